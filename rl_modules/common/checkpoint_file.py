"""Reads checkpoint files, and refuses damaged ones, those of other programs, and tensors that kernels must not get."""

import pickle
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.saving import CHECKPOINT_PAST_HPARAMS_KEYS
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rl_modules.common.arguments import settings_of
from rl_modules.common.errors import UsageError

#: What Lightning needs of a checkpoint to build a module from it.
PARTS = ("state_dict", "hyper_parameters", "pytorch-lightning_version")
#: What torch's elementwise optimizers, among them all that are fused, keep per parameter: tensors of its shape, and
#: numbers.
_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop,
                torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
                torch.optim.Rprop)  # fmt: skip
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg", "acc_delta",
            "exp_inf", "ax", "prev", "step_size")  # fmt: skip
_NUMBERS = ("step", "eta", "mu", "mu_product")

#: The class that ``load_from_checkpoint`` is building, the arguments that its caller gave, and the settings of the
#: checkpoint, before these replaced them; None: unknown.
_building: ContextVar[tuple[type, frozenset[str], dict[str, Any] | None] | None] = ContextVar("building", default=None)


@contextmanager
def building(cls: type, given: Collection[str], settings: dict[str, Any] | None = None) -> Iterator[None]:
    """Marks the arguments of objects of a class that are constructed within the context as those of a checkpoint."""
    token = _building.set((cls, frozenset(given), settings))
    try:
        yield
    finally:
        _building.reset(token)


def chosen_by_checkpoint(made: Any) -> set[str]:
    """Names of the arguments that a checkpoint alone gave to an object, whichever of its keys held them."""
    names: list[str] = made.given_names
    cls, given, _ = _building.get() or (None, frozenset(), None)
    return set(names) - given if cls is not None and isinstance(made, cls) else set()


