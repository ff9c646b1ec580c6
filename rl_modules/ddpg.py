"""Deep deterministic policy gradient."""

from torch import Tensor

from rl_modules.contract import Minibatch
from rl_modules.core.settings import fixed
from rl_modules.td3 import TD3


class DDPG(TD3):
    """Deep deterministic policy gradient: TD3 with one critic, no delay and no noise in its targets.

    Lillicrap et al. 2016, arXiv:1509.02971. Per minibatch of replayed transitions

        critic    E[(Q(s, a) - y)²],   y = r + γ (1 - terminated) Q_target(s', μ_target(s'))
        policy    -E[Q(s, μ(s))]

    and both target networks move by τ. The names and defaults are Stable-Baselines3's.
    """

    policy_delay = fixed(1)
    target_policy_noise, target_noise_clip = fixed(0.0), fixed(0.0)
    n_critics = fixed(1)

    def noise_shape(self) -> tuple[int, ...]:
        # No noise is drawn.
        return (0,)

    def target_action(self, batch: Minibatch) -> Tensor:
        """Returns the target policy's actions in s', [B, A]."""
        action: Tensor = self.target_network.policy(batch["next_observation"])
        return action
