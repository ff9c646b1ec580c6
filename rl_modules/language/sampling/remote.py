"""The sampler that writes completions on vLLM's servers (``rl serve``), on this machine or on others."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from safetensors.torch import save_file

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import is_sharded, max_length, text_config
from rl_modules.language.sampling.engine import check_engine
from rl_modules.language.sampling.protocol import Completions, RowListener, Sampler, SamplingSettings
from rl_modules.language.sampling.request import check_request
from rl_modules.language.sampling.rows import Row, completions_of
from rl_modules.language.sampling.vllm import sampling_fields
from rl_modules.language.sampling.weights import Fingerprint, fingerprint, named_weights
from rl_modules.language.server_token import HOW_TO_GIVE, read_token

log = logging.getLogger(__name__)

#: What a server that is gone, starting, or without the run's weights is left out for.
UNREACHABLE = (OSError, aiohttp.ClientError, asyncio.TimeoutError)
#: What a wrong answer raises where it is read.
WRONG = (LookupError, TypeError, ValueError, AttributeError)
GENERATE = "/inference/v1/generate"
T = TypeVar("T")


class Server:
    """The client's view of one server. What it answers is data, and is checked before it is used."""

    def __init__(self, address: str, timeout_s: float, token_file: str | None = None) -> None:
        self.address, self.timeout_s, self.token_file = address, timeout_s, token_file
        host, _, port = str(address).removeprefix("http://").rstrip("/").rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535 or set(host) & set("/@?# "):
            raise UsageError(f"addresses: {address!r} must be host:port, such as 127.0.0.1:8000")
        self.url, self.port = f"http://{host}:{port}", int(port)
        #: Whether it has the latest weights, whether it has been checked with some, and why it was left out last.
        self.current, self.checked, self.failure = False, False, ""
        #: The run whose weights it gets, the optimizer step of the latest, and the model's vocabulary and longest text.
        self.run, self.version, self.words, self.longest = "", 0, 0, 0

    def ask(self, path: str, body: Any = None, most: int = 2**16) -> Any:
        """One request, of JSON or a file; the answer has at most so many bytes."""
        return self.ask_all(path, [body], [most])[0]

    def ask_all(self, path: str, bodies: Sequence[Any], most: Sequence[int]) -> list[Any]:
        """Requests that the server answers together."""

        async def all_at_once() -> list[Any]:
            connections, wait = aiohttp.TCPConnector(limit=1024), aiohttp.ClientTimeout(total=self.timeout_s)
            async with aiohttp.ClientSession(connector=connections, timeout=wait) as session:
                asked = [self._ask(session, path, body, n) for body, n in zip(bodies, most, strict=True)]
                return list(await asyncio.gather(*asked))

        return run(all_at_once())

    async def _ask(self, session: aiohttp.ClientSession, path: str, body: Any, most: int) -> Any:
        headers = {"Authorization": f"Bearer {read_token(self.token_file, self.port)}"}
        given: dict[str, Any] = {"data": body, "expect100": True}
        if body is None or isinstance(body, dict):
            given = {"json": body}
        asked = "GET" if body is None else "POST", self.url + path
        async with session.request(*asked, headers=headers, allow_redirects=False, **given) as response:
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > most:
                    raise self.wrong(path, f"more than the {most} bytes that were asked for")
        try:
            answer = json.loads(content)
            if response.status == 200:
                return answer
            reason = f"{response.status}: {printable(answer['error']['message'])}"
        except (*WRONG, RecursionError) as error:
            raise self.wrong(path, f"status {response.status} and {printable(error)}") from error
        if response.status == 401:  # or it has started again, with a new token
            raise ConnectionError(f"{reason}; {HOW_TO_GIVE}")
        raise (ConnectionError if response.status >= 500 else UsageError)(f"{self.address} refuses {path} ({reason})")

    def wrong(self, path: str, what: Any) -> UsageError:
        """Returns the error about an answer that no server of this version gives."""
        return UsageError(
            f"{self.address} answers {path} wrongly: {printable(what)}; is it `rl serve` of this version?"
        )

    def leave_out(self, error: BaseException) -> None:
        """Does not ask the server until it has got the weights again."""
        failure = printable(str(error) or type(error).__name__)
        if failure != self.failure:  # not once a retry
            log.warning("%s does not answer (%s)", self.address, failure)
        self.current, self.failure = False, failure

    def has_latest(self) -> bool:
        """Whether another rank has given it this run's latest weights."""
        answer = self.ask("/weights")
        if not isinstance(answer, dict) or not isinstance(found := answer.get("version"), str):
            raise self.wrong("/weights", "no version")
        return found == f"{self.run}:{self.version}"

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings) -> list[Row]:
        """One completion per prompt; the interface of an engine, for its check."""
        return [row for row, _ in self.generate_versioned(prompts, seeds, settings)]

    def generate_versioned(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings
    ) -> list[tuple[Row, int]]:
        """One completion per prompt, each with the version of the weights that wrote it."""
        limits = [min(settings.max_completion_length, self.longest - len(prompt)) for prompt in prompts]
        # A server on CUDA returns the tokens that filters kept, one on a CPU log-probabilities, if they are few enough.
        kept = min(settings.top_k or self.words, self.words) if settings.return_sampling_mask else 0
        options = {"top_k": kept, "logprobs": kept if kept <= 1024 else 0} if kept else {}
        bodies = [
            {"token_ids": list(prompt), "sampling_params": sampling_fields(settings, seed, limit, options)}
            for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
        ]
        most = [2**16 + limit * (400 + 100 * kept) for limit in limits]
        found = []
        for answer, limit in zip(self.ask_all(GENERATE, bodies, most), limits, strict=True):
            try:
                row, versions = row_of(answer, limit, settings, self.words)
                if any(version.rpartition(":")[0] != self.run for version in versions):
                    raise ConnectionError("it has other weights than this run's")
                if not 0 <= (version := min(int(version.rpartition(":")[2]) for version in versions)) <= self.version:
                    raise ValueError(f"weights of step {version}, after {self.version} steps")
            except WRONG as error:
                raise self.wrong(GENERATE, error) from error
            found.append((row if settings.stop is None else settings.stop.cut(row), version))
        return found


