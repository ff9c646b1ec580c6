import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import grpo_loss, kl_estimate, policy_gradient_loss, ppo_clip_loss

from .helpers import categorical_kl, coins, randn, repeatable, seeds

TYPES = ["grpo", "bnpo", "dapo", "dr_grpo"]
ALL_TYPES = [*TYPES, "cispo", "sapo"]
LEVELS = ["token", "sequence", "sequence_token"]


def batch(seed: int, rows: int = 4, length: int = 6):
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=torch.Generator().manual_seed(seed))
    log_prob = randn(seed, rows, length)
    return {
        "log_prob": log_prob,
        "old_log_prob": log_prob + 0.3 * randn(seed + 1, rows, length),
        "advantage": randn(seed + 2, rows),
        "mask": mask,
    }


def by_hand(
    log_prob,
    old_log_prob,
    advantage,
    mask,
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    beta=0.0,
    ref_log_prob=None,
    use_bias_correction_kl=False,
    loss_type="grpo",
    importance_sampling_level="token",
    max_completion_length=None,
    num_items_in_batch=None,
    importance_weight=None,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
):
    """The sums of the papers, in Python numbers, token by token."""
    high = epsilon if epsilon_high is None else epsilon_high
    rows = []
    for i in range(len(log_prob)):
        kept = [t for t in range(log_prob.shape[1]) if mask[i, t]]
        log_ratios = {t: (log_prob[i, t] - old_log_prob[i, t]).item() for t in kept}
        if importance_sampling_level != "token":
            mean = sum(log_ratios.values()) / max(len(kept), 1)
            log_ratios = dict.fromkeys(kept, mean)
        losses = []
        for t in kept:
            ratio, a = math.exp(log_ratios[t]), advantage[i].item()
            bounded = ratio if delta is None else min(ratio, delta)
            if loss_type == "cispo":
                loss = -min(ratio, high) * a * log_prob[i, t].item()
            elif loss_type == "sapo":
                temperature = sapo_temperature_pos if a > 0 else sapo_temperature_neg
                loss = -4 / temperature / (1 + math.exp(-temperature * (ratio - 1))) * a
            else:
                loss = -min(bounded * a, min(max(ratio, 1 - epsilon), 1 + high) * a)
            if importance_weight is not None:
                loss *= importance_weight[i, t].item()
            if beta:
                d = (ref_log_prob[i, t] - log_prob[i, t]).item()
                loss += beta * (math.exp(d) - d - 1) * (ratio if use_bias_correction_kl else 1)
            losses.append(loss)
        rows.append(losses)
    tokens = sum(len(losses) for losses in rows)
    total = sum(sum(losses) for losses in rows)
    if loss_type in ("grpo", "sapo"):
        return sum(sum(losses) / max(len(losses), 1) for losses in rows) / len(rows)
    if loss_type == "dr_grpo":
        return total / (len(rows) * max_completion_length)
    if loss_type in ("dapo", "cispo") and num_items_in_batch is not None:
        return total / num_items_in_batch
    return total / max(tokens, 1)


def test_a_hand_worked_batch_under_each_normaliser():
    # Ratio 1 everywhere, so every counted token's loss is -A: two tokens of row 0 (A = 1), one of row 1 (A = -4).
    log_prob = torch.zeros(2, 3)
    case = (log_prob, log_prob, torch.tensor([1.0, -4.0]), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert grpo_loss(*case).item() == pytest.approx((-1 + 4) / 2)
    assert grpo_loss(*case, loss_type="bnpo").item() == pytest.approx((-2 + 4) / 3)
    assert grpo_loss(*case, loss_type="dapo").item() == pytest.approx((-2 + 4) / 3)
    assert grpo_loss(*case, loss_type="dapo", num_items_in_batch=10).item() == pytest.approx(2 / 10)
    assert grpo_loss(*case, loss_type="dr_grpo", max_completion_length=8).item() == pytest.approx(2 / 16)


@repeatable
@given(
    seeds,
    st.sampled_from(ALL_TYPES),
    st.sampled_from(LEVELS),
    st.sampled_from([None, 0.28]),
    st.sampled_from([None, 1.1, 3.0]),
    st.sampled_from([0.0, 0.04]),
    st.booleans(),
    st.booleans(),
)
def test_against_sums_over_single_tokens(seed, loss_type, level, epsilon_high, delta, beta, corrected, weighted):
    if loss_type == "cispo":
        epsilon_high, delta = 1.2, None
    elif loss_type == "sapo":
        delta = None
    options = {
        "importance_weight": randn(seed + 4, 4, 6).exp() if weighted else None,
        "sapo_temperature_pos": 0.8,
        "sapo_temperature_neg": 1.3,
        "epsilon": 0.1,
        "epsilon_high": epsilon_high,
        "delta": delta,
        "beta": beta,
        "ref_log_prob": randn(seed + 3, 4, 6),
        "use_bias_correction_kl": corrected,
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "max_completion_length": 9,
        "num_items_in_batch": 31,
    }
    inputs = batch(seed)
    assert grpo_loss(**inputs, **options).item() == pytest.approx(by_hand(**inputs, **options))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.25, 1.0, 1.25, 1.25),  # between 1 + ε and 1 + ε_high: still rewarded
        (1.5, 1.0, 1.28, 0.0),
        (0.7, -1.0, -0.8, 0.0),
        (2.0, -1.0, -2.0, -2.0),
        (9.0, -1.0, -4.0, 0.0),  # δ bounds what a negative advantage can cost
    ],
)
def test_the_two_clip_ranges_and_delta(ratio, advantage, value, slope):
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss = grpo_loss(log_prob, one * 0, one[0] * advantage, one, epsilon=0.2, epsilon_high=0.28, delta=4.0)
    loss.backward()
    assert loss.item() == pytest.approx(-value)
    assert log_prob.grad.item() == pytest.approx(-slope)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("log_ratio", [100.0, 1e4])
