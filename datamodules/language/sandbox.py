"""A tool that runs a model's Python programs, by bubblewrap, which ``apt install bubblewrap`` and other systems have.

No config uses it; a user who wants it names it: ``tools: ["datamodules.language.sandbox:python"]``. A program is one
process in namespaces of its own. It sees ``/usr`` and Python's folder, read-only, and no other process; it has no
capabilities, nowhere to write but its output, and it can't start a process. Limits of that process are therefore limits
of all that it does.
"""

import contextlib
import errno
import functools
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable

from rl_modules.common.errors import UsageError

#: By machine, the number of its architecture in seccomp, and those of its calls that a program may not make.
_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, {
        "clone": 56, "fork": 57, "vfork": 58, "unshare": 272, "socket": 41,
        "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64,
    }),
    "aarch64": (0xC00000B7, {
        "clone": 220, "unshare": 97, "socket": 198, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190,
    }),
}  # fmt: skip
#: Calls that have the same number on every machine; without clone3 the C library starts threads by clone.
_NEWER = {"clone3": 435, "io_uring_setup": 425, "memfd_secret": 447}
_REASONS = {"clone3": errno.ENOSYS, "socket": errno.ENETUNREACH}
_CLONE_THREAD = 0x10000
#: Most bytes that a program may write to its output.
_OUTPUT_BYTES = 2**24


def sandbox(
    time_s: float = 5.0,
    memory_mb: int = 512,
    output_limit: int = 4000,
    network: bool = False,
    unsafe: bool = False,
) -> Callable[[str], str]:
    """Returns a tool that runs Python programs, each in a sandbox of its own.

    Args:
        time_s: longest run, in seconds, of the clock and of processor time.
        memory_mb: address space of the program, in MiB.
        output_limit: longest output in characters; the rest is cut off.
        network: whether programs may use the network, the services of this machine included.
        unsafe: without a sandbox, for a container or virtual machine of your own: a program may do what you may do,
            and the limits are of each process that it starts.

    Raises:
        UsageError: bubblewrap is not installed, or the system does not allow it, and not ``unsafe``.
    """

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program; it prints its results. It can't write files or start processes.
        """
        return _run(code, time_s, memory_mb, output_limit, network, unsafe)

    if not unsafe and (why := _refusal(network)):
        raise UsageError(
            f"the sandbox of tools runs no program here: {why}; install bubblewrap on a Linux that allows user "
            "namespaces, or in a container of your own give sandbox(unsafe=True)"
        )
    return python


@functools.cache
def _default() -> Callable[[str], str]:
    return sandbox()


#: The tool with the limits above, made when it is asked for.
python: Callable[[str], str]


def __getattr__(name: str) -> Callable[[str], str]:
    if name == "python":
        return _default()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _refusal(network: bool) -> str:
    """Why no program can be run; "" where one was."""
    if shutil.which("bwrap") is None:
        return "there is no program bwrap"
    if platform.machine() not in _CALLS:
        return f"the processor is {platform.machine()!r}, not one of {', '.join(_CALLS)}"
    said = _run("print(6 * 7)", 10.0, 512, 400, network, False)
    return "" if said == "42\n" else f"bwrap said {said.strip()!r}"


def _run(code: str, time_s: float, memory_mb: int, output_limit: int, network: bool, unsafe: bool) -> str:
    """Runs a program; returns what it printed, and how it ended where it failed."""
    interpreter = os.path.realpath(sys.executable)
    limits = {"t": int(time_s) + 1, "v": memory_mb * 1024, "f": _OUTPUT_BYTES // 512, "c": 0, "n": 64}
    script = "".join(f"ulimit -{name} {limit} && " for name, limit in limits.items()) + 'exec "$0" -I -S -'
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        folder = "/"
        around: list[str] = []
        rules: tuple[int, ...] = ()
        if unsafe:
            folder = tempfile.mkdtemp()
            # Python's own removal ends with a RecursionError in folders that are nested deeply.
            stack.callback(subprocess.run, ["rm", "-rf", folder], check=False)
        else:
            read, write = os.pipe()
            stack.callback(os.close, read)
            os.write(write, _filter(network))
            os.close(write)
            around, rules = [*_bubblewrap(network), "--seccomp", str(read)], (read,)
        child = subprocess.Popen(
            [*around, "/bin/sh", "-c", script, interpreter],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder if unsafe else "/tmp", "LANG": "C.UTF-8"},
            pass_fds=rules,
            start_new_session=True,
        )
        try:
            child.communicate(code.encode("utf-8", "replace"), time_s)
        except subprocess.TimeoutExpired:
            return f"error: the program ran longer than {time_s:g} s"
        finally:
            # The end of bwrap ends the first process of the namespace, and the kernel then all others.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        text = output.read(4 * output_limit + 4).decode("utf-8", "replace")
    text = text if len(text) <= output_limit else text[:output_limit] + " [cut off]"
    return text if child.returncode == 0 else f"{text}\nerror: exit status {child.returncode}".strip()


def _bubblewrap(network: bool) -> list[str]:
    """The command before a program's: namespaces, and what is in its file system, all of it read-only."""
    seen = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix]
    if network:
        seen += ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates"]
    words = ["bwrap", "--unshare-all", *(["--share-net"] if network else []), "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL"]
    for path in seen:
        words += ["--ro-bind-try", path, path]
    for path in ("/dev/null", "/dev/urandom"):
        words += ["--dev-bind", path, path]
    return [*words, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]


def _filter(network: bool) -> bytes:
    """Rules of seccomp that refuse a second process, and memory that the limit of one process does not count."""
    architecture, numbers = _CALLS[platform.machine()]
    refused = {**numbers, **_NEWER}
    clone = refused.pop("clone")
    if network:
        del refused["socket"]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x00050000
    rules = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill)]
    rules += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the calls of x32
    for name, number in refused.items():
        rules += [(equal, 0, 1, number), (give, 0, 0, error | _REASONS.get(name, errno.EPERM))]
    rules += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 1, 0, _CLONE_THREAD), (give, 0, 0, error | errno.EPERM)]
    rules += [(give, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)
