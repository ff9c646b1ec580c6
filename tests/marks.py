"""Marks that several files use."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[str], *names: str) -> list[Any]:
    """The cases as parameters; those that are not named run with the slow tests.

    Args:
        cases: of a test that means the same in each.
        names: those that the fast suite runs.

    Raises:
        ValueError: a name is no case.
    """
    cases = list(cases)
    if unknown := set(names) - set(cases):
        raise ValueError(f"{unknown} are not among {cases}")
    return [pytest.param(case, marks=[] if case in names else [pytest.mark.slow]) for case in cases]
