import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import bradley_terry_loss, dpo_loss, kto_loss, odds_ratio_loss, simpo_loss
from rl_modules.functional.pair_losses import length_desensitized

from .helpers import coins, randn, repeatable, seeds


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > -30 else x


def sigma(x):
    return 1 / (1 + math.exp(-x))


def blended(x, e):
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


def bernoulli_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def discopop_by_hand(x, tau):
    w = sigma(x / tau)
    return w * math.exp(-x) - (1 - w) * log_sigmoid(x)


#: From the log-ratios (or scores) of both answers, β and ε.
BY_HAND = {
    "sigmoid": lambda c, r, b, e: blended(b * (c - r), e),
    "sigmoid_norm": lambda c, r, b, e: blended(b * (c - r), e),
    "cpo": lambda c, r, b, e: blended(b * (c - r), e),
    "simpo": lambda c, r, b, e: blended(b * (c - r) - 0.5, e),
    "robust": lambda c, r, b, e: (-(1 - e) * log_sigmoid(b * (c - r)) + e * log_sigmoid(b * (r - c))) / (1 - 2 * e),
    "ipo": lambda c, r, b, e: (c - r - 1 / (2 * b)) ** 2,
    "hinge": lambda c, r, b, e: max(0.0, 1 - b * (c - r)),
    "exo_pair": lambda c, r, b, e: bernoulli_kl(sigma(b * (c - r)), 1 - e),
    "nca_pair": lambda c, r, b, e: -log_sigmoid(b * c) - log_sigmoid(-b * c) / 2 - log_sigmoid(-b * r) / 2,
    "bco_pair": lambda c, r, b, e: -log_sigmoid(b * c) - log_sigmoid(-b * r),
    "sppo_hard": lambda c, r, b, e: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "apo_zero": lambda c, r, b, e: 1 - sigma(b * c) + sigma(b * r),
    "apo_down": lambda c, r, b, e: sigma(b * c) + 1 - sigma(b * (c - r)),
    "discopop": lambda c, r, b, e: discopop_by_hand(b * (c - r), 0.05),
}
WITHOUT_LABELS = ("ipo", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")


def dpo_by_hand(rows, beta, kind, smoothing):
    if kind == "aot":
        policy, reference = sorted(row[0] - row[1] for row in rows), sorted(row[2] - row[3] for row in rows)
        return sum(blended(beta * (x - y), smoothing) for x, y in zip(policy, reference, strict=True)) / len(rows)
    ratios = [(row[0] - row[2], row[1] - row[3]) for row in rows]
    if kind == "aot_unpaired":
        ratios = list(zip(*(sorted(column) for column in zip(*ratios, strict=True)), strict=True))
        kind = "sigmoid"
    return sum(BY_HAND[kind](c, r, beta, smoothing) for c, r in ratios) / len(rows)


def test_hand_worked_dpo_losses():
    zero, lead = torch.zeros(1), torch.full((1,), math.log(3.0))
    for kind in ("sigmoid", "robust"):
        assert dpo_loss(zero, zero, zero, zero, loss_type=kind).item() == pytest.approx(math.log(2))
        assert dpo_loss(lead, zero, zero, zero, 1.0, kind).item() == pytest.approx(-math.log(0.75))
        assert dpo_loss(zero, zero, zero, lead, 1.0, kind).item() == pytest.approx(-math.log(0.75))
    assert dpo_loss(lead, zero, zero, zero, 1.0, "sigmoid", 0.25).item() == pytest.approx(
        -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    )
    assert dpo_loss(lead, zero, zero, zero, 1.0, "robust", 0.25).item() == pytest.approx(
        -1.5 * math.log(0.75) + 0.5 * math.log(0.25)
    )
    assert dpo_loss(zero, zero, zero, zero, 0.1, "ipo").item() == pytest.approx(25.0)
    assert dpo_loss(zero + 5, zero, zero, zero, 0.1, "ipo").item() == pytest.approx(0.0)
    assert dpo_loss(zero, zero, zero, zero, 0.1, "hinge").item() == pytest.approx(1.0)
    assert dpo_loss(zero + 15, zero, zero, zero, 0.1, "hinge").item() == 0.0


@repeatable
@given(seeds, st.sampled_from([*BY_HAND, "aot", "aot_unpaired"]), st.floats(0.05, 2), st.floats(0.01, 0.4))
def test_dpo_against_python_numbers(seed, kind, beta, smoothing):
    smoothing = 0.0 if kind in WITHOUT_LABELS else smoothing
    rows = 3 * randn(seed, 6, 4)
    expected = dpo_by_hand(rows.tolist(), beta, kind, smoothing)
    assert dpo_loss(*rows.unbind(1), beta, kind, smoothing).item() == pytest.approx(expected, rel=1e-11, abs=1e-11)


def test_discopop_is_the_logistic_loss_where_its_exponential_is_infinite():
    margin = torch.tensor([-100.0, -1e4], requires_grad=True)
    loss = dpo_loss(margin, *torch.zeros(3, 2), beta=1.0, loss_type="discopop")
    loss.backward()
    assert loss.item() == (100 + 1e4) / 2
    assert margin.grad.tolist() == [-0.5, -0.5]


@repeatable
@given(seeds, st.sampled_from(["sigmoid_norm", "ipo", "simpo"]))
def test_means_over_tokens_are_the_sums_over_the_lengths(seed, kind):
    rows, lengths = randn(seed, 4, 6), torch.tensor([[1, 2, 3, 4, 5, 6], [7, 1, 2, 9, 3, 1]])
    means = rows / torch.cat([lengths, lengths])[[0, 1, 0, 1]]
    found = dpo_loss(*rows, 0.7, kind, chosen_length=lengths[0], rejected_length=lengths[1])
    torch.testing.assert_close(found, dpo_loss(*means, 0.7, kind))


#: f of the divergence E_ref[f(u)], whose derivative at u the score is, but for a constant.
GENERATORS = {
    "reverse_kl": lambda u: u * u.log(),
    "forward_kl": lambda u: -u.log(),
    "js_divergence": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
    "alpha_divergence": lambda u: (u**0.3 - 0.3 * u - 0.7) / (0.3 * -0.7),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_the_scores_of_a_divergence_are_its_generators_slopes(name):
    chosen, rejected, ref_chosen, ref_rejected = randn(0, 4, 9)
    slopes = []
    for ratio in (chosen - ref_chosen, rejected - ref_rejected):
        u = ratio.exp().requires_grad_()
        slopes.append(torch.autograd.grad(GENERATORS[name](u).sum(), u)[0])
    zero = torch.zeros(9, dtype=torch.float64)
    options = {"f_divergence_type": name, "f_alpha_divergence_coef": 0.3}
    for kind in ("sigmoid", "hinge", "discopop"):
        found = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.4, kind, **options)
        torch.testing.assert_close(found, dpo_loss(*slopes, zero, zero, 0.4, kind))


def test_an_alpha_divergence_near_1_is_the_reverse_kl_and_at_0_the_forward_kl():
    rows = randn(0, 4, 9)
    for alpha, name in ((1.0, "reverse_kl"), (0.0, "forward_kl")):
        found = dpo_loss(*rows, 0.4, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=alpha)
        torch.testing.assert_close(found, dpo_loss(*rows, 0.4, f_divergence_type=name))
    far = torch.full((1,), -1e4)
    for name in GENERATORS:
        found = dpo_loss(far.requires_grad_(), -far.detach(), torch.zeros(1), torch.zeros(1), f_divergence_type=name)
        assert found.isfinite() and torch.autograd.grad(found, far)[0].isfinite()


def test_length_desensitization_weighs_the_tail_of_the_longer_answer():
    log_prob = torch.tensor([[-1.0, -2.0, -4.0], [-1.0, 0.0, 0.0], [-3.0, -5.0, 0.0], [-2.0, -7.0, -9.0]])
    chosen, rejected = torch.tensor([3, 1]), torch.tensor([2, 3])
    found = length_desensitized(log_prob, chosen, rejected, 0.5)
    assert found.tolist() == [-1 - 2 - 0.5 * 4, -1.0, -8.0, -2 - 0.5 * 16]
    assert torch.equal(length_desensitized(log_prob, chosen, rejected, 1.0), log_prob.sum(-1))


def test_dpo_is_the_reward_models_loss_on_implicit_rewards():
    chosen, rejected, ref_chosen, ref_rejected = randn(0, 4, 7)
    expected = bradley_terry_loss(0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected))
    torch.testing.assert_close(dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.3), expected)


