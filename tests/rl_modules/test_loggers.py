"""Tables, histograms and resumed curves in each logger: what is written is read back from the files themselves."""

import csv
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from recipes.callbacks.episode_monitor import EpisodeWriter
from recipes.cli import main
from rl_modules import GRPO
from rl_modules.loggers import adapters, finite
from tests.chaos import TINY

COLUMNS = {"prompt": ["1+1=", 'a,"b"\nc'], "reward": [0.5, float("nan")], "completion": ["2", "<eos>|"]}
RUN = ["--model=GRPO", f"--model.model_config={TINY}", "--data=PromptDataModule", "--data.task=addition",
       "--data.n_eval=8", "--data.eval_steps=4", "--data.batch_size=8", "--data.num_generations=4",
       "--model.max_completion_length=4", "--model.logging_steps=1", "--model.completions_steps=2",
       "--trainer.accelerator=cpu", "--trainer.max_steps=8"]  # fmt: skip


def adapter_of(logger: Any) -> Any:
    (adapter,) = adapters(SimpleNamespace(is_global_zero=True, loggers=[logger]))
    return adapter


def test_a_csv_loggers_table_and_histogram_are_files_beside_its_curves(tmp_path):
    adapter = adapter_of(CSVLogger(tmp_path, name="", version="run"))
    adapter.write_table("eval/completions", COLUMNS, 1, 3)
    adapter.write_table("eval/completions", COLUMNS, 8, 5)
    rows = [json.loads(line) for line in (tmp_path / "run/tables/eval/completions.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 5, 5]
    assert rows[0] == {"step": 3, "prompt": "1+1=", "reward": 0.5, "completion": "2"}
    assert rows[2]["prompt"] == COLUMNS["prompt"][1] and rows[2]["completion"] == "<eos>|"
    assert rows[2]["reward"] is None, "NaN is no JSON"
    adapter.write_histogram("length", torch.tensor([1, 1, 2, 5]), 7)
    with (tmp_path / "run/tables/length_bars.csv").open(newline="") as file:
        bars = list(csv.DictReader(file))
    assert sum(int(bar["count"]) for bar in bars) == 4 and {bar["step"] for bar in bars} == {"7"}
    first = bars[0]
    assert float(first["low"]) <= 1 <= float(first["high"]) and first["count"] == "2"


def test_predictions_hold_no_number_that_json_lacks(tmp_path):
    writer = EpisodeWriter(str(tmp_path / "a.jsonl"))
    values = torch.tensor([1.5, float("nan"), float("inf"), -float("inf")])
    writer.write_on_epoch_end(SimpleNamespace(), SimpleNamespace(), [{"return": values}], None)
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["return"] for row in rows] == [1.5, None, None, None]
    assert finite({"parsed": [1, float("nan"), (True, "NaN")]}) == {"parsed": [1, None, [True, "NaN"]]}


def test_tensorboard_gets_text_and_histogram(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    adapter = adapter_of(logger)
    adapter.write_table("completions", COLUMNS, 8, 3)
    adapter.write_histogram("length", torch.tensor([1.0, 5.0]), 3)
    logger.experiment.flush()
    tags = EventAccumulator(str(tmp_path / "run")).Reload().Tags()
    assert tags["histograms"] == ["length"] and "completions/text_summary" in tags["tensors"]


def test_other_loggers_and_other_ranks_show_nothing():
    adapter = adapter_of(DummyLogger())
    adapter.write_table("completions", COLUMNS, 8, 3)
    adapter.write_histogram("length", torch.tensor([1.0]), 3)
    assert adapter.position() == {}
    assert adapters(SimpleNamespace(is_global_zero=False, loggers=[DummyLogger()])) == []


def fit(logger: str, *more: str) -> None:
    main(["fit", *RUN, f"--trainer.logger={logger}", "--trainer.logger.save_dir=logs", *more])


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = GRPO.training_step

    def stops(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(GRPO, "training_step", stops)


@pytest.mark.long
def test_a_resumed_run_has_the_csv_files_of_the_uninterrupted_one(tmp_path, monkeypatch):
    def read(folder: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
        with (folder / "metrics.csv").open(newline="") as file:
            rows = [{key: value for key, value in row.items() if value and not key.startswith("time/")}
                    for row in csv.DictReader(file)]  # fmt: skip
        return rows, {str(p.relative_to(folder)): p.read_text() for p in sorted((folder / "tables").rglob("*.*"))}

    folders = []
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "resumed":
            with monkeypatch.context() as patch:
                stop_at(patch, 5)
                with pytest.raises(SystemExit):
                    fit("CSVLogger")
            (folder,) = Path("logs").glob("*/version_0")
            # What the killed process had written after its last checkpoint.
            with (folder / "metrics.csv").open("a") as file:
                file.write("999," * 5 + "\n")
            with (folder / "tables/completions.jsonl").open("a") as file:
                file.write("later\n")
            (folder / "tables/late.jsonl").write_text("later\n")
            fit("CSVLogger", "--resume")
        else:
            fit("CSVLogger")
        folders.append(read(next(iter(Path("logs").glob("*/version_0")))))
    whole, resumed = folders
    assert len(whole[0]) >= 8 and "tables/completions.jsonl" in whole[1]
    assert resumed[1] == whole[1]
    assert resumed[0] == whole[0]


@pytest.mark.parametrize("moment", ["the file is deleted", "it is written"])
def test_a_csv_loggers_rows_survive_a_process_that_ends_while_it_resumes(tmp_path, moment):
    def logger() -> CSVLogger:
        return CSVLogger(tmp_path, name="run", version=0)

    first = logger()
    for step in range(3):
        first.log_metrics({"loss": step / 2}, step=step)
    position = adapter_of(first).position()
    first.log_metrics({"loss": 9.0}, step=9)  # after the checkpoint
    first.save()

    class Killed(BaseException):
        """In place of a signal."""

    class Dies(CSVLogger):
        @property
        def experiment(self) -> Any:
            writer = super().experiment
            if moment == "the file is deleted":
                raise Killed
            writer._fs.touch(writer.metrics_file_path, truncate=True)
            writer.save = lambda: (_ for _ in ()).throw(Killed())
            return writer

    with pytest.raises(Killed):
        adapter_of(Dies(tmp_path, name="run", version=0)).cut(position)
    again = logger()
    adapter_of(again).cut(position)
    again.log_metrics({"loss": 1.5}, step=3)
    again.save()
    with (tmp_path / "run/version_0/metrics.csv").open(newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [0.0, 0.5, 1.0, 1.5]
    assert sorted(path.name for path in (tmp_path / "run/version_0").iterdir()) == ["metrics.csv"]


def test_a_csv_loggers_rows_survive_a_process_that_ends_while_a_column_is_added(tmp_path, monkeypatch):
    class Killed(BaseException):
        """In place of a signal."""

    def dies(self, rows):
        raise Killed

    logger = CSVLogger(tmp_path, name="run", version=0)
    logger.log_metrics({"loss": 0.5}, step=0)
    position = adapter_of(logger).position()
    logger.log_metrics({"loss": 0.25, "accuracy": 1.0}, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", dies)
        with pytest.raises(Killed):
            logger.save()
    again = CSVLogger(tmp_path, name="run", version=0)
    adapter_of(again).cut(position)
    again.log_metrics({"loss": 0.25, "accuracy": 1.0}, step=1)
    again.save()
    with (tmp_path / "run/version_0/metrics.csv").open(newline="") as file:
        assert [(row["loss"], row["accuracy"]) for row in csv.DictReader(file)] == [("0.5", ""), ("0.25", "1.0")]


@pytest.mark.long
def test_weights_and_biases_gets_tables_and_continues_the_run_of_the_checkpoint(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=str(tmp_path), offline=True)
    adapter = adapter_of(logger)
    adapter.write_table("completions", COLUMNS, 8, 3)
    adapter.write_histogram("length", torch.tensor([1.0, 5.0]), 3)
    position = adapter.position()
    wandb.finish()
    (table,) = tmp_path.rglob("completions_*.table.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == list(COLUMNS) and shown["data"][0] == ["1+1=", 0.5, "2"]
    torch.save(position, tmp_path / "position.pt")
    resumed = WandbLogger(save_dir=str(tmp_path), offline=True)
    adapter_of(resumed).cut(torch.load(tmp_path / "position.pt", weights_only=True))
    assert resumed.experiment.id == position["id"]
    wandb.finish()


@pytest.mark.long
def test_weights_and_biases_resumes_through_the_command_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(SystemExit):
            fit("WandbLogger", "--trainer.logger.offline=true")
    wandb.finish()
    (folder,) = (path.parent for path in Path("logs").glob("*/*/checkpoints"))
    assert (folder / "config.yaml").exists() and not Path("logs/config.yaml").exists()
    fit("WandbLogger", "--trainer.logger.offline=true", "--resume")
    wandb.finish()
    assert [path.parent for path in Path("logs").glob("*/*/checkpoints")] == [folder]
    last = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 8 and last["callbacks"]["Checkpoints"]["loggers"] == [{"id": folder.name}]
    assert list(tmp_path.rglob("completions_*.table.json"))
