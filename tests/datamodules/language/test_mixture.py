"""Several sources in one run: their shares, their reward functions, their metrics, curricula, and evaluation sets."""

import json
from collections import Counter

import pytest
import torch

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from datamodules.language.curriculum import checked_weights, learnable
from datamodules.language.mixture import BLOCK, MixedOrder, Mixture, of_source
from datamodules.language.rewards import RewardFunctions
from datamodules.language.sources import EndlessOrder
from rl_modules import DPO, GRPO, SFT
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed
from tests.training import assert_resumes_exactly, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
RECORDS = [{"data_source": name} for name, n in (("a", 3), ("b", 50), ("c", 7)) for _ in range(n)]
WEIGHTS = {"a": 1.0, "b": 5.0, "c": 2.0}


def order(segments=()):
    return MixedOrder(7, RECORDS, WEIGHTS, lambda: list(segments))


def sums(tmp_path, name, n=6):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(n)))
    return str(path)


def grpo(**arguments):
    return GRPO(model_config=TINY, max_completion_length=3, learning_rate=1e-3, logging_steps=1,
                lr_scheduler_type="constant", **arguments)  # fmt: skip


def contains(prompts, completions, completion_ids=None, *, data_source, **columns):
    """Half a point for anything, to be told apart from an accuracy."""
    assert set(data_source) == {"mine"}
    return [0.5] * len(completions)


def constant(prompts, completions, completion_ids=None, **columns):
    return [2.0] * len(completions)


# -------------------------------------------------------------------- order


