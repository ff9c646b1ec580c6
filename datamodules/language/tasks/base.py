"""Base class of tasks, which make prompts, reference answers, demonstrations and rewards from one seed."""

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datamodules.language.tasks.answers import answer_of, text_of, think_and_answer, think_answer_format
from rl_modules.common.errors import UsageError, at_least
from rl_modules.common.seeding import stream_seed

#: A question's fields, as the prompt's template names them.
Question = dict[str, Any]
Record = dict[str, Any]
RewardFunction = Callable[..., list[float | None]]

#: Largest number of questions that are listed and shuffled; if there are more, they are drawn.
LISTED = 100_000
#: Most records that ``n=None`` returns if questions are drawn.
DRAWN = 10_000
#: Number of successive draws without a new question after which no more are expected.
FRUITLESS = 20_000


class TooFew(UsageError):
    """Raised if a split has fewer records than asked for.

    Args:
        message: for the user.
        exist: how many there are.
    """

    def __init__(self, message: str, exist: int) -> None:
        super().__init__(message)
        self.exist = exist


@dataclass(eq=False)
class Task:
    """A family of questions with a verifier. A custom task is a subclass that defines the questions (``questions`` with
    ``size``, or ``draw``, or all three) and their right answers (``solve``). Prompts, splits, demonstrations and the
    accuracy reward are derived from them. If several answers are right, override ``is_correct``.

    Args:
        seed: determines which questions are drawn and in which order, but not their split.
        think_format: demonstrations and answers have the form ``<think>…</think><answer>…</answer>``, and the format
            is a second reward.
        template: the prompt, with the question's fields in braces; None: the task's own, short enough for a
            character-level model.
        chat: prompts are lists of one user message, so that a model's chat template applies.
    """

    #: Name for messages.
    name: ClassVar[str] = "task"
    #: Share of the questions that training never sees.
    test_fraction: ClassVar[float] = 0.1
    #: Whether it is a mixture of other sources.
    is_mixture: ClassVar[bool] = False
    #: The prompt where none is given.
    default_template: ClassVar[str] = "{question}"
    #: How many questions there are, where ``questions`` lists them.
    size: int | None = field(default=None, init=False)

    seed: int = 0
    think_format: bool = False
    template: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        self._require("seed", 0)
        self.template = self.template or self.default_template

    def _require(self, name: str, least: float, most: float = math.inf) -> None:
        """Refuses a setting that is out of its range."""
        if not least <= getattr(self, name) <= most:
            within = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise UsageError(f"{name}={getattr(self, name)} of task {self.name!r} must be {within}")

    # ---------------------------------------------------------------- what a task says of itself

    def questions(self) -> Iterator[Question]:
        """Yields every question once, in a fixed order. Required if ``size`` is set."""
        raise UsageError(f"{type(self).__name__} sets size, so it needs questions()")

    def draw(self, rng: random.Random) -> Question:
        """Draws one question at random. Required if ``size`` is None or above 100,000."""
        raise UsageError(f"{type(self).__name__} lists no questions, so it needs draw(rng)")

    def key(self, question: Question) -> str:
        """Returns the key that decides the split: questions with equal keys are together. By default the question."""
        return json.dumps(question, sort_keys=True, default=str)

    def solve(self, question: Question, rng: random.Random) -> Record:
        """Returns the columns of the question's record: ``answer``, optionally ``completion`` (a demonstration) and
        others.

        Args:
            question: its fields.
            rng: generator for random demonstrations.
        """
        raise UsageError(f"{type(self).__name__} needs solve(question, rng)")

    def reasoning(self, question: Question, columns: Record) -> str:
        """Returns the thoughts of a demonstration under ``think_format``."""
        return ""

    def is_correct(self, answer: str, record: Record) -> bool:
        """Returns whether an extracted answer is right. The default compares it with the reference."""
        return answer == record["answer"]

    # ---------------------------------------------------------------- what the rest of the code asks for

    def records(self, split: str, n: int | None) -> list[Record]:
        """Returns the first ``n`` records of a split, the same at every call.

        Args:
            split: ``train`` or ``test``. The splits are disjoint for all seeds.
            n: number of different records; None: all, or at most 10,000 if there are too many to list.

        Returns:
            Records with ``prompt``, ``answer``, ``completion`` (a demonstration without EOS) and the task's columns.

        Raises:
            UsageError: an unknown split, or, as :class:`TooFew`, fewer than ``n`` questions.
        """
        solver = self._generator("demonstrations", split)
        return [self.record(question, solver) for question in self._choose(split, n)]

    def record(self, question: Question, rng: random.Random) -> Record:
        """Returns a question as a record, with a demonstration."""
        columns = self.solve(question, rng)
        if not isinstance(columns, dict):
            raise UsageError(f"solve of task {self.name!r} returned {columns!r}, where a dict with 'answer' should be")
        completion = columns.get("completion", columns.get("answer"))
        if self.think_format and completion is not None:
            completion = think_and_answer(self.reasoning(question, columns), completion)
        return {"prompt": self.prompt(question), **columns, "completion": completion}

    def prompt(self, question: Question) -> str | list[dict[str, str]]:
        """Returns the question as text, or as a user's message under ``chat``.

        Raises:
            UsageError: the template names an unknown field.
        """
        if not isinstance(question, dict):
            raise UsageError(
                f"task {self.name!r} has {question!r} as a question, where draw and questions give a dict "
                "of the template's fields"
            )
        template = self.template or self.default_template  # of a subclass that did not call this constructor, too
        text = fill(template, question, f"template={template!r} of task {self.name!r}")
        return [{"role": "user", "content": text}] if self.chat else text

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Returns reward functions with TRL's signature; the first is the accuracy, in [0, 1]."""
        if not self.think_format:
            return [self.accuracy]
        return [self.accuracy, think_answer_format]

    def accuracy(
        self, prompts: Any, completions: Any, completion_ids: Any = None, trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        """Returns 1.0 for a right final answer, 0.0 for a wrong or missing one."""
        return [self.score(record, text) for record, text in _rows(completions, columns)]

    def score(self, record: Record, completion: str) -> float:
        """Returns the accuracy of one completion, in [0, 1]."""
        answer = self.final_answer(completion)
        return float(answer is not None and self.is_correct(answer, record))

    def final_answer(self, completion: str) -> str | None:
        """Returns the text between ``<answer>`` tags under ``think_format`` (None: no tags), else the completion."""
        if not self.think_format:
            return completion.strip()
        return answer_of(completion)

    def extract(self, completion: str) -> str | None:
        """Returns the final answer in a canonical form for a majority vote; None: no answer."""
        return self.final_answer(completion)

    def utility(self, record: Record, completion: str) -> float:
        """Returns the true quality of a completion, in [0, 1]. The default is its accuracy."""
        return self.score(record, completion)

    def utilities(
        self, prompts: Any, completions: Any, completion_ids: Any = None, trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        """Returns the utility of each completion; a reward function for ``reward_funcs: [utilities]``."""
        return [self.utility(record, text) for record, text in _rows(completions, columns)]

    def preferences(self, split: str, n: int | None) -> list[Record]:
        """Returns ``n`` comparisons of two completions, decided by a Bradley–Terry model of their utilities.

        Raises:
            UsageError: the task has no preferences.
        """
        raise UsageError(f"task {self.name!r} makes no preferences; task='paths' does, or give path")

    # ---------------------------------------------------------------- the splits

    def _generator(self, purpose: str, split: str) -> random.Random:
        return random.Random(stream_seed(self.seed, 0, f"{purpose}/{split}"))

    def _choose(self, split: str, n: int | None) -> list[Question]:
        """The first ``n`` questions of a split."""
        if split not in ("train", "test"):
            raise UsageError(f"split={split!r} must be one of train, test")
        if n is not None:
            at_least("n", n, 0)
        rng = self._generator("questions", split)
        if self.size is not None and self.size <= LISTED:
            found = [question for question in self.questions() if self._is_in(split, question)]
            rng.shuffle(found)
            return found if n is None else found[: self._enough(split, n, len(found))]
        chosen: dict[str, Question] = {}
        fruitless = 0
        while len(chosen) < (DRAWN if n is None else n):
            question = self.draw(rng)
            identity = str(self.prompt(question))
            if identity not in chosen and self._is_in(split, question):
                chosen[identity] = question
                fruitless = 0
            elif (fruitless := fruitless + 1) >= FRUITLESS:
                if n is None:
                    break
                exist = len(chosen) if self.size is None else sum(self._is_in(split, q) for q in self.questions())
                self._enough(split, n, exist)
                fruitless = 0
        return list(chosen.values())

    def _is_in(self, split: str, question: Question) -> bool:
        """Whether a question belongs to a split, which depends on its key's hash alone."""
        key = self.key(question).encode("utf-8", "surrogatepass")
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
        return (number < self.test_fraction * 2**64) == (split == "test")

    def _enough(self, split: str, n: int, exist: int) -> int:
        if n > exist:
            raise TooFew(
                f"n={n} records of task {self.name!r} were asked for, but its {split} split has only {exist} with "
                f"different prompts; lower {'n_train' if split == 'train' else 'n_eval'}",
                exist,
            )
        return n


def _rows(completions: Sequence[Any], columns: dict[str, Sequence[Any]]) -> Iterator[tuple[Record, str]]:
    """Each completion's record and text."""
    for i, completion in enumerate(completions):
        yield {name: values[i] for name, values in columns.items()}, text_of(completion)


def fill(template: str, fields: dict[str, Any], where: str) -> str:
    """Fills fields into the braces of plain names, so that a template accesses nothing else; ``where``: for errors."""

    def value(match: re.Match[str]) -> str:
        found = fields.get(match[1])
        if found is None:
            rest = "which is null" if match[1] in fields else f"but there is only {', '.join(map(str, fields))}"
            raise UsageError(f"{where} names {match[0]}, {rest}")
        return str(found)

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, template)
