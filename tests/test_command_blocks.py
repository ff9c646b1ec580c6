"""Every command and YAML block of README and docs fits the command line as it is; the cheap ones are executed.

Commands of ``rl`` are parsed by its own parser, with ``--print_config``. Words that stand for something of the reader's
(``…``, ``PATH``, ``my_project``) are replaced or left out. A YAML block with a model and a datamodule is parsed as a
config; of any other, the names are looked up.
"""

import importlib
import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from recipes import configs, r1, rlhf
from recipes.cli import main
from recipes.cli.classes import PACKAGES
from recipes.cli.information import ALONE_COMMANDS, COMMANDS
from recipes.cli.options import GROUPS, arguments_of, of_group

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
#: First words of a command that is checked.
PROGRAMS = (
    "rl",
    "python",
    "torchrun",
    "pip",
    "tensorboard",
    "for",
    "export",
    "cd",
    "git",
    "mkdocs",
    "pytest",
    "jupyter",
)
#: Values of the reader's, by what stands for them.
STANDS_FOR = {"…": "1", "START": "model", "PATH": "last.ckpt", "FOLDER": "folder", "NAME": "ppo/cartpole.yaml",
              "RUN": "run", "N": "1", "S": "1", "step-<step>": "step-5"}  # fmt: skip
#: What makes a run short.
SHORT = ("--data.total_timesteps=512", "--data.n_test_episodes=1", "--data.n_eval_episodes=1")
#: Pages whose commands run in order.
EXECUTED = ("docs/start/five_minutes.md", "docs/start/first_experiment.md", "docs/how_to/logger.md")


