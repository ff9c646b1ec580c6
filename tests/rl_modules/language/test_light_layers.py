"""Layers in place of a model's own: the same numbers, weights and names; less is kept for the backward pass."""

import copy
import gc
import pickle
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from datamodules import InstructionDataModule, PromptDataModule
from rl_modules import GRPO, SFT
from rl_modules.language.fast.light_layers import FusedNorm, GatedLayer, lighten
from tests.fake_device import FakeStrategy, fake_device
from tests.marks import quick
from tests.rl_modules.language.test_device import TINY, case
from tests.training import fit

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
         "num_local_experts": 4}  # fmt: skip
#: By transformers' name of an architecture: norms and gated layers that are replaced. Gemma multiplies by 1 + weight,
#: GPT-OSS and OLMo round elsewhere, StableLM subtracts the mean, Phi-3's layer has one product for gate and up.
FOUND = {"qwen2": (5, 2), "llama": (5, 2), "qwen3": (9, 2), "mistral": (5, 2), "smollm3": (5, 2), "granite": (5, 2),
         "phi3": (5, 0), "mixtral": (5, 0), "gemma2": (0, 2), "gpt_oss": (0, 0), "olmo2": (0, 2), "stablelm": (0, 2),
         "mamba": (3, 0)}  # fmt: skip


def network(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def replaced(module: nn.Module) -> tuple[int, int]:
    return sum(isinstance(m, FusedNorm) for m in module.modules()), sum(
        isinstance(m, GatedLayer) for m in module.modules()
    )


def learned(model: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Logits and gradients, under autocast to a type."""
    tokens = torch.arange(18).reshape(2, 9) * 7 % 50
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(tokens, use_cache=False).logits
    model.zero_grad()
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", quick(list(FOUND), "qwen2", "gemma2"))
def test_numbers_and_weights_are_the_models_own(kind: str) -> None:
    model = network(kind)
    lighter = copy.deepcopy(model)
    lighten(lighter)
    assert replaced(lighter) == FOUND[kind]
    assert list(lighter.state_dict()) == list(model.state_dict())
    assert [name for name, _ in lighter.named_parameters()] == [name for name, _ in model.named_parameters()]
    for ours, own in zip(learned(lighter), learned(model), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)
    again = copy.deepcopy(lighter)
    lighten(again)
    assert replaced(again) == FOUND[kind]


def test_a_gated_layer_casts_its_input_once() -> None:
    model, found = network("qwen2"), []
    layer = model.model.layers[0].mlp
    for part in (layer, GatedLayer(layer)):
        x = torch.randn(2, 3, 32).requires_grad_() * 1  # autocast casts a leaf once by itself
        watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with watched as profile, torch.autocast("cpu", torch.bfloat16):
            part(x).float().sum().backward()
        found.append(sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy"))
    assert found[1] == found[0] - 2  # in the forward and in the backward pass


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_in_half_precision_the_results_have_the_models_types(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = network(kind).to(dtype)
        lighter = copy.deepcopy(model)
        lighten(lighter)
        assert replaced(lighter) == FOUND[kind]
        for ours, own in zip(learned(lighter, torch.bfloat16), learned(model, torch.bfloat16), strict=True):
            assert ours.dtype == own.dtype
            assert (ours - own).abs().max() <= 0.05 * own.abs().max()


def test_a_layer_that_bounds_large_numbers_stays() -> None:
    class Bounded(Qwen2MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-100, 100))

    model = network("qwen2")
    for layer in model.model.layers:
        layer.mlp.__class__ = Bounded
    lighten(model)
    assert replaced(model) == (5, 0)


class Alive(TorchDispatchMode):
    """Counts the tensors of a size that are made and not yet freed."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count, self.seen = numbers, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.numbers:
            storage = result.untyped_storage()
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.count += 1
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, place: int) -> None:
        self.seen.discard(place)
        self.count -= 1


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gated_layer_keeps_gate_and_up_alone(dtype: torch.dtype | None) -> None:
    own = network("qwen2").model.layers[0].mlp
    x = torch.randn(3, 40, 32)
    kept, slopes = [], []
    for layer in (own, GatedLayer(own)):
        leaf = x.clone().requires_grad_()
        with Alive(3 * 40 * 48) as alive, torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = layer(leaf)
            kept.append(alive.count)
        slopes.append(torch.autograd.grad(result.float().square().sum(), [leaf, *own.parameters()]))
    assert kept == [4, 2]
    for ours, others in zip(*slopes, strict=True):
        assert torch.equal(ours, others)


@pytest.mark.parametrize("how", [True, "selective"])
def test_a_layer_that_is_recomputed_keeps_its_input_alone(how: Any) -> None:
    tokens, kept = torch.arange(120).reshape(3, 40) % 50, []
    for lightened in (False, True):
        module = SFT(model_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
                                   "num_attention_heads": 4}, gradient_checkpointing=how)  # fmt: skip
        module.configure_model()
        if lightened:
            lighten(module)
            assert replaced(module) == (7, 0)
        with Alive(3 * 40 * 48) as alive:
            logits = module.model.train()(tokens, use_cache=False).logits
            kept.append(alive.count)
        logits.sum().backward()
    assert kept[1] <= kept[0]


