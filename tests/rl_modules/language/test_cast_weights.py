"""Weights cast together: autocast's numbers to the bit, and the model's own weights before and after."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from datamodules import InstructionDataModule, PromptDataModule
from rl_modules import GRPO, SFT
from rl_modules.language.architecture import body_of
from rl_modules.language.base import LanguageModule
from rl_modules.language.fast import held_graphs
from rl_modules.language.fast.cast_weights import cast_together
from rl_modules.language.fast.graphs import CastWeights
from tests.fake_device import FakeStrategy, fake_device
from tests.rl_modules.language.test_device import TINY, case
from tests.rl_modules.language.test_light_layers import learned, network
from tests.training import fit


class Trained(nn.Module):
    """A module that trains a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def trained_models(self) -> list[Any]:
        return [self.model]


def casts(model: Any) -> int:
    """Conversions between float32 and bfloat16 within a forward and a backward pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        learned(model, torch.bfloat16)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "gemma2", "mamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_autocasts_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    model = network(kind)
    other = copy.deepcopy(model)
    for _ in range(2):  # as a second fit does
        cast_together(Trained(other))
    weights = list(other.parameters())
    for _ in range(2):
        for ours, own in zip(learned(other, dtype), learned(model, dtype), strict=True):
            assert torch.equal(ours, own)
    assert all(now is before for now, before in zip(other.parameters(), weights, strict=True))
    assert list(other.state_dict()) == list(model.state_dict())


def test_each_weight_is_no_longer_cast_by_itself() -> None:
    model = network("qwen2")
    before = casts(model)
    cast_together(Trained(model))
    linear = sum(len(list(m.parameters())) for m in body_of(model).modules() if type(m) is nn.Linear)
    assert linear == 2 * (4 + 3 + 3)  # weights of attention and of the feed-forward layer, and biases
    assert casts(model) == before - 2 * linear


def test_frozen_weights_get_no_gradient() -> None:
    for model in (
        network("qwen2"),
        peft.get_peft_model(network("qwen2"), peft.LoraConfig(target_modules="all-linear")),
    ):
        for name, weight in model.named_parameters():
            weight.requires_grad_(weight.requires_grad and ("layers.1" in name or "lora" in name))
        other = copy.deepcopy(model)
        cast_together(Trained(other))
        for ours, own in zip(learned(other, torch.bfloat16), learned(model, torch.bfloat16), strict=True):
            assert torch.equal(ours, own)
        for now, before in zip(other.parameters(), model.parameters(), strict=True):
            assert (now.grad is None) == (before.grad is None)


def test_a_copy_of_a_model_casts_its_own_weights() -> None:
    model = network("qwen2")
    cast_together(Trained(model))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1)
    learned(other, torch.bfloat16)
    assert all(weight.grad is None for weight in model.parameters())
    assert learned(model, torch.bfloat16)[0].ne(learned(other, torch.bfloat16)[0]).any()


def test_the_copies_of_graphs_are_taken_with_the_weights_of_now() -> None:
    model = network("qwen2")
    other = copy.deepcopy(model)
    cast_together(Trained(other))
    with torch.autocast("cpu", torch.bfloat16):
        copies = CastWeights(other)
    held_graphs._held[other] = held_graphs._Held(None, copies)
    places: set[int] = set()
    other.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda layer, *_: places.add(layer.weight.data_ptr()))
    for _ in range(2):
        with torch.no_grad():
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                noise = 0.1 * torch.randn_like(one)
                one.add_(noise)
                two.add_(noise)
        for ours, own in zip(learned(other, torch.bfloat16), learned(model, torch.bfloat16), strict=True):
            assert torch.equal(ours, own)
    held = {held.data_ptr() for *_, held in copies.places}
    assert places and places <= held
    held_graphs.release(other)
    learned(other, torch.bfloat16)
    assert not places <= held


def test_two_passes_before_a_backward_pass_share_them() -> None:
    model = network("qwen2")
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(torch.arange(6)[None] + i, use_cache=False).logits.float().square().mean() for i in (0, 9))
        model.zero_grad()
        loss.backward()
        found.append([weight.grad for weight in model.parameters()])
        cast_together(Trained(model))
        with torch.autocast("cpu", torch.bfloat16):
            held_graphs._held[model] = held_graphs._Held(None, CastWeights(model))
    for ours, own in zip(*found, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-2, atol=1e-4)  # one cast for both passes, or one for each
    held_graphs.release(model)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft", "sft lora", "grpo"])
def test_a_run_is_the_same_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO's training takes the copies of its graphs."""
    shared: dict[str, Any] = {"model_config": {**TINY, "num_hidden_layers": 2}, "lr_scheduler_type": "constant"}
    configure, ends = LanguageModule.configure_model, []
    for casts_together in (False, True):
        if casts_together:
            monkeypatch.setattr(LanguageModule, "configure_model", lambda m: (configure(m), cast_together(m)))
        data: Any = InstructionDataModule("addition", n_train=32, batch_size=8, eval_steps=0)
        module: Any = SFT(lora={"r": 4, "target_modules": "all-linear"} if "lora" in name else None, **shared)
        if name == "grpo":
            module = GRPO(cache_implementation="graph", max_completion_length=5, completions_steps=0, **shared)
            data = PromptDataModule("addition", num_generations=4, num_iterations=2, n_train=24, batch_size=16,
                                    reward_funcs=[{"length_reward": {"target": 3}}], eval_steps=0)  # fmt: skip
        fit(module, data, max_steps=4, accumulate_grad_batches=2, precision="bf16-mixed")
        ends.append({key: x.clone() for key, x in module.state_dict().items()})
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize(("is_fast", "precision", "ranks", "expected"), [
    ("1", "bf16-mixed", 1, True), ("0", "bf16-mixed", 1, False), ("1", "32-true", 1, False),
    ("1", "bf16-mixed", 2, False),  # gradients of several ranks are exchanged as they come
])  # fmt: skip
def test_runs_under_autocast_cast_together_on_a_device(
    is_fast: str, precision: Any, ranks: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_FAST", is_fast)
    configure = LanguageModule.configure_model

    def configure_on_ranks(module: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module.trainer.strategy, "world_size", ranks, raising=False)
            configure(module)

    monkeypatch.setattr(LanguageModule, "configure_model", configure_on_ranks)
    with fake_device():
        module, data = case("sft", "")
        fit(module, data, max_steps=2, precision=precision, accelerator="auto", strategy=FakeStrategy())
    assert bool(body_of(module.model)._forward_pre_hooks) == expected


def test_an_error_within_the_model_leaves_its_weights() -> None:
    model = network("qwen2")
    cast_together(Trained(model))

    def fail(*_: Any) -> Tensor:
        raise ArithmeticError

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        learned(model, torch.bfloat16)
    handle.remove()
    assert all(weight.is_leaf for weight in model.parameters())
    assert len(list(model.parameters())) == len(list(network("qwen2").parameters()))


@pytest.mark.parametrize("then", ["state_dict", "another fit", "another pass"])
def test_an_interrupt_by_the_keyboard_leaves_its_weights(then: str) -> None:
    """After which torch calls no hooks."""
    model = network("qwen2")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    cast_together(Trained(model))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        learned(model, torch.bfloat16)
    handle.remove()
    if then == "another pass":
        learned(model, torch.bfloat16)
    elif then == "another fit":
        cast_together(Trained(model))
        torch.optim.SGD(model.parameters(), 0.1)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], x) for name, x in before.items())


def test_adapters_of_dora_and_layers_with_hooks_keep_their_weights() -> None:
    adapted = peft.get_peft_model(network("qwen2"), peft.LoraConfig(
        r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False))  # fmt: skip
    hooked = adapted.get_base_model().model.layers[1].mlp.up_proj
    types: set[torch.dtype] = set()
    hooked.register_forward_pre_hook(lambda layer, *_: types.add(layer.weight.dtype))
    for layer in adapted.modules():
        if type(layer) is nn.Linear:
            layer.requires_grad_()
    own = copy.deepcopy(adapted)
    cast_together(Trained(adapted))
    for ours, plain in zip(learned(adapted, torch.bfloat16), learned(own, torch.bfloat16), strict=True):
        assert torch.equal(ours, plain)
    assert types == {torch.float32}


def test_layers_that_run_again_in_the_backward_pass_keep_their_weights() -> None:
    model = network("qwen2").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    cast_together(Trained(model))
    assert not body_of(model)._forward_pre_hooks
