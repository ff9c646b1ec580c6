"""Environments in torch: N of them step together on one device, without a copy to the host.

``torch/CartPole-v1``, ``torch/Pendulum-v1``, ``torch/MountainCar-v0``, ``torch/MountainCarContinuous-v0`` and
``torch/Maze-v0`` are equal to the environments of these names without ``torch/``, which evaluate the policy.
"""

from datamodules.envs.torch.base import TorchEnv
from datamodules.envs.torch.classic import CartPole, Maze, MountainCar, MountainCarContinuous, Pendulum

__all__ = ["CartPole", "Maze", "MountainCar", "MountainCarContinuous", "Pendulum", "TorchEnv"]
