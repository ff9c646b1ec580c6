"""Hindsight experience replay: goals that were reached later, their rewards, resume and what is refused."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import ReplayDataModule
from datamodules.envs.bit_flipping import BitFlipping
from datamodules.hindsight import HindsightReplayBuffer
from rl_modules import DQN, QRDQN, SAC, TD3
from rl_modules.common.errors import UsageError
from tests.training import assert_resumes_exactly, fit

GOAL = spaces.Box(-1.0, 1e6, (3,), np.float32)
SPACE = spaces.Dict({"observation": GOAL, "achieved_goal": GOAL, "desired_goal": GOAL})


def reward(achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
    """How far the achieved step is from the desired one."""
    return (achieved[:, 2] - desired[:, 2]).astype(np.float32)


class Recorded:
    """Rollouts in which every observation says where it is from: environment, episode, step."""

    def __init__(self, n_envs: int, lengths: list[int]) -> None:
        self.n_envs, self.lengths = n_envs, lengths
        self.episode, self.step = np.zeros(n_envs, int), np.zeros(n_envs, int)

    def observed(self, step_on: np.ndarray) -> dict[str, np.ndarray]:
        here = np.stack([np.arange(self.n_envs), self.episode, self.step + step_on], 1).astype(np.float32)
        return {"observation": here, "achieved_goal": here, "desired_goal": np.full_like(here, -1.0)}

    def rollout(self, n_steps: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for _ in range(n_steps):
            length = np.array([self.lengths[(e + i) % len(self.lengths)] for i, e in enumerate(self.episode)])
            row: dict[str, Any] = {"observation": self.observed(np.array(0)), "next_observation":
                                   self.observed(np.array(1)), "action": np.zeros(self.n_envs, np.int64),
                                   "reward": np.full(self.n_envs, -7.0, np.float32)}  # fmt: skip
            self.step += 1
            ended = self.step >= length
            row |= {"terminated": ended, "truncated": np.zeros(self.n_envs, bool), "valid": np.ones(self.n_envs, bool)}
            self.episode, self.step = self.episode + ended, np.where(ended, 0, self.step)
            rows.append(row)
        return stacked(rows)


def stacked(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {key: stacked([row[key] for row in rows]) for key in rows[0]}
    return torch.from_numpy(np.stack(rows))


def buffer(n_envs: int, rows: int, **arguments: Any) -> HindsightReplayBuffer:
    return HindsightReplayBuffer(SPACE, spaces.Discrete(2), n_envs, rows * n_envs, reward, **arguments)


def drawn(replay: HindsightReplayBuffer, times: int = 20) -> list[dict[str, Any]]:
    """Every transition in the buffer, several times."""
    index = replay.valid.nonzero().flatten().repeat(times)
    sample = replay.gather(index)
    names = ("observation", "next_observation")
    columns = {name: {key: x.tolist() for key, x in sample[name].items()} for name in names}
    rewards = sample["reward"].flatten().tolist()
    return [{**{name: {key: x[j] for key, x in columns[name].items()} for name in names}, "reward": rewards[j]}
            for j in range(len(index))]  # fmt: skip


@given(
    n_envs=st.integers(1, 3), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    parts=st.lists(st.integers(1, 8), min_size=1, max_size=8), rows=st.integers(20, 40),
    strategy=st.sampled_from(["future", "final", "episode"]),
)  # fmt: skip
def test_goals_are_those_that_the_episode_reached(
    n_envs: int, lengths: list[int], parts: list[int], rows: int, strategy: str
) -> None:
    """Whatever the episodes' lengths and the ring's place: the same environment and episode, and the right steps."""
    replay, source = buffer(n_envs, rows, goal_selection_strategy=strategy), Recorded(n_envs, lengths)
    for part in parts:
        replay.add(source.rollout(part))
    for row in drawn(replay, 4):
        environment, episode, step = row["observation"]["achieved_goal"]
        assert row["next_observation"]["achieved_goal"] == [environment, episode, step + 1]
        goal = row["observation"]["desired_goal"]
        assert row["next_observation"]["desired_goal"] == goal
        if goal == [-1.0, -1.0, -1.0]:
            assert row["reward"] == -7.0
            continue
        assert goal[:2] == [environment, episode]
        is_running = episode == source.episode[int(environment)]
        length = lengths[int(episode + environment) % len(lengths)]
        end = source.step[int(environment)] if is_running else length
        assert (1 if strategy == "episode" else step + 1) <= goal[2] <= end
        if strategy == "final":
            assert goal[2] == end
        assert row["reward"] == step + 1 - goal[2]


def test_the_share_and_the_spread_of_goals_are_those_of_the_paper() -> None:
    replay = buffer(1, 64, n_sampled_goal=4)
    replay.add(Recorded(1, [10]).rollout(10))
    index = torch.zeros(20_000, dtype=torch.int64)  # the first transition of an episode of ten
    goal = replay.gather(index)["observation"]["desired_goal"][:, 2]
    assert (goal >= 0).float().mean() == pytest.approx(0.8, abs=0.01)
    counts = torch.bincount(goal[goal >= 0].long(), minlength=11)[1:].float()
    assert counts.sum() == (goal >= 0).sum()
    assert ((counts / counts.sum() - 0.1).abs() < 0.01).all()


def test_any_step_of_the_episode_is_as_likely() -> None:
    replay, source = buffer(1, 64, n_sampled_goal=1000, goal_selection_strategy="episode"), Recorded(1, [4, 10])
    for part in (3, 6, 2, 5):
        replay.add(source.rollout(part))
    [seventh] = [int(i) for i in replay.valid.nonzero().flatten()
                 if replay.observation["achieved_goal"][i].tolist() == [0.0, 1.0, 7.0]]  # fmt: skip
    goal = replay.gather(torch.full((20_000,), seventh))["observation"]["desired_goal"]
    goal = goal[goal[:, 0] >= 0]
    assert (goal[:, 1] == 1).all()
    counts = torch.bincount(goal[:, 2].long(), minlength=11)[1:].float()
    assert ((counts / counts.sum() - 0.1).abs() < 0.01).all()


def test_an_episode_that_is_broken_off_keeps_its_goals_to_itself() -> None:
    replay, source = buffer(2, 64, n_sampled_goal=1000), Recorded(2, [100])
    replay.add(source.rollout(5))
    replay.break_off(np.array([True, False]))
    source.episode[0] += 1
    source.step[0] = 0
    replay.add(source.rollout(7))
    goals = {(e, i): set() for e in (0, 1) for i in (0, 1)}
    for row in drawn(replay, 50):
        environment, episode, _ = row["observation"]["achieved_goal"]
        goal = row["observation"]["desired_goal"]
        if goal[0] >= 0:  # one of a thousand keeps its own
            assert goal[:2] == [environment, episode]
            goals[int(environment), int(episode)].add(goal[2])
    assert max(goals[0, 0]) == 5 and max(goals[0, 1]) == 7 and max(goals[1, 0]) == 12


def test_an_episode_longer_than_the_ring_leaves_the_next_one_its_own_goals() -> None:
    """The transitions that follow its end in one rollout stand in rows that its first ones had."""
    replay, source = buffer(1, 20, goal_selection_strategy="final", n_sampled_goal=1000), Recorded(1, [30, 9])
    for steps in (10, 10, 8, 6):
        replay.add(source.rollout(steps))
    goals = [(row["observation"]["achieved_goal"][1], row["observation"]["desired_goal"]) for row in drawn(replay)]
    reached = {(episode, *goal[1:]) for episode, goal in goals if goal[0] >= 0}
    assert reached == {(0.0, 0.0, 30.0), (1.0, 1.0, 4.0)}


@pytest.mark.parametrize("newest", [None, 60])
def test_a_restored_buffer_draws_the_same(newest: int | None) -> None:
    replay, source = buffer(2, 40), Recorded(2, [7, 4])
    for _ in range(9):
        replay.add(source.rollout(8))
    other = buffer(2, 40)
    replay.newest = newest
    other.load_state_dict(replay.state_dict())
    seen = {tuple(row["observation"]["achieved_goal"]) for row in drawn(other)}
    assert seen <= {tuple(row["observation"]["achieved_goal"]) for row in drawn(replay)}
    if newest is None:
        other.load_state_dict(replay.state_dict())
        index = replay.valid.nonzero().flatten()
        one, two = replay.gather(index), other.gather(index)
        assert torch.equal(one["reward"], two["reward"])
    for row in drawn(other):
        environment, episode, step = row["observation"]["achieved_goal"]
        goal = row["observation"]["desired_goal"]
        assert goal[0] == -1.0 or (goal[:2] == [environment, episode] and goal[2] > step)


@pytest.mark.parametrize("lengths", [[60], [100]], ids=["ended", "running"])
def test_a_bounded_checkpoint_has_no_goals_of_rows_that_it_lacks(lengths: list[int]) -> None:
    arguments: dict[str, Any] = {"goal_selection_strategy": "episode", "n_sampled_goal": 1000}
    replay, source = buffer(1, 100, **arguments), Recorded(1, lengths)
    replay.add(source.rollout(60))
    resumed = buffer(1, 100, **arguments)
    replay.newest = 20
    resumed.load_state_dict(replay.state_dict())
    for more in (0, 7, 70):
        if more:
            resumed.add(source.rollout(more))
        drawn_rows = drawn(resumed, 200)
        oldest: dict[float, float] = {}
        for row in drawn_rows:
            _, episode, step = row["observation"]["achieved_goal"]
            oldest[episode] = min(step, oldest.get(episode, step))
        for row in drawn_rows:
            environment, episode, _ = row["observation"]["achieved_goal"]
            goal = row["observation"]["desired_goal"]
            assert goal[0] == -1.0 or (goal[:2] == [environment, episode] and goal[2] > oldest[episode])


@settings(max_examples=10)
@given(n_envs=st.integers(1, 3), breaks=st.lists(st.integers(1, 9), min_size=4, max_size=20), rows=st.integers(20, 40))
def test_a_full_ring_whose_episodes_are_broken_off_has_their_own_goals(
    n_envs: int, breaks: list[int], rows: int
) -> None:
    replay = buffer(n_envs, rows, goal_selection_strategy="episode", n_sampled_goal=1000)
    source = Recorded(n_envs, [12])
    for part in breaks * 3:
        replay.add(source.rollout(part))
        which = np.arange(n_envs) < n_envs - part % 2
        replay.break_off(which)
        source.episode[which] += 1
        source.step[which] = 0
        for row in drawn(replay, 3):
            environment, episode, _ = row["observation"]["achieved_goal"]
            goal = row["observation"]["desired_goal"]
            assert goal[0] == -1.0 or (goal[:2] == [environment, episode] and goal[2] > 0)


def bits(n_bits: int = 4, **arguments: Any) -> ReplayDataModule:
    sizes = {"total_timesteps": 240, "learning_starts": 40, "eval_freq": 0, "batch_size": 8, "rollouts_per_epoch": 10}
    return ReplayDataModule(lambda: bounded(n_bits), **{**sizes, "n_sampled_goal": 4, "buffer_size": 400, **arguments})


def bounded(n_bits: int) -> gym.Env:
    return BitFlipping(n_bits)


@pytest.mark.parametrize("arguments", [{}, {"prioritized_replay": True}, {"norm_obs": True, "n_envs": 2}], ids=str)
def test_resumes_exactly(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: DQN(learning_rate=1e-3), lambda: bits(**arguments), tmp_path, 3)


@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"n_sampled_goal": -1}, "n_sampled_goal=-1"),
    ({"goal_selection_strategy": "random"}, "goal_selection_strategy='random' must be one of future, final, episode"),
    ({"n_steps": 3}, "n_steps=3: with n_sampled_goal=4 only the reward of one step"),
    ({"share_frames": True}, "share_frames=True can't go with n_sampled_goal=4"),
])  # fmt: skip
def test_refused_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        bits(**arguments)


def test_a_buffer_that_was_filled_without_hindsight_is_refused(tmp_path: Path) -> None:
    fit(DQN(), bits(n_sampled_goal=0), max_epochs=2).save_checkpoint(tmp_path / "part.ckpt")
    with pytest.raises(UsageError, match="filled without hindsight; resume with n_sampled_goal=0"):
        fit(DQN(), bits(), tmp_path / "part.ckpt")


class Continuous(BitFlipping):
    """Flips the bit whose action is the largest."""

    def __init__(self) -> None:
        super().__init__(4)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(int(np.argmax(action)))


@pytest.mark.parametrize("algorithm", [SAC, TD3, QRDQN])
def test_other_algorithms_with_a_replay_buffer_learn_from_it(algorithm: Any) -> None:
    env = (lambda: bounded(4)) if algorithm is QRDQN else Continuous
    data = ReplayDataModule(env, n_sampled_goal=4, buffer_size=200, total_timesteps=80, learning_starts=20, eval_freq=0,
                            batch_size=8)  # fmt: skip
    fit(algorithm(net_arch=[8, 8]), data)
    assert data.is_complete


class Walks(gym.Env):
    """Reward: minus the distance between the place and the goal, plus one half."""

    observation_space = spaces.Dict({name: spaces.Box(-50, 50, (2,), np.float32) for name in SPACE})
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.place = 0, np.zeros(2, np.float32)
        self.goal = self.np_random.uniform(-2, 2, 2).astype(np.float32)
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        return {"observation": self.place, "achieved_goal": self.place, "desired_goal": self.goal}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return 0.5 - np.linalg.norm(np.asarray(achieved) - np.asarray(desired), axis=-1)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t, self.place = self.t + 1, self.place + action
        return self.observe(), float(self.compute_reward(self.place, self.goal, {})), False, self.t >= 10, {}


@pytest.mark.parametrize("sign_reward", [False, True])
def test_rewards_of_replaced_goals_are_of_the_same_kind_as_those_of_the_environment(sign_reward: bool) -> None:
    seen: list[dict[str, Any]] = []

    class Watched(TD3):
        def prepare(self, sample: Any) -> dict[str, Any]:
            seen.append({"next": sample["next_observation"], "reward": sample["reward"]})
            return super().prepare(sample)

    data = ReplayDataModule(Walks, total_timesteps=120, learning_starts=60, eval_freq=0, n_sampled_goal=4,
                            sign_reward=sign_reward, batch_size=64)  # fmt: skip
    fit(Watched(net_arch=[8]), data)
    place, goal = (torch.cat([x["next"][f"{name}_goal"] for x in seen]) for name in ("achieved", "desired"))
    expected = 0.5 - (place - goal).norm(dim=-1)
    reward = torch.cat([x["reward"] for x in seen]).flatten()
    torch.testing.assert_close(reward, expected.sign() if sign_reward else expected)
    assert (reward > 0).any() and (reward < 0).any()


class InCentimetres(gym.ObservationWrapper):
    """Shows everything a hundred times as large, and rewards accordingly."""

    def observation(self, observation: Any) -> Any:
        return {name: 100 * part for name, part in observation.items()}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return self.unwrapped.compute_reward(achieved / 100, desired / 100, info)  # type: ignore[attr-defined]


def test_rewards_of_replaced_goals_go_through_the_environments_wrappers() -> None:
    seen: list[dict[str, Any]] = []

    class Watched(TD3):
        def prepare(self, sample: Any) -> dict[str, Any]:
            seen.append({"next": sample["next_observation"], "reward": sample["reward"]})
            return super().prepare(sample)

    def make() -> gym.Env:
        tenfold = gym.wrappers.TransformReward(InCentimetres(Walks()), lambda reward: 10 * reward)
        return gym.wrappers.TransformReward(tenfold, lambda reward: max(reward, -3.0))

    data = ReplayDataModule(make, total_timesteps=120, learning_starts=60, eval_freq=0, n_sampled_goal=4, batch_size=64)
    fit(Watched(net_arch=[8]), data)
    place, goal = (torch.cat([x["next"][f"{name}_goal"] for x in seen]) / 100 for name in ("achieved", "desired"))
    expected = (10 * (0.5 - (place - goal).norm(dim=-1))).clamp_min(-3.0)
    reward = torch.cat([x["reward"] for x in seen]).flatten()
    torch.testing.assert_close(reward, expected, atol=1e-4, rtol=1e-4)  # places are float32
    assert (reward == -3.0).any() and (reward > 1.0).any()


class Lottery(gym.Env):
    """Numbers from 10 on; hitting the goal pays as much as it says."""

    action_space = spaces.Discrete(2)

    def __init__(self, goals: spaces.Space) -> None:
        self.goals = goals
        self.observation_space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), goals))

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        hit, pays = np.asarray(achieved) == np.asarray(desired), np.asarray(desired)
        if self.goals.shape:
            hit, pays = hit.all(-1), pays.sum(-1)
        assert (pays >= 10).all()
        return np.where(hit, pays, 0.0)

    def observe(self) -> dict[str, Any]:
        drawn = self.goals.sample()
        return {"observation": drawn, "achieved_goal": drawn, "desired_goal": self.goal}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.goal = 0, self.goals.sample()
        return self.observe(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.t, now = self.t + 1, self.observe()
        return now, float(self.compute_reward(now["achieved_goal"], self.goal, {})), False, self.t >= 5, {}


@pytest.mark.parametrize("goals", [spaces.Discrete(4, start=10), spaces.MultiDiscrete([2, 2], start=[10, 20])])
def test_goals_that_are_choices_reach_the_reward_as_the_environment_numbers_them(goals: Any) -> None:
    seen: list[dict[str, Any]] = []

    class Watched(DQN):
        def prepare(self, sample: Any) -> dict[str, Any]:
            seen.append({"next": sample["next_observation"], "reward": sample["reward"]})
            return super().prepare(sample)

    data = ReplayDataModule(lambda: Lottery(goals), total_timesteps=80, learning_starts=40, eval_freq=0,
                            n_sampled_goal=4, batch_size=64)  # fmt: skip
    fit(Watched(net_arch=[8]), data)
    # Replay numbers choices from 0 on.
    achieved, desired = (torch.cat([x["next"][f"{name}_goal"] for x in seen]) for name in ("achieved", "desired"))
    start = torch.as_tensor(goals.start)
    hit, pays = achieved == desired, desired + start
    expected = torch.where(hit, pays, 0) if not goals.shape else torch.where(hit.all(-1), pays.sum(-1), 0)
    reward = torch.cat([x["reward"] for x in seen]).flatten()
    torch.testing.assert_close(reward, expected.float())
    assert (reward > 0).any() and (reward == 0).any()


def test_rewards_normalised_by_a_wrapper_are_refused_with_what_to_use() -> None:
    data = ReplayDataModule(Walks, wrappers=["NormalizeReward"], n_sampled_goal=4, eval_freq=0)
    with pytest.raises(UsageError, match="NormalizeReward divides each reward .* use norm_reward=True"):
        fit(TD3(net_arch=[8]), data)


def test_an_environment_without_goals_or_their_rewards_is_refused() -> None:
    with pytest.raises(UsageError, match="Dict with the keys observation, achieved_goal, desired_goal; CartPole-v1"):
        fit(DQN(), ReplayDataModule("CartPole-v1", n_sampled_goal=4, eval_freq=0))

    class Silent(BitFlipping):
        compute_reward = None

    with pytest.raises(UsageError, match="needs an environment with compute_reward"):
        fit(DQN(), ReplayDataModule(lambda: Silent(4), n_sampled_goal=4, eval_freq=0))

    class Scalar(BitFlipping):
        def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
            return np.zeros(()) if np.ndim(achieved_goal) > 1 else 0.0

    with pytest.raises(UsageError, match=r"compute_reward returned an array of shape \(\) for"):
        fit(DQN(), ReplayDataModule(lambda: Scalar(4), n_sampled_goal=4, eval_freq=0, learning_starts=20))


def test_rewards_are_computed_by_an_environment_that_was_reset() -> None:
    class Scaled(Walks):
        scale: np.ndarray

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            self.scale = np.ones(2)
            return super().reset(seed=seed)

        def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
            return super().compute_reward(achieved * self.scale, desired, info)

    data = ReplayDataModule(lambda: gym.wrappers.TimeLimit(Scaled(), 20), total_timesteps=64, learning_starts=60,
                            eval_freq=0, n_sampled_goal=4, batch_size=8)  # fmt: skip
    assert fit(TD3(net_arch=[8]), data).global_step > 0


@pytest.mark.slow
def test_ten_bits_are_learned_with_hindsight_and_not_without() -> None:
    successes = {}
    for k in (0, 4):
        data = bits(10, n_sampled_goal=k, total_timesteps=20_000, buffer_size=20_000, learning_starts=1000,
                    batch_size=128, train_freq=1, n_test_episodes=100, rollouts_per_epoch=1000)  # fmt: skip
        model = DQN(learning_rate=1e-3, gamma=0.98, target_update_interval=500, exploration_fraction=0.3)
        trainer = fit(model, data)
        length = trainer.test(model, datamodule=data, verbose=False)[0]["test/mean_ep_length"]
        successes[k] = length
    assert successes[4] < 6.5 < 9 < successes[0]  # five bits differ on average; an episode that fails has ten steps


@pytest.mark.long
@pytest.mark.parametrize("divided", [False, True])
def test_rewards_that_compute_reward_does_not_give_are_named(divided: bool, recwarn: pytest.WarningsRecorder) -> None:
    def make() -> gym.Env:
        # A wrapper that changes the goals, without a compute_reward for them.
        return gym.wrappers.TransformObservation(
            Walks(), lambda seen: {name: part / 100 for name, part in seen.items()}, None
        ) if divided else Walks()  # fmt: skip

    data = ReplayDataModule(make, total_timesteps=64, learning_starts=60, eval_freq=0, n_sampled_goal=4, batch_size=8)
    fit(TD3(net_arch=[8]), data)
    warned = [str(w.message) for w in recwarn if "compute_reward returns" in str(w.message)]
    assert len(warned) == divided
    assert not divided or "100% of the transitions have such differences" in warned[0]


def line(n: int) -> dict[str, Any]:
    """One episode on a line: places 0 to n, the goal never reached, ended by a fall in the last step."""
    places = torch.arange(n + 1.0)[:, None, None].expand(n + 1, 1, 3).clone()
    seen = {"observation": places, "achieved_goal": places, "desired_goal": torch.full_like(places, -1.0)}
    ended = torch.zeros(n, 1, dtype=torch.bool)
    ended[-1] = True
    return {
        "observation": {key: x[:-1] for key, x in seen.items()},
        "next_observation": {key: x[1:] for key, x in seen.items()},
        "action": torch.zeros(n, 1, dtype=torch.int64), "reward": torch.zeros(n, 1), "terminated": ended,
        "truncated": torch.zeros_like(ended), "valid": torch.ones_like(ended),
    }  # fmt: skip


def at_goal(achieved: np.ndarray, desired: np.ndarray, info: Any) -> bool:
    assert achieved.shape == desired.shape == (3,)  # one pair, as Gymnasium-Robotics defines it
    return bool((achieved == desired).all())


@pytest.mark.parametrize("ends", [None, at_goal])
def test_a_replaced_goal_that_is_reached_ends_the_episode(ends: Any) -> None:
    replay = buffer(1, 20, compute_terminated=ends)
    replay.add(line(5))
    sample = replay.gather(replay.valid.nonzero().flatten().repeat(40))
    after, goal = (sample["next_observation"][name][:, 0] for name in ("achieved_goal", "desired_goal"))
    is_replaced = goal >= 0
    reached, fell = after == goal, after == 5
    assert 0 < int(reached.sum()) < int(is_replaced.sum())
    assert torch.equal(sample["terminated"], fell if ends is None else reached | fell)


def test_an_environment_s_own_end_is_known_to_the_buffer() -> None:
    data = bits(4, n_sampled_goal=4, total_timesteps=200, learning_starts=150, buffer_size=200)
    fit(DQN(net_arch=[8]), data)
    replay: Any = data.replay
    assert replay.compute_terminated is not None
    sample = replay.gather(replay.valid.nonzero().flatten())
    after = sample["next_observation"]
    assert torch.equal(sample["terminated"], (after["achieved_goal"] == after["desired_goal"]).all(1))


def test_a_reward_of_infos_is_one_sentence() -> None:
    class Reads(BitFlipping):
        def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
            if np.ndim(achieved_goal) > 1:
                return np.array([one["effort"] for one in info])
            return super().compute_reward(achieved_goal, desired_goal, info)

    data = ReplayDataModule(lambda: Reads(4), n_sampled_goal=4, total_timesteps=64, learning_starts=60, eval_freq=0)
    with pytest.raises(UsageError, match="^the environment's compute_reward reads 'effort' of info, and a buffer"):
        fit(DQN(net_arch=[8]), data)
