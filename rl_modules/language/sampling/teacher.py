"""A model that a server scores given texts with, as the teacher of distillations: ``rl serve --model``."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import make_config, max_length, text_config
from rl_modules.language.models import make_model
from rl_modules.language.sampling import wire
from rl_modules.language.sampling.remote import Server
from rl_modules.language.sampling.server import PROTOCOL
from rl_modules.language.tokenizer import load_tokenizer

_NUMBER = wire.Within(-1e6, 1e-3, whole=False)
SCORE = {
    "texts": [[wire.COUNT]],
    "begin": [wire.COUNT],
    "top_k": wire.Within(1, 2**16),
    "temperature": wire.Within(1e-6, 1e6, whole=False),
    "tokens": str,
}
#: Of each text: the likeliest tokens of every place, likeliest first, and their log-probabilities.
SCORED = {"rows": [{"ids": [[wire.COUNT]], "log_prob": [[_NUMBER]]}]}


def digest_of(tokenizer: Any) -> str:
    """Returns what two tokenizers with the same tokens have in common."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


class TeacherService:
    """A server's state: a frozen model from a directory."""

    def __init__(self, folder: str) -> None:
        tokenizer = load_tokenizer(folder)
        model = make_model(make_config(folder, None, tokenizer, False), folder, "causal", "float32", None)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.tokens, self.longest = digest_of(tokenizer), max_length(model.config)
        self.pad = int(tokenizer.pad_token_id)
        self.posts = {"/score": self.score}

    def health(self) -> dict[str, Any]:
        """Returns what every server describes itself by."""
        return {"protocol": PROTOCOL, "model": None, "version": None, "run": None, "untied": False}

    @torch.no_grad()
    def score(self, body: bytes) -> dict[str, Any]:
        """Scores the tokens of each text from its place ``begin`` on."""
        asked = wire.parsed(body, SCORE, "the request")
        words = text_config(self.model.config).vocab_size
        if asked["tokens"] != self.tokens:
            raise UsageError("the teacher's tokenizer has other tokens than the student's; give both the same")
        rows = []
        for text, begin in zip(asked["texts"], asked["begin"], strict=True):
            if not 1 <= begin < len(text) <= self.longest:
                raise UsageError(
                    f"a text has {len(text)} tokens, the first to score is {begin}; the teacher takes 2 "
                    f"to {self.longest} tokens"
                )
            # The student's vocabulary may be padded to more words, which stand for no text.
            tokens = torch.tensor([[t if t < words else self.pad for t in text]], device=self.model.device)
            logits = self.model(input_ids=tokens, use_cache=False).logits[0, begin - 1 : -1].float()
            found = (logits / asked["temperature"]).log_softmax(-1).topk(min(asked["top_k"], words))
            rows.append({"ids": found.indices.tolist(), "log_prob": found.values.clamp(min=-1e6).tolist()})
        return {"rows": rows}


class ServedTeacher:
    """The client's view of :class:`TeacherService`."""

    def __init__(self, address: str, tokenizer: Any, top_k: int, token_file: str | None = None) -> None:
        self.server, self.top_k, self.tokens = Server(address, 600.0, token_file), top_k, digest_of(tokenizer)

    def likeliest(
        self, texts: Sequence[Sequence[int]], begin: Sequence[int], temperature: float, words: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the k likeliest tokens of all texts' places from ``begin`` on, and log-probabilities, [m, k] each."""
        body = {
            "texts": [list(text) for text in texts],
            "begin": list(begin),
            "top_k": self.top_k,
            "temperature": temperature,
            "tokens": self.tokens,
        }
        places = [len(text) - first for text, first in zip(texts, begin, strict=True)]
        most = 2**16 + sum(places) * (100 + 50 * self.top_k)
        where = f"teacher_model_server_url: {self.server.address}"
        try:
            answer = self.server.ask("/score", SCORED, json.dumps(body).encode(), most=most)["rows"]
        except (OSError, http.client.HTTPException) as error:
            raise UsageError(
                f"{where} does not answer ({error}); start `rl serve --model DIRECTORY` there, then add --resume"
            ) from error
        ids = [place for row in answer for place in row["ids"]]
        log_prob = [place for row in answer for place in row["log_prob"]]
        widths = {len(place) for place in [*ids, *log_prob]}
        if [len(row["ids"]) for row in answer] != places or len(ids) != len(log_prob) or len(widths) != 1:
            raise UsageError(f"{where} answers for other places than asked for; is it `rl serve` of this version?")
        found = torch.tensor(ids, dtype=torch.int64), torch.tensor(log_prob, dtype=torch.float32)
        if int(found[0].max()) >= words or bool((found[1].exp().sum(-1) > 1 + 1e-4).any()):
            raise UsageError(
                f"{where} answers with tokens or probabilities that no model of the student's vocabulary "
                "has; is it `rl serve` of this version?"
            )
        return found

    def likeliest_at(self, place: Tensor, tokens: Tensor, temperature: float, words: int) -> tuple[Tensor, Tensor]:
        """:meth:`likeliest` of the tokens after m places in the flattened tokens, [m, k] each."""
        row, column = (x.cpu() for x in (place // tokens.shape[1], place % tokens.shape[1]))
        numbers = row.unique().tolist()
        first = [int(column[row == i].min()) + 1 for i in numbers]
        last = [int(column[row == i].max()) + 2 for i in numbers]
        texts = [tokens[i, :end].tolist() for i, end in zip(numbers, last, strict=True)]
        ids, log_p = self.likeliest(texts, first, temperature, words)
        # The answer has all places of a text from the first to the last; those of a mask with gaps are among them.
        begin, offset = torch.zeros(max(numbers) + 1, dtype=torch.int64), 0
        for i, start, end in zip(numbers, first, last, strict=True):
            begin[i], offset = offset - (start - 1), offset + end - start
        chosen = begin[row] + column
        return ids[chosen].to(tokens.device), log_p[chosen].to(tokens.device)
