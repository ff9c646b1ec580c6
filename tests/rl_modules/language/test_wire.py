"""Lies of a server, and hostile requests to one: each is answered in a sentence, and none is used."""

import http.client
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_modules.common.errors import UsageError
from rl_modules.language import server_token, serving
from rl_modules.language.sampling.remote import Server, ServerSampler
from tests.rl_modules.language.fake_vllm_server import TOKEN, running_server
from tests.rl_modules.language.sampler_cases import EOS, WORDS, settings, tiny_model

# ---------------------------------------------------------------- what a server answers

GENERATE = "/inference/v1/generate"
JSON_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def row(
    tokens: Any = (5,) * 8, log_prob: Any = -0.5, kept: Any = None, run: str = "us:3", **lies: Any
) -> dict[str, Any]:
    """An answer of vLLM's about one completion, with lies."""
    places = [{"token_id": token, "logprob": log_prob, "top_logprobs": []} for token in tokens]
    choice = {"token_ids": list(tokens), "logprobs": {"content": places}, "sampling_mask": kept or [[3, 5]] * 8}
    return {"choices": [{**choice, "weight_versions": [{"version": run, "start": 0, "end": 8}], **lies}]}


def answer(body: Any, head: str = JSON_HEAD, length: int | None = None) -> bytes:
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


DEEP = "[" * 200_000
ENDLESS = object()  # bytes without end, one at a time
LIES: dict[str, tuple[str, Any]] = {
    "an id of no word": (GENERATE, row([WORDS] * 8)),
    "a negative id": (GENERATE, row([-1] * 8)),
    "a huge id": (GENERATE, row([2**70] * 8)),
    "an id with a fraction": (GENERATE, row([5.5] * 8)),
    "an id that is true": (GENERATE, row([True] * 8)),
    "an id that is a text": (GENERATE, row(["5"] * 8)),
    "ids in a text": (GENERATE, row(token_ids="55555555")),
    "lists of ids": (GENERATE, row([[5]] * 8)),
    "no ids": (GENERATE, row([])),
    "more ids than asked for": (GENERATE, row([5] * 9, kept=[[5]] * 9)),
    "fewer ids without an end": (GENERATE, row([5] * 7, kept=[[5]] * 7)),
    "ids after the end": (GENERATE, row([5, EOS, *[5] * 6])),
    "kept tokens without the drawn one": (GENERATE, row(kept=[[3, 5]] * 7 + [[3]])),
    "kept tokens of fewer places": (GENERATE, row(kept=[[5]] * 7)),
    "a kept token that the model lacks": (GENERATE, row(kept=[[5, 10**6]] * 8)),
    "kept tokens that are no list": (GENERATE, row(kept=[5] * 8)),
    "log-probabilities above 0": (GENERATE, row(log_prob=0.5)),
    "log-probabilities of NaN": (GENERATE, row(log_prob=float("nan"))),
    "log-probabilities of -Infinity": (GENERATE, row(log_prob=float("-inf"))),
    "log-probabilities of -1e999": (GENERATE, json.dumps(row()).replace("-0.5", "-1e999")),
    "log-probabilities of null": (GENERATE, row(log_prob=None)),
    "texts as log-probabilities": (GENERATE, row(log_prob="-0.5")),
    "log-probabilities that are true": (GENERATE, row(log_prob=False)),
    "log-probabilities of other tokens": (GENERATE, row(logprobs=row([6] * 8)["choices"][0]["logprobs"])),
    "fewer log-probabilities": (GENERATE, row(logprobs=row([5] * 7)["choices"][0]["logprobs"])),
    "a row without log-probabilities": (GENERATE, row(logprobs=None)),
    "no versions": (GENERATE, row(weight_versions=[])),
    "versions of null": (GENERATE, row(weight_versions=None)),
    "a later version": (GENERATE, row(run="us:4")),
    "a negative version": (GENERATE, row(run="us:-1")),
    "a version without a step": (GENERATE, row(run="us:")),
    "a version that is a number": (GENERATE, row(weight_versions=[{"version": 3}])),
    "no choices": (GENERATE, {"choices": []}),
    "choices that are a text": (GENERATE, {"choices": "hello"}),
    "a list": (GENERATE, []),
    "a number": (GENERATE, 5),
    "deep JSON": (GENERATE, DEEP),
    "half of JSON": (GENERATE, '{"choices": ['),
    "a number of 10,000 digits": (GENERATE, '{"choices": ' + "1" * 10_000 + "}"),
    "bytes that are not UTF-8": (GENERATE, b'{"choices": "\xff"}'),
    "an empty body": (GENERATE, ""),
    "megabytes": (GENERATE, json.dumps(row()) + " " * 2**20),
    "a body that ends early": (GENERATE, answer("{}", length=500)),
    "a body without an end": (GENERATE, ENDLESS),
    "HTML": (GENERATE, answer("<p>", "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n")),
    "a redirect": (GENERATE, answer("{}", JSON_HEAD.replace("200 OK", "302 Found") + "Location: http://a/\r\n")),
    "a status of its own": (GENERATE, answer({"error": {"message": "no"}}, JSON_HEAD.replace("200 OK", "799 No"))),
    "an error that is no object": (GENERATE, answer({"error": 5}, JSON_HEAD.replace("200 OK", "400 No"))),
    "an error without the key": (GENERATE, answer({}, JSON_HEAD.replace("200 OK", "500 No"))),
    "an error that paints": (GENERATE, answer({"error": {"message": "\x1b[31mno"}}, JSON_HEAD.replace("200", "400"))),
    "no HTTP": (GENERATE, b"SSH-2.0-OpenSSH\r\n"),
    "nothing": (GENERATE, b""),
    "weights that are refused": ("/weights", answer({"error": {"message": "no"}}, JSON_HEAD.replace("200", "400"))),
    "weights in deep JSON": ("/weights", DEEP),
    "weights of megabytes": ("/weights", " " * 2**20),
}


