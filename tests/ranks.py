"""Several processes that work together, as ``torchrun`` would start them, for tests."""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def on_ranks(function: Callable[[], Any], folder: Path, world_size: int = 2) -> list[Any]:
    """Call a function in ``world_size`` processes that Lightning takes for torchrun's; its results by rank.

    What it returns must be what a checkpoint may hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    pids = [os.fork() or _be_rank(rank, world_size, port, function, folder) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * world_size, "\n".join((folder / f"{rank}.txt").read_text() for rank in range(world_size))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _be_rank(rank: int, world_size: int, port: int, function: Callable[[], Any], folder: Path) -> int:
    code = 1
    output = (folder / f"{rank}.txt").open("w")
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        os.environ.update({
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
        })  # fmt: skip
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        rank_zero_only.rank = rank
        torch.save(function(), folder / f"{rank}.pt")
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        output.flush()
        os._exit(code)
