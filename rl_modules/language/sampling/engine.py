"""The interface of engines, which generate completions with given weights, and the engine on transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.native import sample
from rl_modules.language.sampling.protocol import Completions, SamplingSettings
from rl_modules.language.sampling.weights import EngineSpec


@dataclass(frozen=True)
class Row:
    """One completion: its token ids, their log-probabilities in nats, and whether an EOS token ended it."""

    tokens: list[int]
    log_prob: list[float]
    finished: bool


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
    """An engine on transformers and this project's own sampler.

    Args:
        spec: of the model.
        max_rows_in_flight: see :func:`rl_modules.language.sampling.sample`.
    """

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
        self.model.to("cpu")

    def wake(self) -> None:
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")

    def close(self) -> None:
        """Holds nothing but the model."""


def rows_of(written: Completions) -> list[Row]:
    """Returns the rows of completions as lists."""
    columns = (written.tokens, written.log_prob, written.length, written.finished)
    return [
        Row(tokens[:n], log_prob[:n], finished)
        for tokens, log_prob, n, finished in zip(*(column.tolist() for column in columns), strict=True)
    ]


def completions_of(rows: Sequence[Row], pad_token_id: int, device: Any, versions: Sequence[int]) -> Completions:
    """Completions on a device from rows, padded on the right.

    Args:
        rows: at least one.
        pad_token_id: what fills the rows up.
        device: of the tensors.
        versions: of the weights that wrote each row.

    Raises:
        UsageError: a row without tokens, which no sampler writes.
    """
    length = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
    if not int(length.min()):
        raise UsageError(f"row {int(length.argmin())} of the sampler's answer has no tokens; a completion has at least "
                         "one")  # fmt: skip
    width = int(length.max())
    tokens = torch.tensor([row.tokens + [pad_token_id] * (width - len(row.tokens)) for row in rows], dtype=torch.int64)
    log_prob = torch.tensor([row.log_prob + [0.0] * (width - len(row.log_prob)) for row in rows], dtype=torch.float32)
    finished = torch.tensor([row.finished for row in rows], dtype=torch.bool)
    version = torch.tensor(list(versions), dtype=torch.int64)
    return Completions(*(x.to(device) for x in (tokens, log_prob, length, finished, version)))
