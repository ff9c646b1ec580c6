"""Ends ranks that Lightning started when the process that started them ends."""

import os
import threading
import time

#: Environment variable with the id of the process that starts the ranks.
STARTED_BY = "RL_RECIPES_STARTED_BY"
#: Seconds between two checks of whether that process is alive.
INTERVAL_S = 1.0


def end_with_starter() -> None:
    """Ends this rank soon after the process that started it, for whatever reason that process ended.

    Otherwise a rank whose first process was killed would wait for it, half an hour at the start of a run, and ignore
    SIGTERM in the meantime. The first process calls this before it starts the others. ``torchrun`` and ``srun`` end the
    ranks that they started.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
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
