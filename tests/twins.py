"""Which cases the pass of the plain twins (``RL_FAST=0``) runs: those that reach a fast path in the ordinary pass.

With ``RL_REACHED=<folder>`` the ordinary pass notes for each case the functions that asked :func:`is_fast`. The pass of
the twins then runs, of each of these functions and each test file, the first case of up to :data:`FUNCTIONS` tests.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from rl_modules import fast

#: Test functions of a file that the twins of one fast path run.
FUNCTIONS = 5


class Notes:
    """Notes which functions asked for the switch during a case."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, f"{os.getpid()}.jsonl")
        self.asked: set[str] = set()
        self._switch = fast.is_fast

    def is_fast(self) -> bool:
        code = sys._getframe(1).f_code
        self.asked.add(
            f"{Path(code.co_filename).stem}.{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"
        )
        return self._switch()

    def write(self, item: pytest.Item) -> None:
        if self.asked:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([item.nodeid, sorted(self.asked)]) + "\n")


def chosen(folder: str) -> set[str]:
    """Returns the node ids of the cases to run."""
    by_test: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    lines = [line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    for node, asked in sorted(map(json.loads, lines)):
        file, _, test = node.partition("::")
        for path in asked:
            by_test[path, file].setdefault(test.partition("[")[0], node)
    return {node for tests in by_test.values() for node in list(tests.values())[:FUNCTIONS]}
