"""Stable-Baselines3: CheckpointCallback, then ``load`` and ``learn(reset_num_timesteps=False)``."""

import re
from pathlib import Path
from typing import Any

import stable_baselines3
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.resume.trace import Trace, fingerprint, weights_fingerprint


class Recorder(BaseCallback):
    """Writes transitions, updates and checkpoints to the trace; stands before the CheckpointCallback."""

    def __init__(self, trace: Trace, save_freq: int, off_policy: bool) -> None:
        super().__init__()
        self.trace, self.save_freq, self.off_policy = trace, save_freq, off_policy
        self.rollout: list[str] = []

    def _on_rollout_start(self) -> None:
        self.trace.write("update", weights_fingerprint(self.model.policy))

    def _on_step(self) -> bool:
        before, after = self.model._last_obs, self.locals["new_obs"]
        # PPO's rollout loop has no `actions` in vector form where the space is continuous and clipped.
        actions, rewards = self.locals["actions"], self.locals["rewards"]
        units = [fingerprint(before[i], actions[i], rewards[i], after[i]) for i in range(len(after))]
        self.trace.write("collected", *units)
        if self.off_policy:
            self.trace.write("used", *units)  # stored in the buffer right after this callback
        else:
            self.rollout += units
        if self.n_calls % self.save_freq == 0:
            self.trace.write("checkpoint", self.num_timesteps)
        return True

    def _on_rollout_end(self) -> None:
        if not self.off_policy:
            self.trace.write("used", *self.rollout)
            self.rollout = []


class StableBaselines3:
    """One algorithm of Stable-Baselines3.

    Args:
        cls: the algorithm.
        env_id: Gymnasium's id.
        total: transitions.
        n_envs: parallel environments.
        settings: of the algorithm.
    """

    version = stable_baselines3.__version__
    unit = "transitions"

    def __init__(self, cls: Any, env_id: str, total: int, n_envs: int, **settings: Any) -> None:
        self.cls, self.env_id, self.total, self.n_envs, self.settings = cls, env_id, total, n_envs, settings
        self.off_policy = cls is not PPO
        self.name = f"Stable-Baselines3 {cls.__name__}" + (" with saved buffer" if self.off_policy else "")
        buffer = ", save_replay_buffer=True" if self.off_policy else ""
        loads = ", `load_replay_buffer`" if self.off_policy else ""
        self.way = f"`CheckpointCallback(save_freq{buffer})`; `load`{loads}, `learn(reset_num_timesteps=False)`"
        self.quote = (
            "you need to pass `save_replay_buffer=True`, and `save_vecnormalize=True` to also save replay buffer "
            "checkpoints and normalization statistics checkpoints"
            if self.off_policy
            else "Callback for saving a model every `save_freq` calls to `env.step()`"
        )
        self.link = "https://stable-baselines3.readthedocs.io/en/master/guide/callbacks.html#checkpointcallback"

    def prepare(self, folder: Path) -> None:
        pass

    def train(self, folder: Path, trace: Trace) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        env = make_vec_env(self.env_id, self.n_envs, seed=0)
        model = self._resumed(folder, env, trace)
        resumes = model is not None
        if not resumes:
            trace.write("resume", "start")
            model = self.cls("MlpPolicy", env, seed=0, device="cpu", **self.settings)
        save_freq = max(self.total // 12 // self.n_envs, 1)
        callbacks = CallbackList([
            Recorder(trace, save_freq, self.off_policy),
            CheckpointCallback(save_freq, str(folder / "models"), save_replay_buffer=self.off_policy),
        ])  # fmt: skip
        model.learn(max(self.total - model.num_timesteps, 0), callbacks, reset_num_timesteps=not resumes)
        trace.write("update", weights_fingerprint(model.policy))
        return model.policy.state_dict()

    def _resumed(self, folder: Path, env: Any, trace: Trace) -> Any:
        """Returns the newest checkpoint that loads."""
        found = {int(re.search(r"model_(\d+)_", path.name)[1]): path for path in folder.glob("models/*_steps.zip")}
        for steps in sorted(found, reverse=True):
            try:
                model = self.cls.load(found[steps], env=env, device="cpu")
                if self.off_policy:
                    model.load_replay_buffer(folder / "models" / f"rl_model_replay_buffer_{steps}_steps.pkl")
            except Exception:
                trace.write("damaged", steps)
                continue
            trace.write("resume", steps)
            if self.off_policy and (missing := model.num_timesteps - model.replay_buffer.size() * self.n_envs) > 0:
                # The callback saves before the newest transition is stored.
                trace.write("lost", missing)
            return model
        return None


SMALL = {"policy_kwargs": {"net_arch": [32, 32]}}
CASES = {
    "sb3-ppo": lambda: StableBaselines3(PPO, "CartPole-v1", 4096, 4, n_steps=128, batch_size=128, n_epochs=4, **SMALL),
    "sb3-dqn": lambda: StableBaselines3(DQN, "CartPole-v1", 1800, 1, learning_starts=200, batch_size=32,
                                        buffer_size=10_000, target_update_interval=200, **SMALL),
    "sb3-sac": lambda: StableBaselines3(SAC, "Pendulum-v1", 360, 1, learning_starts=100, batch_size=32,
                                        buffer_size=10_000, **SMALL),
}  # fmt: skip
