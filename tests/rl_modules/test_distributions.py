"""The action distributions are torch's own densities, drawn from private generators."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

from rl_modules.common.errors import UsageError
from rl_modules.distributions import as_distribution, distribution_from, make_distribution, parameter_count

S = 7
SPACES = {
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2, 4]),
    "MultiBinary": spaces.MultiBinary(4),
    "Box": spaces.Box(-2, 2, (3,), np.float32),
}
LOG_STD = torch.tensor([0.3, -0.5, 0.0])


def make(name, seed, requires_grad=False):
    """One of ours, its parameters, and torch's as a list of independent parts."""
    space = SPACES[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(S, parameter_count(space), generator=generator).requires_grad_(requires_grad)
    log_std = LOG_STD + 0.1 * seed if name == "Box" else None
    std = (LOG_STD + 0.1 * seed).exp().expand(S, 3)
    theirs = {
        "Discrete": lambda: [td.Categorical(logits=x)],
        "MultiDiscrete": lambda: [td.Categorical(logits=part) for part in x.split([3, 2, 4], -1)],
        "MultiBinary": lambda: [td.Bernoulli(logits=part) for part in x.unbind(-1)],
        "Box": lambda: [td.Normal(m, s) for m, s in zip(x.unbind(-1), std.unbind(-1), strict=True)],
    }[name]()  # fmt: skip
    return make_distribution(space, x, log_std), x, theirs


def columns(name, action):
    return [action] if name == "Discrete" else action.unbind(-1)


@pytest.mark.parametrize("name", SPACES)
def test_densities_and_entropies_are_torchs(name):
    ours, x, theirs = make(name, 0, requires_grad=True)
    action = ours.sample(torch.Generator().manual_seed(1))
    expected = sum(part.log_prob(a.float()) for part, a in zip(theirs, columns(name, action), strict=True))
    torch.testing.assert_close(ours.log_prob(action), expected)
    torch.testing.assert_close(ours.entropy(), sum(part.entropy() for part in theirs).expand(S))
    gradients = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (ours.log_prob(action), expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", SPACES)
def test_divergences_are_torchs(name):
    (p, _, p_theirs), (q, _, q_theirs) = make(name, 0), make(name, 1)
    expected = sum(td.kl_divergence(a, b) for a, b in zip(p_theirs, q_theirs, strict=True))
    torch.testing.assert_close(p.kl(q), expected)
    torch.testing.assert_close(p.kl(p.detach()), torch.zeros(S), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete", "MultiBinary"])
def test_samples_have_the_probabilities(name):
    space = SPACES[name]
    x = torch.randn(1, parameter_count(space), generator=torch.Generator().manual_seed(3))
    many = make_distribution(space, x.expand(20_000, -1))
    action = many.sample(torch.Generator().manual_seed(4))
    assert all(space.contains(a.numpy().astype(space.dtype)) for a in action[:20])
    one = make_distribution(space, x)
    # Each column of options against its own density; 20,000 draws leave a standard error of 0.0035.
    for k, column in enumerate(columns(name, action)):
        for option in range(2):
            frequency = (column == option).double().mean().item()
            logits = {"Discrete": x, "MultiDiscrete": x.split([3, 2, 4], -1)[k] if name == "MultiDiscrete" else x}
            p = torch.sigmoid(x[0, k]) if name == "MultiBinary" else logits[name].softmax(-1)[0, option]
            p = 1 - p if name == "MultiBinary" and option == 0 else p
            assert frequency == pytest.approx(p.item(), abs=0.015)
    mode = one.mode()[0]
    assert one.log_prob(mode[None]).item() >= one.log_prob(action[:1]).item()


def test_normal_samples_have_mean_and_deviation():
    mean = torch.tensor([[1.0, -2.0, 0.5]]).expand(20_000, 3)
    action = make_distribution(SPACES["Box"], mean, LOG_STD).sample(torch.Generator().manual_seed(0))
    torch.testing.assert_close(action.mean(0), mean[0], atol=0.04, rtol=0)
    torch.testing.assert_close(action.std(0), LOG_STD.exp(), atol=0.03, rtol=0)


@pytest.mark.parametrize("name", SPACES)
def test_samples_come_from_the_given_generator_and_carry_no_gradient(name):
    ours, _, _ = make(name, 0, requires_grad=True)
    state = torch.get_rng_state()
    a, b = (ours.sample(torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)
    assert not a.requires_grad


@pytest.mark.parametrize("name", SPACES)
def test_parameters_make_the_same_distribution(name):
    ours, _, _ = make(name, 0, requires_grad=True)
    again = distribution_from(SPACES[name], ours.parameters())
    action = ours.sample(torch.Generator().manual_seed(5))
    torch.testing.assert_close(again.log_prob(action), ours.log_prob(action).detach())


def test_spaces_without_a_distribution_are_refused():
    with pytest.raises(UsageError, match="has no action distribution; it must be Discrete, a Box, a vector Multi"):
        parameter_count(spaces.MultiBinary((2, 2)))


@pytest.mark.parametrize(("shape", "dimensions"), [((2, 3), 1), ((2, 3, 4), 2)])
def test_components_that_are_not_joined_are_answered_with_how_to_join_them(shape, dimensions):
    policy = as_distribution(td.Normal(torch.zeros(shape), 1.0))
    with pytest.raises(UsageError, match=rf"join its components by torch.distributions.Independent\(…, {dimensions}\)"):
        policy.log_prob(torch.zeros(shape))
    assert as_distribution(td.Independent(td.Normal(torch.zeros(shape), 1.0), dimensions)).log_prob(
        torch.zeros(shape)
    ).shape == (2,)


class Slow(td.Categorical):
    """Leaves another thread time between the seed and the draw."""

    def sample(self, sample_shape=()):
        time.sleep(0.002)
        return super().sample(sample_shape)


def test_threads_sample_a_distribution_of_torchs_as_one_after_the_other():
    def draws(seed):
        policy, generator = as_distribution(Slow(logits=torch.zeros(4, 100))), torch.Generator().manual_seed(seed)
        return torch.stack([policy.sample(generator) for _ in range(10)])

    alone = [draws(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(draws, range(2)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_sampling_on_the_cpu_touches_no_gpu(monkeypatch):
    def touched(*args):
        raise AssertionError("a GPU's generator")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, touched)
    inner = td.Normal(torch.zeros(3, 2), torch.ones(3, 2))
    before = torch.get_rng_state()
    as_distribution(td.Independent(inner, 1)).sample(torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
