"""From prompts to completions with their log-probabilities: the one sampler of all language algorithms."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from rl_modules.errors import UsageError
from rl_modules.language.drawing import NextToken, uniforms
from rl_modules.language.models import max_length
from rl_modules.language.row_cache import RowCache

log = logging.getLogger(__name__)

# New tokens that the cache has room for at first; it grows by half when they are used up.
_ROOM = 64


@dataclass(frozen=True)
class Completions:
    """What was sampled; row ``p * num_generations + g`` is prompt p's completion g. L is the longest one's length."""

    #: (B, L) int64, padded on the right; the EOS token is part of a completion.
    tokens: Tensor
    #: (B, L) float32, in nats: of each token under the distribution it was drawn from, filters included; 0 in padding.
    log_prob: Tensor
    #: (B,) int64: tokens of each row, EOS included.
    length: Tensor
    #: (B,) bool: whether the row ended by an EOS token, not by the limit on its length.
    finished: Tensor

    @property
    def mask(self) -> Tensor:
        """True where a token counts, (B, L) bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length.unsqueeze(-1)

    @property
    def finish_reason(self) -> list[str]:
        """``"stop"`` for an EOS token, ``"length"`` for a row that was cut off, per row."""
        return ["stop" if finished else "length" for finished in self.finished.tolist()]


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
    synced_gpus: bool = False,
) -> Completions:
    """Sample ``num_generations`` completions of each prompt.

    Work is avoided: equal prompts go through the model once, and each row's cache is a copy of its prompt's; a row that
    has ended leaves the batch; log-probabilities come from the logits that were sampled from. A row's tokens depend on
    its prompt and its seed, not on the rows beside it (up to the arithmetic: a model's logits differ in the last digits
    between batch sizes, and a draw that falls on the border between two tokens can go the other way).

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
        synced_gpus: True where the weights are sharded over ranks: each rank calls the model as often as the others.

    Raises:
        UsageError: an argument out of range, an empty prompt, a prompt that leaves no room for a token, an id outside
            of the vocabulary, a wrong number of seeds.
        FloatingPointError: the model's logits are NaN.
    """
    rule = NextToken(temperature, top_k, top_p, min_p, repetition_penalty)
    stops = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    config = model.config.get_text_config(decoder=True)
    _check_counts(len(prompts), num_generations, max_completion_length, stops, seeds)
    _check_prompts(prompts, max_length(config), config.vocab_size)
    batch = _Prompts.of(prompts, num_generations, pad_token_id, next(model.parameters()).device)
    limit = (max_length(config) - batch.length[batch.source]).clamp(max=max_completion_length)
    draws = uniforms(seeds, int(limit.max())).to(limit.device)
    record = _Record(limit, torch.tensor(stops, device=limit.device), pad_token_id)
    cache = (
        None
        if _has_virtual_tokens(model)
        else RowCache.for_model(config, int((batch.length[batch.source] + limit).max()))
    )
    with torch.no_grad(), eval_mode(model):
        if cache is not None:
            _decode(model, cache, batch, rule, draws, record, synced_gpus)
        else:
            _warn_once(f"{type(model).__name__} keeps other things than keys and values of all tokens, so sampling "
                       "goes through its generate(): prompts are not shared, rows that have ended stay")  # fmt: skip
            _generate(model, batch, rule, draws, record, synced_gpus)
    return record.completions()


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Dropout is off inside; each submodule is then as it was before (a frozen part may have been in eval mode)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass
class _Prompts:
    """Distinct prompts, padded on the left, and which of them each row continues."""

    tokens: Tensor  # (U, S)
    mask: Tensor  # (U, S) bool
    length: Tensor  # (U,)
    source: Tensor  # (B,) in [0, U)

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], num_generations: int, pad_token_id: int, device: torch.device
    ) -> _Prompts:
        listed = [tuple(prompt) for prompt in prompts]
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(listed))}
        width = max(map(len, place))
        tokens = torch.tensor([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in place])
        length = torch.tensor([len(prompt) for prompt in place])
        mask = torch.arange(width) >= width - length.unsqueeze(-1)
        source = torch.tensor([place[prompt] for prompt in listed]).repeat_interleave(num_generations)
        return cls(tokens.to(device), mask.to(device), length.to(device), source.to(device))

    @property
    def padded(self) -> bool:
        return not bool(self.mask.all())

    @property
    def positions(self) -> Tensor:
        """A prompt's first token is at 0, however much padding comes before it; (U, S)."""
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    def seen(self, words: int) -> Tensor:
        """True for the tokens that a prompt has, (U, words); padding is no token."""
        seen = torch.zeros((len(self.tokens), words), dtype=torch.bool, device=self.tokens.device)
        line, column = self.mask.nonzero(as_tuple=True)
        seen[line, self.tokens[line, column]] = True
        return seen


