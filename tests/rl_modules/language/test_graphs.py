"""Decoding by graphs: the completions of a growing cache, from steps whose tensors never move.

Without a CUDA device a replay calls the step. The fake capture below is stricter: it remembers the address of every
tensor that a step reads and did not make itself, and a replay that reads another one fails, as a CUDA graph would.
"""

import functools
import gc
import logging
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, masking_utils

from benchmarks import gpu_cases
from rl_modules import GRPO
from rl_modules.common.errors import UsageError
from rl_modules.fast import graphs as recordings
from rl_modules.language.fast import graphs, grouped_attention, held_graphs
from rl_modules.language.lora import add_lora
from rl_modules.language.sampling import NativeSampler, check, native, sample
from tests.conformance.architectures import ARCHITECTURES, network
from tests.fake_device import DEVICE, fake_device, move
from tests.fake_graph import use_tapes
from tests.marks import quick
from tests.rl_modules.language.sampler_cases import settings, tiny_model
from tests.rl_modules.language.test_refill import OPTIONS, PROMPTS, counted
from tests.rl_modules.language.test_sampling import (
    COMMON,
    FAMILIES,
    OF_ALL_LENGTHS,
    assert_log_probs_are_the_models,
    build,
    checked,
    draw,
    rows_of,
)

pytestmark = pytest.mark.fast_path

#: Architectures with keys and values of all tokens, of several kinds of positions, masks and heads.
KINDS = ["Llama", "Qwen3", "Qwen3-MoE", "GPT-2", "GPT-NeoX", "OPT", "Bloom", "MPT", "Granite", "DeepSeek-V3", "SmolLM3"]
#: Rounding: sums over more columns, of which the further ones are zeros, and products of more rows.
ROUNDING = {"atol": 2e-5, "rtol": 0}


class Addresses(TorchDispatchMode):
    """Addresses of the tensors that operations read and did not make."""

    def __init__(self):
        super().__init__()
        self.read: list[int] = []
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        storages = {x.untyped_storage().data_ptr() for x in self._made}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.numel() and x.untyped_storage().data_ptr() not in storages:
                self.read.append(x.untyped_storage().data_ptr())
        result = function(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self._made += [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)
                       and x.untyped_storage().data_ptr() not in before]  # fmt: skip
        return result


class FakeGraph:
    """Captures by running the step, and replays it only on the tensors of the capture."""

    captures: ClassVar[list[tuple[int, int]]] = []
    replays = 0

    def __init__(self, step, device, pool=None, records=True):
        step()  # loads kernels
        self._step, self._reads, self.size = step, self._run(step), 100
        FakeGraph.captures.append(step.args)

    def replay(self):
        FakeGraph.replays += 1
        assert self._run(self._step) == self._reads, "a tensor of the graph has moved"

    @staticmethod
    def _run(step):
        with Addresses() as addresses:
            step()
        return addresses.read


@pytest.fixture
def fake(monkeypatch):
    FakeGraph.captures, FakeGraph.replays = [], 0
    monkeypatch.setattr(graphs, "Graph", FakeGraph)
    return FakeGraph


@pytest.fixture
def no_fallback(monkeypatch):
    """Fails where a model is decoded by anything but a graph."""
    monkeypatch.setattr(check, "SharedPromptCache", None)
    monkeypatch.setattr(native, "generate", None)


def by_graphs(model, prompts, **options):
    return draw(model, prompts, cache_implementation="graph", **options)


@pytest.mark.parametrize("number", range(1, 70))
def test_buckets_are_powers_of_two_and_their_halves(number):
    series = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
    assert graphs.bucket(number) == min(size for size in series if size >= number)
    assert graphs.bucket(number, 8) == max(8, graphs.bucket(number))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", quick(FAMILIES, "qwen2", "gpt2"))
@pytest.mark.parametrize("cap", [None, 6])
def test_completions_are_those_of_a_growing_cache(family, attention, cap, fake, caplog):
    """Unequal prompts, rows of one prompt, rows that end, and with a cap rows that take their places."""
    model = build(family, attention)
    expected = draw(model, PROMPTS, **OPTIONS)
    assert not fake.captures
    found = by_graphs(model, PROMPTS, max_rows_in_flight=cap, **OPTIONS)
    assert rows_of(found) == rows_of(expected) and torch.equal(found.finished, expected.finished)
    torch.testing.assert_close(found.log_prob, expected.log_prob, **ROUNDING)
    assert fake.replays > 10 and len(set(fake.captures)) <= 6  # few buckets
    assert not caplog.records  # nothing fell back
    # What the next generation does is known: nothing is captured again, and the numbers are the same bit for bit.
    fake.captures.clear()
    again = by_graphs(model, PROMPTS, max_rows_in_flight=cap, **OPTIONS)
    assert not fake.captures and torch.equal(again.log_prob, found.log_prob)


