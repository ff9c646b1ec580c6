"""Frozen parameters, and those that no loss depends on, stay as they are; the others train as they do without them."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import DDPG, PPO, SAC, TD3, TQC, TRPO, CrossQ
from tests.training import fit

OFF_POLICY = [SAC, TD3, DDPG, TQC, CrossQ]


class Extractor(nn.Module):
    """A layer that may be frozen, one that trains, and one that may not be used."""

    def __init__(self, space: spaces.Box, frozen: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.features_dim = 8
        self.back, self.front = nn.Linear(space.shape[0], 8), nn.Linear(8, 8)
        if frozen:
            self.back.requires_grad_(False)
        if unused:
            self.extra = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.front(self.back(x).relu()).relu()


def data(algorithm: Any) -> Any:
    if algorithm in (TRPO, PPO):
        return RolloutDataModule("Pendulum-v1", n_envs=2, n_steps=16, eval_freq=0, total_timesteps=96)
    return ReplayDataModule("Pendulum-v1", learning_starts=20, batch_size=8, eval_freq=0, total_timesteps=40)


def moved(model: Any, before: dict[str, Tensor], target: bool = False) -> set[str]:
    after = model.state_dict()
    return {name for name, x in before.items() if not torch.equal(x, after[name]) and ("target" in name) == target}


class Started(dict):
    """The weights that a fit began with."""

    def of(self, model: Any) -> "Started":
        build = model.begin_run
        model.begin_run = lambda: (build(), self.update({k: x.clone() for k, x in model.state_dict().items()}))
        return self


@pytest.mark.parametrize("kind", ["frozen", "unused"])
@pytest.mark.parametrize("algorithm", [*OFF_POLICY, TRPO, PPO])
def test_they_stay_and_the_others_train(algorithm: Any, kind: str) -> None:
    model = algorithm(net_arch=[8], features_extractor=partial(Extractor, **{kind: True}))
    before = Started().of(model)
    fit(model, data(algorithm))
    changed = moved(model, before)
    still = ".extra." if kind == "unused" else ".back."
    assert any(still in name for name in before)
    assert [name for name in changed if still in name] == []
    assert any(".front.weight" in name for name in changed)


@pytest.mark.parametrize("algorithm", OFF_POLICY)
def test_an_unused_layer_changes_no_other_weight(algorithm: Any) -> None:
    weights = []
    for unused in (False, True):
        torch.manual_seed(0)
        model = algorithm(net_arch=[8], features_extractor=partial(Extractor, unused=unused))
        before = Started().of(model)
        if weights:
            start = weights[0][0]
            build = model.build_network
            model.build_network = lambda: (build(), model.load_state_dict(start, strict=False))  # noqa: B023
        fit(model, data(algorithm))
        weights.append((before, model.state_dict()))
    (_, plain), (_, other) = weights
    for name, x in plain.items():
        assert torch.equal(x, other[name]), name


@pytest.mark.parametrize("algorithm", [*OFF_POLICY, TRPO])
@pytest.mark.parametrize("part", ["trunk", "policy", "critic"])
def test_what_is_frozen_between_two_fits_stays(algorithm: Any, part: str) -> None:
    model = algorithm(net_arch=[8])
    fit(model, data(algorithm))
    network = model.network
    if algorithm is TRPO:
        frozen = {"trunk": network.towers, "policy": network, "critic": model.value_network}[part]
    else:
        frozen = {"trunk": network.policy.trunk, "policy": network.policy, "critic": network.critics}[part]
    frozen.requires_grad_(False)
    kept = [x.clone() for x in frozen.parameters()]
    before = Started().of(model)
    fit(model, data(algorithm))
    assert all(torch.equal(x, y) for x, y in zip(kept, frozen.parameters(), strict=True))
    assert moved(model, before)
    frozen.requires_grad_(True)
    fit(model, data(algorithm))
    assert not any(torch.equal(x, y) for x, y in zip(kept, frozen.parameters(), strict=True) if x.dim() > 1)


class Agreement(L.Callback):
    """Fails unless both ranks hold the same weights, and those that no loss depends on stay."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.start = {name: x.clone() for name, x in pl_module.named_parameters()}

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        for name, x in pl_module.named_parameters():
            first, second = pl_module.all_gather(x.detach())
            assert torch.equal(first, second), name
            if ".extra." in name or ".back." in name:
                assert torch.equal(x, self.start[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [SAC, CrossQ, TRPO])
def test_two_ranks_agree(algorithm: Any) -> None:
    model = algorithm(net_arch=[8], features_extractor=partial(Extractor, frozen=True, unused=True))
    fit(model, data(algorithm), devices=2, strategy="ddp_fork", callbacks=[Agreement()])


@pytest.mark.parametrize("algorithm", [SAC, TD3])
def test_a_callback_may_unfreeze_a_part_between_epochs(algorithm: Any) -> None:
    class Thawing(algorithm):
        def build_network(self) -> None:
            super().build_network()
            self.network.policy.trunk.requires_grad_(False)
            self.seen: list[Tensor] = []

        def on_train_epoch_start(self) -> None:
            self.seen.append(self.network.policy.trunk[0].weight.detach().clone())
            self.network.policy.trunk.requires_grad_(self.current_epoch >= 2)

    model = Thawing(net_arch=[8])
    source = data(algorithm)
    source.rollouts_per_epoch = 5
    fit(model, source)
    first, second, third, fourth = model.seen[:4]
    assert torch.equal(first, second) and torch.equal(second, third)
    assert not torch.equal(third, fourth)
