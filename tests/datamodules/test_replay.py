import logging
import math
import re
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.buffers import ReplayBuffer, available_bytes
from datamodules.normalization import RewardNormalizer
from datamodules.samplers import PrioritizedSampler, SumTree, UniformSampler
from rl_modules import DQN, PPO, SAC
from rl_modules.common.errors import UsageError
from tests.datamodules.envs import Counter, Forgetful
from tests.training import assert_resumes_exactly, fit

LINE = spaces.Box(-np.inf, np.inf, (1,), np.float32)
IMAGE = spaces.Box(0, 255, (36, 36, 2), np.uint8)


class Stream:
    """Makes rollouts as the Collector does, and remembers each environment's transitions as plain tuples."""

    def __init__(self, n_envs: int, seed: int, ends: float, has_reset_rows: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.n_envs, self.ends, self.has_reset_rows = n_envs, ends, has_reset_rows
        self.transitions = [[] for _ in range(n_envs)]
        self.resets = np.zeros(n_envs, bool)
        self.now = np.array([self.fresh() for _ in range(n_envs)], np.float32)

    def fresh(self) -> float:
        self.seen = getattr(self, "seen", 0) + 1
        return float(self.seen)

    def rollout(self, n_steps: int) -> dict:
        n = self.n_envs
        rows = {
            "observation": np.empty((n_steps, n, 1), np.float32),
            "next_observation": np.empty((n_steps, n, 1), np.float32),
            "action": self.rng.integers(5, size=(n_steps, n)),
            "reward": self.rng.normal(size=(n_steps, n)).astype(np.float32),
            "terminated": np.zeros((n_steps, n), bool),
            "truncated": np.zeros((n_steps, n), bool),
            "valid": np.ones((n_steps, n), bool),
        }
        for t in range(n_steps):
            for i in range(n):
                rows["observation"][t, i] = self.now[i]
                successor = self.fresh()
                rows["next_observation"][t, i] = successor
                rows["valid"][t, i] = not self.resets[i]
                if self.resets[i]:
                    rows["reward"][t, i] = 0.0
                    self.resets[i], self.now[i] = False, successor
                    continue
                over = self.rng.random() < self.ends
                terminated = over and self.rng.random() < 0.5
                rows["terminated"][t, i], rows["truncated"][t, i] = terminated, over and not terminated
                self.transitions[i].append((
                    float(self.now[i]), int(rows["action"][t, i]), float(rows["reward"][t, i]),
                    bool(terminated), bool(over), successor,
                ))  # fmt: skip
                self.now[i] = successor
                if over and self.has_reset_rows:
                    self.resets[i] = True
                elif over:
                    self.now[i] = self.fresh()
        return {name: torch.from_numpy(x) for name, x in rows.items()}

    def abandon(self, which: np.ndarray) -> None:
        """Begin new episodes, without an end of those under way."""
        for i in np.flatnonzero(which):
            self.resets[i], self.now[i] = False, self.fresh()
            if self.transitions[i] and not self.transitions[i][-1][4]:
                self.transitions[i][-1] = (*self.transitions[i][-1][:4], True, self.transitions[i][-1][5])

    def remembered(self, rows: int, n_steps: int) -> list[tuple]:
        """What a ring of so many rows holds: observation, action, rewards, terminated, next observation."""
        found = []
        for stream in self.transitions:
            spent = 1  # the newest observation
            for t in reversed(range(len(stream))):
                spent += 2 if stream[t][4] else 1
                if spent > rows:
                    break
                window = []
                for step in stream[t : t + n_steps]:
                    window.append(step)
                    if step[4]:
                        break
                rewards = [step[2] for step in window]
                found.append((*stream[t][:2], tuple(rewards), window[-1][3], window[-1][5]))
        return sorted(found)


def all_in(buffer: ReplayBuffer, n_steps: int) -> list[tuple]:
    batch = buffer.gather(buffer.valid.nonzero()[:, 0], n_steps)
    found = []
    for i, count in enumerate(batch["n_steps"].tolist()):
        assert (batch["reward"][i, count:] == 0).all()
        found.append((
            batch["observation"][i].item(), batch["action"][i].item(), tuple(batch["reward"][i, :count].tolist()),
            batch["terminated"][i].item(), batch["next_observation"][i].item(),
        ))  # fmt: skip
    return sorted(found)


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_envs=st.integers(1, 4),
    n_steps=st.integers(1, 4),
    per_env=st.integers(12, 40),
    ends=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    has_reset_rows=st.booleans(),
    breaks=st.booleans(),
)
def test_ring_holds_what_a_list_would(seed, n_envs, n_steps, per_env, ends, has_reset_rows, breaks):
    buffer = ReplayBuffer(LINE, spaces.Discrete(5), n_envs, per_env * n_envs)
    stream = Stream(n_envs, seed, ends, has_reset_rows)
    written = 0
    while written < 3 * per_env:
        length = int(stream.rng.integers(1, per_env // 3))
        buffer.add(stream.rollout(length))
        written += length
        assert breaks or all_in(buffer, n_steps) == stream.remembered(buffer.rows, n_steps)
        if breaks:
            which = stream.rng.random(n_envs) < 0.5
            buffer.break_off(which)
            stream.abandon(which)
            # The row that a broken-off episode takes is the oldest transition's at most.
            held = set(all_in(buffer, n_steps))
            assert set(stream.remembered(buffer.rows, n_steps)) <= held <= set(stream.remembered(10**6, n_steps))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_envs=st.integers(1, 4),
    n_steps=st.integers(1, 3),
    newest=st.integers(1, 60),
    ends=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_checkpoint_s_buffer_holds_the_newest_rows_and_goes_on(seed, n_envs, n_steps, newest, ends):
    make = lambda: ReplayBuffer(LINE, spaces.Discrete(5), n_envs, 30 * n_envs)  # noqa: E731
    buffer, stream = make(), Stream(n_envs, seed, ends, False)
    for length in (5, 9, 14, 3, 11)[: seed % 6]:
        buffer.add(stream.rollout(length))
    sampler = PrioritizedSampler(buffer, 0)
    index = buffer.valid.nonzero()[:, 0]
    sampler.tree[index.numpy()] = buffer.reward[index].abs().numpy() + 1.0
    buffer.newest = newest
    state, known = buffer.state_dict(), sampler.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    kept = max(newest // n_envs, 2) + 1 if state["left_out"] else buffer.rows
    assert len(state["valid"]) <= max(newest + n_envs, buffer.filled * n_envs)
    assert state["valid"].any() == buffer.valid.any()
    assert all_in(resumed, n_steps) == stream.remembered(kept, n_steps)
    again = PrioritizedSampler(resumed, 0)
    again.load_state_dict(known)
    index = resumed.valid.nonzero()[:, 0]
    assert np.array_equal(again.tree[index.numpy()], resumed.reward[index].abs().numpy() + 1.0)
    # What is written from here on stands behind what was kept.
    resumed.add(stream.rollout(2))
    assert set(all_in(resumed, 1)) >= set(stream.remembered(min(kept + 2, buffer.rows), 1))


def test_a_checkpoint_of_one_row_right_after_an_episodes_end_can_be_drawn_from():
    make = lambda: ReplayBuffer(LINE, spaces.Discrete(5), 1, 10)  # noqa: E731
    buffer, resumed = make(), make()
    buffer.add(Stream(1, 0, 1.0, False).rollout(3))  # each step ends an episode
    buffer.newest = 1
    resumed.load_state_dict(buffer.state_dict())
    assert all_in(resumed, 1) == all_in(buffer, 1)[-1:]
    assert UniformSampler(resumed, 0).draw(4).tolist() == [0] * 4


def test_a_bounded_checkpoint_says_what_is_lost(tmp_path, caplog):
    arguments = {"total_timesteps": 64, "buffer_size": 60, "checkpoint_buffer_size": 20}
    with caplog.at_level(logging.INFO, "datamodules"):
        trainer = fit(DQN(), replay(**arguments))
    assert "Checkpoints hold the newest 20 of its 60 rows" in caplog.text
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    buffer = torch.load(tmp_path / "a.ckpt", weights_only=True)["ReplayDataModule"]["ranks"][0]["replay"]
    assert len(buffer["valid"]) == 21
    with pytest.warns(UserWarning, match=r"newest 21 of \d+ rows of the replay buffer: the older transitions are lost"):
        fit(DQN(), replay(**{**arguments, "total_timesteps": 96}), tmp_path / "a.ckpt")


def test_full_ring_without_episode_ends_holds_buffer_size_transitions():
    buffer = ReplayBuffer(LINE, spaces.Discrete(5), 2, 20)
    stream = Stream(2, 0, 0.0, False)
    for _ in range(6):
        buffer.add(stream.rollout(5))
    assert buffer.valid.sum() == 20
    newest = [step[0] for per_env in stream.transitions for step in per_env[-10:]]
    assert sorted(row[0] for row in all_in(buffer, 1)) == sorted(newest)


def test_hand_written_episode_in_a_ring_of_six_rows():
    buffer = ReplayBuffer(LINE, spaces.Discrete(2), 1, 5)

    def rows(observations, successors, ended):
        t = len(observations)
        return {
            "observation": torch.tensor(observations).float().reshape(t, 1, 1),
            "next_observation": torch.tensor(successors).float().reshape(t, 1, 1),
            "action": torch.zeros(t, 1, dtype=torch.int64),
            "reward": torch.tensor(observations).float().reshape(t, 1),
            "terminated": torch.zeros(t, 1, dtype=torch.bool),
            "truncated": torch.tensor(ended).reshape(t, 1),
            "valid": torch.ones(t, 1, dtype=torch.bool),
        }

    buffer.add(rows([1, 2], [2, 3], [False, True]))  # rows: 1 2 final-3 head
    assert buffer.observation[:3, 0].tolist() == [1, 2, 3]
    assert buffer.valid.tolist() == [True, True, False, False, False, False]
    buffer.add(rows([10, 11], [11, 12], [False, False]))  # 1 2 final-3 10 11 head-12
    assert buffer.valid.tolist() == [True, True, False, True, True, False]
    assert all_in(buffer, 3) == [
        (1.0, 0, (1.0, 2.0), False, 3.0),
        (2.0, 0, (2.0,), False, 3.0),
        (10.0, 0, (10.0, 11.0), False, 12.0),
        (11.0, 0, (11.0,), False, 12.0),
    ]
    buffer.add(rows([12], [13], [True]))  # final-13 over row 0, head over row 1
    assert buffer.valid.tolist() == [False, False, False, True, True, True]
    assert all_in(buffer, 3)[0] == (10.0, 0, (10.0, 11.0, 12.0), False, 13.0)


def test_images_stay_uint8_and_are_stored_once():
    buffer = ReplayBuffer(IMAGE, spaces.Discrete(2), 2, 100)
    assert buffer.observation.dtype == torch.uint8
    rows = 102
    assert sum(t.nbytes for t in vars(buffer).values() if isinstance(t, torch.Tensor) and len(t) == rows) == (
        rows * (36 * 36 * 2 + 8 + 4 + 1 + 1)
    )
    assert buffer.nbytes == rows * (36 * 36 * 2 + 8 + 4 + 2)


@pytest.mark.parametrize("newest", [None, 20])
def test_a_whole_checkpoint_copies_no_rows_and_holds_no_more_than_the_used_ones(newest, tmp_path):
    buffer, stream = ReplayBuffer(LINE, spaces.Discrete(5), 2, 100), Stream(2, 0, 0.1, False)
    buffer.add(stream.rollout(20))
    buffer.newest = newest
    state = buffer.state_dict()
    shares = state["observation"].data_ptr() == buffer.observation.data_ptr()
    assert shares == (newest is None)
    torch.save(state["observation"], tmp_path / "rows.pt")
    loaded = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert loaded.untyped_storage().nbytes() == loaded.nbytes < buffer.observation.nbytes
    expected = buffer.observation[buffer.rows_to_save()]
    assert torch.equal(loaded, expected)


def test_the_memory_that_is_checked_counts_the_copy_of_a_bounded_checkpoint(caplog):
    sizes = []
    for bound in (None, 500_000):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="datamodules.buffers"):
            fit(DQN(), replay(total_timesteps=24, buffer_size=1_000_000, checkpoint_buffer_size=bound))
        sizes.append(int(re.search(r"takes up to (\d+) MiB", caplog.text)[1]))
    assert sizes[1] == pytest.approx(1.5 * sizes[0], abs=1)


def test_dict_observations_and_box_actions():
    space = spaces.Dict({"a": LINE, "b": spaces.Dict({"c": spaces.Discrete(3, start=5)})})
    buffer = ReplayBuffer(space, spaces.Box(-1, 1, (2,), np.float32), 1, 8)
    batch = {
        "observation": {"a": torch.tensor([[[1.0]], [[2.0]]]), "b": {"c": torch.tensor([[0], [1]])}},
        "next_observation": {"a": torch.tensor([[[2.0]], [[3.0]]]), "b": {"c": torch.tensor([[1], [2]])}},
        "action": torch.tensor([[[0.1, 0.2]], [[0.3, 0.4]]]),
        "reward": torch.zeros(2, 1),
        **{name: torch.zeros(2, 1, dtype=torch.bool) for name in ("terminated", "truncated")},
        "valid": torch.ones(2, 1, dtype=torch.bool),
    }
    buffer.add(batch)
    found = buffer.gather(torch.tensor([0, 1]))
    assert found["observation"]["b"]["c"].tolist() == [0, 1]
    assert found["next_observation"]["b"]["c"].tolist() == [1, 2]
    assert found["next_observation"]["a"].tolist() == [[2.0], [3.0]]
    torch.testing.assert_close(found["action"], torch.tensor([[0.1, 0.2], [0.3, 0.4]]))


# ---------------------------------------------------------------- sampling


def filled_buffer(n_envs=2, size=40, ends=0.3, steps=9, seed=0):
    buffer = ReplayBuffer(LINE, spaces.Discrete(5), n_envs, size)
    stream = Stream(n_envs, seed, ends, False)
    changes = [buffer.add(stream.rollout(steps))]
    return buffer, changes


def assert_frequencies(index: torch.Tensor, probability: np.ndarray) -> None:
    """Within five standard errors of the multinomial: a false alarm in a million runs."""
    n = len(index)
    share = np.bincount(index.numpy(), minlength=len(probability)) / n
    assert (share[probability == 0] == 0).all()
    error = np.sqrt(probability * (1 - probability) / n)
    assert (np.abs(share - probability) <= 5 * error + 1e-12).all()


def test_uniform_sampling_draws_every_transition_equally_often():
    buffer, _ = filled_buffer()
    valid = buffer.valid.numpy()
    assert 0 < valid.sum() < buffer.filled * buffer.n_envs
    assert_frequencies(UniformSampler(buffer, 0).draw(200_000), valid / valid.sum())


def test_prioritized_sampling_follows_the_powers_of_the_errors():
    buffer, changes = filled_buffer()
    sampler = PrioritizedSampler(buffer, 0, alpha=0.7, epsilon=0.1)
    sampler.added(*changes[0])
    index = buffer.valid.nonzero()[:, 0]
    error = torch.arange(len(index)).float() / 3
    sampler.update(index, error)
    probability = np.zeros(buffer.total)
    probability[index] = (error.numpy() + 0.1) ** 0.7
    probability /= probability.sum()
    draws = torch.cat([sampler.draw(50) for _ in range(4000)])
    assert_frequencies(draws, probability)


def test_importance_weights_by_the_formula():
    buffer, changes = filled_buffer()
    sampler = PrioritizedSampler(buffer, 0, alpha=0.5, epsilon=0.01)
    sampler.added(*changes[0])
    index = buffer.valid.nonzero()[:, 0]
    error = torch.linspace(0, 4, len(index))
    sampler.update(index, error)
    priority = (error.double().numpy() + 0.01) ** 0.5
    probability = priority / priority.sum()
    for beta in (0.0, 0.4, 1.0):
        some = torch.tensor([3, 0, 7])
        expected = (len(index) * probability[some]) ** -beta
        np.testing.assert_allclose(sampler.weights(index[some], beta), expected / expected.max(), rtol=1e-6)


def test_importance_weights_of_two_ranks_are_of_one_minibatch():
    """Each draws half of it from its own buffer, where P is its own priority's share."""
    samplers, expected = [], []
    some = torch.tensor([3, 0, 7])
    for rank in range(2):
        buffer, changes = filled_buffer()
        samplers.append(PrioritizedSampler(buffer, rank, alpha=1.0, epsilon=0.01))
        samplers[-1].added(*changes[0])
        index = buffer.valid.nonzero()[:, 0]
        error = torch.linspace(rank + 1, 8 + 20 * rank, len(index))
        samplers[-1].update(index, error)
        priority = error.double().numpy() + 0.01
        expected.append((2 * len(index) * priority[some] / (2 * priority.sum())) ** -0.4)
    largest = []
    for sampler in samplers:
        sampler.weights(index[some], 0.4, lambda own: largest.append(own) or own)
    expected = np.stack(expected) / np.max(expected)
    for sampler, theirs in zip(samplers, expected, strict=True):
        np.testing.assert_allclose(sampler.weights(index[some], 0.4, lambda _: max(largest)), theirs, rtol=1e-6)
    assert (expected.max(1) < 1).any()


def test_new_transitions_get_the_largest_priority_and_overwritten_ones_none():
    buffer = ReplayBuffer(LINE, spaces.Discrete(5), 1, 8)
    stream = Stream(1, 0, 0.0, False)
    sampler = PrioritizedSampler(buffer, 0, alpha=1.0, epsilon=1e-6)
    sampler.added(*buffer.add(stream.rollout(4)))
    sampler.update(torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, 5.0, 1.0, 1.0]))
    sampler.added(*buffer.add(stream.rollout(4)))
    np.testing.assert_allclose(sampler.tree[np.arange(9)], [1, 5, 1, 1, 5, 5, 5, 5, 0], atol=1e-5)
    sampler.added(*buffer.add(stream.rollout(1)))
    # Row 8 is written, and the newest observation stands in row 0.
    np.testing.assert_allclose(sampler.tree[np.arange(9)], [0, 5, 1, 1, 5, 5, 5, 5, 5], atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0, 7.0, 1e6]), min_size=1, max_size=40), seed=st.integers(0))
