"""Marks that several files use."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

#: Counts of calls include transformers' own, which older versions make more of.
PRESENT_TRANSFORMERS = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.20"), reason="counts calls of the present transformers"
)


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
