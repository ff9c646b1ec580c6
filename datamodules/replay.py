"""Off-policy experience: a replay buffer that grows during training."""

import copy
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from datamodules.base import Batch, ControlDataModule
from datamodules.buffers import ReplayBuffer, announce_memory
from datamodules.collector import prepared_by, rollout_act
from datamodules.envs.boundary import require_numbers
from datamodules.experience import LazyLoader
from datamodules.frame_buffer import FrameReplayBuffer
from datamodules.hindsight import STRATEGIES, HindsightReplayBuffer, check_hindsight, require_goals
from datamodules.samplers import PrioritizedSampler, UniformSampler
from rl_modules.checkpoints import preparation, resumed_position
from rl_modules.common.errors import UsageError, at_least, naming, require_same
from rl_modules.common.masks import split_mask
from rl_modules.common.modules import evaluation_mode, tree_leaves, tree_map
from rl_modules.common.seeding import stream_seed
from rl_modules.common.spaces import observation_arrays
from rl_modules.contract import REPLAY
from rl_modules.core.curves import write_point
from rl_modules.core.seams import require_acted
from rl_modules.core.settings import Converted, made, one_or_all, setting
from rl_modules.core.state import persistent, transient

log = logging.getLogger(__name__)

#: Minibatches of one round are drawn together, as far as they fit into this many bytes.
DRAWN_TOGETHER_BYTES = 64 * 2**20
#: Action spaces whose actions are one array.
STORED_ACTIONS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
#: Steps of each environment between two writes into the buffer while nothing is learned yet.
WARM_UP_STEPS = 128


def without_priorities(data: "ReplayDataModule") -> str | None:
    """The rule of arguments that have no effect while transitions are drawn uniformly."""
    return None if data.prioritized_replay else "while prioritized_replay is false; set that to true"


