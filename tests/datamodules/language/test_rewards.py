"""Reward functions by hand-made tables and against TRL's; failures name the function and the sample."""

import asyncio
import copy
import math
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from datamodules import PromptDataModule
from datamodules.language import mathematics
from datamodules.language.event_loop import RunEnded
from datamodules.language.reward_arguments import TrainerState
from datamodules.language.rewards import (
    RewardFunctions,
    answer_in_tags,
    exact_answer,
    last_number,
    length_reward,
    load_reward_func,
    math_accuracy,
    soft_overlong_penalty,
    think_answer_format,
)
from datamodules.language.tasks import make_task
from rl_modules import GRPO, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer
from tests.training import fit

TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def chat(text):
    return [{"role": "assistant", "content": text}]


FORMATS = [
    ("<think>a</think><answer>b</answer>", 1.0),
    (" <think>a\nb</think>\n<answer>\nc</answer> \n", 1.0),
    ("<think></think><answer></answer>", 1.0),
    ("<think>a</think>b", 0.0),
    ("<answer>b</answer><think>a</think>", 0.0),
    ("x<think>a</think><answer>b</answer>", 0.0),
    ("<think>a</think><answer>b</answer>x", 0.0),
    ("<think>a</think>x<answer>b</answer>", 0.0),
    ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
    ("<think><answer>a</think></answer>", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("text", "value"), FORMATS)
def test_format(text, value):
    assert think_answer_format(None, [text]) == think_answer_format(None, [chat(text)]) == [value]


def test_a_thought_that_the_prompt_opened_is_not_opened_again():
    opened = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Step by step.\n<think>\n"}]
    inside, whole = "a</think><answer>b</answer>", "<think>a</think><answer>b</answer>"
    asked = [{"role": "user", "content": "Begin with <think>"}]
    for prompt, values in (
        ("? <think>", [1.0, 0.0]),
        (opened, [1.0, 0.0]),
        ("<think>?", [0.0, 1.0]),
        (asked, [0.0, 1.0]),
    ):
        assert think_answer_format([prompt] * 2, [inside, whole]) == values
        assert think_answer_format([prompt] * 2, [chat(inside), chat(whole)]) == values


def test_a_thought_that_the_chat_template_opened_is_not_opened_again():
    """As Qwen3.5's and DeepSeek-R1's do; functions that name the rendered prompts get them."""
    tokenizer, seen = character_tokenizer(), []
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m.content }}){% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )

    def read(prompts, completions, rendered_prompts, **columns):
        seen.extend(rendered_prompts)
        return [0.0] * len(prompts)

    def blind(prompts, completions, **columns):
        assert "rendered_prompts" not in columns
        return [0.0] * len(prompts)

    data = PromptDataModule("addition", task_kwargs={"chat": True}, num_generations=2, batch_size=4, n_train=4,
                            reward_funcs=["think_answer_format", read, blind], n_eval=0)  # fmt: skip
    module = GRPO(model_config=TINY, tokenizer_name_or_path=tokenizer, max_completion_length=2)
    fit(module, data, max_steps=1)
    asked = {record["prompt"][0]["content"] for record in data.train_records}
    assert seen and set(seen) <= {f"({text})<think>" for text in asked}
    texts = ["a</think><answer>b</answer>", "<think>a</think><answer>b</answer>"]
    assert data.rewards(data.train_records[:1] * 2, texts)[:, 0].tolist() == [1.0, 0.0]


def test_exact_answers_and_answers_in_tags():
    completions = [" 42\n", "42.", "<answer>1</answer> <answer> 42 </answer>", "42", chat("42")]
    answers = ["42", "42", "42", None, "42"]
    assert exact_answer(None, completions, answer=answers) == [1.0, 0.0, 0.0, None, 1.0]
    assert answer_in_tags(None, completions, answer=answers) == [0.0, 0.0, 1.0, None, 0.0]


