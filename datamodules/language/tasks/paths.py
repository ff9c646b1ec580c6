"""Shortest paths on a random graph drawn as letters."""

import itertools
import math
import random
import string
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from datamodules.language.tasks.base import DRAWN, Question, Record, Task
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed

LETTERS = string.ascii_lowercase + string.ascii_uppercase

#: Answers that are drawn at most, for a second one that differs from the first.
MOST_DRAWS = 1000


@dataclass(eq=False)
class Paths(Task):
    """Walk from one node of a directed graph to another: ``c>k:`` → ``fak``, every letter a node that is stepped on.

    The graph is not part of the prompt; it is learned from demonstrations, which are random walks to the goal with
    detours. The optimum is known: the utility of a walk that follows edges and ends at the goal is (length of the
    shortest) / (its length), that of any other is 0. So the task can carry a whole pipeline from demonstrations over
    preferences to reinforcement learning. After trlX's random walks (Havrilla et al. 2023, EMNLP).
    """

    name = "paths"
    default_template = "{start}>{goal}:"
    # There are few pairs of nodes, so more of them are held out than of the endless tasks.
    test_fraction = 0.2
    think_format: bool = field(default=False, init=False)

    #: Decides the graph, so that all stages of a pipeline share it, and nothing else.
    graph_seed: int = 0
    #: Nodes of the graph, one letter for each.
    n_nodes: int = 20
    #: Edges that leave a node. One of them belongs to a round trip through all nodes, so every node is reached from
    #: every other.
    out_degree: int = 3
    #: Shortest distance from start to goal that makes a question.
    min_distance: int = 2
    #: Walks per question in the training records, which are the questions over and over; test records have one each.
    demonstrations: int = 20
    #: Longest demonstration, in steps; None: three times the longest of the shortest paths.
    max_length: int | None = None
    #: A demonstration takes a random edge instead of a shortest one with a probability that is drawn for every walk
    #: between this and 1.
    min_noise: float = 0.5
    #: κ; of two walks the first is chosen with probability σ(κ (u_1 - u_2)).
    preference_scale: float = 10.0
    #: Share of compared walks that are spoiled: a letter changed, dropped or added, or the end cut off.
    faults: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("n_nodes", 4, len(LETTERS))
        self._require("out_degree", 2, self.n_nodes - 1)
        self._require("demonstrations", 1)
        self._require("min_noise", 0, 1)
        self._require("faults", 0, 1)
        if not self.preference_scale > 0:
            raise UsageError(f"preference_scale={self.preference_scale} must be positive")
        self.edges = random_graph(LETTERS[: self.n_nodes], self.out_degree, self.graph_seed)
        #: Steps of the shortest path, by start and goal.
        self.distance = {start: distances(self.edges, start) for start in self.edges}
        farthest = max(max(row.values()) for row in self.distance.values())
        self._require("min_distance", 1, farthest)
        self.max_length = 3 * farthest if self.max_length is None else self.max_length
        self._require("max_length", farthest)
        self.size = sum(1 for _ in self.questions())

    # ---------------------------------------------------------------- questions and answers

    def questions(self) -> Iterator[Question]:
        for start, goal in itertools.permutations(self.edges, 2):
            if self.distance[start][goal] >= self.min_distance:
                yield {"start": start, "goal": goal}

    def records(self, split: str, n: int | None) -> list[Record]:
        """As every task's; the training questions come ``demonstrations`` times, each time with another walk."""
        if split != "train":
            return super().records(split, n)
        questions = self._choose(split, None)
        exist = len(questions) * self.demonstrations
        n = exist if n is None else self._enough(split, n, exist)
        rng = self._generator("demonstrations", split)
        return [self.record(questions[i % len(questions)], rng) for i in range(n)]

    def key(self, question: Question) -> str:
        return f"{question['start']}>{question['goal']}"

    def solve(self, question: Question, rng: random.Random) -> Record:
        start, goal = question["start"], question["goal"]
        return {"answer": self.shortest(start, goal), "completion": self.walk(start, goal, rng), **question}

    def is_correct(self, answer: str, record: Record) -> bool:
        """Returns whether the walk is a shortest path; there may be several."""
        return self.optimality(answer, record["start"], record["goal"]) == 1.0

    def utility(self, record: Record, completion: str) -> float:
        """Shortest length over walked length; 0 for what leaves the edges or does not end at the goal."""
        return self.optimality(completion.strip(), record["start"], record["goal"])

    def optimality(self, walk: str, start: str, goal: str) -> float:
        """Returns the utility of a walk, the nodes stepped on after ``start``, in [0, 1]."""
        if not walk or walk[-1] != goal:
            return 0.0
        if any(there not in self.edges.get(here, "") for here, there in itertools.pairwise(start + walk)):
            return 0.0
        return self.distance[start][goal] / len(walk)

    # ---------------------------------------------------------------- walks

    def shortest(self, start: str, goal: str) -> str:
        """Returns a shortest path, the alphabetically first."""
        path, here = "", start
        while here != goal:
            here = min(node for node in self.edges[here] if self._is_nearer(node, here, goal))
            path += here
        return path

    def walk(self, start: str, goal: str, rng: random.Random) -> str:
        """Returns a noisy walk from start to goal, of at most ``max_length`` steps; longer ones are drawn again."""
        longest = self.max_length or 0
        while True:
            noise = rng.uniform(self.min_noise, 1)
            path, here = "", start
            while here != goal and len(path) < longest:
                steps = self.edges[here]
                if rng.random() >= noise:
                    steps = "".join(node for node in steps if self._is_nearer(node, here, goal))
                here = rng.choice(steps)
                path += here
            if here == goal:
                return path

    def _is_nearer(self, node: str, here: str, goal: str) -> bool:
        return self.distance[node][goal] < self.distance[here][goal]

    def spoil(self, walk: str, rng: random.Random) -> str:
        """Returns a walk with one fault: a letter changed, dropped or added, or the end cut off."""
        place = rng.randrange(len(walk))
        letter = rng.choice(list(self.edges))
        before, after = walk[:place], walk[place + 1 :]
        return rng.choice([before + letter + after, before + after, before + letter + walk[place:], before])

    # ---------------------------------------------------------------- preferences

    def preferences(self, split: str, n: int | None) -> list[Record]:
        """``n`` comparisons of two different walks (None: ten thousand), the questions one after the other.

        Args:
            split: ``train`` or ``test``, whose questions they are about.
            n: how many.

        Returns:
            Records with ``prompt``, ``chosen``, ``rejected``, ``margin`` (None), ``probability`` (that the chosen one
            wins, given the true utilities), ``chosen_utility``, ``rejected_utility``, ``start`` and ``goal``.

        Raises:
            UsageError: an unknown split, or a question with one answer only.
        """
        questions, rng = self._choose(split, None), self._generator("preferences", split)
        compared = []
        for question in itertools.islice(itertools.cycle(questions), DRAWN if n is None else n):
            record = self.record(question, rng)
            first = self._candidate(record, rng)
            others = (self._candidate(record, rng) for _ in range(MOST_DRAWS))
            second = next((other for other in others if other != first), None)
            if second is None:
                raise UsageError(
                    f"task paths: {MOST_DRAWS} answers to {record['prompt']!r} were all {first!r}; raise "
                    "faults, max_length or out_degree, so that two can be compared"
                )
            compared.append(self.compare(record, first, second, rng))
        return compared

    def compare(self, record: Record, first: str, second: str, rng: random.Random) -> Record:
        """Decides between two completions with Bradley–Terry noise.

        P(first wins) = σ(κ (u(first) - u(second))),  κ = ``preference_scale``

        Args:
            record: the question.
            first: a completion, such as a sample of a policy.
            second: another one.
            rng: of the noise.

        Returns:
            A preference, as :meth:`preferences` describes it.
        """
        utilities = {text: self.utility(record, text) for text in (first, second)}
        probability = 1 / (1 + math.exp(self.preference_scale * (utilities[second] - utilities[first])))
        chosen, rejected = first, second
        if rng.random() >= probability:
            chosen, rejected, probability = second, first, 1 - probability
        return {
            "prompt": record["prompt"],
            "chosen": chosen,
            "rejected": rejected,
            "margin": None,
            "probability": probability,
            "chosen_utility": utilities[chosen],
            "rejected_utility": utilities[rejected],
            "start": record["start"],
            "goal": record["goal"],
        }

    def _candidate(self, record: Record, rng: random.Random) -> str:
        walk = self.walk(record["start"], record["goal"], rng)
        return self.spoil(walk, rng) if rng.random() < self.faults else walk


