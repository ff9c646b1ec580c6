"""Command-line support for language modules: progress, final evaluation, completions in a file, export."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L

import rl_modules
from recipes.callbacks.episode_writer import EpisodeWriter
from recipes.callbacks.progress import TransitionProgressBar
from recipes.cli import resume
from rl_modules.common.arguments import settings_of
from rl_modules.common.calls import default_of
from rl_modules.common.errors import UsageError, did_you_mean

#: Metrics of the progress bar; it shows the first two that a run has.
SHOWN = ("eval/pass@1", "train/reward", "eval/accuracy", "train/accuracy", "train/loss")


class StepProgressBar(TransitionProgressBar):
    """Shows the share of optimizer steps done, steps per second, the time left, success and loss."""

    unit = "steps"
    _started = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start(trainer)
        super().on_train_start(trainer, pl_module)

    def start(self, trainer: L.Trainer) -> None:
        """Begins to measure the speed."""
        self._started = time.monotonic(), trainer.global_step

    def counts(self, trainer: L.Trainer) -> tuple[int, int | None]:
        """Returns the optimizer steps so far and their total; a total of None means that the run has no end."""
        total = trainer.estimated_stepping_batches
        return trainer.global_step, None if total == float("inf") else int(total)

    def notes(self, trainer: L.Trainer) -> tuple[str, str]:
        """Returns the steps per second and the last metrics, each as text."""
        started_s, started_at = self._started
        speed = (trainer.global_step - started_at) / max(time.monotonic() - started_s, 1e-9)
        module: Any = trainer.lightning_module
        latest = {**module.latest_metrics, **trainer.callback_metrics}
        known = [f"{name.partition('/')[2]} {float(latest[name]):.3g}" for name in SHOWN if name in latest]
        return f"{speed:.2f}/s", "  ".join(known[:2])


class CompletionWriter(EpisodeWriter):
    """Writes one row per held-out completion: prompt, completion, length, whether it is correct, every reward.

    For a reward model it writes one row per held-out pair: prompt, both answers and their rewards.
    """

    rows_are = "completions"

    def rows(self, predictions: Any) -> list[dict[str, Any]]:
        """Returns the rows to write, from the batches that ``predict_step`` returned."""
        rows = []
        for batch in predictions:
            judged = [name for name in ("chosen_reward", "rejected_reward", "reward") if name in batch]
            if judged:
                self.rows_are = "judgements" if judged == ["reward"] else "pairs"
                rewards = {name: batch[name].tolist() for name in judged}
                for i, texts in enumerate(batch["texts"]):
                    rows.append({**texts, **{name: values[i] for name, values in rewards.items()}})
                continue
            if "texts" not in batch:
                raise UsageError("this algorithm writes no completions; `rl test` shows its metrics")
            correct = None if batch["correct"] is None else batch["correct"].flatten().tolist()
            for i, (prompt, text) in enumerate(zip(batch["prompts"], batch["texts"], strict=True)):
                row = {"prompt": prompt, "completion": text, "length": int(batch["length"][i]),
                       "finished": bool(batch["finished"][i])}  # fmt: skip
                if correct is not None:
                    row["correct"] = correct[i]
                values = batch["rewards"][i].tolist()
                for name, value in zip(batch["reward_names"], values, strict=True):
                    row[f"rewards/{name}"] = None if value != value else value
                rows.append(row)
        return rows


def hide_transformers_bars() -> None:
    """Hides transformers' own progress bars for model files, if transformers is imported."""
    library: Any = sys.modules.get("transformers")
    if library is not None:
        library.utils.logging.disable_progress_bar()


def task_name(settings: Any) -> str | None:
    """Returns the name of the task, file or dataset, for the run's folder; None where there is none of them."""
    for key in ("task", "path", "dataset"):
        if settings.get(key):
            return Path(settings[key]).stem if key == "path" else str(settings[key])
    return None


def require_room(model: Any, data: Any, fits: bool) -> None:
    """Refuses a completion length that leaves no room for a prompt, before a run begins."""
    longest, wanted = model.max_length, model.hparams.get("max_completion_length")
    if wanted is None or wanted < longest:
        return
    kind = getattr(data, "kind", None)
    # Preferences are only scored, and with demonstrations completions are written only in evaluations.
    writes = kind != "preferences" and (kind != "demonstrations" or not fits or data.can_evaluate)
    if writes or wanted != default_of(type(model), "max_completion_length"):
        raise UsageError(f"max_completion_length={wanted} leaves no room for a prompt: the model takes {longest} "
                         "tokens, prompt and completion together; lower it")  # fmt: skip