def test_the_last_number_is_the_answer_and_a_sum_is_none():
    texts = ["52 + 25 = 77.", "52 + 25", "1,234 km", "about -5", "x3.50, it is", "none", "77, 78", "12,", "7-3", "77"]
    found = ["77", "25", "1234", "-5", "3.50", "?", "78", "12", "3", None]
    expected = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, None]
    assert last_number(None, texts, answer=found) == expected
    assert last_number(None, ["52 + 25", chat("is 77")], answer=["77", 77]) == [0.0, 1.0]
    assert last_number(None, ["1234", "it is 1,234."], answer=["1,234"] * 2) == [1.0, 1.0]
    assert math_accuracy(None, ["52 + 25"], answer=["77"]) == [1.0]  # why sums are not rewarded by it
    assert load_reward_func("last_number")([None], ["a 3"], answer=["3"]) == [1.0]


@pytest.mark.parametrize("thought", ["I write it in <answer> tags", "<answer>, then", "</answer> ends it", "<answer"])
def test_a_thought_may_speak_of_the_tags(thought):
    completions = [f"<think>{thought}</think><answer>{answer}</answer>" for answer in (42, 41)]
    assert answer_in_tags(None, completions, answer=["42", "42"]) == [1.0, 0.0]
    assert math_accuracy(None, completions, answer=["42", "42"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{\\frac{2}{4}}", "\\frac12", 1.0),
        ("<think>3</think><answer>1/2</answer>", "$\\frac{1}{2}$", 1.0),
        ("<think>1/2</think><answer>3</answer>", "1/2", 0.0),
        ("The answer is 72", "72", 1.0),
        ("The answer is 71", "72", 0.0),
        ("I don't know", "72", 0.0),
        ("72", "Paris", None),
        ("72", "\\text{Paris}", None),
        ("72", None, None),
    ],
)
def test_mathematics_by_meaning(completion, reference, value):
    assert math_accuracy(None, [completion], answer=[reference]) == [value]
    assert RewardFunctions([math_accuracy], time_limit_s=10)(
        [{"prompt": "", "answer": reference}], [completion]
    ).tolist() == [[pytest.approx(math.nan if value is None else value, nan_ok=True)]]


@pytest.mark.parametrize("latex", [
    "2\\sqrt{3}", "10^{-5}", "3\\pi", "(-\\infty, 2]", "6 - 5i", "2x+3", "y=2x+3", "1, 2, 3", "5!", "1\\frac{1}{2}",
    "\\pi", "3 \\times 10^8", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "2\\sqrt{3}\\text{ inches}", "\\text{(A)}",
])  # fmt: skip
def test_latex_without_dollars_is_read_whole(latex):
    """As MATH and its like write references; in boxes math-verify itself reads all of it."""
    completions = [f"so \\boxed{{{latex}}}", f"<answer>{latex}</answer>"]
    assert math_accuracy(None, completions, answer=[latex] * 2) == [1.0, 1.0]


@pytest.mark.parametrize(("answer", "reference", "value"), [
    ("2", "2\\sqrt{3}", 0.0), ("10", "10^{-5}", 0.0), ("2", "2x+3", 0.0), ("3", "1, 2, 3", 0.0),
    ("2\\sqrt{3}", "2", 0.0),
    ("2^{10}", "1024", 1.0), ("7 in", "7", 1.0), ("4 km/h", "4", 1.0), ("18 dollars", "18", 1.0), ("3m", "3", 1.0),
    ("1 000", "1,000", 1.0), ("**5**", "5", 1.0), ("x = 5", "5", 1.0), ("$18", "18", 1.0), ("50%", "50", 1.0),
])  # fmt: skip
def test_a_piece_of_an_answer_is_not_the_answer_but_a_unit_may_follow(answer, reference, value):
    assert math_accuracy(None, [f"<answer>{answer}</answer>"], answer=[reference]) == [value]


