"""Runs the slow tests file by file and resumes: ``python -m tests.slow``.

A file that passed at this commit, with this working tree, is not run again. The list is ``.pytest_cache/slow.json``,
written after every file, so that a killed run loses the file that was running. Words after the command go to pytest.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / ".pytest_cache" / "slow.json"
CHOSEN = ["-m", "slow and not long"]


def state_of_tree() -> str:
    """Returns the commit and the changes to it, or the empty text outside a repository."""
    commands = (["rev-parse", "HEAD"], ["diff", "HEAD"])
    return "".join(subprocess.run(["git", *c], cwd=ROOT, capture_output=True, text=True).stdout for c in commands)


def files(words: list[str]) -> list[str]:
    """Returns the test files with slow tests, in pytest's order."""
    loud = [word for word in words if word not in ("-q", "-v")]  # with these pytest lists no names, or a tree of them
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *CHOSEN, *loud]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = list(dict.fromkeys(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line))
    if not found:
        raise SystemExit(f"pytest found no slow test:\n{done.stdout}{done.stderr}")
    return found


def main(words: list[str]) -> int:
    """Runs what has not passed yet; returns 1 if a file fails."""
    tree = state_of_tree()
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    passed: dict[str, float] = record["passed_s"] if record.get("tree") == tree else {}
    failed = []
    for file in files(words):
        if file in passed:
            continue
        start_s = time.monotonic()
        print(f"{file} …", flush=True)
        command = [sys.executable, "-m", "pytest", *CHOSEN, *(w for w in words if not Path(w).exists()), file]
        code = subprocess.run(command, cwd=ROOT).returncode
        if code:
            failed.append(file)
            continue
        passed[file] = round(time.monotonic() - start_s, 1)
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps({"tree": tree, "passed_s": passed}), "utf-8")
    print(f"{len(passed)} files passed in {sum(passed.values()) / 60:.0f} min; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
