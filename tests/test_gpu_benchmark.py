"""The benchmark for GPUs runs here at toy size, and without a GPU says what it would do."""

import json

import pytest
import torch

from benchmarks.gpu import Waits, main
from benchmarks.gpu_cases import CASES


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_says_what_it_would_do(capsys):
    assert main([]) == []
    out = capsys.readouterr().out
    assert all(f"  {case.name}: " in out for case in CASES)
    assert {"GRPO, 8 rows in flight", "GRPO, static cache", "GRPO, vLLM"} <= {case.name for case in CASES}
    assert "16 x (128 + 384) tokens a step" in out and "--tiny --device cpu" in out


@pytest.mark.slow
def test_every_module_runs_at_toy_size(tmp_path, capsys):
    rows = main(["--tiny", "--device", "cpu", "--json", str(tmp_path / "gpu.json")])
    cases = [case for case in CASES if not case.is_vllm]
    assert [row["case"] for row in rows] == [case.name for case in cases]
    assert {"SFT", "RewardModel", "GRPO", "RLHFPPO", "PPO", "DQN"} <= {row["case"] for row in rows}
    for row, case in zip(rows, cases, strict=True):
        assert row["resume exact"] is True and row["peak GiB"] > 0 and row["waits/step"] > 0
        if case.is_language:
            assert row["training tokens/s"] > 0 and 0 < row["of matmul speed"] < 1
        if case.name.startswith(("GRPO", "RLHF")):
            assert row["sampling tokens/s"] > 0
    out = capsys.readouterr().out
    assert all(f"| {case.name} |" in out for case in cases)
    assert "GRPO, vLLM: left out, needs vLLM and a CUDA device" in out
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == len(cases)


def test_waits_are_counted():
    with Waits() as waits:
        x = torch.arange(4.0)
        assert float(x.sum()) == 6.0
        assert x[x > 1].shape == (2,)
        x * 2
    assert waits.count == 2


@pytest.mark.parametrize("words", [["--steps", "2"], ["--only", "GPRO"]])
def test_words_that_mean_nothing(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert words[0] in capsys.readouterr().err
