"""Unpaired preferences: answers judged one by one, each with a label and a mismatched answer."""

from collections.abc import Sequence
from typing import Any, Protocol

from datamodules.language.csv_files import as_number
from datamodules.language.notices import notice
from datamodules.language.preference_forms import as_preference
from datamodules.language.records import NothingUsable, as_answer
from rl_modules.common.errors import UsageError

Record = dict[str, Any]


class EncodesAnswers(Protocol):
    """The interface of the datamodule that :func:`encode_judgements` uses."""

    overlong: str

    @property
    def source(self) -> str: ...

    def encode_answers(
        self, records: Sequence[Record], *names: str
    ) -> tuple[list[list[int]], list[list[list[int]]]]: ...

    def refuse_empty_prompt(self, ids: list[int], record: Record) -> None: ...


def as_judgement(row: Record, place: str) -> Record:
    """A row as ``prompt``, ``completion`` (as of :func:`as_answer`) and ``label`` (bool), or a pair in the form of
    :func:`as_preference`.

    Args:
        row: the columns of a file's or dataset's row.
        place: its file and line, or dataset and row, for messages.

    Raises:
        UsageError: neither form, a label that is not true or false, or a completion of several messages.
    """
    completion, label = row.get("completion"), as_number(row.get("label"))
    if label is None and row.get("chosen") is not None and row.get("rejected") is not None:
        # A table gives each row the columns of all others, so a judgement may have a pair's columns as null.
        pair = {name: value for name, value in row.items() if name not in ("completion", "label")}
        return as_preference(pair, place)
    if completion is None or label is None:
        raise UsageError(f"{place}: has {', '.join(map(repr, row)) or 'no columns'}, where completion and label, or "
                         "chosen and rejected should be; name the columns with `columns`")  # fmt: skip
    if label not in (0, 1):
        raise UsageError(f"{place}: label={label!r} must be true or false")
    return {**row, "completion": as_answer(completion, f"{place}: 'completion'"), "label": bool(label)}


def unpair(records: list[Record]) -> list[Record]:
    """Judgements of single answers: a pair becomes a good and a bad one."""
    single: list[Record] = []
    for record in records:
        if "label" in record:
            single.append(record)
            continue
        rest = {name: value for name, value in record.items() if name not in ("chosen", "rejected", "probability")}
        single += [{**rest, "completion": record["chosen"], "label": True},
                   {**rest, "completion": record["rejected"], "label": False}]  # fmt: skip
    return single


def encode_judgements(data: EncodesAnswers, records: list[Record], limit: int) -> list[Record]:
    """Adds token ids: the prompt's, the answer's as ``chosen_ids``, and another record's answer's as ``rejected_ids``.

    The mismatched answer estimates KL(π || π_ref), from which KTO counts gains and losses. It is that of the first
    record with another prompt, starting half the source away, because answers to one prompt are often adjacent. It is
    fixed, so that reference log-probabilities are computed once; one that does not fit after the prompt is cut.

    Args:
        data: turns texts into tokens.
        records: judgements or pairs.
        limit: tokens that a prompt and an answer may have together.

    Raises:
        UsageError: records that are too long, or fewer than two.
    """
    records = unpair(records)
    prompts, (completions,) = data.encode_answers(records, "completion")
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(records):
        if data.overlong == "error":
            first = next(i for i, length in enumerate(lengths) if length > limit)
            raise UsageError(f"{data.source}: answer {first} has {lengths[first]} tokens, {limit} are allowed; shorten "
                             "it, raise max_length where the model takes more, or set overlong=drop")  # fmt: skip
        notice(f"{data.source}: {len(records) - len(kept)} of {len(records)} answers left out, they are longer "
                       f"than {limit} tokens")  # fmt: skip
    if len(kept) < 2:
        raise NothingUsable(f"{data.source}: {len(kept)} of {len(records)} answers are left; KTO needs at least 2, to "
                            "match prompts with the answers to others")  # fmt: skip
    for i in kept:
        data.refuse_empty_prompt(prompts[i], records[i])
    partners = mismatched([prompts[i] for i in kept])
    return [
        {
            **records[i],
            "prompt_ids": prompts[i],
            "chosen_ids": completions[i],
            "rejected_ids": completions[kept[partner]][: limit - len(prompts[i])],
        }
        for i, partner in zip(kept, partners, strict=True)
    ]


def mismatched(prompts: list[list[int]]) -> list[int]:
    """Returns for each prompt the number of another one: the first that differs, starting half the list away.

    Where all prompts are equal, it is the one half the list away.

    Args:
        prompts: token ids, at least two prompts.
    """
    n, half = len(prompts), len(prompts) // 2
    if all(prompt == prompts[0] for prompt in prompts):
        return [(i + half) % n for i in range(n)]
    # One pass finds for each place the first later one with another prompt: thousands of equal prompts may be adjacent.
    other = [0] * n
    for place in range(2 * n - 1, -1, -1):  # the last ones are known after the first round
        here, after = place % n, (place + 1) % n
        other[here] = after if prompts[after] != prompts[here] else other[after]
    away = [(i + half) % n for i in range(n)]
    return [place if prompts[place] != prompts[i] else other[place] for i, place in enumerate(away)]
