"""The images of one or several rows: tensors that a model's forward pass takes besides the tokens."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_modules.language.architecture import transformers_model

#: Arguments of forward passes that mark the tokens that stand for images.
_TYPES = ("mm_token_type_ids", "token_type_ids")


class RowImages:
    """The processor's tensors of images, in the order in which they stand in the rows.

    Args:
        fields: by their names in the model's forward pass, such as ``pixel_values``. The first dimension goes over
            images, or over parts of them; a model finds their places by its image token. Empty for rows without images.
    """

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.fields = fields

    def joined(self, others: "Sequence[RowImages]") -> "RowImages":
        """Returns the images of this row and, below it, of others. Other dimensions are padded with 0, as the
        processor does for a batch.
        """
        rows = [self, *others]
        names = dict.fromkeys(name for row in rows for name in row.fields)
        return RowImages({n: _stacked([row.fields[n] for row in rows if n in row.fields]) for n in names})

    def to(self, *args: Any, **kwargs: Any) -> "RowImages":
        """Moves the tensors to a device."""
        return RowImages({name: tensor.to(*args, **kwargs) for name, tensor in self.fields.items()})

    def inputs(self, model: Any, tokens: Tensor, prompt_length: Tensor | None = None) -> dict[str, Any]:
        """Returns the arguments of a forward pass over rows with these images.

        An image token that a model has written itself stands for no image: token 0 is read in its place, as in
        decoding.

        Args:
            model: one of transformers that takes images, or such a model with adapters.
            tokens: [b, T].
            prompt_length: [b], after which a model has written; None: it has written nothing.
        """
        network = transformers_model(model)
        shown = tokens == image_token(network)
        if prompt_length is not None:
            is_written = torch.arange(tokens.shape[1], device=tokens.device) >= prompt_length.unsqueeze(1)
            tokens = tokens.masked_fill(shown & is_written, 0)
            shown = shown & ~is_written
        known = inspect.signature(network.forward).parameters
        types = {name: shown.long() for name in _TYPES if name in known}
        return {"input_ids": tokens, **self.to(tokens.device).fields, **types}

    def as_read(self, model: Any, written: Tensor) -> Tensor:
        """Returns tokens that a model has written as it reads them, see :meth:`inputs`."""
        return written.masked_fill(written == image_token(transformers_model(model)), 0)

    def positions(self, model: Any, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Returns the positions of prompts' tokens in rows, columns and time, [3, b, T], of a model that has such;
        ``mask`` [b, T] is false in padding.
        """
        network = transformers_model(model)
        body = next((part for part in network.modules() if hasattr(part, "get_rope_index")), None)
        if body is None:
            return None
        given = {**self.inputs(model, tokens), "attention_mask": mask.long()}
        known = inspect.signature(body.get_rope_index).parameters
        found: Tensor = body.get_rope_index(**{name: x for name, x in given.items() if name in known})[0]
        return found.to(tokens.device)


def image_token(network: Any) -> int:
    """The token that stands for an image, or a part of one; -1: the model's config names none."""
    config = network.config
    return int(next((x for n in ("image_token_id", "image_token_index") if (x := getattr(config, n, None))), -1))


def _stacked(parts: list[Tensor]) -> Tensor:
    size = [max(part.shape[i] for part in parts) for i in range(1, parts[0].ndim)]
    padded = []
    for part in parts:
        missing = [wanted - own for wanted, own in zip(size, part.shape[1:], strict=True)]
        padded.append(pad(part, [x for n in reversed(missing) for x in (0, n)]) if any(missing) else part)
    return torch.cat(padded)
