"""Streamed records: the same ones as loaded, in blocks, from every source, and resumed exactly."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from datamodules.language.files import open_stream
from datamodules.language.streaming import RecordStream
from rl_modules import DPO, GRPO, KTO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer
from tests.ranks import on_ranks
from tests.training import assert_equal_checkpoints, fit

ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)} for i in range(11)]
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


def counted(n, opened=None):
    """A source of n rows that notes where it was opened."""

    def rows(start):
        if opened is not None:
            opened.append(start)
        return iter([(f"row {i}", {"number": i}) for i in range(start, n)])

    return rows


def stream(n, size, seed=0, opened=None, left_out=()):
    def encode(read):
        return [row for _, row in read if row["number"] not in left_out]

    return RecordStream(counted(n, opened), encode, size, seed, "the source")


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "disk")
    return tmp_path


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 40))
def test_what_stands_at_a_position_does_not_depend_on_where_reading_began(n, size, position):
    whole = stream(n, size)
    expected = [whole[i]["number"] for i in range(position + 2 * size)]
    resumed = stream(n, size)
    assert [resumed[i]["number"] for i in range(position, position + 2 * size)] == expected[position:]


@given(st.integers(1, 9), st.integers(1, 5))
def test_every_row_comes_once_per_pass_and_each_block_holds_its_own(n, size):
    found = stream(n, size)
    numbers = [found[i]["number"] for i in range(n * size)]  # whole passes, in whole blocks
    assert sorted(numbers) == sorted(list(range(n)) * size)
    for start in range(0, n * size, size):
        assert sorted(numbers[start : start + size]) == sorted(i % n for i in range(start, start + size))


def test_two_threads_read_what_one_reads():
    reading = threading.Event()

    def rows(start):
        for i in range(start, 30):
            if i == 10:
                reading.set()
                time.sleep(0.1)
            yield f"row {i}", {"number": i}

    found = RecordStream(rows, lambda read: [row for _, row in read], 10, 0, "the source")
    alone = stream(30, 10)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: [found[i]["number"] for i in range(10, 20)])
        assert reading.wait(10)
        assert [found[i]["number"] for i in range(15, 20)] == [alone[i]["number"] for i in range(15, 20)]
        assert other.result() == [alone[i]["number"] for i in range(10, 20)]


def test_blocks_are_shuffled_by_the_seed_and_read_once():
    opened = []
    one, other = stream(100, 20, seed=0, opened=opened), stream(100, 20, seed=1)
    orders = [[found[i]["number"] for i in range(100)] for found in (one, other)]
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    assert opened == [0] and len(one._blocks) <= 2
    # Two neighbouring blocks stay, for a batch may lie across their border.
    assert [one[i]["number"] for i in (79, 80, 79)] == [orders[0][i] for i in (79, 80, 79)]


def test_a_resumed_reader_skips_what_it_does_not_need():
    opened = []
    found = stream(100, 10, opened=opened)
    assert found[57]["number"] in range(50, 60)
    assert opened == [50]


def test_records_that_are_left_out_are_replaced_by_others_of_their_block():
    found = stream(8, 4, left_out={0, 1, 2})
    assert [found[i]["number"] for i in range(4)] == [3, 3, 3, 3]


@given(st.integers(1, 9), st.integers(1, 4), st.sets(st.integers(0, 8)), st.integers(0, 40))
def test_a_block_without_a_record_is_replaced_by_the_next_that_has_one(n, size, left_out, position):
    rows = [i % n for i in range(200)]
    blocks = [[row for row in rows[i : i + size] if row not in left_out] for i in range(0, 200 - size, size)]
    if set(range(n)) <= left_out:
        with pytest.raises(UsageError, match=f"the source: none of its {n} records can be used"):
            stream(n, size, left_out=left_out)[position]
        return
    expected = next(block for block in blocks[position // size :] if block)
    whole, resumed = (stream(n, size, left_out=left_out) for _ in range(2))
    found = [whole[i]["number"] for i in range(position + 2 * size)]
    assert found[position] in expected
    assert [resumed[i]["number"] for i in range(position, position + 2 * size)] == found[position:]


def test_an_endless_source_without_a_usable_record_says_so_again(monkeypatch):
    class Stopped(Exception):
        pass

    def rows(start):
        for number in count(start):
            if number == 2500:
                raise Stopped
            yield f"row {number}", {"number": number}

    told: list = []
    monkeypatch.setattr("datamodules.language.streaming.notice", told.append)
    with pytest.raises(Stopped):
        RecordStream(rows, lambda read: [], 2, 0, "the source")[0]
    assert [text.split(",")[0] for text in told] == [
        "the source: block 0", "the source: 10 blocks", "the source: 100 blocks", "the source: 1000 blocks",
    ]  # fmt: skip


def test_a_source_is_read_once_where_blocks_are_passed_over():
    opened = []
    found = stream(12, 1, opened=opened, left_out={4, 5, 6})
    assert [found[i]["number"] for i in range(12)] == [0, 1, 2, 3, 7, 7, 7, 7, 8, 9, 10, 11]
    assert opened == [0]


LONG = "1" * 80
UNUSABLE = {
    "sft": (SFT, InstructionDataModule, {"prompt": "4+1=", "completion": LONG}, "1 of 1 records are longer than 64"),
    "grpo": (GRPO, PromptDataModule, {"prompt": LONG}, "1 of 1 prompts are longer than 63"),
    "dpo": (DPO, PreferenceDataModule, {"prompt": "4+1=", "chosen": "5", "rejected": LONG}, "1 of 1 pairs are longer"),
    "dpo equal": (DPO, PreferenceDataModule, {"prompt": "4+1=", "chosen": "5", "rejected": "5"}, "chosen equal"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_run_in_the_sources_order_passes_over_what_is_dropped(kind, tmp_path, caplog):
    algorithm, datamodule, unusable, reason = UNUSABLE[kind]
    rows = [{**row, "chosen": row["completion"], "rejected": "no"} for row in ROWS[:6]]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:4], unusable, *rows[5:]]))
    extra = {"num_generations": 2, "reward_funcs": [f"{__name__}:longer"]} if kind == "grpo" else {}

    def run(name, ckpt_path=None, callbacks=None):
        data = datamodule(path=str(path), streaming=True, streaming_buffer=1, overlong="drop", batch_size=2, n_eval=0,
                          **extra)  # fmt: skip
        config = {**TINY, "max_position_embeddings": 64}
        module = algorithm(model_config=config, max_completion_length=3, lr_scheduler_type="constant")
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        fit(module, data, max_steps=6, ckpt_path=ckpt_path, **checkpoints).save_checkpoint(tmp_path / name)

    run("whole.ckpt", callbacks=[ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)])
    assert "rows.jsonl: block 4, of streaming_buffer=1 records each, passed over" in caplog.text
    assert reason in caplog.text
    assert caplog.text.count("passed over") == 1
    run("resumed.ckpt", tmp_path / "step=2.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def test_a_match_of_kto_needs_another_record_in_the_block(tmp_path):
    data = PreferenceDataModule(path=written_pairs(tmp_path), streaming=True, streaming_buffer=1, n_eval=0)
    with pytest.raises(UsageError, match="streaming_buffer=1 leaves KTO no other record"):
        fit(KTO(model_config=TINY), data, max_steps=1)


@pytest.mark.parametrize("kind", ["disk", "object"])
def test_a_saved_dataset_can_be_opened_at_its_end(files, kind):
    source = str(files / "disk") if kind == "disk" else Dataset.from_list(ROWS)
    rows = open_stream(None, source, None, "train")
    assert [[row["prompt"] for _, row in rows(start)] for start in (10, 11, 12)] == [["10+1="], [], []]


def test_an_empty_source_is_refused():
    with pytest.raises(UsageError, match="the source is empty"):
        stream(0, 4)[0]


def attached(data, **module_attributes):
    module = SimpleNamespace(tokenizer=character_tokenizer(), max_length=64, can_pack=False, **module_attributes)
    data.trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=1, global_rank=0, world_size=1,
                                   state=SimpleNamespace(fn="fit"), global_step=0)  # fmt: skip
    data.setup("fit")
    return data


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "disk", "object", "iterable"])
def test_every_source_streams_the_records_that_it_loads(files, kind):
    source = {
        "jsonl": {"path": str(files / "rows.jsonl")}, "parquet": {"path": str(files / "rows.parquet")},
        "disk": {"dataset": str(files / "disk")}, "object": {"dataset": Dataset.from_list(ROWS)},
        "iterable": {"dataset": Dataset.from_list(ROWS).to_iterable_dataset()},
    }[kind]  # fmt: skip
    data = attached(InstructionDataModule(streaming=True, streaming_buffer=4, **source))
    loaded = attached(InstructionDataModule(path=str(files / "rows.jsonl"))).train_records
    assert not data.train_records
    streamed = data.records(range(44))  # four passes
    for number in range(11):
        (record,) = {json.dumps(r, sort_keys=True) for r in streamed if r["prompt"] == ROWS[number]["prompt"]}
        assert json.loads(record) == loaded[number]


@pytest.mark.parametrize("kind", ["sft", "grpo", "sft disk"])
def test_a_resumed_run_reads_on_where_it_stood(files, tmp_path, kind):
    def run(name, ckpt_path=None, callbacks=None):
        source = {"dataset": str(files / "disk")} if "disk" in kind else {"path": str(files / "rows.jsonl")}
        settings = {**source, "streaming": True, "streaming_buffer": 4, "n_eval": 0}
        common = {"model_config": TINY, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
        if kind.startswith("sft"):
            module, data = SFT(**common), InstructionDataModule(batch_size=3, **settings)
        else:
            module = GRPO(max_completion_length=3, **common)
            data = PromptDataModule(batch_size=6, num_generations=2, reward_funcs=[f"{__name__}:longer"], **settings)
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        fit(module, data, max_steps=9, ckpt_path=ckpt_path, **checkpoints).save_checkpoint(tmp_path / name)
        return data

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run("whole.ckpt", callbacks=[every_step])
    resumed = run("resumed.ckpt", tmp_path / "step=7.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
    assert whole.stream._blocks.keys() >= resumed.stream._blocks.keys()


PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(2 * i + 3), "margin": i / 4} for i in range(11)]


def written_pairs(folder):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return str(path)


def answers(batch):
    """Each text of a batch of pairs, padding left out, with its pair's margin."""
    rows, width = batch["tokens"].shape
    ends = (batch["last"] - torch.arange(rows) * width).tolist()
    texts = [tuple(row[: end + 1]) for row, end in zip(batch["tokens"].tolist(), ends, strict=True)]
    return list(zip(texts, batch["margin"].repeat(2).tolist(), strict=True))


