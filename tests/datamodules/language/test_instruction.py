"""What a step of demonstrations consists of, whatever rows, micro-batches and ranks it is cut into."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import Qwen2Config, Qwen2ForCausalLM

from datamodules import InstructionDataModule
from datamodules.language.sequences import Sequences, pack
from rl_modules import SFT
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
TOKENIZER = character_tokenizer()
PAD = TOKENIZER.pad_token_id


def attached(data, stage="fit", rank=0, ranks=1, micro=1, max_length=64, tokenizer=TOKENIZER):
    """A datamodule after ``setup``, with as much of a trainer as it asks."""
    policy = SimpleNamespace(tokenizer=tokenizer, max_length=max_length, can_pack=True)
    data.trainer = SimpleNamespace(
        lightning_module=policy, accumulate_grad_batches=micro, global_rank=rank, world_size=ranks,
        state=SimpleNamespace(fn=stage), strategy=SimpleNamespace(root_device="cpu")
    )  # fmt: skip
    data.setup(stage)
    return data


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def texts(batch):
    """Every sequence of a batch with the part that counts in brackets, sorted."""
    flat = batch["tokens"].flatten().tolist()
    positions = batch.get("position_ids", torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"]))
    counted, found = set(batch["counted"].tolist()), []
    for place, (token, position) in enumerate(zip(flat, positions.flatten().tolist(), strict=True)):
        if position == 0:
            found.append("")
        if token != PAD:
            word = TOKENIZER.decode([token])
            found[-1] += f"[{word}]" if place in counted else word
    return sorted(text for text in found if text)


def sequences_in(batches):
    return sorted(text for batch in batches for text in texts(batch))


# -------------------------------------------------------------------- sequences


def test_batch_of_sequences_by_hand():
    sequences = Sequences([[3, 4], [5]], [[6, 1], [7, 8, 9, 1]], completion_only=True)
    batch = sequences.batch(torch.tensor([0, 1]), PAD)
    assert batch["tokens"].tolist() == [[3, 4, 6, 1, PAD], [5, 7, 8, 9, 1]]
    assert batch["counted"].tolist() == [2, 3, 6, 7, 8, 9]
    whole = Sequences([[3, 4], [5]], [[6, 1], [7, 8, 9, 1]], completion_only=False)
    assert whole.batch(torch.tensor([0, 1]), PAD)["counted"].tolist() == [1, 2, 3, 6, 7, 8, 9]
    assert whole.counted.tolist() == [3, 4]


def test_packed_batch_by_hand():
    sequences = Sequences([[3], [4], [5], [6]], [[11] * 4, [12] * 2, [13], [14] * 2], completion_only=True)
    batch = sequences.batch(torch.tensor([0, 1, 2, 3]), PAD, packing=True)
    # Lengths 5, 3, 2, 3 in rows of 5: the 2 goes beside the first 3, where it leaves nothing over.
    assert batch["tokens"].tolist() == [[3, 11, 11, 11, 11], [4, 12, 12, 5, 13], [6, 14, 14, PAD, PAD]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]
    assert batch["counted"].tolist() == [1, 2, 3, 4, 6, 7, 9, 11, 12]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_packing_overlaps_nothing_and_wastes_little(lengths):
    width = max(lengths)
    row, column = pack(lengths, width)
    used = {(int(r), int(c) + i) for r, c, n in zip(row, column, lengths, strict=True) for i in range(n)}
    assert len(used) == sum(lengths)
    assert all(c < width for _, c in used)
    rows = int(row.max()) + 1
    assert {r for r, _ in used} == set(range(rows))
    # No two rows would fit into one: the shorter of them would have been put there.
    filled = sorted(sum(n for r, n in zip(row.tolist(), lengths, strict=True) if r == k) for k in range(rows))
    assert rows == 1 or filled[0] + filled[1] > width


# -------------------------------------------------------------------- steps


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_the_same_however_it_is_cut(packing):
    arguments = {"batch_size": 12, "packing": packing, "n_train": 200}
    whole = attached(InstructionDataModule("addition", **arguments))
    parts = attached(InstructionDataModule("addition", **arguments), micro=3)
    halves = [attached(InstructionDataModule("addition", **{**arguments, "batch_size": 6}), rank=r, ranks=2, micro=2)
              for r in range(2)]  # fmt: skip
    for number in (0, 1, 17, 40):
        one = whole._step(number)
        expected = sequences_in(one)
        assert len(expected) == 12
        assert sequences_in(parts._step(number)) == expected
        assert sequences_in(halves[0]._step(number) + halves[1]._step(number)) == expected
        counted = one[0]["counted"].numel()
        assert one[0]["step_tokens"] == counted
        assert {batch["step_tokens"] for batch in parts._step(number)} == {counted}
        assert {batch["step_tokens"] for half in halves for batch in half._step(number)} == {counted / 2}
        # All ranks together, told once.
        assert sum(batch["num_tokens"] for batch in halves[0]._step(number)) == one[0]["num_tokens"]
        real = int((one[0]["tokens"] != PAD).sum())
        assert one[0]["num_tokens"] == real


@pytest.mark.parametrize("group_by_length", [False, True])
def test_every_record_comes_once_per_pass_and_in_another_order_next_time(group_by_length):
    data = attached(InstructionDataModule("addition", n_train=60, batch_size=10, group_by_length=group_by_length))
    assert len(data.train_dataloader()) == 6
    first = [tuple(sorted(data.rows_of_step(i).tolist())) for i in range(6)]
    second = [tuple(sorted(data.rows_of_step(i).tolist())) for i in range(6, 12)]
    assert sorted(i for step in first for i in step) == sorted(i for step in second for i in step) == list(range(60))
    assert set(first) != set(second)


def test_steps_of_similar_length_and_packing_waste_less_padding(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b" * (i % 31)} for i in range(400)])

    def waste(**arguments):
        data = attached(InstructionDataModule(path=path, batch_size=20, **arguments))
        batches = [data._step(i)[0] for i in range(20)]
        rows = sum(batch["tokens"].numel() for batch in batches)
        return 1 - sum(batch["num_tokens"] for batch in batches) / rows

    any_, grouped, packed = waste(), waste(group_by_length=True), waste(packing=True)
    assert any_ > 0.4
    assert grouped < 0.1
    assert packed < 0.15


def test_same_seed_same_steps_other_seed_others():
    def make(seed):
        data = attached(InstructionDataModule("addition", n_train=100, batch_size=10, seed=seed))
        return [data._step(i)[0]["tokens"].tolist() for i in range(3)]

    assert make(1) == make(1) != make(2)


def state(position, **change):
    layout = {"trainer.accumulate_grad_batches": 2, "data.batch_size": 10, **change}
    return {"ranks": [{"position": position, "layout": layout}]}


def test_loader_goes_on_where_the_state_says():
    def loaded(position):
        data = attached(InstructionDataModule("addition", n_train=60, batch_size=10), micro=2)
        data.load_state_dict(state(position))
        return data

    data = loaded(0)
    stream = [batch["tokens"].tolist() for _ in range(2) for batch in data.train_dataloader()]
    assert len(stream) == 24
    for position in (1, 6, 12, 17):
        data = loaded(position)
        batch = next(iter(data.train_dataloader()))
        assert batch["tokens"].tolist() == stream[position]
        assert data.state_dict() == state(position + 1)


def test_dropout_seeds_differ_between_micro_batches_and_ranks():
    ranks = [attached(InstructionDataModule("addition", n_train=60, batch_size=10), rank=r, ranks=2, micro=2)
             for r in range(2)]  # fmt: skip
    seeds = [batch["seed"] for data in ranks for batch in data.train_dataloader()]
    assert len(set(seeds)) == len(seeds) == 2 * 3 * 2


# -------------------------------------------------------------------- held-out demonstrations


def test_held_out_demonstrations_are_all_there_and_none_was_trained_on():
    make = {"n_train": 300, "n_eval": 50, "eval_batch_size": 16, "packing": True}
    data = attached(InstructionDataModule("addition", **make), stage="validate")
    shown = list(data.held_out_demonstrations())
    assert len(data.held_out_demonstrations()) == len(shown) == 4
    expected = sequences_in(shown)
    assert len(expected) == 50
    halves = [attached(InstructionDataModule("addition", **make), stage="validate", rank=r, ranks=2) for r in range(2)]
    assert sequences_in([b for half in halves for b in half.held_out_demonstrations()]) == expected
    training = attached(InstructionDataModule("addition", **make))
    seen = {record["prompt"] for record in training.train_records}
    assert not seen & {record["prompt"] for record in data.eval_records}


def test_held_out_prompts_need_no_demonstrations(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    data = attached(InstructionDataModule(path=path, eval_path=jsonl(tmp_path / "b.jsonl", [{"prompt": "a"}])), "test")
    assert len(data.held_out_demonstrations()) == 0
    assert list(data.held_out_demonstrations()) == []


# -------------------------------------------------------------------- tokens


def test_completion_is_tokenized_apart_and_ends_with_eos(tmp_path):
    data = attached(InstructionDataModule(path=jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "c"}])))
    record = data.train_records[0]
    assert TOKENIZER.convert_ids_to_tokens(record["prompt_ids"]) == ["a", "b"]
    assert TOKENIZER.convert_ids_to_tokens(record["completion_ids"]) == ["c", "<eos>"]
    # A completion's EOS counts even where padding has the same id.
    assert data.sequences.counted.tolist() == [2]


def test_chat_template_surrounds_the_prompt(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}){% endfor %}"
        "{% if add_generation_prompt %}(a:{% endif %}"
    )
    records = [{"prompt": "hi", "completion": "yo"},
               {"prompt": [{"role": "user", "content": "hi"}], "completion": "yo"}]  # fmt: skip
    path = jsonl(tmp_path / "a.jsonl", records)
    data = attached(InstructionDataModule(path=path, system_prompt="be"), tokenizer=tokenizer)
    for record in data.train_records:
        assert tokenizer.decode(record["prompt_ids"]) == "(s:be)(u:hi)(a:"
        assert tokenizer.decode(record["completion_ids"]) == "yo)"
    plain = attached(InstructionDataModule(path=jsonl(tmp_path / "b.jsonl", records[:1]), chat_template=False),
                     tokenizer=tokenizer)  # fmt: skip
    assert tokenizer.decode(plain.train_records[0]["prompt_ids"]) == "hi"


@pytest.mark.parametrize("packing", [False, True])
def test_turns_of_the_assistant_count_however_rows_are_laid_out(tmp_path, packing):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}){% endfor %}"
        "{% if add_generation_prompt %}(a:{% endif %}"
    )
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]  # fmt: skip
    records = [{"messages": talk}, {"messages": talk[:2]}, {"prompt": "5", "completion": "6"}]
    path = jsonl(tmp_path / "a.jsonl", records)
    data = attached(InstructionDataModule(path=path, batch_size=3, packing=packing), tokenizer=tokenizer)
    (batch,) = data.train_dataloader()
    assert texts(batch) == sorted(["(u:1)(a:[2][)](u:3)(a:[4][)]", "(u:1)(a:[2][)]", "(u:5)(a:[6][)]"])
    assert batch["step_tokens"] == 8
    plain = attached(InstructionDataModule(path=path, batch_size=3, completion_only_loss=False), tokenizer=tokenizer)
    assert plain.sequences.counted.tolist() == [19, 9, 9]


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "tokenize"])
@pytest.mark.parametrize("in_records", [False, True])
def test_what_the_datamodule_asks_of_the_template_is_no_setting(tmp_path, name, in_records):
    """An opened turn after the last answer would be learned as part of it."""
    tokenizer, given = character_tokenizer(), {"chat_template_kwargs": {name: True}}
    tokenizer.chat_template = "{% for m in messages %}({{ m['content'] }}){% endfor %}"
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    path = jsonl(tmp_path / "a.jsonl", [{"messages": talk, **(given if in_records else {})}])
    with pytest.raises(UsageError, match=rf"a\.jsonl:1: .*multiple values for keyword argument '{name}'"):
        attached(InstructionDataModule(path=path, **({} if in_records else given)), tokenizer=tokenizer)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stops", [["<eos>", ")"], ["<eos>"]])
def test_a_turn_ends_with_any_token_that_ends_completions(tmp_path, stops, streaming, caplog):
    """The generation config may name several; the template's end of a turn need not be the tokenizer's EOS token."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}){% endfor %}"
    config = Qwen2Config(**TINY, vocab_size=len(tokenizer), max_position_embeddings=64)
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(stops)
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    data = InstructionDataModule(path=jsonl(tmp_path / "a.jsonl", [{"messages": talk}] * 4), batch_size=2, n_eval=0,
                                 streaming=streaming, streaming_buffer=4)  # fmt: skip
    with caplog.at_level(logging.WARNING):
        fit(SFT(model_name_or_path=model, tokenizer_name_or_path=tokenizer), data, max_steps=3)
    told = [message for message in caplog.messages if "does not learn to end" in message]
    assert len(told) == (0 if ")" in stops else 1)
    assert all("('<eos>')" in message for message in told)


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ([{"prompt": "a"}], {}, r"a\.jsonl:1: 'completion' is missing, there is only prompt"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}], {}, r"a\.jsonl:2: .*null"),
        ([{"question": "a", "completion": "b"}], {}, r"a\.jsonl:1: 'prompt' is missing"),
        ([{"prompt": "a", "completion": [1]}], {}, r"a\.jsonl:1: 'completion' is list \[1\], where text should be"),
        ([{"prompt": "", "completion": "b"}], {}, r"a\.jsonl:1: 'prompt' is empty, where a text should be"),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": "b"}],
            {},
            r"a\.jsonl:2: 'prompt' is",
        ),
        ([{"text": "a b"}, {"text": ""}], {}, r"a\.jsonl:2: 'text' is '', where a text to learn should be; leave"),
        ([{"text": " \n"}], {}, r"a\.jsonl:1: 'text' is ' \\n'"),
        ([{"text": None}], {}, r"a\.jsonl:1: 'text' is None"),
        ([{"text": "a b"}], {"system_prompt": "s"}, "system_prompt='s' is read by the chat template.*column 'text'"),
        ([{"prompt": "a" * 70, "completion": "b"}], {}, "prompts are longer than 63 tokens .*overlong=drop"),
        ([{"prompt": "a", "completion": "b" * 80}], {}, "longer than 64 tokens .*record 0 has 82.*overlong=drop"),
        ([{"prompt": "a", "completion": "b" * 80}], {"overlong": "drop"}, "1 of 1 records are longer than 64 tokens"),
        ([{"prompt": "aaaa", "completion": "bbbb"}], {"max_length": 6}, "longer than 6 tokens .*raise max_length"),
        ([], {}, "is empty"),
    ],
)
def test_records_that_cannot_be_used(tmp_path, lines, arguments, message):
    with pytest.raises(UsageError, match=message):
        attached(InstructionDataModule(path=jsonl(tmp_path / "a.jsonl", lines), **arguments))


