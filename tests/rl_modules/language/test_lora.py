"""LoRA: exports are the trained model, a reference without adapters is the start, and what arguments may be."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, GRPO, KTO, RLHFPPO, RLOO, SFT, Distillation, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.lora import begins_unchanged
from rl_modules.language.tokenizer import character_tokenizer
from tests.conformance.architectures import ARCHITECTURES
from tests.marks import quick
from tests.training import assert_resumes_exactly, differences, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
TARGETS = ["q_proj", "v_proj"]
LORA = {"r": 4, "target_modules": TARGETS}
TOKENS = torch.arange(3, 51).view(4, 12)


def examples() -> InstructionDataModule:
    return InstructionDataModule("addition", batch_size=8, n_train=16, eval_steps=0)


def pairs() -> PreferenceDataModule:
    return PreferenceDataModule("paths", n_train=16, n_eval=0, batch_size=8, n_demonstrations=4)


def prompts(**arguments: Any) -> PromptDataModule:
    return PromptDataModule("addition", batch_size=8, n_train=8, eval_steps=0, **arguments)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    is_half = next(model.parameters()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):  # what is trained is in float32
        return model.eval()(input_ids=TOKENS).logits


# -------------------------------------------------------------------- export

TIED = {
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "whole output layer": {"target_modules": TARGETS, "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": TARGETS, "trainable_token_indices": [5, 6]},
    "tokens of the output layer": {"target_modules": TARGETS, "trainable_token_indices": {"lm_head": [5, 6]}},
    "other tokens of each": {
        "target_modules": TARGETS,
        "trainable_token_indices": {"lm_head": [5, 6], "embed_tokens": [5, 7]},
    },
    "neither": {"target_modules": TARGETS},
}


@pytest.mark.parametrize("case", quick(TIED, "output layer", "embedding", "tokens of the output layer"))
def test_an_export_of_tied_embeddings_has_the_trained_models_logits(case: str, tmp_path: Path) -> None:
    """Independent source: transformers reads the directory."""
    module = SFT(model_config=TINY, lora={"r": 4, **TIED[case]}, learning_rate=3e-2)
    fit(module, examples(), max_steps=5)
    expected = logits(module.model)
    exported = AutoModelForCausalLM.from_pretrained(module.export(tmp_path))
    torch.testing.assert_close(logits(exported), expected, atol=1e-5, rtol=1e-5)
    assert exported.config.tie_word_embeddings is (case in ("tokens", "neither"))
    assert torch.equal(logits(module.model), expected), "the exported model itself stays as it is"


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_run_goes_on_after_an_export_as_without_one(target: str, tmp_path: Path) -> None:
    class Exporting(SFT):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.export(tmp_path / "model")

    def run(kind: type[SFT]) -> Any:
        module = kind(model_config=TINY, lora={"r": 4, "target_modules": ["q_proj", target]}, learning_rate=3e-2)
        fit(module, examples(), max_steps=4)
        network = module.model.get_base_model()
        assert network.config.tie_word_embeddings
        assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
        return module.state_dict()

    plain, exporting = run(SFT), run(Exporting)
    assert all(torch.equal(value, exporting[name]) for name, value in plain.items())


def test_adapters_that_share_a_weight_are_refused() -> None:
    tied = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    with pytest.raises(UsageError, match="^lora.ensure_weight_tying=true with adapters on tied layers"):
        SFT(model_config=TINY, lora=tied).configure_model()


# -------------------------------------------------------------------- the reference

WITH_REFERENCE = {
    "DPO": lambda **a: DPO(**a),
    "KTO": lambda **a: KTO(**a),
    "GRPO": lambda **a: GRPO(beta=0.1, **a),
    "RLOO": lambda **a: RLOO(beta=0.1, **a),
    "RLHFPPO": lambda **a: RLHFPPO(beta=0.1, **a),
    "Distillation": lambda **a: Distillation(**a),
}
WITHOUT_REFERENCE = {
    "SFT": lambda **a: SFT(**a),
    "RewardModel": lambda **a: RewardModel(**a),
    "DPO": lambda **a: DPO(reference_free=True, **a),
    "GRPO": lambda **a: GRPO(beta=0.0, **a),
    "RLOO": lambda **a: RLOO(beta=0.0, **a),
    "RLHFPPO": lambda **a: RLHFPPO(beta=0.0, **a),
}


@pytest.mark.parametrize("name", WITH_REFERENCE)
@pytest.mark.parametrize("init", [False, "pissa", "olora", "pissa_niter_4"])
def test_adapters_that_begin_with_another_policy_are_no_start_for_a_reference(name: str, init: Any) -> None:
    module = WITH_REFERENCE[name](model_config=TINY, lora={**LORA, "init_lora_weights": init})
    with pytest.warns(UserWarning, match=rf"lora.init_lora_weights={init!r} begins with.*ref_model_name_or_path"):
        module.configure_model()


@pytest.mark.parametrize("name", WITH_REFERENCE)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_a_reference_without_adapters_shares_trained_biases(name: str, bias: str) -> None:
    module = WITH_REFERENCE[name](model_config=TINY, lora={**LORA, "bias": bias})
    with pytest.warns(UserWarning, match=rf"lora.bias='{bias}' trains .*q_proj.*bias.*ref_model_name_or_path"):
        module.configure_model()


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"init_lora_weights": False}, {"bias": "all"}])
def test_a_reference_of_its_own_takes_any_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    start = SFT(model_config=TINY)
    start.configure_model()
    folder = str(start.export(tmp_path))
    module = DPO(folder, ref_model_name_or_path=folder, lora={**LORA, **options}, learning_rate=1e-2)
    fit(module, pairs(), max_steps=2)
    assert torch.equal(logits(module.reference), logits(start.model))


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_without_a_reference_any_adapters_are_taken(name: str) -> None:
    for options in ({"init_lora_weights": "olora"}, {"init_lora_weights": False}, {"bias": "all"}):
        module = WITHOUT_REFERENCE[name](model_config=TINY, lora={**LORA, **options})
        module.configure_model()
        assert any("lora_" in name for name, _ in module.model.named_parameters())


UNCHANGED = {
    "default": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "all layers": {"target_modules": "all-linear"},
    "whole layers": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [5, 6]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj"]},
}


@pytest.mark.parametrize("case", quick(UNCHANGED, "default", "whole layers", "dora"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_adapters_keep_the_start_as_the_reference(case: str, dtype: str) -> None:
    """Independent source: the same model without LoRA, and the adapters switched off after they were trained."""
    config = dict(TINY)
    if case == "experts":
        config |= {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    plain = SFT(model_config=config, torch_dtype=dtype)
    plain.configure_model()
    start = logits(plain.model)
    module = DPO(model_config=config, lora={**LORA, **UNCHANGED[case]}, torch_dtype=dtype)
    module.configure_model()
    assert begins_unchanged(module.model)
    bound = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(logits(module.model), start, atol=bound, rtol=0)
    with torch.no_grad():
        for parameter in module.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    assert (logits(module.model) - start).abs().max() > bound
    with module.reference_model() as reference:
        torch.testing.assert_close(logits(reference), start, atol=bound, rtol=0)


def test_trained_adapters_of_a_checkpoint_are_no_new_ones(tmp_path: Path) -> None:
    """Neither a resumed run nor a loaded module begins with adapters that change nothing."""

    def module() -> DPO:
        return DPO(model_config=TINY, lora=LORA, learning_rate=1e-2, lr_scheduler_type="constant")

    assert_resumes_exactly(module, pairs, tmp_path, epochs=2)
    loaded = DPO.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    assert not begins_unchanged(loaded.model)
    fit(loaded, pairs(), max_steps=1)


# -------------------------------------------------------------------- layers that are trained whole

WHOLE = {
    "output layer": ["lm_head"],
    "embedding": ["embed_tokens"],
    "both": ["embed_tokens", "lm_head"],
    "norms": ["input_layernorm", "norm"],
    "within": ["gate_proj"],
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("case", quick(WHOLE, "both"))
def test_layers_that_are_trained_whole_work_with_a_base_of_16_bits(case: str, precision: Any, tmp_path: Path) -> None:
    """Independent source: the same run with a base of float32, from the same weights."""
    start = SFT(model_config=TINY)
    start.configure_model()
    folder = str(start.export(tmp_path / "start"))
    losses = {}
    for dtype in ("float32", "bfloat16"):
        module = SFT(model_name_or_path=folder, lora={**LORA, "modules_to_save": WHOLE[case]}, learning_rate=1e-2,
                     logging_steps=4, torch_dtype="float32" if precision == "bf16-true" else dtype)  # fmt: skip
        trainer = fit(module, examples(), max_steps=4, precision="32-true" if dtype == "float32" else precision)
        losses[dtype] = module.latest_metrics["train/loss"]
        trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
        assert {p.dtype for p in trained.values()} == {torch.float32}
        assert sum(".modules_to_save." in name for name in trained) >= len(WHOLE[case])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = SFT.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)
    written = loaded.act([[5, 6, 7]], [0], temperature=0.0, max_completion_length=4)
    assert torch.isfinite(written.log_prob).all()


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [GRPO, RLHFPPO, DPO, RewardModel])
def test_reinforcement_and_preferences_train_whole_layers_beside_a_base_of_16_bits(algorithm: Any) -> None:
    lora = {**LORA, "modules_to_save": ["embed_tokens"]}
    sizes = {} if algorithm in (DPO, RewardModel) else {"max_completion_length": 4}
    module = algorithm(model_config=TINY, lora=lora, learning_rate=1e-2, torch_dtype="bfloat16", **sizes)
    fit(module, prompts(num_generations=4) if sizes else pairs(), max_steps=2)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize(("arguments", "given"), [
    ({"torch_dtype": "bfloat16"}, "torch_dtype=bfloat16"), ({"precision": "bf16-true"}, "trainer.precision=bf16-true"),
])  # fmt: skip
def test_biases_beside_weights_of_16_bits_are_refused(arguments: dict[str, Any], given: str) -> None:
    precision = {name: arguments.pop(name) for name in ("precision",) if name in arguments}
    module = SFT(model_config=TINY, lora={**LORA, "bias": "all"}, **arguments)
    with pytest.raises(UsageError, match=rf"lora.bias='all' trains biases in float32.*{given}"):
        fit(module, examples(), max_steps=1, **precision)


# -------------------------------------------------------------------- weights that adapters take over

ALTERED = ["pissa", "pissa_niter_4", "olora"]


@pytest.mark.parametrize("init", ALTERED)
def test_a_base_that_adapters_have_changed_is_in_the_checkpoint(init: str, tmp_path: Path) -> None:
    start = SFT(model_config=TINY)
    start.configure_model()
    folder = str(start.export(tmp_path / "start"))

    def module() -> SFT:
        return SFT(model_name_or_path=folder, lora={**LORA, "init_lora_weights": init}, learning_rate=1e-2,
                   lr_scheduler_type="constant")  # fmt: skip

    def data() -> InstructionDataModule:
        return InstructionDataModule("addition", batch_size=8, n_train=16, eval_steps=0, seed=7)

    whole = module()
    fit(whole, data(), max_steps=4).save_checkpoint(tmp_path / "whole.ckpt")
    loaded = SFT.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    assert torch.equal(logits(loaded.model), logits(whole.model))
    fit(module(), data(), max_steps=2).save_checkpoint(tmp_path / "part.ckpt")
    resumed = fit(module(), data(), ckpt_path=tmp_path / "part.ckpt", max_steps=4)
    resumed.save_checkpoint(tmp_path / "resumed.ckpt")
    # A run that is prolonged has begun an epoch more.
    found = differences(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
    assert [line for line in found if not line.startswith("/epoch")] == []
    exported = AutoModelForCausalLM.from_pretrained(loaded.export(tmp_path / "model"))
    torch.testing.assert_close(logits(exported), logits(whole.model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("init", [True, "pissa"])
def test_the_value_model_begins_with_the_policys_states(init: Any) -> None:
    module = RLHFPPO(model_config=TINY, lora={**LORA, "init_lora_weights": init}, beta=0.0)
    module.configure_model()
    with torch.no_grad():
        policy, value = (part.get_base_model().base_model(input_ids=TOKENS).last_hidden_state
                         for part in (module.model.eval(), module.value_model.eval()))  # fmt: skip
    torch.testing.assert_close(value, policy, atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------- arguments


def test_the_head_decides_the_task_type() -> None:
    lora = {**LORA, "task_type": "CAUSAL_LM"}
    judge = RewardModel(model_config=TINY, lora=lora, learning_rate=1e-2)
    fit(judge, pairs(), max_steps=1)
    assert judge.model.peft_config["default"].task_type == "SEQ_CLS"
    for head in (False, True):
        policy = RLHFPPO(model_config=TINY, lora=lora, max_completion_length=3, value_head_on_policy=head)
        fit(policy, prompts(num_generations=1), max_steps=1)
        assert policy.model.peft_config["default"].task_type == "CAUSAL_LM"


@pytest.mark.long
def test_a_lora_config_is_its_arguments(tmp_path: Path) -> None:
    from peft import LoraConfig, TaskType

    given = LoraConfig(r=4, target_modules=TARGETS, lora_alpha=16, bias="lora_only", task_type=TaskType.CAUSAL_LM)
    fields = {"r": 4, "target_modules": TARGETS, "lora_alpha": 16, "bias": "lora_only"}
    results = []
    for lora in (given, fields, {**fields, "task_type": TaskType.CAUSAL_LM}):
        module = SFT(model_config=TINY, lora=lora, learning_rate=1e-2)
        fit(module, examples(), max_steps=2).save_checkpoint(tmp_path / "last.ckpt")
        assert module.hparams["lora"] == fields
        loaded = SFT.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
        assert torch.equal(logits(loaded.model), logits(module.model))
        results.append(logits(module.model))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_biases_that_were_trained_in_float32_are_evaluated_in_16_bits() -> None:
    module = SFT(model_config=TINY, lora={**LORA, "bias": "all"}, max_completion_length=4)
    data = InstructionDataModule("addition", batch_size=8, n_train=16, n_eval=4)
    fit(module, data, max_steps=1)
    trainer = L.Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_progress_bar=False)
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["eval/loss"] > 0


@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer_name_or_path": "characters"}])
def test_a_checkpoint_as_model_is_answered_by_how_to_export_it(tokenizer: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"")
    if tokenizer:
        character_tokenizer().save_pretrained(tmp_path / "characters")
        tokenizer = {"tokenizer_name_or_path": str(tmp_path / "characters")}
    given = SFT(model_name_or_path=str(tmp_path / "last.ckpt"), **tokenizer)
    with pytest.raises(UsageError, match=r"last.ckpt. is a checkpoint.*`rl export --ckpt_path .*last.ckpt --out"):
        given.configure_model()


@pytest.mark.long
@pytest.mark.parametrize("targets", [TARGETS, "all-linear"])
def test_adapters_of_an_image_encoder_do_not_train(targets: Any, tmp_path: Path) -> None:
    """Its layers have the language model's names; no text goes through them, and DDP waits for every gradient."""
    start = SFT(model_config=ARCHITECTURES["Gemma-3"])
    start.configure_model()
    folder = str(start.export(tmp_path))

    def module() -> DPO:
        return DPO(folder, lora={"r": 4, "target_modules": targets}, learning_rate=1e-2, lr_scheduler_type="constant")

    made = module()
    made.configure_model()
    names = [name for name, parameter in made.model.named_parameters() if parameter.requires_grad]
    assert names and not any("vision" in name or "projector" in name for name in names)
    without: list[str] = []

    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
            trained = [(name, p) for name, p in pl_module.model.named_parameters() if name in names]
            without.extend(name for name, p in trained if p.grad is None)
            assert len(trained) == len(names)

    trainer = fit(made, pairs(), max_steps=1, callbacks=[Gradients()])
    assert trainer.global_step == 1 and without == []
    assert_resumes_exactly(module, pairs, tmp_path, epochs=2)


