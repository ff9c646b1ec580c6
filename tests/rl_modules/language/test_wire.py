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
from rl_modules.language.sampling import server as server_module
from rl_modules.language.sampling import wire
from rl_modules.language.sampling.remote import Server, ServerSampler
from rl_modules.language.sampling.server import PROTOCOL
from tests.rl_modules.language.sampler_cases import EOS, TOKEN, WORDS, running_server, settings, tiny_model

# ---------------------------------------------------------------- what a server answers

TRUE_ROW = {"tokens": [5] * 8, "log_prob": [-0.5] * 8, "finished": False, "kept": [[3, 5]] * 8}
TRUTH: dict[str, Any] = {
    "/health": {"protocol": PROTOCOL, "model": None, "version": 3, "run": None, "untied": False},
    "/model": {}, "/weights": {}, "/generate": {"rows": [TRUE_ROW, TRUE_ROW], "version": 3},
}  # fmt: skip
JSON_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def answer(body: bytes | str, head: str = JSON_HEAD, length: int | None = None) -> bytes:
    data = body if isinstance(body, bytes) else body.encode()
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


def health(**lies: Any) -> bytes:
    return answer(json.dumps({**TRUTH["/health"], **lies}))


def rows(*found: dict[str, Any], version: Any = 3) -> bytes:
    return answer(json.dumps({"rows": list(found), "version": version}))


def row(**lies: Any) -> bytes:
    return rows(TRUE_ROW, {**TRUE_ROW, **lies})


def without(name: str) -> bytes:
    return rows(TRUE_ROW, {key: value for key, value in TRUE_ROW.items() if key != name})


