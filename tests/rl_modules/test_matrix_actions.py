"""Box actions of any shape: they are learned as the vector of their entries, and keep their shape everywhere."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_modules import A2C, PPO, REINFORCE, TRPO, RecurrentA2C, RecurrentPPO
from tests.training import assert_equal_checkpoints, fit, rollouts

SHAPES = {(2, 2): (4,), (): (1,), (1, 3): (3,)}
MODELS = {
    "PPO": lambda: PPO(net_arch=[8]),
    "PPO with gSDE": lambda: PPO(net_arch=[8], use_sde=True),
    "PPO with a penalty": lambda: PPO(net_arch=[8], policy_objective="penalty", target_kl=0.01),
    "A2C": lambda: A2C(net_arch=[8]),
    "REINFORCE": lambda: REINFORCE(net_arch=[8]),
    "TRPO": lambda: TRPO(net_arch=[8]),
    "RecurrentPPO": lambda: RecurrentPPO(net_arch=[8], lstm_hidden_size=8),
    "RecurrentA2C": lambda: RecurrentA2C(net_arch=[8], lstm_hidden_size=8),
}


def make_space(shape: tuple[int, ...]) -> spaces.Box:
    n = int(np.prod(shape))
    low = np.linspace(-1, -0.1, n, dtype=np.float32).reshape(shape)
    return spaces.Box(low, low + 0.5, dtype=np.float32)


class Follow(gym.Env):
    """The reward is minus the distance of each entry of the action from the observation's."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.action_space = make_space(shape)
        self.observation_space = spaces.Box(-1, 1, (max(1, int(np.prod(shape))),))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.n = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.n += 1
        reward = -float(np.abs(action.reshape(-1) - self.seen).sum())
        return self._observe(), reward, self.n == 5, False, {}

    def _observe(self) -> np.ndarray:
        self.seen = self.np_random.uniform(-1, 1, self.observation_space.shape).astype(np.float32)
        return self.seen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_matrix_of_actions_is_learned_as_the_vector_of_its_entries(name: str, shape: tuple[int, ...]) -> None:
    def train(shape: tuple[int, ...]) -> Any:
        model = MODELS[name]()
        data = rollouts(lambda: Follow(shape), n_envs=2, n_steps=8, total_timesteps=64, eval_freq=32, n_eval_episodes=1)
        fit(model, data)
        assert data.rollout["action"].shape == (*data.rollout["observation"].shape[:-1], *shape)
        return model

    model, flat = train(shape), train(SHAPES[shape])
    expected = flat.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    observations = np.linspace(-1, 1, 6 * len(flat.action_space.low), dtype=np.float32).reshape(6, -1)
    actions, _ = model.predict(observations, deterministic=True)
    assert actions.shape == (6, *shape)
    np.testing.assert_array_equal(actions.reshape(6, -1), flat.predict(observations, deterministic=True)[0])
    assert np.shape(model.predict(observations[0])[0]) == shape
    assert model(torch.from_numpy(observations)).shape == (6, *shape)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_run_resumes_within_an_episode(shape: tuple[int, ...], precision: str, tmp_path: Path) -> None:
    def run(epochs: int, ckpt_path: Path | None = None) -> Path:
        # Episodes of 5 steps and rollouts of 8: the environment repeats stored actions.
        data = rollouts(lambda: Follow(shape), n_envs=2, n_steps=8, overlap=True)
        trainer = fit(PPO(net_arch=[8]), data, ckpt_path, max_epochs=epochs, precision=precision)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return tmp_path / f"{epochs}.ckpt"

    whole = run(4).rename(tmp_path / "whole.ckpt")
    assert_equal_checkpoints(whole, run(4, run(2)))
