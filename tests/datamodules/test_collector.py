import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from datamodules.collector import Collector
from datamodules.envs.episodes import SeededEpisodes, episode_seed
from datamodules.envs.vector import make_vector_env
from datamodules.normalization import Normalizers, ObservationNormalizer, RewardNormalizer
from rl_modules.common.errors import UsageError
from tests.datamodules.envs import Counter, Forgetful, Suicidal

CPU = torch.device("cpu")


def act(observation, generator):
    """Random actions; the 'value' of a state is a number that identifies it."""
    n = len(observation)
    action = torch.randint(2, (n,), generator=generator)
    return {"action": action, "value": observation[:, 0] * 100 + observation[:, 1]}


def make(env=Counter, n_envs=3, mode="same_step", vectorization="sync", **kwargs):
    envs = make_vector_env(env, n_envs, vectorization, mode, env_kwargs=kwargs.pop("env_kwargs", None))
    return Collector(envs, streams=list(range(10, 10 + n_envs)), generator_seed=1, name="test", **kwargs)


def valid_transitions(rollouts, env):
    """One environment's real transitions in order, as plain tuples."""
    keys = ("observation", "reward", "terminated", "truncated", "next_observation", "value", "next_value")
    rows = []
    for rollout in rollouts:
        for t in range(len(rollout["reward"])):
            if rollout["valid"][t, env]:
                rows.append(tuple(np.asarray(rollout[key][t, env]).tolist() for key in keys))
    return rows


def test_three_autoreset_modes_and_async_give_the_same_transitions():
    rows = {}
    for mode, vectorization in (
        ("same_step", "sync"),
        ("next_step", "sync"),
        ("disabled", "sync"),
        ("same_step", "async"),
    ):
        collector = make(mode=mode, vectorization=vectorization)
        # NEXT_STEP spends a row on each reset, so it needs more of them for as many transitions.
        rollouts = [collector.collect(act, 13, CPU) for _ in range(3)]
        rows[mode, vectorization] = [valid_transitions(rollouts, i)[:30] for i in range(3)]
        collector.envs.close()
    reference = rows["same_step", "sync"]
    assert all(len(each) == 30 for each in reference)
    for name, other in rows.items():
        # The last row of a rollout depends on where it was cut, in nothing but float rounding: the values are exact.
        assert other == reference, name


def test_rows_follow_the_environment():
    collector = make(n_envs=8)
    rollout = collector.collect(act, 12, CPU)
    seen_truncation = seen_termination = False
    for i in range(8):
        for t in range(12):
            start, count = rollout["observation"][t, i].tolist()
            assert rollout["reward"][t, i] == count + 1
            # The successor is that of this episode, at its end too, where the next row shows the next episode.
            assert rollout["next_observation"][t, i].tolist() == [start, count + 1]
            assert rollout["next_value"][t, i] == start * 100 + count + 1
            over = bool(rollout["terminated"][t, i] or rollout["truncated"][t, i])
            assert over == (count == 4)
            seen_truncation |= bool(rollout["truncated"][t, i])
            seen_termination |= bool(rollout["terminated"][t, i])
    assert seen_truncation
    assert seen_termination


def test_next_step_engine_marks_reset_rows():
    collector = make(mode="next_step", n_envs=1)
    valid = collector.collect(act, 12, CPU)["valid"][:, 0].tolist()
    assert valid == [True] * 5 + [False] + [True] * 5 + [False]


def test_episode_statistics_count_valid_rows_only():
    for mode in ("same_step", "next_step"):
        collector = make(mode=mode, n_envs=2)
        collector.collect(act, 12, CPU)
        assert set(collector.episodes.returns) == {1.0 + 2 + 3 + 4 + 5}
        assert set(collector.episodes.lengths) == {5}


def test_every_episode_has_the_seed_of_its_stream_and_number():
    env = SeededEpisodes(Counter())
    starts = [env.reset(seed=77)[0][0]] + [env.reset()[0][0] for _ in range(3)]
    bare = Counter()
    assert starts == [bare.reset(seed=episode_seed(77, k))[0][0] for k in range(4)]
    assert len(set(starts)) == 4