@pytest.mark.parametrize("name", KINDS)
def test_architectures(name, fake):
    model = network(name)
    options = {"max_completion_length": 12, "eos_token_id": list(range(2, 12)), "num_generations": 3}
    expected = draw(model, OF_ALL_LENGTHS, **options)
    found = by_graphs(model, OF_ALL_LENGTHS, max_rows_in_flight=5, **options)
    assert rows_of(found) == rows_of(expected)
    torch.testing.assert_close(found.log_prob, expected.log_prob, atol=5e-5, rtol=0)
    assert fake.replays


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_is_the_function_bit_for_bit(family, monkeypatch):
    """Operators on the tensors of the recording, without the Python between them, and plain calls of the steps."""
    expected = by_graphs(build(family), PROMPTS, max_rows_in_flight=6, **OPTIONS)
    tape, model = use_tapes(monkeypatch), build(family)
    begin = graphs.GraphCache.__init__

    def sharing(cache, *sizes):
        begin(cache, *sizes)
        cache._pool = []  # as on CUDA, the recordings of a cache share memory

    monkeypatch.setattr(graphs.GraphCache, "__init__", sharing)
    for _ in range(2):
        found = by_graphs(model, PROMPTS, max_rows_in_flight=6, **OPTIONS)
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.log_prob, expected.log_prob)
    assert tape.replayed > 30 > tape.made
    trained(model)  # weights that an optimizer changes in place are those that a recording reads
    expected = draw(model, PROMPTS, **OPTIONS)
    found = by_graphs(model, PROMPTS, max_rows_in_flight=6, **OPTIONS)
    assert rows_of(found) == rows_of(expected)
    torch.testing.assert_close(found.log_prob, expected.log_prob, **ROUNDING)


class Checked:
    """A recording on the stand-in for a GPU, which refuses what a capture can't hold."""

    made = replayed = 0

    def __init__(self, device, generators, pool=None):
        Checked.made += 1

    def warm_up(self, run):
        run()

    def capture(self, run):
        before, masking_utils.is_tracing = masking_utils.is_tracing, lambda *_: True  # as while CUDA captures
        try:
            with recordings.Recordable(()):
                run()
        finally:
            masking_utils.is_tracing = before
        self._run = run

    def replay(self):
        Checked.replayed += 1
        self._run()


OF_DEVICE = ["Bloom", "Cohere", "GPT-NeoX", "Granite", "Llama", "MPT", "OLMo-2", "OPT", "Qwen2", "Qwen3", "SmolLM3"]


@pytest.mark.parametrize("name", quick(OF_DEVICE, "Qwen2", "Bloom"))
def test_a_step_on_a_device_reads_nothing_back(name, monkeypatch, caplog):
    monkeypatch.setitem(recordings.RECORDERS, DEVICE.type, Checked)
    monkeypatch.setattr(Checked, "made", 0)
    monkeypatch.setattr(Checked, "replayed", 0)
    with fake_device(), caplog.at_level(logging.WARNING):
        model = network(name).eval().requires_grad_(False)
        move(model)
        found = by_graphs(model, OF_ALL_LENGTHS, max_completion_length=6)
        assert found.length.tolist() and not [record for record in caplog.records if "rl_modules" in record.name]
    assert Checked.made == 2 and Checked.replayed >= 5  # the self-check's, and one for these rows


def test_the_fake_finds_a_tensor_that_has_moved(fake):
    model = build("qwen2")
    by_graphs(model, PROMPTS, **OPTIONS)
    cache = next(iter(held_graphs._held[model].caches.values()))
    cache._position = cache._position.clone()
    with pytest.raises(AssertionError, match="has moved"):
        by_graphs(model, PROMPTS, **OPTIONS)


