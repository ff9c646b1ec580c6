"""Fast paths: each stands beside its plain twin, and one switch, ``RL_FAST=0`` in the environment, runs the twins."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_fast", "is_recording", "recording"]


def is_fast() -> bool:
    """Whether fast paths run: ``RL_FAST`` is read at each call, so that a test can compare both ways."""
    return os.environ.get("RL_FAST", "1") != "0"


_recording = False


def is_recording() -> bool:
    """Whether the running code is being recorded or checked for that."""
    return _recording


@contextmanager
def recording() -> Iterator[None]:
    """The part of a program in which :func:`is_recording` is true."""
    global _recording
    before, _recording = _recording, True
    try:
        yield
    finally:
        _recording = before