def test_streamed_pairs_are_those_that_are_loaded(tmp_path):
    path = written_pairs(tmp_path)
    data = attached(PreferenceDataModule(path=path, streaming=True, streaming_buffer=4, batch_size=3, packing=False))
    loaded = attached(PreferenceDataModule(path=path, batch_size=11, packing=False))
    [expected] = loaded._step(0)
    rows = dict(answers(expected))
    assert len(rows) == 22
    assert not len(data.train_pairs)
    seen = set()
    for number in range(15):  # about four passes
        [batch] = data._step(number)
        assert "index" not in batch
        assert batch["step_pairs"] == 3
        assert all(rows[text] == margin for text, margin in answers(batch))
        seen |= {text for text, _ in answers(batch)}
    assert seen == rows.keys()
    # A reward model's zero comes from answers of the first block.
    chosen = {tuple(record["prompt_ids"] + record["chosen_ids"]) for record in loaded.train_records[:4]}
    assert {tuple(row.tolist()) for row in data.demonstration_ids} == chosen


def judged(pair, name):
    return {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}


@pytest.mark.parametrize("form", ["pairs", "judgements", "both"])
def test_a_pass_over_streamed_judgements_has_each_of_them_once(form, tmp_path):
    single = [judged(pair, name) for pair in PAIRS for name in ("chosen", "rejected")]
    rows = {"pairs": PAIRS, "judgements": single, "both": PAIRS[:6] + single[12:]}[form]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # As many rows as fill blocks of half the source.
    size = len(rows) // 2 + len(rows) % 2
    settings = {"path": str(path), "streaming": True, "streaming_buffer": size, "batch_size": 2, "packing": False}
    data = attached(PreferenceDataModule(**settings), unpaired=True, scores_demonstrations=False)
    per_row = 1 if form == "judgements" else 2
    read = data.records(range(2 * size * per_row))
    found = [(record["prompt"], record["completion"], record["label"]) for record in read]
    expected = {tuple(one.values()) for one in single}
    assert set(found) == expected
    if form != "both":  # where a row is a judgement, others of its block take the second place
        rest = 2 * size - len(rows)  # rows of the next pass in the last block
        assert len(found) - len(expected) == rest * per_row
    assert len(data.stream) == len(rows) * per_row


