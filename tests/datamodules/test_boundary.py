"""What environments return is checked where it enters, in every way of stepping; wrong kinds are one sentence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from datamodules.collector import Collector
from datamodules.envs.tensors import AsArrays
from datamodules.envs.vector import make_vector_env
from datamodules.evaluation import run_episodes
from datamodules.tensor_collector import TensorCollector
from rl_modules.common.errors import UsageError
from tests.datamodules.test_tensors import OfTensors

BOX = spaces.Box(-9, 9, (3,), np.float32)
MODES = {mode.name.lower(): mode for mode in AutoresetMode}


def act(observation: Any, generator: Any) -> dict[str, torch.Tensor]:
    first = observation["a"] if isinstance(observation, dict) else observation
    return {"action": torch.zeros(len(first), dtype=torch.int64), "value": torch.zeros(len(first))}


class Counts(gym.Env):
    """Counts to 3 and ends; the last step is ``returned`` with the given parts replaced."""

    action_space = spaces.Discrete(2)

    def __init__(self, returned: dict[str, Any] | None = None, infos: Callable[[int], dict] = lambda t: {}) -> None:
        self.returned, self.infos = returned or {}, infos
        self.observation_space = self.returned.pop("space", BOX)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), self.infos(0)

    def _observation(self) -> Any:
        x = np.full(3, self.t, self.observation_space.dtype or np.float32)
        return {"a": x, "b": x[:1]} if isinstance(self.observation_space, spaces.Dict) else x

    def step(self, action: Any) -> Any:
        self.t += 1
        parts = {"observation": self._observation(), "reward": 1.0, "terminated": self.t == 3, "truncated": False,
                 "info": self.infos(self.t)}  # fmt: skip
        return tuple({**parts, **(self.returned if self.t == 3 else {})}.values())


NESTED = spaces.Dict({"a": BOX, "b": spaces.Box(-9, 9, (1,), np.float32)})
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"observation": np.zeros(1, np.float32)},
        r":Counts returned .* of shape \(1,\), .*space Box\(.* \(3,\)",
    ),
    "text": ({"observation": np.array(["1", "2", "3"])}, r"Counts returned .*'<U1'\) to dtype\('float32'"),
    "complex": ({"observation": np.zeros(3, np.complex64)}, r"does not fit .*complex64'\) to dtype\('float32'"),
    "ragged": ({"observation": [1.0, [2.0], 3.0]}, r"the observation \[1.0, \[2.0\], 3.0\], which does not fit"),
    "fractions": ({"space": spaces.Box(0, 9, (3,), np.int64), "observation": np.ones(3)}, r"float64'\) to .*int64"),
    "part": ({"space": NESTED, "observation": {"a": np.zeros(3), "b": np.zeros(2)}}, r"'b': array.* does not fit"),
    "no part": ({"space": NESTED, "observation": {"a": np.zeros(3)}}, "does not fit .*KeyError: 'b'"),
    "terminated": ({"terminated": "False"}, "step of .*:Counts returned terminated='False'; it must be true or false"),
    "truncated": ({"terminated": True, "truncated": None}, "returned truncated=None; it must be true or false"),
    "two ends": (
        {"terminated": np.array([True, False])},
        "environment mine raised ValueError: The truth value of an arr",
    ),
    "half": ({"terminated": 0.5}, "returned terminated=0.5; it must be true or false"),
    "reward": ({"reward": np.ones(3)}, "environment mine raised ValueError: can only convert an array of size 1"),
    "complex reward": ({"reward": 1 + 2j}, "environment mine raised TypeError: .* not 'complex'"),
    "list reward": ({"reward": [1.0]}, "environment mine raised ValueError: setting an array element with a sequence"),
    "info": ({"info": None}, r"Counts returned \(.*, None\); Gymnasium's step returns \(observation, .*, info\)"),
}


class Alternates:
    def predict(self, observation: Any, state: Any, episode_start: Any, deterministic: bool) -> Any:
        return np.zeros(len(episode_start), np.int64), state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRONG)
def test_a_last_step_of_another_kind_is_one_sentence(name: str, mode: str) -> None:
    returned, sentence = WRONG[name]
    envs = [make_vector_env(lambda: Counts(dict(returned)), 2, "sync", mode) for _ in range(2)]
    with pytest.raises(UsageError, match=sentence):
        Collector(envs[0], [1, 2], 0, "mine").collect(act, 8, torch.device("cpu"))
    with pytest.raises(UsageError, match=sentence):
        run_episodes(Alternates(), envs[1], [1, 2], 4, name="mine")


@pytest.mark.long
@pytest.mark.parametrize("name", ["shape", "text", "terminated"])
def test_so_it_is_in_other_processes(name: str) -> None:
    returned, sentence = WRONG[name]
    envs = make_vector_env(lambda: Counts(dict(returned)), 2, "async", "same_step")
    with pytest.raises(UsageError, match=sentence):
        Collector(envs, [1, 2], 0, "mine").collect(act, 8, torch.device("cpu"))


RIGHT: list[dict[str, Any]] = [
    {"terminated": np.True_, "reward": np.float32(1.0)}, {"terminated": 1, "truncated": 0, "reward": 1},
    {"terminated": np.array([True]), "reward": np.array([1.0])}, {"observation": np.full(3, 3.0)},
    {"observation": [3, 3, 3]}, {"observation": (True, True, True)}, {"terminated": torch.tensor(True)},
    {"reward": torch.tensor([1.0])}, {"space": spaces.Box(0, 9, (3,)), "observation": np.full(3, 3, np.uint8)},
]  # fmt: skip


@pytest.mark.parametrize("returned", RIGHT, ids=repr)
def test_what_gymnasium_takes_is_taken(returned: dict[str, Any]) -> None:
    collector = Collector(make_vector_env(lambda: Counts(dict(returned)), 2), [1, 2], 0, "mine")
    rollout: Any = collector.collect(act, 6, torch.device("cpu"))
    assert rollout["terminated"][2::3].all() and rollout["terminated"].sum() == 4
    assert (rollout["reward"] == 1).all()
    last = 1.0 if isinstance(returned.get("observation"), tuple) else 3.0
    assert rollout["next_observation"].dtype is torch.float32 and (rollout["next_observation"][2] == last).all()


# ---------------------------------------------------------------- vectors of the user's


class Own(VectorEnv):
    """Two counters to 3; parts of what a step returns are replaced by functions of them."""

    def __init__(self, mode: AutoresetMode = AutoresetMode.SAME_STEP, **changed: Callable[[Any], Any]) -> None:
        self.num_envs, self.changed = 2, changed
        self.single_observation_space, self.single_action_space = BOX, spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(BOX, 2)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)
        self.metadata = {"autoreset_mode": mode}

    def _observation(self) -> np.ndarray:
        return np.repeat(self.t[:, None], 3, 1).astype(np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = np.zeros(2)
        return self._observation(), {}

    def step(self, actions: Any) -> Any:
        self.t = self.t + 1
        done = self.t == 3
        parts = {"observation": self._observation(), "reward": np.ones(2), "terminated": done,
                 "truncated": np.zeros(2, bool), "final_obs": self._observation()}  # fmt: skip
        self.t[done] = 0
        parts["observation"] = self._observation()
        for name, change in self.changed.items():
            parts[name] = change(parts[name])
        final = parts.pop("final_obs")
        return *parts.values(), {"final_obs": final} if done.any() else {}


OF_VECTORS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "observation": ("observation", lambda x: x[:1], r"of shape \(1, 3\), which does not fit .* \(2, 3\)"),
    "final_obs": ("final_obs", lambda x: x[:, :1], r"of shape \(1,\), which does not fit .* \(3,\)"),
    "final dtype": ("final_obs", lambda x: x.astype(str), r"does not fit .*'<U32'\) to dtype\('float32'"),
    "reward": ("reward", lambda x: x[:1], r"2 rewards, .* not float64 \(1,\)"),
    "terminated": ("terminated", lambda x: x.astype(str), r"2 rewards, .* not float64 \(2,\), <U5 \(2,\)"),
    "truncated": ("truncated", lambda x: False, r"2 rewards, .* bool \(\) and dict"),
    "complex": ("reward", lambda x: x + 0j, r"2 rewards, .* not complex128 \(2,\)"),
}


@pytest.mark.parametrize("name", OF_VECTORS)
def test_a_vector_that_returns_another_kind_is_named(name: str) -> None:
    part, change, sentence = OF_VECTORS[name]
    with pytest.raises(UsageError, match=f"mine .*{sentence}"):
        Collector(Own(**{part: change}), [1], 0, "mine").collect(act, 8, torch.device("cpu"))


@pytest.mark.parametrize(("part", "sentence"), [
    ("reward", r"2 rewards, .* not torch.float32 \(1,\)"), ("final_obs", r"of shape \(2, 1\), which does .* \(2, 3\)"),
])  # fmt: skip
def test_a_vector_of_tensors_that_returns_another_shape_is_named(part: str, sentence: str) -> None:
    class Tensors(Own):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return torch.from_numpy(super().reset(seed=seed)[0]), {}

        def step(self, actions: Any) -> Any:
            *rest, info = super().step(actions)
            parts = {"observation": rest[0], "reward": rest[1].astype(np.float32), "terminated": rest[2],
                     "truncated": rest[3], **info}  # fmt: skip
            tensors = {name: torch.from_numpy(np.array(x)) for name, x in parts.items()}
            if part in tensors:
                tensors[part] = tensors[part][..., :1]
            final = {"final_obs": tensors.pop("final_obs")} if "final_obs" in tensors else {}
            return *tensors.values(), final

    with pytest.raises(UsageError, match=sentence):
        TensorCollector(Tensors(), [1], 0, "mine").collect(act, 8, torch.device("cpu"))


# ---------------------------------------------------------------- names of infos


def named_alike(t: int) -> dict[str, Any]:
    """Infos that an environment calls as Gymnasium's vectors call theirs; it succeeds at the end."""
    said = {"is_success": t == 3} if t else {}
    return {**said, "_is_success": False, "final_obs": np.full(3, 7.0), "final_info": {"is_success": False, "mark": 5},
            "_final_obs": False, "_final_info": False, "mark": t}  # fmt: skip


