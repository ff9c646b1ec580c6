"""Reads checkpoint files, and refuses damaged ones, those of other programs, and tensors that kernels must not get."""

import inspect
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.utilities.cloud_io import _load as pl_load
from lightning.pytorch.core.saving import CHECKPOINT_PAST_HPARAMS_KEYS

from rl_modules.common.arguments import plain
from rl_modules.common.errors import UsageError
from rl_modules.common.foreign_names import refuse_foreign_call
from rl_modules.common.loading import name_of
from rl_modules.common.stored_arguments import building, is_storable, settings_of
from rl_modules.core.settings import Declared, takes_own_arguments

if TYPE_CHECKING:
    from rl_modules.algorithm import Algorithm


#: What Lightning needs of a checkpoint to build a module from it.
PARTS = ("state_dict", "hyper_parameters", "pytorch-lightning_version")
#: What torch's elementwise optimizers, among them all that are fused, keep per parameter: tensors of its shape, and
#: numbers.
_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_MOMENTS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "sum",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
    "ax",
    "prev",
    "step_size",
)
_NUMBERS = ("step", "eta", "mu", "mu_product")


#: What ``torch.load(weights_only=True)`` builds besides tensors.
_PLAIN = (
    dict,
    list,
    tuple,
    set,
    OrderedDict,
    Counter,
    str,
    bytes,
    bytearray,
    bool,
    int,
    float,
    complex,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
)


class DamagedCheckpoint(UsageError):
    """The bytes of a checkpoint file are not those that were written."""


def require_parts(checkpoint: Any, name: str, parts: Collection[str] = PARTS) -> None:
    """Refuses a file that torch has read but that is not a checkpoint, such as a bare state dict."""
    missing = [part for part in parts if not isinstance(checkpoint, dict) or checkpoint.get(part) in (None, {})]
    if missing:
        raise UsageError(
            f"{name} is no checkpoint of this project: it has no {', '.join(missing)}; give one that `rl "
            "fit` or Trainer.save_checkpoint wrote, such as PPO's"
        )


def read_checkpoint(path: Any, what: str | None = "checkpoint_path", parts: Collection[str] = PARTS) -> dict[str, Any]:
    """Verifies a checkpoint's checksums and loads it without code; its tensors stay on the disk until used."""
    file = Path(path)
    name = f"the checkpoint {path}" if what is None else f"{what}={str(path)!r}"
    if (why := _refusal_of(file)) is not None:
        raise UsageError(f"{name} {why}")
    if (damage := damage_of(file)) is not None:
        raise DamagedCheckpoint(f"{name} is damaged: {damage}")
    try:
        checkpoint = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # a foreign pickle makes torch raise errors of any kind
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            code = re.search(r"GLOBAL ([\w.]+)|(?:class|function) ([\w.]+)", str(error))
            said = f"holds code, {code.group(1) or code.group(2)}," if code is not None else f"holds code ({said}),"
            raise UsageError(
                f"{name} {said} which is never run; only checkpoints of tensors, numbers, strings, lists "
                "and dictionaries load"
            ) from error
        raise DamagedCheckpoint(f"{name} is damaged: {said}") from error
    require_parts(checkpoint, name if what else f"ckpt_path={str(path)!r}", parts)
    require_data(checkpoint, name)
    return checkpoint


def _refusal_of(file: Path) -> str | None:
    """Returns why a path can't be a checkpoint file, and what to give instead; None: it may be one."""
    if file.is_dir():
        return (
            "is a folder, as Lightning's sharded strategies write it; its index is a pickle, "
            "which could run code: give a .ckpt file that this project wrote"
        )
    if not file.is_file():  # a device or a pipe may have no end
        return "is not a file, so it can't be read; give the path of a .ckpt file"
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if {"data", "policy.pth"} <= {*archive.namelist()}:
                return (
                    f"is a model of Stable-Baselines3; `rl import-sb3 {file} -o {file.with_suffix('.ckpt')}` writes a "
                    "checkpoint of it"
                )
    return None


def require_data(checkpoint: dict[str, Any], name: str) -> None:
    """Refuses what Lightning would import or what kernels would misread in a checkpoint that torch has read."""
    for key in CHECKPOINT_PAST_HPARAMS_KEYS:
        # Lightning would also read arguments from there, past the checks of `hyper_parameters`.
        if key in checkpoint:
            raise UsageError(
                f"{name} has the key {key!r}, which only checkpoints of Lightning before 0.8 have, and "
                "none of this project; give one that `rl fit` or Trainer.save_checkpoint wrote"
            )
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        settings_of(checkpoint, key)
    require_own_memory(checkpoint, name)


