"""Arguments of modules and datamodules, each declared once in its class's body: default, meaning, range, and what makes
it idle.

    class PPO(ActorCritic):
        clip_range: Scheduled[float | str, float] = setting(default=0.2, says="ε, how far the ratio may move from 1")
        kl_coef: float = setting(default=1.0, says="initial β", above=0, idle=lambda m: not m.penalizes and "…")

From the declarations come the constructor's signature, its documentation, the checks, the attributes and the plain
hyperparameters. The annotation is the type of argument and attribute: :class:`Converted` names both where they differ,
and ``Annotated[Task | str, str]`` names what a file may say where Python takes objects too. A subclass declares further
ones, changes a default in one line (``gae_lambda = 1.0``), fixes a value (``n_critics = fixed(1)``), or has an ordinary
constructor that passes ``**kwargs`` on.
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import dataclass_transform  # typing has it from Python 3.11 on

from rl_modules.common.arguments import chosen_by_checkpoint, has_arrays, plain
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.named_code import named_code, parts_of, refuse_named
from rl_modules.common.schedules import Schedule, as_notation, parse_schedule
from rl_modules.core.constructors import Given, known_annotations, recording, refuse_unknown, settle
from rl_modules.core.state import persistent, transient

#: What should be where another container is given.
_CONTAINED: dict[Any, str] = {str: "a single text", dict: "a dictionary {name: value}"}


Given_ = TypeVar("Given_", contravariant=True)
Kept = TypeVar("Kept", covariant=True)


class Converted(Generic[Given_, Kept]):
    """Annotation of an argument whose attribute has another type: ``n_steps: Converted[int | None, int]``."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: object = None) -> Kept: ...

        def __set__(self, instance: object, value: Given_) -> None: ...


class Scheduled(Converted[Given_, Kept]):
    """Annotation of a number that may be given as a schedule; the attribute is the number at the moment."""


