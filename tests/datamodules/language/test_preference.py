"""Preferences: their forms, their batches, and what is refused."""

import json
import math
from types import SimpleNamespace

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from datamodules import PreferenceDataModule
from datamodules.language.formats import as_preference, end_of_prompt
from datamodules.language.sequences import Pairs
from rl_modules import DPO, KTO, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_token_id
PAIRS = [
    {"prompt": f"{i}?", "chosen": "yes" * (1 + i % 4), "rejected": "no" * (1 + i % 3), "margin": float(i % 2)}
    for i in range(10)
]


def attached(data, stage="fit", rank=0, ranks=1, micro=1, max_length=64, tokenizer=TOKENIZER):
    """A datamodule after ``setup``, with as much of a trainer as it asks."""
    data.trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(tokenizer=tokenizer, max_length=max_length, can_pack=False),
        accumulate_grad_batches=micro,
        global_rank=rank, world_size=ranks, state=SimpleNamespace(fn=stage),
        strategy=SimpleNamespace(root_device="cpu")
    )  # fmt: skip
    data.setup(stage)
    return data


@pytest.fixture
def jsonl(tmp_path):
    def write(rows, name="pairs.jsonl"):
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


def texts(batch):
    """(chosen, rejected) of a padded batch, each up to its last token."""
    width = batch["tokens"].shape[1]
    rows = [TOKENIZER.decode(ids[: last % width + 1]) for ids, last in
            zip(batch["tokens"].tolist(), batch["last"].tolist(), strict=True)]  # fmt: skip
    half = len(rows) // 2
    return list(zip(rows[:half], rows[half:], strict=True))


def seen_from_the_ends(batch):
    """(chosen, rejected) of a packed batch: what each last token sees, in the order of positions."""
    from rl_modules.language.pairs import visible

    width = batch["tokens"].shape[1]
    sees = visible(batch["segment"], batch["prompt_segment"])
    rows = []
    for last in batch["last"].tolist():
        row, column = divmod(last, width)
        seen = sees[row, column].nonzero()[:, 0]
        assert batch["position_ids"][row, seen].tolist() == list(range(len(seen)))
        rows.append(TOKENIZER.decode(batch["tokens"][row, seen]))
    half = len(rows) // 2
    return list(zip(rows[:half], rows[half:], strict=True))


EXPECTED = sorted((f"{p['prompt']}{p['chosen']}<eos>", f"{p['prompt']}{p['rejected']}<eos>") for p in PAIRS)


# -------------------------------------------------------------------- batches


def test_a_pass_shows_every_pair_once(jsonl):
    data = attached(PreferenceDataModule(path=jsonl(PAIRS), batch_size=2))
    for _ in range(2):
        batches = list(data.train_dataloader())
        assert len(batches) == 5
        assert sorted(pair for batch in batches for pair in texts(batch)) == EXPECTED


@given(st.lists(st.tuples(*(st.text("abc", max_size=6) for _ in range(3))), min_size=1, max_size=8))
def test_packed_rows_hold_every_pair_apart_from_the_others(texts_of_pairs):
    ids = [[TOKENIZER(text).input_ids for text in pair] for pair in texts_of_pairs]
    pairs = Pairs([p for p, _, _ in ids], [[*c, EOS] for _, c, _ in ids], [[*r, EOS] for _, _, r in ids])
    index = torch.arange(len(ids)).flip(0)
    batch = pairs.batch(index, packing=True)
    expected = [(f"{p}{c}<eos>", f"{p}{r}<eos>") for p, c, r in reversed(texts_of_pairs)]
    assert seen_from_the_ends(batch) == expected
    assert texts(pairs.batch(index, packing=False)) == expected
    # No row is wider than the longest pair, and no prompt stands there twice.
    assert batch["tokens"].shape[1] == max(len(p) + len(c) + len(r) + 2 for p, c, r in texts_of_pairs)
    assert (batch["segment"] >= 0).sum() == sum(len(p) + len(c) + len(r) + 2 for p, c, r in texts_of_pairs)


