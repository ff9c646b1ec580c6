"""``monitor.csv`` as Stable-Baselines3 reads it: every episode once, whatever stopped the run."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import lightning as L
import pytest
import torch

from datamodules import ReplayDataModule, RolloutDataModule
from recipes.callbacks import EpisodeMonitor
from rl_modules import DQN, PPO
from rl_modules.common.errors import UsageError
from tests.training import fit

load_results: Any = pytest.importorskip("stable_baselines3.common.monitor").load_results
pytest.importorskip("pandas")


def rollouts(**arguments: Any) -> RolloutDataModule:
    return RolloutDataModule(**{"env_id": "CartPole-v1", "n_envs": 3, "n_steps": 64, "batch_size": 96, "n_epochs": 1,
                                "total_timesteps": 960, "eval_freq": 0, **arguments})  # fmt: skip


class Counting(gym.Wrapper):
    """Writes return and length of each finished episode to a file of its own: what happened, by another way."""

    def __init__(self, env: gym.Env, path: str) -> None:
        super().__init__(env)
        self.path = path
        self.total, self.length = 0.0, 0

    def reset(self, **arguments: Any) -> Any:
        self.total, self.length = 0.0, 0
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        self.length += 1
        if terminated or truncated:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{self.total} {self.length}\n")
        return observation, reward, terminated, truncated, info


def pairs(folder: Path) -> list[tuple[float, int]]:
    frame = load_results(str(folder))
    return list(zip(frame["r"].tolist(), frame["l"].tolist(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"norm_reward": True, "norm_obs": True}, {"autoreset_mode": "next_step"},
                                     {"stats_window_size": 1}])  # fmt: skip
def test_every_episode_is_there_once_with_its_raw_return(options: dict[str, Any], tmp_path: Path) -> None:
    wrapper = {"class_path": f"{__name__}.Counting", "init_args": {"path": str(tmp_path / "seen.txt")}}
    fit(PPO(), rollouts(wrappers=[wrapper], **options), callbacks=[EpisodeMonitor()], default_root_dir=tmp_path)
    seen = [tuple(map(float, line.split())) for line in (tmp_path / "seen.txt").read_text("utf-8").splitlines()]
    assert len(seen) > 20 and sorted(pairs(tmp_path)) == sorted(seen)
    first, columns, *_ = (tmp_path / "monitor.csv").read_text("utf-8").splitlines()
    assert first[0] == "#" and json.loads(first[1:]).keys() == {"t_start", "env_id"} and columns == "r,l,t"
    times = load_results(str(tmp_path))["t"]
    assert times.is_monotonic_increasing and times.is_unique and times.min() >= 0


class Noting(gym.Wrapper):
    """Puts the last action, the episode's length and a text into the info of an episode's end, and into a file."""

    def __init__(self, env: gym.Env, path: str) -> None:
        super().__init__(env)
        self.path, self.length = path, 0

    def reset(self, **arguments: Any) -> Any:
        self.length = 0
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        *step, info = self.env.step(action)
        self.length += 1
        if step[2] or step[3]:
            noted = {"last": int(action), "n": self.length, "kind": ("even", "odd")[self.length % 2]}
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(" ".join(map(str, noted.values())) + "\n")
            info = {**info, **noted}
        return *step, info


@pytest.mark.parametrize("options", [{}, {"autoreset_mode": "next_step"}, {"autoreset_mode": "disabled"},
                                     {"overlap": True}])  # fmt: skip
def test_infos_of_an_episodes_end_are_columns(options: dict[str, Any], tmp_path: Path) -> None:
    wrapper = {"class_path": f"{__name__}.Noting", "init_args": {"path": str(tmp_path / "seen.txt")}}

    def run(ckpt_path: Path | None = None, keywords: Any = ("last", "n", "kind"), **arguments: Any) -> list[str]:
        monitor = EpisodeMonitor(tmp_path, info_keywords=keywords)
        data = rollouts(wrappers=[wrapper], rollouts_per_epoch=1, **options)
        fit(PPO(net_arch=[8]), data, ckpt_path, callbacks=[monitor], **arguments).save_checkpoint(tmp_path / "a.ckpt")
        frame = load_results(str(tmp_path))
        assert frame["n"].tolist() == frame["l"].tolist()
        return [f"{last} {n} {kind}" for last, n, kind in zip(frame["last"], frame["n"], frame["kind"], strict=True)]

    whole = run()
    seen = (tmp_path / "seen.txt").read_text("utf-8").splitlines()
    assert len(whole) > 20 and (sorted(whole) == sorted(seen) or ("overlap" in options and set(whole) <= set(seen)))
    run(max_epochs=2)
    with pytest.raises(UsageError, match=r"info_keywords=\['n'\] differ from those of .*, \['last', 'n', 'kind'\]"):
        run(tmp_path / "a.ckpt", ["n"])
    assert run(tmp_path / "a.ckpt") == whole


def test_an_info_that_an_episodes_end_lacks_is_named(tmp_path: Path) -> None:
    monitor = EpisodeMonitor(tmp_path, info_keywords=["speed"])
    with pytest.raises(UsageError, match="info_keywords names 'speed', which the infos at an episode's end lack; they"):
        fit(PPO(net_arch=[8]), rollouts(), callbacks=[monitor])


@pytest.mark.long
def test_replay_has_one_too(tmp_path: Path) -> None:
    data = ReplayDataModule("CartPole-v1", learning_starts=16, total_timesteps=300, eval_freq=0)
    fit(DQN(), data, callbacks=[EpisodeMonitor(tmp_path / "folder")])
    assert sum(length for _, length in pairs(tmp_path / "folder")) <= 300 < 400
    assert pairs(tmp_path / "folder")[-1] == (data.collector.episodes.returns[-1], data.collector.episodes.lengths[-1])


@pytest.mark.long
def test_a_resumed_run_neither_repeats_nor_loses_an_episode(tmp_path: Path) -> None:
    """The file of a run that was killed has episodes after the checkpoint."""
    whole, killed, resumed = (tmp_path / name for name in ("whole", "killed", "resumed"))
    fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(whole)])

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "two.ckpt", weights_only=False)

    fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(killed), Save()], max_epochs=4)
    text = (killed / "monitor.csv").read_text("utf-8")
    assert len(text.splitlines()) > 3
    (killed / "monitor.csv").write_text(text[:-3], "utf-8")  # half a row, as a kill may leave
    for folder in (killed, resumed):
        fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(folder)], ckpt_path=tmp_path / "two.ckpt")
    assert pairs(killed) == pairs(whole)
    # In another folder the file begins with the resumed part.
    assert pairs(resumed) == pairs(whole)[-len(pairs(resumed)) :] and 0 < len(pairs(resumed)) < len(pairs(whole))
    header = (killed / "monitor.csv").read_text("utf-8").splitlines()[0]
    assert header == text.splitlines()[0], "time counts from the first start"


@pytest.mark.long
def test_a_resumed_run_whose_episodes_begin_anew_keeps_those_of_the_rollout_collected_ahead(tmp_path: Path) -> None:
    """They are reported while the checkpoint is loaded, before the file is open."""

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "two.ckpt", weights_only=False)

    def run(**arguments: Any) -> list[tuple[float, int]]:
        data = rollouts(overlap=True, rollouts_per_epoch=1, vectorization_mode="vector_entry_point", n_steps=128,
                        total_timesteps=1920)  # fmt: skip
        fit(PPO(), data, callbacks=[EpisodeMonitor(tmp_path), Save()], **arguments)
        return pairs(tmp_path)

    whole = run()
    state = torch.load(tmp_path / "two.ckpt", weights_only=True)["RolloutDataModule"]["ranks"][0]["collector"]
    reported, ahead = len(state["episodes"]["returns"]), int(state["unreported"][1]["numpy.ndarray"].sum())
    assert ahead > 0
    resumed = run(ckpt_path=tmp_path / "two.ckpt")
    assert resumed[: reported + ahead] == whole[: reported + ahead] and len(resumed) > reported + ahead


@pytest.mark.long
def test_a_new_run_in_the_same_folder_begins_a_new_file(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(tmp_path)])
        found.append(pairs(tmp_path))
    assert found[0] == found[1]


KILLED = """
import os, sys, lightning as L
from tests.recipes.callbacks.test_episode_monitor import rollouts
from recipes.callbacks import EpisodeMonitor
from rl_modules import PPO