def test_prompts_of_any_length_reuse_the_buckets(fake):
    model = build("qwen2")
    for length in (3, 5, 20, 9, 31, 17):
        prompts = [[7] * length, [8, 9]]
        found = by_graphs(model, prompts, max_completion_length=30)
        assert_log_probs_are_the_models(model, prompts, found)
        if length == 3:
            first = len(fake.captures)
    assert len(fake.captures) == first


def test_fewer_rows_reuse_the_tensors_of_more_and_get_the_same_bits(fake):
    model = build("qwen2")
    found = []
    for held in (False, True):
        if held:
            by_graphs(model, PROMPTS, **OPTIONS)
        found.append(by_graphs(model, PROMPTS[:2], **OPTIONS))
        assert len(held_graphs._held[model].caches) == 1
        held_graphs.release(model)
    assert torch.equal(found[0].log_prob, found[1].log_prob) and rows_of(found[0]) == rows_of(found[1])


def test_columns_grow_with_the_text_and_not_before(fake, monkeypatch):
    monkeypatch.setattr(graphs, "_COLUMNS", 4)
    model = build("llama")
    options = {"max_completion_length": 40, "num_generations": 5}
    expected = draw(model, OF_ALL_LENGTHS, **options)
    by_graphs(model, [[5]], max_completion_length=1)  # the self-check
    fake.captures.clear()
    found = by_graphs(model, OF_ALL_LENGTHS, **options)
    assert rows_of(found) == rows_of(expected)
    widths = [columns for _, columns in fake.captures]
    assert widths[0] == 12 and widths == sorted(widths) and 48 in widths


# -------------------------------------------------------------------- weights that change


def trained(model):
    """An optimizer's step in place, on a loss of no meaning."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("lora", [False, True])
def test_weights_changed_in_place_are_there(lora, fake):
    model = build("qwen2")
    if lora:
        model = add_lora(model, {"r": 4, "target_modules": ["q_proj", "up_proj"]}, "CAUSAL_LM", False).eval()
    before = by_graphs(model, PROMPTS, **OPTIONS)
    first = set(fake.captures)
    fake.captures.clear()
    trained(model)
    found = by_graphs(model, PROMPTS, **OPTIONS)
    assert first.isdisjoint(fake.captures)
    expected = draw(model, PROMPTS, **OPTIONS)
    assert rows_of(found) == rows_of(expected) != rows_of(before)
    torch.testing.assert_close(found.log_prob, expected.log_prob, **ROUNDING)


def moved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [moved, hooked])
def test_weights_that_moved_and_code_that_changed_are_captured_again(change, fake):
    """Weights gathered from shards or loaded by assignment lie elsewhere; a replay would not call a new hook."""
    model = build("llama")
    by_graphs(model, PROMPTS, **OPTIONS)
    first = len(fake.captures)
    change(model)
    found = by_graphs(model, PROMPTS, **OPTIONS)
    assert len(fake.captures) > first
    expected = draw(model, PROMPTS, **OPTIONS)
    assert rows_of(found) == rows_of(expected)
    torch.testing.assert_close(found.log_prob, expected.log_prob, **ROUNDING)


def test_adapters_that_are_turned_off_are_captured_again(fake):
    model = add_lora(build("qwen2"), {"r": 4, "target_modules": ["q_proj", "up_proj"]}, "CAUSAL_LM", False).eval()
    trained(model)
    with_adapters = by_graphs(model, PROMPTS, **OPTIONS)
    with model.disable_adapter():
        without = by_graphs(model, PROMPTS, **OPTIONS)
        assert rows_of(without) == rows_of(draw(model, PROMPTS, **OPTIONS)) != rows_of(with_adapters)
    assert rows_of(by_graphs(model, PROMPTS, **OPTIONS)) == rows_of(with_adapters)


def test_other_adapters_are_captured_again(fake):
    model = add_lora(build("qwen2"), {"r": 4, "target_modules": ["q_proj", "up_proj"]}, "CAUSAL_LM", False).eval()
    model.add_adapter("other", model.peft_config["default"])
    trained(model)
    by_default = by_graphs(model, PROMPTS, **OPTIONS)
    model.set_adapter("other")  # begins as no change of the model
    by_other = by_graphs(model, PROMPTS, **OPTIONS)
    assert rows_of(by_other) == rows_of(draw(model, PROMPTS, **OPTIONS)) != rows_of(by_default)


def test_under_autocast_a_graph_reads_copies_of_the_weights(fake):
    """Autocast's own casts end with its context, which a graph outlives."""
    model = build("qwen2")
    first = set()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            plain = draw(model, PROMPTS, **OPTIONS)
            found = by_graphs(model, PROMPTS, **OPTIONS)
            assert first.isdisjoint(fake.captures)
            first = set(fake.captures)
            fake.captures.clear()
        # Products in bfloat16 round with their shapes: the first tokens have the same text behind them.
        torch.testing.assert_close(found.log_prob[:, 0], plain.log_prob[:, 0], atol=1e-5, rtol=0)
        same = (found.tokens[:, :4] == plain.tokens[:, :4]).float().mean()
        assert same > 0.9
        trained(model)
    assert all(p.dtype == torch.float32 and isinstance(p, torch.nn.Parameter) for p in model.parameters())


