"""Three lines of Python leave and print what ``rl fit`` does."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    TQDMProgressBar,
)

from datamodules import InstructionDataModule, RolloutDataModule
from recipes import Trainer
from recipes.callbacks import StopTrainingOnRewardThreshold, curves
from recipes.callbacks.checkpoints import Checkpoints
from recipes.cli import main
from recipes.run import LOCK
from rl_modules import PPO, SFT
from rl_modules.common.errors import UsageError
from tests import chaos
from tests.conformance.envs import Endless

SMALL = {"n_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 2, "total_timesteps": 1024, "eval_freq": 512,
         "n_eval_episodes": 2, "n_test_episodes": 3}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_numbers(text):
    return [re.sub(r"[-\d.,]+", "#", line) for line in text.splitlines()]


@pytest.mark.long
def test_three_lines_print_and_leave_what_the_command_does(here, capsys):
    Trainer(accelerator="cpu").fit(PPO(gamma=0.98, gae_lambda=0.8), RolloutDataModule("CartPole-v1", **SMALL))
    ours = capsys.readouterr()
    (here / "logs").rename(here / "ours")
    main(["fit", "--model", "PPO", "--model.gamma=.98", "--model.gae_lambda=.8", "--data", "RolloutDataModule",
          "--trainer.accelerator=cpu", *(f"--data.{name}={value}" for name, value in SMALL.items())])  # fmt: skip
    theirs = capsys.readouterr()
    # The command's first line says what starts, before the libraries are there; here they are.
    first, *lines = theirs.out.splitlines()
    assert first.endswith(": starting")
    assert without_numbers(ours.out) == without_numbers("\n".join(lines))
    # The same run: the result is the same number.
    assert ours.out.splitlines()[0] == lines[0]
    assert [line for line in ours.err.splitlines() if line] == ["PPO-CartPole-v1: starting"]
    one, other = (curves.points(here / f"{i}/PPO-CartPole-v1/version_0") for i in ("ours", "logs"))
    assert one.keys() == other.keys()
    assert one["rollout/ep_rew_mean"] == other["rollout/ep_rew_mean"]
    assert {path.name for path in here.glob("logs/*/version_0/checkpoints/*")} >= {"best.ckpt", "last.ckpt"}


@pytest.mark.long
def test_a_language_run_s_last_evaluation_is_one_point(here):
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2}  # fmt: skip
    data = InstructionDataModule("addition", n_train=8, batch_size=4, n_eval=4, eval_steps=1)
    Trainer(max_steps=2, accelerator="cpu").fit(SFT(model_config=small, max_completion_length=2), data)
    [folder] = here.glob("logs/*/version_0")
    for name, points in curves.points(folder).items():
        if name.startswith("eval/"):
            assert [step for step, _ in points] == [0, 1, 2], name


@pytest.mark.long
def test_the_summary_names_what_cut_an_evaluation(here, capsys):
    data = RolloutDataModule(Endless, **{**SMALL, "eval_freq": 0, "n_test_episodes": 2, "eval_max_steps": 20})
    Trainer(accelerator="cpu").fit(PPO(), data)
    assert re.search(r"evaluation +2 episodes did not end .* eval_max_steps=20 steps", capsys.readouterr().out)


def test_lightnings_own_bar_shows_the_mean_return(make_trainer):
    data = RolloutDataModule("CartPole-v1", **SMALL)
    trainer = make_trainer(enable_progress_bar=True)
    trainer.fit(PPO(), datamodule=data)
    mean = data.metrics()["rollout/ep_rew_mean"]
    assert trainer.progress_bar_metrics["rollout/ep_rew_mean"] == pytest.approx(mean, rel=1e-3)


@pytest.mark.long
def test_three_lines_with_lightnings_trainer_warn_of_nothing(tmp_path):
    script = (
        "from datamodules import RolloutDataModule\nfrom rl_modules import PPO\nimport lightning as L\n"
        "L.Trainer(max_epochs=-1, accelerator='cpu').fit(PPO(), datamodule=RolloutDataModule('CartPole-v1', n_envs=8, "
        "n_steps=32, batch_size=256, total_timesteps=256))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Lightning itself calls torch by an old name.
    said = [line for line in done.stderr.splitlines() if "LeafSpec" not in line]
    assert not re.search("warn|deprecat", "\n".join(said), re.IGNORECASE), done.stderr


@pytest.mark.long
def test_everything_goes_below_default_root_dir(here):
    Trainer(accelerator="cpu", default_root_dir="elsewhere").fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
    assert [path.name for path in here.iterdir()] == ["elsewhere"]
    assert Path("elsewhere/logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt").is_file()


@pytest.mark.long
def test_a_second_fit_of_one_trainer_has_checkpoints_of_its_own(here):
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
    first = {path: path.read_bytes() for path in here.rglob("*.ckpt")}
    # Returns of Pendulum are negative: none is as good as the worst of CartPole.
    trainer.fit(PPO(), RolloutDataModule("Pendulum-v1", **SMALL))
    assert {path: path.read_bytes() for path in first} == first
    folder = here / "logs/PPO-Pendulum-v1/version_0/checkpoints"
    assert {path.name for path in folder.iterdir()} >= {"best.ckpt", "last.ckpt"}
    assert trainer.checkpoint_callback.best_model_path == str(folder / "best.ckpt")
    assert torch.load(folder / "last.ckpt", weights_only=True)["env_id"] == "Pendulum-v1"


def test_runs_without_logger_have_a_folder_each(here):
    trainer = Trainer(accelerator="cpu", evaluate=False, logger=False, default_root_dir="elsewhere")
    trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
    first = {path: path.read_bytes() for path in here.rglob("*.ckpt")}
    trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
    assert {path: path.read_bytes() for path in first} == first
    runs = Path("elsewhere/logs/PPO-CartPole-v1")
    assert {path.parent for path in here.rglob("last.ckpt")} == {
        (runs / f"version_{i}/checkpoints").absolute() for i in (0, 1)
    }


def test_a_trial_run_leaves_no_files(here, capsys):
    data = RolloutDataModule("CartPole-v1", **SMALL)
    Trainer(accelerator="cpu", fast_dev_run=True).fit(PPO(), data)
    assert data.num_timesteps == 256
    assert list(here.iterdir()) == []
    assert "none (no logger)" in capsys.readouterr().out


def test_a_barebones_trainer_trains_and_leaves_no_files(here):
    data = RolloutDataModule("CartPole-v1", **SMALL)
    Trainer(accelerator="cpu", barebones=True).fit(PPO(), data)
    assert data.num_timesteps == 1024
    assert list(here.iterdir()) == []


@pytest.mark.long
def test_a_bar_of_the_users_takes_the_place_of_ours(here):
    bar = TQDMProgressBar()
    trainer = Trainer(accelerator="cpu", callbacks=[bar], logger=False, evaluate=False)
    trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
    assert trainer.progress_bar_callback is bar


class Interrupt(Callback):
    """Ctrl-C in the middle of a batch; the second one stops at once."""

    def __init__(self, times):
        self.times = times

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)


class StopAt(Callback):
    """SIGTERM in a batch, after which the run saves and stops."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.batch:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_fit_without_ending_python(here, capsys, times):
    before = signal.getsignal(signal.SIGINT)
    trainer = Trainer(accelerator="cpu", callbacks=[Interrupt(times)])
    trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
    assert trainer.was_stopped
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped by" in capsys.readouterr().err
    assert bool(list(here.glob("logs/*/version_0/checkpoints/last.ckpt"))) == (times == 1)


