"""Checks of how a class is called: the names of its arguments."""

import inspect
from collections.abc import Callable
from typing import Any

from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.foreign_names import in_python


class CheckedCall:
    """Base of modules and datamodules: an unknown argument is answered by the nearest known name.

    Python's own error names the base class to which ``**arguments`` were passed on.
    """

    def __new__(cls, *args: Any, **arguments: Any) -> Any:
        if args or arguments:
            refuse_foreign_call(cls, args, arguments)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None
