"""``rl fit --seeds N``: one run per seed, one after another or side by side, and the table that compares them."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recipes import comparison, configs
from recipes.cli import runs
from recipes.cli.options import UNNAMED, options_in
from recipes.compared_runs import read_all, require_packages
from recipes.pipeline import checked
from recipes.terminal import wait_for
from rl_modules.common.errors import UsageError

#: Options of several runs, with the least value of each.
OWN = {"--seeds": 1, "--jobs": 1, "--seed_everything": 0}


def seeds_command(words: Sequence[str]) -> None:
    """Trains on each seed in a process and folder of its own, and prints the table of ``rl compare``."""
    require_packages()
    options = list(options_in(words))
    given = {name: _number(name, value) for name, value, _ in options if name in OWN}
    first, jobs = given.get("--seed_everything", 0), given.get("--jobs", 1)
    if any(name == "--ckpt_path" for name, _, _ in options):
        raise UsageError("--seeds starts its runs anew or continues them with --resume; leave out --ckpt_path")
    rest = [(name, value, own) for name, value, own in options if name not in OWN]
    common = [word for _, _, own in rest for word in own]
    config = checked("fit", [word for word in common if word != "--resume"]).config["fit"]
    logger = str(getattr(config["trainer"]["logger"], "class_path", config["trainer"]["logger"]))
    if not logger.endswith(("TensorBoardLogger", "CSVLogger")):
        raise UsageError(
            f"--seeds compares the curves of one TensorBoardLogger or CSVLogger; trainer.logger is {logger}"
        )
    changed = [f"{name.rpartition('.')[2]}={value}" for name, value, _ in rest if not UNNAMED.fullmatch(name)]
    changed += [
        Path(value).stem for name, value, _ in rest if name == "--config" and configs.short_name(value) == value
    ]
    folders = {
        seed: re.sub(r"[^\w.,=+-]+", "_", ",".join([*sorted(changed), f"seed={seed}"]))
        for seed in range(first, first + given["--seeds"])
    }
    parent = runs.parent_folder(config)
    if "--resume" not in common and (there := [name for name in folders.values() if (parent / name).exists()]):
        raise UsageError(
            f"{parent / there[0]} holds a run already; add --resume to continue the runs of this command, "
            "or remove the folder"
        )
    wait_for("")
    print(f"{len(folders)} runs in {parent}, {min(jobs, len(folders))} at a time", flush=True)
    processes: list[subprocess.Popen] = []

    def train(seed: int) -> str:
        command = ["fit", *common, f"--seed_everything={seed}", f"--trainer.logger.version={folders[seed]}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes", *command],
            stdout=subprocess.PIPE,
            text=True,
            stderr=None if jobs == 1 else subprocess.PIPE,
        )
        processes.append(process)
        out, err = process.communicate()
        if process.returncode:
            said = "see above" if err is None else err.strip().rpartition("\n")[2].removeprefix("error: ")
            raise UsageError(f"seed {seed} failed: {said}")
        return next((line for line in out.splitlines() if " on " in line), "")

    def stop(signum: int, _: Any) -> None:
        for process in processes:
            process.send_signal(signum)
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)  # a terminal sends Ctrl-C to the runs itself
    pool = ThreadPoolExecutor(jobs)
    try:
        for seed, future in [(seed, pool.submit(train, seed)) for seed in folders]:
            print(f"seed {seed}: {future.result()}", flush=True)
    except (KeyboardInterrupt, SystemExit):
        resume = [] if "--resume" in common else ["--resume"]
        print(f"stopped; resume with\n  {shlex.join(['rl', 'fit', *words, *resume])}", file=sys.stderr)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)
    results = read_all([parent / folder for folder in folders.values()])
    print(comparison.text_of(comparison.summarize(results), results))


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < OWN[name]:
        raise UsageError(f"{name}={value or 'nothing'} must be a whole number of at least {OWN[name]}")
    return int(value)
