"""Signatures and help of all public classes are those of the golden files: one that changes is written anew by
``python -m benchmarks.golden write signatures help``, in a commit that says why.
"""

import json
import sys

import pytest

from benchmarks import golden


@pytest.mark.long
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="annotations and help are written as Python 3.11 does")
@pytest.mark.parametrize("part", ["signatures", "help"])
def test_the_public_interface_is_the_golden_one(part: str) -> None:
    pytest.importorskip("transformers", reason="the language classes are among them")
    kept = json.loads((golden.FOLDER / f"{part}.json").read_text("utf-8"))
    assert golden.differences(part, kept, golden.PARTS[part]([]), only=False) == []


def test_a_difference_is_named() -> None:
    one, other = {"PPO": ["gamma: float = 0.99"]}, {"PPO": ["gamma: float = 0.9"], "A2C": []}
    found = golden.differences("signatures", one, other, only=False)
    assert found == [
        "signatures: PPO: - ['gamma: float = 0.99'] + ['gamma: float = 0.9']", "signatures: A2C is new"
    ]  # fmt: skip