def test_robust_dpo_is_unbiased_under_flipped_labels():
    """Chowdhury et al., lemma 3.1: its mean over labels flipped with probability ε is the loss on clean labels."""
    chosen, rejected, ref_chosen, ref_rejected = randn(0, 4, 50)
    noise = 0.2
    right = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.5, "robust", noise)
    flipped = dpo_loss(rejected, chosen, ref_rejected, ref_chosen, 0.5, "robust", noise)
    clean = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.5)
    torch.testing.assert_close((1 - noise) * right + noise * flipped, clean)


@pytest.mark.parametrize("kind", ["exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
                                  "aot", "aot_unpaired", "simpo"])  # fmt: skip
def test_the_gradients_of_its_relatives(kind):
    reference, smoothing = [randn(i, 5) for i in (2, 3)], 0.1 if kind == "exo_pair" else 0.0
    policy = [randn(i, 5).requires_grad_() for i in (0, 1)]
    assert torch.autograd.gradcheck(lambda a, b: dpo_loss(a, b, *reference, 0.5, kind, smoothing), policy)


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "ipo", "hinge"])
def test_dpo_gives_gradient_to_the_policy_only(kind):
    tensors = [randn(i, 5).requires_grad_() for i in range(4)]
    dpo_loss(*tensors, 0.5, kind).backward()
    assert tensors[2].grad is None and tensors[3].grad is None
    torch.testing.assert_close(tensors[0].grad, -tensors[1].grad)
    assert tensors[0].grad.abs().sum() > 0
    assert torch.autograd.gradcheck(lambda a, b: dpo_loss(a, b, *tensors[2:], 0.5, kind), tensors[:2])


