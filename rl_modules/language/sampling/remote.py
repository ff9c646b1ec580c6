"""The sampler that writes completions on servers (``rl serve``), on this machine or on others."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import safetensors.torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import is_sharded
from rl_modules.language.sampling import wire
from rl_modules.language.sampling.engine import check_engine
from rl_modules.language.sampling.protocol import Completions, RowListener, Sampler, SamplingSettings
from rl_modules.language.sampling.rows import Row, completions_of
from rl_modules.language.sampling.server import PROTOCOL
from rl_modules.language.sampling.weights import EngineSpec, Fingerprint, computing_dtype, fingerprint, named_weights

log = logging.getLogger(__name__)

#: Bytes of weights per request.
_PART = 2**28
_UNREACHABLE = (OSError, http.client.HTTPException)


class Server:
    """The client's view of one server. What it answers is checked before it is used."""

    def __init__(self, address: str, timeout_s: float, token_file: str | None = None) -> None:
        self.address, self.timeout_s, self.token_file = address, timeout_s, token_file
        host, _, port = str(address).removeprefix("http://").rstrip("/").rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535 or set(host) & set("/@?# "):
            raise UsageError(f"addresses: {address!r} must be host:port, such as 127.0.0.1:8000")
        self.host, self.port = host.strip("[]"), int(port)
        #: Whether it has the latest weights.
        self.current = False
        #: The run whose weights these are, and the versions that it may have.
        self.run: str | None = None
        self.versions = wire.COUNT
        #: Why it was left out last.
        self.failure = ""
        #: Whether its log-probabilities have been compared with the model's.
        self.checked = False
        #: Of the model whose weights it gets.
        self.spec = EngineSpec({}, 0, 0, False)

    def ask(
        self,
        path: str,
        shape: Any,
        body: bytes | None = None,
        kind: str = wire.JSON,
        timeout_s: float | None = None,
        most: int = 2**24,
    ) -> Any:
        """One request."""
        wait_s = timeout_s or self.timeout_s
        connection = http.client.HTTPConnection(self.host, self.port, timeout=wait_s)
        connection.connect()
        # The socket's own limit is one for each piece of an answer, however many come.
        ends = threading.Timer(wait_s, _shut, [connection.sock])
        ends.daemon = True
        ends.start()
        try:
            token = wire.read_token(self.token_file, self.port)
            headers = {"Authorization": f"Bearer {token}"}
            method = "GET" if body is None else "POST"
            connection.request(method, path, body, headers | ({} if body is None else {"Content-Type": kind}))
            response = connection.getresponse()
            data = self._body(response, path, most)
        finally:
            ends.cancel()
            connection.close()
        try:
            if response.status == 200:
                return wire.parsed(data, shape, "its answer")
            reason = wire.printable(wire.parsed(data, {"error": str}, "its answer")["error"])
        except wire.InvalidMessage as error:
            raise self._wrong(path, str(error)) from error
        is_renewed = response.status == 401 and wire.read_token(self.token_file, self.port) != token
        # It has started again, with a new token or without the weights, or its engine has failed.
        if response.status in (409, 500) or is_renewed:
            raise ConnectionError(reason)
        if response.status == 401:
            raise UsageError(f"{self.address} refuses {path}: {reason}; {wire.HOW_TO_GIVE}")
        raise UsageError(f"{self.address} refuses {path}: {reason}")

    def _body(self, response: http.client.HTTPResponse, path: str, most: int) -> bytes:
        if response.headers.get_content_type() != wire.JSON:
            kind = wire.printable(response.headers.get_content_type())
            raise self._wrong(path, f"status {response.status} and {kind}")
        if response.length is None or response.length > most:  # None: no Content-Length, or chunks
            length = "an unknown number of" if response.length is None else response.length
            raise self._wrong(path, f"{length} bytes, where at most {most} were asked for")
        return response.read()  # IncompleteRead: it ended before its length

    def _wrong(self, path: str, what: str) -> UsageError:
        return UsageError(
            f"addresses: {self.address} answers {path} wrongly: {what}; is it `rl serve` of this version?"
        )

    def leave_out(self, error: Exception) -> str:
        """Notes that the server does not answer until it gets the next weights; returns a sentence of that."""
        self.current, self.failure = False, wire.printable(error)
        return f"{self.address} does not answer ({self.failure})"

    def health(self) -> dict[str, Any]:
        """Returns the server's description; it answers while it writes completions."""
        answer: dict[str, Any] = self.ask("/health", wire.HEALTH, timeout_s=min(10.0, self.timeout_s))
        if answer["protocol"] != PROTOCOL:
            raise UsageError(
                f"addresses: {self.address} speaks protocol {answer['protocol']}, this run {PROTOCOL}; "
                "start it with the same version"
            )
        return answer

    def load(self, spec_of: Callable[[bool], EngineSpec], version: int, parts: list[bytes], run: str) -> None:
        """Gives the server the model, unless it has it, and its weights."""
        self.spec = spec_of(self.health()["untied"])
        # Another thread may be waiting for completions, which may be written with these weights already.
        self.versions = wire.Within(self.versions.least, version)
        self.ask("/model", {}, json.dumps(asdict(self.spec)).encode())
        for number, part in enumerate(parts):
            place = f"first={int(number == 0)}&last={int(number == len(parts) - 1)}"
            self.ask(f"/weights?version={version}&run={run}&{place}", {}, part, wire.BYTES)
        self.current, self.run, self.failure, self.versions = True, run, "", wire.Within(version, version)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        """One completion per prompt; the interface of an engine, for its check."""
        return [row for row, _ in self.generate_versioned(prompts, seeds, settings)]

    def generate_versioned(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings
    ) -> list[tuple[Row, int]]:
        """One completion per prompt, each with the version of the weights that wrote it."""
        body: dict[str, Any] = {
            "prompts": [list(p) for p in prompts],
            "seeds": [int(s) for s in seeds],
            "settings": asdict(settings),
            "run": self.run,
        }
        kept = min(settings.top_k or self.spec.words, self.spec.words) if settings.return_sampling_mask else 0
        most = 2**16 + len(prompts) * (1000 + (60 + 12 * kept) * settings.max_completion_length)
        oldest = self.versions.least
        answer = self.ask("/generate", wire.ROWS, json.dumps(body).encode(), most=most)
        rows = [Row(**row) for row in answer["rows"]]
        limits = [min(settings.max_completion_length, self.spec.longest - len(prompt)) for prompt in prompts]
        for mistake in wire.mistakes(answer["version"], wire.Within(oldest, self.versions.most), "its answer.version"):
            raise self._wrong("/generate", mistake)
        if len(rows) != len(limits):
            raise self._wrong("/generate", f"{len(rows)} completions of {len(limits)} prompts")
        for i, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            if mistake := _mistake_of(row, limit, settings, self.spec.words):
                raise self._wrong("/generate", f"completion {i} has {mistake}")
        return [(row, answer["version"]) for row in rows]


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)