@pytest.mark.parametrize("algorithm", [DPO, KTO, RewardModel])
def test_a_resumed_run_of_streamed_preferences_is_the_uninterrupted_one(algorithm, tmp_path):
    def run(name, ckpt_path=None, callbacks=None):
        module = algorithm(model_config=TINY, learning_rate=1e-2, lr_scheduler_type="constant")
        data = PreferenceDataModule(path=written_pairs(tmp_path), streaming=True, streaming_buffer=4, batch_size=3,
                                    n_eval=0)  # fmt: skip
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        fit(module, data, max_steps=9, ckpt_path=ckpt_path, **checkpoints).save_checkpoint(tmp_path / name)
        return module

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = run("whole.ckpt", callbacks=[every_step])
    run("resumed.ckpt", tmp_path / "step=7.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
    assert not len(getattr(module, "_tables", {}).get("train", ()))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def streamed_on(ranks, algorithm, path, **settings):
    """Weights after four steps of four pairs (KTO: eight judgements)."""
    module = algorithm(model_config=TINY, optimizer=sgd, lr_scheduler_type="constant", max_grad_norm=None)
    data = PreferenceDataModule(path=path, streaming=True, streaming_buffer=8, batch_size=4 // ranks, n_eval=0,
                                packing=False)  # fmt: skip
    fit(module, data, max_steps=4, devices=ranks, strategy="ddp" if ranks > 1 else "auto", **settings)
    return {name: x.float() for name, x in module.model.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [DPO, KTO, RewardModel])
def test_two_ranks_learn_from_streamed_preferences_what_one_learns(algorithm, tmp_path):
    path = written_pairs(tmp_path)
    one = streamed_on(1, algorithm, path)
    two, other = on_ranks(lambda: streamed_on(2, algorithm, path), tmp_path / "ranks")
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], atol=1e-5, rtol=1e-4)
        assert torch.equal(two[name], other[name])
    start = algorithm(model_config=TINY)
    start.configure_model()
    assert any((one[name] - x).abs().max() > 1e-3 for name, x in start.model.state_dict().items())


