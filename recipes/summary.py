"""The end of ``rl fit``: the final evaluation, its record in the loggers, and the summary."""

import shlex
import shutil
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

import rl_modules
from datamodules.base import ControlDataModule
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.curves import log_folder
from recipes.callbacks.recorder import EpisodeRecorder
from recipes.comparison import METRICS
from rl_modules.core.curves import write_point
from rl_modules.loggers import adapters, flat_settings
from rl_modules.networks.nature_cnn import image_brief
from rl_modules.ranks import launches


def finish(trainer: Trainer, model: Any, data: Any, seconds: float) -> bool:
    """Evaluates the final policy, writes hyperparameters and result to the loggers, and prints the summary."""
    controls = isinstance(data, ControlDataModule)
    step, measured = reached(trainer, model, data)
    final, interrupted = evaluate(trainer, model, data, controls)
    if controls:
        rows = {**control_rows(trainer, model, data, final, measured), **exact_row(model, data)}
    else:
        rows = language_rows(model, data, final, step, seconds)
    rows |= limit_of(trainer)
    record_final(trainer, model, data, final, step)
    if trainer.is_global_zero:
        checkpoint = print_summary(trainer, model, rows, exports=not controls)
        if interrupted:
            print(
                f"Ctrl-C stopped the final evaluation. Training is complete: to evaluate it, run `rl test` with "
                f"the same model and data and --ckpt_path {checkpoint}",
                file=sys.stderr,
            )
    return interrupted


def reached(trainer: Trainer, model: Any, data: Any) -> tuple[int, dict[str, float]]:
    """Returns the step at which the curves end, and the metrics of a control datamodule."""
    if launches(trainer):
        # The counters of this process did not change; only those of the ranks did, which ended with `fit`.
        measured = model.run.reached["metrics"]
        return int(measured.get("time/total_timesteps", model.run.reached["global_step"])), measured
    return (data.num_timesteps, data.metrics()) if isinstance(data, ControlDataModule) else (trainer.global_step, {})


def evaluate(trainer: Trainer, model: Any, data: Any, controls: bool) -> tuple[dict[str, float], bool]:
    """Returns the final metrics, and whether Ctrl-C stopped their evaluation.

    They are those of test episodes, ``test/…``, or on held-out records, ``eval/…``; none without such records.
    """
    if not controls and not data.can_evaluate:
        return {}, False
    loggers, trainer.loggers = trainer.loggers, []
    try:
        trainer.test(model, datamodule=data, verbose=False, weights_only=True)
    except (KeyboardInterrupt, SystemExit) as exit_:
        # Lightning answers Ctrl-C with `exit(1)`.
        if isinstance(exit_, SystemExit) and not isinstance(exit_.__context__, KeyboardInterrupt):
            raise
        return {}, True
    finally:
        trainer.loggers = loggers
    prefix = "test/" if controls else "eval/"
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if controls or value == value}, False


def control_rows(trainer: Trainer, model: Any, data: Any, final: dict[str, float], time: dict[str, float]) -> dict:
    """Returns the summary of a control run, one row per name."""
    ranks = trainer.world_size
    episodes = data.hparams.n_test_episodes * ranks
    result = "not evaluated"
    if final:
        mean, std = final["test/mean_reward"], final["test/std_reward"]
        result = f"mean return {mean:.1f} ± {std:.1f} over {episodes} episodes"
    seconds, total = time["time/time_elapsed"], round(time["time/total_timesteps"])
    pace = f" in {seconds:.1f} s ({time['time/fps']:,.0f} per second)"
    rows = {
        f"{type(model).__name__} on {data.env_name}": result,
        "transitions": done(round(time["time/fps"] * seconds), total, pace),
    }
    if cut := data.watch.cut:
        rows["evaluation"] = (
            f"{cut} episodes did not end and were cut after eval_max_steps={data.eval_max_steps:,} steps: lower "
            "data.eval_max_steps, or give the environment a time limit"
        )
    if (image := image_brief(model.observation_space)) is not None:
        rows["observation"] = image
    if ranks > 1:
        rows["ranks"] = f"{ranks}, each with {data.n_envs} environments and minibatches of {data.batch_size}"
        rows["together"] = (
            f"{ranks * data.n_envs} environments, minibatches of {ranks * data.batch_size}; transitions are counted "
            "over all ranks"
        )
    return rows


