"""Optimizer and scheduler settings of a resumed run that differ from the checkpoint's.

A checkpoint's optimizer state contains the settings, so loading it would undo settings of the command line.
"""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rl_modules.common.errors import UsageError


def optimizer_settings(trainer: L.Trainer) -> dict[str, Any]:
    """Returns the settings of newly created optimizers and schedulers, as plain data for a checkpoint."""
    return {
        "optimizers": [
            {"class": type(optimizer).__name__, "groups": [_plain(group) for group in optimizer.param_groups]}
            for optimizer in trainer.optimizers
        ],
        "lr_schedulers": [
            {"class": type(config.scheduler).__name__, **_plain(config.scheduler.state_dict())}
            for config in trainer.lr_scheduler_configs
        ],
    }


def apply_changes(trainer: L.Trainer, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Applies and prints the settings that differ from those of the checkpoint's run."""
    for kind in ("optimizers", "lr_schedulers"):
        before, after = ([part["class"] for part in settings[kind]] for settings in (saved, now))
        if before != after:
            raise UsageError(
                f"the checkpoint has the state of {kind} {', '.join(before) or 'none'}, this run has "
                f"{', '.join(after) or 'none'}; resume with the same"
            )
    for optimizer, old, new in zip(trainer.optimizers, saved["optimizers"], now["optimizers"], strict=True):
        changed = {}
        for group, before, after in zip(optimizer.param_groups, old["groups"], new["groups"], strict=True):
            for name, value in after.items():
                if name in before and value != before[name]:
                    changed[name] = (before[name], value)
                    _set(group, name, before[name], value)
        if "initial_lr" in changed:
            changed["lr"] = changed.pop("initial_lr")
        for name, values in changed.items():
            # `saved_runs.announce` has printed the module's own arguments.
            if trainer.lightning_module.hparams.get({"lr": "learning_rate"}.get(name, name)) is None:
                _print_change(f"optimizer.{name}", *values)
    for config, old, new in zip(
        trainer.lr_scheduler_configs, saved["lr_schedulers"], now["lr_schedulers"], strict=True
    ):
        scheduler: Any = config.scheduler
        for name, value in new.items():
            if name in old and value != old[name]:
                setattr(scheduler, name, value)
                _print_change(f"lr_scheduler.{name}", old[name], value)
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in scheduler.optimizer.param_groups]


def _set(group: dict[str, Any], name: str, before: Any, value: Any) -> None:
    if name == "initial_lr":
        # A rate that a schedule has decayed keeps its ratio to the initial rate.
        group["lr"] = group["lr"] * value / before if before else value
    if not (name == "lr" and "initial_lr" in group):
        group[name] = tuple(value) if isinstance(value, list) else value


@rank_zero_only
def _print_change(name: str, before: Any, after: Any) -> None:
    print(f"{name}: {before} → {after}")


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers, strings and booleans among settings, and tuples of them (Adam's betas) as lists."""
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, tuple) and all(isinstance(x, int | float) for x in value):
            kept[name] = list(value)
        elif isinstance(value, bool | int | float | str):
            kept[name] = value
    return kept
