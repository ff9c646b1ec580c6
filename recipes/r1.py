"""R1: a cold start on demonstrations, then GRPO with rewards for the right answer and the right form.

python -m recipes.r1                                             countdown, from scratch, offline
python -m recipes.r1 --final r1/final.yaml                       with a last stage that mixes in a learned reward
python -m recipes.r1 --cold_start none --grpo r1/zero.yaml       R1-Zero: reinforcement learning on a base model

Every stage is one ``rl fit`` with a config of its own; ``--grpo.model.beta=0.01`` changes an option of a stage's. A
stage that is done is skipped, one that was stopped resumes: run the same command again.

Source: DeepSeek-AI 2025, arXiv:2501.12948, sections 2.2 and 2.3.
"""

import argparse
from pathlib import Path
from typing import Any

from recipes import configs
from recipes.cli.options import Parser
from recipes.pipeline import (
    Pipeline,
    check_stages,
    load_policy,
    run_command,
    stage_options,
    write_jsonl,
    writing_options,
)
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed

STAGES = ("cold_start", "grpo", "reward_model", "final", "evaluation")
#: Options of the reinforcement learning that name its initial model.
MODEL = tuple(
    f"model.{name}" for name in ("model_name_or_path", "model_config", "tokenizer_name_or_path", "torch_dtype")
)
CURVES = (
    "eval/pass@1",
    "eval/rewards/think_answer_format",
    "train/reward",
    "train/completions/mean_length",
    "train/sampled_entropy",
    "train/loss",
)


def main(args: list[str] | None = None) -> None:
    """Runs the pipeline; prints a table of each stage's metrics."""
    run_command(run, parse, args)


def parse(args: list[str]) -> tuple[argparse.Namespace, dict[str, dict[str, str]]]:
    """Returns the pipeline's arguments, and each stage's options by dotted name."""
    parser = Parser("python -m recipes.r1", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default="runs/r1", help="where everything goes")
    parser.add_argument("--cold_start", default="r1/cold_start.yaml", help="config of the first stage, or none")
    parser.add_argument("--grpo", default="r1/grpo.yaml", help="config of the reinforcement learning")
    parser.add_argument("--final", default="none", help="config of a last stage with a learned reward, or none")
    parser.add_argument("--reward_model", default="r1/reward_model.yaml", help="config of that reward's training")
    parser.add_argument("--preference_prompts", type=int, default=512, help="prompts that it compares completions of")
    parser.add_argument("--seed", type=int, default=0, help="of every stage")
    given, rest = parser.parse_known_args(args)
    return given, stage_options(rest, STAGES, parser.names(), "--grpo.model.beta=0.01")


def run(given: argparse.Namespace, options: dict[str, dict[str, str]]) -> None:
    """All stages, the table and the curves."""
    seed = {"seed_everything": str(given.seed)}
    check(given, options, seed)
    pipeline = Pipeline(given.folder)
    rows: dict[str, dict[str, float]] = {}
    judge = {**seed, **writing_options(options["grpo"]), **options["evaluation"]}
    model: Path | None = None
    done: list[Path] = []
    trained = []

    def measure(name: str) -> None:
        first = {key: value for key, value in options["grpo"].items() if key in MODEL}
        arguments = {**first, **judge} if model is None else {**judge, "model.model_name_or_path": str(model)}
        rows[name] = pipeline.measure(f"{name}_evaluation", given.grpo, arguments, done)

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
        arguments, prompts = {**judge, "model.model_name_or_path": str(model)}, given.preference_prompts
        settings = {"config": configs.text(given.grpo), "arguments": arguments, "prompts": prompts}
        pairs = pipeline.stage(
            "preferences",
            lambda folder: write_preferences(given.grpo, arguments, prompts, folder),
            ("train.jsonl", "test.jsonl"),
            settings,
            done,
        )
        judging = pipeline.fit(
            "reward_model",
            given.reward_model,
            {
                **seed,
                "model.model_name_or_path": str(model),
                "data.path": str(pairs / "train.jsonl"),
                "data.eval_path": str(pairs / "test.jsonl"),
                "data.chat_template": "false",
                **options["reward_model"],
            },
            [*done, pairs],
        )
        trained.append("reward_model")
        model = pipeline.fit(
            "final",
            given.final,
            {
                **seed,
                "model.model_name_or_path": str(model),
                "model.reward_model_name_or_path": str(judging),
                **options["final"],
            },
            [*done, judging.parent],
        )
        trained.append("final")
        done.append(model.parent)
        measure("final")
    names = [name.removeprefix("eval/") for name in next(iter(rows.values()))]
    table = {stage: {name.removeprefix("eval/"): value for name, value in row.items()} for stage, row in rows.items()}
    first = [name for name in names if name.startswith(("pass@", "cons@", "rewards/"))]
    pipeline.table(table, [*first, "mean_length"])
    pipeline.curves(trained, CURVES)


