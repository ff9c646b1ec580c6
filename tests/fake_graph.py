"""A recording without a GPU: a list of operators with their tensors, which a replay runs again.

Like a CUDA graph it holds addresses and none of the Python code: what a function leaves in new tensors instead of the
old ones, and every number that Python computes, stays as it was recorded. Unlike one it runs while it records, so that
:meth:`Tape.capture` puts back all tensors that it has changed, and the generators.

Tapes that share a pool share its memory, as CUDA graphs do: what a later one has made may lie where an earlier one
computes, so that a replay of the earlier one spoils it. And a tape does not keep alive what it reads: a replay fails
where such a tensor is gone, whose memory a CUDA graph would go on reading.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from rl_modules.fast import graphs


class Tape:
    """One recording on the CPU, in place of :class:`rl_modules.fast.graphs.CudaGraph`."""

    made: int = 0
    replayed: int = 0

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator], pool: Any = None) -> None:
        #: Of all tapes of the memory, in the order in which they were recorded, the tensors that each has made.
        self.pool: list[list[torch.Tensor]] = [] if pool is None else pool
        self.generators = list(generators)
        self._rows: list[tuple[Any, Any, Any, Any]] = []
        Tape.made += 1

    @staticmethod
    def warm_up(run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> None:
        states = [generator.get_state() for generator in self.generators]
        recorder = _Recorder(self._rows)
        with recorder:
            run()
        with torch.no_grad():
            for storage, before in recorder.before.values():
                storage.copy_(before)
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
        self._own = [x for *_, results in self._rows for x in tree_flatten(results)[0]
                     if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in recorder.own]  # fmt: skip
        self.pool.append(self._own)

    def replay(self) -> None:
        Tape.replayed += 1
        place = next(i for i, own in enumerate(self.pool) if own is self._own)
        with torch.no_grad():
            for own in self.pool[place + 1 :]:
                for x in own:
                    x.untyped_storage().fill_(0 if x.dtype == torch.bool else 255)
            for func, args, kwargs, results in self._rows:
                args, kwargs = tree_map(lambda x: x.again() if isinstance(x, Borrowed) else x, (args, kwargs))
                new = func(*args, **kwargs)
                for old, made in zip(tree_flatten(results)[0], tree_flatten(new)[0], strict=True):
                    if isinstance(old, torch.Tensor) and old is not made and not _shares(old, made):
                        old.copy_(made)


class Borrowed:
    """A tensor that a tape reads or changes and did not make."""

    def __init__(self, x: torch.Tensor, func: Any) -> None:
        self.storage, self.func, self.dtype = StorageWeakRef(x.untyped_storage()), func, x.dtype
        self.form = x.storage_offset(), x.size(), x.stride()

    def again(self) -> torch.Tensor:
        if self.storage.expired():
            raise AssertionError(f"a tensor that {self.func} of the recording reads is gone: {self.dtype} {self.form}")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.form)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Writes operators down, and keeps a copy of every storage that existed before, from before its first change."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows
        self.before: dict[int, tuple[Any, Any]] = {}
        self.own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if func._schema.is_mutable:
            for x in given:
                key = x.untyped_storage().data_ptr()
                if key not in self.own and key not in self.before:
                    self.before[key] = x.untyped_storage(), x.untyped_storage().clone()
        results = func(*args, **kwargs)
        known = {x.untyped_storage().data_ptr() for x in given}
        self.own |= {x.untyped_storage().data_ptr() for x in tree_flatten(results)[0] if isinstance(x, torch.Tensor)
                      and x.untyped_storage().data_ptr() not in known}  # fmt: skip

        def kept(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if x.untyped_storage().data_ptr() in self.own or func is torch.ops.aten.lift_fresh.default:
                return x.detach()  # without its history, whose version counts a replay would break
            return Borrowed(x, func)

        self.rows.append((func, *tree_map(kept, (args, kwargs, results))))
        return results


def use_tapes(monkeypatch: Any) -> type[Tape]:
    """Records on the CPU from here on; returns the class, whose numbers of recordings and replays begin at 0."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Tape)
    Tape.made = Tape.replayed = 0
    return Tape
