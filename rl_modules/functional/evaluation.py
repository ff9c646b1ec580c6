"""Success rates from several answers to the same question."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rl_modules.functional.checks import require_shape


def pass_at_k(num_samples: Tensor | int, num_correct: Tensor | int, k: int) -> Tensor:
    """Unbiased estimate of the probability that at least one of k answers is right, from n answers with c right ones.

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - Π_{j=0}^{k-1} (1 - c / (n - j))

    The product is computed as a sum of logarithms, so that large n do not overflow and small rates are not rounded to
    0.

    Args:
        num_samples: n, answers per question, an integer or an integer tensor of any shape S.
        num_correct: c, right ones among them, an integer or an integer tensor of shape S, at most n.
        k: at least 1, at most n. The values of tensors are checked too, which synchronises a GPU; a compiled graph
            skips this check.

    Returns:
        Probability in [0, 1], shape S; average it over questions.

    Raises:
        ValueError: shapes differ, k is below 1 or above n, or c is not in [0, n].

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k!r}.")
    samples, correct = torch.as_tensor(num_samples), torch.as_tensor(num_correct)
    if samples.ndim and correct.ndim:
        require_shape("num_correct", correct, samples.shape, "num_samples")
    device = samples.device if isinstance(num_samples, Tensor) else correct.device
    samples, correct = torch.broadcast_tensors(samples.to(device), correct.to(device))
    if not torch.compiler.is_compiling():
        if (samples < k).any():
            raise ValueError(f"k must be at most num_samples, got k = {k} with {samples.min().item()} samples.")
        if ((correct < 0) | (correct > samples)).any():
            raise ValueError("num_correct must lie between 0 and num_samples for every question.")
    remaining = samples.unsqueeze(-1) - torch.arange(k, device=device)
    # Where fewer than k answers are wrong, a factor reaches 0 (log: -inf) and some right one is sure to be drawn.
    share = (correct.unsqueeze(-1) / remaining).clamp(max=1.0)
    # expm1 is at most 0 here; abs() instead of a minus sign spares the reader a rate of "-0".
    return torch.expm1(torch.log1p(-share).sum(-1)).abs()


def cons_at_k(answers: Tensor | Sequence[Sequence[Hashable]], reference: Tensor | Sequence[Hashable], k: int) -> Tensor:
    """Whether the most frequent of the first k answers is right: self-consistency, also called maj@k.

    cons@k = [ argmax_a Σ_{j<k} [answer_j = a] = reference ]

    Ties go to the answer that was seen first.

    Args:
        answers: final answers, a tensor of shape (B, n), or B sequences of at least k hashable answers (strings, for
            instance). None and NaN mean "no answer found" and do not vote.
        reference: the right answers, a tensor of shape (B,), or B hashable ones.
        k: number of answers that vote, in [1, n].

    Returns:
        1.0 or 0.0 per question, shape (B,), float32; average it over questions.

    Raises:
        ValueError: the numbers of questions differ, or k is below 1 or above the number of answers.

    Source: Wang et al. 2023, arXiv:2203.11171, section 2; the name cons@64: DeepSeek-R1, arXiv:2501.12948.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k!r}.")
    if not (isinstance(answers, Tensor) and isinstance(reference, Tensor)):
        answers, reference = _as_numbers(answers, reference, k)
    if answers.ndim != 2:
        raise ValueError(f"answers has shape {tuple(answers.shape)}, expected 2 dimensions [B, n].")
    require_shape("reference", reference, answers.shape[:1], "answers' first dimension")
    if answers.shape[1] < k:
        raise ValueError(f"k must be at most the number of answers, got k = {k} with {answers.shape[1]} answers.")
    answers = answers[:, :k]
    votes = (answers.unsqueeze(-1) == answers.unsqueeze(-2)).sum(-1)
    # argmax returns the first of equals, and NaN equals nothing, not even itself: it has no votes.
    winner = answers.gather(-1, votes.argmax(-1, keepdim=True)).squeeze(-1)
    return (winner == reference).float()


def _as_numbers(
    answers: Tensor | Sequence[Sequence[Hashable]], reference: Tensor | Sequence[Hashable], k: int
) -> tuple[Tensor, Tensor]:
    """Give each distinct answer a number, and None the number NaN, which equals nothing."""
    rows = answers.tolist() if isinstance(answers, Tensor) else [list(row) for row in answers]
    targets = reference.tolist() if isinstance(reference, Tensor) else list(reference)
    if len(rows) != len(targets):
        raise ValueError(f"reference has {len(targets)} elements, expected {len(rows)}, one per question in answers.")
    shortest = min((len(row) for row in rows), default=k)
    if shortest < k:
        raise ValueError(f"k must be at most the number of answers, got k = {k} with {shortest} answers.")
    numbers: dict[Hashable, float] = {None: torch.nan}

    def number(answer: Hashable) -> float:
        # A NaN of the caller's is its own key only if it is the same object; here it must never match.
        return torch.nan if answer != answer else numbers.setdefault(answer, float(len(numbers)))

    table = [[number(answer) for answer in row[:k]] for row in rows]
    return torch.tensor(table, dtype=torch.float64).view(len(rows), k), torch.tensor(
        [number(target) for target in targets], dtype=torch.float64
    )
