"""Records from files and datasets; what is wrong with one is said with its place."""

import gzip
import json
import logging
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from datamodules.language.files import open_stream
from datamodules.language.on_demand import load_records
from datamodules.language.sources import fitting
from rl_modules.common.errors import UsageError

GSM8K = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A dozen dozens?", "answer": "12 * 12 = 144\n#### 144"},
]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def jsonl(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


def test_a_jsonl_file_keeps_its_columns_and_order(tmp_path):
    path = jsonl(tmp_path, b'\xef\xbb\xbf{"prompt": "a", "answer": 4, "level": [1, 2]}', b"", {"prompt": "é\u2028b"})
    assert load_records(path=path) == [{"prompt": "a", "answer": "4", "level": [1, 2]}, {"prompt": "é\u2028b"}]


def test_chat_prompts_are_kept_as_messages(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "x"}]
    (record,) = load_records(path=jsonl(tmp_path, {"prompt": messages}))
    assert record["prompt"] == messages


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', r"data.jsonl:2: not valid JSON in UTF-8, .* in column 15"),
        (b'["prompt"]', "data.jsonl:2: a list, where an object"),
        (b'{"prompt": "a\xff"}', "data.jsonl:2: not valid JSON in UTF-8, .* byte 0xff in position 13"),
        (b'{"prompt": "\\ud800"}', r"data.jsonl:2: 'prompt': .*character '\\ud800' in position 0"),
        (b"[" * 100_000, "data.jsonl:2: not valid JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "data.jsonl:2: not valid JSON"),
        (
            b'{"promt": "a", "answer": "b"}',
            "data.jsonl:2: 'prompt' is missing, there is only promt, answer; did you mean promt",
        ),
        (b'{"prompt": null}', "data.jsonl:2: 'prompt' is null"),
        (
            b'{"conversations": [{"from": ["human"], "value": "a"}]}',
            "data.jsonl:2: 'conversations' has a message 0 from",
        ),
        (b'{"prompt": 3}', "data.jsonl:2: 'prompt' is int 3, where text or a list of messages"),
        (b'{"prompt": []}', r"'prompt' is list \[\]"),
        (b'{"prompt": [{"role": "user"}]}', "list of messages with role and content"),
        (b'{"prompt": "a", "answer": ["b"]}', r"'answer' is list \['b'\], where text should be"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_place(tmp_path, line, message):
    with pytest.raises(UsageError, match=message):
        load_records(path=jsonl(tmp_path, {"prompt": "fine"}, line))


@pytest.mark.parametrize("indent", [None, 2])
def test_the_rows_of_a_json_array_are_as_they_are_written(tmp_path, indent):
    # A table would make 4 of a column with 4.5 a 4.0, and of a date a time.
    rows = [{"prompt": "a", "level": 4, "day": "2024-05-01"}, {"prompt": "c", "level": 4.5, "more": {"x": None}}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, indent=indent))
    assert load_records(path=path) == load_records(dataset=str(path)) == rows
    assert [type(record["level"]) for record in load_records(path=path)] == [int, float]
    assert [row for _, row in open_stream(str(path), None, None, "train")(1)] == rows[1:]
    path.write_text(json.dumps(["a", "b"]))
    with pytest.raises(UsageError, match="rows.json:1: an array of other things than objects"):
        load_records(path=path)


def test_a_gzipped_file_has_the_records_and_lines_of_the_plain_one(tmp_path):
    plain = jsonl(tmp_path, *({"prompt": f"p{i}", "answer": str(i)} for i in range(50)))
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_records(path=packed) == load_records(path=plain) == load_records(dataset=str(packed))
    records = [[row for _, row in open_stream(str(path), None, None, "train")(40)] for path in (plain, packed)]
    records.append([row for _, row in open_stream(None, str(packed), None, "train")(40)])
    assert records[0] == records[1] == records[2] and len(records[0]) == 10
    packed.write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt"'))
    with pytest.raises(UsageError, match=r"data.jsonl.gz:2: not valid JSON"):
        load_records(path=packed)
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-30])
    with pytest.raises(UsageError, match=r"data.jsonl.gz' can't be read .*; give a whole JSONL"):
        load_records(path=packed)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.tsv", b"prompt\tanswer\n2+2\t4\n"),
        ("data.csv.gz", gzip.compress(b"prompt,answer\n2+2,4\n", mtime=0)),
        ("data.jsonl.zst", b"\x28\xb5\x2f\xfd"),
    ],
)
def test_files_of_other_kinds_are_refused_by_their_kind(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"{name}:1: not valid JSON.*; other files are read if they end in .csv, .par"):
        load_records(path=path)


