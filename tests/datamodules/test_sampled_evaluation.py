"""Evaluations that sample their actions: a function of weights, seed and purpose, and of nothing before them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import DQN, PPO, SAC, SARSA, RecurrentPPO
from tests.datamodules.test_first_evaluation import Curves
from tests.training import fit


class Adds(gym.Env):
    """Episodes of 20 steps without any randomness, whose return is the sum of the actions, each by its step."""

    def __init__(self, box: bool = False, table: bool = False) -> None:
        self.observation_space = spaces.Discrete(1) if table else spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(5)

    def _observation(self) -> Any:
        return 0 if isinstance(self.observation_space, spaces.Discrete) else np.zeros(1, np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._observation(), float(np.sum(action)) * self.t, False, self.t == 20, {}


def data(**arguments: Any) -> Any:
    common = {"total_timesteps": 192, "eval_freq": 32, "n_eval_episodes": 2, "eval_deterministic": False,
              "rollouts_per_epoch": 1, **arguments}  # fmt: skip
    if "learning_starts" in common:
        return ReplayDataModule(Adds, **{**common, "rollouts_per_epoch": 32})
    return RolloutDataModule(Adds, n_envs=2, n_steps=16, **common)


REPLAY = {"learning_starts": 32, "batch_size": 8, "train_freq": 1}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "ppo": (lambda: PPO(net_arch=[8]), {}),
    "gsde": (lambda: PPO(net_arch=[8], use_sde=True), {"env_kwargs": {"box": True}}),
    "recurrent": (lambda: RecurrentPPO(net_arch=[8], lstm_hidden_size=8), {}),
    "sarsa": (lambda: SARSA(exploration_final_eps=0.5), {"env_kwargs": {"table": True}}),
    "sac": (lambda: SAC(net_arch=[8]), {"env_kwargs": {"box": True}, **REPLAY}),
    "noisy dqn": (lambda: DQN(net_arch=[8], noisy=True), REPLAY),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_evaluates_as_the_uninterrupted_one(case: str, tmp_path: Path) -> None:
    make_model, arguments = CASES[case]
    whole, part, rest = Curves(), Curves(), Curves()
    fit(make_model(), data(**arguments), logger=whole)
    fit(make_model(), data(**arguments), logger=part, max_epochs=3).save_checkpoint(tmp_path / "part.ckpt")
    fit(make_model(), data(**arguments), logger=rest, ckpt_path=tmp_path / "part.ckpt")
    curve = whole.of("eval/mean_reward")
    assert len(rest.of("eval/mean_reward")) >= 2
    assert {**part.of("eval/mean_reward"), **rest.of("eval/mean_reward")} == curve


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_it_depends_on_the_seed_and_the_purpose_and_not_on_what_was_drawn_before(case: str) -> None:
    make_model, arguments = CASES[case]
    model, trained = make_model(), data(**arguments)
    trainer = fit(model, trained)

    def returns(datamodule: Any) -> float:
        return trainer.validate(model, datamodule=datamodule, verbose=False)[0]["eval/mean_reward"]

    first = returns(trained)
    model.predict(trained.hparams["env_kwargs"] and 0 if case == "sarsa" else np.zeros(1, np.float32))
    assert returns(trained) == first
    assert returns(data(seed=1, **arguments)) != first
    tested = trainer.test(model, datamodule=data(n_test_episodes=2, **arguments), verbose=False)
    assert tested[0]["test/mean_reward"] != first


@pytest.mark.long
def test_predict_outside_of_an_evaluation_keeps_its_own_generator() -> None:
    """A pause for an evaluation between two predictions changes nothing in them."""
    drawn = []
    for evaluates in (True, False):
        model, datamodule = PPO(net_arch=[8]), data()
        trainer = fit(model, datamodule)
        torch.manual_seed(0)  # of the generator that the first sample makes
        actions = []
        for _ in range(20):
            actions.append(int(model.predict(np.zeros(1, np.float32))[0]))
            if evaluates:
                trainer.validate(model, datamodule=datamodule, verbose=False)
        drawn.append(actions)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 1


@pytest.mark.long
def test_a_predict_of_a_subclass_with_the_documented_signature_is_called() -> None:
    asked = []

    class Watches(PPO):
        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            asked.append(deterministic)
            return super().predict(observation, state, episode_start, deterministic)

    fit(Watches(net_arch=[8]), data())
    assert asked and not any(asked)
