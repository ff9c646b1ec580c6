"""Order of Lightning's hooks: a subclass's hook runs after this project's, but before that writes a point of the
curves.

A hook of a plain LightningModule does nothing, so users rarely call ``super()`` in their hooks. Here hooks write curves
and checkpoints.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakSet

#: Wrapped hooks that run this project's first, and those that have its points of the curves written last.
_RUN_OURS: WeakSet[Callable] = WeakSet()
_HOLD_POINTS: WeakSet[Callable] = WeakSet()
#: Hooks of this project that write the curves. The point includes values that a user's hook of the same name
#: records.
WRITE_CURVES = ("on_train_epoch_end", "on_train_batch_end")


def is_ours(defined: Any) -> bool:
    """Returns whether a class or function is this project's."""
    return defined.__module__.partition(".")[0] in ("rl_modules", "datamodules")


class HeldPoints:
    """Writes the curves at once, or after a user's hook that runs around the inherited one.

    A class attribute of each module; the state is in the module's ``__dict__``.
    """

    #: Functions that write when the user's hook has ended; None: no such hook runs.
    _held: list[Callable[[], None]] | None = None

    @property
    def holds_points(self) -> bool:
        """Whether a user's hook is running that may still record values of this point."""
        return self._held is not None

    def hold(self, write: Callable[[], None]) -> None:
        """Writes now, or after the user's hook that is running.

        Args:
            write: writes a point of the curves.
        """
        if self._held is None:
            write()
        else:
            self._held.append(write)


def keep_hooks(cls: type) -> None:
    """Makes each hook of a user's class, or of its mixin, first run the hook that it overrides, unless it calls that
    hook itself.

    Args:
        cls: a subclass of a module or datamodule; changed in place.
    """
    if is_ours(cls):
        return
    for name in {name: None for base in cls.__mro__ if not is_ours(base) for name in vars(base) if _is_hook(name)}:
        owner = next((base for base in cls.__mro__ if is_ours(base) and name in vars(base)), None)
        if owner is None:
            continue
        before = [vars(base)[name] for base in cls.__mro__[: cls.__mro__.index(owner)] if name in vars(base)]
        if not before or not isinstance(before[0], FunctionType):
            continue
        hook = _both(vars(owner)[name], before[0]) if _is_last_call(before, name, cls) else before[0]
        if name in WRITE_CURVES and hook not in _HOLD_POINTS and issubclass(owner, HeldPoints):
            hook = _holding(hook)
        if hook is not before[0]:
            setattr(cls, name, hook)


def _is_last_call(hooks: list[Any], name: str, cls: type) -> bool:
    """Returns whether a chain of hooks, in which each may call the next by ``super()``, ends before this project's.

    Args:
        hooks: in the order of the classes.
        name: of all of them.
        cls: the class that they are hooks of.
    """
    for hook in hooks:
        if not isinstance(hook, FunctionType) or hook in _RUN_OURS:
            return False
        if not _calls_next(inspect.unwrap(hook), name, cls):
            return True
    return False


def _both(first: Callable, then: Callable) -> Callable:
    """Wraps a user's hook so that this project's runs first."""

    @functools.wraps(then)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return then(self, *args, **kwargs)

    _RUN_OURS.add(hook)
    return hook


def _holding(then: Callable) -> Callable:
    """Wraps a hook so that what this project's hook would write is written after it."""

    @functools.wraps(then)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.holds_points:  # in the hook of a subclass
            return then(self, *args, **kwargs)
        held: list[Callable[[], None]] = []
        self.__dict__["_held"] = held
        try:
            result = then(self, *args, **kwargs)
        finally:
            del self.__dict__["_held"]
        for write in held:
            write()
        return result

    _HOLD_POINTS.add(hook)
    if then in _RUN_OURS:
        _RUN_OURS.add(hook)
    return hook


def _is_hook(name: str) -> bool:
    return name in ("setup", "teardown") or (name.startswith("on_") and not name.endswith("batch_transfer"))


def _calls_next(function: FunctionType, name: str, cls: type) -> bool:
    """Returns whether a hook calls the next class's, as ``super().on_fit_start()`` and ``PPO.on_fit_start(self)`` do.

    A call of the same name on another object, as in ``tracker.on_fit_start()``, does not count.

    Args:
        function: the hook.
        name: of the hook.
        cls: the class that it is a hook of.
    """
    for code in _codes(function.__code__):
        uses_super = "super" in code.co_names
        instructions = [i for i in dis.get_instructions(code) if i.opname not in _WITHOUT_EFFECT]
        for before, instruction in pairwise(instructions):
            if instruction.argval != name:
                continue
            if instruction.opname == "LOAD_CONST" and uses_super:
                return True  # getattr(super(), "on_fit_start")
            if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                continue
            of_super = instruction.opname == "LOAD_SUPER_ATTR" or "CALL" in before.opname
            # Python 3.13 stores and loads a variable in one instruction.
            word = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            of_variable = "LOAD_FAST" in before.opname and word != "self"
            if (uses_super and (of_super or of_variable)) or _reaches_ours(function, word, name, cls):
                return True
    return False


#: Instructions between an object and its attribute in some versions of Python.
_WITHOUT_EFFECT = ("CACHE", "PRECALL", "EXTENDED_ARG", "PUSH_NULL", "NOP")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reaches_ours(function: FunctionType, word: Any, name: str, cls: type) -> bool:
    """Returns whether a word in a hook is a base of its class whose hook is this project's, or calls that.

    Args:
        function: the hook.
        word: as the code has it.
        name: of the hook.
        cls: the class that it is a hook of.
    """
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    try:
        found = closure[word].cell_contents if word in closure else function.__globals__.get(word)
    except ValueError:  # a cell that is not filled yet, such as that of the class under construction
        found = None
    bases = [base for base in cls.__mro__ if base is found or base.__name__ == word]
    hooks = [vars(part)[name] for base in bases for part in base.__mro__ if name in vars(part)][:1]
    return any(
        isinstance(hook, FunctionType)
        and hook is not function
        and (is_ours(hook) or _calls_next(inspect.unwrap(hook), name, cls))
        for hook in hooks
    )
