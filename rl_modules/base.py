"""Base of the control algorithms: building the network, acting, schedules, the optimizer, checkpoints."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import lightning as L
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules import ranks
from rl_modules.algorithm import Algorithm
from rl_modules.checkpoints import (
    SPACES,
    load_initial_weights,
    load_statistics,
    require_resumable,
    require_same_optimizers,
    statistics_to_tensors,
)
from rl_modules.common.arguments import settings_of
from rl_modules.common.checkpoint_file import chosen_by_checkpoint
from rl_modules.common.errors import UsageError
from rl_modules.common.factories import (
    Custom,
    factory_names,
    missing_factories,
    require_callable,
    require_class,
    to_plain,
    warn_of_missing,
)
from rl_modules.common.factories import build as made_by
from rl_modules.common.masks import split_space
from rl_modules.common.modules import evaluation_mode
from rl_modules.common.schedules import parse_schedule, schedule_value
from rl_modules.common.spaces import check_same_space, space_from_dict, space_to_dict, to_environment
from rl_modules.contract import MINIBATCHES, Experience, ExperienceSource, Learner, Minibatch, RolloutSource, Statistics
from rl_modules.core.curves import hand_to_callbacks
from rl_modules.core.resume import (
    accumulated_gradients,
    copy_for_averages,
    draw_over,
    finish_batch,
    resume_training,
    step_schedulers_of_epochs,
)
from rl_modules.core.seams import DATAMODULES, check_schedulers, check_source, check_trainer
from rl_modules.core.settings import setting, warn_of_idle
from rl_modules.core.state import persistent, transient
from rl_modules.exploration import NoiseMatrices, check_sde, exploring_act
from rl_modules.fast.graphs import is_recording
from rl_modules.loggers import log_settings
from rl_modules.metrics import (
    draw,
    log_evaluation,
    log_outside_of_graphs,
    means_so_far,
    require_finite_weights,
    write_metrics,
)
from rl_modules.networks.encoders import extractor_of
from rl_modules.optimizers import adam, class_names, clip_grad_norm
from rl_modules.prediction import policy_input
from rl_modules.ranks import CHECKPOINT

OptimizerFactory = Callable[[Iterable], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def check_rate(name: str, value: Any) -> Any:
    """Refuses what is no schedule."""
    if value is not None:
        parse_schedule(value, name)
    return value


def plain_space(value: Any) -> Any:
    """Describes a space as plain data."""
    return space_to_dict(value) if isinstance(value, spaces.Space) else value


def beside_network(module: Any) -> str | None:
    """The reason why an argument of the project's networks is idle."""
    if module.hparams.get("network") is None:
        return None
    return "beside network, which is the whole network; give it to that as one of its init_args"


