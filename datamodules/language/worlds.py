"""Small environments whose optimum is known: a maze as text, guess the number, arithmetic and questions with tools.

    environment: datamodules.language.worlds:Guess
    environment_kwargs: {brief: true}

Each has ``records``, the questions of a split, and ``demonstrate``, a scripted player that is right in form and not
optimal: ``demonstrations`` writes its dialogues for supervised fine-tuning. ``brief`` messages are for models that read
characters; without it they say all that a model of words needs to know.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from datamodules.envs.maze import LAYOUT, MOVES, Maze
from datamodules.language.calculator import calculator
from datamodules.language.environments import Step
from datamodules.language.messages import Message
from datamodules.language.search import islands, search
from datamodules.language.tools import ToolEnvironment
from rl_modules.common.seeding import stream_seed

Record = dict[str, Any]


class World(Protocol):
    """An environment with questions and a scripted player."""

    def reset(self, record: Record) -> Sequence[Message]:
        """Begins a dialogue."""
        ...

    def step(self, message: Message) -> Step:
        """Answers a message of the model."""
        ...

    @classmethod
    def records(cls, split: str, n: int, seed: int = 0) -> list[Record]:
        """Returns n questions of ``train`` or ``test``; where there are many, the splits share none."""
        ...

    def demonstrate(self, rng: random.Random) -> Message:
        """Returns the scripted player's next message."""
        ...


def demonstrations(world: World, records: Sequence[Record], seed: int = 0) -> Iterator[Record]:
    """Yields a dialogue of the scripted player for each record, as ``messages`` with its ``reward`` and ``tools``.

    Args:
        world: an environment, used for one dialogue after the other.
        records: questions.
        seed: of the player.
    """
    for i, record in enumerate(records):
        rng = random.Random(stream_seed(seed, 0, "player", i))
        opening = world.reset({**record, "seed": i, "start_seed": i})
        messages = [*opening] or [{"role": "user", "content": record["prompt"]}]
        total, done = 0.0, False
        while not done:
            messages.append(world.demonstrate(rng))
            answer, reward, done = world.step(messages[-1])
            messages += answer
            total += reward
        tools = getattr(world, "tools", None)
        yield {"messages": messages, "reward": total, **({"tools": list(tools)} if tools else {})}


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class TextMaze:
    """The maze of ``Maze-v0`` as text: the model reads its cell and answers with a direction.

    ``left``, ``down``, ``right``, ``up``, or their first letters, move; anything else ends the dialogue and costs as
    much as the trap, because a model that has learned only to avoid the trap would else stop there. The reward is the
    maze's. A dialogue ends after ``max_steps`` moves.

    Args:
        layout: of :class:`datamodules.envs.maze.Maze`.
        max_steps: the horizon.
        brief: messages are the cell alone, ``row,column``.
    """

    names = ("left", "down", "right", "up")

    def __init__(self, layout: str = LAYOUT, max_steps: int = 8, brief: bool = False) -> None:
        self.maze, self.max_steps, self.brief = Maze(layout), max_steps, brief
        self.state = self._steps = 0

    @classmethod
    def records(cls, split: str, n: int, seed: int = 0) -> list[Record]:
        """Returns the one question, n times."""
        return [{"prompt": "maze"}] * n

    def reset(self, record: Record) -> list[Message]:
        """Places the agent at a start, drawn from ``start_seed`` where there are several."""
        self.state, _ = self.maze.reset(seed=int(record.get("start_seed", 0)) % 2**31)
        self._steps = 0
        if self.brief:
            return _user(self.cell())
        rows, columns = self.maze.shape
        return _user(
            f"You walk in a maze of {rows} rows and {columns} columns. Find the goal and avoid the trap. "
            f"Answer with one word: left, down, right or up. You are at {self.cell()}."
        )

    def step(self, message: Message) -> Step:
        """Moves."""
        word = str(message.get("content") or "").strip().casefold()
        action = next((i for i, name in enumerate(self.names) if word in (name, name[0])), None)
        if action is None:
            return [], -10.0, True
        self.state, reward, terminated, _, _ = self.maze.step(action)
        self._steps += 1
        done = terminated or self._steps >= self.max_steps
        return ([] if done else _user(self.cell())), reward, done

    def cell(self) -> str:
        """Returns the agent's cell as text."""
        return ",".join(map(str, divmod(self.state, self.maze.shape[1])))

    def demonstrate(self, rng: random.Random) -> Message:
        """A random walk."""
        name = self.names[rng.randrange(len(MOVES))]
        return _said(name[0] if self.brief else name)


