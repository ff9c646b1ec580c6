"""Tiny random models of many architectures, what is checked on each, and the table of what was found.

    python -m tests.conformance.architectures --write docs/language/architectures.md

A check compares what the language algorithms compute with transformers' own forward pass over one unpadded text, or
with its ``generate``, and returns the largest difference.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rl_modules import GRPO, SFT
from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import make_config
from rl_modules.language.export import export_model
from rl_modules.language.fast.chosen_places import last_mlp
from rl_modules.language.fast.grouped_attention import can_group
from rl_modules.language.fast.kernels import checkpoint_activations
from rl_modules.language.fast.packing import can_pack_scores, can_pack_texts
from rl_modules.language.fast.self_check import require_left_to_right
from rl_modules.language.fast.shared_prompts import SharedPromptCache
from rl_modules.language.fast.shared_scoring import can_share
from rl_modules.language.fast.tiled_head import can_tile
from rl_modules.language.lora import add_lora
from rl_modules.language.models import make_model
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling import Completions, sample
from rl_modules.language.sampling.check import decodes
from rl_modules.language.tokenizer import character_tokenizer

#: Fields that most configs share; 2 layers of 32 hidden units.
BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
HEADS = {**BASE, "head_dim": 8}
WINDOW = {**HEADS, "sliding_window": 8}
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

#: Fields of each architecture's config, by the name in the table.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", **BASE},
    "Llama, tied": {"model_type": "llama", **BASE, "tie_word_embeddings": True},
    "Mistral, window 8": {"model_type": "mistral", **WINDOW},
    "Qwen2": {"model_type": "qwen2", **BASE},
    "Qwen3": {"model_type": "qwen3", **HEADS},
    "Qwen3-MoE": {"model_type": "qwen3_moe", **HEADS, **EXPERTS},
    "Gemma-2": {"model_type": "gemma2", **WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 8},
    "Gemma-3 text": {"model_type": "gemma3_text", **WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 8},
    "Gemma-3": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 8},
        "vision_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "Phi-3": {"model_type": "phi3", **BASE, "sliding_window": 8},
    "GPT-2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **NO_DROPOUT},
    "GPT-Neo": {"model_type": "gpt_neo", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128},
    "GPT-NeoX": {"model_type": "gpt_neox", **BASE},
    "OPT": {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    "Bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "new_decoder_architecture": False, "multi_query": True, "alibi": False,
               "max_position_embeddings": 128},
    "Falcon, ALiBi": {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "new_decoder_architecture": False, "multi_query": False, "alibi": True},
    "MPT": {"model_type": "mpt", "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "Mixtral": {"model_type": "mixtral", **BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": {"model_type": "gpt_oss", **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
                "layer_types": LAYERS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "OLMo-2": {"model_type": "olmo2", **BASE},
    "SmolLM3": {"model_type": "smollm3", **BASE, "no_rope_layer_interval": 2},
    "LFM2": {"model_type": "lfm2", **BASE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8,
             "conv_L_cache": 3},
    "Mamba-2": {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
                "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2},
    "Mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "Jamba": {"model_type": "jamba", **BASE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
              "num_experts_per_tok": 1, "expert_layer_period": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
              "use_mamba_kernels": False},
    "Qwen3-Next": {"model_type": "qwen3_next", **HEADS, **EXPERTS, "shared_expert_intermediate_size": 32,
                   "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "Qwen3.5": {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", **HEADS, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                        "layer_types": ["linear_attention", "full_attention"]},
        "vision_config": {"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2,
                          "out_hidden_size": 32},
    },
    "EXAONE-4": {"model_type": "exaone4", **WINDOW, "layer_types": LAYERS, "sliding_window_pattern": 2},
    "Granite": {"model_type": "granite", **BASE, "logits_scaling": 4.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    "Cohere": {"model_type": "cohere", **BASE, "logit_scale": 0.25},
    "RWKV": {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2, "context_length": 128},
    "BERT": {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5": {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "DeepSeek-V3": {"model_type": "deepseek_v3", **BASE, "num_key_value_heads": 4, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
                    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1},
}  # fmt: skip


def network(name: str, head: str = "causal", **options: Any) -> Any:
    """A model of the architecture in evaluation mode, with weights large enough for errors to show.

    Args:
        name: key of :data:`ARCHITECTURES`.
        head: ``causal`` or ``score``.
        options: further arguments of ``make_model``.
    """
    config = make_config(None, ARCHITECTURES[name], character_tokenizer(), dropout=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model(config, head=head, **options)
        strengthen(model)
    return model.eval()


@torch.no_grad()
def strengthen(model: Any) -> None:
    """Multiply matrices by 4: with initial weights of standard deviation 0.02 a wrong mask would hardly show."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "lora_" not in name and "A_log" not in name and "conv" not in name:
            parameter.mul_(4)