class Wide(nn.Module):
    """Autocast has it in float32, as on a GPU the power in ``gelu_new``."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x.float() if torch.is_autocast_enabled("cpu") else x)


def test_an_activation_that_autocast_computes_in_float32_is_kept() -> None:
    own = network("qwen2").model.layers[0].mlp
    own.act_fn = Wide()
    x, slopes = torch.randn(3, 40, 32), []
    for layer in (own, GatedLayer(own)):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            result = layer(leaf)
        slopes.append(torch.autograd.grad(result.float().square().sum(), [leaf, *own.parameters()]))
    for ours, others in zip(*slopes, strict=True):
        assert torch.equal(ours, others)


@pytest.mark.parametrize("ends", ["backward", "dropped"])
def test_nothing_of_a_step_stays(ends: str) -> None:
    model = network("qwen2")
    lighten(model)
    gc.disable()  # a cycle would wait for the collector
    try:
        with Alive(2 * 9 * 48) as alive:
            logits = model(torch.arange(18).reshape(2, 9), use_cache=False).logits
            assert alive.count == 2 * len(model.model.layers)
            if ends == "backward":
                logits.sum().backward()
            del logits
            assert alive.count == 0
    finally:
        gc.enable()


def test_second_derivatives_are_the_layers_own() -> None:
    own = network("qwen2").model.layers[0].mlp
    x, found = torch.randn(1, 5, 32), []
    for layer in (own, GatedLayer(own)):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [leaf, *own.parameters()]))
    for ours, others in zip(*found, strict=True):
        torch.testing.assert_close(ours, others)


def test_a_norm_that_takes_a_gate_stays() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 1,
             "state_size": 8}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **sizes)).eval()
    lighter = copy.deepcopy(model)
    lighten(lighter)
    assert replaced(lighter) == (3, 0)
    for ours, own in zip(learned(lighter), learned(model), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)


class Sparse(Qwen2MLP):
    """As Gemma-3n's, whose layers differ by a setting."""

    sparsity = 0.0

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if self.sparsity:
            gate = gate - gate.quantile(self.sparsity, -1, keepdim=True)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


def test_layers_of_a_class_that_differ_are_asked_one_by_one() -> None:
    model = network("qwen2")
    for layer, sparsity in zip(model.model.layers, (0.0, 0.5), strict=True):
        layer.mlp.__class__, layer.mlp.sparsity = Sparse, sparsity
    lighten(model)
    assert [type(layer.mlp) for layer in model.model.layers] == [GatedLayer, Sparse]


class Outside(Qwen2RMSNorm):
    """Adds ε to the root, not under it: the same for large numbers."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * hidden_states / (hidden_states.square().mean(-1, keepdim=True).sqrt() + 1e-6)


class Biased(Qwen2RMSNorm):
    """With a bias, which is 0 at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.bias


def watched(register: str) -> nn.Module:
    layer = Qwen2RMSNorm(32)
    getattr(layer, register)(lambda layer, *seen: None)
    return layer


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize(
    "make", [lambda: Outside(32), lambda: Biased(32), *(partial(watched, f"register_{hook}") for hook in HOOKS)]
)
def test_a_norm_of_more_than_a_weight_stays(make: Any) -> None:
    parent = nn.Sequential(make())
    lighten(parent)
    assert replaced(parent) == (0, 0)