@pytest.mark.parametrize(
    ("advantage", "options"),
    [
        (1.0, {"loss_type": "grpo"}),
        (-1.0, {"loss_type": "grpo", "delta": 4.0}),
        (1.0, {"loss_type": "sapo"}),
        (-1.0, {"loss_type": "sapo"}),
        (0.0, {"loss_type": "grpo"}),
        (0.0, {"loss_type": "cispo", "epsilon_high": 5.0}),
        (0.0, {"beta": 0.1, "ref_log_prob": torch.tensor([[3e4]])}),
    ],
)
def test_where_a_bound_holds_the_gradient_is_zero_though_the_ratio_is_infinite(level, log_ratio, advantage, options):
    log_prob, one = torch.tensor([[log_ratio]], requires_grad=True), torch.ones(1, 1)
    loss = grpo_loss(log_prob, one * 0, one[0] * advantage, one, importance_sampling_level=level, **options)
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.item() == 0


def test_one_token_per_sequence_is_ppo():
    log_prob, old, advantage = randn(0, 20, 1).requires_grad_(), randn(1, 20, 1), randn(2, 20)
    mask = torch.ones(20, 1)
    expected = ppo_clip_loss(log_prob[:, 0], old[:, 0], advantage, 0.2)
    (expected_gradient,) = torch.autograd.grad(expected, log_prob)
    for level in LEVELS:
        for loss_type in TYPES:
            options = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": 1}
            loss = grpo_loss(log_prob, old, advantage, mask, **options)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(torch.autograd.grad(loss, log_prob)[0], expected_gradient)


@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_the_gradient_is_the_policy_gradient(level):
    inputs = batch(0)
    log_prob = inputs["log_prob"].requires_grad_()
    inputs["old_log_prob"] = log_prob.detach()
    (gradient,) = torch.autograd.grad(grpo_loss(**inputs, loss_type="bnpo", importance_sampling_level=level), log_prob)
    weight = inputs["advantage"][:, None].expand(4, 6)
    (expected,) = torch.autograd.grad(policy_gradient_loss(log_prob, weight, inputs["mask"]), log_prob)
    torch.testing.assert_close(gradient, expected)


def test_cispo_is_a_weighted_policy_gradient():
    """Every token keeps its gradient, also where PPO's clip would take it: the weight is bounded, not the update."""
    inputs = batch(0)
    log_prob = inputs["log_prob"].requires_grad_()
    ratio = (log_prob - inputs["old_log_prob"]).exp().detach()
    loss = grpo_loss(**inputs, loss_type="cispo", epsilon_high=1.1)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    weight = ratio.clamp(max=1.1) * inputs["advantage"][:, None]
    torch.testing.assert_close(gradient, -weight * inputs["mask"] / inputs["mask"].sum())
    assert (ratio[inputs["mask"]] > 1.1).any()


