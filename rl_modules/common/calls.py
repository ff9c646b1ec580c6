"""The names of a class's arguments, and the error for those that it does not take."""

import inspect
from typing import Any

from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.foreign_names import in_python


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


def default_of(cls: type, name: str) -> Any:
    """Returns the default of an argument that a class or one of its bases declares."""
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    declared = (inspect.signature(constructor).parameters.get(name) for constructor in constructors)
    return next(parameter.default for parameter in declared if parameter is not None)


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
            return [*names, *cls.declared_settings]  # type: ignore[attr-defined]
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None
