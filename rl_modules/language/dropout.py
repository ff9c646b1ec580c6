"""Rates of dropout and noise in transformers configs: 0 in reinforcement learning, the model's own in its export."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig

#: Field of a config with the rates that :func:`remove_dropout` has set to 0; checkpoints hold it with the others.
REMOVED = "removed_dropout"


def remove_dropout(config: PretrainedConfig) -> None:
    """Sets every dropout rate of a config, and of the language model's config in it, to 0; each stores its original
    rates.
    """
    for part in _parts(config):
        rates = {name: value for name, value in part.to_dict().items()
                 if is_rate(name, part) and isinstance(value, float) and value}  # fmt: skip
        for name in rates:
            setattr(part, name, 0.0)
        if rates:
            setattr(part, REMOVED, {**getattr(part, REMOVED, {}), **rates})


def is_rate(name: str, config: PretrainedConfig) -> bool:
    """Returns whether a field of a config is the rate of a random operation of training: dropout of units or layers, or
    noise on a router's input.

    Args:
        name: of the field.
        config: that has it.
    """
    # PhiMoE's decides, in evaluation too, which experts are close enough to the best.
    is_noise = name == "input_jitter_noise" or (name == "router_jitter_noise" and config.model_type != "phimoe")
    return "dropout" in name or name.endswith(("_pdrop", "layerdrop")) or is_noise


def restore_dropout(config: PretrainedConfig) -> bool:
    """Restores the rates that :func:`remove_dropout` set to 0; returns whether there were any."""
    removed = [(part, part.__dict__.pop(REMOVED, {})) for part in _parts(config)]
    for part, rates in removed:
        for name, rate in rates.items():
            setattr(part, name, rate)
    return any(rates for _, rates in removed)


@contextmanager
def original_dropout(config: PretrainedConfig) -> Iterator[None]:
    """Gives a config the model's original rates within the context, as an export writes them."""
    was_removed = restore_dropout(config)
    try:
        yield
    finally:
        if was_removed:
            remove_dropout(config)


def _parts(config: PretrainedConfig) -> tuple[PretrainedConfig, ...]:
    return config, config.get_text_config(decoder=True)