@pytest.mark.parametrize("algorithm", [DPO, KTO, RewardModel])
def test_streamed_preferences_in_bf16_mixed_are_near_those_in_float32(algorithm, tmp_path):
    path = written_pairs(tmp_path)
    exact, rounded = streamed_on(1, algorithm, path), streamed_on(1, algorithm, path, precision="bf16-mixed")
    start = algorithm(model_config=TINY)
    start.configure_model()
    # As vectors: the error of a single weight depends on how a processor sums in 16 bits.
    way, error = (torch.cat([(a - b[name]).flatten() for name, a in exact.items()])
                  for b in (start.model.state_dict(), rounded))  # fmt: skip
    assert 0 < error.norm() < 0.1 * way.norm()


def test_an_empty_streamed_prompt_is_refused_to_a_policy(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "", "chosen": "1", "rejected": "2"}\n' * 4)
    data = PreferenceDataModule(path=str(path), streaming=True, batch_size=2, n_eval=0)
    with pytest.raises(UsageError, match=r"pairs.jsonl:1: 'prompt' is empty"):
        fit(DPO(model_config=TINY), data, max_steps=1)


def longer(prompts, completions, completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"task": "addition", "streaming": True}, r"streaming=True is read with a path or dataset, .*task='addition'"),
    ({"path": "x.jsonl", "streaming": True, "n_train": 5}, r"n_train=5 can't go with it"),
    ({"path": "x.jsonl", "streaming": True, "streaming_buffer": 0}, r"streaming_buffer=0 must be at least 1"),
])  # fmt: skip
def test_arguments_that_cannot_be_used(arguments, message):
    with pytest.raises(UsageError, match=message):
        InstructionDataModule(**arguments)


def test_what_cannot_be_streamed_is_refused(files):
    with pytest.raises(UsageError, match=r"dataset_split='train\[:50%\]' names a part of a split"):
        attached(InstructionDataModule(dataset=str(files / "disk"), dataset_split="train[:50%]", streaming=True))
    with pytest.raises(UsageError, match="group_by_length=true sorts all records"):
        attached(InstructionDataModule(path=str(files / "rows.jsonl"), streaming=True, group_by_length=True))
    with pytest.raises(UsageError, match=r"an IterableDataset is read as it goes; set streaming=true"):
        attached(InstructionDataModule(dataset=IterableDataset.from_generator(lambda: iter(ROWS))))
    with pytest.raises(UsageError, match=r"ptx_batch_size=2 needs a ptx_path"):
        attached(PromptDataModule(path=str(files / "rows.jsonl"), streaming=True, ptx_batch_size=2, batch_size=8,
                                  reward_funcs=[f"{__name__}:longer"]))  # fmt: skip
