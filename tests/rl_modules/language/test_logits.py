"""Logits of chosen places are those of the whole forward pass, and so are their gradients."""

import pytest
import torch

from rl_modules.language.architecture import make_config
from rl_modules.language.fast.chosen_places import last_mlp
from rl_modules.language.models import make_model
from rl_modules.language.scoring import logits_at
from rl_modules.language.tokenizer import character_tokenizer

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
FIELDS = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
          **{kind: {**LLAMA, "head_dim": 16} for kind in ("gemma", "gemma2", "qwen3")}}  # fmt: skip
#: Architectures whose last block ends with an ``mlp`` that sees one token at a time.
PLAIN = ("gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3")
LORA = {"r": 2, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}


def build(kind, **options):
    torch.manual_seed(0)
    fields = {"model_type": kind, **FIELDS.get(kind, LLAMA)}
    return make_model(make_config(None, fields, character_tokenizer(), dropout=False), **options).train()


def both(model):
    tokens = torch.randint(3, 99, (3, 7), generator=torch.Generator().manual_seed(0))
    place = torch.tensor([0, 5, 6, 13, 20])
    found = []
    for logits in (model(input_ids=tokens).logits.flatten(0, 1)[place], logits_at(model, place, input_ids=tokens)[0]):
        model.zero_grad()
        logits.log_softmax(-1)[:, 5].sum().backward()
        found.append((logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    # Nothing is left behind.
    assert model(input_ids=tokens).logits.shape[:2] == (3, 7)
    return found


@pytest.mark.parametrize("kind", PLAIN)
def test_chosen_places_have_the_logits_and_gradients_of_the_whole(kind):
    model = build(kind)
    assert last_mlp(model) is not None
    whole, chosen = both(model)
    torch.testing.assert_close(chosen[0], whole[0], atol=2e-6, rtol=1e-5)
    assert chosen[1].keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        torch.testing.assert_close(chosen[1][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options", "chosen_mlp"),
    [
        ("qwen2", {"lora": LORA}, True),
        # Run again in the backward pass, without our hooks.
        ("qwen2", {"gradient_checkpointing": True}, False),
        ("opt", {}, False),
    ],
    ids=["lora", "checkpointing", "opt"],
)
def test_other_models_too(kind, options, chosen_mlp):
    FIELDS.setdefault("opt", {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                              "word_embed_proj_dim": 32})  # fmt: skip
    model = build(kind, **options)
    assert (last_mlp(model) is not None) == chosen_mlp
    whole, chosen = both(model)
    torch.testing.assert_close(chosen[0], whole[0], atol=2e-6, rtol=1e-5)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(chosen[1][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.fast_path
def test_the_last_block_sees_chosen_places_only():
    model = build("llama")
    assert last_mlp(model) is not None  # the self-check's own passes are over
    widths = []
    for block in model.model.layers:
        block.mlp.gate_proj.register_forward_pre_hook(lambda layer, arguments: widths.append(arguments[0].shape[:-1]))
    logits_at(model, torch.tensor([3, 9]), input_ids=torch.full((2, 6), 7))
    assert widths == [(2, 6), (1, 2)]
