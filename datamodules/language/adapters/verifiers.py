"""Environments of ``verifiers`` before 0.2: their own rollout, with this library's model.

environment: datamodules.language.adapters.verifiers:VerifiersEnvironment
environment_kwargs: {env_id: my_wordle, env_args: {max_turns: 6}}
"""

import asyncio
import functools
import json
import threading
from typing import Any
from unittest import mock

from datamodules.language.calls import calls_of
from datamodules.language.environments import Step, own_columns
from datamodules.language.event_loop import awaited, own_loop
from rl_modules.common.errors import UsageError

_LOADING = threading.Lock()


@functools.cache
def load(env_id: str, env_args: str = "{}") -> Any:
    """Returns ``verifiers.load_environment(env_id, **env_args)``; one object serves all dialogues."""
    try:
        from verifiers import load_environment
    except ImportError as error:
        raise UsageError("verifiers' environments need: pip install 'lightning-rl-recipes[verifiers]'") from error
    with mock.patch("verifiers.envs.environment.signal"):  # it takes Ctrl-C and SIGTERM, which are the run's
        return load_environment(env_id, **json.loads(env_args))


class VerifiersEnvironment:
    """A rollout of a ``verifiers`` environment, in the run's event loop, which asks this object where it would ask a
    server of the model; the rubric's reward is that of the last turn.

    Its records are ``load(env_id).get_dataset()``, for ``data`` of ``PromptDataModule`` or a JSONL file.

    Not carried: rollouts that rewrite their earlier messages, rewards of groups, and tasksets of verifiers 0.2 and
    later, whose agents are programs that talk to a server.

    Args:
        env_id: as for ``verifiers.load_environment``.
        env_args: keyword arguments for it.
    """

    replayable = False  # what its environment draws is not known

    def __init__(self, env_id: str, env_args: dict[str, Any] | None = None) -> None:
        with _LOADING:  # one dialogue after the other
            self.env = load(env_id, json.dumps(env_args or {}))
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    def reset(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Begins the rollout of a record with ``prompt``, a list of messages, and the environment's other columns."""
        self._end = own_loop().start(functools.partial(self._run, {"example_id": 0, **own_columns(record)}), None)
        return list(self._next()[0])

    def step(self, message: dict[str, Any]) -> Step:
        """Gives the rollout the model's message."""
        return awaited(self._said.put(message)) or self._next()

    def close(self) -> None:
        """Ends the rollout, which can't read this message."""
        awaited(self._said.put(None))

    def _next(self) -> Step:
        """Waits for what the rollout asks next, or for its end."""
        return awaited(self._asked.get()) or self._end()

    async def _run(self, row: dict[str, Any]) -> Step:
        from verifiers import Client

        methods = {**dict.fromkeys(Client.__abstractmethods__), "get_response": staticmethod(self.get_response)}
        try:
            state = await self.env.rollout(row, type("Policy", (Client,), methods)(None), "policy")
            if state.get("error") is not None:
                raise state["error"]
            await self.env.rubric.score_rollout(state)
            return [], float(state["reward"]), True
        finally:
            self._asked.put_nowait(None)

    async def get_response(self, prompt: Any, tools: Any = None, **_: Any) -> Any:
        """What a client of verifiers does: returns the model's answer to a prompt."""
        from verifiers import types

        self.tools = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools or []]
        asked = [message.model_dump(exclude_none=True) for message in prompt]
        last = max((i for i, message in enumerate(asked) if message["role"] == "assistant"), default=-1)
        self._asked.put_nowait((asked[last + 1 :], 0.0, False))
        said = await self._said.get()
        calls = [
            types.ToolCall(id=call.id or f"call{i}", name=call.name, arguments=json.dumps(call.arguments))
            for i, call in enumerate(calls_of(said))
        ]
        how = {"finish_reason": "tool_calls" if calls else "stop", "is_truncated": False, "tool_calls": calls or None}
        message = types.ResponseMessage(content=str(said["content"] or ""), **how)
        return types.Response(id="", created=0, model="policy", message=message)
