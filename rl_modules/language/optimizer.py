"""The default optimizer, AdamW, and transformers' schedules of the learning rate, with TRL's names and arguments."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from rl_modules.common.errors import UsageError, naming

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


#: Schedules that go by optimizer steps; the others follow a metric, which is not known at every step.
KINDS = tuple(kind.value for kind in SchedulerType if kind.value not in ("reduce_lr_on_plateau", "greedy"))
_OF_BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
}
#: Values of ``optim``.
OPTIMIZERS = ("adamw", "muon", *_OF_BITSANDBYTES)
#: Schedules for which transformers reads no further arguments.
_CONSTANT = ("constant", "constant_with_warmup")


def adamw(module: "LanguageModule", parameters: Iterable) -> torch.optim.Optimizer:
    """Returns AdamW with weight decay on matrices, but not on biases and norms."""
    named, trainer = list(parameters), module.trainer
    groups = [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": module.weight_decay},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Lightning refuses to clip values under mixed precision when the optimizer is fused.
    by_value = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value"
    clips_itself = not by_value and trainer.strategy.root_device.type == "cuda"
    fused = trainer.precision in ("32-true", "64-true", "bf16-true", *["bf16-mixed"] * clips_itself)
    filled = [group for group in groups if group["params"]]
    if module.optim != "adamw":
        return of_bitsandbytes(module.optim)(filled, lr=module.learning_rate, eps=module.adam_eps)
    return torch.optim.AdamW(filled, lr=module.learning_rate, eps=module.adam_eps, fused=fused)


def of_bitsandbytes(name: str) -> Any:
    """Returns the class of an AdamW of bitsandbytes, whose moments have 8 bits or move to the host's memory."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise UsageError(
            f"optim={name} needs a package that is not installed: pip install bitsandbytes; or take adamw"
        ) from error
    return getattr(bitsandbytes.optim, _OF_BITSANDBYTES[name])


def schedule_of(module: "LanguageModule", optimizer: torch.optim.Optimizer) -> Any:
    """Returns the schedule of a run."""
    hp, steps = module.hparams, module.trainer.estimated_stepping_batches
    kind, arguments = hp.lr_scheduler_type, hp.lr_scheduler_kwargs or {}
    if steps == float("inf"):
        if kind not in (*_CONSTANT, "inverse_sqrt") and "num_stable_steps" not in arguments:
            raise UsageError(
                f"lr_scheduler_type={kind!r} needs an end of the run; give trainer.max_steps or trainer.max_epochs"
            )
        steps = 0
    with warnings.catch_warnings():  # num_stable_steps come before the run's length
        warnings.filterwarnings("ignore", "Both num_training_steps and num_stable_steps")
        with naming(f"lr_scheduler_kwargs={arguments} can't be used with lr_scheduler_type={kind!r}"):
            return get_scheduler(kind, optimizer, hp.warmup_steps, int(steps), hp.lr_scheduler_kwargs)


def beside_optimizer(module: "LanguageModule") -> str | bool:
    """The reason why an argument of AdamW is idle."""
    return module.optimizer_factory is not None and "beside optimizer, which has its own; give it to that"


def beside_scheduler(module: "LanguageModule") -> str | bool:
    """The reason why an argument of the schedule is idle."""
    is_replaced = module.scheduler_factory is not None
    return is_replaced and "beside lr_scheduler, which is the whole schedule; make it a part of that"


def without_warmup(module: "LanguageModule") -> str | bool:
    """The reason why ``warmup_steps`` is idle."""
    is_constant = module.lr_scheduler_type == "constant"
    return beside_scheduler(module) or (is_constant and "with lr_scheduler_type='constant'; take constant_with_warmup")


def without_arguments(module: "LanguageModule") -> str | bool:
    """The reason why ``lr_scheduler_kwargs`` are idle."""
    kind = module.lr_scheduler_type
    return beside_scheduler(module) or (
        kind in _CONSTANT and f"with lr_scheduler_type={kind!r}, which has no arguments"
    )
