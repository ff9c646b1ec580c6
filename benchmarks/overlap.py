"""Time per GRPO step with a slow reward function, with and without overlapping it with the writing of completions.

python -m benchmarks.overlap --sleep_ms 50 --workers 1 --rows 8

Pairs of runs alternate in one process. The reward sleeps per completion, as one that waits for a service does.
"""

import argparse
import logging
import time
import warnings
from functools import partial
from typing import Any

import lightning as L

from datamodules.language.prompt import PromptDataModule
from rl_modules.language.grpo import GRPO


def sleepy(completions: list[str], sleep_s: float, **columns: Any) -> list[float]:
    time.sleep(sleep_s * len(completions))
    return [float(len(text)) for text in completions]


def seconds_per_step(overlap: bool, options: argparse.Namespace) -> float:
    model = GRPO(max_completion_length=options.tokens, completions_steps=0, lr_scheduler_type="constant",
                 max_rows_in_flight=options.rows)  # fmt: skip
    data = PromptDataModule("addition", batch_size=options.batch_size, num_generations=8, eval_steps=0,
                            reward_funcs=[partial(sleepy, sleep_s=options.sleep_ms / 1000)], reward_overlap=overlap,
                            reward_workers=options.workers)  # fmt: skip
    trainer = L.Trainer(max_steps=options.steps, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    start_s = time.perf_counter()
    trainer.fit(model, datamodule=data)
    return (time.perf_counter() - start_s) / options.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sleep_ms", type=float, default=50)
    parser.add_argument("--workers", type=int, default=1, help="reward_workers, on both sides")
    parser.add_argument("--rows", type=int, default=None, help="max_rows_in_flight, on both sides")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=2)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    for _ in range(options.pairs):
        off, on = (seconds_per_step(overlap, options) for overlap in (False, True))
        print(f"off {off:.2f} s, on {on:.2f} s per step: {on / off:.2f}", flush=True)


if __name__ == "__main__":
    main()
