"""Environments by name: Gymnasium ids or importable callables, wrapped, seeded, and in vectors."""

import functools
import importlib
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from datamodules.envs.agents import as_vector
from datamodules.envs.episodes import SeededEpisodes
from datamodules.envs.masks import IGNORED, VectorWithoutMasks, has_mask, with_source
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.extras import install
from rl_modules.common.loading import import_user_module, member_of

#: Extras of this project, by the package that an environment imports.
EXTRAS = {"box2d": "box2d", "mujoco": "mujoco", "ale": "atari", "atari": "atari", "cv2": "atari", "opencv": "atari"}

AUTORESET = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}
VECTORIZATION = ("sync", "async", "vector_entry_point", "envpool")


#: A Gymnasium id, ``package.module:callable``, a callable that returns an environment or a vector of them, or a vector.
EnvId = str | Callable[..., gym.Env | VectorEnv] | VectorEnv


def environment_name(env_id: EnvId) -> str:
    """Returns the environment's name in checkpoints and logs.

    Raises:
        UsageError: a single environment, which can't be made again for other seeds and evaluation.
    """
    if isinstance(env_id, str):
        return env_id
    if isinstance(env_id, VectorEnv):  # EnvPool's are gym.Env too
        return type(env_id.unwrapped).__name__
    if isinstance(env_id, gym.Env):
        name = env_id.spec.id if env_id.spec is not None else f"package.module:make_{type(env_id).__name__.lower()}"
        raise UsageError(f"env_id={env_id} is one environment, and n_envs of them are needed, others for evaluation; "
                         f"give its id or a callable that makes it, as in RolloutDataModule({name!r})")  # fmt: skip
    if not callable(env_id):
        raise UsageError(f"env_id={env_id!r} must be a Gymnasium id, package.module:callable, or a callable that "
                         "returns an environment")  # fmt: skip
    target = getattr(env_id, "func", env_id)  # functools.partial
    return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__qualname__)}"


def make_env(
    env_id: EnvId,
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[str | dict[str, Any]] = (),
    masks: str | None = None,
) -> Any:
    """One environment with its wrappers, the first in the list innermost; or the vector that the callable makes.

    Args:
        env_id: Gymnasium id, ``package.module:callable``, or a callable that returns an environment.
        env_kwargs: keyword arguments of ``gymnasium.make`` (``max_episode_steps`` among them) or of the callable.
        wrappers: names from ``gymnasium.wrappers``, import paths, or ``{"class_path": ..., "init_args": {...}}``.
        masks: where it gives action masks, as :func:`datamodules.envs.masks.mask_source` says; None: nowhere;
            :data:`datamodules.envs.masks.IGNORED`: they are not read, and taken out of its observations.

    Raises:
        UsageError: unknown id, missing extra, unknown wrapper, unknown keyword, a wrapper that does not fit.
    """
    env = _make_bare(env_id, env_kwargs or {})
    if isinstance(env, VectorEnv) and wrappers:
        raise UsageError(f"wrappers are for single environments; {environment_name(env_id)} makes a vector, which "
                         "brings its own")  # fmt: skip
    for wrapper in wrappers:
        env = _wrap(env, wrapper)
    return env if masks is None else with_source(env, masks)


