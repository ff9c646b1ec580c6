"""What a checkpoint holds of a run, written and read: the declared state of its algorithm and its ranks."""

import zlib
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rl_modules.common.checkpoint_file import make_loadable, widen
from rl_modules.common.errors import UsageError
from rl_modules.common.stored_arguments import settings_of
from rl_modules.core.hooks import is_cut_off
from rl_modules.core.resume import keep_earlier_checkpoint, reopen_epoch
from rl_modules.core.state import Stateful, declared
from rl_modules.ranks import of_other_ranks, of_this_rank


def save_run(module: Any, checkpoint: dict[str, Any]) -> None:
    """Adds what a run needs to resume to Lightning's checkpoint."""
    trainer, is_whole = module._trainer, module.is_fitting
    keep_earlier_checkpoint(trainer, module.run.has_begun)
    make_loadable(checkpoint, module, getattr(trainer, "datamodule", None))
    checkpoint["algorithm"] = type(module).__name__
    if is_whole and is_cut_off(trainer):
        reopen_epoch(trainer, checkpoint)
    own: dict[str, Any] = {
        "run": state_of(module, is_whole) | state_of(module.run, is_whole),
        "generators": module.run.generators.state(module.device),
    }
    checkpoint["gradients"] = module.gradients_so_far()
    if module.stores_own_gradients:
        own["gradients"] = checkpoint["gradients"]
    # Lightning saves what the first rank has.
    checkpoint.update(own, other_ranks=of_other_ranks(own, trainer))


def load_run(module: Any, checkpoint: dict[str, Any]) -> None:
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


# ---------------------------------------------------------------- declared state

#: Keys of the dictionaries in which a checkpoint holds what weights_only=True does not load.
ARRAY, GENERATOR = "numpy.ndarray", "torch.Generator"


def state_of(obj: Any, complete: bool = True) -> dict[str, Any]:
    """The declared attributes as plain data on the CPU."""
    names = [name for name in declared(obj, kept=True) if complete or name in vars(obj)]
    return {name.lstrip("_"): pack(getattr(obj, name)) for name in names}


def pack(x: Any) -> Any:
    """A value as a checkpoint holds it."""
    if isinstance(x, Tensor):
        return x.detach().cpu().clone()
    if isinstance(x, np.ndarray | np.generic):
        return {ARRAY: torch.from_numpy(np.array(x))}
    if isinstance(x, Generator):
        return {GENERATOR: x.get_state(), "device": x.device.type}
    if isinstance(x, np.random.Generator):
        return pack(x.bit_generator.state)
    if isinstance(x, dict):
        return {key: pack(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(pack(value) for value in x)
    if isinstance(x, list | deque):
        return [pack(value) for value in x]
    return x.state_dict() if hasattr(x, "state_dict") else x


def load_state(obj: Any, saved: dict[str, Any], device: Any = "cpu", settings: Any = None) -> None:
    """Restores what :func:`state_of` returned."""
    for name in declared(obj, kept=True):
        key, field = name.lstrip("_"), getattr(type(obj), name)
        if field.argument and settings and settings.get(field.argument) != field.value_for(obj):
            continue
        if key not in saved:
            continue
        if saved[key] is None and field.initial is None and not hasattr(getattr(obj, name), "load_state_dict"):
            setattr(obj, name, None)
        else:
            makes_own = isinstance(saved[key], dict) and GENERATOR in saved[key]
            setattr(obj, name, unpack(saved[key], None if makes_own else getattr(obj, name), key, device))


def unpack(saved: Any, here: Any, name: str, device: Any = "cpu") -> Any:
    """The inverse of :func:`pack`; ``here`` is the present value, whose place this takes."""
    if isinstance(here, Stateful):
        here.load_state_dict(saved, device)
        return here
    if hasattr(here, "load_state_dict"):
        here.load_state_dict(saved)
        return here
    if isinstance(here, np.random.Generator):
        here.bit_generator.state = unpack(saved, None, name)
        return here
    is_array = isinstance(saved, dict) and ARRAY in saved
    if isinstance(here, Tensor):
        return like(saved, here, name).to(here.device)
    if isinstance(here, np.ndarray):
        return like(saved[ARRAY] if is_array else saved, here, name)
    if isinstance(saved, Tensor):
        return saved.to(device)
    if is_array:
        return saved[ARRAY].numpy().copy()
    if isinstance(saved, dict) and GENERATOR in saved:
        on, state = torch.device(device), saved[GENERATOR].cpu()
        if saved["device"] not in ("cpu", on.type):  # of a GPU, where there is none: seed and place of its stream
            return Generator(on).manual_seed(zlib.crc32(state.numpy().tobytes()))
        generator = Generator(on if on.type == saved["device"] else "cpu")
        generator.set_state(state)
        return generator
    if isinstance(saved, dict):
        known = here if isinstance(here, dict) else {}
        return {key: unpack(value, known.get(key), f"{name}.{key}", device) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        values = [unpack(value, None, name, device) for value in saved]
        return deque(values, here.maxlen) if isinstance(here, deque) else type(saved)(values)
    return saved


def like(saved: Any, here: Any, name: str) -> Any:
    """Returns a saved tensor that takes the place of an array or tensor of this run."""
    if not isinstance(saved, Tensor) or saved.shape != here.shape or saved.dtype != torch.as_tensor(here).dtype:
        found = f"{tuple(saved.shape)} {saved.dtype}" if isinstance(saved, Tensor) else repr(saved)[:60]
        raise UsageError(
            f"the checkpoint has {name} as {found}, where this run has {tuple(here.shape)} {here.dtype}; "
            "resume with the environments and settings that it was written with"
        )
    return saved if isinstance(here, Tensor) else saved.numpy().copy()
