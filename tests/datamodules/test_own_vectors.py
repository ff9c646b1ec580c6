"""Vectors of environments that a user's callable makes."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.envs.vector import make_vector_env
from datamodules.evaluation import run_episodes
from rl_modules import DQN, PPO, SARSA, MonteCarlo, QLearning
from rl_modules.common.errors import UsageError
from tests.training import fit


def make_engine() -> VectorEnv:
    """Gymnasium's own, which takes one seed and no list."""
    return CartPoleVectorEnv(num_envs=4)


def make_plain(n: int = 3) -> VectorEnv:
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * n, autoreset_mode=AutoresetMode.SAME_STEP)


# ---------------------------------------------------------------- evaluation


def test_an_engine_is_evaluated() -> None:
    data = RolloutDataModule(make_engine, total_timesteps=128, n_steps=32, eval_freq=128, n_eval_episodes=6)
    model = PPO(net_arch=[8])
    trainer = fit(model, data)
    first = trainer.callback_metrics["eval/mean_reward"]
    assert first == trainer.callback_metrics["eval/mean_ep_length"] > 1
    assert trainer.validate(model, datamodule=data, verbose=False)[0]["eval/mean_reward"] == float(first)


@pytest.mark.long
def test_environments_in_other_processes_go_on() -> None:
    """A worker that is asked for an attribute that its environment lacks ends."""

    def make() -> VectorEnv:
        return AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    data = RolloutDataModule(make, total_timesteps=32, n_steps=16, eval_freq=32, n_eval_episodes=2, eval_max_steps=500)
    trainer = fit(PPO(net_arch=[8]), data)
    assert data.num_timesteps == 32 and trainer.callback_metrics["eval/mean_ep_length"] > 1


class Follows:
    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.zeros(len(observation), np.int64), state


def test_the_first_seed_is_that_of_the_vector() -> None:
    """As one that is stepped by hand from the same seed."""
    envs = make_engine()
    envs.reset(seed=5)
    lengths = np.zeros(4)
    over = np.zeros(4, bool)
    while not over.all():
        _, _, terminated, truncated, _ = envs.step(np.zeros(4, np.int64))
        lengths += ~over
        over |= terminated | truncated
    got = run_episodes(Follows(), make_engine(), [5, 6, 7, 8], n_episodes=4)
    assert got["length"].tolist() == lengths.tolist()


def test_only_seeds_that_repeat_an_episode_are_returned() -> None:
    assert "seed" not in run_episodes(Follows(), make_plain(), [4, 5, 6], n_episodes=5)
    assert "seed" not in run_episodes(Follows(), make_engine(), [4, 5, 6, 7], n_episodes=5)
    assert "seed" in run_episodes(Follows(), make_vector_env("CartPole-v1", 2), [4, 5], n_episodes=5)


