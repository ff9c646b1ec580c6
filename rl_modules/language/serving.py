"""What ``rl serve`` adds to vLLM's server: a token for every path, and a path that takes a run's weights.

GET  /weights               {"version": …} of the weights that write, "default" before a run has sent its own
POST /weights?version=R:N   a safetensors file, the weights of run R after N optimizer steps; answered once they write

vLLM imports both classes by their names in its own processes, so that this file imports no model.
"""

import asyncio
import hmac
import json
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rl_modules.language.server_token import FILE_VARIABLE, SAYS_VARIABLE, TOKEN_VARIABLE

#: Paths of vLLM's own that a run asks.
VLLM_PATHS = {("GET", "/health"), ("POST", "/inference/v1/generate"), ("POST", "/detokenize")}
#: Longest body of a request to vLLM, in bytes, and seconds that weights may take to arrive.
MOST, WEIGHTS_S = 2**24, 3600.0
_VERSION = re.compile(rb"version=([\w-]{1,100}:\d{1,16})")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Loading:
    """Methods that vLLM's workers get (``worker_extension_cls``)."""

    def load_weights_of(self, weights: Any) -> None:
        """Replaces all weights by those of a safetensors file, or by ``(name, tensor)`` pairs."""
        worker: Any = self
        if isinstance(weights, str):
            with safe_open(weights, framework="pt") as file:
                worker.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        else:
            worker.reload_weights(weights_iterator=weights)
        if worker.device.type == "cpu":
            # There vLLM computes with a packed copy of an output layer, and leaves that of a tied one as it was.
            for layer in worker.get_model().modules():
                if type(layer).__name__ == "ParallelLMHead":
                    layer.quant_method.process_weights_after_loading(layer)


def _telling(send: Send) -> Send:
    async def told(message: Message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            print(os.environ[SAYS_VARIABLE], flush=True)

    return told


class _RefusedError(Exception):
    """A request that is not answered: its status, and why."""


class Gate:
    """ASGI middleware of vLLM's server that lets in requests with the token, at the paths that a run asks."""

    def __init__(self, app: Any) -> None:
        self.app, self.file = app, Path(os.environ[FILE_VARIABLE])
        self._token = os.environ[TOKEN_VARIABLE].encode()
        self._is_loading = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, _telling(send))
            return
        try:
            length = self._admit(scope)
            if scope["path"] != "/weights":
                await self.app(scope, receive, send)
                return
            status, answer = 200, await self._weights(scope, receive, length)
        except _RefusedError as error:
            status, answer = error.args[0], {"error": {"message": error.args[1]}}
        body, kind = json.dumps(answer).encode(), [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": body})

    def _admit(self, scope: Message) -> int:
        """Refuses a request before any of it is used; returns its length."""
        headers = dict(scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise _RefusedError(401, "the request lacks this server's token")
        asked = (scope.get("method", ""), scope["path"])
        if asked not in VLLM_PATHS | {("GET", "/weights"), ("POST", "/weights")}:
            raise _RefusedError(404, "no such path")
        length = headers.get(b"content-length", b"0" if asked[0] == "GET" else b"")
        if not re.fullmatch(rb"\d{1,15}", length) or b"transfer-encoding" in headers:
            raise _RefusedError(411, "the request needs a Content-Length, and no Transfer-Encoding")
        most = shutil.disk_usage(self.file.parent).free if asked == ("POST", "/weights") else MOST
        if int(length) > most:
            raise _RefusedError(413, f"the body has {int(length)} bytes, and there is room for {most}")
        return int(length)

    async def _weights(self, scope: Message, receive: Receive, length: int) -> dict[str, Any]:
        engine = scope["app"].state.engine_client
        if scope["method"] == "GET":
            return {"version": await engine.get_weight_version()}
        if (version := _VERSION.fullmatch(scope["query_string"])) is None:
            raise _RefusedError(400, "the weights need ?version=run:step")
        if self._is_loading:
            raise _RefusedError(503, "the server is receiving other weights; give each run a server of its own")
        self._is_loading = True
        try:
            await asyncio.wait_for(self._receive(receive, length), WEIGHTS_S)
            await self._load(engine, version[1].decode())
        except asyncio.TimeoutError as error:
            raise _RefusedError(408, f"the weights did not arrive within {WEIGHTS_S:.0f} s") from error
        finally:
            self.file.unlink(missing_ok=True)
            self._is_loading = False
        return {"version": version[1].decode()}

    async def _receive(self, receive: Receive, length: int) -> None:
        """Writes a body to the file, which has no more than one run's weights at a time."""
        self.file.unlink(missing_ok=True)
        with os.fdopen(os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while file.tell() < length:
                message = await receive()
                if message["type"] != "http.request" or not (message.get("body") or message.get("more_body")):
                    raise _RefusedError(400, f"the weights end after {file.tell()} of {length} bytes")
                file.write(message.get("body", b""))

    async def _load(self, engine: Any, version: str) -> None:
        """Replaces the engine's weights, between the completions under way and those that wait."""
        try:
            await engine.pause_generation(mode="wait")
            await engine.collective_rpc("load_weights_of", args=(str(self.file),))
            await engine.update_weight_version(version)
            await engine.resume_generation()
        except Exception as error:
            os.kill(os.getpid(), signal.SIGTERM)  # it has neither the old weights nor the new ones
            raise _RefusedError(500, f"the weights can't be loaded ({str(error)[:200]}); the server ends") from error