def test_sum_tree_finds_prefix_sums(values, seed):
    values = np.array(values)
    if values.sum() == 0:
        values[0] = 1.0
    tree = SumTree(len(values))
    rng = np.random.default_rng(seed)
    for piece in np.array_split(rng.permutation(len(values)), 3):
        tree[piece] = values[piece]
    assert math.isclose(tree.total, values.sum())
    prefix = np.append(rng.random(50) * tree.total, [0.0, np.nextafter(tree.total, 0)])
    found = tree.find(prefix)
    assert (values[found] > 0).all()
    ends = np.cumsum(values)
    slack = 1e-9 * tree.total
    assert (prefix <= ends[found] + slack).all()
    assert (prefix >= ends[found] - values[found] - slack).all()


# ---------------------------------------------------------------- the datamodule


class Listener(DQN):
    """Keeps what it was given."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.samples, self.batches, self.acted = [], [], 0

    def act(self, observation, generator=None, deterministic=False):
        self.acted += len(observation)
        return super().act(observation, generator, deterministic)

    def prepare(self, sample):
        self.samples.append(sample)
        return super().prepare(sample)

    def training_step(self, batch, batch_idx):
        self.batches.append((self.trainer.datamodule.num_timesteps, batch))
        return super().training_step(batch, batch_idx)


def replay(env_id=Counter, **arguments):
    defaults = {"total_timesteps": 200, "eval_freq": 0, "buffer_size": 100, "learning_starts": 20, "batch_size": 8}
    return ReplayDataModule(env_id, **{**defaults, **arguments})


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("prioritized", [False, True])
def test_successors_are_true_after_a_resume_that_begins_episodes_anew(tmp_path, prioritized, n_steps):
    make = lambda total: replay(Forgetful, n_envs=3, n_steps=n_steps, total_timesteps=total, train_freq=2,  # noqa: E731
                                prioritized_replay=prioritized)  # fmt: skip
    fit(Listener(), make(78)).save_checkpoint(tmp_path / "a.ckpt")
    module = Listener()
    with pytest.warns(UserWarning, match=r"environments \[0, 1, 2\] start a new episode"):
        fit(module, make(240), ckpt_path=tmp_path / "a.ckpt")
    broken_off = 0
    for sample in module.samples:
        for i, steps in enumerate(sample["n_steps"].tolist()):
            start, count = sample["observation"][i].tolist()
            assert sample["next_observation"][i].tolist() == [start, count + steps]
            broken_off += steps < n_steps and count + steps < 5
    assert n_steps == 1 or broken_off > 0


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_every_sampled_transition_is_one_of_the_environment(mode, n_steps):
    module = Listener()
    fit(module, replay(n_envs=3, autoreset_mode=mode, n_steps=n_steps, total_timesteps=400))
    seen = {"truncated": 0, "terminated": 0, "short": 0}
    for sample in module.samples:
        for i, steps in enumerate(sample["n_steps"].tolist()):
            start, count = sample["observation"][i].tolist()
            # Rewards count the steps of an episode, of which there are five.
            rewards = [count + k + 1 for k in range(steps)] + [0.0] * (n_steps - steps)
            assert sample["reward"][i].tolist() == rewards
            assert sample["next_observation"][i].tolist() == [start, count + steps]
            assert steps <= 5 - count
            over = count + steps == 5
            assert over or not sample["terminated"][i]
            seen["terminated"] += bool(sample["terminated"][i])
            seen["truncated"] += over and not sample["terminated"][i]
            seen["short"] += steps < n_steps
    assert seen["terminated"] > 20
    assert seen["truncated"] > 20
    assert n_steps == 1 or seen["short"] > 20


@pytest.mark.parametrize("prioritized", [False, True])
def test_rounds_collect_and_learn_as_often_as_asked(prioritized):
    module = Listener()
    data = replay(n_envs=2, train_freq=5, gradient_steps=3, learning_starts=30, total_timesteps=100,
                  rollouts_per_epoch=2, prioritized_replay=prioritized)  # fmt: skip
    trainer = fit(module, data)
    # 30 transitions at random, then 7 rounds of 10: the first three minibatches come at 40 transitions.
    assert [timesteps for timesteps, _ in module.batches] == [n for n in range(40, 101, 10) for _ in range(3)]
    assert module.acted == 70
    assert trainer.global_step == 21
    assert len(data.train_dataloader()) == 6
    assert all(len(batch["action"]) == 8 for _, batch in module.batches)


def test_gradient_steps_minus_one_means_as_many_as_transitions():
    module = Listener()
    fit(module, replay(n_envs=2, train_freq=3, gradient_steps=-1, learning_starts=0, total_timesteps=24))
    assert len(module.batches) == 24


def test_reset_rows_of_several_ranks_are_counted_on_their_device():
    """Replayed experience is on the CPU, whose tensors a GPU's collective refuses."""

    class TwoRanks:
        root_device = torch.device("meta")

        def reduce(self, x, reduce_op):
            assert x.device == self.root_device
            return torch.tensor(5)

    sizes = {"n_envs": 2, "learning_starts": 4, "total_timesteps": 16}
    data = ReplayDataModule("CartPole-v1", autoreset_mode="next_step", eval_freq=0, **sizes)
    fit(DQN(net_arch=[8]), data)
    before = data.num_timesteps
    data.trainer = SimpleNamespace(world_size=2, strategy=TwoRanks(), lightning_module=data.learner)
    data.after_collecting(torch.tensor([[True, False], [True, True]]))
    assert data.num_timesteps == before + 5


