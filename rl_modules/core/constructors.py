"""Ordinary constructors of modules and datamodules, such as a user's."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rl_modules.core.settings import begin, refuse_unknown


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
            begin(self, (), _flat(init, given), _flat(init, dict(bound.arguments)))
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
