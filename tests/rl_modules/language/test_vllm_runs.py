"""Whole runs with vLLM: in this process, under LoRA, and behind ``rl serve``."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_modules import SFT
from rl_modules.language.sampling.remote import ServerSampler
from rl_modules.language.sampling.teacher import ServedTeacher
from rl_modules.language.tokenizer import load_tokenizer
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], str]]:
    """A real `rl serve` of a new model: a run's options that find it, and the model's folder."""
    folder = tmp_path_factory.mktemp("serve")
    module = SFT(model_config=MODEL)
    module.configure_model()
    module.export(folder / "model")
    command = [sys.executable, "-m", "recipes", "serve", f"--model={folder / 'model'}", "--port=0",
               f"--token_file={folder / 'token'}", "--", "--max-model-len=128"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        found = next(filter(None, (re.search(r"^serving \S+ on (\S+); its token is in", x) for x in process.stdout)))
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        yield {"addresses": [found[1]], "token_file": str(folder / "token")}, str(folder / "model")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def test_a_run_with_rl_serve_learns_as_with_the_native_sampler(native: list[float], server: Any) -> None:
    curve, metrics = run(sampler="vllm_server", sampler_options=server[0])
    assert_learned_as(curve, native)
    assert metrics["train/sampling/logp_difference/max"] < 1e-4
    assert torch.tensor(curve).isfinite().all()


def test_a_served_run_resumes_from_its_checkpoint(server: Any, tmp_path: Path) -> None:
    def make() -> Any:
        return grpo(model_config=MODEL, max_completion_length=4, sampler="vllm_server", sampler_options=server[0])

    first, second = make(), make()
    fit(first, addition(), max_steps=3).save_checkpoint(tmp_path / "stopped.ckpt")
    trainer = fit(second, addition(), tmp_path / "stopped.ckpt", max_steps=6)
    assert trainer.global_step == 6 and second.latest_metrics["train/sampling/logp_difference/max"] < 1e-4


def test_a_served_teacher_is_the_local_one(server: Any) -> None:
    options, folder = server
    sampler = ServerSampler(**options, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sampler.update_weights(model, 1)
    teacher = ServedTeacher(options["addresses"][0], load_tokenizer(folder), 5, options["token_file"])
    texts, begin = [[5, 6, 7, 8, 9, 10], list(range(3, 67)), [4, 5]], [2, 1, 1]
    ids, log_prob = teacher.likeliest(texts, begin, 99)
    with torch.no_grad():
        passes = [
            model(input_ids=torch.tensor([text])).logits[0, first - 1 : -1]
            for text, first in zip(texts, begin, strict=True)
        ]
    expected = torch.cat(passes).log_softmax(-1).topk(5)
    torch.testing.assert_close(log_prob, expected.values, atol=1e-4, rtol=0)
    assert (ids == expected.indices).float().mean() > 0.95  # equal probabilities may change places
