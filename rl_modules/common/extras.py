"""Commands that install the packages of the project's optional extras."""

import shlex

#: Packages of each extra in pyproject.toml. They are installed by their own names, which every package index has,
#: whether this project was installed from a checkout or from a wheel.
PACKAGES = {
    "box2d": ("gymnasium[box2d]",),
    "mujoco": ("gymnasium[mujoco]",),
    "atari": ("ale-py>=0.10", "opencv-python-headless>=4.8"),
    "jax": ("brax>=0.14", "playground>=0.2"),
    "sweep": ("optuna>=4",),
    "compare": ("pandas>=2.2,<3", "matplotlib>=3.8", "rliable>=1.2"),
    "video": ("moviepy>=2.1", "gymnasium[classic-control]"),
    "language": (
        "transformers>=5.16",
        "peft>=0.21",
        "datasets>=4",
        "reasoning-gym>=0.1.20",
        "math-verify>=0.8",
        "aiohttp>=3.10",
    ),
}


def install(extra: str) -> str:
    """Returns the command that installs an extra's packages."""
    return f"pip install {shlex.join(PACKAGES[extra])}"
