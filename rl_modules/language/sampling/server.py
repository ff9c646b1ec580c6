"""``rl serve``: an engine served over HTTP, to which a run sends its weights and its prompts.

Bodies are JSON, weights safetensors: nothing is unpickled. Requests are answered one after the other.

GET  /health    what the server is, and the version of its weights
POST /model     the model's EngineSpec; starts an engine, unless the same one runs
POST /weights   ?version=…&run=…&first=0|1&last=0|1: a part of a run's weights; the last part has the engine load all
POST /generate  prompts, seeds, settings and the run; one completion per prompt, with that run's weights
POST /sleep     releases device memory
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import safetensors.torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.engine import Engine
from rl_modules.language.sampling.protocol import SamplingSettings
from rl_modules.language.sampling.weights import EngineSpec

PROTOCOL = 1
MakeEngine = Callable[[EngineSpec], Engine]


class NotReadyError(Exception):
    """The server lacks the run's model or weights: it has just started, sleeps, or has another run's. The run sends
    them again.
    """


class Service:
    """The server's state: an engine and its weights.

    Args:
        make_engine: starts an engine for a model.
        unties: see :class:`EngineSpec`; a run asks before it describes its model.
    """

    def __init__(self, make_engine: MakeEngine, unties: bool) -> None:
        self.make_engine, self.unties = make_engine, unties
        self.engine: Engine | None = None
        self.version: int | None = None
        #: The run whose weights the engine has.
        self.run: str | None = None
        self._parts: dict[str, Tensor] = {}
        self._sender: str | None = None
        self._asleep = False
        self._lock = threading.Lock()

    def health(self) -> dict[str, Any]:
        """Returns the server's description for a run; answers while completions are written."""
        model = None if self.engine is None else asdict(self.engine.spec)
        return {"protocol": PROTOCOL, "model": model, "version": self.version, "run": self.run, "untied": self.unties}

    def model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Starts an engine for the model, in place of one for another."""
        spec = EngineSpec(**body)
        with self._lock:
            if self.engine is None or self.engine.spec != spec:
                if self.engine is not None:
                    self.engine.close()
                self.version, self.engine = None, None
                self.engine = self.make_engine(spec)
        return {}

    def weights(
        self, body: bytes, version: int, last: bool, run: str | None = None, first: bool = False
    ) -> dict[str, Any]:
        """Collects a part of a run's weights; loads them with the last part."""
        with self._lock:
            if first:  # what a run that was killed has left is dropped
                self._parts, self._sender = {}, run
            elif run != self._sender:
                raise NotReadyError("another run sends it weights; give each run a server of its own")
            self._parts |= safetensors.torch.load(body)
            if last:
                parts, self._parts = self._parts, {}
                engine = self._running()
                if self._asleep:
                    engine.wake()
                    self._asleep = False
                self.version = None  # while they are loaded the weights are of no version
                engine.load_weights(parts.items())
                self.version, self.run = version, run
        return {}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Writes one completion per prompt; ``version`` is that of the weights which wrote them."""
        settings = {**body["settings"], "eos_token_id": tuple(body["settings"]["eos_token_id"])}
        with self._lock:
            if self.version is None:
                raise NotReadyError("the server has no weights; POST /weights first")
            if body.get("run") != self.run:
                raise NotReadyError("another run has given it its weights; give each run a server of its own")
            rows = self._running().generate(body["prompts"], body["seeds"], SamplingSettings(**settings))
            return {"rows": [asdict(row) for row in rows], "version": self.version}

    def sleep(self) -> dict[str, Any]:
        """Releases device memory until the next weights."""
        with self._lock:
            if self.engine is not None and not self._asleep:
                self.engine.sleep()
                self._asleep, self.version = True, None
        return {}

    def _running(self) -> Engine:
        if self.engine is None:
            raise NotReadyError("the server has no model; POST /model first")
        return self.engine


def make_server(service: Service, host: str, port: int) -> ThreadingHTTPServer:
    """Returns an HTTP server for a service; ``serve_forever`` runs it.

    Args:
        service: answers the requests.
        host: address to listen on.
        port: 0: any free one.

    Raises:
        UsageError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(service.health if self.path == "/health" else None)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            where = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(where.query).items()}
            answers: dict[str, Callable[[], dict[str, Any]]] = {
                "/model": lambda: service.model(json.loads(body)),
                "/weights": lambda: service.weights(
                    body, int(query["version"]), query["last"] == "1", query.get("run"), query.get("first") == "1"
                ),
                "/generate": lambda: service.generate(json.loads(body)),
                "/sleep": service.sleep,
            }
            self._answer(answers.get(where.path))

        def _answer(self, work: Callable[[], dict[str, Any]] | None) -> None:
            if work is None:
                self._send(404, {"error": f"unknown path {self.path!r}"})
                return
            try:
                self._send(200, work())
            except NotReadyError as error:
                self._send(409, {"error": str(error)})
            except (UsageError, KeyError, TypeError, ValueError) as error:
                self._send(400, {"error": str(error)})
            except (BrokenPipeError, ConnectionResetError):
                pass  # the run that asked has ended
            except Exception as error:  # an engine's own; the run that asked says it
                self._send(500, {"error": f"{type(error).__name__}: {error}"})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                pass

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing per request."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise UsageError(f"host={host!r} port={port} can't be listened on ({error.strerror}); give another") from error
