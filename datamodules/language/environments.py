"""Environments of dialogues: what a model's messages are answered by, turn after turn.

    class Guess:
        def reset(self, record):
            self.secret = record["secret"]
            return [{"role": "user", "content": "Guess a number from 1 to 64."}]

        def step(self, message):
            guess = int(message["content"])
            if guess == self.secret:
                return [], 1.0, True
            return [{"role": "user", "content": "higher" if guess < self.secret else "lower"}], 0.0, False

``PromptDataModule`` takes one by its import path, ``environment: my_package.games:Guess``, with ``environment_kwargs``.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from datamodules.language.messages import Message
from rl_modules.common.errors import UsageError
from rl_modules.common.loading import load_object, require_settings

#: New messages for the model, the turn's reward, and whether the dialogue is over.
Step = tuple[Sequence[Message], float, bool]


class Environment(Protocol):
    """One dialogue's environment. Each dialogue has an object of its own, made by the class with
    ``environment_kwargs``; both methods may be coroutines.

    Two attributes of the class are optional. ``tools``: a sequence of typed functions (or JSON schemas), which the chat
    template shows to the model; calls of them are parsed from what the model writes and arrive as the message's
    ``tool_calls``. ``replayable`` (by default true): whether the same record and messages lead to the same
    state, so that a dialogue may be continued in a new object after a resume. A method ``close()`` is called, where
    there is one, when the dialogue has ended.
    """

    def reset(self, record: dict[str, Any]) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begins a dialogue.

        Args:
            record: a copy of the prompt's, with two further columns where it has none of their names: ``seed``, private
                to the dialogue, and ``start_seed``, the same for all dialogues of a prompt.

        Returns:
            The messages that open the dialogue, the same for all dialogues of a prompt; empty: the record's prompt.
        """
        ...

    def step(self, message: Message) -> Step | Awaitable[Step]:
        """Answers a message of the model, a copy: ``role`` assistant, ``content`` its text without special tokens,
        ``reasoning_content`` its thought where the chat template marks thoughts, and ``tool_calls`` where it wrote
        calls of ``tools``.

        Returns:
            The messages that the model reads next, which may be none at the end; the reward of the turn; and whether
            the dialogue is over.
        """
        ...


EnvironmentClass = Callable[..., Environment]


class RunSeed(int):
    """A seed of this run in a record that has no column of that name."""


def own_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record's own columns, without what the run adds for environments."""
    return {name: x for name, x in record.items() if name != "prompt_ids" and not isinstance(x, RunSeed)}


def load_environment(given: str | EnvironmentClass, settings: Mapping[str, Any]) -> EnvironmentClass:
    """Returns the class of an environment, by its import path ``package.module:Class``, and checks its settings."""
    cls = load_object(given, "environment") if isinstance(given, str) else given
    missing = [name for name in ("reset", "step") if not callable(getattr(cls, name, None))]
    if not callable(cls) or missing:
        raise UsageError(
            f"environment={given!r} has no {' and no '.join(missing) or 'constructor'}; give the import "
            "path of a class with reset(record) and step(message)"
        )
    require_settings(cls, dict(settings), f"environment {given!r}")
    return cls


def replayable(given: str | EnvironmentClass) -> bool:
    """Whether an environment can be brought back to where it was by the same record and messages."""
    cls = load_object(given, "environment") if isinstance(given, str) else given
    return bool(getattr(getattr(cls, "func", cls), "replayable", True))
