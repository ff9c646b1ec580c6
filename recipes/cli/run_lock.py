"""Lock of a run's folder: a second process that resumed the run would write the same checkpoints and cut its curves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_modules.common.errors import UsageError

NAME = "run.lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a run's folder for this process.

    The lock is a POSIX lock, which forked processes do not inherit, so environments' processes that outlive a killed
    run do not keep it. If the platform or the file system does not support such locks, nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    # The file stays: a process that has opened it would lock a file that is there no longer.
    with (folder / NAME).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UsageError(f"another process trains the run in {folder}; stop it first, or leave out --resume for a "
                             "new run") from error  # fmt: skip
        except OSError:
            pass
        yield