@dataclass(frozen=True)
class Setting:
    """One argument.

    Attributes:
        default: its value where the caller gives none.
        says: its meaning in one clause, with the unit.
        least: smallest number.
        most: largest number.
        above: number that it must exceed.
        below: number that it must stay under.
        one_of: the words that it may be.
        check: returns the value as the attribute has it; raises for one that can't be used.
        stores: returns the plain hyperparameter from the checked value; None: the value itself. False: the argument is
            no hyperparameter, such as a callable, which is code that a checkpoint must not hold.
        idle: from the module to a clause that says beside which argument this one has no effect; false: it has one.
        code: yields the names of code in a value that this project does not register, which no checkpoint may bring;
            None: no value of it is imported or called.
        alias: the argument's name where the class's body has another one, which is then that of the attribute: the
            class has a method or property of the argument's name.
        kw_only: whether it must be given by its name.
        attribute: its name (from the class's body).
        kind: the argument's type (from the annotation).
        scheduled: whether a schedule may be given (from the annotation).
    """

    default: Any
    says: str
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    one_of: tuple[str, ...] = ()
    check: Callable[[str, Any], Any] | None = None
    stores: Callable[[Any], Any] | Literal[False] | None = None
    idle: Callable[[Any], str | bool | None] | None = None
    code: Callable[[Any], Iterable[str]] | None = None
    alias: str | None = None
    kw_only: bool = True
    attribute: str = field(default="", repr=False)
    kind: Any = field(default=None, repr=False)
    scheduled: bool = field(default=False, repr=False)

    def of_kind(self, annotation: Any) -> "Setting":
        """Returns the setting with its type."""
        scheduled = typing.get_origin(annotation) is Scheduled
        if typing.get_origin(annotation) in (Converted, Scheduled):
            annotation = typing.get_args(annotation)[0]
        if typing.get_origin(annotation) is Annotated:
            annotation = annotation.__metadata__[0]
        return replace(self, kind=annotation, scheduled=scheduled)

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The members of the type."""
        is_union = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        return typing.get_args(self.kind) if is_union else (self.kind,)

    @property
    def origin(self) -> Any:
        """The type without None and parameters, ``dict`` for ``dict[str, Any] | None``; None for a union."""
        kinds = [kind for kind in self.kinds if kind is not type(None)]
        return (typing.get_origin(kinds[0]) or kinds[0]) if len(kinds) == 1 else None

    def checked(self, name: str, value: Any) -> Any:
        """Returns a value as it becomes a hyperparameter: NumPy's numbers as Python's, whole numbers as int.

        Raises:
            UsageError: names the argument, the value, and what would be right.
        """
        value = plain(value, into_dicts=False) if self.stores is None else value
        if isinstance(value, nn.Module) and self.check is None:
            raise UsageError(f"{name} is a {type(value).__name__}; it takes numbers, texts, lists or dictionaries")
        if value is not None or not (type(None) in self.kinds or self.default is None):
            value = self._fitting(name, value)
        return value if self.check is None else self.check(name, value)

    def _fitting(self, name: str, value: Any) -> Any:
        """A value of the declared type, within the declared range."""
        if self.one_of and not (isinstance(value, str) and value in self.one_of):
            near = did_you_mean(value, self.one_of) if isinstance(value, str) else ""
            raise UsageError(f"{name}={value!r} must be one of {', '.join(self.one_of)}{near}")
        wanted = None if self.stores else _CONTAINED.get(self.origin)  # else an object is described
        if wanted is not None and type(value) in (list, tuple, set, dict) and type(value) is not self.origin:
            raise UsageError(f"{name}={value!r} is a {type(value).__name__}, where {wanted} should be")
        if wanted is not None and self.check is None and self.origin is dict and not isinstance(value, dict):
            raise UsageError(f"{name}={value!r} must be {wanted}")
        if {*self.kinds} - {type(None)} == {bool} and not isinstance(value, bool):
            raise UsageError(f"{name}={value!r} must be true or false")
        if self.scheduled:
            value = as_notation(value)
            parse_schedule(value, name)
            return value
        return self._number(name, value) if int in self.kinds or float in self.kinds else value

    def _number(self, name: str, value: Any) -> Any:
        if type(value) in self.kinds and isinstance(value, str | bool):
            return value
        if isinstance(value, str | bool) or not hasattr(value, "__float__"):
            if {*self.kinds} - {int, float, type(None)}:
                return value  # of another type, which the argument's own check knows
            raise UsageError(f"{name}={value!r} must be a number")
        number = float(value)
        if float not in self.kinds:
            if not number.is_integer():
                raise UsageError(f"{name}={value} must be a whole number")
            value = int(value)
        if not (self.least <= number <= self.most and self.above < number < self.below) or math.isinf(number):
            raise UsageError(f"{name}={value} must {self.range}")
        return value

    @property
    def range(self) -> str:
        """What a number must satisfy, as the end of a sentence."""
        low, high, is_open = max(self.least, self.above), min(self.most, self.below), self.above > -math.inf
        if not math.isinf(high):
            ends = ", ".join(f"{end:.0f}" if float(end).is_integer() else f"{end:g}" for end in (low, high))
            return f"lie in {'(' if is_open else '['}{ends}{')' if self.below < math.inf else ']'}"
        if float in self.kinds:
            of = "" if math.isinf(low) else f" above {low:g}" if is_open else f" of at least {low:g}"
            return f"be a finite number{of}"
        return f"be at least {low:g}"


def setting(default: Any, says: str, *, kw_only: bool = True, alias: str | None = None, **rules: Any) -> Any:
    """Declares an argument in a class's body; the rules are the other attributes of :class:`Setting`.

    Type checkers read ``default=``, ``kw_only`` and ``alias`` (PEP 681), so give them by name.
    """
    return Setting(default, says, kw_only=kw_only, alias=alias, **rules)


def one_or_all(of: str) -> Callable[[str, int], int]:
    """Returns the check of a whole number that is at least 1, or -1 for all of something."""

    def check(name: str, value: int) -> int:
        if value != -1 and value < 1:
            raise UsageError(f"{name}={value} must be at least 1, or -1 for {of}")
        return value

    return check


@dataclass(frozen=True)
class _Fixed:
    value: Any
    instead: str


def fixed(value: Any = ..., instead: str = "", *, init: Literal[False] = False) -> Any:
    """Removes an inherited argument from those that the class takes; the attribute has the value, if one is given.

    Args:
        value: of the attribute.
        instead: what a caller who gives the argument may do, such as ``GRPO takes it``.
        init: tells type checkers that the constructor takes no such argument.
    """
    return _Fixed(value, instead)


@dataclass(frozen=True)
class _Made:
    value: Any


def made(value: Any = ..., *, init: Literal[False] = False) -> Any:
    """Declares an attribute that the class sets itself, and that is no argument; ``value``: until it is set."""
    return _Made(value)


@dataclass(frozen=True)
class _Changed:
    rules: dict[str, Any]


def changed(*, default: Any = ..., **rules: Any) -> Any:
    """Gives an inherited argument other rules; a new default alone is ``name = value``."""
    return _Changed(rules if default is ... else {**rules, "default": default})


# Without `changed`: what is no specifier is a default, so that checkers call no argument required that has one.
@dataclass_transform(kw_only_default=True, field_specifiers=(setting, fixed, made, persistent, transient))
class Declared:
    """Base of modules and datamodules whose arguments are declared in the class's body."""

    #: The arguments that the class takes, by name; those of the most derived class come first.
    declared_settings: ClassVar[Mapping[str, Setting]] = {}
    #: Inherited arguments that the class does not take, with their values.
    fixed_values: ClassVar[Mapping[str, Any]] = {}
    #: Schedules of the arguments that are declared so.
    schedules: dict[str, Schedule]
    _given: "Given"

    if TYPE_CHECKING:

        @property
        def hparams(self) -> Any:
            """The arguments by name, as attributes and as items; Lightning's type has no attributes."""

    def __init__(self, *args: Any, **given: Any) -> None:
        take(self, args, given)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _declare(cls)
        if "__init__" in vars(cls):
            cls.__init__ = recording(vars(cls)["__init__"])  # type: ignore[method-assign]
        elif not takes_own_arguments(cls):
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]
            if "__doc__" in vars(cls) and cls.__doc__:
                cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nArgs:\n{arguments_text(cls)}\n"

    def __post_init__(self) -> None:
        """Checks arguments against each other and sets what follows from them; a subclass extends it."""

    def save_hyperparameters(self, *args: Any, ignore: Any = None, frame: Any = None, logger: bool = True) -> None:
        """Adds a mapping to the hyperparameters; all arguments of constructors are among them already."""
        hparams: Any = self
        for given in args:
            if not isinstance(given, str):
                hparams._set_hparams(given)
        for name in [ignore] if isinstance(ignore, str) else ignore or []:
            if name not in self.declared_settings:
                hparams._hparams.pop(name, None)
        keep(self, dict(hparams.hparams))
        hparams._log_hyperparams = logger

    def idle_arguments(self) -> dict[str, str]:
        """Returns the arguments without effect beside the others and these spaces, with reason and remedy."""
        declared = self.declared_settings.items()
        reasons = {name: setting.idle(self) for name, setting in declared if setting.idle is not None}
        return {name: str(why) for name, why in reasons.items() if why}


