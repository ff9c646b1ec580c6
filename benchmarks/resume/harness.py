"""Starts, kills and resumes one case, and measures what differs from the run that was never killed."""

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.resume.trace import History, Trace, lost_and_repeated, same_updates


class Case(Protocol):
    """A training program of one library."""

    #: Name, version, how it is saved and resumed, a sentence of its documentation and the address.
    name: str
    version: str
    unit: str
    way: str
    quote: str
    link: str

    def prepare(self, folder: Path) -> None:
        """Imports everything, so that forked processes need not; makes data in ``folder``."""

    def train(self, folder: Path, trace: Trace) -> dict[str, torch.Tensor]:
        """Trains to the end, from the newest checkpoint in ``folder`` where there is one; returns the weights."""


def start(case: Case, folder: Path) -> int:
    """Forks a process that trains; returns its id."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        weights = case.train(folder, Trace(folder / "trace.txt"))
        torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, folder / "final.pt")
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_all(case: Case, folder: Path) -> None:
    """Trains once in this process, so that forked ones need not import what libraries import on first use."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        case.train(folder, Trace(folder / "trace.txt"))
    finally:
        os.chdir(before)


def wait(pid: int, at_most_s: float | None = None) -> int | None:
    """Returns the exit code; None if the process still runs after ``at_most_s``."""
    end = None if at_most_s is None else time.monotonic() + at_most_s
    while True:
        done, status = os.waitpid(pid, 0 if end is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(0.005)


def finish(case: Case, folder: Path) -> float:
    """Runs to the end; returns the seconds.

    Raises:
        RuntimeError: another exit code than 0, with the output.
    """
    began_s = time.monotonic()
    check(case, folder, wait(start(case, folder)))
    return time.monotonic() - began_s


def check(case: Case, folder: Path, code: int | None) -> None:
    """Raises where a process failed."""
    if code:
        raise RuntimeError(f"{case.name}: exit code {code}\n{(folder / 'output.txt').read_text()[-3000:]}")


def survivor(case: Case, folder: Path, trace_bytes: int, kills: int, rng: random.Random) -> int:
    """Kills a run ``kills`` times at random points of its progress, then lets it end.

    Progress is the length of the trace, which does not depend on the machine's load as seconds do. After the point is
    reached, the process runs for up to 30 ms more, so that the kill meets any part of an update or of a checkpoint.

    Returns:
        The number of kills: fewer where the run ended before.
    """
    points = sorted(rng.uniform(0.0, 1.0) for _ in range(kills))
    trace = folder / "trace.txt"
    for done, (before, point) in enumerate(zip([0.0, *points], points, strict=False)):
        size = trace.stat().st_size if trace.exists() else 0
        goal = size + (point - before) * trace_bytes
        pid = start(case, folder)
        while (code := wait(pid, 0.0)) is None and (trace.stat().st_size if trace.exists() else 0) <= goal:
            time.sleep(0.002)
        if code is None:
            code = wait(pid, rng.uniform(0.0, 0.03))
        check(case, folder, code)
        if code is not None:
            return done
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    finish(case, folder)
    return kills


def measure(case: Case, whole: Path, other: Path) -> dict[str, Any]:
    """Compares a resumed run with the whole one."""
    one, two = (torch.load(folder / "final.pt", weights_only=True) for folder in (whole, other))
    squares = sum(float((one[name].double() - two[name].double()).square().sum()) for name in one)
    norm = sum(float(tensor.double().square().sum()) for tensor in one.values())
    histories = [History.read(folder / "trace.txt") for folder in (whole, other)]
    lost, repeated = lost_and_repeated(*histories)
    return {
        "identical": one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one),
        "distance": (squares / norm) ** 0.5,
        "lost": lost,
        "repeated": repeated,
        "units": len(histories[0].used),
        "same_updates": same_updates(*histories),
        "damaged": histories[1].damaged,
    }


def run(case: Case, result: Path, kills: int, kills_per_run: int = 5) -> None:
    """Adds killed runs to a result file until it has ``kills`` kills."""
    saved: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"runs": []}
    description = {key: getattr(case, key) for key in ("name", "version", "unit", "way", "quote", "link")}
    if saved["runs"] and saved["version"] != case.version:
        raise SystemExit(f"{result} has runs of {case.name} {saved['version']}, installed is {case.version}: remove it")
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        torch.set_num_threads(1)
        case.prepare(folder)
        import_all(case, folder / "imports")
        finish(case, folder / "first")
        length_s = finish(case, folder / "whole")
        trace_bytes = (folder / "whole" / "trace.txt").stat().st_size
        # Two runs that were never killed must agree, or the comparison says nothing about resuming.
        base = measure(case, folder / "first", folder / "whole")
        if not base["identical"] or base["lost"] or base["repeated"] or base["same_updates"] < 1:
            raise SystemExit(f"{case.name}: two runs that were never killed differ: {base}")
        while (done := sum(entry["kills"] for entry in saved["runs"])) < kills:
            index = len(saved["runs"])
            killed = folder / f"killed-{index}"
            rng = random.Random(f"{case.name} {index}")
            count = survivor(case, killed, trace_bytes, min(kills_per_run, kills - done), rng)
            entry = {"kills": count, **measure(case, folder / "whole", killed)}
            saved = {**description, "length_s": round(length_s, 2), "runs": [*saved["runs"], entry]}
            result.parent.mkdir(parents=True, exist_ok=True)
            result.write_text(json.dumps(saved, indent=1) + "\n")
            print(case.name, entry, flush=True)
            shutil.rmtree(killed)


def summary(saved: dict[str, Any]) -> dict[str, Any]:
    """Sums and medians over a case's runs."""
    # A run that ended before its first kill says nothing about resuming.
    runs = [entry for entry in saved["runs"] if entry["kills"]]
    return {
        "kills": sum(entry["kills"] for entry in runs),
        "runs": len(runs),
        "identical": sum(entry["identical"] for entry in runs),
        "distance": statistics.median(entry["distance"] for entry in runs),
        "lost": sum(entry["lost"] for entry in runs),
        "repeated": sum(entry["repeated"] for entry in runs),
        "units": sum(entry["units"] for entry in runs),
        "same_updates": statistics.median(entry["same_updates"] for entry in runs),
        "damaged": sum(entry["damaged"] for entry in runs),
    }
