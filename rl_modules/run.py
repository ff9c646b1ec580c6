"""A run of a control algorithm: its network from the environment's spaces, its part of Lightning's loop, its curves."""

from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rl_modules.algorithm import Run, begin_training
from rl_modules.checkpoints import check_same_space, require_same_optimizers, warn_of_missing
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import split_space
from rl_modules.common.seeding import GLOBAL_GENERATORS
from rl_modules.common.spaces import SPACES, space_from_dict, space_to_dict
from rl_modules.core.curves import hand_to_callbacks, write_evaluation, write_point
from rl_modules.core.hooks import OfRun, draw_over, is_cut_off
from rl_modules.core.seams import check_schedulers
from rl_modules.core.settings import warn_of_idle
from rl_modules.core.state import persistent, transient
from rl_modules.fast.updates import RecordedUpdate
from rl_modules.loggers import log_settings
from rl_modules.networks.encoders import extractor_of
from rl_modules.ranks import episodes_of_all_ranks

if TYPE_CHECKING:
    from rl_modules.base import ControlModule


class ControlRun(Run):
    """What a run of a control algorithm needs beside the state that its class declares."""

    # Values that hold once per epoch, and objects of torchmetrics.
    latest: dict[str, Tensor | float] = persistent({})
    objects: dict[str, Any] = transient({})
    #: Whether this epoch's diagnostics are written. They cost kernels, so others are not computed.
    logs_this_epoch: bool = transient(True)
    #: Metrics and place of the point of the curves that this epoch's end writes; None: none is due.
    point: tuple[dict[str, float], int] | None = transient()
    #: Processes that train together.
    n_ranks: int = transient(1)
    #: Whether some rows of rollouts are resets and no transitions, so that ranks have different numbers of these.
    has_resets: bool = transient(True)
    #: Transitions when scheduled values were last set, and the ``learning_rate`` that the optimizers were set to.
    scheduled_at: int = transient(-1)
    rate_applied: float | str | None = transient()
    #: Transitions when ``end_rollout`` was last called.
    ended_at: int = persistent(0)
    #: Matrices of state-dependent noise for the rollout that is being collected.
    noise_matrices: Any = transient()
    #: Source of the samples of ``predict``.
    predict_generator: torch.Generator | None = transient()
    #: Classes of the optimizers whose state the loaded checkpoint holds; None: nothing is loaded.
    optimizers_saved: list[str] | None = transient()
    #: Factories of the loaded checkpoint that this module was not given.
    missing_factories: dict[str, str] = transient({})


