"""On-policy experience: rollouts of the current policy, in minibatches."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import torch
from torch import Tensor

from datamodules.collector import Collector
from datamodules.envs.vector import AUTORESET, VECTORIZATION, environment_name, make_env, make_vector_env
from datamodules.evaluation import run_episodes
from datamodules.loader import LazyLoader
from datamodules.normalization import ObservationNormalizer, RewardNormalizer
from datamodules.seeding import stream_seed
from rl_modules.errors import UsageError, did_you_mean
from rl_modules.spaces import tree_map

Batch = dict[str, Any]


class RolloutDataModule(L.LightningDataModule):
    """Rollouts of the current policy.

    Every epoch collects ``rollouts_per_epoch`` rollouts of ``n_steps`` transitions from each of ``n_envs``
    environments, lets the module ``prepare`` each, and yields it ``n_epochs`` times in shuffled minibatches. The names
    are Stable-Baselines3's.

    Args:
        env_id: a Gymnasium id, ``package.module:callable``, or a callable that returns an environment.
        n_envs: environments that step together, per rank.
        n_steps: transitions per environment and rollout.
        batch_size: transitions per minibatch; must divide ``n_envs * n_steps``. None: the whole rollout.
        n_epochs: passes over each rollout.
        total_timesteps: transitions, over all environments and ranks, after which training ends; the last rollout is
            finished.
        rollouts_per_epoch: rollouts per Lightning epoch; raise it where rollouts are tiny.
        seed: the source of every stream of randomness: environments, actions, shuffling, weights.
        vectorization_mode: ``sync``, ``async`` (a process per environment) or ``vector_entry_point`` (the
            environment's own engine).
        autoreset_mode: ``same_step``, ``next_step`` or ``disabled``; the valid transitions are the same.
        env_kwargs: keyword arguments of ``gymnasium.make``, such as ``max_episode_steps``.
        wrappers: Gymnasium wrappers around each environment, the first innermost: a name from
            ``gymnasium.wrappers``, an import path, or ``{"class_path": ..., "init_args": {...}}``.
        norm_obs: normalise observations by their running mean and standard deviation.
        norm_reward: divide rewards by the running standard deviation of their discounted sum.
        norm_gamma: discount of that sum; the algorithm's γ.
        clip_obs: bound on normalised observations, in standard deviations.
        clip_reward: bound on normalised rewards.
        eval_freq: transitions between evaluations, rounded to whole epochs; 0: no evaluation.
        n_eval_episodes: episodes per evaluation, and of ``validate``.
        n_test_episodes: episodes of ``test`` and ``predict``, on seeds of their own.
        eval_deterministic: evaluate the policy's most likely actions instead of samples.
        stats_window_size: finished episodes in ``rollout/ep_rew_mean``.

    Raises:
        UsageError: an argument that can't be used, in one sentence.
    """

    def __init__(
        self,
        env_id: str | Callable[..., gym.Env] = "CartPole-v1",
        n_envs: int = 8,
        n_steps: int = 256,
        batch_size: int | None = 64,
        n_epochs: int = 10,
        total_timesteps: int = 100_000,
        rollouts_per_epoch: int = 1,
        seed: int = 0,
        vectorization_mode: str = "sync",
        autoreset_mode: str = "same_step",
        env_kwargs: dict[str, Any] | None = None,
        wrappers: list[str | dict[str, Any]] | None = None,
        norm_obs: bool = False,
        norm_reward: bool = False,
        norm_gamma: float = 0.99,
        clip_obs: float = 10.0,
        clip_reward: float = 10.0,
        eval_freq: int = 10_000,
        n_eval_episodes: int = 10,
        n_test_episodes: int = 50,
        eval_deterministic: bool = True,
        stats_window_size: int = 100,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["env_id"], logger=False)
        self.env_id = env_id
        self.env_name = environment_name(env_id)
        self.hparams["env_id"] = self.env_name
        self.n_envs = n_envs
        self.n_steps = n_steps
        self.batch_size = n_envs * n_steps if batch_size is None else batch_size
        self.n_epochs = n_epochs
        self.total_timesteps = total_timesteps
        self.rollouts_per_epoch = rollouts_per_epoch
        self.seed = seed
        self._check_arguments()
        self.num_timesteps = 0
        self.collector: Collector | None = None
        self._space_example: gym.Env | None = None
        self._position = 0
        self._fields: Batch | None = None
        self._order: Tensor | None = None
        self._shuffler = torch.Generator()
        self._restored: dict[str, Any] | None = None
        self._started_s = time.monotonic()
        self._started_at = 0

    def _check_arguments(self) -> None:
        hp = self.hparams
        for name in ("n_envs", "n_steps", "n_epochs", "total_timesteps", "rollouts_per_epoch", "n_eval_episodes",
                     "n_test_episodes", "stats_window_size"):  # fmt: skip
            if hp[name] < 1:
                raise UsageError(f"{name}={hp[name]} must be at least 1")
        for name in ("eval_freq", "seed"):
            if hp[name] < 0:
                raise UsageError(f"{name}={hp[name]} must not be negative")
        size = self.n_envs * self.n_steps
        if not 1 <= self.batch_size <= size:
            raise UsageError(f"batch_size={self.batch_size} must lie between 1 and n_envs*n_steps={size}; "
                             f"{size} would take the rollout whole")  # fmt: skip
        if size % self.batch_size:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.batch_size))
            raise UsageError(f"batch_size={self.batch_size} does not divide n_envs*n_steps={size}; {nearest} is the "
                             "nearest that does")  # fmt: skip
        for name, known in (("vectorization_mode", VECTORIZATION), ("autoreset_mode", tuple(AUTORESET))):
            if hp[name] not in known:
                raise UsageError(
                    f"{name}={hp[name]!r} must be one of {', '.join(known)}{did_you_mean(hp[name], known)}"
                )

    # ---------------------------------------------------------------- environments

    def setup(self, stage: str) -> None:
        if self._space_example is None:
            self._space_example = make_env(self.env_id, self.hparams.env_kwargs, self.hparams.wrappers or ())
        if stage != "fit":
            return
        rank = self._rank
        envs = self._make_vector(self.n_envs, self.hparams.vectorization_mode, self.hparams.autoreset_mode)
        hp = self.hparams
        self.collector = Collector(
            envs,
            streams=[stream_seed(self.seed, rank, "train", i) for i in range(self.n_envs)],
            generator_seed=stream_seed(self.seed, rank, "actions"),
            name=self.env_name,
            observation_normalizer=ObservationNormalizer(self.observation_space, hp.clip_obs) if hp.norm_obs else None,
            reward_normalizer=RewardNormalizer(self.n_envs, hp.norm_gamma, hp.clip_reward) if hp.norm_reward else None,
            stats_window_size=hp.stats_window_size,
        )
        self._shuffler.manual_seed(stream_seed(self.seed, rank, "minibatches"))
        self.num_timesteps = self._position = self._started_at = 0
        self._fields = self._order = None
        self._started_s = time.monotonic()
        if self.trainer is not None:
            # Evaluation is counted in transitions; Lightning counts epochs. Its sanity check would play episodes of
            # the untrained policy and learn nothing from them.
            self.trainer.num_sanity_val_steps = 0
            if hp.eval_freq:
                per_epoch = self.n_envs * self.n_steps * self.rollouts_per_epoch * self._world_size
                self.trainer.check_val_every_n_epoch = max(1, round(hp.eval_freq / per_epoch))

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self.collector is not None:
            self.collector.envs.close()
        if self._space_example is not None:
            self._space_example.close()
            self._space_example = None

    @property
    def observation_space(self) -> gym.Space:
        """The space of one observation; known from ``setup`` on."""
        assert self._space_example is not None, "setup comes first"
        return self._space_example.observation_space

    @property
    def action_space(self) -> gym.Space:
        """The space of one action; known from ``setup`` on."""
        assert self._space_example is not None, "setup comes first"
        return self._space_example.action_space

    def observation_statistics(self) -> Any:
        """What :func:`rl_modules.spaces.normalize` takes; None where this datamodule does not normalise."""
        if self.collector is None:
            return self.trainer.lightning_module._observation_statistics if self.trainer else None
        normalizer = self.collector.observation_normalizer
        return None if normalizer is None else normalizer.statistics()

    def _make_vector(self, n_envs: int, vectorization_mode: str, autoreset_mode: str) -> gym.vector.VectorEnv:
        return make_vector_env(
            self.env_id,
            n_envs,
            vectorization_mode,
            autoreset_mode,
            self.hparams.env_kwargs,
            self.hparams.wrappers or (),
        )

    # ---------------------------------------------------------------- training batches

    def train_dataloader(self) -> LazyLoader:
        return LazyLoader(self.rollouts_per_epoch * self._batches_per_rollout, self._minibatches)

    @property
    def _batches_per_rollout(self) -> int:
        return self.n_epochs * (self.n_envs * self.n_steps // self.batch_size)

    def _minibatches(self) -> Iterator[Batch]:
        """One epoch's minibatches, from where the checkpoint left off."""
        per_pass = self.n_envs * self.n_steps // self.batch_size
        per_rollout = self._batches_per_rollout
        length = self.rollouts_per_epoch * per_rollout
        if self._position >= length:
            self._position = 0
        batches: list[Batch] = []
        for position in range(self._position, length):
            if position % per_rollout == 0:
                self._fields = self._new_rollout()
            if position % per_pass == 0:
                self._order = self._draw_order()
            if position % per_pass == 0 or not batches:
                batches = self._split(per_pass)
            self._position = position + 1
            # Lightning asks for nothing after the last batch, so that the end is announced before it.
            if (position + 1) % per_rollout == 0 and self.num_timesteps >= self.total_timesteps:
                assert self.trainer is not None
                self.trainer.should_stop = True
            yield batches[position % per_pass]

    def _new_rollout(self) -> Batch:
        """Collect, let the module prepare, and flatten [T, N] to the valid rows."""
        assert self.trainer is not None and self.collector is not None
        module = self.trainer.lightning_module
        training = module.training
        module.eval()
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            rollout = self.collector.collect(module.act, self.n_steps, module.device)
        valid = rollout["valid"]
        self.num_timesteps += self._count_valid(valid)
        with torch.no_grad():
            prepared = module.prepare(rollout)
        module.train(training)
        if self.collector.envs.metadata["autoreset_mode"] != AUTORESET["next_step"]:
            return tree_map(lambda x: x.flatten(0, 1), prepared)
        return tree_map(lambda x: x[valid], prepared)

    def _draw_order(self) -> Tensor | None:
        # One minibatch per pass sees the same transitions in any order.
        if self.batch_size == self.n_envs * self.n_steps:
            return None
        assert self._fields is not None
        return torch.randperm(_length(self._fields), generator=self._shuffler)

    def _split(self, n_minibatches: int) -> list[Batch]:
        """The rollout in its current order, cut into minibatches (of nearly one size where rows are not valid)."""
        fields, order = self._fields, self._order
        assert fields is not None
        if order is None:
            return [fields]
        shuffled = tree_map(lambda x: x[order.to(x.device)], fields)
        parts = [tree_map(lambda x, i=i: x.tensor_split(n_minibatches)[i], shuffled) for i in range(n_minibatches)]
        return parts

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Nothing to move: rollouts are made where the policy is."""
        return batch

    def _count_valid(self, valid: Tensor) -> int:
        count = valid.sum()
        if self._world_size > 1:
            count = self.trainer.strategy.reduce(count, reduce_op="sum")  # type: ignore[union-attr]
        return int(count)

    # ---------------------------------------------------------------- evaluation

    def val_dataloader(self) -> Any:
        if not self.hparams.eval_freq and self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return self._episodes("eval", self.hparams.n_eval_episodes)

    def test_dataloader(self) -> LazyLoader:
        return self._episodes("test", self.hparams.n_test_episodes)

    def predict_dataloader(self) -> LazyLoader:
        return self._episodes("test", self.hparams.n_test_episodes)

    def _episodes(self, purpose: str, n_episodes: int) -> LazyLoader:
        """One batch of whole episodes, played when asked for: {return, length, seed}, [n_episodes]."""

        def play() -> Iterator[Batch]:
            assert self.trainer is not None
            n_envs = min(n_episodes, 25)
            envs = self._make_vector(n_envs, "sync", "same_step")
            streams = [stream_seed(self.seed, self._rank, purpose, i) for i in range(n_envs)]
            try:
                with torch.no_grad():
                    yield run_episodes(
                        self.trainer.lightning_module, envs, streams, n_episodes, self.hparams.eval_deterministic
                    )
            finally:
                envs.close()

        return LazyLoader(1, play)

    # ---------------------------------------------------------------- metrics and state

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` over the last finished episodes, and ``time/*``."""
        assert self.collector is not None
        elapsed_s = time.monotonic() - self._started_s
        metrics = {
            "time/fps": (self.num_timesteps - self._started_at) / max(elapsed_s, 1e-9),
            "time/time_elapsed": elapsed_s,
            "time/total_timesteps": float(self.num_timesteps),
        }
        if self.collector.recent_returns:
            metrics["rollout/ep_rew_mean"] = float(np.mean(self.collector.recent_returns))
            metrics["rollout/ep_len_mean"] = float(np.mean(self.collector.recent_lengths))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, of every rank."""
        assert self.collector is not None
        mid_rollout = self._position % self._batches_per_rollout != 0
        own = {
            "collector": self.collector.state_dict(),
            "shuffler": self._shuffler.get_state(),
            "fields": tree_map(lambda x: x.cpu(), self._fields) if mid_rollout else None,
            "order": self._order if mid_rollout else None,
        }
        ranks: list[Any] = [own]
        if self._world_size > 1:
            ranks = [None] * self._world_size
            torch.distributed.all_gather_object(ranks, own)
        return {"num_timesteps": self.num_timesteps, "position": self._position, "ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.collector is None:
            # `validate`, `test` and `predict` play episodes of their own.
            return
        if len(state_dict["ranks"]) != self._world_size:
            raise UsageError(f"the checkpoint was written by {len(state_dict['ranks'])} ranks, this run has "
                             f"{self._world_size}; resume with as many")  # fmt: skip
        own = state_dict["ranks"][self._rank]
        n_envs = len(own["collector"]["episode_return"])
        if n_envs != self.n_envs:
            raise UsageError(f"n_envs={self.n_envs} differs from the checkpoint's {n_envs}; resume with as many")
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        self.num_timesteps = self._started_at = state_dict["num_timesteps"]
        self._position = state_dict["position"]
        self._shuffler.set_state(own["shuffler"].cpu())
        self._fields = None if own["fields"] is None else tree_map(lambda x: x.to(device), own["fields"])
        self._order = own["order"]
        self.collector.load_state_dict(own["collector"], device)

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else int(os.environ.get("RANK", 0))

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1


def _length(fields: Batch) -> int:
    leaf = next(iter(fields.values()))
    while isinstance(leaf, dict):
        leaf = next(iter(leaf.values()))
    return len(leaf)