def final_metrics(trainer: L.Trainer, model: L.LightningModule, data: Any) -> dict[str, float]:
    """Evaluates on all held-out records; returns the last point of the ``eval/*`` curves, none without such records."""
    if not data.can_evaluate:
        return {}
    loggers, trainer.loggers = trainer.loggers, []
    trainer.test(model, datamodule=data, verbose=False, weights_only=True)
    trainer.loggers = loggers
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
    return {name: value for name, value in found.items() if value == value}


def summary(model: Any, data: Any, final: dict[str, float], steps: int, seconds: float) -> dict[str, str]:
    """Returns the summary of a run, one row per name."""
    first = model.best_metric[0]
    order = sorted(final, key=lambda name: (name != first, "/" in name.removeprefix("eval/"), name))
    shown = [f"{name.removeprefix('eval/')} {final[name]:.4g}" for name in order]
    rows = {f"{type(model).__name__} on {data.source}": ", ".join(shown) or "no held-out records to evaluate on"}
    began_step, began_tokens = model.began_at
    rows["optimizer steps"] = f"{steps:,}{since_resumed(steps - began_step, steps)} in {seconds:.1f} s"
    if tokens := model.num_tokens - began_tokens:
        whole = f"{model.num_tokens:,}{since_resumed(tokens, model.num_tokens)}"
        rows["tokens"] = f"{whole}, {tokens / max(seconds, 1e-9):,.0f} per second with evaluation"
    return rows


def since_resumed(part: int, whole: int) -> str:
    """Returns how many of a run's steps, tokens or transitions this process made; nothing where it made all."""
    return "" if part == whole else f" ({part:,} since the run resumed)"


def export(ckpt_path: str | None, output: str | None, model: str | None = None) -> Path:
    """Writes a checkpoint's model as a Hugging Face directory."""
    if ckpt_path is None or output is None:
        raise UsageError("export takes --ckpt_path PATH and --output FOLDER")
    if not Path(ckpt_path).is_file():
        raise UsageError(f"ckpt_path={ckpt_path!r} is not a file; give the path of a .ckpt file")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"output={output!r} exists already; give a new folder, or an empty one")
    checkpoint = resume.read(Path(ckpt_path))
    algorithm = checkpoint.get("algorithm")
    if algorithm is None or "observation_space" in settings_of(checkpoint):
        raise UsageError(f"{ckpt_path} holds {algorithm or 'no algorithm'}, which is no language model; only those are "
                         "exported as Hugging Face directories")  # fmt: skip
    if model is None and algorithm not in rl_modules.__all__:
        raise UsageError(f"{ckpt_path} holds {algorithm}, which is none of rl_modules; give its class with --model "
                         f"package.module.{algorithm}{did_you_mean(algorithm, rl_modules.__all__)}")  # fmt: skip
    from rl_modules.common.loading import load_object

    algorithm_class = getattr(rl_modules, algorithm) if model is None else load_object(model, "model")
    from rl_modules.language.base import LanguageModule
    from rl_modules.language.policy_with_reference import PolicyWithReference

    module: LanguageModule
    if issubclass(algorithm_class, PolicyWithReference) and algorithm_class.export is LanguageModule.export:
        module = _policy_alone(checkpoint)
    else:
        module = algorithm_class.load_from_checkpoint(ckpt_path, weights_only=True, map_location="cpu")
    hide_transformers_bars()
    return module.export(folder)


def _policy_alone(checkpoint: dict[str, Any]) -> Any:
    """Loads only the policy of a checkpoint, because its reward model and reference may have been moved."""
    from rl_modules.language.base import LanguageModule

    settings = settings_of(checkpoint)
    description = settings["description"]
    frozen = {prefix: source for prefix, source in description["frozen"].items() if prefix == "model."}
    names = ("model_name_or_path", "lora", "torch_dtype", "attn_implementation")
    module = LanguageModule(**{name: settings[name] for name in names}, description={**description, "frozen": frozen})
    module.configure_model()
    module.load_weights({name: value for name, value in checkpoint["state_dict"].items() if name.startswith("model.")})
    return module
