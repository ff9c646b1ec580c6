"""Fast paths: each stands beside its plain twin, and one switch, ``RL_FAST=0`` in the environment, runs the twins."""

import os

__all__ = ["is_fast"]


def is_fast() -> bool:
    """Whether fast paths run: ``RL_FAST`` is read at each call, so that a test can compare both ways."""
    return os.environ.get("RL_FAST", "1") != "0"
