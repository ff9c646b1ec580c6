"""What every control datamodule shares: environments, seeds, evaluation, counters, metrics."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import torch

from datamodules.collector import Collector
from datamodules.envs.model import TransitionModel, transition_model
from datamodules.envs.vector import AUTORESET, VECTORIZATION, environment_name, make_env, make_vector_env
from datamodules.evaluation import run_episodes
from datamodules.loader import LazyLoader
from datamodules.normalization import ObservationNormalizer, RewardNormalizer
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.seeding import stream_seed
from rl_modules.common.spaces import observation_arrays

Batch = dict[str, Any]


class ControlDataModule(L.LightningDataModule):
    """Base of the control datamodules; one of them adds ``train_dataloader`` and what it stores.

    Args:
        env_id: a Gymnasium id, ``package.module:callable``, or a callable that returns an environment.
        n_envs: environments that step together, per rank.
        total_timesteps: transitions, over all environments and ranks, after which training ends; the last rollout is
            finished.
        seed: the source of every stream of randomness: environments, actions, minibatches, weights.
        vectorization_mode: ``sync``, ``async`` (a process per environment) or ``vector_entry_point`` (the
            environment's own engine).
        autoreset_mode: ``same_step``, ``next_step`` or ``disabled``; the valid transitions are the same.
        env_kwargs: keyword arguments of ``gymnasium.make``, such as ``max_episode_steps``.
        wrappers: Gymnasium wrappers around each environment, the first innermost: a name from
            ``gymnasium.wrappers``, an import path, or ``{"class_path": ..., "init_args": {...}}``.
        norm_obs: normalise observations by their running mean and standard deviation; ranks share theirs after every
            rollout.
        norm_reward: divide rewards by the running standard deviation of their discounted sum.
        norm_gamma: discount of that sum; the algorithm's γ.
        sign_reward: learn from the signs of the rewards, -1, 0 or 1, as is the custom for Atari (Mnih et al. 2015);
            returns are still reported, and evaluated, in the game's points.
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

    #: What the datamodule makes: ``rollouts`` of the current policy, or the ``replay`` of all so far.
    experience = "rollouts"

    def __init__(
        self,
        env_id: str | Callable[..., gym.Env] = "CartPole-v1",
        n_envs: int = 8,
        total_timesteps: int = 100_000,
        seed: int = 0,
        vectorization_mode: str = "sync",
        autoreset_mode: str = "same_step",
        env_kwargs: dict[str, Any] | None = None,
        wrappers: list[str | dict[str, Any]] | None = None,
        norm_obs: bool = False,
        norm_reward: bool = False,
        norm_gamma: float = 0.99,
        sign_reward: bool = False,
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
        self.total_timesteps = total_timesteps
        self.seed = seed
        self.vectorization_mode = vectorization_mode
        self.autoreset_mode = autoreset_mode
        self.env_kwargs = env_kwargs
        self.wrappers = wrappers or []
        self.eval_freq = eval_freq
        self.n_eval_episodes = n_eval_episodes
        self.n_test_episodes = n_test_episodes
        self.eval_deterministic = eval_deterministic
        self._normalization = (norm_obs, norm_reward, norm_gamma, clip_obs, clip_reward)
        self.sign_reward = sign_reward
        if sign_reward and norm_reward:
            raise UsageError("sign_reward and norm_reward both scale the rewards; give one")
        self._stats_window_size = stats_window_size
        self.require_at_least_one("n_envs", "total_timesteps", "n_eval_episodes", "n_test_episodes",
                                  "stats_window_size")  # fmt: skip
        for name in ("eval_freq", "seed"):
            if self.hparams[name] < 0:
                raise UsageError(f"{name}={self.hparams[name]} must not be negative")
        for name, known in (("vectorization_mode", VECTORIZATION), ("autoreset_mode", tuple(AUTORESET))):
            value = self.hparams[name]
            if value not in known:
                raise UsageError(f"{name}={value!r} must be one of {', '.join(known)}{did_you_mean(value, known)}")
        self.num_timesteps = 0
        self.collector: Collector | None = None
        self._example_env: gym.Env | None = None
        self._started_s = time.monotonic()
        self._started_at = 0

    def require_at_least_one(self, *names: str) -> None:
        """Refuse counts below 1.

        Raises:
            UsageError: names the first such argument.
        """
        for name in names:
            if self.hparams[name] < 1:
                raise UsageError(f"{name}={self.hparams[name]} must be at least 1")

    # ---------------------------------------------------------------- environments

    def setup(self, stage: str) -> None:
        if self._example_env is None:
            self._example_env = make_env(self.env_id, self.env_kwargs, self.wrappers)
            observation_arrays(self.observation_space, self.observation_space.sample())
        if stage == "fit":
            self._require_fitting_algorithm()
            self.collector = self._make_collector()
            self.num_timesteps = self._started_at = 0
            self._started_s = time.monotonic()
            self._schedule_evaluation()

    def on_exception(self, exception: BaseException) -> None:
        # The module's `on_fit_end`, which takes back what it set for the whole process, is not called then.
        torch.set_flush_denormal(False)

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self.collector is not None:
            self.collector.close()
        if self._example_env is not None:
            self._example_env.close()
            self._example_env = None

    @property
    def transitions_per_epoch(self) -> int:
        """Transitions that one epoch adds, over all ranks."""
        raise NotImplementedError  # each datamodule's own

    @property
    def observation_space(self) -> gym.Space:
        """The space of one observation; known from ``setup`` on."""
        assert self._example_env is not None, "setup comes first"
        return self._example_env.observation_space

    @property
    def action_space(self) -> gym.Space:
        """The space of one action; known from ``setup`` on."""
        assert self._example_env is not None, "setup comes first"
        return self._example_env.action_space

    def transition_model(self) -> TransitionModel | None:
        """The environment's own transition table as tensors; None where it has none."""
        assert self._example_env is not None, "setup comes first"
        return transition_model(self._example_env)

    @property
    def ranks_differ_in_size(self) -> bool:
        """Whether rollouts have rows that are no transitions, so that ranks come to different numbers of them."""
        assert self.collector is not None
        return self.collector.mode == AUTORESET["next_step"]

    @property
    def is_complete(self) -> bool:
        """Whether ``total_timesteps`` are reached and everything of them is learned from."""
        raise NotImplementedError  # each datamodule's own

    def observation_statistics(self) -> Any:
        """What :func:`rl_modules.common.spaces.normalize` takes; None where nothing is normalised."""
        assert self.collector is not None, "statistics are gathered by training"
        normalizer = self.collector.observation_normalizer
        return None if normalizer is None else normalizer.statistics()

    def _make_collector(self) -> Collector:
        norm_obs, norm_reward, gamma, clip_obs, clip_reward = self._normalization
        return Collector(
            self._make_vector(self.n_envs, self.vectorization_mode, self.autoreset_mode),
            streams=[stream_seed(self.seed, self._rank, "train", i) for i in range(self.n_envs)],
            generator_seed=stream_seed(self.seed, self._rank, "actions"),
            name=self.env_name,
            observation_normalizer=ObservationNormalizer(self.observation_space, clip_obs) if norm_obs else None,
            reward_normalizer=RewardNormalizer(self.n_envs, gamma, clip_reward) if norm_reward else None,
            sign_reward=self.sign_reward,
            gather_news=self._gather_news if self._world_size > 1 else None,
            stats_window_size=self._stats_window_size,
        )

    def _make_vector(self, n_envs: int, vectorization_mode: str, autoreset_mode: str) -> gym.vector.VectorEnv:
        return make_vector_env(self.env_id, n_envs, vectorization_mode, autoreset_mode, self.env_kwargs, self.wrappers)

    def _require_fitting_algorithm(self) -> None:
        """Refuse to feed replayed transitions to what learns from rollouts, and the other way round."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        wanted = getattr(module, "experience", self.experience)
        if wanted != self.experience:
            fitting = {"rollouts": "RolloutDataModule", "replay": "ReplayDataModule"}[wanted]
            raise UsageError(f"{type(module).__name__} learns from {wanted}, {type(self).__name__} makes "
                             f"{self.experience}; use {fitting}")  # fmt: skip

    def _count_valid(self, valid: torch.Tensor) -> int:
        """Transitions in a rollout of all ranks."""
        count = valid.sum()
        if self._world_size > 1 and not self.ranks_differ_in_size:
            count *= self._world_size  # every row is one, on every rank
        elif self._world_size > 1:
            count = self.trainer.strategy.reduce(count, reduce_op="sum")  # type: ignore[union-attr]
        return int(count)

    def _schedule_evaluation(self) -> None:
        if self.trainer is None:
            return
        # Evaluation is counted in transitions; Lightning counts epochs. Its sanity check would play episodes of the
        # untrained policy and learn nothing from them.
        self.trainer.num_sanity_val_steps = 0
        if self.eval_freq:
            self.trainer.check_val_every_n_epoch = max(1, round(self.eval_freq / self.transitions_per_epoch))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Nothing to move: experience is made where the policy is."""
        return batch

    # ---------------------------------------------------------------- evaluation

    def val_dataloader(self) -> Any:
        if not self.eval_freq and self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return self._episodes("eval", self.n_eval_episodes)

    def test_dataloader(self) -> LazyLoader:
        return self._episodes("test", self.n_test_episodes)

    def predict_dataloader(self) -> LazyLoader:
        return self._episodes("test", self.n_test_episodes)

    def _episodes(self, purpose: str, n_episodes: int) -> LazyLoader:
        """One batch of whole episodes, played when asked for: {return, length, seed}, [n_episodes]."""

        def play() -> Iterator[Batch]:
            assert self.trainer is not None
            policy: Any = self.trainer.lightning_module
            n_envs = min(n_episodes, 50)
            envs = self._make_vector(n_envs, "sync", "same_step")
            streams = [stream_seed(self.seed, self._rank, purpose, i) for i in range(n_envs)]
            try:
                yield run_episodes(policy, envs, streams, n_episodes, self.eval_deterministic)
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

    def metrics_over_ranks(self) -> dict[str, float]:
        """:meth:`metrics` with the episodes of all ranks; all ranks call it together."""
        assert self.collector is not None
        metrics = self.metrics()
        if self._world_size > 1:
            returns, lengths = self.collector.recent_returns, self.collector.recent_lengths
            assert self.trainer is not None
            device = self.trainer.strategy.root_device
            sums = torch.tensor([sum(returns), sum(lengths), len(returns)], dtype=torch.float64, device=device)
            torch.distributed.all_reduce(sums)
            reward, length, episodes = sums.tolist()
            if episodes:
                metrics["rollout/ep_rew_mean"], metrics["rollout/ep_len_mean"] = reward / episodes, length / episodes
        return metrics

    def _gather_news(self, news: np.ndarray) -> list[np.ndarray]:
        """What every rank's statistics have seen since the last time, in the order of the ranks."""
        assert self.trainer is not None
        own = torch.from_numpy(news).to(self.trainer.strategy.root_device)
        everyone = [torch.empty_like(own) for _ in range(self._world_size)]
        torch.distributed.all_gather(everyone, own)
        return [part.cpu().numpy() for part in everyone]

    def rank_state(self) -> dict[str, Any]:
        """This rank's part of the checkpoint; a datamodule adds what it stores."""
        assert self.collector is not None
        return {"collector": self.collector.state_dict()}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`rank_state`."""
        assert self.collector is not None and self.trainer is not None
        self.collector.load_state_dict(state["collector"], self.trainer.strategy.root_device)

    def resumed_position(self, state: dict[str, Any], layout: dict[str, int]) -> int:
        """Where in its epoch a run goes on, in batches.

        Args:
            state: ``position`` and ``layout`` as the checkpoint's run had them.
            layout: this run's settings that say what the batches of an epoch are; ``length`` is their number.

        Raises:
            UsageError: the epoch is half over, and its batches were others than this run's.
        """
        saved = state["layout"]
        if saved == layout:
            return state["position"]
        if state["position"] % saved["length"]:
            changed = ", ".join(f"{name}={value} (it has {saved[name]})" for name, value in layout.items()
                                if value != saved[name] and name != "length")  # fmt: skip
            raise UsageError(f"{changed}: the checkpoint is from the middle of an epoch, whose batches can't be "
                             "changed; go on with the old settings, or from a finished run")  # fmt: skip
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, of every rank (Lightning keeps rank 0's alone)."""
        if self.collector is None:
            return {}
        own = self.rank_state()
        ranks: list[Any] = [own]
        if self._world_size > 1:
            ranks = [None] * self._world_size
            # Rank 0 writes the checkpoint; nobody else needs the others' buffers.
            torch.distributed.gather_object(own, ranks if self._rank == 0 else None, dst=0)
        return {"num_timesteps": self.num_timesteps, "ranks": ranks}

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
        self.num_timesteps = self._started_at = state_dict["num_timesteps"]
        self.load_rank_state(own)
        if self.is_complete:
            assert self.trainer is not None
            self.trainer.should_stop = True

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else int(os.environ.get("RANK", 0))

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1
