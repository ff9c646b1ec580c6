"""What a checkpoint holds of a run, written and read: the declared state of its algorithm and its ranks."""

from typing import TYPE_CHECKING, Any

from rl_modules.common.arguments import has_arrays, plain
from rl_modules.common.stored_arguments import settings_of
from rl_modules.core.checkpoint_file import make_loadable, widen
from rl_modules.core.hooks import is_cut_off
from rl_modules.core.resume import keep_earlier_checkpoint, reopen_epoch
from rl_modules.core.state import load_state, pack, state_of, unpack
from rl_modules.ranks import of_other_ranks, of_this_rank

if TYPE_CHECKING:
    from rl_modules.algorithm import Algorithm


def save_run(module: "Algorithm", checkpoint: dict[str, Any]) -> None:
    """Adds what a run needs to resume to Lightning's checkpoint."""
    trainer, is_whole = module._trainer, module.is_fitting
    keep_earlier_checkpoint(trainer, module.run.has_begun)
    make_loadable(checkpoint, module, getattr(trainer, "datamodule", None))
    parts = {"hyper_parameters": module, "datamodule_hyper_parameters": getattr(trainer, "datamodule", None)}
    checkpoint["arrays"] = {
        key: arrays_among(checkpoint[key], made) for key, made in parts.items() if key in checkpoint
    }
    checkpoint["algorithm"] = type(module).__name__
    if is_whole and is_cut_off(module.trainer):
        reopen_epoch(module.trainer, checkpoint)
    own: dict[str, Any] = {
        "run": state_of(module, is_whole) | state_of(module.run, is_whole),
        "generators": module.run.generators.state(module.device),
    }
    checkpoint["gradients"] = module.gradients_so_far()
    if module.stores_own_gradients:
        own["gradients"] = checkpoint["gradients"]
    # Lightning saves what the first rank has.
    checkpoint.update(own, other_ranks=of_other_ranks(own, trainer))


def load_run(module: "Algorithm", checkpoint: dict[str, Any]) -> None:
    """Restores what :func:`save_run` added."""
    widen(module, checkpoint.get("state_dict", {}))
    own = of_this_rank(checkpoint, checkpoint.get("other_ranks", []), module._trainer)
    for state in (module, module.run):
        load_state(state, own.get("run", {}), settings=settings_of(checkpoint))
    module.run.generators.load(own.get("generators"))
    module.run.gradients = (own if module.stores_own_gradients else checkpoint).get("gradients", {})
    if module.is_fitting:
        module.run.resumes = True
        module.trainer.num_sanity_val_steps = 0  # from an epoch's end Lightning would evaluate again


# ---------------------------------------------------------------- arguments with arrays


def arrays_among(stored: dict[str, Any], made: Any) -> dict[str, Any]:
    """Returns the arguments of an object with their arrays, which stored hyperparameters hold as lists."""
    given = getattr(made, "_given", None)
    with_arrays = [] if given is None else [*given.arrays.items(), *given.received.items()]
    return {
        name: pack(value)
        for name, value in with_arrays
        if has_arrays(value) and repr(plain(value)) == repr(stored.get(name))
    }


def restored_arrays(checkpoint: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns what :func:`arrays_among` did, as the constructor took it."""
    return unpack(checkpoint.get("arrays", {}).get(key, {}), None, key)