def test_a_model_that_takes_no_mask_gets_one_row_per_answer(jsonl):
    path = jsonl(PAIRS)
    for asked, can, packed in ((None, True, True), (None, False, False), (False, True, False), (True, True, True)):
        data = attached(PreferenceDataModule(path=path, packing=asked))
        data.trainer.lightning_module.can_pack = can
        assert all(("segment" in batch) == packed for batch in data.train_dataloader())
    data = attached(PreferenceDataModule(path=path, packing=True))
    with pytest.raises(UsageError, match="set packing=false"):
        next(iter(data.train_dataloader()))


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    ("prompt", "answer", "width", "packed"),
    [
        (400, 20, 128, True),  # the prompt is read once in place of twice
        (20, 400, 128, False),  # two answers in a row compare four times as many places, of which none are saved
        (200, 200, 64, False),  # 3 texts of 200 tokens in place of 4, in a narrow model
        (200, 200, 4096, True),  # in a wide one attention is a small part of the work
    ],
)
def test_rows_are_packed_where_that_saves_work(jsonl, prompt, answer, width, packed, micro):
    rows = [{"prompt": "a" * prompt, "chosen": "b" * answer, "rejected": "c" * answer}] * 8
    data = PreferenceDataModule(path=jsonl(rows), batch_size=4, eval_path=jsonl(rows), n_eval=8)
    attached(data, micro=micro, max_length=1024).setup("test")
    data.trainer.lightning_module.can_pack, data.trainer.lightning_module.hidden_size = True, width
    for batch in [*data.train_dataloader(), *data.test_dataloader()]:
        assert ("segment" in batch) == packed


def test_batch_by_hand(jsonl):
    rows = [
        {"prompt": "a", "chosen": "bc", "rejected": "", "margin": 2},
        {"prompt": "a", "chosen": "d", "rejected": "ef"},
    ]
    data = attached(PreferenceDataModule(path=jsonl(rows), batch_size=2))
    (batch,) = data.train_dataloader()
    a, b, c, d, e, f = TOKENIZER("abcdef").input_ids
    order = [0, 1] if batch["margin"].tolist() == [2, 0] else [1, 0]
    assert batch["tokens"][order].tolist() == [[a, b, c, EOS], [a, d, EOS, 0]]
    assert batch["tokens"][[2 + i for i in order]].tolist() == [[a, EOS, 0, 0], [a, e, f, EOS]]
    ends = batch["last"] - 4 * torch.arange(4)  # within their rows
    assert ends[order].tolist() == [3, 2] and ends[[2 + i for i in order]].tolist() == [1, 3]
    assert batch["margin"][order].tolist() == [2, 0]
    assert batch["probability"].isnan().all()
    assert (batch["step_pairs"], batch["n_micro"], batch["num_tokens"]) == (2, 1, 13)


def test_ranks_and_micro_batches_divide_the_same_steps(jsonl):
    path = jsonl(PAIRS)
    whole = [texts(batch) for batch in attached(PreferenceDataModule(path=path, batch_size=4)).train_dataloader()]
    ranks = [attached(PreferenceDataModule(path=path, batch_size=2), rank=rank, ranks=2, micro=2) for rank in range(2)]
    parts = [list(data.train_dataloader()) for data in ranks]
    assert len(whole) == 2
    for step, pairs in enumerate(whole):
        shared = [texts(batch) for part in parts for batch in part[2 * step : 2 * step + 2]]
        assert all(len(part) == 1 for part in shared)
        assert sorted(pair for part in shared for pair in part) == sorted(pairs)


def test_fewer_pairs_than_a_step_are_gone_through_endlessly(jsonl):
    data = attached(PreferenceDataModule(path=jsonl(PAIRS[:3]), batch_size=4))
    seen = [pair for _ in range(3) for batch in data.train_dataloader() for pair in texts(batch)]
    assert sorted(seen) == sorted(4 * EXPECTED_OF_THREE)


EXPECTED_OF_THREE = sorted(
    (f"{p['prompt']}{p['chosen']}<eos>", f"{p['prompt']}{p['rejected']}<eos>") for p in PAIRS[:3]
)


