"""A small stand-in for vLLM's HTTP server: transformers behind its paths, with the real gate in front of it.

python -m tests.rl_modules.language.fake_vllm_server FOLDER PORT TOKEN_FILE
"""

import asyncio
import contextlib
import copy
import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_modules.language.sampling import vllm
from rl_modules.language.sampling.native import sample
from rl_modules.language.sampling.rows import rows_of
from rl_modules.language.server_token import FILE_VARIABLE, TOKEN_VARIABLE, write_token
from rl_modules.language.serving import Gate

#: Of all servers in tests, which the tests' runs find in the environment.
TOKEN = os.environ.setdefault(TOKEN_VARIABLE, "a-token-of-the-tests")


class Http(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = False  # `server_close` waits for them


class FakeServer:
    """The engine's client as the gate calls it, and vLLM's application, as far as a run asks it."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = copy.deepcopy(model).eval(), tokenizer
        self.version, self.calls, self.lock = "default", list[str](), threading.Lock()
        self.state = SimpleNamespace(engine_client=self)

    async def pause_generation(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def get_weight_version(self) -> str:
        return self.version

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def collective_rpc(self, method: str, args: tuple[str]) -> None:
        assert method == "load_weights_of"
        with self.lock, torch.no_grad():
            own, found = dict(self.model.named_parameters()), load_file(args[0])
            assert own.keys() == found.keys()
            for name, weight in found.items():
                own[name].copy_(weight)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads((await receive())["body"])
        with self.lock:
            answer = getattr(self, scope["path"].rpartition("/")[2])(**asked)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def detokenize(self, tokens: list[int]) -> dict[str, Any]:
        return {"prompt": self.tokenizer.decode(tokens)}

    @torch.no_grad()
    def generate(self, token_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        asked = {"temperature": 1.0, "seed": 0, "stop_token_ids": [-1], **sampling_params}
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        (row,) = rows_of(sample(
            self.model, [token_ids], seeds=[asked["seed"]], max_completion_length=asked["max_tokens"],
            eos_token_id=asked["stop_token_ids"], pad_token_id=0, return_sampling_mask=True,
            **{name: asked[name] for name in names if name in asked},
        ))  # fmt: skip
        scores = self.model(input_ids=torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
        content = [
            {
                "token_id": token,
                "logprob": value,
                "top_logprobs": self.top(i, token, value, row, scores, asked["logprobs"]),
            }
            for i, (token, value) in enumerate(zip(row.tokens, row.log_prob, strict=True))
        ]
        choice = {"token_ids": row.tokens, "logprobs": {"content": content}, "sampling_mask": None,
                  "weight_versions": [{"version": self.version, "start": 0, "end": len(row.tokens)}]}  # fmt: skip
        k = asked.get("prompt_logprobs") or 0
        places = [None, *({str(t): {"logprob": float(x[t])} for t in x.topk(k).indices.tolist()} for x in scores[:-1])]
        return {"choices": [choice], "prompt_logprobs": places if k else None}

    def top(self, i: int, token: int, value: float, row: Any, scores: Any, k: int) -> list[dict[str, Any]]:
        """The k likeliest tokens of a place; those that a filter left out have vLLM's number for -inf."""
        if row.kept is not None:
            others = [t for t in range(scores.shape[-1]) if t not in row.kept[i]]
            return [{"token_id": t, "logprob": -9999.0 if t in others else value} for t in [*row.kept[i], *others][:k]]
        likeliest = scores[-1].topk(k).indices.tolist() if i == 0 else []
        return [{"token_id": t, "logprob": float(scores[-1, t])} for t in likeliest or [token]]


@contextmanager
def running_server(
    model: Any, tokenizer: Any = None, port: int = 0, kind: Any = FakeServer
) -> Iterator[tuple[Any, str]]:
    """A server in threads of this process, on a free port; its requests have ended when it is left."""
    fake = kind(model, tokenizer)
    os.environ[FILE_VARIABLE] = "set below"
    gate = fake.gate = Gate(fake)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def answer(self) -> None:
            path, _, query = self.path.partition("?")
            headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
            scope = {"type": "http", "method": self.command, "path": path, "query_string": query.encode(),
                     "headers": headers, "app": fake}  # fmt: skip

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": self.rfile.read(int(self.headers["Content-Length"] or 0))}

            async def send(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    self.status = message["status"]
                    return
                self.send_response(self.status)
                self.send_header("Content-Length", str(len(message["body"])))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(message["body"])

            self.close_connection = True
            with contextlib.suppress(ConnectionError):
                asyncio.run(gate(scope, receive, send))

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing per request."""

    with tempfile.TemporaryDirectory() as folder:
        gate.file = Path(folder, "weights")
        server = Http(("127.0.0.1", port), Handler)
        mixed, vllm.mixed = vllm.mixed, int  # its draws are those of the native sampler
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield fake, f"127.0.0.1:{server.server_port}"
        finally:
            vllm.mixed = mixed
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    folder, port, token_file = sys.argv[1:]
    os.environ[TOKEN_VARIABLE] = token = secrets.token_urlsafe(32)
    write_token(Path(token_file), token)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with running_server(model, tokenizer, int(port)) as (_, address):
        print(f"serving on {address}", flush=True)
        threading.Event().wait()