def test_a_recorded_step_reads_nothing_of_autocasts_cache(fake):
    """Casts of weights that are no matrix of a layer, such as experts', are part of the step."""
    model, enabled = checked(build("qwen2")), []
    model.register_forward_pre_hook(
        lambda *arguments: enabled.append((arguments[2]["input_ids"].shape[1], torch.is_autocast_cache_enabled())),
        with_kwargs=True,
    )
    with torch.autocast("cpu", torch.bfloat16):
        by_graphs(model, [[5, 6, 7]], **OPTIONS)
        assert torch.is_autocast_cache_enabled()
    assert (1, False) in enabled and (3, True) in enabled and (1, True) not in enabled[-5:]


def test_copies_of_weights_give_what_autocast_gives():
    model = build("qwen2")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=tokens).logits
        casts = graphs.CastWeights(model)
        casts.refresh()
        with casts.swapped():
            assert torch.equal(model(input_ids=tokens).logits, expected)


# -------------------------------------------------------------------- memory


def test_the_least_recently_used_graphs_go_first(fake, monkeypatch):
    model = build("qwen2")
    monkeypatch.setattr(held_graphs, "_most", lambda model, share: 250.0)  # two graphs of 100
    found = by_graphs(model, PROMPTS, **OPTIONS)
    cache = next(iter(held_graphs._held[model].caches.values()))
    assert list(cache._graphs) == fake.captures[-2:]
    by_graphs(model, PROMPTS, **{**OPTIONS, "num_generations": 8})  # more rows, for which there is no room
    assert list(held_graphs._held[model].caches.values()) != [cache] and not cache._stores and not cache._graphs
    assert rows_of(by_graphs(model, PROMPTS, **OPTIONS)) == rows_of(found)


def test_release_frees_all_and_the_next_call_captures_again(fake):
    model = tiny_model()
    sampler = NativeSampler(model, cache_implementation="graph")
    first = sampler.sample([[5, 6], [7]], 4, range(8), settings())
    assert held_graphs.held_bytes(model) > 0
    keys = weakref.ref(next(iter(held_graphs._held[model].caches.values()))._stores[0])
    sampler.release()
    assert held_graphs.held_bytes(model) == 0 and keys() is None
    count = len(fake.captures)
    again = sampler.sample([[5, 6], [7]], 4, range(8), settings())
    assert len(fake.captures) > count and torch.equal(again.log_prob, first.log_prob)
    sampler.sleep()  # a training step begins; whether both fit is not known on this device
    assert held_graphs.held_bytes(model) == 0


