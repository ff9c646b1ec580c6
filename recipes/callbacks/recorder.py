"""Videos of whole episodes, recorded by Gymnasium's ``RecordVideo``."""

import contextlib
import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
from gymnasium.wrappers import RecordVideo
from lightning.pytorch.callbacks import Callback

from datamodules.base import ControlDataModule
from datamodules.envs.episodes import episode_seed
from datamodules.envs.masks import with_source
from datamodules.envs.vector import make_env
from datamodules.evaluation import Predicts, sampling_from
from recipes.callbacks.curves import log_folder
from rl_modules.common.errors import UsageError, at_least
from rl_modules.common.extras import install
from rl_modules.common.seeding import stream_seed
from rl_modules.core.state import Stateful, forget_state, persistent, transient


def record_episodes(
    policy: Predicts, data: ControlDataModule, folder: Path, n_episodes: int = 1, prefix: str = "episode"
) -> list[Path]:
    """Plays episodes and writes each to an mp4 file with its return in the file name.

    An episode that does not end is cut after ``data.eval_max_steps``.

    Args:
        policy: acts deterministically where ``data.eval_deterministic`` is set.
        data: names the environment, its wrappers and the seed.
        folder: of the files; created if it does not exist.
        n_episodes: number of episodes, ≥ 1.
        prefix: beginning of the file names.

    Returns:
        The files, in order.

    Raises:
        UsageError: moviepy is not installed, the environment renders no frames, or ``n_episodes`` is below 1.
    """
    at_least("episodes", n_episodes)
    if importlib.util.find_spec("moviepy") is None:
        raise UsageError(f"recording needs moviepy, which is not installed: {install('video')}")
    env = environment_to_film(data)
    if (masks := data.environments.mask_source_of(env)) is not None:
        env = with_source(env, masks)
    stream = stream_seed(data.seed, 0, "record")
    files = []
    with contextlib.closing(env), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overwriting existing videos.*")
        for episode in range(n_episodes):
            # One wrapper per episode: the file is closed, and can be renamed, as soon as its episode has ended.
            name = f"{prefix}-{episode}"
            recorder = RecordVideo(env, str(folder), lambda _: True, name_prefix=name, disable_logger=True)
            with sampling_from(policy, stream_seed(data.seed, 0, "record actions", episode)):
                seed = episode_seed(stream, episode)
                total = _play(policy, recorder, seed, data.eval_deterministic, data.eval_max_steps)
            recorder.stop_recording()
            written = folder / f"{name}-episode-0.mp4"
            files.append(written.rename(folder / f"{name}-return-{total:.1f}.mp4"))
    return files


class Frames(gym.Wrapper):
    """Frames of bytes, as a film has them; those of floats in [0, 1] would be black."""

    def __init__(self, env: gym.Env, refusal: UsageError) -> None:
        super().__init__(env)
        #: Raised where the environment renders none.
        self.refusal = refusal

    def render(self) -> Any:
        frame: Any = self.env.render()
        if not isinstance(frame, np.ndarray | list):
            raise self.refusal
        if isinstance(frame, np.ndarray) and frame.dtype.kind == "f":
            scale = 255.0 if frame.max(initial=0.0) <= 1 else 1.0
            frame = (frame * scale).round().clip(0, 255).astype(np.uint8)
        return frame


def environment_to_film(data: ControlDataModule) -> Any:
    """Makes an environment of evaluation that renders frames."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a display
    run = data.environments
    try:
        env = make_env(run.env_id, {**run.eval_env_kwargs, "render_mode": "rgb_array"}, run.eval_wrappers)
    except UsageError:  # a callable may choose the mode itself
        env = make_env(run.env_id, run.eval_env_kwargs, run.eval_wrappers)
    refusal = UsageError(
        f"recording makes the environment {data.env_name} with render_mode='rgb_array'; "
        "give it this argument, and have its render return frames"
    )
    if env.render_mode in (None, "human", "ansi"):  # what RecordVideo refuses
        env.close()
        raise refusal
    return Frames(env, refusal)


def _play(policy: Predicts, env: gym.Env, seed: int, deterministic: bool, max_steps: int) -> float:
    observation, _ = env.reset(seed=seed)
    state: Any = None
    total = 0.0
    for _ in range(max_steps):
        action, state = policy.predict(observation, state=state, deterministic=deterministic)
        observation, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            break
    return total


class EpisodeRecorder(Stateful, Callback):
    """Records one episode every ``every`` training transitions, into ``videos`` in the run's folder.

    Args:
        every: transitions between two recordings, ≥ 1.
    """

    # Transitions after which the next recording is due.
    _next: int = persistent(lambda self: self.every)
    #: The run's videos, in the order of their transitions.
    files: list[Path] = transient(lambda self: [])

    def __init__(self, every: int) -> None:
        super().__init__()
        if every < 1:
            raise UsageError(f"record_every={every} must be at least 1 transition, or 0 for no recording")
        self.every = every

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            forget_state(self)
            # Checked now, and not at the first recording, which may come much later.
            data: Any = getattr(trainer, "datamodule", None)
            if data is not None:  # the module refuses a Trainer without one
                environment_to_film(data).close()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A resumed run may record more often than the one that wrote its checkpoint.
        begins = trainer.datamodule.num_timesteps  # type: ignore[attr-defined]
        self._next = min(self._next, self._multiple_after(begins))
        steps = {path: int(path.name.split("-")[1]) for path in (log_folder(trainer) / "videos").glob("step-*.mp4")}
        self.files = [path for path in sorted(steps, key=steps.__getitem__) if steps[path] <= begins]

    def _multiple_after(self, timesteps: int) -> int:
        return (timesteps // self.every + 1) * self.every

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if data.num_timesteps < self._next or not trainer.is_global_zero:
            return
        self._next = self._multiple_after(data.num_timesteps)
        folder = log_folder(trainer) / "videos"
        policy: Any = pl_module
        self.files += record_episodes(policy, data, folder, prefix=f"step-{data.num_timesteps}")