@pytest.mark.long
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("endless", ["\\boxed{9^{9^{9}}}", "<answer>2^{10^{12}}</answer>"])
def test_an_answer_without_end_is_wrong_and_does_not_stop_the_run(endless, in_thread, monkeypatch, capfd, caplog):
    """In a thread too, where math-verify's own limits do not hold, and which no time limit can stop; nothing is said of
    it, which would repeat the text.
    """
    monkeypatch.setattr(mathematics, "LIMIT_S", 1)
    records, completions = [{"prompt": "", "answer": "5"}] * 3, ["\\boxed{5}", endless, "5"]
    rewards = RewardFunctions([math_accuracy], time_limit_s=60 if in_thread else None)
    assert rewards(records, completions).tolist() == [[1.0], [0.0], [1.0]]
    assert not caplog.records and "imeout" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_a_process_that_no_signal_reaches_is_ended_and_replaced(monkeypatch):
    rewards = RewardFunctions([math_accuracy], time_limit_s=60)
    records = [{"prompt": "", "answer": "5"}] * 2
    assert rewards(records, ["5", "6"]).tolist() == [[1.0], [0.0]]
    monkeypatch.setattr(mathematics, "LIMIT_S", 60)
    with monkeypatch.context() as patch:
        patch.setattr(mathematics, "_PROCESS_LIMIT_S", 1)
        assert rewards(records[:1], ["\\boxed{9^{9^{9}}}"]).tolist() == [[0.0]]
    assert rewards(records, ["5", "6"]).tolist() == [[1.0], [0.0]]


def test_what_math_verify_raises_in_its_process_costs_the_sample_alone(monkeypatch):
    rewards = RewardFunctions([math_accuracy], time_limit_s=60)
    monkeypatch.setattr(mathematics, "LIMIT_S", "soon")  # no number of seconds
    with pytest.raises(UsageError, match="'math_accuracy' raised RuntimeError: TypeError: "):
        rewards([{"prompt": "2+3=", "answer": "5"}, {"prompt": "3+3=", "answer": "6"}], ["5", "6"])


def test_length_counts_tokens_where_it_can_and_characters_where_not():
    reward = length_reward(4)
    assert reward(None, ["abcd", "abc", "a" * 9]) == [0.0, -0.25, -1.0]
    assert reward(None, ["abcd"], completion_ids=[[1, 2]]) == [-0.5]


def test_soft_overlong_penalty_by_hand_and_against_trl():
    ids = [[0] * n for n in (1, 6, 7, 8, 10, 11, 20)]
    mine = soft_overlong_penalty(max_completion_length=10, cache_length=4)(None, [""] * 7, completion_ids=ids)
    assert mine == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    trl = pytest.importorskip("trl.rewards")
    assert mine == trl.get_soft_overlong_punishment(10, 4)(completion_ids=ids)


def records(n, **columns):
    return [{"prompt": f"p{i}", **{name: values[i] for name, values in columns.items()}} for i in range(n)]


def test_repetition_penalty_by_hand_and_against_trl():
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1], [7]]
    func = load_reward_func({"repetition_penalty": {"ngram_size": 2}})
    found = RewardFunctions([func])([{"prompt": "p"}] * 4, ["x"] * 4, ids)[:, 0].tolist()
    assert found == [0.0, -0.75, -0.5, 0.0]
    rewards = pytest.importorskip("trl.rewards")
    assert found == rewards.get_repetition_penalty_reward(2)(ids)
    with pytest.raises(UsageError, match="ngram_size=0 must be at least 1"):
        load_reward_func({"repetition_penalty": {"ngram_size": 0}})


def test_cosine_length_by_hand_and_against_trl():
    func = load_reward_func({"cosine_length": {"max_len": 100, "reward": "exact_answer"}})
    ids = [[1] * n for n in (0, 50, 100, 300, 50, 0, 5)]
    records = [{"prompt": "p", "answer": answer} for answer in [*"aaaa", "b", "b", None]]
    found = RewardFunctions([func])(records, ["a"] * 7, ids)[:, 0].tolist()
    assert found[:6] == pytest.approx([1.0, 0.75, 0.5, 0.5, -0.75, -1.0]) and math.isnan(found[6])
    rewards = pytest.importorskip("trl.rewards")
    chats = [[{"role": "assistant", "content": f"\\boxed{{{x}}}"}] for x in "112"]
    theirs = rewards.get_cosine_scaled_reward(max_len=40)(chats, ["$1$"] * 3, [[1] * n for n in (3, 39, 17)])
    ours = load_reward_func({"cosine_length": {"max_len": 40}})
    columns = {"completion_ids": [[1] * n for n in (3, 39, 17)], "answer": ["$1$"] * 3}
    assert ours(prompts=["p"] * 3, completions=chats, **columns) == pytest.approx(theirs)


