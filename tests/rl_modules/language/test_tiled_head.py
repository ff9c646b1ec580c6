"""An output layer that is run by tiles: the same numbers and gradients as all at once, and never a larger tensor."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from rl_modules import SFT
from rl_modules.language import scoring as logits_room
from rl_modules.language.architecture import make_config
from rl_modules.language.critics import HeadOnPolicy
from rl_modules.language.fast import tiled_head
from rl_modules.language.fast.self_check import _known
from rl_modules.language.fast.shared_scoring import grouped_log_probs
from rl_modules.language.fast.tiled_head import can_tile
from rl_modules.language.lora import add_lora
from rl_modules.language.models import make_model
from rl_modules.language.scoring import completion_log_probs, log_probs_at
from rl_modules.language.sharding import shard
from rl_modules.language.tokenizer import character_tokenizer
from tests.conformance.architectures import ARCHITECTURES, BASE, network, strengthen
from tests.ranks import on_ranks
from tests.rl_modules.language.test_sft import assert_same_gradient, demonstrations, gradient
from tests.rl_modules.language.test_shared_scoring import texts

pytestmark = pytest.mark.fast_path

WORDS, ROWS = 99, 4
#: Architectures by the kind of their output layer.
HEADS = {
    "plain": ARCHITECTURES["Llama"],
    "tied": ARCHITECTURES["Llama, tied"],
    "with bias": {"model_type": "phi", **BASE, "num_key_value_heads": 4},
    "soft cap": {**ARCHITECTURES["Gemma-2"], "final_logit_softcapping": 3.0},
    "divided": ARCHITECTURES["Granite"],
    "multiplied": ARCHITECTURES["Cohere"],
    "composite config": ARCHITECTURES["Gemma-3"],
    "recurrent body": ARCHITECTURES["Mamba-2"],
}
LORA = {"r": 2, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}


@pytest.fixture
def tiles(monkeypatch):
    """Everything is tiled, by 4 tokens; yields the rows of every tensor that an output layer returned."""
    monkeypatch.setattr(tiled_head, "TILE", {"cpu": ROWS * WORDS})
    monkeypatch.setattr(logits_room, "TILED_ABOVE", {"cpu": 0})


def build(kind, lora=None, dtype="float32"):
    torch.manual_seed(0)
    model = make_model(make_config(None, HEADS[kind], character_tokenizer(), dropout=False), torch_dtype=dtype)
    strengthen(model)
    return model if lora is None else add_lora(model, lora, "CAUSAL_LM", False)


def numbers(model, function, tokens, *text, **arguments):
    model.zero_grad()
    log_prob, entropy = function(model, tokens, *text, temperature=0.7, entropy=True, **arguments)
    weight = torch.arange(log_prob.numel()).view(log_prob.shape) / log_prob.numel()
    (log_prob * weight + 0.3 * entropy * (1 - weight)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return log_prob.detach(), entropy.detach(), gradients


def assert_same(one, other, **tolerance):
    for a, b in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert one[2].keys() == other[2].keys()
    for name in one[2]:
        torch.testing.assert_close(one[2][name], other[2][name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


class Widths:
    """Tokens that an output layer was given, call by call."""

    def __init__(self, model):
        self.seen = []
        model.get_output_embeddings().register_forward_hook(
            lambda layer, inputs, output: self.seen.append(output.shape[:-1].numel())
        )


@pytest.mark.parametrize(("kind", "lora", "function"), [
    (kind, lora, function)
    for kind, lora in [*((kind, None) for kind in HEADS), ("plain", LORA), ("tied", LORA)]
    for function in (completion_log_probs, grouped_log_probs)
    if kind != "recurrent body" or function is completion_log_probs  # its prompts are not shared
])  # fmt: skip
def test_values_and_gradients_are_those_of_all_logits_at_once(kind, lora, function, request):
    model = build(kind, lora)
    *text, group = texts([3, 5, 1], [[2, 4, 1], [5, 5, 3], [1, 2, 6]])
    extra = (group,) if function is grouped_log_probs else ()
    whole = numbers(model, function, *text, *extra)
    request.getfixturevalue("tiles")
    assert can_tile(model)
    logits_room.prepare_head(model)  # the self-checks' own passes are over
    widths = Widths(model)
    tiled = numbers(model, function, *text, *extra)
    # Sums over tokens in another order.
    assert_same(tiled, whole, atol=2e-5, rtol=1e-4)
    assert max(widths.seen) == ROWS
    assert sum(widths.seen) >= 2 * int(text[2].sum())  # each token forwards, and again in the backward pass


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sixteen_bits(dtype, request):
    """Weights of bfloat16, and bfloat16 arithmetic on float32 weights: the backward pass computes in the same way."""
    model = build("tied", dtype=dtype)
    context = torch.autocast("cpu", torch.bfloat16) if dtype == "float32" else nullcontext()
    *text, _ = texts([3, 5], [[2, 4, 1], [5, 5, 3]])
    with context:
        whole = numbers(model, completion_log_probs, *text)
    request.getfixturevalue("tiles")
    with context:
        assert can_tile(model)
        tiled = numbers(model, completion_log_probs, *text)
    assert tiled[0].dtype == torch.float32
    assert_same(tiled, whole, atol=2e-2, rtol=5e-2)


def test_without_gradient_nothing_is_computed_twice(tiles):
    model = build("plain")
    *text, _ = texts([3, 5], [[2, 4, 1], [5, 5, 3]])
    assert can_tile(model)
    logits_room.prepare_head(model)  # the self-checks' own passes are over
    widths = Widths(model)
    with torch.no_grad():
        completion_log_probs(model, *text)
    assert sum(widths.seen) == 1 + int(text[2].sum())  # 1: what lets the model's own forward pass come to its end


def test_a_small_vocabulary_is_not_tiled():
    model = build("plain")
    widths = Widths(model)
    *text, _ = texts([3, 5], [[2, 4, 1], [5, 5, 3]])
    completion_log_probs(model, *text)[0].sum().backward()
    assert len(widths.seen) == 1
    assert not logits_room.is_large(8192, model)
    model.config.vocab_size = 151_936
    assert logits_room.is_large(512, model)


def test_accuracy_and_entropy_without_logits(request):
    model = build("soft cap")
    tokens = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(0))
    place = torch.tensor([0, 5, 6, 13, 17, 18])
    target = model(input_ids=tokens).logits.flatten(0, 1)[place].argmax(-1)
    target[2] = (target[2] + 1) % WORDS
    whole = log_probs_at(model, place, target, entropy=True, accuracy=True, input_ids=tokens)
    request.getfixturevalue("tiles")
    tiled = log_probs_at(model, place, target, entropy=True, accuracy=True, input_ids=tokens)
    assert tiled.is_likeliest.tolist() == whole.is_likeliest.tolist() == [[True, True, False, True, True, True]]
    torch.testing.assert_close(tiled.entropy, whole.entropy)


def test_a_value_head_reads_the_same_states(request):
    model, head = build("soft cap"), HeadOnPolicy(32)
    torch.nn.init.normal_(head.linear.weight)
    *text, _ = texts([3, 5], [[2, 4, 1], [5, 5, 3]])
    whole = head(model, *text, temperature=1.0)
    expected = head.linear(model(input_ids=text[0], output_hidden_states=True).hidden_states[-1])[..., 0]
    for i, (start, n) in enumerate(zip(*text[1:], strict=True)):
        torch.testing.assert_close(whole[2][i, :n], expected[i, start - 1 : start + n - 1])
    request.getfixturevalue("tiles")
    tiled = head(model, *text, temperature=1.0)
    for one, other in ((whole[0], tiled[0]), (whole[2], tiled[2])):
        torch.testing.assert_close(one, other)


def test_a_model_whose_output_has_weights_of_its_own_behind_it_is_not_tiled(tiles, caplog):
    model = build("plain")
    model.temperature_of_its_own = torch.nn.Parameter(torch.ones(()))
    assert not can_tile(model)
    assert "all logits are computed at once" in caplog.text


def test_an_output_layer_whose_hook_may_read_other_weights_is_not_tiled(tiles, caplog):
    model = build("plain")
    model.model.bias = torch.nn.Parameter(torch.zeros(WORDS))
    model.lm_head.register_forward_hook(lambda layer, inputs, output: output + model.model.bias)
    place, tokens = torch.tensor([1, 4]), torch.tensor([[5, 6, 7, 8, 9]])
    log_probs_at(model, place, torch.tensor([7, 3]), input_ids=tokens).log_prob.sum().backward()
    assert model.model.bias.grad is not None and bool(model.model.bias.grad.any())
    assert "all logits are computed at once" in caplog.text


def test_a_cap_is_found_while_logits_are_small(tiles):
    model = build("soft cap")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-4)
        assert can_tile(model)
        model.lm_head.weight.normal_(std=3)
    place, tokens = torch.tensor([1, 4]), torch.tensor([[5, 6, 7, 8, 9]])
    found = log_probs_at(model, place, torch.tensor([7, 3]), input_ids=tokens)
    expected = model(input_ids=tokens).logits[0, place].log_softmax(-1)[[0, 1], [7, 3]]
    torch.testing.assert_close(found.log_prob[0], expected)


def test_what_the_config_does_not_explain_is_not_tiled(tiles):
    model = build("plain")
    # A hook on the whole model stands for an architecture that does something else to its logits.
    model.register_forward_hook(lambda layer, inputs, output: setattr(output, "logits", output.logits.sin()))
    assert not can_tile(model)
    place, tokens = torch.tensor([1, 4]), torch.tensor([[5, 6, 7, 8, 9]])
    found = log_probs_at(model, place, torch.tensor([7, 3]), input_ids=tokens)
    expected = model(input_ids=tokens).logits[0, place].log_softmax(-1)[[0, 1], [7, 3]]
    torch.testing.assert_close(found.log_prob[0], expected)


def test_a_training_step_has_the_same_gradient(tmp_path, request):
    fields = ARCHITECTURES["Qwen2"]
    whole = gradient(SFT(model_config=fields, lr_scheduler_type="constant"), demonstrations(tmp_path))
    request.getfixturevalue("tiles")
    module = SFT(model_config=fields, lr_scheduler_type="constant", gradient_checkpointing=True)
    assert_same_gradient(whole, gradient(module, demonstrations(tmp_path)))
    assert any("tiles" in what for what, _ in _known[module.model])


def test_the_check_of_a_large_vocabulary_runs_at_the_start(monkeypatch):
    model = network("Llama")
    logits_room.prepare_head(model)
    assert not any("tiles" in what for what, _ in _known[model])
    monkeypatch.setattr(logits_room, "TILED_ABOVE", {"cpu": 2**20})
    logits_room.prepare_head(model)
    assert any("tiles" in what for what, _ in _known[model])


@pytest.mark.parametrize(("kind", "lora"), [*((kind, None) for kind in HEADS), ("plain", LORA)])
def test_a_loss_of_equal_weights_has_its_gradient_from_the_forward_pass(kind, lora, request):
    model = build(kind, lora)
    tokens = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(0))
    place, target = torch.tensor([0, 5, 6, 13, 17, 18]), torch.tensor([4, 5, 6, 7, 8, 9])
    found = []
    for tiled in (False, True):
        if tiled:
            request.getfixturevalue("tiles")
            assert can_tile(model)
            logits_room.prepare_head(model)
            widths = Widths(model)
        model.zero_grad()
        log_prob = log_probs_at(model, place, target, equal_weights=True, input_ids=tokens).log_prob
        (log_prob.sum() * -0.3).backward()
        gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((log_prob.detach(), log_prob.detach(), gradient))
    assert_same(*found, atol=2e-5, rtol=1e-4)
    assert widths.seen == [1, ROWS, 2]


def test_unequal_weights_are_not_taken_for_equal_ones(tiles):
    model = build("plain")
    place, target = torch.tensor([0, 3]), torch.tensor([4, 5])
    found = log_probs_at(model, place, target, equal_weights=True, input_ids=torch.tensor([[5, 6, 7, 8]]))
    with pytest.raises(RuntimeError, match="the loss weights tokens unequally"):
        (found.log_prob * torch.tensor([1.0, 2.0])).sum().backward()


def on_shards(kind: str, is_tiled: bool) -> dict[str, Any]:
    """Log-probabilities, entropies and gradients of two ranks that hold half of each weight and see other texts."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    model = build(kind, LORA if kind == "plain" else None)
    shard(model, partial(fully_shard, mesh=mesh, reshard_after_forward=True))
    if is_tiled:
        tiled_head.TILE, logits_room.TILED_ABOVE = {"cpu": ROWS * WORDS}, {"cpu": 0}
        assert can_tile(model)
    logits_room.prepare_head(model)
    widths: list[int] = []
    head = model.get_output_embeddings()
    forward = head.forward
    head.forward = lambda x: widths.append(x.shape[:-1].numel()) or forward(x)
    *text, _ = texts([3, 5 - rank], [[2, 4, 1], [5, 5 - 2 * rank, 3]])
    log_prob, entropy, gradients = numbers(model, completion_log_probs, *text)
    whole = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    assert (max(widths) == ROWS) == is_tiled
    model.zero_grad()
    place, target = torch.tensor([0, 1, 2, 5, 6 + rank]), torch.tensor([4, 5, 6, 7, 8])
    equal = log_probs_at(model, place, target, equal_weights=True, input_ids=text[0])
    (equal.log_prob.sum() * -0.3).backward()
    whole |= {f"equal {name}": p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return {"log_prob": log_prob, "entropy": entropy, "gradients": whole}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "tied", "soft cap"])
def test_sharded_weights_are_tiled_too(kind, tmp_path):
    whole = on_ranks(partial(on_shards, kind, False), tmp_path / "whole")
    tiled = on_ranks(partial(on_shards, kind, True), tmp_path / "tiled")
    for one, other in zip(whole, tiled, strict=True):
        assert one["gradients"].keys() == other["gradients"].keys() and one["gradients"]
        torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-4)
    assert not torch.equal(whole[0]["log_prob"], whole[1]["log_prob"])
