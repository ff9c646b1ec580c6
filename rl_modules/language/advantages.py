"""Advantages of groups of completions: functions from rewards [P, G] to advantages [P, G], by name or import path.

Rewards are those of all ranks, one row per prompt. A NaN marks a completion without a score; its advantage is 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.loading import load_object

GroupScores = Callable[[Tensor], Tensor]


def grpo(rewards: Tensor) -> Tensor:
    """Returns the group's standardised rewards (arXiv:2402.03300)."""
    return F.group_advantages(rewards.flatten(), rewards.shape[1], "group").view_as(rewards)


def dr_grpo(rewards: Tensor) -> Tensor:
    """Returns rewards minus the group's mean, in units of reward (arXiv:2503.20783)."""
    return F.group_advantages(rewards.flatten(), rewards.shape[1], "none").view_as(rewards)


def rloo(rewards: Tensor) -> Tensor:
    """Returns rewards minus the mean of the group's other rewards (arXiv:2402.14740)."""
    return F.rloo_advantages(rewards.flatten(), rewards.shape[1]).view_as(rewards)


def reinforce_plus_plus(rewards: Tensor) -> Tensor:
    """Returns rewards standardised over the batch, without a baseline per prompt (arXiv:2501.03262)."""
    return F.batch_advantages(rewards.flatten()).view_as(rewards)


ADVANTAGES: dict[str, GroupScores] = {
    function.__name__: function for function in (grpo, dr_grpo, rloo, reinforce_plus_plus)
}
#: Functions whose baseline is that of the group, which a group of one completion lacks.
IN_GROUPS = (grpo, dr_grpo, rloo)

#: Whether import paths are those of a checkpoint that is being loaded.
_loads_checkpoint: ContextVar[bool] = ContextVar("loads_checkpoint", default=False)


@contextmanager
def imported_at_use() -> Iterator[None]:
    """Makes :func:`load_advantages` import paths only at the function's first call, in a training step.

    A checkpoint is untrusted data, so loading it must not import modules that it names.
    """
    token = _loads_checkpoint.set(True)
    try:
        yield
    finally:
        _loads_checkpoint.reset(token)


def path_of(given: str | GroupScores | None) -> str | None:
    """Converts a function to its import path, which a checkpoint may hold; names and paths are returned unchanged.

    Args:
        given: the argument ``advantages``.

    Raises:
        UsageError: the function has no import path, or the argument is neither a function nor a text.
    """
    if given is None or isinstance(given, str):
        return given
    path = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', '')}"
    if not callable(given) or isinstance(given, type) or "<" in path or path.endswith(":"):
        raise UsageError(f"advantages={given!r} has no import path, by which a checkpoint could find it again; give a "
                         "function at the first level of a module, or override score_group in a subclass")  # fmt: skip
    return path


def load_advantages(name: str) -> GroupScores:
    """Loads an advantage function by name or import path.

    Args:
        name: one of :data:`ADVANTAGES`, ``package.module:function`` or ``package.module.function``.

    Raises:
        UsageError: an unknown name, or a path without a function.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    return partial(_call, name) if _loads_checkpoint.get() else _imported(name)


def _call(name: str, rewards: Tensor) -> Tensor:
    return _imported(name)(rewards)


def _imported(name: str) -> GroupScores:
    function = load_object(name, "advantages", ADVANTAGES)
    if not callable(function):
        raise UsageError(f"advantages={name!r} is a {type(function).__name__}; name a function from rewards [P, G] to "
                         "advantages [P, G]")  # fmt: skip
    return function


def require_advantages(advantage: Tensor, reward: Tensor, width: int) -> Tensor:
    """Checks the advantages of a generation, which may be a subclass's own; all ranks see the same ones.

    Args:
        advantage: A of each completion over all ranks, [B] or [B, L].
        reward: of the same completions, [B]; NaN: not scored.
        width: tokens of this rank's longest completion.

    Returns:
        The advantages, 0 where nothing was scored: a NaN would spread to all weights.

    Raises:
        UsageError: another shape; an advantage of a scored completion that is not finite.
    """
    enough = advantage.ndim == 1 or (advantage.ndim == 2 and advantage.shape[1] >= width)
    if not enough or len(advantage) != len(reward):
        raise UsageError(f"advantages have shape {tuple(advantage.shape)} for {len(reward)} completions of up to "
                         f"{width} tokens; return one number per completion [B], or per token [B, L]")  # fmt: skip
    unscored = reward.isnan() if advantage.ndim == 1 else reward.isnan().unsqueeze(1)
    advantage = torch.where(unscored, 0.0, advantage)
    if not bool(advantage.isfinite().all()):
        row = int((~advantage.isfinite()).view(len(reward), -1).any(1).nonzero()[0])
        raise UsageError(f"advantages of completion {row}, whose reward is {float(reward[row]):g}, are not finite; a "
                         "reward of NaN is none, which nanmean leaves out where mean does not")  # fmt: skip
    return advantage
