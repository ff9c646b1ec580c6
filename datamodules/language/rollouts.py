"""Stored rollouts: the completions of each generation with their records and rewards, which can be scored again."""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from datamodules.language.jsonl import JsonlRows
from datamodules.language.reward_arguments import columns_of, parameters_of
from datamodules.language.reward_calls import RewardFunctions
from datamodules.language.rewards import load_reward_func
from datamodules.language.tasks import make_task
from datamodules.language.tasks.answers import text_of
from rl_modules.common.errors import UsageError

_REWARD = "rewards/"
#: Prefix of the columns with what the update used.
UPDATE = "update/"


def store(
    folder: str | Path,
    generation: int,
    rank: int,
    rollout: dict[str, Any],
    prepared: dict[str, Any],
    step: int,
    tokenizer: Any,
) -> None:
    """Writes a generation of one rank as ``generation-000012-rank-0.jsonl``; a resumed run writes it again, equally.

    Args:
        folder: of the run's rollouts.
        generation: its number, from 0.
        rank: that wrote it.
        rollout: the scored completions.
        prepared: what the update reads of them: log-probabilities and advantages.
        step: the optimizer step of the weights that the update begins with.
        tokenizer: of the completions, for the texts of their tokens.
    """

    @cache
    def text_of_token(token: int) -> str:
        return str(tokenizer.decode([token]))

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
            "completion_ids": (ids := tokens[i][start[i] : start[i] + length[i]]),
            **_of_update(rollout, prepared, i, length[i]),
            f"{UPDATE}step": step,
            f"{UPDATE}prompt_ids": tokens[i][: start[i]],
            f"{UPDATE}tokens": [text_of_token(token) for token in ids],
            **({} if rollout.get("token_rewards") is None else {"by_token": True}),
        }
        lines.append(json.dumps(row, ensure_ascii=False, default=_shown) + "\n")
    path = Path(folder) / f"generation-{generation:06d}-rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def _shown(value: Any) -> str:
    """What a file has in place of a value that is none of JSON's, such as an image."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def _of_update(rollout: dict[str, Any], prepared: dict[str, Any], row: int, length: int) -> dict[str, Any]:
    """What an update used of a completion: its reward, advantage, end and log-probabilities."""
    found: dict[str, Any] = {"finish_reason": "stop" if bool(rollout["finished"][row]) else "length"}
    columns = {"reward": rollout.get("reward"), "advantage": prepared.get("advantage")}
    names = {"log_prob": "log_probs", "sampling_log_prob": "sampling_log_probs", "ref_log_prob": "ref_log_probs"}
    columns |= {name: prepared.get(field) for field, name in names.items()}
    for name, values in columns.items():
        if values is not None:
            value = values[row] if values.ndim == 1 else values[row, :length]
            numbers = [None if math.isnan(x) else round(x, 6) for x in value.reshape(-1).tolist()]
            found[name] = numbers if values.ndim == 2 else numbers[0]
    return {f"{UPDATE}{name}": value for name, value in found.items()}


class StoredRewards:
    """The rewards of a run's stored completions, with which a generation that is computed again is not scored again.

    Args:
        folder: of :func:`store`, files of one rank.
    """

    def __init__(self, folder: str | Path) -> None:
        #: By prompt and tokens, in the order of the generations: each row's generation and rewards.
        self.rows: dict[tuple[str, tuple[int, ...]], list[tuple[int, dict[str, Any]]]] = {}
        for file in sorted(Path(folder).glob("generation-*-rank-0.jsonl")):
            for _, row in JsonlRows(file):
                if not row.get("by_token"):  # one number does not tell a list of them
                    key = _prompt_key(row["prompt"]), tuple(row["completion_ids"])
                    self.rows.setdefault(key, []).append((int(file.name.split("-")[1]), row))

    def instead_of(self, rewards: RewardFunctions, generation: Callable[[], int]) -> RewardFunctions:
        """Returns reward functions that are called for completions alone that are not stored.

        Args:
            rewards: the run's.
            generation: returns the number of the present generation; later ones may be written ahead.
        """
        funcs = [self._or_call(*each, generation) for each in zip(rewards.names, rewards.funcs, strict=True)]
        return RewardFunctions(funcs, rewards.time_limit_s, rewards.workers)

    def _or_call(self, name: str, func: Callable[..., Any], generation: Callable[[], int]) -> Callable[..., Any]:
        parameters = parameters_of(func)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        further = [n for n in ("prompts", "completion_ids") if not takes_any and n not in parameters]

        def stored(columns: dict[str, Any]) -> tuple[list[Any], list[int], dict[str, Any]]:
            """The values by sample, the samples that have none, and the columns of these."""
            now, values, others = generation(), [], []
            for i, (prompt, ids) in enumerate(zip(columns["prompts"], columns["completion_ids"], strict=True)):
                rows = [row for at, row in self.rows.get((_prompt_key(prompt), tuple(ids)), []) if at >= now]
                values.append(rows[0].get(f"{_REWARD}{name}") if rows else None)
                others += [] if rows else [i]
            given = {key: value for key, value in columns.items() if key not in further}
            part = {k: [v[i] for i in others] if isinstance(v, list) else v for k, v in given.items()}
            return values, others, part

        def call(**columns: Any) -> Any:
            values, others, part = stored(columns)
            for i, value in zip(others, func(**part) if others else [], strict=True):
                values[i] = value
            return values

        async def call_later(**columns: Any) -> Any:
            values, others, part = stored(columns)
            for i, value in zip(others, await func(**part) if others else [], strict=True):
                values[i] = value
            return values

        made: Any = call_later if inspect.iscoroutinefunction(func) else call
        own = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in further]
        kept = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
        made.__signature__ = inspect.Signature([*kept, *own, *[p for p in parameters.values() if p not in kept]])
        made.__name__ = name
        return made


def _prompt_key(prompt: Any) -> str:
    """A prompt, text or messages, as :func:`store` writes it."""
    return json.dumps(json.loads(json.dumps(prompt, default=str)), sort_keys=True)


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
    given = [{key: value for key, value in row.items() if not key.startswith((_REWARD, UPDATE))} for row in rows]
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
