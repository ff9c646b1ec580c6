"""Wrapper of ``torch.distributions`` objects, for networks that return one."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import GLOBAL_GENERATORS


class TorchDistribution:
    """A ``torch.distributions`` object with private randomness, for networks that return one."""

    def __init__(self, distribution: torch.distributions.Distribution) -> None:
        self.distribution = in_full_precision(distribution)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        device = None if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        devices = _accelerators([self.distribution])
        # These objects draw from the global generators, which stay as they were.
        with torch.no_grad(), GLOBAL_GENERATORS, torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)
            for device in devices:
                _seed(device, seed)
            return self.distribution.sample()

    def mode(self) -> Tensor:
        return self.distribution.mode.detach()

    def log_prob(self, action: Tensor) -> Tensor:
        log_prob = self.distribution.log_prob(action)
        if log_prob.shape != self.distribution.batch_shape or log_prob.dim() != 1:
            raise UsageError(
                f"the policy's {type(self.distribution).__name__} has log_prob of shape "
                f"{tuple(log_prob.shape)}, expected one number per action; join its components by "
                f"torch.distributions.Independent(…, {max(1, log_prob.dim() - 1)})"
            )
        return log_prob

    def entropy(self) -> Tensor:
        return self.distribution.entropy()

    def kl(self, other: Any) -> Tensor:
        return torch.distributions.kl_divergence(self.distribution, other.distribution)


def _accelerators(parts: Iterable[Any]) -> set[torch.device]:
    """Returns the devices other than the CPU on which distributions draw: those of the tensors that they hold."""
    found: set[torch.device] = set()
    for part in parts:
        if isinstance(part, Tensor):
            found |= {part.device} - {torch.device("cpu")}
        elif isinstance(part, torch.distributions.Distribution):
            found |= _accelerators(vars(part).values())
        elif isinstance(part, list | tuple | dict):
            found |= _accelerators(part.values() if isinstance(part, dict) else part)
    return found


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)  # torch.cuda.manual_seed: the current GPU's
    else:
        torch.get_device_module(device).manual_seed(seed)


def in_full_precision(distribution: torch.distributions.Distribution) -> torch.distributions.Distribution:
    """Converts a distribution's 16-bit parameters to float32, the dtype of actions and log-probabilities."""
    changed: dict[str, Any] = {}
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            changed[name] = value.float()
        elif isinstance(value, torch.distributions.Distribution):
            changed[name] = in_full_precision(value)
    if all(value is vars(distribution)[name] for name, value in changed.items()):
        return distribution
    made = copy.copy(distribution)
    vars(made).update(changed)
    if isinstance(made, torch.distributions.Categorical) and "logits" in vars(made):
        made.logits = made.logits.log_softmax(-1)  # they were normalised in 16 bits
    return made
