"""A teacher that ``rl serve`` answers for: vLLM's log-probabilities of given texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.remote import UNREACHABLE, Server, log_prob_of, printable


class ServedTeacher:
    """A client of a server whose model stays as it is: the likeliest tokens of every place of a text."""

    def __init__(self, address: str, tokenizer: Any, top_k: int, token_file: str | None = None) -> None:
        self.server, self.top_k, self.tokenizer = Server(address, 600.0, token_file), top_k, tokenizer
        self._is_known = False

    def likeliest(self, texts: Sequence[Sequence[int]], begin: Sequence[int], words: int) -> tuple[Tensor, Tensor]:
        """Returns the k likeliest tokens of all texts' places from ``begin`` on, and log-probabilities, [m, k] each."""
        where, path = f"teacher_model_server_url: {self.server.address}", "/inference/v1/generate"
        fields = {"max_tokens": 1, "prompt_logprobs": self.top_k, "logprobs": self.top_k, "detokenize": False}
        # The last token is left out: it is the one that the server writes, whatever that is.
        # The student's vocabulary may be padded to more words, which stand for no text.
        known, pad = len(self.tokenizer), int(self.tokenizer.pad_token_id)
        known_texts = [[token if token < known else pad for token in text[:-1]] for text in texts]
        bodies = [{"token_ids": text, "sampling_params": fields} for text in known_texts]
        most = [2**16 + len(text) * (200 + 200 * self.top_k) for text in texts]
        try:
            self._check_tokens()
            answers = self.server.ask_all(path, bodies, most)
        except UNREACHABLE as error:
            raise UsageError(
                f"{where} does not answer ({printable(error)}); start `rl serve --model DIRECTORY` there, then add "
                "--resume"
            ) from error
        ids, log_prob = [], []
        for answer, text, first in zip(answers, texts, begin, strict=True):
            try:
                places = [_likeliest(place, self.top_k, words) for place in _places(answer, len(text))[first - 1 :]]
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise self.server.wrong(path, f"scores with {printable(error)}") from error
            ids += [[token for token, _ in place] for place in places]
            log_prob += [[value for _, value in place] for place in places]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(log_prob, dtype=torch.float32)

    def _check_tokens(self) -> None:
        """Refuses a teacher with other tokens, by the text of all tokens in the order of their ids."""
        every = list(range(len(self.tokenizer)))
        if not self._is_known and (
            self.server.ask("/detokenize", {"tokens": every}, most=2**16 + 64 * len(every))
            != {"prompt": self.tokenizer.decode(every)}
        ):
            raise UsageError(
                f"teacher_model_server_url: {self.server.address} has a tokenizer with other tokens than the "
                "student's; give both the same"
            )
        self._is_known = True

    def likeliest_at(self, place: Tensor, tokens: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """:meth:`likeliest` of the tokens after m places in the flattened tokens, [m, k] each."""
        row, column = (x.cpu() for x in (place // tokens.shape[1], place % tokens.shape[1]))
        numbers = row.unique().tolist()
        first = [int(column[row == i].min()) + 1 for i in numbers]
        last = [int(column[row == i].max()) + 2 for i in numbers]
        texts = [tokens[i, :end].tolist() for i, end in zip(numbers, last, strict=True)]
        ids, log_p = self.likeliest(texts, first, words)
        # The answer has all places of a text from the first to the last; those of a mask with gaps are among them.
        begin, offset = torch.zeros(max(numbers) + 1, dtype=torch.int64), 0
        for i, start, end in zip(numbers, first, last, strict=True):
            begin[i], offset = offset - (start - 1), offset + end - start
        chosen = begin[row] + column
        return ids[chosen].to(tokens.device), log_p[chosen].to(tokens.device)


def _places(answer: Any, length: int) -> list[list[tuple[int, float]]]:
    """Returns the scored tokens of each place of a text but its first, as pairs of id and log-probability."""
    found = [
        [(int(token), log_prob_of(score["logprob"])) for token, score in place.items()]
        for place in answer["prompt_logprobs"][1:]
    ]
    last = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    if len(found) != length - 2:
        raise ValueError(f"{len(found) + 1} places, where {length - 1} should be")
    return [*found, [(score["token_id"], log_prob_of(score["logprob"])) for score in last]]


def _likeliest(place: list[tuple[int, float]], top_k: int, words: int) -> list[tuple[int, float]]:
    """Returns the k likeliest of a place's tokens, likeliest first; vLLM adds the one that the text has."""
    found = sorted(dict(place).items(), key=lambda pair: -pair[1])[: min(top_k, words)]
    if len(found) < min(top_k, words) or not all(type(token) is int and 0 <= token < words for token, _ in found):
        raise ValueError(f"tokens that are not {top_k} of the {words}")
    if sum(math.exp(value) for _, value in found) > 1 + 1e-3:
        raise ValueError("probabilities whose sum is above 1")
    return found