def test_warm_up_actions_are_uniform_whatever_the_policy_says():
    class Stubborn(Listener):
        def act(self, observation, generator=None, deterministic=False):
            return {"action": torch.zeros(len(observation), dtype=torch.int64)}

    data = replay(n_envs=4, learning_starts=2000, total_timesteps=2016, buffer_size=4000)
    fit(Stubborn(), data)
    warm_up = data.replay.action.reshape(-1, 4)[data.replay.valid.reshape(-1, 4).all(1)][:400]
    # 1600 coins: five standard errors.
    assert abs(warm_up.float().mean() - 0.5) < 5 * 0.5 / 1600**0.5
    columns = warm_up.float().T
    assert (torch.corrcoef(columns) - torch.eye(4)).abs().max() < 0.3
    # Its parts of 128 steps are not the same actions again.
    assert (warm_up[:128] != warm_up[128:256]).any()


def test_priorities_follow_the_td_errors_and_beta_rises():
    module = Listener()
    data = replay(prioritized_replay=True, prioritized_replay_alpha=1.0, prioritized_replay_eps=0.5, batch_size=4,
                  learning_starts=96, train_freq=4, gradient_steps=1, total_timesteps=100)  # fmt: skip
    fit(module, data)
    _, batch = module.batches[-1]
    data.state_dict()  # takes over what the last minibatch left
    expected = module.td_error.double().numpy() + 0.5
    stored = data.sampler.tree[batch["index"].numpy()]
    for index in set(batch["index"].tolist()):
        at = (batch["index"] == index).numpy()
        np.testing.assert_allclose(stored[at], expected[at][-1])
    # Nothing had been learned from before, so that all had the priority of new transitions.
    assert batch["weight"].tolist() == [1.0] * 4


