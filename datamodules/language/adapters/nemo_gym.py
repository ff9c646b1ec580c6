"""Resources servers of NeMo Gym, which are started with its own commands.

environment: datamodules.language.adapters.nemo_gym:NeMoGymEnvironment
environment_kwargs: {base_url: "http://localhost:11000"}
"""

import json
import urllib.error
import urllib.request
import uuid
from typing import Any

from datamodules.language.calls import calls_of
from datamodules.language.environments import Step, own_columns
from datamodules.language.messages import Message


class NeMoGymEnvironment:
    """A session of a resources server: the record's ``responses_create_params`` open the dialogue, calls go to the
    server's routes of their names, and ``/verify`` scores the dialogue when the model answers without a call.

    Not carried: agents, models and environment servers of NeMo Gym (this library writes the dialogue itself), tools
    over MCP, images.

    Args:
        base_url: of the resources server.
    """

    replayable = False  # a server keeps the session

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())  # the session is a cookie

    def reset(self, record: dict[str, Any]) -> list[Message]:
        """Seeds a session with the record's columns."""
        self.record = own_columns(record)
        self.output: list[dict[str, Any]] = []
        self._post("seed_session", self.record)
        asked, tools = (record["responses_create_params"].get(key) or [] for key in ("input", "tools"))
        self.tools: list[dict[str, Any]] = [
            {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool}}
            for tool in tools
        ]
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return [{**m, "role": "system" if m["role"] == "developer" else m["role"]} for m in asked]

    def step(self, message: Message) -> Step:
        """Runs calls; verifies the dialogue at a message without one."""
        known, results = [tool["function"]["name"] for tool in self.tools], []
        for call in calls_of(message):
            error = call.error or ("" if call.name in known else f"there is no tool {call.name!r}")
            text = f"error: {error}" if error else self._post(call.name, call.arguments)
            same = {"call_id": uuid.uuid4().hex}
            written = {"type": "function_call", "name": call.name, "arguments": json.dumps(call.arguments), **same}
            self.output += [written, {"type": "function_call_output", "output": text, **same}]
            results.append({"role": "tool", "name": call.name, "content": text})
        if results:
            return results, 0.0, False
        said = {"type": "output_text", "text": str(message.get("content") or ""), "annotations": []}
        how = {"id": "message", "type": "message", "role": "assistant", "status": "completed"}
        response = {
            "id": "dialogue",
            "created_at": 0.0,
            "model": "policy",
            "object": "response",
            "tool_choice": "auto",
            "tools": self.record["responses_create_params"].get("tools") or [],
            "parallel_tool_calls": True,
            "output": [*self.output, {**how, "content": [said]}],
        }
        return [], float(json.loads(self._post("verify", {**self.record, "response": response}))["reward"]), True

    def _post(self, route: str, body: Any) -> str:
        """The server's answer; what it refuses (422) is for the model to read."""
        address, header = f"{self.base_url}/{route}", {"Content-Type": "application/json"}
        try:
            with self._opener.open(urllib.request.Request(address, json.dumps(body).encode(), header)) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 422 and route not in ("seed_session", "verify"):
                return f"error: {error.read().decode()[:500]}"
            raise
