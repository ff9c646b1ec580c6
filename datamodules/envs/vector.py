"""Environments by name: Gymnasium ids or importable callables, wrapped, seeded, and in vectors."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from datamodules.envs.engines import AgentsVector, make_engine
from datamodules.envs.episodes import SeededEpisodes
from datamodules.envs.failures import closed_on_error, refuse_environment
from datamodules.envs.imported import EnvId, callable_of, environment_name, register_games, wrap
from datamodules.envs.masks import with_source
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import MASK, mask_size

AUTORESET = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}
VECTORIZATION = ("sync", "async", "vector_entry_point", "envpool")


def as_vector(envs: Any) -> Any:
    """``envs``; a vector of agents as Gymnasium 1 has vectors."""
    if isinstance(envs, VectorEnv) and not hasattr(envs, "single_observation_space"):
        return AgentsVector(envs)
    return envs


def make_env(
    env_id: EnvId,
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[str | dict[str, Any]] = (),
    masks: str | None = None,
) -> Any:
    """One environment with its wrappers, the first innermost, and masks by :func:`mask_source`; or a vector."""
    env = _make_bare(env_id, env_kwargs or {})
    if env is env_id:
        return env
    with closed_on_error(env):
        if isinstance(env, VectorEnv) and wrappers:
            raise UsageError(
                f"wrappers are for single environments; {environment_name(env_id)} makes a vector, which brings its own"
            )
        env = functools.reduce(wrap, wrappers, env)
        if masks is None:
            return env
        return with_source(env, masks)


def make_vector_env(
    env_id: EnvId,
    n_envs: int,
    vectorization_mode: str = "sync",
    autoreset_mode: str = "same_step",
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[str | dict[str, Any]] = (),
    masks: str | None = None,
) -> VectorEnv:
    """``n_envs`` environments that step together, each in :class:`SeededEpisodes`, or an engine."""
    if vectorization_mode in ("vector_entry_point", "envpool"):
        return make_engine(env_id, n_envs, vectorization_mode, env_kwargs or {}, wrappers, masks)
    make = functools.partial(_make_seeded, env_id, env_kwargs, tuple(wrappers), masks)
    mode = AUTORESET[autoreset_mode]
    # Observations are copied into the rollout right away: the vector's own copy would be a second one.
    if vectorization_mode == "sync":
        made: list[gym.Env] = []
        with contextlib.ExitStack() as opened:
            for _ in range(n_envs):
                made.append(make())
                opened.enter_context(closed_on_error(made[-1]))
            return SyncVectorEnv([functools.partial(_itself, env) for env in made], copy=False, autoreset_mode=mode)
    # A mistake in the arguments is reported by this process, not by a worker's traceback.
    make().close()
    envs = AsyncVectorEnv.__new__(AsyncVectorEnv)  # whose processes can be ended if one of them fails at the start
    with closed_on_error(envs):
        envs.__init__([make] * n_envs, copy=False, autoreset_mode=mode)  # type: ignore[misc]
    return envs


def _itself(env: gym.Env) -> gym.Env:
    return env


def _make_seeded(
    env_id: EnvId, env_kwargs: dict[str, Any] | None, wrappers: Sequence[str | dict[str, Any]], masks: str | None
) -> gym.Env:
    env = make_env(env_id, env_kwargs, wrappers, masks)
    with closed_on_error(env):
        return SeededEpisodes(env, expects_no_masks=masks is None)


def _make_bare(env_id: EnvId, env_kwargs: dict[str, Any]) -> Any:
    name = environment_name(env_id)
    if isinstance(env_id, VectorEnv):
        return env_id
    factory = None
    if not isinstance(env_id, str) or ":" in env_id:
        factory = callable_of(env_id)
    try:
        if factory is not None:
            made = as_vector(factory(**env_kwargs))
            if not isinstance(made, gym.Env | VectorEnv):
                raise UsageError(
                    f"env_id={name!r} returned {type(made).__name__}; it must return a gymnasium.Env or a "
                    "gymnasium.vector.VectorEnv"
                )
            return made
        if str(env_id).startswith("ALE/"):
            register_games(str(env_id))
        return gym.make(str(env_id), disable_env_checker=True, **env_kwargs)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        refuse_environment(name, env_kwargs, error)


# ---------------------------------------------------------------- masks


def mask_source(env: gym.Env) -> str | None:
    """Returns where an environment gives its masks: ``observation``, ``method`` or ``info``; None: it has none."""
    size = mask_size(env.action_space)
    if size is None:
        return None
    if isinstance(env.observation_space, spaces.Dict) and MASK in env.observation_space.spaces:
        shape = env.observation_space[MASK].shape
        if shape != (size,):
            raise UsageError(
                f"the observation's action_mask has shape {shape}, but the action space "
                f"{env.action_space} has {size} options; give one number for each"
            )
        return "observation"
    if env.has_wrapper_attr("action_masks") and callable(env.get_wrapper_attr("action_masks")):
        return "method"
    return "info" if MASK in reset_once(env) else None


def reset_once(env: Any) -> dict[str, Any]:
    """Resets an environment below Gymnasium's wrappers, such as a recorder; returns its infos, none if that fails."""
    while isinstance(env, gym.Wrapper) and type(env).__module__.startswith("gymnasium."):
        env = env.env
    with contextlib.suppress(Exception):
        _, infos = env.reset(seed=0)
        return dict(infos)
    return {}
