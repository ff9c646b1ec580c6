"""Environments that take and return tensors: their rollouts are those of the same environments in NumPy."""

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.collector import Collector
from datamodules.envs.tensors import AsArrays, rows_of
from datamodules.episode_statistics import successes
from datamodules.normalization import Normalizers, ObservationNormalizer, RewardNormalizer, RunningMeanStd
from datamodules.tensor_collector import TensorCollector
from rl_modules import A2C, PPO, SAC, TRPO, RecurrentPPO
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves
from tests.fake_device import DEVICE, fake_device
from tests.training import fit

SPACES = {
    "Box": gym.spaces.Box(-5, 5, (3,), np.float64),
    "Discrete": gym.spaces.Discrete(400, start=2),
    "MultiDiscrete": gym.spaces.MultiDiscrete([400, 400], start=[1, 5]),
    "image": gym.spaces.Box(0, 255, (4, 4), np.uint8),
    "Dict": gym.spaces.Dict({"a": gym.spaces.Box(-5, 5, (2,), np.float32), "b": gym.spaces.Discrete(400)}),
    "Tuple": gym.spaces.Tuple((gym.spaces.Box(-5, 5, (2,), np.float32), gym.spaces.Discrete(400))),
}
ACTIONS = {
    "Discrete": gym.spaces.Discrete(4, start=3), "Box": gym.spaces.Box(-0.5, 0.5, (2,), np.float32),
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 3], start=[1, 2]), "MultiBinary": gym.spaces.MultiBinary(2),
}  # fmt: skip


class Walk(gym.Env):
    """Episodes of chance lengths, whose observations and rewards tell one from another."""

    def __init__(self, observation: str = "Box", action: str = "Discrete") -> None:
        self.observation_space, self.action_space = copy.deepcopy(SPACES[observation]), ACTIONS[action]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.left, self.cut = int(self.np_random.integers(1, 7)), bool(self.np_random.integers(2))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.left -= 1
        over = self.left == 0
        reward = float(np.float32(self.np_random.normal() + np.sum(action)))
        info = {"is_success": self.cut, "last": reward} if over else {}
        return self.observation_space.sample(), reward, over and not self.cut, over and self.cut, info


