"""Pipelines: stages that run in order, each in its own folder. A completed stage is skipped."""

import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import configs
from recipes.callbacks import curves
from rl_modules.common.errors import UsageError
from rl_modules.common.extras import install

#: File with a stage's settings and, after its completion, the time that it took.
RECORD = "stage.json"


class Pipeline:
    """A folder of stages with their settings in ``stage.json``: completed ones are skipped, stopped ones resume."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began_s = time.monotonic()
        #: Seconds that each stage took.
        self.seconds: dict[str, float] = {}
        #: Peak memory of the process during each stage, in MiB; None where the system does not report it, and of
        #: stages in several processes.
        self.memory: dict[str, float | None] = {}
        self._has_own_processes = False

    def stage(
        self,
        name: str,
        run: Callable[[Path], None],
        outputs: Sequence[str],
        settings: Any = None,
        after: Sequence[Path] = (),
    ) -> Path:
        """Runs a stage, unless it is completed, and returns its folder, in which ``run`` writes the ``outputs``.

        Refuses other plain ``settings`` than the folder's, and stages ``after`` that ran again since.
        """
        folder = self.folder / name
        wanted = json.loads(
            json.dumps({"settings": settings, "after": {p.name: _record(p).get("done_at") for p in after}})
        )
        found = _record(folder)
        if found and {key: found[key] for key in wanted} != wanted:
            is_same = found["settings"] == wanted["settings"]
            what = "but an earlier stage ran again since" if is_same else "with other settings"
            named = "" if is_same else f" ({'; '.join(changes(found['settings'], wanted['settings']))})"
            raise UsageError(f"{folder} holds the results of stage {name!r}, {what}; remove that folder to run "
                             f"it again, or give the pipeline another folder{named}")  # fmt: skip
        if "done_at" in found and all((folder / output).exists() for output in outputs):
            self.seconds[name], self.memory[name] = found["seconds"], found.get("memory")
            print(f"{name}: done already, see {folder}")
            return folder
        folder.mkdir(exist_ok=True)
        spent = found.get("seconds", 0.0)
        _write(folder, wanted)
        print(f"{name}: in {folder}", flush=True)
        began_s = time.monotonic()
        _reset_peak_memory()
        self._has_own_processes = False
        try:
            run(folder)
        finally:
            spent += time.monotonic() - began_s
            here = None if self._has_own_processes else _peak_memory()
            memory = max((m for m in (here, found.get("memory")) if m is not None), default=None)
            _write(folder, {**wanted, "seconds": spent, "memory": memory})
        missing = [output for output in outputs if not (folder / output).exists()]
        if missing:
            raise UsageError(f"stage {name!r} ended without {', '.join(missing)} in {folder}")
        _write(folder, {**wanted, "seconds": spent, "memory": memory, "done_at": time.time()})
        self.seconds[name], self.memory[name] = spent, memory
        return folder

    def earlier(self, name: str, after: Path) -> Path | None:
        """Returns the folder of a stage that an earlier run completed on the same inputs."""
        record = _record(self.folder / name)
        if "done_at" not in record or record["after"].get(after.name) != _record(after).get("done_at"):
            return None
        self.seconds[name], self.memory[name] = record["seconds"], record.get("memory")
        return self.folder / name

    def fit(
        self, name: str, config: str, arguments: Mapping[str, Any] | None = None, after: Sequence[Path] = ()
    ) -> Path:
        """Runs a stage of ``rl fit`` with options by dotted name, and an export; returns the model's directory."""
        given = dict(arguments or {})

        def run(folder: Path) -> None:
            from recipes.cli import main
            from recipes.stages import world_size

            logger = {"save_dir": str(folder), "name": "", "version": "run"}
            options = {**given, **{f"trainer.logger.init_args.{key}": value for key, value in logger.items()}}
            words = [
                f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()
            ]
            words = ["--config", str(configs.find(config)), *words, *["--resume"] * (folder / "run").exists()]
            # Each further process of a run repeats its command, which must not be the pipeline.
            self._has_own_processes = world_size(words) > 1
            _or_fail(name, lambda: (_in_a_process if self._has_own_processes else main)(["fit", *words]))
            shutil.rmtree(folder / "model", ignore_errors=True)  # an interrupted export leaves a part
            _or_fail(name, lambda: main(["export", "--ckpt_path", str(folder / "run" / "checkpoints" / "last.ckpt"),
                                         "--output", str(folder / "model")]))  # fmt: skip

        settings = {"config": configs.find(config).read_text("utf-8"), "arguments": given}
        return self.stage(name, run, ("model", "run"), settings, after) / "model"

    def evaluate(self, name: str, run: Callable[[], dict[str, float]], settings: Any = None,
                 after: Sequence[Path] = ()) -> dict[str, float]:  # fmt: skip
        """Runs a stage that measures; returns the metrics, which ``metrics.json`` holds."""

        def write(folder: Path) -> None:
            (folder / "metrics.json").write_text(json.dumps(run(), indent=1), "utf-8")

        folder = self.stage(name, write, ("metrics.json",), settings, after)
        return json.loads((folder / "metrics.json").read_text("utf-8"))

    # ---------------------------------------------------------------- results

    def table(self, rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> None:
        """Prints a table and writes it to ``results.md``."""
        lines = [f"| stage | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
        for name, row in rows.items():
            cells = [_number(row[column]) if column in row else "" for column in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        seconds = ", ".join(f"{name} {value:.0f} s" for name, value in self.seconds.items() if value >= 1)
        text = "\n".join([*lines, "", f"Time: {seconds}; together {sum(self.seconds.values()):.0f} s.", ""])
        (self.folder / "results.md").write_text(text, "utf-8")
        print(f"\n{text}")

    def curves(self, stages: Sequence[str], metrics: Sequence[str]) -> Path:
        """Draws the curves of all stages into ``curves.png``, one stage after the other over the optimizer step."""
        points = {stage: curves.points(self.folder / stage / "run") for stage in stages}
        path = self.folder / "curves.png"
        try:
            draw_curves(points, metrics).savefig(path, dpi=120)
            print(f"curves: {path}, and tensorboard --logdir {self.folder}")
        except ModuleNotFoundError:
            print(f"curves: tensorboard --logdir {self.folder}; curves.png needs matplotlib: {install('compare')}")
        return path


def draw_curves(points: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], metrics: Sequence[str]) -> Any:
    """Draws the curves of several stages by metric, one stage after the other, as a figure of matplotlib."""
    from matplotlib.figure import Figure

    shown = [metric for metric in metrics if any(points[stage].get(metric) for stage in points)] or ["no curve"]
    figure = Figure(figsize=(8, 1.8 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    start = 0
    for i, (stage, found) in enumerate(points.items()):
        for panel, metric in zip(panels, shown, strict=True):
            steps, values = zip(*found.get(metric) or [(0, math.nan)], strict=True)
            panel.plot([start + step for step in steps], values, color=f"C{i}", label=stage)
            panel.axvline(start, color="0.8", linewidth=0.8)
            panel.set_title(metric, fontsize="small", loc="left")
        start += max((curve[-1][0] for curve in found.values() if curve), default=0)
    panels[-1].set_xlabel("optimizer steps, one stage after the other")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(points))
    return figure


def changes(old: Any, new: Any, name: str = "settings") -> list[str]:
    """Returns the settings that differ, as ``model.beta: 0.5 → 1.0``; a text of several lines by name only."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys([*old, *new])
        return [line for key in names for line in changes(old.get(key, "not given"), new.get(key, "not given"), key)]
    if old == new:
        return []
    is_long = any(isinstance(value, str) and "\n" in value for value in (old, new))
    return [f"{name} has changed" if is_long else f"{name}: {old} → {new}"]


def _record(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / RECORD).read_text("utf-8"))
    return {}


def _write(folder: Path, record: dict[str, Any]) -> None:
    part = folder / f"{RECORD}.part"
    part.write_text(json.dumps(record, indent=1), "utf-8")
    part.replace(folder / RECORD)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _reset_peak_memory() -> None:
    """Resets the peak of the memory, if the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_memory() -> float | None:
    """MiB: on a GPU what torch had allocated, else the process's resident memory; None where nothing reports it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text("ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**10
    return None


def _in_a_process(words: Sequence[str]) -> None:
    """Runs an ``rl`` command as a process, to which SIGTERM is passed on; raises SystemExit with its exit code."""
    process = subprocess.Popen([sys.executable, "-m", "recipes", *words])

    def pass_on(number: int, frame: Any) -> None:
        if number == signal.SIGTERM:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        raise SystemExit(process.wait())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _or_fail(stage: str, run: Callable[[], None]) -> None:
    """Runs a command; after an error, which the command has printed, the pipeline ends too."""
    try:
        run()
    except SystemExit as exit_:
        if exit_.code:
            print(f"stage {stage!r} is not complete; the same command resumes it", flush=True)
            raise
