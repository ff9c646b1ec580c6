"""Base of the continuous off-policy algorithms: DDPG, TD3, SAC, TQC and CrossQ."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules import action_noise as noises
from rl_modules import functional as F
from rl_modules.action_noise import ActionNoise
from rl_modules.base import ControlModule, beside_network
from rl_modules.common.errors import UsageError
from rl_modules.common.loading import name_of
from rl_modules.common.seeding import generator_of
from rl_modules.contract import REPLAY_EVERY_STEP, Minibatch, Replayed
from rl_modules.core.resume import count_step, step_schedulers_of_updates
from rl_modules.core.settings import Converted, made, setting
from rl_modules.core.state import persistent, transient
from rl_modules.fast.adam import adam, clip_grad_norm
from rl_modules.gradients import GradientHooks, averaged, gradients, trainable
from rl_modules.networks.critics import ActionBounds, Critics, PolicyAndCritics
from rl_modules.networks.custom import custom_critics, custom_policy_and_critics
from rl_modules.networks.layers import check_widths, tower_widths


class OffPolicyActorCritic(ControlModule):
    """Base of the algorithms that learn critics from replayed transitions, and a policy from the critics.

    An algorithm adds ``make_policy(width, net_arch)``; ``make_target()``, a copy of the part that computes the targets;
    ``choose(observation, generator, deterministic)``, which returns actions in [-1, 1], [N, A]; ``noise_shape()`` of
    the standard normal numbers that an update needs per transition; and ``training_step``, in which it calls
    :meth:`step` once or twice and :meth:`finish_update` at the end.

    The buffer holds actions as the environment takes them; the networks see them scaled to [-1, 1]. One optimizer has
    all parameters, unless ``configure_optimizers`` is overridden. Each :meth:`step` gives it the gradients of some of
    them, and it leaves the others as they are.
    """

    supported_action_spaces: ClassVar[tuple[type[spaces.Space], ...]] = (spaces.Box,)
    experience = REPLAY_EVERY_STEP
    target_network: Any = made()
    #: Hidden widths where ``net_arch`` is None.
    default_net_arch: ClassVar[Sequence[int] | dict[str, list[int]]] = (256, 256)
    #: Learning rate of Adam where neither ``learning_rate`` nor ``optimizer`` is given.
    default_learning_rate = 3e-4
    #: Numbers that a critic returns per action.
    n_outputs = 1
    #: Whether the policy returns mean and log standard deviation; else actions.
    policy_is_gaussian = False

    gamma: float = setting(default=0.99, says="discount γ per transition", least=0, most=1)
    tau: float = setting(default=0.005, says="step of the target networks per update", above=0, most=1)
    n_critics: int = setting(default=2, says="number of critics; targets use the smallest value of them", least=1)
    action_noise: Converted[ActionNoise | dict[str, Any] | None, ActionNoise | None] = setting(
        default=None,
        says="added to the policy's actions in training, in units of half the action's range; None: none",
        check=lambda _, value: noises.from_plain(value),
        stores=noises.to_plain,
    )
    net_arch: list[int] | dict[str, list[int]] | None = setting(
        default=None,
        says='hidden widths of policy and critics, or ``{"pi": [...], "qf": [...]}``; None: [256, 256], and none '
        "after a convolutional encoder",
        check=check_widths,
        idle=beside_network,
    )
    layer_norm: bool = setting(
        default=False, says="layer normalisation before every activation of the critics", idle=beside_network
    )
    dropout_rate: float = setting(
        default=0.0,
        says="share of the critics' hidden units that are zeroed in an update; targets use all of them",
        least=0,
        below=1,
        idle=beside_network,
    )
    activation_fn: str = setting(default="relu", says="tanh, relu, elu, silu, gelu or leaky_relu", idle=beside_network)

    #: Updates of this run so far.
    n_updates: int = persistent(0)
    #: |δ| of the last minibatch, [B]: what prioritised replay asks for.
    td_error: Tensor | None = transient()
    #: Of the updates' noise, the same on all ranks.
    generator: torch.Generator = persistent(lambda m: generator_of(m.source.seed, 0, "updates"))
    _lists: dict[str, list[Tensor]] | None = transient()
    _hooks: GradientHooks | None = transient()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.automatic_optimization = False
        if "action_noise" in self._given.names and noises.is_foreign(self.action_noise):
            self._given.objects["action_noise"] = name_of(self.action_noise)

    def begin_run(self) -> None:
        super().begin_run()
        if self.action_noise is not None:
            self.action_noise.reset()

    def check_spaces(self) -> None:
        """Refuses actions that are no bounded Box of floats."""
        space = self.action_space
        if not (isinstance(space, spaces.Box) and space.is_bounded("both") and np.issubdtype(space.dtype, np.floating)):
            raise UsageError(
                f"{type(self).__name__} acts with real numbers between bounds, for which the action space "
                f"must be a bounded Box of floats, not {space}; DQN, PPO, A2C and TRPO fit Discrete, "
                "and gymnasium.wrappers.TransformAction bounds a Box"
            )
        super().check_spaces()

    # ---------------------------------------------------------------- networks

    def build_network(self) -> None:
        pi, qf = tower_widths(self.observation_space, self.net_arch, ("pi", "qf"), self.default_net_arch)
        bounds = ActionBounds(self.action_space)
        if self.own_network is not None:
            shape = self.n_critics, self.n_outputs
            self.network = custom_policy_and_critics(
                self.own_network, self.observation_space, self.action_space, bounds, shape, self.policy_is_gaussian
            )
            self.target_network = self.make_target().requires_grad_(False)
            return
        policy, critics = self.make_policy(bounds.width, pi), self.make_critics(bounds.width, qf)
        if not isinstance(critics, Critics):
            shape = self.n_critics, self.n_outputs
            critics = custom_critics("make_critics", critics, self.observation_space, bounds.width, shape)
        self.network = PolicyAndCritics(policy, critics, bounds)
        self.target_network = self.make_target().requires_grad_(False)

    def make_policy(self, width: int, net_arch: Sequence[int]) -> torch.nn.Module:
        """Returns the policy's network, of actions of ``width`` numbers."""
        raise NotImplementedError

    def make_target(self) -> torch.nn.Module:
        """Returns a copy of the part that computes the targets."""
        raise NotImplementedError

    def make_critics(self, width: int, net_arch: Sequence[int]) -> torch.nn.Module:
        """Returns the action-value networks: a module from observations and actions in [-1, 1], [B, ``width``], to
        values [``n_critics``, B, ``n_outputs``].

        Args:
            width: numbers in an action.
            net_arch: hidden widths.
        """
        return Critics(
            self.observation_space,
            width,
            self.n_critics,
            net_arch,
            self.activation_fn,
            self.n_outputs,
            self.layer_norm,
            self.dropout_rate,
        )

    # ---------------------------------------------------------------- acting

    def choose(self, observation: Any, generator: torch.Generator | None, deterministic: bool) -> Tensor:
        """Returns actions in [-1, 1], [N, A]."""
        raise NotImplementedError

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Actions [N, *act] as the environment takes them; with action noise unless ``deterministic``."""
        action = self.choose(observation, generator, deterministic)
        if self.action_noise is not None and not deterministic:
            noise = self.action_noise.sample(action.shape, generator)
            action = (action + noise.to(action.device)).clamp(-1.0, 1.0)
        return {"action": self.network.bounds.to_box(action)}

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Chooses actions in NumPy, as :meth:`ControlModule.predict`, without the action noise of training."""
        noise, self.action_noise = self.action_noise, None
        try:
            return super().predict(observation, state, episode_start, deterministic, action_masks)
        finally:
            self.action_noise = noise

    def begin_episodes(self, which: np.ndarray) -> None:
        """Restarts the action noise of environments in which an episode begins; the datamodule calls it before
        :meth:`act`.

        Args:
            which: environments whose observation is the first of its episode, [N] bool.
        """
        if self.action_noise is not None:
            self.action_noise.reset(torch.from_numpy(which))

    def exploration_state(self) -> dict[str, Any]:
        """Returns the state of this rank's exploration; the datamodule stores it, because it differs between ranks."""
        return {} if self.action_noise is None else self.action_noise.state_dict()

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`exploration_state`."""
        if self.action_noise is not None:
            self.action_noise.load_state_dict(state)

    # ---------------------------------------------------------------- batches

    def prepare(self, sample: Replayed) -> Minibatch:
        """Computes, for all minibatches of a round at once, the inputs that do not depend on the networks."""
        kept: Any = {k: x for k, x in sample.items() if k != "n_steps"}
        kept["action"] = self.network.bounds.from_box(sample["action"])
        kept["reward"], kept["discount"] = F.n_step_rewards(sample["reward"], sample["n_steps"], self.gamma)
        kept["noise"] = self._noise(len(kept["reward"]), *self.noise_shape()).to(
            kept["reward"].device, non_blocking=True
        )
        return kept

    def noise_shape(self) -> tuple[int, ...]:
        """Returns the shape of the standard normal numbers that an update needs per transition."""
        raise NotImplementedError

    def _noise(self, *shape: int) -> Tensor:
        # Every rank draws the noise of all and takes its own: one generator's state is enough to resume.
        n_ranks = 1 if self._trainer is None else self._trainer.world_size
        return torch.randn((n_ranks, *shape), generator=self.generator)[self.global_rank]

    # ---------------------------------------------------------------- updates

    def critic_loss(self, q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the error of the critics, a scalar.

        Args:
            q: what the critics predict, [K, B].
            target: [B].
            weight: importance weights of prioritised replay, [B].

        Raises:
            ValueError: a target of another shape, such as [B, 1], which would be broadcast.
        """
        if target.shape != q.shape[1:]:
            raise ValueError(
                f"td_target has shape {tuple(target.shape)}, expected {tuple(q.shape[1:])}, one number per transition"
            )
        error = (q - target).square()
        return (error if weight is None else error * weight).mean(1).sum()

    def gradients_of(self, loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Any, ...]:
        """Returns the gradients of a loss for :meth:`step`; None for a parameter that the loss does not depend on."""
        return gradients(loss, parameters)

    def step(self, parameters: Sequence[Tensor], gradients: Iterable[Any]) -> None:
        """One step of the optimizer for some of its parameters, after the hooks ``on_after_backward`` and
        ``on_before_optimizer_step``.

        Args:
            parameters: those to change; none: all are frozen, and nothing happens.
            gradients: one of each, over this rank's minibatch, or None; averaged over ranks, and clipped to the global
                norm ``max_grad_norm`` where a subclass sets one.
        """
        if not parameters:
            return
        # After `manual_backward`, DDP would wait for the gradients of the parameters that are left out.
        if self.run.n_ranks > 1:
            gradients = averaged(parameters, list(gradients), self.mean_over_ranks)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._hooks is None:
            self._hooks = GradientHooks(self.trainer)
        self._hooks.after_backward()
        # The optimizers themselves, not Lightning's wrappers, because Lightning counts an update as one step. A
        # subclass may have one for each part; those whose parameters have no gradient change nothing.
        for optimizer in self.trainer.optimizers:
            self._hooks.before_optimizer_step(optimizer)
            if self.max_grad_norm is not None:
                self.run.grad_norm = clip_grad_norm([p for p in parameters if p.grad is not None], self.max_grad_norm)
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def recording_key(self) -> tuple[Any, ...]:
        """Adds whether this update moves policy and targets, in algorithms that do not in each."""
        intervals = (getattr(self, name, 1) for name in ("policy_delay", "target_update_interval"))
        return (*super().recording_key(), *((self.n_updates + 1) % interval == 0 for interval in intervals))

    def finish_update(self) -> None:
        """Counts the update as one optimizer step, for ``max_steps`` and checkpoints, and steps the schedulers."""
        self.n_updates += 1
        count_step(self.trainer)
        step_schedulers_of_updates(self)

    @property
    def lists(self) -> dict[str, list[Tensor]]:
        """Trained parameters of policy and critics, and those and buffers of ``target`` and ``followed``, per epoch."""
        if self._lists is None:
            parts = {
                "policy": self.network.policy,
                "critics": self.network.critics,
                "target": self.target_network,
                "followed": self.followed(),
            }
            self._lists = {name: trainable(parts[name]) for name in ("policy", "critics")}
            # A learned α has a loss of its own.
            apart = {id(p) for p in [*self.network.parameters(), getattr(self, "log_ent_coef", None)]}
            own = (p for p in self.trainable_parameters() if p.requires_grad and id(p) not in apart)
            self._lists["critics"] += own
            self._lists.update((name, list(parts[name].parameters())) for name in ("target", "followed"))
            self._lists["target_buffers"] = list(parts["target"].buffers())
            self._lists["followed_buffers"] = list(parts["followed"].buffers())
        return self._lists

    @torch.no_grad()
    def update_target(self) -> None:
        """Moves the target networks by τ: θ' ← τ θ + (1 - τ) θ'; running statistics are copied."""
        lists = self.lists
        torch._foreach_lerp_(lists["target"], lists["followed"], self.tau)
        if lists["target_buffers"]:
            torch._foreach_copy_(lists["target_buffers"], lists["followed_buffers"])

    def begin_epoch(self) -> None:
        self._lists = None  # a callback freezes and unfreezes parts between epochs

    def end_epoch(self) -> None:
        self.record_now(n_updates=self.n_updates)

    # ---------------------------------------------------------------- optimizer

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Adam, as Stable-Baselines3's."""
        return adam(self, parameters, lr=self.default_learning_rate, eps=1e-8)
