"""Reinforcement learning on addition, by several algorithms and from several starts.

    python -m benchmarks.starts run --starts "seed 0" "seed 1" "seed 2" --variants dr_grpo gspo cispo rloo
    python -m benchmarks.starts run [--variants grpo "kl .05"] [--starts linear] [--first] [--folder runs/starts]
    python -m benchmarks.starts report

``run`` trains the starts: ``seed S`` is the supervised start that the configs were made for; ``linear``, ``cosine`` and
``constant, then linear`` have seeds, lengths and schedules of their own. From each it trains every variant for 1,000
steps, and keeps the result of a run in ``benchmarks/results/starts/<variant>/<start>.json``. ``--first`` trains 150
steps at a constant learning rate and keeps their results in ``starts_first``. Results that exist are skipped; a stopped
run resumes. ``report`` writes the tables of docs/language/grpo_measured.md from these files.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.callbacks.curves import points
from recipes.pipeline import Pipeline, evaluate

STORES = {False: Path(__file__).parent / "results" / "starts", True: Path(__file__).parent / "results" / "starts_first"}
#: Options that ``--first`` changes in every variant; its steps are the same for any length of a run.
FIRST = {"model.lr_scheduler_type": "constant_with_warmup", "trainer.max_steps": 150, "data.eval_steps": 50}
PAGE = Path(__file__).parent.parent / "docs" / "language" / "grpo_measured.md"
BEGIN, END = "<!-- results: written by `python -m benchmarks.starts report` -->\n", "<!-- end of results -->\n"
START_CONFIG = "sft/addition_start.yaml"
#: Options of the supervised runs beside their config; of several, each begins where the one before it ended. Their
#: lengths are fixed, because their learning rates end with them: the config's EarlyStopping is left out.
STARTS: dict[str, list[dict[str, Any]]] = {
    "linear": [{"data.seed": 11, "model.learning_rate": 3e-3, "model.lr_scheduler_type": "linear",
                "model.warmup_steps": 40, "data.eval_steps": 100, "trainer.max_steps": 450}],
    "cosine": [{"data.seed": 12, "model.learning_rate": 3e-3, "model.lr_scheduler_type": "cosine",
                "model.warmup_steps": 20, "data.batch_size": 192, "data.eval_steps": 100, "trainer.max_steps": 550}],
    "constant, then linear": [
        {"data.seed": 13, "model.learning_rate": 1.5e-3, "model.warmup_steps": 20, "data.batch_size": 192,
         "data.eval_steps": 50, "trainer.max_steps": 600},
        {"data.seed": 14, "model.learning_rate": 1.5e-3, "model.lr_scheduler_type": "linear",
         "model.warmup_steps": 10, "data.eval_steps": 30, "trainer.max_steps": 120},
    ],
}  # fmt: skip
#: Schedules that the config's EarlyStopping stops before their end, at a sampled pass@1 of .3.
STOPPED_STARTS: dict[str, list[dict[str, Any]]] = {
    "linear, stopped": [{"data.seed": 21, "model.learning_rate": 2e-3, "model.lr_scheduler_type": "linear",
                         "model.warmup_steps": 40, "trainer.max_steps": 2000}],
    "cosine, stopped": [{"data.seed": 22, "model.lr_scheduler_type": "cosine", "model.warmup_steps": 20,
                         "data.batch_size": 128, "trainer.max_steps": 4000}],
    "warm-up, stopped": [{"data.seed": 23, "model.learning_rate": 2e-3,
                          "model.lr_scheduler_type": "constant_with_warmup", "model.warmup_steps": 100,
                          "data.batch_size": 192, "data.eval_steps": 5, "trainer.max_steps": 2000}],
}  # fmt: skip
#: The start of the configs; its seed is the seed of the reinforcement learning, too.
OWN_STARTS: dict[str, list[dict[str, Any]]] = {f"seed {seed}": [{"seed_everything": seed}] for seed in range(5)}
#: Sampled pass@1 that a start must have.
RANGE = (0.2, 0.4)


@dataclass(frozen=True)
class Variant:
    """One row of the table: a config and what is changed in it."""

    config: str = "grpo/addition.yaml"
    options: dict[str, Any] = field(default_factory=dict)


#: The tables' rows: GRPO's config as it was before this comparison with one change each, and the other algorithms.
PLAIN = {"model.entropy_coef": 0.0}
ADAPTERS = {"model.lora": "{r: 8, lora_alpha: 16, target_modules: all-linear}", "model.learning_rate": 1e-3}
VARIANTS: dict[str, Variant] = {
    "grpo": Variant(options=PLAIN),
    "entropy .01": Variant(options={"model.entropy_coef": 0.01}),
    "kl .05": Variant(options={**PLAIN, "model.beta": 0.05}),
    "kl .5": Variant(options={**PLAIN, "model.beta": 0.5}),
    "dr_grpo": Variant(options={**PLAIN, "model.loss_type": "dr_grpo", "model.scale_rewards": "none"}),
    "top entropy .2": Variant(options={**PLAIN, "model.top_entropy_quantile": 0.2}),
    # A generation's first optimizer step has ratio 1, so clipping has an effect only from the second step on.
    "two steps, clip .2": Variant(options={**PLAIN, "data.steps_per_generation": 2}),
    "two steps, clip .2 and .28": Variant(
        options={**PLAIN, "data.steps_per_generation": 2, "model.epsilon_high": 0.28}
    ),
    "warm-up 200": Variant(options={**PLAIN, "model.warmup_steps": 200}),
    "learning rate 1e-4": Variant(options={**PLAIN, "model.learning_rate": 1e-4}),
    "learning rate 1e-4, batch 1024": Variant(
        options={**PLAIN, "model.learning_rate": 1e-4, "data.batch_size": 1024}
    ),
    "batch 1024": Variant(options={**PLAIN, "data.batch_size": 1024}),
    "batch 2048": Variant(options={**PLAIN, "data.batch_size": 2048}),
    "learning rate 5e-4, batch 4096": Variant(
        options={**PLAIN, "model.learning_rate": 5e-4, "data.batch_size": 4096}
    ),
    "groups of 4, learning rate 1e-4": Variant(
        options={**PLAIN, "data.num_generations": 4, "model.learning_rate": 1e-4}
    ),
    "LoRA": Variant(options=ADAPTERS),
    "LoRA, groups of 4": Variant(options={**ADAPTERS, "data.num_generations": 4}),
    "gspo": Variant(options={"model.importance_sampling_level": "sequence", "model.epsilon": 3e-4,
                             "model.epsilon_high": 4e-4}),
    "cispo": Variant(options={"model.loss_type": "cispo", "model.epsilon_high": 5.0}),
    "rloo": Variant("rloo/addition.yaml"),
    # In an environment with vLLM, see docs/language/sampling.md.
    "vllm": Variant(options={"model.sampler": "vllm"}),
    "two generations old": Variant(options={"data.async_generations": 2}),
    # A filter that removes nothing: the ratio is to training's own log-probabilities, without a correction.
    "two generations old, uncorrected": Variant(options={
        "data.async_generations": 2, "model.importance_sampling_correction": "none", "model.top_p": 0.9999999}),
    "top-p .8": Variant(options={"model.top_p": 0.8}),
    "top-p .8, vllm": Variant(options={"model.top_p": 0.8, "model.sampler": "vllm"}),
    "ppo with a verifier": Variant("rlhf_ppo/addition.yaml"),
}  # fmt: skip


def main() -> None:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.starts", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train what has no result yet")
    running.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    running.add_argument("--starts", nargs="+", choices=[*STARTS, *STOPPED_STARTS, *OWN_STARTS], default=list(STARTS))
    running.add_argument("--first", action="store_true", help="150 steps at a constant learning rate")
    running.add_argument("--folder", type=Path, default=Path("runs/starts"))
    commands.add_parser("report", help="write the table")
    given = parser.parse_args()
    if given.command == "run":
        run(given.variants, given.starts, given.folder, given.first)
    else:
        report()


def run(variants: Sequence[str], starts: Sequence[str], folder: Path, first: bool = False) -> None:
    """Trains every variant from every start, one after the other.

    Args:
        variants: names of rows.
        starts: names of columns.
        folder: for the runs' files.
        first: 150 steps at a constant learning rate; False: 1,000 steps.
    """
    pipeline = Pipeline(folder)
    for name in variants:
        for start in starts:
            kept = result_path(name, start, first)
            if kept.exists():
                print(f"{name} from {start}: kept in {kept}", flush=True)
                continue
            model, begins = supervise(pipeline, start)
            variant, began_s = VARIANTS[name], time.monotonic()
            stage = file_name(f"{start} {name}" + (" first" if first else ""))
            options = {**OWN_STARTS.get(start, [{}])[0], "model.model_name_or_path": str(model), **variant.options,
                       **(FIRST if first else {})}  # fmt: skip
            pipeline.fit(stage, variant.config, options, [model.parent])
            curves = points(folder / stage / "run")
            kept.parent.mkdir(parents=True, exist_ok=True)
            result = {
                "start": begins["eval/pass@1"],
                **{tag: curves[f"eval/{tag}"][-1][1] for tag in ("pass@1", "pass@4", "cons@4")},
                "entropy": next(
                    (curves[n][-1][1] for n in ("train/entropy", "train/sampled_entropy") if n in curves), None
                ),
                "curve": curves["eval/pass@1"],
                "seconds": round(time.monotonic() - began_s),
            }
            kept.write_text(json.dumps(result), "utf-8")
            print(f"{name} from {start}: {result['start']:.3f} → {result['pass@1']:.3f}", flush=True)


def supervise(pipeline: Pipeline, start: str) -> tuple[Path, dict[str, float]]:
    """Trains a start; returns its directory and success rates.

    Args:
        pipeline: of the stages.
        start: its name.
    """
    model: Path | None = None
    for number, options in enumerate({**STARTS, **STOPPED_STARTS, **OWN_STARTS}[start]):
        stage = file_name(f"start {start}" + (f" {number + 1}" if number else ""))
        begins: dict[str, Any] = {} if model is None else {"model.model_name_or_path": str(model)}
        if start in STARTS:
            begins["trainer.callbacks"] = "[]"
        after = [] if model is None else [model.parent]
        model = pipeline.fit(stage, START_CONFIG, {"threads": 1, **begins, **options}, after)
    assert model is not None
    found = pipeline.evaluate(file_name(f"start {start} evaluation"), lambda: measure(model), None, [model.parent])
    if not RANGE[0] <= found["eval/pass@1"] <= RANGE[1]:
        print(f"start {start}: sampled pass@1 {found['eval/pass@1']:.2f} lies outside of {RANGE}", flush=True)
    return model, found


def file_name(words: str) -> str:
    """Returns a name without spaces and commas."""
    return words.replace(",", "").replace(" ", "_")


def result_path(variant: str, start: str, first: bool = False) -> Path:
    """Where a run's result is kept."""
    return STORES[first] / file_name(variant) / f"{file_name(start)}.json"


