"""Quantized base models under LoRA, compared with the numbers of bitsandbytes and torchao; and Liger's kernels."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import GRPO, RLHFPPO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.fast.kernels import use_liger_kernel
from rl_modules.language.sampling.weights import engine_config, named_weights
from tests.training import assert_resumes_exactly, fit

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
LORA = {"r": 4, "target_modules": "all-linear"}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
TORCHAO = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
CONFIGS = {"4 bits": FOUR_BITS, "8 bits": {"load_in_8bit": True}, "torchao": TORCHAO}
TOKENS = torch.arange(3, 43).view(4, 10)


def needed(config: dict[str, Any]) -> None:
    package = config.get("quant_method", "bitsandbytes")
    pytest.importorskip(package, reason=f"{package} is not installed")


def examples(**arguments: Any) -> InstructionDataModule:
    return InstructionDataModule("addition", batch_size=8, n_train=16, n_eval=4, eval_steps=1, **arguments)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    module = SFT(model_config=TINY)
    module.configure_model()
    return str(module.export(tmp_path / "base"))


def plain_weight(layer: Any) -> torch.Tensor:
    """The weight that a quantized layer stands for, by the package that made it."""
    base = layer.get_base_layer()
    if type(base.weight).__name__ == "Params4bit":
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
    if type(base.weight).__name__ == "Int8Params":
        return base.weight.data * (base.state.SCB if base.weight.SCB is None else base.weight.SCB).unsqueeze(1) / 127
    return base.weight.dequantize()


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_export_and_engines_get_the_quantized_weights_plus_the_adapters(name: str, folder: str, tmp_path: Path) -> None:
    needed(CONFIGS[name])
    module = SFT(folder, lora=LORA, quantization_config=CONFIGS[name], learning_rate=1e-2)
    fit(module, examples(), max_steps=3)
    read = AutoModelForCausalLM.from_pretrained(module.export(tmp_path / "made"))
    assert not hasattr(read.config, "quantization_config")
    sent = dict(named_weights(module.model))
    for path in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        layer = module.model.get_base_model().get_submodule(path)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = plain_weight(layer) + b @ a * layer.scaling["default"]
        assert b.abs().max() > 0
        torch.testing.assert_close(read.get_submodule(path).weight, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(sent[f"{path}.weight"], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=TOKENS).logits for m in (module.model, read))
    # bitsandbytes' product of 8 bits also rounds its inputs.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 if name == "8 bits" else 1e-5)
    assert "quantization_config" not in engine_config(module.model)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_on_a_quantized_base_resumes_exactly_and_stores_the_adapters(
    name: str, folder: str, tmp_path: Path
) -> None:
    needed(CONFIGS[name])

    def make() -> SFT:
        return SFT(folder, lora=LORA, quantization_config=CONFIGS[name], lr_scheduler_type="constant")

    module = make()
    trainer = fit(module, examples(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert all(".lora_" in key for key in saved["state_dict"])
    assert saved["hyper_parameters"]["description"]["frozen"]["model."]["path"] == folder
    loaded = SFT.load_from_checkpoint(tmp_path / "run.ckpt", map_location="cpu", weights_only=True)
    with torch.no_grad():
        ours, theirs = (m.model.eval()(input_ids=TOKENS).logits for m in (module, loaded))
    assert torch.equal(ours, theirs)
    assert_resumes_exactly(make, examples, tmp_path, epochs=2)


@pytest.mark.long
def test_gradients_of_adapters_are_those_on_the_dequantized_base(folder: str, tmp_path: Path) -> None:
    needed(FOUR_BITS)
    quantized = SFT(folder, lora=LORA, quantization_config=FOUR_BITS)
    quantized.configure_model()
    plain = SFT(str(quantized.export(tmp_path / "plain")), lora=LORA)
    plain.configure_model()
    gradients = []
    for module in (quantized, plain):
        module.model.load_state_dict(
            {n: torch.sin(torch.arange(p.numel())).view(p.shape) / 10 for n, p in module.model.named_parameters()
             if p.requires_grad}, strict=False)  # fmt: skip
        logits = module.model(input_ids=TOKENS).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        gradients.append({n: p.grad for n, p in module.model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_reinforcement_learning_and_reward_models_train_on_quantized_bases(folder: str, tmp_path: Path) -> None:
    needed(FOUR_BITS)
    arguments = {"lora": LORA, "quantization_config": BitsAndBytesConfig(**FOUR_BITS), "learning_rate": 1e-2}
    grpo = GRPO(folder, beta=0.1, max_completion_length=4, completions_steps=0, **arguments)
    prompts = PromptDataModule("addition", batch_size=8, num_generations=4, eval_steps=0)
    fit(grpo, prompts, max_steps=1)
    reward_model = RewardModel(folder, **arguments)
    fit(reward_model, PreferenceDataModule("paths", batch_size=8, n_train=16, n_eval=4), max_steps=2).save_checkpoint(
        tmp_path / "rm.ckpt"
    )
    for module in (grpo, reward_model):
        assert type(module.model.get_base_model().model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    judged = GRPO(folder, reward_model_name_or_path=str(tmp_path / "rm.ckpt"), max_completion_length=4)
    fit(judged, prompts, max_steps=1)
    with pytest.raises(UsageError, match="value_head_on_policy=true, or give a reward model"):
        RLHFPPO(folder, **arguments).configure_model()


@pytest.mark.long
def test_directories_of_quantized_weights_are_read_under_lora(folder: str, tmp_path: Path) -> None:
    needed(FOUR_BITS)
    config = BitsAndBytesConfig(**FOUR_BITS)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(folder)
    fit(SFT(folder, lora=LORA), examples(), max_steps=1).save_checkpoint(tmp_path / "run.ckpt")
    SFT.load_from_checkpoint(tmp_path / "run.ckpt", map_location="cpu", weights_only=True).export(tmp_path / "made")
    for which, arguments in (("lora", {}), ("no quantization_config", {"lora": LORA, "quantization_config": TORCHAO})):
        with pytest.raises(UsageError, match=f"has weights quantized by bitsandbytes.*{which}"):
            SFT(folder, **arguments).configure_model()


# -------------------------------------------------------------------- refused

REFUSED = {
    "no adapters": ({"quantization_config": FOUR_BITS}, "quantized weights can't be trained.* give lora"),
    "no method": ({"quantization_config": {"bits": 4}, "lora": LORA}, "must set load_in_4bit or load_in_8bit"),
    "other method": ({"quantization_config": {"quant_method": "gptq", "bits": 4}, "lora": LORA}, "must set load_in_4"),
    "no fields": ({"quantization_config": 4, "lora": LORA}, "quantization_config is a int; give the arguments"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_quantization_that_would_not_train_is_refused(case: str, folder: str) -> None:
    arguments, says = REFUSED[case]
    with pytest.raises(UsageError, match=says):
        SFT(folder, **arguments).configure_model()


def test_new_weights_and_missing_packages_are_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"lora": LORA, "quantization_config": FOUR_BITS}
    with pytest.raises(UsageError, match="quantizes weights that are read from files"):
        SFT(model_config=TINY, **arguments).configure_model()
    monkeypatch.setattr("rl_modules.language.quantized.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed: pip install .*quantized\\]"):
        SFT(folder, **arguments).configure_model()


def test_directories_quantized_by_other_methods_are_refused(folder: str) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UsageError, match="has weights quantized by gptq.* before quantization"):
        SFT(folder, lora=LORA).configure_model()


@pytest.mark.parametrize("name", ["4 bits", "torchao"])
def test_settings_of_quantized_runs_that_could_not_be_stored_are_refused(name: str, folder: str) -> None:
    needed(CONFIGS[name])
    for extra, says in (({"save_frozen_weights": True}, "save_frozen_weights=true"),
                        ({"lora": {**LORA, "init_lora_weights": "pissa"}}, "can't be used")):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            SFT(folder, **{"lora": LORA, "quantization_config": CONFIGS[name], **extra}).configure_model()


# -------------------------------------------------------------------- Liger's kernels


def stand_in(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> None:
    """Installs a package with the names that transformers reads of liger-kernel, with kernels for Qwen2 only."""
    package, patches = ModuleType("liger_kernel.transformers"), ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}  # type: ignore[attr-defined]
    package._apply_liger_kernel_to_instance = lambda **given: calls.append(given)  # type: ignore[attr-defined]
    for name, module in {"liger_kernel": ModuleType("liger_kernel"), "liger_kernel.transformers": package,
                         "liger_kernel.transformers.monkey_patch": patches}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rl_modules.language.fast.kernels.find_spec", lambda name: object())
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)


def test_liger_replaces_the_layers_of_the_model_without_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    stand_in(monkeypatch, calls)
    module = SFT(model_config=TINY, lora=LORA)
    module.configure_model()
    use_liger_kernel(module.model, torch.device("cuda"))
    assert calls == [
        {"model": module.model.get_base_model(), "cross_entropy": False, "fused_linear_cross_entropy": False}
    ]
    other = SFT(model_config={"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1})
    other.configure_model()
    with pytest.raises(UsageError, match="no kernels for gpt2"):
        use_liger_kernel(other.model, torch.device("cuda"))
    assert len(calls) == 1


def test_liger_is_refused_without_a_gpu_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="use_liger_kernel=true needs a GPU, and this run computes on cpu"):
        fit(SFT(model_config=TINY, use_liger_kernel=True), examples(), max_steps=1)
    monkeypatch.setattr("rl_modules.language.fast.kernels.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install liger-kernel"):
        use_liger_kernel(torch.nn.Linear(1, 1), torch.device("cuda"))
