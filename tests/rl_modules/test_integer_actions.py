"""Box actions of integers: the nearest to what a Gaussian policy chose."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import RolloutDataModule
from datamodules.envs.tensors import action_tensors
from rl_modules import A2C, PPO
from rl_modules.common.spaces import to_environment
from tests.training import fit

SPACE = spaces.Box(np.array([-3, 0]), np.array([3, 9]), dtype=np.int64)


class Takes(gym.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), SPACE
    taken: ClassVar[list[np.ndarray]] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        Takes.taken.append(action.copy())
        return np.zeros(2, np.float32), 0.0, False, self.t == 9, {}


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_environment_takes_the_nearest_integers(algorithm: Any) -> None:
    chosen = []

    class Watched(algorithm):
        def prepare(self, rollout: Any) -> Any:
            chosen.append(rollout["action"].flatten(0, 1))
            return super().prepare(rollout)

    Takes.taken.clear()
    model = Watched(net_arch=[8])
    fit(model, RolloutDataModule(Takes, n_envs=1, n_steps=100, total_timesteps=200, eval_freq=0))
    raw, taken = torch.cat(chosen).double().numpy(), np.stack(Takes.taken)
    inside = ((raw > SPACE.low) & (raw < SPACE.high)).all(1)
    assert inside.sum() > 30 and taken.dtype == np.int64
    assert np.abs(taken - raw)[inside].max() <= 0.5
    assert all(SPACE.contains(action) for action in taken)
    assert (taken == -1).any() and (taken[:, 0] == 1).any()
    action, _ = model.predict(np.zeros(2, np.float32))
    assert SPACE.contains(action)


def test_tensors_are_rounded_alike() -> None:
    raw = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([-0.5, 0.5, 1.5, 2.5])])[:, None].expand(-1, 2)
    np.testing.assert_array_equal(to_environment(SPACE, raw.numpy()), action_tensors(SPACE, raw).numpy())
    real = spaces.Box(-1, 1, (2,))
    np.testing.assert_array_equal(to_environment(real, raw.numpy()), raw.clamp(-1, 1).numpy())
