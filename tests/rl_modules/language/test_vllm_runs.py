"""Whole runs with vLLM: in this process, under LoRA, and behind ``rl serve``."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import on_ranks
from tests.rl_modules.language.test_grpo import addition, grpo
from tests.training import fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
HERE = "tests.rl_modules.language.test_vllm_runs"
#: vLLM's attention on a CPU takes heads of 32 and more.
MODEL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip
STEPS = 40


def ones(completions: list[str], **columns: Any) -> list[float]:
    """The share of 1s among four places: from 1/16 or so up to 1."""
    return [text.count("1") / 4 for text in completions]


def run(**arguments: Any) -> tuple[list[float], dict[str, float]]:
    """Mean reward of each generation, and the last metrics."""
    module = grpo(**{"model_config": MODEL, "max_completion_length": 4, "learning_rate": 3e-3, "logging_steps": 1,
                     **arguments})  # fmt: skip
    curve: list[float] = []
    prepare = module.prepare

    def noting(rollout: Any) -> Any:
        curve.append(float(rollout["reward"].mean()))
        return prepare(rollout)

    module.prepare = noting  # type: ignore[method-assign]
    fit(module, addition(reward_funcs=[f"{HERE}:ones"], batch_size=32, num_generations=8), max_steps=STEPS)
    return curve, module.latest_metrics


@pytest.fixture(scope="module")
def native() -> list[float]:
    return run()[0]


def assert_learned_as(curve: list[float], native: list[float]) -> None:
    print("native", [round(x, 3) for x in native[::5]], "vllm", [round(x, 3) for x in curve[::5]])
    late = slice(-10, None)
    assert sum(native[late]) / 10 > 0.7 > 0.3 > native[0]
    assert abs(sum(curve[late]) - sum(native[late])) / 10 < 0.1


def on_two_ranks() -> dict[str, Any]:
    module = grpo(model_config=MODEL, max_completion_length=4, learning_rate=3e-3, logging_steps=1, sampler="vllm")
    trainer = fit(module, addition(reward_funcs=[f"{HERE}:ones"], batch_size=16, num_generations=8), max_steps=3,
                  devices=2, strategy="ddp")  # fmt: skip
    weights = torch.cat([parameter.detach().flatten() for parameter in module.model.parameters()])
    return {"steps": trainer.global_step, "weights": weights, "metrics": dict(module.latest_metrics),
            "texts": module.tokenizer.decode(module.act([[5, 6, 7]], [trainer.global_rank]).tokens[0])}  # fmt: skip


def test_each_rank_of_ddp_has_an_engine_of_its_own(tmp_path: Path) -> None:
    # The first test: an engine in this process starts Gloo's threads, for which forked ranks would wait for ever.
    one, other = on_ranks(on_two_ranks, tmp_path)
    assert one["steps"] == other["steps"] == 3
    assert torch.equal(one["weights"], other["weights"])
    # The engines had the weights of each step.
    assert one["metrics"]["train/sampling/logp_difference/max"] < 1e-3


def test_a_run_with_vllm_learns_as_with_the_native_sampler(native: list[float]) -> None:
    curve, metrics = run(sampler="vllm", max_rows_in_flight=16)
    assert_learned_as(curve, native)
    assert metrics["train/sampling/logp_difference/max"] < 1e-4
    assert metrics["train/sampling/importance_ratio/mean"] == pytest.approx(1, abs=1e-3)


def test_adapters_are_merged_on_the_way_to_vllm() -> None:
    """Their weights start at B = 0 and then move: a sampler without them would differ in its log-probabilities."""
    lora = {"r": 8, "lora_alpha": 64, "target_modules": "all-linear"}
    _, metrics = run(sampler="vllm", lora=lora, learning_rate=1e-2)
    assert metrics["train/sampling/logp_difference/max"] < 1e-4


def test_a_run_with_rl_serve_learns_as_with_the_native_sampler(native: list[float]) -> None:
    command = [sys.executable, "-m", "recipes", "serve", "--engine", "vllm", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.match(r"serving on (\S+) with vllm", server.stdout.readline())
        assert found is not None
        curve, metrics = run(sampler="vllm_server", sampler_options={"addresses": [found[1]]})
    finally:
        server.kill()
        server.wait()
    assert_learned_as(curve, native)
    assert metrics["train/sampling/logp_difference/max"] < 1e-4
    assert torch.tensor(curve).isfinite().all()