def test_dpo_gradient_is_the_probability_of_being_wrong():
    chosen, rejected, ref_chosen, ref_rejected = randn(0, 4, 5)
    chosen.requires_grad_()
    dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.3).backward()
    lead = (chosen.detach() - ref_chosen) - (rejected - ref_rejected)
    torch.testing.assert_close(chosen.grad, -0.3 * torch.sigmoid(-0.3 * lead) / 5)


def test_hopeless_pairs_do_not_overflow():
    far, zero = torch.full((1,), 1e4), torch.zeros(1)
    assert dpo_loss(-far, far, zero, zero, 1.0).item() == pytest.approx(2e4)
    assert dpo_loss(far, -far, zero, zero, 1.0).item() == 0.0


def test_dpo_refuses_by_name():
    row, column = torch.zeros(4), torch.zeros(4, 1)
    with pytest.raises(ValueError, match=r"^chosen_log_prob has shape"):
        dpo_loss(column, column, column, column)
    names = ("chosen_log_prob", "rejected_log_prob", "ref_chosen_log_prob", "ref_rejected_log_prob")
    for place in (1, 2, 3):
        arguments = [row] * 4
        arguments[place] = column
        with pytest.raises(ValueError, match=f"^{names[place]} has shape"):
            dpo_loss(*arguments)
    with pytest.raises(ValueError, match=r"^beta must be a finite number above 0"):
        dpo_loss(row, row, row, row, 0.0)
    with pytest.raises(ValueError, match=r"^loss_type must be one of"):
        dpo_loss(row, row, row, row, loss_type="logistic")
    with pytest.raises(ValueError, match=r"^label_smoothing must lie in"):
        dpo_loss(row, row, row, row, label_smoothing=0.5)
    with pytest.raises(ValueError, match=r"^label_smoothing must be 0 for loss_type 'hinge'"):
        dpo_loss(row, row, row, row, loss_type="hinge", label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"^label_smoothing must be above 0 for loss_type 'exo_pair'"):
        dpo_loss(row, row, row, row, loss_type="exo_pair")
    with pytest.raises(ValueError, match=r"^f_divergence_type must be 'reverse_kl' for loss_type 'apo_zero'"):
        dpo_loss(row, row, row, row, loss_type="apo_zero", f_divergence_type="forward_kl")
    with pytest.raises(ValueError, match=r"^f_divergence_type must be one of"):
        dpo_loss(row, row, row, row, f_divergence_type="kl")
    with pytest.raises(ValueError, match=r"^chosen_length has shape"):
        dpo_loss(row, row, row, row, chosen_length=column)
    with pytest.raises(ValueError, match=r"^discopop_tau must be"):
        dpo_loss(row, row, row, row, discopop_tau=0.0)


def test_hand_worked_kto_losses():
    zero, good = torch.zeros(2), torch.tensor([True, False])
    assert kto_loss(zero, zero, good, 0.0).item() == pytest.approx(0.5)
    # Two nats above the reference, KL 1: the good answer gains σ(1), the bad one loses as much.
    lead = torch.full((2,), 2.0)
    sigma = 1 / (1 + math.exp(-1.0))
    for kl in (1.0, torch.tensor([1.0])):
        loss = kto_loss(lead, zero, good, kl, 1.0, 2.0, 3.0)
        assert loss.item() == pytest.approx((2.0 * (1 - sigma) + 3.0 * sigma) / 2)
    # A negative estimate counts as 0.
    assert kto_loss(lead, zero, good, -5.0, 1.0).item() == kto_loss(lead, zero, good, 0.0, 1.0).item()


@repeatable
@given(seeds, st.floats(-1, 3), st.floats(0.05, 2))
def test_kto_against_python_numbers(seed, kl, beta):
    log_prob, ref, good = randn(seed, 7), randn(seed + 1, 7), coins(seed, 0.5, 7)
    total = 0.0
    for p, r, g in zip(log_prob.tolist(), ref.tolist(), good.tolist(), strict=True):
        gain = beta * (p - r - max(kl, 0.0))
        total += 1.2 * (1 - 1 / (1 + math.exp(-gain))) if g else 0.7 * (1 - 1 / (1 + math.exp(gain)))
    assert kto_loss(log_prob, ref, good, kl, beta, 1.2, 0.7).item() == pytest.approx(total / 7, rel=1e-12)


