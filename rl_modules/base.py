"""Base of the control algorithms: building the network, acting, schedules, the optimizer, checkpoints."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules import ranks
from rl_modules.algorithm import CHECKPOINT, Algorithm
from rl_modules.checkpoints import load, load_initial_weights, save
from rl_modules.common.arguments import OWN_NETWORKS, Custom, chosen_by_checkpoint, require_callable, to_plain
from rl_modules.common.arguments import build as made_by
from rl_modules.common.errors import UsageError
from rl_modules.common.foreign_names import METHODS, NoMethod, no_method
from rl_modules.common.modules import evaluation_mode
from rl_modules.common.named_code import named_code
from rl_modules.common.schedules import OptionalRate, as_notation, parse_schedule, schedule_value
from rl_modules.common.spaces import policy_input, space_to_dict, to_environment
from rl_modules.contract import MINIBATCHES, Experience, ExperienceSource, Learner, Minibatch, Statistics
from rl_modules.core.hooks import copy_for_averages
from rl_modules.core.resume import step_schedulers_of_epochs
from rl_modules.core.seams import DATAMODULES, check_source, check_trainer, require_acted
from rl_modules.core.settings import Converted, made, one_or_all, setting
from rl_modules.core.state import transient
from rl_modules.distributions.state_dependent import check_sde
from rl_modules.fast import is_recording
from rl_modules.fast.adam import adam, clip_grad_norm
from rl_modules.fast.updates import MeansInPlace
from rl_modules.networks.imported import require_class
from rl_modules.run import (
    ControlLoop,
    ControlRun,
    begin_target,
    build,
    draw,
    log_evaluation,
    log_outside_of_graphs,
    take_spaces,
    write_metrics,
)

OptimizerFactory = Callable[[Iterable], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
#: A space, of which checkpoints and files hold the description.
Space = Annotated[spaces.Space | dict[str, Any] | None, dict[str, Any] | None]


def check_rate(name: str, value: Any) -> Any:
    """Refuses what is no schedule; returns a function of the remaining progress as points."""
    value = as_notation(value)
    if value is not None:
        parse_schedule(value, name)
    return value


def plain_space(value: Any) -> Any:
    """Describes a space as plain data."""
    return space_to_dict(value) if isinstance(value, spaces.Space) else value


def beside_network(module: "ControlModule") -> str | None:
    """The reason why an argument of the project's networks is idle."""
    if module.own_network is None:
        return None
    return "beside network, which is the whole network; give it to that as one of its init_args"


def use_sde() -> Any:
    """The argument that turns state-dependent noise on."""
    return setting(
        default=False,
        says="explore by generalized state-dependent noise (gSDE, arXiv:2005.05719), for Box actions: a matrix per "
        "environment turns the policy's last features into noise. ``log_std_init`` is that of its entries",
    )


def sde_sample_freq(interval: str = "rollout") -> Any:
    """The argument that says how often new matrices are drawn."""
    return setting(
        default=-1,
        says=f"steps of a rollout after which new matrices are drawn; -1: once per {interval}",
        check=one_or_all("whole rollouts"),
        idle=without_sde,
    )


def without_sde(module: "ControlModule") -> str | None:
    """The reason why an argument of the noise is idle."""
    return None if module.use_sde else "while use_sde is false; set that to true"


