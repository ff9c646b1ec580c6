"""Frames stored once: every sampled stack is the one that was observed."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import ReplayDataModule
from datamodules.buffers import ReplayBuffer
from datamodules.frame_buffer import FrameReplayBuffer
from datamodules.samplers import PrioritizedSampler
from rl_modules import DQN
from rl_modules.common.errors import UsageError
from tests.training import assert_resumes_exactly, fit

K = 3
STACKS = spaces.Box(0, 255, (K, 2, 2), np.uint8)


class Stacks:
    """Makes rollouts of frame stacks as the Collector does; each transition's reward is its number."""

    def __init__(self, n_envs, seed, ends, padding, has_reset_rows):
        self.rng, self.n_envs, self.ends, self.padding = np.random.default_rng(seed), n_envs, ends, padding
        self.has_reset_rows, self.count = has_reset_rows, 0
        self.resets = np.zeros(n_envs, bool)
        self.now = [self.first() for _ in range(n_envs)]

    def frame(self):
        return self.rng.integers(0, 256, (2, 2), np.uint8)

    def first(self):
        frame = self.frame()
        older = {"reset": frame, "zero": np.zeros_like(frame), "any": None}[self.padding]
        return np.stack([*((self.frame() if older is None else older) for _ in range(K - 1)), frame])

    def rollout(self, n_steps):
        shape = (n_steps, self.n_envs)
        rows = {"observation": np.empty((*shape, *STACKS.shape), np.uint8),
                "next_observation": np.empty((*shape, *STACKS.shape), np.uint8),
                "action": self.rng.integers(5, size=shape), "reward": np.zeros(shape, np.float32),
                "terminated": np.zeros(shape, bool), "truncated": np.zeros(shape, bool),
                "valid": np.ones(shape, bool)}  # fmt: skip
        for t in range(n_steps):
            for i in range(self.n_envs):
                rows["observation"][t, i] = self.now[i]
                if self.resets[i]:
                    self.resets[i], self.now[i] = False, self.first()
                    rows["valid"][t, i] = False
                    rows["next_observation"][t, i] = self.now[i]
                    continue
                after = np.stack([*self.now[i][1:], self.frame()])
                rows["next_observation"][t, i], self.now[i] = after, after
                self.count += 1
                rows["reward"][t, i] = self.count
                over = self.rng.random() < self.ends
                name = "terminated" if self.rng.random() < 0.5 else "truncated"
                rows[name][t, i] = over
                if over and self.has_reset_rows:
                    self.resets[i] = True
                elif over:
                    self.now[i] = self.first()
        return {name: torch.from_numpy(x) for name, x in rows.items()}


def by_number(buffer, n_steps):
    """What is drawn of every transition, by its number."""
    batch = buffer.gather(buffer.valid.nonzero()[:, 0], n_steps)
    return {int(batch["reward"][i, 0]): {name: x[i] for name, x in batch.items()} for i in range(len(batch["action"]))}


def assert_same(ours, plain):
    for number, fields in ours.items():
        for name, value in fields.items():
            assert torch.equal(value, plain[number][name]), (number, name)


