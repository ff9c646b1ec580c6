"""Speed of training beside TRL: the same weights, the same records, the same number of sequences per step, alternating.

    python -m benchmarks.language sft --data paths --pairs 5 --json sft.json
    python -m benchmarks.language reward_model --data paths --pairs 5 --json reward_model.json
    python -m benchmarks.language dpo --data paths --pairs 5 --json dpo.json

Sequences of an optimizer step are padded together or packed; what is counted are real tokens, prompts included and
padding not, per second of training (model and data are ready when the clock starts). Logging every 10 steps on both
sides, no evaluation, no checkpoints, no gradient checkpointing (which TRL has on by default). TRL's packing needs flash
attention, so it is not among the contestants; its batches of similar length are, which change what is in a step. Of
reward models and DPO, pairs per second are counted, of which a step has as many on both sides; every pair is visited
once, so that both sides run the reference as often.
Ratios are taken within a round, and their median is reported.
"""

import argparse
import copy
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

#: Records of every task, and how many sequences a step has.
DATA: dict[str, dict[str, Any]] = {
    "addition": {"task": "addition", "n_train": 4096},
    "paths": {"task": "paths", "n_train": 4096},
    "countdown": {"task": "countdown", "task_kwargs": {"think_format": True, "n_operands": 4}, "n_train": 4096},
}


#: Sequences, or pairs, of an optimizer step.
BATCH = 64
#: The clock; see ``--clock``.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
now = CLOCKS["wall"]


class Clock(L.Callback):
    """Seconds from the first batch to the last."""

    seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_s = now()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = now() - self._start_s


def train(trainer: Any) -> float:
    """Seconds from the first batch to the last of a Hugging Face trainer."""
    from transformers import PrinterCallback, TrainerCallback

    times: list[float] = []

    class Ends(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(now())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(now())

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Ends())
    trainer.train()
    return times[1] - times[0]