def check(given: argparse.Namespace, options: dict[str, dict[str, str]], seed: dict[str, str]) -> None:
    """Checks the settings of all stages before the first one starts."""
    left_out = {name for name in ("cold_start", "final") if getattr(given, name) == "none"}
    stages = [stage for stage in ("cold_start", "grpo", "reward_model", "final") if stage not in left_out]
    if "final" in left_out:
        stages.remove("reward_model")
    judge = {**seed, **writing_options(options["grpo"]), **options["evaluation"]}
    found = check_stages(
        {
            **{stage: ("fit", getattr(given, stage), {**seed, **options[stage]}) for stage in stages},
            "evaluation": ("test", given.grpo, judge),
        }
    )
    if "final" not in left_out and (data := found["evaluation"]).task is None:
        raise UsageError(
            f"{data.source} is no task, whose training prompts the preferences are about; run r1 without --final"
        )


def write_preferences(config: str, arguments: dict[str, str], n_prompts: int, folder: Path) -> None:
    """Writes pairs of completions of training prompts, right before wrong, short before long; a tenth to test."""
    policy = load_policy(config, arguments)
    data = policy.data
    records = data.task.records("train", n_prompts)
    pairs: list[dict[str, Any]] = []
    for start in range(0, n_prompts, 64):
        part = records[start : start + 64]
        seeds = [stream_seed(data.seed, 0, "preferences", 8 * start + i) for i in range(8 * len(part))]
        texts, ids, finished = policy.write(part, seeds, 8)
        correct = data.rewards([r for r in part for _ in range(8)], texts, ids)[:, 0] >= data.hparams.correct_threshold
        columns = zip(texts, correct.tolist(), finished, map(len, ids), strict=True)
        rows = [dict(zip(("completion", "correct", "finished", "length"), row, strict=True)) for row in columns]
        found = [preference(record["prompt"], rows[8 * i : 8 * i + 8]) for i, record in enumerate(part)]
        pairs += [{**pair, **policy.as_read(part[i])} for i, pair in enumerate(found) if pair is not None]
    if len(pairs) < 10:
        raise UsageError(
            f"only {len(pairs)} of {n_prompts} prompts have completions that differ; ask for more with "
            "--preference_prompts"
        )
    cut = len(pairs) * 9 // 10
    for name, those in (("train", pairs[:cut]), ("test", pairs[cut:])):
        write_jsonl(folder / f"{name}.jsonl", those)


def preference(prompt: Any, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the best and the worst of some completions, by correctness and then by length; None if all are equal."""
    order = sorted(rows, key=lambda row: (not row["correct"], not row["finished"], row["length"]))
    best, worst = order[0], order[-1]
    if (best["correct"], best["length"]) == (worst["correct"], worst["length"]):
        return None
    return {"prompt": prompt, "chosen": best["completion"], "rejected": worst["completion"]}


if __name__ == "__main__":
    main()
