"""vLLM as a sampler: how it is started, and what our settings are called there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.language.models import text_config
from rl_modules.language.sampling.draw import mixed
from rl_modules.language.sampling.engine import Engine, Row, Writer, completions_of
from rl_modules.language.sampling.native import eval_mode
from rl_modules.language.sampling.protocol import Completions, RowListener, SamplingSettings
from rl_modules.language.sampling.weights import EngineSpec, Fingerprint, fingerprint, named_weights
from rl_modules.language.sharding import gathered_once, is_sharded

#: Log-probabilities of vLLM and of the model that its weights came from differ at most so much, in nats, by dtype.
_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.2}
_PROBE, _PROBE_TOKENS = 4, 4


def start_engine(spec: EngineSpec, **options: Any) -> Any:
    """VLLM's ``LLM`` for an architecture, without weights yet.

    Args:
        spec: of the model.
        options: further arguments of ``LLM``.

    Raises:
        UsageError: vLLM is not installed.
    """
    # The engine lives in this process, or an iterator over weights could not reach it. On a CPU it must not bind the
    # process's threads, which training uses too.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import LLM
    except ImportError as error:
        raise UsageError("sampler=vllm needs vLLM, which is not installed; see docs/language/sampling.md") from error
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(spec.config), encoding="utf-8")
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype=spec.config["dtype"],
            max_model_len=spec.longest, logprobs_mode="processed_logprobs", enable_prefix_caching=True,
            disable_log_stats=True, **options,
        )  # fmt: skip


def among_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """Arguments of ``LLM`` with which each of several ranks has an engine of its own, in the ranks' process group.

    Args:
        rank: of this process.
        world_size: processes.
    """
    if world_size == 1:
        return {}
    # As torchrun sets them; Lightning's own launcher leaves RANK out.
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ.setdefault(name, str(value))
    return {"distributed_executor_backend": "external_launcher"}


def sampling_params(settings: SamplingSettings, seed: int, max_tokens: int) -> Any:
    """Our settings as vLLM's ``SamplingParams``, for one row.

    Args:
        settings: how tokens are drawn.
        seed: of the row.
        max_tokens: of the row.

    Raises:
        UsageError: filters that vLLM applies in another order.
    """
    from vllm import SamplingParams

    if settings.min_p and (settings.top_p or 1) < 1:
        raise UsageError(f"min_p={settings.min_p} with top_p={settings.top_p}: vLLM applies min_p first, the native "
                         "sampler last, so that the kept tokens would differ; set one of them")  # fmt: skip
    return SamplingParams(
        n=1, logprobs=0, seed=mixed(int(seed)), temperature=settings.temperature, top_k=settings.top_k or 0,
        top_p=1.0 if settings.top_p is None else settings.top_p, min_p=settings.min_p or 0.0,
        repetition_penalty=settings.repetition_penalty, max_tokens=max_tokens,
        stop_token_ids=list(settings.eos_token_id), ignore_eos=True, detokenize=False,
    )  # fmt: skip


def to_row(output: Any, settings: SamplingSettings) -> Row:
    """VLLM's ``CompletionOutput`` as a row; at temperature 0 each choice was certain."""
    tokens = [int(token) for token in output.token_ids]
    if settings.temperature == 0:
        log_prob = [0.0] * len(tokens)
    else:
        log_prob = [float(found[token].logprob) for found, token in zip(output.logprobs, tokens, strict=True)]
    return Row(tokens, log_prob, tokens[-1] in settings.eos_token_id)


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
        self._checked = self._asleep = False
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
        """Load a model's weights, unless the engine has them.

        Raises:
            UsageError: the engine's log-probabilities are not the model's.
        """
        if self._weights == (found := fingerprint(model, version)):
            return
        self.version = version
        self.wake()
        self.engine.load_weights(named_weights(model, self.engine.spec.untied))
        self._weights = found
        if not self._checked and not is_sharded(model):
            self._checked = True
            check_engine(model, self.engine)

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
    """Compare the engine's log-probabilities with a forward pass of the model whose weights it has.

    An engine that has loaded a weight under another name, or not at all, writes text without any error.

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
    bound = _ROUNDING.get(next(model.parameters()).dtype, 1e-2)
    if not worst <= bound:
        raise UsageError(f"sampler={type(engine).__name__} differs from the model by {worst:.2g} nats per "
                         f"log-probability (rounding: {bound}): it lacks weights; take sampler=native")  # fmt: skip
