"""User classes in the folder in which ``rl`` is run: their import paths and the errors in their code."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path

#: Top-level packages of this project.
PACKAGES = ("configs", "datamodules", "recipes", "rl_modules")
_ROOT = Path(__file__).resolve().parents[2]
#: Folders of code that is not the user's; so is all of ``site-packages``.
_LIBRARIES = [Path(sysconfig.get_paths()["stdlib"]), *(_ROOT / package for package in PACKAGES)]


def add_working_directory() -> None:
    """Makes the modules of the working directory importable, after all installed ones.

    A folder of Python files there that has the name of one of this project's packages can't be imported. A line on
    standard error names it, because an import path of the user may mean that folder.
    """
    folder = Path(os.getcwd())
    if folder.resolve() == _ROOT:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        return
    # `python -m` puts the working directory first, where a folder `datamodules` would replace the project's package.
    sys.path[:] = [path for path in sys.path if path not in ("", str(folder))]
    sys.path.append(str(folder))
    hidden = [name for name in PACKAGES if any((folder / name).glob("*.py")) or (folder / f"{name}.py").is_file()]
    if hidden and int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0:
        print(f"note: {', '.join(str(folder / name) for name in hidden)} can't be imported: this project has "
              f"{'packages' if len(hidden) > 1 else 'a package'} of that name; rename yours to use its classes",
              file=sys.stderr)  # fmt: skip


def place_in_users_code(error: BaseException | None) -> str | None:
    """Returns ``file:line: error`` if user code (neither this project's nor a library's) raised an error or called the
    code that did; None otherwise.
    """
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            file = Path(frame.filename)
            is_library = {"site-packages", "dist-packages"} & set(file.parts) or any(
                map(file.is_relative_to, _LIBRARIES)
            )
            if not is_library and file.exists():
                return f"{file}:{frame.lineno}: {type(error).__name__}: {' '.join(str(error).split())}"
        error = error.__cause__ or error.__context__
    return None