def test_order_depends_on_the_seed_alone(jsonl):
    def order(seed):
        data = attached(PreferenceDataModule(path=jsonl(PAIRS), batch_size=2, seed=seed))
        return [texts(batch) for _ in range(2) for batch in data.train_dataloader()]

    torch.manual_seed(1)
    first = order(0)
    torch.manual_seed(2)
    assert order(0) == first != order(1)
    assert first[:5] != first[5:]


def test_resume_goes_on_where_the_stream_stood(jsonl):
    path = jsonl(PAIRS)
    whole = attached(PreferenceDataModule(path=path, batch_size=2), micro=2)
    expected = [texts(batch) for _ in range(2) for batch in whole.train_dataloader()]
    for stop in (3, 10, 13):
        first = attached(PreferenceDataModule(path=path, batch_size=2), micro=2)
        seen = []
        while len(seen) < stop:
            for batch in first.train_dataloader():
                seen.append(texts(batch))
                if len(seen) == stop:
                    break
        second = attached(PreferenceDataModule(path=path, batch_size=2), micro=2)
        second.load_state_dict(first.state_dict())
        while len(seen) < 20:
            seen += [texts(batch) for batch in second.train_dataloader()]
        assert seen == expected


@pytest.mark.parametrize("algorithm", [DPO, KTO, RewardModel])
def test_a_schedule_of_accumulation_is_refused(algorithm):
    data = PreferenceDataModule("paths", batch_size=4, n_train=8, n_eval=0, n_demonstrations=4)
    with pytest.raises(UsageError, match="GradientAccumulationScheduler changed accumulate_grad_batches from 1 to 2"):
        fit(algorithm(model_config=TINY), data, max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


def test_a_checkpoint_of_other_steps_is_refused(jsonl):
    path = jsonl(PAIRS)
    data = attached(PreferenceDataModule(path=path, batch_size=2))
    next(iter(data.train_dataloader()))
    state = data.state_dict()
    with pytest.raises(UsageError, match=r"data.batch_size=4 differs from the checkpoint's 2"):
        attached(PreferenceDataModule(path=path, batch_size=4)).load_state_dict(state)
    with pytest.raises(UsageError, match=r"accumulate_grad_batches=2 differs from the checkpoint's 1"):
        attached(PreferenceDataModule(path=path, batch_size=2), micro=2).load_state_dict(state)


# -------------------------------------------------------------------- evaluation and demonstrations


def test_ranks_share_the_held_out_pairs(jsonl):
    path = jsonl(PAIRS)
    shares = []
    for rank in range(2):
        data = PreferenceDataModule(path=path, eval_path=path, eval_batch_size=2)
        shares.append([texts(b) for b in attached(data, "validate", rank=rank, ranks=2).val_dataloader()])
    assert [len(share) for share in shares] == [3, 3]
    assert sorted(pair for share in shares for batch in share for pair in batch) == EXPECTED


def test_predictions_keep_the_order_of_the_file(jsonl):
    path = jsonl(PAIRS)
    data = attached(PreferenceDataModule(path=path, eval_path=path, eval_batch_size=3), "predict")
    chosen = [pair[0] for batch in data.predict_dataloader() for pair in texts(batch)]
    assert chosen == [f"{p['prompt']}{p['chosen']}<eos>" for p in PAIRS]


def demonstrated(batch):
    return [
        TOKENIZER.decode(row[:n]) for row, n in zip(batch["tokens"].tolist(), batch["length"].tolist(), strict=True)
    ]


def test_demonstrations_come_from_the_task_a_file_or_the_chosen_answers(jsonl):
    path = jsonl(PAIRS)
    chosen = attached(PreferenceDataModule(path=path, n_demonstrations=4))
    assert sum(len(batch["length"]) for batch in chosen.demonstrations()) == 4
    expected = {f"{p['prompt']}{p['chosen']}<eos>" for p in PAIRS}
    assert {text for batch in chosen.demonstrations() for text in demonstrated(batch)} <= expected
    shown = jsonl([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "de"}], "shown.jsonl")
    filed = attached(PreferenceDataModule(path=path, demonstrations_path=shown))
    assert [text for batch in filed.demonstrations() for text in demonstrated(batch)] == ["ab<eos>", "cde<eos>"]
    task = attached(PreferenceDataModule(task="paths", n_train=4, n_demonstrations=5))
    records = task.task.records("train", 5)
    found = sorted(text for batch in task.demonstrations() for text in demonstrated(batch))
    assert found == sorted(f"{r['prompt']}{r['completion']}<eos>" for r in records)