def test_only_what_follows_the_thought_is_judged():
    func = load_reward_func({"outside_thought": {"reward": "exact_answer"}})
    texts = ["<think>4</think> 5", "4</think>5</think>4", "4", "<think>5</think>4"]
    records = [{"prompt": "p", "answer": "4"}] * 3 + [{"prompt": [{"role": "user", "content": "p"}], "answer": "4"}]
    rewards = RewardFunctions([func])
    assert rewards(records, texts)[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert rewards.names == ["outside_thought.exact_answer"]


def test_reward_models_are_reward_functions(tmp_path):
    """Several of them, each with the scores of its own `RewardModel.score`."""
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2}  # fmt: skip
    prompts, texts, expected = ["1+1=", "a"], ["2", "longer"], []
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        module = RewardModel(model_config=tiny)
        module.configure_model()
        with torch.no_grad():
            module.model.score.weight.normal_()
            module.reward_offset = 0.5
            expected.append(module.score(prompts, texts))
        module.export(tmp_path / name)
    funcs = [load_reward_func({"reward_model": {"path": str(tmp_path / n), "name": n}}) for n in ("first", "second")]
    rewards = RewardFunctions(funcs)
    found = rewards([{"prompt": prompt} for prompt in prompts], texts)
    torch.testing.assert_close(found, torch.stack(expected, 1))
    assert rewards.names == ["first", "second"] and not torch.equal(found[:, 0], found[:, 1])


def test_trls_functions_plug_in_by_import_path():
    pytest.importorskip("trl")
    funcs = [
        "trl.rewards.think_format_reward",
        "trl.rewards:accuracy_reward",
        {"trl.rewards.get_soft_overlong_punishment": {"max_completion_len": 4, "soft_punish_cache": 2}},
        {"trl.rewards.get_repetition_penalty_reward": {"ngram_size": 1}},
    ]
    call = RewardFunctions([load_reward_func(spec) for spec in funcs])
    assert call.names == ["think_format_reward", "accuracy_reward", "soft_overlong_punishment_reward",
                          "repetition_penalty_reward"]  # fmt: skip
    texts = ["<think>a</think> $\\boxed{2}$", "b b"]
    rewards = call(records(2, solution=["$2$", "2"]), texts, [[1, 2, 3], [1, 1, 2, 2, 3, 3]])
    assert rewards.tolist() == [[1.0, 1.0, -0.5, 0.0], [0.0, 0.0, -1.0, -0.5]]


