"""Reward functions by hand-made tables and against TRL's; failures name the function and the sample."""

import math
import time

import numpy as np
import pytest
import torch

from datamodules.language.rewards import (
    RewardFunctions,
    answer_in_tags,
    exact_answer,
    length_reward,
    load_reward_func,
    math_accuracy,
    soft_overlong_penalty,
    think_answer_format,
)
from datamodules.language.tasks import make_task
from datamodules.language.trainer_state import TrainerState
from rl_modules.common.errors import UsageError


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


def test_exact_answers_and_answers_in_tags():
    completions = [" 42\n", "42.", "<answer>1</answer> <answer> 42 </answer>", "42", chat("42")]
    answers = ["42", "42", "42", None, "42"]
    assert exact_answer(None, completions, answer=answers) == [1.0, 0.0, 0.0, None, 1.0]
    assert answer_in_tags(None, completions, answer=answers) == [0.0, 0.0, 1.0, None, 0.0]


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
        ("72", None, None),
    ],
)
def test_mathematics_by_meaning(completion, reference, value):
    assert math_accuracy(None, [completion], answer=[reference]) == [value]
    assert RewardFunctions([math_accuracy], time_limit_s=10)(
        [{"prompt": "", "answer": reference}], [completion]
    ).tolist() == [[pytest.approx(math.nan if value is None else value, nan_ok=True)]]


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


def test_trainer_state_is_passed_whole_and_never_cut_by_samples():
    seen = []

    def scheduled(completions, trainer_state, **columns):
        seen.append(trainer_state.global_step)
        return [1 / (len(text) - 3) + trainer_state.global_step for text in completions]

    call = RewardFunctions([scheduled])
    call.trainer_state = TrainerState(global_step=7, max_steps=10)
    assert call(records(2), ["a", "bb"]).tolist() == [[6.5], [6.0]]
    with pytest.raises(UsageError, match="sample 1"):
        call(records(2), ["a", "bbb"])
    assert set(seen) == {7}


def raises(completions, **columns):
    return [1 / (len(text) - 3) for text in completions]


def hangs(completions, **columns):
    for text in completions:
        if text == "slow":
            time.sleep(30)
    return [0.0] * len(completions)


def exits(completions, **columns):
    raise SystemExit


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (raises, r"'raises' raised ZeroDivisionError: .* on sample 1 \(completion 'abc'\)"),
        (lambda completions, **c: [0.0], r"'<lambda>' returned 1 values for 3 completions"),
        (lambda completions, **c: 0.0, "returned a float, not a list of 3 numbers"),
        (lambda completions, **c: "abc", "returned a str"),
        (lambda completions, **c: [0.0, "1", 2], r"returned '1' for sample 1 \(completion 'abc'\)"),
        (lambda completions, **c: [0.0, 1.0, [2.0]], "for sample 2"),
        (lambda completions, **c: [0.0, math.inf, 0.0], "returned inf for sample 1"),
        (lambda completions, **c: [1e39, 0.0, 0.0], "sample 0"),
        (lambda completions, solution, **c: [0.0] * 3, "needs a column 'solution'.*only level"),
        (exits, "'exits' raised SystemExit.* on sample 0"),
    ],
)
@pytest.mark.parametrize("limit", [None, 5.0])
def test_failures_name_the_function_and_the_sample(func, message, limit):
    with pytest.raises(UsageError, match=message):
        RewardFunctions([func], limit)(records(3, level=[1, 2, 3]), ["a", "abc", "d"])


def test_the_original_error_is_kept():
    with pytest.raises(UsageError) as caught:
        RewardFunctions([raises])(records(1), ["abc"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_that_hangs_is_named_with_its_sample():
    started = time.perf_counter()
    with pytest.raises(UsageError, match=r"'hangs' took longer than 0.2 s on sample 2 \(completion 'slow'\)"):
        RewardFunctions([hangs], time_limit_s=0.2)(records(4), ["a", "b", "slow", "c"])
    assert time.perf_counter() - started < 5
    with pytest.raises(UsageError, match="positive"):
        RewardFunctions([hangs], time_limit_s=0)


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
        ({"math.pi": {}}, "takes no settings"),
        ("math:pi", "is a float, not a function"),
        ("datamodules.language.text:nothing", "can't be imported"),
        ("no.such.module.function", "can't be imported"),
        ("fractions:Fraction", "not a function"),
        (3, "is a int, not a function"),
    ],
)
def test_what_is_no_reward_function(spec, message):
    with pytest.raises(UsageError, match=message):
        load_reward_func(spec)


def test_objects_that_can_be_called_get_a_name():
    call = RewardFunctions([load_reward_func(Judge()), load_reward_func({f"{__name__}:Judge": {}})])
    assert call.names == ["Judge", "Judge_2"]
    assert call(records(1), ["a"]).tolist() == [[0.5, 0.5]]
