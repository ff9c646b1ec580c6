"""Deep Q-networks."""

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules import functional as F
from rl_modules.base import ControlModule, beside_network
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import mask_logits, split_mask
from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.common.seeding import generator_of
from rl_modules.contract import REPLAY, Minibatch, Replayed
from rl_modules.core.settings import made, setting
from rl_modules.core.state import persistent, transient
from rl_modules.exploration import epsilon_greedy, exploration_rate, require_finite_actions
from rl_modules.fast.adam import adam
from rl_modules.networks.custom import custom_q_network
from rl_modules.networks.layers import check_widths
from rl_modules.networks.q_network import DistributionalQNetwork, QNetwork, make_noisy, remove_noise, resample


class DQN(ControlModule):
    """Deep Q-learning with replay and a target network.

    Mnih et al. 2015, Nature 518. Per minibatch of replayed transitions, one step on

        L = E[huber(Q(s, a) - y)],   y = r + γ (1 - terminated) max_a' Q_target(s', a')

    and, as options, Double DQN (arXiv:1509.06461), dueling heads (arXiv:1511.06581), n-step targets (the
    datamodule's ``n_steps``) and importance weights (its ``prioritized_replay``). The names and defaults are
    Stable-Baselines3's. Departures from it: each environment draws its own ε-coin (SB3: one for all); ε and the
    learning rate change once per round of experience.
    """

    supported_action_spaces = (spaces.Discrete,)
    experience = REPLAY
    shapes_batch = ("double",)
    target_network: QNetwork = made()

    gamma: float = setting(default=0.99, says="discount γ per transition", least=0, most=1)
    target_update_interval: int = setting(
        default=10_000,
        says="transitions, over all environments and ranks, between updates of the target network",
        least=1,
    )
    tau: float = setting(default=1.0, says="step of the target network towards the network; 1: copy", above=0, most=1)
    exploration_fraction: float = setting(
        default=0.1, says="share of ``total_timesteps`` over which ε decays", above=0, most=1
    )
    exploration_initial_eps: float = setting(
        default=1.0, says="initial ε, the probability of a random action", least=0, most=1
    )
    exploration_final_eps: float = setting(default=0.05, says="final ε", least=0, most=1)
    uses_double: bool = setting(
        alias="double",
        default=False,
        says="select the next action with the network, evaluate it with the target network",
    )
    dueling: bool = setting(default=False, says="V(s) and advantages in separate streams", idle=beside_network)
    loss: str = setting(default="huber", says="huber (its gradient bounded by 1) or mse", one_of=("huber", "mse"))
    max_grad_norm: float | None = setting(
        default=10.0,
        says="global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None: no "
        "clipping",
        above=0,
    )
    net_arch: list[int] | None = setting(
        default=None,
        says="hidden widths; None: [64, 64], and none after a convolutional encoder",
        check=check_widths,
        idle=beside_network,
    )
    activation_fn: str = setting(default="relu", says="tanh, relu, elu, silu, gelu or leaky_relu", idle=beside_network)
    noisy: bool = setting(
        default=False,
        says="noisy linear layers after the encoder (arXiv:1706.10295), with new noise at every step and minibatch; "
        "evaluation uses their means. For exploration by noise alone set exploration_initial_eps and "
        "exploration_final_eps to 0",
    )

    #: ε, the probability of a random action.
    exploration_rate: float = persistent(lambda m: m.exploration_initial_eps)
    #: |δ| of the last minibatch, [B], from which prioritised replay computes priorities.
    td_error: Tensor | None = transient()
    #: Of the updates' noise, the same on all ranks.
    noise_generator: torch.Generator = persistent(lambda m: generator_of(m.source.seed, 0, "updates"))
    # Number of transitions at the last check of whether an update of the target network is due.
    _target_seen_at: int = persistent(0)

    def check_spaces(self) -> None:
        """Refuses an action space without a finite number of actions."""
        require_finite_actions(type(self).__name__, self.action_space)

    def build_network(self) -> None:
        self.network = self.make_network()
        if self.noisy:
            if self.own_network is not None:
                raise UsageError(
                    "noisy=True changes the project's own network; leave it false for a network of yours, "
                    "which may have noisy layers itself"
                )
            make_noisy(self.network)
        self.target_network = copy.deepcopy(self.network).requires_grad_(False)

    @property
    def n_numbers(self) -> int | None:
        """Numbers that the network returns per action; None: the value alone."""
        return None

    def make_network(self) -> QNetwork:
        """Builds the network of action values from the hyperparameters."""
        n_actions, n = int(self.action_space.n), self.n_numbers
        if self.own_network is not None:
            custom: Any = custom_q_network(
                self.own_network, self.observation_space, *(() if n is None else (n,)), n_actions
            )
            return custom
        if n is None:
            return QNetwork(self.observation_space, n_actions, self.net_arch, self.activation_fn, self.dueling)
        return DistributionalQNetwork(
            self.observation_space, n_actions, n, self.net_arch, self.activation_fn, self.dueling
        )

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns ε-greedy actions, [N]; each environment draws its own ε-coin."""
        if self.noisy and not deterministic:
            resample(self.network, generator)
        greedy = self.q_values(self.network, observation).argmax(1)
        if self.noisy:
            remove_noise(self.network)
        if deterministic:
            return {"action": greedy}
        mask = split_mask(observation)[1]
        return {"action": epsilon_greedy(greedy, self.exploration_rate, self.action_space, mask, generator)}

    def prepare(self, sample: Replayed) -> Minibatch:
        """Computes, for all minibatches of a round at once, the values that do not change during the round."""
        self.update_target()
        kept: Any = {k: x for k, x in sample.items() if k not in ("n_steps", "next_observation")}
        if self.uses_double:
            kept["next_observation"] = sample["next_observation"]
        kept["reward"], kept["discount"] = F.n_step_rewards(sample["reward"], sample["n_steps"], self.gamma)
        prepared: Minibatch = {**kept, "next_q": self.next_q(sample["next_observation"])}
        if not self.uses_double:
            # Only Double DQN's target changes with every step of the network.
            prepared["target"] = self.td_target(prepared)
        return prepared

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        if not self.noisy:
            return self.minibatch_loss(batch)
        resample(self.network, self.noise_generator)
        loss = self.minibatch_loss(batch)
        remove_noise(self.network)
        return loss

    def minibatch_loss(self, batch: Minibatch) -> Tensor:
        """Returns the loss of a minibatch, a scalar."""
        q = self.q_values(self.network, batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
        target = self.td_target(batch) if self.uses_double else batch["target"]
        loss = self.td_loss(q, target, batch.get("weight"))
        if "index" in batch:
            self.td_error = (q.detach() - target).abs()
        if self.run.logs_this_epoch:
            self.record(loss=loss, q_mean=q.mean())
        return loss

    def next_q(self, observation: Any) -> Tensor:
        """Returns Q_target(s', ·) for any number of observations, [M, A]; noisy, with new noise per minibatch."""
        m = len(tree_leaves(observation)[0])
        # The activations of a few hundred rows fit in a processor's cache; a GPU takes all rows at once.
        size = 256 if self.device.type == "cpu" else m
        if self.noisy:
            size = cast(Any, self.source).batch_size  # each minibatch has noise of its own
        values = []
        for i in range(0, m, size):
            if self.noisy:
                resample(self.target_network, self.noise_generator)
            values.append(self.target_values(tree_map(lambda x, i=i: x[i : i + size], observation)))
        return torch.cat(values)

    # ---------------------------------------------------------------- pieces to override

    def td_target(self, batch: Minibatch) -> Tensor:
        """Returns the regression target of Q(s, a), [B].

        Without ``double`` it is called in :meth:`prepare`, once for all minibatches of a round. An override then sees
        the network as it was before the round's first update.
        """
        next_q_online = None
        if self.uses_double:
            with torch.no_grad():
                next_q_online = self.q_values(self.network, batch["next_observation"])
        return F.dqn_target(batch["reward"], batch["terminated"], batch["next_q"], batch["discount"], next_q_online)

    def q_values(self, network: QNetwork, observation: Any) -> Tensor:
        """Returns Q(s, ·), [B, A], of the network or the target network; masked actions have the value -1e8."""
        observation, mask = split_mask(observation)
        q = network(observation)
        return q if mask is None else mask_logits(q, mask)

    def target_values(self, observation: Any) -> Tensor:
        """Returns Q_target(s, ·), [B, A], or other outputs of the target network that :meth:`td_target` reads."""
        return self.q_values(self.target_network, observation)

    def td_loss(self, q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the loss of Q(s, a), a scalar; ``weight`` [B] contains prioritised replay's importance weights."""
        return F.td_loss(q, target, self.loss, weight)

    def update_target(self) -> None:
        """Updates the target network if ``target_update_interval`` transitions have passed since its last update. If
        several intervals have passed, k updates by τ equal one by 1 - (1 - τ)^k, because the network has not changed
        between them. Running statistics are copied.
        """
        timesteps, interval = self.source.num_timesteps, self.target_update_interval
        moves = timesteps // interval - self._target_seen_at // interval
        self._target_seen_at = timesteps
        if moves > 0:
            share = 1.0 - (1.0 - self.tau) ** moves
            torch._foreach_lerp_(list(self.target_network.parameters()), list(self.network.parameters()), share)
            if buffers := list(self.target_network.buffers()):
                torch._foreach_copy_(buffers, list(self.network.buffers()))

    def update_schedules(self, progress_remaining: float) -> None:
        super().update_schedules(progress_remaining)
        self.exploration_rate = exploration_rate(
            progress_remaining, self.exploration_fraction, self.exploration_initial_eps, self.exploration_final_eps
        )
        self.record_now(**{"rollout/exploration_rate": self.exploration_rate})

    def end_epoch(self) -> None:
        self.record_now(n_updates=self.trainer.global_step)

    # ---------------------------------------------------------------- optimizer

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns Adam at 1e-4, as in Stable-Baselines3's DQN."""
        return adam(self, parameters, lr=1e-4, eps=1e-8)