def read_source(
    source: str | Path | IO[bytes] | None, hparams_file: str | Path | None, parts: Collection[str] = PARTS
) -> dict[str, Any]:
    """Reads what ``load_from_checkpoint`` is given: a path, an address, or an open file, which stays at its start."""
    if hparams_file is not None:
        raise UsageError(
            f"hparams_file={str(hparams_file)!r} would replace the arguments that the checkpoint holds; leave it out, "
            "and give those that differ by name"
        )
    if source is None:
        raise UsageError("checkpoint_path=None is no file; give the path of a .ckpt file")
    if isinstance(source, str | Path) and "://" not in str(source):
        return read_checkpoint(source, parts=parts)
    checkpoint: dict[str, Any] = pl_load(source, map_location="cpu", weights_only=True)
    if hasattr(source, "seek"):
        source.seek(0)
    require_parts(checkpoint, "checkpoint_path", parts)
    require_data(checkpoint, "checkpoint_path")
    return checkpoint


def damage_of(path: Path) -> str | None:
    """Returns the damage of a checkpoint file that its checksums show; None: it is whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch compresses nothing; unpacking what another program compressed could fill the memory.
            foreign = [part.filename for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED]
            bad = foreign[0] if foreign else archive.testzip()
    except Exception as error:  # a damaged directory makes zipfile raise errors of any kind
        return f"it is cut off, or not a checkpoint at all ({error})"
    return None if bad is None else f"its part {bad} does not match its checksum"


def _parts_of(checkpoint: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All values in nested containers with the keys to them, joined by dots."""
    pending: list[tuple[str, Any]] = [("", checkpoint)]
    seen = set()  # a list may contain itself
    while pending:
        where, value = pending.pop()
        yield where[1:], value
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{where}.{key}", item) for key, item in items]


def require_own_memory(checkpoint: dict[str, Any], name: str) -> None:
    """Refuses a tensor with less memory than elements, as ``expand`` makes it: kernels would read beyond it."""
    for where, value in _parts_of(checkpoint):
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
            if not plain or value.is_quantized or value.device.type != "cpu":
                raise UsageError(
                    f"{name} has {where} as a {type(value).__name__} of {value.layout} on "
                    f"{value.device.type}; only plain dense tensors load"
                )
            if (value.storage_offset() + value.numel()) * value.itemsize > value.untyped_storage().nbytes():
                raise UsageError(
                    f"{name} has {where} of shape {tuple(value.shape)} and strides {value.stride()} "
                    "with less memory than elements; tensors that share memory with themselves do not load"
                )


def require_plain(checkpoint: dict[str, Any]) -> None:
    """Refuses, before it is written, a checkpoint that could not be loaded without code."""
    known = [*_PLAIN, *torch.serialization.get_safe_globals()]
    for where, value in _parts_of(checkpoint):
        if not isinstance(value, torch.Tensor) and type(value) not in known:
            raise UsageError(
                f"this checkpoint could not be loaded again: it has {where} as a "
                f"{type(value).__module__}.{type(value).__qualname__}, which only code could build; keep "
                "tensors, numbers, texts, and lists and dictionaries of these"
            )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Gives loaded moments memory laid out as their parameters, which fused optimizers read by address."""
    for optimizer in (optimizer for optimizer in optimizers if isinstance(optimizer, _ELEMENTWISE)):
        for parameter, state in optimizer.state.items():
            for name in [name for name in (*_MOMENTS, *_NUMBERS) if state.get(name) is not None]:
                value, shape = state[name], () if name in _NUMBERS else parameter.shape
                if not isinstance(value, torch.Tensor):
                    value = torch.tensor(value) if isinstance(value, int | float) else torch.empty(0, 0)
                if value.shape != shape or value.is_complex():
                    raise UsageError(
                        f"the checkpoint has {type(optimizer).__name__}'s {name} with shape "
                        f"{tuple(value.shape)}, where its parameter needs {tuple(shape)}; resume from a "
                        "checkpoint of the same network"
                    )
                if name in _MOMENTS:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def widen(module: "Algorithm", state_dict: dict[str, Any]) -> None:
    """Converts a module without a Trainer of another precision to 64 bits where the checkpoint has these."""
    trainer = module._trainer
    if trainer is not None and trainer.precision != "64-true":
        return
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        saved = state_dict.get(name)
        if saved is not None and saved.dtype == torch.float64 and tensor.is_floating_point():
            tensor.data = tensor.data.double()


# ---------------------------------------------------------------- what a checkpoint has of arguments


def arguments_to_store(made: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that construct an object's class again, and the settings that its constructor chose."""
    if not isinstance(made, Declared):
        return settings, {}
    chosen, before = set_by_constructor(made), received_otherwise(made)
    parameters: Any = made
    now, then = parameters._hparams, parameters._hparams_initial
    # A setting that was assigned after construction has no such value.
    changed = {name for name in then if repr(now.get(name)) != repr(then[name])}
    received = {name: value for name, value in before.items() if name not in changed}
    stored = {name: x for name, x in settings.items() if name not in chosen}
    others = {name: plain(settings[name]) for name in {*chosen, *received} if name in settings}
    return {**stored, **received}, {name: x for name, x in others.items() if is_storable(x)}


