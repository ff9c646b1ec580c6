"""Single reward functions as Python objects, as TRL's trainers take them."""

import pytest
import torch

from datamodules import PromptDataModule


def brevity(prompts, completions, **columns):
    return [-float(len(text)) for text in completions]


@pytest.mark.parametrize("given", [brevity, "accuracy"])
def test_one_reward_function_needs_no_list(given, tmp_path):
    data, other = (PromptDataModule("addition", reward_funcs=funcs) for funcs in (given, [given]))
    assert data.rewards.names == other.rewards.names == ["accuracy" if given == "accuracy" else "brevity"]
    torch.save(dict(data.hparams), tmp_path / "hparams.pt")
    assert torch.load(tmp_path / "hparams.pt", weights_only=True) == dict(data.hparams)
