"""Observations in float64 far from 0: normalised before they become float32, or a warning."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.normalization import Normalizers, ObservationNormalizer
from datamodules.tensor_collector import TensorCollector
from rl_modules import DQN, PPO
from tests.datamodules.test_tensors import OfTensors
from tests.training import assert_resumes_exactly, fit

#: Twenty places, .1 apart; float32 has steps of .5 there.
FIRST, STEP = 5_400_000.0, 0.1


class Far(gym.Env):
    """Walks over the places in turn, and ends at the last."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: str = "float64", first: float = FIRST) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.dtype(dtype).type)
        self.first, self.place = first, 0

    def _observation(self) -> np.ndarray:
        return np.array([self.first + STEP * self.place], self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.place += 1
        return self._observation(), 1.0, self.place == 19, False, {}


PLACES = FIRST + STEP * np.arange(20)[:, None]


class Recording:
    """Keeps what the policy is shown."""

    def act(self, observation: Any, *args: Any, **arguments: Any) -> Any:
        self.__dict__.setdefault("shown", []).append(observation.clone())
        return super().act(observation, *args, **arguments)  # type: ignore[misc]


class RecordingPPO(Recording, PPO):
    pass


class RecordingDQN(Recording, DQN):
    def prepare(self, sample: Any) -> Any:
        self.__dict__.setdefault("samples", []).append(sample)
        return super().prepare(sample)


def far(cls: Any, **arguments: Any) -> Any:
    sizes = {"learning_starts": 40, "batch_size": 32} if cls is ReplayDataModule else {"n_steps": 40}
    defaults = {"n_envs": 2, "total_timesteps": 160, "eval_freq": 0, "norm_obs": True, "n_test_episodes": 2}
    return cls(Far, **{**defaults, **sizes, **arguments})


@pytest.mark.parametrize(("model", "data"), [(RecordingPPO, RolloutDataModule), (RecordingDQN, ReplayDataModule)])
def test_rollouts_prediction_and_evaluation_tell_places_apart(model: Any, data: Any) -> None:
    model, data = model(net_arch=[8]), far(data)
    trainer = fit(model, data)
    assert all(x.dtype is torch.float32 for x in model.shown)
    # In a step of training both environments are at the same place, and the statistics change between steps only.
    assert len({float(x[0, 0]) for x in model.shown[-19:]}) == 19
    mean, deviation, clip = model.observation_statistics
    expected = np.clip((PLACES - mean) / deviation, -clip, clip).astype(np.float32)
    assert len(np.unique(expected)) == 20
    model.shown.clear()
    model.predict(PLACES, deterministic=True)
    np.testing.assert_array_equal(model.shown[0].numpy(), expected)
    model.shown.clear()
    trainer.test(model, datamodule=data, verbose=False)
    np.testing.assert_array_equal(np.unique(torch.cat(model.shown).numpy()), expected[:19, 0])


def test_replay_normalises_in_float64() -> None:
    model, data = RecordingDQN(net_arch=[8]), far(ReplayDataModule)
    fit(model, data)
    sample = model.samples[-1]
    assert sample["observation"].dtype is torch.float32
    moved = (sample["next_observation"] - sample["observation"]).flatten()
    assert (moved > 0).all()  # in float32 four of five steps led nowhere
    torch.testing.assert_close(moved, moved[:1].expand_as(moved), rtol=1e-2, atol=0.0)


def test_hindsight_computes_rewards_from_float64() -> None:
    goals: list[np.ndarray] = []

    class Goals(Far):
        def __init__(self) -> None:
            super().__init__()
            box = self.observation_space
            names = ("observation", "achieved_goal", "desired_goal")
            self.observation_space = spaces.Dict(dict.fromkeys(names, box))

        def _observation(self) -> Any:
            x = np.array([self.first + STEP * self.place])
            return {"observation": x, "achieved_goal": x, "desired_goal": np.array([self.first])}

        def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
            goals.append(np.array(achieved))
            return np.ones(len(achieved))

    fit(DQN(net_arch=[8]), ReplayDataModule(Goals, total_timesteps=80, learning_starts=60, batch_size=32, eval_freq=0,
                                            n_sampled_goal=4, norm_obs=True))  # fmt: skip
    assert np.isin(np.concatenate(goals), PLACES).all()


def test_tensors_are_normalised_in_float64() -> None:
    normalizers = Normalizers(ObservationNormalizer(Far().observation_space))
    collector = TensorCollector(OfTensors(SyncVectorEnv([Far] * 2)), [1], 0, "far", normalizers)
    shown: list[torch.Tensor] = []

    def act(observation: Any, generator: Any) -> dict[str, torch.Tensor]:
        shown.append(observation.clone())
        return {"action": torch.zeros(2, dtype=torch.int64)}

    collector.collect(act, 40, torch.device("cpu"))
    mean, deviation, clip = normalizers.statistics()
    rollout: Any = collector.collect(act, 40, torch.device("cpu"))
    places = np.clip((PLACES - mean) / deviation, -clip, clip).astype(np.float32)
    for seen in (torch.stack(shown[40:]), rollout["observation"], rollout["next_observation"]):
        assert seen.dtype is torch.float32
        np.testing.assert_array_equal(np.unique(seen.numpy()), places[:, 0])


@pytest.mark.long
@pytest.mark.parametrize(("model", "data"), [(PPO, RolloutDataModule), (DQN, ReplayDataModule)])
def test_resumes_exactly(model: Any, data: Any, tmp_path: Path) -> None:
    endless = {"total_timesteps": 10**6, "rollouts_per_epoch": 1 if data is RolloutDataModule else 30}
    assert_resumes_exactly(lambda: model(net_arch=[8]), lambda: far(data, **endless), tmp_path)


# ---------------------------------------------------------------- the warning