def test_a_policy_that_scores_no_demonstrations_loads_none(jsonl, monkeypatch):
    data = PreferenceDataModule(task="paths", n_train=4)
    data.trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(tokenizer=TOKENIZER, max_length=64, can_pack=False,
                                         scores_demonstrations=DPO.scores_demonstrations),
        accumulate_grad_batches=1, global_rank=0, world_size=1, state=SimpleNamespace(fn="fit"),
    )  # fmt: skip
    asked = []
    monkeypatch.setattr(data.task, "records", lambda *a, **k: asked.append(a))
    data.setup("fit")
    assert not asked and not data.demonstration_ids and len(data.train_pairs)
    named = PreferenceDataModule(path=jsonl(PAIRS), demonstrations_path="shown.jsonl")
    named.trainer = data.trainer
    with pytest.raises(UsageError, match=r"demonstrations_path='shown.jsonl' is not read by"):
        named.setup("fit")


def test_every_rank_has_as_many_demonstrations_and_each_counts_once(jsonl):
    path = jsonl(PAIRS)
    counted = []
    for rank in range(3):
        data = PreferenceDataModule(path=path, batch_size=2, eval_batch_size=2)
        batches = list(attached(data, rank=rank, ranks=3).demonstrations())
        assert [len(batch["weight"]) for batch in batches] == [2, 2]
        for batch in batches:
            counted += [t for t, w in zip(demonstrated(batch), batch["weight"].tolist(), strict=True) if w]
    assert sorted(counted) == sorted(f"{p['prompt']}{p['chosen']}<eos>" for p in PAIRS)


def test_a_task_tells_the_true_probabilities():
    data = attached(PreferenceDataModule(task="paths", n_train=8, batch_size=4))
    for batch in data.train_dataloader():
        assert ((batch["probability"] > 0) & (batch["probability"] < 1)).all()


# -------------------------------------------------------------------- forms


def say(role, content):
    return {"role": role, "content": content}


def test_shared_beginnings_are_prompts():
    row = {"chosen": "Human: hi\n\nAssistant: hello there", "rejected": "Human: hi\n\nAssistant: hello you"}
    assert as_preference(row, "here") == {
        "prompt": "Human: hi\n\nAssistant: hello", "chosen": " there", "rejected": " you"
    }  # fmt: skip
    assert as_preference({"chosen": "c>k:abk", "rejected": "c>k:ack"}, "here")["prompt"] == "c>k:a"
    assert as_preference({"chosen": "yes", "rejected": "no"}, "here")["prompt"] == ""


@given(st.text("ab \n"), st.text("ab \n"), st.text("ab \n"))
def test_no_letter_is_lost_between_prompt_and_answers(prompt, chosen, rejected):
    cut = end_of_prompt(prompt + chosen, prompt + rejected)
    assert (prompt + chosen)[:cut] == (prompt + rejected)[:cut]
    found = as_preference({"chosen": prompt + chosen, "rejected": prompt + rejected}, "here")
    assert found["prompt"] + found["chosen"] == prompt + chosen
    assert found["prompt"] + found["rejected"] == prompt + rejected


