"""The loss of GRPO and its relatives: four pieces (ratio, surrogate, KL, reduction) and their composition.

The sum of the token losses is divided

* ``grpo``: by each sequence's own length, then by the number of sequences (DeepSeekMath, arXiv:2402.03300, eq. 3);
* ``bnpo``: by the counted tokens of this micro-batch (the token mean of most RLHF code);
* ``dapo``: by the counted tokens of the whole accumulated, global batch (DAPO, arXiv:2503.14476, eq. 8);
* ``dr_grpo``: by sequences times max_completion_length, a constant (Dr. GRPO, arXiv:2503.20783).

These four clip the ratio as PPO does. Two more have a surrogate of their own:

* ``cispo``: a clipped importance weight without gradient on log π, reduced as ``dapo`` (MiniMax-M1, arXiv:2506.13585);
* ``sapo``: a sigmoid of the ratio in place of the clip, reduced as ``grpo`` (SAPO, arXiv:2511.20347).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    bounded,
    require_choice,
    require_ndim,
    require_number,
    require_positive,
    require_same_shape,
    require_shape,
    require_tensors,
)
from rl_modules.functional.kl import kl_estimate
from rl_modules.functional.reductions import masked_mean

_LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo")
_UNCLIPPED = ("cispo", "sapo")


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    ref_log_prob: Tensor | None = None,
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = False,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items_in_batch: int | Tensor | None = None,
    importance_weight: Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> Tensor:
    """The policy loss of GRPO, BNPO, DAPO, Dr. GRPO, CISPO, SAPO, and with sequence-level ratios of GSPO.

    ℓ_t = w_t s_t + β KL_t [ρ_t]
    s_t = -min(min(ρ_t, δ) A, clip(ρ_t, 1 - ε, 1 + ε_high) A)         "grpo", "bnpo", "dapo", "dr_grpo"
    s_t = -sg(min(ρ_t, ε_high)) A log π(y_t)                          "cispo"; sg: without gradient
    s_t = -σ(τ (ρ_t - 1)) 4 / τ A,   τ = τ_pos if A > 0 else τ_neg    "sapo"
    L   = Σ ℓ_t / normaliser,   the normaliser as listed at the top of this module

    ρ_t = exp(log π - log π_old) per token ("token"), or s = exp of that log-ratio's mean over the sequence's counted
    tokens ("sequence", GSPO), or sg(s) π / sg(π), which is s in value and has the token's own gradient
    ("sequence_token", GSPO-token: where tokens of a sequence have advantages of their own). A log-ratio whose
    exponential would be infinite counts as the largest finite one, and receives no gradient.

    Args:
        log_prob: log π(y_t) in nats, shape (B, L). The only input that receives gradient.
        old_log_prob: the same under the policy that sampled, shape (B, L).
        advantage: A, shape (B,), or (B, L) where tokens differ.
        mask: true (nonzero) where a token counts, shape (B, L). Other values may be arbitrary, including NaN.
        epsilon: ε, the clip range below 1 (and above, unless epsilon_high is given), at least 0.
        epsilon_high: ε_high, the clip range above 1, at least 0; None: ε. For "cispo" it is the bound on the ratio
            itself, not 1 + ε_high, and must be given (ScaleRL, arXiv:2510.13786: 5).
        delta: δ, an upper bound on the ratio that also holds for negative advantages, above 0; None: none. For the
            four clipped loss types only.
        beta: β, weight of the KL, at least 0. At 0 ref_log_prob is ignored.
        ref_log_prob: log π_ref(y_t) in nats, shape (B, L).
        kl_estimator: "k1", "k2" or "k3", see ``kl_estimate`` for what their gradients are.
        use_bias_correction_kl: multiply the estimate by ρ, gradient included: with k3 its expected gradient is then
            that of KL(π || π_ref).
        loss_type: "grpo", "bnpo", "dapo", "dr_grpo", "cispo" or "sapo".
        importance_sampling_level: "token", "sequence" or "sequence_token".
        max_completion_length: tokens; the constant normaliser of "dr_grpo", which needs it. Others ignore it.
        num_items_in_batch: counted tokens of the whole accumulated batch, divided by the number of processes (whose
            gradients are averaged), at least 1. Read by "dapo" and "cispo" only: the sum over micro-batches is then the
            loss of the full batch. None: the tokens of this call.
        importance_weight: w, a plain factor on each token's policy term, shape (B, L), for instance from
            ``importance_weights``; None: all 1. The KL term is not weighted.
        sapo_temperature_pos: τ_pos, above 0; decay rate of the "sapo" gate with the distance of ρ from 1, for positive
            advantages.
        sapo_temperature_neg: τ_neg, above 0, the same for other advantages.

    Returns:
        Scalar to minimise. A row without counted tokens is a sequence with loss 0 under "grpo", "dr_grpo" and
        "sapo", and is ignored under the other three. For "grpo", "bnpo", "dr_grpo" and "sapo" the caller averages over
        micro-batches.

    Raises:
        ValueError: shapes do not fit, a number is out of range, a word is unknown, beta is set without
            ref_log_prob, "dr_grpo" comes without max_completion_length, "cispo" without epsilon_high, or "cispo" or
            "sapo" with delta.

    Source: the papers listed at the top of this module; ε_high: DAPO, eq. 8; sequence ratios: GSPO, arXiv:2507.18071,
        eqs. 7 and 14; δ: INTELLECT-2, arXiv:2505.07291; corrected KL: DeepSeek-V3.2, arXiv:2512.02556. Equals TRL 1.16.
    """
    require_choice("loss_type", loss_type, _LOSS_TYPES)
    require_choice("importance_sampling_level", importance_sampling_level, ("token", "sequence", "sequence_token"))
    require_choice("kl_estimator", kl_estimator, ("k1", "k2", "k3"))
    require_number("epsilon", epsilon)
    require_number("beta", beta)
    require_ndim("log_prob", log_prob, 2, "[B, L]")
    require_same_shape(log_prob=log_prob, old_log_prob=old_log_prob, mask=mask)
    require_tensors(advantage=advantage)
    if advantage.ndim == 1:
        require_shape("advantage", advantage, log_prob.shape[:1], "log_prob's first dimension")
        advantage = advantage.unsqueeze(-1)
    else:
        require_same_shape(log_prob=log_prob, advantage=advantage)
    if epsilon_high is None:
        if loss_type == "cispo":
            raise ValueError(
                "epsilon_high must be given for loss_type 'cispo', the bound on the ratio itself; got None."
            )
        epsilon_high = epsilon
    require_number("epsilon_high", epsilon_high)
    if delta is not None:
        if loss_type in _UNCLIPPED:
            raise ValueError(f"delta must be None for loss_type {loss_type!r}, which does not clip; got {delta!r}.")
        require_positive("delta", delta)
    if importance_weight is not None:
        require_same_shape(log_prob=log_prob, importance_weight=importance_weight)
    require_positive("sapo_temperature_pos", sapo_temperature_pos)
    require_positive("sapo_temperature_neg", sapo_temperature_neg)
    if beta:
        if ref_log_prob is None:
            raise ValueError(f"ref_log_prob is None, but beta = {beta} asks for a KL penalty towards the reference.")
        require_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    if loss_type == "dr_grpo" and (max_completion_length is None or max_completion_length < 1):
        raise ValueError(
            "max_completion_length must be a number of tokens of at least 1 for loss_type 'dr_grpo', "
            f"got {max_completion_length!r}."
        )
    # A tensor is not looked at: that would wait for the GPU.
    if isinstance(num_items_in_batch, int | float) and num_items_in_batch < 1:
        raise ValueError(f"num_items_in_batch must be at least 1, got {num_items_in_batch!r}.")

    counts = mask.bool()
    # Padding is neutralised before any exp: it may hold anything, and 0 * inf in the backward pass is NaN.
    log_prob = torch.where(counts, as_float(log_prob), 0.0)
    old_log_prob = torch.where(counts, as_constant(old_log_prob), 0.0)
    ratio = importance_ratio(log_prob - old_log_prob, counts, importance_sampling_level)
    advantage = as_constant(advantage)
    if advantage.shape == counts.shape:
        advantage = torch.where(counts, advantage, 0.0)
    if loss_type == "cispo":
        token_loss = -ratio.detach().clamp(max=epsilon_high) * advantage * log_prob
    elif loss_type == "sapo":
        token_loss = _soft_surrogate(ratio, advantage, sapo_temperature_pos, sapo_temperature_neg)
    else:
        token_loss = _clipped_surrogate(ratio, advantage, epsilon, epsilon_high, delta)
    if importance_weight is not None:
        token_loss = token_loss * torch.where(counts, as_constant(importance_weight), 0.0)
    if ref_log_prob is not None and beta:
        kl = kl_estimate(log_prob, torch.where(counts, as_constant(ref_log_prob), 0.0), kl_estimator)
        token_loss = token_loss + beta * (kl * ratio if use_bias_correction_kl else kl)
    return _reduce(token_loss.expand(counts.shape), counts, loss_type, max_completion_length, num_items_in_batch)


def importance_ratio(log_ratio: Tensor, counts: Tensor, level: str) -> Tensor:
    """ρ, shape (B, L) per token or (B, 1) per sequence; exponentials of means, so that long answers do not overflow."""
    if level == "sequence":
        log_ratio = masked_mean(log_ratio, counts, dim=-1).unsqueeze(-1)
    elif level == "sequence_token":
        mean = masked_mean(log_ratio.detach(), counts, dim=-1).unsqueeze(-1)
        log_ratio = mean + log_ratio - log_ratio.detach()
    return bounded(log_ratio).exp()


def _clipped_surrogate(
    ratio: Tensor, advantage: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> Tensor:
    """-min(min(ρ, δ) A, clip(ρ, 1 - ε, 1 + ε_high) A), per element."""
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(bounded * advantage, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage)


def _soft_surrogate(ratio: Tensor, advantage: Tensor, temperature_pos: float, temperature_neg: float) -> Tensor:
    """-σ(τ (ρ - 1)) 4 / τ A, per element: the gradient is that of ρ A at ρ = 1 and fades on both sides."""
    positive = (advantage > 0).to(ratio.dtype)
    temperature = temperature_pos * positive + temperature_neg * (1 - positive)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage


def _reduce(
    token_loss: Tensor,
    counts: Tensor,
    loss_type: str,
    max_completion_length: int | None,
    num_items_in_batch: int | Tensor | None,
) -> Tensor:
    """The scalar of a (B, L) loss, divided as the module's docstring lists."""
    if loss_type in ("grpo", "sapo"):
        return masked_mean(token_loss, counts, dim=-1).mean()
    if loss_type == "bnpo" or (loss_type in ("dapo", "cispo") and num_items_in_batch is None):
        return masked_mean(token_loss, counts)
    total = torch.where(counts, token_loss, 0.0).sum()
    if loss_type == "dr_grpo":
        assert max_completion_length is not None, "grpo_loss has refused this already"
        return total / (len(token_loss) * max_completion_length)
    items = torch.as_tensor(num_items_in_batch, device=total.device).detach()
    # A batch without any counted token has loss 0, not 0 / 0.
    return total / items.clamp(min=1)