def make_vector_env(
    env_id: EnvId,
    n_envs: int,
    vectorization_mode: str = "sync",
    autoreset_mode: str = "same_step",
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[str | dict[str, Any]] = (),
    masks: str | None = None,
) -> VectorEnv:
    """``n_envs`` environments that step together, each with :class:`SeededEpisodes` outermost.

    Args:
        env_id: as in :func:`make_env`.
        n_envs: number of environments, ≥ 1.
        vectorization_mode: ``sync`` (one process), ``async`` (a process each), ``vector_entry_point`` (the
            environment's own vectorised engine) or ``envpool`` (EnvPool's); both engines reset in the step after the
            end and know no single episodes.
        autoreset_mode: ``same_step``, ``next_step`` or ``disabled``, as Gymnasium defines them; an engine's own mode
            is kept.
        env_kwargs: as in :func:`make_env`.
        wrappers: as in :func:`make_env`.
        masks: as in :func:`make_env`.

    Raises:
        UsageError: as in :func:`make_env`, an unknown mode, or wrappers around a vectorised engine.
    """
    if vectorization_mode in ("vector_entry_point", "envpool"):
        if wrappers or masks not in (None, IGNORED):
            what = "wrappers are" if wrappers else "action masks are"
            raise UsageError(f"{what} for single environments; with vectorization_mode={vectorization_mode!r} leave "
                             f"them out{'' if wrappers else ' (action_masks=False)'}, or use 'sync'")  # fmt: skip
        make_engine = _make_engine if vectorization_mode == "vector_entry_point" else _make_pool
        envs = make_engine(env_id, n_envs, env_kwargs or {})
        return VectorWithoutMasks(envs) if masks == IGNORED and has_mask(envs) else envs
    make = functools.partial(_make_seeded, env_id, env_kwargs, tuple(wrappers), masks)
    mode = AUTORESET[autoreset_mode]
    # Observations are copied into the rollout right away: the vector's own copy would be a second one.
    if vectorization_mode == "sync":
        return SyncVectorEnv([make] * n_envs, copy=False, autoreset_mode=mode)
    # A mistake in the arguments is reported by this process, not by a worker's traceback.
    make().close()
    return AsyncVectorEnv([make] * n_envs, copy=False, autoreset_mode=mode)


def _make_seeded(
    env_id: EnvId, env_kwargs: dict[str, Any] | None, wrappers: Sequence[str | dict[str, Any]], masks: str | None
) -> gym.Env:
    return SeededEpisodes(make_env(env_id, env_kwargs, wrappers, masks), expects_no_masks=masks is None)


#: Games that other libraries call by their name alone.
_GAMES = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "Qbert", "BeamRider", "Enduro", "MsPacman", "Freeway")


def _remedy(name: str) -> str:
    """Returns a clause that says how to register an environment that Gymnasium does not know."""
    if re.search(r"NoFrameskip|Deterministic-v|-ram", name) or name.partition("-v")[0] in _GAMES:
        game = re.split(r"NoFrameskip|Deterministic|-ram|-v", name)[0]
        return f"; Atari games are called ALE/{game}-v5 (configs/ppo/pong.yaml has the usual wrappers)"
    near = did_you_mean(name, gym.registry)
    return near or ("; if a package registers it, name that first, as in minigrid:MiniGrid-Empty-5x5-v0, or give a "
                    "function that makes it as my_module:make_env")  # fmt: skip


def _make_bare(env_id: EnvId, env_kwargs: dict[str, Any]) -> Any:
    name = environment_name(env_id)
    if isinstance(env_id, VectorEnv):
        return env_id
    factory = _callable_of(env_id)
    try:
        if factory is not None:
            made = as_vector(factory(**env_kwargs))
            if not isinstance(made, gym.Env | VectorEnv):
                raise UsageError(f"env_id={name!r} returned {type(made).__name__}; it must return a gymnasium.Env or a "
                                 "gymnasium.vector.VectorEnv")  # fmt: skip
            return made
        if str(env_id).startswith("ALE/"):
            _register_games(str(env_id))
        return gym.make(str(env_id), disable_env_checker=True, **env_kwargs)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise UsageError(_missing_extra(f"the environment {name}", str(error))) from error
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as error:
        raise UsageError(f"env_id={name!r} is not a known environment{_remedy(name)}") from error
    except gym.error.Error as error:
        # Deprecated and missing versions: Gymnasium names the right one.
        raise UsageError(f"env_id={name!r} can't be made: {error}") from error
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        places = traceback.extract_tb(error.__traceback__)
        # A callable that takes no such arguments raises where it is called, here; Gymnasium's ids in Gymnasium.
        if isinstance(error, TypeError) and (factory is None or len(places) == 1):
            raise UsageError(f"env_kwargs={env_kwargs} does not fit the environment {name}: {error}") from error
        raise UsageError(f"the environment {name} can't be made: {type(error).__name__}: {error} "
                         f"({places[-1].filename}:{places[-1].lineno})") from error  # fmt: skip


def _register_games(env_id: str) -> None:
    """Imports ale_py, which registers Atari's games.

    Raises:
        UsageError: it is not installed.
    """
    try:
        importlib.import_module("ale_py")
    except ModuleNotFoundError as error:
        raise UsageError(_missing_extra(f"the environment {env_id}", str(error))) from error


