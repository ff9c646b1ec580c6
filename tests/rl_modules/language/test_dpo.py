"""DPO: against plain forward passes, hand-made batches, and a preference task whose optimum is known."""

import itertools
import math
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from datamodules.language.preference import PreferenceDataModule
from datamodules.language.sequences import Pairs
from rl_modules import DPO, KTO
from rl_modules.common.errors import UsageError
from rl_modules.functional import dpo_loss
from rl_modules.language.fast.packing import can_pack_pairs
from rl_modules.language.pairs import pair_log_probs
from tests.conformance.architectures import ARCHITECTURES
from tests.training import assert_equal_checkpoints

from .preferences import FAMILIES, PAIRS, TINY, Save, plain_log_prob, sgd, weights, write


def model(**arguments: Any) -> DPO:
    return DPO(**{"model_config": TINY, "learning_rate": 1e-3, "beta": 0.5, **arguments})


@pytest.fixture
def data(tmp_path):
    path = write(tmp_path / "pairs.jsonl", PAIRS)

    def make(**arguments: Any) -> PreferenceDataModule:
        return PreferenceDataModule(**{"path": path, "eval_path": path, "batch_size": 6, **arguments})

    return make


class Names(DummyLogger):
    """Remembers what was logged."""

    def __init__(self):
        super().__init__()
        self.seen: dict[str, float] = {}

    def log_metrics(self, metrics, step=None):
        self.seen |= metrics


# -------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_each_text_alone(family, packing, attention):
    module = model(model_config=FAMILIES[family], attn_implementation=attention)
    module.configure_model()
    prompts, chosen, rejected = [[5, 6, 7], [3], [8, 9]], [[9, 1], [10, 11, 1], [1]], [[12, 13, 14, 1], [1], [15, 1]]
    batch = Pairs(prompts, chosen, rejected).batch(torch.arange(3), packing)
    assert ("segment" in batch) == packing
    log_prob, counts = pair_log_probs(module.model, batch)
    assert counts.sum(-1).tolist() == [2, 3, 1, 4, 1, 2]
    assert (log_prob[~counts] == 0).all()
    answers = [*zip(prompts, chosen, strict=True), *zip(prompts, rejected, strict=True)]
    alone = torch.stack([plain_log_prob(module.model, *answer) for answer in answers])
    torch.testing.assert_close(log_prob.sum(-1), alone, atol=1e-5, rtol=1e-5)
    factor = torch.arange(1.0, 7.0)
    parameters = [p for p in module.model.parameters() if p.requires_grad]
    ours = torch.autograd.grad((log_prob.sum(-1) * factor).sum(), parameters)
    expected = torch.autograd.grad((alone * factor).sum(), parameters)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("config", "packs", "attention"), [
    *((config, True, attention) for config in FAMILIES.values() for attention in ("sdpa", "eager")),
    # Its positions are distances, which a mask of pairs does not carry; transformers has no sdpa for it.
    ({"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}, False, "eager"),
    # States run on from text to text, without attention.
    ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}, False, "eager"),
    ({"model_type": "mistral", **TINY, "sliding_window": 8}, False, "sdpa"),
    ({"model_type": "mistral", **TINY, "sliding_window": 8}, False, "eager"),
])  # fmt: skip
def test_packing_is_used_where_it_changes_nothing(config, packs, attention):
    module = model(model_config=config, attn_implementation=attention)
    module.configure_model()
    # Larger weights than new ones, so that a wrong mask shows.
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    assert module.can_pack == packs


@pytest.mark.parametrize("name", ["Gemma-3", "GPT-Neo"])
def test_windows_longer_than_what_is_compared_are_not_packed(name):
    """A window of a composite model is in the config of its language model; GPT-Neo's has a name of its own."""
    long = {"window_size": 64} if name == "GPT-Neo" else {
        "text_config": {**ARCHITECTURES[name]["text_config"], "sliding_window": 64}
    }  # fmt: skip
    module = model(model_config={**ARCHITECTURES[name], **long})
    module.configure_model()
    assert not module.can_pack


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_leak_smaller_than_rounding_is_found(dtype):
    """LFM2's convolutions reach into the answer before; with initial weights that changes few digits."""
    module = model(model_config=ARCHITECTURES["LFM2"], torch_dtype=dtype)
    module.configure_model()
    assert not module.can_pack


