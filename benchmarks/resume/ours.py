"""This project's algorithms: ``rl fit … --resume``, with every row that enters a ``training_step`` recorded."""

import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.resume.trace import Trace, fingerprint, weights_fingerprint
from tests import chaos

#: Case of tests/chaos.py by name in the results.
NAMES = {
    "ours-ppo": "ppo", "ours-a2c": "a2c", "ours-reinforce": "reinforce", "ours-trpo": "trpo", "ours-dqn": "dqn",
    "ours-qrdqn": "qrdqn", "ours-ddpg": "ddpg", "ours-td3": "td3", "ours-sac": "sac", "ours-tqc": "tqc-prioritized",
    "ours-recurrent-ppo": "recurrent-ppo", "ours-recurrent-a2c": "recurrent-a2c",
    "ours-q-learning": "q-learning", "ours-sarsa": "sarsa", "ours-monte-carlo": "monte-carlo", "ours-sft": "sft",
    "ours-reward-model": "reward-model", "ours-dpo": "dpo", "ours-kto": "kto", "ours-grpo": "grpo",
    "ours-rloo": "rloo", "ours-rlhf-ppo": "rlhf-ppo",
}  # fmt: skip


def tensors(batch: Any) -> list[torch.Tensor]:
    """Every tensor in a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


class Recorder(L.Callback):
    """Writes each batch's rows and the weights after it; its place in the trace is in the checkpoint."""

    def __init__(self) -> None:
        self.trace = Trace(Path("trace.txt"))
        self.count = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trace.write("resume", self.count or "start")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *others: Any) -> None:
        found = tensors(batch)
        rows = {len(tensor) for tensor in found if tensor.ndim}
        if len(rows) == 1:
            (n,) = rows
            units = [fingerprint(*(t[i].detach().cpu().float() for t in found if t.ndim)) for i in range(n)]
        else:  # tensors of several lengths: the batch is one unit
            units = [fingerprint(*(tensor.detach().cpu().float() for tensor in found))]
        self.trace.write("used", *units)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *others: Any) -> None:
        self.trace.write("update", weights_fingerprint(pl_module))
        self.count += 1
        self.trace.write("checkpoint", self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Ours:
    """One algorithm of this project.

    Args:
        case: name in ``tests.chaos.CASES``.
    """

    unit = "rows"
    way = "`rl fit … --resume`"
    quote = "Resumed, it ends where the uninterrupted run ends: the same weights, bit for bit, and the same curves."
    link = "resume.md"

    def __init__(self, case: str) -> None:
        self.case = case
        # An editable installation keeps the version that it was made with; the file has the present one.
        self.version = re.search(r'^version = "(.+)"', Path("pyproject.toml").read_text(), re.MULTILINE)[1]
        self.name = f"this project, {case}"

    def prepare(self, folder: Path) -> None:
        chaos.import_everything(chaos.CASES[self.case])
        self.arguments = chaos.with_models(self.case, folder / "models")

    def train(self, folder: Path, trace: Trace) -> dict[str, torch.Tensor]:
        from recipes.cli import main

        os.environ["HF_HUB_OFFLINE"] = "1"
        main(["fit", *self.arguments, "--trainer.callbacks+=benchmarks.resume.ours.Recorder", "--resume"])
        (last,) = folder.glob("logs/*/*/checkpoints/last.ckpt")
        checkpoint = torch.load(last, weights_only=True)
        state = {name: tensor for name, tensor in checkpoint["state_dict"].items() if isinstance(tensor, torch.Tensor)}
        return {**state, **{f"optimizer {i}": t for i, t in enumerate(tensors(checkpoint["optimizer_states"]))}}


CASES = {name: (lambda case=case: Ours(case)) for name, case in NAMES.items()}
