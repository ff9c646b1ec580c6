"""Draws against closed forms: exact counts for evenly spread numbers, transformers' processors, SplitMix64."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl_modules.language.fast.block_draw import draw_by_blocks
from rl_modules.language.sampling.draw import NextToken, uniforms
from tests.fake_device import DEVICE, fake_device


def logits_of(seed: int, *shape: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def evenly(n: int) -> torch.Tensor:
    """The middles of n equal parts of [0, 1)."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.5}, {"top_p": 0.8, "min_p": 0.2},
     {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5}, {"repetition_penalty": 0.5}],
)  # fmt: skip
def test_distributions_equal_those_of_transformers_processors(temperature, filters):
    logits = logits_of(0, 64, 30)
    history = torch.randint(30, (64, 6), generator=torch.Generator().manual_seed(1))
    processors = LogitsProcessorList()
    if "repetition_penalty" in filters:
        processors.append(RepetitionPenaltyLogitsProcessor(filters["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(temperature))
    for name, kind in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in filters:
            processors.append(kind(filters[name]))
    expected = processors(history, logits.clone()).log_softmax(-1)
    seen = torch.zeros(64, 30, dtype=torch.bool).scatter_(-1, history, True)
    rule = NextToken(temperature, **filters)
    torch.testing.assert_close(rule.scores(logits, seen).log_softmax(-1), expected)
    # The draw reports this distribution's own logarithm, and gives nothing that it rules out.
    token, log_prob = rule.draw(logits, evenly(64), seen)
    torch.testing.assert_close(log_prob, expected.gather(-1, token.unsqueeze(-1)).squeeze(-1))
    assert log_prob.isfinite().all()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(None, None, None), (0, 1.0, 0.0), (1000, 1.0, None)])
def test_filters_that_keep_everything(top_k, top_p, min_p):
    logits = logits_of(0, 4, 30)
    assert torch.equal(NextToken(1.0, top_k, top_p, min_p).scores(logits), logits)


def test_ties_at_the_kth_place_stay():
    scores = NextToken(top_k=2).scores(torch.tensor([[3.0, 1.0, 2.0, 2.0]]))
    assert scores.isfinite().tolist() == [[True, False, True, True]]


def test_a_top_p_below_every_probability_keeps_the_likeliest():
    assert NextToken(top_p=1e-9).scores(torch.tensor([[1.0, 1.0, 2.0]])).isfinite().tolist() == [[False, False, True]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_evenly_spread_numbers_draw_each_token_in_exact_proportion(temperature):
    logits = logits_of(0, 50)
    n = 20_000
    token, log_prob = NextToken(temperature).draw(logits.expand(n, -1), evenly(n))
    probability = (logits.double() / temperature).softmax(-1)
    # A token's interval of length p contains p·n of the evenly spread points, give or take the one at its border.
    assert ((torch.bincount(token, minlength=50) - probability * n).abs() <= 1).all()
    torch.testing.assert_close(log_prob, probability.log().float()[token])


def test_the_draws_of_many_seeds_pass_a_chi_square_test():
    logits = logits_of(1, 12)
    n = 20_000
    expected = logits.double().softmax(-1) * n
    for step in (0, 7):
        token, _ = NextToken().draw(logits.expand(n, -1), uniforms(range(n), 8)[step])
        statistic = ((torch.bincount(token, minlength=12) - expected) ** 2 / expected).sum()
        assert statistic < 31.3  # 11 degrees of freedom: exceeded by one in a thousand


def test_a_large_vocabulary_loses_no_token():
    """One token has 99 % of the probability, 200,000 others share the rest: less each than float32 tells apart."""
    words = 200_000
    logits = torch.zeros(1, words + 1)
    logits[:, 0] = torch.tensor(99.0 * words).log()
    chosen = torch.cat([torch.arange(1, 11), torch.arange(100_000, 100_010), torch.arange(words - 9, words + 1)])
    # From the far end, where the first token's logit (rounded to float32) moves nothing.
    uniform = 1 - 0.01 * (words - chosen + 0.5).double() / words
    token, log_prob = NextToken().draw(logits.expand(30, -1), uniform)
    assert torch.equal(token[20:], chosen[20:])
    assert (token.view(3, 10).diff() == 1).all()
    torch.testing.assert_close(log_prob, torch.full((30,), 0.01 / words).log())


@pytest.mark.long
def test_a_large_vocabulary_keeps_its_proportions():
    """Draws of many seeds, counted in twenty bins of equal probability."""
    words, n = 50_000, 1_000
    logits = logits_of(2, words)
    token = torch.cat([NextToken().draw(logits.expand(100, -1), u)[0] for u in uniforms(range(n), 1)[0].split(100)])
    order = logits.argsort()
    start = torch.empty(words, dtype=torch.float64)  # the probability of all less likely tokens
    start[order] = logits.double().softmax(-1)[order].cumsum(-1)
    counts = torch.histc(start[token].float(), 20, 0, 1)
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 43.8  # 19 degrees of freedom: one in a thousand


@pytest.mark.parametrize("words", [7, 512, 4099, 5120, 30_000])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.6}, {"temperature": 0.3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_by_blocks_is_that_of_all_words_in_order(words, filters, dtype):
    logits = logits_of(0, 200, words, spread=3.0).to(dtype)
    logits[0], logits[1, :-1], logits[2, 1:], logits[3] = 0.0, -torch.inf, -torch.inf, -torch.inf
    logits[3, ::600] = 0.0  # a word of every block or none, with the ends of the interval below
    ends = torch.tensor([0.0, 1 - 2.0**-52, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    rule, uniform = NextToken(**filters), torch.cat([ends, evenly(196)])
    scores = rule.scores(logits)
    for ours, other in zip(draw_by_blocks(scores, uniform), rule.draw_from(scores, uniform), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)


def test_no_block_loses_an_unlikely_word():
    scores = torch.zeros(1, 1024)
    scores[0, 511] = scores[0, 0] = -25.0  # e⁻²⁵ of a block's 510 is lost in its float32 sum
    n, share = 64, math.exp(-25.0) / (1022 + 2 * math.exp(-25.0))
    for word, before in ((511, 510 / 1022), (0, 0.0)):
        uniform = before + share * (torch.arange(-3 * n, 3 * n, dtype=torch.float64) + 0.5) / n
        uniform = uniform[uniform >= 0]
        token, _ = draw_by_blocks(scores.expand(len(uniform), -1), uniform)
        assert abs(int((token == word).sum()) - n) <= n // 8


def test_no_block_draws_a_word_that_is_ruled_out():
    generator = torch.Generator().manual_seed(0)
    scores = torch.full((20_000, 2000), -torch.inf)
    allowed = torch.randint(2000, (20_000, 3), generator=generator)
    scores.scatter_(-1, allowed, torch.randn(20_000, 3, generator=generator) * 30)
    # The ends of words, where sums are rounded.
    uniform = scores.double().softmax(-1).cumsum(-1).gather(-1, allowed[:, :1]).squeeze(-1).clamp(max=1 - 2.0**-52)
    _, log_prob = draw_by_blocks(scores, uniform)
    assert log_prob.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("is_fast", ["1", "0"])
def test_a_device_draws_from_half_precision(temperature, is_fast, monkeypatch):
    monkeypatch.setenv("RL_FAST", is_fast)
    logits = logits_of(0, 50, 5000, spread=3.0).bfloat16()
    expected = NextToken(temperature).draw(logits, evenly(50))
    with fake_device():
        found = NextToken(temperature).draw(logits.to(DEVICE), evenly(50).to(DEVICE))
        assert (NextToken(temperature).scores(logits.to(DEVICE)).dtype is torch.bfloat16) == (temperature in (0, 1))
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.inner, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("words", [5, 512, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_a_device_reports_rows_without_a_distribution_as_the_host_does(words, temperature):
    logits = logits_of(0, words, 4).t()  # neighbours of a row are not neighbours in memory
    logits[0], logits[1, 2], logits[2, 3] = -torch.inf, torch.nan, torch.inf
    expected, before = NextToken(temperature).draw(logits, evenly(4)), logits.clone()
    with fake_device():
        here = logits.to(DEVICE)
        found = NextToken(temperature).draw(here, evenly(4).to(DEVICE))
    for ours, other in zip((*found, here), (*expected, before), strict=True):
        torch.testing.assert_close(ours.inner, other, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_ends_of_the_interval_draw_tokens_that_are_allowed():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    token, _ = NextToken().draw(logits, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64))
    assert token.tolist() == [1, 2]


def test_greedy_takes_the_likeliest_with_certainty():
    logits = logits_of(3, 6, 9)
    token, log_prob = NextToken(0).draw(logits, evenly(6))
    assert torch.equal(token, logits.argmax(-1)) and (log_prob == 0).all()


def splitmix64(state: int):
    """Vigna's reference generator, https://prng.di.unimi.it/splitmix64.c."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        yield z ^ (z >> 31)


def test_uniforms_are_splitmix64_from_a_hashed_seed():
    reference = splitmix64(1234567)
    assert [next(reference) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed in (0, 1, 1234567, 2**63 + 5, -1):
        stream = splitmix64(next(splitmix64(seed % 2**64)))
        expected = [(next(stream) >> 12) / 2**52 for _ in range(5)]
        assert uniforms([seed], 5)[:, 0].tolist() == expected


def test_streams_depend_on_the_seed_alone():
    together = uniforms([3, 1, 2], 9)
    assert together.dtype == torch.float64 and together.shape == (9, 3)
    assert torch.equal(uniforms(torch.tensor([2]), 4)[:, 0], together[:4, 2])


def test_neighbouring_seeds_and_steps_are_uncorrelated():
    u = uniforms(range(4000), 6)
    assert u.min() >= 0 and u.max() < 1
    rows = torch.cat([u[:, :-1], u[:, 1:]])  # six steps of a seed, and of the next seed
    correlation = torch.corrcoef(rows) - torch.eye(12)
    assert correlation.abs().max() < 5 / 4000**0.5  # five standard errors
    counts = torch.histc(u.float(), 64, 0, 1)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 103.4  # 63 degrees of freedom: one in a thousand
