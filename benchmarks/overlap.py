"""Time per GRPO step with a slow reward function, with and without overlapping it with writing and training.

python -m benchmarks.overlap --sleep_ms 50 --workers 4 --rows 16                          reward_overlap
python -m benchmarks.overlap --sleep_ms 50 --tokens 192 --rows 8 --async_generations 1     both

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

#: Steps that fill the queue of generations.
WARM_UP = 2


def sleepy(completions: list[str], sleep_s: float, **columns: Any) -> list[float]:
    time.sleep(sleep_s * len(completions))
    return [float(len(text)) for text in completions]


class Clock(L.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.ends_s.append(time.perf_counter())


def seconds_per_step(overlap: bool, options: argparse.Namespace) -> float:
    model = GRPO(max_completion_length=options.tokens, completions_steps=0, lr_scheduler_type="constant",
                 max_rows_in_flight=options.rows)  # fmt: skip
    data = PromptDataModule("addition", batch_size=options.batch_size, num_generations=8, eval_steps=0,
                            reward_funcs=[partial(sleepy, sleep_s=options.sleep_ms / 1000)], reward_overlap=overlap,
                            reward_workers=options.workers,
                            async_generations=options.async_generations * overlap)  # fmt: skip
    clock = Clock()
    trainer = L.Trainer(max_steps=options.steps + WARM_UP, accelerator="cpu", logger=False, callbacks=[clock],
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(model, datamodule=data)
    return (clock.ends_s[-1] - clock.ends_s[WARM_UP - 1]) / options.steps


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--sleep_ms", type=float, default=50)
    parser.add_argument("--workers", type=int, default=1, help="reward_workers, on both sides")
    parser.add_argument("--rows", type=int, default=None, help="max_rows_in_flight, on both sides")
    parser.add_argument("--async_generations", type=int, default=0, help="where overlap is on")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2, help="that are measured; two come before them")
    parser.add_argument("--pairs", type=int, default=2)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    for _ in range(options.pairs):
        off, on = (seconds_per_step(overlap, options) for overlap in (False, True))
        print(f"off {off:.2f} s, on {on:.2f} s per step: {on / off:.2f}", flush=True)


if __name__ == "__main__":
    main()