def to_tensors(value: Any, device: torch.device | str = "cpu") -> Any:
    if isinstance(value, dict):
        return {name: to_tensors(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(to_tensors(part, device) for part in value)
    return torch.as_tensor(np.array(value)).to(device)


class OfTensors(VectorWrapper):
    """A vector of NumPy arrays as one of tensors; it writes them into the same memory at every step."""

    def __init__(self, env: Any, device: torch.device | str = "cpu", final_obs: bool = True) -> None:
        super().__init__(env)
        self.device, self.final_obs, self.kept = device, final_obs, None

    def _observation(self, observation: Any) -> Any:
        made = to_tensors(observation, self.device)
        if self.kept is None or self.device != "cpu":
            self.kept = made
            return made
        for own, new in zip(_leaves(self.kept), _leaves(made), strict=True):
            own.copy_(new)
        return self.kept

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        options = None if options is None else {name: mask.cpu().numpy() for name, mask in options.items()}
        return self._observation(self.env.reset(seed=seed, options=options)[0]), {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        assert actions.device.type == torch.device(self.device).type
        observation, reward, terminated, truncated, info = self.env.step(actions.cpu().numpy())
        told: dict[str, Any] = {}
        if "final_obs" in info and self.final_obs:
            some = next(x for x in info["final_obs"] if x is not None)
            told["final_obs"] = _batched([some if x is None else x for x in info["final_obs"]], self.device)
        success = info.get("final_info", info)
        names = ("is_success", "_is_success", "last", "_last")
        told.update({key: to_tensors(success[key], self.device) for key in names if key in success})
        rest = (to_tensors(x, self.device) for x in (reward, terminated.astype(np.uint8), truncated))
        return self._observation(observation), *rest, told


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict | tuple):
        return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(part)]
    return [value]


def _batched(rows: list[Any], device: Any) -> Any:
    if isinstance(rows[0], dict):
        return {name: _batched([row[name] for row in rows], device) for name in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(_batched([row[i] for row in rows], device) for i in range(len(rows[0])))
    return to_tensors(np.stack(rows), device)


def vector(mode: str = "same_step", observation: str = "Box", action: str = "Discrete", n: int = 3) -> Any:
    modes = {"same_step": AutoresetMode.SAME_STEP, "next_step": AutoresetMode.NEXT_STEP,
             "disabled": AutoresetMode.DISABLED}  # fmt: skip
    return SyncVectorEnv([lambda: Walk(observation, action)] * n, copy=False, autoreset_mode=modes[mode])


def acting(space: gym.Space) -> Callable[..., dict[str, torch.Tensor]]:
    """A policy of chance, with a value that its observation decides."""

    def act(observation: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        leaves = tree_leaves(observation)
        n = len(leaves[0])
        value = sum(leaf.reshape(n, -1).double().sum(1) for leaf in leaves).float()
        shape = (n, *(space.shape or ()))
        if isinstance(space, gym.spaces.Box):
            action = torch.randn(shape, generator=generator)
        else:
            action = torch.randint(0, 2, shape, generator=generator)
        return {"action": action, "value": value}

    return act


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_infos_of_ends_are_those_of_arrays(mode: str) -> None:
    heard: list[list[tuple[float, int, float]]] = []
    for envs, collects in ((vector(mode), Collector), (OfTensors(vector(mode)), TensorCollector)):
        collector, found = collects(envs, [5, 6, 7], 9, "walk"), []
        collector.episodes.info_keywords = ("last",)
        collector.episodes.on_finished = lambda *episode, found=found: found.append(episode)
        for _ in range(3):
            collector.collect(acting(ACTIONS["Discrete"]), 6, torch.device("cpu"))
        heard.append(found)
    assert heard[0] == heard[1] and len(heard[0]) > 5 and len({last for *_, last in heard[0]}) > 5


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", SPACES)
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_a_rollout_is_that_of_arrays(mode: str, observation: str, action: str) -> None:
    arrays, tensors = vector(mode, observation, action), OfTensors(vector(mode, observation, action))
    cpu, act = torch.device("cpu"), acting(ACTIONS[action])
    expected = Collector(arrays, [5, 6, 7], 9, "walk")
    found = TensorCollector(tensors, [5, 6, 7], 9, "walk")
    for _ in range(3):
        one, other = expected.collect(act, 12, cpu), found.collect(act, 12, cpu)
        assert set(one) == set(other)
        done = one["terminated"] | one["truncated"]
        assert done.any()
        for name in one:
            for a, b in zip(tree_leaves(one[name]), tree_leaves(other[name]), strict=True):
                assert a.dtype == b.dtype, name
                # What follows a reset row is no transition's successor.
                assert torch.equal(a[one["valid"]], b[one["valid"]]), name
        assert torch.equal(one["next_value"], other["next_value"])
    assert expected.episodes.means() == found.episodes.means()
    assert "rollout/success_rate" in found.episodes.means()


def test_an_episode_that_says_nothing_of_success_failed_where_others_say_it() -> None:
    class TellsSuccess(Walk):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            *returned, info = super().step(action)
            return *returned, info if info.get("is_success") else {}  # type: ignore[return-value]

    def made() -> Any:
        return SyncVectorEnv([TellsSuccess] * 3, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)

    expected, found = Collector(made(), [5, 6, 7], 9, "walk"), TensorCollector(OfTensors(made()), [5, 6, 7], 9, "walk")
    for collector in (expected, found):
        collector.collect(acting(ACTIONS["Discrete"]), 12, torch.device("cpu"))
    assert expected.episodes.means() == found.episodes.means()
    assert 0 < found.episodes.means()["rollout/success_rate"] < 1


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_nothing_passes_through_numpy_on_a_device(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device of the tests a tensor has no NumPy array, and an operation with one of the CPU fails."""
    act = acting(ACTIONS["Discrete"])

    def on_device(observation: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        assert observation.device == DEVICE
        return {key: x.to(DEVICE) for key, x in act(observation.cpu(), torch.Generator()).items()}

    made = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *device: made())  # the device has none of its own
    with fake_device():
        normalizers = Normalizers(ObservationNormalizer(SPACES["Box"]), RewardNormalizer(3, gamma=0.9))
        collector = TensorCollector(OfTensors(vector(mode), DEVICE), [5, 6, 7], 9, "walk", normalizers)
        rollout = collector.collect(on_device, 12, DEVICE)
        assert all(x.device == DEVICE for x in tree_leaves(dict(rollout)))
        state = collector.state_dict()
    assert state["observation"].device.type == "cpu"


def make(mode: str = "same_step", n: int = 4) -> Any:
    return OfTensors(gym.make_vec("CartPole-v1", n, "sync", vector_kwargs={"autoreset_mode": AutoresetMode(mode)}))


def same_step() -> Any:
    return make("SameStep")


def next_step() -> Any:
    return make("NextStep")


class Swings(OfTensors):
    def __init__(self) -> None:
        modes = {"autoreset_mode": AutoresetMode.SAME_STEP}
        super().__init__(gym.make_vec("Pendulum-v1", 2, "sync", vector_kwargs=modes, max_episode_steps=20))


@pytest.mark.long
@pytest.mark.parametrize("factory", [same_step, next_step])
@pytest.mark.parametrize("model", [PPO, A2C, TRPO, lambda: RecurrentPPO(lstm_hidden_size=8)])
def test_algorithms_learn_and_are_evaluated(factory: Callable[[], Any], model: Callable[[], Any]) -> None:
    data = RolloutDataModule(factory, n_steps=16, total_timesteps=512, eval_freq=256, n_eval_episodes=2)
    trainer = fit(model(), data)
    assert type(data.collector) is TensorCollector
    assert data.num_timesteps >= 512
    assert {"eval/mean_reward", "rollout/ep_rew_mean"} <= set(trainer.callback_metrics)


def test_replay_keeps_transitions_in_the_hosts_memory() -> None:
    data = ReplayDataModule(Swings, learning_starts=20, total_timesteps=60, batch_size=8, eval_freq=40,
                            n_eval_episodes=2, norm_obs=True)  # fmt: skip
    trainer = fit(SAC(net_arch=[8]), data)
    assert isinstance(data.collector.envs, AsArrays)
    assert "eval/mean_reward" in trainer.callback_metrics
    assert data.replay.valid.sum() == 60


def test_a_run_goes_on_with_new_episodes(tmp_path: Any) -> None:
    data = RolloutDataModule(same_step, n_steps=16, total_timesteps=128, eval_freq=0)
    fit(PPO(), data).save_checkpoint(tmp_path / "a.ckpt")
    more = RolloutDataModule(same_step, n_steps=16, total_timesteps=256, eval_freq=0)
    with pytest.warns(UserWarning, match="its engine has no state to restore"):
        fit(PPO(), more, ckpt_path=tmp_path / "a.ckpt")
    assert more.num_timesteps == 256


def test_a_vector_that_was_given_trains_without_evaluation() -> None:
    data = RolloutDataModule(same_step(), n_steps=16, total_timesteps=128, eval_freq=0)
    fit(PPO(), data)
    assert type(data.collector) is TensorCollector


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("observation", ["Box", "Discrete", "Dict"])
def test_a_rollout_is_normalised_by_the_statistics_before_it(observation: str, mode: str) -> None:
    """Worked from the raw rollout: normalised values, and the statistics that a merge in NumPy has."""
    if observation == "Discrete":
        of_observations = None
    else:
        of_observations = ObservationNormalizer(SPACES[observation], clip=1.5)
    normalizers = Normalizers(of_observations, RewardNormalizer(3, gamma=0.9, clip=1.2))
    raw = TensorCollector(OfTensors(vector(mode, observation)), [5, 6, 7], 9, "walk")
    collector = TensorCollector(OfTensors(vector(mode, observation)), [5, 6, 7], 9, "walk", normalizers)
    by_hand = {"obs": RunningMeanStd((3,) if observation == "Box" else (2,)), "return": RunningMeanStd(())}
    returns, cpu = np.zeros(3), torch.device("cpu")

    def act(observation: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"action": torch.randint(0, 2, (3,), generator=generator)}

    def floats(tree: Any) -> np.ndarray:
        return (tree["a"] if isinstance(tree, dict) else tree).numpy()

    for _ in range(3):
        expected, found = raw.collect(act, 12, cpu), collector.collect(act, 12, cpu)
        if of_observations is not None:
            for name in ("observation", "next_observation"):
                scaled = (floats(expected[name]) - by_hand["obs"].mean) / by_hand["obs"].scale()
                np.testing.assert_allclose(floats(found[name]), np.clip(scaled, -1.5, 1.5), rtol=1e-4, atol=1e-5)
            by_hand["obs"].update(floats(expected["observation"])[expected["valid"].numpy()])
            running = of_observations.parts()[0]
            np.testing.assert_allclose(running.mean, by_hand["obs"].mean, rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(running.var, by_hand["obs"].var, rtol=1e-6)
            assert running.count == pytest.approx(by_hand["obs"].count)
        else:
            assert torch.equal(found["observation"], expected["observation"])
        scaled = expected["reward"].numpy() / by_hand["return"].scale()
        np.testing.assert_allclose(found["reward"].numpy(), np.clip(scaled, -1.2, 1.2), rtol=1e-5)
        seen = []
        for t in range(12):
            valid = expected["valid"][t].numpy()
            returns = np.where(valid, returns * 0.9 + expected["reward"][t].numpy(), returns)
            seen += list(returns[valid])
            returns[(expected["terminated"] | expected["truncated"])[t].numpy()] = 0.0
        by_hand["return"].update(np.array(seen))
        assert normalizers.of_rewards is not None
        np.testing.assert_allclose(normalizers.of_rewards.running.var, by_hand["return"].var, rtol=1e-4)
        np.testing.assert_allclose(normalizers.of_rewards.returns, returns, rtol=1e-5, atol=1e-6)


def test_the_policy_sees_what_it_learns_from_and_is_evaluated_with() -> None:
    seen = []

    class Watched(PPO):
        def act(self, observation: Any, *args: Any, **arguments: Any) -> Any:
            if self.trainer.training:
                seen.append(observation.clone())
            return super().act(observation, *args, **arguments)

        def prepare(self, rollout: Any) -> Any:
            assert torch.equal(rollout["observation"], torch.stack(seen[:16]))
            seen.clear()
            return super().prepare(rollout)

    data = RolloutDataModule(same_step, n_steps=16, total_timesteps=256, eval_freq=128, n_eval_episodes=2,
                             norm_obs=True, norm_reward=True, rollouts_per_epoch=1)  # fmt: skip
    model = Watched()
    trainer = fit(model, data)
    assert "eval/mean_reward" in trainer.callback_metrics
    mean, std, _ = model.observation_statistics
    assert mean.shape == (4,) and (std != 1).all()


@pytest.mark.parametrize(("arguments", "says"), [
    ({"vectorization_mode": "async"}, "vectorization_mode=async does not apply"),
    ({"autoreset_mode": "next_step", "n_envs": 3}, "autoreset_mode=next_step, n_envs=3 does not apply"),
])  # fmt: skip
def test_arguments_that_a_vector_does_not_follow_are_named(arguments: dict[str, Any], says: str) -> None:
    data = RolloutDataModule(same_step, n_steps=16, total_timesteps=128, eval_freq=0, **arguments)
    with pytest.warns(UserWarning, match=f"same_step is a vector of 4 environments.*{says}"):
        fit(PPO(), data)
    assert data.n_envs == 4


def test_arguments_for_a_vector_that_is_made_already_are_refused() -> None:
    with pytest.raises(UsageError, match="env_kwargs={'a': 1} are for a callable that makes the environments"):
        fit(PPO(), RolloutDataModule(same_step(), n_steps=16, total_timesteps=128, eval_freq=0, env_kwargs={"a": 1}))


def test_an_end_without_its_final_observation_is_refused() -> None:
    collector = TensorCollector(OfTensors(vector(), final_obs=False), [5, 6, 7], 9, "walk")
    with pytest.raises(UsageError, match=r"walk resets in the step in which an episode ends.*no final_obs"):
        collector.collect(acting(ACTIONS["Discrete"]), 12, torch.device("cpu"))


def test_a_nan_is_named() -> None:
    class Broken(OfTensors):
        def step(self, actions: Any) -> Any:
            observation, reward, *rest = super().step(actions)
            return observation, reward * float("nan"), *rest

    collector = TensorCollector(Broken(vector()), [5, 6, 7], 9, "walk")
    with pytest.raises(UsageError, match="environment 0 of walk returned a NaN or infinite reward in row 0"):
        collector.collect(acting(ACTIONS["Discrete"]), 4, torch.device("cpu"))


def test_an_environment_that_fails_is_named() -> None:
    class Fails(OfTensors):
        def step(self, actions: Any) -> Any:
            raise ValueError("no such joint")

    collector = TensorCollector(Fails(vector()), [5, 6, 7], 9, "walk")
    with pytest.raises(UsageError, match="the environment walk raised ValueError: no such joint"):
        collector.collect(acting(ACTIONS["Discrete"]), 4, torch.device("cpu"))


@pytest.mark.parametrize("observation", SPACES)
def test_as_arrays_is_the_vector_in_numpy(observation: str) -> None:
    plain, wrapped = vector("same_step", observation), AsArrays(OfTensors(vector("same_step", observation)))
    ours, _ = wrapped.reset(seed=[3])
    for a, b in zip(_leaves(to_tensors(plain.reset(seed=3)[0])), _leaves(to_tensors(ours)), strict=True):
        assert torch.equal(a, b)
    for _ in range(12):
        action = np.array([3, 4, 5])
        one, other = copy.deepcopy(plain.step(action)), copy.deepcopy(wrapped.step(action))
        for a, b in zip(_leaves(to_tensors(one[:4])), _leaves(to_tensors(other[:4])), strict=True):
            assert torch.equal(a.double(), b.double())
        for i in np.flatnonzero(one[2] | one[3]):
            final = one[4]["final_obs"][i], other[4]["final_obs"][i]
            for a, b in zip(*(_leaves(to_tensors(x)) for x in final), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("nested", [False, True], ids=["info", "final_info"])
def test_as_arrays_says_who_succeeded(nested: bool) -> None:
    """As Gymnasium's vectors that reset in the same step do, in the infos of the episodes that ended."""

    class Says(OfTensors):
        def step(self, actions: Any) -> Any:
            *rest, info = super().step(actions)
            said = {name: info.pop(name) for name in ("is_success", "_is_success") if name in info}
            return *rest, {**info, **({"final_info": said} if nested and said else said)}

    plain, wrapped = vector("same_step"), AsArrays(Says(vector("same_step")))
    plain.reset(seed=3)
    wrapped.reset(seed=[3])
    seen: list[float] = []
    for _ in range(12):
        one, other = (env.step(np.array([3, 4, 5])) for env in (plain, wrapped))
        found = successes(other[2] | other[3], other[4])
        assert found == successes(one[2] | one[3], one[4])
        seen += found.values()
    assert set(seen) == {0.0, 1.0}


def test_rows_of_nested_batches() -> None:
    batch = {"a": np.arange(4).reshape(2, 2), "b": (np.arange(2), np.arange(2) + 5)}
    first, second = rows_of(batch, 2)
    assert first["b"] == (0, 5) and second["b"] == (1, 6)
    np.testing.assert_array_equal(second["a"], [2, 3])
