"""Texts that end a completion as an EOS token does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_modules.language.sampling.rows import Row

#: Tokens decoded before those that a text can have: a decoder may change the first of them, or have a part of a
#: character there.
_BEFORE = 5


@dataclass(frozen=True)
class StopStrings:
    """Texts at which completions end, however they are divided into tokens."""

    texts: tuple[str, ...]
    tokenizer: Any

    @property
    def _longest(self) -> int:
        """Tokens that are decoded together; one has at least a byte."""
        return max(len(text.encode()) for text in self.texts) + _BEFORE

    def end(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the tokens of each row spell one of the texts; before their last token none did."""
        last = [list(row[-self._longest :]) for row in rows]
        spelled = self.tokenizer.batch_decode(last, clean_up_tokenization_spaces=False)
        return [any(text in found for text in self.texts) for found in spelled]

    def end_at(self, tokens: Tensor, row: Tensor, step: Tensor | int) -> Tensor:
        """The same of the rows of ``tokens`` [B, L] whose last one is at ``step``, [n] bool."""
        last = torch.as_tensor(step, device=tokens.device).expand(len(row))
        columns = last.unsqueeze(-1) - torch.arange(self._longest - 1, -1, -1, device=tokens.device)
        found = tokens[row.unsqueeze(-1), columns.clamp(min=0)].tolist()
        lengths = (last + 1).clamp(max=self._longest).tolist()
        ended = self.end([ids[-n:] for ids, n in zip(found, lengths, strict=True)])
        return torch.tensor(ended, dtype=torch.bool, device=tokens.device)

    def cut(self, row: Row) -> Row:
        """A completion of an engine that does not end at the texts, up to the token that ends one."""
        ended = self.end([row.tokens[: n + 1] for n in range(len(row.tokens))])
        if not any(ended):
            return row
        n = ended.index(True) + 1
        return replace(
            row, tokens=row.tokens[:n], log_prob=row.log_prob[:n], finished=True, kept=row.kept and row.kept[:n]
        )
