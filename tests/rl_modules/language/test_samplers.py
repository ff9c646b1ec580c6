"""One suite over all samplers: their distributions, log-probabilities, lengths, ends and limits."""

import importlib.util
import socket
import threading

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rl_modules import GRPO
from rl_modules.common.errors import UsageError
from rl_modules.functional import token_log_probs
from rl_modules.language import serving
from rl_modules.language.sampling.draw import NextToken
from rl_modules.language.sampling.remote import ServerSampler
from rl_modules.language.sampling.rows import rows_of
from rl_modules.language.sampling.stop_strings import StopStrings
from tests.rl_modules.language.fake_vllm_server import FakeServer
from tests.rl_modules.language.sampler_cases import (
    EOS,
    POSITIONS,
    WORDS,
    running_server,
    sampler_of,
    settings,
    tiny_model,
)

REAL = pytest.param(
    "vllm",
    marks=[pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")],
)
SAMPLERS = ["native", "server", "fake vllm", REAL]
PROMPTS = [[5, 6, 7, 8], [9], [3, 4] * 5]
#: 99.9th percentile of χ² by degrees of freedom is about df + 3.1 √(2 df) + 5.
DRAWS = 2000
#: Engines round otherwise than one forward pass, by this many nats.
ROUNDING = 1e-4


def chi_squared_bound(degrees: int) -> float:
    return degrees + 3.1 * (2 * degrees) ** 0.5 + 5


@pytest.fixture(params=SAMPLERS)
def kind(request):
    return request.param


@pytest.fixture
def model():
    return tiny_model()


@torch.no_grad()
def next_token_probabilities(model, prompt, options) -> torch.Tensor:
    """What each next token's probability is under the settings, by the definition of the filters."""
    logits = model(input_ids=torch.tensor([prompt])).logits[:, -1]
    seen = torch.zeros((1, WORDS), dtype=torch.bool)
    seen[0, prompt] = True
    return NextToken(**options).scores(logits, seen).softmax(-1)[0].double()


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"repetition_penalty": 1.8},
     {"temperature": 1.4, "top_k": 8, "top_p": 0.8, "repetition_penalty": 1.3}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["native", "fake vllm", REAL])  # a server gets a request per draw
