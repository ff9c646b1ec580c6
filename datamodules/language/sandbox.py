"""A reference for tools that run a model's code: a process without network, with limits of time and memory.

No config uses it; a user who wants it names it: ``tools: ["datamodules.language.sandbox:python"]``. It keeps a program
from using the network, much time, memory or disk. It does not hide the files that this user may read: for code that
nobody reads use a container or a virtual machine of your own, as a function ``code -> text`` of the same form.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of Linux
#: Exit status of the child where the system gives no network namespace.
_NO_NAMESPACE = 97


def sandbox(
    time_s: float = 5.0, memory_mb: int = 512, output_limit: int = 4000, network: bool = False
) -> Callable[[str], str]:
    """Returns a tool that runs Python programs, each in a process and an empty folder of its own.

    Args:
        time_s: longest run, in seconds, of the clock and of processor time.
        memory_mb: address space of the process, in MiB.
        output_limit: longest output in characters; the rest is cut off.
        network: whether programs may use the network. False needs Linux with user namespaces: without them the tool
            runs nothing and says so.
    """

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program; it prints its results.
        """
        limits = [str(int(time_s) + 1), str(memory_mb), str(int(network))]
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), *limits],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
            try:
                child.communicate(code.encode("utf-8", "replace"), time_s)
            except subprocess.TimeoutExpired:
                return f"error: the program ran longer than {time_s:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # those that it started, too
                child.wait()
            output.seek(0)
            text = output.read(4 * output_limit + 4).decode("utf-8", "replace")
        if child.returncode == _NO_NAMESPACE:
            raise OSError("this system gives no process without a network, so that no program is run")
        text = text if len(text) <= output_limit else text[:output_limit] + " [cut off]"
        return text if child.returncode == 0 else f"{text}\nerror: exit status {child.returncode}".strip()

    return python


#: The tool with the limits above.
python = sandbox()


def _enter(seconds: int, memory_mb: int, network: bool) -> None:
    """In the child: gives up the network, sets the limits, and becomes the interpreter that reads the program."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)  # of Linux
    if not network and (unshare is None or unshare(_NEW_USER | _NEW_NETWORK) != 0):
        os._exit(_NO_NAMESPACE)
    size = memory_mb * 2**20
    for name, limit in (("CPU", seconds), ("AS", size), ("FSIZE", 2**26), ("CORE", 0), ("NOFILE", 64), ("NPROC", 64)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-"])


if __name__ == "__main__":
    _enter(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
