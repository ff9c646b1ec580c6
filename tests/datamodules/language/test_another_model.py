"""One datamodule trains several models in turn: each reads the records with its own tokenizer."""

from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, GRPO, KTO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import ALPHABET
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
SIZES = {"batch_size": 8, "n_train": 16, "eval_steps": 0}


def reversed_tokenizer() -> PreTrainedTokenizerFast:
    """The character tokenizer with its alphabet backwards: the same ids are other characters."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *reversed(ALPHABET)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


CASES: dict[str, Any] = {
    "grpo": (lambda **a: GRPO(max_completion_length=3, **a),
             lambda: PromptDataModule("addition", num_generations=4, **SIZES), "prompt"),
    "sft": (SFT, lambda: InstructionDataModule("addition", **SIZES), "completion"),
    "reward model": (RewardModel, lambda: PreferenceDataModule("paths", n_demonstrations=4, **SIZES), "chosen"),
    "dpo": (DPO, lambda: PreferenceDataModule("paths", **SIZES), "rejected"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_records_are_read_with_the_tokenizer_of_the_model_in_training(case: str) -> None:
    make, make_data, column = CASES[case]
    data = make_data()

    def texts(model: Any) -> list[str]:
        ids = [record[f"{column}_ids"] for record in data.train_records]
        return [model.tokenizer.decode(row, skip_special_tokens=True) for row in ids]

    first, second, third = (make(model_config=TINY, **a) for a in ({}, {}, {
        "tokenizer_name_or_path": reversed_tokenizer()}))  # fmt: skip
    fit(first, data, max_steps=1)
    records, expected = data.train_records, [record[column] for record in data.train_records]
    assert texts(first) == expected
    fit(second, data, max_steps=1)
    assert data.train_records is records, "an equal tokenizer read them already"
    fit(third, data, max_steps=1)
    assert texts(third) == expected
    if case == "sft":
        row = data.sequences.batch(torch.tensor([0]), 0)["tokens"][0].tolist()
        assert expected[0] in third.tokenizer.decode(row)
    if case == "reward model":
        assert len(data.demonstration_ids) == 4
        assert all(third.tokenizer.unk_token_id not in ids.tolist() for ids in data.demonstration_ids)


def test_a_model_with_a_shorter_context_refuses_what_the_last_one_took() -> None:
    data = InstructionDataModule("addition", **SIZES)
    fit(SFT(model_config=TINY), data, max_steps=1)
    with pytest.raises(UsageError, match="prompts are longer than 3 tokens"):
        fit(SFT(model_config={**TINY, "max_position_embeddings": 4}), data, max_steps=1)


@pytest.mark.long
def test_pairs_and_single_answers_of_one_datamodule() -> None:
    data = PreferenceDataModule("paths", **SIZES)
    for kind, column in ((DPO, "chosen"), (KTO, "label"), (RewardModel, "chosen")):
        fit(kind(model_config=TINY), data, max_steps=1)
        assert column in data.train_records[0]
