"""Recurrent policies: the network, and a mixin that makes an actor-critic algorithm recurrent."""

from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rl_modules.a2c import A2C
from rl_modules.actor_critic import ActorCriticModule
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import split_mask
from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.contract import Minibatch, Rollout, RolloutSource
from rl_modules.core.settings import changed, fixed, setting
from rl_modules.distributions import Distribution
from rl_modules.networks.recurrent import RecurrentActorCritic
from rl_modules.ppo import PPO


class RecurrentMixin(ActorCriticModule):
    """Makes an actor-critic algorithm recurrent; must precede the algorithm among a class's bases.

    A minibatch consists of whole sequences: consecutive steps of one environment, and the recurrent state before the
    first step, as it was when the policy acted. The algorithm defines ``minibatch_loss(policy, value, batch)``, whose
    arguments are flat.
    """

    rnn: str = setting(default="lstm", says="``lstm`` or ``gru``", one_of=("lstm", "gru"))
    lstm_hidden_size: int = setting(default=256, says="hidden size of the LSTM or GRU", least=1)
    n_lstm_layers: int = setting(default=1, says="number of recurrent layers", least=1)
    shared_lstm: bool = setting(default=False, says="the critic reads the policy's recurrent state, without gradient")
    enable_critic_lstm: bool = setting(
        default=True,
        says="the critic has its own LSTM or GRU; without both options it reads a linear layer of the observation's "
        "features",
    )
    sequence_length: int | None = setting(
        default=None,
        says="steps per sequence, a divisor of the datamodule's ``n_steps``; None: the whole rollout, or as much of "
        "it as a minibatch holds",
        least=1,
    )
    burn_in: int = setting(
        default=0,
        says="steps before each sequence to unroll with the current weights, without gradient; 0: use the stored state",
        least=0,
    )
    net_arch: list[int] | dict[str, list[int]] | None = changed(
        says='hidden widths after the recurrent layers, for policy and value, or ``{"pi": [...], "vf": [...]}``; None: '
        "[64, 64], and none after a convolutional encoder"
    )
    ortho_init: bool = changed(
        says="orthogonal initialisation of all but the recurrent layers, with gains √2, 0.01 (policy head) and 1 "
        "(value head)"
    )
    network = fixed(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_lstm and self.enable_critic_lstm:
            raise UsageError(
                "shared_lstm=True and enable_critic_lstm=True contradict each other: the critic reads the "
                "policy's memory or its own; give enable_critic_lstm=False"
            )

    def make_network(self, critic: bool = True) -> RecurrentActorCritic:  # type: ignore[override]
        """Policy, value function and their memories from the hyperparameters."""
        return RecurrentActorCritic(
            self.observation_space,
            self.action_space,
            self.rnn,
            self.lstm_hidden_size,
            self.n_lstm_layers,
            self.shared_lstm,
            self.enable_critic_lstm,
            self.net_arch,
            self.activation_fn,
            self.log_std_init,
            self.ortho_init,
            self.use_sde,
        )

    # ---------------------------------------------------------------- acting

    def initial_state(self, n: int) -> Tensor:
        """Returns the memory's state at the start of n episodes, [n, K, H]."""
        return self.network.initial_state(n)

    def act(
        self,
        observation: Any,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        state: Tensor | None = None,
    ) -> dict:
        """Returns actions, their log-probabilities and the states' values, each [N], and ``next_state``, the new
        recurrent state.

        Args:
            observation: [N, *obs].
            generator: source of the randomness.
            deterministic: the most likely action instead of a sample.
            state: of the memory, [N, K, H]; None: every row begins an episode.
        """
        if state is None:
            state = self.initial_state(len(tree_leaves(observation)[0]))
        policy, value, after = self._evaluate(tree_map(lambda x: x[:, None], observation), state, None)
        action = policy.mode() if deterministic else policy.sample(generator)
        return {"action": action, "log_prob": policy.log_prob(action), "value": value, "next_state": after}

    def memory_arguments(self, n: int, state: Any, episode_start: np.ndarray | None) -> dict[str, Any]:
        """``act``'s state from what ``predict`` was given: zeros where an episode begins."""
        memory = self.initial_state(n)
        if state is not None:
            memory = torch.as_tensor(np.asarray(state)).to(memory).view_as(memory)
        if episode_start is not None:
            begins = torch.as_tensor(np.asarray(episode_start, bool).reshape(-1), device=memory.device)
            memory = memory * ~begins.expand(n)[:, None, None]
        return {"state": memory}

    # ---------------------------------------------------------------- sequences

    def policy_and_value(
        self, observation: Any, state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Distribution, Tensor]:
        """Returns π(·|s) and V(s) along sequences, both flat over [B·L]."""
        first = tree_leaves(split_mask(observation)[0])[0]
        if state is None:
            state = self.initial_state(len(first))
        return self._evaluate(observation, state, starts)[:2]

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Returns the algorithm's fields cut into sequences of L steps, [T/L, N, L, …] each."""
        stored: Any = rollout
        steps, n = rollout["reward"].shape
        length = self.steps_per_sequence(steps)

        fields = {**super().prepare(rollout), "episode_start": stored["episode_start"]}
        prepared = {**self.in_sequences(fields), "state": stored["state"][::length]}
        rows = torch.ones(steps // length, n, dtype=torch.bool, device=self.device)
        if not bool(rollout["valid"].all()):
            prepared["counts"] = self.in_sequences(rollout["valid"])
            rows = prepared["counts"].any(-1)
        if burn_in := self.burn_in:
            if steps < length + burn_in:
                rank_zero_warn(
                    f"burn_in={burn_in} does nothing: in rollouts of {steps} steps no sequence of {length} "
                    "has as many before it; shorten sequence_length, or leave burn_in out"
                )
            prepared["burn_in"] = self._burn_in(stored, steps, length, burn_in)
        # Rows are sequences from here on; a sequence of one step may be a reset and no transition.
        return {**prepared, "valid": rows}

    def in_sequences(self, fields: Any) -> Any:
        """Cuts fields of a rollout into sequences; a subclass's ``prepare`` must do so with fields that it adds."""

        def cut(x: Tensor) -> Tensor:
            length = self.steps_per_sequence(len(x))
            return x.unflatten(0, (len(x) // length, length)).transpose(1, 2)

        return tree_map(cut, fields)

    def steps_per_sequence(self, steps: int) -> int:
        """Returns L: ``sequence_length``, or as many of a rollout's ``steps`` as a minibatch holds."""
        batch_size = cast(RolloutSource, self.source).batch_size
        length = self.sequence_length
        if length is None:
            return max(d for d in range(1, steps + 1) if steps % d == 0 and d <= batch_size)
        if steps % length or length > batch_size:
            raise UsageError(
                f"sequence_length={length} must divide n_steps={steps} and be at most batch_size={batch_size}"
            )
        return length

    @staticmethod
    def _burn_in(rollout: Any, steps: int, length: int, burn_in: int) -> dict[str, Any]:
        """Returns the ``burn_in`` steps before each sequence, and the recurrent state before the first of them."""
        begins = torch.arange(0, steps, length)
        first = begins - burn_in
        index = (first[:, None] + torch.arange(burn_in)).clamp_min(0)

        def before(x: Tensor) -> Tensor:
            return x[index.to(x.device)].transpose(1, 2)

        state, n = rollout["state"], rollout["reward"].shape[1]
        return {
            "observation": tree_map(before, split_mask(rollout["observation"])[0]),
            "episode_start": before(rollout["episode_start"]),
            "state": state[first.clamp_min(0).to(state.device)],
            "exists": (first >= 0)[:, None].expand(-1, n).to(state.device),
        }

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Returns the loss over the steps of one minibatch of sequences, [C, L, …]."""
        policy, value, _ = self._evaluate(batch["observation"], self._first_state(batch), batch["episode_start"])
        apart = ("state", "episode_start", "burn_in", "counts")
        flat: Any = {name: tree_map(lambda x: x.flatten(0, 1), x) for name, x in batch.items() if name not in apart}
        if "counts" in batch:
            rows = batch["counts"].flatten()
            policy, value, flat = policy.rows(rows), value[rows], tree_map(lambda x: x[rows], flat)
        return self.sequence_loss(policy, value, flat)

    def sequence_loss(self, policy: Distribution, value: Tensor, batch: Minibatch) -> Tensor:
        """Returns the algorithm's loss over the steps of a minibatch of sequences, a scalar.

        Args:
            policy: of S steps.
            value: [S].
            batch: the algorithm's fields, [S, …] each.
        """
        algorithm: Any = self
        return algorithm.minibatch_loss(policy, value, batch)

    def _first_state(self, batch: Minibatch) -> Tensor:
        """Returns the recurrent state before each sequence, as stored or after a burn-in with the current weights."""
        if "burn_in" not in batch:
            return batch["state"]
        before = batch["burn_in"]
        with torch.no_grad():
            reached = self.network(before["observation"], before["state"], before["episode_start"])[2]
        return torch.where(before["exists"][:, None, None], reached, batch["state"])

    def _evaluate(self, observation: Any, state: Tensor, starts: Tensor | None) -> tuple[Distribution, Tensor, Tensor]:
        observation, mask = split_mask(observation)
        policy, value, after = self.network(observation, state, starts)
        if self.run.noise_matrices is not None and hasattr(policy, "matrices"):
            policy.matrices = self.run.noise_matrices
        return (policy if mask is None else policy.masked(mask.flatten(0, 1))), value, after


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


class RecurrentA2C(RecurrentMixin, A2C):
    """A2C with an LSTM or a GRU between the observation and the policy, for tasks that need memory.

    The update is :class:`~rl_modules.a2c.A2C`'s, on whole rollouts; gradients reach back to the rollout's first step,
    the recurrent state carries over from earlier rollouts.
    """