def test_overlong_records_are_dropped_with_a_count(tmp_path, caplog):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b" * n} for n in (3, 80, 100_000)])
    data = attached(InstructionDataModule(path=path, overlong="drop"))
    assert len(data.train_records) == 1
    assert "2 of 3 records left out" in caplog.text


TALK = [{"role": role, "content": text} for role, text in (
    ("system", "S"), ("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "fgh"), ("user", "i"),
    ("assistant", "j"))]  # fmt: skip
EACH_TURN = ("{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% if m['role'][0] == 'a' %}{{ eos_token }}"
             "{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}")  # fmt: skip


def learned(data):
    """Of each record its tokens as text, and those that count."""
    table, found = data.train_table, []
    for i in range(len(table)):
        batch = table.batch(torch.tensor([i]), PAD)
        ids = batch["tokens"].flatten()
        found.append((TOKENIZER.decode(ids), TOKENIZER.decode(ids[batch["counted"]])))
    return found


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("limit", range(10, 40))
def test_a_conversation_that_is_too_long_loses_whole_turns_first(tmp_path, mode, limit):
    """The expectation tries all ways to keep whole turns, and takes the longest."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = EACH_TURN

    def text(messages):
        return tokenizer.apply_chat_template(messages, tokenize=False)

    def length(messages):
        return len(tokenizer(text(messages)).input_ids)

    ways = [TALK[:3], TALK[:5], TALK] if mode == "keep_start" else [TALK[:1] + TALK[i:] for i in (5, 3, 1)]
    path = jsonl(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": [TALK[1], TALK[6]]}])
    how = {"overlong": "truncate", "truncation_mode": mode, "max_length": limit}
    found = learned(attached(InstructionDataModule(path=path, batch_size=1, **how), tokenizer=tokenizer, max_length=50))
    kept = max((way for way in ways if length(way) <= limit), key=length, default=None)
    if kept is None:  # the tokens of the shortest way
        ids = tokenizer(text(ways[0])).input_ids
        expected = tokenizer.decode(ids[:limit] if mode == "keep_start" else ids[-limit:])
        if mode == "keep_start" and limit <= length(TALK[:2]) + 3:  # no token of an answer
            assert expected not in [whole for whole, _ in found]
            return
    else:
        expected = text(kept)
        answers = "".join(m["content"] + "<eos>" for m in kept if m["role"] == "assistant")
        assert found[0][1] == answers
    assert found[0][0] == expected


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_texts_that_are_too_long_are_cut_and_never_end_a_run(tmp_path, mode, caplog):
    rows = [{"prompt": "abcd", "completion": "efgh"}, {"prompt": "x" * 100_000, "completion": "yz"},
            {"prompt": "a", "completion": "b" * 100_000}, {"prompt": "a", "completion": "b"}]  # fmt: skip
    path, text = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", [{"text": "abcdefgh"}])
    how = {"batch_size": 1, "overlong": "truncate", "truncation_mode": mode, "max_length": 6}
    found = learned(attached(InstructionDataModule(path=path, **how)))
    of_text = learned(attached(InstructionDataModule(path=text, **how)))
    if mode == "keep_start":  # the second has no room for a completion
        assert found == [("abcdef", "ef"), ("abbbbb", "bbbbb"), ("ab<eos>", "b<eos>")]
        assert of_text == [("abcdef", "bcdef")] and "1 of 4 prompts left out" in caplog.text
    else:
        assert found == [("defgh<eos>", "efgh<eos>"), ("xxxyz<eos>", "yz<eos>"), ("bbbbb<eos>", "bbbb<eos>"),
                         ("ab<eos>", "b<eos>")]  # fmt: skip
        assert of_text == [("defgh<eos>", "efgh<eos>")] and "left out" not in caplog.text
    assert caplog.text.count(f"cut to them (truncation_mode={mode})") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of task, path and dataset; got none"),
        ({"task": "addition", "path": "a.jsonl"}, "got task and path"),
        ({"task": "addition", "batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"task": "addition", "max_length": 1}, "max_length=1 must be at least 2"),
        ({"task": "addition", "overlong": "cut"}, "overlong='cut' must be one of error, drop, truncate"),
        ({"path": "a.jsonl", "task_kwargs": {"n_digits": 3}}, "task_kwargs=.* is read with a task"),
        ({"task": "adition"}, "did you mean addition"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, message):
    with pytest.raises(UsageError, match=message):
        InstructionDataModule(**arguments)


def test_micro_batches_must_divide_the_step():
    with pytest.raises(UsageError, match="accumulate_grad_batches=3 does not divide batch_size=64"):
        attached(InstructionDataModule("addition", n_train=100), micro=3)


def test_a_schedule_of_accumulation_is_refused():
    data = InstructionDataModule("addition", batch_size=4, n_train=16, eval_steps=0)
    with pytest.raises(UsageError, match="GradientAccumulationScheduler changed accumulate_grad_batches from 1 to 2"):
        fit(SFT(model_config=TINY), data, max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
    fit(SFT(model_config=TINY), data, max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1})])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer.accumulate_grad_batches": 4}, "accumulate_grad_batches=2 differs from the checkpoint's 4"),
        ({"data.batch_size": 8}, "batch_size=10 differs from the checkpoint's 8"),
    ],
)
def test_a_checkpoint_of_another_cut_is_refused(change, message):
    data = attached(InstructionDataModule("addition", n_train=60, batch_size=10), micro=2)
    with pytest.raises(UsageError, match=message):
        data.load_state_dict(state(4, **change))


def test_a_checkpoint_of_more_ranks_is_refused():
    data = attached(InstructionDataModule("addition", n_train=60, batch_size=10), micro=2)
    with pytest.raises(UsageError, match="written by 2 ranks, this run has 1"):
        data.load_state_dict({"ranks": state(4)["ranks"] * 2})


@pytest.mark.parametrize(("records", "ranks", "size"), [(30, 8, 64), (7, 2, 1), (51, 2, 16), (65, 4, 16), (9, 8, 2)])
def test_ranks_evaluate_every_held_out_record_once_in_as_many_batches(records, ranks, size):
    every = [attached(InstructionDataModule("addition", n_train=300, n_eval=records, eval_batch_size=size),
                      stage="validate", rank=rank, ranks=ranks) for rank in range(ranks)]  # fmt: skip
    alone = attached(InstructionDataModule("addition", n_train=300, n_eval=records), stage="validate")
    shown = [list(data.held_out_demonstrations()) for data in every]
    assert sequences_in([batch for share in shown for batch in share]) == sequences_in(alone.held_out_demonstrations())
    assert {len(share) for share in shown} == {len(every[0].held_out_demonstrations())}
    parts = [data.own_held_out(records, size) for data in every]
    assert sorted(number for share in parts for part in share for number in part) == list(range(records))
    assert all(part and len(part) <= size + 1 for share in parts for part in share)
    assert {len(share) for share in parts} == {len(every[0].held_out_completions())}


def test_ranks_with_sharded_weights_evaluate_as_many_records_each(caplog):
    data = attached(InstructionDataModule("addition", n_train=300, n_eval=30), stage="validate", rank=7, ranks=8)
    data.trainer.strategy = ModelParallelStrategy()
    assert data.own_held_out(30, 64) == [range(21, 24)]
    assert "24 of 30 held-out records are evaluated" in caplog.text
    caplog.clear()
    assert data.own_held_out(32, 64) == [range(28, 32)] and not caplog.text