@pytest.mark.parametrize(("ratio", "advantage", "slope"), [(1.0, 1.0, 1.0), (1.0, -1.0, -1.0), (3.0, 1.0, None)])
def test_sapo_has_the_slope_of_the_plain_surrogate_at_one_and_fades(ratio, advantage, slope):
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    options = {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 5.0}
    grpo_loss(log_prob, one * 0, one[0] * advantage, one, **options).backward()
    if slope is None:  # 4 σ(τx) (1 - σ(τx)) ρ at x = ρ - 1 = 2
        sigma = 1 / (1 + math.exp(-4.0))
        slope = 4 * sigma * (1 - sigma) * ratio
        assert slope < 0.25
    assert log_prob.grad.item() == pytest.approx(-slope)


def test_the_importance_weight_scales_policy_terms_and_not_the_kl():
    inputs = batch(0)
    reference = randn(9, 4, 6)
    options = {"beta": 0.3, "ref_log_prob": reference, "loss_type": "bnpo"}
    policy = grpo_loss(**inputs, loss_type="bnpo")
    both = grpo_loss(**inputs, **options)
    doubled = grpo_loss(**inputs, **options, importance_weight=torch.full((4, 6), 2.0).double())
    torch.testing.assert_close(doubled, both + policy)
    weight = torch.ones(4, 6).double().requires_grad_()
    assert not grpo_loss(**inputs, importance_weight=weight).requires_grad


def test_long_sequences_have_a_finite_sequence_ratio():
    log_prob = torch.full((1, 5000), 1.0)
    loss = grpo_loss(
        log_prob,
        log_prob * 0,
        torch.ones(1),
        torch.ones(1, 5000),
        epsilon=10.0,
        importance_sampling_level="sequence",
    )
    assert loss.item() == pytest.approx(-math.e)  # not exp(5000)


@pytest.mark.parametrize(("corrected", "direction"), [(False, "forward"), (True, "reverse")])
def test_the_expected_gradient_of_the_kl_penalty(corrected, direction):
    """All words of one position as a batch of sequences, weighted by their probability through dapo's mean."""
    logits = randn(0, 6).requires_grad_()
    reference = randn(1, 6).log_softmax(-1)
    log_prob = logits.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for word in range(6):
        one = log_prob[word].view(1, 1)
        total = total + log_prob[word].exp().detach() * grpo_loss(
            one,
            one.detach(),
            torch.zeros(1).double(),
            torch.ones(1, 1),
            beta=1.0,
            ref_log_prob=reference[word].view(1, 1),
            use_bias_correction_kl=corrected,
        )
    (gradient,) = torch.autograd.grad(total, logits)
    p, q = logits.softmax(-1), reference.exp()
    exact = categorical_kl(p, q) if direction == "reverse" else categorical_kl(q, p)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_term_is_the_chosen_estimator(estimator):
    inputs = batch(0)
    inputs["advantage"] = torch.zeros(4).double()
    reference = randn(9, 4, 6)
    loss = grpo_loss(**inputs, beta=0.5, ref_log_prob=reference, kl_estimator=estimator, loss_type="bnpo")
    expected = 0.5 * kl_estimate(inputs["log_prob"], reference, estimator)[inputs["mask"]].mean()
    torch.testing.assert_close(loss, expected)


options_of_types = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dapo"},
    {"loss_type": "dapo", "num_items_in_batch": 20},
    {"loss_type": "dr_grpo", "max_completion_length": 12},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "cispo", "epsilon_high": 1.2, "num_items_in_batch": 20},
    {"loss_type": "sapo"},
]


