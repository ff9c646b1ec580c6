"""Every Python block of README and docs runs, with shortened totals, and every printed command can work.

A block below the line ``<!-- fragment -->`` quotes a method and is no program. All others run from top to bottom; a
class that a block defines trains for one epoch. :mod:`tests.documented` says which numbers are replaced, and runs them
where no more than an extra is installed.
"""

import importlib.util
import os
import re
import runpy
import shlex
import shutil
from pathlib import Path

import lightning as L
import pytest
from gymnasium.spaces import Box

import datamodules
from recipes import configs
from recipes.cli import main
from rl_modules.base import ControlModule
from rl_modules.tabular import TabularControl
from tests.documented import SECTIONS, shortened
from tests.documented import blocks as documented_blocks

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
_BLOCK = re.compile(r"(<!-- (?:fragment|not run: [^\n]*) -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks():
    """Page, number and code of every block that is a program.

    The one-page PPO is a file and the ladder's pages are executed notebooks, which are tested as such.
    """
    for page in PAGES:
        if page == "docs/ppo_in_one_page.md" or page.startswith("docs/ladder/"):
            continue
        for i, (fragment, code) in enumerate(_BLOCK.findall((ROOT / page).read_text("utf-8"))):
            if not fragment:
                yield pytest.param(code, id=f"{page}:{i}")


def train(cls):
    """One epoch of a class that a page defines."""
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, max_steps=2, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    if issubclass(cls, ControlModule):
        env = "Maze-v0" if issubclass(cls, TabularControl) else "CartPole-v1"
        env = "Pendulum-v1" if cls.supported_action_spaces == (Box,) else env
        small = {"total_timesteps": 256, "eval_freq": 0}
        if cls.experience.kind == "replay":
            data = datamodules.ReplayDataModule(env, **small)
        else:
            data = datamodules.RolloutDataModule(env, n_envs=2, **small)
        trainer.fit(cls(), datamodule=data)
    elif cls.learns_from == "preferences":
        data = datamodules.PreferenceDataModule("paths", n_train=16, n_eval=0, batch_size=4)
        trainer.fit(cls(model_config=TINY), datamodule=data)
    elif cls.learns_from == "demonstrations":
        data = datamodules.InstructionDataModule("addition", n_train=16, n_eval=0, batch_size=4)
        trainer.fit(cls(model_config=TINY), datamodule=data)
    else:
        data = datamodules.PromptDataModule("addition", n_train=16, n_eval=0, batch_size=8, num_generations=4)
        trainer.fit(cls(model_config=TINY, max_completion_length=4), datamodule=data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with the run and the rebuilt update that pages speak of."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", "--config", "ppo/cartpole.yaml", "--data.total_timesteps=512", "--data.n_test_episodes=1"])
        main(["replay", "logs/PPO-CartPole-v1/version_0", "--step", "2"])
    next(folder.rglob("update-2.pt")).rename(folder / "update-100.pt")
    return folder


@pytest.mark.parametrize("code", list(blocks()))
def test_the_block_runs(code, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if "logs/PPO-CartPole-v1" in code or "update-100" in code:
        shutil.copytree(request.getfixturevalue("run"), tmp_path, dirs_exist_ok=True)
    Path("block.py").write_text(shortened(code))
    names = runpy.run_path("block.py", run_name="block")
    for cls in [value for value in names.values() if getattr(value, "__module__", None) == "block"]:
        if isinstance(cls, type) and issubclass(cls, L.LightningModule):
            train(cls)


@pytest.mark.parametrize("page", PAGES)
def test_every_named_config_and_program_is_there(page):
    text = (ROOT / page).read_text("utf-8")
    for name in re.findall(r"--config ([\w/]+\.yaml)", text):
        assert name in configs.names() or name == "mine.yaml", name
    for module in re.findall(r"python -m ((?:recipes|benchmarks|tests)[\w.]*)", text):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.long
def test_the_readme_s_commands_work_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text("utf-8")
    lines = re.findall(r"^    (rl [^#\n]+)", text, re.MULTILINE)
    assert [line.split()[1] for line in lines[:4]] == ["list", "copy", "fit", "validate"]
    short = ["--data.total_timesteps=512", "--data.n_test_episodes=2", "--data.n_eval_episodes=2"]
    for line in lines:
        path = "logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt"
        words = shlex.split(line.replace("…", path).replace("PATH", path))[1:]
        if words[0] == "record" and importlib.util.find_spec("moviepy") is None:
            continue
        if {"compare", "--seeds"} & set(words) and importlib.util.find_spec("rliable") is None:
            continue
        options = [] if words[0] in ("list", "copy", "compare") else short
        main([*words, *options])
    out = capsys.readouterr().out
    assert "PPO on CartPole-v1  mean return" in out
    assert Path("episodes.csv").is_file()
    assert os.path.exists("mine.yaml")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_bare_environment_runs_every_block_or_knows_why_not(section):
    for page in (ROOT / "docs" / section).glob("*.md"):
        found = list(documented_blocks(page))
        assert len(found) == len(re.findall(r"^```(?:bash|python)$", page.read_text("utf-8"), re.MULTILINE)), page
