"""The second round of a sweep: its best trials run again, on seeds that the search has not seen.

The best of many trials on few seeds owes a part of its result to those seeds. The second round measures the finalists
without that part, and decides between them.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.cli.sweep_file import Sweep
from recipes.cli.sweep_run import FAILURES, remove_checkpoints, run_once
from recipes.cli.sweep_storage import best_trials, locked, write_hparams


def run_finals(sweep: Sweep, study: Any, folder: Path) -> dict[int, float]:
    """Runs the rest of the second round, together with other processes of the same sweep."""
    finalists = best_trials(sweep, study, sweep.finalists)
    seeds = range(sweep.final_seed, sweep.final_seed + sweep.final_seeds)
    for wait in (False, True):  # what other processes run is waited for in the end
        for seed in seeds:
            for trial in finalists:
                with locked(folder / f"final_{trial.number:04}_{seed}.lock", wait) as is_ours:
                    if is_ours and _key(trial, seed) not in study.user_attrs:
                        _run(sweep, study, trial, seed, folder)
    means = {}
    for trial in finalists:
        results = [study.user_attrs[_key(trial, seed)] for seed in seeds]
        if not any(isinstance(result, str) for result in results):
            means[trial.number] = fmean(results)
            write_hparams(folder, sweep, trial, _words(trial), means[trial.number])
    return dict(sorted(means.items(), key=lambda found: found[1], reverse=sweep.mode == "max"))


def _run(sweep: Sweep, study: Any, trial: Any, seed: int, folder: Path) -> None:
    """Runs or resumes one seed of a finalist, and stores its result: a number, or the sentence that it failed with."""
    run_folder = folder / "runs" / f"final_{trial.number:04}"
    result: float | str
    try:
        result = run_once(sweep, _words(trial), seed, run_folder)
        outcome = f"{sweep.objective} {result:.6g}"
    except FAILURES as error:
        result = str(error)
        outcome = f"failed: {error}"
    study.set_user_attr(_key(trial, seed), result)
    if not sweep.keep_checkpoints:
        remove_checkpoints(run_folder)
    print(f"finalist {trial.number}, seed {seed}: {outcome}", flush=True)


def _key(trial: Any, seed: int) -> str:
    return f"final_{trial.number}_{seed}"


def _words(trial: Any) -> dict[str, str]:
    return {name: str(value) for name, value in trial.params.items()}
