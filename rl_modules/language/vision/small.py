"""A LLaVA of about a million parameters with the character tokenizer, for images of 40 x 40 pixels."""

from typing import Any

from transformers import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from rl_modules.language.tokenizer import character_tokenizer

#: Pixels of a side, and of a side of the patches that become a token each.
SIDE, PATCH = 40, 8
_IMAGE = "<image>"
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}>{% endif %}{% endfor %}"
)
_LAYERS = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


def small_processor() -> LlavaProcessor:
    """Returns the processor of the model that :func:`small_config` describes."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [_IMAGE]})
    tokenizer.chat_template = _TEMPLATE
    images = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(images, tokenizer, PATCH, "full", _TEMPLATE, image_token=_IMAGE)


def small_config(fields: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of the architecture: two layers each of a SigLIP tower and of a Qwen2; ``fields`` override."""
    given = fields or {}
    if given.get("model_type", "llava") != "llava":
        return given
    text, seen = given.get("text_config", {}), given.get("vision_config", {})
    return {
        "model_type": "llava",
        "image_token_id": small_processor().image_token_id,
        "image_seq_length": (SIDE // PATCH) ** 2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        **given,
        "text_config": {
            "model_type": "qwen2",
            **_LAYERS,
            "num_key_value_heads": 4,
            "max_position_embeddings": 1024,
            **text,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            **_LAYERS,
            "image_size": SIDE,
            "patch_size": PATCH,
            "vision_use_head": False,
            **seen,
        },
    }
