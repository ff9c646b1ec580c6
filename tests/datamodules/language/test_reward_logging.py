"""What reward functions log by TRL's ``log_metric`` and ``log_extra``: means over completions, columns of tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from datamodules.language.reward_calls import RewardFunctions
from rl_modules.common.errors import UsageError
from tests.ranks import on_ranks
from tests.rl_modules.language.test_grpo import addition, spy
from tests.training import assert_resumes_exactly, fit

HERE = "tests.datamodules.language.test_reward_logging"


def value(text: str) -> float:
    return sum(map(ord, text)) % 7


def logs(completions: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
    """Logs the mean of :func:`value` over its completions, and their texts reversed."""
    assert not {"log_metric", "log_extra"} & set(columns)
    values = [value(text) for text in completions]
    log_metric("seven", sum(values) / len(values))
    log_metric("nothing", torch.nan)
    log_extra("reversed", [text[::-1] for text in completions])
    return values


def logs_and_fails(completions: Any, log_metric: Any = None, log_extra: Any = None) -> list[float]:
    """Raises on texts of which :func:`value` is 0, after it has logged."""
    values = [value(text) for text in completions]
    log_metric("of good ones", sum(values) / len(values))
    log_extra("good", values)
    return [1 / v for v in values]


def takes_columns(completions: Any, **columns: Any) -> list[float]:
    return [float(not {"log_metric", "log_extra"} & set(columns))] * len(completions)


def logs_reward(completions: Any, log_metric: Any) -> list[float]:
    log_metric("reward", 100.0)
    return [1.0] * len(completions)


def logs_by_name(name: str) -> Any:
    def reward(completions: Any, log_metric: Any) -> list[float]:
        log_metric(name, 100.0)
        return [float(len(text)) for text in completions]

    return reward


def logs_on_one_rank(completions: Any, log_metric: Any) -> list[float]:
    if torch.distributed.get_rank() == 1:
        log_metric("rank", 2)
    return [float(len(text)) for text in completions]


def logs_completion(completions: Any, log_extra: Any) -> list[float]:
    log_extra("completion", ["another"] * len(completions))
    return [1.0] * len(completions)


def records(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i // 2}"} for i in range(n)]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_mean_counts_every_completion_once(workers: int) -> None:
    texts = ["a", "bc", "d", "e", "fgh", "i", "j"]
    call = RewardFunctions([logs, takes_columns], workers=workers)
    rewards = call(records(7), texts)
    assert rewards[:, 1].tolist() == [1.0] * 7
    mean, weight = call.take_notes()["logged"]["seven"]
    assert (mean, weight) == (pytest.approx(rewards[:, 0].mean().item(), rel=1e-6), 7)
    assert call.extra(7) == [{"reversed": text[::-1]} for text in texts]
    assert call.take_notes()["logged"] == {}


@pytest.mark.parametrize("time_limit_s", [None, 60.0])
def test_what_a_failing_call_logged_is_not_counted(time_limit_s: float | None) -> None:
    texts = ["a", "b", "i", "c", "p", "d"]
    failing = [i for i, text in enumerate(texts) if value(text) == 0]
    assert 0 < len(failing) < len(texts)
    call = RewardFunctions([logs_and_fails], time_limit_s)
    rewards = call(records(6), texts)
    assert rewards[:, 0].isnan().nonzero().flatten().tolist() == failing
    good = [value(text) for text in texts if value(text)]
    assert call.take_notes()["logged"] == {"of good ones": (pytest.approx(sum(good) / len(good)), len(good))}
    assert call.extra(6) == [{} if value(text) == 0 else {"good": value(text)} for text in texts]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda log_metric, log_extra: log_metric("x", "no"), r"log_metric\('x', 'no'\): the value must be a number"),
        (lambda log_metric, log_extra: log_extra("x", [1, 2]), r"log_extra\('x', …\): 2 values for 1 completions"),
    ],
)  # fmt: skip
def test_what_can_not_be_logged_is_said(wrong: Any, message: str) -> None:
    def reward(completions: Any, log_metric: Any, log_extra: Any) -> list[float]:
        wrong(log_metric, log_extra)
        return [0.0]

    call = RewardFunctions([reward])
    call([{"prompt": "p"}], ["a"])
    with pytest.raises(UsageError, match=f"reward function 'reward' raised .*{message}"):
        call([{"prompt": "q"}], ["a"])


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "tables" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"reward_overlap": True, "reward_workers": 2}, {"dynamic_sampling": 1}])
def test_curves_and_tables_hold_it(settings: dict[str, Any], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="run")
    module = spy(logging_steps=2, completions_steps=1)
    data = addition(reward_funcs=[f"{HERE}:logs"], eval_steps=2, n_eval=8, **settings)
    trainer = fit(module, data, max_steps=2, logger=logger)
    mean = module.latest_metrics["train/seven"]
    if "dynamic_sampling" not in settings:  # which replaces completions that were logged about
        assert mean == pytest.approx(module.latest_metrics["train/rewards/logs/mean"])
    assert "train/nothing" not in module.latest_metrics
    metrics = trainer.callback_metrics
    torch.testing.assert_close(metrics["eval/seven"], metrics["eval/rewards/logs"])
    for name in ("completions", "eval/completions"):
        rows = rows_of(tmp_path / "run", name)
        assert rows and all(row["reversed"] == row["completion"][::-1] for row in rows)


@pytest.mark.long
def test_such_runs_resume_exactly(tmp_path: Path) -> None:
    def make() -> Any:
        return addition(reward_funcs=[f"{HERE}:logs"], steps_per_generation=2)

    assert_resumes_exactly(lambda: spy(logging_steps=3), make, tmp_path, 3)


@pytest.mark.long
def test_what_one_of_two_ranks_logs_is_the_mean_of_both(tmp_path: Path) -> None:
    """Lightning waits for ever where a rank lacks a metric of an evaluation."""

    def run() -> list[float]:
        module = spy(logging_steps=1)
        data = addition(reward_funcs=[f"{HERE}:logs_on_one_rank"], eval_steps=1, n_eval=8)
        trainer = fit(module, data, max_steps=1, devices=2, strategy="ddp")
        return [module.latest_metrics["train/rank"], trainer.callback_metrics["eval/rank"].item()]

    assert on_ranks(run, tmp_path) == [[2.0, 2.0], [2.0, 2.0]]


def test_the_name_of_a_curve_of_the_run_is_refused() -> None:
    with pytest.raises(UsageError, match=r"log_metric\('reward', …\) .* has a curve of this name"):
        fit(spy(), addition(reward_funcs=[f"{HERE}:logs_reward"]), max_steps=1)


@pytest.mark.parametrize("name", ["loss", "train/loss", "learning_rate", "num_tokens"])
def test_a_curve_that_the_run_has_later_is_refused_before_it_is_written(name: str) -> None:
    module = spy(logging_steps=1)
    with pytest.raises(UsageError, match=r"log_metric\('.*', …\) .* has a curve of this name"):
        fit(module, addition(reward_funcs=[logs_by_name(name)]), max_steps=1)
    assert not module.latest_metrics


@pytest.mark.long
@pytest.mark.parametrize("name", ["pass@1", "mean_length", "rewards/reward"])
def test_the_name_of_a_curve_of_evaluations_is_refused(name: str) -> None:
    """Lightning would take the mean of both, by which the best checkpoint is chosen."""
    data = addition(reward_funcs=[logs_by_name(name)], eval_steps=1, n_eval=8)
    with pytest.raises(UsageError, match=rf"log_metric\('{name}', …\) .* has a curve of this name"):
        fit(spy(), data, max_steps=1)


def test_the_name_of_a_column_of_the_table_is_refused() -> None:
    with pytest.raises(UsageError, match=r"log_extra\('completion', …\) .* has a column of this name"):
        fit(spy(completions_steps=1), addition(reward_funcs=[f"{HERE}:logs_completion"]), max_steps=1)