def test_an_activation_in_place_stays() -> None:
    model = network("qwen2")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.SiLU(inplace=True)
    lighten(model)
    assert replaced(model) == (5, 0)


def test_a_layer_that_is_random_in_training_stays() -> None:
    config = AutoConfig.for_model("seed_oss", **SIZES, residual_dropout=0.5)
    model = AutoModelForCausalLM.from_config(config).eval()
    lighten(model)
    assert replaced(model) == (5, 0)
    assert not any(part.training for part in model.modules())
    acting = network("qwen2")
    for layer in acting.model.layers:
        layer.mlp.act_fn = nn.RReLU()
    lighten(acting)
    assert replaced(acting) == (5, 0)


def test_a_product_that_is_changed_in_place_is_kept() -> None:
    model = network("qwen2")
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda layer, inputs: (inputs[0].mul_(0.5),))
    lighter = copy.deepcopy(model)
    lighten(lighter)
    assert replaced(lighter) == (5, 2)
    for ours, own in zip(learned(lighter), learned(model), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)


def test_lighter_layers_run_in_inference_mode() -> None:
    model = network("qwen2")
    lighter = copy.deepcopy(model)
    lighten(lighter)
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        torch.testing.assert_close(lighter(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dora", quick([False, True], False))
def test_adapters_of_lighter_layers_merge(dora: bool) -> None:
    config = peft.LoraConfig(target_modules="all-linear", modules_to_save=["norm"], use_dora=dora, r=2)
    adapted = peft.get_peft_model(network("qwen2"), config).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    own = copy.deepcopy(adapted)
    lighten(adapted)
    assert min(replaced(adapted)) > 0
    assert list(peft.get_peft_model_state_dict(adapted)) == list(peft.get_peft_model_state_dict(own))
    tokens = torch.arange(9)[None]
    expected = own(tokens, use_cache=False).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert list(merged.state_dict()) == list(network("qwen2").state_dict())


def test_a_lighter_model_is_saved_as_its_own(tmp_path: Path) -> None:
    model = network("qwen2")
    lighten(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    copied = pickle.loads(pickle.dumps(model))
    tokens = torch.arange(9)[None]
    for other in (again, copied):
        torch.testing.assert_close(other(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-6)


def module_and_data(name: str) -> tuple[Any, Any]:
    settings: dict[str, Any] = {"model_config": TINY, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    if name == "grpo":
        module = GRPO(**settings, beta=0.1, max_completion_length=5, completions_steps=0)
        return module, PromptDataModule("addition", num_generations=4, n_train=24, batch_size=16, eval_steps=0)
    more = {"sft": {}, "sft lora": {"lora": {"r": 2, "target_modules": "all-linear"}},
            "sft checkpointing": {"gradient_checkpointing": True}}[name]  # fmt: skip
    return SFT(**settings, **more), InstructionDataModule("addition", n_train=48, batch_size=8, eval_steps=0)


@pytest.mark.parametrize("name", quick(["sft", "sft lora", "sft checkpointing", "grpo"], "sft lora", "grpo"))
def test_a_run_is_the_same(name: str) -> None:
    def trained(lightened: bool) -> dict[str, Tensor]:
        module, data = module_and_data(name)
        module.configure_model()
        if lightened:
            lighten(module)
            norms, gated = replaced(module)
            assert norms > 0
            assert (gated > 0) == (name != "sft checkpointing")
        fit(module, data, max_steps=3)
        return module.state_dict()

    ours, own = trained(True), trained(False)
    assert list(ours) == list(own)
    for key, weight in own.items():
        torch.testing.assert_close(ours[key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_fast", ["1", "0"])
def test_runs_on_a_device_take_them(is_fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_FAST", is_fast)
    module, data = case("sft", "")
    with fake_device():
        fit(module, data, max_steps=1, accelerator="auto", strategy=FakeStrategy(), default_root_dir=tmp_path)
    assert (min(replaced(module)) > 0) == (is_fast == "1")
