"""RLHF: demonstrations, comparisons of what the model then writes, a reward model of them, and PPO against it.

python -m recipes.rlhf                                  shortest paths on a hidden graph, from scratch, offline
python -m recipes.rlhf --preferences dpo                DPO on the same comparisons, in place of the last two stages
python -m recipes.rlhf --preferences dpo --rounds 4     three times more, on comparisons of the last round's samples
python -m recipes.rlhf --seed 1 --folder runs/rlhf1 --ppo.model.beta=0.05

Every stage is one ``rl fit`` with a config of its own, or a folder of files; ``--ppo.model.beta=0.05`` changes an
option of one. A stage that is done is skipped, one that was stopped resumes: run the same command again.

Both variants in one folder share the first two stages and one table.

Source: Ouyang et al. 2022, arXiv:2203.02155, figure 2; comparisons of samples: Stiennon et al. 2020, arXiv:2009.01325;
DPO: Rafailov et al. 2023, arXiv:2305.18290; in rounds: Xu et al. 2023, arXiv:2312.16682.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes import configs
from recipes.callbacks.curves import points
from recipes.cli.options import Parser
from recipes.pipeline import (
    PROCESSES,
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

STAGES = ("sft", "preferences", "reward_model", "ppo", "dpo", "evaluation")
CURVES = (
    "train/rewards/utilities/mean",
    "eval/rewards/utilities",
    "train/objective/scores",
    "train/objective/kl",
    "eval/accuracy",
    "eval/rewards/accuracies",
    "train/loss",
)
#: Columns of the table by the metric's name in an evaluation.
COLUMNS = {
    "eval/rewards/utilities": "optimality",
    "eval/rewards/accuracy": "shortest",
    "eval/scores": "reward model",
    "eval/kl": "KL",
    "eval/mean_length": "length",
    "eval/accuracy": "accuracy",
    "eval/bayes_accuracy": "best accuracy",
    "steps": "steps",
    "seconds": "seconds",
}


def main(args: list[str] | None = None) -> None:
    """Runs the pipeline; prints and draws each stage's metrics."""
    run_command(run, parse, args)


