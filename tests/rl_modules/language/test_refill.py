"""Rows that take the places of rows that have ended: the same completions, in fewer and smaller forward passes."""

import logging
import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_modules.language.fast import shared_prompts
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling import check, decode, native
from rl_modules.language.sampling.decode import Prompts, Waiting
from tests.conformance.architectures import ARCHITECTURES, network
from tests.marks import quick
from tests.rl_modules.language import test_sampling as cases
from tests.rl_modules.language.test_sampling import OF_ALL_LENGTHS, build, checked, draw, rows_of

#: Prompts that grow and shrink along the queue; the third and the last are equal.
PROMPTS = [[5, 6, 7], [9], [3] * 11, [7, 2, 4, 4, 8, 2], [12, 2], [9, 9, 30, 31, 4, 5, 6, 7, 8, 9, 4, 5], [3] * 11]
OPTIONS = {"num_generations": 4, "eos_token_id": list(range(1, 7)), "temperature": 1.4, "max_completion_length": 20}


class Work:
    """Rows of every forward pass, and the number of passes."""

    def __init__(self, model):
        self.rows: list[int] = []
        self.hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: self.rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )


@contextmanager
def counted(model):
    work = Work(model)
    try:
        yield work
    finally:
        work.hook.remove()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", quick(cases.FAMILIES, "qwen2", "gpt2"))
@pytest.mark.parametrize("cap", [1, 3, 6, 13])
def test_completions_are_those_of_all_rows_together(family, attention, cap, monkeypatch):
    monkeypatch.setattr(native, "generate", None)  # would fail if called
    model = checked(build(family, attention))
    expected = draw(model, PROMPTS, **OPTIONS)
    assert len(set(expected.length.tolist())) > 5
    with counted(model) as work:
        found = draw(model, PROMPTS, max_rows_in_flight=cap, **OPTIONS)
    assert rows_of(found) == rows_of(expected) and torch.equal(found.finished, expected.finished)
    torch.testing.assert_close(found.log_prob, expected.log_prob, atol=2e-5, rtol=0)
    assert max(work.rows) <= cap


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_settings_that_look_at_the_prompt(family):
    model = checked(build(family))
    options = {**OPTIONS, "repetition_penalty": 1.3, "top_p": 0.9, "temperature": 2.0}
    expected = draw(model, PROMPTS, **options)
    found = draw(model, PROMPTS, max_rows_in_flight=5, **options)
    assert rows_of(found) == rows_of(expected)


@pytest.mark.fast_path
@pytest.mark.parametrize("kind", [shared_prompts.SharedPromptCache, RowCache])
def test_the_check_finds_a_cache_whose_later_rows_see_their_neighbours(kind, monkeypatch):
    """Without the mask before rows that begin later, these see the zeros there."""
    monkeypatch.setenv("RL_FAST", "1")
    model = build("llama", "sdpa" if kind is shared_prompts.SharedPromptCache else "eager")
    place = kind._place

    def forgetful(cache, first):
        place(cache, first)
        if cache._clock:
            cache._before = None

    monkeypatch.setattr(kind, "_place", forgetful)
    found = draw(model, [[5, 6, 7], [8, 9, 10], [11, 12, 13]], max_rows_in_flight=4, max_completion_length=5)
    assert not check.decodes(model, partial(kind.for_model, model.config))
    monkeypatch.undo()
    expected = draw(build("llama"), [[5, 6, 7], [8, 9, 10], [11, 12, 13]], max_completion_length=5)
    assert rows_of(found) == rows_of(expected)


