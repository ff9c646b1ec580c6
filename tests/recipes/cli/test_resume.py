"""``rl fit --resume``: the run resumes in the same folder, with one curve."""

import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers.logger import Logger

from recipes.callbacks import curves
from recipes.cli import main
from recipes.cli.command import _resume_command
from recipes.run import LOCK
from recipes.saved_runs import newest_run
from recipes.signals import Stopped
from rl_modules.common.errors import UsageError
from rl_modules.core.checkpoint_file import damage_of
from tests import chaos
from tests.marks import quick
from tests.training import assert_equal_checkpoints

RUN = ["--config", "ppo/cartpole.yaml", "--data.total_timesteps=1024", "--data.n_epochs=2", "--data.eval_freq=512",
       "--data.n_eval_episodes=2", "--data.n_test_episodes=2", "--model.log_every=1"]  # fmt: skip
FOLDER = Path("logs/PPO-CartPole-v1")


@pytest.fixture
def rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """Run ``rl`` in an empty folder; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            main(list(args))
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped by SIGTERM, which had been sent in the second of its four epochs."""
    folder = tmp_path_factory.mktemp("half")
    before = Path.cwd()
    os.chdir(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            from rl_modules import PPO

            step = PPO.training_step

            def stops(self: Any, batch: Any, batch_idx: int) -> Any:
                if self.current_epoch == 2 and batch_idx == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                return step(self, batch, batch_idx)

            patch.setattr(PPO, "training_step", stops)
            with pytest.raises(SystemExit) as exit_:
                main(["fit", *RUN])
        assert exit_.value.code == 128 + signal.SIGTERM
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def stopped(half: Path, tmp_path: Path) -> Path:
    """A copy of that run where the test runs."""
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    return FOLDER / "version_0"


def steps(folder: Path, tag: str) -> list[int]:
    return [step for step, _ in curves.points(folder)[tag]]


@pytest.mark.long
def test_a_resumed_run_has_one_folder_and_one_curve(rl: Any, stopped: Path, tmp_path: Path) -> None:
    assert steps(stopped, "train/loss") == [256, 512]
    code, out, err = rl("fit", *RUN, "--resume")
    assert code == 0, err
    assert f"resuming from {stopped}/checkpoints/last.ckpt (768 transitions)" in out
    assert "→" not in out
    assert "transitions         1,024 (256 since the run resumed) in " in out
    assert [path.name for path in FOLDER.iterdir()] == ["version_0"]
    assert steps(stopped, "train/loss") == [256, 512, 768, 1024]
    assert steps(stopped, "eval/mean_reward") == [0, 512, 1024]
    assert steps(stopped, "test/mean_reward") == [1024]
    (tmp_path / "whole").mkdir()
    os.chdir("whole")
    rl("fit", *RUN)
    assert chaos.compare(tmp_path / "whole", tmp_path) == []


@pytest.mark.long
def test_a_resumed_run_s_config_starts_a_new_run(rl: Any, stopped: Path) -> None:
    assert rl("fit", *RUN, "--resume")[0] == 0
    code, _, err = rl("fit", "--config", f"{FOLDER}/version_0/config.yaml")
    assert code == 0, err
    assert steps(FOLDER / "version_1", "train/loss") == [256, 512, 768, 1024]


@pytest.mark.long
def test_a_run_of_several_loggers_resumes_in_the_folders_of_all(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_modules import PPO

    Path("csv/PPO-CartPole-v1/version_1").mkdir(parents=True)  # another run's, whose number TensorBoard does not have
    loggers = [{"class_path": name, "init_args": {"save_dir": folder}}
               for name, folder in (("TensorBoardLogger", "logs"), ("CSVLogger", "csv"))]  # fmt: skip
    run = [*RUN, "--trainer.logger", json.dumps(loggers)]
    step = PPO.training_step

    def stops(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 2 and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(PPO, "training_step", stops)
        code, _, err = rl("fit", *run)
    assert code == 128 + signal.SIGTERM
    code, out, err = rl(*shlex.split(err.splitlines()[-1])[1:])  # the command that is printed
    assert code == 0, err
    assert "resuming from logs/PPO-CartPole-v1/version_2/checkpoints/last.ckpt (768 transitions)" in out
    assert [path.name for path in FOLDER.iterdir()] == ["version_2"]
    assert steps(FOLDER / "version_2", "train/loss") == [256, 512, 768, 1024]
    with Path("csv/PPO-CartPole-v1/version_2/metrics.csv").open(newline="") as file:
        rows = [row["step"] for row in csv.DictReader(file) if row["train/loss"]]
    assert rows == ["256", "512", "768", "1024"]


@pytest.mark.long
def test_points_after_the_checkpoint_do_not_come_twice(rl: Any, stopped: Path) -> None:
    # As if the run had trained past its last checkpoint before it was killed.
    early = Path("early.ckpt")
    shutil.copy(stopped / "checkpoints/last.ckpt", early)
    rl("fit", *RUN, "--resume")
    shutil.copy(early, stopped / "checkpoints/last.ckpt")
    points = curves.points(stopped)
    code, _, err = rl("fit", *RUN, "--resume")
    assert code == 0, err
    again = curves.points(stopped)
    assert again.keys() == points.keys()
    for tag in points:
        assert tag in chaos.CLOCKS or repr(again[tag]) == repr(points[tag]), tag
    # Whoever reads all events, without TensorBoard's own cure for restarts, finds each point once.
    assert steps(stopped, "train/loss") == [256, 512, 768, 1024]


def test_half_a_record_at_the_end_of_a_file_is_taken_away(rl: Any, stopped: Path) -> None:
    (file,) = stopped.glob(curves.PATTERN)
    size = file.stat().st_size
    curves.cut(stopped.glob(curves.PATTERN), {file.name: size})
    assert file.stat().st_size == size
    curves.cut(stopped.glob(curves.PATTERN), {file.name: size - 3})
    assert size - 300 < file.stat().st_size < size - 3
    curves.points(stopped)
    (stopped / "events.out.tfevents.2").write_bytes(b"later")
    curves.cut(stopped.glob(curves.PATTERN), {})
    assert not list(stopped.glob(curves.PATTERN))


@pytest.mark.long
def test_overrides_win_and_are_printed(rl: Any, stopped: Path) -> None:
    code, out, err = rl("fit", *RUN, "--resume", "--model.clip_range", "0.125", "--data.total_timesteps", "1536")
    assert code == 0, err
    assert "clip_range: lin_0.2 → 0.125\n" in out
    assert "total_timesteps: 1024 → 1536\n" in out
    assert out.count("→") == 2
    values = dict(curves.points(stopped)["train/clip_range"])
    assert list(values) == [256, 512, 768, 1024, 1280, 1536]
    assert values[512] == pytest.approx(0.1)
    assert values[768] == values[1536] == 0.125
    last = torch.load(stopped / "checkpoints/last.ckpt", weights_only=True)
    assert last["hyper_parameters"]["clip_range"] == 0.125


@pytest.mark.long
def test_a_finished_run_trains_no_further_unless_told_to(rl: Any, stopped: Path) -> None:
    rl("fit", *RUN, "--resume")
    before, points = Path("before.ckpt"), curves.points(stopped)
    shutil.copy(stopped / "checkpoints/last.ckpt", before)
    code, out, err = rl("fit", *RUN, "--resume")
    assert code == 0, err
    assert "1,024, all before this process: the run was complete" in out
    assert_equal_checkpoints(before, stopped / "checkpoints/last.ckpt")
    assert {k: v for k, v in curves.points(stopped).items() if k not in chaos.CLOCKS} == {
        k: v for k, v in points.items() if k not in chaos.CLOCKS
    }
    code, _, err = rl("fit", *RUN, "--resume", "--data.total_timesteps", "1536")
    assert code == 0, err
    assert steps(stopped, "train/loss") == [256, 512, 768, 1024, 1280, 1536]
    assert steps(stopped, "test/mean_reward") == [1536]


@pytest.mark.long
def test_names_stand_for_the_newest_run(rl: Any, stopped: Path) -> None:
    shutil.copytree(stopped, FOLDER / "version_10")
    (FOLDER / "version_2").mkdir()
    code, out, err = rl("fit", *RUN, "--ckpt_path", "last")
    assert code == 0, err
    assert f"resuming from {FOLDER}/version_10/checkpoints/last.ckpt" in out
    assert steps(FOLDER / "version_10", "train/loss") == [256, 512, 768, 1024]
    code, out, err = rl("validate", *RUN, "--ckpt_path", "best")
    assert code == 0, err
    assert "eval/mean_reward" in out
    # A path is where another run begins, in a folder of its own.
    code, out, err = rl("fit", *RUN, "--ckpt_path", str(stopped / "checkpoints/last.ckpt"))
    assert code == 0, err
    [own] = FOLDER.glob("version_11*")
    assert steps(own, "train/loss") == [768, 1024]
    assert steps(stopped, "train/loss") == [256, 512]


def test_a_folder_without_a_checkpoint_is_no_run_beside_one_that_has(tmp_path: Path) -> None:
    folders = [tmp_path / f"version_{number}" for number in (0, 2, 10)]
    for folder in folders:
        folder.mkdir()
    assert newest_run(tmp_path) == folders[2]  # where none has a checkpoint, the newest begins again
    for folder in folders[:2]:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints/last.ckpt").touch()
    with pytest.warns(UserWarning, match=r"version_10 has no checkpoint; the newest run that has one is .*version_2\."):
        assert newest_run(tmp_path) == folders[1]


@pytest.mark.long
@pytest.mark.parametrize("how", [["--resume"], ["--ckpt_path", "last"]])
def test_without_a_checkpoint_a_run_begins(rl: Any, how: list[str]) -> None:
    code, out, err = rl("fit", *RUN, *how)
    assert code == 0, err
    assert "resuming" not in out
    shutil.rmtree(FOLDER / "version_0/checkpoints")
    code, out, err = rl("fit", *RUN, *how)
    assert code == 0, err
    assert "version_0 has no checkpoint yet: its run starts again" in out
    assert [path.name for path in FOLDER.iterdir()] == ["version_0"]
    assert steps(FOLDER / "version_0", "train/loss") == [256, 512, 768, 1024]


@pytest.mark.long
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(rl: Any, stopped: Path) -> None:
    last, previous = (stopped / f"checkpoints/{name}.ckpt" for name in ("last", "previous"))
    shutil.copy(last, previous)
    whole = last.read_bytes()
    last.write_bytes(whole[:5000])
    code, _, err = rl("test", *RUN, "--ckpt_path", "last")
    assert code == 1
    assert re.fullmatch(r"error: the checkpoint \S+last.ckpt is damaged: .*--ckpt_path previous.*\n", err), err
    previous.write_bytes(whole[:5000])
    previous.with_name("best.ckpt").unlink()
    code, _, err = rl("fit", *RUN, "--resume")
    assert (code, "no earlier one is whole" in err) == (1, True), err
    assert steps(stopped, "train/loss") == [256, 512]
    previous.write_bytes(whole)
    with pytest.warns(UserWarning, match=r"last.ckpt is damaged: .* resumes from \S+previous.ckpt"):
        code, out, err = rl("fit", *RUN, "--resume")
    assert code == 0, err
    assert re.search(r"resuming from \S+previous.ckpt \(", out), out
    assert steps(stopped, "train/loss") == [256, 512, 768, 1024]
    assert damage_of(previous) is None  # the damaged file has not taken its place


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ckpt_path", "previous", "--trainer.logger.name", "none"],
         "ckpt_path=previous: there is no previous.ckpt .* in logs/none; give a path"),
        (["--resume", "--ckpt_path", "x.ckpt"], "leave out --ckpt_path x.ckpt, or --resume"),
        (["--resume", "--trainer.logger", "lightning.pytorch.loggers.logger.DummyLogger"],
         "folders of TensorBoardLogger, CSVLogger and WandbLogger; with another logger give --ckpt_path"),
        (["--resume", "--data.n_envs", "4", "--data.batch_size", "128"], "n_envs=4 differs from the checkpoint's 8"),
        (["--resume", "--data.batch_size", "128"], r"batch_size=128 \(it has 256\): .* middle of an epoch"),
        (["--resume", "--data.seed", "3"], "seed=3 differs from the checkpoint's 0"),
    ],
)  # fmt: skip
def test_what_can_not_be_resumed_gets_one_sentence(rl: Any, stopped: Path, arguments: list[str], message: str) -> None:
    recorded = (stopped / "config.yaml").read_text()
    code, _, err = rl("fit", *RUN, *arguments)
    assert code == 1
    assert len(err.strip().splitlines()) == 1, err
    assert re.search(message, err), err
    assert (stopped / "config.yaml").read_text() == recorded


