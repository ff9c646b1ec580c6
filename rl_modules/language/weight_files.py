"""Loads all weights of a directory or hub name; transformers would initialise missing ones and only print a message."""

import pickle
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from rl_modules.common.errors import UsageError


def read_model(auto_class: Any, name: str, config: PretrainedConfig, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a model with the weights of files.

    Args:
        auto_class: ``AutoModelForCausalLM`` or another of transformers'.
        name: directory or hub name.
        config: the architecture.
        options: of ``from_pretrained``.

    Returns:
        The model, and what transformers found, for :func:`require_all_weights`.

    Raises:
        ValueError: files that hold code or are damaged, besides what transformers raises for others.
    """
    try:
        # Weights of other shapes are among what was found; without the option they are a RuntimeError.
        found: tuple[Any, dict[str, Any]] = auto_class.from_pretrained(
            name, config=config, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False,
            **options
        )  # fmt: skip
    except pickle.UnpicklingError as error:
        raise ValueError("its pytorch_model.bin holds code, or is damaged, and code is never run") from error
    except (RuntimeError, LookupError, TypeError, EOFError) as error:  # what damaged files and indices lead to
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return found


def require_all_weights(name: str, model: nn.Module, config: PretrainedConfig, found: dict[str, Any]) -> None:
    """Refuses files that lack weights that process text; a causal model's new reward head may be missing.

    Args:
        name: directory or hub name.
        model: with the weights; parts that a text does not go through are frozen.
        config: of the files, with their ``architectures``.
        found: second value returned by :func:`read_model`.

    Raises:
        UsageError: names a weight that the files lack or have in another shape.
    """
    if shapes := sorted(found["mismatched_keys"]):
        weight, theirs, ours = shapes[0]
        raise UsageError(f"model_name_or_path={name!r} has {weight} of shape {tuple(theirs)}, its config of "
                         f"{tuple(ours)}; leave the sizes of its weights as they are in model_config")  # fmt: skip
    unread = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    is_trained = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or [])
    lacking = sorted(key for key in set(found["missing_keys"]) - unread if is_trained or not key.startswith("score."))
    if not lacking:
        return
    others = sorted(found["unexpected_keys"])
    instead = f" and has {others[0]}, which the model has not" if others else ""
    raise UsageError(f"model_name_or_path={name!r} lacks {len(lacking)} of the model's weights, such as {lacking[0]}"
                     f"{instead}; write the model anew with save_pretrained, or leave model_name_or_path out for new "
                     "weights")  # fmt: skip
