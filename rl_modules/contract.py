"""What an algorithm and its experience expect of each other.

An algorithm (a LightningModule) is a :class:`Learner` to its datamodule; a datamodule is an :class:`ExperienceSource`
to its algorithm. Neither imports the other: both import this file, and mypy checks both sides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

#: Running statistics of observations as :func:`rl_modules.common.spaces.normalize` takes them: (mean, standard
#: deviation, bound), nested like the observation; None: not normalised.
Statistics = Any


@dataclass(frozen=True)
class Experience:
    """The kind of experience that an algorithm learns from; it sets the datamodule's defaults.

    Args:
        kind: ``rollouts`` of the current policy, or the ``replay`` of all transitions so far.
        n_steps: transitions per environment and rollout, by default.
        batch_size: transitions per minibatch, by default; None: the whole rollout.
        n_epochs: passes over each rollout, by default.
        train_freq: replay: steps of each environment per round, by default.
        whole_rollouts: true where the update holds only for the policy that acted, so that a rollout is learned from
            once and whole. Other settings are then refused.
        takes_empty: whether an update accepts a rollout of reset rows only, without a transition; other algorithms
            never get one.
    """

    kind: Literal["rollouts", "replay"]
    n_steps: int = 256
    batch_size: int | None = 64
    n_epochs: int = 10
    train_freq: int = 4
    whole_rollouts: bool = False
    takes_empty: bool = False


#: PPO: shuffled minibatches, several passes.
MINIBATCHES = Experience("rollouts")
#: REINFORCE, TRPO: one update from each whole rollout.
WHOLE_ROLLOUTS = Experience("rollouts", batch_size=None, n_epochs=1, whole_rollouts=True)
#: A2C: the same with rollouts of five steps.
SHORT_ROLLOUTS = Experience("rollouts", n_steps=5, batch_size=None, n_epochs=1, whole_rollouts=True)
#: Tables: an update after every step.
EVERY_STEP = Experience("rollouts", n_steps=1, batch_size=None, n_epochs=1, whole_rollouts=True, takes_empty=True)
#: DQN: minibatches from a replay buffer.
REPLAY = Experience("replay", batch_size=32)
#: DDPG, TD3, SAC, TQC, CrossQ: a minibatch of 256 after every step.
REPLAY_EVERY_STEP = Experience("replay", batch_size=256, train_freq=1)


class Rollout(TypedDict, total=False):
    """``n_steps`` transitions of N environments, time-major. Every valid row is a real transition.

    ``act`` may return further fields; they are stored beside these, [T, N, …].
    """

    observation: Any
    """s_t, [T, N, *obs], normalised where the datamodule normalises; Dict and Tuple spaces: nested dictionaries."""
    action: Tensor
    """a_t as sampled, [T, N, *act]; a Box action is clipped only on its way into the environment."""
    reward: Tensor
    """r_t, [T, N] float32, scaled where the datamodule scales."""
    terminated: Tensor
    """The episode ended in a terminal state, [T, N] bool."""
    truncated: Tensor
    """The episode was cut off, [T, N] bool."""
    valid: Tensor
    """False in the reset rows of a ``next_step`` vector environment, which are no transitions, [T, N] bool."""
    next_observation: Any
    """The true successor of s_t, [T, N, *obs]: at an episode's end its final observation."""
    value: Tensor
    """V(s_t), [T, N] float32, where ``act`` returns ``value``."""
    next_value: Tensor
    """V of the true successor, [T, N] float32, where ``act`` returns ``value``."""
    state: Tensor
    """A recurrent policy's memory before a_t, [T, N, K, H]."""
    episode_start: Tensor
    """Whether s_t begins an episode, [T, N] bool; for recurrent policies only."""
    log_prob: Tensor
    """log π(a_t|s_t) in nats, [T, N] float32, where ``act`` returns it."""


