"""Pipelines: stages that run in order, each in its own folder, a completed one skipped, and their command lines."""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import configs
from recipes.callbacks import curves
from recipes.cli import main
from recipes.cli.lightning_cli import RLCLI
from recipes.terminal import one_sentence, quiet
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.extras import install
from rl_modules.core.seams import check_pairing
from rl_modules.language.precision import adopt_precision

#: File with a stage's settings and, after its completion, the time that it took.
RECORD = "stage.json"


class Pipeline:
    """A folder of stages with their settings in ``stage.json``: completed ones are skipped, stopped ones resume."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        #: Seconds that each stage took.
        self.seconds: dict[str, float] = {}

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
            raise UsageError(
                f"{folder} holds the results of stage {name!r}, {what}; remove that folder to run "
                f"it again, or give the pipeline another folder{named}"
            )
        if "done_at" in found and all((folder / output).exists() for output in outputs):
            self.seconds[name] = found["seconds"]
            print(f"{name}: done already, see {folder}")
            return folder
        folder.mkdir(exist_ok=True)
        spent = found.get("seconds", 0.0)
        _write(folder, wanted)
        print(f"{name}: in {folder}", flush=True)
        began_s = time.monotonic()
        try:
            run(folder)
        finally:
            spent += time.monotonic() - began_s
            _write(folder, {**wanted, "seconds": spent})
        missing = [output for output in outputs if not (folder / output).exists()]
        if missing:
            raise UsageError(f"stage {name!r} ended without {', '.join(missing)} in {folder}")
        _write(folder, {**wanted, "seconds": spent, "done_at": time.time()})
        self.seconds[name] = spent
        return folder

    def earlier(self, name: str, after: Path) -> Path | None:
        """Returns the folder of a stage that an earlier run completed on the same inputs."""
        record = _record(self.folder / name)
        if "done_at" not in record or record["after"].get(after.name) != _record(after).get("done_at"):
            return None
        self.seconds[name] = record["seconds"]
        return self.folder / name

    def fit(
        self, name: str, config: str, arguments: Mapping[str, Any] | None = None, after: Sequence[Path] = ()
    ) -> Path:
        """Runs a stage of ``rl fit`` with options by dotted name, and an export; returns the model's directory."""
        given = dict(arguments or {})

        def run(folder: Path) -> None:
            logger = {"save_dir": str(folder), "name": "", "version": "run"}
            options = {**given, **{f"trainer.logger.init_args.{key}": value for key, value in logger.items()}}
            words = [
                f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()
            ]
            words = ["--config", str(configs.find(config)), *words, *["--resume"] * (folder / "run").exists()]
            # Each further process of a run repeats its command, which must not be the pipeline.
            fit = _in_a_process if world_size(words) > 1 else main
            _or_fail(name, lambda: fit(["fit", *words]))
            shutil.rmtree(folder / "model", ignore_errors=True)  # an interrupted export leaves a part
            _or_fail(
                name,
                lambda: main(
                    [
                        "export",
                        "--ckpt_path",
                        str(folder / "run" / "checkpoints" / "last.ckpt"),
                        "--output",
                        str(folder / "model"),
                    ]
                ),
            )

        settings = {"config": configs.find(config).read_text("utf-8"), "arguments": given}
        return self.stage(name, run, ("model", "run"), settings, after) / "model"

    def measure(
        self, name: str, config: str, arguments: dict[str, str], after: Sequence[Path] = ()
    ) -> dict[str, float]:
        """Runs a stage of ``rl test`` on held-out records; returns the metrics, which ``metrics.json`` holds."""

        def write(folder: Path) -> None:
            (folder / "metrics.json").write_text(json.dumps(evaluate(config, arguments), indent=1), "utf-8")

        settings = {"config": configs.text(config), "arguments": arguments}
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


def write_jsonl(path: Path, records: Iterable[Any]) -> None:
    """Writes one record per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


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


# ---------------------------------------------------------------- the pipelines' command lines

#: Options of the Trainer that set the number of processes in which a stage trains.
PROCESSES = ("trainer.devices", "trainer.num_nodes", "trainer.strategy")


def run_command(run: Callable[..., None], parse: Callable[[list[str]], tuple], args: list[str] | None) -> None:
    """Runs a pipeline's command, ``run(*parse(args))``, without the libraries' messages."""
    quiet()
    with one_sentence():
        run(*parse(sys.argv[1:] if args is None else args))


def stage_options(
    words: Sequence[str], stages: Sequence[str], own: Iterable[str], example: str
) -> dict[str, dict[str, str]]:
    """Each stage's options by dotted name, from words such as ``--ppo.model.beta=0.05``."""
    options: dict[str, dict[str, str]] = {stage: {} for stage in stages}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        stage, _, key = name.partition(".")
        if not word.startswith("--") or not equals or stage not in options or not key:
            raise UsageError(
                f"{word!r} is not understood; an option of a stage is written {example}, and the stages "
                f"are {', '.join(stages)}{did_you_mean(stage, [*stages, *own])}"
            )
        options[stage][key] = value
    return options


