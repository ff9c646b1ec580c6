"""Returns and lengths of finished episodes against a list of rewards per episode."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.envs.vector import make_vector_env
from datamodules.episode_statistics import EpisodeStatistics, successes
from rl_modules.common.errors import UsageError


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6), n_envs=st.integers(1, 3), ends=st.sampled_from([0.0, 0.1, 0.5]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
)  # fmt: skip
def test_rollouts_of_any_length_add_up_to_episodes(seed: int, n_envs: int, ends: float, lengths: list[int]) -> None:
    """Rows that are no transitions, as the resets of ``next_step``, count for nothing."""
    rng = np.random.default_rng(seed)
    statistics = EpisodeStatistics(n_envs, window=3)
    heard: list[tuple[float, int]] = []
    statistics.on_finished = lambda total, length: heard.append((total, length))
    running: list[list[float]] = [[] for _ in range(n_envs)]
    finished: list[tuple[float, int]] = []
    known: list[float] = []
    said = False
    for length in lengths:
        reward = rng.normal(size=(length, n_envs))
        valid = rng.random((length, n_envs)) < 0.8
        done = valid & (rng.random((length, n_envs)) < ends)
        successes = rng.choice([0.0, 1.0, None], size=length % 3).tolist()  # type: ignore[arg-type]
        statistics.update(reward, done, valid, [[one] for one in successes])
        known += [one or 0.0 for one in successes]
        said = said or any(one is not None for one in successes)
        for t in range(length):
            for i in range(n_envs):
                if valid[t, i]:
                    running[i].append(reward[t, i])
                if done[t, i]:
                    finished.append((sum(running[i]), len(running[i])))
                    running[i] = []
    assert statistics.running_return == pytest.approx([sum(rewards) for rewards in running])
    assert statistics.running_length.tolist() == [len(rewards) for rewards in running]
    assert [length for _, length in heard] == [length for _, length in finished]
    assert [total for total, _ in heard] == pytest.approx([total for total, _ in finished])
    means = {}
    if finished:
        means = dict(zip(("rollout/ep_rew_mean", "rollout/ep_len_mean"), np.mean(finished[-3:], 0), strict=True))
    if said:
        means["rollout/success_rate"] = np.mean(known[-3:])
    assert statistics.means() == pytest.approx(means)


def test_the_success_rate_falls_to_0_and_stays_where_the_window_has_lost_the_last_success() -> None:
    """Episodes of one step, of which the first says that it succeeded and the others say nothing."""
    statistics, one = EpisodeStatistics(1, window=2), np.ones((1, 1), bool)
    assert "rollout/success_rate" not in statistics.means()
    rates = []
    for said in (1.0, None, None):
        statistics.update(one.astype(float), one, one, [[said]])
        rates.append(statistics.means()["rollout/success_rate"])
    assert rates == [1.0, 0.5, 0.0]
    resumed = EpisodeStatistics(1, window=2)
    resumed.load_state_dict(statistics.state_dict())
    assert resumed.means() == statistics.means()


class Says(gym.Env):
    """Episodes of one step, which end with ``is_success`` as given."""

    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(2)

    def __init__(self, value: Any) -> None:
        self.value = value

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 1.0, True, False, {"is_success": self.value}


def said(values: list[Any], mode: str) -> dict[int, float | None]:
    envs = make_vector_env(lambda: Says(values.pop(0)), len(values), autoreset_mode=mode)
    envs.reset(seed=0)
    _, _, terminated, truncated, info = envs.step(np.zeros(envs.num_envs, int))
    return successes(terminated | truncated, info)


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (np.array([True]), 1.0), (np.array([[0.0]]), 0.0), (np.bool_(False), 0.0), (None, None)],
    ids=repr,
)
def test_success_may_be_an_array_of_one_element_or_not_known(value: Any, number: float | None, mode: str) -> None:
    """As in Stable-Baselines3, which takes both."""
    assert said([value, value], mode) == {0: number, 1: number}
    assert said([None, value, None], mode) == {0: None, 1: number, 2: None}


@pytest.mark.parametrize("value", [np.array([True, False]), "yes", {"a": 1}], ids=repr)
def test_success_of_another_kind_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(UsageError, match="is_success=.* at the end of an episode; it must be true or false, or None"):
        said([value], "same_step")
