"""Deep deterministic policy gradient."""

from typing import Any

from torch import Tensor

from rl_modules.action_noise import ActionNoise
from rl_modules.base import OptimizerFactory, SchedulerFactory
from rl_modules.common.import_path import Custom
from rl_modules.td3 import TD3


class DDPG(TD3):
    """Deep deterministic policy gradient: TD3 with one critic, no delay and no noise in its targets.

    Lillicrap et al. 2016, arXiv:1509.02971. Per minibatch of replayed transitions

        critic    E[(Q(s, a) - y)²],   y = r + γ (1 - terminated) Q_target(s', μ_target(s'))
        policy    -E[Q(s, μ(s))]

    and both target networks move by τ. The names and defaults are Stable-Baselines3's.

    Args:
        gamma: discount γ per transition, in [0, 1].
        tau: step of the target networks per update, in (0, 1].
        action_noise: added to the actions in training, in units of half their range; None: no exploration.
        net_arch: hidden widths of policy and critic, or ``{"pi": [...], "qf": [...]}``; None: [400, 300], and none
            after a convolutional encoder.
        activation_fn: tanh, relu, elu, silu, gelu or leaky_relu.
        learning_rate: of policy and critic; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0, points
            such as ``0:3e-4, 1:0``, or None for the optimizer's own (Adam: 1e-3).
        optimizer: callable from parameters to an optimizer; None: Adam.
        lr_scheduler: callable from the optimizer to a torch scheduler, stepped once per epoch.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose weights a ``fit`` starts from; None: new weights.
        network: module class or callable that makes the whole network from both spaces (``policy`` and ``critics``): an
            import path, or class_path with init_args; None: built from the arguments above.
        features_extractor: likewise, for the part that turns an observation into ``features_dim`` numbers; None: by
            the space.
    """

    def __init__(
        self,
        gamma: float = 0.99,
        tau: float = 0.005,
        action_noise: ActionNoise | dict[str, Any] | None = None,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: str = "relu",
        learning_rate: float | str | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
        init_from: str | None = None,
        network: Custom | None = None,
        features_extractor: Custom | None = None,
    ) -> None:
        super().__init__(
            gamma=gamma, tau=tau, policy_delay=1, target_policy_noise=0.0, target_noise_clip=0.0, n_critics=1,
            action_noise=action_noise, net_arch=net_arch, activation_fn=activation_fn, learning_rate=learning_rate,
            optimizer=optimizer, lr_scheduler=lr_scheduler, log_every=log_every, observation_space=observation_space,
            action_space=action_space, init_from=init_from,
        )  # fmt: skip

    def noise_shape(self) -> tuple[int, ...]:
        # No noise is drawn.
        return (0,)

    def target_action(self, batch: dict[str, Any]) -> Tensor:
        """Returns the target policy's actions in s', [B, A]."""
        action: Tensor = self.target_network.policy(batch["next_observation"])
        return action
