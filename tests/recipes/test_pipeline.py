"""Pipelines skip completed stages, resume stopped ones, and never mix the results of two pipelines."""

import json
import os
import signal
import sys

import lightning as L
import pytest
import torch

from recipes.pipeline import Pipeline, _in_a_process, check_stages, draw_curves, in_one_process, rl_words, world_size
from rl_modules.common.errors import UsageError


def writer(name, text="x", calls=None):
    def run(folder):
        if calls is not None:
            calls.append(name)
        (folder / name).write_text(text)

    return run


def test_a_stage_that_is_done_is_skipped(tmp_path, capsys):
    calls = []
    for _ in range(2):
        pipeline = Pipeline(tmp_path / "p")
        folder = pipeline.stage("one", writer("a.txt", calls=calls), ["a.txt"], {"lr": 1})
    assert folder == tmp_path / "p" / "one" and calls == ["a.txt"]
    assert "one: done already" in capsys.readouterr().out


def test_a_stage_whose_output_is_gone_runs_again(tmp_path):
    calls = []
    for _ in range(2):
        folder = Pipeline(tmp_path).stage("one", writer("a.txt", calls=calls), ["a.txt"])
        (folder / "a.txt").unlink()
    assert len(calls) == 2


def test_a_stage_that_was_stopped_is_called_again_and_its_time_adds_up(tmp_path):
    calls = []

    def stops_once(folder):
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        (folder / "a.txt").write_text("")

    with pytest.raises(KeyboardInterrupt):
        Pipeline(tmp_path).stage("one", stops_once, ["a.txt"])
    first = json.loads((tmp_path / "one" / "stage.json").read_text())
    assert "done_at" not in first
    Pipeline(tmp_path).stage("one", stops_once, ["a.txt"])
    second = json.loads((tmp_path / "one" / "stage.json").read_text())
    assert len(calls) == 2 and second["seconds"] >= first["seconds"] and "done_at" in second


def test_other_settings_are_refused(tmp_path):
    Pipeline(tmp_path).stage("one", writer("a.txt"), ["a.txt"], {"lr": 1})
    with pytest.raises(UsageError, match="holds the results of stage 'one', with other settings; remove that folder"):
        Pipeline(tmp_path).stage("one", writer("a.txt"), ["a.txt"], {"lr": 2})


def test_a_stage_after_one_that_was_run_again_is_refused(tmp_path):
    def both():
        one = Pipeline(tmp_path).stage("one", writer("a.txt"), ["a.txt"])
        return Pipeline(tmp_path).stage("two", writer("b.txt"), ["b.txt"], after=[one])

    both()
    both()
    (tmp_path / "one" / "a.txt").unlink()
    with pytest.raises(UsageError, match="stage 'two', but an earlier stage ran again since"):
        both()


def test_a_stage_without_its_outputs_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"stage 'one' ended without b.txt"):
        Pipeline(tmp_path).stage("one", writer("a.txt"), ["a.txt", "b.txt"])