class ControlLoop(OfRun):
    """What every control algorithm does at the hooks of a run, in order, before a subclass's own hooks.

    After the own hook of an epoch's end, ``ControlModule._after_on_train_epoch_end`` writes the epoch's point.
    """

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if trainer.loggers:
            log_settings(trainer)
        if module.run.missing_factories:
            warn_of_missing(module, module.run.missing_factories)
            module.run.missing_factories = {}
        # A unit that is no longer active leaves moments of 1e-40 in Adam, with which a CPU computes four times slower.
        torch.set_flush_denormal(True)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        torch.set_flush_denormal(False)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        check_schedulers(module)
        if is_loaded := module.run.optimizers_saved is not None:
            require_same_optimizers(module)
        module._means.to(module.device)
        module.run.n_ranks = trainer.world_size
        # Of the epoch that ends there, if one does: Lightning counts it as done.
        module.run.logs_this_epoch = module.current_epoch % module.log_every == 0
        begin_training(module)
        # As in Stable-Baselines3, targets come without dropout and from running statistics. Not earlier: Lightning
        # warns of parts in evaluation mode before this.
        if (target := module._modules.get("target_network")) is not None:
            target.eval()
        if module.graph:
            module.__dict__["training_step"] = recorded_step(module)
        # A run that resumes in the middle of an epoch begins no epoch and, within a rollout, brings no new experience.
        self.on_train_epoch_start(trainer, module)
        module.run.has_resets = module.source.ranks_differ_in_size
        module.run.scheduled_at = module.source.num_timesteps
        known = {*module.run.latest}
        module.update_schedules(module.progress_remaining)
        if is_loaded:  # an earlier epoch's point has the other values that hold since the last new experience
            module.run.latest = {name: module.run.latest[name] for name in known}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if module.graph:  # not what torch.compile has put there
            module.__dict__.pop("training_step", None)
        if (target := module._modules.get("target_network")) is not None:
            target.train()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Decides whether this epoch's diagnostics are computed."""
        module.begin_epoch()
        module.run.logs_this_epoch = (module.current_epoch + 1) % module.log_every == 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Sets scheduled values after new experience was collected."""
        timesteps = module.source.num_timesteps
        if timesteps != module.run.scheduled_at:
            module.run.scheduled_at = timesteps
            module.update_schedules(module.progress_remaining)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.finish_rollout()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if module.is_fitting:
            # Lightning draws over this count what a subclass or a callback logs in an evaluation.
            draw_over(trainer, module.place)
            # An evaluation comes before the epoch's end: its callbacks monitor the means so far, also after a resume.
            hand_to_callbacks(trainer, means_so_far(module))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.end_evaluation("eval")

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        module.end_evaluation("test")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.end_epoch()
        module.run.point = None
        require_finite_weights(module)
        # What Lightning and its callbacks log by themselves is drawn over this count: here, over transitions.
        draw_over(trainer, module.place)
        rollout = module.source.metrics_over_ranks()
        # For Lightning's bar, EarlyStopping and ModelCheckpoint, which need a value in every epoch, before the first
        # episode's end too.
        mean = rollout.get("rollout/ep_rew_mean", module.source.partial_return)
        module.log("rollout/ep_rew_mean", mean, prog_bar=True, logger=False, sync_dist=trainer.world_size > 1)
        writes = module.run.logs_this_epoch and not is_cut_off(trainer)
        hook: Any = type(module).on_train_epoch_end
        if is_cut_off(trainer) or (writes and hook.framed is not L.LightningModule.on_train_epoch_end):
            # A cut epoch's point is written at its end, by the run that resumes, and callbacks monitor the means so
            # far. A subclass's hook may read them.
            hand_to_callbacks(trainer, means_so_far(module))
        if writes:
            # Without an optimizer Lightning has one that has no parameters.
            if trainer.optimizers and trainer.optimizers[0].param_groups:
                module.record_now(learning_rate=trainer.optimizers[0].param_groups[0]["lr"])
            if module.run.grad_norm is not None:
                module.record_now(grad_norm=float(module.run.grad_norm))
            module.run.point = rollout, module.place
        if not (module.automatic_optimization or module.graph):
            module.step_schedulers()


def recorded_step(module: "ControlModule") -> Any:
    """Returns what replaces ``training_step`` under ``graph=True``."""
    if module.experience.kind == "replay":
        return RecordedUpdate(module)
    source: Any = module.source  # of rollouts
    return source.recorded_iteration()


# ---------------------------------------------------------------- before a run


def take_spaces(module: "ControlModule") -> None:
    """Takes the datamodule's spaces, or refuses others than those of the weights."""
    source = module.source
    for name in SPACES:
        space = getattr(source, name)
        if module.hparams.get(name) is None:
            module.hparams[name] = space_to_dict(space)
        elif module.is_built or module.is_fitting:
            mine = space_from_dict(module.hparams[name])
            check_same_space(name, mine, space, type(module).__name__, source.env_name)


def build(module: "ControlModule") -> None:
    """Builds the network from the spaces among the hyperparameters."""
    hp = module.hparams
    if hp.get("observation_space") is None or hp.get("action_space") is None:
        raise UsageError(
            f"{type(module).__name__} knows no spaces: train it with a datamodule, or give "
            "observation_space and action_space"
        )
    module.action_space = space_from_dict(hp["action_space"])
    full = space_from_dict(hp["observation_space"])
    module.observation_space, module.masks_actions = split_space(full, module.action_space)
    module.check_spaces()
    # Weights are drawn on the CPU from the datamodule's seed: they are the same on every device, and the global
    # generators stay as they were.
    seed = getattr(getattr(module._trainer, "datamodule", None), "seed", 0)
    with GLOBAL_GENERATORS, torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with extractor_of(module.own_features_extractor):
            module.build_network()
    if module.is_fitting:
        warn_of_idle(module.declared_settings, module.hparams, module.idle_arguments())


