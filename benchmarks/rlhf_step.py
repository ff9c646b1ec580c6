"""Time and peak memory of an RLHFPPO step: four models, a generation of one optimizer step.

    python -m benchmarks.rlhf_step [--rows 16] [--length 128] [--pairs 5] [--value_head_on_policy]

A model of 8 layers (or ``--layers``) writes ``--rows`` completions of ``--length`` tokens, because its EOS is never
sampled, to prompts of two-digit addition. Every step is followed by four plain passes of the same tokens, each forward
and backward of the cross-entropy through a copy of the policy; processor time of this process is compared, with
sampling and without. Memory is the highest resident size of the steps less that before the first, without plain passes.
"""

import argparse
import copy
import statistics
import time
from typing import Any

import lightning as L
import torch

from benchmarks.grpo import SIZE_25M, never_ends
from benchmarks.memory import forget_the_peak, resident, varied
from datamodules import PromptDataModule
from rl_modules import RLHFPPO, RewardModel
from rl_modules.language.fast import early_gradient

clock = time.process_time


class Beside(L.Callback):
    """Measures every step, and as many plain passes after each."""

    def __init__(self, plain: Any) -> None:
        self.plain, self.sampling, self.rows = plain, 0.0, []  # type: ignore[var-annotated]

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        act = module.act

        def timed(*given: Any, **named: Any) -> Any:
            began = clock()
            made = act(*given, **named)
            self.sampling += clock() - began
            return made

        module.act = timed
        forget_the_peak()
        self.before, self.began = resident("VmRSS"), clock()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, beside = clock() - self.began, 0.0
        if self.plain is not None:
            began = clock()
            for _ in range(4):
                logits = self.plain(input_ids=batch["tokens"][:, :-1], use_cache=False).logits
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten()).backward()
                self.plain.zero_grad(set_to_none=True)
            beside = clock() - began
        self.rows.append((step, self.sampling, beside))
        self.sampling, self.began = 0.0, clock()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.peak = resident("VmHWM") - self.before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--forward_rows", type=int, default=64, help="local_rollout_forward_batch_size")
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=0, help="0: the tokenizer's")
    parser.add_argument("--value_head_on_policy", action="store_true")
    parser.add_argument("--memory", action="store_true", help="without plain passes")
    parser.add_argument("--one_backward", action="store_true", help="one backward pass for policy and value model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one_backward:
        early_gradient.is_fast = lambda: False
    config = {
        **SIZE_25M,
        "num_hidden_layers": given.layers,
        **({"vocab_size": given.vocabulary} if given.vocabulary else {}),
    }
    module = RLHFPPO(
        model_config=config, value_head_on_policy=given.value_head_on_policy, max_completion_length=given.length,
        learning_rate=1e-6, completions_steps=0, local_rollout_forward_batch_size=given.forward_rows,
    )  # fmt: skip
    judge = RewardModel(model_config=config)
    judge.configure_model()
    build = module.build_model

    def with_judge(config: Any, source: Any) -> None:
        build(config, source)
        never_ends(module.model, module.tokenizer.eos_token_id)
        module.reward_model = judge.model.requires_grad_(False).eval()

    module.build_model = with_judge  # type: ignore[method-assign]
    module.configure_model()
    plain = None if given.memory else copy.deepcopy(module.model)
    data = PromptDataModule("addition", reward_funcs=varied, num_generations=1, batch_size=given.rows, eval_steps=0)
    beside = Beside(plain)
    L.Trainer(
        max_steps=given.pairs + 1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[beside],
        accumulate_grad_batches=given.micro_batches,
    ).fit(module, data)  # fmt: skip
    rows = beside.rows[1:]
    print(f"peak {beside.peak:.0f} MiB above {beside.before:.0f}; step {statistics.median(r[0] for r in rows):.2f} s, "
          f"of it sampling {statistics.median(r[1] for r in rows):.2f} s")  # fmt: skip
    if not given.memory:
        whole, rest = (statistics.median(f(r) / r[2] for r in rows) for f in (lambda r: r[0], lambda r: r[0] - r[1]))
        print(f"÷ four plain passes: {whole:.2f}, without sampling {rest:.2f}")


if __name__ == "__main__":
    main()
