"""The record that a training process writes while it runs, and the history of a run that was killed and resumed."""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch


def fingerprint(*parts: Any) -> str:
    """Returns a digest of the exact bits of arrays or tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def weights_fingerprint(module: torch.nn.Module) -> str:
    """Returns a digest of all weights of a module."""
    return fingerprint(*(p.detach().cpu().float().numpy() for p in module.state_dict().values()))


class Trace:
    """Appends one line per event to a file; a line that was written survives SIGKILL.

    Args:
        path: of the file; a resumed process appends to it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, *values: Any) -> None:
        """Appends an event.

        Args:
            kind: ``collected`` (units the run's counter counts), ``used`` (units in an update), ``lost`` (number of
                units counted that no update will read), ``update`` (weights after it), ``checkpoint`` (its name,
                written before it is), ``resume`` (the name of what was loaded, ``start`` for nothing) or ``damaged``.
            values: of the event.
        """
        os.write(self._descriptor, (" ".join([kind, *map(str, values)]) + "\n").encode())


@dataclass
class History:
    """The events that led to the final weights: what came after a checkpoint and before the kill is left out."""

    collected: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    lost: int = 0
    damaged: int = 0

    @classmethod
    def read(cls, path: Path) -> "History":
        """Reads a trace file."""
        lines: list[list[str]] = []
        damaged = 0
        for line in path.read_text().splitlines():
            words = line.split()
            if words[0] == "damaged":
                damaged += 1
            elif words[0] == "resume":
                while lines and lines[-1] != ["checkpoint", words[1]]:
                    lines.pop()
            else:
                lines.append(words)
        history = cls(damaged=damaged)
        for kind, *values in lines:
            if kind == "lost":
                history.lost += int(values[0])
            elif kind == "update":
                history.updates += values
            elif kind in ("collected", "used"):
                getattr(history, kind).extend(values)
        return history


def lost_and_repeated(whole: History, other: History) -> tuple[int, int]:
    """Returns how many units a run lost and how many it used again, against the run that was never killed.

    Examples and prompts (no ``collected`` events): the difference of the two runs' used units as multisets.
    Transitions: those that the run counts and that no update read are lost; those whose bits are an earlier
    transition's are repeated. Transitions that are new are neither, although the whole run has others.
    """
    if not whole.collected:
        one, two = Counter(whole.used), Counter(other.used)
        return (one - two).total(), (two - one).total()
    lost = [len(h.collected) - len(h.used) + h.lost for h in (whole, other)]
    repeated = [len(h.collected) - len(set(h.collected)) for h in (whole, other)]
    return max(lost[1] - lost[0], 0), max(repeated[1] - repeated[0], 0)


def same_updates(whole: History, other: History) -> float:
    """Returns the share of the whole run's updates after which the weights were the same, bit for bit."""
    equal = sum(a == b for a, b in zip(whole.updates, other.updates, strict=False))
    return equal / max(len(whole.updates), len(other.updates), 1)