class Minibatch(TypedDict, total=False):
    """The input of ``training_step``: fields returned by ``prepare``, flat over time and environments, B rows.

    An algorithm has those that it reads, and may add its own.
    """

    observation: Any
    """[B, *obs]."""
    action: Tensor
    """[B, *act]."""
    log_prob: Tensor
    """log π_old(a|s) in nats, [B] float32."""
    value: Tensor
    """V_old(s), [B] float32."""
    advantage: Tensor
    """A(s, a), [B] float32, not yet whitened."""
    returns: Tensor
    """The value function's target, [B] float32."""
    policy_parameters: Tensor
    """Parameters of π_old in s, [B, P], for the exact KL."""
    kl: Tensor
    """KL(π_old || π) in s, in nats, [B]."""
    weight: Tensor
    """REINFORCE's Ψ, or the importance weights of prioritised replay, [B] float32."""
    reward: Tensor
    """Σ_k γ^k r_k over up to n steps, [B] float32."""
    discount: Tensor
    """γ^n, [B] float32."""
    terminated: Tensor
    """Whether next_observation is terminal, [B] bool."""
    next_observation: Any
    """[B, *obs]."""
    next_q: Tensor
    """Q_target(s', ·), [B, A]."""
    target: Tensor
    """The regression target of Q(s, a), [B]."""
    next_action: Tensor
    """SARSA's a', [B] int64."""
    noise: Tensor
    """Standard normal numbers for the update's actions."""
    critic_order: Tensor
    """Random numbers that order the critics, [B, K]; with SAC's ``target_subset`` only."""
    index: Tensor
    """Rows in the buffer, [B] int64; with prioritised replay only."""
    valid: Tensor
    """In what ``prepare`` returns, [T, N] bool: false where there is nothing to learn from."""
    episode_start: Tensor
    """Of recurrent policies, whose rows are sequences: whether a step begins an episode, [B, L] bool."""
    state: Tensor
    """The memory before each sequence, [B, K, H]."""
    counts: Tensor
    """Whether a step is a transition, [B, L] bool; where some are none."""
    burn_in: dict[str, Any]
    """The steps before each sequence."""


class Replayed(TypedDict, total=False):
    """M transitions drawn from the replay buffer, each over up to n steps."""

    observation: Any
    """[M, *obs]."""
    action: Tensor
    """[M, *act]."""
    reward: Tensor
    """r_t … r_{t+n-1}, [M, n] float32; 0 after the last that counts."""
    n_steps: Tensor
    """How many rewards count, [M] int64."""
    terminated: Tensor
    """Whether next_observation is terminal, [M] bool."""
    next_observation: Any
    """The state n_steps later, [M, *obs]."""
    index: Tensor
    """Rows in the buffer, [M] int64; with prioritised replay only."""
    weight: Tensor
    """Importance weights, [M] float32; with prioritised replay only."""


class Learner(Protocol):
    """The interface of an algorithm that a datamodule uses."""

    experience: Experience
    #: Statistics that the observations given to ``act`` are normalised with; the datamodule sets them.
    observation_statistics: Statistics
    #: State of the normalisers that the weights were trained with, for a warm start; None: not normalised.
    normalizer_state: dict[str, Any] | None

    @property
    def device(self) -> torch.device:
        """Device of the network."""

    def modules(self) -> Any:
        """Returns the network's parts, as :class:`torch.nn.Module` gives them."""

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns ``action`` [N, *act] for observations [N, *obs], and other values to store with the transition."""

    def prepare(self, rollout: Any) -> Minibatch:
        """Computes the inputs of the loss from a rollout; called once per rollout."""

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[np.ndarray, Any]:
        """Returns actions in NumPy for raw observations, with Stable-Baselines3's signature."""


class ExperienceSource(Protocol):
    """The interface of a datamodule that an algorithm uses."""

    #: The run's seed, from which weights are drawn.
    seed: int
    #: Transitions so far and in all, over all environments and ranks.
    num_timesteps: int
    total_timesteps: int

    @property
    def is_complete(self) -> bool:
        """Whether ``total_timesteps`` transitions were collected and all of them were learned from."""

    @property
    def env_name(self) -> str:
        """The environment's name in messages and checkpoints."""

    @property
    def observation_space(self) -> spaces.Space:
        """Space of one observation."""

    @property
    def action_space(self) -> spaces.Space:
        """Space of one action."""

    @property
    def ranks_differ_in_size(self) -> bool:
        """Whether ranks may hold different numbers of transitions in a minibatch."""

    def metrics_over_ranks(self) -> dict[str, float]:
        """``rollout/*`` and ``time/*``; all ranks call it together."""

    @property
    def partial_return(self) -> float:
        """Mean return so far of the running episodes, which replaces the mean return until an episode has ended."""

    def transition_model(self) -> Any:
        """Returns the environment's transition table (:mod:`datamodules.envs.model`); None if it has none."""


class RolloutSource(ExperienceSource, Protocol):
    """The additional interface that an on-policy algorithm uses."""

    #: Environments that are stepped together, and transitions per minibatch.
    n_envs: int
    batch_size: int
    #: Rows of the present minibatch over the mean of those whose gradients one optimizer step accumulates.
    minibatch_weight: float

    @property
    def rollout(self) -> dict[str, Any]:
        """The prepared rollout whose minibatches are being yielded, flat over its valid rows."""

    @property
    def rollout_is_used_up(self) -> bool:
        """True from the last minibatch of a rollout on, until the next is collected."""

    def recorded_iteration(self) -> Callable[[Any, int], None]:
        """Returns rollout, advantages and updates as one step of training, under ``graph=True``."""


Act = Callable[[Any, torch.Generator], dict[str, Tensor]]
