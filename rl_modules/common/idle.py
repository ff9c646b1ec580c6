"""Arguments that have no effect, because other arguments turn them off."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rl_modules.common.calls import declared_elsewhere, declared_here, default_of


def warn_of_idle(module: Any, reasons: Mapping[str, str]) -> None:
    """Warns of arguments that were given and that have no effect in this run.

    This is a warning and not an error, because a config or a sweep may contain both an argument and the one that turns
    it off.

    Args:
        module: whose ``hparams`` they are.
        reasons: by argument, the setting beside which it has no effect, and what would be right.
    """
    cls = type(module)
    declared: Any = getattr(cls, "settings", {})
    if not isinstance(declared, dict):  # a language module
        names = declared_here(cls) - declared_elsewhere(cls)
        defaults = {name: default_of(cls, name) for name in names.intersection(reasons, module.hparams)}
    else:
        defaults = {name: declared[name].default for name in declared if name in reasons and name in module.hparams}
    for name in sorted(defaults):
        value = module.hparams[name]
        if value != defaults[name]:
            rank_zero_warn(f"{name}={value!r} does nothing {reasons[name]}, or leave {name} out")