def test_prompts_columns_and_chat_messages_reach_the_functions():
    seen = {}

    def everything(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [True, np.float32(2)]

    def only_these(completions, level):
        return torch.tensor([len(completions), level[1]])

    async def later(completions, **columns):
        return [None, 3]

    conversation = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a", "level": 5, "completion": "demo"}, {"prompt": conversation, "level": 7, "extra": [1]}]
    rewards = RewardFunctions([everything, only_these, later, later])(rows, ["x", "y"], [[1], [2]])
    assert seen == {
        "prompts": ["a", conversation], "completions": ["x", chat("y")], "completion_ids": [[1], [2]],
        "level": [5, 7], "extra": [None, [1]],
    }  # fmt: skip
    torch.testing.assert_close(
        rewards, torch.tensor([[1.0, 2, math.nan, math.nan], [2, 7, 3, 3]]), equal_nan=True, rtol=0, atol=0
    )
    assert RewardFunctions([later, later, everything]).names == ["later", "later_2", "everything"]


def test_a_coroutine_is_awaited_where_a_loop_is_running():
    """As in a notebook."""

    async def later(completions, **columns):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    async def cell():
        return RewardFunctions([later])(records(2), ["x", "y"], [[1], [2]])

    assert asyncio.run(cell()).tolist() == [[2.0], [2.0]]


class Client:
    """A client as of a reward service: two slots, which belong to the event loop of its first use."""

    def __init__(self):
        self.slots = asyncio.Semaphore(2)
        self.loops, self.busy, self.most = set(), 0, 0

    async def ask(self, text):
        async with self.slots:
            self.loops.add(asyncio.get_running_loop())
            self.busy += 1
            self.most = max(self.most, self.busy)
            await asyncio.sleep(0.005)
            self.busy -= 1
            return float(len(text))


@pytest.mark.parametrize("workers", [1, 3])
def test_coroutines_share_a_client_over_all_calls(workers):
    client = Client()

    async def asks(completions, **columns):
        return await asyncio.gather(*[client.ask(text) for text in completions])

    call = RewardFunctions([asks, partial(asks)], time_limit_s=30, workers=workers)
    rows = [{"prompt": str(i)} for i in range(4)]
    for _ in range(3):
        assert call(rows, ["a", "bb", "", "dddd"], [[1]] * 4).tolist() == [[1, 1], [2, 2], [0, 0], [4, 4]]
    call.close()
    assert len(client.loops) == 1 and client.loops.pop().is_closed() and client.most == 2


def test_coroutine_functions_run_at_once():
    """Each waits for the other, which two calls in turn would do until the time limit."""
    waiting = []

    async def meets(completions, **columns):
        waiting.append(1)
        while len(waiting) < 2:
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    call = RewardFunctions([meets, meets], time_limit_s=10)
    assert call(records(2), ["x", "y"], [[1], [2]]).tolist() == [[1.0, 1.0]] * 2
    call.close()


def test_what_a_closed_loop_interrupts_is_not_called_again():
    begun = threading.Event()
    calls = []

    async def waits_long(completions, **columns):
        calls.append(len(completions))
        begun.set()
        await asyncio.sleep(60)

    call = RewardFunctions([waits_long])
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call, records(4), ["x"] * 4, [[1]] * 4)
        assert begun.wait(10)
        call.close()
        assert isinstance(called.exception(10), RunEnded) and calls == [4]


async def leaves(completions, **columns):
    if "bad" in completions:
        sys.exit(1)
    return [1.0] * len(completions)


async def waits(completions, **columns):
    await asyncio.sleep(60 if "bad" in completions else 0)
    return [1.0] * len(completions)


async def blocks(completions, **columns):
    time.sleep(1.5 if "bad" in completions else 0)
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("func", "why"),
    [
        (leaves, "raised SystemExit"),
        (waits, "longer than 0.1 s"),
        pytest.param(blocks, "longer than 0.1 s", marks=pytest.mark.long),
    ],
)
def test_a_coroutine_that_fails_costs_its_sample_alone(func, why, capsys):
    call = RewardFunctions([func], time_limit_s=0.1)
    rewards = call([{"prompt": str(i)} for i in range(3)], ["x", "bad", "y"], [[1]] * 3)
    call.close()
    assert rewards.flatten().isnan().tolist() == [False, True, False]
    assert why in capsys.readouterr().out


def empties(completions, prompts, tests, meta, **columns):
    """Changes all that it gets; counts what it finds."""
    found = []
    for text, prompt, cases, about in zip(completions, prompts, tests, meta, strict=True):
        prompt += text
        found.append(len(prompt) + 10 * len(cases) + 100 * len(about["tags"]))
        cases.clear()
        about["tags"].clear()
    tests.clear()
    return found


def empties_and_fails_on_many(completions, **columns):
    found = empties(completions, **columns)
    if len(completions) > 1:
        raise ValueError("one at a time")
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_may_change_what_it_gets(workers):
    """Not what other completions of the prompt, other functions, its own next call and the next epoch read."""
    record = {"prompt": [{"role": "user", "content": "hi"}], "tests": ["a", ["b"]], "meta": {"tags": ["x"]}}
    before = copy.deepcopy(record)
    rewards = RewardFunctions([empties, empties, empties_and_fails_on_many], workers=workers)
    for _ in range(2):
        assert rewards([record] * 3, ["1", "2", "3"]).tolist() == [[122.0] * 3] * 3
    assert record == before


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state", "log_metric", "log_extra"])
def test_a_column_with_the_name_of_an_argument_is_refused(name):
    rows = records(2, **{name: ["of another model"] * 2})
    with pytest.raises(UsageError, match=f"a column '{name}', .* own {name}; rename or remove the column"):
        RewardFunctions([exact_answer])(rows, ["a", "b"])
    assert RewardFunctions([])(rows, ["a", "b"]).shape == (2, 0)  # nobody gets it
    rows = records(2, completion_ids=[[9], [9]])  # an encoded demonstration's; the call's own are passed
    assert RewardFunctions([length_reward(2)])(rows, ["a", "b"], [[1, 2], [1]]).tolist() == [[0.0], [-0.5]]


