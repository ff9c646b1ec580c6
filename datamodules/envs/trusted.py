"""Environments and wrappers that a checkpoint may name; others would import a module and call code in it."""

from typing import Any

import gymnasium as gym

from rl_modules.common.errors import UsageError


def require_registered(env_id: Any, again: str) -> None:
    """Refuses a checkpoint's environment that is no registered id.

    Args:
        env_id: as the checkpoint names it.
        again: how the user gives it, for the message.

    Raises:
        UsageError: names the environment.
    """
    if not isinstance(env_id, str) or ":" in env_id:
        raise UsageError(f"the checkpoint names the environment {env_id!r}, and a checkpoint must not choose what code "
                         f"runs; if you trust it, give {again}")  # fmt: skip


def require_gymnasiums(wrappers: Any, again: str) -> None:
    """Refuses a checkpoint's wrappers unless they are names from ``gymnasium.wrappers``.

    Args:
        wrappers: as the checkpoint names them.
        again: how the user gives them, for the message.

    Raises:
        UsageError: names the wrapper.
    """
    for wrapper in wrappers or ():
        path = wrapper.get("class_path") if isinstance(wrapper, dict) else wrapper
        name = str(path).removeprefix("gymnasium.wrappers.")
        if name not in gym.wrappers.__all__:
            raise UsageError(f"the checkpoint names the wrapper {path!r}, which is none of gymnasium.wrappers, and a "
                             f"checkpoint must not choose what code runs; give {again}")  # fmt: skip
