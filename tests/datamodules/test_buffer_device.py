"""Minibatches gathered on the Trainer's device, a stand-in for a GPU, are those gathered on the host."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_modules
from datamodules import ReplayDataModule
from rl_modules.common.errors import UsageError
from tests.fake_device import FakeStrategy, OnDevice, fake_device
from tests.marks import quick
from tests.rl_modules.test_recorded_on_device import SGD, OfTheHost
from tests.training import fit

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SAC": ("Pendulum-v1", {}),
    "TD3": ("Pendulum-v1", {"n_envs": 2, "n_steps": 3}),
    "DQN": ("CartPole-v1", {"prioritized_replay": True, "buffer_size": 40}),
    "QRDQN": ("stacks", {"share_frames": True, "buffer_size": 90}),
}


def make_stacks(**kwargs: Any) -> gym.Env:
    return gym.wrappers.FrameStackObservation(gym.make("CartPole-v1", **kwargs), 3)


@pytest.fixture(autouse=True)
def generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", OfTheHost)


def train(name: str, where: str, ckpt: Path | None = None, steps: int = 90, **more: Any) -> Any:
    env_id, settings = CASES[name]
    settings = {"batch_size": 8, "buffer_size": 60, "buffer_device": where, "learning_starts": 20, **settings, **more}
    with fake_device():
        env: Any = make_stacks if env_id == "stacks" else env_id
        data = ReplayDataModule(env, total_timesteps=steps, eval_freq=0, **settings)
        module = getattr(rl_modules, name)(net_arch=[16], optimizer=SGD)
        trainer = fit(module, data, ckpt_path=ckpt, accelerator="auto", strategy=FakeStrategy())
        sample = data.replay.gather(data.sampler.draw(5), data.n_steps)
    assert isinstance(sample["reward"], OnDevice) == (where == "accelerator")
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("name", quick(CASES, "SAC", "QRDQN"))
def test_the_run_is_the_same_and_resumes(name: str, tmp_path: Path) -> None:
    """The buffers are full twice; episodes end within the runs."""
    ends = {}
    for where in ("cpu", "accelerator"):
        trainer = train(name, where, steps=55)
        trainer.save_checkpoint(tmp_path / "part.ckpt")
        for ckpt in (None, tmp_path / "part.ckpt"):
            trainer = train(name, where, ckpt)
            trainer.save_checkpoint(tmp_path / "end.ckpt")
            ends[where, ckpt is None] = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    for begins in (True, False):
        here, there = ends["cpu", begins], ends["accelerator", begins]
        assert all(torch.equal(here[key], there[key]) for key in here)


def test_rows_follow_changes_of_every_kind() -> None:
    from datamodules.buffers import ReplayBuffer

    rng = np.random.default_rng(0)
    with fake_device():
        spaces = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)
        there, here = ReplayBuffer(*spaces, 2, 12), ReplayBuffer(*spaces, 2, 12)
        there.copy_to(torch.device("meta"))
        for i in range(12):
            rollout = {
                "observation": rng.normal(size=(2, 2, 2)).astype(np.float32),
                "next_observation": rng.normal(size=(2, 2, 2)).astype(np.float32),
                "action": rng.integers(3, size=(2, 2)), "reward": rng.normal(size=(2, 2)).astype(np.float32),
                "terminated": rng.random((2, 2)) < 0.2, "truncated": rng.random((2, 2)) < 0.2,
                "valid": np.ones((2, 2), bool),
            }  # fmt: skip
            for buffer in (there, here):
                buffer.add({name: torch.from_numpy(x) for name, x in rollout.items()})
                if i in (4, 9):
                    buffer.break_off(np.array([True, False]))
            if i == 6:
                for buffer in (there, here):
                    buffer.load_state_dict({**here.state_dict(), "reward": here.reward * 2})
            index = here.valid.nonzero()[:, 0]
            ours, expected = there.gather(index, 3), here.gather(index, 3)
            for name, value in expected.items():
                assert ours[name].tolist() == value.tolist(), (i, name)


@pytest.mark.long
def test_what_the_host_changes_stays_there() -> None:
    with pytest.raises(UsageError, match="buffer_device=accelerator .* norm_obs changes them on the host"):
        train("SAC", "accelerator", norm_obs=True)
    train("SAC", "auto")  # this device's memory is not known