def row_of(answer: Any, limit: int, settings: SamplingSettings, words: int) -> tuple[Row, list[str]]:
    """Returns the completion in an answer of vLLM's, and the versions of the weights that wrote it; one of
    :data:`WRONG` says what no sampler writes.
    """
    choice = answer["choices"][0]
    tokens, places = ids_of(choice["token_ids"], words), choice["logprobs"]["content"]
    n, stops, kept = len(tokens), set(settings.eos_token_id), None
    if not 1 <= n <= limit or (n < limit and tokens[-1] not in stops) or stops.intersection(tokens[:-1]):
        raise ValueError(f"{n} tokens, where 1 to {limit} should be, and fewer only before an EOS token")
    log_prob = [log_prob_of(place["logprob"]) for place in places]
    if [place["token_id"] for place in places] != tokens:
        raise ValueError("log-probabilities of other tokens")
    if settings.return_sampling_mask:
        tops = [place["top_logprobs"] for place in places]
        kept = choice["sampling_mask"]
        if kept is None and len(tops[0]) > 1:  # -inf comes as -9999
            kept = [[x["token_id"] for x in top if log_prob_of(x["logprob"]) > -9999] for top in tops]
    if kept is not None and [token in ids_of(ids, words) for token, ids in zip(tokens, kept, strict=True)].count(False):
        raise ValueError("kept tokens that lack the drawn one")
    if settings.temperature == 0:
        log_prob = [0.0] * n  # each choice was certain
    return Row(tokens, log_prob, tokens[-1] in stops, kept), [span["version"] for span in choice["weight_versions"]]


def ids_of(found: Any, words: int) -> list[int]:
    """Returns token ids of an answer, which the model must have."""
    if not isinstance(found, list) or not all(type(token) is int and 0 <= token < words for token in found):
        raise ValueError(f"ids that are none of the {words} tokens")
    return found


def log_prob_of(found: Any) -> float:
    """Returns a log-probability of an answer; it may be above 0 by rounding."""
    if type(found) not in (int, float) or not (math.isfinite(found) and found <= 1e-3):
        raise ValueError(f"the log-probability {found!r:.20}")
    return float(found)


def printable(text: Any) -> str:
    """Returns a text of the other side as it may be shown: short, and without control characters."""
    return "".join(character if character.isprintable() else " " for character in str(text)[:300])


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine from anywhere; a notebook's thread has a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


