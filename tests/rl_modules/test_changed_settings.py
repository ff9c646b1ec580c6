"""What schedulers, callbacks and users set stays set: only values that decay are set by the run."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.optim.lr_scheduler import ExponentialLR

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import DQN, PPO, SAC, TRPO
from tests.training import fit, rollouts

halving = partial(ExponentialLR, gamma=0.5)


class Rates(L.Callback):
    """Keeps the learning rate of every epoch's first update; may change it."""

    def __init__(self, factor: float = 1.0) -> None:
        self.seen: list[float] = []
        self.factor = factor

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= self.factor


def data(kind: type, epochs: int = 4) -> Any:
    if kind in (PPO, TRPO):
        return rollouts("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=16 * epochs)
    env = "CartPole-v1" if kind is DQN else "Pendulum-v1"
    start = {"learning_starts": 8, "batch_size": 4, "train_freq": 1, "gradient_steps": 1}
    return ReplayDataModule(env, total_timesteps=8 + 10 * epochs, rollouts_per_epoch=10, eval_freq=0, **start)


@pytest.mark.parametrize("kind", [PPO, DQN, SAC])
def test_a_scheduler_decays_the_rate_that_was_given(kind: type) -> None:
    rates = Rates()
    fit(kind(learning_rate=1e-3, lr_scheduler=halving), data(kind), callbacks=[rates])
    assert rates.seen == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])


@pytest.mark.parametrize("kind", [PPO, SAC])
def test_a_callback_changes_the_rate(kind: type) -> None:
    rates = Rates(0.5)
    fit(kind(learning_rate=1e-3), data(kind), callbacks=[rates])
    assert rates.seen == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])


def test_a_resumed_run_keeps_the_rate_that_a_callback_set_and_takes_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fit(PPO(learning_rate=1e-3), data(PPO, 2), callbacks=[Rates(0.5)]).save_checkpoint(path)
    same, other = Rates(), Rates()
    fit(PPO(learning_rate=1e-3), data(PPO), path, callbacks=[same])
    assert same.seen == pytest.approx([2.5e-4] * 2)
    fit(PPO(learning_rate=1e-4), data(PPO), path, callbacks=[other])
    assert other.seen == pytest.approx([1e-4] * 2)


def test_the_rate_of_the_module_may_change_while_it_trains() -> None:
    class Lowers(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            pl_module.learning_rate = 1e-4

    class Mine(PPO):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    seen: list[float] = []
    fit(Mine(learning_rate=1e-3), data(PPO, 3), callbacks=[Lowers()])
    assert seen == pytest.approx([1e-3, 1e-4, 1e-4])


@pytest.mark.parametrize(("kind", "settings"), [
    (PPO, {"clip_range": 0.05, "clip_range_vf": 0.07, "ent_coef": 0.3}), (TRPO, {"target_kl": 0.003}),
])  # fmt: skip
def test_settings_of_a_callback_hold(kind: type, settings: dict[str, float]) -> None:
    class Sets(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                for name, value in settings.items():
                    setattr(pl_module, name, value)

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            assert {name: getattr(pl_module, name) for name in settings} == settings

    fit(kind(), data(kind), callbacks=[Sets()])


def test_an_early_stop_may_be_asked_for_after_construction() -> None:
    def updates(**settings: float) -> float:
        model = PPO(learning_rate=0.05)
        for name, value in settings.items():
            setattr(model, name, value)
        trainer = fit(
            model, rollouts("CartPole-v1", n_envs=2, n_steps=32, batch_size=8, n_epochs=4, total_timesteps=64)
        )
        (adam,) = trainer.optimizers
        return next(iter(adam.state.values()))["step"].item()

    assert updates() == 32
    assert 1 <= updates(target_kl=1e-6) < 32


@pytest.mark.long
def test_settings_of_a_datamodule_change_between_fits() -> None:
    once = rollouts("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=64)
    fit(PPO(), once)
    once.n_steps, once.n_epochs, once.batch_size = 16, 3, 8
    trainer = fit(PPO(), once)
    assert once.rollout["observation"].shape[0] == 2 * 16
    assert trainer.global_step == 2 * 3 * 4 and once.hparams["n_steps"] == 16

    replay = data(DQN)
    fit(DQN(), replay)
    replay.train_freq, replay.gradient_steps, replay.batch_size = 2, 3, 8
    trainer = fit(DQN(), replay)
    assert trainer.global_step == 40 // 2 * 3 and len(replay.sampler.draw(8)) == 8


def test_a_subclass_sets_what_its_base_would_fill_in() -> None:
    class Mine(RolloutDataModule):
        def __init__(self, env_id: str, **arguments: Any) -> None:
            super().__init__(env_id, **arguments)
            self.n_steps = 4

    mine = Mine("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, total_timesteps=32, eval_freq=0)
    fit(PPO(), mine)
    assert mine.rollout["observation"].shape[0] == 2 * 4
