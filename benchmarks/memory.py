"""Peak memory and time of a step beside TRL's, with a vocabulary of 151,936 words on a small body.

    python -m benchmarks.memory sft
    python -m benchmarks.memory grpo

Supervised fine-tuning has 16 texts of 512 tokens in a step, GRPO 16 completions of 384 tokens to prompts of 128 (its
EOS is never sampled), the model 4 layers of 128 hidden units: logits and what is computed from them are nearly all of
the memory. Each contestant runs in a process of its own. Counted is the highest resident size of training less the
resident size before it, when model and data are there; seconds are those of the steps after the first. Gradient
checkpointing is off on both sides.
"""

import argparse
import copy
import json
import logging
import os
import platform
import random
import string
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

CONTESTANTS = ("ours", "trl")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def resident(field: str) -> float:
    """MiB of this process: ``VmRSS``, now, or ``VmHWM``, the highest since :func:`forget_the_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def forget_the_peak() -> None:
    """Resets the kernel's record of the highest resident size."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def texts(n: int, length: int) -> list[str]:
    generator = random.Random(0)
    return ["".join(generator.choices(string.ascii_lowercase, k=length)) for _ in range(n)]


@torch.no_grad()
def writes_letters_for_ever(model: Any, words: int, eos: int) -> None:
    """Adds a common direction to the tied embeddings, opposite for EOS and for ids that the tokenizer lacks."""
    table = model.get_output_embeddings().weight
    table[:, 0] = -0.5
    table[:words, 0] = 0.5
    table[eos, 0] = -0.5


def varied(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Returns rewards that differ between almost all completions."""
    return [sum(map(ord, text)) % 1009 / 1009 for text in completions]


class Bench:
    """One model and data set.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        from rl_modules import SFT

        self.arguments = arguments
        self.config = {"vocab_size": arguments.vocabulary, "hidden_size": arguments.hidden_size,
                       "intermediate_size": 4 * arguments.hidden_size}  # fmt: skip
        module = SFT(model_config=self.config)
        module.configure_model()
        self.weights, self.tokenizer = module.model, module.tokenizer
        self.stamps: list[float] = []
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "records.jsonl")
        self.records = self.make_records()
        self.path.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")

    def make_records(self) -> list[dict[str, str]]:
        raise NotImplementedError

    def measure(self, contestant: str) -> dict[str, float]:
        """MiB above the baseline, and seconds of a step."""
        train = getattr(self, contestant)()
        forget_the_peak()
        before = resident("VmRSS")
        self.stamps = []
        train()
        times = [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        return {"MiB": resident("VmHWM") - before, "seconds": sum(times) / len(times)}

    def fit(self, module: Any, data: Any) -> Any:
        """Returns a function that trains this project's module."""
        import lightning as L

        bench = self

        class Clock(L.Callback):
            def on_train_batch_end(self, *others: Any) -> None:
                bench.stamps.append(CLOCKS[bench.arguments.clock]())

        module.model = copy.deepcopy(self.weights)
        trainer = L.Trainer(
            max_steps=self.arguments.steps, max_epochs=-1, accelerator="cpu", default_root_dir=self.folder.name,
            callbacks=[Clock()], enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            logger=False,
        )  # fmt: skip
        return lambda: trainer.fit(module, datamodule=data)

    def clocked(self, trainer: Any) -> Any:
        """Returns a function that trains by TRL."""
        from transformers import PrinterCallback, TrainerCallback

        bench = self

        class Clock(TrainerCallback):
            def on_step_end(self, *others: Any, **more: Any) -> None:
                bench.stamps.append(CLOCKS[bench.arguments.clock]())

        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Clock())
        return trainer.train


