"""What ``rl`` prints before, during and after a run, and the commands that start none."""

import importlib.util
import inspect
import io
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import recipes.callbacks.progress as lines
import rl_modules
from recipes import configs
from recipes.callbacks.progress import TransitionProgressBar
from recipes.cli import main
from recipes.terminal import one_sentence, quiet
from rl_modules.common import extras
from rl_modules.language.sampling import check
from tests.conformance.architectures import network

ROOT = Path(__file__).parents[3]


@pytest.fixture
def rl(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code = 0
        try:
            main(list(args))
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


#: Packages that Lightning, torchmetrics and torch would import, or that other algorithms use.
UNUSED = (
    "torchmetrics.functional", "torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.fsdp", "sympy",
    "scipy", "matplotlib", "pandas", "tensorflow", "IPython", "transformers", "peft", "datasets",
    "rl_modules.language.sft", "datamodules.language", "datamodules.envs.maze", "moviepy", "pygame", "ale_py",
    "stable_baselines3", "wandb",
)  # fmt: skip


def test_a_message_goes_to_the_standard_error_of_the_moment_also_after_one_was_closed(monkeypatch):
    quiet()
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logging.getLogger("datamodules").info("one")
    assert first.getvalue() == "one\n"
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    logging.getLogger("datamodules").info("two")
    assert second.getvalue() == "two\n"


@pytest.mark.long
def test_what_is_imported_before_the_first_line_and_in_a_whole_run(tmp_path):
    script = f"""
import sys
from recipes.cli import main

class Terminal:
    def __init__(self):
        self.first = None
    def write(self, text):
        if self.first is None:
            self.first = text, {{"torch", "lightning", "gymnasium", "numpy", "jsonargparse"}} & set(sys.modules)
        return len(text)
    def flush(self):
        pass
    def isatty(self):
        return False

terminal, sys.stdout = sys.stdout, Terminal()
main(["fit", "--config", "ppo/cartpole.yaml", "--data.total_timesteps=256", "--data.n_eval_episodes=1"])
(line, heavy), sys.stdout = sys.stdout.first, terminal
print([line, heavy, "torch" in sys.modules, [name for name in {UNUSED} if name in sys.modules]])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = "rl fit --config ppo/cartpole.yaml --data.total_timesteps=256 --data.n_eval_episodes=1: starting"
    assert done.stdout == f"{[line, set(), True, []]}\n"


class Counted(TransitionProgressBar):
    def __init__(self):
        super().__init__()
        self.done = 1000

    def counts(self, trainer):
        return self.done, 5000

    def notes(self, trainer):
        return "50/s", "mean return 9.0"


def test_without_a_terminal_a_line_says_how_far_the_run_is(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    bar = Counted()
    progress = lines.ProgressLines(bar, every_s=30)
    progress.start(None)
    progress.tick(None, 120.0)
    assert capsys.readouterr().err == ""
    bar.done = 2000
    progress.tick(None, 140.0)
    # A thousand in 40 s, three thousand to go.
    assert capsys.readouterr().err == "0:40  2,000 of 5,000 transitions (40%), 50/s, 2:00 left  mean return 9.0\n"
    progress.tick(None, 150.0)
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_a_run_in_a_log_file_prints_lines(rl, monkeypatch):
    monkeypatch.setattr(lines.ProgressLines.__init__, "__defaults__", (0.0,))
    code, _, err = rl("fit", "--config", "q_learning/maze.yaml", "--data.total_timesteps", "300")
    assert code == 0, err
    assert re.search(r"of 300 transitions \(\d+%\), [\d,]+/s", err), err


@pytest.mark.long
def test_a_tabular_summary_has_the_exact_return_and_the_pictures(rl):
    code, out, err = rl("fit", "--config", "q_learning/maze.yaml")
    assert code == 0, err
    row = next(line for line in out.splitlines() if line.startswith("exact expected return"))
    achieved, best = (float(number) for number in re.findall(r"-?[\d.]+(?= of| is)", row))
    assert achieved == pytest.approx(best)
    pictures = next(line for line in out.splitlines() if line.startswith("value maps")).split(None, 2)[2].split(", ")
    assert all(Path(path).is_file() for path in pictures)


@pytest.mark.parametrize("config", ["ppo/cartpole.yaml", "dqn/cartpole.yaml", "q_learning/maze.yaml"])
def test_help_shows_the_chosen_classes_on_one_screen(rl, config):
    code, out, _ = rl("fit", "--config", config, "--help")
    assert code == 0
    rows = out.splitlines()
    assert len(rows) <= 60
    assert max(map(len, rows)) <= 120
    assert "--model.gamma" in rows[4] or any("--model.gamma" in row for row in rows[:12])
    for name in ("--data.env_id", "--data.total_timesteps", "--trainer.accelerator"):
        assert name in out
    assert "<class" not in out


def test_help_names_every_argument_and_describes_those_of_a_group(rl):
    pytest.importorskip("transformers", reason="the class is one of language")
    words = ["fit", "--model", "GRPO", "--data", "PromptDataModule", "--help"]
    code, out, _ = rl(*words)
    assert code == 0 and len(out.splitlines()) <= 90 and "…\n" not in out
    for name in inspect.signature(rl_modules.GRPO.__init__).parameters.keys() - {"self", "description"}:
        assert re.search(rf"\b{name}\b", out), name
    for name in ("learning_rate", "max_completion_length", "temperature", "lora"):
        assert re.search(rf"^  --model.{name}\b.* \w+", out, re.MULTILINE)
    for topic in ("sampling", "nucleus"):
        code, out, _ = rl(*words, topic)
        assert code == 0 and "sample from the nucleus of this probability" in out
    code, _, err = rl(*words, "smapling")
    assert code == 1 and "did you mean sampling" in err


def test_help_all_lists_every_option(rl):
    code, out, _ = rl("fit", "--config", "ppo/cartpole.yaml", "--help", "all")
    assert code == 0
    assert "<class" not in out
    assert "--trainer.limit_val_batches" in out


def test_list_takes_a_word(rl):
    code, out, _ = rl("list", "MAZE")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        name for name in configs.names() if "maze" in f"{name} {configs.describe(name)}".lower()
    ]


def test_version_is_that_of_the_project(rl):
    current = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]
    assert rl("--version")[:2] == (0, f"lightning-rl-recipes {current}\n")


def test_doctor_names_what_is_missing_and_how_to_install_it(rl, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("mujoco", "pygame") else find(name))
    code, out, _ = rl("doctor")
    assert code == 0
    assert re.search(r"^torch +\d", out, re.MULTILINE)
    assert re.search(r"^device +(CPU|Apple|NVIDIA|\w)", out, re.MULTILINE)
    assert "no (mujoco missing): pip install 'gymnasium[mujoco]'" in out
    assert "no (pygame missing): pip install 'moviepy>=2.1' 'gymnasium[classic-control]'" in out


@pytest.mark.parametrize(
    ("config", "way"), [("Qwen2", "share the keys and values of their prompt"), ("Mamba-2", "its generate()")]
)
def test_doctor_says_how_a_model_is_decoded(rl, tmp_path, config, way):
    network(config).save_pretrained(tmp_path)
    check.warn_once.cache_clear()
    code, out, _ = rl("doctor", "--model", str(tmp_path))
    assert code == 0 and way in out and "CUDA graphs need a CUDA device" in out
    code, _, err = rl("doctor", "--model", str(tmp_path / "none"))
    assert code == 1 and "--model=" in err and "can't be loaded" in err


def test_extras_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra, packages in extras.PACKAGES.items():
        given = re.search(rf"^{extra} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)[1]
        assert tuple(re.findall(r'"([^"]+)"', given)) == packages


def test_completion_is_a_script_that_bash_takes(rl, tmp_path):
    code, out, _ = rl("completion", "bash")
    assert code == 0
    (tmp_path / "rl.sh").write_text(f'rl() {{ echo "ppo/cartpole.yaml  x"; }}\n{out}\n'
                                    'COMP_WORDS=(rl fit --config ppo/c); COMP_CWORD=3; _rl; echo "${COMPREPLY[@]}"\n'
                                    'COMP_WORDS=(rl do); COMP_CWORD=1; _rl; echo "${COMPREPLY[@]}"\n')  # fmt: skip
    done = subprocess.run(["bash", "rl.sh"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["ppo/cartpole.yaml", "doctor"]
    code, _, err = rl("completion", "fish")
    assert code == 1 and "'fish'" in err and "bash" in err and "zsh" in err


def test_a_standard_error_that_is_replaced_gets_the_messages(monkeypatch):
    """As in a notebook, and where an earlier one is closed."""
    quiet()
    for closes in (True, False):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        logging.getLogger("datamodules.buffers").info("said")
        assert stream.getvalue() == "said\n"
        if closes:
            stream.close()


def test_an_encoding_without_a_character_ends_no_command(rl, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := io.TextIOWrapper(written := io.BytesIO(), "ascii"))
    code, _, err = rl("fit", "--config", "ppo/cartpole.yaml", "--data.n_envs", "0", "--threads", "1")
    terminal.flush()
    assert written.getvalue() == b"rl fit --config ppo/cartpole.yaml --data.n_envs 0 ?: starting\n"
    assert code == 1 and "n_envs=0" in err


def test_a_missing_package_of_an_extra_is_a_sentence_with_the_command_that_installs_it(rl, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    code, _, err = rl("fit", "--model", "SFT", "--data", "InstructionDataModule", "--data.path", "rows.csv",
                      "--trainer.max_steps", "1")  # fmt: skip
    assert code == 1 and "error: import of datasets halted" in err and "pip install" in err and "'datasets>=4'" in err


def test_a_package_that_gymnasium_misses_is_a_sentence(rl, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert rl("fit", "--config", "ppo/cartpole.yaml", "--data.total_timesteps=256", "--data.n_test_episodes=1")[0] == 0
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    code, _, err = rl("record", "--config", "ppo/cartpole.yaml", "--ckpt_path", "last", "--episodes", "1")
    assert code == 1 and err.startswith("error: pygame is not installed, run `pip install")


@pytest.mark.slow
def test_the_first_line_and_the_first_update_come_soon(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    words = ["fit", "--config", "ppo/cartpole.yaml", "--data.total_timesteps=256", "--data.n_test_episodes=1"]
    with subprocess.Popen([sys.executable, "-m", "recipes", *words], cwd=tmp_path, env=environment, text=True,
                          stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout.readline().endswith(": starting\n")
        first = time.monotonic() - began
        process.communicate()
        assert process.returncode == 0
    assert first < 0.5 * (time.monotonic() - began)


@pytest.mark.parametrize("raises", [lambda: np.empty((2**40, 2**10), np.float32), lambda: torch.empty(2**50)])
def test_a_lack_of_memory_is_one_sentence(raises, capsys):
    with pytest.raises(SystemExit) as end, one_sentence():
        raises()
    assert end.value.code == 1
    assert re.match("error: the memory does not suffice: .*; lower data.n_envs, data.n_steps", capsys.readouterr().err)


@pytest.mark.long
def test_the_end_of_another_rank_is_one_sentence(tmp_path, capsys):
    """What gloo itself raises where the process that it waits for is gone."""
    (tmp_path / "rank.py").write_text(RANK)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "rank.py", str(i)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 7]
    assert "error: another rank of this run has ended, so this one ends too" in said[0]
    assert "Traceback" not in said[0]


RANK = """
import os, sys
import torch
from recipes.terminal import one_sentence

rank = int(sys.argv[1])
store = torch.distributed.FileStore("store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.distributed.barrier()
if rank == 1:
    os._exit(7)
with one_sentence():
    torch.distributed.all_reduce(torch.ones(1))
"""
