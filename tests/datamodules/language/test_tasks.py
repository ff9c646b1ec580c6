"""Splits, repeatability and right answers of the built-in tasks."""

import subprocess
import sys
from collections import Counter

import pytest

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from datamodules.language.on_demand import load_records
from datamodules.language.tasks import TASKS, Task, make_task
from datamodules.language.tasks.base import fill
from rl_modules import DPO, GRPO, KTO, RLHFPPO, RLOO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import ALPHABET
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


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


@pytest.mark.parametrize("name", ["addition", "reverse", "sort", "countdown", "paths"])
@pytest.mark.parametrize("seed", [0, 7])
def test_every_task_keeps_its_splits_apart_and_solves_its_own_questions(name, seed):
    task, other = make_task(name, seed=seed), make_task(name, seed=seed + 1)
    train, test = task.records("train", 200), task.records("test", 40)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in other.records("test", 40)}
    assert len({r["prompt"] for r in test}) == 40
    for record in train[:50] + test:
        columns = {key: [value] for key, value in record.items() if key not in ("prompt", "completion")}
        correct = record["answer"] if name == "paths" else record["completion"]
        assert task.accuracy(prompts=[record["prompt"]], completions=[correct], **columns) == [1.0]
        assert task.accuracy(prompts=[record["prompt"]], completions=["?"], **columns) == [0.0]
        assert set(record["prompt"] + record["completion"]) <= set(ALPHABET)


@pytest.mark.parametrize("name", ["addition", "reverse", "countdown"])
def test_think_format_rewards_the_form_and_reads_the_answer_from_the_tags(name):
    task = make_task(name, think_format=True)
    record = task.records("train", 1)[0]
    thought, answer = record["completion"].removeprefix("<think>").split("</think><answer>")
    accuracy, form = task.reward_funcs
    columns = {key: [value] * 3 for key, value in record.items() if key not in ("prompt", "completion")}
    completions = [record["completion"], f"<answer>{answer}", thought + answer.removesuffix("</answer>")]
    assert accuracy(prompts=None, completions=completions, **columns) == [1.0, 1.0, 0.0]
    assert form(prompts=None, completions=completions, **columns) == [1.0, 0.0, 0.0]
    assert task.extract(completions[2]) is None


def test_reverse_and_sort_answer_right():
    for record in make_task("reverse").records("train", 100):
        assert record["answer"] == "".join(reversed(record["prompt"][:-1]))
    for record in make_task("sort").records("train", 100):
        assert list(record["answer"]) == sorted(record["prompt"][:-1])


def test_addition_reasons_with_carries():
    task = make_task("addition", think_format=True)
    assert task.reasoning({"a": 97, "b": 5}, {}) == "7+5=12 9+0+1=10"


def test_templates_and_chat_shape_the_prompt():
    task = make_task("addition", template="What is {a} plus {b}?", chat=True)
    ((message,),) = [r["prompt"] for r in task.records("train", 1)]
    assert message["role"] == "user" and message["content"].startswith("What is ")
    with pytest.raises(UsageError, match=r"\{c\}.*only a, b"):
        make_task("addition", template="{c}").records("train", 1)


def test_a_template_reaches_nothing_but_fields():
    assert fill("{x.__class__} {0} {x}", {"x": 1}, "here") == "{x.__class__} {0} 1"


class Doubling(Task):
    """The smallest task of one's own."""

    name = "doubling"
    default_template = "2*{x}="
    size = 1000

    def questions(self):
        return ({"x": x} for x in range(1000))

    def solve(self, question, rng):
        return {"answer": str(2 * question["x"])}


def test_a_task_of_ones_own_by_import_path():
    task = make_task("tests.datamodules.language.test_tasks:Doubling", seed=5)
    records = task.records("train", None) + task.records("test", None)
    assert sorted(int(r["answer"]) for r in records) == list(range(0, 2000, 2))


def test_a_task_may_leave_the_base_constructor_out():
    class Own(Doubling):
        def __init__(self, seed=0):
            self.numbers = 7

    assert Own().records("train", 3) == Doubling().records("train", 3)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("additon", {}, "did you mean addition"),
        ("no.such.module:Task", {}, "can't be imported"),
        ("math:pi", {}, "is a float"),
        ("builtins:dict", {}, "made a dict"),
        ("addition", {"n_digit": 3}, "did you mean n_digits"),
        ("addition", {"n_digits": 0}, "at least 1"),
        ("addition", {"seed": -1}, "seed=-1"),
        ("sort", {"min_length": 5, "max_length": 4}, "min_length=5"),
        ("reverse", {"alphabet": "aa"}, "different characters"),
        ("countdown", {"operators": "^"}, "operators='\\^'"),
        ("countdown", {"n_operands": 1}, "at least 2"),
        ("paths", {"n_nodes": 60}, "between 4 and 52"),
        ("paths", {"out_degree": 1}, "out_degree=1"),
        ("paths", {"min_distance": 50}, "min_distance=50"),
        ("paths", {"max_length": 1}, "max_length=1"),
        ("paths", {"faults": 1.5}, "faults=1.5"),
    ],
)
def test_what_a_task_refuses(name, settings, message):
    with pytest.raises(UsageError, match=message):
        make_task(name, **settings)