@pytest.mark.long
def test_a_stopped_fit_that_resumes_equals_one_that_never_stopped(here, capsys):
    def fit(folder, *callbacks):
        trainer = Trainer(accelerator="cpu", resume=True, callbacks=list(callbacks), default_root_dir=folder)
        trainer.fit(PPO(), RolloutDataModule("CartPole-v1", seed=3, **SMALL))
        return trainer

    fit("whole")
    assert fit("cut", StopAt(5)).was_stopped
    assert not fit("cut").was_stopped
    assert "resuming from" in capsys.readouterr().out
    assert chaos.compare(here / "whole", here / "cut") == []


@pytest.mark.long
def test_checkpoints_may_monitor_what_a_callback_of_the_users_logs(here):
    class Logs(Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.callback_metrics["mine/score"] = torch.tensor(float(trainer.global_step))

    data = RolloutDataModule("CartPole-v1", **SMALL)
    with pytest.raises(UsageError, match="mine/score"):
        Trainer(accelerator="cpu", callbacks=[Checkpoints(monitor="mine/score")]).fit(PPO(), data)
    trainer = Trainer(accelerator="cpu", evaluate=False, callbacks=[Logs(), Checkpoints(monitor="mine/score")])
    trainer.fit(PPO(), data)
    assert float(trainer.checkpoint_callback.best_model_score) == trainer.global_step


def test_resume_needs_the_loggers_that_trainer_makes(here):
    for arguments in ({"logger": False}, {"fast_dev_run": True}, {"barebones": True}):
        with pytest.raises(UsageError, match=f"resume=True.*{next(iter(arguments))}"):
            Trainer(accelerator="cpu", resume=True, **arguments)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_run_with_the_users_model_checkpoint_resumes_in_its_folder_with_its_curves(here, is_last):
    for total in (512, 1024):
        arguments = {**SMALL, "total_timesteps": total}
        trainer = Trainer(accelerator="cpu", resume=True, callbacks=[ModelCheckpoint(save_last=is_last)])
        trainer.fit(PPO(log_every=1), RolloutDataModule("CartPole-v1", **arguments))
    [folder] = here.glob("logs/PPO-CartPole-v1/version_*")
    # The first run may have written the point of its last step after the checkpoint.
    assert {step for step, _ in curves.points(folder)["train/value_loss"]} == {256, 512, 768, 1024}


def test_resume_says_that_a_checkpoint_holds_weights_alone(here):
    arguments = {**SMALL, "total_timesteps": 512}
    for resume in (False, True):
        trainer = Trainer(accelerator="cpu", resume=resume,
                          callbacks=[ModelCheckpoint(save_last=True, save_weights_only=True)])  # fmt: skip
        refused = pytest.raises(UsageError, match="weights alone") if resume else contextlib.nullcontext()
        with refused:
            trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **arguments))