def test_weights_use_beta_between_its_start_and_one():
    betas = []

    class Spy(PrioritizedSampler):
        def weights(self, index, beta, *of_ranks):
            betas.append(beta)
            return super().weights(index, beta, *of_ranks)

    data = replay(prioritized_replay=True, prioritized_replay_beta0=0.2, train_freq=10, learning_starts=0,
                  total_timesteps=50)  # fmt: skip
    data.setup = lambda stage, setup=data.setup: (setup(stage), setattr(data, "sampler", Spy(data.replay, 0)))[0]
    fit(DQN(), data)
    np.testing.assert_allclose(betas, [0.2 + 0.8 * share for share in (0.2, 0.4, 0.6, 0.8, 1.0)])


def test_memory_is_announced_before_it_is_taken(caplog):
    with caplog.at_level(logging.INFO, logger="datamodules.buffers"):
        fit(DQN(), replay(total_timesteps=24))
    assert "replay buffer takes up to" in caplog.text


def test_buffer_beyond_memory_is_refused_with_what_would_fit():
    def images():
        return gym.wrappers.TransformObservation(gym.make("CartPole-v1"), lambda o: np.zeros((84, 84, 4), np.uint8),
                                                 spaces.Box(0, 255, (84, 84, 4), np.uint8))  # fmt: skip

    size = available_bytes() // (84 * 84 * 4) + 10**6
    data = replay(images, buffer_size=size)
    with pytest.raises(
        UsageError,
        match=rf"buffer_size={size}(: MemoryError: Unable| needs .* but .* are free; \d+ would fit)",
    ):
        fit(DQN(), data)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"gradient_steps": 0}, "gradient_steps=0 must be at least 1, or -1"),
    ({"learning_starts": 200}, r"learning_starts=200 must lie in \[0, total_timesteps=200\)"),
    ({"buffer_size": 30, "train_freq": 8, "n_envs": 2}, "buffer_size=30 must be at least 32"),
    *(({"train_freq": wrong}, "train_freq=.* must be a number")
      for wrong in ("non_sense", {}, "4", True, [True, "step"], [1, "day"])),
    ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ({"rollouts_per_epoch": 0}, "rollouts_per_epoch=0 must be at least 1"),
    ({"prioritized_replay": True, "prioritized_replay_eps": 0.0}, "prioritized_replay_eps=0.0 must be a finite number"),
])  # fmt: skip
def test_arguments_that_can_not_be_used(arguments, message):
    with pytest.raises(UsageError, match=message):
        replay(**arguments)