@pytest.mark.long
def test_the_record_of_a_resumed_run_has_its_new_settings(rl: Any, stopped: Path) -> None:
    code, _, err = rl("fit", *RUN, "--resume", "--model.clip_range", "0.1")
    assert code == 0, err
    assert yaml.safe_load((stopped / "config.yaml").read_text())["model"]["init_args"]["clip_range"] == 0.1


@pytest.mark.long
def test_a_run_that_is_refused_when_its_loggers_have_written_leaves_no_folder(
    rl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_modules import PPO

    def refuses(self: Any) -> None:
        assert Path("csv/PPO-CartPole-v1/version_0").exists() and (FOLDER / "version_0").exists()
        raise UsageError("not now")

    loggers = [{"class_path": name, "init_args": {"save_dir": folder}}
               for name, folder in (("TensorBoardLogger", "logs"), ("CSVLogger", "csv"))]  # fmt: skip
    monkeypatch.setattr(PPO, "on_fit_start", refuses)
    code, _, err = rl("fit", *RUN, "--trainer.logger", json.dumps(loggers))
    assert code == 1 and "not now" in err
    assert not list(Path().glob("*/**/version_0"))


@pytest.mark.long
def test_a_run_that_is_refused_leaves_no_folder_for_resume_to_take(rl: Any, stopped: Path) -> None:
    wrong = ["--trainer.precision", "bf16-true"]
    for refused in ([*wrong, "--trainer.logger", "CSVLogger"], [*wrong, "--trainer.logger", "false"], wrong):
        code, _, err = rl("fit", *RUN, *refused)
        assert code == 1, err
        assert not list(Path().glob("*/**/version_1"))
    code, out, err = rl("fit", *RUN, "--resume")
    assert code == 0, err
    assert f"resuming from {stopped}/checkpoints/last.ckpt (768 transitions)" in out


@pytest.mark.long
def test_an_epoch_goes_on_with_another_total(rl: Any, stopped: Path) -> None:
    """How many rollouts an epoch has follows from the total."""
    saved = torch.load(stopped / "checkpoints/last.ckpt", weights_only=True)["RolloutDataModule"]["ranks"][0]
    assert saved["layout"]["rollouts_per_epoch"] == 1 and saved["position"] % saved["layout"]["length"]
    code, out, err = rl("fit", *RUN, "--data.total_timesteps", "40000", "--resume", "--trainer.max_steps", "12")
    assert code == 0, err
    assert "total_timesteps: 1024 → 40000" in out
    assert steps(stopped, "eval/mean_reward") == [0, 512, 1024, 1536]


@pytest.mark.slow
def test_ranks_stop_together_within_the_warm_up_of_replay(tmp_path: Path) -> None:
    (tmp_path / "pole.py").write_text("""
import os, signal, time
import gymnasium as gym
class Stops(gym.Wrapper):
    steps = 0
    def step(self, action):
        Stops.steps += 1
        if "STOP" in os.environ:
            time.sleep(0.0005)  # the ranks agree four times a second, and a quick warm-up would be over before
        if Stops.steps == 700 and "STOP" in os.environ and os.environ["LOCAL_RANK"] == os.environ["STOP"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)
def make():
    return Stops(gym.make("CartPole-v1"))
""")
    words = ["fit", "--model", "DQN", "--data", "ReplayDataModule", "--data.env_id", "pole:make", "--data.n_envs", "2",
             "--data.learning_starts", "6000", "--data.total_timesteps", "6400", "--data.eval_freq", "0",
             "--data.n_test_episodes", "1", "--trainer.accelerator", "cpu", "--trainer.devices", "2"]  # fmt: skip

    def run(folder: str, *more: str, **environment: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "recipes", *words, "--trainer.default_root_dir", folder, *more]
        packages = str(Path(__file__).parents[3])
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200,
                              env={**os.environ, "PYTHONPATH": packages, **environment})  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    assert run("whole")[0] == 0
    for rank in "01":
        code, said = run(rank, STOP=rank)
        assert code == 128 + signal.SIGTERM, said
        (last,) = (tmp_path / rank).glob("logs/*/version_0/checkpoints/last.ckpt")
        saved = torch.load(last, weights_only=True)
        assert saved["global_step"] == 0 and 0 < saved["ReplayDataModule"]["num_timesteps"] < 6000
        code, said = run(rank, "--resume")
        assert code == 0, said
        assert_equal_checkpoints(next((tmp_path / "whole").glob("logs/*/version_0/checkpoints/last.ckpt")), last)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("moment", ["on_train_start", "on_test_start"])
