"""Distillation from an exact teacher: two-digit addition, whose right next digit is known.

    python -m benchmarks.distillation START --seeds 0 1 2 --steps 175

``START`` is the directory of an untrained or barely trained adder, such as the export of ``sft/addition_start.yaml``.
The teacher writes the right sum with probability 1 - 1e-3 per token, so that ``eval/reverse_kl`` is the distance to the
optimal policy. Prints sampled pass@1 and that distance on held-out sums at every evaluation.
"""

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor

from datamodules import PromptDataModule
from rl_modules import Distillation
from rl_modules import functional as F
from rl_modules.language.scoring import logits_at

#: Probability of all wrong tokens together.
WRONG = 1e-3


class FromTheAdder(Distillation):
    """A student whose teacher is the rule of addition."""

    def right_answers(self, tokens: Tensor, prompt_length: Tensor, width: int) -> Tensor:
        """The tokens of each prompt's sum, then EOS, [b, width]."""
        eos = int(self.tokenizer.eos_token_id)  # type: ignore[arg-type]
        rows = []
        for text, n in zip(tokens.tolist(), prompt_length.tolist(), strict=True):
            a, b = self.tokenizer.decode(text[:n]).replace(" ", "").rstrip("=").split("+")
            answer = self.tokenizer(str(int(a) + int(b)), add_special_tokens=False)["input_ids"]
            rows.append((answer + [eos] * width)[:width])
        return torch.tensor(rows, device=tokens.device)

    def divergence_of_completions(self, batch: dict[str, Any], mask: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        tokens, start = batch["tokens"], batch["prompt_length"]
        row, column = mask.nonzero(as_tuple=True)
        place = row * tokens.shape[1] + start[row] + column - 1
        log_q = (logits_at(self.model, place, input_ids=tokens)[0] / self.temperature).log_softmax(-1)
        right = self.right_answers(tokens, start, mask.shape[1])[row, column].unsqueeze(1)
        words = log_q.shape[-1]
        p = torch.full_like(log_q, WRONG / (words - 1)).scatter_(1, right, 1 - WRONG)
        return F.generalized_jsd(log_q, p.log(), beta), F.generalized_jsd(log_q.detach(), p.log(), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=175)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    given = parser.parse_args()
    for seed in given.seeds:
        module = FromTheAdder(
            given.start, teacher_model_name_or_path=given.start, beta=given.beta, learning_rate=given.learning_rate,
            warmup_steps=10, max_completion_length=6, completions_steps=0,
        )  # fmt: skip
        data = PromptDataModule("addition", batch_size=256, num_generations=1, n_eval=512, eval_steps=25, seed=seed,
                                eval_num_generations=4, eval_temperature=1.0)  # fmt: skip

        class Printing(L.Callback):
            def on_validation_end(self, trainer: Any, module: Any) -> None:
                found = {name: float(trainer.callback_metrics[name]) for name in ("eval/pass@1", "eval/reverse_kl")}
                step = trainer.global_step
                print(f"seed {seed}, {step} steps, {256 * step} completions: {found}", flush=True)  # noqa: B023

        L.Trainer(max_steps=given.steps, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False, callbacks=[Printing()],
                  ).fit(module, datamodule=data)  # fmt: skip


if __name__ == "__main__":
    main()