def test_a_reference_that_can_not_pack_is_not_packed(tmp_path):
    other = model(model_config={"model_type": "mistral", **TINY, "sliding_window": 64})
    other.configure_model()
    other.export(tmp_path / "reference")
    module = model(ref_model_name_or_path=str(tmp_path / "reference"))
    module.configure_model()
    assert can_pack_pairs(module.model) and not module.can_pack


# -------------------------------------------------------------------- the step


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("arguments", [
    {}, {"loss_type": "ipo"}, {"loss_type": "hinge"}, {"loss_type": "robust", "label_smoothing": 0.1},
    {"label_smoothing": 0.2}, {"rpo_alpha": 0.7}, {"reference_free": True},
])  # fmt: skip
def test_step_is_the_loss_of_each_unpadded_sequence(arguments, packing, make_trainer, data):
    module, pairs = model(optimizer=sgd, logging_steps=1, **arguments), data(packing=packing)
    expected, reference = [], {}

    class Check(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rows = pairs.rows_of_step(len(expected)).tolist()
            sides = ("chosen_ids", "rejected_ids")
            with torch.no_grad():
                for i, side in itertools.product(range(len(pairs.train_records)), sides) if not reference else ():
                    record = pairs.train_records[i]
                    reference[i, side] = plain_log_prob(module.model, record["prompt_ids"], record[side])
                ours, theirs, lengths = ([[], []] for _ in range(3))
                for i, (k, side) in itertools.product(rows, enumerate(sides)):
                    record = pairs.train_records[i]
                    ours[k].append(plain_log_prob(module.model, record["prompt_ids"], record[side]))
                    theirs[k].append(reference[i, side] if "reference_free" not in arguments else torch.zeros(()))
                    lengths[k].append(len(record[side]))
            likelihood = -torch.stack(ours[0]).sum() / sum(lengths[0])
            scale = (
                torch.tensor(lengths, dtype=torch.float32) if arguments.get("loss_type") == "ipo" else torch.ones(2, 6)
            )
            policy, ref = torch.tensor(ours) / scale, torch.tensor(theirs) / scale
            options = (0.5, arguments.get("loss_type", "sigmoid"), arguments.get("label_smoothing", 0.0))
            loss = dpo_loss(*policy, *ref, *options) + arguments.get("rpo_alpha", 0.0) * likelihood
            expected.append(loss.item())

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert ("segment" in batch) == packing
            assert float(outputs["loss"]) == pytest.approx(expected[-1], rel=1e-5, abs=1e-6)

    # Six steps are one and a half passes: the last ones read the table of reference log-probabilities.
    make_trainer(max_steps=6, callbacks=[Check()]).fit(module, datamodule=pairs)
    assert len(expected) == 6 and expected[0] != expected[-1]
    assert module.latest_metrics["train/loss"] == pytest.approx(expected[-1], rel=1e-5, abs=1e-6)
    if arguments == {}:
        assert expected[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_micro_batches_do_not_change_the_step(make_trainer, data, packing):
    results = []
    for micro in (1, 2, 4):  # 6 pairs in 4 parts: 2, 2, 1 and 1
        module = model(optimizer=sgd, rpo_alpha=0.5)
        make_trainer(max_steps=3, accumulate_grad_batches=micro).fit(module, datamodule=data(packing=packing))
        results.append(weights(module))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[2], results[0], atol=1e-6, rtol=1e-5)


@pytest.mark.long
def test_two_ranks_take_the_step_of_one_with_twice_the_pairs(make_trainer, data, tmp_path):
    module = model(optimizer=sgd, rpo_alpha=0.5)
    trainer = make_trainer(max_steps=5)
    trainer.fit(module, datamodule=data(batch_size=6))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    two = make_trainer(max_steps=5, devices=2, strategy="ddp_fork", callbacks=[Save(tmp_path / "two.ckpt")])
    two.fit(model(optimizer=sgd, rpo_alpha=0.5), datamodule=data(batch_size=3, eval_steps=3))
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "two.ckpt"))
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(other["state_dict"][name], value, atol=1e-6, rtol=1e-5)
    states = [other["run"], *(rank["run"] for rank in other["other_ranks"])]
    ranks = torch.stack(
        [table for state in states for key, table in state["tables"].items() if key.startswith("train")]
    )
    assert ranks.shape == (2, 24, 2)
    assert (ranks.isnan().any(-1).sum(0) < 2).all()  # each pair was visited by one rank at least


