"""Supervised fine-tuning: the right loss, however a step is cut, and runs that stop and go on."""

import json
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from transformers import AutoModelForCausalLM, AutoTokenizer

from datamodules import InstructionDataModule
from rl_modules import SFT
from rl_modules.common.errors import UsageError
from rl_modules.language import scoring as logits_room
from rl_modules.language.architecture import make_config
from rl_modules.language.fast import packing as texts_in_rows
from rl_modules.language.fast import tiled_head
from rl_modules.language.models import make_model
from rl_modules.language.scoring import logits_at
from rl_modules.language.tokenizer import character_tokenizer
from tests.conformance.architectures import ARCHITECTURES
from tests.datamodules.language.test_instruction import attached
from tests.training import assert_equal_checkpoints, fit

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
TINY_GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
TINY_LLAMA = {"model_type": "llama", "max_position_embeddings": 64, **TINY, "num_key_value_heads": 1}
GEMMA3 = ARCHITECTURES["Gemma-3"]
FAMILIES = {"qwen2": TINY, "gpt2": TINY_GPT2, "llama": TINY_LLAMA}


def tiny(cls=SFT, **arguments):
    return cls(**{"model_config": TINY, "lr_scheduler_type": "constant", "max_completion_length": 6, **arguments})


def demonstrations(folder, n=24, **arguments):
    """Texts of 3 to 20 characters."""
    path = folder / "demonstrations.jsonl"
    lines = [{"prompt": "ab"[: 1 + i % 2] + "=", "completion": "xyz"[i % 3] * (i * 7 % 17)} for i in range(n)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return InstructionDataModule(path=str(path), **{"batch_size": 8, **arguments})


def gradient(model, data, **trainer):
    """The gradient of one optimizer step: what plain gradient descent with rate 1 subtracts."""
    model.optimizer_factory = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    model.max_grad_norm = None
    before = {}
    model.on_train_start = lambda: before.update({name: p.detach().clone() for name, p in model.named_parameters()})
    fit(model, data, max_steps=1, **trainer)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def assert_same_gradient(one, other):
    assert one.keys() == other.keys()
    assert any(float(g.abs().max()) > 1e-3 for g in one.values())
    for name in one:
        # Sums in another order: float32 differs in the last digits of gradients of order 0.1.
        torch.testing.assert_close(one[name], other[name], atol=5e-6, rtol=1e-4)


class Curves(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.points = []

    def log_metrics(self, metrics, step=None):
        self.points.append({**metrics, "step": step})


class SaveAt(L.Callback):
    """Writes checkpoints in the middle of a run, after some batches."""

    def __init__(self, folder, batches):
        self.folder, self.batches, self.seen = folder, batches, 0

    def on_train_batch_end(self, trainer, *_):
        self.seen += 1
        if self.seen in self.batches:
            trainer.save_checkpoint(self.folder / f"{self.seen}.ckpt")


# -------------------------------------------------------------------- loss


@pytest.mark.parametrize("completion_only_loss", [True, False])
def test_loss_is_transformers_own_and_that_of_a_softmax_by_hand(tmp_path, completion_only_loss):
    model = tiny(logging_steps=1)
    data = demonstrations(tmp_path, completion_only_loss=completion_only_loss)
    losses = []
    original = SFT.training_step
    model.training_step = lambda batch, batch_idx: (
        losses.append((batch, original(model, batch, batch_idx))) or losses[-1][1])  # fmt: skip
    fit(model, data, max_steps=1, gradient_clip_val=0.0)
    batch, loss = losses[0]
    reference = initial_network()
    labels = torch.full_like(batch["tokens"], -100)
    labels.view(-1)[batch["counted"]] = batch["tokens"].view(-1)[batch["counted"]]
    theirs = reference(input_ids=batch["tokens"], labels=labels).loss
    torch.testing.assert_close(loss, theirs, atol=1e-6, rtol=1e-6)
    # By hand: an average over all tokens that count, of whichever sequence.
    log_softmax = reference(input_ids=batch["tokens"]).logits.double().log_softmax(-1)
    terms = [-log_softmax[r, c - 1, batch["tokens"][r, c]] for r, c in (labels != -100).nonzero().tolist()]
    torch.testing.assert_close(loss.double(), torch.stack(terms).mean(), atol=1e-6, rtol=1e-6)


def initial_network():
    """The network that a run with seed 0 starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_model(make_config(None, TINY, character_tokenizer(), dropout=True)).eval()


def test_metrics_are_those_of_the_batch(tmp_path):
    model, data = tiny(logging_steps=2, learning_rate=0.0), demonstrations(tmp_path, n=16, batch_size=16)
    logger = Curves()
    fit(model, data, max_steps=2, logger=logger, accumulate_grad_batches=2)
    (logged,) = logger.points
    assert logged["step"] == 2
    # The rate is 0 and both steps see all the data, so that every metric can be had from the model as it is.
    sequences = data.sequences
    batch = sequences.batch(torch.arange(16), 0)
    with torch.no_grad():
        log_softmax = model.model(input_ids=batch["tokens"]).logits.double().log_softmax(-1).flatten(0, 1)
    log_softmax, target = log_softmax[batch["counted"] - 1], batch["tokens"].flatten()[batch["counted"]]
    loss = -log_softmax.gather(1, target.unsqueeze(1)).mean().item()
    assert logged["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert logged["train/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert logged["train/mean_token_accuracy"] == pytest.approx(
        (log_softmax.argmax(1) == target).double().mean().item()
    )
    assert logged["train/entropy"] == pytest.approx(-(log_softmax.exp() * log_softmax).sum(1).mean().item(), rel=1e-5)
    assert logged["train/num_tokens"] == 2 * int(sequences.total.sum())
    assert logged["train/learning_rate"] == 0.0
    assert logged["train/grad_norm"] > 0


@pytest.mark.parametrize("packing", [False, True])
def test_micro_batches_do_not_change_the_gradient(tmp_path, packing):
    whole = gradient(tiny(), demonstrations(tmp_path))
    for micro in (2, 8):
        parts = gradient(tiny(), demonstrations(tmp_path, packing=packing), accumulate_grad_batches=micro)
        assert_same_gradient(whole, parts)


def test_packing_does_not_change_the_gradient(tmp_path):
    padded = gradient(tiny(), demonstrations(tmp_path))
    assert_same_gradient(padded, gradient(tiny(), demonstrations(tmp_path, packing=True)))


def test_gradients_leave_the_memory_at_the_end_of_a_step(tmp_path):
    found = []

    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            found.append(all(p.grad is not None for p in pl_module.parameters()))

        def on_train_batch_end(self, trainer, pl_module, *rest):
            found.append(any(p.grad is not None for p in pl_module.parameters()))

    fit(tiny(), demonstrations(tmp_path), max_steps=2, accumulate_grad_batches=2, callbacks=[Gradients()])
    assert found == [True, True, False] * 2  # within a step the first micro-batch's stay


@pytest.mark.long
def test_two_ranks_have_the_gradient_of_one(tmp_path):
    """Plain gradient descent for three steps, in two processes of half the batch and in one."""

    def run(batch_size, **trainer):
        data = demonstrations(tmp_path, batch_size=batch_size)
        model = tiny(optimizer=descent, max_grad_norm=None)
        # Written in the processes that train: what they count does not come back from there.
        fit(model, data, max_steps=3, accumulate_grad_batches=2, callbacks=[SaveAt(tmp_path, (6,))], **trainer)
        checkpoint = torch.load(tmp_path / "6.ckpt", weights_only=True)
        return checkpoint["state_dict"], checkpoint["run"]["num_tokens"]

    one, tokens = run(8)
    two, tokens_of_two = run(4, devices=2, strategy="ddp_fork")
    assert tokens == tokens_of_two
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-6, rtol=1e-4)


def descent(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


# -------------------------------------------------------------------- padding and packing


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_alone_padded_and_packed(family, attention, tmp_path):
    data = demonstrations(tmp_path)
    model = SFT(model_config=FAMILIES[family], attn_implementation=attention)
    model.configure_model()
    model.model.eval()
    sequences = attached(data).sequences
    index = torch.tensor([3, 14, 5, 8, 1])
    lone = {}
    with torch.no_grad():
        for i in index.tolist():
            batch = sequences.batch(torch.tensor([i]), 0)
            lone[tuple(batch["tokens"][0].tolist())] = model.demonstrated(batch)[0].squeeze(0)
        for packing in (False, True):
            batch = sequences.batch(index, 0, packing)
            assert ("position_ids" in batch) == packing
            together = model.demonstrated(batch)[0].squeeze(0)
            # Tokens that count come row by row: find each sequence's by its own numbers.
            expected = torch.cat(list(lone.values()))
            torch.testing.assert_close(together.sort().values, expected.sort().values, atol=2e-6, rtol=1e-5)
            if packing:
                assert len(batch["tokens"]) < len(index)


def test_one_row_for_attention_that_needs_one(tmp_path, monkeypatch):
    model = tiny()
    model.configure_model()
    model.model.eval()
    batch = attached(demonstrations(tmp_path)).sequences.batch(torch.arange(10), 0, packing=True)
    assert len(batch["tokens"]) > 1
    with torch.no_grad():
        several = model.demonstrated(batch)[0]
        monkeypatch.setattr(texts_in_rows, "wants_one_row", lambda model: True)
        shapes = []
        hook = model.model.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        one = model.demonstrated(batch)[0]
        hook.remove()
    assert shapes == [(1, batch["tokens"].numel())]
    torch.testing.assert_close(one, several, atol=2e-6, rtol=1e-5)


def test_logits_at_are_those_of_the_whole_and_leave_no_hook():
    model = make_model(make_config(None, TINY, character_tokenizer(), dropout=False)).eval()
    tokens = torch.randint(3, 99, (3, 7), generator=torch.Generator().manual_seed(0))
    place = torch.tensor([0, 5, 6, 13, 20])
    whole = model(input_ids=tokens).logits.flatten(0, 1)[place]
    torch.testing.assert_close(logits_at(model, place, input_ids=tokens)[0], whole)
    assert model(input_ids=tokens).logits.shape == (3, 7, 99)


# -------------------------------------------------------------------- runs


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "data", "trainer"),
    [
        ({}, {"group_by_length": True}, {}),
        ({}, {"packing": True}, {"accumulate_grad_batches": 2}),
        ({"model_config": {**TINY, "attention_dropout": 0.2}, "attn_implementation": "eager"}, {}, {}),
        ({"model_config": {**GEMMA3, "text_config": {**GEMMA3["text_config"], "attention_dropout": 0.2}}}, {}, {}),
        ({"model_config": {**ARCHITECTURES["Mixtral"], "router_jitter_noise": 0.2}}, {}, {}),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, model, data, trainer):
    """24 records make epochs of 3 steps: stops lie inside of epochs and of steps, and at the ends of both."""

    def run(seed, **arguments):
        torch.manual_seed(seed)  # the global generator must not matter
        module, datamodule = tiny(logging_steps=4, **model), demonstrations(tmp_path, **data)
        return fit(module, datamodule, **{"max_steps": 7, **trainer, **arguments})

    run(0, callbacks=[SaveAt(tmp_path, (2, 3, 6))]).save_checkpoint(tmp_path / "whole.ckpt")
    for stop in (2, 3, 6):
        run(stop, ckpt_path=tmp_path / f"{stop}.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


class Noisy(SFT):
    """Noise in the loss, from torch's global generator."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (0.5 + torch.rand(()))


def test_a_loss_that_draws_from_the_global_generator_resumes_exactly(tmp_path):
    def run(seed, **arguments):
        torch.manual_seed(seed)
        return fit(tiny(cls=Noisy), demonstrations(tmp_path), max_steps=5, **arguments)

    run(0, callbacks=[SaveAt(tmp_path, (2, 3))]).save_checkpoint(tmp_path / "whole.ckpt")
    for stop in (2, 3):
        run(stop, ckpt_path=tmp_path / f"{stop}.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def test_a_run_resumes_exactly_from_the_end_of_an_epoch_without_an_evaluation(tmp_path):
    """Lightning, under max_steps, would train on the first micro-batch of the next epoch alone."""

    def run(ckpt_path=None, callbacks=()):
        data = demonstrations(tmp_path, batch_size=24, eval_path=str(tmp_path / "demonstrations.jsonl"), eval_steps=3)
        return fit(tiny(), data, ckpt_path=ckpt_path, max_steps=5, accumulate_grad_batches=2, callbacks=[*callbacks],
                   enable_checkpointing=bool(callbacks))  # fmt: skip

    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(callbacks=[saves]).save_checkpoint(tmp_path / "whole.ckpt")
    for epoch in range(4):  # of one step each
        run(tmp_path / f"epoch={epoch}.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def test_a_finished_run_can_be_prolonged(tmp_path):
    fit(tiny(), demonstrations(tmp_path), max_steps=7).save_checkpoint(tmp_path / "whole.ckpt")
    fit(tiny(), demonstrations(tmp_path), max_steps=4).save_checkpoint(tmp_path / "part.ckpt")
    longer = fit(tiny(), demonstrations(tmp_path), max_steps=7, ckpt_path=tmp_path / "part.ckpt")
    longer.save_checkpoint(tmp_path / "longer.ckpt")
    whole, other = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "longer"))
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name])
    assert whole["run"]["num_tokens"] == other["run"]["num_tokens"]


