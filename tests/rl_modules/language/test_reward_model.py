"""Reward models: against Transformers' own forward pass, hand-made tables, closed forms and torchmetrics."""

import json
import math
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from datamodules.language.preference import PreferenceDataModule
from datamodules.language.sequences import Pairs
from rl_modules.common.errors import UsageError
from rl_modules.language.critics import sequence_scores
from rl_modules.language.fast.packing import can_pack_scores
from rl_modules.language.pairs import pair_scores
from rl_modules.language.preference_metrics import PreferenceMetrics, Reliability, reliability_diagram
from rl_modules.language.reward_model import RewardModel, initialize_head, load_reward_model
from rl_modules.language.tokenizer import character_tokenizer, load_tokenizer
from tests.training import assert_equal_checkpoints

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
FAMILIES = {
    "qwen2": TINY,
    "llama": {"model_type": "llama", **TINY},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                 "num_attention_heads": 2},
}  # fmt: skip
ROWS = [
    {
        "prompt": f"{a}+{b}=",
        "chosen": str(a + b),
        "rejected": str(a + b)[:-1] + "x" * (1 + a % 3),
        "margin": 0.5 * (b % 2),
    }
    for a in range(6)
    for b in range(4)
]


def model(**arguments: Any) -> RewardModel:
    return RewardModel(**{"model_config": TINY, **arguments})


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")

    def make(**arguments: Any) -> PreferenceDataModule:
        return PreferenceDataModule(path=str(path), eval_path=str(path), **{"batch_size": 6, **arguments})

    return make


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def weights(module: RewardModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.model.parameters()])


# -------------------------------------------------------------------- the loss


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_step_is_bradley_terrys_loss_of_each_unpadded_sequence(family, packing, make_trainer, data):
    module, pairs = model(model_config=FAMILIES[family], center_rewards_coefficient=0.1), data(packing=packing)
    seen = []

    class Check(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rows = pairs.rows_of_step(len(seen))
            rows = rows[pairs.train_pairs.longest[rows].argsort(stable=True)].tolist()
            scores = []
            with torch.no_grad():
                for answer in ("chosen_ids", "rejected_ids"):
                    for i in rows:
                        ids = torch.tensor([pairs.train_records[i]["prompt_ids"] + pairs.train_records[i][answer]])
                        # Transformers' own head; one sequence alone, so that no pad is looked for.
                        scores.append(float(module.model.score(module.model.base_model(ids)[0])[0, -1, 0]))
            chosen, rejected = scores[:6], scores[6:]
            seen.append(sum(
                math.log1p(math.exp(-(c - r - m))) + 0.1 * (c + r) ** 2
                for c, r, m in zip(chosen, rejected, batch["margin"].tolist(), strict=True)
            ) / 6)  # fmt: skip

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert ("segment" in batch) == packing
            assert float(outputs["loss"]) == pytest.approx(seen[-1], rel=1e-5)

    make_trainer(max_steps=2, callbacks=[Check()]).fit(module, datamodule=pairs)
    assert len(seen) == 2 and seen[0] != seen[1]


@pytest.mark.parametrize("packing", [False, True])
def test_micro_batches_do_not_change_the_step(make_trainer, data, packing):
    results = []
    for micro in (1, 2, 4):  # 6 pairs in 4 parts: 2, 2, 1 and 1
        module = model(optimizer=sgd, center_rewards_coefficient=0.1)
        make_trainer(max_steps=3, accumulate_grad_batches=micro).fit(module, datamodule=data(packing=packing))
        results.append(weights(module))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[2], results[0], atol=1e-6, rtol=1e-5)


@pytest.mark.long
def test_two_ranks_take_the_step_of_one_with_twice_the_pairs(make_trainer, data, tmp_path):
    module = model(optimizer=sgd)
    trainer = make_trainer(max_steps=3)
    trainer.fit(module, datamodule=data(batch_size=6))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    two = make_trainer(max_steps=3, devices=2, strategy="ddp_fork", callbacks=[Save(tmp_path / "two.ckpt")])
    returned = model(optimizer=sgd)
    two.fit(returned, datamodule=data(batch_size=3, eval_steps=3))
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "two.ckpt"))
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(other["state_dict"][name], value, atol=1e-6, rtol=1e-5)
    assert other["run"]["reward_offset"] == pytest.approx(one["run"]["reward_offset"], abs=1e-5)
    assert other["run"]["num_tokens"] == one["run"]["num_tokens"] > 0
    # The process that started the ranks has what they learned.
    for name, value in other["state_dict"].items():
        assert torch.equal(returned.state_dict()[name], value), name
    assert returned.reward_offset == other["run"]["reward_offset"]


