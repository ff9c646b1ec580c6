"""Advantage actor-critic with a recurrent policy."""

from typing import Any

from rl_modules.a2c import A2C
from rl_modules.base import OptimizerFactory, SchedulerFactory
from rl_modules.common.import_path import Custom
from rl_modules.recurrent import RecurrentMixin


class RecurrentA2C(RecurrentMixin, A2C):
    """A2C with an LSTM or a GRU between the observation and the policy, for tasks that need memory.

    The update is :class:`~rl_modules.a2c.A2C`'s, on whole rollouts; gradients reach back to the rollout's first step,
    the recurrent state carries over from earlier rollouts.

    Args:
        rnn: ``lstm`` or ``gru``.
        lstm_hidden_size: hidden size of the LSTM or GRU.
        n_lstm_layers: number of recurrent layers.
        shared_lstm: the critic reads the policy's recurrent state, without gradient.
        enable_critic_lstm: the critic has its own LSTM or GRU; without both options it reads a linear layer of the
            observation's features.
        sequence_length: steps per sequence, a divisor of the datamodule's ``n_steps``; None: the whole rollout.
        burn_in: steps before each sequence to unroll with the current weights, without gradient; 0: use the stored
            state.
        gamma: discount γ per transition, in [0, 1].
        gae_lambda: λ of generalized advantage estimation, in [0, 1]; 1: n-step returns.
        ent_coef: weight of the entropy bonus, in units of advantage per nat; a number or a schedule.
        vf_coef: weight of the mean squared value error.
        max_grad_norm: global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None:
            no clipping.
        normalize_advantage: whiten the advantages of each rollout.
        use_rms_prop: RMSprop with α 0.99; false: Adam with eps 1e-5. Ignored if ``optimizer`` is given.
        rms_prop_eps: RMSprop's eps.
        net_arch: hidden widths after the recurrent layers, for policy and value, or ``{"pi": [...], "vf": [...]}``;
            None: [64, 64], and none after a convolutional encoder.
        activation_fn: tanh, relu, elu, silu, gelu or leaky_relu.
        log_std_init: initial log standard deviation of Box actions.
        ortho_init: orthogonal initialisation of all but the recurrent layers, with gains √2, 0.01 (policy head) and 1
            (value head).
        learning_rate: a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0, points such as
            ``0:3e-4, 1:0``, or None for the optimizer's own (7e-4).
        optimizer: callable from parameters to an optimizer; None: as ``use_rms_prop`` says.
        lr_scheduler: callable from the optimizer to a torch scheduler, stepped once per epoch.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose weights and normaliser statistics a ``fit`` starts from; None: new weights.
        use_sde: explore by generalized state-dependent noise (gSDE, arXiv:2005.05719), for Box actions: a matrix per
            environment turns the policy's last features into noise. ``log_std_init`` is that of its entries.
        sde_sample_freq: steps of a rollout after which new matrices are drawn; -1: once per rollout.
        features_extractor: module class or callable that turns an observation into ``features_dim`` numbers: an
            import path, or class_path with init_args; None: by the space.
    """

    def __init__(
        self,
        rnn: str = "lstm",
        lstm_hidden_size: int = 256,
        n_lstm_layers: int = 1,
        shared_lstm: bool = False,
        enable_critic_lstm: bool = True,
        sequence_length: int | None = None,
        burn_in: int = 0,
        gamma: float = 0.99,
        gae_lambda: float = 1.0,
        ent_coef: float | str = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float | None = 0.5,
        normalize_advantage: bool = False,
        use_rms_prop: bool = True,
        rms_prop_eps: float = 1e-5,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: str = "tanh",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        learning_rate: float | str | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
        init_from: str | None = None,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        features_extractor: Custom | None = None,
    ) -> None:
        super().__init__(
            gamma, gae_lambda, ent_coef, vf_coef, max_grad_norm, normalize_advantage, use_rms_prop, rms_prop_eps,
            net_arch, activation_fn, log_std_init, ortho_init, learning_rate, optimizer, lr_scheduler, log_every,
            observation_space, action_space, init_from,
        )  # fmt: skip
        self.check_memory()
