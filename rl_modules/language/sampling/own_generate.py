"""Decoding by a model's own ``generate``, for models whose rows are more than keys and values of all their tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from rl_modules.language.architecture import transformers_model
from rl_modules.language.sampling.decode import Prompts, Record
from rl_modules.language.sampling.draw import NextToken


def generate(
    model: Any,
    prompts: Prompts,
    rule: NextToken,
    draws: Tensor,
    record: Record,
    at_once: int | None = None,
    synced_gpus: bool = False,
) -> None:
    """Makes the same draws within the model's ``generate``, at most so many rows together, part after part."""
    count = len(prompts.sources)
    for first in range(0, count, at_once or count):
        rows = range(first, min(first + (at_once or count), count))
        _generate(model, prompts.part(list(rows)), rule, draws[:, rows.start : rows.stop], record, first, synced_gpus)


def _generate(
    model: Any, prompts: Prompts, rule: NextToken, draws: Tensor, record: Record, first: int, synced_gpus: bool
) -> None:
    """Writes the rows from ``first`` on; ``generate`` creates the cache that the model needs."""
    tokens, mask = prompts.tokens[prompts.source], prompts.mask[prompts.source]
    done = torch.zeros_like(prompts.source, dtype=torch.bool)
    seen: Tensor | None = None

    def draw(input_ids: Tensor, logits: Tensor) -> Tensor:
        """Draws tokens as a logits processor: allows only the drawn token of each row."""
        nonlocal seen
        step = input_ids.shape[1] - tokens.shape[1]
        if rule.repetition_penalty != 1 and seen is None:
            seen = prompts.seen(logits.shape[-1])
        scores = rule.scores(logits, seen)
        token, log_prob = rule.draw_from(scores, draws[step])
        if seen is not None:
            seen.scatter_(-1, token.unsqueeze(-1), True)
        row = (~done).nonzero().squeeze(-1)
        done[row] = record.add(step, first + row, token[row], log_prob[row])
        if record.keeps:
            record.keep(torch.full_like(row, step), first + row, scores[row])
        return torch.full_like(logits, -torch.inf).scatter_(-1, token.unsqueeze(-1), 0.0)

    # `generate` would take settings that are not given from the model's generation config, such as penalties or EOS
    # ids.
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
    record.announce(first + torch.arange(len(done), device=done.device))