@contextmanager
def answering(path: str | None = None, lie: Any = b"") -> Iterator[str]:
    """A server that tells the truth but at one path."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as file:
                asked = file.readline().split()[1].decode().partition("?")[0]
                length = 0
                while (line := file.readline().strip()) != b"":
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                    if name.lower() == b"expect":
                        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                file.read(length)
                try:
                    if asked != path:
                        connection.sendall(answer(row() if asked == GENERATE else {}))
                    elif lie is ENDLESS:
                        connection.sendall(f"{JSON_HEAD}Content-Length: 60000\r\n\r\n".encode())
                        while True:
                            connection.sendall(b" ")
                            time.sleep(0.01)
                    else:
                        connection.sendall(lie if isinstance(lie, bytes) and lie[:1] != b"{" else answer(lie))
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def sampled(address: str) -> Any:
    sampler = ServerSampler([address], "cpu", timeout_s=0.5, retries=0, retry_wait_s=0, run="us")
    sampler.servers[0].checked = True  # the rows are made up: no model has their log-probabilities
    sampler.update_weights(tiny_model(), 3)
    return sampler.sample([[5, 6, 7]], 2, range(2), settings(top_k=4, return_sampling_mask=True))


def test_the_truth_is_taken() -> None:
    with answering() as address:
        written = sampled(address)
    assert written.tokens.tolist() == [[5] * 8] * 2
    assert written.version.tolist() == [3, 3]


@pytest.mark.parametrize("name", list(LIES))
def test_a_lie_of_a_server_is_refused_in_a_sentence(name: str) -> None:
    path, lie = LIES[name]
    with answering(path, lie) as address, pytest.raises(UsageError) as error:
        sampled(address)
    text = str(error.value)
    assert address in text
    assert text.isprintable() and len(text) < 800


# ---------------------------------------------------------------- what a server is asked

HOST, RIGHT = "Host: 127.0.0.1:8000", f"Authorization: Bearer {TOKEN}"
WEIGHTS = "/weights?version=a:1"


def request(path: str, *headers: str, body: str = "", method: str = "POST", length: Any = None) -> bytes:
    head = [f"{method} {path} HTTP/1.1", HOST, *headers]
    if method == "POST":
        head.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*head, "", body]).encode()


HOSTILE: dict[str, tuple[int, bytes]] = {
    "weights without a token": (401, request(WEIGHTS, body="x")),
    "completions without a token": (401, request(GENERATE, body="{}")),
    "the version without a token": (401, request("/weights", method="GET")),
    "health without a token": (401, request("/health", method="GET")),
    "another token": (401, request("/weights", f"{RIGHT}x", method="GET")),
    "the beginning of the token": (401, request("/weights", RIGHT[:-1], method="GET")),
    "an empty token": (401, request("/weights", "Authorization: Bearer ", method="GET")),
    "the token by another scheme": (401, request("/weights", f"Authorization: Basic {TOKEN}", method="GET")),
    "the token in the path": (401, request(f"/weights?token={TOKEN}", method="GET")),
    "a token that is not ASCII": (401, request("/weights", "Authorization: Bearer é", method="GET")),
    "a call of vLLM's workers": (404, request("/collective_rpc", RIGHT, body="{}")),
    "a pause": (404, request("/pause", RIGHT)),
    "adapters from a folder": (404, request("/v1/load_lora_adapter", RIGHT, body="{}")),
    "another path": (404, request("/etc/passwd", RIGHT, method="GET")),
    "a path above": (404, request("/weights/../health", RIGHT, method="GET")),
    "a page of documents": (404, request("/docs", RIGHT, method="GET")),
    "no length": (411, request(GENERATE, RIGHT, body="{}").replace(b"Content-Length: 2", b"X: 2")),
    "a length in words": (411, request(GENERATE, RIGHT, body="{}", length="two")),
    "a negative length": (411, request(GENERATE, RIGHT, body="{}", length=-1)),
    "chunks": (411, request(GENERATE, RIGHT, "Transfer-Encoding: chunked", body="{}")),
    "a gigabyte of a prompt": (413, request(GENERATE, RIGHT, length=2**30)),
    "weights that no disk holds": (413, request(WEIGHTS, RIGHT, length=10**14)),
    "weights without a version": (400, request("/weights", RIGHT, body="x")),
    "a version that is no number": (400, request("/weights?version=a:x", RIGHT, body="x")),
    "a version with a path": (400, request("/weights?version=../a:1", RIGHT, body="x")),
    "weights that end early": (400, request(WEIGHTS, RIGHT, body="x", length=99)),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_request_is_refused(name: str) -> None:
    status, data = HOSTILE[name]
    with running_server(tiny_model()) as (server, address):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(connection)
            response.begin()
            sentence = json.loads(response.read())["error"]["message"]
        assert response.status == status and sentence and sentence.isprintable()
        assert (server.version, server.calls) == ("default", [])
        assert not Server(address, 5.0).has_latest()


def test_weights_arrive_one_run_at_a_time_and_leave_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, model = threading.Event(), threading.Event(), tiny_model()

    async def waits(**given: Any) -> None:
        begun.set()
        go_on.wait(10)

    with running_server(model) as (server, address):
        first, second = (ServerSampler([address], "cpu", retries=0, retry_wait_s=0) for _ in range(2))
        pause = server.pause_generation
        monkeypatch.setattr(server, "pause_generation", waits)
        thread = threading.Thread(target=first.update_weights, args=(model, 1))
        thread.start()
        assert begun.wait(10)
        with pytest.raises(UsageError, match="503: the server is receiving other weights; give each run a server"):
            second.update_weights(model, 1)
        go_on.set()
        thread.join()
        monkeypatch.setattr(server, "pause_generation", pause)
        second.update_weights(model, 2)
        assert server.version.endswith(":2") and server.calls == ["resume", "pause wait", "resume"]
        assert not server.gate.file.exists()


def test_a_server_ends_that_could_not_load_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has neither the old ones nor the new ones."""
    ended: list[int] = []
    monkeypatch.setattr(serving.os, "kill", lambda process, signal: ended.append(process))
    with (
        running_server(tiny_model(tied=False)) as (_, address),
        pytest.raises(UsageError, match=r"answers after 0 retries \(.*the weights can't be loaded .*; the server ends"),
    ):
        ServerSampler([address], "cpu", retries=0, retry_wait_s=0).update_weights(tiny_model(tied=True))
    assert ended == [os.getpid()]


