"""vLLM as an engine: its start, and the translation of sampling settings."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import is_sharded, max_length, text_config, transformers_model
from rl_modules.language.sampling.draw import mixed
from rl_modules.language.sampling.engine import check_engine
from rl_modules.language.sampling.protocol import Completions, RowListener, Sampler, SamplingSettings
from rl_modules.language.sampling.request import check_request
from rl_modules.language.sampling.rows import Row, completions_of
from rl_modules.language.sampling.weights import Fingerprint, engine_config, fingerprint, named_weights

#: What loads weights in vLLM's workers.
LOADING = "rl_modules.language.serving.Loading"
#: Words of a vocabulary, or a top k, up to which log-probabilities of so many tokens are asked for.
_FEW = 1024


def require_vllm(argument: str) -> None:
    """Raises where vLLM is not installed, without the seconds that its import takes."""
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        raise UsageError(
            f"{argument} needs a package that is not installed: pip install vllm (the build for a CPU: "
            "docs/language/sampling.md); or take native, the model's own decoding"
        )


class VLLMSampler(Sampler):
    """A :class:`~rl_modules.language.sampling.Sampler` on vLLM in this process."""

    def __init__(
        self,
        model: Any,
        gpu_memory_utilization: float = 0.3,
        enforce_eager: bool | None = None,
        max_rows_in_flight: int | None = None,
        ranks: tuple[int, int, int] = (0, 1, 0),
    ) -> None:
        network = transformers_model(model)
        self.longest, self.words = max_length(network.config), text_config(network.config).vocab_size
        self.device, self._is_alone = next(model.parameters()).device, ranks[1] == 1
        self.on_cuda = torch.cuda.is_available()
        eager = not self.on_cuda if enforce_eager is None else enforce_eager
        cap = {} if max_rows_in_flight is None else {"max_num_seqs": max_rows_in_flight}
        options = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True} if self.on_cuda else {}
        options |= {"enforce_eager": eager, "max_model_len": self.longest, **cap, **among_ranks(*ranks)}
        #: Whether the engine returns the tokens that filters kept: from vLLM 0.28 on, with its second model runner.
        self.returns_masks = True
        try:
            self.llm = start_engine(engine_config(network), return_sampling_mask=True, **options)
        except (TypeError, ValueError):
            self.returns_masks = False
            self.llm = start_engine(engine_config(network), max_logprobs=-1, **options)
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
        rows = self.generate([prompt for prompt in prompts for _ in range(num_generations)], seeds, settings)
        for number, row in enumerate(rows if on_ended is not None else ()):
            on_ended(number, row.tokens, row.finished)  # type: ignore[misc]
        return completions_of(rows, settings.pad_token_id, self.device, [self.version] * len(rows))

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        """One completion per prompt; the interface of an engine, for its check."""
        from vllm import SamplingParams

        most, stops = settings.max_completion_length, list(settings.eos_token_id)
        check_request(prompts, 1, most, stops, seeds, self.longest, self.words)
        options = self.support_options(settings)
        parameters = [
            SamplingParams(**sampling_fields(settings, seed, min(most, self.longest - len(prompt)), options))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(asked, parameters, use_tqdm=False)
        rows = [to_row(output.outputs[0], settings) for output in outputs]
        return rows if settings.stop is None else [settings.stop.cut(row) for row in rows]

    def support_options(self, settings: SamplingSettings) -> dict[str, int]:
        """Parameters with which the engine returns the kept tokens: a mask, or all tokens' log-probabilities."""
        most = min(settings.top_k or self.words, self.words)
        if not settings.return_sampling_mask:
            return {}
        if self.returns_masks:
            return {"top_k": most}
        return {"logprobs": most} if most <= _FEW else {}

    def update_weights(self, model: Any, version: int = 0) -> None:
        """Loads a model's weights, unless the engine has them."""
        if self._weights == (found := fingerprint(model, version)) and not self._forgotten:
            return
        self.version = version
        self.wake()
        self.llm.collective_rpc("load_weights_of", args=(named_weights(model),))
        self.llm.reset_prefix_cache()  # keys and values of the old weights
        self._weights, self._forgotten = found, False
        if not self._checked and not is_sharded(model):
            self._checked = True
            check_engine(model, self, "vllm")

    def forget_weights(self) -> None:
        self._forgotten = True

    def sleep(self) -> None:
        if not self._asleep:
            if self.on_cuda:
                self.llm.sleep(level=2)
            self._asleep, self._weights = True, None

    def wake(self) -> None:
        if self._asleep:
            if self.on_cuda:
                self.llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        # vLLM destroys the process group in which it was started; with several ranks that is training's group.
        if self._is_alone:
            self.llm.llm_engine.engine_core.shutdown()


def start_engine(config: dict[str, Any], **options: Any) -> Any:
    """VLLM's ``LLM`` for an architecture, without weights yet."""
    # The engine runs in this process, because it could not receive an iterator over weights in another one. On a CPU it
    # must not bind the process's threads, which training uses too.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config["dtype"],
            logprobs_mode="processed_logprobs",
            worker_extension_cls=LOADING,
            enable_prefix_caching=True,
            disable_log_stats=True,
            **options,
        )


def among_ranks(rank: int, world_size: int, local_rank: int) -> dict[str, Any]:
    """Arguments of ``LLM`` with which each of several ranks has an engine of its own, in the ranks' process group."""
    if world_size == 1:
        return {}
    # As torchrun sets them; Lightning's own launcher leaves RANK out, and SLURM's environment LOCAL_RANK.
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size)):
        os.environ.setdefault(name, str(value))
    return {"distributed_executor_backend": "external_launcher"}


def sampling_fields(
    settings: SamplingSettings, seed: int, max_tokens: int, options: dict[str, int] | None = None
) -> dict[str, Any]:
    """Our settings as the fields of vLLM's ``SamplingParams``, for one row."""
    if settings.min_p and (settings.top_p or 1) < 1:
        raise UsageError(
            f"min_p={settings.min_p} with top_p={settings.top_p}: vLLM applies min_p first, the native "
            "sampler last, so that the kept tokens would differ; set one of them"
        )
    return {
        "n": 1,
        "seed": mixed(int(seed)),
        "temperature": settings.temperature,
        "logprobs": 0,
        "top_k": settings.top_k or 0,
        **(options or {}),
        "top_p": 1.0 if settings.top_p is None else settings.top_p,
        "min_p": settings.min_p or 0.0,
        "repetition_penalty": settings.repetition_penalty,
        "max_tokens": max_tokens,
        "stop_token_ids": list(settings.eos_token_id),
        "ignore_eos": True,
        "detokenize": False,
    }


def to_row(output: Any, settings: SamplingSettings) -> Row:
    """VLLM's ``CompletionOutput`` as a row; at temperature 0 each choice was certain."""
    tokens = [int(token) for token in output.token_ids]
    if settings.temperature == 0:
        log_prob = [0.0] * len(tokens)
    else:
        log_prob = [float(found[token].logprob) for found, token in zip(output.logprobs, tokens, strict=True)]
    mask, kept = getattr(output, "sampling_mask", None), None
    if settings.return_sampling_mask and mask is not None:
        kept = [[int(token) for token in ids] for ids in mask.token_ids]
    elif settings.return_sampling_mask and len(output.logprobs[0]) > 1:
        kept = [[int(t) for t, x in found.items() if x.logprob > -math.inf] for found in output.logprobs]
    return Row(tokens, log_prob, tokens[-1] in settings.eos_token_id, kept)