def _make_pool(env_id: EnvId, n_envs: int, env_kwargs: dict[str, Any]) -> VectorEnv:
    if not isinstance(env_id, str):
        raise UsageError(f"env_id={environment_name(env_id)!r} is a callable; vectorization_mode='envpool' takes an id "
                         "that EnvPool knows")  # fmt: skip
    from datamodules.envs.pool import EnvPoolVector

    envs = EnvPoolVector(env_id, n_envs, env_kwargs)
    if env_id.startswith("ALE/"):
        return envs  # its pictures are those after preprocessing, which the datamodule compares
    # Arguments that only the engine has, such as num_threads, are not passed to Gymnasium.
    example = gym.make(env_id, disable_env_checker=True)
    envs.require_spaces(example)
    example.close()
    return envs


def _make_engine(env_id: EnvId, n_envs: int, env_kwargs: dict[str, Any]) -> VectorEnv:
    if isinstance(env_id, str) and env_id.startswith("ALE/"):
        _register_games(env_id)
    spec = gym.registry.get(env_id) if isinstance(env_id, str) else None
    if spec is None or spec.vector_entry_point is None:
        with_engine = sorted(name for name, spec in gym.registry.items() if spec.vector_entry_point is not None)
        raise UsageError(f"env_id={environment_name(env_id)!r} has no vectorised engine; those that have are "
                         f"{', '.join(with_engine)}; use vectorization_mode='sync' or 'async'")  # fmt: skip
    try:
        envs = gym.make_vec(str(env_id), n_envs, vectorization_mode="vector_entry_point", **env_kwargs)
    except TypeError as error:
        raise UsageError(f"env_kwargs={env_kwargs} does not fit the engine of {env_id}: {error}") from error
    if str(env_id).startswith("ALE/"):
        from datamodules.envs.atari import SmallSeeds

        return SmallSeeds(envs)
    return envs


def _callable_of(env_id: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns the callable that ``package.module:name`` names; None for Gymnasium ids, ``module:Id-v0`` included."""
    if not isinstance(env_id, str):
        return env_id
    module, _, attribute = env_id.partition(":")
    if not attribute:
        return None
    package = import_user_module(module, f"env_id={env_id!r}")
    found = None if attribute in gym.registry else member_of(package, attribute, f"env_id={env_id!r}")
    if found is not None and not callable(found):
        raise UsageError(f"env_id={env_id!r} is a {type(found).__name__}; give a callable that makes an environment, "
                         "such as its class")  # fmt: skip
    return found


def _wrap(env: gym.Env, wrapper: str | dict[str, Any]) -> gym.Env:
    path: Any = wrapper
    arguments: dict[str, Any] = {}
    if isinstance(wrapper, dict):
        path, arguments = wrapper.get("class_path", ""), wrapper.get("init_args") or {}
    if not isinstance(path, str):
        raise UsageError(f"wrappers: {path!r} must be a name from gymnasium.wrappers, an import path or a dict of "
                         "class_path and init_args; to call code of your own, give env_id a function that makes and "
                         "wraps the environment")  # fmt: skip
    module, _, name = path.replace(":", ".").rpartition(".")
    found = getattr(import_user_module(module or "gymnasium.wrappers", f"wrappers: {path!r}"), name, None)
    if found is None:
        near = did_you_mean(name, gym.wrappers.__all__)
        raise UsageError(f"wrappers: {path!r} is neither in gymnasium.wrappers nor importable{near}")
    try:
        return found(env, **arguments)
    except gym.error.DependencyNotInstalled as error:
        raise UsageError(_missing_extra(f"the wrapper {name}", str(error))) from error
    except TypeError as error:
        raise UsageError(f"wrappers: {path!r} does not take {arguments}: {error}") from error
    except UsageError:
        raise
    except (gym.error.Error, ValueError, AssertionError) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"wrappers: {path!r} with {arguments} does not fit {env}: {reason}") from error


def _missing_extra(who: str, message: str) -> str:
    folded = message.lower()
    for mark, extra in EXTRAS.items():
        if mark in folded:
            return f"{who} needs a package that is not installed: {install(extra)}"
    return f"{who} needs a package that is not installed: {message}"
