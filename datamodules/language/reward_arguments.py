"""Arguments of reward functions: which columns they receive, and copies that a function may change."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from datamodules.language.reward_logging import LOGGING
from rl_modules.common.errors import UsageError

#: Argument for the prompts as the model reads them, after the chat template; only for functions that name it.
RENDERED = "rendered_prompts"
#: Arguments that are no columns.
_OWN = frozenset({"prompts", "completions", "completion_ids", RENDERED, "trainer_state", *LOGGING})
#: Columns that a reward function gets by other names, or not at all (TRL's choice).
_NOT_PASSED = frozenset(
    {"prompt", "completion", "completion_ids", "prompt_ids", "conversation", "text_ids", "completion_mask"}
)
#: Arguments that have no value per completion.
_SHARED = frozenset({"trainer_state", *LOGGING})


def columns_of(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns the records' columns as reward functions get them; None where a record lacks one.

    Raises:
        UsageError: see :func:`refuse_own_names`.
    """
    names = dict.fromkeys(name for record in records for name in record if name not in _NOT_PASSED)
    refuse_own_names(names)
    return {name: [record.get(name) for record in records] for name in names}


def refuse_own_names(columns: Iterable[str]) -> None:
    """Refuses columns with the name of an argument, whose value they would replace.

    Raises:
        UsageError: names the column.
    """
    for name in (_OWN - _NOT_PASSED).intersection(columns):
        raise UsageError(f"the records have a column {name!r}, the name by which reward functions get this run's own "
                         f"{name}; rename or remove the column in the file or dataset")  # fmt: skip


def accepted(func: Callable[..., Any], name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of ``given`` that a function accepts: the arguments that it names, and all columns if it has
    ``**columns``.

    Args:
        func: the reward function.
        name: its name, for messages.
        given: all that reward functions may ask for.

    Raises:
        UsageError: it needs a column that is missing.
    """
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # builtins written in C have no signature
        return _without_named(given)
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)  # fmt: skip
        if needed and parameter.name not in given:
            raise UsageError(_missing(name, parameter.name, given))
    named = {key: value for key, value in given.items() if key in parameters}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {**_without_named(given), **named} if takes_all else named


def _without_named(given: dict[str, Any]) -> dict[str, Any]:
    """Removes the arguments that a reward function receives only if it names them."""
    return {key: value for key, value in given.items() if key not in (*LOGGING, RENDERED)}


def names_argument(func: Callable[..., Any], name: str) -> bool:
    """Returns whether a function has an argument of a name."""
    try:
        return name in inspect.signature(func).parameters
    except (TypeError, ValueError):  # builtins written in C have no signature
        return False


def _missing(name: str, parameter: str, given: dict[str, Any]) -> str:
    columns = [key for key in given if key not in _OWN]
    return (f"reward function {name!r} needs a column {parameter!r}, but the records have only "
            f"{', '.join(columns) or 'prompts'}; map one with columns")  # fmt: skip


def own_part(arguments: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns the arguments of one call for samples ``start`` to ``stop``.

    Each sample has lists and dictionaries of its own: the completions of one prompt share a record, which all epochs
    and all reward functions read, and a function may change what it gets.
    """
    return {
        key: value if value is None or key in _SHARED else [_copied(sample) for sample in value[start:stop]]
        for key, value in arguments.items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        # Lists of numbers and strings, such as token ids, are copied without a check of each element.
        return [_copied(x) if isinstance(x, (list, dict)) else x for x in value]
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.items()}
    return value
