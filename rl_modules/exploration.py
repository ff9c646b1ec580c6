"""ε-greedy actions, and the spaces that have them."""

import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.distributions import sample_allowed


def epsilon_greedy(
    greedy: Tensor,
    epsilon: float,
    action_space: spaces.Discrete,
    mask: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Replaces best actions by uniformly random ones with probability ε; each environment draws its own coin.

    Args:
        greedy: the best actions, [N] int64.
        epsilon: ε, in [0, 1].
        action_space: of one environment.
        mask: true where an action is allowed, [N, A]; None: all are.
        generator: source of the randomness; None: torch's global one.

    Returns:
        [N] int64.
    """
    device = greedy.device if generator is None else generator.device
    explores = torch.rand(len(greedy), generator=generator, device=device) < epsilon
    if mask is None:
        random = torch.randint(int(action_space.n), (len(greedy),), generator=generator, device=device)
    else:
        random = sample_allowed(action_space, mask.to(device), generator)
    return torch.where(explores.to(greedy.device), random.to(greedy.device), greedy)


def require_finite_actions(name: str, action_space: spaces.Space) -> None:
    """Refuses an action space without a finite number of actions.

    Args:
        name: of the algorithm.
        action_space: of one environment.

    Raises:
        UsageError: names the space and the algorithms that fit.
    """
    if not isinstance(action_space, spaces.Discrete):
        raise UsageError(
            f"{name} compares the values of all actions, for which the action space must be Discrete, not "
            f"{action_space}; REINFORCE, A2C, TRPO and PPO fit, and SAC and TD3 a bounded Box"
        )
