"""Ranks end with the process that started them."""

import os
import signal
import subprocess
import sys
import time

import pytest

RANK = """
import time
from recipes.signals import end_with_starter
end_with_starter()
print("waits", flush=True)
time.sleep(60)
"""
STARTER = f"""
import os, subprocess, sys, time
from recipes.signals import end_with_starter
end_with_starter()
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}], env={{**os.environ, "LOCAL_RANK": "1"}})
print(rank.pid, flush=True)
time.sleep(60)
"""


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().split()[2] != "Z"  # nobody may have asked for its exit code
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_ends_with_its_starter(signum):
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, env=environment)
    rank = int(starter.stdout.readline())
    assert starter.stdout.readline() == "waits\n" and is_running(rank)
    starter.send_signal(signum)
    starter.wait()
    assert wait_for(lambda: not is_running(rank))


def test_a_rank_whose_starter_is_gone_already_ends_at_once():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "LOCAL_RANK": "1", "RL_RECIPES_STARTED_BY": str(gone.pid)}
    rank = subprocess.run([sys.executable, "-c", RANK], env=environment, stdout=subprocess.PIPE, timeout=20)
    assert rank.returncode == 1 and not rank.stdout


def test_a_rank_of_torchrun_goes_on_though_a_starter_is_gone():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "LOCAL_RANK": "1", "RL_RECIPES_STARTED_BY": str(gone.pid), "TORCHELASTIC_RUN_ID": "a"}
    short = RANK.replace("sleep(60)", "sleep(0)")
    assert subprocess.run([sys.executable, "-c", short], env=environment, timeout=20).returncode == 0


ENDS = """
import os, signal, subprocess, sys, time
from types import SimpleNamespace
from recipes.signals import end_at_sigterm
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
connector = SimpleNamespace(_sigterm_notifier_fn=None)
trainer = SimpleNamespace(
    world_size=int(sys.argv[1]), _signal_connector=connector, strategy=SimpleNamespace(launcher=SimpleNamespace(
        kill=rank.send_signal)), _accelerator_connector=SimpleNamespace(cluster_environment=None))
end_at_sigterm(trainer)
print(rank.pid, connector._sigterm_notifier_fn is None, flush=True)
if connector._sigterm_notifier_fn is None:
    rank.kill()
else:
    signal.signal(signal.SIGTERM, connector._sigterm_notifier_fn)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_outside_of_training_ends_a_process_and_its_ranks(world_size):
    done = subprocess.run([sys.executable, "-c", ENDS, str(world_size)], stdout=subprocess.PIPE, text=True, timeout=60)
    rank, unchanged = done.stdout.split()
    assert (unchanged == "True") == (world_size == 1)
    assert done.returncode == (0 if world_size == 1 else -signal.SIGTERM)
    assert wait_for(lambda: not is_running(int(rank)))


@pytest.mark.parametrize("starter_lives", [False, True])
def test_ranks_of_another_launcher_and_of_a_living_starter_go_on(starter_lives):
    environment = {name: value for name, value in os.environ.items() if name != "RL_RECIPES_STARTED_BY"}
    environment |= {"LOCAL_RANK": "1", **({"RL_RECIPES_STARTED_BY": str(os.getpid())} if starter_lives else {})}
    short = RANK.replace("sleep(60)", "sleep(1.5)")
    rank = subprocess.run([sys.executable, "-c", short], env=environment, stdout=subprocess.PIPE, timeout=20)
    assert rank.returncode == 0 and rank.stdout == b"waits\n"
