"""Engines that write completions with weights that they are given, in this process or in ``rl serve``."""

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
from rl_modules.language.sampling.native import check_request, sample
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

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        """Write one completion per prompt, with its own seed."""
        ...


class Engine(Writer, Protocol):
    """A model of its own beside the policy, with the policy's weights."""

    spec: EngineSpec

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, which come under the names of a Hugging Face checkpoint."""
        ...

    def sleep(self) -> None:
        """Release device memory; the weights are loaded again after :meth:`wake`."""
        ...

    def wake(self) -> None:
        """Take the memory back."""
        ...

    def close(self) -> None:
        """Release everything."""
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
            self.model = AutoModelForCausalLM.from_config(made).to(device).eval()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from transformers import AutoModelForCausalLM

        # transformers loads a checkpoint's names from files only; some architectures have others in memory.
        with tempfile.TemporaryDirectory() as folder:
            save_file(dict(weights), Path(folder, "model.safetensors"), metadata={"format": "pt"})
            self.model.config.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=self.model.dtype)
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


def unties(kind: str) -> bool:
    """Whether an engine of this kind, here, needs an output layer of its own where the model ties it.

    vLLM's CPU build packs a tied output layer once, and does not see later weights of the embedding.
    """
    return kind == "vllm" and not torch.cuda.is_available()


class VLLMEngine:
    """An engine on vLLM, in this process.

    Args:
        spec: of the model.
        gpu_memory_utilization: share of the card that weights and cache may take.
        enforce_eager: run without CUDA graphs and compilation; None: on a CPU.
        max_rows_in_flight: rows that are decoded together at most; None: vLLM's own number.
        ranks: this process's rank and their number; each has an engine of its own.

    Raises:
        UsageError: vLLM is not installed.
    """

    def __init__(
        self,
        spec: EngineSpec,
        gpu_memory_utilization: float = 0.3,
        enforce_eager: bool | None = None,
        max_rows_in_flight: int | None = None,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        from rl_modules.language.sampling.vllm import among_ranks, start_engine

        self.spec, self._is_alone = spec, ranks[1] == 1
        self.on_cuda = torch.cuda.is_available()
        eager = not self.on_cuda if enforce_eager is None else enforce_eager
        cap = {} if max_rows_in_flight is None else {"max_num_seqs": max_rows_in_flight}
        options = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True} if self.on_cuda else {}
        self.llm = start_engine(spec, enforce_eager=eager, **options, **cap, **among_ranks(*ranks))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()  # keys and values of the old weights

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        from rl_modules.language.sampling.vllm import sampling_params, to_row

        check_request(prompts, 1, settings.max_completion_length, list(settings.eos_token_id), seeds,
                      self.spec.longest, self.spec.words)  # fmt: skip
        parameters = [
            sampling_params(settings, seed, min(settings.max_completion_length, self.spec.longest - len(prompt)))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(asked, parameters, use_tqdm=False)
        return [to_row(output.outputs[0], settings) for output in outputs]

    def sleep(self) -> None:
        if self.on_cuda:
            self.llm.sleep(level=2)

    def wake(self) -> None:
        if self.on_cuda:
            self.llm.wake_up()

    def close(self) -> None:
        # vLLM ends the process group that it was started in, which beside other ranks is training's.
        if self._is_alone:
            self.llm.llm_engine.engine_core.shutdown()


def rows_of(written: Completions) -> list[Row]:
    """The rows of completions as lists."""
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