def fit(model: L.LightningModule, data: L.LightningDataModule, steps: int) -> float:
    """Returns the seconds of a number of optimizer steps."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_steps=steps, max_epochs=-1, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[clock]
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
    return clock.seconds


class SFTRound:
    """One model and data set, and the contestants on it; each returns real tokens per second."""

    def __init__(self, name: str, batch_size: int, vocabulary: int | None) -> None:
        from rl_modules import SFT

        self.settings = {**DATA[name], "batch_size": batch_size}
        self.model_config = {} if vocabulary is None else {"vocab_size": vocabulary}
        module = SFT(model_config=self.model_config)
        module.configure_model()
        self.weights, self.tokenizer = module.model, module.tokenizer
        self.contestants: dict[str, Callable[[int], float]] = {
            "ours": lambda steps: self.ours(steps, packing=False),
            "ours, packed": lambda steps: self.ours(steps, packing=True),
            "TRL": lambda steps: self.trl(steps, "random"),
            "TRL, grouped by length": lambda steps: self.trl(steps, "group_by_length"),
        }

    def ours(self, steps: int, packing: bool) -> float:
        from datamodules import InstructionDataModule
        from rl_modules import SFT

        module = SFT(model_config=self.model_config)
        module.model = copy.deepcopy(self.weights)
        seconds = fit(module, InstructionDataModule(packing=packing, **self.settings), steps)
        return module.num_tokens / seconds

    def trl(self, steps: int, sampling: str) -> float:
        from datasets import Dataset, disable_progress_bars
        from trl import SFTConfig, SFTTrainer

        from datamodules.language.on_demand import load_records

        disable_progress_bars()
        source = {key: value for key, value in self.settings.items() if key in ("task", "task_kwargs")}
        records = load_records(**source, n=self.settings["n_train"])
        rows = [{"prompt": record["prompt"], "completion": record["completion"]} for record in records]
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=self.settings["batch_size"],
                learning_rate=1e-3, use_cpu=True, gradient_checkpointing=False, logging_steps=10, save_strategy="no",
                report_to="none", disable_tqdm=True,
                train_sampling_strategy=sampling, dataloader_pin_memory=False, bf16=False,
            )  # fmt: skip
            trainer = SFTTrainer(
                copy.deepcopy(self.weights), arguments, train_dataset=Dataset.from_list(rows),
                processing_class=self.tokenizer
            )  # fmt: skip
            seconds = train(trainer)
        return trainer._total_train_tokens / seconds


#: Pairs of the paths task: as they are, and with an instruction before each, as in people's preferences.
PREFERENCES: dict[str, dict[str, Any]] = {
    "paths": {"task": "paths", "n_train": 4096},
    "paths_instructed": {
        "task": "paths",
        "task_kwargs": {"template": "Walk from the first letter to the second along the edges of the graph you know "
                        "in as few steps as you can, and write the letters that you step on. {start}>{goal}:"},
        "n_train": 4096,
    },
}  # fmt: skip


class RewardModelRound:
    """One model and set of preferences, and the contestants on it; each returns pairs per second."""

    def __init__(self, name: str, vocabulary: int | None) -> None:
        from rl_modules import RewardModel

        self.settings = {**PREFERENCES[name], "batch_size": BATCH}
        self.model_config = {} if vocabulary is None else {"vocab_size": vocabulary}
        module = RewardModel(model_config=self.model_config)
        module.configure_model()
        self.weights, self.tokenizer = module.model, module.tokenizer
        self.contestants: dict[str, Callable[[int], float]] = {
            "ours": lambda steps: self.ours(steps, packing=True),
            "ours, not packed": lambda steps: self.ours(steps, packing=False),
            "TRL": self.trl,
        }

    def ours(self, steps: int, packing: bool) -> float:
        from datamodules import PreferenceDataModule
        from rl_modules import RewardModel

        module = RewardModel(model_config=self.model_config)
        module.model = copy.deepcopy(self.weights)
        return steps * BATCH / fit(module, PreferenceDataModule(packing=packing, **self.settings), steps)

    def trl(self, steps: int) -> float:
        from datasets import Dataset, disable_progress_bars
        from trl import RewardConfig, RewardTrainer

        from datamodules.language.on_demand import load_records

        disable_progress_bars()
        columns = ("prompt", "chosen", "rejected")
        source = {key: value for key, value in self.settings.items() if key in ("task", "task_kwargs")}
        records = load_records(**source, n=self.settings["n_train"], required=columns)
        with tempfile.TemporaryDirectory() as folder:
            arguments = RewardConfig(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=1e-3, use_cpu=True,
                gradient_checkpointing=False, logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
                dataloader_pin_memory=False, bf16=False,
            )  # fmt: skip
            trainer = RewardTrainer(
                copy.deepcopy(self.weights), arguments,
                train_dataset=Dataset.from_list([{name: record[name] for name in columns} for record in records]),
                processing_class=self.tokenizer
            )  # fmt: skip
            return steps * BATCH / train(trainer)


class DPORound:
    """One policy and set of preferences, and the contestants on it; each returns pairs per second."""

    def __init__(self, name: str, vocabulary: int | None) -> None:
        from rl_modules import DPO

        self.settings = {**PREFERENCES[name], "batch_size": BATCH}
        self.model_config = {} if vocabulary is None else {"vocab_size": vocabulary}
        module = DPO(model_config=self.model_config)
        module.configure_model()
        self.weights, self.tokenizer = module.model, module.tokenizer
        self.contestants: dict[str, Callable[[int], float]] = {
            "ours": lambda steps: self.ours(steps, packing=True),
            "ours, not packed": lambda steps: self.ours(steps, packing=False),
            "TRL": self.trl,
        }

    def ours(self, steps: int, packing: bool) -> float:
        from datamodules import PreferenceDataModule
        from rl_modules import DPO

        module = DPO(model_config=self.model_config, learning_rate=1e-4)
        module.configure_model()
        for model in (module.model, module.reference):
            model.load_state_dict(self.weights.state_dict())
        return steps * BATCH / fit(module, PreferenceDataModule(packing=packing, **self.settings), steps)

    def trl(self, steps: int) -> float:
        from datasets import Dataset, disable_progress_bars
        from trl import DPOConfig, DPOTrainer

        from datamodules.language.on_demand import load_records

        disable_progress_bars()
        columns = ("prompt", "chosen", "rejected")
        source = {key: value for key, value in self.settings.items() if key in ("task", "task_kwargs")}
        records = load_records(**source, n=self.settings["n_train"], required=columns)
        with tempfile.TemporaryDirectory() as folder:
            arguments = DPOConfig(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=1e-4, use_cpu=True,
                gradient_checkpointing=False, logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
                dataloader_pin_memory=False, bf16=False,
            )  # fmt: skip
            trainer = DPOTrainer(
                copy.deepcopy(self.weights), copy.deepcopy(self.weights), arguments,
                train_dataset=Dataset.from_list([{name: record[name] for name in columns} for record in records]),
                processing_class=self.tokenizer
            )  # fmt: skip
            return steps * BATCH / train(trainer)


def measure(contestants: dict[str, Callable[[int], float]], pairs: int, steps: int) -> dict[str, Any]:
    """Alternates the contestants and compares them round by round."""
    for run in contestants.values():
        run(3)  # imports, allocator, first-call costs
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(pairs):
        # In forward and backward order in turn, so that a drift of speed within a round affects all equally.
        for name in list(contestants)[:: 1 if i % 2 == 0 else -1]:
            speeds[name].append(contestants[name](steps))
    ratios = {
        f"{own} ÷ {other}": statistics.median(a / b for a, b in zip(speeds[own], speeds[other], strict=True))
        for own in contestants if own.startswith("ours")
        for other in contestants if not other.startswith("ours")
    }  # fmt: skip
    return {
        "steps": steps,
        "pairs": pairs,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "ratios": ratios,
        "rounds": speeds,
    }


def sft(arguments: argparse.Namespace) -> dict[str, Any]:
    """Supervised fine-tuning, tokens per second."""
    contestants = SFTRound(arguments.data, arguments.batch_size, arguments.vocabulary).contestants
    result = measure(contestants, arguments.pairs, arguments.steps)
    return {"what": "SFT", "data": arguments.data, "batch_size": arguments.batch_size,
            "vocabulary": arguments.vocabulary, "clock": arguments.clock, **result}  # fmt: skip


def reward_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Reward model, pairs per second."""
    contestants = RewardModelRound(arguments.data, arguments.vocabulary).contestants
    result = measure(contestants, arguments.pairs, arguments.steps)
    return {
        "what": "reward model",
        "data": arguments.data,
        "batch": BATCH,
        "vocabulary": arguments.vocabulary,
        **result,
    }


