"""Which cases the pass of the plain twins runs."""

from tests import twins


def test_some_tests_of_each_file_are_run_in_their_first_case(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(twins, "FUNCTIONS", 3)
    noted = [f"tests/a.py::test_{test}[{case}]" for test in "uvwxyz" for case in "12"] + ["tests/b.py::test_v"]
    for part in range(2):  # one of each worker
        (tmp_path / f"{part}.txt").write_text("\n".join(noted[part::2]) + "\n")
    assert twins.chosen(str(tmp_path)) == {f"tests/a.py::test_{test}[1]" for test in "uwy"} | {"tests/b.py::test_v"}


def test_a_case_that_asks_for_the_switch_is_noted(tmp_path) -> None:
    class Item:
        nodeid = "tests/a.py::test_it"

    notes = twins.Notes(str(tmp_path))
    notes.write(Item())
    assert twins.chosen(str(tmp_path)) == set()
    assert notes.is_fast() is twins.fast.is_fast()
    notes.write(Item())
    assert twins.chosen(str(tmp_path)) == {"tests/a.py::test_it"}
