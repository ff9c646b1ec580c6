"""Splits, repeatability and right answers of the built-in tasks."""

import pytest

from datamodules.language.tasks import make_task
from rl_modules.errors import UsageError


def prompts(task, split, n=None):
    return [record["prompt"] for record in task.records(split, n)]


def test_addition_lists_every_pair_once_and_answers_right():
    task = make_task("addition", seed=3)
    records = task.records("train", None) + task.records("test", None)
    assert sorted(r["prompt"] for r in records) == sorted(f"{a}+{b}=" for a in range(100) for b in range(100))
    for record in records:
        a, b = record["prompt"][:-1].split("+")
        assert record["answer"] == record["completion"] == str(int(a) + int(b))


def test_splits_do_not_overlap_for_any_two_seeds_and_hold_out_about_a_tenth():
    train = {p for seed in range(4) for p in prompts(make_task("addition", seed=seed), "train")}
    test = {p for seed in range(4, 8) for p in prompts(make_task("addition", seed=seed), "test")}
    assert not train & test
    assert 900 <= len(test) <= 1100


def test_commuted_sums_are_in_the_same_split():
    test = set(prompts(make_task("addition"), "test"))
    assert all(f"{b}+{a}=" in test for a, b in (p[:-1].split("+") for p in test))


def test_records_repeat_for_a_seed_and_differ_between_seeds():
    task = make_task("addition", seed=1)
    assert task.records("train", 50) == task.records("train", 50) == make_task("addition", seed=1).records("train", 50)
    assert prompts(task, "train", 50) != prompts(make_task("addition", seed=2), "train", 50)


def test_fewer_records_are_a_prefix_of_more():
    for digits in (2, 3):
        task = make_task("addition", n_digits=digits)
        assert task.records("test", 20) == task.records("test", 60)[:20]


def test_more_records_than_exist_name_how_many_exist():
    task = make_task("addition", n_digits=1)
    exist = len(task.records("test", None))
    with pytest.raises(UsageError, match=f"only {exist}"):
        task.records("test", exist + 1)


def test_accuracy_is_one_for_demonstrations_and_zero_for_the_rest():
    for think in (False, True):
        task = make_task("addition", think_format=think)
        records = task.records("train", 30)
        answers = [r["answer"] for r in records]
        accuracy = task.reward_funcs[0]
        right = accuracy(prompts=None, completions=[r["completion"] for r in records], answer=answers)
        wrong = accuracy(prompts=None, completions=[r["completion"] + "0" for r in records], answer=answers)
        bare = accuracy(prompts=None, completions=answers, answer=answers)
        assert right == [1.0] * 30
        assert wrong == ([1.0] * 30 if think else [0.0] * 30)  # what follows the tags is the format's business
        assert bare == ([0.0] * 30 if think else [1.0] * 30)