def test_ranks_end_at_a_signal_outside_of_training(moment: str, rank: str, tmp_path: Path) -> None:
    """Lightning's own handler waits for the other ranks, which wait elsewhere."""
    (tmp_path / "mine.py").write_text(f"""
import os, signal
import lightning as L
class Ends(L.Callback):
    def {moment}(self, trainer, module):
        if trainer.global_rank == {rank}:
            os.kill(os.getpid(), signal.SIGTERM)
""")
    words = ["fit", *RUN, "--trainer.callbacks+=mine.Ends", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    done = subprocess.run([sys.executable, "-m", "recipes", *words], cwd=tmp_path, capture_output=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})  # fmt: skip
    assert done.returncode == (-signal.SIGTERM if rank == "0" else 1)


class OneFolder(Logger):
    """A logger of the user's, all of whose runs have one name and version."""

    name, version, save_dir = "mine", 0, "."

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.long
def test_loggers_whose_folder_resume_does_not_know(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_modules import PPO

    step, own = PPO.training_step, ["--trainer.logger", f"{__name__}.OneFolder"]

    def stops(self: Any, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(PPO, "training_step", stops)
    code, _, err = rl("fit", *RUN, *own)
    monkeypatch.setattr(PPO, "training_step", step)
    command = shlex.split(err.splitlines()[-1])
    assert code == 130 and command[-2:] == ["--ckpt_path", "mine/version_0/checkpoints/last.ckpt"]
    before = Path(command[-1]).read_bytes()
    code, _, err = rl("fit", *RUN, *own)
    assert code == 1 and "mine/version_0 holds a run, which a new one would overwrite" in err
    assert Path(command[-1]).read_bytes() == before
    code, out, err = rl(*command[1:])
    assert code == 0, err
    assert "resuming from mine/version_0/checkpoints/last.ckpt (256 transitions)" in out


@pytest.mark.long
@pytest.mark.parametrize("logger", ["null", "true"])
def test_a_logger_of_null_or_true_is_the_usual_one(logger: str, rl: Any, stopped: Path) -> None:
    code, out, err = rl("fit", *RUN, "--trainer.logger", logger, "--resume")
    assert code == 0, err
    assert f"resuming from {stopped}/checkpoints/last.ckpt (768 transitions)" in out
    assert not Path("lightning_logs").exists()


@pytest.mark.long
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_file_of_torch_that_is_no_checkpoint(command: str, rl: Any, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, "other.ckpt")
    code, _, err = rl(command, *RUN, "--ckpt_path", "other.ckpt")
    assert code == 1 and "ckpt_path='other.ckpt' is no checkpoint of this project: it has no state_dict, " in err


@pytest.mark.long
def test_the_command_that_goes_on_is_printed(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_modules import PPO

    def stops(self: Any, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return self.no_update()

    monkeypatch.setattr(PPO, "training_step", stops)
    code, _, err = rl("fit", *RUN, "--model.clip_range", "0.1")
    assert code == 130
    assert err.splitlines()[-1].strip() == f"rl fit {' '.join(RUN)} --model.clip_range 0.1 --resume"
    assert "stopped by SIGINT; the run is saved in logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt" in err


def test_the_command_names_the_recipe_s_config_and_leaves_out_the_old_checkpoint() -> None:
    stopped = Stopped(signal.SIGINT, "a/last.ckpt")
    assert _resume_command(["fit", "--ckpt_path", "a b", "--data.seed", "1"], "ppo/cartpole.yaml", stopped) == (
        "rl fit --config ppo/cartpole.yaml --data.seed 1 --resume"
    )
    assert _resume_command(["fit", "--config=x y.yaml", "--ckpt_path=last"], None, stopped) == (
        "rl fit '--config=x y.yaml' --resume"
    )


@pytest.mark.long
@pytest.mark.parametrize("case", quick(["ppo", "q-learning"], "ppo"))
def test_killed_processes_end_where_the_whole_one_does(case: str, tmp_path: Path) -> None:
    chaos.import_everything(chaos.CASES[case])
    small = {"ppo": 1024, "q-learning": 1600}[case]
    arguments = [*chaos.CASES[case], f"--data.total_timesteps={small}"]
    outcome = chaos.chaos(arguments, kills=2, folder=tmp_path, rng=random.Random(case), kills_per_run=2)
    assert outcome.kills == 2
    assert outcome.differences == []


@pytest.mark.slow
@pytest.mark.parametrize("case", chaos.CASES)
def test_chaos(case: str, tmp_path: Path) -> None:
    chaos.import_everything(chaos.CASES[case])
    arguments = chaos.with_models(case, tmp_path / "models")
    outcome = chaos.chaos(arguments, kills=8, folder=tmp_path, rng=random.Random(f"slow {case}"))
    assert outcome.kills == 8
    assert outcome.differences == []


@pytest.mark.long
def test_a_job_of_another_number_resumes_what_it_is_told_to(
    rl: Any, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_job = {"JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in in_job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    # A run outside of SLURM, continued by job 17; a second run, of another command, is newer.
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    code, out, err = rl("fit", *RUN, "--resume")
    assert code == 0 and f"resuming from {stopped}/checkpoints/last.ckpt (768 transitions)" in out, err
    shutil.rmtree(FOLDER)
    assert rl("fit", *RUN, "--resume")[0] == 0  # there is none: job 17 starts one
    assert rl("fit", *RUN, "--data.seed=3")[0] == 0
    first, _ = sorted(FOLDER.iterdir(), key=lambda folder: folder.stat().st_mtime)
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    code, out, err = rl("fit", *RUN, "--resume")
    assert code == 0 and f"resuming from {first}/checkpoints/last.ckpt (1,024 transitions)" in out, err
    assert len(list(FOLDER.iterdir())) == 2
    for name in (*in_job, "JOB_ID"):
        monkeypatch.delenv(f"SLURM_{name}")
    os.utime(first / "checkpoints")
    code, out, err = rl("fit", *RUN, "--resume")
    assert code == 0 and f"resuming from {first}/checkpoints/last.ckpt" in out, err


@pytest.mark.slow
def test_slurm_hands_the_job_back_and_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chaos.import_everything(chaos.CASES["ppo"])
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "scontrol").write_text('#!/bin/sh\necho "$@" >> "$REQUEUED"\n')
    (bin_ / "scontrol").chmod(0o755)
    slurm = {"JOB_ID": 17, "NTASKS": 1, "JOB_NAME": "train", "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("REQUEUED", str(tmp_path / "requeued"))
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    run = chaos.Run(chaos.CASES["ppo"], tmp_path / "job", forks=True, resume=False)
    while not (found := list((tmp_path / "job").glob("logs/*/job_17_*/checkpoints/last.ckpt"))):
        assert run.wait(0.01) is None, run.output.read_text()
    os.kill(run.pid, signal.SIGUSR1)
    assert run.wait(30) == 128 + signal.SIGUSR1, run.output.read_text()
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    folder = found[0].parent.parent
    assert [path.name for path in folder.glob("hpc*")] == ["hpc_ckpt_1.ckpt"]
    time.sleep(0.01)
    again = chaos.Run(chaos.CASES["ppo"], tmp_path / "job", forks=True, resume=False)
    again.finish()
    assert f"resuming from {folder.relative_to(tmp_path / 'job')}/" in again.output.read_text()
    for name in slurm:
        monkeypatch.delenv(f"SLURM_{name}")
    for path in list((tmp_path / "job").glob(f"*/*/{folder.name}")):
        path.rename(path.with_name("version_0"))  # as a run outside of Slurm calls its folders
    chaos.Run(chaos.CASES["ppo"], tmp_path / "whole", forks=True).finish()
    assert chaos.compare(tmp_path / "whole", tmp_path / "job") == []


@pytest.mark.long
def test_the_printed_command_resumes_its_own_run_where_a_newer_one_has_begun(
    rl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_modules import PPO

    step = PPO.training_step

    def stops(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 2 and batch_idx == 0:
            shutil.copytree(FOLDER / "version_0", FOLDER / "version_1", dirs_exist_ok=True)
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(PPO, "training_step", stops)
        code, _, err = rl("fit", *RUN)
    assert code == 128 + signal.SIGTERM
    code, out, err = rl(*shlex.split(err.splitlines()[-1])[1:])  # the command that is printed
    assert code == 0, err
    assert f"resuming from {FOLDER}/version_0/checkpoints/last.ckpt (768 transitions)" in out
    assert sorted(path.name for path in FOLDER.iterdir()) == ["version_0", "version_1"]
    assert steps(FOLDER / "version_0", "train/loss") == [256, 512, 768, 1024]


HOLDER = """
import sys
from pathlib import Path
from recipes import run
with run.held(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


@pytest.mark.long
def test_a_run_that_another_process_trains_is_not_resumed(rl: Any) -> None:
    code, _, err = rl("fit", *RUN)
    assert code == 0, err
    run, more = FOLDER / "version_0", "--data.total_timesteps=1280"
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        code, _, err = rl("fit", *RUN, more, "--resume")
        assert code == 1 and f"error: another process trains the run in {run}" in err
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        locked = (run / LOCK).stat().st_ino
        other.communicate("\n")
    code, out, err = rl("fit", *RUN, more, "--resume")
    assert code == 0 and "resuming from" in out, err
    # A process that had opened another file by this name would hold a lock beside that of the next.
    assert (run / LOCK).stat().st_ino == locked
