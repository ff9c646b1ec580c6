"""Every algorithm's program runs as written, with shortened totals; with words it is the command line."""

import importlib
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recipes import configs
from recipes.program import run_program
from recipes.trainer import Trainer
from tests.marks import quick

CONTROL = {
    "ppo": ("PPO", 512), "a2c": ("A2C", 4000), "trpo": ("TRPO", 1024), "reinforce": ("REINFORCE", 1024),
    "qrdqn": ("QRDQN", 1512), "c51": ("C51", 1512), "pqn": ("PQN", 1024), "recurrent_ppo": ("RecurrentPPO", 1024),
    "dqn": ("DQN", 1512), "monte_carlo": ("MonteCarlo", 2048), "sarsa": ("SARSA", 800),
    "q_learning": ("QLearning", 2048), "ars": ("ARS", 512),
    "ddpg": ("DDPG", 300), "td3": ("TD3", 300), "sac": ("SAC", 300), "tqc": ("TQC", 300), "crossq": ("CrossQ", 300),
}  # fmt: skip
LANGUAGE: dict[str, dict[str, int]] = {
    "sft": {"max_steps": 2, "n_eval": 8},
    "reward_model": {"max_steps": 2, "n_train": 200},
    "grpo": {"start_steps": 2, "max_steps": 2, "n_eval": 8},
    "rlhf_ppo": {"sft_steps": 2, "reward_steps": 2, "ppo_steps": 8, "n_train": 200},
}
PROGRAMS = [*CONTROL, *LANGUAGE]
QUICK = ("ppo", "trpo", "reinforce", "recurrent_ppo", "dqn", "monte_carlo", "q_learning")
FOLDER = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("name", quick(CONTROL, *QUICK))
def test_a_control_program_trains_evaluates_and_leaves_a_checkpoint(name: str, here: Path) -> None:
    algorithm, total = CONTROL[name]
    result = importlib.import_module(f"recipes.{name}").main(total_timesteps=total)
    assert math.isfinite(result)
    [last] = here.glob(f"logs/{algorithm}-*/version_0/checkpoints/last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["algorithm"] == algorithm
    [state] = [checkpoint[key] for key in checkpoint if key.endswith("DataModule")]
    assert state["num_timesteps"] >= total
    assert list(last.parents[1].glob("events.*"))


@pytest.mark.long
@pytest.mark.parametrize("name", quick(LANGUAGE, "grpo"))
def test_a_language_program_runs_by_itself(name: str, here: Path) -> None:
    result = importlib.import_module(f"recipes.{name}").main(**LANGUAGE[name])
    assert 0 <= result <= 1
    # Every stage that another starts from, and every model to keep, is a Hugging Face directory.
    assert all((folder / "model.safetensors").is_file() for folder in here.glob("exported/*"))
    assert list(here.glob("exported/*"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_short_and_its_default_config_has_its_algorithm(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert 20 <= len(text.splitlines()) <= 70
    [line] = [line for line in text.splitlines() if line.startswith("    run_program(main, default_config=")]
    config = line.split('"')[1]
    with configs.find(config).open() as file:
        algorithm = yaml.safe_load(file)["model"]["class_path"]
    assert f"import {algorithm}" in text or f", {algorithm}" in text or f"{algorithm}," in text
    assert f"python -m recipes.{name} fit" in text and f"configs/{config}" in text


@pytest.mark.parametrize("name", quick(CONTROL, *QUICK))
def test_a_control_program_and_its_config_have_the_same_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is the config in Python: only the number of transitions is an argument of it."""
    seen: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def fit(self: Trainer, model: Any, datamodule: Any) -> None:
        seen.update(model=dict(model.hparams), data=dict(datamodule.hparams), experience=model.experience)
        raise Stop

    monkeypatch.setattr(Trainer, "fit", fit)
    program = importlib.import_module(f"recipes.{name}")
    with pytest.raises(Stop):
        program.main()
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    with configs.find(text.split('default_config="')[1].split('"')[0]).open() as file:
        config = yaml.safe_load(file)
    experience = seen["experience"]
    own = {"n_steps": experience.n_steps, "batch_size": experience.batch_size, "n_epochs": experience.n_epochs}
    for part in ("model", "data"):
        for key, value in config[part].get("init_args", {}).items():
            ours = seen[part][key]
            wanted = float(value) if isinstance(value, str) and _is_number(value) else value
            if ours in (None, "auto") and part == "data":
                # The program leaves the rhythm to the algorithm, the config spells it out.
                assert key == "rollouts_per_epoch" or own[key] == wanted, f"{part}.{key}"
            else:
                assert ours == wanted, f"{part}.{key}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("target", "code"), [(None, 0), (2.0, 0), (2.5, 1)])
def test_a_program_that_misses_its_target_says_so_and_fails(
    target: float | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(Trainer, "raises_when_stopped", False)
    with pytest.raises(SystemExit) if code else nullcontext():
        run_program(lambda: 2.0, "ppo/cartpole.yaml", target)
    err = capsys.readouterr().err
    assert err == ("error: the result of the test is 2; the target is at least 2.5\n" if code else "")


def test_words_make_it_the_command_line_with_the_default_config(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["ppo.py", "fit", "--print_config"])
    with pytest.raises(SystemExit) as exit_:
        run_program(lambda: pytest.fail("the program ran"), "ppo/cartpole.yaml")
    assert exit_.value.code in (0, None)
    assert "gae_lambda: 0.8" in capsys.readouterr().out


def test_without_words_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    monkeypatch.setattr(Trainer, "raises_when_stopped", False)
    run_program(lambda: ran.append(1), "ppo/cartpole.yaml")
    assert ran == [1]


@pytest.mark.long
@pytest.mark.parametrize("module", ["recipes", "recipes.ppo"])
def test_modules_start_as_commands(module: str) -> None:
    command = [sys.executable, "-m", module, "list"]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=True)
    assert "ppo/cartpole.yaml" in done.stdout


@pytest.mark.slow
def test_the_whole_ppo_program_solves_cartpole(here: Path) -> None:
    main = importlib.import_module("recipes.ppo").main
    assert main() == pytest.approx(500, abs=25)
