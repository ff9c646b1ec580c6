"""Tokens per second of sampling and of training, in runs whose clock the test sets."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_modules.language import throughput
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.throughput import device_figures
from tests.rl_modules.language.test_device import TINY, case
from tests.rl_modules.language.test_run_state import Curves, addition, fit, grpo
from tests.training import tensors_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What ``time.perf_counter`` says to the module under test; the test moves it."""
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    return now


class Alone:
    root_device = torch.device("cpu")


def test_rates_are_tokens_over_their_own_seconds(clock: list[float]) -> None:
    counter = throughput.Throughput()
    counter.restart(100)
    watch = throughput.Stopwatch(torch.device("cpu"))
    clock[0] += 2.0
    watch.stop()
    counter.add(torch.tensor([3, 5]), watch)
    clock[0] += 1.0
    counter.pause()
    clock[0] += 50.0  # an evaluation
    counter.resume()
    clock[0] += 3.0
    assert counter.rates(140, Alone(), 1) == {
        "time/sampling_tokens_per_second": 8 / 2, "time/training_tokens_per_second": 40 / 4,
    }  # fmt: skip
    # Without new tokens there is no rate, and the time counts for the next.
    clock[0] += 1.0
    assert counter.rates(140, Alone(), 1) == {}
    clock[0] += 1.0
    assert counter.rates(160, Alone(), 1) == {"time/training_tokens_per_second": 10.0}


@pytest.mark.long
def test_a_run_counts_the_tokens_that_it_writes_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    took: list[float] = []
    add = throughput.Throughput.add

    def spy(self: Any, tokens: Any, watch: Any) -> None:
        written.append(int(tokens.sum()))
        took.append(watch.seconds())
        add(self, tokens, watch)

    monkeypatch.setattr(throughput.Throughput, "add", spy)
    curves = Curves()
    began_s = time.perf_counter()
    module = grpo(logging_steps=1)
    fit(module, addition(eval_steps=1, n_eval=4), max_steps=2, logger=curves)
    wall_s = time.perf_counter() - began_s
    points = [point for _, point in curves.points if "time/sampling_tokens_per_second" in point]
    assert len(points) == len(written) == 2, "held-out completions are not counted"
    for point, tokens, seconds in zip(points, written, took, strict=True):
        assert point["time/sampling_tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-4)
        assert point["time/training_tokens_per_second"] > point["train/num_tokens"] / 2 / wall_s


@pytest.mark.long
def test_clocks_are_in_no_checkpoint(tmp_path: Path) -> None:
    fit(grpo(), addition(), max_steps=2).save_checkpoint(tmp_path / "one.ckpt")
    leaves = tensors_of(torch.load(tmp_path / "one.ckpt", weights_only=True))
    assert leaves and not any("per_second" in f"{path} {value}" for path, value in leaves.items())


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [("NVIDIA H100 80GB HBM3", "bf16-mixed", 989e12), ("NVIDIA H100 PCIe", "bf16-true", 756e12),
     ("NVIDIA H100 80GB HBM3", "32-true", None), ("Some Card", "bf16-mixed", None)],
)  # fmt: skip
def test_figures_of_a_gpu(name, precision, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 5, bias=False))
    model[0].requires_grad_(False)
    trainer = SimpleNamespace(precision=precision, world_size=2, strategy=SimpleNamespace(
        root_device=torch.device("cuda", 0)))  # fmt: skip
    found = device_figures(model, trainer, {"time/training_tokens_per_second": 1e9})
    assert found.pop("time/peak_memory_gib") == 3.0
    # 100 frozen weights and 50 that train.
    expected = {} if peak is None else {"time/model_flops_utilization": (100 * 4 + 50 * 6) * 1e9 / peak / 2}
    assert found == pytest.approx(expected)


def test_a_cpu_has_no_such_figures():
    trainer = SimpleNamespace(precision="bf16-mixed", world_size=1, strategy=SimpleNamespace(
        root_device=torch.device("cpu")))  # fmt: skip
    assert device_figures(torch.nn.Linear(2, 2), trainer, {"time/training_tokens_per_second": 1.0}) == {}


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft", "reward model", "dpo", "kto", "grpo", "rlhf"])
def test_every_algorithm_has_the_figures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds in every point; the share of the device's speed counts all models that train."""
    seen: list[tuple[int, dict[str, float]]] = []

    def spy(models: Any, trainer: Any, rates: dict[str, float]) -> dict[str, float]:
        seen.append((sum(p.numel() for p in models.parameters() if p.requires_grad), rates))
        return {"time/peak_memory_gib": 1.0}

    monkeypatch.setattr("rl_modules.language.metrics.device_figures", spy)
    judge = RewardModel(model_config=TINY)
    judge.configure_model()
    module, data = case(name, str(judge.export(tmp_path / "judge")))
    curves = Curves()
    fit(module, data, max_steps=2, logger=curves, limit_val_batches=0)
    assert seen[0][0] == sum(p.numel() for p in module.parameters() if p.requires_grad)
    points = [point for _, point in curves.points if "time/peak_memory_gib" in point]
    assert points and all(point["time/training_tokens_per_second"] > 0 for point in points)
    assert name not in ("grpo", "rlhf") or all(point["time/sampling_tokens_per_second"] > 0 for point in points)
