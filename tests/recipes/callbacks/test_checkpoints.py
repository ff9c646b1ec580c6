"""Checkpoints are whole or not there, are taken between batches, and are resumed exactly."""

import csv
import errno
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from datamodules import InstructionDataModule, ReplayDataModule, RolloutDataModule
from recipes import saved_runs
from recipes.callbacks.checkpoint_files import AtomicCheckpointIO
from recipes.callbacks.checkpoints import Checkpoints
from recipes.signals import Stopped, StopRequests
from rl_modules import A2C, DDPG, DQN, PPO, REINFORCE, SAC, SARSA, SFT, TD3, TQC, TRPO, MonteCarlo, QLearning
from rl_modules.action_noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from rl_modules.common.errors import UsageError
from tests.marks import quick
from tests.training import assert_equal_checkpoints, differences, fit, rollouts


def saving(folder: Path, *callbacks: L.Callback, **checkpoints: Any) -> dict[str, Any]:
    """Trainer arguments for a run in a folder that saves whenever it may."""
    settings = {"interval_s": 0.0, "max_share": 1.0, **checkpoints}
    return {
        "default_root_dir": folder,
        "enable_checkpointing": True,
        "callbacks": [Checkpoints(**settings), *callbacks],
    }


# -------------------------------------------------------------------- stopping anywhere


class Killed(Exception):
    """In a test's process what SIGKILL is to a run's: nothing is done any more."""


