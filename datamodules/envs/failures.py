"""What is said where an environment can't be made, or has failed."""

import contextlib
import importlib.util
import re
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

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

#: Seconds that the processes of environments have to close them.
PATIENCE_S = 5.0
#: Games that other libraries call by their name alone.
_GAMES = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "Qbert", "BeamRider", "Enduro", "MsPacman", "Freeway")


def close(envs: Any, name: str) -> None:
    """Closes every environment of a vector, in whatever state it is; an error in closing one is a warning."""
    if getattr(envs, "closed", False):
        return
    if getattr(envs, "processes", None):
        _end_processes(envs)
        return
    errors = []
    # Gymnasium's vector stops at the first environment that can't be closed.
    for env in envs.envs if isinstance(envs, SyncVectorEnv) else (envs,):
        try:
            env.close()
        except (Exception, SystemExit) as error:
            errors.append(error)
    if isinstance(envs, SyncVectorEnv):
        envs.closed = True
    if errors:
        rank_zero_warn(f"closing {name} raised {type(errors[0]).__name__}: {errors[0]}")


@contextlib.contextmanager
def closed_on_error(*envs: Any) -> Iterator[None]:
    """Closes environments or vectors that were just made, if the context ends with an exception."""
    try:
        yield
    except BaseException:
        for one in envs:
            close(one, type(one).__name__)
        raise


def _end_processes(envs: Any) -> None:
    """Ends the processes of a vector, after they have closed their environments or :data:`PATIENCE_S` have passed.

    Gymnasium's own ``close`` waits without limit for the answer to a step that an exception has interrupted.
    """
    # One that could not be made may lack them.
    pipes = [pipe for pipe in getattr(envs, "parent_pipes", ()) if pipe is not None and not pipe.closed]
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(("close", None))
    until_s = time.monotonic() + (PATIENCE_S if pipes else 0)
    for process in envs.processes:
        process.join(max(until_s - time.monotonic(), 0))
        if process.is_alive():
            process.terminate()
            process.join(1)
        if process.is_alive():
            process.kill()
            process.join()
    for pipe in pipes:
        pipe.close()
    envs.closed = True


def raise_in_one_sentence(envs: Any, name: str, error: BaseException) -> NoReturn:
    """Names the process that died instead of its broken pipe, or the line that raised."""
    processes = getattr(envs, "processes", [])
    if isinstance(error, UsageError):
        if processes:
            close(envs, name)  # Gymnasium has dropped the pipe of the one that raised
        raise error
    died = isinstance(error, EOFError | BrokenPipeError | ConnectionResetError)
    dead = []
    for i, process in enumerate(processes if died else ()):
        process.join(0.1)  # its end may not have been noticed yet
        if not process.is_alive():
            dead.append(f"{i} (exit code {process.exitcode})")
    if processes:
        close(envs, name)
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
    module, _, made = name.rpartition(".")
    is_module = re.fullmatch(r"[A-Za-z_][\w.]*", module) is not None
    if is_module and made == "py":
        return f"; what makes it in that file is named after a colon: {module}:make_env, the function or class there"
    if is_module and importlib.util.find_spec(module.partition(".")[0]) is not None:
        return f"; did you mean {module}:{made}?"
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
