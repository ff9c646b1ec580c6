from pathlib import Path

import pytest

from datamodules import RolloutDataModule
from recipes.callbacks import record_episodes
from recipes.cli import main
from rl_modules.common.errors import UsageError
from tests.datamodules.test_rollout import Follows


class OneAction(Follows):
    """Plays action 0 for one observation at a time."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return super().predict(observation[None])[0][0], state


def test_each_file_holds_one_whole_episode_and_its_return(tmp_path):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    pytest.importorskip("pygame", reason="pygame is not installed")
    from moviepy import VideoFileClip

    data = RolloutDataModule("CartPole-v1")
    files = record_episodes(OneAction(), data, tmp_path / "videos", n_episodes=2)
    assert [file.name.rsplit("-return-")[0] for file in files] == ["episode-0", "episode-1"]
    for file in files:
        # Pushing left for ever lets the pole fall within 8 to 10 steps; each step pays 1 and shows a frame.
        total = float(file.stem.rsplit("-")[-1])
        assert 8 <= total <= 10
        with VideoFileClip(str(file)) as clip:
            assert clip.n_frames == pytest.approx(total + 1, abs=1)
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == sorted(file.name for file in files)


def test_training_records_every_so_many_transitions(tmp_path, monkeypatch):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    pytest.importorskip("pygame", reason="pygame is not installed")
    monkeypatch.chdir(tmp_path)
    small = ["--data.total_timesteps=1024", "--data.n_epochs=1", "--data.n_test_episodes=1", "--data.eval_freq=0"]
    main(["fit", "--config", "ppo/cartpole.yaml", *small, "--record_every", "500"])
    names = sorted(path.name for path in Path().glob("logs/*/version_0/videos/*.mp4"))
    assert [name.split("-0-return")[0] for name in names] == ["step-1024", "step-512"]


def test_missing_moviepy_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'moviepy>=2.1' 'gymnasium\[classic-control\]'"):
        record_episodes(OneAction(), RolloutDataModule("CartPole-v1"), tmp_path)
