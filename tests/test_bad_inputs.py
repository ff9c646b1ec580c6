"""What can't work is answered by one sentence that names the argument and the remedy."""

import re
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from recipes.cli import main
from tests.bad_inputs import ADDITION, CARTPOLE, CASES, Place

#: Names of cases that CI runs: one of each place that raises. The others run at night.
IN_CI = Path(__file__).with_name("one_per_rule.txt").read_text("utf-8").splitlines()


def quietly(words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rl"])
        main(words)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A policy's checkpoint and a language model's."""
    folder = tmp_path_factory.mktemp("trained")
    small = "--model.model_config={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1}"
    for words in ([*CARTPOLE], [*ADDITION, small]):
        quietly([*words, "--trainer.default_root_dir", str(folder)])
    pattern = "logs/{}-*/version_0/checkpoints/last.ckpt"
    control, language = (str(next(folder.glob(pattern.format(name)))) for name in ("PPO", "SFT"))
    return control, language


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, id=x.name, marks=pytest.mark.long if x.name in IN_CI else pytest.mark.slow) for x in CASES],
)
def test_the_answer_is_one_sentence(case, checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["rl"])
    known = set(sys.modules)
    # Another test may have imported ale_py, which registers the old names of games.
    for name in [
        name for name, spec in gym.registry.items() if str(spec.entry_point).startswith("ale_py") and "/" not in name
    ]:
        monkeypatch.delitem(gym.registry, name)
    for name, content in case.files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    place = Place(tmp_path, *checkpoints)
    try:
        sentence = answer_in_python(case, place) if callable(case.run) else answer_of_command(case, place, capsys)
    finally:
        # The next case may have a module of the same name.
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]
    assert len(sentence.splitlines()) == 1, sentence
    assert len(sentence) < 700, sentence
    for pattern in case.says:
        assert re.search(pattern, sentence), f"{pattern!r} is not in: {sentence}"


def answer_of_command(case, place, capsys):
    words = [word.replace("{control}", place.control).replace("{language}", place.language) for word in case.run]
    with pytest.raises(SystemExit) as ended:
        quietly(words)
    out, err = capsys.readouterr()
    assert ended.value.code not in (0, None)
    assert "Traceback" not in out + err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors, f"no sentence: {err}"
    return err[err.index("error: ") :].strip()


def answer_in_python(case, place):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - a UsageError; the functional core's checks raise its base class
        case.run(place)
    return str(raised.value).strip()


def test_the_cases_of_ci_exist():
    assert set(IN_CI) - {case.name for case in CASES} == set()