class ReplayDataModule(ControlDataModule):
    """Replay buffer: transitions of all policies so far, sampled at random.

    Every epoch is ``rollouts_per_epoch`` rounds. A round takes ``train_freq`` steps in each of ``n_envs``
    environments, appends them to the replay buffer, and draws ``gradient_steps`` minibatches from it. Before the first
    round, ``learning_starts`` transitions are collected with random actions. Names are Stable-Baselines3's, and for
    prioritised replay Stable-Baselines2's.

    Batches hold up to n rewards each, not their discounted sum: the module owns γ and sums them in ``prepare``.
    Other values that ``act`` returns are not stored, because they belong to an outdated policy.
    With ``norm_obs`` and ``norm_reward`` the buffer holds raw observations and rewards, and minibatches are normalised
    with the current statistics. Rows that a subclass adds count in these statistics.
    """

    kind = "replay"
    filled_in = ("batch_size", "train_freq", "gradient_steps", "rollouts_per_epoch")
    replay: ReplayBuffer = made()
    sampler: UniformSampler | PrioritizedSampler = made()

    n_envs = 1
    buffer_size: int = setting(
        default=1_000_000,
        says="rows of the replay buffer over all environments of a rank: transitions, and one row for each "
        "episode's end",
        least=1,
    )
    learning_starts: int = setting(
        default=100,
        says="transitions with random actions, over all environments and ranks, before the first update",
        least=0,
    )
    train_freq: Converted[int | None, int] = setting(
        default=None,
        says="steps of each environment per round; None: the algorithm's (DQN 4, the others 1)",
        least=1,
    )
    gradient_steps: int = setting(
        default=1,
        says="minibatches per round; -1: as many as transitions (``train_freq * n_envs``)",
        check=one_or_all("as many as transitions"),
    )
    batch_size: Converted[int | None, int] = setting(
        default=None,
        says="transitions per minibatch; None: the algorithm's (DQN 32, the others 256)",
        least=1,
    )
    n_steps: int = setting(
        default=1,
        says="steps between a transition's observation and the one to bootstrap from; fewer where the episode ends",
        least=1,
    )
    prioritized_replay: bool = setting(
        default=False, says="draw transitions in proportion to their TD error instead of uniformly"
    )
    alpha: float = setting(
        alias="prioritized_replay_alpha",
        default=0.6,
        says="α ≥ 0, exponent of the TD error; 0: uniform",
        least=0,
        idle=without_priorities,
    )
    beta0: float = setting(
        alias="prioritized_replay_beta0",
        default=0.4,
        says="β in [0, 1] at the start, rising to 1 over ``total_timesteps``: share of the sampling bias that the "
        "importance weights correct",
        least=0,
        most=1,
        idle=without_priorities,
    )
    epsilon: float = setting(
        alias="prioritized_replay_eps",
        default=1e-6,
        says="ε > 0, in units of reward, added to each TD error",
        above=0,
        idle=without_priorities,
    )
    share_frames: bool = setting(
        default=False,
        says="the observations are stacks of k frames along their first axis. Each frame is stored once, and the "
        "stacks are made when they are drawn, which takes a k-th of the memory. The buffer's rows are then frames: one "
        "per transition, and k more per episode",
    )
    n_sampled_goal: int = setting(
        default=0,
        says="k, for environments with goals: in k of k + 1 drawn transitions the goal is replaced by one that the "
        "episode reached, and the reward is recomputed (hindsight experience replay; usual: 4). 0: no replacement",
        least=0,
    )
    goal_selection_strategy: str = setting(
        default="future",
        says="which goal: the one reached after a random later step (``future``), at the end of the episode "
        "(``final``), or after any of its steps (``episode``)",
        one_of=STRATEGIES,
        idle=lambda d: not d.n_sampled_goal and "at n_sampled_goal=0; set that to 4",
    )
    checkpoint_buffer_size: int | None = setting(
        default=None,
        says="number of newest rows that a checkpoint stores, at least one transition of each environment; None: all. "
        "A run resumed from fewer rows differs from the uninterrupted run",
        least=1,
    )
    rollouts_per_epoch: Converted[int | None, int] = setting(
        default=None,
        says="rounds per Lightning epoch; None: about a thousand transitions",
        least=1,
    )

    # In this epoch, and left of this round, in minibatches.
    _position: int = persistent(0)
    _left: int = persistent(0)
    # `num_timesteps` before the warm-up that is under way; None: none is.
    _warm_up_began: int | None = persistent()
    # Transitions that `num_timesteps` lacks between loading a checkpoint within the warm-up and its next step.
    _uncounted: int = persistent(0)
    _drawn: deque[Batch] = persistent(deque())
    _learning: Tensor | None = transient()
    _parts: list[torch.nn.Module] = transient([])
    # Whether what `act` returns has been checked.
    _has_acted: bool = transient(False)
    # Rows that a subclass added, until the statistics of the normalisers have them.
    _recorded: list[Batch] = transient([])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_starts >= self.total_timesteps:
            raise UsageError(
                f"learning_starts={self.learning_starts} must lie in [0, total_timesteps="
                f"{self.total_timesteps}): nothing would be left to learn in"
            )
        check_hindsight(self.hparams)
        self.resolve()

    def _resolve(self) -> None:
        """Fills in settings that were not given with the algorithm's defaults, and checks them against each other."""
        wanted = self.learner.experience if self.has_learner else REPLAY
        given = self.hparams
        self.train_freq = wanted.train_freq if given["train_freq"] is None else given["train_freq"]
        self.batch_size = at_least("batch_size", given["batch_size"] or wanted.batch_size or 32)
        self.gradient_steps = given["gradient_steps"]
        per_epoch = given["rollouts_per_epoch"]
        if self.gradient_steps == -1:
            self.gradient_steps = self.train_freq * self.n_envs
        self.rollouts_per_epoch = per_epoch or max(1, round(1000 / (self.train_freq * self.n_envs)))
        self._epoch_length = self.rollouts_per_epoch * self.gradient_steps
        smallest = self.n_envs * 2 * max(self.train_freq, self.n_steps)
        if self.buffer_size < smallest:
            raise UsageError(
                f"buffer_size={self.buffer_size} must be at least {smallest}, twice what "
                f"n_envs={self.n_envs} write in a round of train_freq={self.train_freq} or need for "
                f"n_steps={self.n_steps}"
            )

    def begin_run(self) -> None:
        super().begin_run()
        self.resolve()
        if not isinstance(self.action_space, STORED_ACTIONS):
            known = ", ".join(space.__name__ for space in STORED_ACTIONS)
            raise UsageError(
                f"{self.env_name} has the action space {self.action_space}, and a replay buffer stores "
                f"actions of {known}; make it one of these (gymnasium.wrappers.TransformAction)"
            )
        with naming(f"buffer_size={self.buffer_size}", MemoryError):
            self.replay = self.make_buffer()
        least = 2 * self.replay.rows_per_step * max(self.train_freq, self.n_steps) * self.n_envs
        if self.share_frames and self.buffer_size < least:
            raise UsageError(
                f"buffer_size={self.buffer_size} must be at least {least} for stacks of frames "
                f"(share_frames=True) and train_freq={self.train_freq}"
            )
        seed = stream_seed(self.seed, self._rank, "minibatches")
        if self.prioritized_replay:
            self.sampler = PrioritizedSampler(self.replay, seed, self.alpha, self.epsilon)
        else:
            self.sampler = UniformSampler(self.replay, seed)
        tree_bytes = self.sampler.tree.nodes.nbytes if isinstance(self.sampler, PrioritizedSampler) else 0
        local_ranks = self.trainer.num_devices if self.trainer is not None else 1
        announce_memory(self.replay, self.buffer_size, tree_bytes, local_ranks)
        self.replay.on_added = self._on_added

    def make_buffer(self) -> ReplayBuffer:
        """Makes the buffer of a run from the settings, before its first step."""
        sizes = (self.observation_space, self.action_space, self.n_envs, self.buffer_size)
        given = self.hparams
        if given.n_sampled_goal:
            compute_reward, ends = require_goals(
                self.observation_space, self.example_env, self.env_name, self.sign_reward
            )
            seed = stream_seed(self.seed, self._rank, "goals")
            strategy = given.goal_selection_strategy
            buffer: ReplayBuffer = HindsightReplayBuffer(
                *sizes, compute_reward, given.n_sampled_goal, strategy, seed, self.norm_obs, ends
            )
        elif self.share_frames:
            buffer = FrameReplayBuffer(*sizes)
        else:
            buffer = ReplayBuffer(*sizes, double=self.norm_obs)
        buffer.newest = self.checkpoint_buffer_size
        return buffer

    @property
    def transitions_per_epoch(self) -> int:
        """Transitions that one epoch adds, over all ranks."""
        return self.n_envs * self.train_freq * self.rollouts_per_epoch * self._world_size

    # ---------------------------------------------------------------- training batches

    def train_dataloader(self) -> LazyLoader:
        self.begin_statistics()
        return LazyLoader(self._epoch_length, self._minibatches)

    @property
    def is_complete(self) -> bool:
        """Whether ``total_timesteps`` transitions were collected and the last round's minibatches were used."""
        return self.num_timesteps >= self.total_timesteps and self._left == 0 and self._warm_up_began is None

    def _minibatches(self) -> Iterator[Batch]:
        """One epoch's minibatches, from where the checkpoint left off, or ``limit_train_batches`` the last epoch."""
        length = self._epoch_length
        position = self._position
        if self._world_size > 1 and position % length == 0:
            # Without this, the ranks of a subclass that collects nothing would have different statistics.
            self._count_recorded()
            if self.collector.normalizers is not None:
                self.collector.normalizers.merge_ranks(self._gather)
        # Lightning knows how many of them an epoch has.
        for _ in range(length):
            position = 0 if position >= length else position
            self._update_priorities()
            if self._left == 0:
                self.new_experience()
                self._left = self.gradient_steps
            if not self._drawn:
                self._draw(self._left)
            self._position = position + 1
            self._left -= 1
            # Lightning asks for nothing after the last batch, so the end is announced before it.
            if self._left == 0 and self.num_timesteps >= self.total_timesteps:
                self.learner_trainer.should_stop = True
                # The epoch ends here, should the run be resumed with a larger total_timesteps.
                self._position = length
            batch = self._drawn.popleft()
            self._learning = batch.get("index")
            yield batch
            position += 1

    def new_experience(self) -> int:
        """One round of the policy; before the first, the warm-up at random. Returns how many transitions it made.

        A subclass that learns from recorded transitions adds some to ``num_timesteps``, and collects none.
        """
        began = self.num_timesteps
        self.num_timesteps += self._uncounted
        self._uncounted = 0
        if self.num_timesteps < self.learning_starts:
            self._warm_up(began)
        module: Any = self.learner
        device = module.device
        if not self._parts:
            # Rounds are short, and looking the parts up takes as long as an action.
            self._parts = list(module.modules())
        begin_episodes = getattr(module, "begin_episodes", None)
        policy_act = rollout_act(module)

        def act(observation: Any, generator: torch.Generator) -> dict[str, Tensor]:
            if begin_episodes is not None and self.collector.episode_start.any():
                begin_episodes(self.collector.episode_start)
            acted = policy_act(tree_map(lambda x: x.to(device, non_blocking=True), observation), generator)
            if not self._has_acted:
                self._has_acted = True
                require_acted(acted, self.n_envs, ["action"])
                if others := [name for name in acted if name != "action"]:
                    rank_zero_warn(
                        f"act returned {', '.join(others)} beside action; replay stores actions alone, so "
                        "that prepare does not get them"
                    )
            return {"action": acted["action"].cpu()}

        self._warm_up_began = None
        precision = self.learner_trainer.precision_plugin.forward_context()
        with evaluation_mode(self._parts), torch.no_grad(), precision:
            return self._collect(act, self.train_freq)

    def _offer_to_stop(self) -> None:
        """Lets a signal end a long warm-up; a checkpoint written now is exact."""
        trainer = self.learner_trainer
        waits = getattr(trainer.train_dataloader, "while_waiting", None)
        if waits is not None:
            waits()
        if trainer.received_sigterm:
            raise SIGTERMException

    def _warm_up(self, began: int) -> None:
        """``learning_starts`` transitions with uniformly random actions, after those before the round, ``began``."""
        space = copy.deepcopy(self.action_space)

        def act(observation: Any, generator: torch.Generator) -> dict[str, Tensor]:
            # Gymnasium's samplers take masks as bytes.
            masks = split_mask(observation)[1]
            draws = [None] * self.n_envs if masks is None else masks.numpy().astype(np.int8)
            actions = [observation_arrays(space, space.sample(mask)) for mask in draws]
            return {"action": torch.from_numpy(np.stack(actions))}

        while self.num_timesteps < self.learning_starts:
            # By the part, so that a run that resumes within the warm-up draws what the uninterrupted run draws.
            space.seed(stream_seed(self.seed, self._rank, "warm-up", self.num_timesteps))
            missing = math.ceil((self.learning_starts - self.num_timesteps) / (self.n_envs * self._world_size))
            self._collect(
                act, min(missing, WARM_UP_STEPS, self.buffer_size // (self.replay.rows_per_step * self.n_envs))
            )
            self._warm_up_began = began
            self._draw_episodes()
            self._offer_to_stop()

    def _draw_episodes(self) -> None:
        """Writes a point of the episodes' curves within the warm-up, which an epoch follows much later."""
        metrics = self.metrics_over_ranks()
        if "rollout/ep_rew_mean" in metrics and hasattr(self.learner, "learning_curve"):
            write_point(self.learner_trainer, metrics, self.num_timesteps)

    def _collect(self, act: Any, n_steps: int) -> int:
        """Steps every environment ``n_steps`` times and stores the transitions; returns how many there were."""
        self._count_recorded()
        # The experience stays on the buffer's device; only drawn minibatches are moved to the network's device.
        rollout: Any = self.collector.collect(act, n_steps, torch.device("cpu"))
        self.collector.is_unfinished = True  # until the buffer has it
        self.after_collecting(rollout["valid"])
        transitions, _ = self.replay.add(rollout)
        self.collector.is_unfinished = False
        return len(transitions)

    def _on_added(self, rollout: Batch, transitions: Tensor, blocked: Tensor) -> None:
        """Gives new rows of the buffer their priorities, those that a subclass adds among them."""
        if isinstance(self.sampler, PrioritizedSampler):
            self.sampler.added(transitions, blocked)
        if self.collector.is_unfinished:
            return  # the collector's own
        added = ("reward", rollout["reward"]), *(("observation", x) for x in tree_leaves(rollout["observation"]))
        for what, x in added:
            require_numbers(f"the rows added to {self.env_name}", what, x.numpy())
        if self.collector.normalizers is not None:
            self._recorded.append(rollout)

    def _count_recorded(self) -> None:
        """Merges rows that a subclass added into the normalisers' statistics, after those of an earlier run."""
        normalizers = self.collector.normalizers
        if self._recorded and normalizers is not None:
            for rollout in self._recorded:
                normalizers.add_recorded(rollout)
            self._recorded = []
            self.hand_over_statistics()

    def _draw(self, remaining: int) -> None:
        """Draws up to ``remaining`` minibatches, lets the module prepare them, and queues them."""
        module: Any = self.learner
        # With priorities every minibatch is drawn after the update of the last one.
        count = 1 if self.prioritized_replay else min(remaining, self._minibatches_at_once)
        self._count_recorded()
        index = self.sampler.draw(count * self.batch_size)
        sample = self.replay.gather(index, self.n_steps)
        if self.collector.normalizers is not None:
            self.collector.normalizers.sample(sample)
        if isinstance(self.sampler, PrioritizedSampler):
            share_done = min(self.num_timesteps / self.total_timesteps, 1.0)
            beta = self.beta0 + (1.0 - self.beta0) * share_done
            over_ranks = self._largest_over_ranks if self._world_size > 1 else None
            sample.update(index=index, weight=self.sampler.weights(index, beta, over_ranks))
        sample = tree_map(lambda x: x.to(module.device, non_blocking=True), sample)
        if not self._parts:  # a resumed run draws before it collects
            self._parts = list(module.modules())
        with evaluation_mode(self._parts), torch.no_grad(), self.learner_trainer.precision_plugin.forward_context():
            prepared = prepared_by(self.collector, module, sample, (len(index),), "[M]")
        if count == 1:
            self._drawn.append(prepared)
            return
        pieces = tree_map(lambda x: x.split(self.batch_size), prepared)
        self._drawn.extend(tree_map(lambda x, i=i: x[i], pieces) for i in range(count))

    @property
    def _minibatches_at_once(self) -> int:
        return max(1, DRAWN_TOGETHER_BYTES // (2 * self.replay.observation_bytes * self.batch_size))

    def _update_priorities(self) -> None:
        """Sets the priorities of the last minibatch from its TD errors."""
        if self._learning is None or not isinstance(self.sampler, PrioritizedSampler):
            return
        td_error = getattr(self.learner, "td_error", None)
        if td_error is None:
            raise UsageError(
                f"prioritized_replay needs an algorithm that leaves its |δ| in `td_error`; "
                f"{type(self.learner).__name__} does not"
            )
        self.sampler.update(self._learning.cpu(), td_error)
        self._learning = None

    # ---------------------------------------------------------------- state

    @property
    def _layout(self) -> dict[str, int]:
        names = ("n_envs", "train_freq", "gradient_steps", "batch_size", "rollouts_per_epoch")
        return {**{name: getattr(self, name) for name in names}, "length": self._epoch_length}

    def rank_state(self) -> dict[str, Any]:
        """Returns the state of the collector, the buffer, the priorities, and the minibatches already drawn."""
        self._update_priorities()
        self._count_recorded()
        return {
            **super().rank_state(),
            "exploration": getattr(self.learner, "exploration_state", dict)() if self.has_learner else {},
            "replay": self.replay.state_dict(),
            "sampler": self.sampler.state_dict(),
        }

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`rank_state`."""
        super().load_rank_state(state)
        rows = state["replay"]["rows"]
        if rows != self.replay.rows:
            require_same("buffer_size", self.buffer_size, (rows - 1) * self.n_envs)
        require_same("prioritized_replay", self.prioritized_replay, "powers" in state["sampler"])
        self._position = resumed_position(self._position, state["layout"], self._layout)
        # A finished run's last epoch may be shorter; what is left of a round belongs to the settings it began with.
        goes_on = state["layout"] == self._layout
        if not goes_on:
            self._left, self._warm_up_began = 0, None
        if self._warm_up_began is not None:
            # Schedules are set from this at the start of a fit, and keep their values within a round.
            counted, self.num_timesteps = self.num_timesteps + self._uncounted, self._warm_up_began
            self._uncounted = counted - self.num_timesteps
        if state["exploration"]:
            self.learner.load_exploration_state(state["exploration"])  # type: ignore[attr-defined]
        self.replay.valid.zero_()  # a subclass may have filled rows beyond those of the checkpoint
        self._recorded = []  # the checkpoint's statistics have them
        self.replay.load_state_dict(state["replay"])
        self.replay.break_off(self.collector.begun_anew)
        if left_out := state["replay"]["left_out"]:
            kept = len(state["replay"]["valid"])
            rank_zero_warn(
                f"The checkpoint holds the newest {kept:,} of {kept + left_out:,} rows of the replay buffer: the older "
                "transitions are lost, and the run differs from one that was never stopped."
            )
        self.sampler.load_state_dict(state["sampler"])
        here = preparation(self.learner) if self.has_learner else {}
        # Minibatches that were prepared for another setting are drawn again.
        if not goes_on or {**here, **state.get("preparation", {})} != here:
            self._drawn.clear()