def test_every_block_has_the_exact_shares_and_every_source_its_own_endless_order():
    found, n = order(), len(RECORDS)
    numbers = [found.at(position, n) for position in range(3 * BLOCK)]
    for block in range(3):
        counts = Counter(RECORDS[i]["data_source"] for i in numbers[block * BLOCK : (block + 1) * BLOCK])
        assert counts == {"a": BLOCK // 8, "b": 5 * BLOCK // 8, "c": BLOCK // 4}
    # Small parts are mixed too: a run of one source as long as this has a chance below 1e-6.
    assert max(len(run) for run in "".join(RECORDS[i]["data_source"] for i in numbers).split("b")) < 30
    for name, first, size in (("a", 0, 3), ("b", 3, 50), ("c", 53, 7)):
        own = [i - first for i in numbers if RECORDS[i]["data_source"] == name]
        alone = EndlessOrder(stream_seed(7, 0, f"source {name}"))
        assert own == [alone.at(k, size) for k in range(len(own))]
    assert [order().at(position, n) for position in (5, 2000, 17)] == [numbers[5], numbers[2000], numbers[17]]


def test_new_weights_continue_every_source_where_it_was():
    segments, n = [], len(RECORDS)
    for position, weights in ((100, {"a": 0.0, "b": 1.0, "c": 1.0}), (1700, {"a": 3.0, "b": 0.0, "c": 1.0})):
        segments = [*segments, order(segments).reweighed(position, weights)]
    found = order(segments)
    numbers = [found.at(position, n) for position in range(5000)]
    names = [RECORDS[i]["data_source"] for i in numbers]
    assert "a" not in names[100:1700] and "b" not in names[1700:]
    assert Counter(names[1700 : 1700 + BLOCK]) == {"a": 3 * BLOCK // 4, "c": BLOCK // 4}
    for name, first, size in (("a", 0, 3), ("b", 3, 50), ("c", 53, 7)):
        own = [i - first for i in numbers if RECORDS[i]["data_source"] == name]
        alone = EndlessOrder(stream_seed(7, 0, f"source {name}"))
        assert own == [alone.at(k, size) for k in range(len(own))]


# -------------------------------------------------------------------- rewards and metrics


def test_a_function_of_one_source_sees_its_completions_only():
    def inner(prompts, completions, answer, log_extra=None, log_metric=None):
        log_extra("seen", completions)
        log_metric("count", len(completions))
        return [float(len(text)) for text in completions]

    async def later(completions, **columns):
        return [10.0] * len(completions)

    records = [{"prompt": "p", "answer": "x", "data_source": name} for name in "abab"]
    rewards = RewardFunctions([of_source(inner, "a"), of_source(later, "b")])
    found = rewards(records, ["1", "22", "333", "4444"])
    expected = torch.tensor([[1.0, torch.nan], [torch.nan, 10.0], [3.0, torch.nan], [torch.nan, 10.0]])
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert rewards.names == ["a.inner", "b.later"]
    assert rewards.extra(4) == [{"seen": "1"}, {"seen": None}, {"seen": "333"}, {"seen": None}]
    assert rewards.take_notes()["logged"]["count"][0] == 2
    none = RewardFunctions([of_source(inner, "c")])(records, list("abcd"))
    assert none.isnan().all()


def test_the_metrics_of_a_source_are_means_over_its_completions(tmp_path):
    data = PromptDataModule(
        [{"name": "addition", "weight": 3}, {"name": "mine", "path": sums(tmp_path, "mine"),
                                             "reward_funcs": contains}],
        reward_funcs=constant, batch_size=16, num_generations=2, eval_steps=0, correct_threshold=0.5,
    )  # fmt: skip
    module = grpo()
    fit(module, data, max_steps=2)
    latest = module.latest_metrics
    assert latest["train/mine/pass@1"] == 1.0 and latest["train/addition/pass@1"] == 0.0
    assert latest["train/rewards/mine.contains/mean"] == 0.5
    assert latest["train/mine/rewards/constant"] == latest["train/addition/rewards/constant"] == 2.0
    assert data.rewards.names == ["addition.accuracy", "mine.contains", "constant"]
    assert [record["data_source"] for record in data.train_records[-6:]] == ["mine"] * 6
    assert module.hparams and data.hparams["task"][1]["reward_funcs"] == f"{__name__}:contains"


def test_evaluation_sets_have_metrics_by_name(tmp_path, make_trainer):
    sets = {"easy": sums(tmp_path, "easy"), "long": sums(tmp_path, "long", 9)}
    data = PromptDataModule("addition", eval_path=sets, batch_size=4, num_generations=2, eval_steps=1, n_eval=7,
                            reward_funcs=["accuracy", constant], eval_batch_size=4)  # fmt: skip
    module = grpo()
    trainer = make_trainer(max_steps=1, limit_val_batches=1.0)
    trainer.fit(module, datamodule=data)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found["eval/easy/rewards/constant"] == found["eval/long/rewards/constant"] == 2.0
    assert found["eval/pass@1"] == pytest.approx((6 * found["eval/easy/pass@1"] + 7 * found["eval/long/pass@1"]) / 13)
    assert len(data.eval_records) == 13


def test_demonstrations_and_preferences_are_mixed_too(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": "no"}) + "\n" for i in range(8)))
    data = InstructionDataModule([{"name": "addition", "n_train": 20}, {"path": str(rows), "weight": 3}], batch_size=8,
                                 eval_steps=0)  # fmt: skip
    fit(SFT(model_config=TINY), data, max_steps=2)
    seen = [data.train_records[data.record_at(i)]["data_source"] for i in range(BLOCK)]
    assert Counter(seen) == {"addition": BLOCK // 4, "rows": 3 * BLOCK // 4}
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(json.dumps({"prompt": f"{i}?", "chosen": "yes", "rejected": "no"}) + "\n" for i in range(8))
    )
    both = PreferenceDataModule([{"name": "paths", "n_train": 8}, {"path": str(pairs)}], batch_size=4, eval_steps=0)
    fit(DPO(model_config=TINY), both, max_steps=1)
    assert Counter(record["data_source"] for record in both.train_records) == {"paths": 8, "pairs": 8}


# -------------------------------------------------------------------- curricula


def test_learnable_sources_are_preferred():
    found = learnable({"solved": 1.0, "half": 0.5, "never": 0.0}, {"solved": 1.0, "half": 2.0, "never": 1.0})
    assert found == pytest.approx({"solved": 0.01, "half": 0.52, "never": 0.01})


def follow(pass_rates, weights):
    """Weights that show which pass rates came."""
    assert weights == {"addition": 1.0, "mine": 1.0}
    return {"addition": 0.25, "mine": pass_rates["mine"] - 0.25}


def mixed(tmp_path, **arguments):
    sources = [{"name": "addition", "n_train": 64}, {"name": "mine", "path": sums(tmp_path, "mine"),
                                                     "reward_funcs": contains}]  # fmt: skip
    return PromptDataModule(sources, **{"batch_size": 16, "num_generations": 2, "eval_steps": 0, "curriculum": follow,
                                        "correct_threshold": 0.5, **arguments})  # fmt: skip


def test_a_curriculum_weighs_the_next_generation_by_the_running_pass_rates(tmp_path):
    module, data = grpo(), mixed(tmp_path)
    fit(module, data, max_steps=3)
    # The file's pass rate is 1: its share becomes 3 of 4.
    assert module.latest_metrics["train/mine/share"] == pytest.approx(0.75)
    segments = data._segments
    assert [segment[0] for segment in segments] == [8, 16, 24] and segments[-1][2] == {"addition": 0.25, "mine": 0.75}


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{}, {"async_generations": 1}])
def test_a_resumed_curriculum_is_the_uninterrupted_one(tmp_path, arguments):
    assert_resumes_exactly(grpo, lambda: mixed(tmp_path, **arguments), tmp_path)


def test_a_curriculums_weights_are_checked():
    assert checked_weights({"a": 1, "b": 0}, ["a", "b"], "f") == {"a": 1.0, "b": 0.0}
    for found in ({"a": 1.0}, {"a": 0.0, "b": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan"), "b": 1.0}, [1, 2]):
        with pytest.raises(UsageError, match=r"curriculum=f returned .* a weight of at least 0 for each of a, b"):
            checked_weights(found, ["a", "b"], "f")


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("arguments", "message"), [
    ({"task": []}, "should be one source or more"),
    ({"task": ["addition"]}, "should be a dictionary such as"),
    ({"task": [{"name": "addition"}, {"name": "addition"}]}, "of different names; give each a name"),
    ({"task": [{"name": "addition", "wieght": 2}]}, "has no setting 'wieght'; did you mean weight"),
    ({"task": [{"weight": 2}]}, "exactly one of task, path and dataset"),
    ({"task": [{"name": "addition", "weight": 0}]}, "weight=0 must be a number above 0"),
    ({"task": [{"name": "addition"}], "task_kwargs": {"n_digits": 1}}, "n_digits belong to a source"),
    ({"task": "addition", "curriculum": "learnable"}, "give task a list of sources"),
    ({"task": [{"name": "addition"}], "curriculum": "nowhere"}, "curriculum"),
    ({"task": [{"name": "addition"}], "eval_path": {"new": "x"}}, "no reward function applies to the set 'new'"),
])  # fmt: skip
def test_refuses_by_name(arguments, message):
    with pytest.raises(UsageError, match=message):
        PromptDataModule(**arguments)


def test_preferences_have_one_evaluation_set():
    with pytest.raises(UsageError, match="eval_path=.* where a single text should be"):
        PreferenceDataModule("paths", eval_path={"a": "b"})


def test_held_out_records_are_divided_equally_and_may_be_missing(tmp_path):
    mixture = Mixture([{"name": "addition", "weight": 9}, {"name": "sort"}, {"path": sums(tmp_path, "mine")}])
    assert Counter(r["data_source"] for r in mixture.load("test", 6)) == {"addition": 2, "sort": 2}
    with pytest.raises(UsageError, match="no source has held-out records"):
        Mixture([{"path": sums(tmp_path, "mine")}]).load("test", 4)
