"""Prompts that are read once: the same log-probabilities, entropies and gradients as by a pass over whole rows."""

import pytest
import torch

from rl_modules.language.fast.shared_scoring import can_share, grouped_log_probs, repeated_share
from rl_modules.language.scoring import completion_log_probs
from rl_modules.language.sft import SFT

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4}  # fmt: skip
FAMILIES = {
    "qwen2": TINY,
    "qwen2, keys shared by heads": {**TINY, "num_key_value_heads": 2},
    "llama": {"model_type": "llama", **TINY},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                 "num_attention_heads": 2},
}  # fmt: skip


def build(config: dict, **arguments) -> SFT:
    module = SFT(model_config=config, **arguments)
    module.configure_model()
    return module


def texts(prompt_length: list[int], length: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Prompts of given lengths, each with completions of given lengths; in an order that mixes them."""
    generator = torch.Generator().manual_seed(0)
    group = torch.tensor([i for i, row in enumerate(length) for _ in row])
    prompts = torch.randint(3, 90, (len(length), max(prompt_length)), generator=generator)
    lengths = torch.tensor([n for row in length for n in row])
    before = torch.tensor(prompt_length)[group]
    tokens = torch.randint(3, 90, (len(group), int((before + lengths).max())), generator=generator)
    for i, n in enumerate(before):
        tokens[i, :n] = prompts[group[i], :n]
    order = torch.randperm(len(group), generator=generator)
    return tokens[order], before[order], lengths[order], group[order]


@pytest.mark.parametrize("lengths", [
    ([3, 5, 1], [[2, 4, 1], [5, 5, 3], [1, 2, 6]]),
    ([4, 4], [[2, 4, 1], [5, 1, 3]]),  # no padding among the prompts
    ([3, 2], [[1, 1], [1, 1]]),  # completions of one token: the prompts' logits say everything
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_a_pass_over_whole_rows(family, lengths):
    module = build(FAMILIES[family])
    module.model.train()
    tokens, prompt_length, length, group = texts(*lengths)
    results = []
    for function, extra in ((completion_log_probs, ()), (grouped_log_probs, (group,))):
        module.zero_grad()
        log_prob, entropy = function(module.model, tokens, prompt_length, length, *extra, temperature=0.7, entropy=True)
        weight = torch.arange(log_prob.numel()).view(log_prob.shape) / log_prob.numel()
        (log_prob * weight).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in module.model.parameters()])
        results.append((log_prob.detach(), entropy, gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.fast_path
def test_adapters_take_part():
    module = build(TINY, lora={"r": 2, "target_modules": ["q_proj", "v_proj"]})
    tokens, prompt_length, length, group = texts([3, 5], [[2, 4], [3, 3]])
    log_prob, _ = grouped_log_probs(module.model, tokens, prompt_length, length, group)
    log_prob.sum().backward()
    assert can_share(module.model, 16)
    assert all(p.grad is not None for p in module.model.parameters() if p.requires_grad)


def test_the_share_that_is_saved():
    # 3 rows of prompt 4 and one of prompt 2; completions of 8 tokens in all.
    share = repeated_share(torch.tensor([4, 2, 4, 4]), torch.tensor([1, 2, 3, 2]), torch.tensor([7, 3, 7, 7]))
    assert share == pytest.approx(8 / 22)


@pytest.mark.fast_path
def test_what_can_not_share():
    assert not can_share(build(TINY, gradient_checkpointing=True).model, 16)
    windows = {"model_type": "mistral", **TINY, "sliding_window": 8}
    module = build(windows)
    assert can_share(module.model, 8)
    assert not can_share(module.model, 9)
