"""A recording without a GPU: a list of operators with their tensors, which a replay runs again.

Like a CUDA graph it holds addresses and none of the Python code: what a function leaves in new tensors instead of the
old ones, and every number that Python computes, stays as it was recorded. Unlike one it runs while it records, so that
:meth:`Tape.capture` puts back all tensors that it has changed, and the generators.

Tapes that share a pool share its memory, as CUDA graphs do: what a later one has made may lie where an earlier one
computes, so that a replay of the earlier one spoils it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
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
                new = func(*args, **kwargs)
                for old, made in zip(tree_flatten(results)[0], tree_flatten(new)[0], strict=True):
                    if isinstance(old, torch.Tensor) and old is not made and not _shares(old, made):
                        old.copy_(made)


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
        # Without their history, whose version counts a replay would break.
        kept_args, kept_kwargs, kept = tree_map(
            lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (args, kwargs, results)
        )
        self.rows.append((func, kept_args, kept_kwargs, kept))
        return results


def use_tapes(monkeypatch: Any) -> type[Tape]:
    """Records on the CPU from here on; returns the class, whose numbers of recordings and replays begin at 0."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Tape)
    Tape.made = Tape.replayed = 0
    return Tape