class Die(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, i):
        if trainer.global_step == 4:
            trainer.save_checkpoint("killed.ckpt", weights_only=False)
        if trainer.global_step == 7:
            os.kill(os.getpid(), 9)

trainer = L.Trainer(max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, callbacks=[EpisodeMonitor("."), Die()])
trainer.fit(PPO(), datamodule=rollouts())
"""


@pytest.mark.slow
def test_kill_minus_nine_loses_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False, capture_output=True,
                             env={**os.environ, "PYTHONPATH": str(root)})  # fmt: skip
    assert process.returncode == -9, process.stderr.decode()[-2000:]
    (tmp_path / "killed").mkdir()
    shutil.copy(tmp_path / "monitor.csv", tmp_path / "killed")
    fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(tmp_path / "killed")], ckpt_path=tmp_path / "killed.ckpt")
    fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(tmp_path / "whole")])
    assert pairs(tmp_path / "killed") == pairs(tmp_path / "whole")


@pytest.mark.long
def test_every_rank_has_a_file(tmp_path: Path) -> None:
    trainer = fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(tmp_path)], devices=2, strategy="ddp_fork")
    trainer.save_checkpoint(tmp_path / "end.ckpt", weights_only=False)
    assert {path.name for path in tmp_path.glob("*.csv")} == {"0.monitor.csv", "1.monitor.csv"}
    assert len(pairs(tmp_path)) > 10


def test_a_checkpoint_with_it_loads_without_code(tmp_path: Path) -> None:
    fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(tmp_path)], max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["EpisodeMonitor"]
    assert state["ranks"][0]["size"] == (tmp_path / "monitor.csv").stat().st_size
    assert math.isfinite(state["ranks"][0]["t_start"])


@pytest.mark.long
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_checkpoint_of_a_run_that_had_one_is_evaluated_with_one(stage: str, tmp_path: Path) -> None:
    """As ``rl validate --config …`` does, whose config names the callback."""
    trainer = fit(PPO(), rollouts(), callbacks=[EpisodeMonitor(tmp_path)], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    written = (tmp_path / "monitor.csv").read_text("utf-8")
    data = rollouts(n_eval_episodes=1, n_test_episodes=1)
    evaluator = L.Trainer(accelerator="cpu", logger=False, callbacks=[EpisodeMonitor(tmp_path)])
    getattr(evaluator, stage)(PPO(), datamodule=data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert (tmp_path / "monitor.csv").read_text("utf-8") == written
