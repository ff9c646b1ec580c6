"""``rl serve``: an engine served over HTTP, to which a run sends its weights and its prompts.

Bodies are JSON, weights safetensors: nothing is unpickled. Requests are answered one after the other. Each needs the
server's token (``Authorization: Bearer …``), a Host that names this machine, no Origin (browsers send one), its content
type and length.

GET  /health    what the server is, and the version of its weights
POST /model     the model's EngineSpec; starts an engine, unless the same one runs
POST /weights   ?version=…&run=…&first=0|1&last=0|1: a part of a run's weights; the last part has the engine load all
POST /generate  prompts, seeds, settings and the run; one completion per prompt, with that run's weights
"""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import safetensors.torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.engine import Engine
from rl_modules.language.sampling.protocol import SamplingSettings
from rl_modules.language.sampling.weights import EngineSpec
from rl_modules.language.sampling.wire import BYTES, GENERATE, JSON, MODEL, InvalidMessage, parsed

PROTOCOL = 3
#: Longest body of each path, in bytes, and its content type. A part of the weights ends with a whole weight.
BODIES = {"/model": (2**24, JSON), "/generate": (2**30, JSON), "/score": (2**30, JSON), "/weights": (2**35, BYTES)}
#: Seconds for a request's head, which a stranger may send, and for the body of a client.
HEAD_S, BODY_S = 10.0, 3600.0
_WEIGHTS = re.compile(r"/weights\?version=(\d{1,16})&run=([\w-]{1,100})&first=([01])&last=([01])")
MakeEngine = Callable[[EngineSpec], Engine]


class NotReadyError(Exception):
    """The server lacks the run's model or weights, as after a start; the run sends them again."""


class Service:
    """The server's state: an engine and its weights."""

    def __init__(self, make_engine: MakeEngine, unties: bool) -> None:
        self.make_engine, self.unties = make_engine, unties
        self.engine: Engine | None = None
        self.version: int | None = None
        #: The run whose weights the engine has.
        self.run: str | None = None
        self._parts: dict[str, Tensor] = {}
        self._sender: str | None = None
        self._lock = threading.Lock()
        self.posts = {"/model": self.model, "/generate": self.generate}

    def health(self) -> dict[str, Any]:
        """Returns the server's description for a run; answers while completions are written."""
        model = None if self.engine is None else asdict(self.engine.spec)
        return {"protocol": PROTOCOL, "model": model, "version": self.version, "run": self.run, "untied": self.unties}

    def model(self, body: bytes) -> dict[str, Any]:
        """Starts an engine for the model, in place of one for another."""
        spec = EngineSpec(**parsed(body, MODEL, "the model"))
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
            try:
                self._parts |= safetensors.torch.load(body)
            except Exception as error:  # of safetensors' own kinds
                raise InvalidMessage(f"the weights are no safetensors ({str(error)[:100]})") from error
            if last:
                parts, self._parts = self._parts, {}
                engine = self._running()
                self.version = None  # while they are loaded the weights are of no version
                engine.load_weights(parts.items())
                self.version, self.run = version, run
        return {}

    def generate(self, data: bytes) -> dict[str, Any]:
        """Writes one completion per prompt; ``version`` is that of the weights which wrote them."""
        body = parsed(data, GENERATE, "the request")
        settings = {**body["settings"], "eos_token_id": tuple(body["settings"]["eos_token_id"])}
        with self._lock:
            if self.version is None:
                raise NotReadyError("the server has no weights; POST /weights first")
            if body["run"] != self.run:
                raise NotReadyError("another run has given it its weights; give each run a server of its own")
            rows = self._running().generate(body["prompts"], body["seeds"], SamplingSettings(**settings))
            return {"rows": [vars(row) for row in rows], "version": self.version}

    def _running(self) -> Engine:
        if self.engine is None:
            raise NotReadyError("the server has no model; POST /model first")
        return self.engine


class _Bounded(io.RawIOBase):
    """Reads a connection until a time, however slowly the bytes come."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self.ends_s = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self.ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a connection that fails, which any stranger's may."""


