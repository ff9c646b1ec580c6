"""The state of a datamodule over all ranks, and the checks before one is loaded."""

from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.ranks import cpu_group


def gather_ranks(own: dict[str, Any], rank: int, world_size: int) -> list[Any]:
    """Every rank's state, on rank 0 (Lightning saves rank 0's alone); all ranks call it together."""
    if world_size == 1:
        return [own]
    states: list[Any] = [None] * world_size
    # Rank 0 writes the checkpoint; the other ranks do not need the states.
    torch.distributed.gather_object(own, states if rank == 0 else None, dst=0, group=cpu_group())
    return states


def state_of_rank(states: list[Any], rank: int, world_size: int) -> dict[str, Any]:
    """This rank's state; a UsageError if the checkpoint has another number of ranks."""
    if len(states) != world_size:
        raise UsageError(f"the checkpoint was written by {len(states)} ranks, this run has {world_size}; resume with "
                         "as many")  # fmt: skip
    return states[rank]


def preparation(learner: Any) -> dict[str, Any]:
    """Returns the settings of an algorithm that decide which fields its ``prepare`` returns, by name."""
    return {name: learner.hparams.get(name) for name in getattr(learner, "prepares_by", ())}


def require_same_preparation(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses to resume with a rollout that was prepared for another setting.

    Args:
        saved: :func:`preparation` of the checkpoint's run.
        here: of this one.

    Raises:
        UsageError: names the setting.
    """
    for name, value in here.items():
        if saved.get(name, value) != value:
            raise UsageError(f"{name}={value!r} (it has {saved[name]!r}): the checkpoint is from the middle of an "
                             "epoch, and its rollout was prepared for the old setting; resume with that, or from a "
                             "finished run")  # fmt: skip


def resumed_position(position: int, saved: dict[str, int], layout: dict[str, int], begun: bool = False) -> int:
    """Returns the position in its epoch at which a run resumes, in minibatches.

    Args:
        position: of the checkpoint's run.
        saved: its settings that decide an epoch's minibatches; ``length`` is their number.
        layout: this run's.
        begun: whether the checkpoint holds experience of later epochs already.

    Raises:
        UsageError: the settings differ, and the checkpoint is from the middle of an epoch or holds later experience.
    """
    if saved == layout:
        return position
    if position % saved["length"] or begun:
        changed = ", ".join(f"{name}={value} (it has {saved.get(name)})" for name, value in layout.items()
                            if value != saved.get(name) and name != "length")  # fmt: skip
        why = "holds experience of the next epoch" if begun else "is from the middle of an epoch"
        raise UsageError(f"{changed}: the checkpoint {why}, whose minibatches can't change; resume with the old "
                         "settings, or from a finished run")  # fmt: skip
    return 0
