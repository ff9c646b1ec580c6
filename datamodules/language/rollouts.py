"""Stored rollouts: the completions of each generation with their records and rewards, which can be scored again."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.language.files import JsonlRows
from datamodules.language.reward_arguments import columns_of
from datamodules.language.reward_calls import RewardFunctions
from datamodules.language.rewards import load_reward_func
from datamodules.language.tasks import make_task
from datamodules.language.tasks.answers import text_of
from rl_modules.common.errors import UsageError

_REWARD = "rewards/"


def store(folder: str | Path, generation: int, rank: int, rollout: dict[str, Any]) -> None:
    """Writes a generation of one rank as ``generation-000012-rank-0.jsonl``; a resumed run writes it again, equally."""
    columns = columns_of(rollout["records"])
    tokens, start, length = (rollout[name].tolist() for name in ("tokens", "prompt_length", "length"))
    rewards = rollout["rewards"].tolist()
    lines = []
    for i, (record, text) in enumerate(zip(rollout["records"], rollout["texts"], strict=True)):
        found = {
            f"{_REWARD}{name}": None if math.isnan(x) else x
            for name, x in zip(rollout["reward_names"], rewards[i], strict=True)
        }
        own = {name: values[i] for name, values in columns.items()}
        row = {
            "prompt": record["prompt"],
            "completion": text,
            **found,
            **own,
            "completion_ids": tokens[i][start[i] : start[i] + length[i]],
        }
        lines.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    path = Path(folder) / f"generation-{generation:06d}-rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def rescore(paths: Sequence[Path], reward_funcs: Sequence[Any], task: str | None, output: Path) -> str:
    """Scores completions of JSONL files or folders again, writes them to ``output``, and returns a table of means."""
    made = None if task is None else make_task(task)
    specs = list(reward_funcs) or ([] if made is None else made.reward_funcs)
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not files or not specs:
        raise UsageError(
            "rescore: give --reward_funcs, or a --task with functions of its own"
            if not specs
            else f"rescore: no *.jsonl file is in {', '.join(map(str, paths))}"
        )
    placed = [found for file in files for found in JsonlRows(file)]
    for place, row in placed:
        if "prompt" not in row or "completion" not in row:
            raise UsageError(f"{place}: a stored rollout has prompt and completion; this row has {', '.join(row)}")
    rows = [row for _, row in placed]
    ids: list[Any] = [row.get("completion_ids") for row in rows]
    functions = RewardFunctions([load_reward_func(spec, made) for spec in specs])
    given = [{key: value for key, value in row.items() if not key.startswith(_REWARD)} for row in rows]
    found = functions(given, [text_of(row["completion"]) for row in rows], None if None in ids else ids)
    functions.close()
    table = [f"{'reward function':<32}{'stored':>10}{'new':>10}{'changed':>10}"]
    for name, column in zip(functions.names, found.tolist() and found.T.tolist(), strict=True):
        key = f"{_REWARD}{name}"
        new = [None if math.isnan(x) else x for x in column]
        changed = sum(row[key] != x for row, x in zip(rows, new, strict=True) if key in row)
        means = [_mean([row.get(key) for row in rows]), _mean(new)]
        table.append(f"{name:<32}{means[0]:>10}{means[1]:>10}{changed if any(key in row for row in rows) else '':>10}")
        for row, x in zip(rows, new, strict=True):
            row[key] = x
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return "\n".join([*table, f"{len(rows):,} completions written to {output}"])


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{math.fsum(known) / len(known):.4f}" if known else ""
