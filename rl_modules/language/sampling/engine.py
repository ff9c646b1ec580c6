"""Engines: separate models that write completions with the policy's weights, the one on transformers, their sampler."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import evaluation_mode
from rl_modules.language.architecture import is_sharded, text_config
from rl_modules.language.fast.held_graphs import release
from rl_modules.language.sampling.native import sample
from rl_modules.language.sampling.protocol import Completions, RowListener, SamplingSettings
from rl_modules.language.sampling.rows import Row, completions_of, rows_of
from rl_modules.language.sampling.weights import EngineSpec, Fingerprint, fingerprint, named_weights
from rl_modules.language.sharding import gathered_once

#: Largest allowed difference between log-probabilities of an engine and of its weights' model, in nats, by dtype.
_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.2}
_PROBE, _PROBE_TOKENS = 4, 4


class Writer(Protocol):
    """Writes completions with weights that it has."""

    spec: EngineSpec

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        """Writes one completion per prompt, with its own seed."""
        ...


class Engine(Writer, Protocol):
    """A separate model next to the policy, with the policy's weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights, which come under the names of a Hugging Face checkpoint."""
        ...

    def sleep(self) -> None:
        """Releases device memory; the weights are loaded again after :meth:`wake`."""
        ...

    def wake(self) -> None:
        """Takes the memory back."""
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


class NativeEngine:
    """An engine on transformers and this project's own sampler."""

    def __init__(self, spec: EngineSpec, max_rows_in_flight: int | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.spec = spec
        fields = {name: value for name, value in spec.config.items() if name != "model_type"}
        self.max_rows_in_flight = max_rows_in_flight
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        made = AutoConfig.for_model(spec.config["model_type"], **fields)
        with torch.random.fork_rng(devices=[]):
            self.model = AutoModelForCausalLM.from_config(made, trust_remote_code=False).to(device).eval()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from transformers import AutoModelForCausalLM

        # transformers loads a checkpoint's names from files only; some architectures have others in memory.
        with tempfile.TemporaryDirectory() as folder:
            save_file(dict(weights), Path(folder, "model.safetensors"), metadata={"format": "pt"})
            self.model.config.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=self.model.dtype, trust_remote_code=False)
        self.model = loaded.to(self.model.device).eval()

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        written = sample(self.model, prompts, seeds=seeds, max_rows_in_flight=self.max_rows_in_flight, **vars(settings))
        return rows_of(written)

    def sleep(self) -> None:
        release(self.model)  # its keys and values would stay on the device
        self.model.to("cpu")

    def wake(self) -> None:
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")

    def close(self) -> None:
        """Holds nothing but the model."""


class EngineSampler:
    """A :class:`~rl_modules.language.sampling.Sampler` on an engine in this process."""

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
        """Loads a model's weights, unless the engine has them."""
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
    bound = _ROUNDING.get(getattr(torch, engine.spec.config["dtype"]), 1e-2)
    if not worst <= bound:
        raise UsageError(
            f"sampler={type(engine).__name__} differs from the model by {worst:.2g} nats per "
            f"log-probability (rounding: {bound}): it lacks weights; take sampler=native"
        )
