"""Records from a task, a JSONL file or a dataset, with one set of checks."""

import gzip
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datamodules.language.csv_files import options_of_folder, options_of_texts
from datamodules.language.notices import notice
from datamodules.language.tasks import Task, make_task
from datamodules.language.tasks.base import Record, fill
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.seeding import stream_seed

#: Columns that must be text where they occur, unless the caller names others; numbers become text.
TEXTS = ("answer", "completion", "chosen", "rejected")
_SLICE = re.compile(r"([^\[\]]+?)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


def load_records(
    *,
    task: str | Task | None = None,
    task_kwargs: dict[str, Any] | None = None,
    path: str | Path | None = None,
    dataset: Any = None,
    dataset_config: str | None = None,
    dataset_split: str | None = None,
    columns: dict[str, str] | None = None,
    answer_after: str | None = None,
    split: str = "train",
    n: int | None = None,
    seed: int = 0,
    required: Sequence[str] = ("prompt",),
    reshape: Callable[[Record, str], Record] | None = None,
    texts: Sequence[str] = TEXTS,
) -> list[Record]:
    """Records from exactly one source.

    Args:
        task: a task, its name or its import path.
        task_kwargs: the task's settings.
        path: JSONL file, one object per line, which may be gzipped; or a parquet, arrow or csv file. The cells of a csv
            file are texts.
        dataset: hub name, or a directory or file (parquet, csv, json) that ``datasets`` reads; or one of its objects.
        dataset_config: the hub dataset's configuration.
        dataset_split: the dataset's split, ``train``, or a part of it, ``train[:90%]``; None: the only one.
        columns: record's column → the source's column, or a template such as ``"{question} ->"``; None: by the same
            names. Columns that are not mentioned keep their names.
        answer_after: keep of every answer what follows this text, such as GSM8K's ``####``.
        split: of a task, ``train`` or ``test``. Files and datasets are taken whole.
        n: of a task, so many records; of a file or dataset at most so many, drawn with ``seed``; None: all.
        seed: of what is drawn.
        required: columns that every record must have; ``chosen`` and ``rejected`` beside ``prompt`` make preferences
            (where they are made by a task, they are synthesised).
        reshape: brings a row of a file or dataset, whose place it is told, into the form of a record, before the
            columns are checked.
        texts: columns of a file or dataset that must be text where they occur; numbers become text. Others are kept as
            they are.

    Returns:
        Dicts with at least the required columns. ``prompt`` is text or a list of chat messages.

    Raises:
        UsageError: no source or several; a file, line, column or value that can't be used; an empty dataset.
    """
    given = [name for name, value in (("task", task), ("path", path), ("dataset", dataset)) if value is not None]
    if len(given) != 1:
        raise UsageError(f"give exactly one of task, path and dataset; got {' and '.join(given) or 'none'}")
    if task is not None:
        made = make_task(task, **({} if isinstance(task, Task) else {"seed": seed}), **(task_kwargs or {}))
        if "rejected" in required:
            return made.preferences(split, n)
        records = made.records(split, n)
        for name in required:
            if records and records[0].get(name) is None:
                raise UsageError(f"task {made.name!r} has no {name!r}; it has {', '.join(records[0])}")
        return records
    if path is not None:
        where, rows = str(path), read_path(path)
    else:
        assert dataset is not None
        where = f"dataset {dataset if isinstance(dataset, str) else describe_dataset(dataset)!r}"
        rows = read_dataset(dataset, dataset_config, dataset_split)
    if not rows:
        raise UsageError(f"{where} is empty; at least one record is needed")
    if n is not None and n < len(rows):
        chosen = random.Random(stream_seed(seed, 0, "records")).sample(range(len(rows)), n)
        rows = [rows[i] for i in sorted(chosen)]
    return [as_record(row, place, columns, answer_after, required, reshape, texts) for place, row in rows]


# -------------------------------------------------------------------- reading


def read_path(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """The rows of one file, each with its place: a table that ``datasets`` reads, or else JSONL.

    Raises:
        UsageError: see :func:`read_jsonl` and :func:`read_dataset`.
    """
    if Path(path).is_file() and is_table(Path(path)):
        return [(f"{path}, row {i}", row) for i, (_, row) in enumerate(read_dataset(str(path)))]
    return list(read_jsonl(path))


#: First bytes of a gzipped file.
GZIP = b"\x1f\x8b"


def is_table(path: Path) -> bool:
    """Whether a file is parquet (by its first bytes: names vary), arrow or csv."""
    if path.suffix in (".csv", ".arrow", ".parquet"):
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its ``file:line``. Empty lines are passed over; gzip is unpacked.

    Raises:
        UsageError: no such file, a file of another kind, a JSON array, or a line that is not UTF-8, not JSON or not an
            object.
    """
    is_first = True
    for number, raw in enumerate(_lines(path), 1):
        place = f"{path}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UsageError(f"{place}: byte 0x{raw[error.start]:02x} in column {error.start + 1} is not UTF-8; "
                             f"{_other_kind(path) or 'save the file as UTF-8'}") from error  # fmt: skip
        if not line:
            continue
        if is_first and (line == "[" or line.startswith(("[{", "[ {"))):
            raise UsageError(f"{place}: a JSON array, where a JSONL file has one object per line; give the file as "
                             "dataset, which reads arrays too")  # fmt: skip
        is_first = False
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            kind = _other_kind(path)
            raise UsageError(f"{place}: not valid JSON, {error.msg} in column {error.colno}"
                             f"{kind and f'; {kind}'}") from error  # fmt: skip
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place}: JSON that can't be read ({error})") from error
        if not isinstance(row, dict):
            raise UsageError(f'{place}: a {type(row).__name__}, where an object such as {{"prompt": "…"}} should be')
        yield place, row


def _refuse_constant(text: str) -> Any:
    """NaN and Infinity are Python's own, no JSON, and would become text or a reward that poisons the loss."""
    raise ValueError(f"{text}, which is no JSON and no value that a prompt, an answer or a completion can have")


def _other_kind(path: str | Path) -> str:
    """What to do with a file whose name says that it is no JSONL; nothing of another."""
    packed = ".gz" if str(path).endswith(".gz") else ""
    suffix = Path(str(path).removesuffix(".gz")).suffix
    if suffix in ("", ".json", ".jsonl", ".jsonlines", ".ndjson"):
        return ""
    return f"a file ending in {suffix + packed!r} is not read: give JSONL, which may be gzipped, csv, parquet or arrow"


def _lines(path: str | Path) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            is_gzip = file.read(2) == GZIP
            file.seek(0)
            yield from gzip.GzipFile(fileobj=file) if is_gzip else file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"path={str(path)!r} can't be unpacked ({error}); the file is damaged or was not copied to "
                         "its end") from error  # fmt: skip
    except OSError as error:
        raise UsageError(f"path={str(path)!r} can't be read ({error.strerror}); give a JSONL file, or first run the "
                         "stage that writes it (the config's header says how)") from error  # fmt: skip


def describe_dataset(dataset: Any) -> str:
    """A name for a dataset that was given as an object: its kind, rows and fingerprint, which reveals changes.

    Args:
        dataset: a ``datasets.Dataset`` or ``DatasetDict``, or their iterable kinds, which are streamed.

    Raises:
        UsageError: another object.
    """
    import datasets

    if isinstance(dataset, datasets.Dataset):
        return f"Dataset of {len(dataset)} rows, {dataset._fingerprint}"
    if isinstance(dataset, datasets.IterableDataset):
        return f"IterableDataset {dataset.info.dataset_name or ''}".strip()
    if isinstance(dataset, datasets.IterableDatasetDict):
        return f"IterableDatasetDict of {', '.join(dataset)}"
    if isinstance(dataset, datasets.DatasetDict):
        return f"DatasetDict of {', '.join(f'{name}: {describe_dataset(part)}' for name, part in dataset.items())}"
    raise UsageError(f"dataset is a {type(dataset).__name__}, where a hub name, a directory, a file, or a "
                     "datasets.Dataset or DatasetDict should be")  # fmt: skip


def read_dataset(name: Any, config: str | None = None, split: str | None = None) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a dataset, each with its place, read by ``datasets``; no code of the dataset is run.

    Args:
        name: hub name; a directory that ``save_to_disk`` wrote; a directory or file of parquet, csv or json; a
            ``datasets.Dataset``, which is taken whole where no such split is asked of it, or a ``DatasetDict``.
        config: the hub dataset's configuration.
        split: a split or a part of it, ``train[:90%]``; None: the only one. Of an ``IterableDatasetDict`` a whole
            split, which is read to its end.

    Raises:
        UsageError: it can't be loaded, has no such split, or holds text that is not UTF-8.
    """
    import datasets

    base, start, stop = parse_split(split)
    try:
        found = open_dataset(name, config) if isinstance(name, str) else name
    except Exception as error:  # `datasets` raises errors of many libraries
        raise UsageError(unreadable(name, error)) from error
    if isinstance(found, datasets.IterableDatasetDict):
        if base not in found or start is not None or stop is not None:
            raise UsageError(f"split {split!r} is no whole split of dataset, an {describe_dataset(found)}, whose "
                             "streams can't be divided; name one of them")  # fmt: skip
        return _listed(describe_dataset(found), found[base])
    refuse_stream(found)
    if not isinstance(name, str):
        name = describe_dataset(name)
        base = base if isinstance(found, datasets.DatasetDict) else None
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {split_name(found): found}
    if base is None and len(splits) > 1:
        raise UsageError(f"dataset {name!r} has several splits; set dataset_split to one of {', '.join(splits)}")
    if base is not None and base not in splits:
        raise UsageError(f"dataset {name!r} has no split {base!r}; it has {', '.join(splits)}, and a part of one is "
                         "written 'train[90%:]'")  # fmt: skip
    rows = splits[base] if base is not None else next(iter(splits.values()))
    part = range(len(rows))[_position(start, len(rows)) : _position(stop, len(rows))]
    return _listed(name, rows.select(part) if part else [])


def refuse_stream(dataset: Any) -> None:
    """Refuses a stream where all rows are to be loaded.

    Raises:
        UsageError: it may have no end.
    """
    import datasets

    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise UsageError("an IterableDataset is read as it goes; set streaming=true, or give a Dataset")


def _listed(name: str, rows: Any) -> list[tuple[str, dict[str, Any]]]:
    listed: list[tuple[str, dict[str, Any]]] = []
    try:
        for row in rows:
            listed.append((f"dataset {name!r}, row {len(listed)}", as_written(row)))
    except UnicodeDecodeError as error:
        raise UsageError(f"dataset {name!r}, row {len(listed)}: text that is not UTF-8 ({error.reason})") from error
    return listed


def as_written(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table as it was before: a table gives every message, tool and variable the keys of all others."""
    return {key: _without_nulls(value) if _is_of_the_template(key, value) else value for key, value in row.items()}


def _is_of_the_template(name: str, value: Any) -> bool:
    """Whether the chat template reads a column: messages, tools or variables."""
    if name in ("tools", "chat_template_kwargs"):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) and "role" in x for x in value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def open_dataset(name: str, config: str | None, streaming: bool = False) -> Any:
    """What ``datasets`` makes of a hub name, a directory of ``save_to_disk``, or a file.

    Args:
        name: of the dataset.
        config: the hub dataset's configuration.
        streaming: read rows as they are needed.
    """
    import datasets

    path = Path(name)
    if path.is_dir() and any((path / file).exists() for file in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(name)
    if path.is_file():
        kinds = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
        kind = kinds.get(path.suffix) or ("parquet" if is_table(path) else None)
        if kind is None and path.suffix == ".gz" and path.with_suffix("").suffix in (".json", ".jsonl"):
            kind = "json"
        if kind is None:
            raise ValueError(f"a file ending in {path.suffix!r}, not in one of {', '.join(kinds)}")
        options = options_of_texts(name) if kind == "csv" else {}
        return datasets.load_dataset(kind, data_files=name, streaming=streaming, **options)
    options = options_of_folder(name, config) if path.is_dir() else {}
    return datasets.load_dataset(name, config, streaming=streaming, **options)


def unreadable(name: str, error: Exception) -> str:
    """Why a dataset can't be read, in a sentence."""
    # The cause says more than "An error occurred while generating the dataset".
    cause = error if error.__cause__ is None or not str(error.__cause__).strip() else error.__cause__
    reason = " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__
    if Path(name).exists():
        return f"dataset {name!r} can't be read ({reason}); give what save_to_disk wrote, or parquet, csv or json files"
    return (f"dataset {name!r} can't be loaded ({reason}); without network download it elsewhere, keep it with "
            "save_to_disk, and give that directory instead of the hub name")  # fmt: skip


def parse_split(split: str | None) -> tuple[str | None, str | None, str | None]:
    """A split's name, and the beginning and end of the part of it, where one is named."""
    if split is None:
        return None, None, None
    match = _SLICE.fullmatch(split)
    if match is None:
        raise UsageError(f"dataset_split={split!r} is not understood; write 'train', 'train[:1000]' or 'train[90%:]'")
    return match[1], match[2], match[3]


def split_name(dataset: Any) -> str:
    """The name of a dataset's split; of one that was loaded as a part of it, ``train[:1000]``, without the brackets.

    Args:
        dataset: a ``datasets.Dataset``.
    """
    return str(dataset.split or "train").partition("[")[0]


def _position(text: str | None, length: int) -> int | None:
    if text is None:
        return None
    return round(length * int(text[:-1]) / 100) if text.endswith("%") else int(text)


# -------------------------------------------------------------------- one record


class PlacedRecord(dict[str, Any]):
    """A record that knows its file and line, for what is found only when it is tokenized; copies are plain dicts.

    Args:
        record: its columns.
        place: its file and line, or dataset and row.
    """

    def __init__(self, record: Record, place: str) -> None:
        super().__init__(record)
        self.place = place


def place_of(record: Record, source: str) -> str:
    """A record's file and line, or dataset and row; where it has none, the name of its source."""
    return record.place if isinstance(record, PlacedRecord) else source


def as_record(
    row: dict[str, Any],
    place: str,
    columns: dict[str, str] | None,
    answer_after: str | None,
    required: Sequence[str],
    reshape: Callable[[Record, str], Record] | None,
    texts: Sequence[str] = TEXTS,
) -> Record:
    """A row of a file or dataset as a record, checked; see :func:`load_records` for the arguments.

    Raises:
        UsageError: a column or value that can't be used; names the place.
    """
    record = dict(row)
    for target, source in (columns or {}).items():
        where = f"{place}: columns.{target}={source!r}"
        if source in row:
            record[target] = row[source]
        elif "{" in source:
            record[target] = fill(source, row, where)
        else:
            raise UsageError(
                f"{where}: there is no column {source!r}{did_you_mean(source, row)}, only {', '.join(row)}"
            )
    _refuse_other_formats(record, place)
    if reshape is not None:
        record = reshape(record, place)
    for name in dict.fromkeys(("prompt", *required)):
        if record.get(name) is None:
            raise UsageError(f"{place}: there is no {name!r}, only {', '.join(record)}{did_you_mean(name, record)}; "
                             f"columns maps one to it, as in {{{name}: {next(iter(record), 'column')}}}"
                             if name not in record else f"{place}: {name!r} is null")  # fmt: skip
    record["prompt"] = _prompt(record["prompt"], place)
    for name in (*texts, *(("answer",) if answer_after is not None else ())):
        if record.get(name) is not None:
            record[name] = _text(record[name], f"{place}: {name!r}")
    if answer_after is not None and record.get("answer") is not None:
        _, found, answer = record["answer"].rpartition(answer_after)
        if not found:
            raise UsageError(f"{place}: the answer has no {answer_after!r}, as answer_after wants it to")
        record["answer"] = answer.strip()
    return PlacedRecord(record, place)


def _refuse_other_formats(row: dict[str, Any], place: str) -> None:
    """Refuse by name the dataset formats that nothing here learns from."""
    if isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list):
        raise UsageError(f"{place}: 'completions' with 'labels' is stepwise supervision of a process reward model, "
                         "which nothing here learns from; give prompt, completion and label")  # fmt: skip
    messages = row.get("messages", row.get("conversations"))
    first = messages[0] if isinstance(messages, list) and messages else None
    if isinstance(first, dict) and "from" in first and "value" in first and "role" not in first:
        raise UsageError(f"{place}: messages have from and value, ShareGPT's format, where role (system, user, "
                         "assistant) and content should be; convert them, and give them as messages")  # fmt: skip
    for name in ("image", "images"):
        if row.get(name) is not None:
            raise UsageError(f"{place}: {name!r} belongs to a vision dataset, and every algorithm here reads text "
                             "alone; leave the column out")  # fmt: skip


