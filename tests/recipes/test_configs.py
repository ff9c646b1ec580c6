"""Every config parses through the command line and trains for two epochs."""

import re

import pytest
import yaml

from recipes import configs
from recipes.cli import main

NAMES = configs.names()


@pytest.mark.parametrize("name", NAMES)
def test_header_says_what_how_where_and_what_to_expect(name):
    """What it is, the command, the result or that there is none, the cost, the source, and why it takes no GPU."""
    lines = (configs.CONFIGS / name).read_text(encoding="utf-8").splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    assert len(header[0]) > 20
    for word in ("Run", "Expect", "Cost", "Source"):
        assert any(re.match(rf"# {word} +\S", line) for line in header), word
    assert f"--config {name}" in "\n".join(header)
    settings = yaml.safe_load((configs.CONFIGS / name).read_text("utf-8"))
    accelerator = settings.get("trainer", {}).get("accelerator", "auto")
    reasons = [line for line in configs.header(name) if line.startswith("# Device")]
    assert len(reasons) == (accelerator != "auto")
    assert all(re.match(rf"# Device +{accelerator}: .{{20,}}", reason) for reason in reasons)
    expect = next(line for line in configs.header(name) if line.startswith("# Expect"))
    is_marked = configs.describe(name).startswith("[experimental] ")
    assert is_marked == bool(re.search("not (run|measured)", expect))
    assert is_marked or re.search(r"[0-9]", expect)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_config_prints_and_resolves(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", name, "--print_config"])
    assert exit_.value.code in (0, None)
    assert "class_path" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_config_trains_two_epochs(name, tmp_path, monkeypatch, capsys):
    """Two epochs of control, two optimizer steps of a language model."""
    monkeypatch.chdir(tmp_path)
    small = [
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=3",
        "--data.eval_freq=0",
        "--data.n_test_episodes=1",
    ]
    text = (configs.CONFIGS / name).read_text(encoding="utf-8")
    language = re.search(r"class_path: (Instruction|Preference|Prompt)DataModule", text) is not None
    if language:
        small = ["--trainer.max_steps=2", "--data.n_train=64", "--data.batch_size=16", "--data.n_eval=4",
                 "--trainer.accelerator=cpu"]  # fmt: skip
        small += ["--data.num_generations=8"] * ("num_generations: 64" in text)
    if name.partition("/")[0] in ("dqn", "qrdqn", "c51", "ddpg", "td3", "sac", "tqc", "crossq"):
        small += ["--data.learning_starts=100", "--data.buffer_size=1000"]
    try:
        main(["fit", "--config", name, *small])
    except SystemExit as exit_:
        error = capsys.readouterr().err
        if "needs a package that is not installed" in error:
            pytest.skip(error.strip())
        earlier = ("can't be loaded", "there is no model directory", "first run the stage that writes it")
        if language and any(words in error for words in earlier):
            pytest.skip(f"begins with a model of the hub, or with what an earlier stage writes: {error.strip()}")
        pytest.fail(f"exit code {exit_.code}: {error}")
    assert re.search(r"optimizer steps +2 in" if language else "transitions", capsys.readouterr().out)
