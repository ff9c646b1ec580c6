"""Models that keep less for the backward pass: the same outputs bit for bit, the same gradients, less memory."""

import copy

import pytest
import torch

from rl_modules.language.lean import _GatedDown, _Norm, keep_less
from rl_modules.language.sft import SFT

TINY = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


def build(**arguments):
    module = SFT(**{"model_config": TINY, **arguments})
    module.configure_model()
    lean = copy.deepcopy(module.model)
    keep_less(lean)
    return module.model.train(), lean.train()


def run(model, tokens):
    """Logits, gradients, and how many numbers were kept between the passes."""
    kept: dict[int, int] = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(input_ids=tokens, use_cache=False).logits
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients, sum(kept.values())


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral", "qwen3"])
def test_outputs_are_equal_gradients_too_and_much_less_is_kept(kind):
    plain, lean = build(model_config={**TINY, "model_type": kind})
    tokens = torch.randint(3, 90, (8, 64), generator=torch.Generator().manual_seed(0))
    logits, gradients, kept = run(plain, tokens)
    lean_logits, lean_gradients, lean_kept = run(lean, tokens)
    assert torch.equal(logits, lean_logits)
    assert gradients.keys() == lean_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(lean_gradients[name], gradient, atol=1e-5, rtol=1e-4)
    assert lean_kept < 0.75 * kept


def test_the_derivatives_are_those_of_finite_differences(monkeypatch):
    monkeypatch.setattr("rl_modules.language.lean._PIECE", 4)  # of six rows: a whole piece and a part of one

    generator = torch.Generator().manual_seed(0)
    gate, up, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
                        for shape in ((2, 3, 5), (2, 3, 5), (4, 5)))  # fmt: skip
    assert torch.autograd.gradcheck(_GatedDown.apply, (gate, up, weight))
    # The norm computes in float32, as the models do: coarser differences.
    x, w = gate.detach().float().requires_grad_(), torch.randn(5, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: _Norm.apply(*a, 1e-6), (x, w), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_adapters_and_other_architectures_are_left_alone():
    plain, lean = build(lora={"r": 2, "target_modules": ["down_proj"]})
    tokens = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    for one, other in zip(run(plain, tokens)[1].values(), run(lean, tokens)[1].values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    _, untouched = build(model_config=gpt2)
    assert not any("forward" in vars(module) for module in untouched.modules())


def test_sixteen_bits_and_mixed_precision():
    plain, lean = build(torch_dtype="bfloat16")
    tokens = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    logits, gradients, _ = run(plain, tokens)
    lean_logits, lean_gradients, _ = run(lean, tokens)
    assert torch.equal(logits, lean_logits)
    for name, gradient in gradients.items():
        assert (lean_gradients[name] - gradient).norm() <= 0.03 * gradient.norm() + 1e-3
    plain, lean = build()
    with torch.autocast("cpu", torch.bfloat16):
        logits, gradients, _ = run(plain, tokens)
        lean_logits, lean_gradients, _ = run(lean, tokens)
    assert torch.equal(logits, lean_logits)
    for name, gradient in gradients.items():
        assert (lean_gradients[name] - gradient).norm() <= 0.03 * gradient.norm() + 1e-3
