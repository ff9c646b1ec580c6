"""Which rows are held out, and which columns reach reward functions as they are."""

import json

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict, load_dataset
from torch.nn.utils.rnn import pad_sequence

from datamodules import InstructionDataModule, PromptDataModule
from datamodules.language.on_demand import load_records
from datamodules.language.tasks.answers import voted_answer
from rl_modules import GRPO, SFT
from rl_modules.common.errors import UsageError
from rl_modules.language.sampling import Completions
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]
HELD_OUT = [{"prompt": "40+1=", "completion": "41", "answer": 41}]


def evaluated(**source):
    """The prompts that a run of one step evaluates on."""
    data = InstructionDataModule(**{"batch_size": 4, "eval_steps": 1, **source})
    fit(SFT(model_config=TINY, max_completion_length=2), data, max_steps=1)
    return [record["prompt"] for record in data.eval_records]


@pytest.fixture
def held_out(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    return str(path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dataset", "dict", "task", "stream"])
def test_a_file_of_held_out_records_counts_beside_every_source(kind, held_out):
    table = Dataset.from_list(ROWS)
    sources = {
        "dataset": {"dataset": table},
        "dict": {"dataset": DatasetDict(train=table, test=table)},
        "task": {"task": "addition", "n_train": 8},
        "stream": {"dataset": table.to_iterable_dataset(), "streaming": True},
    }
    assert evaluated(**sources[kind], eval_path=held_out) == ["40+1="]


def test_a_split_that_is_named_is_evaluated_without_an_interval():
    splits = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(HELD_OUT))
    data = InstructionDataModule(dataset=splits, eval_split="test", batch_size=4)
    assert data.can_evaluate and not InstructionDataModule(dataset=splits, batch_size=4).can_evaluate
    model = SFT(model_config=TINY, max_completion_length=2)
    trainer = fit(model, data, max_steps=1)
    assert data.eval_records == []  # none within training
    trainer.test(model, data, verbose=False)
    assert [record["prompt"] for record in data.eval_records] == ["40+1="]


def test_a_run_is_not_evaluated_on_its_training_rows_unless_it_is_asked_for():
    table = Dataset.from_list(ROWS)
    with pytest.raises(UsageError, match=r"eval_split='test' is no part of dataset.*dataset_split='train\[:90%\]'"):
        evaluated(dataset=table)
    assert evaluated(dataset=table, eval_split="train") == [row["prompt"] for row in ROWS]
    assert evaluated(dataset=table, dataset_split="train[:6]", eval_split="train[6:]") == ["6+1=", "7+1="]
    named = Dataset.from_list(ROWS, split="validation")
    assert len(evaluated(dataset=named, eval_split="validation[:1]")) == 1
    # Without a run all rows are the held-out ones.
    data = InstructionDataModule(dataset=table, batch_size=4)
    model = SFT(model_config=TINY, max_completion_length=2)
    fit(model, data, max_steps=1).validate(model, datamodule=data, verbose=False)
    assert len(data.eval_records) == len(ROWS)


def test_a_part_of_a_split_is_divided_by_the_splits_name(held_out, tmp_path):
    """``load_dataset(…, split="train[:8]")`` calls its rows so."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *ROWS]))
    table = load_dataset("json", data_files=str(path), split="train[:8]", cache_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"by dataset_split='train\[:90%\]' and eval_split='train\[90%:\]'"):
        evaluated(dataset=table)
    assert evaluated(dataset=table, dataset_split="train[:6]", eval_split="train[6:]") == ["6+1=", "7+1="]
    table.save_to_disk(tmp_path / "saved")
    assert len(load_records(dataset=str(tmp_path / "saved"), dataset_split="train[:6]")) == 6


@pytest.mark.long
def test_held_out_rows_of_a_stream_are_its_split():
    parts = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(HELD_OUT)}
    streams = IterableDatasetDict({name: part.to_iterable_dataset() for name, part in parts.items()})
    assert evaluated(dataset=streams, streaming=True) == ["40+1="]
    with pytest.raises(UsageError, match="an IterableDataset is read as it goes; set streaming=true"):
        evaluated(dataset=streams)
    for part in ("test[:1]", "validation"):
        with pytest.raises(UsageError, match=r"^split '.*' is no whole split of .*IterableDatasetDict of train"):
            evaluated(dataset=streams, streaming=True, eval_split=part)
    with pytest.raises(UsageError, match="a Dataset or stream whose rows are all trained on; give eval_path"):
        evaluated(dataset=streams["train"], streaming=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "a.jsonl", "dataset_split": "train[:50%]"}, r"dataset_split='train\[:50%\]' is read with a dataset, "
                                                              "and the records come from path='a.jsonl'"),
        ({"task": "addition", "eval_split": "validation"}, "eval_split='validation' is read with a dataset, .* task="),
        ({"path": "a.jsonl", "chat_template": "my.jinja"}, "chat_template='my.jinja' must be true or false"),
    ],
)  # fmt: skip
def test_arguments_that_would_have_no_effect(arguments, message):
    with pytest.raises(UsageError, match=message):
        InstructionDataModule(**arguments)


def rewarded(rows, func):
    """What a reward function is called with in one step, by column."""
    seen = {}

    def reward(completions, **columns):
        seen.update({name: list(values) for name, values in columns.items() if isinstance(values, list)})
        return func(completions, **columns)

    data = PromptDataModule(dataset=Dataset.from_list(rows), num_generations=2, batch_size=4, reward_funcs=reward)
    fit(GRPO(model_config=TINY, max_completion_length=2), data, max_steps=1)
    return seen


def test_reward_functions_get_columns_as_they_are():
    chat = [{"role": "user", "content": "a"}]
    rows = [
        {"prompt": "2+2=", "answer": 4, "chosen": chat, "meta": {"a": None, "b": 1}},
        {"prompt": "2+3=", "answer": 5, "chosen": chat, "meta": {"a": 2, "b": 1}},
    ]
    seen = rewarded(rows, lambda completions, **columns: [float(i) for i in range(len(completions))])
    assert sorted(set(seen["answer"])) == [4, 5]
    assert {len(chat) for chat in seen["chosen"]} == {1}
    assert {"a": None, "b": 1} in seen["meta"]


@pytest.mark.parametrize("name", ["exact_answer", "math_accuracy"])
def test_own_reward_functions_read_numbers_as_answers(name):
    from datamodules.language.rewards import load_reward_func

    reward = load_reward_func(name, None)
    assert reward(["?"] * 3, ["4", "5", "4"], answer=[4, 4, "4"]) == [1.0, 0.0, 1.0]
    with pytest.raises(UsageError, match="is a list, where text or a number"):
        reward(["?"], ["4"], answer=[["4"]])


def test_a_record_of_a_table_keeps_its_nulls_but_in_messages(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "a", "name": None}], "meta": {"x": None, "y": 1}}]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (record,) = load_records(path=tmp_path / "rows.parquet")
    assert record == {"prompt": [{"role": "user", "content": "a"}], "meta": {"x": None, "y": 1}}


@pytest.mark.parametrize(
    ("steps", "interval", "told"),
    [(0, 2, True), (0, {"minutes": 5}, True), (3, 2, True), (3, None, False), (0, 1.0, False)],
)
def test_an_interval_of_the_trainer_that_nothing_reads_is_named(steps, interval, told, held_out, caplog):
    data = InstructionDataModule(dataset=Dataset.from_list(ROWS), batch_size=4, eval_path=held_out, eval_steps=steps)
    model = SFT(model_config=TINY, max_completion_length=2)
    trainer = fit(model, data, max_steps=2, val_check_interval=interval)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, datamodule=data)
    assert ("val_check_interval" in caplog.text and f"eval_steps={steps} is the number" in caplog.text) == told


@pytest.mark.parametrize("other", [False, True])
def test_an_evaluation_on_the_training_file_is_named(other, tmp_path, caplog, monkeypatch):
    rows = "".join(json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) + "\n" for i in range(8))
    for name in ("rows.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(rows)
    monkeypatch.chdir(tmp_path)
    # The same file by another name.
    held_out = tmp_path / ("other.jsonl" if other else "rows.jsonl")
    data = InstructionDataModule(path="rows.jsonl", eval_path=str(held_out), batch_size=4, eval_steps=1)
    fit(SFT(model_config=TINY, max_completion_length=2), data, max_steps=1)
    assert ("is the file of path" in caplog.text) != other


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>2</think><answer> 4 </answer>", "4"),
        (r"so <answer>$\boxed{4}$</answer>", "4"),
        (r"not \boxed{3} but \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"cut off in \boxed{\frac{1}", r"cut off in \boxed{\frac{1}"),
        ("2+2=4\n#### 4\n", "4"),
        (" 4\n", "4"),
    ],
)
def test_a_completion_votes_by_its_answer(text, answer):
    assert voted_answer(text, after="####") == answer


def test_the_majority_is_that_of_answers_not_of_whole_texts(tmp_path, make_trainer):
    texts = ["a, so 5", "b, so <answer>4</answer>", "c, so <answer>4</answer>"]

    class Writes(SFT):
        """Gives the same three answers to every prompt."""

        def act(self, prompts, seeds, num_generations=1, on_ended=None, **sampling):
            rows = [torch.tensor(self.tokenizer(text).input_ids) for text in texts * len(prompts)]
            tokens = pad_sequence(rows, batch_first=True)
            length = torch.tensor([len(row) for row in rows])
            return Completions(tokens, torch.zeros(tokens.shape), length, torch.ones(len(rows), dtype=torch.bool))

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT).replace("41", "4"))
    data = InstructionDataModule(
        path=str(path), eval_path=str(path), reward_funcs="answer_in_tags", eval_num_generations=3, eval_temperature=1.0
    )
    (metrics,) = make_trainer().validate(Writes(model_config=TINY), data, verbose=False)
    assert metrics["eval/pass@1"] == pytest.approx(2 / 3) and metrics["eval/cons@3"] == 1
