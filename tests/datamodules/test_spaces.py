"""Spaces of observations that can't be sampled, and those without entries."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import DQN, PPO
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves
from rl_modules.common.spaces import example_arrays, observation_arrays
from tests.training import fit

TOP = np.finfo(np.float64).max
PARTS: dict[str, spaces.Space] = {
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "double": spaces.Box(-1, 1, (), np.float64),
    "image": spaces.Box(0, 255, (4, 4), np.uint8),
    "bytes": spaces.Box(-3, 3, (2,), np.int8),
    "bool": spaces.Box(0, 1, (2,), np.bool_),
    "choice": spaces.Discrete(3, start=5),
    "choices": spaces.MultiDiscrete([3, 4], dtype=np.int32, start=[7, 8]),
    "choice of bytes": spaces.Discrete(3, dtype=np.uint8),
    "choices of bytes": spaces.MultiDiscrete([3, 4], dtype=np.uint8),
    "bits": spaces.MultiBinary((2, 2)),
}


class Fixed(gym.Env):
    """Episodes of 20 steps, each observed as the same value."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space, value: Any) -> None:
        self.observation_space, self.value = space, value

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.value, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.value, 1.0, self.t == 20, False, {}


def test_examples_have_the_shapes_and_dtypes_of_what_is_sampled() -> None:
    space = spaces.Dict({**PARTS, "tuple": spaces.Tuple([*PARTS.values(), spaces.Dict(PARTS)])})
    sampled = tree_leaves(observation_arrays(space, space.sample()))
    examples = tree_leaves(example_arrays(space))
    assert [(x.shape, x.dtype) for x in examples] == [(np.shape(x), np.asarray(x).dtype) for x in sampled]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("replays", [False, True])
def test_a_box_that_cannot_be_sampled_is_trained_and_evaluated_in(nested: bool, replays: bool) -> None:
    space: spaces.Space = spaces.Box(-TOP, TOP, (3,), np.float64)
    with pytest.raises(OverflowError), np.errstate(over="ignore"):
        space.sample()
    value: Any = np.zeros(3)
    if nested:
        space, value = spaces.Dict(a=space, b=spaces.Tuple([space])), {"a": value, "b": (value,)}
    arguments = {"n_envs": 1, "total_timesteps": 64, "eval_freq": 32, "n_eval_episodes": 1}
    if replays:
        model: Any = DQN(net_arch=[8])
        data: Any = ReplayDataModule(lambda: Fixed(space, value), learning_starts=32, rollouts_per_epoch=8, **arguments)
    else:
        model = PPO(net_arch=[8])
        data = RolloutDataModule(lambda: Fixed(space, value), n_steps=32, **arguments)
    trainer = fit(model, data)
    assert trainer.callback_metrics["eval/mean_reward"] == 20


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (0,)), spaces.Dict(a=spaces.Box(-1, 1, (2, 0)))], ids=str)
def test_an_observation_without_entries_is_refused(space: spaces.Space) -> None:
    data = RolloutDataModule(lambda: Fixed(space, None), n_steps=32, total_timesteps=64)
    with pytest.raises(UsageError, match=r"has the observation_space .*, which has no entries; give one .*Box\(0, 1"):
        fit(PPO(net_arch=[8]), data)


def test_an_observation_of_a_mask_alone_is_refused() -> None:
    class Masked(Fixed):
        action_space = spaces.Discrete(3)  # type: ignore[assignment]

    space = spaces.Dict(action_mask=spaces.MultiBinary(3))
    data = RolloutDataModule(lambda: Masked(space, {"action_mask": np.ones(3, np.int8)}), n_steps=32)
    with pytest.raises(UsageError, match="which has no entries beside its action_mask; give one that holds"):
        fit(PPO(net_arch=[8]), data)


def test_an_action_without_entries_is_refused() -> None:
    class NoAction(Fixed):
        action_space = spaces.Box(-1, 1, (0,))  # type: ignore[assignment]

    data = RolloutDataModule(lambda: NoAction(PARTS["box"], None), n_steps=32, total_timesteps=64)
    with pytest.raises(UsageError, match=r"has the action_space .*, which has no entries"):
        fit(PPO(net_arch=[8]), data)


def test_a_part_of_a_dict_may_have_no_entries() -> None:
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(-1, 1, (0,)))
    value = {"a": np.zeros(2, np.float32), "b": np.zeros(0, np.float32)}
    data = RolloutDataModule(lambda: Fixed(space, value), n_envs=1, n_steps=32, total_timesteps=32, eval_freq=0)
    assert fit(PPO(net_arch=[8]), data).global_step > 0