class Closes(gym.Env):
    """Five steps with one allowed action each; none is where the episode has ended, as nobody acts there."""

    observation_space = spaces.Dict({"observation": spaces.Box(0, 9, (1,)), "action_mask": spaces.MultiBinary(2)})
    action_space = spaces.Discrete(2)

    def _observation(self) -> Any:
        mask = np.arange(2) == self.t % 2 if self.t < 5 else np.zeros(2)
        return {"observation": np.array([self.t], np.float32), "action_mask": mask.astype(np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        assert action == self.t % 2
        self.t += 1
        return self._observation(), 1.0, self.t == 5, False, {}


def test_an_ended_episode_needs_no_allowed_action() -> None:
    data = RolloutDataModule(partial(SyncVectorEnv, [Closes] * 2), total_timesteps=32, n_steps=16, n_eval_episodes=3)
    trainer = fit(PPO(net_arch=[8]), data)
    (result,) = trainer.validate(trainer.lightning_module, datamodule=data, verbose=False)
    assert result["eval/mean_reward"] == result["eval/mean_ep_length"] == 5


class ClosesAtALimit(Closes):
    """The same as states of a table, and a time limit of its own ends the episode."""

    observation_space = spaces.Dict({"observation": spaces.Discrete(6), "action_mask": spaces.MultiBinary(2)})

    def _observation(self) -> Any:
        return {**super()._observation(), "observation": self.t}

    def step(self, action: Any) -> Any:
        *rest, ended, _, info = super().step(action)
        return *rest, False, ended, info


@pytest.mark.parametrize(
    "make_module", [MonteCarlo, QLearning, partial(QLearning, double=True), SARSA, partial(SARSA, expected=True)]
)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_tables_bootstrap_from_a_state_that_allows_nothing(make_module: Any, mode: AutoresetMode) -> None:
    module = make_module()
    fit(
        module, RolloutDataModule(partial(SyncVectorEnv, [ClosesAtALimit] * 2, autoreset_mode=mode), total_timesteps=64)
    )
    assert module.q[4, 0] > 0
    assert module.greedy_policy()[:5].argmax(1).tolist() == [0, 1, 0, 1, 0]


class SaysNoMore(gym.Env):
    """State 1 forbids action 1 and is worth -10; the episode is cut off there, with a mask that allows nothing.

    Args:
        source: where the mask is.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, source: str = "info") -> None:
        self.source = source
        self.observation_space: Any = spaces.Discrete(2)
        if source == "observation":
            self.observation_space = spaces.Dict(
                {"observation": spaces.Discrete(2), "action_mask": spaces.MultiBinary(2)}
            )

    def _shown(self, over: bool) -> Any:
        mask = np.array([0, 0] if over else [1, 1 - self.state], np.int8)
        if self.source == "observation":
            return {"observation": self.state, "action_mask": mask}, {}
        return self.state, {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return self._shown(False)

    def step(self, action: Any) -> Any:
        assert action == 0 or self.state == 0
        over, self.state = bool(self.state == 0 or self.np_random.random() < 0.1), 1
        observation, info = self._shown(over)
        return observation, -1.0, False, over, info


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("source", ["info", "observation"])
@pytest.mark.parametrize("make_module", [QLearning, partial(SARSA, expected=True)])
def test_tables_know_what_a_state_forbids_after_a_mask_that_says_nothing(
    make_module: Any, source: str, mode: str
) -> None:
    module = make_module(gamma=0.5, learning_rate=0.5)
    data = RolloutDataModule(
        partial(SaysNoMore, source), n_envs=1, autoreset_mode=mode, total_timesteps=400, eval_freq=0
    )
    fit(module, data)
    # -1 / (1 - γ) in state 1, and the same from state 0: nothing of the forbidden action's 0.
    np.testing.assert_allclose([*module.q[0], module.q[1, 0]], -2, atol=0.05)
    assert module.tables.allowed[1].tolist() == [True, False]


def test_predict_acts_for_an_ended_episode_among_others() -> None:
    module = PPO(net_arch=[8])
    fit(module, RolloutDataModule(Closes, n_envs=2, total_timesteps=32, n_steps=16, eval_freq=0))
    envs = SyncVectorEnv([Closes] * 2)
    observation, _ = envs.reset()
    for t in range(12):  # the sixth step resets
        action, _ = module.predict(observation, deterministic=True)
        assert t % 6 == 5 or (action == t % 6 % 2).all()
        observation, *_ = envs.step(action)
    with pytest.raises(UsageError, match="allows no action"):
        module.predict({"observation": np.zeros(1, np.float32), "action_mask": np.zeros(2)})


class FloatMasks(Closes):
    """Masks as RLlib's examples have them."""

    observation_space = spaces.Dict(
        {"observation": spaces.Box(0, 5, (1,), np.float32), "action_mask": spaces.Box(0, 1, (2,), np.float32)}
    )

    def _observation(self) -> Any:
        return {name: part.astype(np.float32) for name, part in super()._observation().items()}


def test_normalised_observations_leave_masks_of_floats_as_they_are() -> None:
    make = partial(SyncVectorEnv, [FloatMasks] * 2)
    data = RolloutDataModule(make, total_timesteps=64, n_steps=16, norm_obs=True)
    fit(PPO(net_arch=[8]), data)  # the environment fails where the policy takes what is forbidden
    assert set(data.rollout["observation"]["action_mask"].unique().tolist()) == {0.0, 1.0}


class Halves(VectorEnv):
    """Begins at 0, a whole number, and shows halves afterwards; the fourth step ends an episode, by 1, not by True."""

    num_envs = 2
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space, single_action_space = spaces.Box(-10, 10, (1,), np.float32), spaces.Discrete(2)
    observation_space, action_space = spaces.Box(-10, 10, (2, 1), np.float32), spaces.MultiDiscrete([2, 2])

    def __init__(self, as_tensors: bool = False) -> None:
        self.converted: Any = torch.as_tensor if as_tensors else np.asarray

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return self.converted(np.zeros((2, 1), np.int64)), {}

    def step(self, actions: Any) -> Any:
        self.t = self.t + 1 if self.t < 4 else 0
        ended = np.full(2, self.t == 4, np.int64)
        parts = np.full((2, 1), self.t / 2), np.full(2, float(self.t > 0)), ended, np.zeros(2, np.int64)
        return *map(self.converted, parts), {}


@pytest.mark.parametrize("as_tensors", [False, True])
def test_observations_and_ends_keep_their_meaning_whatever_their_dtype(as_tensors: bool) -> None:
    seen: list[Any] = []

    class Watched(PPO):
        def prepare(self, rollout: Any) -> Any:
            seen.append(rollout["observation"][:, 0, 0].tolist())
            return super().prepare(rollout)

    data = RolloutDataModule(
        partial(Halves, as_tensors), n_steps=9, total_timesteps=14, eval_freq=14, n_eval_episodes=2
    )
    results = fit(Watched(net_arch=[8]), data).callback_metrics
    assert seen == [[0.0, 0.5, 1.0, 1.5, 2.0, 0.0, 0.5, 1.0, 1.5]]
    assert results["eval/mean_ep_length"] == results["eval/mean_reward"] == 4.0


# ---------------------------------------------------------------- batch_size


class Tells(gym.Env):
    """Says which actions it allows in its infos."""

    observation_space, action_space = spaces.Discrete(3), spaces.Discrete(2)
    info: ClassVar[dict[str, Any]] = {"action_mask": np.array([1, 0], np.int8)}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return 0, self.info

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, self.info


class Permits(Tells):
    """Says so by sb3-contrib's method."""

    info: ClassVar[dict[str, Any]] = {}

    def action_masks(self) -> list[bool]:
        return [True, False]


@pytest.mark.long
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize(("make_one", "where"), [(Tells, "in its infos"), (Permits, "by the method action_masks")])
def test_masks_that_are_not_read_are_named(kind: Any, make_one: Any, where: str) -> None:
    def make() -> VectorEnv:
        return kind([make_one] * 2)

    common: Any = {"total_timesteps": 16, "n_steps": 8, "eval_freq": 0}
    with pytest.warns(UserWarning, match=f"gives action masks {where}.*the policy acts without masks"):
        fit(PPO(net_arch=[8]), RolloutDataModule(make, **common))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*action masks")
        fit(PPO(net_arch=[8]), RolloutDataModule(make, action_masks=False, **common))
        fit(PPO(net_arch=[8]), RolloutDataModule(lambda: kind([Closes] * 2), **common))


@pytest.mark.long
@pytest.mark.parametrize("make", [make_plain, f"{__name__}:make_plain"])
def test_batch_size_is_compared_with_the_vectors_own_number(make: Any) -> None:
    """3 × 32 = 96 transitions, which 24, 48 and 96 divide; none divides the 8 × 32 of the default."""
    for size in (24, 96, 48):
        data = RolloutDataModule(make, n_steps=32, batch_size=size, total_timesteps=96, eval_freq=0)
        model = PPO(net_arch=[8], log_every=1)
        fit(model, data)
        assert data.batch_size == size and model.trainer.global_step == 10 * 96 // size


def test_a_batch_size_of_0_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=0 must be at least 1"):
        RolloutDataModule(make_plain, n_steps=32, batch_size=0)


# ---------------------------------------------------------------- final observations


class Counts(VectorEnv):
    """Two counters that are truncated at 5 and reset in the same step; final observations under ``key``."""

    def __init__(self, space: str = "box", key: str | None = "final_obs") -> None:
        self.num_envs, self.key, self.kind = 2, key, space
        box = spaces.Box(-10, 10, (1,), np.float32)
        self.single_observation_space = {
            "box": box, "dict": spaces.Dict({"a": box, "b": spaces.Dict({"c": box})}), "tuple": spaces.Tuple([box, box])
        }[space]  # fmt: skip
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, 2)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def _observation(self) -> Any:
        x = self.t[:, None].astype(np.float32)
        return {"box": x, "dict": {"a": x, "b": {"c": -x}}, "tuple": (x, -x)}[self.kind]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = np.array([0, 2])
        return self._observation(), {}

    def step(self, actions: Any) -> Any:
        self.t = self.t + 1
        done = self.t >= 5
        info = {self.key: self._observation()} if done.any() and self.key else {}
        self.t = np.where(done, 0, self.t)
        return self._observation(), np.ones(2), np.zeros(2, bool), done, info


def first_rollout(make_vector: Any) -> Any:
    """What PPO learns from first, 12 steps of a user's vector."""
    seen: list[Any] = []

    class Watched(PPO):
        def prepare(self, rollout: Any) -> Any:
            seen.append(rollout)
            return super().prepare(rollout)

    fit(Watched(net_arch=[8]), RolloutDataModule(make_vector, n_steps=12, total_timesteps=24, eval_freq=0))
    return seen[0]


@pytest.mark.parametrize("space", ["box", "dict", "tuple"])
def test_a_batch_of_final_observations_is_taken_apart(space: str) -> None:
    rollout = first_rollout(partial(Counts, space))
    parts = {"box": lambda o: [(1, o)], "dict": lambda o: [(1, o["a"]), (-1, o["b"]["c"])],
             "tuple": lambda o: [(1, o["0"]), (-1, o["1"])]}[space]  # fmt: skip
    pairs = zip(parts(rollout["observation"]), parts(rollout["next_observation"]), strict=True)
    for (sign, before), (_, after) in pairs:
        assert torch.equal(after * sign, before * sign + 1)
        assert (after * sign).max() == 5


class CountsInPlace(Counts):
    """Writes every batch of final observations into the same memory."""

    def step(self, actions: Any) -> Any:
        *returned, info = super().step(actions)
        if "final_obs" in info:
            self.final[:] = info["final_obs"]
            info = {"final_obs": self.final}
        return *returned, info

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.final = np.zeros((2, 1), np.float32)
        return super().reset(seed=seed, options=options)


def test_final_observations_outlive_the_memory_they_came_in() -> None:
    rollout = first_rollout(CountsInPlace)
    assert torch.equal(rollout["next_observation"], rollout["observation"] + 1)


class WalksInPlace(gym.Env):
    """Returns its state itself, which the next reset overwrites.

    Args:
        copies: return a copy of the state instead.
        constant: an array beside it that never changes.
    """

    action_space = spaces.Discrete(2)
    box = spaces.Box(0, 9, (1,), np.float32)

    def __init__(self, copies: bool = False, constant: bool = False) -> None:
        self.state, self.map = np.zeros(1, np.float32), np.ones(1, np.float32)
        self.copies, self.constant = copies, constant
        self.observation_space: Any = spaces.Dict({"at": self.box, "map": self.box}) if constant else self.box

    def _observation(self) -> Any:
        state = self.state.copy() if self.copies else self.state
        return {"at": state, "map": self.map} if self.constant else state

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.state[:] = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.state += 1
        return self._observation(), 1.0, False, bool(self.state[0] == 5), {}


@pytest.mark.parametrize("constant", [False, True])
def test_an_environment_that_returns_its_own_array_is_named_where_a_reset_overwrites_it(constant: bool) -> None:
    vector = partial(SyncVectorEnv, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(UsageError, match=r"same array in every step.*return a copy"):
        first_rollout(lambda: vector([partial(WalksInPlace, constant=constant)] * 2))
    rollouts = [
        first_rollout(lambda: vector([partial(WalksInPlace, True, constant)] * 2)),  # copies
        first_rollout(lambda: SyncVectorEnv([partial(WalksInPlace, constant=constant)] * 2)),  # resets in the next step
        first_rollout(partial(WalksInPlace, constant=constant)),  # a vector of this project
    ]
    for rollout in rollouts:
        before, after = (
            rollout[name]["at"] if constant else rollout[name] for name in ("observation", "next_observation")
        )
        assert torch.equal(after[rollout["valid"]], before[rollout["valid"]] + 1)


@pytest.mark.parametrize("key", [None, "final_observation"])
@pytest.mark.parametrize(("module", "make_data"), [
    (PPO, partial(RolloutDataModule, n_steps=12)), (DQN, partial(ReplayDataModule, learning_starts=8))
])  # fmt: skip
def test_missing_final_observations_are_named(key: str | None, module: Any, make_data: Callable[..., Any]) -> None:
    data = make_data(partial(Counts, "box", key), total_timesteps=24, eval_freq=0)
    with pytest.raises(UsageError, match="resets in the step in which an episode ends, and its infos have no final_ob"):
        fit(module(net_arch=[8]), data)


# ---------------------------------------------------------------- ways of resetting


class SaysNothing(Counts):
    """Resets in the same step, as vectors written by hand do, and does not say so."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.metadata = metadata


def test_infos_that_are_a_list_are_named() -> None:
    """As Gymnasium's wrapper DictInfoToList returns them, at a reset too."""
    data = RolloutDataModule(
        lambda: gym.wrappers.vector.DictInfoToList(make_plain()), total_timesteps=30, n_steps=10, batch_size=30
    )
    with pytest.raises(UsageError, match="must return observations, .* and a dictionary of infos, not"):
        fit(PPO(net_arch=[8]), data)


def test_a_vector_that_does_not_say_when_it_resets_is_named() -> None:
    """Its final observations are not read: what follows an episode's end counts as a reset."""
    with pytest.warns(UserWarning, match="SaysNothing has no metadata.*NEXT_STEP.*SAME_STEP there if"):
        rollout = first_rollout(partial(SaysNothing, {}))
    assert not rollout["valid"].all()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*autoreset_mode")
        rollout = first_rollout(partial(SaysNothing, {"autoreset_mode": AutoresetMode.SAME_STEP}))
    assert rollout["valid"].all()


def test_a_way_of_resetting_is_a_member_of_gymnasiums() -> None:
    with pytest.raises(UsageError, match=r"autoreset_mode'\]='SameStep'; it must be a member of"):
        first_rollout(partial(SaysNothing, {"autoreset_mode": "SameStep"}))
