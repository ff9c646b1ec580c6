"""The check of an engine that has the policy's weights: a separate model that writes completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import evaluation_mode
from rl_modules.language.architecture import text_config, transformers_model
from rl_modules.language.sampling.protocol import SamplingSettings
from rl_modules.language.sampling.rows import Row
from rl_modules.language.sampling.weights import computing_dtype
from rl_modules.language.sharding import gathered_once

#: Largest allowed difference between log-probabilities of an engine and of its weights' model, in nats, by dtype.
_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.2}
_PROBE, _PROBE_TOKENS = 4, 4


class Engine(Protocol):
    """A separate model next to the policy, with the policy's weights."""

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        """Writes one completion per prompt, with its own seed."""
        ...


@torch.no_grad()
def check_engine(model: Any, engine: Engine, sampler: str) -> None:
    """Compares the engine's log-probabilities with a forward pass: weights under a wrong name raise no error there."""
    device = next(model.parameters()).device
    words = text_config(model.config).vocab_size
    prompts = [[(7 * i + 3 * j) % words for j in range(3)] for i in range(_PROBE)]
    settings = SamplingSettings(_PROBE_TOKENS, (words - 1,), 0)
    rows = engine.generate(prompts, list(range(_PROBE)), settings)
    worst = 0.0
    with evaluation_mode(model.modules()), gathered_once(model):
        for prompt, row in zip(prompts, rows, strict=True):
            text = torch.tensor([prompt + row.tokens], dtype=torch.int64, device=device)
            logits = model(input_ids=text, use_cache=False).logits[:, len(prompt) - 1 : -1]
            expected = F.token_log_probs(logits.float(), text[:, len(prompt) :])[0]
            found = torch.tensor(row.log_prob, dtype=torch.float32, device=device)
            worst = max(worst, float((found - expected).abs().max()))
    bound = _ROUNDING.get(computing_dtype(transformers_model(model)), 1e-2)
    if not worst <= bound:
        raise UsageError(
            f"sampler={sampler} differs from the model by {worst:.2g} nats per log-probability (rounding: {bound}): it "
            "lacks weights, or computes in another dtype (`rl serve --dtype`); take sampler=native"
        )
