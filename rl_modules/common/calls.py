"""The names of a class's arguments, and which of them a user's subclass declares."""

import inspect
from collections.abc import Callable, Iterable
from copy import deepcopy
from types import FrameType, NoneType, UnionType
from typing import Any, get_args, get_origin

from torch import nn

from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.foreign_names import in_python
from rl_modules.common.hooks import is_ours, keep_hooks
from rl_modules.common.storable import is_storable, name_of


class CheckedCall:
    """Base class of modules and datamodules that checks their callers and subclasses.

    The error for an unknown argument names the nearest known argument; Python's own error would name the base class to
    which ``**arguments`` were passed on. A subclass's hooks come after this project's (:func:`keep_hooks`).
    """

    #: Arguments of a subclass that a checkpoint can't hold, with the names of the objects given.
    given_objects: dict[str, str]
    #: Those of them that are networks. They are not hyperparameters, because Lightning would copy their weights.
    given_networks: list[str]
    #: Names of all arguments that the caller gave.
    given_names: list[str]
    # Arguments that a subclass's constructor passed on with another value: that which it received, and the other, see
    # `save_arguments`.
    _received: dict[str, Any]
    _passed_on: dict[str, Any]

    def __new__(cls, *args: Any, **arguments: Any) -> Any:
        if args or arguments:
            refuse_foreign_call(cls, args, arguments)
        made = super().__new__(cls)
        given = given_arguments(cls, args, arguments)
        refuse_several(cls, given)
        own = [name for name in sorted(given) if name not in declared_here(cls) and not is_storable(given[name])]
        made.__dict__["_given"] = given
        made.__dict__["given_names"] = list(given)
        made.__dict__["given_objects"] = {name: name_of(given[name]) for name in own}
        made.__dict__["given_networks"] = [name for name in own if isinstance(given[name], nn.Module)]
        return made

    def save_hyperparameters(self, *args: Any, frame: FrameType | None = None, **kwargs: Any) -> None:
        """Saves arguments as Lightning's method does, except those that a subclass has passed on with another value."""
        caller: Any = inspect.currentframe()
        super().save_hyperparameters(*args, frame=frame or caller.f_back, **kwargs)  # type: ignore[misc]
        self.restore_passed_on()

    def restore_passed_on(self) -> None:
        """Sets ``hparams`` to the values that this project's constructors received, if a subclass received others."""
        parameters: Any = self
        for name, value in self.__dict__.get("_passed_on", {}).items():
            parameters._hparams[name] = value
            parameters._hparams_initial[name] = deepcopy(value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        keep_hooks(cls)
        # `inspect.signature` of a class with `__new__` reads that.
        init: Callable = cls.__init__
        parameters = list(inspect.signature(init).parameters.values())[1:]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def refuse_foreign_call(cls: type, args: tuple, arguments: dict[str, Any]) -> None:
    """Refuses arguments that a class does not take.

    Raises:
        UsageError: names the argument, and the nearest that the class takes, or where it belongs.
    """
    hint: str = getattr(cls, "called_elsewhere", "")
    if args and isinstance(args[0], str) and args[0].endswith("Policy"):
        raise UsageError(f"{cls.__name__}({args[0]!r}, …) is Stable-Baselines3's call; here environments belong to a "
                         f"datamodule: {three_lines(cls)}")  # fmt: skip
    known = _arguments(cls)
    if known is None:
        return
    for name in arguments:
        if name not in known:
            near = in_python(name, known)
            if not near and name in ("env", "policy"):
                near = f"; environments belong to a datamodule: {three_lines(cls)}"
            if near:
                raise UsageError(f"{cls.__name__} takes no argument {name!r}{near}")
            near = did_you_mean(name, known)
            raise UsageError(f"{cls.__name__} takes no argument {name!r}{near}{f'; {hint}' if hint else ''}")


def refuse_several(cls: type, given: dict[str, Any]) -> None:
    """Refuses a list, tuple, set or dictionary for an argument that its class declares as a text, and one without names
    for an argument that is declared as a dictionary.

    Raises:
        UsageError: names the argument.
    """
    declared = {name: declaration for base in reversed(cls.__mro__) if is_ours(base) and "__init__" in vars(base)
                for name, declaration in inspect.signature(vars(base)["__init__"]).parameters.items()}  # fmt: skip
    for name, value in given.items():
        kind = declared[name].annotation if name in declared and type(value) in (list, tuple, set, dict) else None
        wanted = {str: "a single text", dict: "a dictionary {name: value}"}.get(_plain(kind))
        if wanted is not None and type(value) is not _plain(kind):
            raise UsageError(f"{name}={value!r} is a {type(value).__name__}, where {wanted} should be")


def _plain(annotation: Any) -> Any:
    """Returns ``dict`` for ``dict[str, Any] | None`` and ``str`` for ``str | None``; other unions as they are."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    kind = kinds[0] if isinstance(annotation, UnionType) and len(kinds) == 1 else annotation
    return get_origin(kind) or kind


def given_arguments(cls: type, args: tuple, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    init: Callable = cls.__init__  # type: ignore[misc]
    parameters = list(inspect.signature(init).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {**dict(zip(names, args, strict=False)), **arguments}


def default_arguments(cls: type) -> dict[str, Any]:
    """Returns the arguments of a class that have defaults, by name."""
    init: Callable = cls.__init__  # type: ignore[misc]
    parameters = inspect.signature(init).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def declared_here(cls: type) -> frozenset[str]:
    """Arguments of a module or datamodule that it or its bases in these packages declare."""
    return _declared(base for base in cls.__mro__ if is_ours(base))


def declared_elsewhere(cls: type) -> frozenset[str]:
    """Arguments that a user's subclass declares; their meaning is up to the subclass."""
    return _declared(base for base in cls.__mro__ if issubclass(base, CheckedCall) and not is_ours(base))


def default_of(cls: type, name: str) -> Any:
    """Returns the default of an argument that a class or one of its bases declares."""
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    declared = (inspect.signature(constructor).parameters.get(name) for constructor in constructors)
    return next(parameter.default for parameter in declared if parameter is not None)


def set_by_subclass(module: Any) -> set[str]:
    """Hyperparameters whose values a constructor of the user's may have chosen, as in ``super().__init__(gamma=0.9,
    **arguments)``. It chooses them again when a checkpoint is loaded, and would refuse them as arguments.
    """
    cls: type = type(module)
    init: Callable = cls.__init__  # type: ignore[misc]
    if is_ours(init):
        return set()
    taken = {*inspect.signature(init).parameters, *module.given_names}
    chosen = _declared(base for base in cls.__mro__ if issubclass(base, CheckedCall)) - taken
    # Values that were filled in later, such as the spaces, are in the checkpoint only.
    now, then = module._hparams, module._hparams_initial
    return {name for name in chosen if repr(now.get(name)) == repr(then.get(name))}


def _declared(classes: Iterable[type]) -> frozenset[str]:
    constructors = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]
    return frozenset(name for constructor in constructors for name in inspect.signature(constructor).parameters)


def three_lines(cls: type) -> str:
    """Returns the lines of Python that train a control algorithm."""
    replays = getattr(getattr(cls, "experience", None), "kind", "") == "replay"
    continuous = [space.__name__ for space in getattr(cls, "supported_action_spaces", ())] == ["Box"]
    env = "Pendulum-v1" if continuous else "CartPole-v1"
    data = f"{'Replay' if replays else 'Rollout'}DataModule({env!r})"
    return f"data = {data}, model = {cls.__name__}(), recipes.Trainer().fit(model, data)"


def _arguments(cls: type) -> list[str] | None:
    """Names of the arguments of a class and of the bases that it passes ``**arguments`` to; None: any."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        if hasattr(base.__init__, "declares"):  # type: ignore[misc]
            return [*names, *cls.settings]  # type: ignore[attr-defined]
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None
