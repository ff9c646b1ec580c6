"""The tool that runs programs: what a program tries against its caller fails, or no program is run."""

import os
import time
from pathlib import Path

import pytest

from datamodules.language import sandbox as module
from datamodules.language.sandbox import sandbox
from datamodules.language.tools import Tools
from rl_modules.common.errors import UsageError

works = pytest.mark.skipif(bool(module._refusal(False)), reason="no bubblewrap that works here")


def processes(mark):
    """Command lines of this machine's processes that hold a mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return [line for line in found if mark in line]


def assert_ends(mark):
    """Waits until no process has the mark."""
    began_s = time.monotonic()
    while left := processes(mark):
        assert time.monotonic() < began_s + 5, left


@works
@pytest.mark.parametrize(("program", "says"), [
    ("print(6 * 7)", "42\n"),
    ("import os; print(os.listdir('.'), sorted(os.environ))", "[] ['HOME', 'LANG', 'PATH'"),
    ("print('x' * 10**6)", "[cut off]"),
    ("raise SystemExit(3)", "error: exit status 3"),
    ("import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()", "ran\n"),
    ("import asyncio; asyncio.run(asyncio.sleep(0)); print('slept')", "slept\n"),
])  # fmt: skip
def test_programs_run(program, says):
    assert says in sandbox()(program)


@works
@pytest.mark.parametrize(("program", "says"), [
    ("import os; os.kill(os.getppid(), 9); print('sent')", ""),
    ("import os; os.kill(-1, 9)", "ProcessLookupError"),
    ("import os; os.fork(); os.setsid()", "PermissionError"),
    ("import subprocess; subprocess.Popen(['sleep', '60'])", "PermissionError"),
    ("import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))", "-1"),
    ("bytearray(2**30)", "MemoryError"),
    ("import os; os.memfd_create('x')", "PermissionError"),
    ("import ctypes; print(ctypes.CDLL(None).shmget(0, 2**20, 0o1600))", "-1"),
    ("import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')", "Read-only file system"),
    ("open('x', 'w')", "Read-only file system"),
    ("while True: print('x' * 2**20)", "[cut off]\nerror: exit status"),
    ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "unreachable"),
    ("import os; print(os.path.exists('/proc/1'), os.path.exists('/var'))", "False False"),
])  # fmt: skip
def test_what_a_program_tries_fails(program, says):
    assert says in sandbox(memory_mb=256)(program)


@works
def test_nothing_is_left_of_a_program_that_takes_too_long():
    assert "ran longer than 0.2 s" in sandbox(time_s=0.2, memory_mb=509)("while True: pass")
    assert_ends(f"-v {509 * 1024}".encode())


@works
@pytest.mark.parametrize("network", [False, True])
def test_the_files_memory_and_environment_of_the_caller_are_out_of_reach(tmp_path, network):
    (tmp_path / "own").write_text("secret")
    program = (
        f"import ctypes, os\nfor path in ({str(tmp_path / 'own')!r}, '/proc/{os.getpid()}/environ', "
        f"'/proc/{os.getpid()}/mem'):\n    print(os.path.exists(path))\n"
        f"print(ctypes.CDLL(None).ptrace(16, {os.getpid()}, 0, 0))"
    )
    try:
        run = sandbox(network=network)
    except UsageError:
        pytest.skip("no sandbox with a network here")
    assert run(program) == "False\nFalse\nFalse\n-1\n"


def test_no_program_is_run_where_there_is_no_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    module._refusal.cache_clear()
    module._default.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"no program bwrap; install bubblewrap .* sandbox\(unsafe=True\)"):
            Tools(["datamodules.language.sandbox:python"])
    finally:
        module._refusal.cache_clear()


@pytest.mark.long
def test_without_a_sandbox_a_program_runs_in_a_folder_that_is_removed_however_deep(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nested = "import os\nfor i in range(1100): os.mkdir('d'); os.chdir('d')\nprint('made')"
    assert sandbox(unsafe=True, time_s=30)(nested) == "made\n" and not list(tmp_path.iterdir())
    program = "import subprocess; subprocess.Popen(['sleep', '61.25']); print('left')"
    assert sandbox(unsafe=True)(program) == "left\n"
    assert_ends(b"61.25")