class ControlModule(Algorithm):
    """Base class of the control algorithms; a subclass defines ``build_network``, ``act``, ``prepare`` and
    ``training_step``.
    """

    #: Advice in the error for arguments that belong to the datamodule or the Trainer.
    called_elsewhere = (
        "environments and their counts belong to the datamodule (RolloutDataModule or ReplayDataModule), devices and "
        "loggers to the Trainer"
    )
    #: Hyperparameters that decide which fields :meth:`prepare` returns.
    prepares_by: tuple[str, ...] = ()
    #: Gymnasium action spaces that the algorithm can act in.
    supported_action_spaces: tuple[type[spaces.Space], ...] = (
        spaces.Discrete,
        spaces.Box,
        spaces.MultiDiscrete,
        spaces.MultiBinary,
    )
    #: Kind of experience that the algorithm learns from; it sets the datamodule's defaults.
    experience: Experience = MINIBATCHES
    #: Metrics by which a checkpoint can be selected as the best. Every evaluation logs them; the last one only if
    #: the environment reports ``is_success``.
    evaluation_metrics: tuple[str, ...] = (
        "eval/mean_reward", "eval/std_reward", "eval/mean_ep_length", "rollout/ep_rew_mean", "eval/success_rate",
    )  # fmt: skip
    #: Global norm to clip gradients to where the Trainer sets no ``gradient_clip_val``; None: no clipping.
    max_grad_norm: float | None = None
    #: Matrices of state-dependent noise for the rollout that is being collected.
    noise_matrices: NoiseMatrices | None = None
    #: Whether observations come with an ``action_mask``.
    masks_actions = False
    #: Hyperparameters that name a network by its import path; loading a checkpoint makes those that are classes.
    own_networks: ClassVar[tuple[str, ...]] = ("network", "features_extractor")

    learning_rate: float | str | None = setting(
        None, "step size; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0 over ``total_timesteps``, "
        "points such as ``0:3e-4, 1:0`` (share of training: value), or None for the optimizer's own",
        check=check_rate)  # fmt: skip
    optimizer: OptimizerFactory | None = setting(
        None, "callable from parameters to an optimizer; None: the algorithm's", attribute="optimizer_factory",
        stored=False, check=require_callable)  # fmt: skip
    lr_scheduler: SchedulerFactory | None = setting(
        None, "callable from the optimizer to a torch scheduler, stepped once per epoch; not together with a decaying "
        "``learning_rate``", attribute="scheduler_factory", stored=False, check=require_callable)  # fmt: skip
    log_every: int = setting(
        1, "epochs between two points of the ``train/*`` and ``rollout/*`` curves", least=1, unit="epoch")  # fmt: skip
    #: After `configure_model` the space of what the network sees: an ``action_mask`` is not part of it.
    observation_space: Any = setting(
        None, "description of the space, see :func:`rl_modules.common.spaces.space_to_dict`, or the space itself; None "
        "takes the datamodule's", kind=dict[str, Any] | None, attribute="", stores=plain_space)  # fmt: skip
    action_space: Any = setting(None, "likewise", kind=dict[str, Any] | None, attribute="", stores=plain_space)
    init_from: str | None = setting(
        None, "checkpoint whose weights and normaliser statistics a ``fit`` starts from; None: new weights",
        attribute="")  # fmt: skip
    network: Any = setting(
        None, "module class or callable that makes the whole network from both spaces: an import path, or class_path "
        "with init_args; None: built from the other arguments", kind=Custom | None, attribute="",
        check=to_plain)  # fmt: skip
    features_extractor: Any = setting(
        None, "likewise, for the part that turns an observation into ``features_dim`` numbers; None: by the space",
        kind=Custom | None, attribute="", check=to_plain)  # fmt: skip

    graph: bool = setting(
        False, "record the computation once as a CUDA graph and replay it: with environments in torch (``torch/…``) "
        "rollout, advantages and updates, with a replay buffer the update. Without CUDA the same function is "
        "called")  # fmt: skip

    #: What makes the optimizer and the scheduler; None: the algorithm's.
    optimizer_factory: OptimizerFactory | None
    scheduler_factory: SchedulerFactory | None
    #: Statistics that normalise observations; the datamodule sets them after every rollout.
    observation_statistics: Statistics = None
    #: State of the normalisers that the weights were trained with; None: raw observations and rewards.
    normalizer_state: dict[str, Any] | None = None
    #: Whether this epoch's diagnostics are written. They cost kernels, so others are not computed.
    logs_this_epoch = True
    # Values that hold once per epoch, objects of torchmetrics, and what this epoch's end writes; None: nothing is due.
    _latest: dict[str, Tensor | float] = persistent({})
    _objects: dict[str, Any] = transient({})
    _point: tuple[dict[str, float], int] | None = transient()
    _predict_generator: torch.Generator | None = transient()
    # Transitions so far when `end_rollout` was last called.
    _ended_at: int = persistent(0)

    def __post_init__(self) -> None:
        for name in chosen_by_checkpoint(self).intersection(self.own_networks):
            require_class(name, self.hparams.get(name))
        if self.hparams.get("network") is not None and self.hparams.get("features_extractor") is not None:
            raise UsageError("network and features_extractor are both given; network is the whole network, with its "
                             "own features")  # fmt: skip
        decays = self.learning_rate is not None and parse_schedule(self.learning_rate, "learning_rate").decays
        if decays and self.scheduler_factory:
            raise UsageError(f"learning_rate={self.learning_rate!r} and lr_scheduler both change the learning rate; "
                             "give one")  # fmt: skip
        if self.graph:
            self.automatic_optimization = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.experience, Experience):
            raise UsageError(f"{cls.__name__}.experience={cls.experience!r} must be an Experience, such as REPLAY or "
                             "MINIBATCHES of rl_modules.contract")  # fmt: skip
        # Lightning asks for this signature at every batch, and Python builds it anew each time unless it is stored:
        # 1 % of PPO's run, 5 % of DQN's with Stable-Baselines3's defaults.
        if "training_step" in vars(cls):
            step: Any = cls.training_step
            step.__signature__ = inspect.signature(step)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets this name some forty times per batch; through torch's bookkeeping of parameters and submodules
        # that takes 4 % of the run.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # ---------------------------------------------------------------- the run

    @property
    def is_built(self) -> bool:
        """Whether the network has been built."""
        return "network" in self._modules

    @property
    def source(self) -> ExperienceSource:
        """The datamodule of the run."""
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is None:
            raise UsageError(f"{type(self).__name__} learns from a datamodule: give the Trainer's fit "
                             f"datamodule={DATAMODULES[self.experience.kind]}(...)")  # fmt: skip
        return cast(ExperienceSource, datamodule)

    @property
    def place(self) -> int:
        return self.source.num_timesteps

    @property
    def is_cut_off(self) -> bool:
        """Whether a resumed run has batches left in the last epoch; a run that reached ``total_timesteps`` has none."""
        return super().is_cut_off and not self.source.is_complete

    @property
    def discount(self) -> float | None:
        """γ; None if the algorithm has no discount."""
        return getattr(self, "gamma", None)

    def configure_model(self) -> None:
        """Builds the network from the spaces; at the start of ``fit`` resets the state of the run."""
        check_trainer(self)
        if self._trainer is not None and getattr(self._trainer, "datamodule", None) is not None:
            check_source(self, self.source, self.is_fitting)
            take_spaces(self)
        if self.is_built and not hasattr(self, "action_space"):
            raise UsageError(f"{type(self).__name__}.network was set before its spaces were known; set it in "
                             "build_network, or give the argument network")  # fmt: skip
        if self.is_fitting:
            self.source  # noqa: B018 - raises where the Trainer was given no datamodule
        if not self.is_built:
            build(self)
            if self.is_fitting:
                copy_for_averages(self)
        if self.is_fitting:
            if self.hparams.get("init_from") and not self.trainer.ckpt_path:
                load_initial_weights(self, self.hparams["init_from"])  # the target network's among them
            else:
                self.begin_target()
            self.begin_run()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads weights; builds the network first where the spaces were given as arguments."""
        # What a rank returned brings the spaces.
        if not self.is_built and CHECKPOINT not in state_dict:
            self.configure_model()
        return super().load_state_dict(state_dict, strict, assign)

    def begin_run(self) -> None:
        super().begin_run()
        self.run.rate_applied = self.learning_rate
        if self.graph:
            self.__dict__.pop("training_step", None)
            from rl_modules.fast.updates import MeansInPlace  # only recordings need it

            self._means = MeansInPlace()

    def followed(self) -> torch.nn.Module:
        """Returns the part of the network that ``target_network`` follows, if the algorithm has a target network."""
        return self.network

    @torch.no_grad()
    def begin_target(self) -> None:
        """Copies the followed weights to ``target_network``: another ``fit`` or a user's loop may have trained them. A
        target of another form, which a subclass may define, stays unchanged.
        """
        if (target := self._modules.get("target_network")) is None:
            return
        for ours, theirs in ((target.parameters(), self.followed().parameters()),
                             (target.buffers(), self.followed().buffers())):  # fmt: skip
            copies, originals = list(ours), list(theirs)
            if copies and [x.shape for x in copies] == [x.shape for x in originals]:
                torch._foreach_copy_(copies, originals)

    def check_spaces(self) -> None:
        """Refuses an action space that the algorithm does not support."""
        if not isinstance(self.action_space, self.supported_action_spaces):
            fitting = ", ".join(space.__name__ for space in self.supported_action_spaces)
            raise UsageError(f"{type(self).__name__} can't act in the action space {self.action_space}; it does "
                             f"{fitting}")  # fmt: skip
        if self.hparams.get("use_sde"):
            check_sde(self)

    def build_network(self) -> None:
        """Sets ``self.network`` from ``self.observation_space`` and ``self.action_space``."""
        raise UsageError(f"{type(self).__name__} must define build_network")

    # ---------------------------------------------------------------- acting

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Chooses actions for a batch of observations.

        Args:
            observation: [N, *obs] tensor, or nested dictionary of such; normalised where the datamodule normalises.
            generator: source of the randomness.
            deterministic: the most likely action instead of a sample.

        Returns:
            ``action`` [N, *act], and other values to store with the transition in a rollout; replay stores actions
            alone.
        """
        raise UsageError(f"{type(self).__name__} must define act")

    def rollout_act(self) -> Callable[..., Any]:
        """Returns the function that collects one rollout: ``act``, with ``use_sde`` with that rollout's noise."""
        return exploring_act(self) if self.hparams.get("use_sde") else self.act

    def prepare(self, rollout: Any) -> Minibatch:
        """Computes the inputs of the loss from new experience; called once per rollout, or per sample of the buffer.

        Args:
            rollout: a :class:`~rl_modules.contract.Rollout` or :class:`~rl_modules.contract.Replayed`.

        Returns:
            A :class:`~rl_modules.contract.Minibatch` of all its rows, with the fields that ``training_step`` reads.
        """
        raise UsageError(f"{type(self).__name__} must define prepare")

    def end_rollout(self, rollout: Minibatch) -> None:
        """Called once after the last minibatch of each rollout, before a checkpoint is written; does nothing here.

        Args:
            rollout: what :meth:`prepare` returned, flat over its transitions.
        """

    def forward(self, observation: Any) -> Tensor:
        """Returns the most likely actions, [N, *act], for a batch of observations as in ``act``."""
        return self.act(observation, deterministic=True)["action"]

    @torch.no_grad()
    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Chooses actions in NumPy, with the signature of Stable-Baselines3's ``predict``.

        Args:
            observation: one observation or a batch of them, as the environment returns it (not normalised).
            state: recurrent state, as the last call returned it; None: new episodes. Feed-forward policies return it
                unchanged.
            episode_start: true where an episode begins, so that the recurrent state is reset.
            deterministic: the most likely action instead of a sample. Samples are from a private stream, which torch's
                global generator seeds at the first one.
            action_masks: true where an action is allowed, for one observation or for each of a batch, in the forms that
                environments give: sb3-contrib's layout, or a part for each choice; None: the observation's
                ``action_mask``, or, without one or where the module was trained without masks, all actions.

        Returns:
            The actions for the environment (Box actions clipped to their bounds), and the next ``state``.

        Raises:
            UsageError: the observation has another shape than the space.
        """
        if not self.is_built:
            self.configure_model()
        tensors, n, single = policy_input(self, observation, action_masks)
        if not deterministic and (self._predict_generator is None or self._predict_generator.device != self.device):
            self._predict_generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, ())))
        with evaluation_mode(self.modules()):
            memory = self.memory_arguments(n, state, episode_start)
            acted = self.act(tensors, generator=self._predict_generator, deterministic=deterministic, **memory)
        if "next_state" in acted:
            state = acted["next_state"].cpu().numpy()
        action = to_environment(self.action_space, acted["action"].cpu().numpy())
        return (action[0] if single else action), state

    @contextmanager
    def sampling_from(self, seed: int) -> Iterator[None]:
        """Makes :meth:`predict` draw its samples from a separate random stream, as an evaluation does.

        Args:
            seed: seed of the stream; outside of the context, ``predict`` continues its own stream.
        """
        kept, self._predict_generator = self._predict_generator, torch.Generator(self.device).manual_seed(seed)
        try:
            yield
        finally:
            self._predict_generator = kept

    def memory_arguments(self, n: int, state: Any, episode_start: np.ndarray | None) -> dict[str, Any]:
        """Returns additional arguments of ``act`` for n observations; a recurrent policy adds its state."""
        return {}

    # ---------------------------------------------------------------- curves

    def record(self, **metrics: Tensor | float) -> None:
        """Adds scalars of one minibatch; their mean over the epoch is logged as ``train/<name>``.

        Any number of names, in any subset of the updates. Does nothing in epochs that are not logged, nor in
        evaluations, which call ``act`` too.
        """
        evaluates = self._trainer is not None and self._trainer.evaluating
        if self.logs_this_epoch and not evaluates:
            self._means.add({f"train/{name}": value for name, value in metrics.items()})

    def record_now(self, **metrics: Tensor | float) -> None:
        """Sets numbers that hold once per epoch, such as a coefficient; the last value is logged."""
        self._latest.update({name if "/" in name else f"train/{name}": value for name, value in metrics.items()})

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:  # type: ignore[override]
        """Lightning's ``log``. In training the epoch's mean is drawn over ``total_timesteps``, like every curve; by
        ``reduce_fx`` its sum, largest or smallest value.

        Args:
            name: of the curve.
            value: a number, a scalar tensor, or an object of torchmetrics.
            prog_bar: show it in Lightning's progress bar.
            logger: False: known to callbacks, but not drawn.
            **options: Lightning's others.
        """
        if torch.compiler.is_compiling():
            log_outside_of_graphs(self, name, value, prog_bar, logger, **options)
            return
        value = value.item() if isinstance(value, np.generic) else value
        if draw(self, name, value, options.get("reduce_fx", "mean"), logger):
            if is_recording():
                return  # a replay would not call Lightning's part
            logger, options = False, {**options, "on_step": False, "on_epoch": True}
        super().log(name, value, prog_bar=prog_bar, logger=logger, **options)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        log_evaluation(self, batch, "eval")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        log_evaluation(self, batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return batch

    # ---------------------------------------------------------------- parts of hooks

    def _on_fit_start(self) -> None:
        log_settings(self.trainer)
        warn_of_missing(self, self.run.missing_factories)
        self.run.missing_factories = {}
        # A unit that is no longer active leaves moments of 1e-40 in Adam, with which a CPU computes four times slower.
        torch.set_flush_denormal(True)

    def _on_fit_end(self) -> None:
        torch.set_flush_denormal(False)

    def _on_train_start(self) -> None:
        check_schedulers(self)
        require_same_optimizers(self)
        resume_training(self)
        self._means.to(self.device)
        # Of the epoch that ends there, if one does: Lightning counts it as done.
        self.logs_this_epoch = self.current_epoch % self.log_every == 0
        finish_batch(self.trainer)
        # As in Stable-Baselines3, targets come without dropout and from running statistics. Not earlier: Lightning
        # warns of parts in evaluation mode before this.
        if (target := self._modules.get("target_network")) is not None:
            target.eval()
        if self.graph:
            self.__dict__["training_step"] = self.recorded_step()
        # A run that resumes in the middle of an epoch begins no epoch and, within a rollout, brings no new experience.
        self._on_train_epoch_start()
        self.run.scheduled_at = self.source.num_timesteps
        self.update_schedules(self.progress_remaining)

    def recorded_step(self) -> Callable[[Any, int], None]:
        """Returns what replaces ``training_step`` under ``graph=True``."""
        if self.experience.kind == "replay":
            from rl_modules.fast.updates import RecordedUpdate

            return RecordedUpdate(self)
        return cast(RolloutSource, self.source).recorded_iteration()

    def recording_key(self) -> tuple[Any, ...]:
        """Returns what Python branches of the update depend on besides settings: each value has its own recording."""
        return (self.logs_this_epoch,)

    def _on_train_end(self) -> None:
        if self.graph:  # not what torch.compile has put there
            self.__dict__.pop("training_step", None)
        if (target := self._modules.get("target_network")) is not None:
            target.train()

    def _on_train_epoch_start(self) -> None:
        """Decides whether this epoch's diagnostics are computed."""
        self.logs_this_epoch = (self.current_epoch + 1) % self.log_every == 0

    def _on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        timesteps = self.source.num_timesteps
        if timesteps != self.run.scheduled_at:
            self.run.scheduled_at = timesteps
            self.update_schedules(self.progress_remaining)

    def _on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        finish_rollout(self)

    def _on_validation_start(self) -> None:
        if self.is_fitting:
            # Lightning draws over this count what a subclass or a callback logs in an evaluation.
            draw_over(self.trainer, self.place)
            # An evaluation comes before the epoch's end: its callbacks monitor the means so far, also after a resume.
            hand_to_callbacks(self.trainer, means_so_far(self))

    def _on_train_epoch_end(self) -> None:
        self._point = None
        require_finite_weights(self)
        # What Lightning and its callbacks log by themselves is drawn over this count: here, over transitions.
        draw_over(self.trainer, self.place)
        rollout = self.source.metrics_over_ranks()
        # For Lightning's bar, EarlyStopping and ModelCheckpoint, which need a value in every epoch, before the first
        # episode's end too.
        mean = rollout.get("rollout/ep_rew_mean", self.source.partial_return)
        self.log("rollout/ep_rew_mean", mean, prog_bar=True, logger=False, sync_dist=self.trainer.world_size > 1)
        writes = self.logs_this_epoch and not self.is_cut_off
        hook: Any = type(self).on_train_epoch_end
        if self.is_cut_off or (writes and hook.framed is not L.LightningModule.on_train_epoch_end):
            # A cut epoch's point is written at its end, by the run that resumes, and callbacks monitor the means so
            # far. A subclass's hook may read them.
            hand_to_callbacks(self.trainer, means_so_far(self))
        if writes:
            # Without an optimizer Lightning has one that has no parameters.
            if self.trainer.optimizers and self.trainer.optimizers[0].param_groups:
                self.record_now(learning_rate=self.trainer.optimizers[0].param_groups[0]["lr"])
            if self.grad_norm is not None:
                self.record_now(grad_norm=float(self.grad_norm))
            self._point = (rollout, self.place)

    def _after_on_train_epoch_end(self) -> None:
        if self._point is not None:
            write_metrics(self, *self._point)

    def gradients_so_far(self) -> dict[str, Tensor]:
        found = accumulated_gradients(self) if self.is_fitting and self.automatic_optimization else {}
        return {name: gradient.cpu().clone() for name, gradient in found.items()}

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.is_fitting:
            # At the end of a minibatch callbacks, which may write a checkpoint, come before the module.
            finish_rollout(self)
        super()._on_save_checkpoint(checkpoint)
        checkpoint["factories"] = factory_names(self)
        checkpoint["env_id"] = getattr(getattr(self._trainer, "datamodule", None), "env_name", None)
        checkpoint["observation_statistics"] = statistics_to_tensors(self.observation_statistics)
        checkpoint["normalizer_state"] = self.normalizer_state
        checkpoint["optimizer_classes"] = class_names(self.trainer.optimizers) if self.is_fitting else None

    def _on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._require_own(checkpoint)
        if self._trainer is not None:
            require_resumable(self, checkpoint)
        load_statistics(self, checkpoint)
        if not self.is_built:
            self.configure_model()
        super()._on_load_checkpoint(checkpoint)
        if self._trainer is None or self.is_fitting:
            self.run.missing_factories = missing_factories(self, checkpoint)
        if self.is_fitting:
            # In the optimizers' state; absent where a subclass sets it by itself.
            self.run.rate_applied = settings_of(checkpoint).get("learning_rate", self.run.rate_applied)
            self.run.optimizers_saved = checkpoint.get("optimizer_classes")

    def weights_to_start_from(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns the weights of an earlier run's checkpoint that ``init_from`` loads; an algorithm omits those that a
        new argument replaces.
        """
        return checkpoint["state_dict"]

    # ---------------------------------------------------------------- schedules and ranks

    @property
    def progress_remaining(self) -> float:
        """Remaining share of ``total_timesteps``, from 1 down to 0; the last rollout may end after it."""
        return max(0.0, 1.0 - self.source.num_timesteps / self.source.total_timesteps)

    def update_schedules(self, progress_remaining: float) -> None:
        """Sets every scheduled value; called at the start and after new experience was collected."""
        for name, schedule in self.schedules.items():
            if schedule.decays:
                value = schedule_value(schedule, progress_remaining)
                setattr(self, name, max(value, self.declared_settings[name].least))
        if self.learning_rate is None:
            return
        schedule = parse_schedule(self.learning_rate, "learning_rate")
        # A constant is set once: afterwards `lr_scheduler` or a callback may change the optimizer's rate.
        is_new = self.learning_rate != self.run.rate_applied and self.scheduler_factory is None
        if schedule.decays or is_new:
            for optimizer in self.trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = schedule_value(schedule, progress_remaining)
        self.run.rate_applied = self.learning_rate

    @property
    def _is_alone(self) -> bool:
        return self._trainer is None or self._trainer.world_size == 1

    def rank_weight(self, n: int) -> float:
        """Returns the weight of this rank's mean over ``n`` transitions in the mean over all ranks. The weight is 1
        unless the vector environment has reset rows, so that the ranks have different numbers of transitions.
        """
        if self._is_alone or not self.source.ranks_differ_in_size:
            return 1.0
        return ranks.rank_weight(n, self.device)

    def loss_over_ranks(self, loss: Tensor, n: int) -> Tensor:
        """Returns a minibatch's loss so that its mean over ranks is that over all their transitions, n on this one."""
        weight = self.rank_weight(n)
        return loss if weight == 1.0 else loss * weight

    def mean_over_ranks(self, x: Tensor) -> Tensor:
        """Returns the mean of a tensor over ranks, which call this together."""
        return self.trainer.strategy.reduce(x, reduce_op="mean")

    # ---------------------------------------------------------------- optimizer

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns the default optimizer: Adam at 3e-4 with eps 1e-5, as in the original PPO."""
        return self.adam(parameters, lr=3e-4, eps=1e-5)

    def adam(self, parameters: Iterable, lr: float, eps: float) -> torch.optim.Optimizer:
        """Returns Adam, fused except under mixed precision, where Lightning refuses to clip gradients of fused
        optimizers.
        """
        return adam(parameters, lr, eps, fused=self.trainer.precision in ("32-true", "64-true"))

    def configure_optimizers(self) -> Any:
        optimizer = made_by("optimizer", self.optimizer_factory or self.default_optimizer, self.trainable_parameters())
        if self.learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = parse_schedule(self.learning_rate, "learning_rate")[0]
        if self.scheduler_factory is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": made_by("lr_scheduler", self.scheduler_factory, optimizer)}

    def step_schedulers(self) -> None:
        """Steps the learning-rate schedulers of epochs after one, as Lightning does under automatic optimization: those
        whose ``frequency`` divides the number of epochs.

        """
        step_schedulers_of_epochs(self)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        # The optimizer's own method does the same inside a profiler's scope, which takes longer than the work.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def trainable_parameters(self) -> Iterable:
        """Returns the parameters to optimize: the network's, then those of a subclass's own parts; a target network
        follows by itself.
        """
        network, target = list(self.network.parameters()), getattr(self, "target_network", None)
        apart = {id(p) for p in [*network, *(() if target is None else target.parameters())]}
        return [*network, *(p for p in self.parameters() if id(p) not in apart)]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips to the Trainer's ``gradient_clip_val``, or to the algorithm's ``max_grad_norm`` if the Trainer sets
        none.
        """
        if gradient_clip_val is None and self.max_grad_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.grad_norm = clip_grad_norm(parameters, self.max_grad_norm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")


def finish_rollout(module: ControlModule) -> None:
    """Calls ``end_rollout`` where a rollout has no further minibatch, once."""
    source: Any = module.source
    if type(module).end_rollout is ControlModule.end_rollout or not source.rollout_is_used_up:
        return
    if module._ended_at != source.num_timesteps:
        module._ended_at = source.num_timesteps
        module.end_rollout(source.rollout)


# ---------------------------------------------------------------- before a run


def take_spaces(module: ControlModule) -> None:
    """Takes the datamodule's spaces, or refuses others than those of the weights."""
    source = module.source
    for name in SPACES:
        space = getattr(source, name)
        if module.hparams.get(name) is None:
            module.hparams[name] = space_to_dict(space)
        elif module.is_built or module.is_fitting:
            mine = space_from_dict(module.hparams[name])
            check_same_space(name, mine, space, type(module).__name__, source.env_name)


def build(module: ControlModule) -> None:
    """Builds the network from the spaces among the hyperparameters."""
    hp = module.hparams
    if hp.get("observation_space") is None or hp.get("action_space") is None:
        raise UsageError(f"{type(module).__name__} knows no spaces: train it with a datamodule, or give "
                         "observation_space and action_space")  # fmt: skip
    module.action_space = space_from_dict(hp["action_space"])
    full = space_from_dict(hp["observation_space"])
    module.observation_space, module.masks_actions = split_space(full, module.action_space)
    module.check_spaces()
    # Weights are drawn on the CPU from the datamodule's seed: they are the same on every device, and the global
    # generators stay as they were.
    seed = getattr(getattr(module._trainer, "datamodule", None), "seed", 0)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with extractor_of(hp.get("features_extractor")):
            module.build_network()
    if module.is_fitting:
        warn_of_idle(module, module.idle_arguments())


if TYPE_CHECKING:

    def _is_a_learner(module: ControlModule) -> Learner:
        return module  # mypy compares the two
