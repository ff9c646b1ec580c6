"""Callables that make optimizers and schedulers; a checkpoint holds only their names, because it holds no code."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rl_modules.common.errors import UsageError
from rl_modules.common.storable import name_of

#: Arguments of a module, and the attributes that hold them.
_ATTRIBUTES = {"optimizer": "optimizer_factory", "lr_scheduler": "scheduler_factory"}


def build(argument: str, factory: Callable[[Any], Any], given: Any) -> Any:
    """Returns what a factory makes.

    Args:
        argument: ``optimizer`` or ``lr_scheduler``.
        factory: takes the parameters, or the optimizer.
        given: these.

    Raises:
        UsageError: the factory's class refuses its arguments.
    """
    try:
        return factory(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{argument} can't be made with its arguments: {type(error).__name__}: {error}") from error


def factory_names(module: Any) -> dict[str, str]:
    """Returns the names of a module's factories by argument."""
    made_by = {name: getattr(module, attribute, None) for name, attribute in _ATTRIBUTES.items()}
    # A partial is named by its class.
    return {
        name: name_of(getattr(factory, "func", factory)) for name, factory in made_by.items() if factory is not None
    }


def missing_factories(module: Any, checkpoint: dict[str, Any]) -> dict[str, str]:
    """Returns the names of the factories that the checkpoint's module had and this one lacks."""
    here = factory_names(module)
    return {name: given for name, given in checkpoint.get("factories", {}).items() if name not in here}


def warn_of_missing(module: Any, missing: dict[str, str]) -> None:
    """Warns at the start of a fit of the checkpoint's factories that the module lacks."""
    if missing:
        given = " and ".join(f"{name}={value}" for name, value in missing.items())
        again = ", ".join(f"{name}=…" for name in missing)
        rank_zero_warn(f"the checkpoint of {type(module).__name__} was trained with {given}, code that no checkpoint "
                       f"can hold, and this fit has the default instead; to train as before, give it again: "
                       f"load_from_checkpoint(…, {again})")  # fmt: skip


def require_callable(name: str, value: Any) -> Any:
    """Refuses what is no callable."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r} must be a callable, such as a class of torch.optim"
                         f"{'.lr_scheduler' if name == 'lr_scheduler' else ''}")  # fmt: skip
    return value