@pytest.mark.parametrize("options", options_of_types)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("garbage", [0.0, 1e4, torch.nan, -torch.inf])
@pytest.mark.parametrize("by_token", [False, True])
def test_padding_changes_nothing_whatever_stands_there(options, level, garbage, by_token):
    inputs = batch(0)
    advantage = inputs["advantage"]
    if by_token:
        inputs["advantage"] = advantage[:, None] + randn(11, 4, 6)
    reference, weight = randn(9, 4, 6), randn(10, 4, 6).exp()
    options = {**options, "beta": 0.1, "importance_sampling_level": level, "use_bias_correction_kl": True}
    log_prob = inputs["log_prob"].requires_grad_()
    loss = grpo_loss(**inputs, ref_log_prob=reference, importance_weight=weight, **options)
    (gradient,) = torch.autograd.grad(loss, log_prob)

    more = torch.full((4, 3), garbage, dtype=torch.float64)
    if by_token:
        advantage = torch.cat((inputs["advantage"].masked_fill(~inputs["mask"], garbage), more), 1)
    dirty = torch.cat((inputs["log_prob"].detach().masked_fill(~inputs["mask"], garbage), more), 1).requires_grad_()
    padded = grpo_loss(
        dirty,
        torch.cat((inputs["old_log_prob"].masked_fill(~inputs["mask"], garbage), more), 1),
        advantage,
        torch.cat((inputs["mask"], torch.zeros(4, 3, dtype=torch.bool)), 1),
        ref_log_prob=torch.cat((reference.masked_fill(~inputs["mask"], garbage), more), 1),
        importance_weight=torch.cat((weight.masked_fill(~inputs["mask"], garbage), more), 1),
        **options,
    )
    (padded_gradient,) = torch.autograd.grad(padded, dirty)
    torch.testing.assert_close(padded, loss)
    torch.testing.assert_close(padded_gradient[:, :6], gradient)
    assert (padded_gradient[:, 6:] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_fully_masked_row(level):
    """It is a sequence with loss 0 under grpo, dr_grpo and sapo, and no token under the others."""
    inputs = batch(0)
    with_row = {
        "log_prob": torch.cat((inputs["log_prob"], torch.full((1, 6), torch.nan).double())),
        "old_log_prob": torch.cat((inputs["old_log_prob"], torch.zeros(1, 6).double())),
        "advantage": torch.cat((inputs["advantage"], torch.ones(1).double())),
        "mask": torch.cat((inputs["mask"], torch.zeros(1, 6, dtype=torch.bool))),
    }
    for options in options_of_types:
        options = {**options, "importance_sampling_level": level}
        share = 4 / 5 if options["loss_type"] in ("grpo", "dr_grpo", "sapo") else 1.0
        torch.testing.assert_close(grpo_loss(**with_row, **options), grpo_loss(**inputs, **options) * share)


@pytest.mark.parametrize("options", options_of_types)
def test_a_batch_without_any_token_has_loss_and_gradient_zero(options):
    log_prob = randn(0, 2, 3).requires_grad_()
    loss = grpo_loss(log_prob, randn(1, 2, 3), torch.ones(2), torch.zeros(2, 3), **options)
    loss.backward()
    assert loss.item() == 0
    assert (log_prob.grad == 0).all()


@repeatable
@given(seeds, st.integers(1, 5))
def test_micro_batches_add_up_to_the_full_batch(seed, cut):
    inputs = batch(seed, rows=6)
    tokens = int(inputs["mask"].sum())
    parts = [{k: v[:cut] for k, v in inputs.items()}, {k: v[cut:] for k, v in inputs.items()}]

    for options in ({"loss_type": "dapo"}, {"loss_type": "cispo", "epsilon_high": 1.2}):
        full = grpo_loss(**inputs, **options)
        for items in (tokens, torch.tensor(tokens)):
            summed = sum(grpo_loss(**part, **options, num_items_in_batch=items) for part in parts)
            torch.testing.assert_close(summed, full)
    # The others average over sequences: weigh by their number.
    for options in ({"loss_type": "grpo"}, {"loss_type": "sapo"}, {"loss_type": "dr_grpo", "max_completion_length": 7}):
        weighted = sum(grpo_loss(**part, **options) * len(part["mask"]) / 6 for part in parts)
        torch.testing.assert_close(weighted, grpo_loss(**inputs, **options))


def test_only_dapo_and_cispo_read_the_number_of_items():
    inputs = batch(0)
    for options in (
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "sapo"},
        {"loss_type": "dr_grpo", "max_completion_length": 7},
    ):
        torch.testing.assert_close(
            grpo_loss(**inputs, **options, num_items_in_batch=999), grpo_loss(**inputs, **options)
        )


def test_an_advantage_per_token():
    inputs = batch(0)
    expected = grpo_loss(**inputs)
    inputs["advantage"] = inputs["advantage"][:, None].expand(4, 6)
    torch.testing.assert_close(grpo_loss(**inputs), expected)
    changed = inputs["advantage"].clone()
    changed[:, 0] += 1
    assert grpo_loss(**{**inputs, "advantage": changed}) != expected


def test_without_a_price_the_reference_is_not_read():
    inputs = batch(0)
    poison = torch.full((4, 6), torch.nan).double()
    torch.testing.assert_close(grpo_loss(**inputs, ref_log_prob=poison), grpo_loss(**inputs))


@pytest.mark.parametrize("level", LEVELS)
def test_only_the_current_policy_receives_gradient(level):
    inputs = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in batch(0).items()}
    leaves = {k: v.detach().clone().requires_grad_() for k, v in inputs.items() if v.is_floating_point()}
    reference = randn(9, 4, 6).requires_grad_()
    copies = {k: v.detach().clone() for k, v in leaves.items()}
    loss = grpo_loss(
        **leaves,
        mask=inputs["mask"],
        beta=0.1,
        ref_log_prob=reference,
        use_bias_correction_kl=True,
        importance_sampling_level=level,
    )
    loss.backward()
    assert leaves["log_prob"].grad.abs().sum() > 0
    assert leaves["old_log_prob"].grad is None
    assert leaves["advantage"].grad is None
    assert reference.grad is None
    for name, tensor in leaves.items():
        assert torch.equal(tensor, copies[name]), name