@pytest.mark.parametrize("name", ["Mamba-2", "LFM2", "Qwen3-Next", "Mistral, window 8", "Gemma-3"])
def test_states_and_sliding_windows_are_decoded_in_parts(name, caplog):
    model = network(name)
    options = {"max_completion_length": 12, "eos_token_id": 2, "num_generations": 3}
    check.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        expected = draw(model, OF_ALL_LENGTHS, **options)
        for _ in range(2):
            assert rows_of(draw(model, OF_ALL_LENGTHS, max_rows_in_flight=5, **options)) == rows_of(expected)
    assert sum("part after part" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_prompt_is_read_once_and_few_steps_are_idle(family, attention):
    model = checked(build(family, attention))
    draw(model, PROMPTS, max_rows_in_flight=2, max_completion_length=2)  # checks refilling
    options = {**OPTIONS, "max_completion_length": 40}
    with counted(model) as refilled:
        found = draw(model, PROMPTS, max_rows_in_flight=8, **options)
    lengths = found.length.tolist()
    # A step per token that follows another one, and a row per distinct prompt.
    assert sum(refilled.rows) == sum(n - 1 for n in lengths) + 6
    assert len(refilled.rows) < 0.8 * sum(max(lengths[i : i + 8]) for i in range(0, len(lengths), 8))  # in chunks
    # No schedule has fewer steps than the longest row, or than full batches; the rest is waiting for places.
    assert len(refilled.rows) <= max(max(lengths), sum(lengths) / 8 / 0.75) + len(PROMPTS) + max(lengths)


def test_the_buffer_grows_and_narrows(monkeypatch):
    model = checked(build("qwen2", "eager"))
    expected = draw(model, PROMPTS, **OPTIONS)
    monkeypatch.setattr(decode, "_ROOM", 1)
    widths = []
    step = RowCache.step

    def spy(cache):
        mask = step(cache)
        widths.append((cache.get_seq_length() + 1, max(cache._clock - first for first in cache._first)))
        return mask

    monkeypatch.setattr(RowCache, "step", spy)
    found = draw(model, PROMPTS, max_rows_in_flight=5, **OPTIONS)
    assert rows_of(found) == rows_of(expected)
    assert all(width == longest <= 12 + 20 for width, longest in widths)  # never wider than the longest row
    assert any(after < before for (before, _), (after, _) in zip(widths, widths[1:], strict=False))


def test_rows_of_one_prompt_wait_for_each_other():
    """One prompt with 12 completions, two at a time: its keys and values stay for those that wait."""
    for attention in ("sdpa", "eager"):
        model = checked(build("llama", attention))
        draw(model, [[5], [6], [7]], max_rows_in_flight=2, max_completion_length=2)
        with counted(model) as work:
            found = draw(model, [[5, 6, 7, 8]], 12, max_rows_in_flight=2, eos_token_id=[1, 2, 3, 4])
        assert rows_of(found) == rows_of(draw(model, [[5, 6, 7, 8]], 12, eos_token_id=[1, 2, 3, 4]))
        assert sum(work.rows) == int((found.length - 1).sum()) + 1


def test_a_listener_hears_of_rows_by_their_number():
    model = checked(build("qwen2"))
    heard = {}
    found = draw(model, PROMPTS, max_rows_in_flight=5, on_ended=lambda row, tokens, finished: heard.update(
        {row: (tokens, finished)}), **OPTIONS)  # fmt: skip
    assert [heard[row][0] for row in range(len(heard))] == rows_of(found)
    assert [heard[row][1] for row in range(len(heard))] == found.finished.tolist()


def test_waiting_rows_go_in_groups():
    prompts = Prompts.of([[5], [6], [7], [5]], 2, 0, torch.device("cpu"))
    waiting = Waiting(prompts, 8)
    assert waiting.take(0) == [0, 1, 6, 7, 2, 3, 4, 5] and not waiting.rows
    waiting = Waiting(prompts, 4)
    assert waiting.take(0) == [0, 1, 6, 7] and waiting.rows[0] == 2
    assert waiting.take(4) == [] and waiting.take(3) == [2] and waiting.rows[0] == 3
    waiting = Waiting(Prompts.of([[5]], 100, 0, torch.device("cpu")), 40)
    assert len(waiting.take(0)) == 40 and waiting.take(31) == [] and len(waiting.take(30)) == 10
    assert len(waiting.take(0)) == 40 and len(waiting.take(30)) == 10 and waiting.take(12) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("RWKV", "BERT", "T5")])
def test_every_architecture_writes_the_same_with_few_rows_in_flight(name):
    model = network(name)
    options = {"max_completion_length": 12, "eos_token_id": list(range(2, 12)), "num_generations": 3}
    expected = draw(model, OF_ALL_LENGTHS, **options)
    found = draw(model, OF_ALL_LENGTHS, max_rows_in_flight=5, **options)
    assert rows_of(found) == rows_of(expected)
    torch.testing.assert_close(found.log_prob, expected.log_prob, atol=5e-5, rtol=0)


def test_bfloat16():
    model = AutoModelForCausalLM.from_config(cases.CONFIGS["qwen2"]()).bfloat16().eval()
    found = draw(model, PROMPTS, max_rows_in_flight=5, **OPTIONS)
    for i, row in enumerate(rows_of(found)):
        expected = cases.teacher_forced(model, PROMPTS[i // 4], row, 1.4)
        torch.testing.assert_close(found.log_prob[i, : len(row)], expected, atol=0.15, rtol=0)
    assert math.isfinite(float(found.log_prob.sum()))
