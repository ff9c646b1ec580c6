"""One completion on the host, between samplers and :class:`~rl_modules.language.sampling.protocol.Completions`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.protocol import Completions
from rl_modules.language.sampling.support import kept_lists, packed_lists


@dataclass(frozen=True)
class Row:
    """One completion: its token ids, their log-probabilities in nats, and whether an EOS token ended it."""

    tokens: list[int]
    log_prob: list[float]
    finished: bool
    #: The tokens that filters kept where each was drawn; None: not asked for, or not known.
    kept: list[list[int]] | None = None


def rows_of(written: Completions) -> list[Row]:
    """Returns the rows of completions as lists."""
    columns = (written.tokens, written.log_prob, written.length, written.finished)
    kept: Sequence[list[list[int]] | None] = kept_lists(written) or [None] * len(written.length)
    return [
        Row(tokens[:n], log_prob[:n], finished, ids and ids[:n])
        for tokens, log_prob, n, finished, ids in zip(*(column.tolist() for column in columns), kept, strict=True)
    ]


def completions_of(rows: Sequence[Row], pad_token_id: int, device: Any, versions: Sequence[int] | None) -> Completions:
    """Completions on a device from rows, padded on the right."""
    length = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
    if not int(length.min()):
        raise UsageError(
            f"row {int(length.argmin())} of the sampler's answer has no tokens; a completion has at least one"
        )
    width = int(length.max())
    tokens = torch.tensor([row.tokens + [pad_token_id] * (width - len(row.tokens)) for row in rows], dtype=torch.int64)
    log_prob = torch.tensor([row.log_prob + [0.0] * (width - len(row.log_prob)) for row in rows], dtype=torch.float32)
    finished = torch.tensor([row.finished for row in rows], dtype=torch.bool)
    version = None if versions is None else torch.tensor(list(versions), dtype=torch.int64)
    found = [row.kept for row in rows if row.kept is not None]
    kept, count = packed_lists(found, width) if len(found) == len(rows) else (None, None)
    columns = {
        "tokens": tokens,
        "log_prob": log_prob,
        "length": length,
        "finished": finished,
        "version": version,
        "kept": kept,
        "kept_count": count,
    }
    on_device: dict[str, Any] = {name: None if x is None else x.to(device) for name, x in columns.items()}
    return Completions(**on_device)
