"""What benchmarks/resume counts as lost and used again, on histories worked out by hand."""

from pathlib import Path

import numpy as np

from benchmarks.resume.trace import History, Trace, fingerprint, lost_and_repeated, same_updates


def history(path: Path, *events: tuple) -> History:
    trace = Trace(path)
    for kind, *values in events:
        trace.write(kind, *values)
    return History.read(path)


def test_what_came_after_the_checkpoint_is_cut(tmp_path):
    found = history(
        tmp_path / "trace.txt",
        ("resume", "start"), ("used", "a"), ("update", 1), ("checkpoint", 1), ("used", "b"), ("update", 2),
        ("resume", 1), ("used", "c"), ("update", 3), ("checkpoint", 2),
    )  # fmt: skip
    assert found.used == ["a", "c"]
    assert found.updates == ["1", "3"]


def test_a_run_that_starts_again_has_no_history(tmp_path):
    found = history(
        tmp_path / "trace.txt", ("resume", "start"), ("used", "a"), ("damaged", "x"), ("resume", "start"), ("used", "b")
    )
    assert found.used == ["b"]
    assert found.damaged == 1


def test_a_second_resume_from_the_same_checkpoint(tmp_path):
    found = history(
        tmp_path / "trace.txt",
        ("used", "a"), ("checkpoint", 1), ("resume", 1), ("used", "b"), ("resume", 1), ("used", "c"),
    )  # fmt: skip
    assert found.used == ["a", "c"]


def test_examples_are_compared_as_multisets():
    whole, other = History(used=["a", "b", "c", "a"]), History(used=["a", "b", "b", "b"])
    assert lost_and_repeated(whole, other) == (2, 2)
    assert lost_and_repeated(whole, whole) == (0, 0)


def test_transitions_are_lost_where_no_update_reads_them():
    whole = History(collected=["a", "b", "c"], used=["a", "b", "c"])
    other = History(collected=["a", "b", "x", "a"], used=["a", "b", "x"], lost=2)
    # `a` came twice; one collected transition and two that only the counter knows were used nowhere.
    assert lost_and_repeated(whole, other) == (3, 1)


def test_equal_updates_are_a_share_of_the_longer_run():
    assert same_updates(History(updates=["1", "2"]), History(updates=["1", "3", "4", "5"])) == 0.25


def test_a_fingerprint_is_of_the_bits():
    one = np.array([0.1], np.float32)
    assert fingerprint(one) == fingerprint(one.copy())
    assert fingerprint(one) != fingerprint(np.nextafter(one, np.float32(1)))
