"""``rl replay`` and ``rl verify`` beside what the run itself saw and wrote."""

import ast
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from recipes.callbacks.stops import plain_batch
from recipes.cli import main
from tests import chaos
from tests.marks import quick

CASES = {
    "ppo": "--data.total_timesteps=512", "ppo-early-stop": "--data.total_timesteps=512",
    "ppo-accumulated": "--data.total_timesteps=512", "dqn": "--data.total_timesteps=500",
    "q-learning": "--data.total_timesteps=1000", "trpo": "--data.total_timesteps=768",
    "sft": "--trainer.max_steps=8", "grpo": "--trainer.max_steps=8",
}  # fmt: skip
#: An update that is not the first, and lies behind the first checkpoint.
STEP = 5


class Witness(L.Callback):
    """Writes the batches, losses and gradient norms of one update while the run is trained."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.batches, self.losses, self.norms, self.before = [], [], [], trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, *others: Any) -> None:
        if trainer.global_step > self.before:
            self.batches, self.losses, self.norms, self.before = [], [], [], trainer.global_step
        self.batches.append(plain_batch(batch, copy=True))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad.detach().flatten() for p in pl_module.parameters() if p.grad is not None]
        if grads:
            self.norms.append(torch.cat(grads).norm())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *others: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else None)
        if self.before < STEP <= trainer.global_step:
            torch.save({"batches": self.batches, "losses": self.losses, "norms": self.norms}, "witness.pt")


@pytest.fixture(scope="module", params=quick(CASES, "ppo-accumulated", "grpo"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run in the working directory, as (name, folder)."""
    folder, before = tmp_path_factory.mktemp(request.param), Path.cwd()
    os.chdir(folder)
    try:
        arguments = [*chaos.CASES[request.param], CASES[request.param], "--checkpoint.keep_all=true"]
        main(["fit", *arguments, "--trainer.callbacks+=tests.recipes.cli.test_recomputation.Witness"])
        (found,) = (folder / "logs").glob("*/version_0")
        yield request.param, found
    finally:
        os.chdir(before)


def without_intermediate(folder: Path, copy: Path) -> Path:
    """A copy of a run that recomputation begins anew: how many checkpoints the run itself kept depends on its speed."""
    (copy / "checkpoints").mkdir(parents=True)
    for file in ("config.yaml", "checkpoints/last.ckpt"):
        (copy / file).write_bytes((folder / file).read_bytes())
    return copy


@pytest.mark.long
def test_replay_reads_stored_rewards_and_computes_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paid = (
        "async def paid(completions, **columns):\n    open('calls', 'a').write('x')\n"
        "    return [len(text) % 3 - 1.0 for text in completions]\n"
        "def free(prompts, completions):\n    open('calls', 'a').write('y')\n    return [0.5] * len(prompts)\n"
    )
    (tmp_path / "mine_paid.py").write_text(paid)
    small = "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1}"
    main(["fit", "--model", "GRPO", f"--model.model_config={small}", "--model.max_completion_length=4", "--data",
          "PromptDataModule", "--data.task=addition", "--data.batch_size=8", "--data.num_generations=4",
          "--data.reward_funcs=[mine_paid:paid, mine_paid:free]", "--data.rollouts_path=rollouts", "--data.n_eval=0",
          "--trainer.max_steps=3", "--trainer.accelerator=cpu"])  # fmt: skip
    [folder] = (tmp_path / "logs").glob("*/version_0")
    calls, files = (tmp_path / "calls").read_text(), sorted((tmp_path / "rollouts").iterdir())
    before = [file.read_bytes() for file in files]
    assert exit_code("replay", str(folder), "--step", "2", "--output", "stored.pt") == 0
    assert (tmp_path / "calls").read_text() == calls
    assert [file.read_bytes() for file in files] == before
    for file in files:  # half of each generation is stored
        file.write_text("".join(file.read_text().splitlines(keepends=True)[::2]))
    assert exit_code("replay", str(folder), "--step", "2", "--output", "half.pt") == 0
    assert len((tmp_path / "calls").read_text()) > len(calls)
    stored, half = (torch.load(name, weights_only=True) for name in ("stored.pt", "half.pt"))
    assert same(stored["batches"], half["batches"]) and same(stored["losses"], half["losses"])