class SFTBench(Bench):
    """Supervised fine-tuning; every token but a text's first counts."""

    def make_records(self) -> list[dict[str, str]]:
        # A prompt of one token, and the completion's EOS.
        found = texts(self.arguments.rows * self.arguments.steps, self.arguments.length - 1)
        return [{"prompt": text[0], "completion": text[1:]} for text in found]

    def ours(self) -> Any:
        from datamodules import InstructionDataModule
        from rl_modules import SFT

        data = InstructionDataModule(path=str(self.path), batch_size=self.arguments.rows, eval_steps=0)
        return self.fit(SFT(model_config=self.config), data)

    def trl(self) -> Any:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        settings = SFTConfig(
            output_dir=self.folder.name, max_steps=self.arguments.steps,
            per_device_train_batch_size=self.arguments.rows, learning_rate=1e-3, use_cpu=True, max_length=None,
            gradient_checkpointing=False, logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False, bf16=False,
        )  # fmt: skip
        return self.clocked(SFTTrainer(copy.deepcopy(self.weights), settings,
                                       train_dataset=Dataset.from_list(self.records),
                                       processing_class=self.tokenizer))  # fmt: skip


class GRPOBench(Bench):
    """GRPO in groups of 8 without KL; every completion is as long as it may be and has an advantage."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        writes_letters_for_ever(self.weights, len(self.tokenizer), self.tokenizer.eos_token_id)

    def make_records(self) -> list[dict[str, str]]:
        return [{"prompt": text} for text in texts(self.arguments.rows * self.arguments.steps, self.arguments.prompt)]

    def ours(self) -> Any:
        from datamodules import PromptDataModule
        from rl_modules import GRPO

        module = GRPO(model_config=self.config, loss_type="grpo", max_completion_length=self.arguments.length,
                      learning_rate=1e-5, lr_scheduler_type="constant", completions_steps=0)  # fmt: skip
        data = PromptDataModule(path=str(self.path), batch_size=self.arguments.rows, num_generations=8, eval_steps=0,
                                reward_funcs=["benchmarks.memory:varied"])  # fmt: skip
        return self.fit(module, data)

    def trl(self) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        settings = GRPOConfig(
            output_dir=self.folder.name, max_steps=self.arguments.steps,
            per_device_train_batch_size=self.arguments.rows, num_generations=8,
            max_completion_length=self.arguments.length, learning_rate=1e-5, lr_scheduler_type="constant",
            loss_type="grpo", beta=0.0, temperature=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False,
            logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        return self.clocked(GRPOTrainer(copy.deepcopy(self.weights), varied, settings,
                                        train_dataset=Dataset.from_list(self.records),
                                        processing_class=self.tokenizer))  # fmt: skip


BENCHES = {"sft": SFTBench, "grpo": GRPOBench}


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each contestant in a process of its own, in turn."""
    found: dict[str, Any] = {}
    for name in CONTESTANTS:
        command = [sys.executable, "-m", "benchmarks.memory", *sys.argv[1:], "--contestant", name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[name] = json.loads(output.splitlines()[-1])
        print(f"{name}: {found[name]['MiB']:,.0f} MiB, {found[name]['seconds']:.2f} s a step", flush=True)
    ratios = {field: found["ours"][field] / found["trl"][field] for field in ("MiB", "seconds")}
    return {**found, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, length in (("sft", 512), ("grpo", 384)):
        one = commands.add_parser(name, help=BENCHES[name].__doc__)
        one.add_argument("--rows", type=int, default=16, help="texts, or completions, of a step")
        one.add_argument("--length", type=int, default=length, help="tokens of a text, or of a completion")
        one.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (grpo)")
        one.add_argument("--vocabulary", type=int, default=151_936)
        one.add_argument("--hidden_size", type=int, default=128)
        one.add_argument("--steps", type=int, default=3, help="optimizer steps; the first is not timed")
        one.add_argument("--threads", type=int, default=2, help="torch threads, for both")
        one.add_argument("--clock", choices=[*CLOCKS], default="wall",
                         help="cpu: the process's own time, for one thread on a busy machine")  # fmt: skip
        one.add_argument("--contestant", choices=CONTESTANTS, help="this one alone, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if arguments.contestant is not None:
        print(json.dumps(BENCHES[arguments.command](arguments).measure(arguments.contestant)))
        return
    versions = {"threads": arguments.threads, "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({**compare(arguments), **versions}))


if __name__ == "__main__":
    main()