def test_files_that_are_not_there_or_empty(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        load_records(path=tmp_path / "nothing.jsonl")
    with pytest.raises(UsageError, match="is empty"):
        load_records(path=jsonl(tmp_path, b"", b" "))
    with pytest.raises(UsageError, match="is no regular file; give one, or a directory as dataset"):
        load_records(path=tmp_path)


def test_columns_are_renamed_or_put_together(tmp_path):
    path = jsonl(tmp_path, {"title": "T", "post": "P", "label": "S"})
    columns = {"prompt": "TITLE: {title}\nPOST: {post}\nTL;DR:", "completion": "label"}
    (record,) = load_records(path=path, columns=columns, required=("prompt", "completion"))
    assert record == {"title": "T", "post": "P", "label": "S", "prompt": "TITLE: T\nPOST: P\nTL;DR:", "completion": "S"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompt": "titel"},
            "columns.prompt='titel': there is no column 'titel'; did you mean title.*only title, post",
        ),
        ({"prompt": "{titel}"}, r"columns.prompt='\{titel\}' names \{titel\}, but there is only title, post"),
        ({"prompt": "{post}"}, r"names \{post\}, which is null"),
        ({"prompt": "post"}, "'prompt' is null"),
    ],
)
def test_columns_that_are_missing(tmp_path, columns, message):
    with pytest.raises(UsageError, match=message):
        load_records(path=jsonl(tmp_path, {"title": "T", "post": None}), columns=columns)


def test_required_columns(tmp_path):
    path = jsonl(
        tmp_path, {"prompt": "p", "chosen": "c", "rejected": "r", "margin": 0.5}, {"prompt": "p", "chosen": "c"}
    )
    with pytest.raises(UsageError, match=r"data.jsonl:2: 'rejected' is missing, there is only prompt, chosen"):
        load_records(path=path, required=("prompt", "chosen", "rejected"))


@pytest.mark.parametrize("kind", ["dict", "single", "parquet", "csv", "jsonl", "folder"])
def test_gsm8k_from_every_kind_of_local_dataset(tmp_path, kind):
    table = Dataset.from_list(GSM8K)
    place, split = tmp_path / "gsm8k", "train"
    if kind == "dict":
        DatasetDict(train=table, test=table.select([0])).save_to_disk(place)
    elif kind == "single":
        table.save_to_disk(place)
        split = None
    elif kind == "folder":
        place.mkdir()
        table.to_parquet(place / "train.parquet")
    else:
        place = place.with_suffix(f".{kind}")
        {"parquet": table.to_parquet, "csv": table.to_csv, "jsonl": table.to_json}[kind](place)
    records = load_records(
        dataset=str(place), dataset_split=split, answer_after="####",
        columns={"prompt": "{question}\n", "completion": "answer", "answer": "answer"},
    )  # fmt: skip
    assert [r["prompt"] for r in records] == ["Two and two?\n", "A dozen dozens?\n"]
    assert [r["answer"] for r in records] == ["4", "144"]
    assert [r["completion"] for r in records] == [row["answer"] for row in GSM8K]


TOOL_CALL = [
    {"role": "user", "content": "weather in Oslo?"},
    {"role": "assistant", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "day": None}}}]},
    {"role": "tool", "name": "weather", "tool_call_id": "7", "content": "rain"},
]  # fmt: skip


def test_tool_calls_keep_their_keys(tmp_path):
    (record,) = load_records(path=jsonl(tmp_path, {"prompt": TOOL_CALL, "tools": [{"name": "weather"}]}))
    assert record["prompt"] == [TOOL_CALL[0], {**TOOL_CALL[1], "content": ""}, TOOL_CALL[2]]
    assert record["tools"] == [{"name": "weather"}]