def parse(args: list[str]) -> tuple[argparse.Namespace, dict[str, dict[str, str]]]:
    """Returns the pipeline's arguments, and each stage's options by dotted name."""
    parser = Parser("python -m recipes.rlhf", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default="runs/rlhf", help="where everything goes")
    parser.add_argument("--sft", default="rlhf/sft.yaml", help="config of the first stage")
    parser.add_argument(
        "--reward_model", default="rlhf/reward_model.yaml", help="config of the reward model's training"
    )
    parser.add_argument("--ppo", default="rlhf_ppo/paths.yaml", help="config of the reinforcement learning")
    parser.add_argument("--dpo", default="dpo/paths.yaml", help="config of the direct preference optimization")
    parser.add_argument(
        "--preferences",
        default="ppo",
        choices=("ppo", "dpo"),
        help="what learns from the comparisons: ppo on a reward model of them, or dpo",
    )
    parser.add_argument("--rounds", type=int, default=1, help="of dpo, each on comparisons of the last one's samples")
    parser.add_argument("--samples", type=int, default=32, help="completions of each prompt at each temperature")
    parser.add_argument("--comparisons", type=int, default=8, help="of each completion with others of its prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.5, 2.0], help="of what is compared")
    parser.add_argument("--seed", type=int, default=0, help="of every stage")
    given, rest = parser.parse_known_args(args)
    if given.rounds < 1 or (given.rounds > 1 and given.preferences != "dpo"):
        raise UsageError(f"rounds={given.rounds} must be at least 1, and above 1 only with --preferences dpo")
    return given, stage_options(rest, STAGES, parser.names(), "--ppo.model.beta=0.05")


def run(given: argparse.Namespace, options: dict[str, dict[str, str]]) -> None:
    """All stages, the table and the curves."""
    seed = {"seed_everything": str(given.seed)}
    check(given, options, seed)
    pipeline = Pipeline(given.folder)
    sft = pipeline.fit("sft", given.sft, {**seed, **options["sft"]})
    pairs = compared(pipeline, given, options, "preferences", sft, [sft.parent])
    done = [sft.parent, pairs]
    # Another judge of what the policies write: the reward model, where there is one.
    judge = {"model.reward_model_name_or_path": "null"}
    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, model: Path, after: list[Path], stage: str | None = None) -> None:
        arguments = {
            **seed,
            "model.model_name_or_path": str(model),
            "model.ref_model_name_or_path": str(sft),
            **judge,
            **writing_options(options["ppo"]),
            **options["evaluation"],
        }
        rows[name] = pipeline.measure(f"{stage or name}_evaluation", given.ppo, arguments, after)

    if given.preferences == "dpo":
        measure("sft", sft, done, "sft_alone")
        trained = learn_directly(pipeline, given, options, sft, pairs, measure)
    else:
        judging = {
            **seed,
            "model.model_name_or_path": str(sft),
            **files(pairs),
            **options["reward_model"],
        }
        judged = pipeline.fit("reward_model", given.reward_model, judging, done)
        judge = {"model.reward_model_name_or_path": str(judged)}
        done = [*done, judged.parent]
        start = {**seed, "model.model_name_or_path": str(sft), "model.ref_model_name_or_path": str(sft), **judge}
        ppo = pipeline.fit("ppo", given.ppo, {**start, **options["ppo"]}, done)
        measure("sft", sft, done)
        measure("ppo", ppo, [*done, ppo.parent])
        # The evaluation runs in this process, so it leaves out options that set the number of training processes.
        arguments = {key: value for key, value in judging.items() if key not in PROCESSES}
        arguments["model.model_name_or_path"] = str(judged)
        rows["reward_model"] = pipeline.measure("reward_model_evaluation", given.reward_model, arguments, done)
        trained = ["reward_model", "ppo"]
    add_earlier(pipeline, rows, pairs)
    summarise(pipeline, rows, trained)


def check(given: argparse.Namespace, options: dict[str, dict[str, str]], seed: dict[str, str]) -> None:
    """Checks the settings of all stages before the first one starts."""
    later = ["dpo"] if given.preferences == "dpo" else ["reward_model", "ppo"]
    found = check_stages(
        {
            **{stage: ("fit", getattr(given, stage), {**seed, **options[stage]}) for stage in ("sft", *later)},
            "preferences": ("test", given.sft, {**seed, **writing_options(options["sft"]), **options["preferences"]}),
            "evaluation": ("test", given.ppo, {**seed, **writing_options(options["ppo"]), **options["evaluation"]}),
        }
    )
    if not hasattr((data := found["preferences"]).task, "compare"):
        raise UsageError(f"{data.source} can't compare completions, which the preferences come from; task paths can")


def compared(
    pipeline: Pipeline,
    given: argparse.Namespace,
    options: dict[str, dict[str, str]],
    name: str,
    model: Path,
    after: Sequence[Path],
) -> Path:
    """Runs a stage of comparisons of a policy's samples; returns its folder."""
    # The trained policy: the config's settings of a new model do not apply.
    policy = {
        "seed_everything": str(given.seed),
        "model.model_name_or_path": str(model),
        "model.model_config": "null",
        **writing_options(options["sft"]),
        **options["preferences"],
    }
    numbers = {name: getattr(given, name) for name in ("samples", "temperatures", "comparisons")}
    return pipeline.stage(
        name,
        lambda folder: write_preferences(given.sft, policy, **numbers, folder=folder),
        ("train.jsonl", "test.jsonl"),
        {"config": configs.text(given.sft), "arguments": policy, **numbers},
        after,
    )


def files(pairs: Path) -> dict[str, str]:
    """Returns the options by which a stage reads comparisons."""
    return {
        "data.path": str(pairs / "train.jsonl"),
        "data.eval_path": str(pairs / "test.jsonl"),
        "data.chat_template": "false",
    }


