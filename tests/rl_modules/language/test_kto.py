"""KTO: against plain forward passes, and a task whose good answers are known."""

from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset
from lightning.pytorch.loggers.logger import DummyLogger

from datamodules.language.formats import as_judgement
from datamodules.language.preference import PreferenceDataModule
from rl_modules import KTO
from rl_modules.common.errors import UsageError
from rl_modules.functional import kto_loss
from tests.training import assert_equal_checkpoints

from .preferences import JUDGEMENTS, PAIRS, TINY, Save, plain_log_prob, sgd, weights, write


def model(**arguments: Any) -> KTO:
    return KTO(**{"model_config": TINY, "learning_rate": 1e-3, "beta": 0.5, **arguments})


@pytest.fixture
def data(tmp_path):
    path = write(tmp_path / "judgements.jsonl", JUDGEMENTS)

    def make(**arguments: Any) -> PreferenceDataModule:
        return PreferenceDataModule(**{"path": path, "eval_path": path, "batch_size": 10, **arguments})

    return make


@pytest.mark.long
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("arguments", [
    {}, {"desirable_weight": 1.3, "undesirable_weight": 0.0}, {"loss_type": "apo_zero_unpaired"}
])  # fmt: skip
def test_step_is_the_loss_of_each_unpadded_sequence(arguments, packing, make_trainer, data):
    module, judgements = model(optimizer=sgd, **arguments), data(packing=packing)
    expected, kls, reference = [], [], {}

    class Check(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            records = judgements.train_records
            rows = judgements.rows_of_step(len(expected)).tolist()
            with torch.no_grad():
                if not reference:
                    for i, record in enumerate(records):
                        for side in ("chosen_ids", "rejected_ids"):
                            reference[i, side] = plain_log_prob(module.model, record["prompt_ids"], record[side])
                own, other = (
                    torch.stack(
                        [plain_log_prob(module.model, records[i]["prompt_ids"], records[i][side]) for i in rows]
                    )
                    for side in ("chosen_ids", "rejected_ids")
                )
            ref, ref_other = (torch.stack([reference[i, s] for i in rows]) for s in ("chosen_ids", "rejected_ids"))
            label = torch.tensor([records[i]["label"] for i in rows])
            kls.append((other - ref_other).mean().clamp(min=0).item())
            point = 0.0 if "loss_type" in arguments else kls[-1]
            options = arguments.get("desirable_weight", 1.0), arguments.get("undesirable_weight", 1.0)
            expected.append(kto_loss(own, ref, label, point, 0.5, *options).item())

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert ("segment" in batch) == packing
            assert float(outputs["loss"]) == pytest.approx(expected[-1], rel=1e-5, abs=1e-6)

    make_trainer(max_steps=6, callbacks=[Check()]).fit(module, datamodule=judgements)
    assert len(expected) == 6 and expected[0] != expected[-1]
    # Where bad answers push nothing down, all answers become likelier, the mismatched ones too.
    assert "desirable_weight" not in arguments or max(kls) > 0.1


def test_mismatched_answers_are_those_of_other_prompts(make_trainer, data):
    judgements = data()
    make_trainer(max_steps=1).fit(model(), datamodule=judgements)
    records = judgements.train_records
    assert len(records) == len(JUDGEMENTS)
    answers = {tuple(record["chosen_ids"]) for record in records}
    for i, record in enumerate(records):
        partner = records[(i + len(records) // 2) % len(records)]
        assert record["rejected_ids"] == partner["chosen_ids"]
        assert record["prompt_ids"] != partner["prompt_ids"]
        assert tuple(record["rejected_ids"]) in answers


@pytest.mark.long
def test_pairs_become_judgements(make_trainer, data, tmp_path):
    judgements = data(path=write(tmp_path / "pairs.jsonl", PAIRS))
    make_trainer(max_steps=1).fit(model(), datamodule=judgements)
    found = {(record["prompt"], record["completion"], record["label"]) for record in judgements.train_records}
    expected = {(row["prompt"], row["chosen"], True) for row in PAIRS}
    assert found == expected | {(row["prompt"], row["rejected"], False) for row in PAIRS}
    tasks = PreferenceDataModule(task="paths", n_train=16, batch_size=4, n_demonstrations=4)
    make_trainer(max_steps=1).fit(model(), datamodule=tasks)
    assert len(tasks.train_records) == 32


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_table_may_hold_pairs_beside_judgements(make_trainer, data, tmp_path, suffix):
    single = [{"prompt": f"{a}+9=", "completion": str(a + 9), "label": a % 2 == 0} for a in range(4)]
    names = ("prompt", "chosen", "rejected", "completion", "label")
    table = Dataset.from_list([{name: row.get(name) for name in names} for row in [*PAIRS, *single]])
    path = str(tmp_path / f"mixed.{suffix}")
    table.to_parquet(path) if suffix == "parquet" else table.to_csv(path)
    judgements = data(path=path)
    make_trainer(max_steps=1).fit(model(), datamodule=judgements)
    found = {(record["prompt"], record["completion"], record["label"]) for record in judgements.train_records}
    expected = {(row["prompt"], row["chosen"], True) for row in PAIRS}
    expected |= {(row["prompt"], row["rejected"], False) for row in PAIRS}
    assert found == expected | {(row["prompt"], row["completion"], row["label"]) for row in single}


@pytest.mark.long
def test_micro_batches_of_one_kind_of_answer(make_trainer, data, tmp_path):
    """A micro-batch may hold good answers only; a mean over none is no metric, and no NaN."""
    good = write(tmp_path / "good.jsonl", [row for row in JUDGEMENTS if row["label"]])
    module = model(logging_steps=1)
    make_trainer(max_steps=2, accumulate_grad_batches=5).fit(module, datamodule=data(path=good, eval_steps=1))
    assert weights(module).isfinite().all()
    assert "train/rewards/chosen" in module.latest_metrics and "train/rewards/rejected" not in module.latest_metrics


@pytest.mark.parametrize("label", [True, False])
def test_held_out_answers_of_one_kind(make_trainer, data, tmp_path, label):
    """There is no margin to be the best in, nor a mean over none."""
    one = write(tmp_path / "one.jsonl", [row for row in JUDGEMENTS if row["label"] is label])
    module, trainer = model(), make_trainer(max_steps=2)
    trainer.fit(module, datamodule=data(eval_path=one, eval_steps=1))
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
    side, other = ("chosen", "rejected") if label else ("rejected", "chosen")
    assert f"eval/rewards/{side}" in found and f"eval/rewards/{other}" not in found
    assert all(value == value for value in found.values())
    assert module.best_metric == ("eval/loss", "min")
    trainer.fit(module, datamodule=data(eval_steps=1))
    assert module.best_metric == ("eval/rewards/margins", "max")


@pytest.mark.long
@pytest.mark.parametrize("stop", [4, 8, 11])
def test_a_resumed_run_is_the_uninterrupted_one(make_trainer, data, tmp_path, stop):
    def run(**options: Any) -> L.Trainer:
        trainer = make_trainer(max_steps=8, accumulate_grad_batches=2, **options)
        checkpoint = tmp_path / "part.ckpt" if not options else None
        trainer.fit(model(), datamodule=data(eval_steps=3), ckpt_path=checkpoint, weights_only=True)
        return trainer

    run(callbacks=[Save(tmp_path / "part.ckpt", stop)]).save_checkpoint(tmp_path / "whole.ckpt")
    run().save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@pytest.mark.long
def test_two_ranks_share_the_kl_estimate(make_trainer, data, tmp_path):
    trainer = make_trainer(max_steps=3)
    trainer.fit(model(optimizer=sgd), datamodule=data(batch_size=8))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    two = make_trainer(max_steps=3, devices=2, strategy="ddp_fork", callbacks=[Save(tmp_path / "two.ckpt")])
    two.fit(model(optimizer=sgd), datamodule=data(batch_size=4, eval_steps=3))
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "two.ckpt"))
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(other["state_dict"][name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.long
def test_good_answers_gain_on_bad_ones(make_trainer, data):
    seen: dict[str, float] = {}

    class Names(DummyLogger):
        def log_metrics(self, metrics, step=None):
            seen.update(metrics)

    module = model(learning_rate=3e-3, logging_steps=1)
    make_trainer(max_steps=60, logger=Names()).fit(module, datamodule=data(eval_steps=60))
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "loss", "kl"}
    assert {f"{group}/{name}" for group in ("train", "eval") for name in names} <= set(seen)
    assert seen["eval/rewards/margins"] == pytest.approx(
        seen["eval/rewards/chosen"] - seen["eval/rewards/rejected"], abs=1e-4
    )
    assert seen["eval/rewards/margins"] > 1
    assert seen["eval/loss"] < 0.35


@pytest.mark.parametrize("micro", [1, 2])
def test_tokens_are_those_of_the_judged_answers_and_their_prompts(make_trainer, data, micro):
    module, judgements = model(), data(batch_size=len(JUDGEMENTS))
    make_trainer(max_steps=2, accumulate_grad_batches=micro).fit(module, datamodule=judgements)
    once = sum(len(record["prompt_ids"]) + len(record["chosen_ids"]) for record in judgements.train_records)
    assert module.num_tokens == 2 * once


def test_predictions_are_implicit_rewards(make_trainer, data):
    module = model()
    make_trainer(max_steps=3).fit(module, datamodule=data())
    (batch,) = make_trainer().predict(module, datamodule=data())
    assert [(t["completion"], t["label"]) for t in batch["texts"]] == [
        (r["completion"], r["label"]) for r in JUDGEMENTS
    ]
    assert batch["reward"].shape == (len(JUDGEMENTS),)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"loss_type": "bco"}, "loss_type='bco' must be one of kto, apo_zero_unpaired"),
    ({"desirable_weight": -1.0}, "desirable_weight=-1.0 must be"),
    ({"undesirable_weight": -1.0}, "undesirable_weight=-1.0 must be"),
])  # fmt: skip
def test_refuses_arguments_by_name(arguments, message):
    with pytest.raises(UsageError, match=message):
        model(**arguments)


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "a", "completion": "b"}, "line 1: 'completion' and 'label', or .* the columns 'prompt', 'completion'"),
    ({"prompt": "a", "completion": "b", "label": "good"}, "line 1: 'label' is 'good', where true or false"),
    ({"prompt": "a", "completion": [{"role": "user", "content": "b"}] * 2, "label": 1}, "of user, user, where"),
    ({"prompt": "a", "completion": [{"role": "user", "content": "b"}], "label": 1}, "of user, where the last one"),
])  # fmt: skip
def test_refuses_records_by_place(row, message):
    with pytest.raises(UsageError, match=message):
        as_judgement(row, "line 1")