def test_priorities_need_an_algorithm_that_reports_its_errors():
    class Silent(DQN):
        def training_step(self, batch, batch_idx):
            return self.td_loss(self.network(batch["observation"])[:, 0], self.td_target(batch), None)

    with pytest.raises(UsageError, match="Silent does not"):
        fit(Silent(), replay(prioritized_replay=True))


def test_rollouts_and_replay_are_not_mixed_up():
    with pytest.raises(UsageError, match="DQN learns from replay, RolloutDataModule makes rollouts; use ReplayDataM"):
        fit(DQN(), RolloutDataModule("CartPole-v1"))
    with pytest.raises(UsageError, match="PPO learns from rollouts, ReplayDataModule makes replay; use RolloutDataM"):
        fit(PPO(), ReplayDataModule("CartPole-v1"))


def test_rewards_are_learned_by_sign_and_reported_in_points():
    class Points(gym.Env):
        observation_space = spaces.Box(-1, 1, (1,), np.float32)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.zeros(1, np.float32), (7.0, -3.0, 0.0)[self.t - 1], self.t == 3, False, {}

    data = ReplayDataModule(Points, total_timesteps=60, learning_starts=0, eval_freq=0, sign_reward=True)
    model = DQN()
    trainer = fit(model, data)
    assert set(data.replay.reward[data.replay.valid].tolist()) == {1.0, -1.0, 0.0}
    assert set(data.collector.episodes.returns) == {4.0}
    assert trainer.test(model, datamodule=data, verbose=False)[0]["test/mean_reward"] == 4.0


