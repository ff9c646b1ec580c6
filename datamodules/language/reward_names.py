"""Reward functions of an argument: by name, with settings, by import path, or given as they are."""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from datamodules.language.tasks import Task
from rl_modules.common.errors import UsageError, what_happened
from rl_modules.common.loading import load_object, require_settings

Rewards = list[float | None]
RewardFunction = Callable[..., Rewards]


def load_reward_func(spec: str | dict[str, Any] | RewardFunction, task: Any = None) -> RewardFunction:
    """Returns the reward function of an entry in a config: a built-in name; a name of one of the task's own
    (``accuracy``, ``utilities``); an import path ``package.module:function`` or ``package.module.function``; any of
    these with settings, ``{length_reward: {target: 20}}``, which calls what the name stands for to make the function;
    or a function. Those of ``trl.rewards`` read chat messages only, so they are given strings in that form.

    Raises:
        UsageError: an unknown name, an import path without a function, a model, missing or unknown settings.
    """
    if not isinstance(spec, str | dict):
        # A partial has the name of what it calls.
        return _adapted(spec, getattr(getattr(spec, "func", spec), "__name__", type(spec).__name__))
    from datamodules.language.rewards import FACTORIES, FUNCTIONS

    if isinstance(spec, dict):
        if len(spec) != 1 or not isinstance(next(iter(spec.values())), dict):
            raise UsageError(f"reward function {spec} must be one name with its settings, such as "
                             "{length_reward: {target: 20}}")  # fmt: skip
        ((name, settings),) = spec.items()
        factory = FACTORIES.get(name) or _imported(name, [*FUNCTIONS, *FACTORIES])
        if not callable(factory):
            raise UsageError(f"reward function {name!r} is a {type(factory).__name__}, so it takes no settings")
        require_settings(factory, settings, f"reward function {name!r}")
        return _adapted(factory(**settings), name)
    own = {} if task is None else {func.__name__: func for func in [*task.reward_funcs, task.utilities]}
    if spec in FACTORIES:
        needed = ", ".join(inspect.signature(FACTORIES[spec]).parameters)
        raise UsageError(f"reward function {spec!r} needs settings ({needed}): write {{{spec}: {{…}}}}")
    known = {**FUNCTIONS, **own}
    return _adapted(known.get(spec) or _imported(spec, [*known, *FACTORIES]), spec)


def load_reward_funcs(given: Any, task: Task | None) -> list[RewardFunction]:
    """The reward functions of an argument: one or several entries; none: the task's own."""
    specs: Any = [given] if isinstance(given, str | dict) or callable(given) else given
    if given and task is not None and task.is_mixture:
        specs = [*task.reward_funcs, *specs]  # those of the sources, and those of all
    if not specs and task is not None:
        try:
            specs = task.reward_funcs
        except Exception as error:
            raise UsageError(f"task {task.name!r} has no reward_funcs: {what_happened(error)}") from error
        if not isinstance(specs, list | tuple) or not all(map(callable, specs)):
            raise UsageError(f"task {task.name!r} has reward_funcs={specs!r}, where a property that returns a list of "
                             "functions should be")  # fmt: skip
    return [load_reward_func(spec, task) for spec in specs or ()]


def _imported(path: str, known: list[str]) -> Any:
    """The object of an import path; the name or directory of a model is refused."""
    if ("/" in path and ":" not in path) or (Path(path) / "config.json").is_file():
        raise UsageError(f"reward function {path!r} is the name or directory of a model; give it to the module as "
                         "reward_model_name_or_path, not to the datamodule in reward_funcs")  # fmt: skip
    return load_object(path, "reward function", known)


def _adapted(func: Any, spec: str) -> RewardFunction:
    """A function with a name, that takes completions as strings or as chat messages."""
    if isinstance(func, nn.Module) and "completions" not in inspect.signature(func.forward).parameters:
        raise UsageError(
            f"reward function {spec!r} is a model; write it with save_pretrained and give the directory to the module "
            "as reward_model_name_or_path, not to the datamodule in reward_funcs"
        )
    if not callable(func) or inspect.isclass(func):
        raise UsageError(f"reward function {spec!r} is a {type(func).__name__}, not a function")
    name = getattr(func, "__name__", re.split("[.:]", spec)[-1])  # TRL's functions with settings are nameless objects
    if getattr(func, "__module__", "").startswith("trl.rewards"):
        return named(_with_messages(func), name)
    return func if hasattr(func, "__name__") else named(functools.partial(func), name)


def _with_messages(func: RewardFunction) -> RewardFunction:
    @functools.wraps(func)
    def call(*, completions: Any, **columns: Any) -> Rewards:
        chats = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
        return func(completions=chats, **columns)

    return call


def named(func: RewardFunction, name: str) -> RewardFunction:
    """The same function by a name."""
    func.__name__ = func.__qualname__ = name
    return func
