"""What ``graph=True`` records crosses no border between host and device, on a stand-in for a GPU."""

from functools import partial
from typing import Any

import pytest
import torch

import rl_modules
from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules.common.errors import UsageError
from tests.fake_device import DEVICE, FakeStrategy, fake_device
from tests.training import fit

SGD = partial(torch.optim.SGD, lr=1e-3, foreach=False)  # the others know the devices that they work on


class Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, GENERATOR)


GENERATOR = torch.Generator


class OfDevice(GENERATOR):  # type: ignore[misc]
    """A generator that says it is the device's; its numbers are the host's."""

    device = DEVICE

    def __new__(cls) -> Any:
        return super().__new__(cls, "cpu")

    def manual_seed(self, seed: int) -> Any:
        super().manual_seed(seed)
        return self


class OfTheHost(metaclass=Kind):
    """The stand-in has no generators of its own."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return OfDevice() if torch.device(device).type == DEVICE.type else GENERATOR("cpu")


def train(name: str, env_id: str, **settings: Any) -> None:
    with fake_device():
        data: Any
        if env_id.startswith("torch/"):
            data = RolloutDataModule(env_id, n_envs=4, n_steps=8, total_timesteps=96, eval_freq=0)
        else:
            data = ReplayDataModule(env_id, learning_starts=20, batch_size=8, buffer_size=500, total_timesteps=40,
                                    eval_freq=0)  # fmt: skip
        module = getattr(rl_modules, name)(graph=True, net_arch=[16], optimizer=SGD, **settings)
        fit(module, data, accelerator="auto", strategy=FakeStrategy())


@pytest.mark.parametrize(
    ("name", "env_id"),
    [("PPO", "torch/Pendulum-v1"), ("A2C", "torch/CartPole-v1"), ("PQN", "torch/Maze-v0"), ("PQN", "torch/CartPole-v1"),
     ("REINFORCE", "torch/MountainCar-v0"), ("PPO", "torch/MountainCarContinuous-v0"), ("SAC", "Pendulum-v1"),
     ("TD3", "Pendulum-v1"), ("DDPG", "Pendulum-v1"), ("TQC", "Pendulum-v1"), ("DQN", "CartPole-v1"),
     ("C51", "CartPole-v1"), ("QRDQN", "CartPole-v1")],
)  # fmt: skip
def test_nothing_crosses(name, env_id, monkeypatch):
    monkeypatch.setattr(torch, "Generator", OfTheHost)
    train(name, env_id)


class Crosses(rl_modules.PPO):
    def value_loss(self, value: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return super().value_loss(value * torch.ones(1).to(value.device), batch)


def test_a_copy_from_the_host_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "Generator", OfTheHost)
    monkeypatch.setattr(rl_modules, "Crosses", Crosses, raising=False)
    with pytest.raises(UsageError, match="copies between the host and the device"):
        train("Crosses", "torch/Pendulum-v1")