class DrawsFromItsSpaces(gym.Env):
    """As Stable-Baselines3's identity environments do: what happens comes from the spaces' own generators."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(50)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(self.action_space.sample()), False, False, {}


def test_an_environment_that_draws_from_its_spaces_is_seeded_and_can_be_brought_back():
    first, again, other = (SeededEpisodes(DrawsFromItsSpaces()) for _ in range(3))
    streams = []
    for env, seed in ((first, 5), (again, 5), (other, 6)):
        env.reset(seed=seed)
        episode = [env.reset()[0].tolist(), *(env.step(0)[1] for _ in range(8))]
        streams.append(episode)
    assert streams[0] == streams[1] != streams[2]
    state = first.episode_state
    expected = [first.step(0)[1] for _ in range(5)]
    other.episode_state = state
    assert [other.step(0)[1] for _ in range(5)] == expected


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_resumed_collector_continues_bit_for_bit(vectorization):
    normalizers = lambda: {  # noqa: E731
        "normalizers": Normalizers(ObservationNormalizer(Counter.observation_space), RewardNormalizer(3, 0.9))
    }
    straight = make(vectorization=vectorization, **normalizers())
    straight.collect(act, 7, CPU)
    state = straight.state_dict()
    expected = straight.collect(act, 9, CPU)
    resumed = make(vectorization=vectorization, **normalizers())
    resumed.load_state_dict(state, CPU)
    got = resumed.collect(act, 9, CPU)
    straight.envs.close()
    resumed.envs.close()
    assert expected.keys() == got.keys()
    for key in expected:
        assert torch.equal(expected[key], got[key]), key
    assert list(straight.episodes.returns) == list(resumed.episodes.returns)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_run_resumes_between_the_end_of_an_episode_and_its_reset(vectorization):
    straight = make(mode="next_step", vectorization=vectorization)
    straight.collect(act, 5, CPU)
    state = straight.state_dict()
    assert state["resets_next"]["numpy.ndarray"].all()
    resumed = make(mode="next_step", vectorization=vectorization)
    resumed.load_state_dict(state, CPU)
    expected, got = straight.collect(act, 8, CPU), resumed.collect(act, 8, CPU)
    for key in expected:
        assert torch.equal(expected[key], got[key]), key
    assert got["valid"][:, 0].tolist() == [False] + [True] * 5 + [False, True]
    assert list(resumed.episodes.lengths) == [5] * 6
    for collector in (straight, resumed):
        collector.envs.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_where_one_episode_is_begun_anew_the_others_still_reset(vectorization):
    collector = make(mode="next_step", vectorization=vectorization)
    collector.collect(act, 5, CPU)
    state = collector.state_dict()
    state["running"][1]["actions"] = state["running"][1]["actions"][:3]  # leads to another observation
    resumed = make(mode="next_step", vectorization=vectorization)
    with pytest.warns(UserWarning, match=r"environments \[1\] start a new episode"):
        resumed.load_state_dict(state, CPU)
    valid = resumed.collect(act, 7, CPU)["valid"].T.tolist()
    assert valid == [[False] + [True] * 5 + [False], [True] * 5 + [False, True], [False] + [True] * 5 + [False]]
    for each in (collector, resumed):
        each.envs.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_episode_that_is_begun_anew_in_place_of_a_reset_is_not_reset_again(vectorization):
    collector = make(env=Forgetful, n_envs=2, mode="next_step", vectorization=vectorization)
    collector.collect(act, 5, CPU)
    state = collector.state_dict()
    assert state["resets_next"]["numpy.ndarray"].all()
    resumed = make(env=Forgetful, n_envs=2, mode="next_step", vectorization=vectorization)
    with pytest.warns(UserWarning, match=r"environments \[0, 1\] start a new episode"):
        resumed.load_state_dict(state, CPU)
    rollout = resumed.collect(act, 6, CPU)
    for key, values in (("valid", [True] * 5 + [False]), ("reward", [1.0, 2.0, 3.0, 4.0, 5.0, 0.0])):
        assert rollout[key].T.tolist() == [values] * 2, key
    assert (rollout["next_observation"][:5, :, 1] == torch.arange(1.0, 6.0)[:, None]).all()
    assert list(resumed.episodes.lengths) == [5, 5, 5, 5]
    for each in (collector, resumed):
        each.envs.close()


def test_an_episode_that_is_begun_anew_has_a_discounted_return_of_its_own():
    make_normalized = lambda: make(  # noqa: E731
        env=Forgetful, n_envs=2, normalizers=Normalizers(None, RewardNormalizer(2, 0.5))
    )
    collector = make_normalized()
    collector.collect(act, 3, CPU)
    resumed = make_normalized()
    with pytest.warns(UserWarning, match="start a new episode"):
        resumed.load_state_dict(collector.state_dict(), CPU)
    resumed.collect(act, 2, CPU)
    assert resumed.normalizers.of_rewards.returns.tolist() == [0.5 * 1.0 + 2.0] * 2  # rewards are 1, 2, …


class SameInfo(Counter):
    """Returns one dictionary from every call."""

    def __init__(self):
        super().__init__(length=4)
        self.info = {}

    def reset(self, *, seed=None, options=None):
        self.info["is_success"] = False
        return super().reset(seed=seed)[0], self.info

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        self.info["is_success"] = self.count >= 4
        return observation, reward, terminated, truncated, self.info


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_success_is_that_of_the_last_step_where_the_reset_overwrites_it(vectorization):
    collector = make(env=SameInfo, n_envs=2, vectorization=vectorization)
    collector.collect(act, 9, CPU)
    collector.close()
    assert list(collector.episodes.successes) == [1.0] * 4


class InArrays(Counter):
    """Returns arrays of as many elements as asked in place of numbers."""

    def __init__(self, size=1):
        super().__init__()
        self.size = size

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.full(self.size, reward), np.array([terminated]), np.array([truncated]), info


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_rewards_and_ends_may_be_arrays_of_one_element(vectorization):
    collector = make(env=InArrays, vectorization=vectorization)
    expected = make().collect(act, 7, CPU)
    got = collector.collect(act, 7, CPU)
    collector.close()
    for key in ("reward", "terminated", "truncated"):
        assert torch.equal(got[key], expected[key]), key


def test_rewards_of_several_numbers_are_refused_in_one_sentence():
    with pytest.raises(UsageError, match="test raised ValueError: can only convert an array of size 1"):
        make(env=InArrays, env_kwargs={"size": 2}).collect(act, 2, CPU)


class Pushed(gym.Env):
    """A place that is pushed by half of each action; the environment halves the array that it was given."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.zeros(2, np.float32)
        return self.place.copy(), {}

    def step(self, action):
        action *= 0.5
        self.place += action
        return self.place.copy(), 1.0, False, False, {}