# -------------------------------------------------------------------- the reference


def count_reference_passes(monkeypatch):
    calls = []
    compute = DPO._compute_reference
    monkeypatch.setattr(DPO, "_compute_reference", lambda self, batch: calls.append(1) or compute(self, batch))
    return calls


def test_the_reference_is_read_once_per_pair(make_trainer, data, monkeypatch):
    calls = count_reference_passes(monkeypatch)
    make_trainer(max_steps=12).fit(model(), datamodule=data())  # three passes of four steps
    assert len(calls) == 4


def test_the_reference_stays_where_the_policy_started(make_trainer, data):
    module = model(learning_rate=1e-2)
    make_trainer(max_steps=6).fit(module, datamodule=data())
    start = model()
    start.configure_model()
    for name, value in start.model.state_dict().items():
        torch.testing.assert_close(module.reference.state_dict()[name], value, rtol=0, atol=0)
    assert not torch.equal(weights(module), weights(start))


def test_under_lora_the_reference_is_the_model_without_adapters(make_trainer, data):
    module = model(lora={"r": 4, "init_lora_weights": False})
    make_trainer(max_steps=2).fit(module, datamodule=data())
    assert module.reference is None
    batch = Pairs([[5, 6, 7]], [[9, 1]], [[12, 13, 1]]).batch(torch.arange(1), packing=False)
    chosen, rejected = module.reference_log_probs(batch, "train")
    with module.model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(chosen[0], plain_log_prob(module.model, [5, 6, 7], [9, 1]))
        torch.testing.assert_close(rejected[0], plain_log_prob(module.model, [5, 6, 7], [12, 13, 1]))
    with torch.no_grad():
        assert chosen[0] != plain_log_prob(module.model, [5, 6, 7], [9, 1])


def test_another_reference(make_trainer, data, tmp_path):
    other = model(model_config={**TINY, "num_hidden_layers": 2})
    other.configure_model()
    other.export(tmp_path / "reference")
    module = model(ref_model_name_or_path=str(tmp_path / "reference"))
    make_trainer(max_steps=1).fit(module, datamodule=data())
    assert torch.equal(torch.cat([p.flatten() for p in module.reference.parameters()]), weights(other))


def test_a_second_fit_on_other_pairs_reads_the_reference_anew(make_trainer, data, tmp_path, monkeypatch):
    module = model()
    make_trainer(max_steps=4).fit(module, datamodule=data())
    calls = count_reference_passes(monkeypatch)
    path = write(tmp_path / "other.jsonl", [{**row, "chosen": row["chosen"] + "!"} for row in PAIRS])
    make_trainer(max_steps=4).fit(module, datamodule=data(path=path))
    assert len(calls) == 4


