"""A search engine as a tool: BM25 over a small corpus, and a built-in corpus of invented islands.

The islands are invented, so that no model knows them: a question about one needs the search.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

_SYLLABLES = ("ba", "do", "fe", "gu", "ka", "lo", "mi", "na", "pe", "ri", "sa", "tu", "ve", "zo")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


class Search:
    """Ranks passages by BM25; words are runs of letters and digits, without case.

    score(q, d) = Σ_w idf(w) · f(w, d) (k + 1) / (f(w, d) + k (1 - b + b |d| / mean |d|)),
    idf(w) = ln(1 + (N - n(w) + ½) / (n(w) + ½)),  k = 1.2, b = ¾

    Source: Robertson and Zaragoza 2009, The Probabilistic Relevance Framework: BM25 and Beyond, with Lucene's idf.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = list(passages)
        self._counts = [Counter(_words(passage)) for passage in self.passages]
        self._holders = Counter(word for count in self._counts for word in count)
        self._mean = sum(count.total() for count in self._counts) / max(1, len(self.passages))

    def __call__(self, query: str, k: int = 3) -> list[str]:
        """Returns the best k passages that share a word with the query, best first."""
        words = set(_words(query))
        scores = [self._score(words, count) for count in self._counts]
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
        return [self.passages[i] for i in best if scores[i] > 0]

    def _score(self, words: set[str], count: Counter[str]) -> float:
        saturation = 1.2 * (0.25 + 0.75 * count.total() / self._mean)
        return sum(self._idf(word) * count[word] * 2.2 / (count[word] + saturation) for word in words if word in count)

    def _idf(self, word: str) -> float:
        holders = self._holders[word]
        return math.log(1 + (len(self.passages) - holders + 0.5) / (holders + 0.5))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


@cache
def islands() -> list[dict[str, str]]:
    """Returns 400 invented islands with ``name``, ``people``, ``harbour`` and ``day``, the same at every call."""
    rng = random.Random(0)
    names = ["".join(rng.choices(_SYLLABLES, k=3)).capitalize() for _ in range(2000)]
    names = list(dict.fromkeys(names))[:800]
    return [
        {"name": name, "people": str(rng.randrange(100, 1000)), "harbour": harbour, "day": rng.choice(DAYS)}
        for name, harbour in zip(names[:400], names[400:], strict=True)
    ]


@cache
def _islands_search() -> Search:
    return Search(
        [f"{i['name']}: {i['people']} people, harbour {i['harbour']}, ferry on {i['day']}" for i in islands()]
    )


def search(query: str) -> str:
    """Searches a gazetteer of islands.

    Args:
        query: Words to look for, such as the name of an island.
    """
    return "\n".join(_islands_search()(query, 1)) or "nothing found"
