"""Objects that no checkpoint can hold: a noise is asked for at loading, an optimizer's lack is said at a fit."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import PPO, TD3
from rl_modules.action_noise import ActionNoise, NormalActionNoise
from rl_modules.common.errors import UsageError
from tests.training import fit

SGD = partial(torch.optim.SGD, lr=0.05)
HALVED = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


class Constant(ActionNoise):
    def sample(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        return torch.full(shape, 0.3)


class Own(NormalActionNoise):
    """A subclass of the project's, which may draw something else."""


def pendulum() -> ReplayDataModule:
    return ReplayDataModule("Pendulum-v1", total_timesteps=30, learning_starts=20, eval_freq=0, batch_size=8)


def cartpole() -> RolloutDataModule:
    return RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=32, eval_freq=10**6, n_eval_episodes=1)


@pytest.mark.long
@pytest.mark.parametrize("noise", [Constant(), Own(sigma=0.2)], ids=["own", "subclass"])
def test_an_own_action_noise_is_asked_for_at_loading(noise: ActionNoise, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    fit(TD3(net_arch=[8], action_noise=noise), pendulum()).save_checkpoint(path)
    with pytest.raises(UsageError, match=rf"TD3 was trained with action_noise=.*{type(noise).__name__}.*give it again"):
        TD3.load_from_checkpoint(path)
    assert TD3.load_from_checkpoint(path, action_noise=noise).action_noise is noise
    assert TD3.load_from_checkpoint(path, action_noise=None).action_noise is None
    resumed = TD3(net_arch=[8], action_noise=noise)
    fit(resumed, pendulum(), path)


@pytest.mark.long
def test_an_own_action_noise_that_a_subclass_chooses_it_chooses_again(tmp_path: Path) -> None:
    fit(Noisy(net_arch=[8]), pendulum()).save_checkpoint(tmp_path / "last.ckpt")
    assert isinstance(Noisy.load_from_checkpoint(tmp_path / "last.ckpt").action_noise, Constant)


class Noisy(TD3):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(action_noise=Constant(), **arguments)


@pytest.mark.long
def test_this_projects_action_noise_loads_by_itself(tmp_path: Path) -> None:
    fit(TD3(net_arch=[8], action_noise=NormalActionNoise(sigma=0.2)), pendulum()).save_checkpoint(tmp_path / "a.ckpt")
    loaded = TD3.load_from_checkpoint(tmp_path / "a.ckpt").action_noise
    assert type(loaded) is NormalActionNoise and float(loaded.sigma) == pytest.approx(0.2)


def told(run: Any) -> list[str]:
    """The warnings about factories that a run gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "no checkpoint can hold" in str(w.message)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "last.ckpt"
    fit(PPO(net_arch=[8], optimizer=SGD, lr_scheduler=HALVED), cartpole()).save_checkpoint(path)
    return path


@pytest.mark.long
def test_a_fit_of_a_loaded_module_says_once_that_its_optimizer_is_another(trained: Path) -> None:
    model = PPO.load_from_checkpoint(trained)
    [message] = told(lambda: fit(model, cartpole()))
    assert "PPO" in message and "optimizer=torch.optim.sgd.SGD" in message
    assert "lr_scheduler=torch.optim.lr_scheduler.ExponentialLR" in message
    assert "load_from_checkpoint(…, optimizer=…, lr_scheduler=…)" in message
    assert not isinstance(model.trainer.optimizers[0], torch.optim.SGD)
    assert told(lambda: fit(model, cartpole())) == []


@pytest.mark.long
def test_only_what_is_missing_is_named(trained: Path) -> None:
    model = PPO.load_from_checkpoint(trained, optimizer=SGD)
    [message] = told(lambda: fit(model, cartpole()))
    assert " optimizer=" not in message and "lr_scheduler=" in message
    assert isinstance(model.trainer.optimizers[0], torch.optim.SGD)
    whole = PPO.load_from_checkpoint(trained, optimizer=SGD, lr_scheduler=HALVED)
    assert told(lambda: fit(whole, cartpole())) == []


@pytest.mark.long
def test_a_module_loads_and_is_evaluated_without_its_optimizer(trained: Path) -> None:
    model = PPO.load_from_checkpoint(trained)

    def use() -> None:
        model.predict(np.zeros(4, np.float32))
        trainer = fit(PPO(net_arch=[8]), cartpole())
        for evaluate in (trainer.validate, trainer.test, trainer.predict):
            evaluate(model, datamodule=cartpole())
            evaluate(PPO(net_arch=[8]), datamodule=cartpole(), ckpt_path=trained, weights_only=True)

    assert told(use) == []


def test_resuming_with_the_same_optimizer_says_nothing(trained: Path) -> None:
    model = PPO(net_arch=[8], optimizer=SGD, lr_scheduler=HALVED)
    assert told(lambda: fit(model, cartpole(), trained)) == []


@pytest.mark.long
def test_a_default_optimizer_is_no_loss(tmp_path: Path) -> None:
    fit(PPO(net_arch=[8]), cartpole()).save_checkpoint(tmp_path / "last.ckpt")
    assert told(lambda: fit(PPO.load_from_checkpoint(tmp_path / "last.ckpt"), cartpole())) == []


@pytest.mark.long
def test_a_checkpoint_is_loaded_by_the_class_and_not_into_a_module(tmp_path: Path) -> None:
    model = PPO(net_arch=[8])
    fit(model, cartpole()).save_checkpoint(tmp_path / "a.ckpt")
    assert PPO.load_from_checkpoint(tmp_path / "a.ckpt").hparams["net_arch"] == [8]
    with pytest.raises(TypeError, match="`PPO.load_from_checkpoint` cannot be called on an instance"):
        PPO(net_arch=[8]).load_from_checkpoint(tmp_path / "a.ckpt")