def test_dropout_of_the_config_is_applied_in_training_only(tmp_path):
    config = {**TINY_GPT2, "resid_pdrop": 0.5}
    one = gradient(tiny(model_config=config), demonstrations(tmp_path))
    other = gradient(tiny(model_config={**config, "resid_pdrop": 0.0}), demonstrations(tmp_path))
    assert any(not torch.allclose(one[name], other[name], atol=1e-3) for name in one)


@pytest.mark.long
def test_it_learns_what_it_is_shown(tmp_path):
    data = demonstrations(tmp_path, n=6, batch_size=6, eval_path=None)
    model = tiny(learning_rate=1e-2)
    fit(model, data, max_steps=80)
    model.model.eval()
    for record in data.train_records[:3]:
        written = model.act([record["prompt_ids"]], [0], temperature=0.0, max_completion_length=20)
        prompts = [r for r in data.train_records if r["prompt_ids"] == record["prompt_ids"]]
        assert written.tokens[0, : int(written.length[0])].tolist() in [r["completion_ids"] for r in prompts]


def test_evaluation_reports_loss_of_held_out_demonstrations_and_pass_at_1(make_trainer):
    model = tiny()
    data = InstructionDataModule("addition", batch_size=16, n_train=64, n_eval=8, eval_batch_size=3)
    trainer = make_trainer(max_steps=2)
    trainer.fit(model, data)
    metrics = {name: float(value) for name, value in trainer.validate(model, data, verbose=False)[0].items()}
    sequences = data.table(data.eval_records)
    with torch.no_grad():
        batch = sequences.batch(torch.arange(8), 0)
        logits = model.model(input_ids=batch["tokens"]).logits.flatten(0, 1)[batch["counted"] - 1]
        target = batch["tokens"].flatten()[batch["counted"]]
        log_prob = logits.log_softmax(-1).gather(1, target.unsqueeze(1))
    assert metrics["eval/loss"] == pytest.approx(-log_prob.mean().item(), rel=1e-5)
    assert metrics["eval/perplexity"] == pytest.approx(math.exp(-log_prob.mean().item()), rel=1e-5)
    assert metrics["eval/mean_token_accuracy"] == pytest.approx((logits.argmax(-1) == target).float().mean().item())
    greedy = model.act([r["prompt_ids"] for r in data.eval_records], range(8), temperature=0.0)
    written = zip(greedy.tokens.tolist(), greedy.length.tolist(), strict=True)
    texts = model.tokenizer.batch_decode([tokens[:n] for tokens, n in written], skip_special_tokens=True)
    right = [text == record["answer"] for text, record in zip(texts, data.eval_records, strict=True)]
    assert metrics["eval/pass@1"] == pytest.approx(sum(right) / 8)