def make_loadable(checkpoint: dict[str, Any], module: Any, datamodule: Any) -> None:
    """Makes a checkpoint loadable whatever arguments a subclass has, right before it is written."""
    parameters, chosen = arguments_to_store(module, checkpoint.get("hyper_parameters", {}))
    checkpoint["hyper_parameters"] = {name: plain(x) for name, x in parameters.items() if is_storable(x)}
    checkpoint["left_out"] = dict(module._given.objects)
    checkpoint["chosen"] = {"hyper_parameters": chosen}
    if "datamodule_hyper_parameters" in checkpoint:
        parameters, chosen = arguments_to_store(datamodule, checkpoint["datamodule_hyper_parameters"])
        checkpoint["datamodule_hyper_parameters"] = plain(described(parameters))
        checkpoint["chosen"]["datamodule_hyper_parameters"] = chosen
    for name, state in checkpoint.get("callbacks", {}).items():
        checkpoint["callbacks"][name] = _with_python_numbers(state)


def received_otherwise(made: Any) -> dict[str, Any]:
    """Returns the arguments that an ordinary constructor received and passed on with another value."""
    now = made._hparams_initial
    return {
        name: plain(value)
        for name, value in made._given.received.items()
        if name in made.declared_settings and repr(plain(value)) != repr(plain(now.get(name)))
    }


def set_by_constructor(made: Any) -> set[str]:
    """Returns the hyperparameters that an ordinary constructor chose, and chooses again when it is loaded."""
    cls: Any = type(made)
    if not takes_own_arguments(cls):
        return set()
    chosen = {*cls.declared_settings, *made._given.received} - {
        *inspect.signature(cls.__init__).parameters,
        *made._given.names,
    }
    # Values that were filled in later, such as the spaces, are in the checkpoint only.
    now, then = made._hparams, made._hparams_initial
    return {name for name in chosen if repr(now.get(name)) == repr(then.get(name))}


def _with_python_numbers(state: Any) -> Any:
    if type(state) is dict:
        return {_with_python_numbers(key): _with_python_numbers(item) for key, item in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_python_numbers(item) for item in state)
    return state.item() if isinstance(state, np.generic) else state


def described(value: Any) -> Any:
    """Replaces the objects in a value that a checkpoint can't hold by their names."""
    if type(value) is dict:
        return {key: described(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(described(item) for item in value)
    return value if is_storable(value) else name_of(value)


# ---------------------------------------------------------------- loading a module


@contextmanager
def loading(cls: Any, checkpoint_path: Any, hparams_file: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Checks the file and the arguments that replace its own, from which Lightning builds a module within the context;
    gives what the file holds.

    Raises:
        UsageError: an unknown hyperparameter, a file that is no checkpoint of this class, one that names a function
            for its network, or weights of another network.
    """
    refuse_foreign_call(cls, (), arguments)
    saved = read_source(checkpoint_path, hparams_file)
    algorithm = saved.get("algorithm")
    if algorithm != cls.__name__:
        raise UsageError(
            f"the checkpoint {checkpoint_path} holds {algorithm or 'no algorithm of this project'}"
            f", not {cls.__name__}; load it with that class"
        )
    for name, given in saved.get("left_out", {}).items():
        if name not in arguments:
            raise UsageError(
                f"{cls.__name__} was trained with {name}={given}, an object that no checkpoint "
                f"can hold; give it again: load_from_checkpoint(…, {name}=…)"
            )
    try:
        with building(cls, arguments, settings_of(saved)):
            yield saved
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        detail = " ".join(str(error).split())[:300]
        raise UsageError(
            f"checkpoint_path={str(checkpoint_path)!r} holds weights of another network than its "
            f"hyperparameters describe: {detail}"
        ) from error