def _mistake_of(row: Row, limit: int, settings: SamplingSettings, words: int) -> str:
    """Returns why no sampler writes a row of these tokens and so many; empty where one may."""
    n, stops = len(row.tokens), set(settings.eos_token_id)
    if not 1 <= n <= limit or (n < limit and not row.finished):
        return f"{n} tokens, where 1 to {limit} should be, and fewer only before an EOS token"
    if len(row.log_prob) != n:
        return f"{len(row.log_prob)} log-probabilities for {n} tokens"
    if max(row.tokens) >= words:
        return f"the token id {max(row.tokens)}, where the model has {words}"
    if row.kept is not None and not (
        len(row.kept) == n
        and all(token in ids and max(ids) < words for token, ids in zip(row.tokens, row.kept, strict=True))
    ):
        return "kept tokens that lack the drawn one, or that the model does not have"
    if row.finished != (row.tokens[-1] in stops) or stops.intersection(row.tokens[:-1]):
        return f"finished={row.finished}, against its EOS tokens"
    return ""


class ServerSampler(Sampler):
    """A :class:`~rl_modules.language.sampling.Sampler` on servers, which share the prompts.

    A server that does not answer is left out, and its prompts are asked again of the others; it comes back with the
    next weights. Completions carry the version of the weights that wrote them.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        device: Any,
        timeout_s: float = 600.0,
        retries: int = 5,
        retry_wait_s: float = 2.0,
        pushes: bool = True,
        run: str | None = None,
        token_file: str | None = None,
    ) -> None:
        if isinstance(addresses, str) or not addresses:
            raise UsageError(f"addresses={addresses!r} must be a list of host:port; start a server with `rl serve`")
        self.servers = [Server(address, timeout_s, token_file) for address in addresses]
        self.device, self.retries, self.retry_wait_s = device, retries, retry_wait_s
        self.pushes = pushes
        self.version = 0
        # Versions of two runs can be equal, so without a name a run could accept completions from another run's
        # weights.
        self._run = run or uuid.uuid4().hex
        self._is_named = pushes or run is not None
        self._weights: Fingerprint | None = None
        self._forgotten = False
        self._spec_of: Callable[[bool], EngineSpec]
        self._parts: list[bytes] = []
        self._lock = threading.Lock()
        self._greet()

    def _greet(self) -> None:
        """Checks at start that a server is there, which may have been started together with the run."""
        for attempt in range(self.retries + 1):
            time.sleep(self.retry_wait_s if attempt else 0)
            for server in self.servers:
                with contextlib.suppress(*_UNREACHABLE):
                    server.health()
                    return
        addresses = ", ".join(server.address for server in self.servers)
        raise UsageError(f"addresses: none of {addresses} answers after {self.retries} retries; start `rl serve` there")

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        seeds: Sequence[int],
        settings: SamplingSettings,
        on_ended: RowListener | None = None,
    ) -> Completions:
        if self._weights is None:
            raise UsageError("the sampler has no weights yet; call update_weights first")
        asked = [prompt for prompt in prompts for _ in range(num_generations)]
        rows: list[tuple[Row, int] | None] = [None] * len(asked)
        missing = list(range(len(asked)))
        attempts, patience_ends_s = 0, time.monotonic() + self.servers[0].timeout_s
        while attempts <= self.retries:
            expects_weights = self._bring_back()
            self._ask_all(asked, seeds, settings, missing, rows, num_generations)
            missing = [number for number, row in enumerate(rows) if row is None]
            if not missing:
                break
            # A server that another rank is giving the weights to has not failed.
            attempts += not (expects_weights and time.monotonic() < patience_ends_s)
            time.sleep(self.retry_wait_s)
        else:
            addresses = ", ".join(server.address for server in self.servers)
            failures = "; ".join(dict.fromkeys(server.failure for server in self.servers if server.failure))
            reason = f" ({failures})" if failures else ""
            raise UsageError(
                f"addresses: none of {addresses} answers after {self.retries} retries{reason}; start `rl "
                "serve` again, then add --resume"
            )
        found = [row for row in rows if row is not None]
        if on_ended is not None:
            for number, (row, _) in enumerate(found):
                on_ended(number, row.tokens, row.finished)
        written = [row for row, _ in found]
        return completions_of(written, settings.pad_token_id, self.device, [version for _, version in found])

    def _ask_all(
        self,
        asked: list[Sequence[int]],
        seeds: Sequence[int],
        settings: SamplingSettings,
        missing: list[int],
        rows: list[tuple[Row, int] | None],
        num_generations: int,
    ) -> None:
        """Distributes the missing rows over the available servers, in whole groups, and stores their completions."""
        servers = [server for server in self.servers if server.current]
        shares: list[list[int]] = [[] for _ in servers]
        for number in missing if servers else ():
            shares[number // num_generations % len(servers)].append(number)

        def work(server: Server, numbers: list[int]) -> None:
            try:
                answer = server.generate_versioned([asked[i] for i in numbers], [seeds[i] for i in numbers], settings)
            except _UNREACHABLE as error:
                log.warning("%s; its prompts are asked again", server.leave_out(error))
                return
            for i, row in zip(numbers, answer, strict=True):
                rows[i] = row

        tasks = [(server, numbers) for server, numbers in zip(servers, shares, strict=True) if numbers]
        if len(tasks) == 1:
            work(*tasks[0])
        elif tasks:
            with ThreadPoolExecutor(len(tasks)) as pool:
                list(pool.map(lambda task: work(*task), tasks))

    def update_weights(self, model: Any, version: int = 0) -> None:
        """Takes a copy of a model's weights; each server gets it before it writes its next completions."""
        if self._weights == (found := fingerprint(model, version)) and not self._forgotten:
            return
        parts = list(_parts(model)) if self.pushes else []
        if not self.pushes and is_sharded(model):
            for _ in named_weights(model, untied=True):
                """A weight is put together by all ranks; the first alone keeps it."""
        with self._lock:
            self._weights, self._forgotten, self.version = found, False, version
            self._spec_of = functools.partial(EngineSpec.of, model, dtype=computing_dtype(model))
            self._parts = parts
            for server in self.servers:
                server.current = False
        if self.pushes and not is_sharded(model) and not all(server.checked for server in self.servers):
            self._bring_back()
            for server in self.servers:
                self._check(server, model)

    def _check(self, server: Server, model: Any) -> None:
        """Compares a server's log-probabilities with the model's, once, while both have the same weights."""
        if server.checked or not server.current:
            return
        try:
            check_engine(model, server)
            server.checked = True
        except _UNREACHABLE as error:
            log.warning("%s", server.leave_out(error))

    def _bring_back(self) -> bool:
        """Sends the latest weights to the servers that lack them and that answer."""
        expects_weights = False
        with self._lock:
            for server in self.servers:
                if server.current:
                    continue
                try:
                    if self.pushes:
                        server.load(self._spec_of, self.version, self._parts, self._run)
                    else:
                        health = server.health()
                        server.run = health.get("run")
                        is_ours = server.run == self._run or not self._is_named
                        server.current = is_ours and health["version"] == self.version
                        server.spec = self._spec_of(health["untied"])
                        expects_weights |= not server.current
                except _UNREACHABLE as error:
                    server.leave_out(error)
        return expects_weights

    def forget_weights(self) -> None:
        self._forgotten = True


def _parts(model: Any) -> Iterator[bytes]:
    """A model's weights as safetensors of bounded size; a tied output layer is sent too."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, weight in named_weights(model, untied=True):
        part[name] = weight.to("cpu", copy=True).contiguous()
        size += weight.numel() * weight.element_size()
        if size >= _PART:
            yield safetensors.torch.save(part)
            part, size = {}, 0
    yield safetensors.torch.save(part)
