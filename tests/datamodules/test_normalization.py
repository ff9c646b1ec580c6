import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.normalization import ObservationNormalizer, RewardNormalizer, RunningMeanStd
from rl_modules import DQN, PPO
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import normalize
from tests.training import assert_resumes_exactly, fit


def test_running_moments_equal_those_of_all_samples():
    rng = np.random.default_rng(0)
    batches = [rng.normal(3, 2, (n, 4)) for n in (1, 7, 30, 2)]
    running = RunningMeanStd((4,), epsilon=0.0)
    for batch in batches:
        running.update(batch)
    together = np.concatenate(batches)
    np.testing.assert_allclose(running.mean, together.mean(0), rtol=1e-12)
    np.testing.assert_allclose(running.var, together.var(0), rtol=1e-12)


def test_normalized_observations_are_whitened_and_clipped():
    statistic = (np.array([1.0, -2.0]), np.array([2.0, 0.5]), 3.0)
    got = normalize(np.array([[5.0, -2.0], [1.0, 100.0]]), statistic)
    np.testing.assert_array_equal(got, np.array([[2.0, 0.0], [0.0, 3.0]], np.float32))
    assert got.dtype == np.float32


def test_images_and_integers_in_a_dict_are_left_alone():
    space = spaces.Dict(x=spaces.Box(-1, 1, (2,)), image=spaces.Box(0, 255, (8, 8, 1), np.uint8), n=spaces.Discrete(3))
    normalizer = ObservationNormalizer(space)
    batch = {"x": np.ones((5, 2), np.float32), "image": np.full((5, 8, 8, 1), 7, np.uint8), "n": np.arange(5) % 3}
    normalizer.update(batch)
    got = normalizer(batch)
    assert got["image"] is batch["image"]
    assert got["n"] is batch["n"]
    assert np.abs(got["x"]).max() < 1e-1  # the mean of ones is one


@pytest.mark.parametrize("bound", [1.0, 255.0])
def test_images_of_floats_are_left_to_the_encoder_that_divides_them(bound):
    image = spaces.Box(0.0, bound, (36, 36, 3), np.float32)
    normalizer = ObservationNormalizer(spaces.Dict(x=spaces.Box(-1, 1, (2,)), image=image))
    batch = {"x": np.ones((5, 2), np.float32), "image": np.full((5, 36, 36, 3), bound, np.float32)}
    normalizer.update(batch)
    assert normalizer(batch)["image"] is batch["image"]
    with pytest.raises(UsageError, match="no real numbers to normalise; images are scaled by their bounds"):
        ObservationNormalizer(image)


def test_a_field_of_real_numbers_is_no_image():
    field = spaces.Box(-np.inf, np.inf, (36, 36, 3), np.float32)
    batch = np.random.default_rng(0).normal(50.0, 3.0, (40, 36, 36, 3)).astype(np.float32)
    normalizer = ObservationNormalizer(field)
    normalizer.update(batch)
    assert abs(normalizer(batch).mean()) < 0.01


def test_nothing_to_normalize_is_refused():
    with pytest.raises(UsageError, match="no real numbers"):
        ObservationNormalizer(spaces.Discrete(4))


def test_rewards_are_divided_by_the_std_of_the_discounted_return():
    """By hand: two environments, γ = 0.5, the second ends after its first step."""
    normalizer = RewardNormalizer(2, gamma=0.5)
    all_valid = np.array([True, True])
    normalizer(np.array([1.0, 2.0]), np.array([False, True]), all_valid)
    got = normalizer(np.array([3.0, 4.0]), np.array([False, False]), all_valid)
    returns = np.array([1.0, 2.0, 0.5 * 1 + 3, 4.0])
    weights = np.array([1e-4, 1, 1, 1, 1])
    samples = np.concatenate([[0.0], returns])
    mean = np.average(samples, weights=weights)
    # The prior counts as 1e-4 samples with mean 0 and variance 1.
    var = (np.average((samples - mean) ** 2, weights=weights)) + 1e-4 / weights.sum()
    np.testing.assert_allclose(got, np.array([3.0, 4.0]) / np.sqrt(var + 1e-8), rtol=1e-9)