# ---------------------------------------------------------------- tokens


def test_a_token_file_is_for_its_owner_and_a_restart_s_token_is_read_again(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(server_token.TOKEN_VARIABLE)
    path = tmp_path / "new" / "token"
    server_token.write_token(path, TOKEN)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    monkeypatch.setenv(server_token.TOKEN_VARIABLE, TOKEN)  # of the server
    with running_server(tiny_model()) as (_, address):
        monkeypatch.delenv(server_token.TOKEN_VARIABLE)
        server = Server(address, 5.0, str(path))
        assert not server.has_latest()
        server_token.write_token(path, server_token.make_token())
        with pytest.raises(ConnectionError, match="lacks this server's token; give the file that `rl serve` names"):
            server.has_latest()
        server_token.write_token(path, TOKEN)
        server.has_latest()
    assert [file.name for file in path.parent.iterdir()] == ["token"]


def test_tokens_are_new_and_of_the_variable(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(server_token.TOKEN_VARIABLE)
    assert server_token.make_token() != server_token.make_token()
    monkeypatch.setenv(server_token.TOKEN_VARIABLE, "of-the-environment")
    assert server_token.make_token() == server_token.read_token(None, 8000) == "of-the-environment"
    (tmp_path / "token").write_text("of-the-file-it-is\n")
    assert server_token.read_token(str(tmp_path / "token"), 8000) == "of-the-file-it-is"


BAD_TOKENS: dict[str, Callable[[Any, Any], Any]] = {
    "token_file=.* can't be read": lambda folder, patch: server_token.read_token(str(folder / "none"), 8000),
    "token_file=.* holds no token": lambda folder, patch: server_token.read_token(os.devnull, 8000),
    "RL_SERVE_TOKEN holds no token": lambda folder, patch: (patch.setenv(server_token.TOKEN_VARIABLE, "a b"),
                                                            server_token.make_token()),
    "token_file=.* can't be written": lambda folder, patch: server_token.write_token(folder, TOKEN),
}  # fmt: skip


@pytest.mark.parametrize("sentence", list(BAD_TOKENS))
def test_a_bad_token_is_refused(sentence: str, tmp_path: Any, monkeypatch: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UsageError, match=sentence):
        BAD_TOKENS[sentence](folder, monkeypatch)
    assert list(tmp_path.iterdir()) == [folder]  # nothing half written is left
