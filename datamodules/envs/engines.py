"""Vectors that others made, as Gymnasium vectors: engines, agents of a game, and the user's own."""

import contextlib
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from datamodules.envs.imported import EnvId, environment_name, register_games
from datamodules.envs.masks import IGNORED, VectorWithoutMasks, has_mask
from rl_modules.checkpoints import space_brief
from rl_modules.common.errors import UsageError, did_you_mean, naming
from rl_modules.common.masks import MASK, mask_size


def make_engine(
    env_id: EnvId,
    n_envs: int,
    vectorization_mode: str,
    env_kwargs: dict[str, Any],
    wrappers: Sequence[Any],
    masks: str | None,
) -> VectorEnv:
    """Makes an engine's vector; see :func:`datamodules.envs.vector.make_vector_env`."""
    if wrappers or masks not in (None, IGNORED):
        what = "wrappers are" if wrappers else "action masks are"
        raise UsageError(
            f"{what} for single environments; with vectorization_mode={vectorization_mode!r} leave "
            f"them out{'' if wrappers else ' (action_masks=False)'}, or use 'sync'"
        )
    name = environment_name(env_id)
    is_game = name.startswith("ALE/")
    if vectorization_mode == "envpool":
        pool = EnvPoolVector(name, n_envs, env_kwargs)
        if not is_game:  # their pictures are those after preprocessing, which the datamodule compares
            # Arguments that only the engine has, such as num_threads, are not passed to Gymnasium.
            example = gym.make(name, disable_env_checker=True)
            pool.require_spaces(example)
            example.close()
        envs: VectorEnv = pool
    else:
        if is_game:
            register_games(name)
        what = f"env_id={name!r} has no vectorised engine that takes env_kwargs={env_kwargs}, as 'sync' and 'async' do"
        with naming(what, gym.error.Error):
            envs = gym.make_vec(name, n_envs, vectorization_mode="vector_entry_point", **env_kwargs)
        envs = SmallSeeds(envs) if is_game else envs
    return VectorWithoutMasks(envs) if masks == IGNORED and has_mask(envs) else envs


