"""What a language module's checkpoint holds besides its run: no frozen weights from a path, one mean gradient."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rl_modules.common.stored_arguments import settings_of
from rl_modules.core.curves import hand_to_callbacks
from rl_modules.core.resume import accumulated_gradients
from rl_modules.language import frozen_weights
from rl_modules.language.architecture import is_sharded
from rl_modules.language.frozen_weights import add_to, leave_out, require_same_weights
from rl_modules.language.lora import refuse_other_adapters
from rl_modules.language.metrics import monitored
from rl_modules.language.sharding import share, whole

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


def complete(module: "LanguageModule", checkpoint: dict[str, Any]) -> None:
    """Leaves frozen weights out of a checkpoint; adds the last values of metrics that callbacks monitor."""
    if frozen := module.hparams["description"]["frozen"]:
        leave_out(module, checkpoint, frozen)
    watched = set() if module._trainer is None else monitored(module.trainer)
    checkpoint["monitored"] = {name: value for name, value in module.latest_metrics.items() if name in watched}


def add_frozen(module: "LanguageModule", state_dict: dict[str, Tensor]) -> None:
    """Adds the frozen weights that a checkpoint's state dict lacks."""
    if frozen := module.hparams["description"]["frozen"]:
        frozen_weights.add_frozen(module, state_dict, frozen)


def add_frozen_to(module: "LanguageModule", checkpoint: dict[str, Any]) -> None:
    """Adds the same to a checkpoint of a run that resumes, where they are the weights with which it began."""
    if saved := (settings_of(checkpoint).get("description") or {}).get("frozen", {}):
        require_same_weights(module._sources, saved, module.hparams)
        add_to(module, checkpoint, saved)
    # The checkpoint's weights may differ from the current ones at the path, so later checkpoints contain them too.
    own = module.hparams["description"]
    kept = {prefix: source for prefix, source in own["frozen"].items() if prefix in saved}
    module.hparams["description"] = {**own, "frozen": kept}


def require_same_adapters(module: "LanguageModule", checkpoint: dict[str, Any]) -> None:
    """Refuses a checkpoint with adapters for a model without any, and the reverse."""
    saved, own = settings_of(checkpoint), module.lora
    if "lora" in saved and (own is None) != (saved["lora"] is None):
        refuse_other_adapters(own, saved["lora"])


def gradients_so_far(module: "LanguageModule") -> dict[str, Tensor]:
    """The gradients of an unfinished step, averaged over ranks, on the CPU."""
    gradients = accumulated_gradients(module)
    if is_sharded(module.model):  # and averaged already
        return whole(gradients) if gradients else {}
    # After a fit the module is on the CPU, but the ranks' collectives still use the strategy's device.
    strategy: Any = module._trainer and module.trainer.strategy
    there = {name: g.detach().to(strategy.root_device, copy=True) for name, g in gradients.items()}
    return {name: strategy.reduce(g, reduce_op="mean").cpu() for name, g in there.items()}


def take_up(module: "LanguageModule") -> None:
    """Continues the curves and the unfinished step of a loaded checkpoint, before training begins."""
    hand_to_callbacks(module.trainer, module.latest_metrics)
    module._means.to(module.device)
    if module._means:
        module.write_due_metrics()  # a ModelCheckpoint saves a step before its point is written
    gradients, parameters = module.run.gradients, dict(module.named_parameters())
    gradients |= {name: g.to(parameters[name].device, parameters[name].dtype) for name, g in gradients.items()}
    if is_sharded(module.model):
        gradients |= {name: share(gradient, parameters[name]) for name, gradient in gradients.items()}