@pytest.mark.parametrize(("peak", "keeps"), [(0.5, True), (0.85, False)])
def test_graphs_stay_beside_training_where_an_earlier_step_left_room(peak, keeps, monkeypatch, fake):
    model = tiny_model()
    sampler = NativeSampler(model, cache_implementation="graph", graph_memory=0.2)
    there = [torch.nn.Parameter(torch.empty(0))]
    monkeypatch.setattr(held_graphs, "_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(held_graphs, "_most", lambda model, share: share * 1e6)
    monkeypatch.setattr(held_graphs, "held_bytes", lambda model: 1e5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak * 1e6)
    for is_first in (True, False):
        held_graphs._held[model] = held_graphs._Held((), None)
        sampler.sleep()
        assert (model in held_graphs._held) == (keeps and not is_first)
    assert there


def test_a_model_that_is_gone_leaves_nothing(fake):
    model = build("qwen2")
    by_graphs(model, PROMPTS, **OPTIONS)
    gone, keys = weakref.ref(model), weakref.ref(next(iter(held_graphs._held[model].caches.values()))._stores[0])
    del model
    gc.collect()
    assert gone() is None and keys() is None


def test_numbers_that_are_not_finite_do_not_reach_the_next_generation(fake):
    model = build("llama")
    expected = by_graphs(model, PROMPTS, **OPTIONS)
    weight = model.model.layers[0].self_attn.v_proj.weight
    healthy = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(FloatingPointError):
            by_graphs(model, PROMPTS, **OPTIONS)
        weight.copy_(healthy)
    assert torch.equal(by_graphs(model, PROMPTS, **OPTIONS).log_prob, expected.log_prob)


# -------------------------------------------------------------------- attention


@pytest.mark.parametrize("masks", ["bool", "added"])
@pytest.mark.parametrize(("heads", "shared"), [(8, 2), (8, 8), (6, 1)])
def test_attention_over_grouped_keys_is_that_over_repeated_ones(heads, shared, masks):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, heads, 1, 16, generator=generator)
    key, value = (torch.randn(5, shared, 24, 16, generator=generator) for _ in range(2))
    mask = (torch.arange(24) < torch.tensor([[24], [1], [7], [12], [23]]))[:, None, None]
    scores = (query @ key.repeat_interleave(heads // shared, 1).transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ value.repeat_interleave(heads // shared, 1)).transpose(1, 2)
    given = mask if masks == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    found, _ = grouped_attention._attention(None, query, key, value, given, scaling=0.3)
    torch.testing.assert_close(found, expected)


def test_keys_are_not_repeated_while_decoding(no_fallback, monkeypatch):
    shapes = []
    plain = grouped_attention.scaled_dot_product_attention

    def spy(query, key, value, **options):
        shapes.append((query.shape[1], key.shape[1], query.shape[2]))
        return plain(query, key, value, **options)

    monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention", spy)
    model = build("qwen2")
    found = by_graphs(model, PROMPTS, **OPTIONS)
    assert set(shapes) == {(2, 2, 2)}  # two heads of keys, each with the two queries that share it
    assert model.config._attn_implementation == "sdpa"
    assert_log_probs_are_the_models(model, PROMPTS, found, 4, temperature=1.4)


def test_attention_that_the_check_refuses_is_the_models_own_with_one_warning(monkeypatch, caplog, fake):
    model = build("qwen2")
    plain = grouped_attention.scaled_dot_product_attention
    monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention",
                        lambda query, key, value, **options: 1.01 * plain(query, key, value, **options))  # fmt: skip
    with caplog.at_level(logging.WARNING):
        found = [by_graphs(model, PROMPTS, **OPTIONS) for _ in range(2)][1]
    assert rows_of(found) == rows_of(draw(model, PROMPTS, **OPTIONS)) and fake.replays
    said = [record.message for record in caplog.records if "grouped" in record.message]
    assert len(said) == 1 and "differs by" in said[0] and "its own attention is taken" in said[0]


def test_a_cap_on_scores_keeps_its_attention(fake, caplog):
    config = Gemma2Config(**COMMON, head_dim=8, sliding_window=64, attn_logit_softcapping=0.5)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    expected = draw(model, PROMPTS, **OPTIONS)
    found = by_graphs(model, PROMPTS, **OPTIONS)
    assert rows_of(found) == rows_of(expected) and fake.replays and not caplog.records
    assert_log_probs_are_the_models(model, PROMPTS, found, 4, temperature=1.4)


def test_the_benchmark_of_attention_times_each_way():
    found = gpu_cases.attention_us(4, 16, torch.device("cpu"))
    assert len(found) == 6 and all(us > 0 for us in found.values())


def test_cudnns_planner_is_off_while_decoding_and_on_again(monkeypatch):
    states = []
    model = checked(build("qwen2"))
    hook = model.register_forward_pre_hook(lambda *_: states.append(torch.backends.cuda.cudnn_sdp_enabled()))
    for before in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(before)
        try:
            draw(model, OF_ALL_LENGTHS)
            assert torch.backends.cuda.cudnn_sdp_enabled() == before
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
    hook.remove()
    assert states and not any(states)


# -------------------------------------------------------------------- what has no graph


class FakeCuda:
    """The parts of ``torch.cuda`` that a capture calls, in the order in which it does."""

    def __init__(self, monkeypatch, fails=False):
        self.log, self.free, self.current = [], 1000, "training's stream"
        owner = self

        class Stream:
            def wait_stream(self, other):
                owner.log.append("other waits")

        class Context:
            def __init__(self, *names, **options):
                self.name = names[0] if isinstance(names[0], str) else "side"
                self.options = options

            def __enter__(self):
                owner.log.append(f"enter {self.name}")
                owner.current = self.name

            def __exit__(self, kind, *_):
                owner.log.append(f"leave {self.name}")
                owner.free -= 100 * (self.name == "capture")
                if fails and self.name == "capture":
                    raise RuntimeError("operation not permitted")  # before the stream is restored, as torch does

        calls = {
            "device": lambda device: Context("device"), "stream": lambda stream: Context("side"),
            "Stream": lambda device: owner.log.append("new stream") or Stream(), "current_device": lambda: 0,
            "graph_pool_handle": lambda: (0, 7),
            "current_stream": Stream, "synchronize": lambda device: owner.log.append("synchronize"),
            "empty_cache": lambda: None, "mem_get_info": lambda device: (owner.free, 2000),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: owner.log.append("replay")),
            "graph": lambda graph, pool, stream, capture_error_mode: Context("capture"),
            "set_stream": lambda stream: owner.log.append("restore the stream"),
        }  # fmt: skip
        for name, call in calls.items():
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.log.append(f"end {pool}"), raising=False
        )
        monkeypatch.setattr(recordings, "_side_stream", functools.cache(recordings._side_stream.__wrapped__))


