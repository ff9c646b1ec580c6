"""Learning from judgements without a reward model: the policy's own log-probabilities take the reward's place.

The implicit reward of an answer is r(x, y) = β (log π(y|x) - log π_ref(y|x)). DPO, IPO and the hinge loss compare two
answers to one prompt, KTO judges single answers, SimPO and ORPO do without a reference policy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    require_choice,
    require_number,
    require_positive,
    require_same_shape,
    require_shape,
    require_tensors,
)
from rl_modules.functional.pair_losses import (
    DIVERGENCES,
    NORMALISED,
    OF_DIFFERENCES,
    PAIR_LOSSES,
    SMOOTHED,
    Constants,
    divergence_score,
)


def dpo_loss(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    ref_chosen_log_prob: Tensor,
    ref_rejected_log_prob: Tensor,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    *,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    simpo_gamma: float = 0.5,
) -> Tensor:
    """The loss of Direct Preference Optimization and its relatives, over comparisons of two answers.

    c = log π(y_c) - log π_ref(y_c),   r = log π(y_r) - log π_ref(y_r),   Δ = c - r,   L = mean of

    -(1 - ε) log σ(βΔ) - ε log σ(-βΔ)                        "sigmoid"; "cpo"; "sigmoid_norm" with means over tokens
    (-(1 - ε) log σ(βΔ) + ε log σ(-βΔ)) / (1 - 2ε)           "robust"
    max(0, 1 - βΔ)                                           "hinge"
    (Δ - 1 / (2β))²                                          "ipo", means over tokens as in TRL (eq. 17 has sums)
    KL(σ(βΔ) || 1 - ε), of two Bernoulli distributions       "exo_pair"
    -log σ(βc) - ½ log σ(-βc) - ½ log σ(-βr)                 "nca_pair"
    -log σ(βc) - log σ(-βr)                                  "bco_pair"
    (c - 1 / (2β))² + (r + 1 / (2β))²                        "sppo_hard"
    1 - σ(βc) + σ(βr)                                        "apo_zero"
    σ(βc) + 1 - σ(βΔ)                                        "apo_down"
    -(1 - w) log σ(βΔ) + w exp(-βΔ),   w = σ(βΔ / τ)         "discopop"
    the sigmoid loss of sorted c minus sorted r              "aot_unpaired"
    the sigmoid loss of the policy's sorted log π(y_c) - log π(y_r) minus the reference's        "aot"
    -log σ(βΔ - γ), with means over tokens                   "simpo"
    -β log σ(log odds(y_c) - log odds(y_r))                  "orpo", see :func:`odds_ratio_loss`

    Args:
        chosen_log_prob: log π(y_c|x) in nats, the sum over the preferred answer's tokens, shape (B,). Receives
            gradient.
        rejected_log_prob: log π(y_r|x) of the other answer, shape (B,). Receives gradient.
        ref_chosen_log_prob: log π_ref(y_c|x), shape (B,); 0 for "cpo", "simpo" and "orpo", which have no reference.
        ref_rejected_log_prob: log π_ref(y_r|x), shape (B,).
        beta: β, the implicit reward per nat of log-ratio (for "ipo" the regularisation τ, for "orpo" the weight λ),
            above 0. A small β lets the policy move far from the reference.
        loss_type: the loss, see above.
        label_smoothing: ε, the probability that a judgement is wrong, in [0, 0.5); above 0 for "exo_pair". Read by
            "sigmoid", "sigmoid_norm", "cpo", "simpo" and both AOT losses, which blend the two labels, "robust", which
            corrects for the wrong ones without bias, and "exo_pair".
        chosen_length: tokens of y_c, shape (B,), by which "ipo", "sigmoid_norm", "simpo" and "orpo" divide its score;
            None: the arguments are means over tokens.
        rejected_length: tokens of y_r, shape (B,).
        f_divergence_type: the divergence from the reference that the policy is held to: "reverse_kl", "forward_kl",
            "js_divergence" or "alpha_divergence", whose f'(π / π_ref) takes the log-ratio's place; for losses of Δ
            with a reference.
        f_alpha_divergence_coef: α of "alpha_divergence"; near 1 it is "reverse_kl".
        discopop_tau: τ, above 0.
        simpo_gamma: γ, margin of the preferred answer, in units of reward, at least 0.

    Returns:
        Scalar to minimise, the mean over pairs; log 2 for "sigmoid" while the policy equals the reference.

    Raises:
        ValueError: shapes differ, beta or discopop_tau is not positive, loss_type or f_divergence_type is unknown or
            they don't go together, simpo_gamma is negative, or label_smoothing is outside [0, 0.5), not 0 for a loss
            type that has none, or 0 for "exo_pair".

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; ε: Mitchell 2023 (conservative DPO); "robust": Chowdhury et
        al. 2024, arXiv:2403.00409, eq. 11; "ipo": Azar et al. 2023, arXiv:2310.12036, eq. 17; "hinge": Zhao et al.
        2023, arXiv:2305.10425, with normalised margins as in Liu et al. 2023, arXiv:2309.06657; "exo_pair": Ji et al.
        2024, arXiv:2402.00856, eq. 16; "nca_pair": Chen et al. 2024, arXiv:2402.05369; "bco_pair": Jung et al. 2024,
        arXiv:2404.04656, without its shift; "sppo_hard": Wu et al. 2024, arXiv:2405.00675, eq. 4.7; "apo_zero",
        "apo_down": D'Oosterlinck et al. 2024, arXiv:2408.06266, eqs. 7 and 8; "discopop": Lu et al. 2024,
        arXiv:2406.08414, eq. 5; "aot": Melnyk et al. 2024, arXiv:2406.05882; "cpo": Xu et al. 2024, arXiv:2401.08417;
        divergences: Wang et al. 2023, arXiv:2309.16240. Equals TRL 1.16.
    """
    require_choice("loss_type", loss_type, tuple(PAIR_LOSSES))
    require_choice("f_divergence_type", f_divergence_type, DIVERGENCES)
    require_positive("beta", beta)
    require_positive("discopop_tau", discopop_tau)
    require_number("simpo_gamma", simpo_gamma)
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing!r}.")
    if label_smoothing and loss_type not in SMOOTHED:
        raise ValueError(f"label_smoothing must be 0 for loss_type {loss_type!r}, got {label_smoothing!r}.")
    if loss_type == "exo_pair" and not label_smoothing:
        raise ValueError("label_smoothing must be above 0 for loss_type 'exo_pair', such as 1e-3.")
    if f_divergence_type != "reverse_kl" and loss_type not in OF_DIFFERENCES:
        raise ValueError(
            f"f_divergence_type must be 'reverse_kl' for loss_type {loss_type!r}, got {f_divergence_type!r}."
        )
    _require_vector("chosen_log_prob", chosen_log_prob)
    for name, tensor in (
        ("rejected_log_prob", rejected_log_prob),
        ("ref_chosen_log_prob", ref_chosen_log_prob),
        ("ref_rejected_log_prob", ref_rejected_log_prob),
        ("chosen_length", chosen_length),
        ("rejected_length", rejected_length),
    ):
        if tensor is not None:
            require_shape(name, tensor, chosen_log_prob.shape, "chosen_log_prob")
    policy = as_float(chosen_log_prob), as_float(rejected_log_prob)
    reference = as_constant(ref_chosen_log_prob), as_constant(ref_rejected_log_prob)
    if loss_type == "aot":
        chosen, rejected = policy[0] - policy[1], reference[0] - reference[1]
    else:
        chosen, rejected = (
            divergence_score(ours - theirs, f_divergence_type, f_alpha_divergence_coef)
            for ours, theirs in zip(policy, reference, strict=True)
        )
    if loss_type in NORMALISED and chosen_length is not None and rejected_length is not None:
        chosen, rejected = chosen / chosen_length, rejected / rejected_length
    constants = Constants(beta, label_smoothing, discopop_tau, simpo_gamma)
    return PAIR_LOSSES[loss_type](chosen, rejected, constants).mean()


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
    require_number("desirable_weight", desirable_weight)
    require_number("undesirable_weight", undesirable_weight)
    _require_vector("log_prob", log_prob)
    require_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob, desirable=desirable)
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
    require_number("simpo_gamma", simpo_gamma)
    _require_vector("chosen_log_prob", chosen_log_prob)
    require_same_shape(chosen_log_prob=chosen_log_prob, rejected_log_prob=rejected_log_prob)
    constants = Constants(beta, 0.0, 1.0, simpo_gamma)
    return PAIR_LOSSES["simpo"](as_float(chosen_log_prob), as_float(rejected_log_prob), constants).mean()


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
    require_same_shape(chosen_log_prob=chosen_log_prob, rejected_log_prob=rejected_log_prob)
    constants = Constants(1.0, 0.0, 1.0, 0.0)
    return PAIR_LOSSES["orpo"](as_float(chosen_log_prob), as_float(rejected_log_prob), constants).mean()


def _require_vector(name: str, tensor: Tensor) -> None:
    require_tensors(**{name: tensor})
    if tensor.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected 1 dimension [B].")
