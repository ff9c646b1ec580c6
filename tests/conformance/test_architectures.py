"""What the language algorithms compute is the model's own on every architecture, or refused by name."""

import json

import pytest
import torch

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, GRPO, KTO, RLHFPPO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import make_config, plain_config
from rl_modules.language.fast.self_check import require_left_to_right
from rl_modules.language.tokenizer import character_tokenizer
from tests.conformance import architectures
from tests.conformance.architectures import ARCHITECTURES, CHECKS, TOLERANCE, network, written
from tests.training import fit

REFUSED = {"RWKV": "when it decodes than when it reads", "BERT": "what stands to its right", "T5": "encoder-decoder"}
NO_REWARD_MODEL = {"Granite", "Cohere", "LFM2", "Mamba", "Mamba-2"}
RIGHT = [name for name in ARCHITECTURES if name not in REFUSED]
#: The fast suite takes one architecture of each kind: full attention, window, composite, sinks, states, ALiBi.
QUICK = {"Llama", "Mistral, window 8", "Gemma-3", "gpt-oss", "Qwen3-Next", "MPT"}
#: Checks that every architecture has in the fast suite.
FIRST = ["sampled log π", "trained log π", "packing"]
GATED = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RIGHT]


@pytest.mark.parametrize("check", FIRST)
@pytest.mark.parametrize("name", RIGHT)
def test_log_probabilities_are_the_models_own(name, check):
    assert CHECKS[check](name) <= TOLERANCE


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in FIRST])
@pytest.mark.parametrize("name", GATED)
def test_what_is_written_exported_and_adapted_is_the_models_own(name, check):
    assert CHECKS[check](name) <= TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_right_is_refused_by_name(name):
    def use():
        model = network(name)
        require_left_to_right(model)
        written(model, max_completion_length=2)

    with pytest.raises(UsageError, match=REFUSED[name]):
        use()


def test_a_wrong_path_is_found(monkeypatch):
    """The checks can fail: with the self-check switched off, Bloom's packed texts leak."""
    from rl_modules.language import sft

    monkeypatch.setattr(sft, "can_pack_texts", lambda model: True)
    assert CHECKS["packing"]("Bloom") > 100 * TOLERANCE


@pytest.mark.long
def test_the_table_has_a_row_per_architecture():
    row = architectures.row_of("Qwen2")
    assert row.startswith("| Qwen2 | right (") and row.endswith("| shared prompts | yes | yes | yes | yes | packed |")
    assert "refused: BertLMHeadModel lets a token see" in architectures.row_of("BERT")


@pytest.mark.parametrize("name", RIGHT)
def test_a_checkpoint_describes_the_architecture_and_those_within(name):
    """A field that was lost would come back with the type's default: of Gemma-3, a model of four billion weights."""
    tokenizer = character_tokenizer()
    config = make_config(None, ARCHITECTURES[name], tokenizer, dropout=False)
    again = make_config(None, plain_config(config), tokenizer, dropout=False)
    assert again.to_dict() == config.to_dict()


# -------------------------------------------------------------------- a few steps of each module


def shown(folder):
    path = folder / "records.jsonl"
    rows = [{"prompt": "abc"[: 1 + i % 3] + "=", "completion": "xyz"[i % 3] * (1 + i * 7 % 17)} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def letters(prompts, completions, **columns):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


STEPS = {"lr_scheduler_type": "constant", "learning_rate": 1e-3, "logging_steps": 1}


def moved(module, run):
    """Whether training changed weights, all of which stayed finite."""
    module.configure_model()
    before = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    run()
    after = dict(module.named_parameters())
    assert all(bool(p.isfinite().all()) for p in after.values())
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", GATED)
def test_three_steps_of_supervised_fine_tuning(name, tmp_path):
    module = SFT(model_config=ARCHITECTURES[name], **STEPS)
    data = InstructionDataModule(path=shown(tmp_path), batch_size=8, packing=True)
    assert moved(module, lambda: fit(module, data, max_steps=3).save_checkpoint(tmp_path / "a.ckpt"))
    loaded = dict(SFT.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).named_parameters())
    assert all(torch.equal(parameter, loaded.pop(name)) for name, parameter in module.named_parameters())
    assert not loaded