class ControlModule(Algorithm):
    """Base class of the control algorithms; a subclass defines ``build_network``, ``act``, ``prepare`` and
    ``training_step``.
    """

    #: Gymnasium action spaces that the algorithm can act in.
    supported_action_spaces: ClassVar[tuple[type[spaces.Space], ...]] = (
        spaces.Discrete,
        spaces.Box,
        spaces.MultiDiscrete,
        spaces.MultiBinary,
    )
    #: Kind of experience that the algorithm learns from; it sets the datamodule's defaults.
    experience: Experience = made(MINIBATCHES)
    #: Global norm to clip gradients to where the Trainer sets no ``gradient_clip_val``; None: no clipping.
    max_grad_norm: float | None = made(None)
    #: Arguments that decide which fields ``prepare`` returns.
    shapes_batch: ClassVar[tuple[str, ...]] = ()
    #: Whether observations come with an ``action_mask``.
    masks_actions = False

    learning_rate: Converted[OptionalRate, float | str | None] = setting(
        default=None,
        says="step size; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0 over ``total_timesteps``, "
        "points such as ``0:3e-4, 1:0`` (share of training: value), a function of the remaining share (in Python; it "
        "becomes points), or None for the optimizer's own",
        check=check_rate,
    )
    optimizer_factory: OptimizerFactory | None = setting(
        alias="optimizer",
        default=None,
        says="callable from parameters to an optimizer; None: the algorithm's",
        stores=False,
        check=require_callable,
        code=named_code,
    )
    scheduler_factory: SchedulerFactory | None = setting(
        alias="lr_scheduler",
        default=None,
        says="callable from the optimizer to a torch scheduler, stepped once per epoch; not together with a decaying "
        "``learning_rate``. ``ReduceLROnPlateau`` monitors what its ``monitor`` names, by default "
        "``rollout/ep_rew_mean`` where its ``mode`` is max, else ``train/loss``",
        stores=False,
        check=require_callable,
        code=named_code,
    )
    log_every: int = setting(
        default=1, says="epochs between two points of the ``train/*`` and ``rollout/*`` curves", least=1
    )
    given_observation_space: Space = setting(
        alias="observation_space",
        default=None,
        says="description of the space, see :func:`rl_modules.common.spaces.space_to_dict`, or the space itself; None "
        "takes the datamodule's",
        stores=plain_space,
    )
    given_action_space: Space = setting(alias="action_space", default=None, says="likewise", stores=plain_space)
    init_from: str | None = setting(
        default=None,
        says="checkpoint whose weights and normaliser statistics a ``fit`` starts from; None: new weights",
    )
    own_network: Custom | None = setting(
        alias="network",
        default=None,
        says="module class or callable that makes the whole network from both spaces: an import path, or class_path "
        "with init_args; None: built from the other arguments",
        check=to_plain,
    )
    own_features_extractor: Custom | None = setting(
        alias="features_extractor",
        default=None,
        says="likewise, for the part that turns an observation into ``features_dim`` numbers; None: by the space",
        check=to_plain,
    )

    graph: bool = setting(
        default=False,
        says="record the computation once as a CUDA graph and replay it: with environments in torch (``torch/…``) "
        "rollout, advantages and updates, with a replay buffer the update. Without CUDA the same function is "
        "called",
    )

    #: Stable-Baselines3's, which is not here; Python asks an object of this class for it by ``__getattr__``.
    load = NoMethod()
    #: After `configure_model` the spaces of what the network sees, without an ``action_mask``, and of actions.
    observation_space: Any = made()
    action_space: Any = made()
    #: What ``build_network`` makes.
    network: Any = made()
    run: ControlRun = transient(lambda m: ControlRun())
    #: Statistics that normalise observations; the datamodule sets them after every rollout.
    observation_statistics: Statistics = made(None)
    #: State of the normalisers that the weights were trained with; None: raw observations and rewards.
    normalizer_state: dict[str, Any] | None = made(None)

    def __post_init__(self) -> None:
        for name in chosen_by_checkpoint(self).intersection(OWN_NETWORKS):
            require_class(name, self.hparams.get(name))
        if self.own_network is not None and self.own_features_extractor is not None:
            raise UsageError(
                "network and features_extractor are both given; network is the whole network, with its own features"
            )
        decays = self.learning_rate is not None and parse_schedule(self.learning_rate, "learning_rate").decays
        if decays and self.scheduler_factory:
            raise UsageError(
                f"learning_rate={self.learning_rate!r} and lr_scheduler both change the learning rate; give one"
            )
        if self.graph:
            self.automatic_optimization = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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

    def __getattr__(self, name: str) -> Any:
        """Looks a submodule up; a method of Stable-Baselines3 that is not here is answered with its name here."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in METHODS:
                raise AttributeError(no_method(type(self), name)) from error
            raise

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
            raise UsageError(
                f"{type(self).__name__} learns from a datamodule: give the Trainer's fit "
                f"datamodule={DATAMODULES[self.experience.kind]}(...)"
            )
        return cast(ExperienceSource, datamodule)

    @property
    def place(self) -> int:
        return self.source.num_timesteps

    def configure_model(self) -> None:
        """Builds the network from the spaces; at the start of ``fit`` resets the state of the run."""
        check_trainer(self)
        if self._trainer is not None and getattr(self._trainer, "datamodule", None) is not None:
            check_source(self, self.source, self.is_fitting)
            take_spaces(self)
        if self.is_built and not hasattr(self, "action_space"):
            raise UsageError(
                f"{type(self).__name__}.network was set before its spaces were known; set it in "
                "build_network, or give the argument network"
            )
        if self.is_fitting:
            self.source  # noqa: B018 - raises where the Trainer was given no datamodule
        if not self.is_built:
            build(self)
            if self.is_fitting:
                copy_for_averages(self)
        if self.is_fitting:
            if self.init_from and not self.trainer.ckpt_path:
                load_initial_weights(self, self.init_from)  # the target network's among them
            else:
                begin_target(self)
            self.begin_run()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads weights; builds the network first where the spaces were given as arguments."""
        # What a rank returned brings the spaces.
        if not self.is_built and CHECKPOINT not in state_dict:
            self.configure_model()
        return super().load_state_dict(state_dict, strict, assign)

    def begin_run(self) -> None:
        missing = self.run.missing_factories
        super().begin_run()
        self.run.missing_factories = missing
        self.run.rate_applied = self.learning_rate
        if self.graph:
            self.__dict__.pop("training_step", None)

            self._means = MeansInPlace()

    def followed(self) -> torch.nn.Module:
        """Returns the part of the network that ``target_network`` follows, if the algorithm has a target network."""
        return self.network

    def check_spaces(self) -> None:
        """Refuses an action space that the algorithm does not support."""
        if not isinstance(self.action_space, self.supported_action_spaces):
            fitting = ", ".join(space.__name__ for space in self.supported_action_spaces)
            raise UsageError(
                f"{type(self).__name__} can't act in the action space {self.action_space}; it does {fitting}"
            )
        if self.hparams.get("use_sde"):
            check_sde(self)

    def build_network(self) -> None:
        """Sets ``self.network`` from ``self.observation_space`` and ``self.action_space``."""

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
        raise NotImplementedError(f"{type(self).__name__} must define act")

    def prepare(self, rollout: Any) -> Minibatch:
        """Computes the inputs of the loss from new experience; called once per rollout, or per sample of the buffer.

        Args:
            rollout: a :class:`~rl_modules.contract.Rollout` or :class:`~rl_modules.contract.Replayed`.

        Returns:
            A :class:`~rl_modules.contract.Minibatch` of all its rows, with the fields that ``training_step`` reads.
        """
        raise NotImplementedError(f"{type(self).__name__} must define prepare")

    def end_rollout(self, rollout: Minibatch) -> None:
        """Called once after the last minibatch of each rollout, before a checkpoint is written; does nothing here.

        Args:
            rollout: what :meth:`prepare` returned, flat over its transitions.
        """

    def finish_rollout(self) -> None:
        """Calls :meth:`end_rollout` where a rollout has no further minibatch, once."""
        source: Any = self.source
        if getattr(source, "rollout_is_used_up", False) and self.run.ended_at != source.num_timesteps:
            self.run.ended_at = source.num_timesteps
            self.end_rollout(source.rollout)

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
        generator = self.run.predict_generator
        if not deterministic and (generator is None or generator.device != self.device):
            generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, ())))
            self.run.predict_generator = generator
        with evaluation_mode(self.modules()):
            memory = self.memory_arguments(n, state, episode_start)
            acted = self.act(tensors, generator=generator, deterministic=deterministic, **memory)
        require_acted(acted, n, ["action"])
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
        kept, self.run.predict_generator = self.run.predict_generator, torch.Generator(self.device).manual_seed(seed)
        try:
            yield
        finally:
            self.run.predict_generator = kept

    def memory_arguments(self, n: int, state: Any, episode_start: np.ndarray | None) -> dict[str, Any]:
        """Returns additional arguments of ``act`` for n observations; a recurrent policy adds its state."""
        return {}

    # ---------------------------------------------------------------- curves

    def record(self, **metrics: Tensor | float) -> None:
        """Adds scalars of one minibatch to the epoch's means, ``train/<name>``; does nothing in evaluations."""
        evaluates = self._trainer is not None and self._trainer.evaluating
        if self.run.logs_this_epoch and not evaluates:
            self._means.add({f"train/{name}": value for name, value in metrics.items()})

    def record_now(self, **metrics: Tensor | float) -> None:
        """Sets numbers that hold once per epoch, such as a coefficient; the last value is logged."""
        self.run.latest.update({name if "/" in name else f"train/{name}": value for name, value in metrics.items()})

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

    def make_loop(self) -> ControlLoop:
        return ControlLoop()

    def begin_epoch(self) -> None:
        """Called at the start of each epoch of training, before a subclass's hook; does nothing here."""

    def end_epoch(self) -> None:
        """Called at the end of each epoch of training, before its point of the curves is made; does nothing here."""

    def end_evaluation(self, prefix: str) -> None:
        """Called at the end of an evaluation, whose curves begin with ``prefix``, eval or test; does nothing here."""

    def _after_on_train_epoch_end(self) -> None:
        if self.run.point is not None:
            write_metrics(self, *self.run.point)

    def recording_key(self) -> tuple[Any, ...]:
        """Returns what Python branches of the update depend on besides settings: each value has its own recording."""
        return (self.run.logs_this_epoch,)

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:

        save(self, checkpoint)

    def _on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:

        load(self, checkpoint)

    def weights_to_start_from(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns the weights that ``init_from`` loads; an algorithm omits those that a new argument replaces."""
        return checkpoint["state_dict"]

    # ---------------------------------------------------------------- schedules and ranks

    @property
    def progress_remaining(self) -> float:
        """Remaining share of ``total_timesteps``, from 1 down to 0; the last rollout may end after it."""
        return max(0.0, 1.0 - self.source.num_timesteps / self.source.total_timesteps)

    def update_schedules(self, progress_remaining: float) -> None:
        """Sets and records every scheduled value; called at the start and after new experience was collected."""
        for name, schedule in self.schedules.items():
            if schedule.decays:
                value = max(schedule_value(schedule, progress_remaining), self.declared_settings[name].least)
                setattr(self, name, value)
                self.record_now(**{name: value})
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

    def loss_over_ranks(self, loss: Any, n: int) -> Any:
        """Returns a mean over this rank's ``n`` transitions so that its mean over ranks is that over all of theirs."""
        if self.run.n_ranks == 1 or not self.run.has_resets:
            return loss

        return loss * ranks.rank_weight(n, self.device)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Computes gradients; minibatches of different sizes that one optimizer step accumulates count by their rows,
        so that the accumulated loss is the mean over all of them.
        """
        weight = getattr(self.source, "minibatch_weight", 1.0)
        super().backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)

    def mean_over_ranks(self, x: Tensor) -> Tensor:
        """Returns the mean of a tensor over ranks, which call this together."""
        return self.trainer.strategy.reduce(x, reduce_op="mean")

    # ---------------------------------------------------------------- optimizer

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns the default optimizer: Adam at 3e-4 with eps 1e-5, as in the original PPO."""
        return adam(self, parameters, lr=3e-4, eps=1e-5)

    def configure_optimizers(self) -> Any:
        optimizer = made_by("optimizer", self.optimizer_factory or self.default_optimizer, self.trainable_parameters())
        if self.learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = parse_schedule(self.learning_rate, "learning_rate")[0]
        if self.scheduler_factory is None:
            return optimizer
        scheduler: Any = made_by("lr_scheduler", self.scheduler_factory, optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            # Lightning's class of this name says what it monitors.
            default = "rollout/ep_rew_mean" if scheduler.mode == "max" else "train/loss"
            scheduler = {"scheduler": scheduler, "monitor": getattr(scheduler, "monitor", default)}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def step_schedulers(self) -> None:
        """Steps the schedulers of epochs that are due, as Lightning does under automatic optimization."""
        step_schedulers_of_epochs(self)

    def trainable_parameters(self) -> Iterable:
        """Returns the parameters to optimize: the network's and a subclass's, not a target network's."""
        network, target = list(self.network.parameters()), getattr(self, "target_network", None)
        apart = {id(p) for p in [*network, *(() if target is None else target.parameters())]}
        return [*network, *(p for p in self.parameters() if id(p) not in apart)]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips to the Trainer's ``gradient_clip_val``, or else to the algorithm's ``max_grad_norm``."""
        if gradient_clip_val is None and self.max_grad_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.run.grad_norm = clip_grad_norm(parameters, self.max_grad_norm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")


if TYPE_CHECKING:

    def _is_a_learner(module: ControlModule) -> Learner:
        return module  # mypy compares the two
