"""An agent in turns: supervised fine-tuning on scripted dialogues, then GRPO in the environment.

python -m recipes.agent                          guess the number from 1 to 64, from scratch, offline
python -m recipes.agent --world arithmetic       products, with a calculator
python -m recipes.agent --world islands          questions, with a search
python -m recipes.agent --world maze             the maze of the tabular chapters, as text
python -m recipes.agent --world nim              a game of two players, both played by the model

Every stage is one ``rl fit`` with a config of its own; ``--grpo.model.beta=0.01`` changes an option of a stage's. A
stage that is done is skipped, one that was stopped resumes: run the same command again.
"""

import argparse
from pathlib import Path

from datamodules.language.worlds import WORLDS, OneCall, demonstrations
from recipes.cli.options import Parser
from recipes.pipeline import Pipeline, run_command, stage_options, write_jsonl, writing_options
from rl_modules.language.tokenizer import character_tokenizer

STAGES = ("sft", "grpo", "evaluation")
CURVES = (
    "train/reward",
    "eval/rewards/environment",
    "environment/turns",
    "train/completions/mean_length",
    "train/sampled_entropy",
    "train/loss",
)
#: Of each world: the first stage's config, and how many scripted dialogues it reads.
STARTS = {
    "maze": ("agent/sft_maze.yaml", 2000),
    "nim": ("agent/sft.yaml", 500),
    "guess": ("agent/sft_guess.yaml", 32000),
    "arithmetic": ("agent/sft_tools.yaml", 8000),
    "islands": ("agent/sft_tools.yaml", 8000),
}
#: A chat template for the character tokenizer, with calls in the format of Hermes and Qwen. What the model writes ends
#: with ``<eos>``; every other message is a line.
TEMPLATE = (
    "{%- for t in tools or [] %}{{ t.function.name }} {% endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}{{ eos_token }}{% endgeneration %}"
    "{%- else -%}{{ m.content }}\n{% endif -%}"
    "{%- endfor -%}"
)


def main(args: list[str] | None = None) -> None:
    """Runs the pipeline; prints a table of each stage's metrics."""
    run_command(run, parse, args)


def parse(args: list[str]) -> tuple[argparse.Namespace, dict[str, dict[str, str]]]:
    """Returns the pipeline's arguments, and each stage's options by dotted name."""
    parser = Parser("python -m recipes.agent", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", default="guess", choices=tuple(WORLDS), help="what the agent acts in")
    parser.add_argument("--folder", help="where everything goes; default: runs/agent/WORLD")
    parser.add_argument("--sft", help="config of the first stage; default: the world's")
    parser.add_argument("--grpo", help="config of the reinforcement learning; default: agent/WORLD.yaml")
    parser.add_argument("--dialogues", type=int, help="scripted dialogues of the first stage; default: the world's")
    parser.add_argument("--seed", type=int, default=0, help="of every stage")
    given, rest = parser.parse_known_args(args)
    config, dialogues = STARTS[given.world]
    given.sft, given.dialogues = given.sft or config, given.dialogues or dialogues
    given.folder = given.folder or f"runs/agent/{given.world}"
    given.grpo = given.grpo or f"agent/{given.world}.yaml"
    return given, stage_options(rest, STAGES, parser.names(), "--grpo.model.beta=0.01")


def run(given: argparse.Namespace, options: dict[str, dict[str, str]]) -> None:
    """All stages, the table and the curves."""
    seed = {"seed_everything": str(given.seed)}
    pipeline = Pipeline(given.folder)
    made = pipeline.stage(
        "records",
        lambda folder: write_records(given.world, given.dialogues, given.seed, folder),
        ("tokenizer", "dialogues.jsonl", "train.jsonl", "test.jsonl"),
        {"world": given.world, "dialogues": given.dialogues, "seed": given.seed},
    )
    sources = {"data.path": str(made / "train.jsonl"), "data.eval_path": str(made / "test.jsonl")}
    judge = {**seed, **sources, **writing_options(options["grpo"]), **options["evaluation"]}
    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, model: Path) -> None:
        arguments = {**judge, "model.model_name_or_path": str(model)}
        rows[name] = pipeline.measure(f"{name}_evaluation", given.grpo, arguments, [model.parent])

    model = pipeline.fit(
        "sft",
        given.sft,
        {
            **seed,
            "model.tokenizer_name_or_path": str(made / "tokenizer"),
            "data.path": str(made / "dialogues.jsonl"),
            **options["sft"],
        },
        [made],
    )
    measure("sft", model)
    start = {"model.model_name_or_path": str(model)}
    model = pipeline.fit("grpo", given.grpo, {**seed, **sources, **start, **options["grpo"]}, [made, model.parent])
    measure("grpo", model)
    names = [name for name in rows["grpo"] if name.startswith(("eval/rewards/", "eval/environment/"))]
    table = {stage: {name.removeprefix("eval/"): value for name, value in row.items()} for stage, row in rows.items()}
    pipeline.table(table, [name.removeprefix("eval/") for name in names])
    pipeline.curves(["sft", "grpo"], CURVES)


def write_records(world: str, dialogues: int, seed: int, folder: Path) -> None:
    """Writes a tokenizer with a chat template, scripted dialogues, and the questions of both splits."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    cls = WORLDS[world]
    player = cls() if issubclass(cls, OneCall) else cls(brief=True)
    rows = {
        "dialogues": demonstrations(player, cls.records("train", dialogues, seed), seed),
        "train": cls.records("train", 4096, seed + 1),
        "test": cls.records("test", 256, seed),
    }
    for name, records in rows.items():
        write_jsonl(folder / f"{name}.jsonl", records)


if __name__ == "__main__":
    main()