class Save(L.Callback):
    """Writes a checkpoint behind a number of micro-batches, or at the end."""

    def __init__(self, path: Any, batches: int | None = None) -> None:
        self.path, self.batches = path, batches
        self.seen = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen += 1
        if self.seen == self.batches:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.batches is None:
            trainer.save_checkpoint(self.path)


# A pass has 4 steps of 2 micro-batches: in its middle, at its end, inside of a step of the next.
@pytest.mark.parametrize("stop", [4, 8, 11])
def test_a_resumed_run_is_the_uninterrupted_one(make_trainer, data, tmp_path, stop):
    def run(**arguments: Any) -> L.Trainer:
        trainer = make_trainer(max_steps=8, accumulate_grad_batches=2, **arguments)
        checkpoint = tmp_path / "part.ckpt" if not arguments else None
        trainer.fit(model(), datamodule=data(eval_steps=3), ckpt_path=checkpoint, weights_only=True)
        return trainer

    run(callbacks=[Save(tmp_path / "part.ckpt", stop)]).save_checkpoint(tmp_path / "whole.ckpt")
    run().save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"])
def test_packed_scores_are_those_of_each_text_alone(family, attention):
    torch.manual_seed(0)
    sizes = FAMILIES[family] if family in ("gpt2", "gpt_neox") else {**TINY, "sliding_window": None, "head_dim": 16}
    config = AutoConfig.for_model(**{"model_type": family, **sizes}, vocab_size=40, num_labels=1, pad_token_id=0)
    network = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention).eval()
    assert can_pack_scores(network)
    prompts, chosen, rejected = [[5, 6, 7], [], [8]], [[9, 1], [10, 11, 1], [1]], [[12, 13, 14, 1], [1], [15, 1]]
    batch = Pairs(prompts, chosen, rejected).batch(torch.arange(3), packing=True)
    assert len(batch["tokens"]) < 3
    with torch.no_grad():
        scores = torch.cat(pair_scores(network, batch))
        ids = [p + answer for answers in (chosen, rejected) for p, answer in zip(prompts, answers, strict=True)]
        alone = [network.score(network.base_model(torch.tensor([row]))[0])[0, -1, 0] for row in ids]
    torch.testing.assert_close(scores, torch.stack(alone))


def test_windows_and_other_attention_are_not_packed():
    heads = {**TINY, "head_dim": 16}
    for fields in ({"model_type": "mistral", **heads, "sliding_window": 64}, {"model_type": "gemma2", **heads},
                   {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2},
                   {"model_type": "mpt", "d_model": 32, "n_layers": 2, "n_heads": 2},
                   {"model_type": "qwen2", **TINY, "use_sliding_window": True, "sliding_window": 8,
                    "max_window_layers": 0}):  # fmt: skip
        config = AutoConfig.for_model(**fields, vocab_size=40, num_labels=1, pad_token_id=0)
        assert not can_pack_scores(AutoModelForSequenceClassification.from_config(config)), fields
    config = AutoConfig.for_model("llama", **TINY, vocab_size=40, num_labels=1, pad_token_id=0)
    network = AutoModelForSequenceClassification.from_config(config)
    assert can_pack_scores(network)
    network.config._attn_implementation = "flash_attention_2"
    assert not can_pack_scores(network)


def test_training_in_bfloat16_packs_too(make_trainer, data):
    module = model()
    make_trainer(max_steps=2, precision="bf16-mixed").fit(module, datamodule=data(packing=True))
    assert weights(module).isfinite().all()


# -------------------------------------------------------------------- the model


def test_head_starts_with_the_standard_deviation_of_the_notes():
    head = torch.nn.Linear(4095, 16)
    initialize_head(head)
    assert float(head.weight.detach().std()) == pytest.approx(1 / 64, rel=0.02)
    assert (head.bias == 0).all()


def test_an_sft_directory_gives_the_body_and_none_of_the_head(tmp_path):
    tokenizer = character_tokenizer()
    config = AutoConfig.for_model("qwen2", **TINY, vocab_size=len(tokenizer), tie_word_embeddings=True)
    causal = AutoModelForCausalLM.from_config(config)
    causal.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    module = RewardModel(str(tmp_path))
    module.configure_model()
    for name, value in causal.model.state_dict().items():
        assert torch.equal(module.model.model.state_dict()[name], value), name
    assert float(module.model.score.weight.detach().std()) == pytest.approx(1 / math.sqrt(33), rel=0.4)


