"""``StopTrainingOnRewardThreshold``: when a run ends, and that a run without evaluations is refused."""

from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
from gymnasium import spaces

from datamodules import RolloutDataModule
from recipes.callbacks import StopTrainingOnRewardThreshold
from rl_modules import PPO
from rl_modules.common.errors import UsageError
from tests.training import fit


class Paying(gym.Env):
    """Episodes of one step with the reward ``amount``."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    amount = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), self.amount, True, False, {}


class Scripted(L.Callback):
    """Evaluations with the given mean returns."""

    def __init__(self, returns: list[float]) -> None:
        self.returns = iter(returns)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Paying.amount = next(self.returns)


def epochs(returns: list[float], threshold: float, **data: Any) -> int:
    data = {"eval_freq": 32, "n_eval_episodes": 1, "total_timesteps": 160, "n_steps": 16, "batch_size": 32, **data}
    callbacks = [Scripted(returns), StopTrainingOnRewardThreshold(threshold)]
    return fit(PPO(), RolloutDataModule(Paying, n_envs=2, **data), callbacks=callbacks).current_epoch


def test_training_ends_at_the_first_evaluation_that_reaches_the_threshold(capsys: pytest.CaptureFixture) -> None:
    assert epochs([100.0, 499.0, 500.0, 500.0, 500.0], 500, eval_on_start=False) == 3
    assert "the mean return 500 reached reward_threshold=500: training ends" in capsys.readouterr().out
    assert epochs([100.0] * 5, 500, eval_on_start=False) == 5


def test_the_evaluation_before_training_does_not_count() -> None:
    assert epochs([500.0, 100.0, 500.0, 500.0], 500, eval_on_start=True) == 2


def test_a_run_without_evaluations_is_refused() -> None:
    with pytest.raises(UsageError, match="reads evaluations in training, and there are none: set data.eval_freq"):
        epochs([], 500, eval_freq=0)