def measure(model: Path) -> dict[str, float]:
    """Returns the success rates of a start on the held-out questions of its runs.

    Args:
        model: an exported directory.
    """
    return evaluate("grpo/addition.yaml", {"model.model_name_or_path": str(model)})


def report() -> None:
    """Writes the tables between their two marks on the page."""
    before, found, rest = PAGE.read_text("utf-8").partition(BEGIN)
    if not found:
        raise SystemExit(f"{PAGE} has no line {BEGIN.strip()}, after which the tables go")
    cells = "pass@1 of the initial policy → sampled pass@1; pass@4; entropy per token"
    text = (
        f"From the start of the configs, 1,000 steps, {cells}:\n\n{table(OWN_STARTS)}\n"
        f"From starts stopped on their way, 1,000 steps, {cells}:\n\n{table(STOPPED_STARTS)}\n"
        f"From starts whose learning rate decayed to 0, 1,000 steps, {cells}:\n\n{table(STARTS)}\n"
        "From starts whose learning rate decayed to 0, the first steps at a constant learning rate, sampled pass@1 "
        "after 50, 100, 150 steps:\n\n"
        f"{table(STARTS, first=True)}"
    )
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")


def table(starts: Iterable[str], first: bool = False) -> str:
    """One row per variant that has results, one column per start; a sentence where there is none."""
    starts = list(starts)
    stored = {
        name: {start: json.loads(path.read_text("utf-8"))
               for start in starts if (path := result_path(name, start, first)).exists()}
        for name in VARIANTS
    }  # fmt: skip
    if not any(stored.values()):
        return "No run is recorded yet.\n"
    lines = [f"| variant | {' | '.join(starts)} |{'' if first else ' worst |'}",
             f"|{'---|' * (len(starts) + (1 if first else 2))}"]  # fmt: skip
    for name, found in stored.items():
        if not found:
            continue
        cell = _first_cell if first else _cell
        cells = [cell(found[start]) if start in found else "" for start in starts]
        is_whole = len(found) == len(starts)
        worst = f" {min(result['pass@1'] for result in found.values()):.2f} |" if is_whole else " |"
        lines.append(f"| {name} | {' | '.join(cells)} |{'' if first else worst}")
    return "\n".join(lines) + "\n"


def _cell(result: dict[str, Any]) -> str:
    entropy = "" if result["entropy"] is None else f"; {result['entropy']:.3f}"
    return f"{result['start']:.2f} → {result['pass@1']:.2f}; {result['pass@4']:.2f}{entropy}"


def _first_cell(result: dict[str, Any]) -> str:
    """Pass@1 of the start and at each evaluation; the last point is there twice, from the final evaluation."""
    points = dict(result["curve"])
    return ", ".join(f"{points[step]:.2f}" for step in sorted(points) if step)


if __name__ == "__main__":
    main()