def learn_directly(
    pipeline: Pipeline,
    given: argparse.Namespace,
    options: dict[str, dict[str, str]],
    sft: Path,
    pairs: Path,
    measure: Callable[[str, Path, list[Path]], None],
) -> list[str]:
    """DPO on the comparisons, and further rounds on comparisons of the samples of the last round's policy."""
    model, done, trained = sft, [sft.parent, pairs], []
    for number in range(1, given.rounds + 1):
        name = "dpo" if number == 1 else f"dpo_{number}"
        if number > 1:
            pairs = compared(pipeline, given, options, f"preferences_{number}", model, done)
            done.append(pairs)
        start = {"seed_everything": str(given.seed), "model.model_name_or_path": str(model)}
        model = pipeline.fit(name, given.dpo, {**start, **files(pairs), **options["dpo"]}, done)
        done.append(model.parent)
        trained.append(name)
        measure(name, model, list(done))
    return trained


def add_earlier(pipeline: Pipeline, rows: dict[str, dict[str, float]], pairs: Path) -> None:
    """Adds rows of the other variant, if an earlier command ran it on the same comparisons."""
    if found := pipeline.earlier("sft_evaluation", pairs):  # with the score of the reward model
        rows["sft"] = json.loads((found / "metrics.json").read_text("utf-8"))
    stages = ["reward_model", "ppo", "dpo", *sorted(path.name for path in pipeline.folder.glob("dpo_[0-9]*"))]
    for name in (stage for stage in stages if stage not in rows and not stage.endswith("_evaluation")):
        if pipeline.earlier(name, pairs) and (found := pipeline.earlier(f"{name}_evaluation", pairs)):
            rows[name] = json.loads((found / "metrics.json").read_text("utf-8"))


def summarise(pipeline: Pipeline, rows: dict[str, dict[str, float]], trained: Sequence[str]) -> None:
    """Prints the table, with the optimizer steps and time of each training, and draws the curves."""
    order = ["sft", "reward_model", "ppo"]
    table = {}
    for name in sorted(rows, key=lambda name: (order.index(name) if name in order else len(order), name)):
        curves = points(pipeline.folder / name / "run")
        # Evaluations are on the same axis: the last one comes after the last optimizer step.
        steps = max((curve[-1][0] for curve in curves.values() if curve), default=0)
        costs = {"steps": steps, "seconds": round(pipeline.seconds[name])}
        row = {**rows[name], **costs}
        table[name] = {COLUMNS[key]: value for key, value in row.items() if key in COLUMNS}
    pipeline.table(table, list(COLUMNS.values()))
    pipeline.curves(["sft", *trained], CURVES)


def write_preferences(
    config: str,
    arguments: dict[str, str],
    samples: int,
    temperatures: Sequence[float],
    comparisons: int,
    folder: Path,
) -> None:
    """Writes pairs of completions at several temperatures, each in several comparisons by the task with noise."""
    policy = load_policy(config, arguments)
    data = policy.data
    for split in ("train", "test"):
        # A prompt of messages can't be a key of a dictionary.
        records = list({json.dumps(record["prompt"]): record for record in data.task.records(split, None)}.values())
        texts: list[list[str]] = [[] for _ in records]
        for k, temperature in enumerate(temperatures):
            stream = f"comparisons/{split}/{k}"
            seeds = [stream_seed(data.seed, 0, stream, i) for i in range(len(records) * samples)]
            written, _, _ = policy.write(records, seeds, samples, temperature=temperature)
            for i, text in enumerate(written):
                texts[i // samples].append(text)
        rng = random.Random(stream_seed(data.seed, 0, f"comparisons/{split}"))
        pairs = []
        for record, answers in zip(records, texts, strict=True):
            for _ in range(comparisons):
                rng.shuffle(answers)
                for first, second in zip(answers[::2], answers[1::2], strict=False):
                    if first != second:
                        pair = data.task.compare(record, first, second, rng)
                        pairs.append({**pair, **policy.as_read(record)})
        write_jsonl(folder / f"{split}.jsonl", pairs)


if __name__ == "__main__":
    main()
