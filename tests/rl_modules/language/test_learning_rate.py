"""Schedules of the learning rate: their values over a run, resuming, and what is refused before it."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from datamodules import InstructionDataModule
from rl_modules import SFT
from rl_modules.common.errors import UsageError
from tests.training import differences, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PEAK, STEPS = 1e-2, 10


class Rates(L.Callback):
    """The learning rate of every optimizer step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def module(**arguments: Any) -> SFT:
    return SFT(model_config=TINY, learning_rate=PEAK, **arguments)


def data() -> InstructionDataModule:
    return InstructionDataModule("addition", batch_size=8, n_train=16, eval_steps=0)


def rates(max_steps: int = STEPS, ckpt_path: Path | None = None, **arguments: Any) -> tuple[list[float], L.Trainer]:
    callback = Rates()
    trainer = fit(module(**arguments), data(), ckpt_path=ckpt_path, max_steps=max_steps, callbacks=[callback])
    return callback.seen, trainer


def cosine(share: float, least: float) -> float:
    return PEAK * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * share)))


#: Arguments, and the rate by hand at each of ten steps.
CASES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "lowest rate": (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
        [cosine(t / STEPS, 0.2) for t in range(STEPS)]),
    "lowest rate after warm-up": (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-3}, "warmup_steps": 2},
        [0.0, PEAK / 2, *(cosine(t / 8, 0.2) for t in range(8))]),
    "stable": (
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4, "decay_type":
         "linear"}, "warmup_steps": 2}, [0.0, PEAK / 2, *[PEAK] * 4, *(PEAK * (1 - t / 4) for t in range(4))]),
    "restarts": (
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        [cosine(t % 5 / 5, 0.0) for t in range(STEPS)]),
    "polynomial": (
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-3}},
        [1e-3 + (PEAK - 1e-3) * (1 - t / STEPS) ** 2 for t in range(STEPS)]),
    "linear": ({"lr_scheduler_type": "linear"}, [PEAK * (1 - t / STEPS) for t in range(STEPS)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rates_follow_the_schedule(case: str) -> None:
    arguments, expected = CASES[case]
    assert rates(**arguments)[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.long
def test_a_resumed_run_goes_on_in_its_schedule(tmp_path: Path) -> None:
    arguments, expected = CASES["stable"]
    _, trainer = rates(**arguments)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "part.ckpt")
                trainer.should_stop = True

    fit(module(**arguments), data(), max_steps=STEPS, callbacks=[Stop()])
    again, trainer = rates(ckpt_path=tmp_path / "part.ckpt", **arguments)
    assert again == pytest.approx(expected[7:], abs=1e-9)
    trainer.save_checkpoint(tmp_path / "resumed.ckpt")
    assert differences(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt") == []
    loaded = SFT.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    assert loaded.hparams["lr_scheduler_kwargs"] == arguments["lr_scheduler_kwargs"]


@pytest.mark.long
def test_a_schedule_that_fits_the_optimizers_rate_alone_is_no_obstacle_to_loading(tmp_path: Path) -> None:
    """A checkpoint lacks the optimizer, which is code."""
    optimizer = partial(torch.optim.SGD, lr=0.5)
    arguments = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.1}}
    fit(module(optimizer=optimizer, **arguments), data(), max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    loaded = SFT.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert loaded.hparams["lr_scheduler_kwargs"] == arguments["lr_scheduler_kwargs"]


@pytest.mark.parametrize("kind", ["inverse_sqrt", "warmup_stable_decay"])
def test_schedules_without_an_end_take_a_run_without_one(kind: str) -> None:
    arguments = {"num_decay_steps": 2, "num_stable_steps": 3} if kind == "warmup_stable_decay" else {"timescale": 4}
    model, seen = module(lr_scheduler_type=kind, lr_scheduler_kwargs=arguments), Rates()

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            trainer.should_stop = trainer.global_step == 5

    fit(model, data(), max_steps=-1, callbacks=[seen, Stop()])
    expected = {"inverse_sqrt": [PEAK * (4 / (4 + t)) ** 0.5 for t in range(5)],
                "warmup_stable_decay": [PEAK, PEAK, PEAK, PEAK, PEAK / 2]}[kind]  # fmt: skip
    assert seen.seen == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"lr_scheduler_type": "cosine_with_min_lr"},
     r"^lr_scheduler_kwargs=\{\} can't be used with lr_scheduler_type='cosine_with_min_lr': ValueError: One of min_lr "
     "or min_lr_rate"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "^lr_scheduler_kwargs=.*num_decay_steps"),
    ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "cubic"}},
     "^lr_scheduler_kwargs=.*Unknown decay type: cubic"),
    ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}, "^lr_scheduler_kwargs=.*lr_end"),
    ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"min_lr": 1e-4}}, "^lr_scheduler_kwargs=.*'min_lr'"),
    ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": "a tenth"}},
     "^lr_scheduler_kwargs=.*'a tenth'.* can't be used with"),
])  # fmt: skip
def test_a_schedule_that_can_not_be_built_is_refused_before_the_first_step(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(module(**arguments), data(), max_steps=1)


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "cosin"])
def test_a_schedule_that_does_not_go_by_steps_is_refused_at_construction(kind: str) -> None:
    with pytest.raises(UsageError, match=f"^lr_scheduler_type='{kind}' must be one of linear, cosine"):
        module(lr_scheduler_type=kind)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"min_lr": 1e-4}}, "which has no arguments"),
    ({"lr_scheduler_kwargs": {"power": 2.0}, "lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2)},
     "beside lr_scheduler"),
])  # fmt: skip
def test_arguments_that_no_schedule_reads_are_named(arguments: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=f"lr_scheduler_kwargs=.* does nothing .*{message}"):
        fit(module(**arguments), data(), max_steps=1)


def test_a_rate_that_is_text_is_refused() -> None:
    """As PyYAML reads 1e-5, which has no point."""
    with pytest.raises(UsageError, match="learning_rate='1e-5' must be a number"):
        SFT(model_config=TINY, learning_rate="1e-5")
