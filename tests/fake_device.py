"""A device that is no device: tensors on it live in the host's memory, and every crossing is seen.

It stands for a GPU where there is none. Like there, an operation between a tensor of the device and one of the CPU
fails, a collective of a CPU tensor fails (as under NCCL), and what makes the host wait for the device is counted.
"""

import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

#: Torch knows it without a driver. Its own tensors have no numbers; these here do.
DEVICE = torch.device("meta")
optimizer: Any = sys.modules[torch.optim.Optimizer.__module__]
_OURS = re.compile(r"(?<!/tests)/(rl_modules|datamodules)/")
#: Operations whose result decides a shape or a number on the host.
_WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::item", "aten::repeat_interleave",
}  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor of the device, around the one that holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {}, None)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"OnDevice({self.inner})"

    def tolist(self) -> Any:
        _note("tolist", None)
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a tensor of the device has no NumPy array; call cpu() first")


class FakeDevice(TorchDispatchMode):
    """Inside, tensors can be made on the device; ``waits`` counts by place what made the host wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.exempt = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {}, self)

    def __enter__(self) -> Any:
        _MODES.append(self)
        return super().__enter__()

    def __exit__(self, *args: Any) -> Any:
        _MODES.pop()
        return super().__exit__(*args)


_MODES: list[FakeDevice] = []


def _note(what: str, mode: FakeDevice | None) -> None:
    mode = mode or (_MODES[-1] if _MODES else None)
    if mode is None or mode.exempt:
        return
    frames = traceback.extract_stack()
    if any(f.filename.endswith("_check.py") for f in frames):
        return  # a check of a fast path runs once per model
    ours = [f for f in frames if _OURS.search(f.filename)]
    place = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].name}" if ours else "elsewhere"
    mode.waits[f"{place} {what}"] += 1


def _is_fake(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any], mode: FakeDevice | None) -> Any:
    name = func._schema.name
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, OnDevice)]
    there = [x for x in tensors if not isinstance(x, OnDevice)]
    moving = name in ("aten::copy_", "aten::_to_copy", "aten::to")
    if name.startswith("c10d::") and name != "c10d::barrier":
        if there and not (_MODES and _MODES[-1].exempt):
            raise RuntimeError(f"{name} got a tensor of the CPU; a collective takes tensors of the strategy's device")
    elif here and not moving and any(x.ndim for x in there):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found device and cpu")
    goes_to = kwargs.get("device")
    if (name in _WAITING and here) or (name in ("aten::index", "aten::index_put", "aten::index_put_") and here and any(
        x.dtype == torch.bool for x in tree_flatten(args[1])[0] if isinstance(x, torch.Tensor)
    )):  # fmt: skip
        _note(name.removeprefix("aten::"), mode)
    elif name == "aten::_to_copy" and goes_to is not None and _is_fake(goes_to) != bool(here):
        if kwargs.get("non_blocking") and here:
            raise RuntimeError("a copy to the host that does not block is read before it is there")
        if not (kwargs.get("non_blocking") and _is_fake(goes_to)):
            _note("to device" if _is_fake(goes_to) else "to cpu", mode)
    elif name == "aten::copy_" and here and there:
        _note("copy_", mode)
    known = {id(x.inner): x for x in here}
    args, kwargs = tree_map(lambda x: x.inner if isinstance(x, OnDevice) else x, (args, kwargs))
    if _is_fake(goes_to):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*args, **kwargs)
    on_device = _is_fake(goes_to) if goes_to is not None else bool(here)
    if name == "aten::copy_":
        on_device = id(args[0]) in known

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, OnDevice):
            return x
        return known[id(x)] if id(x) in known else OnDevice(x) if on_device else x

    return tree_map(wrapped, result)


# ------------------------------------------------------------------------------- a Trainer on it


class FakeAccelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        pass


def move(model: torch.nn.Module) -> None:
    """Move a module to the device; ``Module.to`` would part weights that are tied."""
    moved: dict[int, Any] = {}
    for part in model.modules():
        for name, weight in part._parameters.items():
            if weight is not None and not isinstance(weight, OnDevice):
                if id(weight) not in moved:
                    moved[id(weight)] = torch.nn.Parameter(OnDevice(weight.detach()), weight.requires_grad)
                part._parameters[name] = moved[id(weight)]
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, OnDevice):
                part._buffers[name] = OnDevice(buffer)
    model.to(DEVICE)


class FakeStrategy(SingleDeviceStrategy):
    """One process with the device."""

    def __init__(self) -> None:
        super().__init__(device=DEVICE, accelerator=FakeAccelerator())

    def model_to_device(self) -> None:
        move(self.lightning_module)

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        return nullcontext()


class FakeRanks(DDPStrategy):
    """Several processes with a device each. Gradients stay each rank's own: DDP's buckets need real storage."""

    def __init__(self) -> None:
        super().__init__(accelerator=FakeAccelerator(), parallel_devices=[DEVICE] * 2,
                         process_group_backend="gloo")  # fmt: skip

    def setup_distributed(self) -> None:
        self.parallel_devices = [torch.device("cpu")] * 2  # torch wants to know the device's driver
        super().setup_distributed()
        self.parallel_devices = [DEVICE] * 2

    def model_to_device(self) -> None:
        move(self.lightning_module)

    def configure_ddp(self) -> None:
        pass

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        return nullcontext()


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """The mode, with collectives of Python objects let through: they choose their tensors' device themselves."""
    mode = FakeDevice()
    before = {
        name: getattr(torch.distributed, name)
        for name in ("all_gather_object", "gather_object", "broadcast_object_list")
    }

    def let_through(inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode.exempt += 1
            try:
                return inner(*args, **kwargs)
            finally:
                mode.exempt -= 1

        return call

    for name, inner in before.items():
        setattr(torch.distributed, name, let_through(inner))
    autocast, is_autocast_enabled = torch.autocast, torch.is_autocast_enabled
    torch.autocast = _Autocast  # type: ignore[misc]
    torch.is_autocast_enabled = lambda device="cpu": is_autocast_enabled("cpu" if _is_fake(device) else device)
    fused = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*fused(), DEVICE.type]  # the CPU's kernels run
    try:
        with mode, _ByWayOfTheHost():
            yield mode
    finally:
        torch.autocast, torch.is_autocast_enabled = autocast, is_autocast_enabled  # type: ignore[misc]
        optimizer._get_fused_kernels_supported_devices = fused
        for name, inner in before.items():
            setattr(torch.distributed, name, inner)


class _Autocast(torch.autocast):
    """Autocast of the device is that of the CPU, where its numbers are."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if _is_fake(device_type) else device_type, *args, **kwargs)


class _ByWayOfTheHost(TorchFunctionMode):
    """``torch.tensor(numbers, device=…)`` makes a tensor on the host and copies it; torch would leave out the numbers.

    A mode and no patch: torch keeps a table of its constructors, which would go on holding the patch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_fake(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)