class Guess:
    """Guess a number from 1 to ``most``: the answer is ``higher``, ``lower``, or the end. Each guess costs 1.

    Args:
        most: largest number.
        max_guesses: guesses after which the dialogue ends.
        brief: messages are one character.
        mistakes: share of the scripted player's guesses that are any of the numbers still possible, and not their
            middle.
    """

    def __init__(self, most: int = 64, max_guesses: int = 10, brief: bool = False, mistakes: float = 0.75) -> None:
        self.most, self.max_guesses, self.brief, self.mistakes = most, max_guesses, brief, mistakes
        self.secret = self.guesses = 0
        self._low, self._high = 1, most

    @classmethod
    def records(cls, split: str, n: int, seed: int = 0) -> list[Record]:
        """Returns n numbers of 1 to 64, all equally often, in random order; the splits are the same numbers."""
        numbers = [i % 64 + 1 for i in range(n)]
        random.Random(stream_seed(seed, 0, split)).shuffle(numbers)
        return [{"prompt": "guess", "secret": number} for number in numbers]

    def reset(self, record: Record) -> list[Message]:
        """Takes the record's ``secret``."""
        self.secret, self.guesses, self._low, self._high = int(record["secret"]), 0, 1, self.most
        return _user(
            "?"
            if self.brief
            else f"I think of a whole number from 1 to {self.most}. Guess it: answer with a "
            "number, and I say higher or lower. Use as few guesses as you can."
        )

    def step(self, message: Message) -> Step:
        """Compares a guess with the secret."""
        self.guesses += 1
        text = str(message.get("content") or "").strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        done = guess == self.secret or self.guesses >= self.max_guesses
        if guess is None:
            said = "!" if self.brief else f"Answer with a whole number from 1 to {self.most}."
        elif guess < self.secret:
            self._low, said = max(self._low, guess + 1), "+" if self.brief else "higher"
        else:
            self._high, said = min(self._high, guess - 1), "-" if self.brief else "lower"
        return ([] if done else _user(said)), -1.0, done

    def demonstrate(self, rng: random.Random) -> Message:
        """The middle of the numbers that are still possible, or by mistake any of them."""
        middle, other = (self._low + self._high) // 2, rng.randint(self._low, self._high)
        return _said(str(other if rng.random() < self.mistakes else middle))

    @staticmethod
    def optimum(most: int = 64) -> float:
        """Returns the mean number of guesses of bisection, the least possible.

        A guess of the k-th round decides at most 2^(k-1) numbers: Σ_k k · min(2^(k-1), what is left) / most.
        """
        left, total = most, 0
        for k in range(1, most + 1):
            decided = min(2 ** (k - 1), left)
            left, total = left - decided, total + k * decided
        return total / most


