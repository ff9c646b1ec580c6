"""TRL's SFT, DPO and GRPO on a random model of one layer: ``train(resume_from_checkpoint=True)``."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.resume.trace import Trace, fingerprint, weights_fingerprint

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


class Recorder(TrainerCallback):
    """Writes the weights after every optimizer step; a checkpoint's name is its step."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.trace.write("resume", state.global_step or "start")

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.trace.write("update", weights_fingerprint(model))
        self.trace.write("checkpoint", state.global_step)


def recorded(cls: Any, trace: Trace) -> Any:
    """Returns the trainer class, writing each row of a batch to the trace when its loss is computed."""

    class Recorded(cls):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **others: Any) -> Any:
            ids, mask = (
                (inputs["prompt_ids"], inputs["prompt_mask"])
                if "prompt_ids" in inputs
                else (inputs["input_ids"], inputs["attention_mask"])
            )
            trace.write("used", *(fingerprint(row[keep.bool()]) for row, keep in zip(ids, mask, strict=True)))
            return super().compute_loss(model, inputs, *args, **others)

    return Recorded


def short(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """Returns rewards that differ between completions."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


class Trl:
    """One trainer of TRL.

    Args:
        kind: ``sft``, ``dpo`` or ``grpo``.
    """

    version = trl.__version__
    way = "`save_steps=3`; `trainer.train(resume_from_checkpoint=True)`"
    quote = (
        "If a `bool` and equals `True`, load the last checkpoint in *args.output_dir* […]. If present, training will "
        "resume from the model/optimizer/scheduler states loaded here."
    )
    link = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.Trainer.train.resume_from_checkpoint"

    def __init__(self, kind: str) -> None:
        self.kind, self.name = kind, f"TRL {kind.upper()}Trainer"
        self.unit = "prompts" if kind == "grpo" else "examples"

    def prepare(self, folder: Path) -> None:
        from rl_modules import SFT

        module = SFT(model_config=TINY)
        module.configure_model()
        self.model_path = folder / "model"
        module.export(self.model_path)
        rng = random.Random(0)
        sums = [tuple(rng.randrange(100) for _ in "ab") for _ in range(96)]
        rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in dict.fromkeys(sums)]
        if self.kind == "dpo":
            rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "0"} for row in rows]
        elif self.kind == "grpo":
            rows = [{"prompt": row["prompt"]} for row in rows]
        self.rows = folder / "rows.json"
        self.rows.write_text(json.dumps(rows))

    def train(self, folder: Path, trace: Trace) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        while True:
            saved = sorted(folder.glob("out/checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
            trainer = self._trainer(folder, trace)
            try:
                trainer.train(resume_from_checkpoint=bool(saved) or None)
            except Exception:
                # A folder that the kill left half written is the newest; without saved folders it is an error.
                if not saved or trainer.state.global_step > int(saved[-1].name.partition("-")[2]):
                    raise
                trace.write("damaged", saved[-1].name)
                shutil.rmtree(saved[-1])
                continue
            return trainer.model.state_dict()

    def _trainer(self, folder: Path, trace: Trace) -> Any:
        common = {
            "output_dir": str(folder / "out"), "max_steps": 30, "per_device_train_batch_size": 8, "save_steps": 3,
            "learning_rate": 1e-3, "seed": 0, "use_cpu": True, "bf16": False, "report_to": "none",
            "disable_tqdm": True, "dataloader_pin_memory": False, "logging_steps": 10, "gradient_checkpointing": False,
        }  # fmt: skip
        set_seed(0)
        model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        data = Dataset.from_list(json.loads(self.rows.read_text()))
        shared = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [Recorder(trace)]}
        if self.kind == "sft":
            trainer = recorded(SFTTrainer, trace)(model, args=SFTConfig(**common, max_length=32), **shared)
        elif self.kind == "dpo":
            trainer = recorded(DPOTrainer, trace)(model, args=DPOConfig(**common, max_length=32), **shared)
        else:
            config = GRPOConfig(**common, num_generations=4, steps_per_generation=2, max_completion_length=4)
            trainer = recorded(GRPOTrainer, trace)(model, reward_funcs=short, args=config, **shared)
        trainer.remove_callback(PrinterCallback)
        return trainer


CASES = {f"trl-{kind}": (lambda kind=kind: Trl(kind)) for kind in ("sft", "dpo", "grpo")}
