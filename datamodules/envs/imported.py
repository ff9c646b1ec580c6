"""Environments and wrappers that are named by an import path, and Atari's games."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from datamodules.envs.failures import missing_extra
from rl_modules.common.errors import UsageError, did_you_mean, naming
from rl_modules.common.loading import import_user_module, member_of

#: A Gymnasium id, ``package.module:callable``, a callable that returns an environment or a vector of them, or a vector.
EnvId = str | Callable[..., gym.Env | VectorEnv] | VectorEnv


def register_games(env_id: str) -> None:
    """Imports ale_py, which registers Atari's games."""
    try:
        importlib.import_module("ale_py")
    except ModuleNotFoundError as error:
        raise UsageError(missing_extra(f"the environment {env_id}", str(error))) from error


def callable_of(env_id: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns the callable that ``package.module:name`` names; None for Gymnasium ids, ``module:Id-v0`` included."""
    if not isinstance(env_id, str):
        return env_id
    module, _, attribute = env_id.partition(":")
    if not attribute:
        return None
    package = import_user_module(module, f"env_id={env_id!r}")
    found = None if attribute in gym.registry else member_of(package, attribute, f"env_id={env_id!r}")
    if found is not None and not callable(found):
        raise UsageError(
            f"env_id={env_id!r} is a {type(found).__name__}; give a callable that makes an environment, "
            "such as its class"
        )
    return found


def wrap(env: gym.Env, wrapper: str | dict[str, Any]) -> gym.Env:
    """One environment with one more wrapper."""
    path: Any = wrapper
    arguments: dict[str, Any] = {}
    if isinstance(wrapper, dict):
        path, arguments = wrapper.get("class_path", ""), wrapper.get("init_args") or {}
    if not isinstance(path, str):
        raise UsageError(
            f"wrappers: {path!r} must be a name from gymnasium.wrappers, an import path or a dict of "
            "class_path and init_args; to call code of your own, give env_id a function that makes and "
            "wraps the environment"
        )
    module, _, name = path.replace(":", ".").rpartition(".")
    found = getattr(import_user_module(module or "gymnasium.wrappers", f"wrappers: {path!r}"), name, None)
    if found is None:
        near = did_you_mean(name, gym.wrappers.__all__)
        raise UsageError(f"wrappers: {path!r} is neither in gymnasium.wrappers nor importable{near}")
    with naming(f"wrappers: {path!r} with {arguments} does not fit {env}", gym.error.Error, AssertionError):
        declared = inspect.signature(found).parameters
        tuples = {name for name, argument in declared.items() if "tuple" in str(argument.annotation)}  # YAML has lists
        return found(
            env,
            **{
                name: tuple(value) if isinstance(value, list) and name in tuples else value
                for name, value in arguments.items()
            },
        )


def environment_name(env_id: EnvId) -> str:
    """Returns the environment's name; refuses a single environment, which can't be made again for other seeds."""
    if isinstance(env_id, str):
        return env_id
    if isinstance(env_id, VectorEnv):  # EnvPool's are gym.Env too
        return type(env_id.unwrapped).__name__
    if isinstance(env_id, gym.Env):
        name = env_id.spec.id if env_id.spec is not None else f"package.module:make_{type(env_id).__name__.lower()}"
        raise UsageError(
            f"env_id={env_id} is one environment, and n_envs of them are needed, others for evaluation; "
            f"give its id or a callable that makes it, as in RolloutDataModule({name!r})"
        )
    if not callable(env_id):
        raise UsageError(
            f"env_id={env_id!r} must be a Gymnasium id, package.module:callable, or a callable that "
            "returns an environment"
        )
    target = getattr(env_id, "func", env_id)  # functools.partial
    return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__qualname__)}"
