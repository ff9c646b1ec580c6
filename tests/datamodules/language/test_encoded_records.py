"""Large sources, whose records are encoded when they are asked for: the same batches as if all were loaded."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from datamodules.language import loading
from datamodules.language.on_demand import EncodedRecords
from rl_modules import DPO, GRPO, SFT
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer
from tests.training import assert_equal_checkpoints, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
N = 1_500  # more than are encoded at the start
CLASSES = {"sft": InstructionDataModule, "dpo": PreferenceDataModule, "grpo": PromptDataModule}
#: Numbers of records that are too long, and of pairs with two equal answers.
OVERLONG, EQUAL = (3, 1_100, 1_450), (7, 1_200)


def row(i: int) -> dict[str, str]:
    prompt = f"{i}+1=" if i not in OVERLONG else f"{i}+{'1' * 70}="
    return {"prompt": prompt, "completion": str(i + 1), "answer": str(i + 1), "chosen": str(i + 1),
            "rejected": str(i + 1 if i in EQUAL else i)}  # fmt: skip


ROWS = [row(i) for i in range(N)]


def written(folder, form):
    path = folder / f"rows.{form}"
    lines = [json.dumps(row) + "\n" for row in ROWS]
    if form == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(lines).encode()))
    else:
        path.write_text("\n \n".join(lines) if form == "gaps.jsonl" else "".join(lines))
    return str(path)


def attached(data):
    module = SimpleNamespace(tokenizer=character_tokenizer(), max_length=64, can_pack=False)
    data.trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=1, global_rank=0, world_size=1,
                                   state=SimpleNamespace(fn="fit"), global_step=0)  # fmt: skip
    data.setup("fit")
    return data


def steps(kind, data):
    """What some optimizer steps of the first two passes read."""
    if kind == "grpo":
        return [data._asked(range(start, start + 8)) for start in (0, 700, 1_490, 1_600)]
    numbers = (0, 1, 90, 92, 93, 94, 130)
    found = [data._step(number) for number in numbers]
    return [[{name: value for name, value in part.items() if name != "index"} for part in step] for step in found]


@pytest.mark.parametrize("form", ["jsonl", "gaps.jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("kind", list(CLASSES))
def test_batches_are_those_of_loaded_records(kind, form, tmp_path, monkeypatch):
    source = {"path": written(tmp_path, form), "batch_size": 16, "overlong": "drop"}
    loaded = attached(CLASSES[kind](**source))
    monkeypatch.setattr(loading, "LOADED", 100)
    data = attached(CLASSES[kind](**source))
    assert isinstance(data.train_records, EncodedRecords)
    assert len(data.train_records) == N - len(OVERLONG) - (len(EQUAL) if kind == "dpo" else 0)
    found, expected = steps(kind, data), steps(kind, loaded)
    if kind == "grpo":
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert data.train_records[5:8] == loaded.train_records[5:8]
    some = {**source, "n_train": 400}
    chosen = attached(CLASSES[kind](**some)).train_records
    monkeypatch.setattr(loading, "LOADED", N)
    assert list(chosen) == attached(CLASSES[kind](**some)).train_records


@pytest.mark.parametrize(
    ("number", "broken", "sentence"),
    [
        (1_402, '{"prompt": "1+', r"rows\.jsonl:1403: not valid JSON"),
        (1_402, '{"prompt": "1+1="}', r"rows\.jsonl:1403: 'completion' is missing"),
        (1_402, json.dumps({**row(1), "prompt": "1" * 70}), r"rows\.jsonl:1403: .* longer than 6\d tokens"),
        (1_402, json.dumps({**row(1), "prompt": ""}), r"rows\.jsonl:1403: .*'prompt' is empty"),
    ],
)
def test_a_bad_row_is_found_at_the_start(number, broken, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LOADED", 100)
    lines = [json.dumps(row(0))] * N
    lines[number] = broken
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=sentence):
        attached(InstructionDataModule(path=str(path)))


def test_what_the_template_refuses_is_an_error_with_its_line_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LOADED", 100)
    path = tmp_path / "rows.jsonl"
    unweighed = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "weight": 3}]
    lines = [*(json.dumps(row(0)) for _ in range(1_400)), json.dumps({"messages": unweighed})]
    path.write_text("\n".join(lines))
    data = InstructionDataModule(path=str(path), max_length=2_000)
    module = SimpleNamespace(tokenizer=character_tokenizer(), max_length=2_000, can_pack=False)
    module.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data.trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=1, global_rank=0, world_size=1,
                                   state=SimpleNamespace(fn="fit"), global_step=0)  # fmt: skip
    data.setup("fit")
    assert data.train_records[1_399]["completion"] == row(0)["completion"]
    with pytest.raises(UsageError, match=r"rows\.jsonl:1401: .*weight=3"):
        data.train_records[1_400]


def test_a_file_that_changes_in_a_run_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LOADED", 100)
    path = written(tmp_path, "jsonl")
    data = attached(InstructionDataModule(path=path, overlong="drop"))
    with open(path, "a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match="was changed while it is read"):
        data.records([0])


def test_answers_that_only_the_tokenizer_makes_equal_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LOADED", 100)
    path = tmp_path / "rows.jsonl"
    alike = {"prompt": "1+1=", "chosen": "é", "rejected": "ü"}  # both are unknown characters
    path.write_text("".join(json.dumps(r) + "\n" for r in [*({**row(0)} for _ in range(1_400)), alike]))
    records = attached(PreferenceDataModule(path=str(path))).train_records
    assert len(records) == 1_401
    assert [r["chosen"] for r in records.take([1_400, 3])] == [row(0)["chosen"]] * 2
    assert records[1_400]["chosen"] == row(0)["chosen"]


@pytest.mark.long
@pytest.mark.parametrize("kind", list(CLASSES))
def test_a_resumed_run_continues_with_the_same_records(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LOADED", 100)
    path = written(tmp_path, "jsonl")

    def run(name, steps, ckpt_path=None):
        common = {"model_config": TINY, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
        settings = {"path": path, "overlong": "drop", "n_eval": 0, "batch_size": 4}
        if kind == "grpo":
            module = GRPO(max_completion_length=3, **common)
            settings |= {"num_generations": 2, "reward_funcs": "exact_answer"}
        else:
            module = {"sft": SFT, "dpo": DPO}[kind](**common)
        trainer = fit(module, CLASSES[kind](**settings), max_steps=steps, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / name)

    run("whole.ckpt", 4)
    run("half.ckpt", 2)
    run("resumed.ckpt", 4, tmp_path / "half.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