@pytest.mark.parametrize("algorithm", [GRPO, RewardModel])
def test_every_algorithm_leaves_adapters_of_an_image_encoder_out(algorithm: Any) -> None:
    module = algorithm(model_config=ARCHITECTURES["Gemma-3"], lora=LORA)
    module.configure_model()
    names = [name for name, parameter in module.model.named_parameters() if parameter.requires_grad]
    assert any("language_model" in name for name in names) and not any("vision" in name for name in names)


def test_what_is_no_lora_config_is_refused() -> None:
    from peft import PrefixTuningConfig

    with pytest.raises(UsageError, match=r"^lora is a PrefixTuningConfig; give the arguments of peft.LoraConfig as a"):
        SFT(model_config=TINY, lora=PrefixTuningConfig(num_virtual_tokens=2))
    with pytest.raises(UsageError, match=r"^lora is a int; give the arguments"):
        SFT(model_config=TINY, lora=8)
    with pytest.raises(UsageError, match=r"^lora.layer_replication is a map, which no checkpoint can hold"):
        SFT(model_config=TINY, lora={"r": 2, "layer_replication": map(int, "12")})


@pytest.mark.parametrize("algorithm", [SFT, DPO])
def test_a_checkpoint_with_adapters_is_not_read_without_them(algorithm: Any, tmp_path: Path) -> None:
    written = {}
    for name, lora in (("adapters", LORA), ("whole", None)):
        module = algorithm(model_config=TINY, lora=lora)
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        trainer.strategy.connect(module)
        module.configure_model()
        trainer.save_checkpoint(written.setdefault(name, tmp_path / f"{name}.ckpt"))
    for name, lora, message in (
        ("adapters", None, r"^lora=None, but the checkpoint's run trained adapters with lora=\{'r'"),
        ("whole", LORA, r"^lora=\{'r'.* but the checkpoint's run trained all weights"),
    ):
        other = algorithm(model_config=TINY, lora=lora)
        other.configure_model()
        with pytest.raises(UsageError, match=message):
            other.on_load_checkpoint(torch.load(written[name], weights_only=True))