def test_derived_metrics_follow_every_evaluation(make_trainer):
    logger = Curves()
    data = InstructionDataModule("addition", batch_size=16, n_train=64, n_eval=4, eval_steps=2)
    trainer = make_trainer(max_steps=6, logger=logger)
    trainer.fit(tiny(learning_rate=1e-2), data)
    rows = [row for row in logger.points if "eval/loss" in row]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert len({row["eval/loss"] for row in rows}) == 4
    for row in rows:
        assert row["eval/perplexity"] == pytest.approx(math.exp(row["eval/loss"]), rel=1e-5)
    assert trainer.callback_metrics["eval/perplexity"].item() == pytest.approx(rows[-1]["eval/perplexity"], rel=1e-5)


def test_completions_without_reward_functions_are_written_but_not_judged(tmp_path, make_trainer):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"prompt": "a=", "completion": "x"}\n')
    trainer = make_trainer()
    (metrics,) = trainer.validate(tiny(), demonstrations(tmp_path, eval_path=str(path)), verbose=False)
    assert "eval/pass@1" not in metrics
    assert {"eval/loss", "eval/mean_length", "eval/clipped_ratio"} <= metrics.keys()


# -------------------------------------------------------------------- models


@pytest.mark.parametrize("model", [
    {"model_config": TINY_GPT2},
    {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
    {"gradient_checkpointing": True},
    {"torch_dtype": "bfloat16", "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
], ids=["gpt2", "lora", "checkpointing", "bfloat16 under lora"])  # fmt: skip
def test_other_models_train_and_come_back_from_export_and_checkpoint(tmp_path, model):
    module, data = tiny(**model), demonstrations(tmp_path)
    trainer = fit(module, data, max_steps=2)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    module.model.eval()
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = module.model(input_ids=tokens).logits

        folder = module.export(tmp_path / "exported")
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=model.get("torch_dtype", "float32"))
        # The export rounds the sum of weights and adapters to bfloat16.
        tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(theirs.eval()(input_ids=tokens).logits, expected, atol=tolerance, rtol=tolerance)
        assert AutoTokenizer.from_pretrained(folder)("12+3=").input_ids == module.tokenizer("12+3=").input_ids

        again = SFT.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
        assert torch.equal(again.model.eval()(input_ids=tokens).logits, expected)


def test_lora_trains_adapters_alone(tmp_path):
    changed = gradient(tiny(lora={"r": 4, "target_modules": ["q_proj"]}), demonstrations(tmp_path))
    moved = {name for name, g in changed.items() if bool((g != 0).any())}
    assert moved
    assert all("lora_" in name for name in moved)


@pytest.mark.long
def test_goes_on_from_an_exported_model_and_needs_it_no_more(tmp_path):
    """A stage begins with the directory that another left; its checkpoint loads when that directory is gone."""
    first = tiny()
    fit(first, demonstrations(tmp_path), max_steps=1)
    folder = first.export(tmp_path / "start")
    second = SFT(model_name_or_path=str(folder), lr_scheduler_type="constant")
    second.configure_model()
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)
    second.model = None
    fit(second, demonstrations(tmp_path), max_steps=1).save_checkpoint(tmp_path / "second.ckpt")
    folder.rename(tmp_path / "elsewhere")
    again = SFT.load_from_checkpoint(tmp_path / "second.ckpt", weights_only=True)
    for name, value in second.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_weights(tmp_path):
    model = tiny()
    seen = []
    model.on_train_start = lambda: model.model.lm_head.register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    fit(model, demonstrations(tmp_path), max_steps=2, precision="bf16-mixed")
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1"),
        ({"logging_steps": 0}, "logging_steps=0 must be at least 1"),
        ({"lr_scheduler_type": "linaer"}, "did you mean linear"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, message):
    with pytest.raises(UsageError, match=message):
        tiny(**arguments)


