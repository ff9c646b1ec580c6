"""ε-greedy actions."""

import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.distributions import sample_allowed


def exploration_rate(progress_remaining: float, fraction: float, initial: float, final: float) -> float:
    """Stable-Baselines3's ε: linear from ``initial`` to ``final`` over the first ``fraction``, then flat."""
    done = 1.0 - max(progress_remaining, 0.0)
    if done >= fraction:
        return final
    return initial + (final - initial) * done / fraction


def epsilon_greedy(
    greedy: Tensor,
    epsilon: float,
    action_space: spaces.Discrete,
    mask: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Replaces best actions by uniformly random ones with probability ε; each environment draws its own coin."""
    device = greedy.device if generator is None else generator.device
    explores = torch.rand(len(greedy), generator=generator, device=device) < epsilon
    if mask is None:
        random = torch.randint(int(action_space.n), (len(greedy),), generator=generator, device=device)
    else:
        random = sample_allowed(action_space, mask.to(device), generator)
    explores, random = (x.to(greedy.device, non_blocking=True) for x in (explores, random))
    return torch.where(explores, random, greedy)


def require_finite_actions(name: str, action_space: spaces.Space) -> None:
    """Refuses an action space without a finite number of actions."""
    if not isinstance(action_space, spaces.Discrete):
        raise UsageError(
            f"{name} compares the values of all actions, for which the action space must be Discrete, not "
            f"{action_space}; REINFORCE, A2C, TRPO and PPO fit, and SAC and TD3 a bounded Box"
        )