def check_stages(stages: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> dict[str, Any]:
    """Checks configs and options of all stages before the first: each is parsed, and its classes are made."""
    if "LOCAL_RANK" in os.environ:
        raise UsageError(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']}: a pipeline starts the processes of its stages "
            "itself; run it once, without torchrun, and give a stage trainer.devices"
        )
    for _, config, _ in stages.values():
        configs.checked(configs.find(config))
    found = {}
    for stage, (command, config, options) in stages.items():
        try:
            words = rl_words(config, in_one_process(options) if command == "test" else options)
            found[stage] = checked(command, words).datamodule
        except Exception as error:  # this project's sentence, or one of Lightning's
            raise UsageError(f"stage {stage}: {' '.join(str(error).split())}") from error
    return found


def world_size(words: Sequence[str]) -> int:
    """Number of processes that ``rl fit`` trains in."""
    return int(checked("fit", words).trainer.world_size)


def checked(command: str, words: Sequence[str]) -> Any:
    """Returns the parsed command with its objects, which has run nothing."""

    class Checked(RLCLI):
        def _require_weights(self, config: Any) -> None:
            """Does nothing: an earlier stage will write them."""

        def _check_environment(self) -> None:
            check_pairing(self.model, self.datamodule)

        def _run_subcommand(self, subcommand: str) -> None:
            """Runs nothing."""

    return Checked(command, list(words))


def in_one_process(arguments: Mapping[str, str]) -> dict[str, str]:
    """Returns options for a pipeline's own use of a policy, on one device."""
    devices = str(arguments.get("trainer.devices", "1"))
    if devices != "1":
        raise UsageError(
            f"trainer.devices={devices}: evaluations and comparisons run in the pipeline's own process; "
            "give several devices to the stages that train"
        )
    return {**arguments, "trainer.devices": "1"}


def writing_options(options: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of a policy's stage that determine its prompts and completions in an evaluation."""
    names = {f"model.{name}" for name in ("max_completion_length", "top_k", "min_p", "repetition_penalty")}
    return {key: value for key, value in options.items() if key.startswith("data.") or key in names}


def rl_words(config: str, arguments: Mapping[str, str]) -> list[str]:
    """Returns the arguments of an ``rl`` command."""
    return ["--config", str(configs.find(config)), *(f"--{key}={value}" for key, value in arguments.items())]


def evaluate(config: str, arguments: dict[str, str]) -> dict[str, float]:
    """Returns the metrics of ``rl test`` on held-out records, by name, ``eval/…``."""
    with contextlib.redirect_stdout(io.StringIO()):
        cli = RLCLI("test", rl_words(config, in_one_process(arguments)))
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    return {name: value for name, value in sorted(metrics.items()) if name.startswith("eval/")}


@dataclass(frozen=True)
class Policy:
    """A policy on the device of its config's Trainer, with the datamodule that encodes its prompts."""

    module: Any
    data: Any
    trainer: Any

    def write(
        self, records: Sequence[dict[str, Any]], seeds: Sequence[int], num_generations: int, **sampling: Any
    ) -> tuple[list[str], list[list[int]], list[bool]]:
        """Writes completions of records' prompts, with the chat template and system prompt of the policy's training."""
        import torch

        prompts = self.data.encoder.prompts([record["prompt"] for record in records], list(records))
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            written = self.module.act(prompts, seeds, num_generations, **sampling)
        ids = [row[:n] for row, n in zip(written.tokens.tolist(), written.length.tolist(), strict=True)]
        return self.module.tokenizer.batch_decode(ids, skip_special_tokens=True), ids, written.finished.tolist()

    def as_read(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns columns of a record from which any datamodule makes the same prompt, messages or text."""
        encoder = self.data.encoder
        prompt = encoder.as_read(record["prompt"])
        if isinstance(prompt, str):
            return {"prompt": prompt}
        variables = {**encoder.chat_template_kwargs, **(record.get("chat_template_kwargs") or {})}
        tools = record.get("tools")
        return {
            "prompt": prompt,
            **({"chat_template_kwargs": variables} if variables else {}),
            **({"tools": tools} if tools else {}),
        }


def load_policy(config: str, arguments: dict[str, str]) -> Policy:
    """Loads the policy of an ``rl`` config, ready to write completions."""
    from lightning.pytorch.plugins.precision import HalfPrecision

    cli = checked("test", rl_words(config, in_one_process(arguments)))
    trainer = cli.trainer
    if isinstance(trainer.precision_plugin, HalfPrecision):
        adopt_precision(trainer, cli.model.hparams["lora"] is not None)
    cli.model.configure_model()
    module = trainer.precision_plugin.convert_module(cli.model).to(trainer.strategy.root_device).eval()
    trainer.strategy.connect(module)
    cli.datamodule.trainer = trainer
    return Policy(module, cli.datamodule, trainer)