def test_trainer_state_is_passed_whole_and_never_cut_by_samples():
    seen = []

    def scheduled(completions, trainer_state, **columns):
        seen.append(trainer_state.global_step)
        return [1 / (len(text) - 3) + trainer_state.global_step for text in completions]

    call = RewardFunctions([scheduled])
    call.trainer_state = TrainerState(global_step=7, max_steps=10)
    assert call(records(2), ["a", "bb"]).tolist() == [[6.5], [6.0]]
    rewards = call(records(2), ["a", "bbb"])
    assert rewards[0].tolist() == [6.5] and bool(rewards[1].isnan().all())
    assert set(seen) == {7} and len(seen) > 2


def raises(completions, **columns):
    return [1 / (len(text) - 3) for text in completions]


def hangs(completions, **columns):
    for text in completions:
        if text == "slow":
            time.sleep(30)
    return [0.0] * len(completions)


def exits(completions, **columns):
    raise SystemExit


def never(completions, **columns):
    raise RuntimeError("the service\nis down")


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (
            never,
            r"'never' raised RuntimeError: the service is down \(.*test_rewards\.py:\d+\) on all 3",
        ),
        (lambda completions, **c: [0.0], r"'<lambda>' returned 1 values for 3 completions"),
        (lambda completions, **c: 0.0, "returned a float, not a list of 3 numbers"),
        (lambda completions, **c: "abc", "returned a str"),
        (lambda completions, **c: torch.tensor(1.0), "returned a Tensor, not a list of 3 numbers"),
        (lambda completions, **c: {0.0, 1.0, 2.0}, "returned a set, not a list of 3 numbers"),
        (lambda completions, **c: [0.0, "1", 2], r"returned '1' for sample 1 \(completion 'abc'\)"),
        (lambda completions, **c: [0.0, 1.0, [2.0]], "for sample 2"),
        (lambda completions, **c: [0.0, math.inf, 0.0], "returned inf for sample 1"),
        (lambda completions, **c: [1e39, 0.0, 0.0], "sample 0"),
        (lambda completions, solution, **c: [0.0] * 3, "needs a column 'solution'.*only level"),
        (exits, "'exits' raised SystemExit.* on all 3 completions"),
    ],
)
@pytest.mark.parametrize("limit", [None, 5.0])
def test_failures_name_the_function_and_the_sample(func, message, limit):
    with pytest.raises(UsageError, match=message):
        RewardFunctions([func], limit)(records(3, level=[1, 2, 3]), ["a", "abc", "d"])


class Counted:
    """A reward function that fails on some texts; keeps what it was called with."""

    __name__ = "counted"

    def __init__(self, *bad):
        self.bad, self.calls = bad, []

    def __call__(self, completions, level, **columns):
        self.calls.append(list(completions))
        if any(text in self.bad for text in completions):
            raise ValueError("no")
        return [float(text) + number for text, number in zip(completions, level, strict=True)]


