"""Which cases the pass of the plain twins (``RL_FAST=0``) runs: those that reach a fast path in the ordinary pass.

With ``RL_REACHED=<folder>`` the ordinary pass notes each case in which :func:`is_fast` was asked. The pass of the twins
then runs, of each test file, the first case of up to :data:`FUNCTIONS` tests, spread over the file.
"""

import os
from collections import defaultdict
from pathlib import Path

import pytest

from rl_modules import fast

#: Test functions of a file that the twins run.
FUNCTIONS = 12


class Notes:
    """Notes in which cases the switch was asked."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, f"{os.getpid()}.txt")
        self.was_asked = False
        self._switch = fast.is_fast

    def is_fast(self) -> bool:
        self.was_asked = True
        return self._switch()

    def write(self, item: pytest.Item) -> None:
        if self.was_asked:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{item.nodeid}\n")


def chosen(folder: str) -> set[str]:
    """Returns the node ids of the cases to run."""
    by_file: dict[str, dict[str, str]] = defaultdict(dict)
    nodes = {line for path in Path(folder).glob("*.txt") for line in path.read_text("utf-8").splitlines()}
    for node in sorted(nodes):
        file, _, test = node.partition("::")
        by_file[file].setdefault(test.partition("[")[0], node)
    return {node for tests in by_file.values() for node in list(tests.values())[:: -(-len(tests) // FUNCTIONS)]}
