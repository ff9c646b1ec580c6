"""Arguments that have no effect, because other arguments turn them off."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def warn_of_idle(module: Any, reasons: Mapping[str, str]) -> None:
    """Warns of arguments that were given and that have no effect in this run.

    This is a warning and not an error, because a config or a sweep may contain both an argument and the one that turns
    it off.

    Args:
        module: whose ``hparams`` they are.
        reasons: by argument, the setting beside which it has no effect, and what would be right.
    """
    declared = type(module).declared_settings
    for name in sorted(declared.keys() & reasons.keys() & module.hparams.keys()):
        value = module.hparams[name]
        if value != declared[name].default:
            rank_zero_warn(f"{name}={value!r} does nothing {reasons[name]}, or leave {name} out")