def test_a_reward_model_can_be_trained_further(tmp_path, make_trainer, data):
    first = model()
    make_trainer(max_steps=1).fit(first, datamodule=data())
    first.reward_offset = 0.75
    first.export(tmp_path / "export")
    second = RewardModel(str(tmp_path / "export"))
    second.configure_model()
    assert torch.equal(second.model.score.weight, first.model.score.weight)
    assert second.reward_offset == 0.75


def test_dropout_of_the_config_is_off():
    module = model(model_config=FAMILIES["gpt2"])
    module.configure_model()
    module.train()
    tokens, length = torch.arange(12).view(2, 6), torch.tensor([6, 4])
    assert torch.equal(sequence_scores(module.model, tokens, length), sequence_scores(module.model, tokens, length))


# -------------------------------------------------------------------- normalisation, export, loading


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A reward model on path preferences after three steps: the module, its checkpoint and its export."""
    folder = tmp_path_factory.mktemp("trained")
    module = model()
    pairs = PreferenceDataModule(task="paths", n_train=64, batch_size=16, n_demonstrations=10, eval_batch_size=4)
    trainer = L.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False
    )  # fmt: skip
    trainer.fit(module, datamodule=pairs)
    trainer.save_checkpoint(folder / "reward.ckpt")
    module.export(folder / "export")
    return module, pairs, folder


def test_demonstrations_average_zero(trained):
    module, pairs, _ = trained
    records = pairs.task.records("train", 10)
    scores = module.score([record["prompt"] for record in records], [record["completion"] for record in records])
    assert scores.std() > 0.01
    assert abs(scores.mean()) < 1e-6


def test_demonstrations_average_zero_after_a_fit_that_wrote_no_checkpoint(make_trainer, data, tmp_path):
    module, pairs = model(), data()
    make_trainer(max_steps=2).fit(module, datamodule=pairs)
    assert abs(module.score([row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS]).mean()) < 1e-5
    module.export(tmp_path)
    assert load_reward_model(tmp_path).offset == module.reward_offset != 0


@pytest.mark.parametrize("form", ["reward.ckpt", "export"])
def test_a_loaded_reward_model_scores_as_the_trained_one(trained, form):
    module, _, folder = trained
    reward, offset, tokenizer = load_reward_model(folder / form, tokenizer=character_tokenizer())
    assert offset == module.reward_offset != 0
    ids = tokenizer(["a>b:cdb<eos>"]).input_ids
    assert ids[0][-1] == tokenizer.eos_token_id
    scores = sequence_scores(reward, torch.tensor(ids), torch.tensor([len(ids[0])])) - offset
    torch.testing.assert_close(scores, module.score(["a>b:"], ["cdb"]))
    assert not reward.training and not any(p.requires_grad for p in reward.parameters())


def test_scores_leave_the_state_of_the_run(make_trainer, data):
    module = model()
    make_trainer(max_steps=1).fit(module, datamodule=data())
    assert module.num_tokens > 0
    before = module.num_tokens
    module.score(["a>b:"], ["cdb"])
    assert module.num_tokens == before


def test_transformers_loads_the_export_and_finds_the_last_token_among_pads(trained):
    module, _, folder = trained
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / "export").eval()
    tokens, length = torch.tensor([[5, 6, 7, 1], [8, 1, 0, 0]]), torch.tensor([4, 2])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits[:, 0], sequence_scores(module.model, tokens, length))
    assert theirs.config.reward_offset == module.reward_offset


def without_pad_token(*special):
    """A tokenizer of the words a, b and c, which ends texts with ``<eos>`` and has no pad token."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", *special, "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>", *special])
    unknown = {"unk_token": "<unk>"} if "<unk>" in special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", **unknown)


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"]}])
@pytest.mark.parametrize(
    ("special", "pad"), [(["<x>", "<unk>"], "<unk>"), (["<unk>", "<right_pad>"], "<right_pad>"), (["<x>"], "<x>")]
)
def test_transformers_reads_an_exports_score_at_the_eos_token(tmp_path, lora, special, pad):
    module = model(tokenizer_name_or_path=without_pad_token(*special), lora=lora)
    module.configure_model()
    folder = module.export(tmp_path / "export")
    assert module.tokenizer.pad_token == "<eos>"
    theirs, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    assert tokenizer.pad_token == pad and theirs.config.pad_token_id == tokenizer.pad_token_id
    batch = tokenizer(["a b c <eos>", "a <eos>"], padding=True, return_tensors="pt")
    alone = [tokenizer(text, return_tensors="pt").input_ids for text in ("a b c <eos>", "a <eos>")]
    with torch.no_grad():
        found = theirs(**batch).logits[:, 0]
        expected = [sequence_scores(module.model.eval(), ids, torch.tensor([ids.shape[1]])) for ids in alone]
    torch.testing.assert_close(found, torch.cat(expected))


