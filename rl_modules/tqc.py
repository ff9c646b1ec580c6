"""Truncated quantile critics."""

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.contract import Minibatch
from rl_modules.core.settings import fixed, setting
from rl_modules.sac import SAC


class TQC(SAC):
    """SAC with critics that predict quantiles of the return and targets that drop the largest ones.

    Kuznetsov et al. 2020, arXiv:2005.04269. Each of K critics predicts N quantiles. Of the K·N target quantiles of
    (s', a'), sorted, the largest K·top_quantiles_to_drop_per_net are dropped; each remaining quantile gives a target

        y_j = r + γ (1 - terminated) (z_j - α log π(a'|s')),

    and the critics minimise the quantile Huber loss, the mean over critics, quantiles and targets. The policy maximises
    the mean of all quantiles. The rest is SAC. Names and defaults are those of sb3-contrib.
    """

    n_outputs: int = setting(alias="n_quantiles", default=25, says="quantiles per critic", least=1)
    top_quantiles_to_drop_per_net: int = setting(
        default=2, says="largest target quantiles that are left out, per critic; below ``n_quantiles``", least=0
    )

    target_subset = fixed(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        dropped = self.top_quantiles_to_drop_per_net
        if dropped >= self.n_outputs:
            raise UsageError(f"top_quantiles_to_drop_per_net={dropped} must lie in [0, n_quantiles={self.n_outputs})")
        #: How many of the sorted target quantiles are kept.
        self.n_kept = self.n_critics * (self.n_outputs - dropped)

    def td_target(self, batch: Minibatch, noise: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Returns the targets of every quantile, [B, n_kept]; arguments as in SAC."""
        action, log_prob = self.network.policy.sample(batch["next_observation"], noise)
        quantiles = self.target_network(batch["next_observation"], action)
        kept = quantiles.movedim(0, 1).flatten(1).sort(1).values[:, : self.n_kept]
        value = torch.where(batch["terminated"][:, None], 0.0, kept - (ent_coef * log_prob)[:, None])
        return batch["reward"][:, None] + batch["discount"][:, None] * value

    def critic_loss(self, q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the quantile Huber loss of all critics, a scalar.

        Args:
            q: predicted quantiles, [K, B, N], or [K, B] of one.
            target: [B, n_kept].
            weight: importance weights of prioritised replay, [B].
        """
        q = q if q.ndim == 3 else q.unsqueeze(-1)
        k = len(q)
        weight = None if weight is None else weight.repeat(k)
        return F.quantile_huber_loss(q.flatten(0, 1), target.repeat(k, 1), weight) / q.shape[-1]

    def actor_loss(self, q: Tensor, log_prob: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Returns the policy's loss, a scalar; the value of an action is the mean of all quantiles."""
        return (ent_coef * log_prob).mean() - q.mean()

    def absolute_error(self, q: Tensor, target: Tensor) -> Tensor:
        """Returns |δ| per transition for prioritised replay, [B], between the means of predicted and target
        quantiles.
        """
        return (q.mean((0, 2)) - target.mean(1)).abs()
