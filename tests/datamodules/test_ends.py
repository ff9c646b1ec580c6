"""However a run ends, no environment stays open and no process stays behind."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import DQN, PPO, SAC
from rl_modules.common.errors import UsageError
from tests.training import fit

#: The environments of this process that are open; their number so far.
OPEN: set[int] = set()
MADE: list[int] = []


class Watched(gym.Env):
    """Counts to five; ``fails`` says what goes wrong, after ``after`` steps."""

    observation_space: Any = spaces.Box(-1e3, 1e3, (1,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, fails: str = "", after: int = 3, folder: str = "") -> None:
        if fails == "to be made" and len(MADE) == after:
            raise RuntimeError("no licence is left")
        self.fails, self.after, self.folder, self.steps = fails, after, folder, 0
        self.number = len(MADE)
        MADE.append(self.number)
        OPEN.add(self.number)
        if fails == "no entries":
            self.observation_space = spaces.Box(-1, 1, (0,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        self.count += 1
        if self.steps == self.after and self.fails == "raises":
            raise RuntimeError("the simulator is gone")
        if self.steps == self.after and self.fails == "exits":
            raise SystemExit(3)
        value = np.nan if self.steps == self.after and self.fails == "nan" else self.count
        return np.array([value], np.float32), 1.0, self.count == 5, False, {}

    def close(self) -> None:
        OPEN.discard(self.number)
        if self.folder:
            Path(self.folder, str(os.getpid())).touch()


def refuses(env: gym.Env) -> gym.Env:
    raise ValueError("this wrapper is for pictures")


class Raises(L.Callback):
    def __init__(self, hook: str, error: type[BaseException] = RuntimeError) -> None:
        self.hook, self.error = hook, error
        setattr(self, hook, self.stop)

    def stop(self, *arguments: Any, **options: Any) -> None:
        raise self.error("stop")


class NoOptimizer(PPO):
    def configure_optimizers(self) -> Any:
        raise RuntimeError("stop")


@pytest.fixture(autouse=True)
def nothing_open() -> Any:
    OPEN.clear()
    MADE.clear()
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)  # Lightning ignores further ones


def data(kind: Any = RolloutDataModule, fails: str = "", after: int = 3, **arguments: Any) -> Any:
    settings: dict[str, Any] = {"n_steps": 8} if kind is RolloutDataModule else {"learning_starts": 4}
    settings |= {"n_envs": 2, "total_timesteps": 64, "eval_freq": 0}
    return kind(Watched, env_kwargs={"fails": fails, "after": after}, **(settings | arguments))


def callbacks(*given: Any) -> dict[str, Any]:
    return {"callbacks": list(given)}


ENDS: dict[str, Any] = {
    "finished": lambda: (PPO(), data(eval_freq=16), {}),
    "an action space that the algorithm refuses": lambda: (SAC(), data(ReplayDataModule), {}),
    "an observation without entries": lambda: (PPO(), data(fails="no entries"), {}),
    "a wrapper that can't be made": lambda: (PPO(), data(wrappers=[f"{__name__}.refuses"]), {}),
    "the third environment can't be made": lambda: (PPO(), data(fails="to be made", after=2), {}),
    "those of evaluation can't be made": lambda: (PPO(), data(eval_env_kwargs={"fails": "to be made", "after": 1}), {}),
    "a callback's setup": lambda: (PPO(), data(), callbacks(Raises("setup"))),
    "a callback's on_fit_start": lambda: (PPO(), data(), callbacks(Raises("on_fit_start"))),
    "a callback's on_train_batch_end": lambda: (DQN(), data(ReplayDataModule), callbacks(Raises("on_train_batch_end"))),
    "a callback in an evaluation": lambda: (PPO(), data(eval_freq=16), callbacks(Raises("on_validation_end"))),
    "Ctrl-C": lambda: (PPO(), data(), callbacks(Raises("on_train_batch_start", KeyboardInterrupt))),
    "configure_optimizers": lambda: (NoOptimizer(), data(), {}),
    "a checkpoint that is none": lambda: (PPO(), data(), {"ckpt_path": Path(__file__)}),
    "the environment raises": lambda: (PPO(), data(fails="raises"), {}),
    "the environment exits": lambda: (DQN(), data(ReplayDataModule, fails="exits"), {}),
    "the environment returns NaN": lambda: (PPO(), data(fails="nan"), {}),
    "the evaluation raises": lambda: (PPO(), data(eval_env_kwargs={"fails": "raises"}, eval_freq=16), {}),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_no_environment_stays_open(end: str, tmp_path: Path) -> None:
    model, experience, arguments = ENDS[end]()
    if end == "finished":
        fit(model, experience, **arguments)
    else:
        with pytest.raises((Exception, SystemExit)):
            fit(model, experience, **arguments)
    assert MADE
    assert not OPEN


@pytest.mark.parametrize("end", ["finished", "a callback's setup", "Ctrl-C", "the environment raises"])
def test_no_process_of_an_environment_stays_and_each_closes_its_own(end: str, tmp_path: Path) -> None:
    model, experience, arguments = ENDS[end]()
    experience.vectorization_mode = "async"
    experience.env_kwargs["folder"] = str(tmp_path)
    if end == "finished":
        fit(model, experience, **arguments)
    else:
        with pytest.raises((Exception, SystemExit)):
            fit(model, experience, **arguments)
    assert not multiprocessing.active_children()
    assert not OPEN
    assert len(list(tmp_path.iterdir())) == 3  # of this process and two others


def test_a_checkpoint_at_an_exception_still_has_the_running_episodes(tmp_path: Path) -> None:
    arguments = {
        "enable_checkpointing": True,
        **callbacks(OnExceptionCheckpoint(tmp_path), Raises("on_train_epoch_end")),
    }
    with pytest.raises(RuntimeError, match="stop"):
        fit(PPO(), data(), **arguments)
    assert not OPEN
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    running = saved["RolloutDataModule"]["ranks"][0]["collector"]["running"]
    assert [len(episode["actions"]) for episode in running] == [3, 3]  # of 8 steps, 5 end an episode


def test_a_callback_that_would_write_before_the_training_leaves_nothing_open(tmp_path: Path) -> None:
    arguments = {"enable_checkpointing": True, **callbacks(OnExceptionCheckpoint(tmp_path))}
    with pytest.raises(UsageError, match="use_sde"):
        fit(PPO(use_sde=True), data(), **arguments)
    assert MADE
    assert not OPEN


def test_an_interrupted_step_ends_the_processes_too(tmp_path: Path) -> None:
    """The answer to the step never comes, or comes after the exception."""
    experience = data(vectorization_mode="async")
    model = PPO()

    class Interrupts(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            envs = trainer.datamodule.collector.envs
            envs.step_async(np.zeros(2, np.int64))
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        fit(model, experience, **callbacks(Interrupts()))
    assert not multiprocessing.active_children()


def test_an_environment_that_can_t_be_closed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Watched) -> None:
        OPEN.discard(self.number)
        raise OSError("no display")

    monkeypatch.setattr(Watched, "close", close)
    with pytest.warns(UserWarning, match="closing .*Watched raised OSError: no display"):
        fit(PPO(), data())
    assert not OPEN
