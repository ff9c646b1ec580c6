"""Images in prompts and answers; imported when the first record has one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "ImageEncoder": "rl_modules.language.vision.encoder",
    "ImageReader": "rl_modules.language.vision.reader",
    "RowImages": "rl_modules.language.vision.rows",
    "freeze_parts": "rl_modules.language.vision.parts",
    "small_processor": "rl_modules.language.vision.small",
    "small_config": "rl_modules.language.vision.small",
}

if TYPE_CHECKING:
    from rl_modules.language.vision.encoder import ImageEncoder as ImageEncoder
    from rl_modules.language.vision.parts import freeze_parts as freeze_parts
    from rl_modules.language.vision.reader import ImageReader as ImageReader
    from rl_modules.language.vision.rows import RowImages as RowImages
    from rl_modules.language.vision.small import small_config as small_config
    from rl_modules.language.vision.small import small_processor as small_processor


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
