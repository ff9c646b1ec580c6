"""Ranks that this process starts (``ddp_notebook``, ``ddp_fork``, ``ddp_spawn``) return a module that can be used."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from datamodules import ReplayDataModule
from rl_modules import DQN, PPO, SAC
from tests.training import fit, rollouts


class Save(L.Callback):
    """Writes a checkpoint in the ranks at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def ppo() -> tuple[PPO, Any]:
    return PPO(), rollouts("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=64, norm_obs=True)


def dqn() -> tuple[DQN, Any]:
    return DQN(), ReplayDataModule("CartPole-v1", learning_starts=20, batch_size=8, total_timesteps=64, eval_freq=0)


def sac() -> tuple[SAC, Any]:
    return SAC(net_arch=[16]), ReplayDataModule(
        "Pendulum-v1", learning_starts=20, batch_size=8, total_timesteps=40, eval_freq=0
    )


@pytest.mark.long
@pytest.mark.parametrize("make", [ppo, dqn, sac])
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_the_starting_process_has_what_the_ranks_learned(make: Any, strategy: str, tmp_path: Path) -> None:
    model, data = make()
    fit(model, data, devices=2, strategy=strategy, callbacks=[Save(tmp_path / "rank.ckpt")])
    saved = type(model).load_from_checkpoint(tmp_path / "rank.ckpt")
    for name, weight in saved.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0)
    observation = np.stack([saved.observation_space.sample() for _ in range(8)])
    expected, _ = saved.predict(observation, deterministic=True)
    np.testing.assert_array_equal(model.predict(observation, deterministic=True)[0], expected)
    if make is ppo:
        assert model.observation_statistics is not None, "predict would feed raw observations"
        np.testing.assert_array_equal(model.observation_statistics[0], saved.observation_statistics[0])


@pytest.mark.long
def test_a_second_fit_starts_from_the_returned_weights(tmp_path: Path) -> None:
    model, data = ppo()
    fit(model, data, devices=2, strategy="ddp_fork", callbacks=[Save(tmp_path / "first.ckpt")])
    fit(model, ppo()[1], devices=2, strategy="ddp_fork", callbacks=[Save(tmp_path / "second.ckpt")])

    again = PPO.load_from_checkpoint(tmp_path / "first.ckpt")
    fit(again, ppo()[1], devices=2, strategy="ddp_fork", callbacks=[Save(tmp_path / "again.ckpt")])
    second, other = (torch.load(tmp_path / name, weights_only=True) for name in ("second.ckpt", "again.ckpt"))
    for name, weight in second["state_dict"].items():
        torch.testing.assert_close(other["state_dict"][name], weight, rtol=0, atol=0)
    assert set(second["state_dict"]) == set(model.state_dict())
