"""Ranks that this process starts (``ddp_notebook``, ``ddp_fork``, ``ddp_spawn``) return a module that can be used."""

import pickle
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from datamodules import InstructionDataModule, ReplayDataModule
from recipes.cli import main
from recipes.trainer import Trainer
from rl_modules import DQN, PPO, SAC, SFT
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


def sft() -> tuple[SFT, Any]:
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return SFT(model_config=tiny), InstructionDataModule("addition", n_train=64, batch_size=8, n_eval=4, eval_steps=2)


@pytest.mark.parametrize("make", [ppo, dqn, sac, sft])
def test_what_ranks_are_spawned_with_pickles(make: Any) -> None:
    model, data = pickle.loads(pickle.dumps(make()))
    assert type(data) is type(make()[1]) and model.hparams.keys() == make()[0].hparams.keys()


@pytest.mark.long
@pytest.mark.parametrize(("make", "counted", "steps"), [(ppo, "transitions", "64"), (sft, "optimizer steps", "2")])
def test_the_summary_is_of_what_the_ranks_did(
    make: Any, counted: str, steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a notebook with two GPUs: the counters and the callbacks of the starting process have not moved."""
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=2)
    model, data = make()
    trainer.fit(model, data)
    (last,) = tmp_path.glob("logs/*/version_0/checkpoints/last.ckpt")
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert rows[counted].split()[0] == steps
    assert rows["last checkpoint"].strip() == str(last)
    assert "not evaluated" not in next(iter(rows.values())) and not list(tmp_path.glob("logs/*/version_1"))


@pytest.mark.long
def test_the_command_line_writes_into_the_folder_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", "--model=PPO", "--data=RolloutDataModule", "--data.env_id=CartPole-v1", "--data.n_envs=2",
          "--data.n_steps=8", "--data.batch_size=8", "--data.total_timesteps=64", "--data.n_test_episodes=1",
          "--data.eval_freq=0", "--trainer.accelerator=cpu", "--trainer.devices=2",
          "--trainer.strategy=ddp_fork"])  # fmt: skip
    summary = capsys.readouterr().out
    assert "64 in" in summary and "version_0/checkpoints/last.ckpt" in summary
    assert [path.name for path in tmp_path.glob("logs/*/*")] == ["version_0"]