# -------------------------------------------------------------------- checks

#: Prompts and completions shorter and longer than a window of 8, and a layout wider than any row.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20], [30, 31, 32, 33], [40, 41]]
LENGTHS = [[2, 5], [12, 7], [1, 4], [6, 3]]
EOS, PAD = 2, 0


def batch_of(prompts: list[list[int]], lengths: list[list[int]]) -> dict[str, Tensor]:
    """Completions of given lengths to each prompt, as a minibatch of GRPO."""
    generator = torch.Generator().manual_seed(0)
    group = [i for i, row in enumerate(lengths) for _ in row]
    length = [n for row in lengths for n in row]
    rows = [prompts[g] + torch.randint(3, 90, (n,), generator=generator).tolist()
            for g, n in zip(group, length, strict=True)]  # fmt: skip
    width = max(map(len, rows))
    return {
        "tokens": torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        "prompt_length": torch.tensor([len(prompts[g]) for g in group]),
        "length": torch.tensor(length),
        "group": torch.tensor(group),
    }


def plain_log_probs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Log π of every completion token, one unpadded text at a time, [b, L]."""
    rows = zip(batch["tokens"], batch["prompt_length"].tolist(), batch["length"].tolist(), strict=True)
    found = []
    for tokens, start, n in rows:
        text = tokens[: start + n]
        logits = model(input_ids=text[None], use_cache=False).logits[0, start - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, text[start:, None]).squeeze(1))
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def gradients(model: Any, log_prob: Tensor) -> dict[str, Tensor]:
    """Of a weighted sum of log-probabilities."""
    model.zero_grad()
    weight = torch.arange(1, 1 + log_prob.numel()).view(log_prob.shape) / log_prob.numel()
    (log_prob * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of gradients, relative to the largest gradient."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    scale = max(float(g.abs().max()) for g in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / scale


def grpo_with(model: Any) -> GRPO:
    """The module around a finished model."""
    module = GRPO()
    module.model = model
    return module


def written(model: Any, **options: Any) -> Completions:
    settings = {"max_completion_length": 12, "eos_token_id": EOS, "pad_token_id": PAD, "seeds": range(8),
                "num_generations": 2}  # fmt: skip
    return sample(model, PROMPTS, **{**settings, **options})


def sampler_is_generate(name: str) -> float:
    """Greedy completions token by token: the share that differs from ``generate`` of each prompt alone."""
    model = network(name)
    found = written(model, temperature=0.0, num_generations=1, seeds=range(4))
    wrong = 0
    for i, prompt in enumerate(PROMPTS):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=12, eos_token_id=EOS, pad_token_id=PAD,
        )[0, len(prompt) :]  # fmt: skip
        wrong += found.tokens[i, : int(found.length[i])].tolist() != theirs.tolist()
    return wrong / len(PROMPTS)


def sampled_log_probs(name: str) -> float:
    """The sampler's log-probabilities against one forward pass per text, and the ratio to those of training."""
    model = network(name)
    found = written(model)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    rows = [prompt + tokens[:n].tolist() for prompt, tokens, n in zip(prompts, found.tokens, found.length, strict=True)]
    width = max(map(len, rows))
    batch = {
        "tokens": torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        "prompt_length": torch.tensor([len(prompt) for prompt in prompts]),
        "length": found.length,
        "group": torch.arange(len(rows)) // 2,
    }
    with torch.no_grad():
        expected = plain_log_probs(model, batch)
        training, _ = grpo_with(model.train()).log_probs(batch)
    log_prob = torch.where(found.mask, found.log_prob, 0.0)
    ratio = (training - log_prob).exp() - 1
    return float(torch.maximum((log_prob - expected).abs().max(), ratio.abs().max()))