@pytest.mark.parametrize("way", ["sync", pytest.param("async", marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_infos_with_gymnasiums_names_are_not_taken_for_those_of_an_end(way: str, mode: str) -> None:
    envs = make_vector_env(partial(Counts, infos=named_alike), 2, way, mode)
    collector = Collector(envs, [1, 2], 0, "mine")
    collector.episodes.info_keywords, noted = ("mark",), []
    collector.episodes.on_finished = lambda *values: noted.append(values)
    rollout: Any = collector.collect(act, 8, torch.device("cpu"))
    rows = rollout["valid"]
    assert torch.equal(rollout["next_observation"][rows], rollout["observation"][rows] + 1)
    assert collector.episodes.means()["rollout/success_rate"] == 1.0
    assert set(noted) == {(3.0, 3, 3)}  # return, length, mark
    collector.close()
    evaluated = make_vector_env(partial(Counts, infos=named_alike), 2, "sync", mode)
    assert run_episodes(Alternates(), evaluated, [1, 2], 4)["success"].tolist() == [1.0] * 4


@pytest.mark.parametrize("kind", [SyncVectorEnv, pytest.param(AsyncVectorEnv, marks=pytest.mark.long), OfTensors])
def test_so_they_are_in_a_vector_of_the_users_that_resets_later(kind: Any) -> None:
    def said(t: int) -> dict[str, Any]:
        return {"is_success": t == 3, "final_info": {"is_success": False}} if t else {}

    merges = SyncVectorEnv if kind is OfTensors else kind
    envs = merges([partial(Counts, infos=said)] * 2)  # in the next step
    if kind is OfTensors:

        class Tells(OfTensors):
            def step(self, actions: Any) -> Any:
                *rest, _ = super().step(actions)
                own = {"is_success": torch.from_numpy(self.env.envs[0].t == np.full(2, 3))}  # type: ignore[attr-defined]
                return *rest, {**own, "final_info": {"is_success": torch.zeros(2)}}

        collector: Collector = TensorCollector(Tells(envs), [1], 0, "mine")
        evaluated: Any = AsArrays(Tells(merges([partial(Counts, infos=said)] * 2)))
    else:
        collector, evaluated = Collector(envs, [1], 0, "mine"), merges([partial(Counts, infos=said)] * 2)
    collector.collect(act, 8, torch.device("cpu"))
    assert collector.episodes.means()["rollout/success_rate"] == 1.0
    assert run_episodes(Alternates(), evaluated, [1, 2], 4)["success"].tolist() == [1.0] * 4
    collector.close()
    evaluated.close()


def test_a_vector_of_the_users_whose_resets_have_a_final_obs_is_refused() -> None:
    """Gymnasium then writes it over the final observation."""
    envs = SyncVectorEnv([partial(Counts, infos=named_alike)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(UsageError, match="mine return _final_info, .*final_obs in the infos of a reset.*otherwise"):
        Collector(envs, [1], 0, "mine").collect(act, 8, torch.device("cpu"))