def settings_before(made: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a checkpoint's run, also where ``load_from_checkpoint`` was given others."""
    cls, _, settings = _building.get() or (None, frozenset(), None)
    return settings_of(checkpoint) if cls is None or settings is None or not isinstance(made, cls) else settings


class DamagedCheckpoint(UsageError):
    """The bytes of a checkpoint file are not those that were written."""


def require_parts(checkpoint: Any, name: str, parts: Collection[str] = PARTS) -> None:
    """Refuses a file that torch has read but that is not a checkpoint, such as a bare state dict."""
    missing = [part for part in parts if not isinstance(checkpoint, dict) or checkpoint.get(part) in (None, {})]
    if missing:
        raise UsageError(f"{name} is no checkpoint of this project: it has no {', '.join(missing)}; give one that `rl "
                         "fit` or Trainer.save_checkpoint wrote, such as PPO's")  # fmt: skip


def read_checkpoint(path: Any, what: str | None = "checkpoint_path", parts: Collection[str] = PARTS) -> dict[str, Any]:
    """Verifies a checkpoint's checksums and loads it without running code; its tensors stay on the disk until they are
    used.
    """
    file = Path(path)
    name = f"the checkpoint {path}" if what is None else f"{what}={str(path)!r}"
    if file.is_dir():
        raise UsageError(f"{name} is a folder, as Lightning's sharded strategies write it; its index is a pickle, "
                         "which could run code: give a .ckpt file that this project wrote")  # fmt: skip
    if not file.is_file():  # a device or a pipe may have no end
        raise UsageError(f"{name} is not a file, so it can't be read; give the path of a .ckpt file")
    if (damage := damage_of(file)) is not None:
        raise DamagedCheckpoint(f"{name} is damaged: {damage}")
    try:
        checkpoint = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # a foreign pickle makes torch raise errors of any kind
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            code = re.search(r"GLOBAL ([\w.]+)|(?:class|function) ([\w.]+)", str(error))
            said = f"holds code, {code.group(1) or code.group(2)}," if code is not None else f"holds code ({said}),"
            raise UsageError(f"{name} {said} which is never run; only checkpoints of tensors, numbers, strings, lists "
                             "and dictionaries load") from error  # fmt: skip
        raise DamagedCheckpoint(f"{name} is damaged: {said}") from error
    require_parts(checkpoint, name if what else f"ckpt_path={str(path)!r}", parts)
    for key in CHECKPOINT_PAST_HPARAMS_KEYS:
        # Lightning would also read arguments from there, past the checks of `hyper_parameters`.
        if key in checkpoint:
            raise UsageError(f"{name} has the key {key!r}, which only checkpoints of Lightning before 0.8 have, and "
                             "none of this project; give one that `rl fit` or Trainer.save_checkpoint wrote"
                             )  # fmt: skip
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        settings_of(checkpoint, key)
    require_own_memory(checkpoint, name)
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


def require_own_memory(checkpoint: dict[str, Any], name: str) -> None:
    """Refuses a tensor that has less memory than elements, or another layout than rows: kernels that take tensors by
    their address would read and write beyond it. ``expand`` makes such tensors.
    """
    pending: list[tuple[str, Any]] = [("", checkpoint)]
    seen = set()  # a list may contain itself
    while pending:
        where, value = pending.pop()
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
            if not plain or value.is_quantized or value.device.type != "cpu":
                raise UsageError(f"{name} has {where[1:]} as a {type(value).__name__} of {value.layout} on "
                                 f"{value.device.type}; only plain dense tensors load")  # fmt: skip
            if (value.storage_offset() + value.numel()) * value.itemsize > value.untyped_storage().nbytes():
                raise UsageError(f"{name} has {where[1:]} of shape {tuple(value.shape)} and strides {value.stride()} "
                                 "with less memory than elements; tensors that share memory with themselves do not load"
                                 )  # fmt: skip
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{where}.{key}", item) for key, item in items]


class CheckedCheckpointIO(TorchCheckpointIO):
    """Verifies a file by :func:`read_checkpoint` before Lightning loads it."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        if "://" not in str(path):
            read_checkpoint(path, "ckpt_path", ("state_dict", "pytorch-lightning_version"))
        where: Any = map_location or "cpu"
        return super().load_checkpoint(path, where, weights_only=True)

    @classmethod
    def install(cls, trainer: Any) -> None:
        """Replaces Lightning's own reader and writer of a Trainer; a user's stays."""
        # Some strategies read checkpoints in their own way and have no `checkpoint_io`.
        with suppress(NotImplementedError):
            if type(trainer.strategy.checkpoint_io) in (TorchCheckpointIO, CheckedCheckpointIO):
                trainer.strategy.checkpoint_io = cls()


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Gives the loaded moments memory of their own, laid out as their parameters: torch's fused optimizers read both by
    their addresses.
    """
    for optimizer in (optimizer for optimizer in optimizers if isinstance(optimizer, _ELEMENTWISE)):
        for parameter, state in optimizer.state.items():
            for name in [name for name in (*_MOMENTS, *_NUMBERS) if state.get(name) is not None]:
                value, shape = state[name], () if name in _NUMBERS else parameter.shape
                if not isinstance(value, torch.Tensor):
                    value = torch.tensor(value) if isinstance(value, int | float) else torch.empty(0, 0)
                if value.shape != shape or value.is_complex():
                    raise UsageError(f"the checkpoint has {type(optimizer).__name__}'s {name} with shape "
                                     f"{tuple(value.shape)}, where its parameter needs {tuple(shape)}; resume from a "
                                     "checkpoint of the same network")  # fmt: skip
                if name in _MOMENTS:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def widen(module: Any, state_dict: dict[str, Any]) -> None:
    """Converts tensors to 64 bits if the checkpoint's have 64 bits, because copies into 32 bits would be rounded.

    A Trainer of another precision than 64-true computes in its own, and nothing changes.
    """
    trainer = module._trainer
    if trainer is not None and trainer.precision != "64-true":
        return
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        saved = state_dict.get(name)
        if saved is not None and saved.dtype == torch.float64 and tensor.is_floating_point():
            tensor.data = tensor.data.double()
