"""R1: a cold start on demonstrations, then GRPO with rewards for the right answer and the right form.

python -m recipes.r1                                             countdown, from scratch, offline
python -m recipes.r1 --final r1/final.yaml                       with a last stage that mixes in a learned reward
python -m recipes.r1 --cold_start none --grpo r1/zero.yaml       R1-Zero: reinforcement learning on a base model

Every stage is one ``rl fit`` with a config of its own; ``--grpo.model.beta=0.01`` changes an option of a stage's. A
stage that is done is skipped, one that was stopped goes on where it stood: run the same command again.

Source: DeepSeek-AI 2025, arXiv:2501.12948, sections 2.2 and 2.3.
"""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from recipes.pipeline import Pipeline
from recipes.stages import config_text, evaluate, rl_words, stage_options
from rl_modules.errors import UsageError

STAGES = ("cold_start", "grpo", "preferences", "reward_model", "final", "evaluation")
CURVES = ("eval/pass@1", "eval/rewards/think_answer_format", "reward", "completions/mean_length", "entropy", "loss")


def main(args: list[str] | None = None) -> None:
    """Run the pipeline; prints a table of what each stage is worth.

    Args:
        args: the command line; None: ``sys.argv``.

    Raises:
        SystemExit: with 1 after an error, which is printed in one sentence.
    """
    try:
        run(*parse(sys.argv[1:] if args is None else args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def parse(args: list[str]) -> tuple[argparse.Namespace, dict[str, dict[str, str]]]:
    """The pipeline's arguments, and each stage's options by dotted name."""
    parser = argparse.ArgumentParser(prog="python -m recipes.r1", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="runs/r1", help="where everything goes")
    parser.add_argument("--cold_start", default="r1/cold_start.yaml", help="config of the first stage, or none")
    parser.add_argument("--grpo", default="r1/grpo.yaml", help="config of the reinforcement learning")
    parser.add_argument("--final", default="none", help="config of a last stage with a learned reward, or none")
    parser.add_argument("--reward_model", default="r1/reward_model.yaml", help="config of that reward's training")
    parser.add_argument("--seed", type=int, default=0, help="of every stage")
    given, rest = parser.parse_known_args(args)
    return given, stage_options(rest, STAGES, "--grpo.model.beta=0.01")


def run(given: argparse.Namespace, options: dict[str, dict[str, str]]) -> None:
    """All stages, the table and the curves."""
    pipeline = Pipeline(given.folder)
    seed = {"seed_everything": str(given.seed)}
    rows: dict[str, dict[str, float]] = {}
    judge = {**seed, **_of_group(options["grpo"], "data"), **options["evaluation"]}
    model: Path | None = None
    done: list[Path] = []
    trained = []

    def measure(name: str) -> None:
        arguments = {**judge, **({} if model is None else {"model.model_name_or_path": str(model)})}
        rows[name] = pipeline.evaluate(f"{name}_evaluation", lambda: evaluate(given.grpo, arguments),
                                       {"config": config_text(given.grpo), "arguments": arguments}, done)  # fmt: skip

    if given.cold_start != "none":
        model = pipeline.fit("cold_start", given.cold_start, {**seed, **options["cold_start"]})
        trained.append("cold_start")
        done.append(model.parent)
        measure("cold_start")
    else:
        measure("base")
    start = {} if model is None else {"model.model_name_or_path": str(model)}
    model = pipeline.fit("grpo", given.grpo, {**seed, **start, **options["grpo"]}, done)
    trained.append("grpo")
    done.append(model.parent)
    measure("grpo")
    if given.final != "none":
        arguments = {**judge, "model.model_name_or_path": str(model), **options["preferences"]}
        pairs = pipeline.stage("preferences", lambda folder: write_preferences(given.grpo, arguments, folder),
                               ("train.jsonl", "test.jsonl"), {"arguments": arguments}, done)  # fmt: skip
        judging = pipeline.fit("reward_model", given.reward_model, {
            **seed, "model.model_name_or_path": str(model), "data.path": str(pairs / "train.jsonl"),
            "data.eval_path": str(pairs / "test.jsonl"), **options["reward_model"],
        }, [*done, pairs])  # fmt: skip
        trained.append("reward_model")
        model = pipeline.fit("final", given.final, {
            **seed, "model.model_name_or_path": str(model), "model.reward_model_name_or_path": str(judging),
            **options["final"],
        }, [*done, judging.parent])  # fmt: skip
        trained.append("final")
        done.append(model.parent)
        measure("final")
    names = [name.removeprefix("eval/") for name in next(iter(rows.values()))]
    table = {stage: {name.removeprefix("eval/"): value for name, value in row.items()} for stage, row in rows.items()}
    first = [name for name in names if name.startswith(("pass@", "cons@", "rewards/"))]
    pipeline.table(table, [*first, "mean_length"])
    pipeline.curves(trained, CURVES)


def write_preferences(config: str, arguments: dict[str, str], folder: Path) -> None:
    """Pairs of the policy's own completions of held-out prompts: right before wrong, then short before long.

    Such a judge stands in for people, who want an answer that is right and no longer than it has to be. Nine tenths of
    the prompts go to ``train.jsonl``, the others to ``test.jsonl``.
    """
    from recipes.lightning_cli import RLCLI

    written = folder / "completions.jsonl"
    with contextlib.redirect_stdout(io.StringIO()):
        RLCLI("predict", [*rl_words(config, arguments), "--output", str(written)])
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in written.read_text("utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(row["prompt"], []).append(row)
    pairs = [pair for prompt, rows in groups.items() if (pair := preference(prompt, rows)) is not None]
    if len(pairs) < 10:
        raise UsageError(f"only {len(pairs)} of {len(groups)} prompts have completions that differ; ask for more with "
                         "--preferences.data.n_eval=…")  # fmt: skip
    cut = len(pairs) * 9 // 10
    for name, part in (("train", pairs[:cut]), ("test", pairs[cut:])):
        text = "".join(json.dumps(pair) + "\n" for pair in part)
        (folder / f"{name}.jsonl").write_text(text, "utf-8")


def preference(prompt: str, rows: list[dict[str, Any]]) -> dict[str, str] | None:
    """The best and the worst of some completions, by correctness and then by length; None where all are alike."""
    order = sorted(rows, key=lambda row: (not row["correct"], not row["finished"], row["length"]))
    best, worst = order[0], order[-1]
    if (best["correct"], best["length"]) == (worst["correct"], worst["length"]):
        return None
    return {"prompt": prompt, "chosen": best["completion"], "rejected": worst["completion"]}


def _of_group(options: dict[str, str], group: str) -> dict[str, str]:
    """Those options of a stage that decide what is measured."""
    return {key: value for key, value in options.items() if key.startswith(f"{group}.")}


if __name__ == "__main__":
    main()