def test_a_task_of_a_package_that_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"needs a package that is not installed, reasoning_gym.*reasoning-gym"):
        make_task("reasoning_gym:chain_sum")


def test_unknown_split_and_preferences_of_a_task_without_any():
    with pytest.raises(UsageError, match="split='eval'"):
        make_task("addition").records("eval", 1)
    with pytest.raises(UsageError, match="paths"):
        make_task("addition").preferences("train", 1)


def test_an_endless_task_that_runs_out_says_how_many_it_found():
    task = make_task("countdown", n_operands=2, max_operand=3)
    with pytest.raises(UsageError, match=r"split has only \d+"):
        task.records("train", 10_000)


def test_tasks_import_neither_torch_nor_transformers():
    code = "import sys; from datamodules.language.tasks import make_task; make_task('addition').records('train', 1); "
    code += "sys.exit(' '.join(m for m in ('torch', 'transformers', 'datasets') if m in sys.modules) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_records_of_a_task_are_as_many_as_can_be_drawn(monkeypatch):
    """Without a number a task with fewer questions than the default gives those it has."""

    class Seven(Task):
        def draw(self, rng):
            return {"question": f"{rng.randrange(7)} ="}

        def solve(self, question, rng):
            return {"answer": question["question"][0]}

    monkeypatch.setattr("datamodules.language.tasks.base.FRUITLESS", 200)
    found = [record["answer"] for split in ("train", "test") for record in Seven().records(split, None)]
    assert sorted(found) == list("0123456")
    with pytest.raises(UsageError, match=r"n=8 records .* has only \d with different prompts"):
        Seven().records("train", 8)


def held_out(**arguments):
    data = PromptDataModule(batch_size=8, eval_steps=1, **arguments)
    fit(GRPO(model_config=TINY, max_completion_length=2), data, max_steps=1)
    return data.eval_records


@pytest.mark.long
def test_the_usual_number_of_held_out_records_is_what_a_task_has_and_a_given_one_is_refused():
    listed = make_task("paths").records("test", None)
    assert len(held_out(task="paths")) == len(listed) < 256
    mixed = held_out(task=[{"name": "paths"}, {"name": "addition"}])
    assert Counter(record["data_source"] for record in mixed) == {"paths": len(listed), "addition": 128}
    for given in ({"task": "paths", "n_eval": 100}, {"task": [{"name": "paths", "n_eval": 100}]}):
        with pytest.raises(UsageError, match=r"n=100 records of task 'paths' .* has only \d+ .*; lower n_eval"):
            held_out(**given)


@pytest.mark.parametrize(
    "algorithm",
    [
        *(pytest.param(kind, marks=pytest.mark.long) for kind in (SFT, GRPO, DPO, RewardModel)),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (RLOO, RLHFPPO, KTO)),
    ],
)
@pytest.mark.parametrize("task", [*(name for name in TASKS if name != "dots"), "reasoning_gym:chain_sum"])
def test_a_shipped_task_runs_with_a_module_that_takes_it_by_defaults_alone(task, algorithm):
    small = {} if algorithm is RewardModel else {"max_completion_length": 2}
    model = algorithm(model_config=TINY, **small)
    kinds = {"prompts": PromptDataModule, "demonstrations": InstructionDataModule}
    data = kinds.get(model.learns_from, PreferenceDataModule)(task)
    if isinstance(data, PreferenceDataModule) and task != "paths":
        with pytest.raises(UsageError, match=f"task {task!r} makes no preferences"):
            fit(model, data, max_steps=1)
        return
    trainer = fit(model, data, max_steps=1)
    [metrics] = trainer.test(model, data, verbose=False)
    assert trainer.global_step == 1 and metrics


def test_a_number_as_answer_is_compared_as_text():
    class Two(Task):
        def draw(self, rng):
            return {"question": f"{rng.random()} ="}

        def solve(self, question, rng):
            return {"answer": 2}

    class Numeric(Two):
        def is_correct(self, answer, record):
            return int(answer) == record["answer"]

    for task in (Two(), Numeric()):
        record = load_records(task=task, n=1)[0]
        assert [task.score(record, text) for text in ("2", "3")] == [1.0, 0.0]
