"""How completions grow: through a cache whose rows can leave, or through the model's own ``generate``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling.draw import NextToken
from rl_modules.language.sampling.protocol import RowListener

# New tokens that the cache has room for at first; it grows by half when they are used up.
_ROOM = 64


@dataclass
class Prompts:
    """Distinct prompts, padded on the left, and which of them each row continues."""

    #: (U, S)
    tokens: Tensor
    #: (U, S) bool, false in padding
    mask: Tensor
    #: (U,)
    length: Tensor
    #: (B,) in [0, U)
    source: Tensor

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], num_generations: int, pad_token_id: int, device: torch.device
    ) -> Prompts:
        listed = [tuple(prompt) for prompt in prompts]
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(listed))}
        width = max(map(len, place))
        tokens = torch.tensor(
            [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in place], dtype=torch.int64
        )
        length = torch.tensor([len(prompt) for prompt in place], dtype=torch.int64)
        mask = torch.arange(width) >= width - length.unsqueeze(-1)
        source = torch.tensor([place[prompt] for prompt in listed], dtype=torch.int64).repeat_interleave(
            num_generations
        )
        return cls(*(x.to(device, non_blocking=True) for x in (tokens, mask, length, source)))

    @property
    def positions(self) -> Tensor:
        """A prompt's first token is at 0, however much padding comes before it; (U, S)."""
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    def seen(self, words: int) -> Tensor:
        """True for the tokens that each row's prompt has, (B, words); padding is no token."""
        seen = torch.zeros((len(self.tokens), words), dtype=torch.bool, device=self.tokens.device)
        line, column = self.mask.nonzero(as_tuple=True)
        seen[line, self.tokens[line, column]] = True
        return seen[self.source]


class Record:
    """The completions of all rows while they grow.

    Args:
        limit: of each row's length, (B,).
        stops: ids that end a completion.
        pad_token_id: what stands where nothing was drawn.
        on_ended: called with each row that has ended.
    """

    def __init__(self, limit: Tensor, stops: Tensor, pad_token_id: int, on_ended: RowListener | None = None) -> None:
        self.on_ended = on_ended
        shape = (len(limit), int(limit.max()))
        self.limit, self.stops, self.pad_token_id = limit, stops, pad_token_id
        self.tokens = torch.full(shape, pad_token_id, dtype=torch.int64, device=limit.device)
        self.log_prob = torch.zeros(shape, dtype=torch.float32, device=limit.device)
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

    def announce(self, row: Tensor) -> None:
        """Call the listener, where there is one, with these rows; they have ended."""
        if self.on_ended is None:
            return
        columns = (row, self.length[row], self.finished[row], self.tokens[row])
        for number, length, finished, tokens in zip(*(column.tolist() for column in columns), strict=True):
            self.on_ended(number, tokens[:length], finished)


@dataclass
class _Live:
    """The rows that have not ended; line i here is line i of the cache."""

    row: Tensor  # (n,) in [0, B)
    token: Tensor  # (n,) the last one drawn
    position: Tensor  # (n,) of that token
    mask: Tensor | None  # (n, S) of the prompt; None where no prompt is padded
    seen: Tensor | None  # (n, V) true for tokens that the row has; None where nobody asks

    def whole_mask(self, new: int) -> Tensor | None:
        """The prompts' masks, with ``new`` tokens more, none of them padding; (n, S + new)."""
        return None if self.mask is None else torch.nn.functional.pad(self.mask, (0, new), value=True)

    def drop(self, done: list[bool], cache: RowCache) -> None:
        """Move rows from the end into the places of those that are done: few rows move, each at most once a step."""
        left = len(done) - sum(done)
        moves = [[i for i in range(left) if done[i]], [i for i in range(left, len(done)) if not done[i]]]
        holes, movers = torch.tensor(moves, dtype=torch.int64).to(self.row.device, non_blocking=True)
        for name, lines in vars(self).items():
            if lines is not None:
                lines[holes] = lines[movers]
                setattr(self, name, lines[:left])
        cache.replace(holes, movers, left)