def exact_row(model: Any, data: Any) -> dict[str, str]:
    """Returns the exact expected return of a table's greedy policy, where the environment has a transition table."""
    if not hasattr(model, "greedy_policy"):
        return {}
    data.setup("check")
    try:
        table = data.transition_model()
    finally:
        data.teardown("check")
    if table is None:
        return {}
    achieved, best = table.expected_return(model.greedy_policy()), table.optimal_return()
    return {"exact expected return": f"{achieved:.6g} of the greedy policy; {best:.6g} is the best possible"}


def limit_of(trainer: Trainer) -> dict[str, str]:
    """Returns a row that says that ``trainer.max_time`` ended training, for Lightning's hidden message."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    left = [timer.time_remaining() for timer in callbacks if isinstance(timer, Timer)]
    is_reached = any(seconds is not None and seconds <= 0 for seconds in left)
    return {"stopped": "by the time limit, trainer.max_time"} if is_reached else {}


def files_of(trainer: Trainer) -> dict[str, str]:
    """Returns where the pictures and videos of a run are, for those that it has."""
    folder = log_folder(trainer)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    videos = [file for callback in callbacks if isinstance(callback, EpisodeRecorder) for file in callback.files]
    found = {"value maps": sorted(folder.glob("values_*.png")), "videos": videos}
    return {name: ", ".join(_relative(str(path)) for path in paths) for name, paths in found.items() if paths}


def record_final(trainer: Trainer, model: Any, data: Any, final: dict[str, float], step: int) -> None:
    """Writes the hyperparameters and the final metrics to every logger."""
    settings = flat_settings(model, data)
    checkpoints = Checkpoints.of(trainer)
    is_drawn = checkpoints is not None and checkpoints.evaluated_at == step
    controls = isinstance(data, ControlDataModule)
    if controls and not is_drawn:
        # The last policy is the last point of the evaluation's curves.
        write_point(trainer, {name.replace("test/", "eval/", 1): value for name, value in final.items()}, step)
    for adapter in adapters(trainer):
        adapter.write_result(settings, final, step)
        if final and (controls or not is_drawn):  # of a language model they are points of the same curves
            adapter.logger.log_metrics(final, step=step)
        adapter.logger.save()


def print_summary(trainer: Trainer, model: Any, rows: dict[str, str], exports: bool) -> str:
    """Prints the results of the run and the locations of its checkpoints and curves."""
    checkpoints = Checkpoints.of(trainer)
    assert checkpoints is not None
    best, last = checkpoints.best_model_path, str(checkpoints.last_path or "")
    if launches(trainer):  # the ranks wrote them
        last, best = (
            str(path) if (path := log_folder(trainer) / "checkpoints" / f"{name}.ckpt").exists() else given
            for name, given in (("last", last), ("best", best))
        )
    origin = model.hparams.get("init_from")
    unit = "steps" if exports else "transitions"
    none = "not in this folder" if checkpoints.writes else "not written (enable_checkpointing=false)"
    if last and not best and checkpoints.evaluated_at is None:
        best_is = "the last: none was evaluated in training"
    else:
        best_is = _relative(best) if best else none
    rows = {
        **rows,
        **({"started from": str(origin)} if origin else {}),
        "last checkpoint": _relative(last) if last else none,
        "best checkpoint": best_is,
    }
    if best and (score := checkpoints.best_model_score) is not None:
        after = "" if checkpoints.best_at is None else f" after {checkpoints.best_at:,} {unit}"
        instead = " (pass@1 was 0 in every evaluation)" if checkpoints.monitor == checkpoints.while_zero else ""
        rows["best evaluation"] = f"{checkpoints.monitor} {float(score):.4g}{after}{instead}"
    rows |= {"curves": curves_of(trainer), **files_of(trainer)}
    if exports and last:
        rows["export"] = export_of(model, _relative(best or last))
    width = max(map(len, rows)) + 2
    room = shutil.get_terminal_size().columns - width if sys.stdout.isatty() else sys.maxsize
    for left, right in rows.items():
        # A terminal would break lines inside a word. A command to copy stays whole.
        lines = (
            [right] if left == "export" else wrap(right, max(room, 20), break_long_words=False, break_on_hyphens=False)
        )
        print(f"{left:{width}}" + f"\n{'':{width}}".join(lines))
    return last


def export_of(model: Any, path: str) -> str:
    """Returns the command that exports a checkpoint; for a class that no command can import, the line of Python."""
    kind = type(model)
    if kind.__name__ in rl_modules.__all__:
        return f"rl export --ckpt_path {path} --output model"
    if kind.__module__ == "__main__" or kind.__name__ != kind.__qualname__:
        return f'{kind.__name__}.load_from_checkpoint("{path}").export("model")'
    return f"rl export --ckpt_path {path} --output model --model {kind.__module__}.{kind.__name__}"


def curves_of(trainer: Trainer) -> str:
    """Returns where the run's curves are: TensorBoard's command, the CSV file, or another logger's folder."""
    places = []
    for logger in (logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)):
        folder = getattr(logger, "log_dir", None) or logger.save_dir
        if isinstance(logger, TensorBoardLogger):
            # TensorBoard names a run by its folder below the given one; the run's own folder would be named ".".
            parent, name = Path(str(folder)).parent, Path(str(folder)).name
            places.append(f"tensorboard --logdir {shlex.quote(_relative(str(parent)))} (run {name})")
        elif isinstance(logger, CSVLogger):
            places.append(str(Path(str(folder)) / "metrics.csv"))
        else:
            places.append(f"{type(logger).__name__}{f' in {folder}' if folder else ''}")
    return ", ".join(places) or "none (no logger)"


