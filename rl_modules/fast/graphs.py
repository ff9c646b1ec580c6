"""Functions that are recorded once as a CUDA graph and then replayed; without CUDA they are called.

A recording holds the kernels of a function with the addresses of its tensors, and none of its Python code. So tensors
that it reads and changes must stay where they are, Python's branches and numbers are those of the recording, and
nothing may be read back to the host. :class:`Recordable` checks the last at a function's first call, on every device.
"""

import functools
import linecache
import traceback
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_modules.common.errors import UsageError
from rl_modules.fast import recording

#: Operators whose result the host waits for: a number, or the shape of a tensor.
READ_BACK = frozenset(
    (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    )
)
#: Recordings of one function that are kept, the last ones used.
MOST = 16


class CannotRecord(RuntimeError):
    """An operation that a recording can't repeat; the message says what it does."""


class CudaGraph:
    """One recording on a CUDA device. Its generators advance with every replay; ``pool`` is memory to share."""

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator], pool: Any = None) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
        for generator in generators:
            self._graph.register_generator_state(generator)

    @staticmethod
    def warm_up(run: Callable[[], None]) -> None:
        """Calls the function on the stream of recordings, as CUDA wants it before one."""
        stream = _side_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, run: Callable[[], None]) -> None:
        """Records the kernels of the function, which are not run."""
        current = torch.cuda.current_stream()
        try:
            stream = _side_stream(torch.cuda.current_device())
            # Other threads may meanwhile pin memory for a loader.
            with torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError:
            with suppress(RuntimeError):  # torch 2.12 does not end a capture that fails, later ones have
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own

    def replay(self) -> None:
        """Runs the kernels."""
        self._graph.replay()

    @property
    def pool(self) -> Any:
        """The memory that the recording holds."""
        return self._graph.pool()


@functools.cache
def _side_stream(device: int) -> Any:
    """A device's stream of warm-ups and recordings: cuBLAS keeps a workspace for each, 32 MiB on an H100."""
    return torch.cuda.Stream(device)


#: What records on a kind of device; functions on others are called.
RECORDERS: dict[str, Any] = {"cuda": CudaGraph}


class Recordable(TorchDispatchMode):
    """Raises at an operation that a recording can't repeat, and at draws from other generators than these."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        super().__init__()
        # By address, because operators get another Python object of the same generator.
        self.generators = {generator._cdata for generator in generators}  # type: ignore[attr-defined]
        #: False within the step of an optimizer, which on a CPU reads its count of steps.
        self.checks = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.checks:
            name = func.overloadpacket.__name__
            if name in READ_BACK or (name.startswith("index") and _has_mask(args)):
                raise CannotRecord("reads a value back from the device")
            drawn = kwargs.get("generator")
            if drawn is not None and drawn._cdata not in self.generators:
                raise CannotRecord("draws from a generator that the recording does not know")
            if name in ("_to_copy", "copy_") and _crosses(args, kwargs):
                raise CannotRecord("copies between the host and the device")
        return func(*args, **kwargs)


def _has_mask(args: Any) -> bool:
    """Whether an indexing operator gets a mask, whose true places must be counted first."""
    places = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in places)


def _crosses(args: Any, kwargs: Any) -> bool:
    devices = {x.device.type for x in tree_leaves(args) if isinstance(x, Tensor)}
    if kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    return len(devices) > 1


class Recordings:
    """Recordings of a function by key: the first call checks it, the second records it, later ones replay."""

    def __init__(
        self,
        what: str,
        device: torch.device,
        generators: Iterable[torch.Generator] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        self.what, self.device = what, device
        self.generators, self.optimizers = list(generators), list(optimizers)
        self._found: dict[Hashable, Any] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, run: Callable[[], None]) -> bool:
        """Makes the function's changes once; returns whether by a replay alone, without its Python code."""
        recorder = RECORDERS.get(self.device.type)
        key = None if recorder is None else key
        known = self._found.pop(key, False)
        try:
            if known is False:
                self._check(recorder, run)
                known = None
            elif recorder is None:
                run()
            elif known is None:
                known = recorder(self.device, self.generators, self._pool)
                with recording():
                    known.capture(run)
                self._pool = known.pool
                known.replay()
            else:
                known.replay()
                self._found[key] = known
                return True
        except RuntimeError as error:
            if isinstance(error, CannotRecord) or "captur" in str(error):
                raise UsageError(
                    f"{self.what}: {self._place(error)}, which a recording can't; compute it with tensors "
                    "that keep their shape, or leave graph out"
                ) from error
            raise
        self._found[key] = known
        while len(self._found) > MOST:
            del self._found[next(iter(self._found))]
        return False

    def _check(self, recorder: Any, run: Callable[[], None]) -> None:
        check = Recordable(self.generators)
        on_host = self.device.type == "cpu"
        hooks = [
            hook
            for optimizer in self.optimizers
            if on_host
            for hook in (
                optimizer.register_step_pre_hook(lambda *_: setattr(check, "checks", False)),
                optimizer.register_step_post_hook(lambda *_: setattr(check, "checks", True)),
            )
        ]
        try:
            with recording(), check:
                (recorder.warm_up if recorder is not None else _call)(run)
        finally:
            for hook in hooks:
                hook.remove()

    def _place(self, error: BaseException) -> str:
        while isinstance(error.__context__, RuntimeError):  # the end of a recording that has failed raises again
            error = error.__context__
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/torch/" not in frame.filename or "/envs/torch/" in frame.filename
        ]
        frame = [frame for frame in frames if frame.filename != __file__][-1]
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        does = error.args[0] if isinstance(error, CannotRecord) else "waits for the device"
        return f"{frame.filename}:{frame.lineno} ({line[:80]}) {does}"


def _call(run: Callable[[], None]) -> None:
    run()
