"""Frozen weights in checkpoints: weights from a path are left out, and a digest shows whether they changed."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_modules.common.errors import UsageError
from rl_modules.language.lora import begins_unchanged

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


#: Source and digest of the frozen weights of each part of a module, by the prefix of its parameters' names.
Sources = dict[str, dict[str, str]]


def describe_sources(module: "LanguageModule", arguments: dict[str, str]) -> Sources:
    """Describes the frozen weights that arguments name by path and digest, which checkpoints hold instead."""
    sources: Sources = {}
    for prefix, argument in arguments.items():
        if not begins_unchanged(getattr(module, prefix.removesuffix("."))):
            continue
        place = str(module.hparams[argument])
        sources[prefix] = {
            "argument": argument,
            "given": place,
            "path": str(Path(place).resolve()) if Path(place).exists() else place,
            "digest": digest(frozen_parameters(module, prefix)),
        }
    return sources


def source_path(source: dict[str, str], given: Any) -> str:
    """Returns the path of frozen weights: the argument's value if it is new, else the recorded one."""
    place, argument = source["path"], source["argument"]
    if given[argument] is not None and str(given[argument]) != source["given"]:
        place = str(given[argument])
    if Path(place).is_absolute() and not Path(place).exists():
        raise UsageError(
            f"{argument}={place!r} is not there, and the checkpoint holds a digest of its weights only; "
            f"give its new place with {argument} (next time save_frozen_weights=true keeps them in the "
            "checkpoint)"
        )
    return place


def check_sources(module: "LanguageModule", sources: Sources) -> Sources:
    """Compares weights that were read again with the digests of those with which the run began."""
    for prefix, source in sources.items():
        _compare(digest(frozen_parameters(module, prefix)), source, module.hparams)
    return sources


def require_same_weights(own: Sources, saved: Sources, given: Any) -> None:
    """Compares a module's frozen weights with the digests in a checkpoint that lacks the weights."""
    for prefix, source in saved.items():
        if prefix in own:  # a module without such a part fails where its weights are loaded
            _compare(own[prefix]["digest"], source, given)


def _compare(found: str, source: dict[str, str], given: Any) -> None:
    if found != source["digest"]:
        raise UsageError(
            f"{source['argument']}={given[source['argument']] or source['path']!r} holds other weights than the run "
            f"began with (digest {found[:12]}, the checkpoint has {source['digest'][:12]}); put the old ones back, or "
            "begin a new run"
        )


def frozen_parameters(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Parameters of a part that never change, by name; and the scales of quantized ones."""
    return {
        name: parameter
        for name, parameter in module.state_dict(keep_vars=True).items()
        # peft keeps the initial weights of a head that is trained whole, which may be random instead of read from
        # files. Adapters of parts that do not process text are random too.
        if name.startswith(prefix)
        and not parameter.requires_grad
        and not any(part in name for part in ("original_module", "lora_"))
    }


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and every byte."""

    def of_one(name: str) -> bytes:
        tensor = tensors[name].detach().cpu()
        sha = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # A quantized weight of torchao has its numbers and scales as parts.
        parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        for part in [getattr(tensor, name) for name in parts] or [tensor]:
            sha.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return sha.digest()

    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        return hashlib.sha256(b"".join(pool.map(of_one, sorted(tensors)))).hexdigest()


# ---------------------------------------------------------------- state dicts without them


def _states(checkpoint: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The state dicts of a checkpoint: under ``WeightAveraging`` the averages, and the module's own weights."""
    return [checkpoint[key] for key in ("state_dict", "current_model_state") if key in checkpoint]


def frozen_names(module: "LanguageModule", prefixes: Iterable[str]) -> set[str]:
    """Returns the names of a module's frozen parameters that begin with one of the prefixes."""
    return {name for prefix in prefixes for name in frozen_parameters(module, prefix)}


def add_frozen(module: "LanguageModule", state_dict: dict[str, Tensor], prefixes: Iterable[str]) -> None:
    """Adds the frozen weights that a checkpoint does not contain, with their directory's values."""
    if missing := frozen_names(module, prefixes) - state_dict.keys():
        own = dict(module.named_parameters(remove_duplicate=False))  # without the scales of quantized weights
        state_dict.update({name: own[name].detach() for name in missing & own.keys()})


def leave_out(module: "LanguageModule", checkpoint: dict[str, Any], prefixes: Iterable[str]) -> None:
    """Deletes the frozen weights from a checkpoint."""
    for name in frozen_names(module, prefixes):
        for state in _states(checkpoint):
            del state[name]


def add_to(module: "LanguageModule", checkpoint: dict[str, Any], prefixes: Iterable[str]) -> None:
    """Adds the frozen weights to a checkpoint that does not contain them."""
    for state in _states(checkpoint):
        add_frozen(module, state, prefixes)
