"""Models and tokenizers given as objects, as TRL's trainers take them; checkpoints load without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from recipes.cli import main
from rl_modules import DPO, GRPO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer
from tests.marks import quick
from tests.training import differences, fit

HERE = "tests.rl_modules.language.test_model_objects"


def longest(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def causal(**fields: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    tokenizer = character_tokenizer()
    return Qwen2ForCausalLM(Qwen2Config(**{
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "attention_dropout": 0.1, **fields}))  # fmt: skip


def instructions(**arguments: Any) -> InstructionDataModule:
    return InstructionDataModule(**{"task": "addition", "n_train": 16, "batch_size": 4, **arguments})


def prompts() -> PromptDataModule:
    return PromptDataModule("addition", n_train=8, batch_size=8, num_generations=4, reward_funcs=[f"{HERE}:longest"])


def pairs() -> PreferenceDataModule:
    return PreferenceDataModule("paths", n_train=16, n_eval=0, batch_size=4, n_demonstrations=4)


CASES: dict[str, tuple[Any, Any]] = {
    "SFT": (lambda **a: SFT(max_completion_length=4, learning_rate=1e-2, **a), instructions),
    "SFT lora": (lambda **a: SFT(max_completion_length=4, learning_rate=1e-2,
                                 lora={"r": 2, "target_modules": "all-linear"}, **a), instructions),
    "GRPO reference": (lambda **a: GRPO(beta=0.1, max_completion_length=4, learning_rate=1e-2, **a), prompts),
    "DPO": (lambda **a: DPO(learning_rate=1e-2, **a), pairs),
    "RewardModel": (lambda **a: RewardModel(learning_rate=1e-2, **a), pairs),
}  # fmt: skip


def make(name: str, model: Any, **arguments: Any) -> tuple[Any, Any]:
    make_model, make_data = CASES[name]
    settings = {"tokenizer_name_or_path": character_tokenizer(), "lr_scheduler_type": "constant", **arguments}
    return make_model(model_name_or_path=model, **settings), make_data()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_object_trains_as_its_directory_does_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """Independent source: the same model read from the directory that ``save_pretrained`` writes."""
    given = causal()
    before = {key: value.clone() for key, value in given.state_dict().items()}
    given.save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    module, data = make(name, given)
    fit(module, data, max_steps=3)
    other, data = make(name, str(tmp_path / "model"), tokenizer_name_or_path=None)
    fit(other, data, max_steps=3)
    left, right = module.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key
    assert any(not torch.equal(value, before[key.removeprefix("model.")]) for key, value in left.items()
               if key.removeprefix("model.") in before) or "lora" in name  # fmt: skip
    assert all(torch.equal(value, before[key]) for key, value in given.state_dict().items())
    assert given.config.attention_dropout == 0.1


@pytest.mark.long
@pytest.mark.parametrize("name", quick(CASES, "SFT lora", "GRPO reference"))
def test_a_checkpoint_loads_without_the_object_and_resumes_with_it(name: str, tmp_path: Path) -> None:
    module, data = make(name, causal())
    fit(module, data, max_steps=2).save_checkpoint(tmp_path / "two.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "two.ckpt", weights_only=True, map_location="cpu")
    for key, value in module.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    assert loaded.hparams["model_name_or_path"] is None
    assert loaded.tokenizer.get_vocab() == character_tokenizer().get_vocab()
    whole, data = make(name, causal())
    fit(whole, data, max_steps=4).save_checkpoint(tmp_path / "whole.ckpt")
    resumed, data = make(name, causal())
    fit(resumed, data, max_steps=4, ckpt_path=tmp_path / "two.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
    # A run that is prolonged has begun an epoch more, and a reward model's offset is measured at the end of each fit.
    found = differences(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
    assert [line for line in found if not line.startswith(("/epoch", "/reward_offset"))] == []


@pytest.mark.long
def test_a_checkpoint_is_exported(tmp_path: Path) -> None:
    module, data = make("SFT lora", causal())
    fit(module, data, max_steps=2).save_checkpoint(tmp_path / "two.ckpt")
    main(["export", "--ckpt_path", str(tmp_path / "two.ckpt"), "--output", str(tmp_path / "model")])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(5, 12)[None]
    module.model.eval()
    torch.testing.assert_close(exported(tokens).logits, module.model(tokens).logits, atol=1e-5, rtol=1e-5)


def test_the_end_of_completions_is_the_objects_own() -> None:
    given = causal()
    given.generation_config.eos_token_id = [1, 7]
    module, data = make("SFT", given)
    fit(module, data, max_steps=1)
    assert module.settings().eos_token_id == (1, 7)


def test_a_scoring_model_keeps_its_head() -> None:
    torch.manual_seed(4)
    given = Qwen2ForSequenceClassification(Qwen2Config(**{**causal().config.to_dict(), "num_labels": 1}))
    module = RewardModel(given, tokenizer_name_or_path=character_tokenizer())
    module.configure_model()
    assert torch.equal(module.model.score.weight, given.score.weight)


def test_the_tokenizer_comes_from_where_the_model_came_from(tmp_path: Path) -> None:
    causal().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    given = AutoModelForCausalLM.from_pretrained(tmp_path)
    module = SFT(model_name_or_path=given)
    assert module.tokenizer.get_vocab() == character_tokenizer().get_vocab()
    assert module.max_length == 64


def peft() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(causal(), LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize(("make_module", "message"), [
    (lambda: SFT(model_name_or_path=causal()).tokenizer, "loaded from no directory.*give tokenizer_name_or_path"),
    (lambda: SFT(model_name_or_path=causal(), model_config={"hidden_size": 4}), "model_config=.*can't change a model"),
    (lambda: SFT(model_name_or_path=nn.Linear(2, 2)), "model_name_or_path is a Linear; it takes a directory, a hub"),
    (lambda: SFT(model_name_or_path=3), "model_name_or_path is a int; it takes a directory"),
    (lambda: SFT(model_name_or_path=peft()), r"model_name_or_path is a PeftModel.*lora=\{"),
    (lambda: SFT(model_name_or_path=causal(), tokenizer_name_or_path=len), "tokenizer_name_or_path is a builtin"),
    (lambda: GRPO(causal(), beta=0.1, ref_model_name_or_path=causal()),
     "ref_model_name_or_path is a Qwen2ForCausalLM; it takes numbers, texts"),
    (lambda: SFT(max_completion_length=causal()), "max_completion_length is a Qwen2ForCausalLM; it takes numbers"),
    (lambda: SFT(causal(), 4), "SFT takes 1 argument without its name, not 2; name them"),
    (lambda: GRPO(reward_model_name_or_path=nn.Linear(2, 2)), "reward_model_name_or_path is a Linear"),
])  # fmt: skip
def test_what_can_not_be_used_is_answered_in_one_sentence(make_module: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_module()
