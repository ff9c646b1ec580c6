"""``rl list``, ``rl --version`` and ``rl doctor``: installed configs, versions, and missing extras."""

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from recipes import configs
from rl_modules.common.errors import UsageError
from rl_modules.common.extras import install

#: Packages that every run needs.
NEEDED = ("torch", "lightning", "jsonargparse", "gymnasium", "numpy", "tensorboard", "rich", "pillow")
#: Modules of each extra by feature; they are looked up without being imported.
OPTIONAL = {
    "box2d": ("LunarLander, BipedalWalker", ("Box2D",)),
    "mujoco": ("HalfCheetah, Hopper, Walker2d", ("mujoco",)),
    "atari": ("Pong, Breakout", ("ale_py", "cv2")),
    "sweep": ("rl sweep", ("optuna",)),
    "video": ("rl record, --record_every", ("moviepy", "pygame")),
    "language": ("language models", ("transformers", "peft", "datasets", "reasoning_gym", "math_verify")),
}


def listing(words: list[str]) -> str:
    """Every installed config with its one-line description; with a word, those that hold it."""
    if len(words) > 1:
        raise UsageError(f"list takes at most one word, as in `rl list cartpole`; got {' '.join(words)}")
    rows = {name: configs.describe(name) for name in (*configs.names(), *configs.sweeps())}
    if words:
        rows = {name: text for name, text in rows.items() if words[0].lower() in f"{name} {text}".lower()}
        if not rows:
            raise UsageError(f"no installed config has {words[0]!r} in its name or description; `rl list` shows all")
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows.items())


def version(words: list[str]) -> str:
    """Name and version of the project, and of what it runs on."""
    if words:
        raise UsageError(f"--version takes no further words; got {' '.join(words)}")
    return f"lightning-rl-recipes {_of_checkout() or _version('lightning-rl-recipes') or 'unknown'}"


def doctor(words: list[str]) -> str:
    """Versions, device and extras; for every extra that is missing the command that installs it."""
    if words:
        raise UsageError(f"doctor takes no further words; got {' '.join(words)}")
    lines = [
        version([]),
        f"{'installed in':14}{Path(__file__).resolve().parents[2]}",
        f"{'Python':14}{platform.python_version()} ({sys.executable})",
        *(f"{name:14}{_version(name) or 'missing: pip install ' + name}" for name in NEEDED),
        f"{'device':14}{_device()}",
        f"{'CPU cores':14}{_cores()}",
        "",
    ]
    for extra, (use, modules) in OPTIONAL.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        state = f"no ({', '.join(missing)} missing): {install(extra)}" if missing else "yes"
        lines.append(f"{extra:14}{use}: {state}")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def _of_checkout() -> str | None:
    """Returns the version in a checkout's pyproject.toml, whatever is installed beside it; None in a wheel."""
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return next((line.partition('"')[2].rstrip('"') for line in lines if line.startswith("version = ")), None)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{', '.join(names)} (CUDA {torch.version.cuda}); --trainer.accelerator auto takes it"
    if torch.backends.mps.is_available():
        return "Apple GPU (MPS); --trainer.accelerator auto takes it"
    return "CPU (torch sees no GPU)"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable}; a run of a small network uses one (--threads N for more)"
