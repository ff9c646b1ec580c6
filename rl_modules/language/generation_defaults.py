"""A model's own generation config, as an export can write it."""

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import GenerationConfig


def without_ignored(config: GenerationConfig) -> GenerationConfig:
    """Returns the config without the settings that transformers ignores, such as a temperature without ``do_sample``.

    transformers reads such a config with a warning but refuses to write it, which would cost the export after a run.
    ``generate`` does the same without these settings.
    """
    try:
        config.validate(strict=True)
        return config
    except ValueError as error:
        refused = str(error)
    ignored = {name: value for name, value in config.to_diff_dict().items() if f"`{name}`:" in refused}
    if ignored:
        settings = ", ".join(f"{name}={value}" for name, value in ignored.items())
        rank_zero_warn(f"the model's generation config has {settings}, ignored with do_sample={config.do_sample} and "
                       f"num_beams={config.num_beams}; exports leave this out")  # fmt: skip
    return GenerationConfig.from_dict({**config.to_dict(), **dict.fromkeys(ignored)})
