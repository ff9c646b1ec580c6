"""Checks of what an algorithm's methods return: a wrong value is refused here, before it fails elsewhere."""

from typing import Any

from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import tree_leaves


def require_action(acted: Any) -> None:
    """Checks that ``act`` returned a dictionary with ``action``.

    Raises:
        UsageError: says what it returned.
    """
    if not isinstance(acted, dict) or "action" not in acted:
        raise UsageError(f"act returned {_brief(acted)}; it must return a dictionary with the key action, and whatever "
                         "else is to be stored in a rollout")  # fmt: skip


def require_acted(acted: Any, n: int) -> None:
    """Checks what ``act`` returned to be stored.

    Args:
        acted: for a batch of observations.
        n: how many they were.

    Raises:
        UsageError: no dictionary with ``action``, or a value without a row for each observation.
    """
    require_action(acted)
    for name, value in acted.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != n:
            raise UsageError(f"act returned {name} as {_brief(value)}; it must be a tensor with a row for each of the "
                             f"{n} observations")  # fmt: skip


def require_rows(prepared: Any, rows: tuple[int, ...], layout: str) -> None:
    """Checks what ``prepare`` returned.

    Args:
        prepared: fields by name.
        rows: their first dimensions.
        layout: what these are, for the message.

    Raises:
        UsageError: no dictionary, or a field with other first dimensions.
    """
    if not isinstance(prepared, dict):
        raise UsageError(
            f"prepare returned {_brief(prepared)}; it must return a dictionary of what training_step reads"
        )
    for name, field in prepared.items():
        for leaf in tree_leaves(field):
            if not isinstance(leaf, Tensor) or leaf.shape[: len(rows)] != rows:
                raise UsageError(f"prepare returned {name} as {_brief(leaf)}; it must be a tensor whose shape begins "
                                 f"with {layout} = {rows}")  # fmt: skip


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:60]}"