def test_a_reset_row_counts_nowhere():
    one, other = RewardNormalizer(1, 0.9), RewardNormalizer(1, 0.9)
    yes, no = np.array([True]), np.array([False])
    for normalizer in (one, other):
        normalizer(np.array([1.0]), yes, yes)
    other(np.array([0.0]), no, no)
    np.testing.assert_array_equal(one(np.array([2.0]), no, yes), other(np.array([2.0]), no, yes))


class Scalars(gym.Env):
    """Observes a number without dimensions, alone or as a part."""

    def __init__(self, kind: str) -> None:
        number = spaces.Box(-100, 100, (), np.float32)
        self.kind = kind
        self.observation_space = {"alone": number, "dict": spaces.Dict({"x": number}),
                                  "tuple": spaces.Tuple([number, spaces.Box(-1, 1, (2,))])}[kind]  # fmt: skip
        self.action_space = spaces.Discrete(2)

    def _observation(self):
        x = np.float32(self.t)
        return {"alone": x, "dict": {"x": x}, "tuple": (x, np.zeros(2, np.float32))}[self.kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        return self._observation(), float(action), False, self.t == 7, {}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["alone", "dict", "tuple"])
def test_statistics_of_a_number_without_dimensions_are_saved_and_resumed(kind, tmp_path):
    def data():
        return RolloutDataModule(Scalars, env_kwargs={"kind": kind}, n_envs=2, n_steps=8, norm_obs=True, eval_freq=0,
                                 total_timesteps=96, rollouts_per_epoch=1)  # fmt: skip

    assert_resumes_exactly(lambda: PPO(net_arch=[8]), data, tmp_path, epochs=3)
    loaded = PPO.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    first = loaded.observation_statistics
    mean, std, _ = {"alone": lambda: first, "dict": lambda: first["x"], "tuple": lambda: first["0"]}[kind]()
    assert mean.shape == std.shape == () and 2 < mean < 4  # of 0 … 6, or a little more
    assert 1.8 < std < 2.4


class _One(gym.Env):
    """Reward 1 per step."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t >= 5, False, {}


@pytest.mark.long
@pytest.mark.parametrize(("gamma", "spread"), [(0.0, 0.0), (0.5, 0.34), (1.0, 1.41)])
def test_rewards_are_scaled_by_the_spread_of_their_sum_with_the_algorithms_discount(gamma, spread):
    """Sums within an episode of five ones: 1 to 1 where γ = 0, and 1 to 5 where γ = 1."""
    data = RolloutDataModule(_One, n_envs=1, n_steps=500, total_timesteps=500, eval_freq=0, norm_reward=True)
    fit(PPO(net_arch=[8], gamma=gamma), data)
    variance = float(data.collector.normalizers.of_rewards.running.var)
    sums = np.cumsum(gamma ** np.arange(5))
    assert variance**0.5 == pytest.approx(sums.std(), abs=0.01) == pytest.approx(spread, abs=0.01)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    ("name", "argument"), [("NormalizeObservation", "norm_obs"), ("NormalizeReward", "norm_reward")]
)
def test_a_wrapper_with_statistics_of_its_own_is_answered_with_the_argument(vector, name, argument):
    """Its statistics differ between training and evaluation, and no checkpoint has them."""
    common = {"n_steps": 8, "total_timesteps": 16, "eval_freq": 0}
    wrapper = getattr(gym.wrappers.vector if vector else gym.wrappers, name)

    def make():
        return wrapper(gym.make_vec("Pendulum-v1", 2, "sync") if vector else gym.make("Pendulum-v1"))

    with pytest.warns(UserWarning, match=f"the wrapper {name} keeps running statistics .* set {argument}=True"):
        fit(PPO(net_arch=[8]), RolloutDataModule(make, **common))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*running statistics")
        fit(PPO(net_arch=[8]), RolloutDataModule("Pendulum-v1", n_envs=2, **common, **{argument: True}))


@pytest.mark.parametrize(
    ("given", "switch"),
    [({"norm_gamma": 0.5}, "norm_reward"), ({"clip_reward": 1.0}, "norm_reward"), ({"clip_obs": 1.0}, "norm_obs")],
    ids=str,
)
def test_an_argument_of_a_normalisation_that_is_off_is_named(given, switch):
    small = {"n_envs": 2, "n_steps": 16, "total_timesteps": 64, "eval_freq": 0}
    name, value = next(iter(given.items()))
    with pytest.warns(UserWarning, match=f"^{name}={value} does nothing while {switch} is false; set that to") as told:
        fit(PPO(net_arch=[8]), RolloutDataModule("CartPole-v1", **small, **given))
    assert sum("does nothing" in str(one.message) for one in told) == 1
    for quiet in ({**given, switch: True}, {}, {"clip_obs": 10.0, "clip_reward": 10.0}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*does nothing while")
            fit(PPO(net_arch=[8]), RolloutDataModule("CartPole-v1", **small, **quiet))


class Once(gym.Env):
    """A simulator that returns one bad number, in the sixth step of all."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)
    steps = 0

    def __init__(self, value=np.nan, where="reward"):
        self.value, self.where = value, where

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.normal(size=1), {}

    def step(self, action):
        Once.steps += 1
        self.count += 1
        bad = self.value if Once.steps == 6 else None
        observation = self.np_random.normal(size=1) if bad is None or self.where == "reward" else np.array([bad])
        reward = 1.0 if bad is None or self.where != "reward" else bad
        return observation, reward, self.count == 4, False, {}


