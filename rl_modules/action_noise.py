"""Noise that explores with a deterministic policy, added to actions in [-1, 1]."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.arguments import plain
from rl_modules.common.errors import UsageError
from rl_modules.common.foreign_names import refuse_foreign_call
from rl_modules.core.state import Stateful, persistent

Numbers = float | Sequence[float]


class ActionNoise(Stateful):
    """Base class of the action noises. One object serves all environments of a run, each with a separate process."""

    #: The constructor's arguments as plain data, for checkpoints.
    arguments: dict[str, Any]

    def sample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        """Returns every environment's next noise, [N, A] float32 on the CPU, in halves of the action's range."""
        raise NotImplementedError(f"{type(self).__name__} must define sample")

    def reset(self, which: Tensor | None = None) -> None:
        """Restarts the processes of the environments ``which``, [N] bool; None: of all, whatever their number."""


class NormalActionNoise(ActionNoise):
    """Independent Gaussian noise.

    Args:
        mean: mean, a number or one per action dimension.
        sigma: standard deviation, likewise, ≥ 0.

    Raises:
        UsageError: a negative standard deviation.
    """

    def __init__(self, mean: Numbers = 0.0, sigma: Numbers = 0.1) -> None:
        self.arguments = plain({"mean": mean, "sigma": sigma})
        self.mean, self.sigma = _numbers("mean", mean), _numbers("sigma", sigma, at_least_zero=True)

    def sample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.mean + self.sigma * _normal(shape, generator)


class OrnsteinUhlenbeckActionNoise(ActionNoise):
    """Correlated noise: a discretised Ornstein-Uhlenbeck process, which restarts with every episode.

    n ← n + theta (mean - n) dt + sigma √dt ε,   ε ~ N(0, 1)

    Args:
        mean: mean that the process reverts to, a number or one per action dimension.
        sigma: scale of its increments, likewise, ≥ 0.
        theta: rate at which it returns to the mean, ≥ 0.
        dt: time per step, > 0.
        initial_noise: initial value, a number or one per action dimension.

    Raises:
        UsageError: a number outside its range.

    Source: Uhlenbeck & Ornstein 1930; Lillicrap et al. 2016, arXiv:1509.02971, section 7. The names and defaults are
        Stable-Baselines3's.
    """

    # Of every environment, [N, A]; None: before the first step.
    _noise: Tensor | None = persistent()

    def __init__(
        self,
        mean: Numbers = 0.0,
        sigma: Numbers = 0.1,
        theta: float = 0.15,
        dt: float = 1e-2,
        initial_noise: Numbers = 0.0,
    ) -> None:
        self.arguments = plain({"mean": mean, "sigma": sigma, "theta": theta, "dt": dt, "initial_noise": initial_noise})
        self.mean, self.sigma = _numbers("mean", mean), _numbers("sigma", sigma, at_least_zero=True)
        self.initial_noise = _numbers("initial_noise", initial_noise)
        if not theta >= 0 or not dt > 0:
            raise UsageError(f"theta={theta} must not be negative, and dt={dt} must be positive")
        self.theta, self.dt = float(theta), float(dt)

    def sample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        if self._noise is None or self._noise.shape != shape:
            self._noise = self.initial_noise.expand(shape).clone()
        drift = self.theta * (self.mean - self._noise) * self.dt
        self._noise = self._noise + drift + self.sigma * self.dt**0.5 * _normal(shape, generator)
        return self._noise

    def reset(self, which: Tensor | None = None) -> None:
        if which is None:
            self._noise = None
        elif self._noise is not None:
            self._noise = torch.where(which[:, None], self.initial_noise, self._noise)


def is_foreign(noise: ActionNoise | None) -> bool:
    """Returns whether the noise's class is a user's, which a checkpoint can't hold."""
    return noise is not None and type(noise) not in (NormalActionNoise, OrnsteinUhlenbeckActionNoise)


def to_plain(noise: ActionNoise | None) -> dict[str, Any] | None:
    """Converts a noise to its class's name and arguments; None for no noise, and for a user's class."""
    if noise is None or is_foreign(noise):
        return None
    defaults = {name: p.default for name, p in inspect.signature(type(noise)).parameters.items()}
    given = {name: value for name, value in noise.arguments.items() if name == "sigma" or value != defaults[name]}
    return {"class_path": type(noise).__name__, "init_args": given}


def from_plain(data: ActionNoise | dict[str, Any] | None) -> ActionNoise | None:
    """Makes a noise from what :func:`to_plain` returned; an :class:`ActionNoise` is returned unchanged."""
    if data is None or isinstance(data, ActionNoise):
        return data
    known = {cls.__name__: cls for cls in (NormalActionNoise, OrnsteinUhlenbeckActionNoise)}
    name = str(data.get("class_path", "")).rpartition(".")[2] if isinstance(data, dict) else ""
    if name not in known:
        raise UsageError(
            f"action_noise={data!r} must be a NormalActionNoise or an OrnsteinUhlenbeckActionNoise, or a "
            "dictionary with class_path, one of these names, and init_args"
        )
    arguments = data.get("init_args") or {}
    refuse_foreign_call(known[name], (), arguments)
    return known[name](**arguments)


def _normal(shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    device = "cpu" if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).cpu()


def _numbers(name: str, value: Numbers, at_least_zero: bool = False) -> Tensor:
    try:
        tensor = torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.tensor(torch.nan)  # no numbers
    if tensor.dim() > 1 or not tensor.isfinite().all() or (at_least_zero and (tensor < 0).any()):
        bound = ", none of them negative" if at_least_zero else ""
        raise UsageError(f"{name}={value} must be a number, or a list of one number per action dimension{bound}")
    return tensor
