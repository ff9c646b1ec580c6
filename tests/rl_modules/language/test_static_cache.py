"""Decoding with a cache of fixed size: the same completions as with one that grows, by compilable steps."""

import logging

import pytest
import torch

from rl_modules import GRPO
from rl_modules.common.errors import UsageError
from rl_modules.language.sampling import native, static
from rl_modules.language.sampling.factory import check_sampler
from tests.conformance.architectures import ARCHITECTURES, network
from tests.rl_modules.language.test_refill import OPTIONS, PROMPTS, counted
from tests.rl_modules.language.test_sampling import FAMILIES, OF_ALL_LENGTHS, build, draw, rows_of

#: Architectures with keys and values of all tokens, of several kinds of positions, masks and heads.
KINDS = ["Llama", "Qwen3-MoE", "GPT-2", "GPT-NeoX", "OPT", "Bloom", "MPT", "Granite", "DeepSeek-V3", "SmolLM3"]


@pytest.fixture
def taken(monkeypatch):
    """Sizes with which static caches called the model."""
    sizes = []
    advance = static.StaticRowCache.advance

    def spy(cache, forward, tokens, positions):
        sizes.append((cache.slots, cache.size_for(len(tokens)), len(tokens)))
        return advance(cache, forward, tokens, positions)

    monkeypatch.setattr(static.StaticRowCache, "advance", spy)
    return sizes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cap", [None, 6])
def test_completions_are_those_of_a_growing_cache(family, attention, cap, taken):
    model = build(family, attention)
    expected = draw(model, PROMPTS, **OPTIONS)
    assert not taken
    found = draw(model, PROMPTS, max_rows_in_flight=cap, cache_implementation="static", **OPTIONS)
    assert rows_of(found) == rows_of(expected) and torch.equal(found.finished, expected.finished)
    torch.testing.assert_close(found.log_prob, expected.log_prob, atol=2e-5, rtol=0)
    steps = [size for slots, size, _ in taken if slots == (cap or 28)]
    assert len(steps) > 10 and len(set(steps)) <= 4  # few shapes, each compiled once


@pytest.mark.parametrize("name", KINDS)
def test_architectures(name, taken):
    model = network(name)
    options = {"max_completion_length": 12, "eos_token_id": list(range(2, 12)), "num_generations": 3}
    expected = draw(model, OF_ALL_LENGTHS, **options)
    found = draw(model, OF_ALL_LENGTHS, cache_implementation="static", max_rows_in_flight=5, **options)
    assert rows_of(found) == rows_of(expected)
    assert any(slots == 5 for slots, _, _ in taken)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Mamba-2", "LFM2", "Qwen3-Next", "Mistral, window 8"])
def test_an_architecture_without_one_says_so_once(name, caplog, taken):
    model = network(name)
    native._warn_once.cache_clear()
    options = {"max_completion_length": 12, "eos_token_id": 2}
    expected = draw(model, OF_ALL_LENGTHS, **options)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert rows_of(draw(model, OF_ALL_LENGTHS, cache_implementation="static", **options)) == rows_of(expected)
    said = [record.message for record in caplog.records if "static" in record.message]
    assert len(said) == 1 and "has no static cache here, so that cache_implementation=dynamic is taken" in said[0]
    assert not taken


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_step_compiles_without_a_break_once_per_size(family, monkeypatch):
    """The compiler's front end traces the whole step; what CUDA graphs need beyond that is a CUDA device's to show."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = build(family, "sdpa")
    expected = draw(model, PROMPTS, **OPTIONS)
    compiled = {}

    def step_of(model, forward):
        if model not in compiled:
            compiled[model] = torch.compile(forward, backend=backend, dynamic=False, fullgraph=True)
        return compiled[model]

    monkeypatch.setattr("rl_modules.language.sampling.decode.step_of", step_of)
    options = {**OPTIONS, "cache_implementation": "static", "max_rows_in_flight": 8}
    assert rows_of(draw(model, PROMPTS, **options)) == rows_of(expected)
    first = len(graphs)
    assert rows_of(draw(model, PROMPTS, **options)) == rows_of(expected)
    assert len(graphs) == first  # the next generation finds them


@pytest.mark.long
def test_a_step_that_does_not_compile_runs_as_it_is(monkeypatch, caplog):
    model = build("llama")
    expected = draw(model, PROMPTS, **OPTIONS)

    def fail(*arguments):
        raise RuntimeError("no compiler here")

    static._steps[model] = fail
    forwards = []

    def step_of(model, forward):
        forwards.append(forward)
        return static.partial(static._guarded, model, fail, forward)

    monkeypatch.setattr("rl_modules.language.sampling.decode.step_of", step_of)
    with caplog.at_level(logging.WARNING):
        found = draw(model, PROMPTS, cache_implementation="static", **OPTIONS)
    assert rows_of(found) == rows_of(expected) and forwards
    assert sum("compiling a step of decoding fails (no compiler here)" in r.message for r in caplog.records) == 1


@pytest.mark.long
def test_auto_is_dynamic_on_a_cpu_and_measures_elsewhere(monkeypatch, taken):
    model = build("llama")
    draw(model, PROMPTS, cache_implementation="auto", **OPTIONS)
    assert not taken
    make = native._maker(static.StaticRowCache, model, 8)
    for static_s, dynamic_s in ((1.0, 2.0), (2.0, 1.0)):
        native._measured.clear()
        seconds = iter([static_s, dynamic_s])

        def measured(run, device, seconds=seconds):
            run()
            return next(seconds)

        monkeypatch.setattr(native, "seconds_of", measured)
        for _ in range(2):  # the second time it is known
            assert native.is_faster(model, make, native.RowCache, 8, 20) == (static_s < dynamic_s)
    assert taken


@pytest.mark.long
def test_a_static_cache_does_no_more_passes(monkeypatch):
    model = build("qwen2")
    draw(model, PROMPTS, cache_implementation="static", max_rows_in_flight=8, **OPTIONS)
    draw(model, PROMPTS, max_rows_in_flight=8, **OPTIONS)
    with counted(model) as dynamic:
        draw(model, PROMPTS, max_rows_in_flight=8, **OPTIONS)
    with counted(model) as fixed:
        draw(model, PROMPTS, cache_implementation="static", max_rows_in_flight=8, **OPTIONS)
    assert len(fixed.rows) == len(dynamic.rows)
    assert all(one >= other for one, other in zip(fixed.rows, dynamic.rows, strict=True))


def test_the_argument_reaches_the_sampler_and_is_checked(taken):
    module = GRPO(model_config=ARCHITECTURES["Llama"], cache_implementation="static", max_completion_length=4)
    module.configure_model()
    module.act([[5, 6], [7]], [1, 2])
    assert taken
    with pytest.raises(UsageError, match="cache_implementation='statc' must be one of dynamic, static, auto"):
        GRPO(cache_implementation="statc")
    with pytest.raises(UsageError, match="cache_implementation=static is the native sampler's"):
        check_sampler("vllm", {}, None, "static")
