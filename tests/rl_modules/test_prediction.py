"""Samples of ``predict``: their stream begins where torch's global generator says."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning import seed_everything

from rl_modules import PPO, SAC, TRPO, QLearning, RecurrentPPO

STATES, CHOICES = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(5)
MODELS: dict[str, Any] = {
    "PPO": lambda: PPO(observation_space=STATES, action_space=CHOICES),
    "TRPO": lambda: TRPO(observation_space=STATES, action_space=CHOICES),
    "RecurrentPPO": lambda: RecurrentPPO(observation_space=STATES, action_space=CHOICES),
    "SAC": lambda: SAC(observation_space=STATES, action_space=spaces.Box(-1.0, 1.0, (2,), np.float32)),
    "QLearning": lambda: QLearning(observation_space=spaces.Discrete(4), action_space=CHOICES),
}


def samples(model: Any, deterministic: bool = False) -> np.ndarray:
    observation = np.zeros(200, np.int64) if isinstance(model, QLearning) else np.zeros((200, 3), np.float32)
    return model.predict(observation, deterministic=deterministic)[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_global_seed_decides_the_samples(name: str) -> None:
    drawn = []
    for seed in (1, 2, 1):
        seed_everything(seed, verbose=False)
        model = MODELS[name]()
        drawn.append([samples(model), samples(model)])
    np.testing.assert_array_equal(drawn[0], drawn[2])
    for stream in ([drawn[0][0], drawn[1][0]], drawn[0]):  # two seeds; two calls
        assert not np.array_equal(*stream)


def test_copies_act_differently_as_their_process_is_seeded() -> None:
    model = MODELS["PPO"]()
    samples(model)
    drawn = []
    for worker_seed in (3, 4, 3):  # a DataLoader seeds each worker's torch
        torch.manual_seed(worker_seed)
        drawn.append(samples(copy.deepcopy(model)))
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert not np.array_equal(drawn[0], drawn[1])


def test_the_best_action_draws_nothing() -> None:
    model = MODELS["PPO"]()
    before = torch.get_rng_state()
    samples(model, deterministic=True)
    assert torch.equal(torch.get_rng_state(), before)
