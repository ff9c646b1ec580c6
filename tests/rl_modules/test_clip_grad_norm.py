import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from rl_modules import PPO
from rl_modules.fast.adam import clip_grad_norm
from tests.training import fit, rollouts


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


def test_the_curve_is_the_norm_of_the_epochs_last_gradient(tmp_path):
    """Recomputed from the gradients as they are before clipping."""
    norms = []

    class Watched(PPO):
        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            gradients = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            norms.append(torch.cat(gradients).norm().item())
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    logged = []
    logger = CSVLogger(tmp_path)
    logger.log_metrics = lambda metrics, step=None: logged.append(metrics.get("train/grad_norm"))
    model = Watched(max_grad_norm=0.01)
    data = rollouts("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, total_timesteps=64)
    trainer = fit(model, data, logger=logger)
    assert [x for x in logged if x is not None] == pytest.approx(norms[1::2], rel=1e-5)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["run"]["grad_norm"] == pytest.approx(norms[-1], rel=1e-5)
