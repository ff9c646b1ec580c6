"""Ordinary constructors of modules and datamodules, such as a user's."""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rl_modules.common.errors import UsageError
from rl_modules.common.foreign_names import refuse_foreign_call
from rl_modules.common.loading import name_of
from rl_modules.common.stored_arguments import is_storable


def known_annotations(cls: type) -> dict[str, Any]:
    """Returns the annotations of a class's body whose names are known at run time."""
    found: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        alone = type(cls.__name__, (), {"__annotations__": {name: annotation}, "__module__": cls.__module__})
        with suppress(NameError):
            found |= inspect.get_annotations(alone, locals=dict(vars(cls)), eval_str=True)
    return found


def recording(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps an ordinary constructor so that the arguments which it received are known: it may pass others on."""

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_given" not in self.__dict__:
            refuse_unknown(type(self), args, kwargs)
        try:
            bound = inspect.signature(init).bind(self, *args, **kwargs)
        except TypeError:
            bound = None  # the call below raises it with the constructor's name
        if bound is not None:
            given = dict(bound.arguments)
            bound.apply_defaults()
            begin(self, _flat(init, given), _flat(init, dict(bound.arguments)))
        init(self, *args, **kwargs)

    signature: Any = constructor
    signature.__signature__ = inspect.signature(init)
    return constructor


def _flat(init: Callable[..., None], bound: dict[str, Any]) -> dict[str, Any]:
    """Bound arguments by name, those of ``**kwargs`` among them, without the first."""
    found: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(init).parameters.values()):
        if index and parameter.name in bound:
            if parameter.kind is parameter.VAR_KEYWORD:
                found.update(bound[parameter.name])
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                found[parameter.name] = bound[parameter.name]
    return found


def begin(made: Any, given: dict[str, Any], received: dict[str, Any]) -> None:
    """Notes the arguments of a constructor; those of a more derived one take precedence."""
    known = made.__dict__.setdefault("_given", Given(list(given)))
    for name, value in received.items():
        known.received.setdefault(name, value)
    known.objects.update(
        {
            name: name_of(value)
            for name, value in given.items()
            if name not in type(made).declared_settings and name not in known.objects and not is_storable(value)
        }
    )


def settle(made: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Keeps what a constructor received and passed on with another value; returns the hyperparameters of its own."""
    declared, known = type(made).declared_settings, made._given
    stored = {
        name: value
        for name, value in known.received.items()
        if name not in declared and not isinstance(value, nn.Module)
    }
    known.received = {
        name: x
        for name, x in known.received.items()
        if name not in declared or (x is not given[name] if name in given else is_storable(x))
    }
    for name in known.received.keys() & declared.keys() & {*known.names}:
        if declared[name].stores is not False and not is_storable(known.received[name]):
            known.objects[name] = name_of(known.received[name])
    return stored


@dataclass
class Given:
    """What the caller of a constructor gave."""

    #: Names of the arguments.
    names: list[str]
    #: Arguments of a subclass's constructor that a checkpoint can't hold, with the names of the objects given.
    objects: dict[str, str] = field(default_factory=dict)
    #: What ordinary constructors received, by name, before they passed it on.
    received: dict[str, Any] = field(default_factory=dict)
    #: Arguments that contain arrays, which are lists among the hyperparameters.
    arrays: dict[str, Any] = field(default_factory=dict)


def refuse_unknown(cls: Any, args: tuple, given: dict[str, Any]) -> None:
    """Refuses arguments that a class sets itself, and those that it does not take."""
    unknown = given.keys() - inspect.signature(cls.__init__).parameters
    for name in unknown:
        if instead := set_by(cls, name):
            raise UsageError(f"{cls.__name__} sets {name} itself, and takes no {name}={given[name]!r}; {instead}")
    if unknown - cls.declared_settings.keys() or (args and isinstance(args[0], str) and args[0].endswith("Policy")):
        refuse_foreign_call(cls, args, given)


def set_by(cls: type, name: str) -> str:
    """Returns what a caller may do who gives an argument that the class sets itself; "" for any other name."""
    for base in cls.__mro__:
        theirs, fixed_here, _ = vars(base).get("_own_settings", ({}, {}, ()))
        if name in theirs or fixed_here.get(name):
            return str(fixed_here.get(name, ""))
    return ""