@pytest.mark.parametrize("name", GATED)
def test_three_steps_of_grpo_whose_first_minibatch_has_ratio_one(name, tmp_path):
    ratios = []

    class Watched(GRPO):
        def policy_loss(self, log_prob, batch):
            if self.trainer.global_step == 0:
                stored = batch["sampled"] if "sampled" in batch else batch["log_prob"]
                ratios.append((log_prob.detach() - stored).exp()[batch["mask"]])
            return super().policy_loss(log_prob, batch)

        def training_step(self, batch, batch_idx):
            return super().training_step({**batch, "sampled": batch["log_prob"]}, batch_idx)

    module = Watched(model_config=ARCHITECTURES[name], max_completion_length=12, completions_steps=0, **STEPS)
    data = PromptDataModule(path=shown(tmp_path), batch_size=8, num_generations=4, eval_steps=0, n_eval=0,
                            reward_funcs=["tests.conformance.test_architectures:letters"])  # fmt: skip
    assert moved(module, lambda: fit(module, data, max_steps=3))
    torch.testing.assert_close(torch.cat(ratios), torch.ones(len(torch.cat(ratios))), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_two_steps_of_rlhf_with_ppo(name, tmp_path):
    judge = RewardModel(model_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                      "num_attention_heads": 2})  # fmt: skip
    judge.configure_model()
    judge.export(tmp_path / "judge")
    module = RLHFPPO(model_config=ARCHITECTURES[name], reward_model_name_or_path=str(tmp_path / "judge"),
                     max_completion_length=12, completions_steps=0, **STEPS)  # fmt: skip
    data = PromptDataModule(path=shown(tmp_path), batch_size=8, num_generations=1, eval_steps=0, n_eval=0)
    assert moved(module, lambda: fit(module, data, max_steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_two_steps_of_ppo_with_a_verifier_whose_value_model_starts_from_the_policy(name, tmp_path):
    headless = name in NO_REWARD_MODEL
    data = PromptDataModule(path=shown(tmp_path), batch_size=8, num_generations=1, eval_steps=0, n_eval=0,
                            reward_funcs=["tests.conformance.test_architectures:letters"])  # fmt: skip
    settings = {"model_config": ARCHITECTURES[name], "max_completion_length": 12, "completions_steps": 0, **STEPS}
    if headless:
        with pytest.raises(UsageError, match="transformers has no sequence classification for"):
            RLHFPPO(**settings).configure_model()
    module = RLHFPPO(value_head_on_policy=headless, **settings)
    module.configure_model()
    if not headless:
        tokens = torch.tensor([[5, 6, 7, 8, 9]])
        states = [model.eval().base_model(input_ids=tokens).last_hidden_state
                  for model in (module.model, module.value_model)]  # fmt: skip
        torch.testing.assert_close(states[0], states[1], atol=TOLERANCE, rtol=0)
        _, value, _ = module.policy_and_value(tokens, torch.tensor([2]), torch.tensor([3]))
        assert torch.equal(value, torch.zeros(1, 3))
    assert moved(module, lambda: fit(module, data, max_steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [DPO, KTO])
@pytest.mark.parametrize("name", RIGHT)
def test_two_steps_on_preferences(name, cls):
    module = cls(model_config=ARCHITECTURES[name], **STEPS)
    data = PreferenceDataModule("paths", batch_size=8, n_train=32, n_eval=0)
    assert moved(module, lambda: fit(module, data, max_steps=2))


@pytest.mark.parametrize("name", GATED)
def test_two_steps_of_a_reward_model_or_its_refusal(name):
    module = RewardModel(model_config=ARCHITECTURES[name], **STEPS)
    data = PreferenceDataModule("paths", batch_size=8, n_train=32, n_eval=8)
    if name in NO_REWARD_MODEL:
        with pytest.raises(UsageError, match="transformers has no sequence classification for"):
            module.configure_model()
    else:
        assert moved(module, lambda: fit(module, data, max_steps=2))


def test_a_model_with_quantized_weights_is_refused(tmp_path):
    module = GRPO(model_config=ARCHITECTURES["Qwen2"])
    module.configure_model()
    module.export(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(
        json.dumps({**fields, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    with pytest.raises(UsageError, match=r"has weights quantized by bitsandbytes.* the model before quantization"):
        GRPO(str(tmp_path / "model")).configure_model()
