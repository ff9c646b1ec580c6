"""Trainer options, loggers and seeds do through ``rl`` what they do in Lightning."""

import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes import Trainer
from recipes.cli import main
from recipes.cli.runs import drawn_seed
from recipes.run import number_alike

ROOT = Path(__file__).parents[3]
RUN = ["--config", "ppo/cartpole.yaml", "--data.total_timesteps=1024", "--data.n_epochs=2", "--data.eval_freq=0",
       "--data.n_test_episodes=2"]  # fmt: skip
CSV = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "logs"]


@pytest.fixture
def rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Any:
    """Run ``rl`` in an empty folder; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            main(list(args))
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capfd.readouterr()
        return code, out, err

    return run


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with next(folder.glob("logs/*/version_0/metrics.csv")).open() as file:
        return list(csv.DictReader(file))


# -------------------------------------------------------------------- checkpoints


@pytest.mark.long
def test_without_checkpointing_a_run_writes_none_and_says_so(rl: Any, tmp_path: Path) -> None:
    code, out, err = rl("fit", *RUN, "--data.eval_freq=512", "--checkpoint.interval_s=0",
                        "--trainer.enable_checkpointing=false")  # fmt: skip
    assert code == 0, err
    assert re.search(r"last checkpoint +not written \(enable_checkpointing=false\)\n", out)
    assert re.search(r"best checkpoint +not written \(enable_checkpointing=false\)\n", out)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(("signum", "said"), [(signal.SIGTERM, "stopped by SIGTERM, without a checkpoint"),
                                               (signal.SIGINT, "")])  # fmt: skip
def test_without_checkpointing_a_stopped_run_has_the_code_of_its_signal(
    signum: int, said: str, rl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_modules import PPO

    step = PPO.training_step

    def stops(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            os.kill(os.getpid(), signum)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(PPO, "training_step", stops)
    # Python has no handler where SIGINT was ignored at its start, as in a shell's background jobs.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = rl("fit", *RUN, "--trainer.enable_checkpointing=false")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert code == 128 + signum
    assert said in err and "Traceback" not in err


# -------------------------------------------------------------------- loggers


@pytest.mark.long
def test_the_summary_names_the_csv_file_of_a_csv_logger(rl: Any, tmp_path: Path) -> None:
    code, out, err = rl("fit", *RUN, *CSV)
    assert code == 0, err
    assert "tensorboard" not in out
    assert "is not empty" not in err  # the folder holds nothing but this run's own files
    path = next(line.split()[-1] for line in out.splitlines() if line.startswith("curves"))
    assert Path(path).is_file()
    # The final evaluation is in the file too, at the last transition.
    final = [row for row in csv_rows(tmp_path) if row["test/mean_reward"]]
    assert [row["step"] for row in final] == ["1024"]


@pytest.mark.long
def test_a_run_without_logger_says_that_it_has_no_curves(rl: Any) -> None:
    code, out, err = rl("fit", *RUN, "--trainer.logger", "false")
    assert code == 0, err
    assert next(line for line in out.splitlines() if line.startswith("curves")).split(None, 1)[1] == "none (no logger)"


def test_runs_without_logger_have_a_folder_each_and_resume_in_it(rl: Any, tmp_path: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    alone, runs = [*RUN, "--trainer.logger", "false"], Path("logs/PPO-CartPole-v1")
    assert rl("fit", *alone)[0] == 0
    first = files()
    assert {path.parent for path in first} == {runs / "version_0", runs / "version_0/checkpoints"}
    code, out, err = rl("fit", *alone, "--model.gamma", "0.5", "--run_name", "short")
    assert code == 0, err
    assert "logs/PPO-CartPole-v1/version_1_short/checkpoints/last.ckpt" in out
    second = files()
    assert {path: second[path] for path in first} == first and runs / "version_1_short/checkpoints/last.ckpt" in second
    code, out, err = rl("fit", *alone, "--model.gamma", "0.5", "--data.total_timesteps", "1536", "--resume")
    assert code == 0, err
    assert "resuming from logs/PPO-CartPole-v1/version_1_short/checkpoints/last.ckpt (1,024 transitions)" in out
    third = files()
    assert {path: third[path] for path in first} == first and set(third) >= set(second)
    assert {path.parts[2] for path in third} == {"version_0", "version_1_short"}
    code, _, err = rl("fit", "--config", str(runs / "version_0/config.yaml"))
    assert code == 0, err
    assert Path(runs / "version_2/checkpoints/last.ckpt").is_file()


def test_a_run_of_an_earlier_version_without_logger_is_found(rl: Any, tmp_path: Path) -> None:
    alone = [*RUN, "--trainer.logger", "false"]
    assert rl("fit", *alone)[0] == 0
    (tmp_path / "logs/PPO-CartPole-v1/version_0/checkpoints").rename(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "logs")
    code, out, err = rl("fit", *alone, "--data.total_timesteps", "1536", "--resume")
    assert code == 0, err
    assert "resuming from checkpoints/last.ckpt (1,024 transitions)" in out
    assert not (tmp_path / "logs").exists()


def test_a_run_that_writes_nothing_leaves_no_folder(rl: Any, tmp_path: Path) -> None:
    code, _, err = rl("fit", *RUN, "--trainer.logger=false", "--trainer.enable_checkpointing=false")
    assert code == 0, err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_default_root_dir_moves_the_whole_run(rl: Any, tmp_path: Path) -> None:
    code, out, err = rl("fit", *RUN, "--trainer.default_root_dir", "elsewhere")
    assert code == 0, err
    assert not (tmp_path / "logs").exists()
    run = tmp_path / "elsewhere/logs/PPO-CartPole-v1/version_0"
    assert (run / "checkpoints/last.ckpt").is_file() and list(run.glob("events.*"))
    assert "tensorboard --logdir elsewhere/logs/PPO-CartPole-v1 (run version_0)" in out
    code, out, err = rl("fit", *RUN, "--trainer.default_root_dir", "elsewhere", "--resume")
    assert code == 0, err
    assert "resuming from elsewhere/logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt (1,024 transitions)" in out


@pytest.mark.long
def test_a_logger_s_own_folder_wins_over_default_root_dir(rl: Any, tmp_path: Path) -> None:
    code, _, err = rl("fit", *RUN, "--trainer.default_root_dir", "elsewhere", "--trainer.logger.save_dir", "mine")
    assert code == 0, err
    assert (tmp_path / "mine/PPO-CartPole-v1/version_0/checkpoints/last.ckpt").is_file()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.long
def test_learning_rate_monitor_logs_over_transitions(rl: Any, tmp_path: Path) -> None:
    monitor = ["--trainer.callbacks+=LearningRateMonitor", "--trainer.log_every_n_steps=1"]
    code, _, err = rl("fit", *RUN, *CSV, *monitor, "--model.log_every=1")
    assert code == 0, err
    rows = csv_rows(tmp_path)
    column = next(name for name in rows[0] if name.startswith("lr-"))
    ours = {int(row["step"]): float(row["train/learning_rate"]) for row in rows if row["train/learning_rate"]}
    theirs = {int(row["step"]): float(row[column]) for row in rows if row[column]}
    assert set(ours) == {256, 512, 768, 1024}
    # Two minibatches per rollout, of which the second is logged one step further: Lightning's own count ends at 8.
    assert {step - step % 256 for step in theirs} == {0, 256, 512, 768} and max(step % 256 for step in theirs) <= 1
    # The monitor reads the rate before the rollout's first update sets it: it shows the rollout before.
    assert {step: theirs[step] for step in (512, 768)} == pytest.approx({step: ours[step] for step in (512, 768)})


# -------------------------------------------------------------------- evaluation


@pytest.mark.long
@pytest.mark.parametrize("options", [
    ["--trainer.check_val_every_n_epoch=2"],
    ["--trainer.check_val_every_n_epoch=null", "--trainer.val_check_interval=4"],
    ["--data.eval_freq=512"],
])  # fmt: skip
def test_evaluations_come_as_often_as_the_user_says(rl: Any, tmp_path: Path, options: list[str]) -> None:
    # Two minibatches per epoch of 256 transitions.
    code, _, err = rl("fit", *RUN, *CSV, "--data.eval_freq=256", "--data.n_eval_episodes=1", *options)
    assert code == 0, err
    # The evaluation of the untrained policy belongs to the datamodule's own schedule.
    first = ["0"] if options == ["--data.eval_freq=512"] else []
    assert [row["step"] for row in csv_rows(tmp_path) if row["eval/mean_reward"]] == [*first, "512", "1024"]


# -------------------------------------------------------------------- profiler


@pytest.mark.slow
def test_the_simple_profiler_prints_its_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes", "fit", *RUN, "--trainer.profiler=simple"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert "FIT Profiler Report" in done.stdout + done.stderr
    assert "run_training_batch" in done.stdout + done.stderr


def test_own_callbacks_are_known_by_their_bare_names() -> None:
    names = [f"--trainer.callbacks+={name}" for name in ("EpisodeMonitor", "ValuePictures")]
    # In a process of its own, into which nothing else imported the classes.
    done = subprocess.run([sys.executable, "-m", "recipes", "fit", *RUN, *names, "--print_config"], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(f"recipes.callbacks.{name}" in done.stdout for name in ("EpisodeMonitor", "ValuePictures"))


# -------------------------------------------------------------------- progress


def test_a_progress_bar_of_the_user_takes_the_place_of_ours(rl: Any) -> None:
    code, out, err = rl("fit", *RUN, "--trainer.callbacks+=TQDMProgressBar")
    assert code == 0, err
    assert "Epoch 0" in out + err


# -------------------------------------------------------------------- seeds


@pytest.mark.long
def test_seed_everything_seeds_the_global_generators_too(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_modules import PPO

    drawn: list[tuple] = []

    def draw(self: PPO) -> None:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002

    monkeypatch.setattr(PPO, "on_fit_start", draw)
    for seed in (3, 3, 4):
        code, _, err = rl("fit", *RUN, "--seed_everything", str(seed), "--trainer.max_epochs=1")
        assert code == 0, err
    assert drawn[0] == drawn[1]
    assert drawn[2] != drawn[0]


@pytest.mark.long
def test_seed_everything_seeds_the_private_streams_through_the_datamodule(rl: Any, tmp_path: Path) -> None:
    for folder, seed in (("one", ["--seed_everything", "7"]), ("two", ["--data.seed", "7"])):
        code, _, err = rl("fit", *RUN, *seed, "--trainer.default_root_dir", folder)
        assert code == 0, err
    states = [torch.load(next(tmp_path.glob(f"{name}/**/last.ckpt")), weights_only=True) for name in ("one", "two")]
    assert [state["datamodule_hyper_parameters"]["seed"] for state in states] == [7, 7]
    assert states[0]["state_dict"].keys() == states[1]["state_dict"].keys()
    assert all(torch.equal(states[0]["state_dict"][key], states[1]["state_dict"][key])
               for key in states[0]["state_dict"])  # fmt: skip


# -------------------------------------------------------------------- the user's folder


def own_project(folder: Path) -> None:
    """A project whose packages have the names of this one's."""
    (folder / "datamodules").mkdir()
    (folder / "datamodules/__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    (folder / "configs").mkdir()
    (folder / "configs/mine.yaml").write_text("model: PPO\n")
    (folder / "my_policy.py").write_text("from rl_modules import PPO\n\n\nclass MyPPO(PPO):\n    pass\n")


@pytest.mark.long
@pytest.mark.parametrize(
    "start",
    [
        ["-c", "from recipes.cli import main; main()"],
        pytest.param(["-m", "recipes"], marks=pytest.mark.slow),
    ],
)
def test_a_folder_of_the_same_name_does_not_replace_the_project_s_package(start: list[str], tmp_path: Path) -> None:
    own_project(tmp_path)
    done = subprocess.run(
        [sys.executable, *start, "fit", *RUN, "--model", "my_policy.MyPPO"], cwd=tmp_path, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\nMyPPO on CartPole-v1" in done.stdout


# -------------------------------------------------------------------- the summary


@pytest.mark.long
def test_a_warm_start_from_the_shell_is_a_new_run_that_names_its_origin(rl: Any, tmp_path: Path) -> None:
    code, out, err = rl("fit", *RUN)
    assert code == 0, err
    assert "started from" not in out
    last = "logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt"
    code, out, err = rl("fit", *RUN, "--model.init_from", last, "--data.total_timesteps=256")
    assert code == 0, err
    assert f"started from        {last}\n" in out
    assert "transitions         256 in" in out
    code, out, err = rl("fit", *RUN, "--model.init_from", "none.ckpt")
    assert code == 1 and "init_from" in err and "none.ckpt" in err


# -------------------------------------------------------------------- Ctrl-C after training


@pytest.mark.long
def test_ctrl_c_in_the_final_evaluation_is_answered(rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_modules import PPO

    monkeypatch.setattr(PPO, "on_test_start", lambda self: os.kill(os.getpid(), signal.SIGINT))
    # A process that a shell starts in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = rl("fit", *RUN)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores further Ctrl-C after the first
    last = next(tmp_path.glob("logs/*/version_0/checkpoints/last.ckpt"))
    assert code == 130
    assert "Traceback" not in err
    assert re_line(err, "Ctrl-C stopped the final evaluation", "rl test", str(last.relative_to(tmp_path)))
    assert "\nPPO on CartPole-v1" in out
    assert "not evaluated" in out
    assert torch.load(last, weights_only=True)["RolloutDataModule"]["num_timesteps"] == 1024
    events = EventAccumulator(str(last.parents[1])).Reload()
    assert "test/mean_reward" not in events.Tags()["scalars"]


def re_line(text: str, *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in text.splitlines())


@pytest.mark.long
def test_a_combination_that_the_trainer_refuses_gets_one_sentence(rl: Any) -> None:
    # A tabular agent has no gradients for Lightning to clip.
    code, _, err = rl("fit", "--config", "q_learning/maze.yaml", "--trainer.gradient_clip_val=1")
    assert code == 1
    assert err.startswith("error: ") and "gradient_clip_val" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.long
def test_a_monitor_that_no_run_logs_is_answered_with_the_curves_there_are(rl: Any) -> None:
    stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=eval/mean_rewrad"]
    code, _, err = rl("fit", *RUN, "--data.eval_freq=256", *stop)
    assert code == 1 and "Traceback" not in err
    assert re_line(err, "metric `eval/mean_rewrad` which is not available", "`eval/mean_reward`")


@pytest.mark.long
@pytest.mark.parametrize("monitor", ["train/loss", "rollout/ep_rew_mean", "eval/mean_reward"])
def test_a_callback_may_monitor_any_curve(rl: Any, monitor: str) -> None:
    stop = ["--trainer.callbacks+=EarlyStopping", f"--trainer.callbacks.monitor={monitor}"]
    assert rl("fit", *RUN, "--data.eval_freq=256", "--model.log_every=1", *stop)[0] == 0


@pytest.mark.long
def test_early_stopping_says_why_it_ends_a_run(rl: Any) -> None:
    stop = {"monitor": "eval/mean_reward", "mode": "max", "patience": 1, "min_delta": 1000.0, "verbose": True}
    given = ["--trainer.callbacks+=EarlyStopping", f"--trainer.callbacks.init_args={json.dumps(stop)}"]
    code, out, err = rl("fit", *RUN, "--data.eval_freq=256", *given)
    assert code == 0, err
    assert re_line(out + err, "Monitored metric eval/mean_reward did not improve in the last 1 records")


@pytest.mark.long
def test_the_recorded_config_of_averaged_weights_runs_again(rl: Any, tmp_path: Path) -> None:
    averaged = ["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.01",
                "--trainer.callbacks.swa_epoch_start=1"]  # fmt: skip
    assert rl("fit", *RUN, *averaged)[0] == 0
    recorded = next(tmp_path.glob("logs/*/version_0/config.yaml"))
    assert "device: cpu" in recorded.read_text()
    code, _, err = rl("fit", "--config", str(recorded))
    assert code == 0, err


def test_the_recorded_config_of_a_timer_runs_again(rl: Any, tmp_path: Path) -> None:
    """Its ``interval`` defaults to a member of an enumeration, which YAML can't hold."""
    code, _, err = rl("fit", *RUN, "--trainer.callbacks=Timer", "--trainer.callbacks.duration=00:00:00:30")
    assert code == 0, err
    recorded = next(tmp_path.glob("logs/*/version_0/config.yaml"))
    (timer,) = yaml.safe_load(recorded.read_text())["trainer"]["callbacks"]
    assert timer["init_args"]["interval"] == "step" and timer["init_args"]["duration"] == "00:00:00:30"
    code, _, err = rl("fit", "--config", str(recorded))
    assert code == 0, err


@pytest.mark.long
def test_an_error_in_a_run_keeps_its_traceback(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_modules import PPO

    def fails(self: Any, rollout: Any) -> Any:
        raise ValueError("a mistake in the algorithm")

    monkeypatch.setattr(PPO, "prepare", fails)
    with pytest.raises(ValueError, match="a mistake in the algorithm") as raised:
        rl("fit", *RUN)
    assert raised.type is ValueError


@pytest.mark.long
def test_an_option_overrides_every_config_wherever_it_stands(rl: Any, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {max_epochs: 7}\nmodel: {class_path: PPO, init_args: {gamma: 0.5}}\n")
    (tmp_path / "b.yaml").write_text("trainer: {max_epochs: 9}\n")
    files = [*RUN, "--config", "a.yaml", "--model.gamma=0.75", "--config=b.yaml"]
    given = ["--trainer.max_epochs", "1", *files]
    code, _, err = rl("fit", *given)
    assert code == 0, err
    recorded = yaml.safe_load(next(tmp_path.glob("logs/*/version_0/config.yaml")).read_text())
    assert recorded["trainer"]["max_epochs"] == 1 and recorded["model"]["init_args"]["gamma"] == 0.75
    code, _, err = rl("fit", *files)  # the last of several configs counts
    assert code == 0, err
    recorded = yaml.safe_load(next(tmp_path.glob("logs/*/version_1*/config.yaml")).read_text())
    assert recorded["trainer"]["max_epochs"] == 9


@pytest.mark.parametrize("late", [["--model", "PPO"], ["--model=PPO"], ["--model.class_path", "rl_modules.PPO"]])
def test_a_class_may_come_after_its_options(rl: Any, late: list[str]) -> None:
    given = ["--model.gamma", "0.75", "--data.n_steps=32", *late, "--trainer.max_epochs", "1",
             "--data", "RolloutDataModule"]  # fmt: skip
    code, out, err = rl("fit", "--config", "a2c/cartpole.yaml", *given, "--print_config")
    assert code == 0, err
    printed = yaml.safe_load(out)
    assert printed["model"]["class_path"] == "rl_modules.PPO" and printed["model"]["init_args"]["gamma"] == 0.75
    assert printed["data"]["init_args"]["n_steps"] == 32 and printed["trainer"]["max_epochs"] == 1
    code, out, err = rl("fit", *given, "--print_config")
    assert code == 0, err
    assert yaml.safe_load(out)["model"]["init_args"]["gamma"] == 0.75


def test_of_several_classes_the_last_counts_and_options_keep_their_order(rl: Any) -> None:
    code, out, err = rl("fit", "--model.gamma=0.5", "--model", "A2C", "--model.gamma=0.75", "--model", "PPO", "--data",
                        "RolloutDataModule", "--print_config")  # fmt: skip
    assert code == 0, err
    printed = yaml.safe_load(out)["model"]
    assert printed["class_path"] == "rl_modules.PPO" and printed["init_args"]["gamma"] == 0.75


@pytest.mark.long
def test_a_seed_by_chance_is_drawn_once_for_all_ranks(rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(version: int) -> tuple[int, int]:
        config = yaml.safe_load(next(tmp_path.glob(f"logs/*/version_{version}*/config.yaml")).read_text())
        return config["seed_everything"], config["data"]["init_args"]["seed"]

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    words = ["fit", *RUN, "--trainer.max_epochs=1", "--seed_everything", "true"]
    seeds = []
    for version in range(2):
        assert rl(*words)[0] == 0
        seeds.append(recorded(version))
        assert os.environ["PL_GLOBAL_SEED"] == str(seeds[-1][0]) and seeds[-1][0] == seeds[-1][1]
    assert seeds[0] != seeds[1]  # another draw in each run of one process
    # A further rank, which the Trainer starts with the first one's environment.
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert drawn_seed() == seeds[1][0]
    # torchrun's ranks have nothing in common.
    monkeypatch.delenv("PL_GLOBAL_SEED")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = rl(*words)
    assert code == 1 and "seed_everything=true draws a seed, which 2 processes" in err


@pytest.mark.long
def test_a_run_that_reaches_its_time_limit_says_so(rl: Any) -> None:
    code, out, err = rl("fit", *RUN, "--data.total_timesteps=1000000", "--trainer.max_time=00:00:00:01")
    assert code == 0, err
    assert re_line(out, "stopped", "by the time limit, trainer.max_time")
    code, out, err = rl("fit", *RUN, "--trainer.max_time=00:01:00:00")
    assert code == 0 and "time limit" not in out, err


def test_runs_that_start_together_have_a_folder_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each run looks for the next number before any of them has written."""
    monkeypatch.chdir(tmp_path)
    trainers = [Trainer(logger=[TensorBoardLogger("logs", "x"), CSVLogger("csv", "x")][:n], accelerator="cpu",
                          enable_progress_bar=False) for n in (1, 2, 1)]  # fmt: skip
    for trainer in trainers:
        number_alike(trainer)
    assert [[logger.version for logger in trainer.loggers] for trainer in trainers] == [[0], [1, 1], [2]]


@pytest.mark.long
@pytest.mark.parametrize("folder", ["~/runs", "$SCRATCH/runs"])
def test_a_folder_may_be_named_by_home_or_a_variable(
    rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "mine"))
    Path("mine.yaml").write_text(f"trainer: {{default_root_dir: {folder}}}")
    for words in ([], ["--resume"]):
        code, out, err = rl("fit", *RUN, "--config", "mine.yaml", *words)
        assert code == 0, err
    assert "/version_0/checkpoints/last.ckpt (1,024 transitions)" in out
    run = tmp_path / "mine/runs/logs/PPO-CartPole-v1/version_0"
    assert (run / "checkpoints/last.ckpt").is_file() and list(run.glob("events.*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine.yaml"]


@pytest.mark.long
def test_weights_and_biases_without_a_key_is_one_sentence(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    # A mock, because a function of this file would be the user's code.
    refusal = wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")
    monkeypatch.setattr(wandb, "init", Mock(side_effect=refusal))
    code, _, err = rl(
        "fit", "--config", "ppo/cartpole.yaml", "--data.total_timesteps=256", "--trainer.logger=WandbLogger"
    )
    assert code == 1 and "Traceback" not in err
    assert "error: No API key configured" in err
