"""Environments of ``verifiers`` before 0.2: their own rollout, with this library's model.

environment: datamodules.language.adapters.verifiers:VerifiersEnvironment
environment_kwargs: {env_id: my_wordle, env_args: {max_turns: 6}}
"""

import asyncio
import functools
import json
import queue
import threading
from typing import Any

from datamodules.language.calls import calls_of
from datamodules.language.environments import Message, Step
from rl_modules.common.errors import UsageError


@functools.cache
def load(env_id: str, env_args: str = "{}") -> Any:
    """Returns ``verifiers.load_environment(env_id, **env_args)``; one object serves all dialogues."""
    try:
        from verifiers import load_environment
    except ImportError as error:
        raise UsageError("verifiers' environments need: pip install 'lightning-rl-recipes[verifiers]'") from error
    return load_environment(env_id, **json.loads(env_args))


def records(env_id: str, n: int = -1, **env_args: Any) -> list[dict[str, Any]]:
    """Returns the environment's own training records, for ``data`` of ``PromptDataModule`` or a JSONL file."""
    return [dict(row) for row in load(env_id, json.dumps(env_args)).get_dataset(n)]


class VerifiersEnvironment:
    """A rollout of a ``verifiers`` environment, which runs in a thread and asks this object where it would ask a server
    of the model; the rubric's reward is that of the last turn.

    Not carried: rollouts that rewrite their earlier messages, rewards of groups, and tasksets of verifiers 0.2 and
    later, whose agents are programs that talk to a server.

    Args:
        env_id: as for ``verifiers.load_environment``.
        env_args: keyword arguments for it.
    """

    replayable = False  # what its environment draws is not known

    def __init__(self, env_id: str, env_args: dict[str, Any] | None = None) -> None:
        self.env = load(env_id, json.dumps(env_args or {}))
        self._asked: queue.Queue[Any] = queue.Queue()
        self._said: queue.Queue[Message | None] = queue.Queue()

    def reset(self, record: dict[str, Any]) -> list[Message]:
        """Begins the rollout of a record with ``prompt`` and the environment's other columns."""
        row = {"example_id": 0, **record}
        if isinstance(row["prompt"], str):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        threading.Thread(target=lambda: asyncio.run(self._run(row)), daemon=True).start()
        return list(self._next()[0])

    def step(self, message: Message) -> Step:
        """Gives the rollout the model's message."""
        self._said.put(message)
        return self._next()

    def close(self) -> None:
        """Ends the rollout's thread."""
        self._said.put(None)

    def _next(self) -> Step:
        """Waits for what the rollout asks next, or for its end."""
        found = self._asked.get()
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, float):
            return [], found, True
        last = max((i for i, message in enumerate(found) if message["role"] == "assistant"), default=-1)
        return found[last + 1 :], 0.0, False

    async def _run(self, row: dict[str, Any]) -> None:
        try:
            state = await self.env.rollout(row, self, "policy")
            if state.get("error") is not None:
                raise state["error"]
            await self.env.rubric.score_rollout(state)
            self._asked.put(float(state["reward"]))
        except BaseException as error:
            self._asked.put(error)

    async def get_response(self, prompt: Any, tools: Any = None, **_: Any) -> Any:
        """What a client of verifiers does: returns the model's answer to a prompt."""
        from verifiers.types import Response, ResponseMessage, ToolCall

        self.tools = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools or []]
        self._asked.put([message.model_dump(exclude_none=True) for message in prompt])
        said = await asyncio.to_thread(self._said.get)
        if said is None:
            raise asyncio.CancelledError
        calls = [ToolCall(id=f"call{i}", name=call.name, arguments=json.dumps(call.arguments))
                 for i, call in enumerate(calls_of(said))]  # fmt: skip
        how = {"finish_reason": "tool_calls" if calls else "stop", "is_truncated": False, "tool_calls": calls or None}
        return Response(id="", created=0, model="", message=ResponseMessage(content=str(said["content"] or ""), **how))