# A pass has 4 steps of 2 micro-batches: in its middle, at its end, inside of a step of the next.
@pytest.mark.long
@pytest.mark.parametrize("stop", [4, pytest.param(8, marks=pytest.mark.slow), pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", [{}, {"lora": {"r": 4}}, {"reference_free": True}])
def test_a_resumed_run_is_the_uninterrupted_one(make_trainer, data, tmp_path, stop, arguments):
    def run(**options: Any) -> L.Trainer:
        trainer = make_trainer(max_steps=8, accumulate_grad_batches=2, **options)
        checkpoint = tmp_path / "part.ckpt" if not options else None
        trainer.fit(model(**arguments), datamodule=data(eval_steps=3), ckpt_path=checkpoint, weights_only=True)
        return trainer

    run(callbacks=[Save(tmp_path / "part.ckpt", stop)]).save_checkpoint(tmp_path / "whole.ckpt")
    run().save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def test_a_resumed_run_reads_the_table_of_its_checkpoint(make_trainer, data, tmp_path, monkeypatch):
    trainer = make_trainer(max_steps=4)
    trainer.fit(model(), datamodule=data())
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    calls = count_reference_passes(monkeypatch)
    make_trainer(max_steps=8).fit(model(), datamodule=data(), ckpt_path=tmp_path / "part.ckpt", weights_only=True)
    assert calls == []


@pytest.mark.long
def test_a_checkpoint_loads_alone_and_judges(make_trainer, data, tmp_path):
    module = model()
    trainer = make_trainer(max_steps=3)
    trainer.fit(module, datamodule=data())
    trainer.save_checkpoint(tmp_path / "dpo.ckpt")
    loaded = DPO.load_from_checkpoint(tmp_path / "dpo.ckpt", weights_only=True)
    results = [make_trainer().test(m, datamodule=data(), verbose=False)[0] for m in (module, loaded)]
    assert results[0] == results[1]
    assert {"eval/loss", "eval/rewards/accuracies", "eval/rewards/margins", "eval/logps/chosen"} <= set(results[0])


# -------------------------------------------------------------------- metrics


def test_metrics_are_trls(make_trainer, data):
    logger = Names()
    module = model(logging_steps=1, rpo_alpha=1.0)
    make_trainer(max_steps=4, logger=logger).fit(module, datamodule=data(eval_steps=2))
    names = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
    names += ["logps/chosen", "logps/rejected", "loss"]
    trained = {f"train/{name}" for name in (*names, "nll_loss", "num_tokens", "grad_norm")}
    assert trained | {f"eval/{name}" for name in names} <= set(logger.seen)
    seen = {name.removeprefix("train/"): value for name, value in logger.seen.items()}
    assert seen["rewards/margins"] == pytest.approx(seen["rewards/chosen"] - seen["rewards/rejected"], abs=1e-5)
    assert 0 <= seen["rewards/accuracies"] <= 1


def test_the_held_out_loss_has_the_likelihood_term(make_trainer, data):
    pairs = data(eval_steps=2)
    module = model(rpo_alpha=0.5)
    [metrics] = make_trainer().validate(module, pairs, verbose=False)
    chosen = [(record["prompt_ids"], record["chosen_ids"]) for record in pairs.eval_records]
    with torch.no_grad():
        likelihood = -sum(float(plain_log_prob(module.model, *ids)) for ids in chosen) / sum(len(y) for _, y in chosen)
    # Policy and reference are the same, so the loss of every pair is log 2.
    assert metrics["eval/loss"] == pytest.approx(math.log(2) + 0.5 * likelihood, rel=1e-5)


def test_predictions_are_implicit_rewards(make_trainer, data):
    module = model()
    make_trainer(max_steps=4).fit(module, datamodule=data())
    (batch,) = make_trainer().predict(module, datamodule=data())
    assert [row["chosen"] for row in batch["texts"]] == [row["chosen"] for row in PAIRS]
    tokenizer, row = module.tokenizer, PAIRS[5]
    ids = tokenizer(row["prompt"]).input_ids, [*tokenizer(row["chosen"]).input_ids, tokenizer.eos_token_id]
    with torch.no_grad():
        expected = 0.5 * (plain_log_prob(module.model, *ids) - plain_log_prob(module.reference, *ids))
    assert batch["chosen_reward"][5].item() == pytest.approx(expected.item(), abs=1e-5)


# -------------------------------------------------------------------- learning


@pytest.mark.long
def test_the_policy_becomes_the_reference_tilted_by_the_reward(make_trainer, tmp_path):
    """π = π_ref exp(r/β) / Z where preferences are Bradley and Terry's with reward r: DPO's eq. 4."""
    rewards = {"a": 0.0, "b": 0.5, "c": 1.0, "de": -0.5, "f": 0.25}
    beta, copies = 0.5, 40
    rows = []
    for prompt, sign in (("x=", 1.0), ("y=", -1.0)):  # what is good behind one prompt is bad behind the other
        for one, other in itertools.combinations(rewards, 2):
            wins = round(copies / (1 + math.exp(-sign * (rewards[one] - rewards[other]))))
            rows += [{"prompt": prompt, "chosen": one, "rejected": other}] * wins
            rows += [{"prompt": prompt, "chosen": other, "rejected": one}] * (copies - wins)
    path = write(tmp_path / "pairs.jsonl", rows)
    module = model(beta=beta, learning_rate=3e-3, lr_scheduler_type="cosine")
    pairs = PreferenceDataModule(path=path, batch_size=len(rows) // 4)
    make_trainer(max_steps=160).fit(module, datamodule=pairs)

    tokenizer = module.tokenizer
    for prompt, sign in (("x=", 1.0), ("y=", -1.0)):
        ids = [
            (tokenizer(prompt).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]) for answer in rewards
        ]
        with torch.no_grad():
            policy, reference = (
                torch.stack([plain_log_prob(network, *answer) for answer in ids])
                for network in (module.model, module.reference)
            )
        optimum = (reference + sign * torch.tensor(list(rewards.values())) / beta).softmax(0)
        distance = (policy.softmax(0) - optimum).abs().sum() / 2
        assert (reference.softmax(0) - optimum).abs().sum() / 2 > 0.15  # there was something to learn
        assert distance <= 0.05


# -------------------------------------------------------------------- a new loss, refusals


class SimPO(DPO):
    """SimPO: mean log-probabilities, a margin, no reference."""

    def loss(self, chosen, rejected, ref_chosen, ref_rejected, chosen_length, rejected_length):
        from rl_modules import functional as F

        return F.simpo_loss(chosen / chosen_length, rejected / rejected_length, self.beta, 0.3)


def test_another_loss_is_a_subclass_with_one_method(make_trainer, data):
    module = SimPO(model_config=TINY, learning_rate=1e-2, beta=2.0, reference_free=True, logging_steps=1)
    make_trainer(max_steps=20).fit(module, datamodule=data())
    assert module.latest_metrics["train/loss"] < 0.5


def test_training_in_bfloat16(make_trainer, data):
    module = model()
    make_trainer(max_steps=2, precision="bf16-mixed").fit(module, datamodule=data())
    assert weights(module).isfinite().all()


def test_it_writes_completions(make_trainer, data):
    module = model(max_completion_length=5)
    make_trainer(max_steps=1).fit(module, datamodule=data())
    written = module.act([module.tokenizer("1+1=").input_ids], [0, 1], 2)
    assert written.tokens.shape[0] == 2


@pytest.mark.parametrize("make", [DPO, KTO])
def test_the_reference_follows_the_policy_and_its_table_begins_again(make, make_trainer, data):
    """TR-DPO, arXiv:2404.09656: a soft update every so many steps, whose log-probabilities are those of the new
    reference.
    """
    module = make(model_config=TINY, learning_rate=1e-2, sync_ref_model=True, ref_model_sync_steps=2,
                  ref_model_mixup_alpha=0.25)  # fmt: skip
    policies, references = [], []

    class Remember(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *others):
            references.append(torch.cat([p.flatten() for p in pl_module.reference.parameters()]))
            policies.append(torch.cat([p.detach().flatten() for p in pl_module.model.parameters()]))
            kept = torch.stack(pl_module.reference_log_probs(next(iter(seen)), "train"))
            now = torch.stack(pl_module.reference_log_probs({**next(iter(seen)), "index": None}, "train"))
            torch.testing.assert_close(kept, now, atol=1e-5, rtol=1e-5)

    seen: list[Any] = []

    class Kept(type(module)):
        def training_step(self, batch, batch_idx):
            seen[:] = [batch]
            return super().training_step(batch, batch_idx)

        def reference_log_probs(self, batch, data):
            return super().reference_log_probs({k: v for k, v in batch.items() if v is not None}, data)

    module.__class__ = Kept
    make_trainer(max_steps=5, callbacks=[Remember()]).fit(module, datamodule=data())
    for step in (1, 3):
        assert torch.equal(references[step], references[step - 1]) and not torch.equal(*references[step : step + 2])
        torch.testing.assert_close(references[step + 1], 0.25 * policies[step] + 0.75 * references[step])


def test_simpo_cpo_and_orpo_keep_no_reference(make_trainer, data):
    for name in ("simpo", "cpo", "orpo"):
        module = model(loss_type=name, learning_rate=1e-2, logging_steps=1)
        make_trainer(max_steps=12).fit(module, datamodule=data())
        assert module.reference is None
        assert module.latest_metrics["train/rewards/accuracies"] > 0.9, name
        assert ("train/nll_loss" in module.latest_metrics) == (name != "simpo")


def test_orpo_is_the_likelihood_and_the_odds_ratio():
    module = model(loss_type="orpo", beta=0.3)
    module.configure_model()
    module.record = lambda *weight, **metrics: None
    prompts, chosen, rejected = [[5, 6, 7], [3], [8, 9]], [[9, 1], [10, 11, 1], [1]], [[12, 13, 14, 1], [1], [15, 1]]
    pairs = Pairs(prompts, chosen, rejected)
    batch = {**pairs.batch(torch.arange(3), False), "n_micro": 1, "step_pairs": 3, "step_chosen_tokens": 6,
             "num_tokens": 0}  # fmt: skip
    means = [[plain_log_prob(module.model, p, a) / len(a) for p, a in zip(prompts, side, strict=True)]
             for side in (chosen, rejected)]  # fmt: skip
    expected = -sum(mean * len(a) for mean, a in zip(means[0], chosen, strict=True)) / 6
    odds = [[m.exp() / (1 - m.exp()) for m in side] for side in means]
    expected -= sum(0.3 * (c / r).log().sigmoid().log() for c, r in zip(*odds, strict=True)) / 3
    torch.testing.assert_close(module.training_step(batch, 0), expected)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"loss_type": ["sigmoid", "sigmoid"]}, "must name different losses"),
    ({"loss_type": "sft"}, "must name different losses, and at least one of two answers"),
    ({"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0]}, "are 1 numbers for loss_type"),
    ({"loss_weights": [-1.0]}, "must be finite numbers above 0, one per loss"),
    ({"loss_type": ["sigmoid", "sft"], "rpo_alpha": 1.0}, "weigh the same term"),
    ({"loss_type": "exo_pair"}, "label_smoothing=0 leaves loss_type='exo_pair' without a bound"),
    ({"loss_type": "aot", "f_divergence_type": "forward_kl"}, "is not defined for loss_type='aot'"),
    ({"loss_type": "simpo", "ref_model_name_or_path": "x"}, "simpo has no reference policy"),
    ({"loss_type": ["cpo", "hinge"]}, "cpo has no reference policy; give it no other loss"),
    ({"ld_alpha": 1.5}, "ld_alpha=1.5 must lie in"),
    ({"sync_ref_model": True, "lora": {"r": 2}}, "can't move the reference under lora"),
    ({"beta": 0.0}, "beta=0.0 must be a finite number above 0"),
    ({"loss_type": "logistic"}, "loss_type='logistic' must be one of sigmoid, robust, hinge, ipo"),
    ({"label_smoothing": 0.5}, "label_smoothing=0.5 must lie in"),
    ({"rpo_alpha": 0.0}, "rpo_alpha=0.0 must be a finite number above 0"),
    ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1"),
])  # fmt: skip
def test_refuses_arguments_by_name(arguments, message):
    with pytest.raises(UsageError, match=message):
        model(**arguments)


