"""What reward functions, tables and curves get of dialogues with environments."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from datamodules.language.tasks.base import Record
from rl_modules.language.sampling import Completions


def opened(records: Sequence[Record], written: Completions, num_generations: int) -> list[Record]:
    """The records with the prompts that environments opened the dialogues with."""
    if written.dialogues is None:
        return list(records)
    first = written.dialogues[::num_generations]
    return [{**record, "prompt": dialogue["prompt"], "prompt_ids": dialogue["prompt_ids"]}
            for record, dialogue in zip(records, first, strict=True)]  # fmt: skip


def environment(
    prompts: Any, completions: Any, completion_ids: Any = None, *, environment_reward: Any, **_: Any
) -> Any:
    """The reward function of the environment: what each dialogue's turns earned."""
    return environment_reward


def with_rewards(records: Sequence[Record], written: Completions, by_token: bool) -> list[Record]:
    """A record per dialogue, with the column ``environment_reward``: the sum over its turns, or a number per token;
    None where the environment has failed.
    """
    assert written.dialogues is not None and written.turn_reward is not None
    rows, lengths = written.turn_reward.tolist(), written.length.tolist()
    earned: list[Any] = []
    for dialogue, row, length in zip(written.dialogues, rows, lengths, strict=True):
        failed = dialogue["ended"] == "failed"
        earned.append(None if failed else row[:length] if by_token else math.fsum(dialogue["rewards"]))
    return [{**record, "environment_reward": value} for record, value in zip(records, earned, strict=True)]


def fields_of(written: Completions) -> dict[str, Any]:
    """The fields that a rollout in turns has besides those of others."""
    names = ("written", "turn", "turn_reward", "dialogues")
    return {} if written.dialogues is None else {name: getattr(written, name) for name in names}


def dialogue_metrics(rollout: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Mean number of turns, shares of dialogues that failed, and that reached ``max_turns`` or the limit of tokens, and
    tokens of the environment per dialogue, each with the number of dialogues.
    """
    if "dialogues" not in rollout:
        return {}
    n = len(rollout["dialogues"])
    ends = [dialogue["ended"] for dialogue in rollout["dialogues"]]
    read = float(rollout["length"].sum() - rollout["written"].sum())
    values = {
        "turns": sum(sum(m["role"] == "assistant" for m in d["messages"]) for d in rollout["dialogues"]),
        "failed": ends.count("failed"),
        "truncated": ends.count("max_turns") + ends.count("length"),
        "tokens_read": read,
    }
    return {f"environment/{name}": (value / n, n) for name, value in values.items()}


def transcript(dialogue: Mapping[str, Any]) -> str:
    """A dialogue after its prompt as text, a line per message, for tables."""
    parts = [f"{m['role']}: {m.get('content') or ''}" for m in dialogue["messages"]]
    return "\n".join([*parts, f"[{dialogue['error'] or dialogue['ended']}]"])
