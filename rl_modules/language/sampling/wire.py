"""What a client and a server of ``rl serve`` accept of each other: tokens, JSON, and shapes of messages."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_modules.common.errors import UsageError

#: The environment variable that holds a token, on both sides.
TOKEN_VARIABLE = "RL_SERVE_TOKEN"
HOW_TO_GIVE = (
    f"give the file that `rl serve` names, by sampler_options={{token_file: …}}, or set {TOKEN_VARIABLE} on both sides"
)
#: Content types of messages and of weights.
JSON, BYTES = "application/json", "application/octet-stream"


class InvalidMessage(ValueError):
    """A message that is not what the protocol says, in a sentence."""


@dataclass(frozen=True)
class Within:
    """Shape of a number in a range; an integer where ``whole``. NaN is in none."""

    least: float
    most: float
    whole: bool = True

    def holds(self, values: list[Any]) -> bool:
        """Returns whether all values are such numbers."""
        kinds = {int} if self.whole else {int, float}
        least, most = self.least, self.most
        return kinds.issuperset(map(type, values)) and all(least <= value <= most for value in values)


COUNT = Within(0, 2**53)
MODEL = {"config": dict, "longest": Within(1, 2**31), "words": Within(1, 2**31), "untied": bool}
HEALTH = {"protocol": COUNT, "model": (None, MODEL), "version": (None, COUNT), "run": (None, str), "untied": bool}
SETTINGS = {
    "max_completion_length": Within(1, 2**31),
    "eos_token_id": [COUNT],
    "pad_token_id": COUNT,
    "temperature": Within(0, 1e6, whole=False),
    "top_k": (None, COUNT),
    "top_p": (None, Within(0, 1, whole=False)),
    "min_p": (None, Within(0, 1, whole=False)),
    "repetition_penalty": Within(1e-6, 1e6, whole=False),
    "return_sampling_mask": bool,
}
GENERATE = {"prompts": [[COUNT]], "seeds": [Within(-(2**63), 2**64)], "settings": SETTINGS, "run": (None, str)}
#: Log-probabilities may be above 0 by rounding.
ROW = {"tokens": [COUNT], "log_prob": [Within(-1e6, 1e-3, whole=False)], "finished": bool, "kept": (None, [[COUNT]])}
ROWS = {"rows": [ROW], "version": COUNT}


def parsed(data: bytes, shape: Any, what: str) -> Any:
    """Parses JSON and checks its shape."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{what} is no JSON that can be read ({str(error)[:100]})") from error
    for found in mistakes(value, shape, what):
        raise InvalidMessage(found)
    return value


def mistakes(value: Any, shape: Any, what: str) -> Iterator[str]:
    """Yields a sentence for each part of a value that does not have its shape; see :func:`parsed`."""
    if isinstance(shape, tuple):
        if value is not None:
            yield from mistakes(value, shape[1], what)
    elif isinstance(shape, dict):
        if not isinstance(value, dict) or value.keys() != shape.keys():
            yield f"{what} is {_short(value)}, where an object of {', '.join(shape)} should be"
        else:
            for name, part in shape.items():
                yield from mistakes(value[name], part, f"{what}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{what} is {_short(value)}, where a list should be"
        elif not (isinstance(shape[0], Within) and shape[0].holds(value)):
            for i, item in enumerate(value):
                yield from mistakes(item, shape[0], f"{what}[{i}]")
    elif isinstance(shape, Within):
        if not shape.holds([value]):
            kind = "a whole number" if shape.whole else "a number"
            yield f"{what} is {_short(value)}, where {kind} from {shape.least} to {shape.most} should be"
    elif not isinstance(value, shape):
        yield f"{what} is {_short(value)}, where a {shape.__name__} should be"


def printable(text: Any) -> str:
    """Returns a text of the other side as it may be shown: short, and without control characters."""
    return "".join(character if character.isprintable() else " " for character in str(text)[:300])


def make_token() -> str:
    """Returns the token of the environment variable, or a new one."""
    given = os.environ.get(TOKEN_VARIABLE)
    return secrets.token_urlsafe(32) if given is None else _checked(given, TOKEN_VARIABLE)


def write_token(path: Path, token: str) -> None:
    """Writes a token to a file that only its owner can read; replaces another."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise UsageError(f"token_file={str(path)!r} can't be written ({error.strerror}); give another") from error


def read_token(path: str | None, port: int) -> str:
    """Returns the token for a server: that of a file, of the environment variable, or of this user's server here."""
    if path is None and (given := os.environ.get(TOKEN_VARIABLE)) is not None:
        return _checked(given, TOKEN_VARIABLE)
    file = default_token_file(port) if path is None else Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            return _checked(opened.read(1000).decode("ascii", "replace").strip(), f"token_file={str(file)!r}")
    except OSError as error:
        raise UsageError(f"token_file={str(file)!r} can't be read ({error.strerror}); {HOW_TO_GIVE}") from error


def default_token_file(port: int) -> Path:
    """Returns the file in which a server on this machine leaves its token for this user's runs."""
    return Path("~/.cache/lightning-rl-recipes").expanduser() / f"serve-{port}.token"


def _checked(token: str, where: str) -> str:
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{where} holds no token: 16 or more letters, digits and signs without spaces")
    return token


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object of {printable(', '.join(map(str, list(value)[:8]))) or 'nothing'}"
    return f"a list of {len(value)}" if isinstance(value, list) else printable(repr(value))[:60]
