"""A run of a control algorithm: its network from the environment's spaces, and its part of Lightning's loop."""

from typing import Any

import lightning as L
import torch

from rl_modules.checkpoints import SPACES, require_same_optimizers
from rl_modules.common.errors import UsageError
from rl_modules.common.factories import warn_of_missing
from rl_modules.common.masks import split_space
from rl_modules.common.spaces import check_same_space, space_from_dict, space_to_dict
from rl_modules.core.curves import hand_to_callbacks
from rl_modules.core.hooks import OfRun
from rl_modules.core.resume import draw_over, finish_batch, resume_training
from rl_modules.core.seams import check_schedulers
from rl_modules.core.settings import warn_of_idle
from rl_modules.metrics import means_so_far, require_finite_weights
from rl_modules.networks.encoders import extractor_of


class ControlLoop(OfRun):
    """What every control algorithm does at the hooks of a fit, before a subclass's own hooks."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if trainer.loggers:
            from rl_modules.loggers import log_settings

            log_settings(trainer)
        warn_of_missing(module, module.run.missing_factories)
        module.run.missing_factories = {}
        # A unit that is no longer active leaves moments of 1e-40 in Adam, with which a CPU computes four times slower.
        torch.set_flush_denormal(True)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        torch.set_flush_denormal(False)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        check_schedulers(module)
        require_same_optimizers(module)
        resume_training(module)
        module._means.to(module.device)
        # Of the epoch that ends there, if one does: Lightning counts it as done.
        module.logs_this_epoch = module.current_epoch % module.log_every == 0
        finish_batch(trainer)
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
        module.update_schedules(module.progress_remaining)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if module.graph:  # not what torch.compile has put there
            module.__dict__.pop("training_step", None)
        if (target := module._modules.get("target_network")) is not None:
            target.train()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Decides whether this epoch's diagnostics are computed."""
        module.logs_this_epoch = (module.current_epoch + 1) % module.log_every == 0

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

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.run.point = None
        require_finite_weights(module)
        # What Lightning and its callbacks log by themselves is drawn over this count: here, over transitions.
        draw_over(trainer, module.place)
        rollout = module.source.metrics_over_ranks()
        # For Lightning's bar, EarlyStopping and ModelCheckpoint, which need a value in every epoch, before the first
        # episode's end too.
        mean = rollout.get("rollout/ep_rew_mean", module.source.partial_return)
        module.log("rollout/ep_rew_mean", mean, prog_bar=True, logger=False, sync_dist=trainer.world_size > 1)
        writes = module.logs_this_epoch and not module.is_cut_off
        hook: Any = type(module).on_train_epoch_end
        if module.is_cut_off or (writes and hook.framed is not L.LightningModule.on_train_epoch_end):
            # A cut epoch's point is written at its end, by the run that resumes, and callbacks monitor the means so
            # far. A subclass's hook may read them.
            hand_to_callbacks(trainer, means_so_far(module))
        if writes:
            # Without an optimizer Lightning has one that has no parameters.
            if trainer.optimizers and trainer.optimizers[0].param_groups:
                module.record_now(learning_rate=trainer.optimizers[0].param_groups[0]["lr"])
            if module.grad_norm is not None:
                module.record_now(grad_norm=float(module.grad_norm))
            module.run.point = rollout, module.place
        if not (module.automatic_optimization or module.graph):
            module.step_schedulers()


def recorded_step(module: Any) -> Any:
    """Returns what replaces ``training_step`` under ``graph=True``."""
    if module.experience.kind == "replay":
        from rl_modules.fast.updates import RecordedUpdate

        return RecordedUpdate(module)
    return module.source.recorded_iteration()


# ---------------------------------------------------------------- before a run


def take_spaces(module: Any) -> None:
    """Takes the datamodule's spaces, or refuses others than those of the weights."""
    source = module.source
    for name in SPACES:
        space = getattr(source, name)
        if module.hparams.get(name) is None:
            module.hparams[name] = space_to_dict(space)
        elif module.is_built or module.is_fitting:
            mine = space_from_dict(module.hparams[name])
            check_same_space(name, mine, space, type(module).__name__, source.env_name)


def build(module: Any) -> None:
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


@torch.no_grad()
def begin_target(module: Any) -> None:
    """Copies the followed weights to ``target_network``: another ``fit`` or a user's loop may have trained them. A
    target of another form, which a subclass may define, stays unchanged.
    """
    if (target := module._modules.get("target_network")) is None:
        return
    for ours, theirs in ((target.parameters(), module.followed().parameters()),
                         (target.buffers(), module.followed().buffers())):  # fmt: skip
        copies, originals = list(ours), list(theirs)
        if copies and [x.shape for x in copies] == [x.shape for x in originals]:
            torch._foreach_copy_(copies, originals)