def test_a_capture_runs_the_step_once_before_and_once_inside(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    graph = graphs.Graph(lambda: cuda.log.append("step"), torch.device("cuda"))
    assert cuda.log == [
        "enter device", "new stream", "other waits", "enter side", "step", "leave side", "other waits", "synchronize",
        "enter capture", "step", "leave capture", "restore the stream", "synchronize", "leave device",
    ]  # fmt: skip
    assert graph.size == 100
    graph.replay()
    assert cuda.log[-1] == "replay" and cuda.log.count("step") == 2
    for _ in range(3):
        graphs.Graph(lambda: cuda.log.append("step"), torch.device("cuda"))
    assert cuda.log.count("new stream") == 1  # each has a workspace of cuBLAS


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch):
    cuda = FakeCuda(monkeypatch, fails=True)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.Graph(lambda: cuda.log.append("step"), torch.device("cuda"))
    assert cuda.log[-3:] == ["end (0, 7)", "restore the stream", "leave device"]


@pytest.mark.parametrize("name", quick(["Mamba-2", "LFM2", "Qwen3-Next", "Mistral, window 8"], "Mistral, window 8"))
def test_an_architecture_without_one_says_so_once(name, caplog, fake):
    model = network(name)
    check.warn_once.cache_clear()
    options = {"max_completion_length": 12, "eos_token_id": 2}
    expected = draw(model, OF_ALL_LENGTHS, **options)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert rows_of(by_graphs(model, OF_ALL_LENGTHS, **options)) == rows_of(expected)
    said = [record.message for record in caplog.records if "static" in record.message]
    assert len(said) == 1 and "has no static cache here, so that cache_implementation=dynamic is taken" in said[0]
    assert not fake.captures


def test_a_window_that_never_slides_has_one(fake):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**COMMON, sliding_window=40)).eval()
    expected = draw(model, OF_ALL_LENGTHS, num_generations=4)
    assert rows_of(by_graphs(model, OF_ALL_LENGTHS, num_generations=4)) == rows_of(expected) and fake.replays


class Broken(graphs.Graph):
    """A capture that fails, from the given one on."""

    first, count = 0, 0

    def __init__(self, step, device, pool=None, records=True):
        Broken.count += records
        if records and Broken.count > Broken.first:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        super().__init__(step, device, pool)


def test_a_step_that_can_not_be_captured_is_decoded_dynamically_with_its_reason(monkeypatch, caplog):
    monkeypatch.setattr(Broken, "first", 0)
    monkeypatch.setattr(graphs, "Graph", Broken)
    model = build("llama")
    with caplog.at_level(logging.WARNING):
        found = [by_graphs(model, PROMPTS, **OPTIONS) for _ in range(2)][1]
    assert rows_of(found) == rows_of(draw(model, PROMPTS, **OPTIONS))
    said = [record.message for record in caplog.records if "operation not permitted" in record.message]
    assert any("cache_implementation=dynamic is taken" in message for message in said) and len(said) == 2
    assert model not in held_graphs._held