class Nim:
    """Take one to three stones of a heap; whoever takes the last one wins. Best play leaves a multiple of four.

    The model writes the moves of both players, and a move earns 1 where it wins and -1 where it is none; with
    ``reward_to_go`` and ``turn_gamma: -1`` a move's return is the game's result for the player who made it. Where the
    record says ``perfect`` the environment plays the other side, perfectly, and losing earns -1.

    Args:
        brief: messages are the number of stones alone.
    """

    def __init__(self, brief: bool = False) -> None:
        self.brief, self.stones, self._perfect = brief, 0, False

    @classmethod
    def records(cls, split: str, n: int, seed: int = 0) -> list[Record]:
        """Returns n heaps of 1 to 20 stones, all equally often; of ``test`` those that can be won, and a perfect
        opponent.
        """
        test = split == "test"
        heaps = [i for i in range(1, 21) if i % 4 or not test]
        drawn = [heaps[i % len(heaps)] for i in range(n)]
        random.Random(stream_seed(seed, 0, split)).shuffle(drawn)
        return [{"prompt": "nim", "stones": stones, "perfect": test} for stones in drawn]

    def reset(self, record: Record) -> list[Message]:
        """Takes the record's ``stones``."""
        self.stones, self._perfect = int(record["stones"]), bool(record.get("perfect"))
        return _user(
            str(self.stones)
            if self.brief
            else f"{self.stones} stones are left. Take 1, 2 or 3; whoever "
            "takes the last one wins. Answer with a number."
        )

    def step(self, message: Message) -> Step:
        """Takes stones; where the opponent is perfect, it answers."""
        text = str(message.get("content") or "").strip()
        taken = int(text) if text in ("1", "2", "3") else 0
        if not 0 < taken <= self.stones:
            return [], -1.0, True
        self.stones -= taken
        if self.stones == 0:
            return [], 1.0, True
        if self._perfect:
            self.stones -= self.stones % 4 or 1
        lost = self.stones == 0
        return ([] if lost else _user(str(self.stones))), -float(lost), lost

    def demonstrate(self, rng: random.Random) -> Message:
        """Any move."""
        return _said(str(rng.randint(1, min(3, self.stones))))


class OneCall(ToolEnvironment):
    """A question whose answer needs one call of a tool; the scripted player calls it and repeats the answer."""

    def reset(self, record: Record) -> list[Message]:
        """Begins with the record's prompt."""
        self._has_called = False
        return super().reset(record)

    def demonstrate(self, rng: random.Random) -> Message:
        """Calls the tool; then answers."""
        if self._has_called:
            return _said(str(self.record["answer"]))
        self._has_called = True
        return {**_said(""), "tool_calls": [{"type": "function", "function": self.call()}]}

    def call(self) -> dict[str, Any]:
        """Returns the call's ``name`` and ``arguments``. To be overridden."""
        raise NotImplementedError


class Arithmetic(OneCall):
    """A product of two numbers of three digits, to be computed by the calculator; 1 for the right number."""

    def __init__(self, call_reward: float = 0.0) -> None:
        super().__init__([calculator], call_reward=call_reward)

    @classmethod
    def records(cls, split: str, n: int, seed: int = 0) -> list[Record]:
        """Returns n products; those whose sum of factors is divisible by 10 are of ``test``."""
        rng = random.Random(stream_seed(seed, 0, split))
        found: list[Record] = []
        while len(found) < n:
            a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
            if ((a + b) % 10 == 0) == (split == "test"):
                found.append({"prompt": f"{a}*{b}=", "answer": str(a * b)})
        return found

    def call(self) -> dict[str, Any]:
        """The calculator, on the question as it is written."""
        return {"name": "calculator", "arguments": {"expression": self.record["prompt"].rstrip("=")}}


class Islands(OneCall):
    """A question about one of 400 invented islands, to be answered by the search; 1 for the right word."""

    def __init__(self, call_reward: float = 0.0) -> None:
        super().__init__([search], call_reward=call_reward)

    @classmethod
    def records(cls, split: str, n: int, seed: int = 0) -> list[Record]:
        """Returns n questions; every tenth island is of ``test``."""
        rng = random.Random(stream_seed(seed, 0, split))
        own = [island for i, island in enumerate(islands()) if (i % 10 == 0) == (split == "test")]
        asked = [(rng.choice(own), rng.choice(("people", "harbour", "day"))) for _ in range(n)]
        return [{"prompt": f"{what} of {island['name']}?", "answer": island[what]} for island, what in asked]

    def call(self) -> dict[str, Any]:
        """The search, for the island's name."""
        return {"name": "search", "arguments": {"query": self.record["prompt"].rpartition(" ")[2].rstrip("?")}}


#: The worlds by name.
WORLDS: dict[str, type[TextMaze] | type[Guess] | type[Nim] | type[Arithmetic] | type[Islands]] = {
    "maze": TextMaze,
    "guess": Guess,
    "nim": Nim,
    "arithmetic": Arithmetic,
    "islands": Islands,
}