def training_log_probs(name: str) -> float:
    """GRPO's log-probabilities and gradients, with prompts read once where they can be, against plain passes."""
    worst = 0.0
    model = network(name).train()
    # Wider than the window, and within it.
    for batch in (batch_of(PROMPTS, LENGTHS), batch_of([[5, 6], [7, 8, 9]], [[2, 4], [3, 1]])):
        found, _ = grpo_with(model).log_probs(batch)
        expected = plain_log_probs(model, batch)
        worst = max(worst, float((found - expected).detach().abs().max()))
        worst = max(worst, largest_difference(gradients(model, found), gradients(model, expected)))
    return worst


def packing_is_padding(name: str) -> float:
    """SFT's loss and gradients on a packed batch, or a padded one where the model does not pack, against plain ones."""
    from datamodules.language.sequences import Sequences

    module = SFT()
    module.model = network(name).train()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (14, 5, 9, 3, 6, 2, 11)]
    sequences = Sequences([text[:1] for text in texts], [text[1:] for text in texts], completion_only=True)
    found = module.demonstrated(sequences.batch(torch.arange(len(texts)), PAD, packing=module.can_pack))
    total = found.log_prob.sum()
    alone = [module.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :-1].log_softmax(-1)
             .gather(1, torch.tensor(text[1:])[:, None]).sum() for text in texts]  # fmt: skip
    expected = torch.stack(alone).sum()
    same = largest_difference(gradients(module.model, total), gradients(module.model, expected))
    return max(float((total - expected).detach().abs()) / found.log_prob.numel(), same)


def export_is_the_model(name: str) -> float:
    """Logits of what ``from_pretrained`` reads from an export."""
    model, tokens = network(name), torch.tensor([PROMPTS[0]])
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        export_model(model, character_tokenizer(), folder)
        again = AutoModelForCausalLM.from_pretrained(folder).eval()
        return float((again(input_ids=tokens).logits - model(input_ids=tokens).logits).abs().max())


def adapters_train(name: str) -> float:
    """LoRA: log-probabilities against plain passes, and the logits of an export, into which adapters are merged."""
    # Of Mamba's linear layers, peft adapts the first: its kernels read the others' weights directly.
    targets = ["in_proj"] if "mamba" in name.lower() or name == "Jamba" else "all-linear"
    lora = {"r": 2, "target_modules": targets, "init_lora_weights": False}
    model = add_lora(network(name), lora, "CAUSAL_LM", False).train()
    batch = batch_of(PROMPTS[2:], LENGTHS[2:])
    found, _ = grpo_with(model).log_probs(batch)
    worst = float((found - plain_log_probs(model, batch)).detach().abs().max())
    trained = [p for name, p in model.named_parameters() if p.requires_grad and "vision" not in name]
    found.sum().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in trained)
    model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        export_model(model, character_tokenizer(), folder)
        again = AutoModelForCausalLM.from_pretrained(folder).eval()
        tokens = torch.tensor([PROMPTS[0]])
        # Merging adds the product to the weights, which rounds by the size of what they compute.
        adapted = model(input_ids=tokens).logits
        error = (again(input_ids=tokens).logits - adapted).abs().max() / adapted.abs().max().clamp(min=1)
        return max(worst, float(error))