def test_tokens_have_the_frequencies_of_the_distribution(kind, model, options, monkeypatch):
    prompt = [5, 6, 7, 8]
    expected = next_token_probabilities(model, prompt, options) * DRAWS
    with sampler_of(kind, model, monkeypatch) as sampler:
        written = sampler.sample([prompt], DRAWS, range(DRAWS), settings(max_completion_length=1, **options))
    counts = torch.bincount(written.tokens[:, 0], minlength=WORDS).double()
    assert counts[expected == 0].sum() == 0
    # Rare tokens count as one class, or their small expectations would carry the statistic.
    rare = (expected > 0) & (expected < 5)
    classes = [(counts[i], expected[i]) for i in (expected >= 5).nonzero().flatten()]
    classes += [(counts[rare].sum(), expected[rare].sum())] if expected[rare].sum() >= 1 else []
    assert len(classes) > 1
    statistic = sum(float((n - e) ** 2 / e) for n, e in classes)
    assert statistic < chi_squared_bound(len(classes) - 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_forward_pass(kind, model, temperature, monkeypatch):
    with sampler_of(kind, model, monkeypatch) as sampler:
        written = sampler.sample(PROMPTS, 3, range(9), settings(temperature=temperature))
        # An update of the weights reaches the sampler, the tied output layer included.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        sampler.update_weights(model, 3)
        later = sampler.sample(PROMPTS, 3, range(9), settings(temperature=temperature))
    assert not torch.equal(later.log_prob[:, 0], written.log_prob[:, 0])
    worst = 0.0
    for row in range(9):
        n = int(later.length[row])
        prompt, tokens = PROMPTS[row // 3], later.tokens[row, :n]
        text = torch.tensor([[*prompt, *tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=text).logits[:, len(prompt) - 1 : -1]
        expected = token_log_probs(logits, tokens[None], temperature)[0]
        worst = max(worst, float((later.log_prob[row, :n] - expected).abs().max()))
    assert worst < ROUNDING
    assert later.version is None or later.version.tolist() == [3] * 9
    assert (later.log_prob[~later.mask] == 0).all()


def test_filters_are_part_of_the_log_probs(kind, model, monkeypatch):
    """The trap of engines that report unfiltered log-probabilities: the kept mass would be missing from the ratio."""
    prompt = [5, 6, 7, 8]
    kept = next_token_probabilities(model, prompt, {"top_p": 0.7})
    with sampler_of(kind, model, monkeypatch) as sampler:
        written = sampler.sample([prompt], 16, range(16), settings(max_completion_length=1, top_p=0.7))
    expected = kept[written.tokens[:, 0]].log().float()
    torch.testing.assert_close(written.log_prob[:, 0], expected, atol=ROUNDING, rtol=0)


def test_rows_end_at_eos_or_at_their_limit(kind, model, monkeypatch):
    stops = (EOS, 2, 3, 11)
    long = [4] * (POSITIONS - 3)
    with sampler_of(kind, model, monkeypatch) as sampler:
        written = sampler.sample([[5, 6], long], 16, range(32), settings(eos_token_id=stops))
        heard = {}
        sampler.sample([[5, 6], long], 16, range(32), settings(eos_token_id=stops),
                       lambda row, tokens, finished: heard.update({row: (len(tokens), finished)}))  # fmt: skip
    assert sorted(heard) == list(range(32))
    limits = [8] * 16 + [3] * 16
    for tokens, n, finished, limit in zip(
        written.tokens.tolist(), written.length.tolist(), written.finished.tolist(), limits, strict=True
    ):
        assert all(token not in stops for token in tokens[: n - 1])
        assert finished == (tokens[n - 1] in stops)
        assert n == limit or finished
        assert tokens[n:] == [0] * (len(tokens) - n)
    reasons = set(written.finish_reason)
    assert reasons == {"stop", "length"}


def pieces_tokenizer():
    """Tokens of one to three characters, some of half a character: "é" has two bytes."""
    pieces = ["<pad>", "<eos>", "a", "b", "c", "ab", "ba", "bc", "abc", "Ã", "©", "aÃ", "©b", "©©", "cÃ©a", "Ġa"]
    model = models.WordLevel({piece: i for i, piece in enumerate([*pieces, *"defghijk"])}, "a")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


@pytest.mark.parametrize("texts", [("ab",), ("éb", "cb"), ("bab", "d", "ca"), ("ca", "abcabcabc")], ids=" ".join)
@pytest.mark.parametrize("in_flight", [None, 5])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(kind, texts, in_flight, model, monkeypatch):
    """The expectation cuts what is sampled without them where the text of all tokens so far has one."""
    tokenizer = pieces_tokenizer()
    stop = StopStrings(texts, tokenizer)
    with sampler_of(kind, model, monkeypatch) as sampler:
        if kind == "native":
            sampler.max_rows_in_flight = in_flight
        whole = sampler.sample([[5, 6], [7]], 32, range(64), settings(max_completion_length=24))
        heard = {}
        found = sampler.sample([[5, 6], [7]], 32, range(64), settings(max_completion_length=24, stop=stop),
                               lambda row, tokens, finished: heard.update({row: (tokens, finished)}))  # fmt: skip
    cut = 0
    for i, row in enumerate(rows_of(whole)):
        ends = [n for n in range(1, len(row.tokens) + 1) if any(t in tokenizer.decode(row.tokens[:n]) for t in texts)]
        n, finished = (ends[0], True) if ends else (len(row.tokens), row.finished)
        own = rows_of(found)[i]
        assert (own.tokens, own.finished) == (row.tokens[:n], finished) == heard[i]
        assert own.log_prob == pytest.approx(row.log_prob[:n], abs=1e-5)
        cut += n < len(row.tokens)
    assert cut > 3


@pytest.mark.parametrize("stop", ["ab", [], ["a", ""]])
def test_stop_strings_that_would_end_everything_are_refused(stop):
    with pytest.raises(UsageError, match="stop=.* must be a list of texts"):
        GRPO(stop=stop)


def test_equal_seeds_give_equal_rows_and_others_others(kind, model, monkeypatch):
    with sampler_of(kind, model, monkeypatch) as sampler:
        one = sampler.sample(PROMPTS, 4, range(12), settings())
        again = sampler.sample(PROMPTS, 4, range(12), settings())
        others = sampler.sample(PROMPTS, 4, [2**62 + n for n in range(12)], settings())
        same = sampler.sample([PROMPTS[0]], 4, [7] * 4, settings())
    assert torch.equal(one.tokens, again.tokens)
    width = min(one.tokens.shape[1], others.tokens.shape[1])
    assert not torch.equal(one.tokens[:, :width], others.tokens[:, :width])
    assert len({tuple(row) for row in same.tokens.tolist()}) == 1
    assert len({tuple(row) for row in one.tokens[:4].tolist()}) > 1


def test_temperature_0_takes_the_likeliest_token_with_certainty(kind, model, monkeypatch):
    with sampler_of(kind, model, monkeypatch) as sampler:
        written = sampler.sample(PROMPTS, 2, range(6), settings(temperature=0.0, max_completion_length=1))
    with torch.no_grad():
        best = [int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in PROMPTS]
    assert written.tokens[:, 0].tolist() == [token for token in best for _ in range(2)]
    assert (written.log_prob == 0).all()


def test_what_cannot_be_written_is_refused(kind, model, monkeypatch):
    with sampler_of(kind, model, monkeypatch) as sampler:
        for prompts, seeds, message in (
            ([[]], range(1), "prompt 0 is empty"),
            ([[1] * POSITIONS], range(1), f"prompt 0 has {POSITIONS} tokens"),
            ([[WORDS]], range(1), "has a token id outside"),
        ):
            with pytest.raises(UsageError, match=message):
                sampler.sample(prompts, 1, seeds, settings())


def test_a_rank_waits_while_another_gives_the_server_its_weights(model):
    """Longer than its retries take, which are for servers that do not answer."""
    with running_server(model) as (_, address):
        wait = {"retries": 0, "retry_wait_s": 0.01, "run": "ours"}
        first, other = (ServerSampler([address], "cpu", pushes=pushes, **wait) for pushes in (True, False))
        other.update_weights(model, 1)
        pushed = threading.Timer(0.5, first.update_weights, (model, 1))
        pushed.start()
        written = other.sample(PROMPTS, 1, range(3), settings())
        pushed.join()
    assert written.version.tolist() == [1, 1, 1]


def test_a_rank_takes_no_completions_of_another_run_of_equal_version(model):
    """As after a restart: the server still has the last run's weights when the second rank asks first."""
    with running_server(model) as (_, address):
        ServerSampler([address], "cpu").update_weights(tiny_model(3), 1)
        wait = {"retries": 0, "retry_wait_s": 0.01, "run": "new"}
        first, other = (ServerSampler([address], "cpu", pushes=pushes, **wait) for pushes in (True, False))
        other.update_weights(model, 1)
        pushed = threading.Timer(0.5, first.update_weights, (model, 1))
        pushed.start()
        written = other.sample(PROMPTS, 1, range(3), settings())
        pushed.join()
        assert written.tokens.tolist() == first.sample(PROMPTS, 1, range(3), settings()).tokens.tolist()


def test_a_run_waits_for_a_server_that_starts_after_it(model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    is_over = threading.Event()

    def serve() -> None:
        if not is_over.wait(0.5):
            with running_server(model, port=port):
                is_over.wait()

    late = threading.Thread(target=serve)
    late.start()
    try:
        sampler = ServerSampler([f"127.0.0.1:{port}"], "cpu", retries=100, retry_wait_s=0.1)
        sampler.update_weights(model, 1)
        assert sampler.sample(PROMPTS, 1, range(3), settings()).tokens.shape[0] == 3
    finally:
        is_over.set()
        late.join()


def test_a_rank_does_not_wait_for_a_server_that_is_gone(model):
    with running_server(model) as (_, address):
        pass
    other = ServerSampler([address], "cpu", retries=1, retry_wait_s=0.01, pushes=False)
    other.update_weights(model, 1)
    with pytest.raises(UsageError, match="none of .* answers after 1 retries"):
        other.sample(PROMPTS, 1, range(3), settings())


def test_two_runs_at_one_server_get_the_completions_of_their_own_weights():
    models, wait = [tiny_model(seed) for seed in (0, 1)], {"retry_wait_s": 0.01}
    with running_server(models[0]) as (_, address):
        first, second = (ServerSampler([address], "cpu", **wait) for _ in models)
        first.update_weights(models[0], 1)
        alone = first.sample(PROMPTS, 1, range(3), settings())
        second.update_weights(models[1], 1)  # of the same optimizer step, so that the versions are equal
        others = second.sample(PROMPTS, 1, range(3), settings())
        again = first.sample(PROMPTS, 1, range(3), settings())
    assert again.tokens.tolist() == alone.tokens.tolist() != others.tokens.tolist()


class Broken(FakeServer):
    async def pause_generation(self, mode: str) -> None:
        raise RuntimeError("CUDA out of memory")


def test_an_engine_that_fails_is_named_when_the_run_gives_up(model, monkeypatch):
    monkeypatch.setattr(serving.os, "kill", lambda process, signal: None)  # the server would end this process
    with running_server(model, kind=Broken) as (_, address):
        sampler = ServerSampler([address], "cpu", retries=1, retry_wait_s=0.01)
        with pytest.raises(UsageError, match=r"answers after 1 retries \(.*CUDA out of memory.*\); start `rl serve`"):
            sampler.update_weights(model, 1)
