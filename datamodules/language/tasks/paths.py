"""Shortest paths on a random graph drawn as letters."""

import itertools
import math
import random
import string
from collections.abc import Iterator

from datamodules.language.tasks.base import DRAWN, Question, Record, Task
from datamodules.language.tasks.graph import distances, random_graph
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed

LETTERS = string.ascii_lowercase + string.ascii_uppercase

#: Answers that are drawn at most, for a second one that differs from the first.
MOST_DRAWS = 1000


class Paths(Task):
    """Walk from one node of a directed graph to another: ``c>k:`` → ``fak``, every letter a node that is stepped on.

    The graph is not part of the prompt; it is learned from demonstrations, which are random walks to the goal with
    detours. The optimum is known: the utility of a walk that follows edges and ends at the goal is (length of the
    shortest) / (its length), that of any other is 0. So the task can carry a whole pipeline from demonstrations over
    preferences to reinforcement learning. After trlX's random walks (Havrilla et al. 2023, EMNLP).

    Args:
        seed: decides the order of questions, the demonstrations and the comparisons; never the graph.
        graph_seed: decides the graph, so that all stages of a pipeline share it.
        n_nodes: nodes of the graph, from 4 to 52.
        out_degree: edges that leave a node, from 2 to ``n_nodes - 1``. One of them belongs to a round trip through all
            nodes, so every node is reached from every other.
        min_distance: shortest distance from start to goal that makes a question, at least 1.
        demonstrations: walks per question in the training records, which are the questions over and over; test records
            have one each.
        max_length: longest demonstration, in steps; None: three times the longest of the shortest paths.
        min_noise: a demonstration takes a random edge instead of a shortest one with a probability that is drawn for
            every walk between this and 1.
        preference_scale: κ; of two walks the first is chosen with probability σ(κ (u_1 - u_2)).
        faults: share of compared walks that are spoiled: a letter changed, dropped or added, or the end cut off.
        template: the prompt, with fields ``start`` and ``goal``.
        chat: prompts are user messages.

    Raises:
        UsageError: a setting out of its range.
    """

    name = "paths"
    default_template = "{start}>{goal}:"
    # There are few pairs of nodes, so more of them are held out than of the endless tasks.
    test_fraction = 0.2

    def __init__(
        self,
        seed: int = 0,
        graph_seed: int = 0,
        n_nodes: int = 20,
        out_degree: int = 3,
        min_distance: int = 2,
        demonstrations: int = 20,
        max_length: int | None = None,
        min_noise: float = 0.5,
        preference_scale: float = 10.0,
        faults: float = 0.3,
        template: str | None = None,
        chat: bool = False,
    ) -> None:
        super().__init__(seed, template=template, chat=chat)
        if not 4 <= n_nodes <= len(LETTERS):
            raise UsageError(f"n_nodes={n_nodes} must lie between 4 and {len(LETTERS)}, one letter for each")
        if not 2 <= out_degree < n_nodes:
            raise UsageError(f"out_degree={out_degree} must lie between 2 and n_nodes-1={n_nodes - 1}")
        if demonstrations < 1:
            raise UsageError(f"demonstrations={demonstrations} must be at least 1")
        for name, share in (("min_noise", min_noise), ("faults", faults)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name}={share} must lie between 0 and 1")
        if not preference_scale > 0:
            raise UsageError(f"preference_scale={preference_scale} must be positive")
        self.edges = random_graph(LETTERS[:n_nodes], out_degree, graph_seed)
        #: Steps of the shortest path, by start and goal.
        self.distance = {start: distances(self.edges, start) for start in self.edges}
        farthest = max(max(row.values()) for row in self.distance.values())
        if not 1 <= min_distance <= farthest:
            raise UsageError(
                f"min_distance={min_distance} must lie between 1 and {farthest}, the graph's largest distance"
            )
        self.max_length = 3 * farthest if max_length is None else max_length
        if self.max_length < farthest:
            raise UsageError(f"max_length={max_length} must be at least {farthest}, the graph's largest distance")
        self.min_distance = min_distance
        self.demonstrations = demonstrations
        self.min_noise = min_noise
        self.preference_scale = preference_scale
        self.faults = faults
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
        self._check_request(split, n)
        questions = self._shuffled(split)
        n = len(questions) * self.demonstrations if n is None else n
        self._enough(split, n, len(questions) * self.demonstrations)
        rng = random.Random(stream_seed(self.seed, 0, f"demonstrations/{split}"))
        return [self.record(questions[i % len(questions)], rng) for i in range(n)]

    def _shuffled(self, split: str) -> list[Question]:
        self._check_request(split, None)
        return self._choose(split, None, random.Random(stream_seed(self.seed, 0, f"questions/{split}")))

    def key(self, question: Question) -> str:
        return f"{question['start']}>{question['goal']}"

    def solve(self, question: Question, rng: random.Random) -> Record:
        start, goal = question["start"], question["goal"]
        return {
            "answer": self.shortest(start, goal),
            "completion": self.walk(start, goal, rng),
            "start": start,
            "goal": goal,
        }

    def is_correct(self, answer: str, record: Record) -> bool:
        """Returns whether the walk is a shortest path; there may be several."""
        return self.optimality(answer, record["start"], record["goal"]) == 1.0

    def utility(self, record: Record, completion: str) -> float:
        """Shortest length over walked length; 0 for what leaves the edges or does not end at the goal."""
        return self.optimality(completion.strip(), record["start"], record["goal"])

    def optimality(self, walk: str, start: str, goal: str) -> float:
        """Returns the utility of a walk, in [0, 1].

        Args:
            walk: the nodes stepped on after ``start``.
            start: where it begins.
            goal: where it should end.
        """
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
        while True:
            noise = rng.uniform(self.min_noise, 1)
            path, here = "", start
            while here != goal and len(path) < self.max_length:
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
        return rng.choice(
            [
                walk[:place] + letter + walk[place + 1 :],
                walk[:place] + walk[place + 1 :],
                walk[:place] + letter + walk[place:],
                walk[:place],
            ]
        )

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
        questions = self._shuffled(split)
        rng = random.Random(stream_seed(self.seed, 0, f"preferences/{split}"))
        compared = []
        for question in itertools.islice(itertools.cycle(questions), DRAWN if n is None else n):
            record = self.record(question, rng)
            first = self._candidate(record, rng)
            others = (self._candidate(record, rng) for _ in range(MOST_DRAWS))
            second = next((other for other in others if other != first), None)
            if second is None:
                raise UsageError(f"task paths: {MOST_DRAWS} answers to {record['prompt']!r} were all {first!r}; raise "
                                 "faults, max_length or out_degree, so that two can be compared")  # fmt: skip
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
