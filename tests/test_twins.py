"""Which cases the pass of the plain twins runs."""

import json

from tests import twins


def test_each_fast_path_of_each_file_has_the_first_case_of_some_tests(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(twins, "FUNCTIONS", 3)
    noted = {f"tests/a.py::test_{test}[{case}]": ["adam.adam"] for test in "vwxyz" for case in "12"}
    noted |= {"tests/a.py::test_z[2]": ["adam.adam", "scoring.tiled"], "tests/b.py::test_v": ["adam.adam"]}
    for part in range(2):  # one of each worker
        lines = [json.dumps(entry) for entry in list(noted.items())[part::2]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    first = {f"tests/a.py::test_{test}[1]" for test in "vwx"}
    assert twins.chosen(str(tmp_path)) == first | {"tests/a.py::test_z[2]", "tests/b.py::test_v"}


def test_a_case_that_asks_for_the_switch_is_noted(tmp_path) -> None:
    class Item:
        nodeid = "tests/a.py::test_it"

    notes = twins.Notes(str(tmp_path))
    assert notes.is_fast() is twins.fast.is_fast()
    notes.write(Item())
    assert twins.chosen(str(tmp_path)) == {"tests/a.py::test_it"}
