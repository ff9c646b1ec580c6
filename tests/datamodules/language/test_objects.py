"""Single reward functions as Python objects, as TRL's trainers take them."""

import pytest
import torch

from datamodules import PreferenceDataModule, PromptDataModule
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
