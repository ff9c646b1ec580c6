"""The parts of a model that takes images: vision tower, projector and language model."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from rl_modules.common.errors import UsageError

#: Names of projectors that are within the vision tower.
_WITHIN = ("merger", "projector", "connector")


def freeze_parts(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Freezes the weights of the parts ``vision``, ``projector`` and ``language``."""
    parts = parts_of(model)
    for name in names:
        if not parts[name]:
            raise UsageError(f"freeze: {type(model).__name__} has no weights that are its {name}; leave it out")
        for parameter in parts[name]:
            parameter.requires_grad_(False)


def parts_of(model: PreTrainedModel) -> dict[str, list[nn.Parameter]]:
    """The weights of each part: those of the vision tower, those between it and the language model, the others."""
    tower = model.get_encoder(modality="image")
    language = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    within = {id(p) for name, p in tower.named_parameters() if not any(word in name for word in _WITHIN)}
    found: dict[str, list[nn.Parameter]] = {"vision": [], "projector": [], "language": []}
    for parameter in model.parameters():
        kind = "language" if id(parameter) in language else "vision" if id(parameter) in within else "projector"
        found[kind].append(parameter)
    return found
