"""Runs what the pages of start, how-to and algorithms show, in the environment of this Python: ``python -m
tests.documented`` what needs no extra, ``python -m tests.documented sweep`` what needs that one. It needs no pytest.

The blocks of a page run in their order in a folder that has a run each of ``ppo/cartpole.yaml`` and
``a2c/cartpole.yaml``, and a copy of the first; numbers of transitions are shortened. A line above a block says what is
special about it:

    <!-- extra: sweep -->            it needs an extra, or several
    <!-- not run: needs a GPU -->    why it is not run
    <!-- fragment -->                it quotes a part of a program
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("start", "how_to", "algorithms")
#: What a Python block's numbers are replaced by.
SHORTER = {"total_timesteps": 512, "max_steps": 2, "n_train": 64}
BLOCK = re.compile(r"(?:<!-- (fragment|extra|not run)(?:: ([^\n]*))? -->\n)?```(python|bash)\n(.*?)```", re.DOTALL)
#: Programs that are not run, with the reason.
OTHERS = {
    "tensorboard": "a server",
    "pip": "the installation is what this runs in",
    "python": "likewise",
    ".": "likewise",
}
#: What makes a command of `rl` short.
SHORT = {
    "fit": ["--data.total_timesteps=512", "--data.n_test_episodes=1", "--data.n_eval_episodes=1"],
    "validate": ["--data.n_eval_episodes=1"],
    "predict": ["--data.n_test_episodes=1"],
    "record": ["--data.eval_max_steps=50"],
    "sweep": ["--n_trials=2", "--data.total_timesteps=2048", "--data.n_test_episodes=1"],
}
#: For replay, where one transition may be followed by many updates.
FEW_UPDATES = ["--data.learning_starts=100", "--data.total_timesteps=200"]
#: The run that pages speak of has a hundred updates and more.
PREPARED = (
    ["copy", "ppo/cartpole.yaml", "mine.yaml"],
    ["fit", "--config", "ppo/cartpole.yaml", *SHORT["fit"], "--data.total_timesteps=2048"],
    ["fit", "--config", "a2c/cartpole.yaml", *SHORT["fit"]],
)
LONGEST_S = 300


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its text, the extras that it needs, and why it is not run."""

    page: str
    language: str
    text: str
    extras: tuple[str, ...]
    reason: str


def shortened(code: str) -> str:
    """Returns a Python block with fewer transitions, steps and records."""
    for name, value in SHORTER.items():
        code = re.sub(rf"\b{name}=[\d_]+", f"{name}={value}", code)
    return code


def blocks(page: Path) -> Iterator[Block]:
    """Yields the Python and shell blocks of a page."""
    for mark, says, language, text in BLOCK.findall(page.read_text("utf-8")):
        extras = tuple(says.split(", ")) if mark == "extra" else ()
        reason = {"fragment": "a fragment", "not run": says}.get(mark, "")
        yield Block(page.relative_to(ROOT).as_posix(), language, text, extras, reason)


def commands(block: Block) -> Iterator[tuple[list[str], str]]:
    """Yields the commands of a block, as they run here, and why one does not."""
    if block.language == "python":
        Path("block.py").write_text(shortened(block.text))
        # A page's commands name its classes as those of a package of the reader's.
        for name in ("my_package.py", "my_envs.py"):
            with open(name, "a") as file:
                file.write(shortened(block.text))
        yield [sys.executable, "block.py"], ""
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        if loop := re.fullmatch(r"for (\w+) in (\w+).*?; do (.*); done", line):
            line = loop[3].replace(f"${loop[1]}", loop[2])
        for part in line.partition(" #")[0].split(" && "):
            words = shlex.split(part)
            if words and words[0] == "rl":
                own = [*SHORT.get(words[1], []), *(FEW_UPDATES if "ReplayDataModule" in words else [])]
                yield [sys.executable, "-m", "recipes", *words[1:], *own], ""
            elif words:
                yield words, OTHERS.get(words[0], f"{words[0]} is no program of this project")


def run(words: list[str]) -> str:
    """Runs a command; returns the end of what it says where it fails, else an empty text."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(ROOT)]), "MPLBACKEND": "Agg"}
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return f"took more than {LONGEST_S} s"
    return (done.stderr or done.stdout)[-600:] or f"exit status {done.returncode}" if done.returncode else ""


def main(installed: set[str]) -> int:
    """Runs all blocks that need exactly the installed extras; returns how many fail."""
    ran = failed = 0
    pages = [path for section in SECTIONS for path in sorted((ROOT / "docs" / section).glob("*.md"))]
    with tempfile.TemporaryDirectory() as place:
        prepared = Path(place, "prepared")
        prepared.mkdir()
        os.chdir(prepared)
        for words in PREPARED:
            if said := run([sys.executable, "-m", "recipes", *words]):
                raise SystemExit(f"rl {' '.join(words)}: {said}")
        shutil.copy(next(prepared.glob("logs/PPO-*/*/checkpoints/last.ckpt")), "last.ckpt")
        for page in pages:
            # Commands of a page may need what its blocks before them left, so these run too.
            wanted = [block for block in blocks(page) if set(block.extras) <= installed]
            if not wanted or (installed and not any(block.extras for block in wanted)):
                continue
            shutil.copytree(prepared, folder := Path(place, page.stem))
            os.chdir(folder)
            for block in wanted:
                for words, reason in commands(block) if not block.reason else [([block.text[:60]], block.reason)]:
                    shown = f"{block.page}: {' '.join(words).replace(sys.executable, 'python')[:110]!r}"
                    if reason:
                        print(f"not run  {shown}: {reason}", flush=True)
                        continue
                    said = "" if words[2:4] == ["recipes", "copy"] and Path(words[-1]).exists() else run(words)
                    ran, failed = ran + 1, failed + bool(said)
                    print(f"{'FAILED' if said else 'ran'}  {shown}{said and chr(10) + said}", flush=True)
        os.chdir(ROOT)
    print(f"{ran} ran, {failed} of them failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(set(sys.argv[1:]))))