def take(made: Any, args: tuple, given: dict[str, Any]) -> None:
    """Makes attributes and hyperparameters of the arguments, then calls its ``__post_init__``."""
    cls = type(made)
    if "_given" not in made.__dict__:  # else a subclass's constructor passes them on
        refuse_unknown(cls, args, given)
        made.__dict__["_given"] = Given(list(given))
    positional = [name for name, setting in cls.declared_settings.items() if not setting.kw_only]
    if len(args) > len(positional):
        taken = f"{len(positional)} argument{'s'[: len(positional) - 1]}" if positional else "no arguments"
        raise UsageError(
            f"{cls.__name__} takes {taken} without {'its name' if len(positional) == 1 else 'names'}, "
            f"not {len(args)}; name them"
        )
    given = {**dict(zip(positional, args, strict=False)), **given}
    if unknown := [name for name in given if name not in cls.declared_settings]:
        refuse_unknown(cls, (), {name: given[name] for name in unknown})
        near = did_you_mean(unknown[0], cls.declared_settings)
        raise UsageError(f"{cls.__name__} takes no argument {unknown[0]!r}{near}")
    refuse_brought_code(made, given)
    super(Declared, made).__init__()
    made.schedules = {}
    stored: dict[str, Any] = {}
    if made._given.received:  # by an ordinary constructor
        stored = settle(made, given)
    for name, declared in cls.declared_settings.items():
        value = declared.checked(name, given.get(name, declared.default))
        if declared.stores is not False:
            stored[name] = value if declared.stores is None else declared.stores(value)
        if declared.scheduled and value is not None:
            made.schedules[name] = parse_schedule(value, name)
            value = max(made.schedules[name].initial, declared.least)
        elif value is not None and float in declared.kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        setattr(made, declared.attribute, value)
    made._given.arrays = {name: value for name, value in stored.items() if has_arrays(value)}
    keep(made, {name: plain(value) for name, value in stored.items()})
    made.__post_init__()


def refuse_brought_code(made: Any, given: dict[str, Any]) -> None:
    """Refuses code that a checkpoint's arguments name; what the user's own constructor names is the user's."""
    if not (chosen := chosen_by_checkpoint(made)):
        return
    received = {**given, **made._given.received}
    brought = {
        path: name
        for name in sorted(chosen & received.keys())
        for path in (*filter(_is_text, parts_of(received[name])), *named_code(received[name]))
    }
    for name, declared in made.declared_settings.items():
        if declared.code is not None and name in given and (name in chosen or name not in made._given.names):
            for path in declared.code(given[name]):
                if path in brought:
                    argument = brought[path] if name not in chosen else name
                    again = f"give it again: load_from_checkpoint(…, {argument}=…)"
                    refuse_named("the checkpoint", argument, [path], again)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