def fenced(page, language):
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def lines_of(page):
    """The lines of a page that are commands: of bash blocks, indented ones, and code in a sentence."""
    text = (ROOT / page).read_text("utf-8")
    found = [line for block in fenced(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found += re.findall(r"^    ((?:rl|python -m|pip|torchrun) .*)$", plain, re.MULTILINE)
    # In a sentence, a command without options is its name.
    found += [span for span in re.findall(r"`((?:rl|python -m recipes[\w.]*) [^`\n]+)`", plain) if " --" in span]
    return found


def commands(page):
    """Each simple command of a page, as words."""
    for line in lines_of(page):
        line = re.sub(r"(^|\s)#.*$", "", line.removeprefix("$ ")).strip()
        if loop := re.fullmatch(r"for (\w+) in (\w+).*?; do (.*); done", line):
            line = loop[3].replace(f"${loop[1]}", loop[2])
        for part in line.split(" && "):
            words = shlex.split(part) if "'" not in part or part.count("'") % 2 == 0 else part.split()
            if words and words[0] in PROGRAMS:
                known = [STANDS_FOR.get(word, word) for word in words]
                yield ["PPO" if before == "--model" and "/" in word else word
                       for before, word in zip(["", *known], known, strict=False)]  # fmt: skip


def cases(kinds):
    found = {}
    for page in PAGES:
        for words in commands(page):
            if words[0] in kinds:
                found.setdefault(" ".join(words), pytest.param(words, id=f"{page}: {' '.join(words)[:70]}"))
    return list(found.values())


def parse(command, words, default=None, capsys=None):
    with pytest.raises(SystemExit) as ended:
        main([command, *words, "--print_config"], default_config=default)
    assert ended.value.code in (0, None), capsys.readouterr().err


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the config that the pages copy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rl"])
    configs.copy("ppo/cartpole.yaml", "mine.yaml")
    return tmp_path


def is_the_readers(words):
    return any(re.search(r"\b(my_\w+|mine)[.:/]\w+", word) and word != "mine.yaml" for word in words)


def check_rl(words, capsys, default=None):
    command, rest = words[0], words[1:]
    assert command in (*COMMANDS, *ALONE_COMMANDS, "--version", "--help"), command
    if "--help" in rest or "-h" in rest or command in ("list", "doctor", "completion", "--version", "--help"):
        main([command, *rest])
        assert capsys.readouterr().out
    elif command in COMMANDS and rest:
        if "--config" in rest and rest[rest.index("--config") + 1] == "1":
            rest[rest.index("--config") + 1] = "ppo/cartpole.yaml"
        if is_the_readers(rest) or not ({"--config", "--model"} & {w.partition("=")[0] for w in rest} or default):
            return
        parse(command, rest, default, capsys)
    elif command in ("export", "replay", "verify"):
        # They have no parse alone: the words are understood where the answer is about the file that is not there.
        with pytest.raises(SystemExit) as ended:
            main([command, *rest])
        assert ended.value.code == 1
        assert re.search(r"not a file|no config\.yaml|no checkpoint", capsys.readouterr().err)
    elif command == "copy":
        assert configs.find(rest[0]).is_file()


@pytest.mark.parametrize("words", cases(("rl",)))
def test_an_rl_command_is_understood(words, here, capsys):
    if len(words) > 1:
        check_rl(words[1:], capsys)


@pytest.mark.parametrize("words", cases(("python", "torchrun")))
def test_a_python_command_is_understood(words, here, capsys):
    if "-m" not in words:
        return
    module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    if module in ("venv", "pip", "pytest", "http.server"):
        return
    assert importlib.util.find_spec(module) is not None
    if module in ("recipes", "recipes.cli"):
        check_rl(rest, capsys)
    elif module in ("recipes.rlhf", "recipes.r1"):
        pipeline = {"recipes.rlhf": rlhf, "recipes.r1": r1}[module]
        if "r1/zero.yaml" not in rest:  # wants a GPU
            pipeline.check(*pipeline.parse(rest), {"seed_everything": "0"})
    elif rest and rest[0] in COMMANDS:
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")
        check_rl(rest, capsys, re.search(r'default_config="([^"]+)"', text)[1])


@pytest.mark.parametrize("words", cases(("pip",)))
def test_what_pip_installs_is_there(words):
    # Python 3.10 has no parser of TOML.
    _, extras_and_rest = (ROOT / "pyproject.toml").read_text("utf-8").split("[project.optional-dependencies]\n")
    extras = re.findall(r"^([\w-]+) = \[", extras_and_rest.partition("\n[")[0], re.MULTILINE)
    assert "test" in extras
    for word in words:
        for name in (
            match[1].split(",") if (match := re.search(r"(?:\.|lightning-rl-recipes)\[([\w,-]+)\]", word)) else ()
        ):
            assert name in extras, name
    for option, value in zip(words, words[1:], strict=False):
        if option in ("-c", "-r"):
            assert (ROOT / value).is_file(), value


@pytest.mark.long
@pytest.mark.parametrize("page", EXECUTED)
def test_the_commands_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rl"])
    runs = [words[1:] for words in commands(page) if words[0] == "rl" and not is_the_readers(words)]
    runs = [words for words in runs if words[0] in (*COMMANDS, "list", "copy") and len(words) > 1]
    assert len(runs) >= 1
    for words in runs:
        if words[0] == "copy" and Path(words[2]).exists():
            continue
        main([*words, *(SHORT if words[0] in COMMANDS else ())])
    assert shutil.which("tensorboard", path=Path(sys.executable).parent)


def names_in(group, node, place):
    """Fails where a section of a config has a class or an argument that does not exist."""
    if not isinstance(node, dict) or str(node.get("class_path", "")).partition(".")[0].startswith("my_"):
        return
    if "class_path" in node and group in PACKAGES:
        known = arguments_of(getattr(PACKAGES[group], node["class_path"]))
        node = node.get("init_args") or {}
    else:
        known = of_group(group)
    assert set(node) <= known, f"{place}: {set(node) - known}"


@pytest.mark.parametrize(
    ("text", "page"), [pytest.param(text, page, id=f"{page}:{i}") for page in PAGES
                       for i, text in enumerate(fenced(page, "yaml"))],
)  # fmt: skip
def test_a_yaml_block_has_names_that_exist(text, page, here, capsys):
    settings = yaml.safe_load(text)
    if "search" in settings:
        assert settings["config"] in configs.names()
        for name in settings["search"]:
            group, _, rest = name.partition(".")
            assert rest in of_group(group), name
        return
    assert set(settings) <= {*GROUPS, "threads", "seed_everything"}, set(settings)
    for group, node in settings.items():
        names_in(group, node, page)
    whole = all(isinstance(settings.get(group), dict) and "class_path" in settings[group] for group in PACKAGES)
    if whole and not is_the_readers([text]):
        Path("block.yaml").write_text(text)
        parse("fit", ["--config", "block.yaml"], capsys=capsys)
