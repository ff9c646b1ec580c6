"""The token that ``rl serve`` and its runs share: in a file that only its owner can read, or in the environment."""

import os
import secrets
from pathlib import Path

from rl_modules.common.errors import UsageError

#: Environment variable of the token, on both sides.
TOKEN_VARIABLE = "RL_SERVE_TOKEN"
#: Those of a server: the file that it receives weights into, and what it prints once it answers.
FILE_VARIABLE, SAYS_VARIABLE = "RL_SERVE_WEIGHTS_FILE", "RL_SERVE_SAYS"
HOW_TO_GIVE = (
    f"give the file that `rl serve` names, by sampler_options={{token_file: …}}, or set {TOKEN_VARIABLE} on both sides"
)


def make_token() -> str:
    """Returns the token of the environment variable, or a new one."""
    given = os.environ.get(TOKEN_VARIABLE)
    return secrets.token_urlsafe(32) if given is None else _checked(given, TOKEN_VARIABLE)


def write_token(path: Path, token: str) -> None:
    """Writes a token to a file that only its owner can read; runs that read it meanwhile find the old one."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.touch(mode=0o600, exist_ok=False)
        new.write_text(f"{token}\n", encoding="ascii")
        new.replace(path)
    except OSError as error:
        raise UsageError(f"token_file={str(path)!r} can't be written ({error.strerror}); give another") from error
    finally:
        if new.is_file():
            new.unlink()


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