def test_what_is_drawn_is_normalised_by_the_current_statistics():
    seen = []

    class Watch(DQN):
        def prepare(self, sample):
            normalizers = self.trainer.datamodule.collector.normalizers
            seen.append(
                (sample, normalizers.of_observations.running.mean.copy(), normalizers.of_rewards.running.scale())
            )
            return super().prepare(sample)

    data = replay(env_id="MountainCar-v0", total_timesteps=400, buffer_size=5000, norm_obs=True, norm_reward=True,
                  n_steps=2, prioritized_replay=True)  # fmt: skip
    fit(model := Watch(), data)
    sample, mean, scale = seen[-1]
    raw = data.replay.gather(sample["index"], 2)
    running = data.collector.normalizers.of_observations.running
    assert not np.allclose(seen[0][1], mean)  # they move
    np.testing.assert_allclose(running.mean, mean)
    for name in ("observation", "next_observation"):
        # The buffer's rows since overwritten are none here: it is larger than the run.
        expected = np.clip((raw[name].numpy() - running.mean) / running.scale(), -10, 10)
        np.testing.assert_allclose(sample[name].numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sample["reward"].numpy(), np.clip(raw["reward"].numpy() / scale, -10, 10), rtol=1e-6)
    assert set(data.replay.reward[data.replay.valid].tolist()) == {-1.0}
    stored = data.replay.observation[: data.replay.filled * data.n_envs].numpy()
    assert stored.max() < 0.7  # positions and velocities, as the environment returned them
    # Evaluation and `predict` normalise by the same.
    np.testing.assert_allclose(model.observation_statistics[0], running.mean)