def test_refuses_what_it_cannot_learn_from(make_trainer, data, tmp_path):
    judged = write(tmp_path / "judged.jsonl", [{"prompt": "1+1=", "completion": "2", "label": True}])
    with pytest.raises(UsageError, match=r"judged.jsonl:1: 'label' with 'completion' is a judgement .* DPO needs"):
        make_trainer(max_steps=1).fit(model(), datamodule=data(path=judged))
    empty = write(tmp_path / "empty.jsonl", [*PAIRS, *({**row, "prompt": ""} for row in PAIRS)])
    with pytest.raises(UsageError, match=rf"empty.jsonl:{len(PAIRS) + 1}: 'prompt' is empty, .*; write one"):
        make_trainer(max_steps=1).fit(model(), datamodule=data(path=empty))


def test_a_checkpoint_holds_plain_data_only(make_trainer, data, tmp_path):
    trainer = make_trainer(max_steps=1)
    trainer.fit(model(), datamodule=data())
    trainer.save_checkpoint(tmp_path / "dpo.ckpt")
    checkpoint = torch.load(tmp_path / "dpo.ckpt", weights_only=True)
    assert checkpoint["algorithm"] == "DPO"
    assert [table.shape for table in checkpoint["run"]["tables"].values()] == [(24, 2)]
