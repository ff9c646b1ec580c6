"""A sampler on an engine in this process, and the comparison of an engine with the model whose weights it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.language.models import text_config
from rl_modules.language.sampling.engine import Engine, Writer, completions_of
from rl_modules.language.sampling.native import eval_mode
from rl_modules.language.sampling.protocol import Completions, RowListener, SamplingSettings
from rl_modules.language.sampling.weights import Fingerprint, fingerprint, named_weights
from rl_modules.language.sharding import gathered_once, is_sharded

#: Largest allowed difference between log-probabilities of an engine and of its weights' model, in nats, by dtype.
_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.2}
_PROBE, _PROBE_TOKENS = 4, 4


class EngineSampler:
    """A :class:`~rl_modules.language.sampling.Sampler` on an engine in this process.

    Args:
        engine: holds the weights.
        device: of the completions' tensors.
    """

    exact_log_probs = False
    reproducible = False
    concurrent = False

    def __init__(self, engine: Engine, device: Any) -> None:
        self.engine, self.device = engine, device
        self.version = 0
        self._checked = self._asleep = self._forgotten = False
        self._weights: Fingerprint | None = None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        seeds: Sequence[int],
        settings: SamplingSettings,
        on_ended: RowListener | None = None,
    ) -> Completions:
        if self._weights is None:
            raise UsageError("the sampler has no weights yet; call update_weights first")
        asked = [prompt for prompt in prompts for _ in range(num_generations)]
        rows = self.engine.generate(asked, seeds, settings)
        for number, row in enumerate(rows if on_ended is not None else ()):
            on_ended(number, row.tokens, row.finished)  # type: ignore[misc]
        return completions_of(rows, settings.pad_token_id, self.device, [self.version] * len(rows))

    def update_weights(self, model: Any, version: int = 0) -> None:
        """Loads a model's weights, unless the engine has them.

        Raises:
            UsageError: the engine's log-probabilities are not the model's.
        """
        if self._weights == (found := fingerprint(model, version)) and not self._forgotten:
            return
        self.version = version
        self.wake()
        self.engine.load_weights(named_weights(model, self.engine.spec.untied))
        self._weights, self._forgotten = found, False
        if not self._checked and not is_sharded(model):
            self._checked = True
            check_engine(model, self.engine)

    def forget_weights(self) -> None:
        self._forgotten = True

    def sleep(self) -> None:
        if not self._asleep:
            self.engine.sleep()
            self._asleep, self._weights = True, None

    def wake(self) -> None:
        if self._asleep:
            self.engine.wake()
            self._asleep = False

    def close(self) -> None:
        self.engine.close()


@torch.no_grad()
def check_engine(model: Any, engine: Writer) -> None:
    """Compares the engine's log-probabilities with a forward pass of the model whose weights it has.

    This detects weights that were loaded under a wrong name or not at all, which raise no error in the engine.

    Raises:
        UsageError: they differ by more than rounding.
    """
    device = next(model.parameters()).device
    words = text_config(model.config).vocab_size
    prompts = [[(7 * i + 3 * j) % words for j in range(3)] for i in range(_PROBE)]
    settings = SamplingSettings(_PROBE_TOKENS, (words - 1,), 0)
    rows = engine.generate(prompts, list(range(_PROBE)), settings)
    worst = 0.0
    with eval_mode(model), gathered_once(model):
        for prompt, row in zip(prompts, rows, strict=True):
            text = torch.tensor([prompt + row.tokens], dtype=torch.int64, device=device)
            logits = model(input_ids=text, use_cache=False).logits[:, len(prompt) - 1 : -1]
            expected = F.token_log_probs(logits.float(), text[:, len(prompt) :])[0]
            found = torch.tensor(row.log_prob, dtype=torch.float32, device=device)
            worst = max(worst, float((found - expected).abs().max()))
    bound = _ROUNDING.get(getattr(torch, engine.spec.config["dtype"]), 1e-2)
    if not worst <= bound:
        raise UsageError(f"sampler={type(engine).__name__} differs from the model by {worst:.2g} nats per "
                         f"log-probability (rounding: {bound}): it lacks weights; take sampler=native")  # fmt: skip
