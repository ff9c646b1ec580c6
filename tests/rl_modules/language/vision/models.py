"""Random models of real architectures that take images, with their processors, saved as a checkpoint's folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    InternVLProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
    processing_utils,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rl_modules.language.tokenizer import character_tokenizer

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "llava", "internvl")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content "
    "%}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% if m.role == "
    "'assistant' %}<eos>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_SEEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class NoVideos(dict[str, Any]):
    """In place of a processor's part for videos, which needs torchvision."""

    _auto_class = None
    model_input_names: tuple[str, ...] = ()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "NoVideos":
        return cls()

    def save_pretrained(self, folder: Any, **kwargs: Any) -> None: ...


@pytest.fixture
def without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors with :class:`NoVideos`."""
    proper = ProcessorMixin.check_argument_for_proper_class

    def check(self: Any, name: str, argument: Any) -> Any:
        return NoVideos if name == "video_processor" else proper(self, name, argument)

    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", check)
    mapping = type(processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING)
    known = mapping.__getitem__
    monkeypatch.setattr(mapping, "__getitem__", lambda self, key: NoVideos if "video" in key else known(self, key))


def _tokenizer(*special: str, **named: str) -> Any:
    own = character_tokenizer()
    own.add_special_tokens({"additional_special_tokens": [*special, *named.values(), "<|user|>", "<|assistant|>"]})
    how = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer, extra_special_tokens=named, **how)


def _qwen(processor: Any, **vision: Any) -> tuple[dict[str, Any], Any]:
    tokenizer = _tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    seen = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    named = {"image_token_id": "image_pad", "video_token_id": "video_pad", "vision_start_token_id": "vision_start"}
    named |= {"vision_end_token_id": "vision_end"}
    fields = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in named.items()}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    fields["text_config"] = {"rope_parameters": rope, "head_dim": 8}
    fields["vision_config"] = {**seen, "out_hidden_size": 32, **vision}
    return fields, processor(images, tokenizer, NoVideos(), chat_template=tokenizer.chat_template)


def _gemma() -> tuple[dict[str, Any], Any]:
    tokenizer = _tokenizer(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", "<start_of_image>")
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    fields = {
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "image_token_index": tokenizer.image_token_id,
        "mm_tokens_per_image": 4,
        "text_config": {"head_dim": 8, "sliding_window": 512},
        "vision_config": {**_SEEN, "image_size": 16, "patch_size": 4},
    }
    return fields, Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)


def _idefics() -> tuple[dict[str, Any], Any]:
    places = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]
    tokenizer = _tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *places)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", "<image>")
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    fields = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "text_config": {"model_type": "llama"},
        "vision_config": {**_SEEN, "image_size": 16, "patch_size": 4},
    }
    return fields, Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)


def _llava() -> tuple[dict[str, Any], Any]:
    tokenizer = _tokenizer("<image>")
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", "<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    fields = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **_SEEN, "image_size": 16, "patch_size": 4},
        "vision_feature_layer": -1,
    }
    processor = LlavaProcessor(images, tokenizer, 4, "default", tokenizer.chat_template, num_additional_image_tokens=1)
    return fields, processor


def _internvl() -> tuple[dict[str, Any], Any]:
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = _tokenizer(**named, video_token="<video>")
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>")
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=2)
    fields = {
        "image_token_id": tokenizer.context_image_token_id,
        "image_seq_length": 4,
        "text_config": {"model_type": "qwen2"},
        "vision_config": {**_SEEN, "image_size": [16, 16], "patch_size": [4, 4]},
    }
    processor = InternVLProcessor(
        images, tokenizer, NoVideos(), image_seq_length=4, chat_template=tokenizer.chat_template
    )
    return fields, processor


_PARTS: dict[str, Callable[[], tuple[dict[str, Any], Any]]] = {
    "qwen2_5_vl": partial(_qwen, Qwen2_5_VLProcessor, window_size=16, fullatt_block_indexes=[1]),
    "qwen3_vl": partial(_qwen, Qwen3VLProcessor, num_position_embeddings=64, deepstack_visual_indexes=[0]),
    "gemma3": _gemma,
    "idefics3": _idefics,
    "llava": _llava,
    "internvl": _internvl,
}


def make(family: str, folder: Path, seed: int = 0, **text: Any) -> Path:
    """Writes a random model of ``family`` with its processor into a folder."""
    fields, processor = _PARTS[family]()
    words = len(processor.tokenizer)
    fields["text_config"] = {**_TEXT, **fields.get("text_config", {}), "vocab_size": words, **text}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    fields["text_config"] |= special
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **fields, tie_word_embeddings=False))
    for parameter in model.parameters():  # so that images matter
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.2)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
