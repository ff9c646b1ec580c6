import pytest
import torch
from hypothesis import given

from rl_modules.functional import approx_kl, kl_estimate

from .helpers import categorical_kl, randn, repeatable, seeds


def test_estimates_of_a_hand_worked_pair():
    log_prob, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    d = torch.tensor(0.5).log().item()
    assert kl_estimate(log_prob, reference, "k1").item() == pytest.approx(-d)
    assert kl_estimate(log_prob, reference, "k2").item() == pytest.approx(d * d / 2)
    assert kl_estimate(log_prob, reference, "k3").item() == pytest.approx(0.5 - 1 - d)


@repeatable
@given(seeds)
def test_expectations_over_all_samples(seed):
    """k1 and k3 are unbiased; k2 and k3 are never negative."""
    log_prob, reference = randn(seed, 7).log_softmax(-1), randn(seed + 1, 7).log_softmax(-1)
    exact = categorical_kl(log_prob.exp(), reference.exp())
    for estimator in ("k1", "k3"):
        estimate = (log_prob.exp() * kl_estimate(log_prob, reference, estimator)).sum()
        torch.testing.assert_close(estimate, exact)
    assert (kl_estimate(log_prob, reference, "k2") >= 0).all()
    assert (kl_estimate(log_prob, reference, "k3") >= 0).all()


@repeatable
@given(seeds)
def test_expected_gradients_when_used_as_a_loss_on_policy(seed):
    """k1: zero. k2: reverse KL. k3: forward KL. k3 times the ratio: reverse KL. By enumeration, so exactly."""
    logits = randn(seed, 6).requires_grad_()
    reference = randn(seed + 1, 6).log_softmax(-1)
    log_prob = logits.log_softmax(-1)
    probability = log_prob.exp()
    sampled = probability.detach()

    def gradient(scalar):
        return torch.autograd.grad(scalar, logits, retain_graph=True)[0]

    reverse = gradient(categorical_kl(probability, reference.exp()))
    forward = gradient(categorical_kl(reference.exp(), probability))
    ratio = (log_prob - log_prob.detach()).exp()
    k3 = kl_estimate(log_prob, reference, "k3")
    torch.testing.assert_close(
        gradient((sampled * kl_estimate(log_prob, reference, "k1")).sum()), torch.zeros(6).double()
    )
    torch.testing.assert_close(gradient((sampled * kl_estimate(log_prob, reference, "k2")).sum()), reverse)
    torch.testing.assert_close(gradient((sampled * k3).sum()), forward)
    torch.testing.assert_close(gradient((sampled * k3 * ratio).sum()), reverse)
    assert (reverse - forward).abs().max() > 1e-3  # the two directions differ here, so the test can tell them apart


def test_k3_keeps_its_digits_while_the_policies_are_close():
    # d = 1e-4: k3 is 5.00e-9, far below float32's 6e-8 around 1, where e^d - 1 would be rounded to it.
    log_prob, reference = torch.tensor([0.0]), torch.tensor([1e-4])
    assert kl_estimate(log_prob, reference, "k3").item() == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize(("difference", "slope"), [(-1e4, 1.0), (-100.0, 1.0), (100.0, 0.0), (1e4, 0.0)])
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_k3_and_its_gradient_are_finite_however_far_apart_the_policies_are(difference, slope, factor):
    log_prob = torch.tensor(-difference, requires_grad=True)
    kl = kl_estimate(log_prob, torch.tensor(0.0), "k3")
    (factor * kl).backward()
    assert kl.isfinite()
    assert log_prob.grad.item() == factor * slope


def test_approx_kl_is_the_mean_of_k3_over_the_old_policys_samples():
    # d = log 2 and -log 2: (2 - 1 - log 2 + .5 - 1 + log 2) / 2 = .25
    log_prob = torch.tensor([2.0, 0.5]).log().requires_grad_()
    result = approx_kl(log_prob, torch.zeros(2))
    assert result.item() == pytest.approx(0.25)
    assert not result.requires_grad
    old, new = randn(0, 7).log_softmax(-1), randn(1, 7).log_softmax(-1)
    # Weighted so that the plain mean is the expectation under the old policy.
    estimate = sum(old[i].exp() * approx_kl(new[i : i + 1], old[i : i + 1]) for i in range(7))
    torch.testing.assert_close(estimate, categorical_kl(old.exp(), new.exp()))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_receives_no_gradient(estimator):
    log_prob, reference = randn(0, 5).requires_grad_(), randn(1, 5).requires_grad_()
    kl_estimate(log_prob, reference, estimator).sum().backward()
    assert log_prob.grad.abs().sum() > 0
    assert reference.grad is None


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_bfloat16_gives_float32(estimator):
    log_prob = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    result = kl_estimate(log_prob, log_prob - 0.5, estimator)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, kl_estimate(log_prob.float(), log_prob.float() - 0.5, estimator))


def test_refuses_by_name():
    row, column = torch.zeros(5), torch.zeros(5, 1)
    with pytest.raises(ValueError, match=r"^ref_log_prob has shape"):
        kl_estimate(row, column, "k1")
    with pytest.raises(ValueError, match=r"^estimator must be one of 'k1', 'k2', 'k3', got 'k4'"):
        kl_estimate(row, row, "k4")
    with pytest.raises(ValueError, match=r"^old_log_prob has shape"):
        approx_kl(row, column)
