"""reasoning-gym as tasks: its own answers score 1, and no answer is run as code."""

import ast
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from datamodules.language.tasks import make_task, reasoning
from datamodules.language.tasks.reasoning import is_arithmetic, secure_scorer
from rl_modules.common.errors import UsageError

needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: it needs a C compiler"
)


def scores(task, records, completions):
    return task.accuracy(prompts=None, completions=completions, index=[r["index"] for r in records])


@needs_reasoning_gym
@pytest.mark.parametrize(
    "dataset",
    ["chain_sum", "gcd", "mini_sudoku", "n_queens", "spiral_matrix", "polynomial_multiplication", "gsm_symbolic"],
)
def test_own_answers_score_one_and_splits_stay_apart(dataset):
    task = make_task(f"reasoning_gym:{dataset}", seed=2)
    train, test = task.records("train", 20), task.records("test", 5)
    assert scores(task, train, [r["completion"] for r in train]) == [1.0] * 20
    assert task.records("train", 20) == train
    other = make_task(f"reasoning_gym:{dataset}", seed=3).records("train", 60)
    assert not {r["prompt"] for r in test} & {r["prompt"] for r in other}


@needs_reasoning_gym
def test_the_scorer_is_the_datasets_own():
    task = make_task("reasoning_gym:chain_sum", min_terms=2, max_terms=2)
    (record,) = task.records("train", 1)
    assert scores(task, [record], [f"it is {record['answer']}"])[0] == pytest.approx(
        task.dataset.score_answer(f"it is {record['answer']}", task.dataset[record["index"]])
    )
    assert scores(task, [record], ["no idea"]) == [0.0]


@needs_reasoning_gym
def test_think_format_gives_the_scorer_what_is_in_the_tags():
    task = make_task("reasoning_gym:gcd", think_format=True)
    (record,) = task.records("train", 1)
    assert record["completion"] == f"<think></think><answer>{record['answer']}</answer>"
    assert scores(task, [record] * 2, [record["completion"], record["answer"]]) == [1.0, 0.0]


@needs_reasoning_gym
@pytest.mark.parametrize("dataset", ["n_queens", "binary_matrix", "spiral_matrix", "string_insertion",
                                     "polynomial_multiplication", "simple_integration", "countdown"])  # fmt: skip
def test_no_answer_is_run_as_code(dataset, tmp_path):
    task = make_task(f"reasoning_gym:{dataset}")
    records = task.records("train", 1) * 3
    marks = [tmp_path / str(i) for i in range(3)]
    attempts = [
        f"__import__('pathlib').Path({str(marks[0])!r}).touch()",
        f"[open({str(marks[1])!r}, 'w')]",
        f"().__class__.__base__.__subclasses__() or open({str(marks[2])!r}, 'w')",
    ]
    assert max(scores(task, records, attempts)) <= 0.05
    assert not any(mark.exists() for mark in marks)


@needs_reasoning_gym
def test_the_parts_of_a_composite_are_secured_too(tmp_path):
    parts = [{"name": "chain_sum"}, {"name": "simple_integration"}, {"name": "spiral_matrix"}]
    task = make_task("reasoning_gym:composite", datasets=parts)
    records = task.records("train", 12)
    assert {r["answer"].isdigit() for r in records} == {True, False}
    scores(task, records, [f"open({str(tmp_path / 'mark')!r}, 'w')"] * 12)
    assert not (tmp_path / "mark").exists()
    assert scores(task, records, [r["completion"] for r in records]) == [1.0] * 12


def dataset_with_scorer(call, folder, monkeypatch):
    """A dataset in a module of its own, whose scorer makes one call with the answer."""
    name = "scorer_for_test"
    (folder / f"{name}.py").write_text(
        f"import re\n\n\nclass Fake:\n    def score_answer(self, answer, entry):\n        return {call}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name).Fake()


@pytest.mark.parametrize("call", ["exec(answer)", "re and exec (answer)", "compile(answer, '', 'eval')",
                                  "__builtins__.eval(answer)", "__import__(answer)"])  # fmt: skip
def test_a_scorer_that_runs_text_as_code_is_refused(call, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="could run an answer as code"):
        secure_scorer(dataset_with_scorer(call, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    ("call", "parses", "replaces"),
    [
        ("eval(answer)", False, True),
        ("eval (answer)", False, True),
        ("parse_expr(answer)", True, False),
        ("sympy.sympify (answer)", True, False),
        ("re.compile(answer)", False, False),
        ("my_eval(answer)", False, False),
    ],
)
def test_eval_alone_is_replaced_and_the_parser_alone_is_reported(call, parses, replaces, tmp_path, monkeypatch):
    dataset = dataset_with_scorer(call, tmp_path, monkeypatch)
    assert secure_scorer(dataset) is parses
    assert (sys.modules["scorer_for_test"].__dict__.get("eval") is ast.literal_eval) is replaces


def test_nothing_in_the_guard_is_defined_twice():
    # Of two definitions by one name the last counts: a merge had left the looser pattern there.
    tree = ast.parse(Path(reasoning.__file__).read_text("utf-8"))
    names = [target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names += [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert {name: n for name, n in Counter(names).items() if n > 1} == {}


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("2*x**3 + 4*x - 3.5", True),
        ("exp(2*x)/3 + C", True),
        ("x**(1/2) + y**-2", True),
        ("(1+2)*(3-4)/5", True),
        ("9**9**9", False),
        ("9**(9+9)", False),
        ("9**999", False),
        ("(((9**99)**99)**99)**99", False),
        ("1e999999999", False),
        ("x.__class__", False),
        ("open", False),
        ("lambda: 0", False),
        ("'a'", False),
        ("f(x).g", False),
        ("", False),
        ("1+" * 600 + "1", False),
    ],
)
def test_what_sympys_parser_may_see(text, harmless):
    assert is_arithmetic(text) is harmless


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("reasoning_gym:chain_sums", {}, "did you mean chain_sum"),
        ("reasoning_gym:chain_sum", {"min_terms": -1}, "must be positive"),
    ],
)
def test_what_a_dataset_refuses(name, settings, message):
    with pytest.raises(UsageError, match=message):
        make_task(name, **settings)
