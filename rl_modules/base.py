"""What every control algorithm shares: spaces, ``predict``, schedules, metrics, the optimizer."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.modes import evaluation_mode
from rl_modules.common.schedules import parse_schedule, schedule_value
from rl_modules.common.spaces import (
    normalize,
    observation_arrays,
    space_from_dict,
    space_to_dict,
    to_environment,
    tree_leaves,
    tree_map,
)
from rl_modules.exchange import add_over_ranks, exchange_gradients
from rl_modules.optimizers import FusedAdam, clip_grad_norm

OptimizerFactory = Callable[[Iterable], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class ControlModule(L.LightningModule):
    """Base of the control algorithms; an algorithm adds ``build_network``, ``act``, ``prepare``, ``training_step``.

    Args:
        learning_rate: step size; a number, ``lin_<number>`` for linear decay to 0 over ``total_timesteps``, or None
            for the rate that ``optimizer`` brings.
        optimizer: callable from parameters to an optimizer.
        lr_scheduler: callable from the optimizer to a torch scheduler, stepped once per epoch; not together with a
            decaying ``learning_rate``.
        log_every: epochs between two points of the ``train/*`` and ``rollout/*`` curves; ≥ 1.
        observation_space: description of the space, see :func:`rl_modules.common.spaces.space_to_dict`; None takes the
            datamodule's.
        action_space: likewise.
    """

    #: Gymnasium action spaces that the algorithm can act in.
    supported_action_spaces: tuple[type[spaces.Space], ...] = (
        spaces.Discrete,
        spaces.Box,
        spaces.MultiDiscrete,
        spaces.MultiBinary,
    )
    #: What the algorithm learns from: ``rollouts`` of its current policy, or the ``replay`` of all so far.
    experience = "rollouts"
    #: Global norm to clip gradients to where the Trainer sets no ``gradient_clip_val``; None: no clipping.
    max_grad_norm: float | None = None
    #: Norm of the last gradient before it was clipped; None where nothing is clipped.
    grad_norm: Tensor | None = None

    def __init__(
        self,
        learning_rate: float | str | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        # Callables are code, which a checkpoint must not hold.
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"], logger=False)
        if log_every < 1:
            raise UsageError(f"log_every={log_every} must be at least 1 epoch")
        self.log_every = log_every
        self.optimizer_factory = optimizer
        self.scheduler_factory = lr_scheduler
        self.learning_rate = None if learning_rate is None else parse_schedule(learning_rate, "learning_rate")
        if self.learning_rate and self.learning_rate[1] and lr_scheduler:
            raise UsageError(
                f"learning_rate={learning_rate!r} and lr_scheduler both change the learning rate; give one"
            )
        self.network: torch.nn.Module | None = None
        self.observation_space: spaces.Space | None = None
        self.action_space: spaces.Space | None = None
        self.logs_this_epoch = True
        self._scheduled_at = -1
        self._sums: list[Tensor] = []
        self._sum_names: tuple[str, ...] = ()
        self._metrics: dict[str, float] = {}
        self._observation_statistics: Any = None
        self._observation_ndim = 0
        self._whitened: tuple[Tensor, Tensor] | None = None
        self._predict_generator = torch.Generator()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Lightning asks for this signature at every batch, and Python makes it anew each time unless it is kept.
        if "training_step" in vars(cls):
            cls.training_step.__signature__ = inspect.signature(cls.training_step)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the name of the running hook here some forty times per batch; torch's bookkeeping of
        # parameters and submodules would cost a twentieth of the run for it.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # ---------------------------------------------------------------- spaces and network

    def configure_model(self) -> None:
        """Build the network once the spaces are known: from the hyperparameters, or from the datamodule."""
        strategy = None if self._trainer is None else self._trainer.strategy
        if isinstance(strategy, ModelParallelStrategy | FSDPStrategy):
            raise UsageError(f"trainer.strategy={type(strategy).__name__} splits the weights of language models over "
                             f"ranks, not those of {type(self).__name__}; take ddp")  # fmt: skip
        if (precision := getattr(self._trainer, "precision", "32-true")) in ("16-true", "bf16-true"):
            raise UsageError(f"trainer.precision={precision} would keep weights and advantages in 16 bits; take "
                             "bf16-mixed, or on a GPU 16-mixed")  # fmt: skip
        if self.network is not None:
            return
        if self.hparams.get("observation_space") is None or self.hparams.get("action_space") is None:
            datamodule = getattr(self._trainer, "datamodule", None)
            if datamodule is None:
                raise UsageError(f"{type(self).__name__} knows no spaces: train it with a datamodule, or give "
                                 "observation_space and action_space")  # fmt: skip
            self.hparams["observation_space"] = space_to_dict(datamodule.observation_space)
            self.hparams["action_space"] = space_to_dict(datamodule.action_space)
        self.observation_space = space_from_dict(self.hparams["observation_space"])
        self.action_space = space_from_dict(self.hparams["action_space"])
        self.check_spaces()
        example = observation_arrays(self.observation_space, self.observation_space.sample())
        self._observation_ndim = tree_leaves(example)[0].ndim
        # Weights come from the datamodule's seed and leave the global generator as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(getattr(getattr(self._trainer, "datamodule", None), "seed", 0))
            self.build_network()

    def check_spaces(self) -> None:
        """Refuse an action space that the algorithm can't act in.

        Raises:
            UsageError: names the space and the algorithm.
        """
        if not isinstance(self.action_space, self.supported_action_spaces):
            fitting = ", ".join(space.__name__ for space in self.supported_action_spaces)
            raise UsageError(f"{type(self).__name__} can't act in the action space {self.action_space}; it does "
                             f"{fitting}")  # fmt: skip

    def require_whole_rollouts(self) -> None:
        """Refuse a datamodule that cuts rollouts into minibatches or goes over them again; called in ``setup``.

        For algorithms whose gradient holds only for the policy that acted: after one step that is another.

        Raises:
            UsageError: names the datamodule's arguments.
        """
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        size = datamodule.n_envs * datamodule.n_steps
        if datamodule.n_epochs != 1 or datamodule.batch_size != size:
            raise UsageError(f"{type(self).__name__} learns once from each whole rollout; the datamodule has "
                             f"n_epochs={datamodule.n_epochs} and batch_size={datamodule.batch_size}, give it "
                             f"n_epochs=1 and batch_size=None (that is {size} transitions)")  # fmt: skip

    def build_network(self) -> None:
        """Set ``self.network`` from ``self.observation_space`` and ``self.action_space``."""
        raise UsageError(f"{type(self).__name__} must define build_network")

    # ---------------------------------------------------------------- acting

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Choose actions for a batch of observations.

        Args:
            observation: [N, *obs] tensor, or nested dictionary of such.
            generator: source of the randomness.
            deterministic: the most likely action instead of a sample.

        Returns:
            ``action`` [N, *act], and whatever else the loss wants to find beside the transition.
        """
        raise UsageError(f"{type(self).__name__} must define act")

    @torch.no_grad()
    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:
        """Choose actions in NumPy, with the signature that Stable-Baselines3's ``evaluate_policy`` calls.

        Args:
            observation: one observation or a batch of them, as the environment returns it (not normalised).
            state: passed through; the policies here have no memory.
            episode_start: ignored, for the same reason.
            deterministic: the most likely action instead of a sample.

        Returns:
            The actions as the environment takes them (Box actions clipped to their bounds), and ``state``.
        """
        if self.observation_space is None or self.action_space is None:
            self.configure_model()
        assert self.observation_space is not None and self.action_space is not None
        arrays = observation_arrays(self.observation_space, observation)
        single = tree_leaves(arrays)[0].ndim == self._observation_ndim
        if single:
            arrays = tree_map(lambda x: np.asarray(x)[None], arrays)
        statistics = self.observation_statistics()
        if statistics is not None:
            arrays = tree_map(normalize, arrays, statistics)
        tensors = tree_map(lambda x: torch.as_tensor(x).to(self.device), arrays)
        if self._predict_generator.device != self.device:
            self._predict_generator = torch.Generator(self.device)
        with evaluation_mode(self):
            acted = self.act(tensors, generator=self._predict_generator, deterministic=deterministic)
        action = acted["action"].cpu().numpy()
        action = to_environment(self.action_space, action)
        return (action[0] if single else action), state

    def observation_statistics(self) -> Any:
        """What :func:`rl_modules.common.spaces.normalize` takes: the attached datamodule's, else the checkpoint's."""
        if self._trainer is not None and self._trainer.state.fn == "fit":
            return self._trainer.datamodule.observation_statistics()  # type: ignore[attr-defined]
        return self._observation_statistics

    def on_fit_start(self) -> None:
        # A unit that is no longer active leaves moments of 1e-40 in Adam, with which a CPU computes four times slower.
        torch.set_flush_denormal(True)
        if not self._is_alone:
            exchange_gradients(self.trainer.strategy.model)

    def on_fit_end(self) -> None:
        torch.set_flush_denormal(False)

    def on_train_end(self) -> None:
        # From here on the statistics stand still, for `test` after `fit` and for `predict`.
        self._observation_statistics = self.observation_statistics()

    # ---------------------------------------------------------------- several ranks

    @property
    def _is_alone(self) -> bool:
        return self._trainer is None or self._trainer.world_size == 1

    def std_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Standard deviation (unbiased) and mean of a minibatch over all ranks, scalars."""
        if self._is_alone:
            return torch.std_mean(x)
        wide = x.double()
        sums = torch.stack([torch.full_like(wide.sum(), x.numel()), wide.sum(), wide.square().sum()])
        add_over_ranks(sums)
        n, total, squares = sums.unbind()
        mean = total / n
        variance = (squares - n * mean**2) / (n - 1)
        return variance.clamp(min=0).sqrt().to(x.dtype), mean.to(x.dtype)

    def whiten(self, x: Tensor) -> Tensor:
        """``(x - mean) / (std + 1e-8)`` over all ranks, [B]; asked for the same tensor again, the same result.

        A rollout that is one minibatch comes again in every epoch, and the ranks need not talk about it each time.
        """
        if self._whitened is None or self._whitened[0] is not x:
            std, mean = self.std_mean(x)
            self._whitened = x, (x - mean) / (std + 1e-8)
        return self._whitened[1]

    def rank_weight(self, n: int) -> float:
        """What to multiply this rank's mean over ``n`` transitions by, so that the mean over ranks is that over all.

        1, unless the vector environment has rows that are no transitions: then ranks have different numbers.
        """
        if self._is_alone or not self.trainer.datamodule.ranks_differ_in_size:  # type: ignore[attr-defined]
            return 1.0
        total = torch.tensor(float(n), device=self.device)
        add_over_ranks(total)
        return n * self.trainer.world_size / float(total)

    # ---------------------------------------------------------------- schedules

    @property
    def progress_remaining(self) -> float:
        """Share of ``total_timesteps`` still to come, from 1 down to 0."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        return 1.0 - datamodule.num_timesteps / datamodule.total_timesteps

    def update_schedules(self, progress_remaining: float) -> None:
        """Set every scheduled value; called when new experience has arrived, before it is learned from."""
        if self.learning_rate is not None:
            value = schedule_value(self.learning_rate, progress_remaining)
            for group in self._optimizer().param_groups:
                group["lr"] = value

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        timesteps = self.trainer.datamodule.num_timesteps  # type: ignore[attr-defined]
        if timesteps != self._scheduled_at:
            self._scheduled_at = timesteps
            self.update_schedules(self.progress_remaining)

    # ---------------------------------------------------------------- metrics

    def on_train_start(self) -> None:
        # A run that goes on in the middle of an epoch begins no epoch and, within a rollout, brings no new experience.
        self.on_train_epoch_start()
        timesteps = self.trainer.datamodule.num_timesteps  # type: ignore[attr-defined]
        if timesteps:
            self._scheduled_at = timesteps
            self.update_schedules(self.progress_remaining)

    def on_train_epoch_start(self) -> None:
        # Diagnostics cost kernels: they are computed only in the epochs that are written.
        self.logs_this_epoch = (self.current_epoch + 1) % self.log_every == 0

    def record(self, **metrics: Tensor) -> None:
        """Remember scalars of one minibatch; their mean over the epoch is logged as ``train/<name>``.

        Does nothing in epochs that are not logged. Costs one kernel and never waits for the device.
        """
        if self.logs_this_epoch:
            self._sum_names = tuple(metrics)
            self._sums.append(torch.stack([value.detach().float() for value in metrics.values()]))

    def record_now(self, **metrics: float) -> None:
        """Remember numbers that stand once per epoch, such as a coefficient; the last value is logged."""
        self._metrics.update({f"train/{name}": value for name, value in metrics.items()})

    def on_train_epoch_end(self) -> None:
        if not self.logs_this_epoch:
            return
        if self._sums:
            means = torch.stack(self._sums).mean(0)
            if not self._is_alone:
                # The strategy's `reduce` would have all ranks wait for each other first.
                add_over_ranks(means)
                means /= self.trainer.world_size
            self._metrics.update({f"train/{k}": v for k, v in zip(self._sum_names, means.tolist(), strict=True)})
            self._sums = []
        if self.trainer.optimizers:
            self._metrics["train/learning_rate"] = self._optimizer().param_groups[0]["lr"]
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        rollout = datamodule.metrics_over_ranks()
        for logger in self.trainer.loggers:
            logger.log_metrics({**rollout, **self._metrics}, step=datamodule.num_timesteps)
        self._metrics = {}
        if "rollout/ep_rew_mean" in rollout:
            # For EarlyStopping and ModelCheckpoint; the curve was written above, over the right axis.
            self.log("rollout/ep_rew_mean", rollout["rollout/ep_rew_mean"], logger=False, sync_dist=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_evaluation(batch, "eval")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_evaluation(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return batch

    def _log_evaluation(self, batch: dict[str, Tensor], prefix: str) -> None:
        reward, length = batch["return"], batch["length"]
        metrics = {
            f"{prefix}/mean_reward": reward.mean(),
            f"{prefix}/std_reward": reward.std(correction=0),
            f"{prefix}/mean_ep_length": length.float().mean(),
        }
        fitting = self.trainer.state.fn == "fit"
        self.log_dict(metrics, logger=not fitting, batch_size=len(reward), sync_dist=True)
        if fitting and not self.trainer.sanity_checking:
            step = self.trainer.datamodule.num_timesteps  # type: ignore[attr-defined]
            for logger in self.trainer.loggers:
                logger.log_metrics({name: value.item() for name, value in metrics.items()}, step=step)

    # ---------------------------------------------------------------- optimizer

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """The optimizer when none is given: Adam at 3e-4 with eps 1e-5, as the original PPO."""
        return self.adam(parameters, lr=3e-4, eps=1e-5)

    def adam(self, parameters: Iterable, lr: float, eps: float) -> torch.optim.Optimizer:
        """Adam, fused where Lightning lets it be: under mixed precision it refuses to clip for fused optimizers."""
        fused = self.trainer.precision in ("32-true", "64-true")
        return (FusedAdam if fused else torch.optim.Adam)(parameters, lr=lr, eps=eps)

    def configure_optimizers(self) -> Any:
        optimizer = (self.optimizer_factory or self.default_optimizer)(self.trainable_parameters())
        if self.learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate[0]
        if self.scheduler_factory is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler_factory(optimizer)}

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        # The optimizer's own method does the same, inside a profiler's scope that costs more than the work.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def trainable_parameters(self) -> Iterable:
        """What the optimizer updates; an algorithm with a target network leaves that out."""
        return self.parameters()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip to the Trainer's ``gradient_clip_val``, or to the algorithm's ``max_grad_norm`` where it sets none."""
        whole = isinstance(self.trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if gradient_clip_val is None and self.max_grad_norm is not None and whole:
            self.grad_norm = clip_grad_norm(
                [p for g in optimizer.param_groups for p in g["params"]], self.max_grad_norm
            )
        else:
            value = self.max_grad_norm if gradient_clip_val is None else gradient_clip_val
            self.clip_gradients(optimizer, value, gradient_clip_algorithm or "norm")

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[0]

    # ---------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["algorithm"] = type(self).__name__
        datamodule = getattr(self._trainer, "datamodule", None)
        checkpoint["env_id"] = getattr(datamodule, "env_name", None)
        checkpoint["observation_statistics"] = _to_tensors(self.observation_statistics())
        checkpoint["unlogged"] = {
            "names": list(self._sum_names),
            "values": list(self._sums),
            "now": dict(self._metrics),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._check_checkpoint(checkpoint)
        self._observation_statistics = _to_arrays(checkpoint.get("observation_statistics"))
        unlogged = checkpoint["unlogged"]
        self._sum_names, self._sums, self._metrics = tuple(unlogged["names"]), unlogged["values"], unlogged["now"]
        if self.network is None:
            self.configure_model()

    def _check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved, here = checkpoint.get("algorithm"), type(self).__name__
        if saved != here:
            raise UsageError(f"the checkpoint holds {saved or 'no control algorithm'}, not {here}; load it with that "
                             "class")  # fmt: skip
        if self._trainer is None:
            return
        for name in ("observation_space", "action_space"):
            saved, here = checkpoint["hyper_parameters"].get(name), self.hparams[name]
            if saved != here:
                raise UsageError(f"the checkpoint is of another environment, {checkpoint['env_id']}: its {name} is "
                                 f"{_brief(saved)}, here it is {_brief(here)}")  # fmt: skip
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.trainer.state.fn != "fit":
            return
        # Lightning files a datamodule's state under its class's name and passes over what it does not find.
        name = type(datamodule).__qualname__
        if name not in checkpoint:
            stored = ", ".join(key for key in checkpoint if key.endswith("DataModule")) or "none"
            raise UsageError(f"the checkpoint has no state of {name}; it has that of {stored}, so training could not "
                             "go on where it was")  # fmt: skip
        env_id = datamodule.env_name
        if checkpoint["env_id"] != env_id:
            raise UsageError(f"the checkpoint is of another environment: it was trained on {checkpoint['env_id']}, "
                             f"this run is on {env_id}; training can only go on where it was")  # fmt: skip
        seed = checkpoint["datamodule_hyper_parameters"]["seed"]
        if seed != datamodule.seed:
            raise UsageError(f"seed={datamodule.seed} differs from the checkpoint's {seed}; its random streams go on "
                             "where they were, so resume with the same")  # fmt: skip


def _brief(space: dict[str, Any]) -> str:
    """A space without its bounds, for one line."""
    return f"Box{tuple(space['shape'])}" if space["type"] == "Box" else str(space_from_dict(space))


def _to_tensors(tree: Any) -> Any:
    """Statistics as a checkpoint may hold them: lists of tensors and numbers."""
    return tree_map(lambda s: s and [torch.from_numpy(s[0].copy()), torch.from_numpy(s[1].copy()), s[2]], tree)


def _to_arrays(tree: Any) -> Any:
    return tree_map(lambda s: s and (s[0].cpu().numpy(), s[1].cpu().numpy(), s[2]), tree)