DEEP = "[" * 200_000
ENDLESS = object()  # bytes without end, one at a time
LIES: dict[str, tuple[str, Any]] = {
    "an id of no word": ("/generate", row(tokens=[WORDS] * 8)),
    "a negative id": ("/generate", row(tokens=[-1] * 8)),
    "a huge id": ("/generate", row(tokens=[2**70] * 8)),
    "an id with a fraction": ("/generate", row(tokens=[5.5] * 8)),
    "an id that is true": ("/generate", row(tokens=[True] * 8)),
    "an id that is a text": ("/generate", row(tokens=["5"] * 8)),
    "ids in a text": ("/generate", row(tokens="55555555")),
    "lists of ids": ("/generate", row(tokens=[[5]] * 8)),
    "no ids": ("/generate", row(tokens=[], log_prob=[])),
    "more ids than asked for": ("/generate", row(tokens=[5] * 9, log_prob=[-0.5] * 9)),
    "fewer ids without an end": ("/generate", row(tokens=[5] * 7, log_prob=[-0.5] * 7)),
    "ids after the end": ("/generate", row(tokens=[5, EOS, *[5] * 6])),
    "finished without an end": ("/generate", row(finished=True)),
    "an end that is not finished": ("/generate", row(tokens=[5] * 7 + [EOS])),
    "kept tokens without the drawn one": ("/generate", row(kept=[[3, 5]] * 7 + [[3]])),
    "kept tokens of fewer places": ("/generate", row(kept=[[5]] * 7)),
    "a kept token that the model lacks": ("/generate", row(kept=[[5, 10**6]] * 8)),
    "kept tokens that are no list": ("/generate", row(kept=[5] * 8)),
    "finished that is a number": ("/generate", row(finished=0)),
    "log-probabilities above 0": ("/generate", row(log_prob=[0.5] * 8)),
    "log-probabilities of NaN": ("/generate", row(log_prob=[float("nan")] * 8)),
    "log-probabilities of -Infinity": ("/generate", row(log_prob=[float("-inf")] * 8)),
    "log-probabilities of -1e999": ("/generate", answer(json.dumps(TRUTH["/generate"]).replace("-0.5", "-1e999"))),
    "log-probabilities of null": ("/generate", row(log_prob=[None] * 8)),
    "texts as log-probabilities": ("/generate", row(log_prob=["-0.5"] * 8)),
    "fewer log-probabilities": ("/generate", row(log_prob=[-0.5] * 7)),
    "more log-probabilities": ("/generate", row(log_prob=[-0.5] * 9)),
    "a row without log-probabilities": ("/generate", without("log_prob")),
    "a row with another column": ("/generate", row(text="hello")),
    "a row that is a list": ("/generate", answer('{"rows": [[], []], "version": 3}')),
    "rows that are an object": ("/generate", answer('{"rows": {}, "version": 3}')),
    "fewer rows": ("/generate", rows(TRUE_ROW)),
    "more rows": ("/generate", rows(TRUE_ROW, TRUE_ROW, TRUE_ROW)),
    "no version": ("/generate", answer(json.dumps({"rows": [TRUE_ROW, TRUE_ROW]}))),
    "a later version": ("/generate", rows(TRUE_ROW, TRUE_ROW, version=4)),
    "an older version": ("/generate", rows(TRUE_ROW, TRUE_ROW, version=2)),
    "a version of null": ("/generate", rows(TRUE_ROW, TRUE_ROW, version=None)),
    "a version that is a text": ("/generate", rows(TRUE_ROW, TRUE_ROW, version="3")),
    "deep JSON": ("/generate", answer(DEEP)),
    "half of JSON": ("/generate", answer('{"rows": [')),
    "a number of 10,000 digits": ("/generate", answer('{"rows": [], "version": ' + "1" * 10_000 + "}")),
    "bytes that are not UTF-8": ("/generate", answer(b'{"rows": "\xff"}')),
    "an empty body": ("/generate", answer("")),
    "a body that ends early": ("/generate", answer("{}", length=500)),
    "a body of a terabyte": ("/generate", answer("{}", length=2**40)),
    "a body without a length": ("/generate", (JSON_HEAD + "\r\n{}").encode()),
    "chunks": ("/generate", (JSON_HEAD + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n").encode()),
    "a body without an end": ("/generate", ENDLESS),
    "HTML": ("/generate", answer("<p>", "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n")),
    "a redirect": ("/generate", answer("{}", JSON_HEAD.replace("200 OK", "302 Found") + "Location: http://a/\r\n")),
    "a status of its own": ("/generate", answer('{"error": "no"}', JSON_HEAD.replace("200 OK", "799 No"))),
    "an error that is no text": ("/generate", answer('{"error": 5}', JSON_HEAD.replace("200 OK", "400 No"))),
    "an error without the key": ("/generate", answer("{}", JSON_HEAD.replace("200 OK", "500 No"))),
    "no HTTP": ("/generate", b"SSH-2.0-OpenSSH\r\n"),
    "nothing": ("/generate", b""),
    "health that is a list": ("/health", answer("[]")),
    "health without its keys": ("/health", answer("{}")),
    "another protocol": ("/health", health(protocol=PROTOCOL + 1)),
    "untied that is a text": ("/health", health(untied="no")),
    "a model that is a text": ("/health", health(model="gpt")),
    "health of a gigabyte": ("/health", answer("{}", length=2**30)),
    "health in deep JSON": ("/health", answer(DEEP)),
    "a model with an answer": ("/model", answer('{"ok": true}')),
    "weights with an answer": ("/weights", answer("[1]")),
    "weights that are refused": ("/weights", answer('{"error": "\\u001b[31mno"}', JSON_HEAD.replace("200", "400"))),
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
                file.read(length)
                try:
                    if asked != path:
                        connection.sendall(answer(json.dumps(TRUTH[asked])))
                    elif lie is ENDLESS:
                        connection.sendall(f"{JSON_HEAD}Content-Length: 60000\r\n\r\n".encode())
                        while True:
                            connection.sendall(b" ")
                            time.sleep(0.01)
                    else:
                        connection.sendall(lie)
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def sampled(address: str) -> Any:
    sampler = ServerSampler([address], "cpu", timeout_s=0.5, retries=0, retry_wait_s=0)
    sampler.servers[0].checked = True  # the rows are made up: no model has their log-probabilities
    sampler.update_weights(tiny_model(), 3)
    return sampler.sample([[5, 6, 7]], 2, range(2), settings())


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
    assert text.isprintable() and len(text) < 600


# ---------------------------------------------------------------- what a server is asked

HOST, RIGHT = "Host: 127.0.0.1:8000", f"Authorization: Bearer {TOKEN}"
GENERATE = {"prompts": [[5]], "seeds": [0], "settings": {**vars(settings()), "eos_token_id": [EOS]}, "run": "a"}


def request(
    path: str, *headers: str, body: bytes | str = b"", method: str = "POST", length: Any = None, kind: str = wire.JSON
) -> bytes:
    data = body if isinstance(body, bytes) else body.encode()
    head = [f"{method} {path} HTTP/1.1", *headers]
    if method == "POST":
        head += [f"Content-Type: {kind}", f"Content-Length: {len(data) if length is None else length}"]
    return "\r\n".join([*head, "", ""]).encode() + data


def ours(path: str, **other: Any) -> bytes:
    return request(path, HOST, RIGHT, **other)


def changed(**lies: Any) -> bytes:
    return ours("/generate", body=json.dumps({**GENERATE, **lies}))


WEIGHTS = "/weights?version=1&run=a&first=1&last=1"
HOSTILE: dict[str, tuple[int, bytes]] = {
    "weights without a token": (401, request(WEIGHTS, HOST, body="x", kind=wire.BYTES)),
    "a model without a token": (401, request("/model", HOST, body="{}")),
    "completions without a token": (401, request("/generate", HOST, body=json.dumps(GENERATE))),
    "health without a token": (401, request("/health", HOST, method="GET")),
    "another token": (401, request("/health", HOST, f"{RIGHT}x", method="GET")),
    "the beginning of the token": (401, request("/health", HOST, RIGHT[:-1], method="GET")),
    "an empty token": (401, request("/health", HOST, "Authorization: Bearer ", method="GET")),
    "the token by another scheme": (401, request("/health", HOST, f"Authorization: Basic {TOKEN}", method="GET")),
    "the token in the path": (401, request(f"/health?token={TOKEN}", HOST, method="GET")),
    "a token that is not ASCII": (401, request("/health", HOST, "Authorization: Bearer é", method="GET")),
    "another host (DNS rebinding)": (403, request("/health", "Host: evil.example:8000", RIGHT, method="GET")),
    "a host that begins as ours": (403, request("/health", "Host: 127.0.0.1.evil.example", RIGHT, method="GET")),
    "no host": (403, request("/health", RIGHT, method="GET")),
    "a web page": (403, ours("/health", method="GET").replace(b"Host", b"Origin: http://127.0.0.1\r\nHost")),
    "a page from a file": (403, ours("/health", method="GET").replace(b"Host", b"Origin: null\r\nHost")),
    "a form's content type": (415, ours("/generate", body="{}", kind="application/x-www-form-urlencoded")),
    "text": (415, ours("/generate", body=json.dumps(GENERATE), kind="text/plain")),
    "weights as JSON": (415, ours(WEIGHTS, body="{}")),
    "no length": (411, ours("/generate", body="{}").replace(b"Content-Length: 2", b"X: 2")),
    "two lengths": (411, ours("/generate", body="{}").replace(b"Content-L", b"Content-Length: 1\r\nContent-L")),
    "a negative length": (411, ours("/generate", body="{}", length=-1)),
    "a length in words": (411, ours("/generate", body="{}", length="two")),
    "chunks": (411, ours("/generate", body="{}").replace(b"Host", b"Transfer-Encoding: chunked\r\nHost")),
    "a terabyte of prompts": (413, ours("/generate", body="{}", length=2**40)),
    "a gigabyte of a model": (413, ours("/model", body="{}", length=2**30)),
    "no JSON": (400, ours("/generate", body="{")),
    "deep JSON": (400, ours("/generate", body=DEEP)),
    "NaN": (400, ours("/generate", body='{"prompts": NaN}')),
    "a pickle as weights": (400, ours(WEIGHTS, body=b"\x80\x04cos\nsystem\n.", kind=wire.BYTES)),
    "a model of other keys": (400, ours("/model", body='{"auto_map": {}}')),
    "a model of another type": (400, ours("/model", body='{"config": 1, "longest": 1, "words": 1, "untied": true}')),
    "a setting that is not known": (400, changed(settings={**GENERATE["settings"], "code": "1"})),
    "a prompt of text": (400, changed(prompts=["hello"])),
    "a negative id": (400, changed(prompts=[[-1]])),
    "a temperature below 0": (400, changed(settings={**GENERATE["settings"], "temperature": -1})),
    "weights without a version": (404, ours("/weights?run=a", body="x", kind=wire.BYTES)),
    "a version that is no number": (404, ours(WEIGHTS.replace("1", "x", 1), body="x", kind=wire.BYTES)),
    "another path": (404, ours("/etc/passwd", method="GET")),
    "a path above": (404, ours("/../../etc/passwd", method="GET")),
    "DELETE": (405, ours("/health", method="DELETE")),
    "OPTIONS, a browser's question": (405, ours("/weights", method="OPTIONS")),
    "no HTTP": (400, b"\x16\x03\x01 hello there you\r\n\r\n"),
    "a line of 70,000 letters": (414, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"),
    "200 headers": (400, request("/health", *[f"X-{i}: 1" for i in range(200)], method="GET")),
}


def asked(address: str, data: bytes) -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.read()


def no_engine(spec: Any) -> Any:
    raise AssertionError("an engine was started")


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_request_is_refused(name: str) -> None:
    status, data = HOSTILE[name]
    with running_server(no_engine) as (service, address):
        found, body = asked(address, data)
        assert (found // 100, service.engine, service.version, service._parts) == (4, None, None, {})
        sentence = json.loads(body)["error"]
        assert sentence and sentence.isprintable()
        assert found == status or name == "200 headers"  # 431 since Python 3.13
        assert Server(address, 5.0).health()["protocol"] == PROTOCOL


def test_bytes_that_come_slowly_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_S", 0.2)
    monkeypatch.setattr(server_module, "BODY_S", 0.2)
    with running_server(no_engine) as (_, address):
        host, _, port = address.rpartition(":")
        for data, expected in ((ours("/health", method="GET")[:-2], b""), (ours("/model", length=9), b"HTTP/1.1 408")):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(data)
                start_s = time.monotonic()
                assert connection.recv(12) == expected
                assert time.monotonic() - start_s < 2


# ---------------------------------------------------------------- tokens


def test_a_token_file_is_for_its_owner_and_a_restart_s_token_is_read_again(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(wire.TOKEN_VARIABLE)
    path = tmp_path / "new" / "token"
    wire.write_token(path, TOKEN)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with running_server(no_engine) as (_, address):
        server = Server(address, 5.0, str(path))
        assert server.health()["version"] is None
        wire.write_token(path, wire.make_token())
        with pytest.raises(UsageError, match="lacks this server's token; give the file that `rl serve` names"):
            server.health()
        wire.write_token(path, TOKEN)
        server.health()
    assert [file.name for file in path.parent.iterdir()] == ["token"]


def test_a_token_that_is_replaced_while_it_is_read_leaves_the_server_out_for_a_round(monkeypatch: Any) -> None:
    tokens = iter(["of-the-server-before", TOKEN])
    monkeypatch.setattr(wire, "read_token", lambda *where: next(tokens))
    with running_server(no_engine) as (_, address), pytest.raises(ConnectionError, match="lacks this server's token"):
        Server(address, 5.0).health()


def test_tokens_are_new_and_of_the_variable(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(wire.TOKEN_VARIABLE)
    assert wire.make_token() != wire.make_token()
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "of-the-environment")
    assert wire.make_token() == wire.read_token(None, 8000) == "of-the-environment"
    (tmp_path / "token").write_text("of-the-file-it-is\n")
    assert wire.read_token(str(tmp_path / "token"), 8000) == "of-the-file-it-is"


BAD_TOKENS: dict[str, Callable[[Any, Any], Any]] = {
    "token_file=.* can't be read": lambda folder, patch: wire.read_token(str(folder / "none"), 8000),
    "token_file=.* holds no token": lambda folder, patch: wire.read_token(os.devnull, 8000),
    "RL_SERVE_TOKEN holds no token": lambda folder, patch: (patch.setenv(wire.TOKEN_VARIABLE, "a b"),
                                                            wire.make_token()),
    "token_file=.* can't be written": lambda folder, patch: wire.write_token(folder, TOKEN),
}  # fmt: skip


@pytest.mark.parametrize("sentence", list(BAD_TOKENS))
def test_a_bad_token_is_refused(sentence: str, tmp_path: Any, monkeypatch: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UsageError, match=sentence):
        BAD_TOKENS[sentence](folder, monkeypatch)
    assert list(tmp_path.iterdir()) == [folder]  # nothing half written is left