class ServerSampler(Sampler):
    """A :class:`~rl_modules.language.sampling.Sampler` on servers, which share the prompts.

    A server that does not answer is left out until it takes the weights again; the others take its prompts. Completions
    carry the version of the weights that wrote them.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        device: Any,
        timeout_s: float = 600.0,
        retries: int = 60,
        retry_wait_s: float = 5.0,
        pushes: bool = True,
        run: str | None = None,
        token_file: str | None = None,
    ) -> None:
        if isinstance(addresses, str) or not addresses:
            raise UsageError(f"addresses={addresses!r} must be a list of host:port; start a server with `rl serve`")
        self.servers = [Server(address, timeout_s, token_file) for address in addresses]
        self.device, self.retries, self.retry_wait_s, self.pushes = device, retries, retry_wait_s, pushes
        self._run = run or uuid.uuid4().hex
        self._weights: Fingerprint | None = None
        #: The latest weights, a file without a name.
        self._file: Any = None
        self._lock = threading.Lock()

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
        stops, most, first = list(settings.eos_token_id), settings.max_completion_length, self.servers[0]
        check_request(prompts, num_generations, most, stops, seeds, first.longest, first.words)
        asked = [prompt for prompt in prompts for _ in range(num_generations)]
        rows: dict[int, tuple[Row, int]] = {}

        def ask(server: Server, numbers: list[int]) -> None:
            try:
                own = [asked[i] for i in numbers], [seeds[i] for i in numbers]
                rows.update(zip(numbers, server.generate_versioned(*own, settings), strict=True))
            except UNREACHABLE as error:
                server.leave_out(error)

        for _ in self._attempts():
            servers = [server for server in self.servers if server.current]
            missing = [number for number in range(len(asked)) if number not in rows]
            if len(servers) == 1:
                ask(servers[0], missing)
            else:
                with ThreadPoolExecutor(len(servers)) as pool:  # a group is written by one server
                    shares: list[list[int]] = [[] for _ in servers]
                    for i in missing:
                        shares[i // num_generations % len(servers)].append(i)
                    list(pool.map(ask, servers, shares))
            if len(rows) == len(asked):
                break
        found = [rows[number] for number in range(len(asked))]
        for number, (row, _) in enumerate(found if on_ended is not None else ()):
            on_ended(number, row.tokens, row.finished)  # type: ignore[misc]
        versions = [version for _, version in found]
        return completions_of([row for row, _ in found], settings.pad_token_id, self.device, versions)

    def _attempts(self) -> Iterator[None]:
        """Yields whenever a server has the latest weights.

        Raises:
            UsageError: none has, or they all fail, ``retries`` times.
        """
        attempts, patience_ends_s = 0, time.monotonic() + self.servers[0].timeout_s
        while attempts <= self.retries:
            expects_weights = self._bring_back()
            if any(server.current for server in self.servers):
                yield
            # A server that another rank is giving the weights to has not failed.
            attempts += not (expects_weights and time.monotonic() < patience_ends_s)
            time.sleep(self.retry_wait_s)
        addresses = ", ".join(server.address for server in self.servers)
        failures = "; ".join(dict.fromkeys(server.failure for server in self.servers if server.failure))
        raise UsageError(
            f"addresses: none of {addresses} answers after {self.retries} retries ({failures}); start `rl serve` "
            "there, then add --resume"
        )

    def update_weights(self, model: Any, version: int = 0) -> None:
        """Takes a copy of a model's weights; each server gets it before it writes its next completions."""
        if self._weights == (found := fingerprint(model, version)):
            return
        file = _file_of(model) if self.pushes else None
        if not self.pushes and is_sharded(model):
            for _ in named_weights(model):
                """A weight is put together by all ranks; the first alone keeps it."""
        with self._lock:
            self.close()
            self._weights, self._file = found, file
            for server in self.servers:
                server.current, server.run, server.version = False, self._run, version
                server.words, server.longest = text_config(model.config).vocab_size, max_length(model.config)
        if not self.pushes or is_sharded(model) or all(server.checked for server in self.servers):
            return
        for _ in self._attempts():
            for server in [server for server in self.servers if server.current and not server.checked]:
                try:
                    check_engine(model, server, "vllm_server")
                    server.checked = True
                except UNREACHABLE as error:
                    server.leave_out(error)
            return

    def _bring_back(self) -> bool:
        """Sends the latest weights to the servers that lack them and that answer; whether some wait for another
        rank's.
        """
        expects_weights = False
        with self._lock:
            for server in self.servers:
                if server.current:
                    continue
                try:
                    if self.pushes:
                        self._file.seek(0)
                        with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
                            server.ask(f"/weights?version={server.run}:{server.version}", file)
                    elif not server.has_latest():
                        expects_weights = True
                        continue
                    server.current, server.failure = True, ""
                except UNREACHABLE as error:
                    server.leave_out(error)
        return expects_weights

    def forget_weights(self) -> None:
        if self._weights is not None:
            self._weights = (*self._weights[:2], -1)  # which no sum of counters is

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _file_of(model: Any) -> Any:
    """A model's weights as a file of safetensors that goes with the process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights")
        save_file({name: weight.to("cpu", copy=True).contiguous() for name, weight in named_weights(model)}, path)
        return path.open("rb")
