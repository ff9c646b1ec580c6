"""``check_env`` and ``rl check``: what is refused, what is advised, and what passes."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import rl_modules
from datamodules import check_env
from datamodules.check import algorithms_for
from recipes.cli.command import main
from rl_modules.common.errors import UsageError
from tests.masked_envs import MASKED_SPACES


class Walk(gym.Env):
    """A walk of ``length`` steps, whose faults are chosen by name."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 10, fault: str = "") -> None:
        self.length, self.fault = length, fault

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        place = np.array([self.steps % 100], np.float32)
        if self.fault == "random" and self.steps > 3:  # after the steps that Gymnasium's check compares
            place = np.random.default_rng().uniform(0, 100, 1).astype(np.float32)
        if self.fault == "first step":
            place = np.random.default_rng().uniform(0, 100, 1).astype(np.float32)
        if self.fault == "outside":
            place -= 50
        reward = float("nan") if self.fault == "nan" and self.steps > 3 else 1.0
        return place, reward, self.steps == self.length, False, {}


def test_a_sound_environment_has_no_findings() -> None:
    assert check_env(Walk) == check_env("Maze-v0") == check_env("CartPole-v1") == []


class Mixed(Walk):
    observation_space = spaces.Dict({"both": spaces.Tuple([spaces.Box(0.0, 100.0, (3,)), spaces.Discrete(5)])})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"both": (np.zeros(3, np.float32), 1)}, super().reset(seed=seed)[1]

    def step(self, action: int) -> Any:
        return {"both": (np.ones(3, np.float32), 2)}, *super().step(action)[1:]


def test_a_tuple_within_a_dictionary_has_no_findings() -> None:
    assert check_env(Mixed) == []


def test_an_episode_that_differs_when_repeated_is_advised_against() -> None:
    (advice,) = check_env(Walk, {"fault": "random"})
    assert "the same seed and actions led to something else at step 3" in advice


def test_episodes_without_end_are_advised_against() -> None:
    (advice,) = check_env(Walk, {"length": 10**6})
    assert advice.startswith("no episode ended in 1,000 steps") and "TimeLimit" in advice
    limit = {"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max_episode_steps": 20}}
    assert check_env(Walk, {"length": 10**6}, [limit]) == []


def test_what_gymnasiums_check_refuses_is_refused() -> None:
    with pytest.raises(UsageError, match="Walk fails Gymnasium's check_env: AssertionError: Deterministic step"):
        check_env(Walk, {"fault": "first step"})


def test_what_gymnasiums_check_warns_of_is_advice() -> None:
    (advice,) = check_env(Walk, {"fault": "outside"})
    assert advice.startswith("Gymnasium: The obs returned by the `step()` method is not within the observation space")


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="a NaN or infinite reward"):
        check_env(Walk, {"fault": "nan"})


@pytest.mark.parametrize("space", MASKED_SPACES)
@pytest.mark.parametrize("source", ["info", "method", "observation"])
def test_gymnasium_s_checker_ignores_masks(space: str, source: str) -> None:
    [advice] = [one for one in check_env("tests.masked_envs:make_guarded", {"space": space, "source": source}, seed=3)
                if "forbidden" in one]  # fmt: skip
    assert advice.startswith("Gymnasium's check_env ignores action masks, and a random action ended it (ValueError:")


def test_a_vector_is_refused() -> None:
    with pytest.raises(UsageError, match="must inherit from the gymnasium.Env class, .*CartPoleVectorEnv"):
        check_env(lambda: gym.make_vec("CartPole-v1", 2))


def test_the_algorithms_are_those_that_train_in_the_spaces() -> None:
    box, discrete = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(4)
    assert {"PPO", "SAC", "TD3"} <= set(algorithms_for(box, box)) and "DQN" not in algorithms_for(box, box)
    assert {"PPO", "DQN"} <= set(algorithms_for(box, discrete)) and "QLearning" not in algorithms_for(box, discrete)
    assert "QLearning" in algorithms_for(discrete, discrete) and "SAC" not in algorithms_for(discrete, discrete)


def test_the_command_prints_spaces_and_findings(capsys: pytest.CaptureFixture) -> None:
    main(["check", "Pendulum-v1"])
    said = capsys.readouterr().out
    assert "Box(-2.0, 2.0, (1,), float32)" in said and "algorithms         A2C, ARS, DDPG, PPO" in said
    assert "advice             Gymnasium: For Box action spaces" in said and "Pendulum-v1 can be used" in said
    with pytest.raises(SystemExit):
        main(["check", "Pendulun-v1"])
    assert "did you mean Pendulum-v1" in capsys.readouterr().err


def test_the_fitting_algorithms_are_found_without_the_language_libraries(monkeypatch):
    class NotInstalled:
        def __getattr__(self, name):
            raise ModuleNotFoundError("No module named 'transformers'")

    languages = set(rl_modules.__all__) - set(rl_modules.CONTROL)
    assert {"GRPO", "SFT"} <= languages and "PPO" not in languages
    for name in languages:
        monkeypatch.setattr(rl_modules, name, NotInstalled(), raising=False)
    box = spaces.Box(-1, 1, (3,))
    assert "PPO" in algorithms_for(box, box)