class _Record:
    """The completions while they grow."""

    def __init__(self, limit: Tensor, stops: Tensor, pad_token_id: int) -> None:
        shape = (len(limit), int(limit.max()))
        self.limit, self.stops, self.pad_token_id = limit, stops, pad_token_id
        self.tokens = torch.full(shape, pad_token_id, device=limit.device)
        self.log_prob = torch.zeros(shape, device=limit.device)
        self.length = torch.zeros_like(limit)
        self.finished = torch.zeros_like(limit, dtype=torch.bool)

    def add(self, step: int, row: Tensor, token: Tensor, log_prob: Tensor) -> Tensor:
        """Write one token to each of these rows; returns which of them have now had their last one."""
        ended = torch.isin(token, self.stops)
        self.tokens[row, step] = token
        self.log_prob[row, step] = log_prob
        self.length[row] = step + 1
        self.finished[row] = ended
        return ended | (self.limit[row] == step + 1)

    def completions(self) -> Completions:
        if bool(self.log_prob.isnan().any()):
            raise FloatingPointError("the model's logits are NaN: training has diverged, or float16 has overflown")
        longest = int(self.length.max())
        tokens, log_prob = self.tokens[:, :longest].clone(), self.log_prob[:, :longest].clone()
        return Completions(tokens, log_prob, self.length, self.finished)


@dataclass
class _Live:
    """The rows that have not ended; line i here is line i of the cache."""

    row: Tensor  # (n,) in [0, B)
    token: Tensor  # (n,) the last one drawn
    position: Tensor  # (n,) of that token
    mask: Tensor | None  # (n, S) of the prompt; None if no prompt is padded
    seen: Tensor | None  # (n, V)

    def drop(self, done: Tensor, cache: RowCache) -> None:
        """Move rows from the end into the places of those that are done: each row moves at most once in its life."""
        left = len(done) - int(done.sum())
        holes = done[:left].nonzero().squeeze(-1)
        movers = (~done[left:]).nonzero().squeeze(-1) + left
        for name, lines in vars(self).items():
            if lines is not None:
                lines[holes] = lines[movers]
                setattr(self, name, lines[:left])
        cache.replace(holes, movers, left)


def _decode(
    model: Any, cache: RowCache, prompts: _Prompts, rule: NextToken, draws: Tensor, record: _Record, synced_gpus: bool
) -> None:
    """Run each distinct prompt once, then draw token by token for the rows that have not ended."""
    source = prompts.source
    padded = prompts.padded
    logits = _next_logits(model, cache, prompts.tokens, prompts.positions, prompts.mask if padded else None)[source]
    cache.expand(source, prompts.tokens.shape[1] + min(_ROOM, len(draws)))
    live = _Live(
        row=torch.arange(len(source), device=source.device),
        token=torch.empty_like(source),
        position=prompts.length[source] - 1,
        mask=prompts.mask[source] if padded else None,
        seen=prompts.seen(logits.shape[-1])[source] if rule.penalizes else None,
    )
    for step in itertools.count():
        if len(live.row):
            live.token, log_prob = rule.draw(logits, draws[step, live.row], live.seen)
            live.position = live.position + 1
            if live.seen is not None:
                live.seen.scatter_(-1, live.token.unsqueeze(-1), True)
            done = record.add(step, live.row, live.token, log_prob)
            if bool(done.any()):
                live.drop(done, cache)
        if not _any_rank(len(live.row) > 0, source.device, synced_gpus):
            return
        if not len(live.row):  # Other ranks wait for our part of the weights.
            model(input_ids=prompts.tokens[:1, -1:], use_cache=False)
            continue
        mask = None if live.mask is None else torch.nn.functional.pad(live.mask, (0, step + 1), value=True)
        logits = _next_logits(model, cache, live.token.unsqueeze(-1), live.position.unsqueeze(-1), mask)