def test_a_tokenizer_without_another_special_token_warns_that_scores_are_read_before_eos(tmp_path):
    module = model(tokenizer_name_or_path=without_pad_token())
    module.configure_model()
    with pytest.warns(UserWarning, match="pads with its EOS token '<eos>'.*set pad_token"):
        module.export(tmp_path / "export")


def test_lora_is_merged_where_the_model_is_exported_or_loaded(make_trainer, data, tmp_path):
    module = model(lora={"r": 2, "target_modules": ["q_proj", "v_proj"]}, learning_rate=0.05)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, datamodule=data())
    trainer.save_checkpoint(tmp_path / "lora.ckpt")
    module.export(tmp_path / "export")
    tokens, length = torch.tensor([[5, 6, 7, 1]]), torch.tensor([4])
    expected = sequence_scores(module.model, tokens, length)
    before = sequence_scores(module.model.get_base_model(), tokens, length)
    for form in ("lora.ckpt", "export"):
        reward, offset, _ = load_reward_model(tmp_path / form)
        assert not hasattr(reward, "peft_config") or not reward.peft_config
        torch.testing.assert_close(sequence_scores(reward, tokens, length), expected)
        assert offset == module.reward_offset
    assert before.isfinite().all()


def test_what_is_no_reward_model_is_refused(tmp_path, trained):
    tokenizer = character_tokenizer()
    config = AutoConfig.for_model("qwen2", **TINY, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "causal")
    tokenizer.save_pretrained(tmp_path / "causal")
    with pytest.raises(UsageError, match="Qwen2ForCausalLM, which has no reward head"):
        load_reward_model(tmp_path / "causal")
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    with pytest.raises(UsageError, match="3 labels"):
        load_reward_model(tmp_path / "classifier")
    with pytest.raises(UsageError, match=r"missing\.ckpt is not a file"):
        load_reward_model(tmp_path / "missing.ckpt")
    torch.save({"algorithm": "SFT"}, tmp_path / "sft.ckpt")
    with pytest.raises(UsageError, match="holds SFT, where a RewardModel should be"):
        load_reward_model(tmp_path / "sft.ckpt")
    other = character_tokenizer()
    other.add_tokens(["<new>"])
    with pytest.raises(UsageError, match="tokenizer"):
        load_reward_model(trained[2] / "export", tokenizer=other)


def test_a_model_without_a_score_head_is_refused():
    bert = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2}  # fmt: skip
    with pytest.raises(UsageError, match="bert model has no linear head named score"):
        model(model_config=bert).configure_model()


def test_negative_centring_is_refused():
    with pytest.raises(UsageError, match="center_rewards_coefficient=-1"):
        model(center_rewards_coefficient=-1)


# -------------------------------------------------------------------- metrics


LEADS = torch.tensor([2.0, 1.9, -2.1, 0.3, 0.2, -0.1, 4.0, -0.5])


def test_metrics_are_those_of_a_hand_made_table():
    judged = PreferenceMetrics()
    chosen, rejected = LEADS + 1.0, torch.ones(8)
    unknown = torch.full((8,), math.nan)
    for part in (slice(0, 3), slice(3, 8)):
        judged.update(chosen[part], rejected[part], torch.tensor(0.5), unknown[part])
    scalars, bins = judged.compute()
    assert scalars["accuracy"] == 5 / 8
    assert scalars["margin"] == pytest.approx(LEADS.mean())
    assert (scalars["min_reward"], scalars["max_reward"]) == (pytest.approx(-1.1), 5.0)
    assert scalars["mean_reward"] == pytest.approx((chosen.sum() + 8) / 16)
    assert "bayes_accuracy" not in scalars
    # Three tenths-wide bins by hand: σ(.1), σ(.2) in [.5, .55); σ(.3) in [.55, .6); σ(.5) in [.6, .65);
    # σ(1.9), σ(2), σ(2.1) in [.85, .9); σ(4) in [.95, 1].
    assert bins.comparisons.tolist() == [2, 1, 1, 0, 0, 0, 0, 3, 0, 1]
    assert bins.accuracy[[0, 1, 2, 7, 9]].tolist() == pytest.approx([0.5, 1.0, 0.0, 2 / 3, 1.0])
    gaps = bins.comparisons * (bins.accuracy - bins.confidence).abs()
    assert scalars["calibration_error"] == pytest.approx(float(gaps.sum() / 8), abs=1e-6)


