"""Folders of runs: their names, and where checkpoints are if no logger has a folder."""

from pathlib import Path

import datasets
import lightning as L
import pytest

from datamodules import InstructionDataModule, RolloutDataModule
from recipes import Trainer
from recipes.cli import main
from recipes.run import run_name
from recipes.saved_runs import newest_run
from rl_modules import PPO

TINY = ["--data.total_timesteps=256", "--data.n_test_episodes=1"]
CHANGED = "n_test_episodes=1,total_timesteps=256"


def train(folder: Path, **arguments) -> None:
    data = RolloutDataModule("Maze-v0", n_envs=2, n_steps=8, total_timesteps=32, eval_freq=0, n_test_episodes=1)
    Trainer(default_root_dir=folder, enable_progress_bar=False, **arguments).fit(PPO(net_arch=[4]), data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("logs/*/*"))


@pytest.mark.long
def test_a_run_is_named_or_says_what_was_changed_beside_earlier_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "ppo/cartpole.yaml", *TINY])
    main(["fit", "--config", "ppo/cartpole.yaml", *TINY, "--model.clip_range", "0.1"])
    main(["fit", "--config", "ppo/cartpole.yaml", *TINY, "--model.clip_range", "0.1", "--run_name", "my run"])
    assert names(tmp_path) == ["version_0", f"version_1_clip_range=0.1,{CHANGED}", "version_2_my_run"]
    assert "(run version_2_my_run)" in capsys.readouterr().out
    longer = [word.replace("=256", "=512") for word in TINY]
    main(["fit", "--config", "ppo/cartpole.yaml", *longer, "--run_name", "my run", "--resume"])
    assert "version_2_my_run/checkpoints/last.ckpt" in capsys.readouterr().out and len(names(tmp_path)) == 3


def test_a_named_run_is_resumed_by_its_name(tmp_path: Path) -> None:
    for name in ("one", "other", None):
        train(tmp_path, run_name=name)
    assert names(tmp_path) == ["version_0_one", "version_1_other", "version_2"]
    train(tmp_path, run_name="one", resume=True)
    assert len(names(tmp_path)) == 3
    runs = tmp_path / "logs" / "PPO-Maze-v0"
    assert newest_run(runs) == runs / "version_2" and newest_run(runs, "other") == runs / "version_1_other"


def test_a_dataset_s_fingerprint_is_no_part_of_a_name() -> None:
    rows = datasets.Dataset.from_dict({"prompt": ["a"] * 20, "completion": ["b"] * 20})
    data = InstructionDataModule(dataset=rows, n_eval=0)
    assert run_name("SFT", data.hparams, "InstructionDataModule") == "SFT-Dataset_of_20_rows"


class Server(L.pytorch.loggers.Logger):
    """Keeps curves elsewhere, as MLflow's does with a server."""

    name, version, experiment = "1", "b8e6dc6dbb2f", None

    def log_hyperparams(self, *args, **kwargs) -> None: ...

    def log_metrics(self, *args, **kwargs) -> None: ...


def test_checkpoints_are_in_the_run_s_folder_where_the_logger_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tmp_path, logger=Server())
    train(tmp_path, logger=Server(), run_name="again")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    written = sorted(tmp_path.rglob("last.ckpt"))
    assert [path.parts[-3] for path in written] == ["version_0", "version_1_again"]
