"""A user's class may have the name of the one that it was made from, as a copied file's has."""

import gc
import sys

import pytest
import torch

from recipes.cli import main

MODULE = '''
import datamodules
import rl_modules


class PPO(rl_modules.PPO):
    """Mine."""


class RolloutDataModule(datamodules.RolloutDataModule):
    """Mine."""
'''
SHORT = ["--data.total_timesteps=128", "--data.n_test_episodes=1"]
CONFIG = """
model: {class_path: PPO, init_args: {gamma: 0.9}}
data: {class_path: RolloutDataModule, init_args: {env_id: CartPole-v1, n_envs: 2, n_steps: 32}}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module with two such classes, importable; forgotten afterwards."""
    (tmp_path / "my_copies.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_copies", None)
    gc.collect()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "data"),
    [
        (["--model", "my_copies.PPO", "--data", "RolloutDataModule", "--data.env_id=CartPole-v1"], "datamodules"),
        (["--model=my_copies.PPO", "--data=RolloutDataModule", "--data.env_id=CartPole-v1"], "datamodules"),
        (["--config", "mine.yaml", "--model", "my_copies.PPO"], "datamodules"),
        (["--config=mine.yaml", "--model", "my_copies.PPO", "--data", "my_copies.RolloutDataModule"], "my_copies"),
        (["--config", "ppo/cartpole.yaml", "--model.class_path", "my_copies.PPO"], "datamodules"),
        (["--config", "mine.yaml", "--data", "my_copies.RolloutDataModule"], "my_copies"),
    ],
)
def test_a_short_name_is_this_project_s(words, data, mine):
    main(["fit", *words, *SHORT])
    with open("logs/PPO-CartPole-v1/version_0/config.yaml", encoding="utf-8") as file:
        recorded = file.read()
    model = "my_copies" if any("my_copies.PPO" in word for word in words) else "rl_modules"
    assert f"class_path: {model}.PPO" in recorded and f"class_path: {data}.RolloutDataModule" in recorded
    checkpoint = torch.load("logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt", weights_only=True)
    assert "mine.yaml" not in words or checkpoint["hyper_parameters"]["gamma"] == 0.9


@pytest.mark.long
def test_an_option_without_its_value_is_asked_for(mine, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model", "my_copies.PPO", "--data"])
    assert "--data" in capsys.readouterr().err
