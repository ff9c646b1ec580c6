"""Advantage actor-critic with a recurrent policy."""

from rl_modules.a2c import A2C
from rl_modules.recurrent import RecurrentMixin


class RecurrentA2C(RecurrentMixin, A2C):
    """A2C with an LSTM or a GRU between the observation and the policy, for tasks that need memory.

    The update is :class:`~rl_modules.a2c.A2C`'s, on whole rollouts; gradients reach back to the rollout's first step,
    the recurrent state carries over from earlier rollouts.
    """