def _relative(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def language_rows(model: Any, data: Any, final: dict[str, float], steps: int, seconds: float) -> dict[str, str]:
    """Returns the summary of a run, one row per name."""
    first = model.best_metric[0]
    order = sorted(final, key=lambda name: (name != first, "/" in name.removeprefix("eval/"), name))
    shown = [f"{name.removeprefix('eval/')} {final[name]:.4g}" for name in order]
    if not shown:
        latest = {name: float(value) for name, value in model.latest_metrics.items()}
        shown = [f"{name} {latest[name]:.4g}" for name in METRICS if name in latest][:3]
        shown.append("of the last steps (no held-out records to evaluate on)" if shown else "no held-out records")
    rows = {f"{type(model).__name__} on {data.source}": ", ".join(shown)}
    has_trained = model.run.has_begun or model.run.reached
    began_step, began_tokens = model.run.began_at if has_trained else (steps, model.num_tokens)
    rows["optimizer steps"] = done(steps - began_step, steps, f" in {seconds:.1f} s")
    if tokens := model.num_tokens - began_tokens:
        pace = f", {tokens / max(seconds, 1e-9):,.0f} per second with evaluation"
        rows["tokens"] = done(tokens, model.num_tokens, pace)
    latest = getattr(model, "latest_metrics", {})
    if "time/peak_memory_gib" in latest:
        rows["GPU"] = f"{latest['time/peak_memory_gib']:.1f} GiB at most"
        if (share := latest.get("time/model_flops_utilization")) is not None:
            rows["GPU"] += f", {share:.1%} of its peak speed in the last steps' training"
    return rows


def done(part: int, whole: int, pace: str) -> str:
    """Returns how many steps, tokens or transitions a run made, and how many of them in this process."""
    if part == 0 and whole:
        return f"{whole:,}, all before this process: the run was complete"
    return f"{whole:,}{'' if part == whole else f' ({part:,} since the run resumed)'}{pace}"