def _prompt(value: Any, place: str) -> str | list[dict[str, Any]]:
    return _text(value, f"{place}: 'prompt'") if isinstance(value, str) else as_messages(value, f"{place}: 'prompt'")


def as_messages(value: Any, what: str) -> list[dict[str, Any]]:
    """Chat messages, checked: every one has a role, and text as content unless it calls tools.

    Other keys (``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content`` …) are kept for the chat template.

    Raises:
        UsageError: anything else.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UsageError(f"{what} is {_short(value)}, where text or a list of messages with role and content should be")
    messages = [{key: item for key, item in message.items() if item is not None} for message in value]
    for i, message in enumerate(messages):
        if isinstance(message.get("content"), list):
            raise UsageError(f"{what}: message {i} has a list of parts as its content, as vision datasets have it; "
                             "every algorithm here reads text alone")  # fmt: skip
        text = message.get("content", "" if message.get("tool_calls") else None)
        if not isinstance(message.get("role"), str) or not isinstance(text, str):
            raise UsageError(f"{what} is {_short(value)}, where text or a list of messages with role and content "
                             f"should be: message {i} lacks one")  # fmt: skip
        messages[i] = {**message, "content": _text(text, what)}
        _text(json.dumps(message, ensure_ascii=False, default=str), what)
    return messages


def _text(value: Any, what: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UsageError(f"{what} is {_short(value)}, where text should be")
    try:
        value.encode()  # JSON may hold half of a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} has {value[error.start]!a} in place {error.start}, half of a character; it can't be "
                         "written as UTF-8") from error  # fmt: skip
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"


# -------------------------------------------------------------------- lengths


def check_prompt_lengths(lengths: Sequence[int], limit: int, where: str, overlong: str = "error") -> list[int]:
    """Which records have a prompt that the model can take.

    Args:
        lengths: tokens of every prompt.
        limit: most tokens of a prompt.
        where: the records' source, for the message.
        overlong: ``error``, or ``drop`` with one printed count.

    Returns:
        Indices of the records to keep, in order.

    Raises:
        UsageError: a prompt is too long under ``error``; all are under ``drop``; another value of ``overlong``.
    """
    if overlong not in ("error", "drop"):
        raise UsageError(f"overlong={overlong!r} must be error or drop")
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    dropped = len(lengths) - len(kept)
    if dropped and (overlong == "error" or not kept):
        first = next(i for i, length in enumerate(lengths) if length > limit)
        raise UsageError(f"{where}: {dropped} of {len(lengths)} prompts are longer than {limit} tokens (record {first} "
                         f"has {lengths[first]}); shorten them or take a model with more positions"
                         + ("" if overlong == "drop" else ", or set overlong=drop"))  # fmt: skip
    if dropped:
        notice(f"{where}: {dropped} of {len(lengths)} records left out, their prompts are longer than {limit} tokens")
    return kept
