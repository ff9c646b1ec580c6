import pytest
import torch

from rl_modules.optimizers import clip_grad_norm


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_equals_torchs(max_norm):
    def parameters():
        generator = torch.Generator().manual_seed(0)
        made = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 1, 2))]
        for p in made[:2]:
            p.grad = torch.randn(p.shape, generator=generator)
        return made  # the last has no gradient

    ours, theirs = parameters(), parameters()
    clip_grad_norm(ours, max_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)
    assert ours[2].grad is None