@pytest.mark.parametrize("options", options_of_types)
def test_bfloat16_is_summed_in_float32(options):
    zero = torch.zeros(2, 1000, dtype=torch.bfloat16)
    loss = grpo_loss(zero, zero, torch.ones(2, dtype=torch.bfloat16), zero + 1, **options)
    assert loss.dtype is torch.float32
    # At ratio 1 sapo's surrogate is 4 σ(0) A = 2 A, and cispo's -A log π with log π = 0 here.
    expected = {
        "dr_grpo": 1000 / 12,
        "dapo": 2000 / options.get("num_items_in_batch", 2000),
        "sapo": 2.0,
        "cispo": 0.0,
    }
    assert loss.item() == pytest.approx(-expected.get(options["loss_type"], 1.0))


def test_refuses_by_name():
    square, row = torch.zeros(2, 3), torch.zeros(2)
    good = {"log_prob": square, "old_log_prob": square, "advantage": row, "mask": square}
    for name in ("old_log_prob", "mask"):
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            grpo_loss(**{**good, name: square[:, :1]})
    with pytest.raises(ValueError, match=r"^log_prob has shape"):
        grpo_loss(row, row, row, row)
    for wrong in (torch.zeros(3), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"^advantage has shape"):
            grpo_loss(**{**good, "advantage": wrong})
    with pytest.raises(ValueError, match=r"^ref_log_prob is None, but beta = 0.1"):
        grpo_loss(**good, beta=0.1)
    with pytest.raises(ValueError, match=r"^ref_log_prob has shape"):
        grpo_loss(**good, beta=0.1, ref_log_prob=row)
    with pytest.raises(ValueError, match=r"^max_completion_length must be a number of tokens"):
        grpo_loss(**good, loss_type="dr_grpo")
    with pytest.raises(ValueError, match=r"^importance_weight has shape"):
        grpo_loss(**good, importance_weight=row)
    with pytest.raises(ValueError, match=r"^epsilon_high must be given for loss_type 'cispo'"):
        grpo_loss(**good, loss_type="cispo")
    for options in ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "sapo"}):
        with pytest.raises(ValueError, match=r"^delta must be None for loss_type"):
            grpo_loss(**good, **options, delta=2.0)
    for name, bad in {
        "sapo_temperature_pos": 0.0,
        "sapo_temperature_neg": -1.0,
        "epsilon": -0.1,
        "epsilon_high": -0.1,
        "delta": 0.0,
        "beta": -1.0,
        "num_items_in_batch": 0,
        "loss_type": "mean",
        "importance_sampling_level": "word",
        "kl_estimator": "k4",
    }.items():
        with pytest.raises(ValueError, match=rf"^{name} must be"):
            grpo_loss(**good, **{name: bad})


def test_masks_are_checked_for_coins_too():
    """A float, an integer and a boolean mask say the same, with gaps as well."""
    inputs = batch(0)
    gaps = coins(0, 0.5, 4, 6)
    gaps[:, 2] = True
    results = [grpo_loss(**{**inputs, "mask": gaps.to(kind)}) for kind in (torch.bool, torch.float32, torch.int64)]
    assert results[0] == results[1] == results[2]


def test_gspo_of_tokens_is_gspo_where_the_advantage_is_the_completions():
    gradients = []
    for level in ("sequence", "sequence_token"):
        fields = batch(5)
        fields["log_prob"] = fields["log_prob"].clone().requires_grad_()
        loss = grpo_loss(**fields, epsilon=10.0, importance_sampling_level=level)
        loss.backward()
        gradients.append(fields["log_prob"].grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0


def test_gspo_of_tokens_gives_each_token_its_own_advantage():
    """∂L/∂ log π_t = -s A_t / n with s the geometric mean of the ratios (arXiv:2507.18071, eq. 17)."""
    old = torch.tensor([[-1.0, -2.0]])
    now = (old + torch.tensor([[0.1, -0.3]])).requires_grad_()
    advantage = torch.tensor([[2.0, -1.0]])
    grpo_loss(now, old, advantage, torch.ones(1, 2), epsilon=1.0, importance_sampling_level="sequence_token").backward()
    torch.testing.assert_close(now.grad, -math.exp(-0.1) * advantage / 2)
