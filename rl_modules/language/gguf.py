"""Models in GGUF files: converted once to a directory that transformers reads."""

import hashlib
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rl_modules.common.errors import UsageError


def directory_of(name: str) -> str:
    """Returns the cached directory of a GGUF file, a path or ``package/file.gguf``: weights in single precision,
    tokenizer.

    Only data is read: a package that holds the file is not imported.
    """
    file, package = Path(name), name.partition("/")[0]
    if not file.is_file() and package.isidentifier() and (spec := find_spec(package)) is not None:
        places = spec.submodule_search_locations or []
        file = next((path for place in places if (path := Path(place, *file.parts[1:])).is_file()), file)
    if not file.is_file():
        raise UsageError(f"model_name_or_path={name!r} is no file, and no installed package {package!r} has it; give "
                         "the path of a .gguf file, or install the package") from None  # fmt: skip
    try:
        import gguf  # noqa: F401 - transformers reads the file by it
        from huggingface_hub.constants import HF_HOME
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError as error:
        raise UsageError(f"model_name_or_path={name!r} needs a package that is not installed: pip install {error.name}"
                         ) from error  # fmt: skip
    known = hashlib.sha256(f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()
    folder = Path(HF_HOME) / "gguf" / f"{file.stem}-{known[:12]}"
    if folder.is_dir():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place, "made")
        try:
            read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise UsageError(f"model_name_or_path={name!r} can't be read: {' '.join(str(error).split())[:200]}"
                             ) from error  # fmt: skip
        # transformers does not save what it has read from such a file, because it takes it for quantized still.
        if hasattr(read.config, "quantization_config"):
            del read.config.quantization_config
        model = type(read)(read.config)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(made)
        if not folder.is_dir():  # another process may have been faster
            os.replace(made, folder)
    return str(folder)
