"""The fast paths of the language algorithms and their plain twins, which ``RL_FAST=0`` runs, give the same numbers."""

import pytest
import torch

from rl_modules.language import scoring as logits_room
from rl_modules.language.architecture import make_config
from rl_modules.language.fast import tiled_head
from rl_modules.language.fast.packing import can_pack_pairs, can_pack_scores, can_pack_texts
from rl_modules.language.fast.shared_scoring import can_share, shared_log_probs
from rl_modules.language.models import make_model
from rl_modules.language.pairs import pair_log_probs, pair_scores
from rl_modules.language.scoring import completion_log_probs, log_probs_at, logits_at
from rl_modules.language.tokenizer import character_tokenizer
from tests.rl_modules.language.test_shared_scoring import texts

FIELDS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}  # sums in another order


def network(head="causal"):
    torch.manual_seed(0)
    config = make_config(None, {"model_type": "qwen2", **FIELDS}, character_tokenizer(), dropout=False)
    return make_model(config, head=head).train()


def both_ways(compute, model, monkeypatch):
    """Numbers of a fast path and of its plain twin, and the gradients of their weighted sum."""
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("RL_FAST", switch)
        model.zero_grad()
        numbers = compute()
        (numbers * torch.arange(numbers.numel()).view(numbers.shape)).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((numbers.detach(), gradients))
    return found


def assert_same(found):
    torch.testing.assert_close(found[1][0], found[0][0], **TOLERANCE)
    assert found[1][1].keys() == found[0][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=2e-4, rtol=1e-4)


def test_logits_of_chosen_places_are_selected_from_all_of_them(monkeypatch):
    model, tokens = network(), torch.randint(3, 99, (3, 7), generator=torch.Generator().manual_seed(0))
    place = torch.tensor([0, 5, 6, 13, 20])
    assert_same(both_ways(lambda: logits_at(model, place, input_ids=tokens), model, monkeypatch))


def test_tiles_are_the_output_layer_at_once(monkeypatch):
    model, tokens = network(), torch.randint(3, 99, (3, 7), generator=torch.Generator().manual_seed(0))
    place = torch.tensor([0, 4, 8, 13, 15])
    monkeypatch.setattr(tiled_head, "TILE", {"cpu": 2 * 99})
    monkeypatch.setattr(logits_room, "TILED_ABOVE", {"cpu": 0})
    assert tiled_head.can_tile(model) and logits_room.is_large(1, model)
    target = tokens.flatten()[place + 1]
    assert_same(both_ways(lambda: log_probs_at(model, place, target, input_ids=tokens).log_prob, model, monkeypatch))
    assert not logits_room.is_large(10**9, model)  # under RL_FAST=0, which is set now


def test_shared_prompts_are_read_with_each_completion(monkeypatch):
    model = network()
    *text, group = texts([3, 5], [[2, 4, 1], [5, 5, 3]])
    ways = []

    def compute():
        shared = shared_log_probs(model, *text, group)
        ways.append(shared is not None)
        return (shared or completion_log_probs(model, *text))[0]

    assert_same(both_ways(compute, model, monkeypatch))
    assert ways == [True, False]


@pytest.mark.parametrize("head", ["causal", "score"])
def test_packed_pairs_have_the_numbers_of_padded_ones(head, monkeypatch):
    model = network(head)
    tokens = torch.randint(3, 99, (9,), generator=torch.Generator().manual_seed(0))
    prompt, chosen, rejected = tokens.split([3, 4, 2])
    segment = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    lengths = torch.tensor([[3, 4, 2]])
    packed = {"tokens": tokens[None], "lengths": lengths, "last": torch.tensor([6, 8]), "segment": segment[None],
              "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 3, 4]]),
              "prompt_segment": torch.zeros_like(segment)[None]}  # fmt: skip
    rows = [torch.cat([prompt, chosen]), torch.cat([prompt, rejected])]
    padded = {"tokens": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), "lengths": lengths,
              "last": torch.tensor([6, 7 + 4])}  # fmt: skip
    can_pack = can_pack_pairs if head == "causal" else can_pack_scores

    def compute():
        batch = packed if can_pack(model) else padded
        return pair_log_probs(model, batch)[0] if head == "causal" else torch.cat(pair_scores(model, batch))

    assert can_pack(model)
    assert_same(both_ways(compute, model, monkeypatch))
    assert not can_pack(model)


def test_the_switch_turns_every_fast_path_off(monkeypatch):
    model = network()
    assert can_pack_texts(model) and can_share(model, 16)
    monkeypatch.setenv("RL_FAST", "0")
    assert not can_pack_texts(model) and not can_share(model, 16)