def test_conversations_part_at_their_last_message():
    before = [say("user", "hi"), say("assistant", "hello"), say("user", "how are you?")]
    row = {"chosen": [*before, say("assistant", "fine")], "rejected": [*before, say("assistant", "go away")]}
    expected = {"prompt": before, "chosen": "fine", "rejected": "go away"}
    assert as_preference(row, "here") == expected
    # As in UltraFeedback, whose prompt is the first message once more; alone it stays in words.
    assert as_preference({"prompt": "hi", **row}, "here") == expected
    short = {"chosen": [before[0], say("assistant", "hey")], "rejected": [before[0], say("assistant", "no")]}
    assert as_preference({"prompt": "hi", **short}, "here") == {"prompt": "hi", "chosen": "hey", "rejected": "no"}
    # As in TRL's explicit form, where the prompt is a list and the answers are one message each.
    explicit = {"prompt": before, "chosen": [say("assistant", "fine")], "rejected": [say("assistant", "go away")]}
    assert as_preference(explicit, "here") == expected


def test_conversations_are_read_with_the_chat_template(jsonl):
    tokenizer = character_tokenizer()
    each = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.chat_template = each + "{% if add_generation_prompt %}[assistant]{% endif %}"
    rows = [
        {
            "chosen": [say("user", "hi"), say("assistant", "yes")],
            "rejected": [say("user", "hi"), say("assistant", "no")],
        }
    ]
    data = attached(PreferenceDataModule(path=jsonl(rows), batch_size=1), tokenizer=tokenizer)
    (batch,) = data.train_dataloader()
    assert texts(batch) == [("[user]hi[assistant]yes", "[user]hi[assistant]no")], "the template writes no end"


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_a_dataset_with_other_columns_and_splits(tmp_path, form):
    rows = [{"question": p["prompt"], "better": p["chosen"], "worse": p["rejected"]} for p in PAIRS]
    table = datasets.Dataset.from_list(rows)
    if form == "saved":
        datasets.DatasetDict({"train": table, "test": table.select(range(3))}).save_to_disk(tmp_path / "pairs")
        name, splits = str(tmp_path / "pairs"), {}
    else:
        name, splits = str(tmp_path / "pairs.parquet"), {"eval_split": "train[:3]"}
        table.to_parquet(name)
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    data = attached(PreferenceDataModule(dataset=name, columns=columns, batch_size=10, eval_steps=1, **splits))
    (batch,) = data.train_dataloader()
    assert sorted(texts(batch)) == EXPECTED
    assert len(data.eval_records) == 3


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("cell", "margin"), [("1.5", 1.5), ("-2", -2), (".5", 0.5), ("1e-1", 0.1), ("", None)])
def test_a_csv_file_writes_its_margins_as_texts(cell, margin):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": cell, "probability": "0.25"}
    assert as_preference(row, "here") == {**row, "margin": margin, "probability": 0.25}


AB = {"prompt": "a", "chosen": "b"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
ABC = {**AB, "rejected": "c"}
PARTING = {
    "chosen": [say("user", "a"), say("assistant", "b")],
    "rejected": [say("user", "c"), say("assistant", "d")],
}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (AB, "'rejected' is missing, there is only prompt, chosen"),
        ({**AB, "rejected": None}, "'rejected' is null"),
        ({**AB, "rejected": {"x": 1}}, "'rejected' is dict"),
        ({**ABC, "margin": "large"}, "'margin' is 'large', where a number"),
        ({**ABC, "margin": math.nan}, "not valid JSON in UTF-8, NaN"),
        ({**ABC, "margin": True}, "'margin' is True, where a number"),
        ({**ABC, "chosen": [say("assistant", "b")]}, "'chosen' is a (list|str) and 'rejected' a (list|str)"),
        (PARTING, "'chosen' and 'rejected' share no message, and there is no prompt"),
        ({"chosen": [], "rejected": []}, "'chosen' is an empty list"),
        (
            {"prompt_ids": [5], "chosen_ids": [5, 6], "rejected_ids": [5, 10**6]},
            "'rejected_ids' is list .*, where a list of token ids from 0 to",
        ),
        ({"prompt_ids": [5], "chosen_ids": [5, 6], "rejected": "a"}, "'rejected_ids' is NoneType None, where a list"),
        (
            {"prompt": "a", "chosen": [CALL], "rejected": [say("assistant", "b")]},
            "the prompts or answers are .* no chat template",
        ),
        (
            {"chosen": [say("user", "a"), say("user", "b")], "rejected": [say("user", "a"), say("assistant", "c")]},
            "'chosen' has messages of user, where the last one should be the assistant's",
        ),
        ("{not json", "not valid JSON"),
    ],
)
def test_a_bad_row_is_named(jsonl, row, message):
    with pytest.raises(UsageError, match=f"pairs.jsonl:2: {message}"):
        attached(PreferenceDataModule(path=jsonl([PAIRS[0], row])))


