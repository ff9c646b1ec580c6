"""Checks of what foreign objects are and return, each where it enters: datamodules, batches, ``act``, ``prepare``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves
from rl_modules.contract import ExperienceSource

if TYPE_CHECKING:
    from rl_modules.algorithm import Algorithm
    from rl_modules.base import ControlModule


#: The datamodule that makes each kind of experience.
DATAMODULES = {
    "rollouts": "RolloutDataModule",
    "replay": "ReplayDataModule",
    "prompts": "PromptDataModule",
    "preferences": "PreferenceDataModule",
    "demonstrations": "InstructionDataModule",
}


def check_pairing(algorithm: object, data: object) -> None:
    """Refuses a datamodule that does not fit the algorithm. Classes that state no kind are not checked."""
    wanted = getattr(getattr(algorithm, "experience", None), "kind", None) or getattr(algorithm, "learns_from", None)
    made = getattr(data, "kind", None)
    kinds = (wanted,) if isinstance(wanted, str) else wanted or ()
    if not kinds or made is None or made in kinds:
        return
    fitting = " or ".join(DATAMODULES.get(kind, f"a datamodule of kind {kind!r}") for kind in kinds)
    raise UsageError(
        f"{type(algorithm).__name__} learns from {' or '.join(kinds)}, {type(data).__name__} makes {made}; "
        f"use {fitting}"
    )


def check_source(module: "ControlModule", source: Any, fitting: bool) -> None:
    """Refuses a datamodule that lacks what a control algorithm reads of it."""
    # The values of properties are not read, because they may not exist yet.
    parts: Any = ("observation_space", "action_space")
    if fitting:
        members = (name for name in vars(ExperienceSource) if not name.startswith("_"))
        parts = sorted({*ExperienceSource.__annotations__, *members})
    missing = [name for name in parts if not hasattr(type(source), name) and not hasattr(source, name)]
    if missing:
        raise UsageError(
            f"{type(source).__name__} has no {', '.join(missing)}, which {type(module).__name__} reads of "
            f"its datamodule; subclass {DATAMODULES[module.experience.kind]}, or define what "
            "rl_modules.contract.ExperienceSource states"
        )


def check_trainer(module: "Algorithm") -> None:
    """Refuses strategies and precisions under which the algorithm would be wrong."""
    name, trainer = type(module).__name__, module._trainer
    if trainer is not None and isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy):
        raise UsageError(
            f"trainer.strategy={type(trainer.strategy).__name__} splits the weights of language "
            f"models over ranks, not those of {name}; take ddp"
        )
    if (precision := getattr(trainer, "precision", "32-true")) in ("16-true", "bf16-true"):
        raise UsageError(
            f"trainer.precision={precision} would keep weights and advantages in 16 bits; take "
            "bf16-mixed, or on a GPU 16-mixed"
        )
    if precision == "16-mixed" and not (module.automatic_optimization or module.graph):
        raise UsageError(f"trainer.precision=16-mixed scales one loss, {name} has several; take bf16-mixed")


def check_schedulers(module: "Algorithm") -> None:
    """Refuses schedulers of no known interval."""
    for config in module.trainer.lr_scheduler_configs:
        if config.interval not in ("step", "epoch") or config.frequency < 1:
            raise UsageError(
                f"{type(module).__name__}.configure_optimizers returns a scheduler with interval="
                f"{config.interval!r} and frequency={config.frequency!r}; give step or epoch, and at "
                "least 1"
            )


# ---------------------------------------------------------------- what an algorithm returns


def require_acted(acted: Any, n: int, fields: Iterable[str] | None = None) -> None:
    """Checks what ``act`` returned: of its ``fields`` those that are used, by default all, which a rollout stores."""
    if not isinstance(acted, dict) or "action" not in acted:
        raise UsageError(
            f"act returned {_brief(acted)}; it must return a dictionary with the key action, and whatever "
            "else is to be stored in a rollout"
        )
    for name in fields or acted:
        value = acted[name]
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != n:
            raise UsageError(
                f"act returned {name} as {_brief(value)}; it must be a tensor with a row for each of the "
                f"{n} observations"
            )


def require_rows(prepared: Any, rows: tuple[int, ...], layout: str) -> None:
    """Checks what ``prepare`` returned."""
    if not isinstance(prepared, dict):
        raise UsageError(
            f"prepare returned {_brief(prepared)}; it must return a dictionary of what training_step reads"
        )
    for name, field in prepared.items():
        for leaf in tree_leaves(field):
            if not isinstance(leaf, Tensor) or leaf.shape[: len(rows)] != rows:
                raise UsageError(
                    f"prepare returned {name} as {_brief(leaf)}; it must be a tensor whose shape begins "
                    f"with {layout} = {rows}"
                )


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:60]}"