def test_a_bucket_that_can_not_be_captured_runs_as_it_is(monkeypatch, caplog):
    """The self-check's captures succeed, one of a later size does not."""
    model = build("llama")
    expected = draw(model, PROMPTS, **OPTIONS)
    by_graphs(model, [[5]], max_completion_length=1)
    monkeypatch.setattr(Broken, "first", 1)
    monkeypatch.setattr(Broken, "count", 0)
    monkeypatch.setattr(graphs, "Graph", Broken)
    with caplog.at_level(logging.WARNING):
        found = by_graphs(model, PROMPTS, **OPTIONS)
    assert rows_of(found) == rows_of(expected)
    assert [record.message for record in caplog.records] == [
        "a step of decoding can't be captured as a CUDA graph (operation not permitted when stream is capturing), so "
        "that its kernels are started one by one"
    ]


def test_sharded_weights_say_why_they_have_none(caplog, monkeypatch, fake):
    check.warn_once.cache_clear()
    monkeypatch.setattr("rl_modules.language.sampling.decode._any_rank", lambda value, device: value)
    with caplog.at_level(logging.WARNING):
        by_graphs(build("llama"), OF_ALL_LENGTHS, synced_gpus=True)
    assert "is for weights in one piece" in caplog.text and not fake.captures


def test_compiled_layers_run_as_they_are_while_decoding():
    """Each number of rows and columns would be compiled anew."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    expected = draw(build("llama"), OF_ALL_LENGTHS)
    model = build("llama")
    for layer in model.model.layers:
        layer.compile(backend=backend)
    assert torch.equal(draw(model, OF_ALL_LENGTHS).log_prob, expected.log_prob) and not compiled


# -------------------------------------------------------------------- the argument


def test_auto_is_dynamic_on_a_cpu(fake):
    draw(build("llama"), PROMPTS, cache_implementation="auto", **OPTIONS)
    draw(build("llama"), PROMPTS, **OPTIONS)
    assert not fake.captures


@pytest.mark.parametrize("implementation", ["auto", "graph"])
def test_without_fast_paths_the_plain_cache_decodes(implementation, fake, monkeypatch):
    model = checked(build("llama"))
    expected = draw(model, PROMPTS, **OPTIONS)
    monkeypatch.setenv("RL_FAST", "0")
    monkeypatch.setattr(check, "SharedPromptCache", None)
    found = draw(model, PROMPTS, cache_implementation=implementation, **OPTIONS)
    assert rows_of(found) == rows_of(expected) and not fake.captures
    torch.testing.assert_close(found.log_prob, expected.log_prob, **ROUNDING)


def test_graphs_do_no_more_passes():
    model = build("qwen2")
    by_graphs(model, PROMPTS, max_rows_in_flight=8, **OPTIONS)
    draw(model, PROMPTS, max_rows_in_flight=8, **OPTIONS)
    with counted(model) as dynamic:
        draw(model, PROMPTS, max_rows_in_flight=8, **OPTIONS)
    with counted(model) as fixed:
        by_graphs(model, PROMPTS, max_rows_in_flight=8, **OPTIONS)
    assert len(fixed.rows) == len(dynamic.rows)
    assert all(one >= other for one, other in zip(fixed.rows, dynamic.rows, strict=True))


@pytest.mark.parametrize("implementation", ["graph", "static"])
def test_the_argument_reaches_the_sampler_and_is_checked(implementation, fake):
    module = GRPO(model_config=ARCHITECTURES["Llama"], cache_implementation=implementation, max_completion_length=4,
                  sampler_options={"graph_memory": 0.3})  # fmt: skip
    module.configure_model()
    module.act([[5, 6], [7]], [1, 2])
    assert fake.captures and module.sampler.graph_memory == 0.3


@pytest.mark.parametrize(("make", "message"), [
    (lambda: GRPO(cache_implementation="statc"),
     "cache_implementation='statc' must be one of auto, dynamic, graph, static; did you mean static"),
    (lambda: sample(None, [[1]], max_completion_length=1, eos_token_id=1, pad_token_id=0, seeds=[0], graph_memory=2.0),
     "graph_memory=2.0 must be above 0"),
])  # fmt: skip
def test_refused_arguments(make, message):
    with pytest.raises(UsageError, match=message):
        make()
