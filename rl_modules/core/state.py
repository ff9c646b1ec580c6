"""What a run needs to resume, declared by name in the class's body.

    class PPO(ActorCriticModule):
        beta: float = persistent(lambda m: m.kl_coef)    # a run begins with this, a checkpoint has the present value
        _weight: float | None = transient()              # a run begins with None, no checkpoint has it

The value is made at its first use. Each fit of a module or datamodule forgets it, so that it is made again. It may be a
number, a text, a tensor, an array, a generator of torch or NumPy, an object with ``state_dict`` and
``load_state_dict``, and lists, tuples, deques and dictionaries of these. Loading needs no code: everything is stored as
tensors and plain data.
"""

import random
import zlib
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves, tree_map

#: Keys of the dictionaries in which a checkpoint holds what weights_only=True does not load.
ARRAY, GENERATOR = "numpy.ndarray", "torch.Generator"


class State:
    """One attribute of a run; see :func:`persistent`."""

    def __init__(self, initial: Any, kept: bool, argument: str | None) -> None:
        self.initial, self.kept, self.argument = initial, kept, argument

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, obj: Any, owner: type) -> Any:
        # Called only while the instance has no value of its own.
        if obj is None:
            return self
        value = obj.__dict__[self.name] = self.value_for(obj)
        return value

    def value_for(self, obj: Any) -> Any:
        """The value with which a run begins."""
        return self.initial(obj) if callable(self.initial) else deepcopy(self.initial)


def persistent(initial: Any = None, argument: str | None = None, *, init: Literal[False] = False) -> Any:
    """Declares an attribute of a run that checkpoints hold.

    Args:
        initial: its value when a run begins, or a function from the object to it.
        argument: the hyperparameter that the initial value is; a run that resumes with another one begins with that.
        init: tells type checkers that the constructor takes no such argument.
    """
    return State(initial, True, argument)


def transient(initial: Any = None, *, init: Literal[False] = False) -> Any:
    """Declares an attribute of a run that no checkpoint holds, and no copy of the object."""
    return State(initial, False, None)


class Stateful:
    """An object whose declared attributes are its state."""

    def state_dict(self) -> dict[str, Any]:

        return state_of(self)

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:

        load_state(self, state, device)


def declared(obj: Any, kept: bool | None = None) -> Iterator[str]:
    """Names of the declared attributes, those of base classes first."""
    found = {name: x for cls in reversed(type(obj).__mro__) for name, x in vars(cls).items() if isinstance(x, State)}
    return (name for name, x in found.items() if kept in (None, x.kept))


def forget_state(obj: Any, kept: bool | None = None) -> None:
    """Begins a run: every declared attribute, or those that checkpoints hold or do not, has its initial value again."""
    for name in declared(obj, kept):
        obj.__dict__.pop(name, None)


# ---------------------------------------------------------------- global generators


class GlobalGenerators:
    """States of Python's, NumPy's and torch's global generators, stored by a run that draws from them."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._at_start: dict[str, Any] | None = None
        self._resumed = False

    def load(self, state: dict[str, Any] | None) -> None:
        """Keeps what :meth:`state` returned until :meth:`start`."""
        self._loaded = state

    def start(self, device: torch.device) -> None:
        """Sets the generators to the loaded state, if there is one; called when training begins."""
        self._resumed = self._loaded is not None
        if self._loaded is not None:
            _restore(self._loaded, device)
        self._loaded, self._at_start = None, _states(device)

    def state(self, device: torch.device) -> dict[str, Any] | None:
        """Returns the states as a checkpoint may hold them; None where nothing has drawn since the run's start."""
        if self._at_start is None:
            return self._loaded  # of a run that was complete
        now = _states(device)
        return now if self._resumed or not _are_same(now, self._at_start) else None


def _states(device: torch.device) -> dict[str, Any]:
    of_numpy = tree_map(_to_tensor, np.random.get_state(legacy=False))  # noqa: NPY002
    state = {"python": random.getstate(), "numpy": of_numpy, "torch": torch.get_rng_state()}
    if device.type in ("cuda", "mps"):
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def _restore(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(tree_map(_to_array, state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


def _are_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


def _to_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf.astype(np.int64)) if isinstance(leaf, np.ndarray) else leaf


def _to_array(leaf: Any) -> Any:
    return leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf


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
