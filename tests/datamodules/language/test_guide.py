"""What docs/language/tasks.md and docs/language/rewards.md show works as it stands there."""

import re
from pathlib import Path

import pytest
import yaml

from datamodules.language import load_reward_func, make_task
from datamodules.language.rewards import FACTORIES, FUNCTIONS
from datamodules.language.tasks import TASKS

DOCS = Path(__file__).parents[3] / "docs/language"
GUIDE = "".join((DOCS / f"{name}.md").read_text("utf-8") for name in ("tasks", "rewards"))
BLOCKS = [yaml.safe_load(block)["data"] for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]


def test_every_task_and_reward_function_is_in_the_guide():
    assert all(f"`{name}" in GUIDE for name in [*TASKS, *FUNCTIONS, *FACTORIES])


def test_examples_of_questions_and_answers_are_right():
    for name, prompt, answer in re.findall(r"^\| `(\w+)` \| `(\S+)` → `(\S+)` \|", GUIDE, re.MULTILINE):
        if name == "paths":
            continue  # depends on the graph
        task = make_task(name)
        numbers = [int(n) for n in re.findall(r"\d+", prompt)]
        record = {"prompt": prompt, "answer": answer, "numbers": numbers[:-1], "target": numbers[-1:] and numbers[-1]}
        assert task.score(record, answer) == 1.0
        fields = re.fullmatch(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(task.template)), prompt)
        assert fields is not None
        if name != "countdown":
            question = {key: int(value) if value.isdigit() else value for key, value in fields.groupdict().items()}
            assert task.solve(question, None)["answer"] == answer


def test_yaml_examples_make_tasks_and_rewards():
    (task,) = [make_task(block["task"], **block["task_kwargs"]) for block in BLOCKS if "task" in block]
    assert len(task.records("train", 3)) == 3
    pytest.importorskip("trl")
    (specs,) = [block["reward_funcs"] for block in BLOCKS if "reward_funcs" in block]
    assert all(callable(load_reward_func(spec, task)) for spec in specs if "my_project" not in str(spec))


def test_the_example_task_is_found_by_its_import_path(tmp_path, monkeypatch):
    code = re.search(r"```python\n# my_project/tasks.py\n(.*?)```", GUIDE, re.DOTALL)[1]
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    records = make_task("my_project.tasks:Doubling").records("train", 20)
    assert all(int(r["answer"]) == 2 * int(r["prompt"].removeprefix("2*").removesuffix("=")) for r in records)
