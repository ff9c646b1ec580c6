"""``ortho_init`` is for the project's own layers: a user's extractor keeps the weights that it was made with."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from datamodules import RolloutDataModule
from rl_modules import A2C, DQN, PPO, PQN, REINFORCE, SAC, TRPO, RecurrentA2C, RecurrentPPO
from rl_modules.common.spaces import space_to_dict
from tests.training import fit

BOX = spaces.Box(-1, 1, (4,), np.float32)


class Pretrained(nn.Module):
    """The identity plus one half, frozen where asked."""

    def __init__(self, space: spaces.Box, frozen: bool = False) -> None:
        super().__init__()
        self.features_dim = 4
        self.layer = nn.Linear(4, 4)
        nn.init.eye_(self.layer.weight)
        nn.init.constant_(self.layer.bias, 0.5)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def extractors(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, Pretrained)]


@pytest.mark.parametrize("algorithm", [PPO, A2C, REINFORCE, TRPO, RecurrentPPO, RecurrentA2C, DQN, PQN, SAC])
def test_an_extractor_starts_with_its_own_weights(algorithm: Any) -> None:
    actions = spaces.Box(-1, 1, (2,), np.float32) if algorithm is SAC else spaces.Discrete(2)
    model = algorithm(features_extractor=Pretrained, observation_space=space_to_dict(BOX),
                      action_space=space_to_dict(actions))  # fmt: skip
    model.configure_model()
    assert extractors(model)
    for extractor in extractors(model):
        assert torch.equal(extractor.layer.weight, torch.eye(4))
        assert torch.equal(extractor.layer.bias, torch.full((4,), 0.5))


@pytest.mark.parametrize("algorithm", [PPO, TRPO, RecurrentPPO])
def test_a_frozen_extractor_is_what_it_was_after_training(algorithm: Any) -> None:
    model = algorithm(net_arch=[8], features_extractor=functools.partial(Pretrained, frozen=True))
    fit(model, RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=32, eval_freq=0))
    for extractor in extractors(model):
        assert torch.equal(extractor.layer.weight, torch.eye(4))


@pytest.mark.parametrize("algorithm", [PPO, TRPO, RecurrentPPO])
def test_this_projects_encoder_and_the_layers_after_it_are_orthogonal(algorithm: Any) -> None:
    image = spaces.Box(0, 255, (1, 40, 40), np.uint8)
    model = algorithm(observation_space=space_to_dict(image), action_space=space_to_dict(spaces.Discrete(2)))
    model.configure_model()
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    assert convolutions
    for layer in convolutions:
        rows = layer.weight.flatten(1)
        torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), rtol=1e-4, atol=1e-4)
