"""The distance between two policies, estimated from the log-probabilities of samples."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import as_constant, as_float, bounded, require_choice, require_same_shape


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, estimator: str) -> Tensor:
    """Single-sample estimates of KL(π || π_ref), from samples of π.

    With d = log π_ref(a) - log π(a):

    k1 = -d               unbiased, noisy, may be negative
    k2 = d² / 2           biased, never negative
    k3 = e^d - 1 - d      unbiased, never negative

    As a *loss*, on samples of π itself, their expected gradients differ from that of the KL they estimate: the expected
    gradient of k1 is zero, that of k2 is the gradient of KL(π || π_ref), and that of k3 is the gradient of the other
    direction, KL(π_ref || π). k3 times the ratio π / π.detach() has the gradient of KL(π || π_ref) again.

    Args:
        log_prob: log π(a) in nats, any shape S. The only input that receives gradient.
        ref_log_prob: log π_ref(a) in nats, shape S.
        estimator: "k1", "k2" or "k3".

    Returns:
        One estimate per element in nats, shape S. Where e^d would be infinite, k3 is that of the largest d for which
        it is finite, and has no gradient.

    Raises:
        ValueError: shapes differ, or the estimator is unknown.

    Source: Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html); k3 in GRPO: Shao et
        al. 2024, arXiv:2402.03300, eq. 4.
    """
    require_choice("estimator", estimator, ("k1", "k2", "k3"))
    require_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    log_prob, ref_log_prob = as_float(log_prob), as_constant(ref_log_prob)
    if estimator == "k1":
        return log_prob - ref_log_prob
    difference = ref_log_prob - log_prob
    if estimator == "k2":
        return 0.5 * difference.square()
    # expm1 keeps the digits that e^d - 1 loses while the two policies are still close.
    difference = bounded(difference)
    return torch.expm1(difference) - difference
