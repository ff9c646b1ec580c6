"""``torchrun`` over two hosts, which are network namespaces of this machine; one is lost, and the job started again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import chaos

pytestmark = pytest.mark.slow

ARGUMENTS = [*chaos.CASES["ppo-normalized"], "--data.total_timesteps=6144", "--trainer.num_nodes=2",
             "--trainer.devices=1", "--trainer.strategy=ddp", "--trainer.accelerator=cpu", "--resume"]  # fmt: skip


class Hosts:
    """Two network namespaces with an address each, joined by a cable."""

    def __init__(self) -> None:
        self.names = [f"rl{os.getpid()}{letter}" for letter in "ab"]

    def ip(self, command: str) -> str:
        """Why ``ip`` refused; nothing where it did not."""
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    def build(self) -> str:
        a, b = self.names
        commands = [f"netns add {a}", f"netns add {b}", f"link add {a} netns {a} type veth peer name {b} netns {b}"]
        for name, address in ((a, "10.213.7.1"), (b, "10.213.7.2")):
            commands += [f"-n {name} addr add {address}/24 dev {name}", f"-n {name} link set {name} up",
                         f"-n {name} link set lo up"]  # fmt: skip
        return next((refused for command in commands if (refused := self.ip(command))), "")

    def remove(self) -> None:
        for name in self.names:
            self.ip(f"netns del {name}")

    def start(self, folder: Path) -> list[subprocess.Popen]:
        """One torchrun on each host, in one folder, as on a file system that both share."""
        folder.mkdir(parents=True, exist_ok=True)
        started = []
        for rank, name in enumerate(self.names):
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": name,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path.cwd()),
            }
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                       f"--node_rank={rank}", "--nproc_per_node=1", "--master_addr=10.213.7.1", "--master_port=29411",
                       "-m", "recipes", "fit", *ARGUMENTS]  # fmt: skip
            with (folder / f"output-{rank}.txt").open("w") as output:
                started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output))
        return started

    def output(self, folder: Path) -> str:
        return "\n".join((folder / f"output-{rank}.txt").read_text() for rank in (0, 1))

    def processes(self, host: int) -> list[int]:
        """The training processes on a host: not torchrun itself."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        return [pid for pid in map(int, pids.stdout.split())
                if b"torch.distributed.run" not in Path(f"/proc/{pid}/cmdline").read_bytes()]  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("two hosts need the command ip, to make network namespaces")
    made = Hosts()
    try:
        if refused := made.build():
            pytest.skip(f"this system makes no network namespaces: {refused.strip()}")
        yield made
    finally:
        made.remove()


def test_a_job_of_two_hosts_goes_on_after_one_was_lost(hosts: Hosts, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert [process.wait(240) for process in hosts.start(whole)] == [0, 0], hosts.output(whole)

    torchruns = hosts.start(killed)
    last = killed / "logs/run/version_0/checkpoints/last.ckpt"
    while not last.exists():
        assert torchruns[0].poll() is None, hosts.output(killed)
        time.sleep(0.01)
    (lost,) = hosts.processes(1)
    os.kill(lost, signal.SIGKILL)
    assert all(process.wait(120) != 0 for process in torchruns), hosts.output(killed)

    assert [process.wait(240) for process in hosts.start(killed)] == [0, 0], hosts.output(killed)
    assert "resuming from logs/run/version_0/checkpoints/last.ckpt" in hosts.output(killed)
    assert chaos.compare(whole, killed) == []