def test_measurements_are_kept(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("recipes.pipeline.evaluate", lambda *given: calls.append(given) or {"eval/pass@1": 0.5})
    for _ in range(2):
        found = Pipeline(tmp_path).measure("e", "r1/grpo.yaml", {"model.beta": "1"})
    assert found == {"eval/pass@1": 0.5} and calls == [("r1/grpo.yaml", {"model.beta": "1"})]


def test_the_table_has_a_row_per_stage(tmp_path, capsys):
    pipeline = Pipeline(tmp_path)
    pipeline.table({"sft": {"pass@1": 0.25}, "grpo": {"pass@1": 0.5, "length": 7.0}}, ["pass@1", "length"])
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[:4] == [
        "| stage | pass@1 | length |",
        "|---|---|---|",
        "| sft | 0.250 |  |",
        "| grpo | 0.500 | 7.000 |",
    ]
    assert "| grpo | 0.500 | 7.000 |" in capsys.readouterr().out


def test_curves_of_stages_are_drawn_one_after_the_other():
    points = {
        "one": {"loss": [(0, 1.0), (100, 0.0)]},
        "two": {"loss": [(0, 1.0), (100, 1.0)], "kl": [(50, 2.0), (60, 3.0)]},
    }
    panels = draw_curves(points, ["loss", "kl", "absent"]).axes
    assert [panel.get_title(loc="left") for panel in panels] == ["loss", "kl"], "a panel for each metric that there is"
    drawn = {line.get_label(): line.get_xydata().tolist() for line in panels[0].lines if line.get_label() in points}
    assert drawn == {"one": [[0, 1], [100, 0]], "two": [[100, 1], [200, 1]]}
    [kl] = [line for line in panels[1].lines if line.get_label() == "two"]
    assert kl.get_xydata().tolist() == [[150, 2], [160, 3]]


def test_without_matplotlib_the_curves_are_in_tensorboard(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "sft" / "run").mkdir(parents=True)
    Pipeline(tmp_path).curves(["sft"], ["loss"])
    assert "needs matplotlib: pip install" in capsys.readouterr().out


# ---------------------------------------------------------------- several devices


TINY = '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}'
ADDITION = {"model.model_config": TINY, "data.n_train": 32, "data.n_eval": 4, "data.batch_size": 8,
            "data.eval_steps": 0, "trainer.max_steps": 4, "trainer.accelerator": "cpu", "threads": 1}  # fmt: skip


@pytest.mark.long
def test_the_number_of_processes_is_that_of_the_trainer():
    words = rl_words("sft/addition.yaml", {name: str(value) for name, value in ADDITION.items()})
    assert world_size(words) == 1
    assert world_size([*words, "--trainer.devices=2"]) == 2


@pytest.mark.slow
def test_a_stage_on_two_devices_trains_what_the_command_trains(tmp_path, capfd):
    pipeline = Pipeline(tmp_path)
    model = pipeline.fit("sft", "sft/addition.yaml", {**ADDITION, "trainer.devices": 2})
    assert (model / "model.safetensors").exists()
    checkpoint = torch.load(model.parent / "run/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 4 and len(checkpoint["InstructionDataModule"]["ranks"]) == 2
    assert capfd.readouterr().out.count("sft: in") == 1  # the second process did not repeat the pipeline


class StopsAtStep(L.Callback):
    """Sends SIGTERM to its own process after an optimizer step, as a queue does to a job whose time is over."""

    stop_at = 3

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
def test_a_fit_that_was_stopped_goes_on_when_its_pipeline_is_called_again(tmp_path, monkeypatch):
    arguments = {**ADDITION, "trainer.callbacks": f"{__name__}.StopsAtStep"}
    with pytest.raises(SystemExit) as stopped:
        Pipeline(tmp_path).fit("sft", "sft/addition.yaml", arguments)
    last = tmp_path / "sft/run/checkpoints/last.ckpt"
    assert stopped.value.code == 128 + signal.SIGTERM and torch.load(last, weights_only=True)["global_step"] == 3
    monkeypatch.setattr(StopsAtStep, "stop_at", 1)  # not reached by a run that resumes after step 3
    model = Pipeline(tmp_path).fit("sft", "sft/addition.yaml", arguments)
    assert torch.load(last, weights_only=True)["global_step"] == 4 and (model / "model.safetensors").exists()


@pytest.mark.long
def test_a_command_in_a_process_of_its_own_ends_as_that_process_does():
    with pytest.raises(SystemExit) as ended:
        _in_a_process(["--version"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        _in_a_process(["fit", "--config", "no/such.yaml"])
    assert ended.value.code == 1


def test_what_a_pipeline_does_itself_needs_one_device():
    assert in_one_process({"data.n_eval": "4"}) == {"data.n_eval": "4", "trainer.devices": "1"}
    with pytest.raises(UsageError, match="trainer.devices=2: evaluations and comparisons run in the pipeline's own"):
        in_one_process({"trainer.devices": "2"})


def test_a_pipeline_is_started_once(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="LOCAL_RANK=1: a pipeline starts the processes of its stages itself"):
        check_stages({})


def test_other_settings_are_named(tmp_path):
    def run(config, **arguments):
        settings = {"config": config, "arguments": {"model.beta": "0.5", **arguments}}
        Pipeline(tmp_path).stage("ppo", writer("a.txt"), ["a.txt"], settings)

    run("model: PPO\nlr: 1\n", **{"data.n_eval": "4"})
    with pytest.raises(UsageError, match=r"another folder \(model.beta: 0.5 → 1; data.n_eval: 4 → not given\)$"):
        run("model: PPO\nlr: 1\n", **{"model.beta": "1"})
    with pytest.raises(UsageError, match=r"another folder \(config has changed\)$"):
        run("model: PPO\nlr: 2\n", **{"data.n_eval": "4"})
