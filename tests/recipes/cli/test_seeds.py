"""``rl fit --seeds``: a run per seed, and their table."""

import gc
import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml

from recipes.cli import main, seeds

pytest.importorskip("rliable")

RUN = ["fit", "--config", "a2c/cartpole.yaml", "--data.total_timesteps=320", "--data.n_test_episodes=2",
       "--data.eval_freq=0"]  # fmt: skip
FOLDER = Path("logs/A2C-CartPole-v1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds=0 must be a whole number of at least 1"),
        (["--seeds=2", "--jobs=none"], "--jobs=none must be a whole number of at least 1"),
        (["--seeds=2", "--ckpt_path", "last"], "leave out --ckpt_path"),
        (["--seeds=2", "--trainer.logger=false"], "trainer.logger is False"),
        (["--seeds=2", "--model.gama=0.9"], "did you mean"),
    ],
)
def test_what_is_wrong_for_all_seeds_is_refused_before_the_first(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds.subprocess, "Popen", None)
    with pytest.raises(SystemExit) as end:
        main([*RUN, *words])
    assert end.value.code == 1
    assert message in capsys.readouterr().err


def test_a_folder_of_the_same_settings_is_not_trained_in_again(capsys: pytest.CaptureFixture[str]) -> None:
    (FOLDER / "gamma=0.9,total_timesteps=320,seed=1").mkdir(parents=True)
    words = [word for word in RUN if "episodes" not in word and "eval" not in word]
    with pytest.raises(SystemExit):
        main([*words, "--model.gamma", "0.9", "--seeds=2"])
    assert "gamma=0.9,total_timesteps=320,seed=1 holds a run already; add --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_side_by_side_end_with_their_table_and_resume(capfd: Any) -> None:
    words = [*RUN, "--seed_everything=5", "--seeds=3", "--jobs=3", "--model.gamma=0.9"]
    main(words)
    out = capfd.readouterr().out
    names = [f"eval_freq=0,gamma=0.9,n_test_episodes=2,total_timesteps=320,seed={seed}" for seed in (5, 6, 7)]
    assert sorted(path.name for path in FOLDER.iterdir()) == names
    for seed, name in zip((5, 6, 7), names, strict=True):
        settings = yaml.safe_load((FOLDER / name / "hparams.yaml").read_text("utf-8"))
        assert (settings["seed"], settings["gamma"]) == (seed, 0.9)
        assert f"seed {seed}: A2C on CartPole-v1  mean return" in out
    row = out.splitlines()[-1]
    assert row.startswith("A2C-CartPole-v1  3 ") and "320" in row
    main([*words, "--resume"])
    assert capfd.readouterr().out.splitlines()[-1].split()[:3] == row.split()[:3]


@pytest.mark.long
def test_a_failed_seed_is_named(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        main([*RUN, "--seeds=2", "--jobs=2", "--model.learning_rate=1e30"])
    assert "seed 0 failed: " in capfd.readouterr().err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_runs_and_tells_how_to_resume(
    signum: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []

    class Run:
        """A run that lasts until a signal reaches it, as a terminal's Ctrl-C does."""

        returncode = 1

        def __init__(self, *_: Any, **__: Any) -> None:
            self.ended = Event()

        def communicate(self) -> tuple[str, str]:
            os.kill(os.getpid(), signum)
            if signum == signal.SIGTERM:
                assert self.ended.wait(30)
            else:
                self.ended.wait(1)  # the main thread has yet to take the signal
            return "", ""

        def send_signal(self, number: int) -> None:
            got.append(number)
            self.ended.set()

    monkeypatch.setattr(seeds.subprocess, "Popen", Run)
    gc.disable()  # a collection's callbacks, where Python swallows exceptions, could take the signal
    try:
        with pytest.raises(SystemExit) as end:
            main([*RUN, "--seeds=3"])
    finally:
        gc.enable()
    assert end.value.code == code
    assert got == ([signum] if signum == signal.SIGTERM else [])
    said = capsys.readouterr().err
    assert "stopped; resume with\n  rl fit" in said
    assert said.strip().endswith("--seeds=3 --resume")