def test_resume_and_a_checkpoint_are_one_too_many(here):
    with pytest.raises(UsageError, match="leave out ckpt_path='one.ckpt', or resume"):
        Trainer(accelerator="cpu", resume=True).fit(PPO(), RolloutDataModule("CartPole-v1"), ckpt_path="one.ckpt")


def test_a_complete_run_that_the_same_trainer_resumes_names_its_checkpoint(here, capsys):
    trainer = Trainer(accelerator="cpu", resume=True)
    for _ in range(2):
        trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **{**SMALL, "total_timesteps": 256}))
    assert (
        re.findall("last checkpoint +(.*)", capsys.readouterr().out)
        == ["logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt"] * 2
    )


def test_a_complete_language_run_that_resumes_says_so(here, capsys):
    for _ in range(2):
        data = InstructionDataModule(task="addition", batch_size=4, n_eval=4)
        Trainer(accelerator="cpu", resume=True, max_steps=2).fit(SFT(max_completion_length=8), data)
    assert re.findall(r"optimizer steps +(2.*)", capsys.readouterr().out)[1:] == [
        "2, all before this process: the run was complete"
    ]


def test_a_refused_run_ends_the_spinner(here, monkeypatch):
    shown = []
    monkeypatch.setattr("recipes.trainer.wait_for", shown.append)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    trainer = Trainer(accelerator="cpu", callbacks=[StopTrainingOnRewardThreshold(500.0)])
    with pytest.raises(UsageError, match="there are none"):
        trainer.fit(PPO(), RolloutDataModule("CartPole-v1", eval_freq=0))
    assert shown == ["preparing the first step", ""]


