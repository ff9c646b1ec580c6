"""Returns and lengths of finished episodes against a list of rewards per episode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.episode_statistics import EpisodeStatistics


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
        statistics.update(reward, done, valid, successes)
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
        statistics.update(one.astype(float), one, one, [said])
        rates.append(statistics.means()["rollout/success_rate"])
    assert rates == [1.0, 0.5, 0.0]
    resumed = EpisodeStatistics(1, window=2)
    resumed.load_state_dict(statistics.state_dict())
    assert resumed.means() == statistics.means()
