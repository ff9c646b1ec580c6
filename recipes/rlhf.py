"""RLHF: demonstrations, comparisons of what the model then writes, a reward model of them, and PPO against it.

python -m recipes.rlhf                                  shortest paths on a hidden graph, from scratch, offline
python -m recipes.rlhf --seed 1 --folder runs/rlhf1 --ppo.model.beta=0.05

Every stage is one ``rl fit`` with a config of its own, or a folder of files; ``--ppo.model.beta=0.05`` changes an
option of one. A stage that is done is skipped, one that was stopped goes on where it stood: run the same command again.

Source: Ouyang et al. 2022, arXiv:2203.02155, figure 2; comparisons of samples: Stiennon et al. 2020, arXiv:2009.01325.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from recipes.pipeline import Pipeline
from recipes.stages import config_text, evaluate, load_policy, run_command, stage_options
from rl_modules.common.errors import UsageError

STAGES = ("sft", "preferences", "reward_model", "ppo", "evaluation")
CURVES = (
    "rewards/utilities/mean",
    "eval/rewards/utilities",
    "objective/scores",
    "objective/kl",
    "eval/accuracy",
    "loss",
)
#: What the table shows, by the metric's name in an evaluation.
COLUMNS = {
    "eval/rewards/utilities": "optimality",
    "eval/rewards/accuracy": "shortest",
    "eval/scores": "reward model",
    "eval/kl": "KL",
    "eval/mean_length": "length",
    "eval/accuracy": "accuracy",
    "eval/bayes_accuracy": "best accuracy",
}


def main(args: list[str] | None = None) -> None:
    """Run the pipeline; prints and draws what each stage is worth.

    Args:
        args: the command line; None: ``sys.argv``.

    Raises:
        SystemExit: with 1 after an error, which is printed in one sentence.
    """
    run_command(run, parse, args)


def parse(args: list[str]) -> tuple[argparse.Namespace, dict[str, dict[str, str]]]:
    """The pipeline's arguments, and each stage's options by dotted name."""
    parser = argparse.ArgumentParser(prog="python -m recipes.rlhf", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="runs/rlhf", help="where everything goes")
    parser.add_argument("--sft", default="rlhf/sft.yaml", help="config of the first stage")
    parser.add_argument(
        "--reward_model", default="rlhf/reward_model.yaml", help="config of the reward model's training"
    )
    parser.add_argument("--ppo", default="rlhf_ppo/paths.yaml", help="config of the reinforcement learning")
    parser.add_argument("--samples", type=int, default=32, help="completions of each prompt at each temperature")
    parser.add_argument("--comparisons", type=int, default=8, help="of each completion with others of its prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.5, 2.0], help="of what is compared")
    parser.add_argument("--seed", type=int, default=0, help="of every stage")
    given, rest = parser.parse_known_args(args)
    if given.samples * len(given.temperatures) < 2:
        raise UsageError(f"samples={given.samples} at one temperature leave nothing to compare; give at least 2")
    if given.comparisons < 1:
        raise UsageError(f"comparisons={given.comparisons} must be at least 1")
    if min(given.temperatures) < 0:
        raise UsageError(f"temperatures={given.temperatures} must be at least 0")
    return given, stage_options(rest, STAGES, "--ppo.model.beta=0.05")


def run(given: argparse.Namespace, options: dict[str, dict[str, str]]) -> None:
    """All stages, the table and the curves."""
    pipeline = Pipeline(given.folder)
    seed = {"seed_everything": str(given.seed)}
    sft = pipeline.fit("sft", given.sft, {**seed, **options["sft"]})
    done = [sft.parent]

    # The policy as it is now: what the config says of a new one does not apply.
    policy = {**seed, "model.model_name_or_path": str(sft), "model.model_config": "null", **options["preferences"]}
    pairs = pipeline.stage(
        "preferences",
        lambda folder: write_preferences(
            given.sft, policy, given.samples, given.temperatures, given.comparisons, folder
        ),
        ("train.jsonl", "test.jsonl"),
        {
            "config": config_text(given.sft),
            "arguments": policy,
            "samples": given.samples,
            "temperatures": given.temperatures,
            "comparisons": given.comparisons,
        },
        done,
    )
    done = [*done, pairs]

    judging = {
        **seed, "model.model_name_or_path": str(sft), "data.path": str(pairs / "train.jsonl"),
        "data.eval_path": str(pairs / "test.jsonl"), "data.chat_template": "false", **options["reward_model"],
    }  # fmt: skip
    judge = pipeline.fit("reward_model", given.reward_model, judging, done)
    done = [*done, judge.parent]

    models = {"model.reward_model_name_or_path": str(judge), "model.ref_model_name_or_path": str(sft)}
    start = {**seed, "model.model_name_or_path": str(sft), **models}
    ppo = pipeline.fit("ppo", given.ppo, {**start, **options["ppo"]}, done)

    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, config: str, arguments: dict[str, str], after: list[Path]) -> None:
        settings = {"config": config_text(config), "arguments": arguments}
        rows[name] = pipeline.evaluate(f"{name}_evaluation", lambda: evaluate(config, arguments), settings, after)

    data = {key: value for key, value in options["ppo"].items() if key.startswith("data.")}
    for name, model in (("sft", sft), ("ppo", ppo)):
        arguments = {**start, **data, "model.model_name_or_path": str(model), **options["evaluation"]}
        measure(name, given.ppo, arguments, [*done, model.parent] if model is ppo else done)
    measure("reward_model", given.reward_model, {**judging, "model.model_name_or_path": str(judge)}, done)
    table = {name: {COLUMNS[key]: value for key, value in rows[name].items() if key in COLUMNS}
             for name in ("sft", "reward_model", "ppo")}  # fmt: skip
    pipeline.table(table, list(COLUMNS.values()))
    pipeline.curves(["sft", "reward_model", "ppo"], CURVES)


def write_preferences(
    config: str,
    arguments: dict[str, str],
    samples: int,
    temperatures: Sequence[float],
    comparisons: int,
    folder: Path,
) -> None:
    """Pairs of the policy's own completions, compared by the task as people would, with noise.

    A judge that has seen good completions only is easily fooled: it does not know what is bad. Hence several
    temperatures, as Stiennon et al. compare samples of several policies. And each completion is compared with several
    others, as Ouyang et al. have all pairs of a prompt's completions: the texts cost more than the verdicts.

    Args:
        config: the ``rl`` config of the policy's training, which says which task.
        arguments: options beside it.
        samples: completions of each prompt at each temperature.
        temperatures: of the samples, which are paired at random, whatever theirs.
        comparisons: times that the completions of a prompt are paired anew.
        folder: for ``train.jsonl``, about the training prompts, and ``test.jsonl``, about the held-out ones.

    Raises:
        UsageError: the data is no task that can compare.
    """
    from rl_modules.common.seeding import stream_seed

    policy = load_policy(config, arguments)
    data = policy.data
    if not hasattr(data.task, "compare"):
        raise UsageError(f"{data.source} can't compare completions, which the preferences come from; task paths can")
    for split in ("train", "test"):
        # A prompt of messages is no key of a dictionary.
        records = list({json.dumps(record["prompt"]): record for record in data.task.records(split, None)}.values())
        texts: list[list[str]] = [[] for _ in records]
        for k, temperature in enumerate(temperatures):
            stream = f"comparisons/{split}/{k}"
            seeds = [stream_seed(data.seed, 0, stream, i) for i in range(len(records) * samples)]
            written, _, _ = policy.write(records, seeds, samples, temperature=temperature)
            for i, text in enumerate(written):
                texts[i // samples].append(text)
        rng = random.Random(stream_seed(data.seed, 0, f"comparisons/{split}"))
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for record, answers in zip(records, texts, strict=True):
                for _ in range(comparisons):
                    rng.shuffle(answers)
                    for first, second in zip(answers[::2], answers[1::2], strict=False):
                        if first != second:
                            pair = data.task.compare(record, first, second, rng)
                            file.write(json.dumps({**pair, **policy.as_read(record)}) + "\n")


if __name__ == "__main__":
    main()