def test_an_episode_is_repeated_where_the_environment_changes_actions_in_place():
    def push(observation, generator):
        return {"action": torch.rand(len(observation), 2, generator=generator)}

    straight, resumed = (make(env=Pushed, n_envs=2) for _ in range(2))
    rollout = straight.collect(push, 6, CPU)
    torch.testing.assert_close(rollout["next_observation"][-1], rollout["action"].sum(0) / 2)
    resumed.load_state_dict(straight.state_dict(), CPU)
    assert not resumed.begun_anew.any()
    expected, got = straight.collect(push, 6, CPU), resumed.collect(push, 6, CPU)
    assert torch.equal(expected["observation"], got["observation"])


def test_episode_that_cannot_be_repeated_is_begun_anew_and_says_so():
    collector = make(env=Forgetful, n_envs=2)
    collector.collect(act, 7, CPU)
    state = collector.state_dict()
    resumed = make(env=Forgetful, n_envs=2)
    with pytest.warns(UserWarning, match=r"environments \[0, 1\] start a new episode, because repeating"):
        resumed.load_state_dict(state, CPU)
    rollout = resumed.collect(act, 1, CPU)
    assert rollout["observation"][0, :, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_task_without_end_keeps_few_actions_and_is_begun_anew(vectorization, monkeypatch):
    monkeypatch.setattr("datamodules.envs.episodes.LONGEST", 100)
    make_long = lambda: make(n_envs=2, vectorization=vectorization, env_kwargs={"length": 1000})  # noqa: E731
    collector = make_long()
    collector.collect(act, 100, CPU)
    exact = collector.state_dict()
    assert [len(episode["actions"]) for episode in exact["running"]] == [100, 100]
    following = collector.collect(act, 30, CPU)
    beyond = collector.state_dict()
    assert [episode["actions"] for episode in beyond["running"]] == [None, None]
    resumed = make_long()
    resumed.load_state_dict(exact, CPU)
    assert torch.equal(resumed.collect(act, 30, CPU)["observation"], following["observation"])
    anew = make_long()
    with pytest.warns(UserWarning, match=r"environments \[0, 1\] start a new episode, because its episode has"):
        anew.load_state_dict(beyond, CPU)
    assert anew.begun_anew.all()
    starts = anew.collect(act, 1, CPU)["observation"][0]
    assert (starts[:, 1] == 0).all() and (starts[:, 0] != following["observation"][0, :, 0]).all()
    assert anew.envs.get_attr("episode_state")[0]["episode"] == 1
    for each in (collector, resumed, anew):
        each.close()


@pytest.mark.parametrize(
    "space", [spaces.Discrete(5), spaces.Box(-1, 1, (6,), np.float32), spaces.MultiDiscrete([3, 4])]
)
def test_actions_take_the_memory_of_their_numbers(space):
    env = SeededEpisodes(gym.wrappers.TransformAction(Counter(length=10**6), lambda action: 0, space))
    env.reset(seed=1)
    actions = [space.sample() for _ in range(3000)]
    tracemalloc.start()
    for action in actions:
        env.step(action)
    kept = sum(
        x.size for x in tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*episodes.py")]).traces
    )
    tracemalloc.stop()
    assert kept < 2.5 * sum(np.asarray(action).nbytes for action in actions)
    np.testing.assert_array_equal(env.episode_state["actions"], np.array(actions))


def test_engine_without_state_begins_anew_and_says_so():
    def random(observation, generator):
        return {"action": torch.randint(2, (len(observation),), generator=generator)}

    make_engine = lambda: Collector(make_vector_env("CartPole-v1", 3, "vector_entry_point"), [5, 6, 7], 1, "test")  # noqa: E731
    collector = make_engine()
    assert collector.mode == AutoresetMode.NEXT_STEP
    rollout = collector.collect(random, 60, CPU)
    ended = (rollout["terminated"] | rollout["truncated"])[:-1]
    assert ended.any()
    assert torch.equal(~rollout["valid"][1:], ended)
    with pytest.warns(UserWarning, match="engine has no state"):
        make_engine().load_state_dict(collector.state_dict(), CPU)


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_nan_names_environment_and_row(what):
    collector = make(n_envs=2, env_kwargs={"bad_at": 3, "bad": what})
    with pytest.raises(UsageError, match=rf"environment 0 of test returned a NaN or infinite {what} in row [23]"):
        collector.collect(act, 4, CPU)


def test_nan_in_a_final_observation_is_found():
    collector = make(n_envs=2, env_kwargs={"bad_at": 5, "bad": "observation"})
    with pytest.raises(UsageError, match=r"environment 0 of test returned a NaN or infinite observation in row 4"):
        collector.collect(act, 6, CPU)


def test_dead_process_is_named():
    collector = make(env=Suicidal, n_envs=2, vectorization="async")
    with pytest.raises(UsageError, match=r"the process of environment .*0 \(exit code 7\).* of test died"):
        collector.collect(act, 6, CPU)
    collector.envs.close()