def decode(
    model: Any, cache: RowCache, prompts: Prompts, rule: NextToken, draws: Tensor, record: Record, synced_gpus: bool
) -> None:
    """Run each distinct prompt once, then draw token by token for the rows that have not ended.

    Args:
        model: in eval mode.
        cache: empty.
        prompts: what to continue.
        rule: how logits become a token.
        draws: uniform numbers, (steps, B).
        record: where the completions go.
        synced_gpus: keep calling the model until no rank needs it any more.
    """
    forward = _forward(model, cache)
    with cache.attention(transformers_model(model)):
        mask = None if bool(prompts.mask.all()) else prompts.mask
        logits = forward(prompts.tokens, prompts.positions, mask)[prompts.source]
        cache.expand(prompts.source, mask, room=min(_ROOM, len(draws)))
        live = _Live(
            row=torch.arange(len(prompts.source), device=logits.device),
            token=torch.empty_like(prompts.source),
            position=prompts.length[prompts.source] - 1,
            mask=mask[prompts.source] if mask is not None and cache.needs_mask else None,
            seen=prompts.seen(logits.shape[-1]) if rule.penalizes else None,
        )
        for step in itertools.count():
            live.token, log_prob = rule.draw(logits, draws[step, live.row], live.seen)
            live.position = live.position + 1
            if live.seen is not None:
                live.seen.scatter_(-1, live.token.unsqueeze(-1), True)
            # The one wait for the device per token: how many rows are left decides the next shapes.
            done = record.add(step, live.row, live.token, log_prob).tolist()
            if any(done):
                if record.on_ended is not None:
                    record.announce(live.row[torch.tensor(done, dtype=torch.bool, device=live.row.device)])
                live.drop(done, cache)
            if not len(live.row):
                break
            if synced_gpus:
                _any_rank(True, logits.device)
            logits = forward(live.token.unsqueeze(-1), live.position.unsqueeze(-1), live.whole_mask(step + 1))
    while synced_gpus and _any_rank(False, logits.device):  # Other ranks wait for this one's part of the weights.
        model(input_ids=prompts.tokens[:1, -1:], use_cache=False)


def generate(model: Any, prompts: Prompts, rule: NextToken, draws: Tensor, record: Record, synced_gpus: bool) -> None:
    """The same draws inside of the model's ``generate``, which brings whatever cache the model needs.

    Args: those of :func:`decode`.
    """
    tokens, mask = prompts.tokens[prompts.source], prompts.mask[prompts.source]
    done = torch.zeros_like(prompts.source, dtype=torch.bool)
    seen: Tensor | None = None

    def draw(input_ids: Tensor, logits: Tensor) -> Tensor:
        """A logits processor that leaves nothing but the token that we draw."""
        nonlocal seen
        step = input_ids.shape[1] - tokens.shape[1]
        if rule.penalizes and seen is None:
            seen = prompts.seen(logits.shape[-1])
        token, log_prob = rule.draw(logits, draws[step], seen)
        if seen is not None:
            seen.scatter_(-1, token.unsqueeze(-1), True)
        row = (~done).nonzero().squeeze(-1)
        done[row] = record.add(step, row, token[row], log_prob[row])
        return torch.full_like(logits, -torch.inf).scatter_(-1, token.unsqueeze(-1), 0.0)

    # Whatever the model's own generation config lacks in ours, generate would add: penalties, say, or other ends.
    network = transformers_model(model)
    own_config, network.generation_config = network.generation_config, GenerationConfig()
    config = GenerationConfig(
        max_new_tokens=len(draws),
        do_sample=False,
        eos_token_id=record.stops.tolist(),
        pad_token_id=record.pad_token_id,
        use_cache=True,
    )
    try:
        model.generate(
            input_ids=tokens,
            attention_mask=mask.long(),
            generation_config=config,
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([lambda input_ids, scores: done.clone()]),
            synced_gpus=synced_gpus,
        )
    finally:
        network.generation_config = own_config
    record.announce(torch.arange(len(done), device=done.device))


def transformers_model(model: Any) -> Any:
    """The transformers model inside of a ``peft`` model, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _forward(model: Any, cache: RowCache) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A function from tokens, positions and mask to the logits after the last token, (n, V)."""
    known = inspect.signature(transformers_model(model).forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def forward(tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        # Models without position_ids have no positions but those that follow from the mask (ALiBi).
        where = {"position_ids": positions} if "position_ids" in known else {}
        output = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **where, **options)
        return output.logits[:, -1]

    return forward


def _any_rank(value: bool, device: torch.device) -> bool:
    flag = torch.tensor(int(value), dtype=torch.int64, device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
