"""Base class of tasks, which make prompts, reference answers, demonstrations and rewards from one seed."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from datamodules.language.text import answer_of, think_and_answer
from rl_modules.common.errors import UsageError
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
SPLITS = ("train", "test")


def is_held_out(key: str, fraction: float) -> bool:
    """Returns whether the question with this ``key`` belongs to the test split; depends on the key's hash only, not on
    a seed.

    Args:
        key: any text; equal texts are always on the same side.
        fraction: share of all keys that is held out, in [0, 1].
    """
    number = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return number < fraction * 2**64


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

    Raises:
        UsageError: a negative seed.
    """

    #: Name for messages.
    name: ClassVar[str] = "task"
    #: Share of the questions that training never sees.
    test_fraction: ClassVar[float] = 0.1
    #: The prompt where none is given.
    default_template: ClassVar[str] = "{question}"
    #: How many questions there are, where ``questions`` lists them.
    size: int | None = None

    def __init__(
        self, seed: int = 0, think_format: bool = False, template: str | None = None, chat: bool = False
    ) -> None:
        if seed < 0:
            raise UsageError(f"seed={seed} must be at least 0")
        self.seed = seed
        self.think_format = think_format
        self.template = self.default_template if template is None else template
        self.chat = chat

    # ---------------------------------------------------------------- what a task says of itself

    def questions(self) -> Iterator[Question]:
        """Yields every question once, in a fixed order. Required if ``size`` is set."""
        raise UsageError(f"{type(self).__name__} sets size, so it needs questions()")

    def draw(self, rng: random.Random) -> Question:
        """Draws one question at random. Required if ``size`` is None or above 100,000."""
        raise UsageError(f"{type(self).__name__} lists no questions, so it needs draw(rng)")

    def key(self, question: Question) -> str:
        """Returns the key that decides the split: questions with equal keys are on the same side. The default is the
        question itself.
        """
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
            UsageError: an unknown split, or fewer than ``n`` questions.
        """
        self._check_request(split, n)
        chooser = random.Random(stream_seed(self.seed, 0, f"questions/{split}"))
        solver = random.Random(stream_seed(self.seed, 0, f"demonstrations/{split}"))
        return [self.record(question, solver) for question in self._choose(split, n, chooser)]

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
            raise UsageError(f"task {self.name!r} has {question!r} as a question, where draw and questions give a dict "
                             "of the template's fields")  # fmt: skip
        text = fill(self.template, question, f"template={self.template!r} of task {self.name!r}")
        return [{"role": "user", "content": text}] if self.chat else text

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Returns reward functions with TRL's signature; the first is the accuracy, in [0, 1]."""
        from datamodules.language.rewards import think_answer_format

        return [self.accuracy, think_answer_format] if self.think_format else [self.accuracy]

    def accuracy(
        self, prompts: Any, completions: Any, completion_ids: Any = None, trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        """Returns 1.0 for a right final answer, 0.0 for a wrong or missing one."""
        from datamodules.language.text import text_of

        rewards: list[float | None] = []
        for i, completion in enumerate(completions):
            record = {name: values[i] for name, values in columns.items()}
            rewards.append(self.score(record, text_of(completion)))
        return rewards

    def score(self, record: Record, completion: str) -> float:
        """Returns the accuracy of one completion, in [0, 1]."""
        answer = self.final_answer(completion)
        return float(answer is not None and self.is_correct(answer, record))

    def final_answer(self, completion: str) -> str | None:
        """Returns the text between ``<answer>`` tags under ``think_format`` (None without tags), otherwise the stripped
        completion.
        """
        return answer_of(completion) if self.think_format else completion.strip()

    def extract(self, completion: str) -> str | None:
        """Returns the final answer in a canonical form for a majority vote; None: no answer."""
        return self.final_answer(completion)

    def utility(self, record: Record, completion: str) -> float:
        """Returns the true quality of a completion, in [0, 1]. The default is its accuracy."""
        return self.score(record, completion)

    def utilities(
        self, prompts: Any, completions: Any, completion_ids: Any = None, trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        """Returns the utility of each completion; a reward function that a config can name, ``reward_funcs:
        [utilities]``.
        """
        from datamodules.language.text import text_of

        records = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        return [self.utility(record, text_of(text)) for record, text in zip(records, completions, strict=True)]

    def preferences(self, split: str, n: int | None) -> list[Record]:
        """Returns ``n`` comparisons of two completions, decided by a Bradley–Terry model of their utilities.

        Raises:
            UsageError: the task has no preferences.
        """
        raise UsageError(f"task {self.name!r} makes no preferences; task='paths' does, or give path")

    # ---------------------------------------------------------------- the splits

    def _check_request(self, split: str, n: int | None) -> None:
        if split not in SPLITS:
            raise UsageError(f"split={split!r} must be one of {', '.join(SPLITS)}")
        if n is not None and n < 0:
            raise UsageError(f"n={n} records can't be negative")

    def _choose(self, split: str, n: int | None, rng: random.Random) -> list[Question]:
        if self.size is not None and self.size <= LISTED:
            found = [question for question in self.questions() if self._is_in(split, question)]
            rng.shuffle(found)
            return found if n is None else found[: self._enough(split, n, len(found))]
        chosen: dict[str, Question] = {}
        fruitless = 0
        while len(chosen) < (DRAWN if n is None else n):
            question = self.draw(rng)
            identity = str(self.prompt(question))
            if identity in chosen or not self._is_in(split, question):
                fruitless += 1
                if fruitless >= FRUITLESS:
                    if n is None:
                        break
                    self._enough(split, n, self._count(split, len(chosen)))
                    fruitless = 0
                continue
            fruitless = 0
            chosen[identity] = question
        return list(chosen.values())

    def _is_in(self, split: str, question: Question) -> bool:
        return is_held_out(self.key(question), self.test_fraction) == (split == "test")

    def _count(self, split: str, found: int) -> int:
        if self.size is None:
            return found
        return sum(self._is_in(split, question) for question in self.questions())

    def _enough(self, split: str, n: int, exist: int) -> int:
        if n > exist:
            raise UsageError(
                f"n={n} records of task {self.name!r} were asked for, but its {split} split has only {exist} with "
                f"different prompts; lower {'n_train' if split == 'train' else 'n_eval'}"
            )
        return n


def fill(template: str, fields: dict[str, Any], where: str) -> str:
    """Fills the fields into a template's braces. Only plain names are replaced, so a template can access nothing else.

    Args:
        template: text with ``{name}``; other braces are kept.
        fields: the values by name.
        where: name of the template for the error message.

    Raises:
        UsageError: a name without a field, or with the value null.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise UsageError(f"{where} names {match[0]}, but there is only {', '.join(map(str, fields))}")
        if fields[match[1]] is None:
            raise UsageError(f"{where} names {match[0]}, which is null")
        return str(fields[match[1]])

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, template)


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