def test_an_empty_prompt_is_named_by_its_line(make_trainer, data, tmp_path):
    path = write(tmp_path / "empty.jsonl", [*JUDGEMENTS, {**JUDGEMENTS[0], "prompt": ""}])
    with pytest.raises(UsageError, match=rf"empty.jsonl:{len(JUDGEMENTS) + 1}: 'prompt' is empty"):
        make_trainer(max_steps=1).fit(model(), datamodule=data(path=path))


def test_forms_of_a_judgement():
    message = [{"role": "assistant", "content": "b"}]
    assert as_judgement({"prompt": "a", "completion": message, "label": 1}, "") == {
        "prompt": "a", "completion": "b", "label": True
    }  # fmt: skip
    assert as_judgement({"chosen": "x y", "rejected": "x z"}, "")["prompt"] == "x"
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert as_judgement({**pair, "completion": "d"}, "") == pair  # nothing says that d is good


@pytest.mark.parametrize(
    ("cell", "label"), [("True", True), ("false", False), ("1", True), ("0", False), ("0.0", False)]
)
def test_a_csv_file_writes_its_labels_as_texts(cell, label):
    assert as_judgement({"prompt": "a", "completion": "b", "label": cell}, "")["label"] is label


def test_overlong_answers_are_refused_or_left_out(make_trainer, data, tmp_path):
    path = write(tmp_path / "long.jsonl", [*JUDGEMENTS, {"prompt": "1+1=", "completion": "2" * 40, "label": False}])
    with pytest.raises(UsageError, match=r"answers are longer than 20 tokens \(record \d+ has 45 tokens\)"):
        make_trainer(max_steps=1).fit(model(), datamodule=data(path=path, max_length=20))
    judgements = data(path=path, max_length=20, overlong="drop")
    make_trainer(max_steps=1).fit(model(), datamodule=judgements)
    assert len(judgements.train_records) == len(JUDGEMENTS)