def random_graph(nodes: str, out_degree: int, seed: int) -> dict[str, str]:
    """The successors of each node, ``out_degree`` in alphabetical order; every node is reached from every other."""
    rng = random.Random(stream_seed(seed, 0, "graph"))
    trip = rng.sample(nodes, len(nodes))
    following = dict(zip(trip, trip[1:] + trip[:1], strict=True))
    edges = {}
    for node in nodes:
        others = [other for other in nodes if other not in (node, following[node])]
        edges[node] = "".join(sorted([following[node], *rng.sample(others, out_degree - 1)]))
    return edges


def distances(edges: dict[str, str], start: str) -> dict[str, int]:
    """Steps of the shortest path from ``start`` to every node, by breadth-first search."""
    reached = {start: 0}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for node in edges[here]:
            if node not in reached:
                reached[node] = reached[here] + 1
                queue.append(node)
    return reached


def bayes_accuracy(records: Sequence[Record]) -> float:
    """Returns the accuracy of the best possible judge of these comparisons, which knows the true utilities.

    mean_i max(p_i, 1 - p_i), with p_i the true probability that the chosen completion wins.

    Args:
        records: preferences with ``probability``.

    Raises:
        UsageError: no records, or records without ``probability``.
    """
    if not records or any("probability" not in record for record in records):
        raise UsageError("the Bayes accuracy needs preferences with a 'probability', as tasks synthesise them")
    return sum(max(record["probability"], 1 - record["probability"]) for record in records) / len(records)
