"""Servers of OpenEnv (``pip install openenv``).

environment: datamodules.language.adapters.openenv:OpenEnvEnvironment
environment_kwargs: {base_url: "http://localhost:8000", action: message, observation: echoed_message}
"""

from typing import Any

from datamodules.language.environments import Step
from datamodules.language.messages import Message
from rl_modules.common.errors import UsageError


class OpenEnvEnvironment:
    """A session of an OpenEnv server, over its WebSocket: the model's message becomes one field of the action, and a
    field of the observation becomes a user message.

    Not carried: actions of several fields, MCP tools of a server, and its web interface. A server whose environment
    lacks ``SUPPORTS_CONCURRENT_SESSIONS`` serves one dialogue at a time: start several, or raise its
    ``max_concurrent_envs``.

    Args:
        base_url: of the server, ``http://…`` or ``ws://…``.
        action: field of the action that holds the model's text.
        observation: field of the observation that holds the text for the model.
        columns: of the record, passed to the server's ``reset``.
    """

    replayable = False  # a server need not draw from the seed alone

    def __init__(
        self, base_url: str, action: str = "message", observation: str = "message", columns: tuple[str, ...] = ()
    ) -> None:
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise UsageError("OpenEnvEnvironment needs OpenEnv: pip install 'lightning-rl-recipes[openenv]'") from error
        self.client = GenericEnvClient(base_url=base_url).sync()
        self.action, self.observation, self.columns = action, observation, columns

    def reset(self, record: dict[str, Any]) -> list[Message]:
        """Begins an episode with the record's ``start_seed`` and columns."""
        given = {name: record[name] for name in self.columns}
        result = self.client.reset(seed=int(record.get("start_seed", 0)) % 2**31, **given)
        return [{"role": "user", "content": self._text(result)}]

    def step(self, message: Message) -> Step:
        """Sends the model's text."""
        result = self.client.step({self.action: str(message.get("content") or "")})
        return [{"role": "user", "content": self._text(result)}], float(result.reward or 0.0), bool(result.done)

    def _text(self, result: Any) -> str:
        if self.observation not in result.observation:
            raise UsageError(
                f"observation={self.observation!r} is no field of the server's observation, which has "
                f"{', '.join(result.observation)}"
            )
        return str(result.observation[self.observation])

    def close(self) -> None:
        """Ends the session."""
        self.client.close()