@pytest.mark.parametrize("bad", [[], [0], [63], [31, 32], [5, 6, 7, 40], list(range(1, 64))])
@pytest.mark.parametrize("workers", [1, 3])
def test_none_for_the_samples_that_a_function_failed_on(bad, workers, capsys):
    func = Counted(*map(str, bad))
    rewards = RewardFunctions([func, exact_answer], workers=workers)
    rows = records(64, level=list(range(64)), answer=["7"] * 64)
    scores = rewards(rows, [str(i) for i in range(64)])
    assert scores[:, 0].isnan().nonzero().squeeze(1).tolist() == bad
    expected = torch.tensor([math.nan if i in bad else 2.0 * i for i in range(64)])
    torch.testing.assert_close(scores[:, 0], expected, equal_nan=True, rtol=0, atol=0)
    assert scores[:, 1].tolist() == [float(i == 7) for i in range(64)], "other functions are not affected"
    assert rewards.take_notes()["failed"] == {"counted": len(bad), "exact_answer": 0}
    assert rewards.take_notes()["failed"] == {"counted": 0, "exact_answer": 0}
    printed = capsys.readouterr().out
    assert printed.count("counted") == (2 if bad else 0), "the name and the metric, in one line"
    if bad:
        assert "raised ValueError: no" in printed and "rewards/counted/failed" in printed
    rewards(rows, [str(i) for i in range(64)])
    assert capsys.readouterr().out == "", "said once"


def test_one_failure_among_64_costs_few_calls():
    """Halves are called in turn, so that the samples without a failure are mostly scored together."""
    for bad in (0, 17, 63):
        func = Counted(str(bad))
        RewardFunctions([func])(records(64, level=[0] * 64), [str(i) for i in range(64)])
        assert len(func.calls) == 1 + 2 * 6
    func = Counted()
    RewardFunctions([func])(records(64, level=[0] * 64), [str(i) for i in range(64)])
    assert len(func.calls) == 1


def test_a_run_ends_where_a_function_fails_on_every_sample_and_keeps_the_error():
    func = Counted(*map(str, range(8)))
    with pytest.raises(
        UsageError, match=r"'counted' raised ValueError: no \(.*\) on all 8 completions, such as '0'"
    ) as caught:
        RewardFunctions([func])(records(8, level=[0] * 8), [str(i) for i in range(8)])
    assert isinstance(caught.value.__cause__, ValueError)


def test_one_bad_record_ends_no_run_and_a_broken_function_does(capsys):
    """A call may have a single prompt: in a run's first batch, after a resume, or later."""
    rewards = RewardFunctions([Counted("0", "1", "2")])
    call = lambda *texts: rewards([{"prompt": f"p{text}", "level": 0} for text in texts], texts)[:, 0].tolist()  # noqa: E731
    for texts in (["0"] * 4, ["3", "0"], ["0"] * 4, ["1"] * 4):
        assert [math.isnan(value) for value in call(*texts)] == [text != "3" for text in texts]
    assert re.search(r"raised ValueError: no \(.*\) on 4 of 4 completions", capsys.readouterr().out)
    with pytest.raises(UsageError, match=r"'counted' raised ValueError: no \(.*\) on all 4 completions"):
        call("0", "0", "1", "1")
    rewards = RewardFunctions([Counted("0", "1")])
    call("0", "0"), call("0", "0")
    with pytest.raises(UsageError, match=r"'counted' raised ValueError: no \(.*\) on all 2 completions"):
        call("1", "1")


def test_a_function_that_has_returned_a_value_ends_no_resumed_run_at_single_prompts():
    call = lambda rewards, text: rewards([{"prompt": text, "level": 0}] * 2, [text] * 2)  # noqa: E731
    whole, resumed, broken = (RewardFunctions([Counted("0", "1")]) for _ in range(3))
    call(whole, "0"), call(whole, "2")
    resumed.load_state_dict(whole.state_dict())
    for rewards in (whole, resumed):
        assert call(rewards, "0").isnan().all() and call(rewards, "1").isnan().all()
    call(broken, "0")
    resumed.load_state_dict(broken.state_dict())
    for rewards in (broken, resumed):
        with pytest.raises(UsageError, match="'counted' raised ValueError"):
            call(rewards, "1")


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_hangs_on_a_sample_hangs_twice(workers, capsys):
    """Its other samples are scored one by one: a half with the slow one would wait for the limit again."""
    started = time.perf_counter()
    rewards = RewardFunctions([hangs], time_limit_s=0.3, workers=workers)
    scores = rewards(records(4), ["a", "b", "slow", "c"])
    assert scores[:, 0].isnan().tolist() == [False, False, True, False]
    assert time.perf_counter() - started < 3
    assert "took longer than 0.3 s on 1 of 4 completions, such as 'slow'" in capsys.readouterr().out


