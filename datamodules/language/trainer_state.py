"""The progress of a run, in the form that TRL's reward functions read."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainerState:
    """The fields of transformers' ``TrainerState`` that exist here, for example for a reward with a schedule."""

    #: Optimizer steps so far.
    global_step: int = 0
    #: Optimizer steps of the whole run; 0: not known.
    max_steps: int = 0
    #: Passes over the training records so far, a fraction.
    epoch: float = 0.0
    #: Tokens that training has seen so far, over all ranks.
    num_input_tokens_seen: int = 0
    is_world_process_zero: bool = True
    #: The last logged metrics without ``time/*``, with their ``step``, in a list of at most one.
    log_history: list[dict[str, float]] = field(default_factory=list)


def trainer_state(trainer: Any, epoch: float) -> TrainerState:
    """Returns the state of a Lightning trainer; zeros where there is none.

    Args:
        trainer: Lightning's, or None.
        epoch: passes over the training records.
    """
    if trainer is None:
        return TrainerState()
    step, total = trainer.global_step, trainer.max_steps
    if total < 0 and trainer.state.fn == "fit":
        estimate = trainer.estimated_stepping_batches
        total = 0 if estimate == float("inf") else int(estimate)
    module = trainer.lightning_module
    # TRL's log has its own names, which TensorBoard shows with the prefix.
    latest = {name.removeprefix("train/"): value for name, value in getattr(module, "regular_metrics", {}).items()}
    return TrainerState(
        step, max(0, total), epoch, getattr(module, "num_tokens", 0), trainer.is_global_zero,
        [{**latest, "step": step}] if latest else [],
    )  # fmt: skip
