"""The command that runs the slow tests resumes where it was killed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import slow


def test_a_killed_run_resumes_and_another_tree_begins_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    codes: dict[str, Any] = {"a.py": 0, "b.py": KeyboardInterrupt, "c.py": 1}

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(command[-1])
        code = codes[command[-1]]
        if code is KeyboardInterrupt:
            raise KeyboardInterrupt
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(slow, "RECORD", tmp_path / "cache" / "slow.json")
    monkeypatch.setattr(slow, "files", lambda words: list(codes))
    monkeypatch.setattr(slow, "state_of_tree", lambda: "one")
    monkeypatch.setattr(slow.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        slow.main([])
    codes["b.py"] = 0
    assert slow.main([]) == 1 and ran == ["a.py", "b.py", "b.py", "c.py"]  # a file that failed runs again
    codes["c.py"] = 0
    assert slow.main([]) == 0 and ran[4:] == ["c.py"]
    monkeypatch.setattr(slow, "state_of_tree", lambda: "two")
    slow.main([])
    assert ran[5:] == ["a.py", "b.py", "c.py"]
