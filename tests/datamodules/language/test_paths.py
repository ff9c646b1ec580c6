"""The path task: its graph against networkx, its utility against brute force, its noise against the stated model."""

import math
import random

import networkx
import pytest

from datamodules.language.rewards import load_reward_func
from datamodules.language.tasks import make_task
from datamodules.language.tasks.paths import bayes_accuracy
from rl_modules.common.errors import UsageError


@pytest.fixture(scope="module")
def task():
    return make_task("paths")


def as_networkx(task):
    return networkx.DiGraph((here, there) for here, row in task.edges.items() for there in row)


@pytest.mark.parametrize("graph_seed", range(5))
def test_distances_are_networkx_and_every_node_is_reached(graph_seed):
    task = make_task("paths", graph_seed=graph_seed)
    graph = as_networkx(task)
    assert networkx.is_strongly_connected(graph)
    assert task.distance == dict(networkx.all_pairs_shortest_path_length(graph))
    assert {degree for _, degree in graph.out_degree} == {3}


def test_the_graph_belongs_to_graph_seed_alone():
    assert make_task("paths", seed=1).edges == make_task("paths", seed=2).edges
    assert make_task("paths", graph_seed=1).edges != make_task("paths", graph_seed=2).edges


def test_answers_are_shortest_paths(task):
    graph = as_networkx(task)
    for record in task.records("train", None) + task.records("test", None):
        shortest = ["".join(path[1:]) for path in networkx.all_shortest_paths(graph, record["start"], record["goal"])]
        assert record["answer"] == min(shortest)
        assert record["prompt"] == f"{record['start']}>{record['goal']}:"
        assert all(task.utility(record, path) == task.score(record, path) == 1.0 for path in shortest)


def test_utility_is_shortest_over_walked_and_zero_off_the_edges(task):
    record = task.records("train", 1)[0]
    start, goal, best = record["start"], record["goal"], record["answer"]
    cycle = networkx.shortest_path(as_networkx(task), goal, start)
    detour = best + "".join(cycle[1:]) + best
    assert task.utility(record, detour) == pytest.approx(len(best) / len(detour))
    assert task.score(record, detour) == 0.0
    jump = next(node for node in task.edges if node not in (*task.edges[start], start))
    for walk in ("", best[:-1], jump + best, best + "?", goal):
        assert task.utility(record, walk) == 0.0


@pytest.mark.long
def test_demonstrations_reach_the_goal_and_are_far_from_the_optimum(task):
    records = [r for seed in range(5) for r in make_task("paths", seed=seed).records("train", None)]
    utilities = [task.utility(r, r["completion"]) for r in records]
    assert min(utilities) > 0
    assert max(len(r["completion"]) for r in records) <= task.max_length
    assert 0.5 < sum(utilities) / len(utilities) < 0.65
    assert len({round(u, 2) for u in utilities}) > 20


def test_preferences_carry_the_probability_of_the_stated_model(task):
    preferences = task.preferences("train", 300)
    assert preferences == make_task("paths").preferences("train", 300)
    spoiled = 0
    for record in preferences:
        u = {name: task.utility(record, record[name]) for name in ("chosen", "rejected")}
        expected = 1 / (1 + math.exp(-10 * (u["chosen"] - u["rejected"])))
        assert record["probability"] == pytest.approx(expected)
        assert (record["chosen_utility"], record["rejected_utility"]) == (u["chosen"], u["rejected"])
        assert record["chosen"] != record["rejected"]
        spoiled += 0.0 in u.values()
    assert spoiled > 60  # a reward model must have seen what is no walk


def test_preferences_keep_the_splits(task):
    held_out = {r["prompt"] for r in task.preferences("test", 500)}
    assert held_out == {r["prompt"] for r in task.records("test", None)}
    assert not held_out & {r["prompt"] for r in make_task("paths", seed=9).preferences("train", 500)}


@pytest.mark.long
def test_bayes_accuracy_is_reached_by_the_true_utilities(task):
    preferences = task.preferences("train", 20_000)
    right = [
        0.5 if r["probability"] == 0.5 else float(r["chosen_utility"] > r["rejected_utility"]) for r in preferences
    ]
    # The standard error of 20,000 comparisons is at most 0.0036.
    assert sum(right) / len(right) == pytest.approx(bayes_accuracy(preferences), abs=0.011)
    assert 0.8 < bayes_accuracy(preferences) < 0.95


def test_compare_chooses_as_often_as_it_says(task):
    record = task.records("train", 1)[0]
    better, worse = record["answer"], next(
        r["completion"] for s in range(99) for r in make_task("paths", seed=s).records("train", None)
        if r["prompt"] == record["prompt"] and 0.7 < task.utility(record, r["completion"]) < 1
    )  # fmt: skip
    rng = random.Random(0)
    decided = [task.compare(record, worse, better, rng) for _ in range(4000)]
    share = sum(r["chosen"] == better for r in decided) / 4000
    expected = 1 / (1 + math.exp(-10 * (1 - task.utility(record, worse))))
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 4000))


def test_bayes_accuracy_by_hand_and_its_refusals():
    assert bayes_accuracy([{"probability": 0.8}, {"probability": 0.3}, {"probability": 0.5}]) == pytest.approx(2.0 / 3)
    for records in ([], [{"chosen": "a"}]):
        with pytest.raises(UsageError, match="probability"):
            bayes_accuracy(records)


def test_training_questions_come_over_and_over_with_other_walks():
    task = make_task("paths", demonstrations=3)
    once = make_task("paths", demonstrations=1).records("train", None)
    records = task.records("train", None)
    assert len(records) == 3 * len(once)
    assert [r["prompt"] for r in records] == [r["prompt"] for r in once] * 3
    assert records[: len(once)] == once == task.records("train", len(once))
    walks = [r["completion"] for r in records]
    assert walks[: len(once)] != walks[len(once) : 2 * len(once)]
    with pytest.raises(UsageError, match=f"only {len(records)}"):
        task.records("train", len(records) + 1)
    assert len({r["prompt"] for r in task.records("test", None)}) == len(task.records("test", None))


def test_utilities_are_a_reward_function_by_name(task):
    function = load_reward_func("utilities", task)
    records = task.records("train", 50)
    columns = {name: [record[name] for record in records] for name in records[0]}
    texts = columns.pop("completion")
    given = function(prompts=columns.pop("prompt"), completions=texts, **columns)
    assert given == [task.utility(record, text) for record, text in zip(records, texts, strict=True)]
    assert 0 < min(given) < max(given) == 1


def test_a_question_with_one_answer_can_not_be_compared():
    small = {"graph_seed": 3, "n_nodes": 5, "out_degree": 2, "min_distance": 2, "max_length": 2}
    task = make_task("paths", faults=0.0, **small)
    with pytest.raises(UsageError, match=r"1000 answers to .* were all .*raise faults, max_length or out_degree"):
        task.preferences("train", 40)