@torch.no_grad()
def begin_target(module: "ControlModule") -> None:
    """Copies the followed weights to a ``target_network`` of the same form, at the start of each fit."""
    if (target := module._modules.get("target_network")) is None:
        return
    for ours, theirs in (
        (target.parameters(), module.followed().parameters()),
        (target.buffers(), module.followed().buffers()),
    ):
        copies, originals = list(ours), list(theirs)
        if copies and [x.shape for x in copies] == [x.shape for x in originals]:
            torch._foreach_copy_(copies, originals)


# ---------------------------------------------------------------- curves

#: Prefix of the names of logged values. A logged value replaces one that the algorithm records under the same name.
LOGGED = "log:"
#: Reductions that ``log`` takes, by what Lightning accepts.
REDUCE_FX: dict[Any, str] = {
    "mean": "mean",
    torch.mean: "mean",
    "max": "max",
    torch.max: "max",
    "min": "min",
    torch.min: "min",
    "sum": "sum",
    torch.sum: "sum",
}


def draw(module: "ControlModule", name: str, value: Any, reduce_fx: Any, logger: bool | None) -> bool:
    """Adds a value that ``log`` was given in training to the next point of its curve; returns whether it did."""
    trainer, reduction = module._trainer, REDUCE_FX.get(reduce_fx)
    if trainer is None or not trainer.training or reduction is None:
        return False
    if logger is not False and module.run.logs_this_epoch:
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, Tensor | int | float):
            module.run.objects[name] = value  # of torchmetrics
        elif reduction == "mean":
            module._means.add({LOGGED + name: value})
        else:
            module._means.reduce(LOGGED + name, value, reduction)
    return True


@_disable_dynamo
def log_outside_of_graphs(module: "ControlModule", *args: Any, **options: Any) -> None:
    """Lightning inspects signatures and stores values by name, which Dynamo can't trace."""
    module.log(*args, **options)


def means_so_far(module: "ControlModule") -> dict[str, float]:
    """Means since the last point of the curves, over all ranks; a logged value replaces a recorded one."""
    means = module._means.means(module.trainer)
    logged = {name.removeprefix(LOGGED): x for name, x in means.items() if name.startswith(LOGGED)}
    logged |= {name: float(metric.compute()) for name, metric in module.run.objects.items()}
    return {**{name: x for name, x in means.items() if not name.startswith(LOGGED)}, **logged}


def write_metrics(module: "ControlModule", rollout: dict[str, float], step: int) -> None:
    """Writes one point of every training curve, with the datamodule's metrics, and begins the next."""
    latest = {name: float(value) for name, value in module.run.latest.items()}
    metrics = {**rollout, **latest, **means_so_far(module)}
    write_point(module.trainer, metrics, step)
    hand_to_callbacks(module.trainer, {name: x for name, x in metrics.items() if not name.startswith("time/")})
    module._means, module.run.latest, module.run.objects = module._means.begun_anew(), {}, {}


def log_evaluation(module: "ControlModule", batch: dict[str, Tensor], prefix: str) -> None:
    """Logs mean and spread of the returns of evaluation episodes, over all ranks."""
    if module.trainer.world_size > 1:
        batch = episodes_of_all_ranks(batch, module.device)
    reward, length = batch["return"], batch["length"]
    metrics = {
        f"{prefix}/mean_reward": reward.mean(),
        f"{prefix}/std_reward": reward.std(correction=0),
        f"{prefix}/mean_ep_length": length.float().mean(),
    }
    if "success" in batch:
        metrics[f"{prefix}/success_rate"] = batch["success"].mean()
    write_evaluation(module, metrics, batch_size=len(reward), sync_dist=True)


def require_finite_weights(module: "ControlModule") -> None:
    """Stops the run before a callback saves weights that are not finite."""
    named = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
    if not named or bool(torch.stack(torch._foreach_norm(list(named.values()))).isfinite().all()):
        return
    bad = next((name for name, p in named.items() if not torch.isfinite(p).all()), None)
    if bad is not None:  # else the square of a large weight is infinite
        source: Any = module.source
        if hasattr(source, "metrics"):
            source.metrics()  # names the environment if a recorded rollout was not finite
        raise UsageError(
            f"after {module.source.num_timesteps:,} transitions the parameter {bad} is NaN or infinite; "
            "earlier checkpoints are untouched: lower learning_rate or max_grad_norm"
        )