class _RefusedError(Exception):
    """A request that is not answered: its status, and why."""


def make_server(service: Any, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """Returns an HTTP server for a service; ``serve_forever`` runs it."""
    # Only a name can be made to mean this machine by someone else's DNS server, an address can't.
    names = {"localhost", host, socket.gethostname()} - {""}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        default_request_version = "HTTP/1.0"  # of a line without one, which is answered with a status too

        def setup(self) -> None:
            super().setup()
            self._bounded = _Bounded(self.connection, HEAD_S)
            self.rfile = io.BufferedReader(self._bounded)

        def do_GET(self) -> None:
            self._answer(service.health if self.path == "/health" else None)

        def do_POST(self) -> None:
            found = _WEIGHTS.fullmatch(self.path)
            path = "/weights" if found is not None else self.path
            answers: dict[str, Callable[[bytes], dict[str, Any]]] = dict(service.posts)
            if found is not None and isinstance(service, Service):
                version, run, first, last = found.groups()
                answers[path] = lambda body: service.weights(body, int(version), last == "1", run, first == "1")
            work = answers.get(path)
            self._answer(None if work is None else lambda: work(self._body(path)))

        def _answer(self, work: Callable[[], dict[str, Any]] | None) -> None:
            self.close_connection = True
            try:
                self._admit()
                if work is None:
                    raise _RefusedError(404, f"unknown path {self.path[:100]!r}")
                self._bounded.ends_s = time.monotonic() + BODY_S
                self._send(200, work())
            except _RefusedError as error:
                self._send(error.args[0], {"error": error.args[1]})
            except NotReadyError as error:
                self._send(409, {"error": str(error)})
            except (UsageError, KeyError, TypeError, ValueError) as error:
                self._send(400, {"error": str(error)})
            except TimeoutError:
                self._send(408, {"error": f"the body did not arrive within {BODY_S:.0f} s"})
            except (BrokenPipeError, ConnectionResetError):
                pass  # the run that asked has ended
            except Exception as error:  # an engine's own; the run that asked says it
                self._send(500, {"error": f"{type(error).__name__}: {error}"})

        def _admit(self) -> None:
            """Refuses a request that is not from a client of this server, before any of it is used."""
            name = re.sub(r":\d*$", "", self.headers.get("Host", "").strip()).strip("[]")
            if name not in names and not _is_address(name):
                raise _RefusedError(403, f"the Host {name[:100]!r} is not this server's; ask it by its IP address")
            if "Origin" in self.headers:
                raise _RefusedError(403, "a web page asks, and this server answers none; leave the Origin header out")
            kind, _, given = self.headers.get("Authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
                raise _RefusedError(401, "the request lacks this server's token")

        def _body(self, path: str) -> bytes:
            most, kind = BODIES[path]
            if self.headers.get_content_type() != kind:
                raise _RefusedError(415, f"{path} takes {kind}, not {self.headers.get('Content-Type', 'none')[:100]!r}")
            lengths = self.headers.get_all("Content-Length", [])
            if len(lengths) != 1 or not re.fullmatch(r"\d{1,15}", lengths[0]) or "Transfer-Encoding" in self.headers:
                raise _RefusedError(411, "the request needs one Content-Length, a number, and no Transfer-Encoding")
            if int(lengths[0]) > most:
                raise _RefusedError(413, f"{path} takes at most {most} bytes, not {lengths[0]}")
            body = self.rfile.read(int(lengths[0]))
            if len(body) < int(lengths[0]):
                raise _RefusedError(400, f"the body ends after {len(body)} of {lengths[0]} bytes")
            return body

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Answers what ``http.server`` can't parse in the form of the other errors."""
            self.close_connection = True
            self._send(code if code < 500 else 405, {"error": message or "the request is no HTTP that is known here"})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            try:
                self.connection.settimeout(BODY_S)
                self.send_response(status)
                self.send_header("Content-Type", JSON)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing per request."""

    try:
        return _Server((host, port), Handler)
    except OSError as error:
        raise UsageError(f"host={host!r} port={port} can't be listened on ({error.strerror}); give another") from error


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
