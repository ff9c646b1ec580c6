"""A checkpoint's processor: images as the model's tensors, and the text that stands for each."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import AutoProcessor

from rl_modules.common.errors import UsageError
from rl_modules.language.pretrained import write_files
from rl_modules.language.tokenizer import tokenizer_to_dict
from rl_modules.language.vision.rows import RowImages

if TYPE_CHECKING:
    from PIL.Image import Image

#: Fields of a processor that belong to tokens.
_OF_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ImageReader:
    """Reads images with a processor of transformers."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        #: What a chat template writes for an image.
        self.placeholder = str(processor.image_token)

    @classmethod
    def of(cls, name_or_path: str) -> "ImageReader":
        """Reads the processor of a model's directory or hub name."""
        try:
            processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"the records have images, and {name_or_path!r} has no processor that can be read ({reason}); give a "
                "model with a processor_config.json or preprocessor_config.json, and the packages that it needs"
            ) from error
        if getattr(processor, "image_token", None) is None:
            raise UsageError(
                f"the records have images, and the {type(processor).__name__} of {name_or_path!r} has no token for "
                "them; give a model that reads text and images"
            )
        return cls(processor)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> "ImageReader":
        """The inverse of :meth:`files`."""
        with tempfile.TemporaryDirectory() as folder:
            write_files(files, Path(folder).resolve())
            return cls.of(folder)

    def files(self) -> dict[str, str]:
        """Returns the processor's files by name, as text that a checkpoint may hold."""
        return tokenizer_to_dict(self.processor)

    def read(self, images: "Sequence[Image]") -> tuple[RowImages, list[str]]:
        """Returns the tensors of a row's images, and the text that stands for each of them."""
        text = self.placeholder * len(images)
        how = {"return_tensors": "pt", "return_text_replacement_offsets": True}
        found = self.processor(images=[list(images)], text=[text], **how)
        replaced = found.get("text_replacement_offsets")
        if replaced is None:
            raise UsageError(
                f"{type(self.processor).__name__} does not say what stands for an image in the text; take transformers "
                "5.24 or later, and a model whose processor returns text_replacement_offsets"
            )
        fields = {name: x for name, x in found.items() if isinstance(x, Tensor) and name not in _OF_TOKENS}
        return RowImages(fields), [part["replacement"] for part in replaced[0]]