@pytest.mark.long
def test_the_policy_acts_on_normalised_observations():
    given = []

    class Watch(DQN):
        def act(self, observation, generator=None, deterministic=False):
            given.append(observation.clone())
            return super().act(observation, generator, deterministic)

    data = replay(env_id="MountainCar-v0", total_timesteps=2000, buffer_size=5000, norm_obs=True, learning_starts=1000)
    fit(Watch(), data)
    observations = torch.cat(given)
    assert 0.2 < float(observations[:, 1].std()) < 3  # velocities themselves are below 0.07


def test_normalised_replay_resumes_exactly(tmp_path):
    make = lambda: replay(env_id="MountainCar-v0", total_timesteps=10**6, norm_obs=True, norm_reward=True,  # noqa: E731
                          rollouts_per_epoch=8)  # fmt: skip
    assert_resumes_exactly(DQN, make, tmp_path, epochs=3)


def test_a_warm_start_takes_the_statistics(tmp_path):
    arguments = {"env_id": "MountainCar-v0", "total_timesteps": 400, "norm_obs": True}
    fit(DQN(), replay(**arguments)).save_checkpoint(tmp_path / "a.ckpt")
    data = replay(**{**arguments, "total_timesteps": 100, "learning_starts": 0})
    fit(DQN(init_from=str(tmp_path / "a.ckpt")), data)
    assert data.collector.normalizers.of_observations.running.count > 400


class Recorded(ReplayDataModule):
    """Two recorded episodes of three transitions each, and no step of the environment."""

    def begin_run(self):
        super().begin_run()
        self.add_rows()

    def add_rows(self):
        observation = torch.arange(6.0)[:, None, None].expand(6, 1, 4)
        ends = torch.tensor([False, False, True])[:, None]
        self.replay.add({
            "observation": observation, "next_observation": observation + 0.5, "action": torch.zeros(6, 1).long(),
            "reward": torch.arange(6.0)[:, None], "valid": torch.ones(6, 1).bool(),
            "terminated": torch.cat([ends, ends & False]), "truncated": torch.cat([ends & False, ends]),
        })  # fmt: skip

    def new_experience(self):
        self.num_timesteps += 1
        return 1


def test_a_subclass_learns_from_recorded_transitions(tmp_path):
    class Looks(DQN):
        def prepare(self, sample):
            seen.update(zip(sample["reward"][:, 0].tolist(), sample["next_observation"][:, 0].tolist(), strict=True))
            return super().prepare(sample)

    def data():
        return Recorded("CartPole-v1", learning_starts=0, buffer_size=16, train_freq=1, batch_size=8,
                        total_timesteps=12, rollouts_per_epoch=4, eval_freq=0)  # fmt: skip

    seen: dict[float, float] = {}
    trainer = fit(Looks(net_arch=[8]), data())
    assert trainer.global_step == 12
    # The successor is the next row's observation, but for the last of an episode, whose own is kept.
    assert seen == {0.0: 1.0, 1.0: 2.0, 2.0: 2.5, 3.0: 4.0, 4.0: 5.0, 5.0: 5.5}
    assert_resumes_exactly(lambda: Looks(net_arch=[8]), data, tmp_path, epochs=3)


def recorded(**arguments):
    sizes = {"learning_starts": 0, "buffer_size": 16, "train_freq": 1, "batch_size": 8, "total_timesteps": 12}
    return Recorded("CartPole-v1", **{**sizes, "rollouts_per_epoch": 4, "eval_freq": 0, **arguments})