def test_an_empty_file_is_refused(jsonl):
    with pytest.raises(UsageError, match=r"pairs.jsonl is empty"):
        attached(PreferenceDataModule(path=jsonl([])))


def test_pairs_whose_answers_are_equal_are_left_out_or_refused(jsonl):
    equal = {"prompt": "a", "chosen": "b", "rejected": "b"}
    data = attached(PreferenceDataModule(path=jsonl([equal, PAIRS[0], equal])))
    assert [record["prompt"] for record in data.train_records] == [PAIRS[0]["prompt"]]
    with pytest.raises(UsageError, match="2 of 2 pairs left out, they have chosen equal to rejected"):
        attached(PreferenceDataModule(path=jsonl([equal, equal])))


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_pairs_that_are_too_long_are_cut(jsonl, mode):
    """As TRL's collator cuts them, but that both answers of ``keep_end`` follow one prompt."""
    texts = (("abcd", "efgh", "i"), ("abcdefgh", "x", "y"), ("ab", "c", "d"), ("ab", "cdefghijk", "lm"))
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in texts]
    data = PreferenceDataModule(path=jsonl(rows), overlong="truncate", max_length=6, truncation_mode=mode, batch_size=1,
                                eval_steps=0)  # fmt: skip
    fit(DPO(model_config=TINY), data, max_steps=1)
    found = [tuple(TOKENIZER.decode(record[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected"))
             for record in data.train_records]  # fmt: skip
    if mode == "keep_start":  # the second pair has no room for an answer
        assert found == [("abcd", "ef", "i<eos>"), ("ab", "c<eos>", "d<eos>"), ("ab", "cdef", "lm<eos>")]
    else:
        assert found == [("d", "efgh<eos>", "i<eos>"), ("efgh", "x<eos>", "y<eos>"), ("ab", "c<eos>", "d<eos>"),
                         ("b", "hijk<eos>", "lm<eos>")]  # fmt: skip


def test_answers_to_be_judged_whole_are_not_cut(jsonl):
    data = PreferenceDataModule(path=jsonl(PAIRS), overlong="truncate", batch_size=2, eval_steps=0)
    with pytest.raises(UsageError, match="overlong='truncate' would cut the end of answers"):
        fit(RewardModel(model_config=TINY), data, max_steps=1)


def test_rows_of_token_ids_are_those_of_their_texts(jsonl):
    def ids(text):
        return TOKENIZER(text).input_ids

    rows = [{"prompt_ids": ids(row["prompt"]), "chosen_ids": [*ids(row["chosen"]), EOS],
             "rejected_ids": [*ids(row["rejected"]), EOS]} for row in PAIRS]  # fmt: skip
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    expected = attached(PreferenceDataModule(path=jsonl(PAIRS))).train_records
    found = attached(PreferenceDataModule(path=jsonl(rows, "ids.jsonl"))).train_records
    assert [[a[n] for n in names] for a in found] == [[b[n] for n in names] for b in expected]
    assert found[0]["prompt"] == "0?"
    judged = [{"prompt_ids": row["prompt_ids"], "completion_ids": row["chosen_ids"], "label": True} for row in rows]
    module = KTO(model_config=TINY)
    data = PreferenceDataModule(path=jsonl([*judged, rows[0]], "both.jsonl"), batch_size=2, eval_steps=0)
    fit(module, data, max_steps=1)
    assert [record["chosen_ids"] for record in data.train_records][-2:] == [rows[0]["chosen_ids"],
                                                                            rows[0]["rejected_ids"]]  # fmt: skip
    with pytest.raises(UsageError, match=r"mixed.jsonl:2: 'prompt_ids' is missing"):
        attached(PreferenceDataModule(path=jsonl([rows[0], PAIRS[1]], "mixed.jsonl")))


def test_answers_of_several_turns_are_rendered_whole(jsonl):
    """What follows the shared messages is the answer, as in TRL: its users' turns too."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}a{% endif %}")  # fmt: skip
    start = [say("user", "1"), say("assistant", "2"), say("user", "3")]
    row = {"chosen": [*start, say("assistant", "4"), say("user", "5"), say("assistant", "6")],
           "rejected": [*start, say("assistant", "7")]}  # fmt: skip
    (record,) = attached(PreferenceDataModule(path=jsonl([row]), batch_size=1), tokenizer=tokenizer).train_records
    read = [tokenizer.decode(record[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")]
    assert read == ["u1a2<eos>u3a", "4<eos>u5a6<eos>", "7<eos>"]


def test_pairs_that_are_too_long_are_refused_or_left_out(jsonl):
    path = jsonl([PAIRS[0], {"prompt": "a" * 30, "chosen": "b", "rejected": "c" * 40}])
    with pytest.raises(UsageError, match=r"1 of 2 pairs are longer than 64 tokens \(record 1 has 71 tokens\)"):
        attached(PreferenceDataModule(path=path))
    assert len(attached(PreferenceDataModule(path=path, overlong="drop")).train_records) == 1
    assert len(attached(PreferenceDataModule(path=path), max_length=71).train_records) == 2
    with pytest.raises(UsageError, match=r"1 of 2 pairs are longer than 40 tokens"):
        attached(PreferenceDataModule(path=path, max_length=40))
    with pytest.raises(UsageError, match="2 of 2 pairs are longer than 3 tokens"):
        attached(PreferenceDataModule(path=path, max_length=3, overlong="drop"))
    with pytest.raises(UsageError, match="max_length=100 is more than the 64 tokens"):
        attached(PreferenceDataModule(path=path, max_length=100))


def test_hundred_thousand_characters_are_refused_in_one_sentence(jsonl):
    with pytest.raises(UsageError) as caught:
        attached(PreferenceDataModule(path=jsonl([{"prompt": "a", "chosen": "b" * 100_000, "rejected": "c"}])))
    assert "100002 tokens" in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_demonstrations": 0}, "n_demonstrations=0 must be at least 1"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"task": "paths"}, "exactly one of task, path and dataset"),
    ],
)
def test_bad_arguments_are_refused(jsonl, arguments, message):
    with pytest.raises(UsageError, match=message):
        PreferenceDataModule(path=jsonl(PAIRS), **arguments)


def test_more_micro_batches_than_pairs_are_refused(jsonl):
    with pytest.raises(UsageError, match=r"accumulate_grad_batches=3 is more than the batch_size=2 pairs"):
        attached(PreferenceDataModule(path=jsonl(PAIRS), batch_size=2), micro=3)


def test_a_task_without_preferences_says_which_has_them():
    with pytest.raises(UsageError, match=r"'addition' makes no preferences; task='paths' does"):
        attached(PreferenceDataModule(task="addition", n_train=4))


def test_evaluation_needs_held_out_pairs(jsonl):
    with pytest.raises(UsageError, match="eval_path"):
        attached(PreferenceDataModule(path=jsonl(PAIRS), eval_steps=1))


def test_ranks_judge_every_held_out_pair_once_where_they_do_not_divide_them(jsonl):
    path, shares = jsonl(PAIRS), []
    for rank in range(3):
        data = PreferenceDataModule(path=path, eval_path=path, eval_batch_size=3)
        shares.append([texts(b) for b in attached(data, "validate", rank=rank, ranks=3).val_dataloader()])
    assert [[len(batch) for batch in share] for share in shares] == [[4], [3], [3]]
    assert sorted(pair for share in shares for batch in share for pair in batch) == EXPECTED