def test_workers_run_side_by_side_and_keep_a_prompts_completions_together():
    barrier, parts = threading.Barrier(4, timeout=20), []

    def meets(prompts, completions, **columns):
        barrier.wait()  # passes when four calls are under way at once
        parts.append(list(prompts))
        return [float(text) for text in completions]

    rows = [{"prompt": name} for name in "abcde" for _ in range(3)]
    rewards = RewardFunctions([meets], workers=4)
    assert rewards(rows, [str(i) for i in range(15)])[:, 0].tolist() == [float(i) for i in range(15)]
    assert len(parts) == 4 and sorted(chain.from_iterable(parts)) == sorted(row["prompt"] for row in rows)
    for one in parts:
        for other in parts:
            assert one is other or not set(one) & set(other)


def test_several_functions_run_side_by_side():
    barrier = threading.Barrier(2, timeout=20)

    def one(completions, **columns):
        barrier.wait()
        return [1.0] * len(completions)

    def two(completions, **columns):
        barrier.wait()
        return [2.0] * len(completions)

    assert RewardFunctions([one, two], workers=2)([{"prompt": "a"}], ["x"]).tolist() == [[1.0, 2.0]]


def test_names_of_the_tasks_own_functions():
    task = make_task("addition", think_format=True)
    assert load_reward_func("accuracy", task) == task.accuracy
    assert load_reward_func("think_answer_format", task) is think_answer_format


class Judge:
    def __call__(self, completions, **columns):
        return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_anwser", "did you mean exact_answer"),
        ("length_reward", r"needs settings \(target\)"),
        ({"length_reward": {}}, "needs target"),
        ({"length_reward": {"target": 1, "unit": "token"}}, "has no setting 'unit'"),
        ({"length_reward": {"target": 0}}, "at least 1"),
        ({"soft_overlong_penalty": {"max_completion_length": 4, "cache_length": 5}}, "cache_length=5"),
        ({"length_reward": 3}, "one name with its settings"),
        ({"math.pi": {}}, "is a float, where a function should be"),
        ("math:pi", "is a float, where a function should be"),
        ("datamodules.language.tasks.base:nothing", "has no 'nothing'"),
        ("no.such.module.function", "can't be imported"),
        ("fractions:Fraction", "not a function"),
        (3, "is a int, not a function"),
        ("org/rm", "'org/rm' is the name or directory of a model; give it .* reward_model_name_or_path"),
        ("trl-lib/Qwen2-0.5B-Reward", "is the name or directory of a model.*reward_model_name_or_path"),
        ({"org/rm": {}}, "'org/rm' is the name or directory of a model.*reward_model_name_or_path"),
        (torch.nn.Linear(1, 1), "'Linear' is a model; write it with save_pretrained.*reward_model_name_or_path"),
    ],
)
def test_what_is_no_reward_function(spec, message):
    with pytest.raises(UsageError, match=message):
        load_reward_func(spec)


def test_the_directory_of_a_model_is_no_reward_function(tmp_path, monkeypatch):
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="'judge' is the name or directory of a model.*reward_model_name_or_path"):
        load_reward_func("judge")


class JudgingModule(torch.nn.Module):
    def forward(self, completions, **columns):
        return [0.5] * len(completions)


def test_a_module_with_a_reward_functions_arguments_is_one():
    assert RewardFunctions([load_reward_func(JudgingModule())])(records(1), ["a"]).tolist() == [[0.5]]


def test_objects_that_can_be_called_get_a_name():
    call = RewardFunctions([load_reward_func(Judge()), load_reward_func({f"{__name__}:Judge": {}})])
    assert call.names == ["Judge", "Judge_2"]
    assert call(records(1), ["a"]).tolist() == [[0.5, 0.5]]


def of_length(completions, longest, **columns):
    return [min(len(text), longest) for text in completions]


def test_a_function_with_settings_has_the_functions_name():
    call = RewardFunctions([load_reward_func(partial(of_length, longest=longest)) for longest in (1, 2)])
    assert call.names == ["of_length", "of_length_2"]
    assert call(records(1), ["abc"]).tolist() == [[1, 2]]
