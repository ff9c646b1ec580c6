from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from datamodules import RolloutDataModule
from recipes.callbacks import EpisodeRecorder, record_episodes
from recipes.cli import main
from rl_modules import A2C
from rl_modules.common.errors import UsageError
from tests.datamodules.test_rollout import Follows
from tests.envs import InfiniteHorizon
from tests.masked_envs import make_guarded
from tests.training import fit, rollouts


class OneAction(Follows):
    """Plays action 0 for one observation at a time."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return super().predict(observation[None])[0][0], state


class Unfilmed(gym.Wrapper):
    """Writes an empty film."""

    def __init__(self, env, folder, trigger, name_prefix, disable_logger):
        super().__init__(env)
        self.file = Path(folder) / f"{name_prefix}-episode-0.mp4"

    def stop_recording(self):
        self.file.touch()


@pytest.mark.long
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


def filmed(env, render_mode):
    env.unwrapped.render_mode = render_mode
    return env


def make_filmed(source, render_mode=None):
    return filmed(make_guarded(source=source), render_mode)


@pytest.mark.parametrize("source", ["info", "method", "observation"])
def test_an_episode_is_played_with_the_masks_of_training(tmp_path, monkeypatch, source):
    """The environment raises for a forbidden action, which a policy without masks takes sooner or later."""
    monkeypatch.setattr("recipes.callbacks.recorder.RecordVideo", Unfilmed)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    (tmp_path / "videos").mkdir()
    data = rollouts(make_filmed, n_envs=2, total_timesteps=32, env_kwargs={"source": source}, eval_deterministic=False)
    model = A2C(net_arch=[8])
    fit(model, data)
    assert len(record_episodes(model, data, tmp_path / "videos", n_episodes=5)) == 5


FOUR = {"type": "Discrete", "n": 4, "start": 0}


def make_endless(render_mode=None):
    return InfiniteHorizon()


def make_endless_filmed(render_mode=None):
    return filmed(InfiniteHorizon(), render_mode)


def test_an_episode_without_an_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.callbacks.recorder.RecordVideo", Unfilmed)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    data = RolloutDataModule(make_endless_filmed, eval_max_steps=20)
    (file,) = record_episodes(A2C(observation_space=FOUR, action_space=FOUR), data, tmp_path)
    assert file.name == "episode-0-return-20.0.mp4"


@pytest.mark.long
def test_training_records_every_so_many_transitions(tmp_path, monkeypatch):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    pytest.importorskip("pygame", reason="pygame is not installed")
    monkeypatch.chdir(tmp_path)
    small = ["--data.total_timesteps=1024", "--data.n_epochs=1", "--data.n_test_episodes=1", "--data.eval_freq=0"]
    main(["fit", "--config", "ppo/cartpole.yaml", *small, "--record_every", "500"])
    names = sorted(path.name for path in Path().glob("logs/*/version_0/videos/*.mp4"))
    assert [name.split("-0-return")[0] for name in names] == ["step-1024", "step-512"]


@pytest.mark.long
def test_a_second_fit_is_recorded_as_the_first_and_a_resumed_one_goes_on(tmp_path, monkeypatch):
    recorded = []
    monkeypatch.setattr(
        "recipes.callbacks.recorder.record_episodes", lambda *args, prefix: recorded.append(int(prefix[5:])) or []
    )
    recorder = EpisodeRecorder(every=64)

    def train(total_timesteps, ckpt_path=None):
        recorded.clear()
        data = rollouts("CartPole-v1", n_envs=2, n_steps=16, total_timesteps=total_timesteps)
        trainer = fit(A2C(), data, ckpt_path, callbacks=[recorder], default_root_dir=tmp_path)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return list(recorded)

    assert train(128) == [64, 128]
    assert train(128) == [64, 128]
    assert train(256, tmp_path / "end.ckpt") == [192, 256]
    recorder.every = 32
    assert train(352, tmp_path / "end.ckpt") == [288, 320, 352]


def test_missing_moviepy_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'moviepy>=2.1' 'gymnasium\[classic-control\]'"):
        record_episodes(OneAction(), RolloutDataModule("CartPole-v1"), tmp_path)


class Drawn(gym.Wrapper):
    """CartPole that renders what a test says, or as every environment does that defines no ``render``."""

    def __init__(self, frame=None, render_mode=None):
        super().__init__(gym.make("CartPole-v1"))
        self.frame, self.mode = frame, render_mode

    @property
    def render_mode(self):
        return self.mode

    def render(self):
        return self.frame if isinstance(self.frame, np.ndarray | str) else gym.Env.render(self)


FRAME = np.zeros((16, 16, 3), np.uint8)


def make_without_the_argument():
    return Drawn(FRAME)


def make_with_its_own_mode():
    return Drawn(FRAME, "rgb_array")


@pytest.mark.parametrize("env_id", [make_without_the_argument, make_endless])
def test_a_run_that_can_not_be_recorded_ends_before_it_is_trained(monkeypatch, env_id):
    monkeypatch.setattr("recipes.callbacks.recorder.record_episodes", None)
    data = rollouts(env_id, n_envs=2, total_timesteps=32)
    with pytest.raises(UsageError, match="with render_mode='rgb_array'; give it this"):
        fit(A2C(net_arch=[8]), data, callbacks=[EpisodeRecorder(every=10**6)])
    assert data.num_timesteps == 0


def test_a_callable_may_choose_its_mode_itself(tmp_path):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    (file,) = record_episodes(OneAction(), RolloutDataModule(make_with_its_own_mode), tmp_path)
    assert file.stat().st_size > 0


def make_of_floats():
    return Drawn(np.full((16, 16, 3), 0.5), "rgb_array")


def make_of_text():
    return Drawn("+--+", "ansi")


def test_frames_of_floats_are_as_bright_as_they_are(tmp_path):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    from moviepy import VideoFileClip

    (file,) = record_episodes(OneAction(), RolloutDataModule(make_of_floats), tmp_path)
    with VideoFileClip(str(file)) as clip:
        assert clip.get_frame(0).mean() == pytest.approx(127.5, abs=4)  # compressed


@pytest.mark.parametrize("env_id", [make_without_the_argument, make_of_text, make_endless])
def test_an_environment_without_pictures_is_refused(env_id, tmp_path):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    policy = A2C(observation_space=FOUR, action_space=FOUR) if env_id is make_endless else OneAction()
    with pytest.raises(UsageError, match="with render_mode='rgb_array'; give it this argument"):
        record_episodes(policy, RolloutDataModule(env_id), tmp_path)


def test_no_episode_is_no_recording(tmp_path):
    with pytest.raises(UsageError, match="episodes=0 must be at least 1"):
        record_episodes(OneAction(), RolloutDataModule("CartPole-v1"), tmp_path, n_episodes=0)