ARGUMENTS = {
    "seed": st.integers(0, 10**6), "n_envs": st.integers(1, 3), "n_steps": st.integers(1, 4),
    "ends": st.sampled_from([0.0, 0.1, 0.5, 1.0]), "padding": st.sampled_from(["reset", "zero", "any"]),
    "has_reset_rows": st.booleans(),
}  # fmt: skip


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(per_env=st.integers(40, 80), **ARGUMENTS)
def test_draws_are_those_of_the_plain_buffer(seed, n_envs, n_steps, ends, padding, has_reset_rows, per_env):
    frames = FrameReplayBuffer(STACKS, spaces.Discrete(5), n_envs, per_env * n_envs)
    plain = ReplayBuffer(STACKS, spaces.Discrete(5), n_envs, 2000 * n_envs)
    stream = Stacks(n_envs, seed, ends, padding, has_reset_rows)
    written = 0
    while written < 4 * per_env:
        length = int(stream.rng.integers(1, per_env // frames.rows_per_step))
        rollout = stream.rollout(length)
        added, _ = frames.add(rollout)
        assert torch.equal(frames.reward[added], plain.reward[plain.add(rollout)[0]])
        written += length
        ours = by_number(frames, n_steps)
        assert_same(ours, by_number(plain, n_steps))
        # The newest are there: of each environment as many as fit with the rows that episodes take.
        newest = rollout["reward"][rollout["valid"]].int().tolist()
        assert set(newest) <= set(ours)
    # Where episodes do not end, all rows but those of the newest stack are transitions.
    if ends == 0.0:
        assert len(ours) == n_envs * (frames.rows - K)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(newest=st.integers(12, 60), **ARGUMENTS)
def test_a_bounded_checkpoint_holds_no_cut_stack(seed, n_envs, n_steps, ends, padding, has_reset_rows, newest):
    make = lambda: FrameReplayBuffer(STACKS, spaces.Discrete(5), n_envs, 60 * n_envs)  # noqa: E731
    buffer, plain = make(), ReplayBuffer(STACKS, spaces.Discrete(5), n_envs, 2000 * n_envs)
    stream = Stacks(n_envs, seed, ends, padding, has_reset_rows)

    def add(*buffers, length):
        rollout = stream.rollout(length)
        for each in buffers:
            each.add(rollout)

    for length in (5, 9, 14, 3, 11)[: seed % 6]:
        add(buffer, plain, length=length)
    sampler = PrioritizedSampler(buffer, 0)
    sampler.tree[buffer.valid.nonzero()[:, 0].numpy()] = 1.0
    resumed = make()
    buffer.newest = newest
    resumed.load_state_dict(buffer.state_dict())
    again = PrioritizedSampler(resumed, 0)
    again.load_state_dict(sampler.state_dict())
    assert again.tree.total == int(resumed.valid.sum())
    assert_same(by_number(resumed, n_steps), by_number(plain, n_steps))
    for _ in range(6):
        add(resumed, plain, length=7)
        assert_same(by_number(resumed, n_steps), by_number(plain, n_steps))


def test_a_restored_environment_begins_a_new_stack():
    """After a resume that could not repeat an episode, the next observation continues nothing."""
    buffer, stream = FrameReplayBuffer(STACKS, spaces.Discrete(5), 1, 40), Stacks(1, 0, 0.0, "reset", False)
    plain = ReplayBuffer(STACKS, spaces.Discrete(5), 1, 400)
    rollout = stream.rollout(4)
    buffer.add(rollout), plain.add(rollout)
    stream.now = [stream.first()]
    rollout = stream.rollout(4)
    buffer.add(rollout), plain.add(rollout)
    ours = by_number(buffer, 1)
    assert sorted(ours) == [1, 2, 3, 5, 6, 7, 8]  # the fourth has lost its successor
    assert_same(ours, by_number(plain, 1))


def test_the_memory_is_that_of_one_frame_per_row():
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer, plain = (make(space, spaces.Discrete(6), 1, 1000) for make in (FrameReplayBuffer, ReplayBuffer))
    assert 3.9 < plain.nbytes / buffer.nbytes < 4.0
    assert buffer.observation_bytes == 4 * 84 * 84


class Picture(gym.Env):
    """Random frames, episodes of random length."""

    observation_space = spaces.Box(0, 255, (36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.frame(), {}

    def frame(self):
        return self.np_random.integers(0, 256, (36, 36), np.uint8)

    def step(self, action):
        return self.frame(), float(action), bool(self.np_random.random() < 0.1), False, {}


STACK = {"class_path": "FrameStackObservation", "init_args": {"stack_size": 4}}


def data(**arguments):
    return ReplayDataModule(Picture, n_envs=2, **{"buffer_size": 200, "learning_starts": 20, "eval_freq": 0,
                            "batch_size": 4, "total_timesteps": 96, "rollouts_per_epoch": 4, "wrappers": [STACK],
                            "share_frames": True, **arguments})  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("prioritized", [False, True])
def test_dqn_learns_from_them_and_resumes_exactly(prioritized, tmp_path):
    assert_resumes_exactly(lambda: DQN(net_arch=[8]), lambda: data(prioritized_replay=prioritized, n_steps=2), tmp_path,
                           epochs=3)  # fmt: skip


def test_what_is_no_stack_is_one_sentence():
    with pytest.raises(UsageError, match="whose space is a Box with the stack as first axis"):
        fit(DQN(), ReplayDataModule("CartPole-v1", share_frames=True, total_timesteps=200, eval_freq=0))
    with pytest.raises(UsageError, match="older frames are not those of the observation before"):
        fit(DQN(), data(wrappers=[], buffer_size=600))
    with pytest.raises(UsageError, match="buffer_size=60 must be at least 80"):
        fit(DQN(), data(buffer_size=60))