class Hyperparameters(AttributeDict):
    """Those of an object; what its class fixes is read like them, and is none of them."""

    def __missing__(self, name: str) -> Any:
        return vars(self).get("fixed", {})[name]


def keep(made: Any, stored: dict[str, Any]) -> None:
    """Makes these the hyperparameters, and the initial ones."""
    made._set_hparams(stored)
    made._hparams_initial = deepcopy(made._hparams)
    if made.fixed_values:
        made._hparams = Hyperparameters(made._hparams)
        vars(made._hparams)["fixed"] = made.fixed_values
    made._hparams_name = "kwargs"


def warn_of_idle(declared: Mapping[str, Setting], hparams: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Warns of given arguments that have no effect in this run, with the reasons by name."""
    for name in sorted(declared.keys() & reasons.keys() & hparams.keys()):
        value = hparams[name]
        if value != declared[name].default:
            rank_zero_warn(f"{name}={value!r} does nothing {reasons[name]}, or leave {name} out")


def takes_own_arguments(cls: type) -> bool:
    """Returns whether a class's constructor is an ordinary one, such as a user's."""
    own = [vars(base)["__init__"] for base in cls.__mro__[: cls.__mro__.index(Declared)] if "__init__" in vars(base)]
    return bool(own) and not hasattr(own[0], "declares")


def _declare(cls: Any) -> None:
    """Sets ``declared_settings`` from the class's body and its bases."""
    inherited: dict[str, Setting] = {}
    for base in reversed(cls.__mro__[1:]):
        theirs, fixed_there, _ = vars(base).get("_own_settings", ({}, {}, ()))
        inherited.update(theirs)
        for name in fixed_there:
            inherited.pop(name, None)
    try:
        annotations = inspect.get_annotations(cls, eval_str=True)
    except NameError:  # a name of a function's scope, or one that is imported for type checkers alone
        annotations = known_annotations(cls)
    declared, fixed_here, introduced = {}, {}, []
    for name, value in list(vars(cls).items()):
        if isinstance(value, Setting):
            delattr(cls, name)
            argument = value.alias or name
            declared[argument] = replace(value.of_kind(annotations.get(name, Any)), attribute=name)
            introduced.append(argument)
        elif isinstance(value, _Made):
            delattr(cls, name)
            if value.value is not ...:
                setattr(cls, name, value.value)
        elif isinstance(value, _Fixed):
            fixed_here[name] = value.instead
            delattr(cls, name)
            if value.value is not ...:
                cls.fixed_values = {**cls.fixed_values, name: plain(value.value)}
                setattr(cls, inherited[name].attribute, value.value)
        elif isinstance(value, _Changed):
            other = replace(inherited[name], **value.rules)
            declared[name] = other.of_kind(annotations[name]) if name in annotations else other
            delattr(cls, name)
        elif name in inherited and not hasattr(type(value), "__get__"):
            other = replace(inherited[name], default=value)
            declared[name] = other.of_kind(annotations[name]) if name in annotations else other
            delattr(cls, name)
    #: What this class declares, what it fixes with what a caller may do instead, and what it introduces.
    cls._own_settings = declared, fixed_here, tuple(introduced)
    found = {name: x for name, x in {**inherited, **declared}.items() if name not in fixed_here}
    # An argument's place is where it is declared, not where its default changes.
    order = {name: None for base in cls.__mro__ for name in vars(base).get("_own_settings", ((), (), ()))[2]}
    cls.declared_settings = {name: found[name] for name in order if name in found}


def _constructor(cls: Any) -> Callable[..., None]:
    """Makes the constructor of a class from its settings."""

    def __init__(self: Any, *args: Any, **given: Any) -> None:
        take(self, args, given)

    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, by_name if x.kw_only else by_position, default=x.default, annotation=x.kind)
        for name, x in sorted(cls.declared_settings.items(), key=lambda item: item[1].kw_only)
    ]
    made: Any = __init__
    made.__signature__ = inspect.Signature([inspect.Parameter("self", by_position), *parameters])
    made.__annotations__ = {name: x.kind for name, x in cls.declared_settings.items()}
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__doc__ = f"Takes the arguments.\n\nArgs:\n{arguments_text(cls)}\n"
    made.declares = True
    return made


def arguments_text(cls: Any) -> str:
    """Returns the lines of a docstring's section of arguments."""
    return "\n".join(f"    {name}: {x.says}." for name, x in cls.declared_settings.items())
