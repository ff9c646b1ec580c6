"""What a subclass records and logs is in the point of the curves that it belongs to."""

import logging
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import DummyLogger

import rl_modules
from datamodules import InstructionDataModule, ReplayDataModule, RolloutDataModule
from rl_modules import PPO, SAC, SFT
from rl_modules.common.errors import UsageError
from rl_modules.core.curves import Means
from tests.training import fit

Base = PPO
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


class Curves(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.points.append((step or 0, dict(metrics)))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, float(point[name])) for step, point in self.points if name in point]


def rollouts(**changes: Any) -> RolloutDataModule:
    settings = {"n_envs": 4, "n_steps": 16, "batch_size": 16, "n_epochs": 2, "total_timesteps": 384, "eval_freq": 0}
    return RolloutDataModule("CartPole-v1", **{**settings, "rollouts_per_epoch": 2, **changes})


def replayed() -> ReplayDataModule:
    return ReplayDataModule("Pendulum-v1", n_envs=2, buffer_size=1000, learning_starts=32, train_freq=4, batch_size=8,
                            total_timesteps=192, rollouts_per_epoch=8, eval_freq=0)  # fmt: skip


class Tracker:
    """A library's object with methods of the hooks' names."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_epoch_end(self) -> None:
        self.calls += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls += 1


tracker = Tracker()


class Says(PPO):
    def on_train_epoch_end(self) -> None:
        logging.getLogger(__name__).debug("on_train_epoch_end")


class Delegates(PPO):
    def build_network(self) -> None:
        super().build_network()
        self.tracker = Tracker()

    def on_train_epoch_end(self) -> None:
        self.tracker.on_train_epoch_end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        tracker.on_save_checkpoint(checkpoint)


class DelegatesBesideSuper(PPO):
    def on_train_epoch_end(self) -> None:
        super().update_schedules(0.5)
        tracker.on_train_epoch_end()


@pytest.mark.parametrize("cls", [Says, Delegates, DelegatesBesideSuper])
def test_a_hook_that_only_names_itself_does_not_replace_the_inherited_one(cls: Any, tmp_path: Any) -> None:
    curves = []
    for kind in (PPO, cls):
        logger = Curves()
        trainer = fit(kind(net_arch=[8]), rollouts(), logger=logger)
        curves.append([step for step, _ in logger.points])
    assert curves[0] == curves[1] == [128, 256, 384]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert cls.load_from_checkpoint(tmp_path / "last.ckpt").is_built


class BySuper(PPO):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()


class ByOldSuper(PPO):
    def on_train_epoch_end(self) -> None:
        super(ByOldSuper, self).on_train_epoch_end()  # noqa: UP008


class ByClass(PPO):
    def on_train_epoch_end(self) -> None:
        PPO.on_train_epoch_end(self)


class ByAlias(PPO):
    def on_train_epoch_end(self) -> None:
        Base.on_train_epoch_end(self)


class ByModule(PPO):
    def on_train_epoch_end(self) -> None:
        rl_modules.PPO.on_train_epoch_end(self)


class ByVariable(PPO):
    def on_train_epoch_end(self) -> None:
        inherited = super()
        inherited.on_train_epoch_end()


class ByName(PPO):
    def on_train_epoch_end(self) -> None:
        getattr(super(), "on_train_epoch_end")()  # noqa: B009


class GoesOn:
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()  # type: ignore[misc]


class Stops:
    def on_train_epoch_end(self) -> None:
        pass


class ByMixin(GoesOn, PPO):
    def on_train_epoch_end(self) -> None:
        GoesOn.on_train_epoch_end(self)


class ByMixinThatStops(Stops, PPO):
    def on_train_epoch_end(self) -> None:
        Stops.on_train_epoch_end(self)


class ByLightning(PPO):
    def on_train_epoch_end(self) -> None:
        L.LightningModule.on_train_epoch_end(self)


class WithinAFunction(PPO):
    def on_train_epoch_end(self) -> None:
        [super(WithinAFunction, self).on_train_epoch_end() for _ in range(1)]


@pytest.mark.parametrize(
    "cls", [BySuper, ByOldSuper, ByClass, ByAlias, ByModule, ByVariable, ByName, ByMixin, ByMixinThatStops, ByLightning,
            WithinAFunction]
)  # fmt: skip
def test_a_hook_that_calls_the_inherited_one_has_it_run_once(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("rl_modules.run.require_finite_weights", lambda module: calls.append(module.current_epoch))
    fit(cls(net_arch=[8]), rollouts())
    assert calls == [0, 1, 2]


def note(self: Any) -> None:
    self.log("my/logged", float(self.current_epoch))
    self.record(recorded=float(self.current_epoch))


@pytest.mark.parametrize("base", [PPO, SAC])
@pytest.mark.parametrize("levels", [1, 2])
def test_what_an_epoch_s_end_records_is_in_its_own_point(base: type, levels: int) -> None:
    cls = base
    for _ in range(levels):
        cls = type("Mine", (cls,), {"__module__": "mine", "on_train_epoch_end": note})
    curves = Curves()
    fit(cls(net_arch=[8]), rollouts() if base is PPO else replayed(), logger=curves)
    points = [step for step, point in curves.points if "train/learning_rate" in point]
    expected = [(step, float(epoch)) for epoch, step in enumerate(points)]
    assert len(points) == 3
    assert curves.of("my/logged") == curves.of("train/recorded") == expected


def test_what_is_recorded_after_super_is_in_its_own_point() -> None:
    class Mine(PPO):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            # Values of the epoch are known to whoever asks for them here.
            assert "train/value_loss" in self.trainer.callback_metrics
            note(self)

    curves = Curves()
    fit(Mine(net_arch=[8]), rollouts(), logger=curves)
    assert curves.of("train/recorded") == [(128, 0.0), (256, 1.0), (384, 2.0)]


def test_an_error_in_a_hook_writes_no_point() -> None:
    class Fails(PPO):
        def on_train_epoch_end(self) -> None:
            raise RuntimeError("mine")

    curves = Curves()
    with pytest.raises(RuntimeError, match="mine"):
        fit(Fails(net_arch=[8]), rollouts(), logger=curves)
    assert not curves.points


def test_log_takes_what_lightning_s_takes() -> None:
    class Mine(PPO):
        def build_network(self) -> None:
            super().build_network()
            self.seen: list[float] = []
            self.metric = torchmetrics.MeanMetric()

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            value = float(batch["advantage"].abs().max())
            self.seen.append(value)
            self.metric(value)
            self.log("my/metric", self.metric)
            self.log_dict({"my/float32": np.float32(value), "my/int64": np.int64(2), "my/tensor": torch.tensor(value)})
            self.log("my/mean", value, reduce_fx=torch.mean)
            self.log("my/max", value, reduce_fx="max")
            self.log("my/min", torch.tensor(value), reduce_fx=torch.min, on_step=False, on_epoch=True)
            self.log("my/sum", value, reduce_fx="sum")
            self.log("my/hidden", value, logger=False)
            return super().training_step(batch, batch_idx)

    curves, model = Curves(), Mine(net_arch=[8])
    trainer = fit(model, rollouts(), logger=curves)
    parts = np.array(model.seen).reshape(3, 16)
    expected = {"float32": parts.mean(1), "int64": [2.0] * 3, "tensor": parts.mean(1), "metric": parts.mean(1),
                "mean": parts.mean(1), "max": parts.max(1), "min": parts.min(1), "sum": parts.sum(1)}  # fmt: skip
    for name, values in expected.items():
        found = curves.of(f"my/{name}")
        assert [step for step, _ in found] == [128, 256, 384], name
        assert [value for _, value in found] == pytest.approx(list(values), rel=1e-5), name
        assert float(trainer.callback_metrics[f"my/{name}"]) == pytest.approx(values[-1], rel=1e-5), name
    assert not curves.of("my/hidden") and "my/hidden" in trainer.callback_metrics


def test_a_logged_value_replaces_one_that_the_algorithm_records() -> None:
    class Mine(PPO):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            self.log("train/loss", 1000.0)
            return super().training_step(batch, batch_idx)

    curves = Curves()
    trainer = fit(Mine(net_arch=[8]), rollouts(), logger=curves)
    assert curves.of("train/loss") == [(128, 1000.0), (256, 1000.0), (384, 1000.0)]
    assert float(trainer.callback_metrics["train/loss"]) == 1000.0


def test_reductions_are_part_of_a_checkpoint() -> None:
    sums = Means()
    for value in (3.0, -1.0, 2.0):
        for how in ("sum", "max", "min"):
            sums.reduce(how, value, how)
        sums.add({"mean": value})
    resumed = Means()
    resumed.load_state_dict(sums.state_dict())
    for one in (sums, resumed):
        one.reduce("max", torch.tensor(5.0), "max")
    expected = {"sum": 4.0, "max": 5.0, "min": -1.0, "mean": pytest.approx(4 / 3)}
    assert sums.means() == resumed.means() == expected


def test_a_language_hook_records_into_its_own_point() -> None:
    class Mine(SFT):
        def on_train_batch_end(self, *args: Any) -> None:
            self.record(step=float(self.trainer.global_step))

    curves = Curves()
    data = InstructionDataModule("addition", n_train=16, n_eval=0, batch_size=8)
    fit(Mine(model_config=TINY, logging_steps=1), data, logger=curves, max_steps=3)
    assert curves.of("train/step") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_weight_without_a_metric_is_refused() -> None:
    model = SFT(model_config=TINY)
    with pytest.raises(UsageError, match=r"record\(weight=3.0\) has no metric"):
        model.record(weight=3.0)


def test_a_callback_s_value_of_an_epoch_s_end_is_in_its_point() -> None:
    class Notes(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            pl_module.log("callback/epoch", float(trainer.current_epoch))

    curves = Curves()
    fit(PPO(net_arch=[8]), rollouts(), logger=curves, callbacks=[Notes()])
    assert curves.of("callback/epoch") == [(128, 0.0), (256, 1.0), (384, 2.0)]
