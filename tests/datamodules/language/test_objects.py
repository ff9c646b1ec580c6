"""Single reward functions as Python objects, as TRL's trainers take them."""

import pytest
import torch
from datasets import Dataset, DatasetDict, load_from_disk

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from datamodules.language.files import open_stream, read_dataset
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import setting


def brevity(prompts, completions, **columns):
    return [-float(len(text)) for text in completions]


@pytest.mark.parametrize("given", [brevity, "accuracy"])
def test_one_reward_function_needs_no_list(given, tmp_path):
    data, other = (PromptDataModule("addition", reward_funcs=funcs) for funcs in (given, [given]))
    assert data.rewards.names == other.rewards.names == ["accuracy" if given == "accuracy" else "brevity"]
    torch.save(dict(data.hparams), tmp_path / "hparams.pt")
    assert torch.load(tmp_path / "hparams.pt", weights_only=True) == dict(data.hparams)


class Pairs(PromptDataModule):
    """A user's subclass without a constructor: a new default, and an argument of its own."""

    num_generations = 2
    level: int = setting(3, "difficulty", least=1)


def test_a_subclass_declares_an_argument_and_a_default():
    data = Pairs("addition", level=4.0)
    assert (data.num_generations, data.level, data.hparams["level"]) == (2, 4, 4)
    assert data.generation_size == data.batch_size == 64
    with pytest.raises(UsageError, match="level=0 must be at least 1"):
        Pairs("addition", level=0)
    with pytest.raises(UsageError, match=r"Pairs takes no argument 'levle'; did you mean level\?"):
        Pairs("addition", levle=2)


def test_preferences_take_no_arguments_of_writing():
    with pytest.raises(UsageError, match="PreferenceDataModule takes no argument 'reward_funcs'"):
        PreferenceDataModule("paths", reward_funcs="accuracy")
    assert "reward_funcs" not in PreferenceDataModule("paths").hparams


ROWS = [{"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "margin": 0.5, "other": [1]} for _ in range(2)]


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", None])
def test_the_format_of_a_dataset_changes_no_record(form, tmp_path):
    given = Dataset.from_list(ROWS)
    given.with_format(form).save_to_disk(tmp_path / "saved")
    saved = load_from_disk(tmp_path / "saved")
    assert saved.format["type"] == form
    for dataset in (saved, str(tmp_path / "saved"), DatasetDict(train=saved)):
        assert [row for _, row in read_dataset(dataset, split="train")[0]] == ROWS
        assert [row for _, row in open_stream(None, dataset, None, "train")(0)] == ROWS
    assert [row for _, row in open_stream(None, saved.to_iterable_dataset(), None, "train")(1)] == ROWS[1:]
    columns, _ = read_dataset(given.with_format(form, columns=["chosen"]))
    assert [row for _, row in columns] == [{"chosen": "b"}] * 2


def test_a_transform_of_a_dataset_is_applied():
    dataset = Dataset.from_list(ROWS).with_transform(lambda rows: {"prompt": ["x" for _ in rows["chosen"]]})
    assert [row for _, row in read_dataset(dataset)[0]] == [{"prompt": "x"}] * 2


@pytest.mark.parametrize("given", [Dataset.from_list(ROWS), {"held out": Dataset.from_list(ROWS)}])
def test_a_dataset_in_the_place_of_a_file_is_refused(given):
    with pytest.raises(UsageError, match=r"eval_path has a Dataset, .*; give datasets as dataset"):
        InstructionDataModule(dataset=Dataset.from_list(ROWS), eval_path=given)
    with pytest.raises(UsageError, match="path has a "):
        PreferenceDataModule(path=Dataset.from_list(ROWS))
    with pytest.raises(UsageError, match="eval_path has a NoneType"):
        InstructionDataModule(dataset=Dataset.from_list(ROWS), eval_path={"held out": None})
