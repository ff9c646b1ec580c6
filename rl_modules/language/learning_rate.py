"""Transformers' schedules of the learning rate, with the names and arguments that TRL's configs have."""

import warnings
from typing import Any

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from rl_modules.common.errors import UsageError, did_you_mean

#: Schedules that follow a metric, which is not known at every optimizer step.
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
#: Schedules for which transformers reads no further arguments.
_WITHOUT_ARGUMENTS = ("constant", "constant_with_warmup")
#: Schedules that need no end of the run.
_ENDLESS = (*_WITHOUT_ARGUMENTS, "inverse_sqrt")


def check_schedule(kind: str, arguments: dict[str, Any] | None, warmup_steps: int, learning_rate: float) -> None:
    """Refuses a schedule that could not be built at the start of a run, by building one."""
    known = [name for name in (kind.value for kind in SchedulerType) if name not in _BY_METRIC]
    if kind in _BY_METRIC:
        raise UsageError(f"lr_scheduler_type={kind!r} follows a metric of evaluations, and the schedules here go by "
                         f"optimizer steps; take one of {', '.join(known)}")  # fmt: skip
    if kind not in known:
        raise UsageError(f"lr_scheduler_type={kind!r} must be one of {', '.join(known)}{did_you_mean(kind, known)}")
    if arguments and kind in _WITHOUT_ARGUMENTS:
        raise UsageError(f"lr_scheduler_kwargs={arguments} does nothing for lr_scheduler_type={kind!r}, which takes "
                         "no arguments; leave it out")  # fmt: skip
    steps = warmup_steps + 1000
    try:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)
        (rate,) = make_schedule(kind, arguments, optimizer, warmup_steps, steps).lr_lambdas
        for step in (0, 1, warmup_steps, warmup_steps + 500, steps - 1, steps):
            float(rate(step))
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UsageError(f"lr_scheduler_kwargs={arguments or {}} can't be used with lr_scheduler_type={kind!r} and "
                         f"learning_rate={learning_rate}: {reason}") from error  # fmt: skip


def make_schedule(
    kind: str, arguments: dict[str, Any] | None, optimizer: torch.optim.Optimizer, warmup_steps: int, steps: float
) -> Any:
    """Returns the schedule of a run."""
    has_end = "num_stable_steps" not in (arguments or {})
    if steps == float("inf"):
        if kind not in _ENDLESS and has_end:
            raise UsageError(f"lr_scheduler_type={kind!r} needs an end of the run; give trainer.max_steps or "
                             "trainer.max_epochs")  # fmt: skip
        steps = 0
    with warnings.catch_warnings():  # num_stable_steps come before the run's length
        warnings.filterwarnings("ignore", "Both num_training_steps and num_stable_steps")
        return get_scheduler(kind, optimizer, warmup_steps, int(steps), arguments)


def beside_scheduler(module: Any) -> str | bool:
    """The reason why an argument of the schedule is idle."""
    is_replaced = module.scheduler_factory is not None
    return is_replaced and "beside lr_scheduler, which is the whole schedule; make it a part of that"


def without_warmup(module: Any) -> str | bool:
    """The reason why ``warmup_steps`` is idle."""
    is_constant = module.hparams["lr_scheduler_type"] == "constant"
    return beside_scheduler(module) or (is_constant and "with lr_scheduler_type='constant'; take constant_with_warmup")
