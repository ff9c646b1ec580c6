"""Proximal policy optimization with a recurrent policy."""

from torch import Tensor

from rl_modules.contract import Minibatch
from rl_modules.core.settings import fixed
from rl_modules.distributions import Distribution
from rl_modules.ppo import PPO
from rl_modules.recurrent import RecurrentMixin


class RecurrentPPO(RecurrentMixin, PPO):
    """PPO with an LSTM or a GRU between the observation and the policy, for tasks that need memory.

    The objective is :class:`~rl_modules.ppo.PPO`'s clipped one. Minibatches are whole sequences of one environment
    each, unrolled from the recurrent state at the time of acting; the state is reset at each episode's start, and
    carries over from one rollout to the next. Action masks work as in PPO.

    Names and defaults are sb3-contrib's; ``rnn``, ``sequence_length`` and ``burn_in`` are additions. Departures: the
    datamodule's ``n_steps`` and ``batch_size`` are 256 and 64 (sb3-contrib: 128 and 128); sequences have equal lengths
    without padding, and minibatches contain whole sequences; a truncated episode bootstraps from its final observation
    with the recurrent state at that step.
    """

    policy_objective = fixed("clip")
    kl_coef = fixed(1.0)

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Returns the loss of one minibatch of sequences; skips the update once ``target_kl`` is exceeded."""
        return self.no_update() if self.kl_exceeded else super().training_step(batch, batch_idx)

    def sequence_loss(self, policy: Distribution, value: Tensor, batch: Minibatch) -> Tensor:
        return self.loss_within_kl(policy, value, batch)