def test_what_a_table_fills_in_between_messages_is_left_out(tmp_path):
    Dataset.from_list([{"prompt": TOOL_CALL}, {"prompt": TOOL_CALL[:1]}]).to_parquet(tmp_path / "chat.parquet")
    first, second = load_records(path=tmp_path / "chat.parquet")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert first["prompt"][1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert first["prompt"][2] == TOOL_CALL[2]
    assert second["prompt"] == TOOL_CALL[:1]


@pytest.mark.parametrize("name", ["train.parquet", "train.bin", "train.csv", "train.arrow"])
def test_a_path_may_be_a_table(tmp_path, name):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "été=", "answer": "x"}]
    place, table = tmp_path / name, Dataset.from_list(rows)
    if name.endswith(".csv"):
        table.to_csv(place)
    elif name.endswith(".arrow"):
        table.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(place)
    else:
        table.to_parquet(place)
    assert load_records(path=place) == rows
    with pytest.raises(UsageError, match=rf"{name}, row 0: 'completion' is missing"):
        load_records(path=place, required=("prompt", "completion"))


CSV = "prompt,answer,zip,day\n007,1.50,02134,2024-05-01\n1.0,12,00501,\nNA,,null,None\n"
CELLS = [{"prompt": "007", "answer": "1.50", "zip": "02134", "day": "2024-05-01"},
         {"prompt": "1.0", "answer": "12", "zip": "00501", "day": ""},
         {"prompt": "NA", "answer": "", "zip": "null", "day": "None"}]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["path", "file", "folder"])
def test_cells_of_a_csv_file_are_the_texts_that_it_holds(tmp_path, kind):
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "train.csv"
    file.write_text(CSV)
    source = {"path": {"path": file}, "file": {"dataset": str(file)}, "folder": {"dataset": str(file.parent)}}[kind]
    assert load_records(**source, texts=()) == CELLS
    rows = open_stream(str(file) if kind == "path" else None, source.get("dataset"), None, "train")
    assert [row for _, row in rows(0)] == CELLS and [row for _, row in rows(2)] == CELLS[2:]


def test_splits_and_parts_of_them(tmp_path):
    rows = [{"prompt": str(i)} for i in range(10)]
    DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1])).save_to_disk(tmp_path / "two")
    Dataset.from_list(rows).save_to_disk(tmp_path / "one")

    def prompts(name, split):
        return [int(r["prompt"]) for r in load_records(dataset=str(tmp_path / name), dataset_split=split)]

    assert prompts("two", "test") == [0]
    assert prompts("two", "train[:3]") == prompts("one", "train[:3]") == [0, 1, 2]
    assert prompts("one", "train[:80%]") + prompts("one", "train[80%:]") == list(range(10))
    assert prompts("one", "train[-2:]") == [8, 9]
    for name, split, message in (
        ("two", None, "Should be one of .'train', 'test'"),
        ("two", "validation", "Unknown split .validation.. Should be one of .'train', 'test'"),
        ("one", "test", "Unknown split .test.. Should be one of .'train'"),
        ("one", "train[1", r"dataset_split='train\[1': Unrecognized instruction.* write"),
        ("one", "train[20:]", "is empty"),
    ):
        with pytest.raises(UsageError, match=message):
            prompts(name, split)


def test_n_draws_with_the_seed_and_keeps_the_order(tmp_path):
    path = jsonl(tmp_path, *({"prompt": str(i)} for i in range(50)))
    drawn = [int(r["prompt"]) for r in load_records(path=path, n=20, seed=1)]
    assert drawn == sorted(set(drawn)) and len(drawn) == 20
    assert drawn == [int(r["prompt"]) for r in load_records(path=path, n=20, seed=1)]
    assert drawn != [int(r["prompt"]) for r in load_records(path=path, n=20, seed=2)]
    assert len(load_records(path=path, n=80)) == 50


def test_datasets_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="'openai/gsm8k' can't be read.*without network.*save_to_disk.*that directory"):
        load_records(dataset="openai/gsm8k", dataset_config="main", dataset_split="train")
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": ')
    (tmp_path / "data.txt").write_bytes(b"a")
    (tmp_path / "bad.csv").write_bytes(b"prompt\n\xff\n")
    (tmp_path / "wide.csv").write_text("prompt,completion\nSay yes, please,yes\n")
    for name, message in (
        ("data.jsonl", "data.jsonl:2: not valid JSON"),
        ("data.txt", "data.txt:1: not valid JSON"),
        ("bad.csv", "utf-8"),
        ("wide.csv", "wide.csv:2: 3 cells under the 2 names of the header, prompt, completion; cells with commas"),
    ):
        with pytest.raises(UsageError, match=message):
            load_records(dataset=str(tmp_path / name))