@pytest.mark.parametrize("command", [["verify"], ["replay", "--step", "5"]])
def test_ctrl_c_ends_it_without_a_way_to_resume(run, command, monkeypatch, capsys, tmp_path):
    """The temporary folder and what was saved in it are gone."""
    if run[0] == "trpo" and command[0] == "replay":
        pytest.skip("a batch is 20 of its steps, the fifth of which is reached before the first signal")
    folder = without_intermediate(run[1], tmp_path / "version_0")
    monkeypatch.setattr(Witness, "on_train_batch_end", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit) as end:
        main([command[0], str(folder), "--trust", *command[1:]])
    assert end.value.code == 130 and "saved in" not in capsys.readouterr().err


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def exit_code(*args: str, trust: bool = True) -> int:
    """Runs a command; the runs have a callback of this file, which only a trusted folder may name."""
    try:
        main([*args, *(["--trust"] if trust else [])])
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


@pytest.mark.long
def test_replay_rebuilds_the_update_that_the_run_saw(run: Any) -> None:
    name, folder = run
    assert exit_code("replay", str(folder), "--step", str(STEP), "--output", "update.pt") == 0
    update, seen = (torch.load(file, weights_only=True) for file in ("update.pt", "witness.pt"))
    assert update["step"] == STEP
    assert len(update["batches"]) == (2 if name in ("ppo-accumulated", "sft") else 1)
    assert same(update["batches"], seen["batches"])
    assert same(update["losses"], seen["losses"])
    if seen["norms"]:
        torch.testing.assert_close(update["grad_norm"], seen["norms"][0])
    else:
        assert name == "q-learning"
        assert update["grad_norm"] is None


@pytest.mark.long
def test_replay_from_the_beginning_is_replay_from_a_checkpoint(run: Any, tmp_path: Path) -> None:
    _, folder = run
    copy = without_intermediate(folder, tmp_path / "version_0")
    for source, output in ((folder, "near.pt"), (copy, "far.pt")):
        assert exit_code("replay", str(source), "--step", str(STEP), "--output", str(tmp_path / output)) == 0
    near, far = (torch.load(tmp_path / name, weights_only=True) for name in ("near.pt", "far.pt"))
    assert same(near, far)


@pytest.mark.long
def test_verify_finds_a_run_the_same(run: Any, capsys: pytest.CaptureFixture) -> None:
    _, folder = run
    for begin in ([], ["--from", "start"]):
        assert exit_code("verify", str(folder), *begin) == 0, capsys.readouterr().out
        assert "the same, bit for bit" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "dqn", "sft"])
def test_a_run_that_max_steps_ended_within_an_epoch_is_verified(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", *chaos.CASES[name], "--trainer.max_steps=3"])
    (folder,) = (tmp_path / "logs").glob("*/version_0")
    loops = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["loops"]["fit_loop"]
    assert loops["epoch_progress"]["current"]["processed"] < loops["epoch_progress"]["current"]["started"]
    assert exit_code("verify", str(folder)) == 0, capsys.readouterr().out
    assert "the same, bit for bit" in capsys.readouterr().out


@pytest.mark.long
def test_a_checkpoint_of_a_run_s_end_is_none_to_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    best = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "eval/mean_reward", "save_top_k": -1}}
    main(["fit", "--config", "ppo/cartpole.yaml", "--data.total_timesteps=1024", "--data.eval_freq=512",
          "--data.n_eval_episodes=1", f"--trainer.callbacks+={json.dumps(best)}"])  # fmt: skip
    (folder,) = (tmp_path / "logs").glob("*/version_0")
    assert exit_code("verify", str(folder)) == 0, capsys.readouterr().err
    assert "the same, bit for bit" in capsys.readouterr().out


