"""The benchmark for GPUs runs here at toy size, and without a GPU says what it would do."""

import json
import time

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Meter, Waits, main
from benchmarks.gpu_cases import CASES
from benchmarks.gpu_targets import TARGETS, Line, Target
from tests.marks import quick

NAMES = [case.name for case in (*TARGETS, *CASES)]


def test_without_a_gpu_it_says_what_it_would_do(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == []
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES) and "--cpu runs all but vLLM's at toy size" in out


def test_the_cases_fit_into_eight_minutes():
    assert sum(target.budget_s for target in TARGETS) <= 420


@pytest.mark.slow
def test_every_case_runs_at_toy_size(tmp_path, capsys):
    rows = main(["--cpu", "--json", str(tmp_path / "gpu.json")])
    assert [row for row in rows if "error" in row or "left out" in row] == []
    by_name = {name: [row for row in rows if row["case"] == name] for name in NAMES if name != "GRPO, vLLM"}
    assert all(by_name.values())
    for case in CASES:
        for row in by_name.get(case.name, ()):
            assert row["resume exact"] is True and row["peak GiB"] > 0 and row["waits/step"] > 0
            if case.is_language:
                assert row["training tokens/s"] > 0 and 0 < row["of matmul speed"] < 1
            if case.name.startswith(("GRPO", "RLHF")):
                assert row["sampling tokens/s"] > 0
    quantities = {row["quantity"]: row["ours"] for target in TARGETS for row in by_name[target.name]}
    assert {"ms a step, 4 x 16", "a step, s", "updates/s, graph"} <= quantities.keys()
    assert all(quantities[name] > 0 for name in ("a step, s", "updates/s, graph", "first step, s"))
    assert "needs vLLM and a CUDA device" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == json.loads(json.dumps(rows))


OURS = ["eager"]


@pytest.mark.parametrize("name", quick(["SAC", "TD3"], "TD3"))
def test_a_pair_of_control(name, capsys):
    rows = main(["--cpu", "--only", name])
    assert [row["ours"] for row in rows if row["quantity"].startswith("largest difference of a weight")] == [0.0]
    pairs = [row for row in rows if row["theirs"] is not None]
    assert [row["peer"] for row in pairs] in (OURS, [*OURS, "Stable-Baselines3"])
    assert all(row["ours"] > 0 and row["ratio"] == row["ours"] / row["theirs"] for row in pairs)
    assert f"| {name} | updates/s, graph | " in capsys.readouterr().out


def slow(place):
    yield Line("begun", 1.0)
    while True:
        time.sleep(0.01)


def wrong(place):
    raise RuntimeError("of no\nuse")
    yield Line("never", 1.0)


def keeps_the_first_error_to_itself():
    try:
        time.sleep(5)
    except TimeoutError:
        time.sleep(5)


def test_an_alarm_that_a_library_keeps_to_itself_comes_again():
    with pytest.raises(TimeoutError), gpu.within(0.01, again=0.05):
        keeps_the_first_error_to_itself()


def test_a_lost_device_ends_the_command_and_says_so(monkeypatch, capsys, tmp_path):
    def lost(place):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: (_ for _ in ()).throw(RuntimeError("illegal address")))
        yield Line("x", 1.0)

    monkeypatch.setattr(gpu, "TARGETS", (Target("lost", lost, 5), Target("next", slow, 5)))
    monkeypatch.setattr(gpu, "CASES", ())
    with pytest.raises(SystemExit):
        main(["--cpu", "--json", str(tmp_path / "gpu.json")])
    assert "| lost | the device is lost: illegal address; run the cases after it by --only |" in capsys.readouterr().out
    assert [row["case"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == ["lost", "lost"]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_a_case_that_takes_too_long_or_fails_leaves_the_others(monkeypatch, capsys, tmp_path):
    cases = (Target("slow", slow, 1), Target("wrong", wrong, 5), Target("fine", lambda _: iter([Line("x", 2.0)]), 5))
    monkeypatch.setattr(gpu, "TARGETS", cases)
    monkeypatch.setattr(gpu, "CASES", ())
    rows = main(["--cpu", "--json", str(tmp_path / "gpu.json")])
    assert [row["case"] for row in rows] == ["slow", "slow", "wrong", "fine"]
    out = capsys.readouterr().out
    assert "| slow | not measured: TimeoutError: stopped after 1 s |" in out
    assert "| wrong | not measured: RuntimeError: of no use |" in out and "| fine | x | 2 |" in out
    main(["--cpu", "--seconds", "1"])
    assert "| fine | left out: the time is over |" in capsys.readouterr().out


def test_waits_are_counted():
    with Waits() as waits:
        x = torch.arange(4.0)
        assert float(x.sum()) == 6.0
        assert x[x > 1].shape == (2,)
        x * 2
    assert waits.count == 2


def test_a_case_that_fails_in_the_counted_step_leaves_the_next_one_alone():
    meter = Meter(torch.device("cpu"), 3)
    meter._counting = True
    meter.waits.__enter__()
    assert bool(torch.ones(1) > 0)
    meter.on_exception(None, torch.nn.Module(), TimeoutError())
    assert bool(torch.ones(1) > 0)
    assert meter.waits.count == 1


@pytest.mark.parametrize("words", [["--steps", "2"], ["--only", "GPRO"]])
def test_words_that_mean_nothing(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert words[0] in capsys.readouterr().err
