"""Checks of a vector environment that the user made."""

import inspect
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from datamodules.envs.masks import unread_masks
from rl_modules.common.errors import UsageError

#: Arguments that a vector defines itself, with their defaults.
_USUAL = {"vectorization_mode": "sync", "autoreset_mode": "same_step"}


def check_vector(envs: VectorEnv, data: Any) -> None:
    """Warns of arguments of single environments that a vector ignores, of masks that are not read, and of an assumed
    autoreset mode.

    Args:
        envs: the vector.
        data: the control datamodule that steps it.

    Raises:
        UsageError: ``env_kwargs`` for a vector that is made already, or an unknown autoreset mode.
    """
    given, name = data.hparams, data.env_name
    if data.environments.is_one_vector and data.env_kwargs:
        raise UsageError(f"env_kwargs={data.env_kwargs} are for a callable that makes the environments; {name} was "
                         "given as a vector")  # fmt: skip
    n_envs = inspect.signature(type(data).__init__).parameters.get("n_envs")
    other = [f"{key}={given[key]}" for key, value in _USUAL.items() if given[key] != value]
    if n_envs is not None and given.n_envs not in (n_envs.default, envs.num_envs):
        other.append(f"n_envs={given.n_envs}")
    if other:
        rank_zero_warn(f"{name} is a vector of {envs.num_envs} environments, which brings its own number and way of "
                       f"stepping: {', '.join(other)} does not apply")  # fmt: skip
    mode = envs.metadata.get("autoreset_mode")
    if mode is None:
        rank_zero_warn(f"{name} has no metadata['autoreset_mode'] and is taken for one of AutoresetMode.NEXT_STEP: the "
                       "step after an episode's end resets, and is no transition; set AutoresetMode.SAME_STEP there if "
                       "the step that ends an episode resets")  # fmt: skip
    elif not isinstance(mode, AutoresetMode):
        raise UsageError(f"{name} has metadata['autoreset_mode']={mode!r}; it must be a member of "
                         "gymnasium.vector.AutoresetMode, such as AutoresetMode.SAME_STEP")  # fmt: skip
    where = unread_masks(envs) if data.action_masks else None
    if where is not None:
        rank_zero_warn(f"{name} gives action masks {where}, and only those in a vector's observations are read: the "
                       "policy acts without masks; put them there as 'action_mask', give a callable that makes one "
                       "environment, or action_masks=False")  # fmt: skip