def test_checkpoint_of_another_algorithm_is_refused(tmp_path):
    trainer = fit(tiny(), demonstrations(tmp_path), max_steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["algorithm"] = "PPO"
    torch.save(checkpoint, tmp_path / "b.ckpt")
    with pytest.raises(UsageError, match="holds PPO, not SFT"):
        SFT.load_from_checkpoint(tmp_path / "b.ckpt", weights_only=True)


# -------------------------------------------------------------------- losses of one's own


class Dynamic(SFT):
    """Weights each token by its probability."""

    def training_step(self, batch, batch_idx):
        log_prob = self.demonstrated(batch).log_prob
        return -(log_prob.detach().exp() * log_prob).sum() * batch["n_micro"] / batch["step_tokens"]


class Entropic(SFT):
    """Rewards entropy."""

    def training_step(self, batch, batch_idx):
        found = self.demonstrated(batch, entropy=True)
        return -(found.log_prob + 0.5 * found.entropy).sum() * batch["n_micro"] / batch["step_tokens"]


class Halved(SFT):
    """Every second token counts half."""

    def demonstrated(self, batch, entropy=False, accuracy=False):
        found = super().demonstrated(batch, entropy, accuracy)
        weight = 1 - 0.5 * (torch.arange(found.log_prob.shape[1]) % 2)
        return found._replace(log_prob=found.log_prob * weight)


@pytest.mark.parametrize("cls", [Dynamic, Entropic, Halved])
def test_a_loss_of_a_subclass_has_its_gradient_where_logits_are_tiled(cls, tmp_path, monkeypatch):
    def of_a_step():
        return gradient(cls(model_config=TINY, lr_scheduler_type="constant"), demonstrations(tmp_path))

    whole = of_a_step()
    monkeypatch.setattr(tiled_head, "TILE", {"cpu": 4 * 100})
    monkeypatch.setattr(logits_room, "TILED_ABOVE", {"cpu": 0})
    assert_same_gradient(whole, of_a_step())


@pytest.mark.long
@pytest.mark.parametrize(("stop", "accumulate"), [(1, 1), (4, 1), (3, 2)])
def test_a_run_that_is_stopped_within_an_epoch_resumes_there(stop, accumulate, tmp_path):
    """It has as many epochs: Lightning takes the one that was cut off for a whole one."""

    def run(**arguments):
        module = SFT(model_config=TINY, lr_scheduler_type="constant", logging_steps=1)
        data = demonstrations(tmp_path, batch_size=8 // accumulate)
        return fit(module, data, max_epochs=3, accumulate_grad_batches=accumulate, **arguments)

    whole = run()
    whole.save_checkpoint(tmp_path / "whole")
    run(max_steps=stop).save_checkpoint(tmp_path / "stopped")
    resumed = run(ckpt_path=tmp_path / "stopped")
    resumed.save_checkpoint(tmp_path / "resumed")
    assert whole.global_step == resumed.global_step > stop
    assert_equal_checkpoints(tmp_path / "whole", tmp_path / "resumed")