def test_the_judge_who_knows_the_probabilities_reaches_the_bayes_accuracy():
    torch.manual_seed(0)
    utility = torch.randn(20_000, 2)
    first = torch.sigmoid(utility[:, 0] - utility[:, 1])
    wins = torch.rand(20_000) < first
    chosen = torch.where(wins, utility[:, 0], utility[:, 1])
    rejected = torch.where(wins, utility[:, 1], utility[:, 0])
    judged = PreferenceMetrics()
    judged.update(chosen, rejected, torch.tensor(0.5), torch.where(wins, first, 1 - first))
    scalars, _ = judged.compute()
    assert scalars["expected_accuracy"] == pytest.approx(float(scalars["bayes_accuracy"]), abs=1e-6)
    assert scalars["bayes_accuracy"] == pytest.approx(float(torch.maximum(first, 1 - first).mean()), abs=1e-6)
    # 20,000 coins: three standard deviations are .009. And whoever says the truth is calibrated.
    assert scalars["accuracy"] == pytest.approx(float(scalars["bayes_accuracy"]), abs=0.01)
    assert scalars["calibration_error"] < 0.015


def test_metrics_begin_anew_after_reset():
    judged = PreferenceMetrics()
    for lead, expected in ((torch.tensor([1.0]), 1.0), (torch.tensor([-1.0]), 0.0)):
        judged.update(lead, torch.zeros(1), torch.tensor(0.5), torch.tensor([0.75]))
        scalars, bins = judged.compute()
        assert scalars["accuracy"] == scalars["bayes_accuracy"] / 0.75 * expected == expected
        assert bins.comparisons.sum() == 1
        judged.reset()


@pytest.mark.parametrize("entry", ["validate", "test"])
def test_an_interrupted_evaluation_leaves_nothing_to_the_next(entry, make_trainer, data):
    module, pairs = model(), data(eval_batch_size=4)
    module.configure_model()
    whole = getattr(make_trainer(), entry)(module, datamodule=pairs)

    class Interrupt(L.Callback):
        def on_validation_batch_end(self, *arguments):
            raise RuntimeError("stopped")

        on_test_batch_end = on_validation_batch_end

    with pytest.raises(RuntimeError, match="stopped"):
        getattr(make_trainer(callbacks=[Interrupt()]), entry)(module, datamodule=pairs)
    assert getattr(make_trainer(), entry)(module, datamodule=pairs) == whole


def test_the_picture_shows_the_bins():
    reliability = Reliability(bins=2)
    reliability.update(torch.tensor([0.1, -0.1, 3.0, 3.0]))
    picture = reliability_diagram(reliability.compute(), 0.1)
    blue = np.isclose(picture.astype(int), (68, 119, 170), atol=3).all(-1)
    columns = blue.sum(0)
    drawn = np.flatnonzero(columns > 10)
    middle = (drawn.min() + drawn.max()) // 2
    low, high = np.median(columns[drawn[drawn < middle]]), np.median(columns[drawn[drawn > middle]])
    assert high / low == pytest.approx(2, abs=0.1)  # accuracies 1/2 and 1, but for the lines drawn over them


def test_evaluation_is_logged_with_the_bayes_accuracy_and_a_picture(make_trainer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from datamodules.language.tasks.paths import bayes_accuracy

    pairs = PreferenceDataModule(task="paths", n_train=32, n_eval=40, batch_size=8, eval_steps=2, eval_batch_size=16)
    logger = TensorBoardLogger(tmp_path, name=None, version="run")
    trainer = make_trainer(max_steps=2, logger=logger)
    trainer.fit(model(logging_steps=1), datamodule=pairs)
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0})
    events.Reload()
    logged = {name: events.Scalars(name)[-1].value for name in events.Tags()["scalars"]}
    assert logged["eval/bayes_accuracy"] == pytest.approx(bayes_accuracy(pairs.eval_records), abs=1e-6)
    assert logged["eval/accuracy"] == trainer.callback_metrics["eval/accuracy"]
    names = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens")
    assert {f"train/{name}" for name in names} <= logged.keys()
    assert logged["train/min_reward"] < logged["train/mean_reward"] < logged["train/max_reward"]
    assert events.Tags()["images"] == ["eval/reliability"]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [0, 2]
