"""The end of a run before its end: Ctrl-C, SIGTERM and SIGHUP, SLURM's queue, ranks whose starter is gone."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning as L  # `rl --help` does without it


class Stopped(Exception):
    """Training was stopped by a signal after a checkpoint was written."""

    def __init__(self, signum: int, checkpoint: Any, number: int | None = None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; the run is saved in {checkpoint}")
        self.signum = signum
        self.checkpoint = checkpoint
        self.number = number
        #: Whether ``--resume`` finds the run; the folder of a user's own logger is not known in advance.
        self.is_found_again = True


def end_at_sigterm(trainer: "L.Trainer") -> None:
    """Ends this process and its ranks at SIGTERM; Lightning's handler would wait for ranks without the signal."""

    def end(signum: int, frame: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)  # the ranks that this process started
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    if trainer.world_size > 1 and not requeue_signals(trainer):
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = end


class StopRequests:
    """Remembers SIGINT, SIGTERM and SIGHUP until a step is finished; a second Ctrl-C raises at once."""

    def __init__(self) -> None:
        #: The signal that was received; 0: none.
        self.signum = 0
        self._previous: dict[int, Any] = {}

    def install(self, *more: int) -> None:
        """Handles SIGINT, SIGTERM, ``more``, and SIGHUP unless ignored, as by ``nohup``; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.signum = 0
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
            more = (hangup, *more)
        for signum in (signal.SIGINT, signal.SIGTERM, *more):
            if signum not in self._previous:
                self._previous[signum] = signal.signal(signum, self._remember)

    @property
    def is_installed(self) -> bool:
        """Whether this object handles the signals."""
        return bool(self._previous)

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def previous_handler(self, signum: int) -> Callable[[int, FrameType | None], Any] | None:
        """Returns the handler that the signal had before ``install``; None where it was not a function."""
        handler = self._previous.get(signum)
        return handler if callable(handler) else None

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        again = "; a second Ctrl-C stops at once, without saving" if signum == signal.SIGINT else ""
        # os.write, not print: the interrupted code may be writing to print's buffer.
        for descriptor in (1, 2) if name == "SIGHUP" else (2,):
            try:
                os.write(descriptor, f"\n{name}: saving a checkpoint after this step{again}\n".encode())
            except OSError:  # the terminal is gone, and a later print would end the run before it has saved
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def requeue_signals(trainer: "L.Trainer") -> tuple[int, ...]:
    """Returns the signal on which Lightning saves and requeues a SLURM job; none outside of such a job."""
    from lightning.fabric.plugins.environments import SLURMEnvironment  # `rl --help` does without it

    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
        return (int(environment.requeue_signal),)
    return ()


def remove_requeue_checkpoints(trainer: "L.Trainer") -> None:
    """Deletes the checkpoints of SLURM's queue, which Lightning would load even for the evaluation after training."""
    if not requeue_signals(trainer):
        return
    if trainer.is_global_zero:
        for path in Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"):
            path.unlink()
    trainer.strategy.barrier("hpc checkpoints removed")


#: Seconds between two exchanges of the ranks.
AGREEMENT_INTERVAL_S = 0.25


class RankAgreement:
    """Takes the same decision on all ranks, after the same step, about four times a second."""

    def __init__(self) -> None:
        self._steps, self._every, self._agreed_s = 0, 1, 0.0

    def decide(self, trainer: Any, stop: int, is_due: bool) -> tuple[int, bool]:
        """Returns the signal that any rank received, and whether rank 0 wants to save; called once per step."""
        if trainer.world_size == 1:
            return stop, is_due
        self._steps += 1
        if self._steps < self._every:
            return 0, False
        import torch

        now = time.monotonic()
        rate = self._steps / max(now - self._agreed_s, 1e-6) if self._agreed_s else 0.0
        wishes = torch.tensor(
            [stop, is_due and trainer.is_global_zero, rate if trainer.is_global_zero else 0.0],
            device=trainer.strategy.root_device,
            dtype=torch.float32,
        )
        torch.distributed.all_reduce(wishes, torch.distributed.ReduceOp.MAX)
        stop_any, due_any, rate = wishes.tolist()
        self._steps, self._agreed_s = 0, now
        self._every = max(1, min(1000, int(rate * AGREEMENT_INTERVAL_S)))
        return int(stop_any), bool(due_any)


#: Environment variable with the id of the process that starts the ranks.
STARTED_BY = "RL_RECIPES_STARTED_BY"
#: Seconds between two checks of whether that process is alive.
INTERVAL_S = 1.0


def end_with_starter() -> None:
    """Ends this rank soon after the process that started it; called by that process first, before it starts ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun ends its ranks itself; others would wait for half an hour
        return
    if "LOCAL_RANK" not in os.environ:  # the first process, or a rank of srun
        os.environ[STARTED_BY] = str(os.getpid())
        return
    starter = os.environ.get(STARTED_BY, "")
    if starter == str(os.getppid()):
        threading.Thread(target=_wait, args=(int(starter),), daemon=True).start()
    elif starter and not _is_there(int(starter)):
        os._exit(1)


def _wait(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(INTERVAL_S)
    os._exit(1)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True