def checkpointing_is_the_same(name: str) -> float:
    """Gradients with activations computed again, against those that are kept."""
    batch, found = batch_of(PROMPTS, LENGTHS), []
    for how in (False, True):
        model = network(name)
        checkpoint_activations(model, how)
        log_prob, _ = grpo_with(model.train()).log_probs(batch)
        found.append(gradients(model, log_prob))
    return largest_difference(*found)


CHECKS: dict[str, Callable[[str], float]] = {
    "sampler = generate": sampler_is_generate,
    "sampled log π": sampled_log_probs,
    "trained log π": training_log_probs,
    "packing": packing_is_padding,
    "export": export_is_the_model,
    "LoRA": adapters_train,
    "checkpointing": checkpointing_is_the_same,
}
#: Largest difference that is rounding, in nats or relative to the largest gradient, at float32.
TOLERANCE = 5e-5


# -------------------------------------------------------------------- the table


def fast_paths(name: str) -> list[str]:
    """Which fast paths the self-check allows, in the order of the table's columns."""
    model = network(name)
    config = model.config.get_text_config(decoder=True)
    kinds = [SharedPromptCache, RowCache] if can_group(model) else [RowCache]
    cache = next((kind for kind in kinds if decodes(model, lambda n, kind=kind: kind.for_model(config, n))), None)
    decoding = {SharedPromptCache: "shared prompts", RowCache: "rows", None: "generate"}[cache]
    try:
        pairs = can_pack_scores(network(name, "score"))
        reward = "packed" if pairs else "padded"
    except UsageError:
        reward = "refused"
    able = [can_share(model, 8), can_pack_texts(model), last_mlp(model) is not None, can_tile(model)]
    return [decoding, *("yes" if yes else "no" for yes in able), reward]


def row_of(name: str) -> str:
    """One line of the table."""
    try:
        require_left_to_right(network(name))
        written(network(name), max_completion_length=2)
    except UsageError as error:
        reason = str(error).split(";")[0]
        return f"| {name} | refused: {reason} |" + " |" * 6
    errors = {check: CHECKS[check](name) for check in CHECKS}
    wrong = [f"{check}: {error:.1g}" for check, error in errors.items() if error > TOLERANCE]
    verdict = "; ".join(wrong) or f"right ({max(errors.values()):.0e})"
    return f"| {name} | {verdict} | " + " | ".join(fast_paths(name)) + " |"


HEADER = f"""# Architectures

Each row is a tiny random model of one architecture. The following are compared with transformers' forward pass over one
unpadded text, or with its `generate`: {", ".join(CHECKS)}. *Right* means that nothing differs by more than
{TOLERANCE:.0e} nats (or of the largest gradient); the largest
difference is in parentheses. The other columns show which fast paths the self-check at the start of a run allows for
the model; if one is not allowed, the run uses the plain path and prints a line.

* **decoding**: *shared prompts*: all completions of a prompt read one copy of its keys and values (on a CPU); *rows*:
  finished rows are removed from the cache; *generate*: the model's own method, because the model has recurrent states
  or windows.
* **prompts once**: GRPO computes the prompt of a group once for all log-probabilities. With a sliding window this
  requires that the longest prompt and completion together fit into the window.
* **packing**: `packing: true` of SFT puts several texts into a row. Recurrent states, convolutions, ALiBi, and
  positions that the model counts itself continue from one text to the next, so such models use one row per text.
* **last block**: the last feed-forward layer runs on counted tokens only.
* **tiles**: large logits are computed tile by tile, see [SFT](sft.md).
* **reward model**: whether pairs are packed, or transformers has no sequence classification for the type.

`python -m tests.conformance.architectures --write docs/language/architectures.md` writes this page. To test another
architecture, add its config's fields to `ARCHITECTURES`.

| architecture | checks | decoding | prompts once | packing | last block | tiles | reward model |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="where the table goes; without it, to the terminal")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    for name in ARCHITECTURES:
        rows.append(row_of(name))
        print(rows[-1], flush=True)
    if arguments.write:
        arguments.write.write_text(HEADER + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
