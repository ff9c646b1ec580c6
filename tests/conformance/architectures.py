"""Tiny random models of the architectures that the language algorithms are checked on."""

from typing import Any

import torch

from rl_modules.language.models import make_config, make_model
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