class KillAfter(L.Callback):
    """Ends the run in the middle of a batch, with nothing put in order."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_start(self, *args: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def ppo_data(**arguments: Any) -> RolloutDataModule:
    defaults = {"n_steps": 8, "batch_size": 8, "n_epochs": 2, "total_timesteps": 128, "eval_freq": 0, "n_envs": 4}
    return RolloutDataModule(**{"env_id": "CartPole-v1", **defaults, **arguments})


def whole(**arguments: Any) -> RolloutDataModule:
    return rollouts("CartPole-v1", n_envs=2, **{"n_steps": 8, "total_timesteps": 160, **arguments})


def maze(**arguments: Any) -> RolloutDataModule:
    return rollouts("Maze-v0", n_envs=2, n_steps=4, total_timesteps=160, rollouts_per_epoch=5, **arguments)


def replay(env_id: str = "CartPole-v1", **arguments: Any) -> ReplayDataModule:
    return ReplayDataModule(env_id, total_timesteps=120, learning_starts=20, eval_freq=0, batch_size=8,
                            rollouts_per_epoch=5, buffer_size=200, **arguments)  # fmt: skip


STEP_LR = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
ALGORITHMS: dict[str, tuple[Any, Any]] = {
    "ppo": (lambda: PPO(learning_rate="lin_0.01"), ppo_data),
    "ppo normalized": (
        lambda: PPO(log_every=2),
        lambda: ppo_data(env_id="Pendulum-v1", norm_obs=True, norm_reward=True),
    ),
    "ppo async": (lambda: PPO(), lambda: ppo_data(n_envs=2, vectorization_mode="async")),
    "ppo next step": (lambda: PPO(), lambda: ppo_data(autoreset_mode="next_step", norm_obs=True)),
    "ppo penalty": (lambda: PPO(policy_objective="penalty", target_kl=1e-3), ppo_data),
    "ppo early stop": (lambda: PPO(target_kl=1e-4, **STEP_LR), ppo_data),
    "a2c": (lambda: A2C(), lambda: whole(rollouts_per_epoch=3)),
    "reinforce": (lambda: REINFORCE(psi="baseline"), whole),
    "trpo": (lambda: TRPO(batch_size=8, n_critic_updates=2), whole),
    "dqn": (lambda: DQN(), lambda: replay(gradient_steps=3)),
    "dqn prioritized": (lambda: DQN(double=True), lambda: replay(prioritized_replay=True, n_steps=3, n_envs=2)),
    "sac": (lambda: SAC(learning_rate="lin_0.001"), lambda: replay("Pendulum-v1", gradient_steps=3, train_freq=2)),
    "tqc prioritized": (
        lambda: TQC(net_arch=[16]),
        lambda: replay("Pendulum-v1", prioritized_replay=True, n_steps=3, n_envs=2),
    ),
    "td3": (
        lambda: TD3(net_arch=[16], action_noise=OrnsteinUhlenbeckActionNoise(sigma=0.5)),
        lambda: replay("tests.conformance.envs:make_short_pendulum", train_freq=1, n_envs=2),
    ),
    "ddpg": (lambda: DDPG(net_arch=[16], action_noise=NormalActionNoise()), lambda: replay("Pendulum-v1")),
    "monte carlo": (lambda: MonteCarlo(), maze),
    "sarsa": (lambda: SARSA(), maze),
    "q-learning": (lambda: QLearning(double=True), maze),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm", quick(ALGORITHMS, "ppo", "ppo normalized", "trpo", "dqn prioritized", "sac", "sarsa")
)
def test_a_run_killed_between_and_within_epochs_ends_where_the_whole_one_does(algorithm: str, tmp_path: Path) -> None:
    make_model, make_data = ALGORITHMS[algorithm]
    fit(make_model(), make_data(), **saving(tmp_path / "whole", interval_s=1e9))
    killed, last = tmp_path / "killed", None
    for batches in (3, 2, 4):
        with pytest.raises(Killed):
            fit(make_model(), make_data(), last, **saving(killed, KillAfter(batches)))
        last = killed / "checkpoints/last.ckpt"
    progress = torch.load(last, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["total"]["completed"] == 3 + 2 + 4
    fit(make_model(), make_data(), last, **saving(killed, interval_s=1e9))
    assert_equal_checkpoints(tmp_path / "whole/checkpoints/last.ckpt", last)


def test_checkpoints_come_after_whole_optimizer_steps(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(PPO(), ppo_data(), accumulate_grad_batches=4, **saving(tmp_path, KillAfter(7)))
    checkpoint = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"] == 4
    assert checkpoint["global_step"] == 1


def test_writing_takes_no_larger_share_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = [0.0], []

    def monotonic() -> float:
        return clock[0]

    class Slow(AtomicCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            clock[0] += 2.0  # a write takes 2 s,
            written.append(clock[0])

    class Tick(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            clock[0] += 1.0  # a batch 1 s

    monkeypatch.setattr("recipes.callbacks.checkpoints.time.monotonic", monotonic)
    monkeypatch.setattr("recipes.callbacks.checkpoints.AtomicCheckpointIO", Slow)
    monkeypatch.setattr("recipes.callbacks.checkpoints.Checkpoints._rotate", lambda *args: None)
    fit(PPO(), ppo_data(total_timesteps=320), **saving(tmp_path, Tick(), max_share=0.1))
    pauses = [b - a - 2.0 for a, b in zip(written, written[1:-1], strict=False)]
    assert pauses == [18.0] * len(pauses) and len(pauses) >= 2


# -------------------------------------------------------------------- whole or not at all


@pytest.mark.long
def test_a_checkpoint_of_a_callback_before_there_are_optimizers_is_resumed(tmp_path: Path) -> None:
    class Early(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "start.ckpt")

    fit(PPO(), ppo_data(), **saving(tmp_path / "a", Early()))
    fit(PPO(), ppo_data(), tmp_path / "start.ckpt", **saving(tmp_path / "b"))
    assert_equal_checkpoints(tmp_path / "a/checkpoints/last.ckpt", tmp_path / "b/checkpoints/last.ckpt")


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(3)}, target)
    before = target.read_bytes()
    # Whatever is written to this device, it says that there is no space left.
    (tmp_path / "last.ckpt.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"x": torch.ones(3)}, target)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_disk_that_fills_up_and_is_cleared_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = AtomicCheckpointIO.save_checkpoint, []

    def fails_twice(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        calls.append(path)
        if len(calls) in (3, 4):
            Path(f"{path}.part").symlink_to("/dev/full")
        save(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", fails_twice)
    with pytest.warns(UserWarning, match=r"No space left on device.*; the one before, .*last.ckpt, is untouched"):
        fit(PPO(), ppo_data(), **saving(tmp_path))
    assert saved_runs.read(tmp_path / "checkpoints/last.ckpt")["RolloutDataModule"]["num_timesteps"] == 128


def test_a_small_disk_in_earnest(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this system does not let the test mount a small file system")
    try:
        # Two checkpoints fit, a third does not.
        with pytest.raises(UsageError, match=r"last checkpoint can't be written.*No space left.*is untouched"), \
                pytest.warns(UserWarning, match="Training continues"):  # fmt: skip
            fit(PPO(), ppo_data(), **saving(tmp_path))
        kept = saved_runs.read(tmp_path / "checkpoints/last.ckpt")
        assert kept["RolloutDataModule"]["num_timesteps"] < 128
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("kib", [48, 200, 400])
def test_the_archive_s_own_error_is_that_of_the_disk(kib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer answers a failed write by a RuntimeError about positions in its file."""
    written, write = [0], io.FileIO.write

    class Disk(io.FileIO):
        def write(self, data: Any) -> Any:
            written[0] += len(data)
            if written[0] > kib * 1024:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, data)

    monkeypatch.setattr(Path, "open", lambda path, mode: Disk(path, mode))
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({str(i): torch.zeros(4000) for i in range(40)}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_for_the_best_checkpoint_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = AtomicCheckpointIO.save_checkpoint

    def fails(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if str(path).endswith("best.ckpt"):
            Path(f"{path}.part").symlink_to("/dev/full")
        save(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", fails)
    arguments = saving(tmp_path)
    with pytest.warns(UserWarning, match=r"best checkpoint can't be written: .*No space left.* Training continues"):
        fit(PPO(), ppo_data(eval_freq=32, n_eval_episodes=1, eval_on_start=False), **arguments)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last.ckpt", "previous.ckpt"]
    callback = arguments["callbacks"][0]  # a later evaluation must not be compared with what no file holds
    assert (callback.best_model_path, callback.best_model_score) == ("", None)


class Success(L.LightningModule):
    """Logs a pass@1 and a reward of each evaluation."""

    best_metric, best_while_zero = ("eval/pass@1", "max"), {"eval/pass@1": "eval/reward"}

    def __init__(self, *evaluations: tuple[float, float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.evaluations = list(evaluations)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right, reward = self.evaluations[self.trainer.global_step - 1]
        self.log_dict({"eval/pass@1": right, "eval/reward": reward})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(("evaluations", "monitor", "best_at"), [
    ([(0.0, -3.0), (0.0, -1.0), (0.0, -2.0)], "eval/reward", 2),  # the last of equal pass@1 would be 3
    ([(0.0, -1.0), (0.1, -9.0), (0.0, -0.5)], "eval/pass@1", 2),
    ([(0.2, -1.0), (0.0, -0.5), (0.0, -0.1)], "eval/pass@1", 1),
])  # fmt: skip
def test_the_reward_selects_the_best_while_pass_at_1_is_zero(
    evaluations: list[tuple[float, float]], monitor: str, best_at: int, tmp_path: Path
) -> None:
    best = Checkpoints()
    rows = torch.utils.data.DataLoader(torch.zeros(3, 1), batch_size=1)
    trainer = L.Trainer(max_epochs=1, val_check_interval=1, num_sanity_val_steps=0, callbacks=[best], logger=False,
                        accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)  # fmt: skip
    trainer.fit(Success(*evaluations), rows, torch.utils.data.DataLoader(torch.zeros(1, 1)))
    assert (best.monitor, best.best_at) == (monitor, best_at)
    assert torch.load(best.best_model_path, weights_only=True)["global_step"] == best_at


def test_the_checkpoint_before_the_last_is_kept(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(PPO(), ppo_data(), **saving(tmp_path, KillAfter(3)))
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "previous.ckpt"]
    steps = [torch.load(folder / name, weights_only=True)["global_step"] for name in ("previous.ckpt", "last.ckpt")]
    assert steps == [2, 3]
    fit(PPO(), ppo_data(), **saving(tmp_path / "one", keep_previous=False))
    assert [path.name for path in (tmp_path / "one/checkpoints").iterdir()] == ["last.ckpt"]


# -------------------------------------------------------------------- Lightning's loops and the last point


def sft() -> SFT:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
             "num_key_value_heads": 1}  # fmt: skip
    return SFT(model_config=small, logging_steps=4)


def additions() -> InstructionDataModule:
    return InstructionDataModule(task="addition", n_train=16, n_eval=4, eval_steps=2, batch_size=4)


@pytest.mark.long
def test_a_resumed_language_run_counts_each_batch_once_and_keeps_its_last_point(tmp_path: Path) -> None:
    """Killed after an evaluation, after a step without one, and after the last step."""

    def run(name: str, killed_after: int | None, ckpt_path: Path | None = None) -> list[dict[str, str]]:
        logger = CSVLogger(tmp_path, name=name, version="")
        callbacks = [] if killed_after is None else [KillAfter(killed_after)]
        arguments = saving(tmp_path / name, *callbacks) | {"logger": logger, "max_steps": 6}
        with nullcontext() if killed_after is None else pytest.raises(Killed):
            fit(sft(), additions(), ckpt_path, **arguments)
        logger.save()
        with (tmp_path / name / "metrics.csv").open() as file:
            return [{k: x for k, x in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]

    points = run("whole", None)
    last = tmp_path / "whole/checkpoints/last.ckpt"
    assert points[-1]["step"] == "6" and points[-1]["train/loss"]
    for step in (2, 3):
        run(f"killed-{step}", step)
        run(f"resumed-{step}", None, tmp_path / f"killed-{step}/checkpoints/last.ckpt")
        found = differences(last, tmp_path / f"resumed-{step}/checkpoints/last.ckpt", loops=True)
        assert not found, (step, found)
    shutil.copy(last, tmp_path / "complete.ckpt")
    assert run("complete", None, tmp_path / "complete.ckpt") == [
        {name: value for name, value in points[-1].items() if value}
    ]


# -------------------------------------------------------------------- damage


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with ``last.ckpt`` and ``previous.ckpt``."""
    for name in ("last.ckpt", "previous.ckpt"):
        content = {"state_dict": {"weights": torch.arange(1000.0)}, "global_step": 3, "pytorch-lightning_version": "2"}
        AtomicCheckpointIO().save_checkpoint(content, tmp_path / name)
    return tmp_path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def weights_at(path: Path) -> int:
    """Where in the file the tensor's bytes are."""
    return path.read_bytes().index(torch.arange(1000.0).numpy().tobytes()) + 2000


def test_a_whole_checkpoint_is_read(pair: Path) -> None:
    assert torch.equal(saved_runs.read(pair / "last.ckpt")["state_dict"]["weights"], torch.arange(1000.0))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(pair: Path, damage: str) -> None:
    last = pair / "last.ckpt"
    if damage == "cut":
        last.write_bytes(last.read_bytes()[:-700])
    elif damage == "flipped":
        flip(last, weights_at(last))
        assert not torch.equal(
            torch.load(last, weights_only=True)["state_dict"]["weights"], torch.arange(1000.0)
        )  # torch is silent
    else:
        last.write_text("" if damage == "empty" else "hello")
    with pytest.raises(UsageError, match=r"last.ckpt is damaged: it.* whole: resume .* --ckpt_path previous"):
        saved_runs.read(last)
    flip(pair / "previous.ckpt", weights_at(pair / "previous.ckpt"))
    with pytest.raises(UsageError, match="no earlier one is whole"):
        saved_runs.read(last)


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_code_in_a_checkpoint_is_refused_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "extra": Code()}, tmp_path / "evil.ckpt")
    with pytest.raises(UsageError, match=r"evil.ckpt holds code, \w+.system, .* never run"):
        saved_runs.read(tmp_path / "evil.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Code()))
    with pytest.raises(UsageError, match="not a checkpoint at all"):
        saved_runs.read(tmp_path / "plain.ckpt")
    with zipfile.ZipFile(tmp_path / "zip.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Code()))
    with pytest.raises(UsageError):
        saved_runs.read(tmp_path / "zip.ckpt")
    assert not (tmp_path / "ran").exists()


# -------------------------------------------------------------------- signals


class Signal(L.Callback):
    """Sends this process a signal in the middle of a batch."""

    def __init__(self, signum: int, batch: int, times: int = 1) -> None:
        self.signum, self.batch, self.times = signum, batch, times

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.batch:
            for _ in range(self.times):
                os.kill(os.getpid(), self.signum)


def test_a_hangup_that_nohup_ignores_does_not_stop_a_run(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fit(PPO(), ppo_data(), **saving(tmp_path, Signal(signal.SIGHUP, 5)))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def hangups() -> Any:
    """Hangups end a process, as they do outside of ``nohup``, under which the tests may run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_a_hangup_saves_although_the_terminal_is_gone() -> None:
    """Whatever the run prints between the signal and its checkpoint would raise."""
    program = (
        "import os, signal\nfrom recipes.signals import StopRequests\nrequests = StopRequests()\n"
        "requests.install()\nreader, writer = os.pipe()\nos.close(reader)\n"
        "os.dup2(writer, 1), os.dup2(writer, 2)\nos.kill(os.getpid(), signal.SIGHUP)\nprint('x', flush=True)\n"
        "os._exit(40 + requests.signum)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 40 + signal.SIGHUP


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_after_the_step_and_stops(signum: int, tmp_path: Path, capfd: Any) -> None:
    before = signal.getsignal(signum)
    arguments = saving(tmp_path, Signal(signum, 5), interval_s=1e9)
    with pytest.raises(Stopped) as stopped:
        fit(PPO(), ppo_data(), **arguments)
    assert signal.getsignal(signum) == before
    assert stopped.value.signum == signum
    assert stopped.value.checkpoint == tmp_path / "checkpoints/last.ckpt"
    assert torch.load(stopped.value.checkpoint, weights_only=True)["global_step"] == 6
    assert "saving a checkpoint after this step" in capfd.readouterr().err
    fit(PPO(), ppo_data(), stopped.value.checkpoint, **saving(tmp_path))
    fit(PPO(), ppo_data(), **saving(tmp_path / "whole"))
    assert_equal_checkpoints(tmp_path / "whole/checkpoints/last.ckpt", tmp_path / "checkpoints/last.ckpt")


WARM_UPS: dict[str, tuple[Any, Any]] = {
    "sac of as many steps": (
        lambda: SAC(net_arch=[16]),
        lambda: replay("tests.conformance.envs:make_short_pendulum", gradient_steps=-1, train_freq=3),
    ),
    "td3 normalized and prioritized": (
        lambda: TD3(net_arch=[16], action_noise=OrnsteinUhlenbeckActionNoise(sigma=0.5)),
        lambda: replay("tests.conformance.envs:make_short_pendulum", train_freq=3, norm_obs=True, norm_reward=True,
                       prioritized_replay=True),
    ),
    "dqn of steps": (lambda: DQN(learning_rate="lin_0.01"), lambda: replay(n_envs=3, prioritized_replay=True)),
    "sac next step": (
        lambda: SAC(net_arch=[16], use_sde=True),
        lambda: replay("tests.conformance.envs:make_short_pendulum", n_envs=2, autoreset_mode="next_step",
                       norm_obs=True, n_steps=2),
    ),
    "hindsight": (lambda: DQN(), lambda: replay("datamodules.envs.bit_flipping:BitFlipping", n_sampled_goal=2)),
}  # fmt: skip


@pytest.mark.parametrize("case", WARM_UPS)
def test_a_signal_stops_within_the_warm_up_from_where_the_run_resumes_exactly(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamodules.replay.WARM_UP_STEPS", 3)
    saved = resumed_after_a_signal_in(2, *WARM_UPS[case], tmp_path, monkeypatch)
    assert 0 < saved["num_timesteps"] < 20  # the warm-up has 20


def resumed_after_a_signal_in(
    number: int, make_model: Any, make_data: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Stops a run by SIGTERM in its ``number``-th collection, resumes it and compares its end with that of a whole run;
    returns the datamodule's state at the stop.
    """
    fit(make_model(), make_data(), **saving(folder / "whole", interval_s=1e9))
    collect, collected = ReplayDataModule._collect, []

    def counted(self: Any, act: Any, n_steps: int) -> int:
        collected.append(n_steps)
        if len(collected) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return collect(self, act, n_steps)

    monkeypatch.setattr(ReplayDataModule, "_collect", counted)
    with pytest.raises(Stopped) as stopped:
        fit(make_model(), make_data(), **saving(folder, interval_s=1e9))
    monkeypatch.setattr(ReplayDataModule, "_collect", collect)
    assert len(collected) == number
    saved: dict[str, Any] = torch.load(stopped.value.checkpoint, weights_only=True)["ReplayDataModule"]
    fit(make_model(), make_data(), stopped.value.checkpoint, **saving(folder, interval_s=1e9))
    assert_equal_checkpoints(folder / "whole/checkpoints/last.ckpt", folder / "checkpoints/last.ckpt")
    return saved


class Regression(L.LightningModule):
    """Any LightningModule, with a loader of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_signal_stops_a_run_whose_epochs_end_within_an_accumulation(tmp_path: Path) -> None:
    """Lightning steps after an epoch's last batch, whatever the number before."""
    loader = torch.utils.data.DataLoader(torch.ones(5, 1))
    settings = saving(tmp_path, Signal(signal.SIGTERM, 2))
    trainer = L.Trainer(max_epochs=4, accumulate_grad_batches=2, logger=False, accelerator="cpu",
                        enable_progress_bar=False, enable_model_summary=False, **settings)  # fmt: skip
    with pytest.raises(Stopped):
        trainer.fit(Regression(), loader)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3


def test_a_second_ctrl_c_ends_at_once() -> None:
    requests = StopRequests()
    before = signal.getsignal(signal.SIGINT)
    requests.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.signum == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        requests.restore()
    assert signal.getsignal(signal.SIGINT) == before


# -------------------------------------------------------------------- optimizers' settings


def adam(lr: float, **settings: Any) -> Any:
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, **settings)


def step_lr(gamma: float) -> Any:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)


def test_changed_settings_of_optimizer_and_schedule_win(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fit(PPO(optimizer=adam(0.01), lr_scheduler=step_lr(0.5)), ppo_data(), **saving(tmp_path))
    last = tmp_path / "checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01 * 0.5**4
    model = PPO(optimizer=adam(0.1, weight_decay=0.2), lr_scheduler=step_lr(0.1))
    fit(model, ppo_data(total_timesteps=160), last, **saving(tmp_path))
    out = capsys.readouterr().out
    assert "optimizer.lr: 0.01 → 0.1\n" in out
    assert "optimizer.weight_decay: 0 → 0.2\n" in out
    assert "lr_scheduler.gamma: 0.5 → 0.1\n" in out
    group = torch.load(last, weights_only=True)["optimizer_states"][0]["param_groups"][0]
    assert group["weight_decay"] == 0.2
    assert group["lr"] == pytest.approx(0.1 * 0.5**4 * 0.1)
    with pytest.raises(UsageError, match="optimizers Adam, this run has SGD"):
        fit(PPO(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), lr_scheduler=step_lr(0.1)),
            ppo_data(total_timesteps=192), last, **saving(tmp_path))  # fmt: skip


# -------------------------------------------------------------------- a second fit


def test_one_callback_serves_two_runs_with_a_folder_and_a_best_each(tmp_path: Path) -> None:
    arguments = saving(tmp_path / "one", interval_s=1e9)
    [checkpoints] = arguments["callbacks"]
    evaluated = {"eval_freq": 64, "n_eval_episodes": 1}
    fit(PPO(), ppo_data(**evaluated), **arguments)
    before = {path.name: path.read_bytes() for path in (tmp_path / "one/checkpoints").iterdir()}
    assert {"best.ckpt", "last.ckpt"} <= before.keys()
    # Returns of Pendulum are negative: none is as good as the worst of CartPole.
    fit(PPO(), ppo_data(env_id="Pendulum-v1", **evaluated), **{**arguments, "default_root_dir": tmp_path / "two"})
    assert {path.name: path.read_bytes() for path in (tmp_path / "one/checkpoints").iterdir()} == before
    assert checkpoints.best_model_path == str(tmp_path / "two/checkpoints/best.ckpt")
    assert checkpoints.last_path == tmp_path / "two/checkpoints/last.ckpt"
    for name in ("best.ckpt", "last.ckpt"):
        assert torch.load(tmp_path / "two/checkpoints" / name, weights_only=True)["env_id"] == "Pendulum-v1"


@pytest.mark.long
@pytest.mark.parametrize(
    ("monitor", "mode"), [("eval/mean_reward", "min"), ("eval/mean_ep_length", "min"), ("eval/mean_reward", "max")]
)
def test_the_best_by_another_measure_does_not_stand_in_the_way(monitor: str, mode: str, tmp_path: Path) -> None:
    data = {"env_id": "Pendulum-v1", "eval_freq": 64, "n_eval_episodes": 1}
    fit(PPO(), ppo_data(**data), **saving(tmp_path, monitor="eval/mean_reward", mode="max"))
    before = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    arguments = saving(tmp_path, monitor=monitor, mode=mode)
    [checkpoints] = arguments["callbacks"]
    first = float(before["callbacks"]["Checkpoints"]["best_model_score"])
    seen: list[float] = []

    class See(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append(float(trainer.callback_metrics[monitor]))

    arguments["callbacks"].append(See())
    last = tmp_path / "checkpoints/last.ckpt"
    is_same = (monitor, mode) == ("eval/mean_reward", "max")
    if not is_same:  # no later evaluation is as low
        saved = torch.load(last, weights_only=True)
        saved["callbacks"]["Checkpoints"].update(best_model_score=torch.tensor(-1e9))
        torch.save(saved, last)
    fit(PPO(learning_rate=0.05), ppo_data(**{**data, "total_timesteps": 320}), last, **arguments)
    assert len(seen) >= 2
    expected = max(first, *seen) if is_same else min(seen)
    assert float(checkpoints.best_model_score) == pytest.approx(expected, rel=1e-6)


def test_of_equal_evaluations_the_later_is_the_best(tmp_path: Path) -> None:
    """Every evaluation of a constant return is as good as the first."""
    data = RolloutDataModule("tests.envs:make_constant_reward", n_envs=1, n_steps=8, total_timesteps=32, eval_freq=8,
                             n_eval_episodes=1)  # fmt: skip
    trainer = fit(A2C(net_arch=[4]), data, **saving(tmp_path))
    checkpoints = Checkpoints.of(trainer)
    best = torch.load(checkpoints.best_model_path, weights_only=True)
    assert checkpoints.best_at == best["RolloutDataModule"]["num_timesteps"] == 32
    assert list((tmp_path / "checkpoints").glob("best*")) == [Path(checkpoints.best_model_path)]