@pytest.mark.long
def test_rows_that_a_subclass_adds_are_drawn_by_priority(tmp_path):
    """They had no priority: a run that collects nothing divided by 0, one that collects never drew them."""
    data = recorded(prioritized_replay=True)
    fit(DQN(net_arch=[8]), data)
    assert (data.sampler.tree[np.arange(17)] > 0).tolist() == data.replay.valid.tolist()
    assert_resumes_exactly(lambda: DQN(net_arch=[8]), lambda: recorded(prioritized_replay=True), tmp_path, epochs=3)


def test_rows_that_a_subclass_adds_later_have_the_largest_priority():
    class Filled(Recorded):
        def new_experience(self):
            count = ReplayDataModule.new_experience(self)
            if self.num_timesteps == 2:
                self.sampler.update(torch.tensor([0]), torch.tensor([9.0]))
                self.add_rows()
                powers = self.sampler.tree[np.arange(self.replay.total)]
                largest.append(int((powers == self.sampler.largest**self.alpha).sum()))
            return count

    largest: list[int] = []
    data = Filled("CartPole-v1", learning_starts=0, buffer_size=100, train_freq=1, batch_size=8,
                  prioritized_replay=True, total_timesteps=6, eval_freq=0)  # fmt: skip
    fit(DQN(net_arch=[8]), data)
    assert largest == [7]  # the six new ones, and the row of the largest error


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_bounded_checkpoint_replaces_all_rows_that_a_subclass_adds(tmp_path, prioritized):
    make = lambda: recorded(prioritized_replay=prioritized, checkpoint_buffer_size=2)  # noqa: E731
    fit(DQN(net_arch=[8]), make(), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    data = make()
    with pytest.warns(UserWarning, match="holds the newest 3"):
        fit(DQN(net_arch=[8]), data, ckpt_path=str(tmp_path / "a.ckpt"))
    assert int(data.replay.valid.sum()) == 2 - 1
    if prioritized:
        assert (data.sampler.tree[np.arange(17)] > 0).tolist() == data.replay.valid.tolist()


def test_rows_that_a_subclass_adds_count_in_the_statistics(tmp_path):
    """Observations 0 to 5, rewards of 0, episodes of three rows; a run that collects nothing and one that does."""

    class Looks(DQN):
        def training_step(self, batch, batch_idx):
            seen.extend(batch["observation"][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    seen: list[float] = []
    data, model = recorded(norm_obs=True), Looks(net_arch=[8])
    fit(model, data)
    scaled = (np.arange(6) - 2.5) / np.arange(6).std()
    assert sorted(set(seen)) == pytest.approx(scaled, abs=1e-3)
    mean, scale, _ = model.observation_statistics
    assert (mean, scale) == (pytest.approx([2.5] * 4, abs=1e-3), pytest.approx([np.arange(6).std()] * 4, abs=1e-3))

    class Filled(Recorded):
        new_experience = ReplayDataModule.new_experience

    data = Filled("CartPole-v1", learning_starts=0, train_freq=1, batch_size=8, norm_obs=True, total_timesteps=6,
                  eval_freq=0, buffer_size=100)  # fmt: skip
    trainer = fit(model, data)
    # Those of the first fit, the six rows once more, and what was collected.
    assert data.collector.normalizers.of_observations.running.count == pytest.approx(6 + 6 + 7, abs=1e-3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(Looks(net_arch=[8]), data, tmp_path / "a.ckpt")
    assert data.collector.normalizers.of_observations.running.count == pytest.approx(6 + 6 + 7, abs=1e-3)


@pytest.mark.long
def test_statistics_of_added_rows_are_those_of_a_resumed_run(tmp_path):
    make = lambda: recorded(norm_obs=True, norm_reward=True)  # noqa: E731
    assert_resumes_exactly(lambda: DQN(net_arch=[8]), make, tmp_path, epochs=3)


def test_recorded_rewards_count_as_those_of_an_environment():
    one, other = RewardNormalizer(2, gamma=0.9), RewardNormalizer(2, gamma=0.9)
    rng = np.random.default_rng(0)
    reward, done, valid = rng.normal(size=(9, 2)), rng.random((9, 2)) < 0.3, rng.random((9, 2)) < 0.8
    other.returns[:] = 7.0  # of running episodes
    other.add_recorded(reward, done & valid, valid)
    for t in range(9):
        one(reward[t], done[t] & valid[t], valid[t])
    assert other.running.mean == pytest.approx(one.running.mean) and other.running.var == pytest.approx(one.running.var)
    assert other.returns.tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    "space", [spaces.Dict(a=spaces.Discrete(2)), spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))), spaces.Text(3)]
)
@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_actions_that_no_buffer_stores_are_refused(algorithm, space):
    class Acts(gym.Env):
        observation_space, action_space = spaces.Discrete(2), space

    with pytest.raises(UsageError, match=r"has the action space .* stores actions of Box, Disc"):
        fit(algorithm(net_arch=[8]), ReplayDataModule(Acts, eval_freq=0))