def test_a_refused_second_fit_of_a_model_leaves_no_run(here):
    trainer, model = Trainer(accelerator="cpu", evaluate=False), PPO()
    trainer.fit(model, RolloutDataModule("CartPole-v1", **{**SMALL, "total_timesteps": 256}))
    with pytest.raises(UsageError, match="observation_space"):
        trainer.fit(model, RolloutDataModule("Pendulum-v1", **SMALL))
    assert [path.parent.name for path in here.glob("logs/*/version_*")] == ["PPO-CartPole-v1"]


@pytest.mark.long
def test_a_refused_resume_leaves_the_curves_of_the_complete_run(here):
    def fit(**changed):
        Trainer(accelerator="cpu", resume=True).fit(PPO(), RolloutDataModule("CartPole-v1", **{**SMALL, **changed}))

    fit()
    (folder,) = here.glob("logs/*/version_0")
    before = curves.points(folder)
    assert "test/mean_reward" in before
    with pytest.raises(UsageError, match="n_envs"):
        fit(n_envs=4, total_timesteps=4096)
    assert curves.points(folder) == before


def test_a_run_that_another_process_trains_is_not_resumed(here):
    arguments = {**SMALL, "total_timesteps": 256}
    Trainer(accelerator="cpu", evaluate=False).fit(PPO(), RolloutDataModule("CartPole-v1", **arguments))
    folder = here / "logs/PPO-CartPole-v1/version_0"
    holder = subprocess.Popen([sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'a'); "
                               "fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); input()", folder / LOCK],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match="another process trains the run"):
            Trainer(accelerator="cpu", resume=True).fit(PPO(), RolloutDataModule("CartPole-v1", **arguments))
    finally:
        holder.communicate(b"\n")


def test_sigterm_ends_fit_without_ending_python_where_no_checkpoint_is_written(here, capsys):
    class Terminate(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    trainer = Trainer(accelerator="cpu", callbacks=[Terminate()], enable_checkpointing=False)
    trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
    assert trainer.was_stopped
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err.endswith("stopped by SIGTERM, without a checkpoint\n")


@pytest.mark.long
def test_nothing_is_said_about_weights_only(here, caplog):
    """Lightning's own line at level INFO, which plain ``lightning.Trainer`` shows for its ``save_checkpoint``."""
    loggers = [logging.getLogger(f"lightning.pytorch{name}") for name in ("", ".utilities.rank_zero")]
    before = [logger.level for logger in loggers]
    try:
        trainer = Trainer(accelerator="cpu", evaluate=False, logger=False)
        for logger in loggers:
            logger.setLevel(logging.INFO)
            logger.addHandler(caplog.handler)
        trainer.fit(PPO(), RolloutDataModule("CartPole-v1", **SMALL))
        trainer.save_checkpoint("ours.ckpt")
        plain = L.Trainer(accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False)
        plain.fit(PPO(), datamodule=RolloutDataModule("CartPole-v1", **SMALL), ckpt_path="ours.ckpt")
        plain.test(PPO(), datamodule=RolloutDataModule("CartPole-v1", **SMALL), ckpt_path="ours.ckpt", verbose=False)
        PPO.load_from_checkpoint("ours.ckpt")
        assert "Restored all states" in caplog.text
        assert "weights_only" not in caplog.text
        plain.save_checkpoint("theirs.ckpt")
        assert "weights_only" in caplog.text, "the line is Lightning's own"
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(caplog.handler)
            logger.setLevel(level)