class EnvPoolVector(VectorEnv):
    """N environments of EnvPool's, which resets in a step of its own; episodes can't be read or restored."""

    def __init__(self, env_id: str, num_envs: int, env_kwargs: dict[str, Any] | None = None) -> None:
        try:
            import envpool
        except ImportError as error:
            raise UsageError(
                "vectorization_mode='envpool' needs a package that is not installed: pip install "
                "'lightning-rl-recipes[envpool]'"
            ) from error
        known = envpool.list_all_envs()
        env_id = env_id.removeprefix("ALE/") if env_id.startswith("ALE/") else env_id
        if env_id not in known:
            raise UsageError(
                f"env_id={env_id!r} has no engine in EnvPool{did_you_mean(env_id, known)}; use "
                "vectorization_mode='sync' or 'async'"
            )
        self._make = envpool.make
        self._arguments = {"task_id": env_id, "env_type": "gymnasium", "num_envs": num_envs, **(env_kwargs or {})}
        self._pool: Any = self._new_pool(0)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self._pool.spec.gymnasium_observation_space
        self.single_action_space = self._pool.spec.gymnasium_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def require_spaces(self, env: gym.Env) -> None:
        """Refuses an engine whose spaces differ from those of the environment that evaluation uses."""
        for name in ("observation_space", "action_space"):
            here, there = getattr(self, f"single_{name}"), getattr(env, name)
            if space_brief(here) != space_brief(there):
                raise UsageError(
                    f"EnvPool's {self._arguments['task_id']} has the {name} {space_brief(here)}, "
                    f"Gymnasium's {space_brief(there)}; use vectorization_mode='sync'"
                )

    def _new_pool(self, seed: int) -> Any:
        seeds = np.random.SeedSequence(seed).generate_state(self._arguments["num_envs"]) >> 1
        with naming(f"env_kwargs do not fit EnvPool's {self._arguments['task_id']}", AssertionError, KeyError):
            return self._make(**self._arguments, seed=[int(s) for s in seeds])

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = self._new_pool(int(np.ravel(seed)[0]))
        return self._pool.reset()[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *step, info = self._pool.step(np.asarray(actions))
        # Besides one value of each environment, the infos have EnvPool's numbers of environments and players.
        infos = {name: x for name, x in info.items() if np.shape(x)[:1] == (self.num_envs,) and name != "env_id"}
        return *step, infos

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()


class SmallSeeds(VectorWrapper):
    """ALE's engine with seeds of any size: it takes 31 bits, and consecutive ones for its environments."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        small = None if seed is None else int(np.ravel(seed)[0]) % (2**31 - self.num_envs)
        return self.env.reset(seed=small, options=options)


class AgentsVector(VectorEnv):
    """A vector of agents, as SuperSuit makes of PettingZoo's games: each is an environment, all end together."""

    def __init__(self, envs: Any) -> None:
        self.envs_of_agents = envs
        self.num_envs = envs.num_envs
        self.single_observation_space, self.single_action_space = envs.observation_space, envs.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**(envs.metadata or {}), "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = getattr(envs, "render_mode", None)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        small = None if seed is None else int(np.ravel(seed)[0]) % 2**31  # many games seed NumPy's old generator
        return self.envs_of_agents.reset(seed=small, options=options)[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self.envs_of_agents.step(actions)
        terminated, truncated = terminated.astype(bool), truncated.astype(bool)
        info: dict[str, Any] = {}
        done = terminated | truncated
        if done.any():
            final = [infos[i].get("terminal_observation") for i in range(self.num_envs)]
            alone = [i for i in np.flatnonzero(done) if final[i] is None]
            if alone:
                raise UsageError(
                    f"agent {alone[0]} ended before its game did (black_death=True), and the rows after "
                    "that are no transitions; end the episodes of all agents together"
                )
            info["final_obs"] = final
            info["_is_success"] = np.array(["is_success" in one for one in infos])
            if info["_is_success"].any():
                info["is_success"] = np.array([one.get("is_success", False) for one in infos])
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        return self.envs_of_agents.render()

    def close_extras(self, **kwargs: Any) -> None:
        self.envs_of_agents.close()


# ---------------------------------------------------------------- the user's


def check_vector(envs: VectorEnv, data: Any) -> None:
    """Warns of arguments that a vector ignores, unread masks and an assumed autoreset mode; refuses an unknown mode."""
    given, name = data.hparams, data.env_name
    if data.environments.is_one_vector and data.env_kwargs:
        raise UsageError(
            f"env_kwargs={data.env_kwargs} are for a callable that makes the environments; {name} was given as a vector"
        )
    declared = data.declared_settings
    names = ["vectorization_mode", "autoreset_mode", *(["n_envs"] if given.n_envs != envs.num_envs else [])]
    other = [f"{name}={given[name]}" for name in names if name in declared and given[name] != declared[name].default]
    if other:
        rank_zero_warn(
            f"{name} is a vector of {envs.num_envs} environments, which brings its own number and way of "
            f"stepping: {', '.join(other)} does not apply"
        )
    mode = envs.metadata.get("autoreset_mode")
    if mode is None:
        rank_zero_warn(
            f"{name} has no metadata['autoreset_mode'] and is taken for one of AutoresetMode.NEXT_STEP: the "
            "step after an episode's end resets, and is no transition; set AutoresetMode.SAME_STEP there if "
            "the step that ends an episode resets"
        )
    elif not isinstance(mode, AutoresetMode):
        raise UsageError(
            f"{name} has metadata['autoreset_mode']={mode!r}; it must be a member of "
            "gymnasium.vector.AutoresetMode, such as AutoresetMode.SAME_STEP"
        )
    where = unread_masks(envs) if data.action_masks else None
    if where is not None:
        rank_zero_warn(
            f"{name} gives action masks {where}, and only those in a vector's observations are read: the "
            "policy acts without masks; put them there as 'action_mask', give a callable that makes one "
            "environment, or action_masks=False"
        )


def unread_masks(envs: VectorEnv) -> str | None:
    """Returns where a user's vector, which it resets, gives masks outside of its observations; None: nowhere."""
    if mask_size(envs.single_action_space) is None or has_mask(envs):
        return None
    with contextlib.suppress(Exception):  # a broken one is reported where it is first stepped
        call: Any = getattr(envs, "call", None)
        if call is not None and all(call("has_wrapper_attr", "action_masks")):
            return "by the method action_masks() of its environments"
        if MASK in envs.reset(seed=0)[1]:
            return "in its infos"
    return None