def tampered(folder: Path, path: Path, change: Any) -> Path:
    """A copy of a run whose last checkpoint is changed."""
    (path / "checkpoints").mkdir(parents=True)
    for file in (folder / "config.yaml", *folder.glob("events.out.tfevents.*")):
        (path / file.name).write_bytes(file.read_bytes())
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path / "checkpoints" / "last.ckpt")
    return path


@pytest.mark.long
@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_verify_names_the_largest_difference(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, folder = run

    def change(checkpoint: dict[str, Any]) -> None:
        name, weights = next(iter(checkpoint["state_dict"].items()))
        weights.view(-1)[0] += 0.25
        change.name = name  # type: ignore[attr-defined]

    other = tampered(folder, tmp_path / "version_0", change)
    assert exit_code("verify", str(other)) == 1
    out = capsys.readouterr().out
    assert "not the same" in out
    assert "1 of" in out
    assert f"0.25, in state_dict/{change.name}" in out  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_verify_names_the_first_point_that_differs(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Other settings than the run had stand for another machine's arithmetic."""
    _, folder = run
    other = tampered(folder, tmp_path / "version_0", lambda checkpoint: None)
    config = other / "config.yaml"
    text = config.read_text()
    assert "vf_coef: 0.5" in text
    config.write_text(text.replace("vf_coef: 0.5", "vf_coef: 0.6"))
    assert exit_code("verify", str(other)) == 1
    out = capsys.readouterr().out
    assert "the first point of a curve that differs is train/" in out
    assert "at step 256" in out


@pytest.mark.long
@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_the_console_has_the_model_from_before_the_update(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = run
    seen: dict[str, Any] = {}

    def console(banner: str, local: dict[str, Any], exitmsg: str) -> None:
        seen["again"] = local["model"].training_step(local["batch"], 0).detach()
        seen["loss"] = local["update"]["losses"][0]

    monkeypatch.setattr("code.interact", console)
    assert exit_code("replay", str(folder), "--step", str(STEP), "--output", "update.pt", "--interactive") == 0
    assert torch.equal(seen["again"], seen["loss"])


@pytest.mark.parametrize("run", ["ppo"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["replay", "{run}", "--step", "99999"], "step=99999 is after the run's last checkpoint"),
        (["replay", "nowhere", "--step", "1"], "nowhere has no config.yaml; give the folder of a run of `rl fit`"),
        (["replay", "{run}"], "the following arguments are required: --step"),
        (["verify", "{run}", "--from", "best"], "from='best' is no checkpoint before"),
    ],
)
def test_errors_name_the_argument(run: Any, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert exit_code(*(word.replace("{run}", str(run[1])) for word in arguments)) == 1
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


EVIL = "evil_of_a_folder"
#: What a sent folder's config may name, and the argument that the refusal names.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "data.env_id": ("data", {"env_id": f"{EVIL}:run"}),
    "data.env_id of a program": ("data", {"env_id": "subprocess:Popen", "env_kwargs": {"args": ["touch", "ran"]}}),
    "data.env_id of a file": ("data", {"env_id": "other.yaml"}),
    "data.wrappers": ("data", {"wrappers": [{"class_path": f"{EVIL}.run"}]}),
    "data.env_kwargs": ("data", {"env_kwargs": {"x": [{"class_path": f"{EVIL}.run"}]}}),
    "model.network": ("model", {"network": f"{EVIL}.run"}),
    "model.features_extractor": ("model", {"features_extractor": {"class_path": f"{EVIL}.run", "init_args": {}}}),
    "model.optimizer": ("model", {"optimizer": f"{EVIL}.run"}),
    "model.optimizer of a file": ("model", {"optimizer": "other.yaml"}),
    "model.lr_scheduler": (
        "model",
        {"lr_scheduler": {"class_path": "torch.optim.lr_scheduler.LambdaLR",
                          "init_args": {"lr_lambda": f"{EVIL}.run"}}},
    ),
    "model.net_arch": ("model", {"net_arch": {"class_path": f"{EVIL}.run"}}),
    "model.class_path": ("", {"model": {"class_path": f"{EVIL}.run"}}),
    "model.class_path of a function": ("", {"model": {"class_path": "rl_modules.core.settings.setting"}}),
    "data.class_path": ("", {"data": {"class_path": f"{EVIL}.run", "init_args": {}}}),
    "trainer": ("trainer", {"callbacks": [{"class_path": f"{EVIL}.run"}]}),
    "trainer of a callback": (
        "trainer",
        {"callbacks": [{"class_path": "lightning.pytorch.callbacks.LambdaCallback",
                        "init_args": {"on_fit_start": f"{EVIL}.run"}}]},
    ),
    "trainer of a file": ("trainer", {"callbacks": "other.yaml"}),
    "trainer of a strategy": ("trainer", {"strategy": {"class_path": f"{EVIL}.run"}}),
    "checkpoint": ("", {"checkpoint": {"class_path": f"{EVIL}.run"}}),
    "config": ("", {"config": "other.yaml"}),
}  # fmt: skip


@pytest.mark.parametrize("named", NAMED)
def test_a_sent_folder_runs_nothing_of_its_own(named: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{EVIL}.py").write_text("open('ran', 'w')\ndef run(*a, **k): pass\n")
    (tmp_path / "other.yaml").write_text(f"class_path: {EVIL}.run\n")
    where, change = NAMED[named]
    config: dict[str, Any] = {
        "model": {"class_path": "rl_modules.PPO", "init_args": {}},
        "data": {"class_path": "datamodules.RolloutDataModule", "init_args": {"env_id": "CartPole-v1"}},
        "trainer": {"devices": 1, "accelerator": "cpu", "max_steps": 1},
        "checkpoint": {},
    }
    part = config.get(where, config)
    part.get("init_args", part).update(change)
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "config.yaml").write_text(yaml.safe_dump(config))
    assert exit_code("replay", "sent", "--step", "1", trust=False) == 1
    err = capsys.readouterr().err
    assert f"names {named.partition(' ')[0]}=" in err and "give --trust" in err
    assert EVIL not in sys.modules and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [("a: &a [1]\nmodel: 3", "has trainer"), ("x: [" * 3, "no YAML of plain values"), ("[]", "settings by name")],
)
def test_a_damaged_folder_is_refused_in_one_line(config: str, sentence: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.yaml").write_text(config)
    assert exit_code("replay", str(tmp_path), "--step", "1", trust=False) == 1
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_a_run_of_what_is_registered_needs_no_trust(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    config = yaml.safe_load((run[1] / "config.yaml").read_text())
    for file in run[1].glob("checkpoints/*.ckpt"):
        (tmp_path / "run" / "checkpoints" / file.name).write_bytes(file.read_bytes())
    for file in run[1].glob("events*"):
        (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    assert config["trainer"]["callbacks"], "that of this file"
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    assert exit_code("verify", str(tmp_path / "run"), trust=False) == 1
    config["trainer"]["callbacks"] = None
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    assert exit_code("verify", str(tmp_path / "run"), trust=False) == 0


def test_files_are_loaded_to_the_cpu():
    """A GPU's run saves tensors of the GPU: `rl verify` compares them with others, and a machine may have none."""
    calls = [
        (path.name, call)
        for package in ("rl_modules", "datamodules", "recipes")
        for path in (Path(__file__).parents[3] / package).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "torch.load"
        and ast.unparse(call.args[0]) != "buffer"
    ]
    assert len(calls) >= 2
    assert [name for name, call in calls if "map_location" not in {word.arg for word in call.keywords}] == []
