"""GRPO beside TRL's: wall time of optimizer steps, and peak memory; the same checkpoint, prompts and settings.

    python -m benchmarks.grpo time --model runs/addition/cold_start/model --pairs 5
    python -m benchmarks.grpo memory

``time`` runs both in turn from one checkpoint on two-digit addition: 256 completions a step in groups of 8, at most 6
tokens, temperature 1, no KL, learning rate 3e-4, a log line every 10 steps, no evaluation and no checkpoints. The first
3 steps of each run don't count. ``memory`` gives each a process of its own, on a model of 25 million parameters with 64
completions of 256 tokens (its EOS is never sampled), all of which have an advantage. ``time`` has gradient
checkpointing off on both sides. ``memory`` has what is asked for: ours keeps matrix products alone (``selective``), a
choice that TRL doesn't offer, beside TRL without checkpointing; ``--ours full --trl full`` is TRL's default.
"""

import argparse
import copy
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3
SIZE_25M = {"hidden_size": 512, "intermediate_size": 1344, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 8, "tie_word_embeddings": True}  # fmt: skip


def varied(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Returns rewards that differ between almost all completions."""
    return [sum(map(ord, text)) % 1009 / 1009 for text in completions]


class Setting:
    """Settings of both trainers."""

    #: Seconds; of the process's own work where other work runs beside it.
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self, model: str | None, rows: int, length: int, learning_rate: float, reward: str | None,
        checkpointing: str = "none",
    ) -> None:  # fmt: skip
        from rl_modules import SFT

        self.checkpointing = checkpointing
        module = SFT(model_name_or_path=model, model_config=None if model else SIZE_25M)
        module.configure_model()
        self.weights, self.tokenizer = module.model, module.tokenizer
        if model is None:
            never_ends(self.weights, self.tokenizer.eos_token_id)
        self.rows, self.length, self.learning_rate, self.reward = rows, length, learning_rate, reward

    def ours(self, steps: int, warm_up: int = WARM_UP) -> float:
        """Returns the seconds of ``steps`` steps after the first ``warm_up``."""
        import lightning as L

        from datamodules import PromptDataModule
        from rl_modules import GRPO
        from rl_modules.language.fast.kernels import checkpoint_activations

        stamps: list[float] = []
        clock = self.clock

        class Clock(L.Callback):
            def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
                stamps.append(clock())

        module = GRPO(loss_type="grpo", max_completion_length=self.length, learning_rate=self.learning_rate,
                      lr_scheduler_type="constant", completions_steps=0)  # fmt: skip
        module.model = copy.deepcopy(self.weights)
        checkpoint_activations(module.model, {"none": False, "full": True}.get(self.checkpointing, self.checkpointing))
        data = PromptDataModule("addition", batch_size=self.rows, num_generations=8, eval_steps=0,
                                reward_funcs=None if self.reward is None else [self.reward])  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                max_steps=steps + warm_up, max_epochs=-1, accelerator="cpu", default_root_dir=folder,
                callbacks=[Clock()], enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False
            )  # fmt: skip
            trainer.fit(module, datamodule=data)
        return stamps[-1] - stamps[warm_up - 1]

    def trl(self, steps: int, warm_up: int = WARM_UP) -> float:
        """Returns the same for TRL."""
        from datasets import Dataset, disable_progress_bars
        from transformers import PrinterCallback, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        from datamodules.language.on_demand import load_records

        stamps: list[float] = []
        clock = self.clock

        class Clock(TrainerCallback):
            def on_step_end(self, *arguments: Any, **others: Any) -> None:
                stamps.append(clock())

        disable_progress_bars()
        records = load_records(task="addition", n=None)
        rows = [{"prompt": record["prompt"], "answer": record["answer"]} for record in records]

        def accuracy(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
            return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]

        with tempfile.TemporaryDirectory() as folder:
            arguments = GRPOConfig(
                output_dir=folder, max_steps=steps + warm_up, per_device_train_batch_size=self.rows, num_generations=8,
                max_completion_length=self.length, learning_rate=self.learning_rate, lr_scheduler_type="constant",
                loss_type="grpo", beta=0.0, temperature=1.0, use_cpu=True, bf16=False,
                gradient_checkpointing=self.checkpointing == "full",
                logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
            )  # fmt: skip
            trainer = GRPOTrainer(
                copy.deepcopy(self.weights), accuracy if self.reward is None else varied, arguments,
                train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer, callbacks=[Clock()]
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return stamps[-1] - stamps[warm_up - 1]


@torch.no_grad()
def never_ends(model: Any, eos: int) -> None:
    """Adds a common direction to all tied embeddings except EOS, so that the logit of EOS is far below all others."""
    table = model.get_output_embeddings().weight
    table[:, 0] = 0.5
    table[eos, 0] = -0.5


def wall_time(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of optimizer steps, alternating."""
    setting = Setting(arguments.model, 256, 6, 3e-4, None)
    if arguments.clock == "cpu":
        setting.clock = time.process_time
    contestants: dict[str, Callable[[int], float]] = {"ours": setting.ours, "TRL": setting.trl}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(arguments.pairs):
        for name in list(contestants)[:: 1 if i % 2 == 0 else -1]:
            seconds[name].append(contestants[name](arguments.steps) / arguments.steps)
            print(f"{name}: {1000 * seconds[name][-1]:.0f} ms a step", flush=True)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["TRL"], strict=True)]
    return {"seconds_per_step": seconds, "ratio": statistics.median(ratios), "steps": arguments.steps,
            "clock": arguments.clock}  # fmt: skip


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of a process that makes a few steps."""
    ways = {"ours": arguments.ours, "trl": arguments.trl}
    if arguments.contestant is not None:
        setting = Setting(None, 64, 256, 1e-5, "benchmarks.grpo:varied", ways[arguments.contestant])
        getattr(setting, arguments.contestant)(arguments.steps, 0)
        return {"MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    peaks = {}
    for name in ways:
        command = [sys.executable, "-m", "benchmarks.grpo", "memory", "--contestant", name, "--ours", arguments.ours,
                   "--trl", arguments.trl, "--steps", str(arguments.steps),
                   "--threads", str(arguments.threads)]  # fmt: skip
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[name] = json.loads(output.splitlines()[-1])["MiB"]
        print(f"{name}, checkpointing {ways[name]}: {peaks[name]:,.0f} MiB", flush=True)
    return {"MiB": peaks, "checkpointing": ways, "ratio": peaks["ours"] / peaks["trl"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time", help=wall_time.__doc__)
    timing.add_argument("--model", default="runs/addition/cold_start/model", help="exported directory to start from")
    timing.add_argument("--pairs", type=int, default=5, help="rounds; the median ratio is reported")
    timing.add_argument("--steps", type=int, default=30, help="optimizer steps per run")
    timing.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                        help="cpu: seconds of the process's own work, where other work runs beside it")  # fmt: skip
    timing.set_defaults(run=wall_time)
    peak = commands.add_parser("memory", help=memory.__doc__)
    peak.add_argument("--contestant", choices=["ours", "trl"], help="this one alone, in this process")
    peak.add_argument("--ours", choices=["none", "selective", "full"], default="selective",
                      help="what the backward pass computes again instead of keeping it")  # fmt: skip
    peak.add_argument("--trl", choices=["none", "full"], default="none", help="the same of TRL, whose default is full")
    peak.add_argument("--steps", type=int, default=1, help="optimizer steps; Adam's moments come with the second")
    peak.set_defaults(run=memory)
    for command in commands.choices.values():
        command.add_argument("--threads", type=int, default=2, help="torch threads, for both")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    result = arguments.run(arguments)
    versions = {"threads": arguments.threads, "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({**result, **versions}))


if __name__ == "__main__":
    main()