def test_text_in_a_table_that_is_not_utf8(tmp_path):
    column = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"prompt": column}), tmp_path / "data.parquet")
    with pytest.raises(UsageError, match=r"data.parquet', row 1: text that is not UTF-8"):
        load_records(dataset=str(tmp_path / "data.parquet"))


def test_an_answer_without_the_mark(tmp_path):
    with pytest.raises(UsageError, match="data.jsonl:1: 'answer' has no '####'"):
        load_records(path=jsonl(tmp_path, {"prompt": "a", "answer": "4"}), answer_after="####")


def test_tasks_as_a_source():
    records = load_records(task="addition", task_kwargs={"n_digits": 1}, split="test", n=3, seed=4)
    assert [set(r) for r in records] == [{"prompt", "answer", "completion"}] * 3
    assert {"chosen", "rejected"} <= set(load_records(task="paths", n=1, required=("prompt", "chosen", "rejected"))[0])
    with pytest.raises(UsageError, match="no 'solution'; it has prompt, answer, completion"):
        load_records(task="addition", n=1, required=("prompt", "solution"))
    for arguments in ({}, {"task": "addition", "path": "x"}):
        with pytest.raises(UsageError, match="exactly one of task, path and dataset"):
            load_records(**arguments)


def test_enormous_prompts_are_loaded_and_then_judged_by_their_tokens(tmp_path, caplog):
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b" * 100_000}, {"prompt": "c"})
    lengths = [len(r["prompt"]) for r in load_records(path=path)]
    assert lengths == [1, 100_000, 1]
    with pytest.raises(UsageError, match=r"here: 1 of 3 prompts .* than 512 tokens \(record 1 has 100000 tokens\)"):
        fitting(lengths, 512, "here")
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        assert fitting(lengths, 512, "here", "drop") == [0, 2]
        assert fitting([1, 2], 512, "here", "drop") == [0, 1]
    assert [m for m in caplog.messages if "left out" in m] == [
        "here: 1 of 3 prompts left out, they are longer than 512 tokens"
    ]
    with pytest.raises(UsageError, match="2 of 2"):
        fitting([600, 700], 512, "here", "drop")


def bomb(path):
    """A small file of 1,024 texts of 8 KiB, one of which is written."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), ["a" * 2**13])
    pq.write_table(pa.table({"prompt": texts}), path)


def test_what_is_no_file_of_records_is_refused_in_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (str(tmp_path / "pipe.jsonl"), "/dev/zero"):
        for source in ({"path": path}, {"dataset": path}):
            with pytest.raises(UsageError, match=f"{path}.* is no regular file|{path}.* can't be read"):
                load_records(**source)


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "lines.jsonl.gz", "bomb.parquet"])
def test_a_small_file_of_enormous_content_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr("datamodules.language.jsonl.MOST", 2**18)
    path = tmp_path / name
    if name == "bomb.parquet":
        bomb(path)
    else:
        content = b"\0" * 2**22 if name == "bomb.jsonl.gz" else b'{"prompt": "%s"}\n' % (b"a" * 2**12) * 2**10
        path.write_bytes(gzip.compress(content, 9))
    assert path.stat().st_size < 2**13
    for read in (lambda: load_records(path=path), lambda: list(open_stream(str(path), None, None, "train")(0))):
        with pytest.raises(UsageError, match=f"{name}(' unpacks to more than 500 times its size|:1: not valid JSON)"):
            read()


@pytest.mark.parametrize(
    "rows",
    [
        'a,"b\nc,d\n',  # to the end of the file
        'a,"b\nc,d\ne,"f"\n',  # to the quote of another row
        'a,b\n"c,d\n',
        'a,"b" c\n',
    ],
)
def test_a_csv_file_with_an_unclosed_quote_is_refused(tmp_path, rows):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\n" + rows)
    for read in (lambda: load_records(path=path), lambda: open_stream(str(path), None, None, "train")):
        with pytest.raises(UsageError, match=r"rows.csv:\d: .*; cells with commas or line breaks need quotes"):
            read()
    path.write_text('prompt,completion\n"a ""b"", c","d\ne"\n')
    assert load_records(path=path) == [{"prompt": 'a "b", c', "completion": "d\ne"}]
