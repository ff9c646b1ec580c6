"""What the tests of preference learning share: small models, pairs in a file, plain log-probabilities."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
FAMILIES = {
    "qwen2": TINY,
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                 "num_attention_heads": 2},
}  # fmt: skip
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b)[:-1] + "x" * (1 + a % 3)}
    for a in range(6)
    for b in range(4)
]
JUDGEMENTS = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for i, pair in enumerate(PAIRS)
    for side in (("chosen", "rejected") if i % 3 else ("chosen",))
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def weights(module: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.model.parameters()])


def plain_log_prob(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Σ_t log π(y_t) of one sequence alone, by Transformers' own forward pass."""
    ids = torch.tensor([prompt + answer])
    log_prob = model(input_ids=ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return log_prob.gather(1, torch.tensor(answer).unsqueeze(1)).sum()


class Save(L.Callback):
    """Writes a checkpoint after a number of micro-batches, or at the end."""

    def __init__(self, path: Any, batches: int | None = None) -> None:
        self.path, self.batches = path, batches
        self.seen = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen += 1
        if self.seen == self.batches:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.batches is None:
            trainer.save_checkpoint(self.path)