@pytest.mark.parametrize("where", ["reward", "observation"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e200])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("replay", [False, True])
def test_one_bad_number_is_in_no_statistic_and_the_run_resumes(where, value, norm, replay, tmp_path):
    Once.steps = 0
    shared = {"n_envs": 1, "env_kwargs": {"value": value, "where": where}, "norm_obs": norm, "norm_reward": norm,
              "total_timesteps": 32, "eval_freq": 0}  # fmt: skip

    def make():
        if replay:
            return ReplayDataModule(Once, **shared, learning_starts=8, buffer_size=64)
        return RolloutDataModule(Once, **shared, n_steps=8)

    algorithm, data = DQN if replay else PPO, make()
    found = (
        "a NaN or infinite"
        if not np.isfinite(value) or (where == "observation" and not norm)
        else rf"the {where} -1e\+200, beyond ±1e\+150"
    )
    with pytest.raises(UsageError, match=f"^environment 0 of .*Once returned {found}"):
        fit(algorithm(net_arch=[4]), data, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    collector = data.collector
    assert np.isfinite(collector.episodes.running_return).all()
    assert np.isfinite(collector.episodes.returns).all()
    for part in collector.normalizers.parts() if norm else ():
        assert np.isfinite(part.mean).all() and (part.var < 1e3).all()
    model, resumed = algorithm(net_arch=[4]), make()
    with pytest.warns(UserWarning, match="start a new episode"):
        fit(model, resumed, ckpt_path=tmp_path / "on_exception.ckpt")
    assert resumed.num_timesteps == 32
    assert all(p.isfinite().all() for p in model.parameters())


def test_rows_that_a_subclass_adds_are_checked_before_they_count():
    class Demonstrations(ReplayDataModule):
        def begin_run(self):
            super().begin_run()
            shape = (3, 1)
            self.replay.add({
                "observation": torch.zeros(*shape, 4), "next_observation": torch.zeros(*shape, 4),
                "action": torch.zeros(shape, dtype=torch.int64), "reward": torch.tensor([[0.0], [torch.inf], [0.0]]),
                **dict.fromkeys(("terminated", "truncated"), torch.zeros(shape, dtype=torch.bool)),
                "valid": torch.ones(shape, dtype=torch.bool),
            })  # fmt: skip

    data = Demonstrations("CartPole-v1", n_envs=1, total_timesteps=16, learning_starts=4, norm_reward=True)
    with pytest.raises(UsageError, match=r"environment 0 of the rows added to CartPole-v1 returned a NaN or infinite"):
        fit(DQN(net_arch=[4]), data)
    assert data.collector.normalizers.of_rewards.running.var == 1
