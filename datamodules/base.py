"""Base class of the control datamodules: environments, seeds, evaluation, counters, metrics."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from datamodules.collector import Collector
from datamodules.environments import Environments
from datamodules.envs.engines import check_vector
from datamodules.envs.failures import closed_on_error
from datamodules.envs.imported import EnvId
from datamodules.envs.tensors import AsArrays, returns_tensors, torch_env
from datamodules.envs.vector import AUTORESET, VECTORIZATION, as_vector
from datamodules.evaluation import Watch, has_time_limit, run_episodes, sampling_from, schedule_evaluations
from datamodules.experience import ExperienceDataModule, LazyLoader
from datamodules.normalization import Normalizers, ObservationNormalizer, RewardNormalizer
from datamodules.registered import code_of_environment, code_of_settings, code_of_wrappers
from datamodules.tensor_collector import TensorCollector
from rl_modules.common.errors import UsageError, require_same
from rl_modules.common.seeding import stream_seed
from rl_modules.contract import Learner
from rl_modules.core.seams import check_pairing
from rl_modules.core.settings import Converted, setting, warn_of_idle
from rl_modules.core.state import forget_state, persistent

Batch = dict[str, Any]


def _without_norm(switch: str) -> Any:
    """Makes the rule of an argument that has no effect while a normalisation is off."""
    return lambda self: None if getattr(self, switch) else f"while {switch} is false; set that to true"


class ControlDataModule(ExperienceDataModule):
    """Base class of the control datamodules; a subclass adds ``train_dataloader`` and its storage."""

    #: Kind of experience: ``rollouts`` of the current policy, or the ``replay`` of all transitions so far.
    kind = "rollouts"
    #: Settings that the algorithm determines if they are not given, see :meth:`resolve`.
    filled_in: ClassVar[tuple[str, ...]] = ()

    env_id: Converted[EnvId, Any] = setting(
        default="CartPole-v1",
        says="a Gymnasium id, ``package.module:callable``, a callable that returns an environment or a "
        "vector of them, or a vector",
        kw_only=False,
        stores=False,
        code=code_of_environment,
    )
    n_envs: int = setting(
        default=8,
        says="environments that step together, per rank; ignored for a vector, which has its own number",
        least=1,
        kw_only=False,
    )
    total_timesteps: int = setting(
        default=100_000,
        says="transitions, over all environments and ranks, after which training ends; the last rollout is finished",
        least=1,
    )
    seed: int = setting(
        default=0, says="source of all random streams: environments, actions, minibatches, weights", least=0
    )
    vectorization_mode: str = setting(
        default="sync",
        says="``sync``, ``async`` (a process per environment), ``vector_entry_point`` (the environment's own "
        "engine) or ``envpool`` (EnvPool's engine, an extra; evaluation stays with Gymnasium)",
        one_of=VECTORIZATION,
    )
    autoreset_mode: str = setting(
        default="same_step",
        says="``same_step``, ``next_step`` or ``disabled``. ``same_step`` and ``disabled`` give the same "
        "transitions. With ``next_step``, actions are also drawn for the reset rows, which are ignored, so later "
        "samples differ",
        one_of=tuple(AUTORESET),
    )
    env_kwargs: dict[str, Any] | None = setting(
        default=None,
        says="keyword arguments of ``gymnasium.make``, such as ``max_episode_steps``, or of the callable",
        code=code_of_settings,
    )
    wrappers: list[str | dict[str, Any]] | None = setting(
        default=None,
        says="Gymnasium wrappers around each environment, the first innermost: a name from ``gymnasium.wrappers``, an "
        "import path, or ``{'class_path': ..., 'init_args': {...}}``",
        code=code_of_wrappers,
    )
    eval_env_kwargs: dict[str, Any] | None = setting(
        default=None,
        says="keyword arguments of the environments of evaluation, which override those of ``env_kwargs``; if an "
        "engine steps in training, they replace ``env_kwargs``",
        code=code_of_settings,
    )
    eval_wrappers: list[str | dict[str, Any]] | None = setting(
        default=None,
        says="wrappers of the environments of evaluation, instead of ``wrappers``; None: the same",
        code=code_of_wrappers,
    )
    action_masks: bool = setting(
        default=True,
        says="restrict actions to those that the environment allows in an ``action_mask`` of its Dict observation or "
        "infos, or by a method ``action_masks()``. False: ignore masks",
    )
    norm_obs: bool = setting(
        default=False,
        says="normalise observations by their running mean and standard deviation; ranks share theirs after every "
        "rollout",
    )
    norm_reward: bool = setting(
        default=False, says="divide rewards by the running standard deviation of their discounted sum"
    )
    norm_gamma: float | None = setting(
        default=None,
        says="discount of that sum; None: the algorithm's γ",
        least=0,
        most=1,
        idle=_without_norm("norm_reward"),
    )
    warm_start_statistics: bool = setting(
        default=True, says="start from the running statistics of the module's last training, if it has any"
    )
    sign_reward: bool = setting(
        default=False,
        says="learn from the signs of the rewards, -1, 0 or 1, as usual for Atari (Mnih et al. 2015); logged returns "
        "and evaluations use the game's points",
    )
    clip_obs: float = setting(
        default=10.0,
        says="bound on normalised observations, in standard deviations",
        above=0,
        idle=_without_norm("norm_obs"),
    )
    clip_reward: float = setting(
        default=10.0, says="bound on normalised rewards", above=0, idle=_without_norm("norm_reward")
    )
    eval_freq: int = setting(
        default=10_000,
        says="transitions between evaluations, rounded to whole epochs; 0: no evaluation. The Trainer's "
        "``check_val_every_n_epoch`` and ``val_check_interval`` override it",
        least=0,
    )
    eval_on_start: bool | None = setting(
        default=None,
        says="evaluate before the first update too, if there are evaluations; None: only if ``eval_freq`` sets their "
        "times and the environment has a time limit, because an untrained policy may never end an episode. A resumed "
        "run does not repeat it",
    )
    n_eval_episodes: int = setting(default=10, says="episodes per evaluation, and of ``validate``", least=1)
    n_test_episodes: int = setting(default=50, says="episodes of ``test`` and ``predict``, on separate seeds", least=1)
    eval_deterministic: bool = setting(
        default=True, says="evaluate the policy's most likely actions instead of samples"
    )
    eval_max_steps: int = setting(
        default=100_000,
        says="steps after which an evaluation episode that does not end is cut, with a warning",
        least=1,
    )
    stats_window_size: int = setting(default=100, says="finished episodes in ``rollout/ep_rew_mean``", least=1)

    #: Transitions so far, over all environments and ranks.
    num_timesteps: int = persistent(0)
    _collector: Collector | None = persistent()

    def __post_init__(self) -> None:
        given: Any = as_vector(self.env_id)
        self.env_id = given
        self.environments = self._described()
        self.hparams["env_id"] = self.env_name
        if self.environments.is_one_vector:
            self.n_envs = given.num_envs
        if self.sign_reward and self.norm_reward:
            raise UsageError("sign_reward and norm_reward both scale the rewards; give one")
        #: What a progress bar and the summary see of evaluations.
        self.watch = Watch()
        # Settings as :meth:`resolve` left them.
        self._resolved: dict[str, Any] = {}
        self._started_s = time.monotonic()
        self._started_at = 0

    # ---------------------------------------------------------------- the run

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if not self.environments.is_open:
            self.environments = self._described()
            self.environments.open()
            if self.environments.makes_vector:
                check_vector(self.example_env, self)
                self.n_envs = self.example_env.num_envs
        if stage == "fit":
            warn_of_idle(self.declared_settings, self.hparams, self.idle_arguments())
            forget_state(self)
            self._collector = self.make_collector()
            self._started_at, self._started_s = 0, time.monotonic()
            self.begin_run()
            self._schedule_evaluations()
            if any(isinstance(callback, ModelPruning) for callback in getattr(self.trainer, "callbacks", ())):
                # Its own setup, which comes next, looks for the weights to prune.
                self.learner_trainer.lightning_module.configure_model()

    def _described(self) -> Environments:
        """The environments that the settings describe, which may have been assigned since the last run."""
        return Environments(
            self.env_id,
            self.env_kwargs,
            self.wrappers,
            self.eval_env_kwargs,
            self.eval_wrappers,
            self.vectorization_mode,
            self.autoreset_mode,
            self.action_masks,
            self.seed,
        )

    def resolve(self) -> None:
        """Fills in what was not given, or assigned since, with the algorithm's defaults, before each fit."""
        for name, value in self._resolved.items():
            if getattr(self, name) != value:
                self.hparams[name] = getattr(self, name)
        self._resolve()
        self._resolved = {name: getattr(self, name) for name in self.filled_in}

    def _resolve(self) -> None:
        """Sets the attributes :attr:`filled_in`."""

    def begin_run(self) -> None:
        """Resets the state of a run before a checkpoint is loaded; a subclass resets its storage.

        Raises:
            UsageError: the algorithm learns from another kind of experience.
        """
        check_pairing(self.learner if self.has_learner else None, self)

    def _on_exception(self, exception: BaseException) -> None:
        # The module's `on_fit_end`, which resets this for the whole process, is not called then.
        torch.set_flush_denormal(False)
        # Nor is `teardown`. The callbacks have written their checkpoints.
        self._teardown("fit")

    def _teardown(self, stage: str) -> None:
        if stage == "fit" and self._collector is not None and not self.environments.is_one_vector:
            self._collector.close()
        self.environments.close()

    @property
    def has_learner(self) -> bool:
        """Whether a Trainer has attached an algorithm of this project; other modules may call the loaders too."""
        return self.trainer is not None and hasattr(self.trainer.lightning_module, "experience")

    @property
    def learner(self) -> Learner:
        """The algorithm of the run."""
        return cast(Learner, self.learner_trainer.lightning_module)

    @property
    def collector(self) -> Collector:
        """Steps the environments; available after ``setup("fit")``."""
        if self._collector is None:
            raise RuntimeError("the environments are made by setup('fit'), which comes first")
        return self._collector

    @property
    def env_name(self) -> str:
        """The environment's name in messages and checkpoints."""
        return self.environments.name

    @property
    def example_env(self) -> Any:
        """One environment, or the vector; available between ``setup`` and ``teardown``."""
        return self.environments.example

    @property
    def observation_space(self) -> gym.Space:
        """The space of one observation; available after ``setup``."""
        return self.environments.observation_space

    @property
    def action_space(self) -> gym.Space:
        """The space of one action; available after ``setup``."""
        return self.environments.action_space

    def transition_model(self) -> Any:
        """Returns the environment's transition table as tensors; None if the environment has none."""
        return self.environments.transition_model()

    @property
    def transitions_per_epoch(self) -> int:
        """Number of transitions per epoch, over all ranks."""
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """Whether ``total_timesteps`` transitions were collected and all of them were learned from."""
        raise NotImplementedError

    @property
    def ranks_differ_in_size(self) -> bool:
        """Whether rollouts can contain reset rows, so that the number of transitions differs between ranks."""
        return self.collector.mode == AutoresetMode.NEXT_STEP

    # ---------------------------------------------------------------- the state of all ranks

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of every rank, which a run needs to resume exactly; empty before ``setup("fit")``."""
        if self._collector is None:
            return {}
        return {"num_timesteps": self.num_timesteps, "n_envs": self.n_envs, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.is_fitting:
            return
        require_same("n_envs", self.n_envs, state_dict.get("n_envs"))
        super().load_state_dict(state_dict)
        self._started_at = state_dict["num_timesteps"]
        self.learner_trainer.should_stop |= self.is_complete

    # ---------------------------------------------------------------- environments and statistics

    def make_collector(self) -> Collector:
        """Makes what steps the environments of training, and opens these."""
        envs, kind = self.environments.for_training(self.n_envs), Collector
        if self.environments.makes_vector or self.environments.has_engine:
            vector = torch_env(envs)
            if vector is not None and self.kind == "rollouts" and self.trainer is not None:
                vector.to(self.trainer.strategy.root_device)
            if vector is not None or (self.environments.makes_vector and returns_tensors(envs, self.seed)):
                if self.kind == "replay":
                    envs = AsArrays(envs)
                else:
                    kind = TensorCollector
        with closed_on_error(*(() if self.environments.makes_vector else (envs,))):
            return kind(
                envs,
                streams=[stream_seed(self.seed, self._rank, "train", i) for i in range(self.n_envs)],
                generator_seed=stream_seed(self.seed, self._rank, "actions"),
                name=self.env_name,
                normalizers=self._make_normalizers() if self.norm_obs or self.norm_reward else None,
                sign_reward=self.sign_reward,
                stats_window_size=self.stats_window_size,
                returns_raw=self.kind == "replay",
            )

    def _make_normalizers(self) -> Normalizers:
        gamma = self.norm_gamma
        if gamma is None:
            gamma = getattr(self.learner, "gamma", 0.99) if self.has_learner else 0.99
        normalizers = Normalizers(
            ObservationNormalizer(self.observation_space, self.clip_obs) if self.norm_obs else None,
            RewardNormalizer(self.n_envs, gamma, self.clip_reward) if self.norm_reward else None,
        )
        for part in normalizers.parts() if self._world_size > 1 else ():
            part.track_own()
        return normalizers

    def begin_statistics(self) -> None:
        """Copies the statistics of an earlier run into the normalisers; called before the first collection."""
        if not self.has_learner:
            return
        state, normalizers = self.learner.normalizer_state, self.collector.normalizers
        if normalizers is None:
            self.hand_over_statistics()
        if not self.collector.is_fresh:
            return
        if state is not None and state["observation"] is not None and not self.norm_obs:
            rank_zero_warn(
                "norm_obs=False, but the weights were trained on normalised observations; give "
                "norm_obs=True to continue with their statistics"
            )
        if state is not None and normalizers is not None and self.warm_start_statistics:
            normalizers.warm_start(state)

    def after_collecting(self, valid: torch.Tensor) -> None:
        """Counts a rollout's transitions, and passes the new statistics to every rank and to the learner."""
        trainer: Any = self.trainer
        count, ranks = valid.sum(), trainer.world_size
        if ranks > 1 and not self.ranks_differ_in_size:
            count *= ranks  # every row is a transition, on every rank
        elif ranks > 1:
            # Replayed experience is on the CPU.
            count = trainer.strategy.reduce(count.to(trainer.strategy.root_device), reduce_op="sum")
        self.num_timesteps += int(count)
        normalizers = self.collector.normalizers
        if normalizers is not None:
            if ranks > 1:
                normalizers.merge_ranks(self._gather)
            self.hand_over_statistics()

    def hand_over_statistics(self) -> None:
        """Passes the statistics of the normaliser to the learner, which evaluates and saves with them."""
        module: Any = self.learner_trainer.lightning_module
        normalizers = self.collector.normalizers
        if hasattr(module, "experience"):  # an algorithm of this project
            module.observation_statistics = None if normalizers is None else normalizers.statistics()
            module.normalizer_state = None if normalizers is None else normalizers.state_dict()

    def _gather(self, own: np.ndarray) -> list[np.ndarray]:
        """Every rank's array, in the order of the ranks."""
        part = torch.from_numpy(own).to(self.learner_trainer.strategy.root_device)
        everyone = [torch.empty_like(part) for _ in range(self._world_size)]
        torch.distributed.all_gather(everyone, part)
        return [other.cpu().numpy() for other in everyone]

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Moves nothing: experience is collected on the policy's device."""
        return batch

    # ---------------------------------------------------------------- evaluation

    def _schedule_evaluations(self) -> None:
        if self.trainer is None:
            return
        if self.eval_freq and self.environments.is_one_vector:
            rank_zero_warn(
                f"{self.env_name} was given as one vector, in which training steps: it is not evaluated; "
                "give a callable that makes it, or eval_freq=0"
            )
        has_limit = has_time_limit(self.example_env)
        schedule_evaluations(self.trainer, self.eval_freq, self.transitions_per_epoch, self.eval_on_start, has_limit)

    def val_dataloader(self) -> Any:
        if self.is_fitting and (not self.eval_freq or self.environments.is_one_vector):
            return []
        return self._episodes("eval", self.n_eval_episodes)

    def test_dataloader(self) -> LazyLoader:
        return self._episodes("test", self.n_test_episodes)

    def predict_dataloader(self) -> LazyLoader:
        return self._episodes("test", self.n_test_episodes)

    def _episodes(self, purpose: str, n_episodes: int) -> LazyLoader:
        """One batch of whole episodes, played on demand: what :func:`run_episodes` returns."""

        def play() -> Iterator[Batch]:
            envs = self.environments.for_evaluation(min(n_episodes, 50))
            streams = [stream_seed(self.seed, self._rank, purpose, i) for i in range(envs.num_envs)]
            with sampling_from(self.learner, stream_seed(self.seed, self._rank, f"{purpose} actions")):
                batch = run_episodes(
                    self.learner,
                    envs,
                    streams,
                    n_episodes,
                    self.eval_deterministic,
                    self.eval_max_steps,
                    self.env_name,
                    self.watch,
                )
            yield batch

        return LazyLoader(1, play)

    # ---------------------------------------------------------------- metrics

    @property
    def partial_return(self) -> float:
        """Mean return so far of the running episodes; replaces the mean return until the first episode ends."""
        return float(self.collector.episodes.running_return.mean())

    def metrics(self) -> dict[str, float]:
        """Returns ``rollout/*`` over the last finished episodes, and ``time/*``."""
        elapsed_s = time.monotonic() - self._started_s
        metrics = {
            "time/fps": (self.num_timesteps - self._started_at) / max(elapsed_s, 1e-9),
            "time/time_elapsed": elapsed_s,
            "time/total_timesteps": float(self.num_timesteps),
        }
        return {**metrics, **self.collector.episodes.means()}

    def metrics_over_ranks(self) -> dict[str, float]:
        """Returns :meth:`metrics` over the episodes of all ranks; all ranks must call it."""
        if self._world_size == 1:
            return self.metrics()
        strategy = self.learner_trainer.strategy

        def total(own: torch.Tensor) -> torch.Tensor:
            return strategy.reduce(own.to(strategy.root_device), reduce_op="sum")

        return {**self.metrics(), **self.collector.episodes.means(total)}
