"""Sampling with the model itself: one forward pass per token, ended rows leave the batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import evaluation_mode, on
from rl_modules.language.architecture import is_sharded, max_length, text_config
from rl_modules.language.fast.grouped_attention import without_plans
from rl_modules.language.fast.held_graphs import make_room, release
from rl_modules.language.sampling.check import CACHES, cache_for, wants_graphs
from rl_modules.language.sampling.conversing import converse_natively
from rl_modules.language.sampling.decode import Decoding, Prompts, Record
from rl_modules.language.sampling.draw import NextToken, uniforms
from rl_modules.language.sampling.own_generate import generate
from rl_modules.language.sampling.protocol import Completions, RowListener, Sampler, SamplingSettings
from rl_modules.language.sampling.request import check_request, completions_from, plain_layers, rows_in_flight
from rl_modules.language.sampling.stop_strings import StopStrings
from rl_modules.language.sampling.turns import Partner
from rl_modules.language.sharding import gathered_once

if TYPE_CHECKING:
    from rl_modules.language.vision import RowImages


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    num_generations: int = 1,
    max_completion_length: int,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    seeds: Sequence[int] | Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    return_sampling_mask: bool = False,
    synced_gpus: bool = False,
    max_rows_in_flight: int | None = None,
    cache_implementation: str = "auto",
    graph_memory: float = 0.1,
    on_ended: RowListener | None = None,
    stop: StopStrings | None = None,
    images: Sequence[RowImages] | None = None,
) -> Completions:
    """Samples ``num_generations`` completions of each prompt.

    Work is avoided: equal prompts go through the model once, and their completions share what was cached (on a CPU) or
    copy it; a row that has ended leaves the batch; log-probabilities come from the logits that were sampled from. A
    row's tokens depend on its prompt and its seed, not on the other rows of the batch, except for rounding: a model's
    logits differ in the last digits between batch sizes, which can change a draw at the border between two tokens.

    The model runs in eval mode, without gradient, and in whatever precision context the caller is in. Its train mode is
    restored. Caches with a window or a state (Mamba, or sliding windows shorter than the text) can't drop rows; for
    those the model's own ``generate`` runs instead, with the same draws, and a warning says so once.

    Args:
        model: a causal language model of transformers, LoRA of ``peft`` included.
        prompts: P lists of token ids of any length from 1.
        num_generations: G, completions per prompt; B = P · G.
        max_completion_length: at most so many tokens per completion, and fewer where the model's positions run out.
        eos_token_id: the token, or each of several tokens, that ends a completion.
        pad_token_id: what fills the rows up; may be an EOS token.
        seeds: B integers, one per row; rows of one prompt need different ones to differ.
        temperature: T > 0; 0: the likeliest token always (then each log-probability is 0: the choice was certain).
        top_k: draw from the k likeliest tokens; None or 0: from all.
        top_p: draw from the likeliest tokens that reach this probability together; None: from all.
        min_p: draw from tokens with at least this fraction of the likeliest one's probability; None: from all.
        repetition_penalty: r > 0, makes tokens that the row has (prompt included) less likely if above 1.
        return_sampling_mask: also return which tokens top_k, top_p and min_p kept, where one of them is set.
        synced_gpus: True where the weights are sharded over ranks: each rank calls the model as often as the others.
        max_rows_in_flight: rows that are decoded together at most, which bounds the cache's memory; the others take
            the places of those that end. None: all, and on CUDA as many as the free memory has room for.
        cache_implementation: ``dynamic``: the cache grows with the text; ``graph`` (or ``static``): it is allocated at
            once, and on CUDA each step is replayed from a CUDA graph; ``auto``: ``graph`` on CUDA, elsewhere
            ``dynamic``. A model whose steps can't be replayed is decoded by the growing cache, and one line says why.
        graph_memory: share of the device's memory that graphs and their caches may keep from one generation to the
            next, in (0, 1]; the least recently used are freed first.
        on_ended: called with each row as it ends: its number, its token ids, and whether it finished.
        stop: texts that end a completion as an EOS token does, with the token that completes them.
        images: of each prompt; equal prompts of one object are read once. They are decoded by the growing cache.

    Raises:
        UsageError: an argument out of range, a wrong number of seeds, an empty prompt, a prompt that leaves no room for
            a token, an id outside of the vocabulary, a model with virtual tokens (prompt tuning), or on MPS.
        FloatingPointError: the model's logits are NaN.
    """
    if cache_implementation not in CACHES:
        raise UsageError(f"cache_implementation={cache_implementation!r} must be one of {', '.join(CACHES)}")
    if not 0 < graph_memory <= 1:
        raise UsageError(f"graph_memory={graph_memory} must be above 0 and at most 1, a share of the device's memory")
    rule = NextToken(temperature, top_k, top_p, min_p, repetition_penalty)
    stops = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UsageError(
            "model has virtual tokens before its prompt (prompt or prefix tuning), whose positions depend "
            "on the padding; use LoRA or another method that changes weights"
        )
    config = text_config(model.config)
    positions = max_length(config)
    check_request(prompts, num_generations, max_completion_length, stops, seeds, positions, config.vocab_size)
    device = next(model.parameters()).device
    if device.type == "mps":
        raise UsageError("model is on mps, which has no float64 for exact draws; use accelerator=cpu or a CUDA device")
    at_once = rows_in_flight(model, prompts, num_generations, max_completion_length, max_rows_in_flight, synced_gpus)
    longest = min(max(map(len, prompts)) + max_completion_length, positions)
    batch = Prompts.of(prompts, num_generations, pad_token_id, device, images)
    limits = [min(positions - batch.lengths[source], max_completion_length) for source in batch.sources]
    draws = uniforms(seeds, max(limits)).to(device, non_blocking=True)
    keeps = return_sampling_mask and rule.truncates
    record = Record(on(device, limits), on(device, stops), pad_token_id, on_ended, keeps, stop)
    with torch.no_grad(), evaluation_mode(model.modules()), without_plans(), plain_layers(model):
        kind = cache_implementation if images is None else "dynamic"
        cache = cache_for(kind, model, longest, synced_gpus, at_once, graph_memory)
        if cache is None and images is not None:
            raise UsageError(
                f"{type(model).__name__} keeps other things than keys and values of all tokens, and only those are "
                "decoded after images; take another architecture, or shorter texts than its sliding window"
            )
        if cache is None:
            generate(model, batch, rule, draws, record, at_once, synced_gpus)
        else:
            Decoding(model, cache, batch, rule, draws, record, synced_gpus).run(at_once)
        return completions_from(record, model)


class NativeSampler(Sampler):
    """The :class:`~rl_modules.language.sampling.Sampler` that decodes with the model in training itself."""

    def __init__(
        self,
        model: Any,
        max_rows_in_flight: int | None = None,
        cache_implementation: str = "auto",
        graph_memory: float = 0.1,
    ) -> None:
        self.model, self.max_rows_in_flight = model, max_rows_in_flight
        self.cache_implementation, self.graph_memory = cache_implementation, graph_memory

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        seeds: Sequence[int],
        settings: SamplingSettings,
        on_ended: RowListener | None = None,
        images: Sequence[RowImages] | None = None,
    ) -> Completions:
        whole: AbstractContextManager[None] = nullcontext()
        if sharded := is_sharded(self.model):
            whole = gathered_once(self.model)
        with whole:
            return sample(
                self.model,
                prompts,
                num_generations=num_generations,
                seeds=seeds,
                on_ended=on_ended,
                images=images,
                synced_gpus=sharded,
                max_rows_in_flight=self.max_rows_in_flight,
                cache_implementation=self.cache_implementation,
                graph_memory=self.graph_memory,
                **vars(settings),
            )

    def converse(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings, partner: Partner
    ) -> Completions | None:
        """Writes completions in turns with the keys and values of earlier turns; None: this model can't."""
        return converse_natively(
            self.model, prompts, seeds, settings, partner, self.max_rows_in_flight, self.graph_memory
        )

    def update_weights(self, model: Any, version: int = 0) -> None:
        self.model = model

    def sleep(self) -> None:
        """Frees the graphs where they would not fit beside a training step."""
        if wants_graphs(self.cache_implementation, self.model):
            make_room(self.model, self.graph_memory)

    def release(self) -> None:
        """Frees the graphs and their caches; the next call captures them again."""
        if wants_graphs(self.cache_implementation, self.model):
            release(self.model)

    def close(self) -> None:
        self.release()
