"""Transformers' schedules of the learning rate, with the names and arguments that TRL's configs have."""

import warnings
from typing import Any

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from rl_modules.common.errors import UsageError

#: Schedules that go by optimizer steps; the others follow a metric, which is not known at every step.
KINDS = tuple(kind.value for kind in SchedulerType if kind.value not in ("reduce_lr_on_plateau", "greedy"))
#: Schedules for which transformers reads no further arguments.
_CONSTANT = ("constant", "constant_with_warmup")


def make_schedule(
    kind: str, arguments: dict[str, Any] | None, optimizer: torch.optim.Optimizer, warmup_steps: int, steps: float
) -> Any:
    """Returns the schedule of a run."""
    has_end = "num_stable_steps" not in (arguments or {})
    if steps == float("inf"):
        if kind not in (*_CONSTANT, "inverse_sqrt") and has_end:
            raise UsageError(f"lr_scheduler_type={kind!r} needs an end of the run; give trainer.max_steps or "
                             "trainer.max_epochs")  # fmt: skip
        steps = 0
    with warnings.catch_warnings():  # num_stable_steps come before the run's length
        warnings.filterwarnings("ignore", "Both num_training_steps and num_stable_steps")
        try:
            return get_scheduler(kind, optimizer, warmup_steps, int(steps), arguments)
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"lr_scheduler_kwargs={arguments or {}} can't be used with lr_scheduler_type={kind!r}: "
                             f"{reason}") from error  # fmt: skip


def beside_scheduler(module: Any) -> str | bool:
    """The reason why an argument of the schedule is idle."""
    is_replaced = module.scheduler_factory is not None
    return is_replaced and "beside lr_scheduler, which is the whole schedule; make it a part of that"


def without_warmup(module: Any) -> str | bool:
    """The reason why ``warmup_steps`` is idle."""
    is_constant = module.hparams["lr_scheduler_type"] == "constant"
    return beside_scheduler(module) or (is_constant and "with lr_scheduler_type='constant'; take constant_with_warmup")


def without_arguments(module: Any) -> str | bool:
    """The reason why ``lr_scheduler_kwargs`` are idle."""
    kind = module.hparams["lr_scheduler_type"]
    return beside_scheduler(module) or (
        kind in _CONSTANT and f"with lr_scheduler_type={kind!r}, which has no arguments"
    )