def test_kto_gradient_raises_good_answers_and_lowers_bad_ones():
    log_prob, ref, kl = randn(0, 6).requires_grad_(), randn(1, 6).requires_grad_(), torch.tensor(0.3).requires_grad_()
    good = torch.tensor([1, 0, 1, 0, 1, 0])
    kto_loss(log_prob, ref, good, kl).backward()
    assert ref.grad is None and kl.grad is None
    assert (log_prob.grad[0::2] < 0).all() and (log_prob.grad[1::2] > 0).all()
    assert torch.autograd.gradcheck(lambda x: kto_loss(x, ref, good, 0.3), log_prob)


def test_kto_refuses_by_name():
    row, column = torch.zeros(4), torch.zeros(4, 1)
    with pytest.raises(ValueError, match=r"^log_prob has shape"):
        kto_loss(column, column, column, 0.0)
    with pytest.raises(ValueError, match=r"^ref_log_prob has shape"):
        kto_loss(row, column, row, 0.0)
    with pytest.raises(ValueError, match=r"^desirable has shape"):
        kto_loss(row, row, column, 0.0)
    with pytest.raises(ValueError, match=r"^kl has shape"):
        kto_loss(row, row, row, row)
    with pytest.raises(ValueError, match=r"^kl must be a number"):
        kto_loss(row, row, row, math.nan)
    with pytest.raises(ValueError, match=r"^beta must be"):
        kto_loss(row, row, row, 0.0, beta=-1.0)
    with pytest.raises(ValueError, match=r"^desirable_weight must be"):
        kto_loss(row, row, row, 0.0, desirable_weight=-1.0)
    with pytest.raises(ValueError, match=r"^undesirable_weight must be"):
        kto_loss(row, row, row, 0.0, undesirable_weight=-1.0)


def test_simpo():
    chosen, rejected = torch.full((1,), -1.0), torch.full((1,), -2.0)
    # 2 (-1 + 2) - 0.5 = 1.5
    assert simpo_loss(chosen, rejected).item() == pytest.approx(math.log1p(math.exp(-1.5)))
    zero = torch.zeros(5)
    chosen, rejected = randn(0, 2, 5)
    expected = dpo_loss(chosen, rejected, zero, zero, 3.0)
    torch.testing.assert_close(simpo_loss(chosen, rejected, 3.0, 0.0), expected)
    margin = torch.full((5,), 0.7)
    expected = bradley_terry_loss(3.0 * chosen, 3.0 * rejected, margin.double())
    torch.testing.assert_close(simpo_loss(chosen, rejected, 3.0, 0.7), expected)
    assert torch.autograd.gradcheck(simpo_loss, (chosen.requires_grad_(), rejected.requires_grad_()))
    with pytest.raises(ValueError, match=r"^rejected_log_prob has shape"):
        simpo_loss(zero, zero[:2])
    with pytest.raises(ValueError, match=r"^beta must be"):
        simpo_loss(zero, zero, 0.0)
    with pytest.raises(ValueError, match=r"^simpo_gamma must be"):
        simpo_loss(zero, zero, 1.0, -0.1)


def test_odds_ratio():
    # Probabilities 3/4 and 1/4: odds 3 and 1/3, so a lead of log 9.
    chosen, rejected = torch.tensor([math.log(0.75)]), torch.tensor([math.log(0.25)])
    assert odds_ratio_loss(chosen, rejected).item() == pytest.approx(-math.log(0.9))
    assert odds_ratio_loss(chosen, chosen).item() == pytest.approx(math.log(2))
    p, q = (randn(i, 6).sigmoid() for i in range(2))
    odds = (p / (1 - p)) / (q / (1 - q))
    torch.testing.assert_close(odds_ratio_loss(p.log(), q.log()), (1 + 1 / odds).log().mean())
    inputs = (p.log().requires_grad_(), q.log().requires_grad_())
    assert torch.autograd.gradcheck(odds_ratio_loss, inputs)
    # Near certainty and near impossibility stay finite, gradients included.
    extreme = torch.tensor([-1e-6, -80.0], requires_grad=True)
    odds_ratio_loss(extreme, extreme.detach().flip(0)).backward()
    assert extreme.grad.isfinite().all()
    with pytest.raises(ValueError, match=r"^rejected_log_prob has shape"):
        odds_ratio_loss(chosen, torch.zeros(2))
    with pytest.raises(ValueError, match=r"^chosen_log_prob has shape"):
        odds_ratio_loss(chosen[None], chosen[None])