def _next_logits(model: Any, cache: RowCache, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """The logits behind the last of these tokens, (n, V)."""
    options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
    taken = _arguments(_network(model).forward.__func__)
    options = {name: value for name, value in options.items() if name in taken}
    return model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options).logits[:, -1]


def _generate(
    model: Any, prompts: _Prompts, rule: NextToken, draws: Tensor, record: _Record, synced_gpus: bool
) -> None:
    """The same draws inside of the model's own ``generate``, which brings whatever cache the model needs."""
    tokens, mask = prompts.tokens[prompts.source], prompts.mask[prompts.source]
    done = torch.zeros_like(prompts.source, dtype=torch.bool)
    seen: Tensor | None = None

    def draw(input_ids: Tensor, logits: Tensor) -> Tensor:
        """A logits processor: leaves nothing but the token that we draw."""
        nonlocal seen
        step = input_ids.shape[1] - tokens.shape[1]
        if rule.penalizes:
            seen = prompts.seen(logits.shape[-1])[prompts.source] if seen is None else seen
        token, log_prob = rule.draw(logits, draws[step], seen)
        if seen is not None:
            seen.scatter_(-1, token.unsqueeze(-1), True)
        row = (~done).nonzero().squeeze(-1)
        done[row] = record.add(step, row, token[row], log_prob[row])
        return torch.full_like(logits, -torch.inf).scatter_(-1, token.unsqueeze(-1), 0.0)

    network = _network(model)
    own_config, network.generation_config = network.generation_config, GenerationConfig()
    try:
        model.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=len(draws),
                do_sample=False,
                eos_token_id=record.stops.tolist(),
                pad_token_id=record.pad_token_id,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([lambda input_ids, scores: done.clone()]),
            synced_gpus=synced_gpus,
        )
    finally:
        network.generation_config = own_config


def _network(model: Any) -> Any:
    """The transformers model inside of a ``peft`` model, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@functools.cache
def _arguments(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _has_virtual_tokens(model: Any) -> bool:
    """Whether a ``peft`` method such as prompt tuning puts tokens of its own before the prompt."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def _any_rank(value: bool, device: torch.device, synced_gpus: bool) -> bool:
    if not synced_gpus:
        return value
    flag = torch.tensor(int(value), device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _check_counts(
    prompts: int, num_generations: int, max_completion_length: int, stops: list[int], seeds: Sequence[int] | Tensor
) -> None:
    if prompts == 0:
        raise UsageError("prompts is empty; give at least one list of token ids")
    if num_generations < 1:
        raise UsageError(f"num_generations={num_generations} must be 1 or more")
    if max_completion_length < 1:
        raise UsageError(f"max_completion_length={max_completion_length} must be 1 or more")
    if not stops:
        raise UsageError("eos_token_id is empty; give at least one token that ends a completion")
    if len(seeds) != prompts * num_generations:
        rows = prompts * num_generations
        raise UsageError(f"seeds has {len(seeds)} numbers, but {prompts} prompts and num_generations={num_generations} "
                         f"make {rows} rows; give one seed per row")  # fmt: skip


def _check_prompts(prompts: Sequence[Sequence[int]], longest: int, words: int) -> None:
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UsageError(f"prompt {i} is empty; give it at least one token, such as the tokenizer's BOS")
        if len(prompt) >= longest:
            raise UsageError(f"prompt {i} has {len(prompt)} tokens, the model takes {longest} with at least one of "
                             "them new; shorten the prompt, or leave it out")  # fmt: skip
        if not 0 <= min(prompt) <= max(prompt) < words:
            raise UsageError(f"prompt {i} has a token id outside of [0, {words}), the model's vocabulary; "
                             "use the tokenizer that the model was trained with")  # fmt: skip
