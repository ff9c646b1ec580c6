"""Actions of integers, in the environment's dtype; of a Box the nearest to what a Gaussian policy chose."""

from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.envs.tensors import action_tensors
from rl_modules import A2C, DQN, PPO
from rl_modules.common.spaces import space_from_dict, space_to_dict, to_environment
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


class Picky(gym.Env):
    """Refuses actions that are not in its space; of Gymnasium's spaces of int32 no int64 is one."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), (action, action.dtype)
        self.t += 1
        return np.zeros(2, np.float32), 0.0, False, self.t == 9, {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "space"),
    [
        (PPO, spaces.Discrete(3, start=-1, dtype=np.int32)),
        (PPO, spaces.MultiDiscrete([2, 3], dtype=np.int32, start=[5, -1])),
        (DQN, spaces.Discrete(3, dtype=np.uint8)),
    ],
)
def test_choices_have_the_dtype_of_their_space(algorithm: Any, space: Any, tmp_path: Path) -> None:
    """In training, its random start, evaluations and the predictions of a checkpoint alone."""

    def data(actions: spaces.Space) -> Any:
        common: Any = {"total_timesteps": 60, "eval_freq": 30, "n_eval_episodes": 2}
        common["env_kwargs"] = {"action_space": actions}
        if algorithm is DQN:
            return ReplayDataModule(Picky, learning_starts=20, buffer_size=100, batch_size=8, **common)
        return RolloutDataModule(Picky, n_envs=2, n_steps=15, **common)

    fit(algorithm(net_arch=[8]), data(space)).save_checkpoint(tmp_path / "a.ckpt")
    for deterministic in (False, True):
        action, _ = algorithm.load_from_checkpoint(tmp_path / "a.ckpt").predict(np.zeros(2), None, None, deterministic)
        assert space.contains(action)
    # The weights fit the same choices of another dtype.
    usual = space_from_dict({**space_to_dict(space), "dtype": "int64"})
    assert usual.dtype == np.int64
    fit(algorithm(net_arch=[8], init_from=str(tmp_path / "a.ckpt")), data(usual))