def dpo(arguments: argparse.Namespace) -> dict[str, Any]:
    """DPO, pairs per second."""
    contestants = DPORound(arguments.data, arguments.vocabulary).contestants
    result = measure(contestants, arguments.pairs, arguments.steps)
    return {"what": "DPO", "data": arguments.data, "batch": BATCH, "vocabulary": arguments.vocabulary, **result}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("sft", help=sft.__doc__)
    one.add_argument("--data", choices=[*DATA], default="paths")
    one.add_argument("--vocabulary", type=int, help="words of the model; default: the character tokenizer's 99")
    one.add_argument("--batch_size", type=int, default=BATCH, help="sequences per optimizer step")
    one.set_defaults(run=sft)
    two = commands.add_parser("reward_model", help=reward_model.__doc__)
    two.add_argument("--data", choices=[*PREFERENCES], default="paths")
    two.add_argument("--vocabulary", type=int, help="words of the model; default: the character tokenizer's 99")
    two.set_defaults(run=reward_model)
    three = commands.add_parser("dpo", help=dpo.__doc__)
    three.add_argument("--data", choices=[*PREFERENCES], default="paths")
    three.add_argument("--vocabulary", type=int, help="words of the model; default: the character tokenizer's 99")
    three.set_defaults(run=dpo)
    for command in commands.choices.values():
        command.add_argument("--pairs", type=int, default=5, help="rounds; the median is reported")
        command.add_argument("--steps", type=int, default=30, help="optimizer steps per run")
        command.add_argument("--threads", type=int, default=1, help="torch threads, for every contestant")
        command.add_argument("--clock", choices=[*CLOCKS], default="wall",
                             help="cpu: the process's own time, for one thread on a busy machine")  # fmt: skip
        command.add_argument("--json", type=Path, help="where to write the measurements")
    arguments = parser.parse_args()
    global now
    now = CLOCKS[arguments.clock]
    torch.set_num_threads(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    result = arguments.run(arguments)
    print(f"\n{result['what']} on {arguments.data}: {result['steps']} steps, {result['pairs']} rounds, "
          f"{result['threads']} thread(s)")  # fmt: skip
    for name, speed in result["per_second"].items():
        print(f"{name:<28}{speed:>12,.0f} per second")
    for name, ratio in result["ratios"].items():
        print(f"{name:<40}{ratio:>8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
