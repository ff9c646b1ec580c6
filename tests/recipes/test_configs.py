"""Every config parses through the command line and trains for two epochs."""

import re

import pytest

from recipes import configs
from recipes.cli import main

NAMES = configs.names()


@pytest.mark.parametrize("name", NAMES)
def test_header_says_what_how_and_what_to_expect(name):
    lines = (configs.CONFIGS / name).read_text(encoding="utf-8").splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    assert len(header[0]) > 20
    for word in ("Run", "Expect", "Cost", "Source"):
        assert any(re.match(rf"# {word} +\S", line) for line in header), word
    assert f"--config {name}" in "\n".join(header)


@pytest.mark.parametrize("name", NAMES)
def test_config_prints_and_resolves(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", name, "--print_config"])
    assert exit_.value.code in (0, None)
    assert "class_path" in capsys.readouterr().out
