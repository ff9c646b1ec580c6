"""Learning from judgements without a reward model: the policy's own log-probabilities take the reward's place.

The implicit reward of an answer is r(x, y) = β (log π(y|x) - log π_ref(y|x)). DPO, IPO and the hinge loss compare two
answers to one prompt, KTO judges single answers, SimPO and ORPO do without a reference policy.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    require_choice,
    require_nonnegative,
    require_positive,
    require_shape,
    require_tensors,
)

_DPO_LOSS_TYPES = ("sigmoid", "ipo", "hinge", "robust")


def dpo_loss(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    ref_chosen_log_prob: Tensor,
    ref_rejected_log_prob: Tensor,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of Direct Preference Optimization and its relatives, per comparison of two answers.

    Δ = (log π(y_c) - log π_ref(y_c)) - (log π(y_r) - log π_ref(y_r))

    L = mean [ -(1 - ε) log σ(β Δ) - ε log σ(-β Δ) ]                     "sigmoid"
    L = mean [ (-(1 - ε) log σ(β Δ) + ε log σ(-β Δ)) / (1 - 2ε) ]        "robust"
    L = mean [ (Δ - 1 / (2β))² ]                                         "ipo"
    L = mean [ max(0, 1 - β Δ) ]                                         "hinge"

    Args:
        chosen_log_prob: log π(y_c|x) in nats, the sum over the preferred answer's tokens, shape (B,). Receives
            gradient. For "ipo" with answers of unequal length its authors recommend means over tokens, here and in
            the other three.
        rejected_log_prob: log π(y_r|x) of the other answer, shape (B,). Receives gradient.
        ref_chosen_log_prob: log π_ref(y_c|x), shape (B,).
        ref_rejected_log_prob: log π_ref(y_r|x), shape (B,).
        beta: β, the implicit reward per nat of log-ratio (for "ipo" the regularisation τ), above 0. A small β lets
            the policy move far from the reference.
        loss_type: "sigmoid" (DPO; with label_smoothing: conservative DPO), "robust", "ipo" or "hinge" (SLiC).
        label_smoothing: ε, the probability that a judgement is wrong, in [0, 0.5). Read by "sigmoid", which blends the
            two labels, and "robust", which corrects for the wrong ones without bias.

    Returns:
        Scalar to minimise, the mean over pairs; log 2 for "sigmoid" while the policy equals the reference.

    Raises:
        ValueError: shapes differ, beta is not positive, loss_type is unknown, or label_smoothing is outside [0, 0.5)
            or not 0 for a loss type that has none.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; ε: Mitchell 2023 (conservative DPO); "robust": Chowdhury et
        al. 2024, arXiv:2403.00409, eq. 11; "ipo": Azar et al. 2023, arXiv:2310.12036, eq. 17; "hinge": Zhao et al.
        2023, arXiv:2305.10425, with normalised margins as in Liu et al. 2023, arXiv:2309.06657. Equals TRL 1.16.
    """
    require_choice("loss_type", loss_type, _DPO_LOSS_TYPES)
    require_positive("beta", beta)
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing!r}.")
    if label_smoothing and loss_type in ("ipo", "hinge"):
        raise ValueError(f"label_smoothing must be 0 for loss_type {loss_type!r}, got {label_smoothing!r}.")
    _require_vector("chosen_log_prob", chosen_log_prob)
    for name, tensor in (
        ("rejected_log_prob", rejected_log_prob),
        ("ref_chosen_log_prob", ref_chosen_log_prob),
        ("ref_rejected_log_prob", ref_rejected_log_prob),
    ):
        require_shape(name, tensor, chosen_log_prob.shape, "chosen_log_prob")
    chosen = as_float(chosen_log_prob) - as_constant(ref_chosen_log_prob)
    rejected = as_float(rejected_log_prob) - as_constant(ref_rejected_log_prob)
    lead = chosen - rejected
    if loss_type == "ipo":
        return (lead - 1 / (2 * beta)).square().mean()
    if loss_type == "hinge":
        return torch.relu(1 - beta * lead).mean()
    right, wrong = -F.logsigmoid(beta * lead), -F.logsigmoid(-beta * lead)
    if loss_type == "robust":
        return (((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)).mean()
    return ((1 - label_smoothing) * right + label_smoothing * wrong).mean()


def kto_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """The loss of Kahneman-Tversky Optimization, on single answers that are judged good or bad.

    r = log π(y|x) - log π_ref(y|x),   z = max(0, KL)
    L = mean [ λ_D (1 - σ(β (r - z))) if desirable else λ_U (1 - σ(β (z - r))) ]

    Args:
        log_prob: log π(y|x) in nats, the sum over the answer's tokens, shape (B,). The only input that receives
            gradient.
        ref_log_prob: log π_ref(y|x), shape (B,).
        desirable: true where the answer was judged good, shape (B,).
        kl: an estimate of KL(π || π_ref) in nats, a number or a scalar tensor: the mean of log π - log π_ref over
            prompts with answers that belong to other prompts. It is the reference point that separates gains from
            losses.
        beta: β, the risk aversion per nat, above 0.
        desirable_weight: λ_D, at least 0. For unequal classes the paper keeps λ_D n_D / (λ_U n_U) in [1, 4/3].
        undesirable_weight: λ_U, at least 0.

    Returns:
        Scalar to minimise, the mean over answers; ½ while the policy equals the reference and weights are 1.

    Raises:
        ValueError: shapes differ, kl is no scalar, beta is not positive, or a weight is negative.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eqs. 7 and 8. Equals TRL 1.16.
    """
    require_positive("beta", beta)
    require_nonnegative("desirable_weight", desirable_weight)
    require_nonnegative("undesirable_weight", undesirable_weight)
    _require_vector("log_prob", log_prob)
    require_shape("ref_log_prob", ref_log_prob, log_prob.shape, "log_prob")
    require_shape("desirable", desirable, log_prob.shape, "log_prob")
    if isinstance(kl, Tensor):
        if kl.numel() != 1:
            raise ValueError(f"kl has shape {tuple(kl.shape)}, expected one number.")
        reference_point: float | Tensor = as_constant(kl).reshape(()).clamp(min=0)
    else:
        if math.isnan(kl):
            raise ValueError("kl must be a number, got nan: the policy has diverged.")
        reference_point = max(0.0, kl)
    gain = beta * (as_float(log_prob) - as_constant(ref_log_prob) - reference_point)
    good = desirable.bool()
    # 1 - σ(x) = σ(-x)
    loss = torch.sigmoid(torch.where(good, -gain, gain))
    return torch.where(good, desirable_weight * loss, undesirable_weight * loss).mean()


def simpo_loss(
    chosen_log_prob: Tensor, rejected_log_prob: Tensor, beta: float = 2.0, simpo_gamma: float = 0.5
) -> Tensor:
    """The loss of SimPO: preferences over mean log-probabilities, without a reference policy.

    L = mean [ -log σ(β (log π(y_c) / |y_c| - log π(y_r) / |y_r|) - γ) ]

    Args:
        chosen_log_prob: log π(y_c|x) / |y_c| in nats per token, shape (B,). Receives gradient.
        rejected_log_prob: log π(y_r|x) / |y_r|, shape (B,). Receives gradient.
        beta: β, the reward per nat, above 0.
        simpo_gamma: γ, margin of the preferred answer, in units of reward, at least 0.

    Returns:
        Scalar to minimise, the mean over pairs.

    Raises:
        ValueError: shapes differ, beta is not positive, or simpo_gamma is negative.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6. Equals TRL 1.16.
    """
    require_positive("beta", beta)
    require_nonnegative("simpo_gamma", simpo_gamma)
    _require_vector("chosen_log_prob", chosen_log_prob)
    require_shape("rejected_log_prob", rejected_log_prob, chosen_log_prob.shape, "chosen_log_prob")
    lead = as_float(chosen_log_prob) - as_float(rejected_log_prob)
    return -F.logsigmoid(beta * lead - simpo_gamma).mean()


def odds_ratio_loss(chosen_log_prob: Tensor, rejected_log_prob: Tensor) -> Tensor:
    """ORPO's odds-ratio term: the preferred answer's odds against the other's, without a reference policy.

    odds(y) = P(y) / (1 - P(y)),   log P(y) = log π(y|x) / |y|
    L = mean [ -log σ(log odds(y_c) - log odds(y_r)) ]

    ORPO's loss is the preferred answers' negative log-likelihood per token, plus λ times this term.

    Args:
        chosen_log_prob: log P(y_c) in nats per token, below 0, shape (B,). Receives gradient.
        rejected_log_prob: log P(y_r), below 0, shape (B,). Receives gradient.

    Returns:
        Scalar to minimise, the mean over pairs; log 2 where the two odds are equal.

    Raises:
        ValueError: shapes differ.

    Source: Hong et al. 2024, arXiv:2403.07691, eqs. 4 and 7. Equals TRL 1.16.
    """
    _require_vector("chosen_log_prob", chosen_log_prob)
    require_shape("rejected_log_prob", rejected_log_prob, chosen_log_prob.shape, "chosen_log_prob")
    chosen, rejected = as_float(chosen_log_prob), as_float(rejected_log_prob)
    return -F.logsigmoid((chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))).mean()


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact at both ends (Mächler 2012); unused branches get a harmless argument."""
    near = x > -math.log(2.0)
    small = torch.where(near, x, -1.0)
    large = torch.where(near, -1.0, x)
    return torch.where(near, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))


def _require_vector(name: str, tensor: Tensor) -> None:
    require_tensors(**{name: tensor})
    if tensor.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected 1 dimension [B].")
