"""Training templates: a family's chat template with ``{% generation %}`` blocks, from TRL's package."""

from importlib.util import find_spec
from pathlib import Path

_ENDING = "_training.jinja"


def training_template(template: str) -> tuple[str, str] | None:
    """Name and text of TRL's training variant of a chat template; None: it has none, or is not installed.

    Source: TRL's ``get_training_chat_template``, from its files alone: importing it takes some seconds.
    """
    trl = find_spec("trl")
    folder = Path(trl.origin).parent / "chat_templates" if trl is not None and trl.origin else None
    for variant in sorted(folder.glob(f"*{_ENDING}")) if folder is not None else ():
        plain = variant.with_name(variant.name.removesuffix(_ENDING) + ".jinja")
        if plain.is_file() and plain.read_text("utf-8") == template:
            return variant.name, variant.read_text("utf-8")
    return None
