"""What users of Stable-Baselines3 type next is answered with its name here."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from datamodules import ReplayDataModule
from rl_modules import DQN, PPO, SAC
from rl_modules.common.foreign_names import CLASSES, METHODS
from tests.training import fit, rollouts


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_stable_baselines_names_what_to_use(name: str) -> None:
    for cls in (PPO, SAC):
        with pytest.raises(AttributeError, match=f"{cls.__name__} has no {name}; "):
            getattr(cls(), name)
        assert not hasattr(cls(), name)
    with pytest.raises(AttributeError, match="PPO has no load; load_from_checkpoint"):
        PPO.load("model.zip")


def test_other_names_are_untouched() -> None:
    with pytest.raises(AttributeError, match="'PPO' object has no attribute 'nothing'"):
        PPO().nothing  # noqa: B018

    class Own(PPO):
        def build_network(self) -> None:
            super().build_network()
            self.load = nn.Linear(2, 2)

        def learn(self) -> str:
            return "mine"

    model = Own()
    fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=4, total_timesteps=8))
    assert model.learn() == "mine" and isinstance(model.load, nn.Linear)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_stable_baselines_names_what_to_use(name: str) -> None:
    for package in ("rl_modules", "datamodules"):
        with pytest.raises(ImportError, match=f"{package} has no {name}; "):
            getattr(importlib.import_module(package), name)


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (lambda: PPO(device="cpu"), "the Trainer's accelerator"),  # type: ignore[call-arg]
        (lambda: PPO(verbose=1), "the Trainer's enable_progress_bar"),  # type: ignore[call-arg]
        (lambda: DQN(replay_buffer_class=dict), "n_sampled_goal=4 replays in hindsight"),  # type: ignore[call-arg]
        (lambda: ReplayDataModule("CartPole-v1", replay_buffer_kwargs={}), "goal_selection_strategy"),  # type: ignore[call-arg]
    ],
)
def test_an_argument_names_its_place(make: Callable[[], Any], answer: str) -> None:
    with pytest.raises(ValueError, match=f"takes no argument .*{answer}"):
        make()
