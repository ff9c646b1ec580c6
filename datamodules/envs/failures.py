"""What is said where an environment can't be made, or has failed."""

import re
import traceback
from typing import Any, NoReturn

import gymnasium as gym

from rl_modules.common.errors import UsageError, did_you_mean, what_happened
from rl_modules.common.extras import install

#: Extras of this project, by the package that an environment imports.
EXTRAS = {
    "jax": "jax",
    "brax": "jax",
    "mujoco_playground": "jax",
    "mjlab": "mjlab",
    "box2d": "box2d",
    "mujoco": "mujoco",
    "ale": "atari",
    "atari": "atari",
    "cv2": "atari",
    "opencv": "atari",
}

#: Games that other libraries call by their name alone.
_GAMES = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "Qbert", "BeamRider", "Enduro", "MsPacman", "Freeway")


def raise_in_one_sentence(envs: Any, name: str, error: BaseException) -> NoReturn:
    """Names the process that died instead of its broken pipe, or the line that raised."""
    if isinstance(error, UsageError):
        raise error
    processes = getattr(envs, "processes", [])
    died = isinstance(error, EOFError | BrokenPipeError | ConnectionResetError)
    dead = []
    for i, process in enumerate(processes if died else ()):
        process.join(0.1)  # its end may not have been noticed yet
        if not process.is_alive():
            dead.append(f"{i} (exit code {process.exitcode})")
    if died or processes:
        for process in processes:
            process.terminate()
        envs.closed = True  # closing would wait for answers that never come
    if died:
        raise UsageError(
            f"the process of environment {', '.join(dead) or '?'} of {name} died; resume from "
            "the last checkpoint with --resume"
        ) from error
    # The frame that called `exit()` is the environment's.
    place = [x for x in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in x.filename][-1]
    where = "its own traceback stands above" if processes else f"{place.filename}:{place.lineno}"
    raise UsageError(
        f"the environment {name} raised {type(error).__name__}: {error} ({where}); fix it, then "
        "resume from the last checkpoint with --resume"
    ) from error


def refuse_environment(name: str, env_kwargs: dict[str, Any], error: BaseException) -> NoReturn:
    """Says why an environment could not be made."""
    if isinstance(error, gym.error.DependencyNotInstalled | ModuleNotFoundError):
        raise UsageError(missing_extra(f"the environment {name}", str(error))) from error
    if isinstance(error, gym.error.NameNotFound | gym.error.NamespaceNotFound):
        raise UsageError(f"env_id={name!r} is not a known environment{_remedy(name)}") from error
    if isinstance(error, gym.error.Error):
        # Deprecated and missing versions: Gymnasium names the right one.
        raise UsageError(f"env_id={name!r} can't be made: {error}") from error
    with_what = f" with env_kwargs={env_kwargs}" if env_kwargs else ""
    raise UsageError(f"the environment {name} can't be made{with_what}: {what_happened(error)}") from error


def _remedy(name: str) -> str:
    """Returns a clause that says how to register an environment that Gymnasium does not know."""
    if re.search(r"NoFrameskip|Deterministic-v|-ram", name) or name.partition("-v")[0] in _GAMES:
        game = re.split(r"NoFrameskip|Deterministic|-ram|-v", name)[0]
        return f"; Atari games are called ALE/{game}-v5 (configs/ppo/pong.yaml has the usual wrappers)"
    near = did_you_mean(name, gym.registry)
    return near or (
        "; if a package registers it, name that first, as in minigrid:MiniGrid-Empty-5x5-v0, or give a "
        "function that makes it as my_module:make_env"
    )


def missing_extra(who: str, message: str) -> str:
    """Says that a package is missing, with the command that installs it where it is one of an extra."""
    folded = message.lower()
    for mark, extra in EXTRAS.items():
        if mark in folded:
            return f"{who} needs a package that is not installed: {install(extra)}"
    return f"{who} needs a package that is not installed: {message}"
