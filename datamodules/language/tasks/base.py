"""What a task is: prompts, reference answers, demonstrations and rewards, all from one seed."""

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

#: Up to so many questions are listed and shuffled; of more, they are drawn.
LISTED = 100_000
#: So many records are "all" of them where they are drawn.
DRAWN = 10_000
#: So many draws in a row without a new question mean that there are no more.
FRUITLESS = 20_000
SPLITS = ("train", "test")


def is_held_out(key: str, fraction: float) -> bool:
    """Whether what ``key`` stands for belongs to the test split: decided by its hash alone, never by a seed.

    Args:
        key: any text; equal texts are always on the same side.
        fraction: share of all keys that is held out, in [0, 1].
    """
    number = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return number < fraction * 2**64


class Task:
    """A family of questions with a verifier. A task of your own is a subclass.

    It says which questions there are (``questions`` with ``size``, or ``draw``, or all three) and what is right
    (``solve``). Prompts, splits, demonstrations and the accuracy reward follow. Where several answers are right,
    override ``is_correct``.

    Args:
        seed: decides which questions are drawn and in which order; never which split they belong to.
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
        """Every question once, in a fixed order. Needed where ``size`` is set."""
        raise UsageError(f"{type(self).__name__} sets size, so it needs questions()")

    def draw(self, rng: random.Random) -> Question:
        """One question at random. Needed where ``size`` is None or beyond a hundred thousand."""
        raise UsageError(f"{type(self).__name__} lists no questions, so it needs draw(rng)")

    def key(self, question: Question) -> str:
        """What the splits must not share: equal keys are on the same side. The default is the whole question."""
        return json.dumps(question, sort_keys=True, default=str)

    def solve(self, question: Question, rng: random.Random) -> Record:
        """The columns of the question's record: ``answer``, perhaps ``completion`` (a demonstration), perhaps more.

        Args:
            question: its fields.
            rng: for demonstrations that are drawn.
        """
        raise UsageError(f"{type(self).__name__} needs solve(question, rng)")

    def reasoning(self, question: Question, columns: Record) -> str:
        """What a demonstration thinks under ``think_format``."""
        return ""

    def is_correct(self, answer: str, record: Record) -> bool:
        """Whether an extracted answer is right. The default compares it with the reference."""
        return answer == record["answer"]

    # ---------------------------------------------------------------- what the rest of the code asks for

    def records(self, split: str, n: int | None) -> list[Record]:
        """The first ``n`` records of a split, the same at every call.

        Args:
            split: ``train`` or ``test``. No question of one is in the other, whatever the seeds.
            n: how many, all different; None: all that exist, or ten thousand where there are too many to list.

        Returns:
            Records with ``prompt``, ``answer``, ``completion`` (a demonstration without EOS) and the task's columns.

        Raises:
            UsageError: an unknown split, or fewer questions than wanted.
        """
        self._check_request(split, n)
        chooser = random.Random(stream_seed(self.seed, 0, f"questions/{split}"))
        solver = random.Random(stream_seed(self.seed, 0, f"demonstrations/{split}"))
        return [self.record(question, solver) for question in self._choose(split, n, chooser)]

    def record(self, question: Question, rng: random.Random) -> Record:
        """A question as a record, with a demonstration."""
        columns = self.solve(question, rng)
        completion = columns.get("completion", columns.get("answer"))
        if self.think_format and completion is not None:
            completion = think_and_answer(self.reasoning(question, columns), completion)
        return {"prompt": self.prompt(question), **columns, "completion": completion}

    def prompt(self, question: Question) -> str | list[dict[str, str]]:
        """The question in words, or as a user's message under ``chat``.

        Raises:
            UsageError: the template names a field that there is not.
        """
        text = fill(self.template, question, f"template={self.template!r} of task {self.name!r}")
        return [{"role": "user", "content": text}] if self.chat else text

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Functions with TRL's signature; the first is the accuracy, in [0, 1]."""
        from datamodules.language.rewards import think_answer_format

        return [self.accuracy, think_answer_format] if self.think_format else [self.accuracy]

    def accuracy(
        self, prompts: Any, completions: Any, completion_ids: Any = None, trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        """1.0 where the final answer is right, 0.0 where it is wrong or missing."""
        from datamodules.language.text import text_of

        rewards: list[float | None] = []
        for i, completion in enumerate(completions):
            record = {name: values[i] for name, values in columns.items()}
            rewards.append(self.score(record, text_of(completion)))
        return rewards

    def score(self, record: Record, completion: str) -> float:
        """The accuracy of one completion, in [0, 1]."""
        answer = self.final_answer(completion)
        return float(answer is not None and self.is_correct(answer, record))

    def final_answer(self, completion: str) -> str | None:
        """The text between ``<answer>`` tags under ``think_format`` (None without), else the completion, stripped."""
        return answer_of(completion) if self.think_format else completion.strip()

    def extract(self, completion: str) -> str | None:
        """The final answer in a form in which equal answers are equal texts, for a majority vote; None: none."""
        return self.final_answer(completion)

    def utility(self, record: Record, completion: str) -> float:
        """How good a completion truly is, in [0, 1]. The default is its accuracy."""
        return self.score(record, completion)

    def utilities(
        self, prompts: Any, completions: Any, completion_ids: Any = None, trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        """The utility of each completion: a reward function that a config can name, ``reward_funcs: [utilities]``."""
        from datamodules.language.text import text_of

        records = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        return [self.utility(record, text_of(text)) for record, text in zip(records, completions, strict=True)]

    def preferences(self, split: str, n: int | None) -> list[Record]:
        """``n`` comparisons of two completions, decided with Bradley–Terry noise from their utilities.

        Raises:
            UsageError: the task has none.
        """
        raise UsageError(f"task {self.name!r} makes no preferences; task 'paths' does")

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
        if n is None:
            n = DRAWN
        chosen: dict[str, Question] = {}
        fruitless = 0
        while len(chosen) < n:
            question = self.draw(rng)
            identity = str(self.prompt(question))
            if identity in chosen or not self._is_in(split, question):
                fruitless += 1
                if fruitless >= FRUITLESS:
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
                f"n={n} records of task {self.name!r} were asked for, but its {split} split has only {exist}"
            )
        return n


def fill(template: str, fields: dict[str, Any], where: str) -> str:
    """Put fields into a template's braces. Only plain names count, so a template can reach nothing else.

    Args:
        template: text with ``{name}``; braces around anything else stay as they are.
        fields: the values by name.
        where: what the template is, for the message.

    Raises:
        UsageError: a name that is not among the fields, or whose value is null.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise UsageError(f"{where} names {match[0]}, but there is only {', '.join(map(str, fields))}")
        if fields[match[1]] is None:
            raise UsageError(f"{where} names {match[0]}, which is null")
        return str(fields[match[1]])

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, template)


def bayes_accuracy(records: Sequence[Record]) -> float:
    """The accuracy of the best possible judge of these comparisons, who knows the true utilities.

    mean_i max(p_i, 1 - p_i), with p_i the true probability that the chosen completion wins.

    Args:
        records: preferences with ``probability``.

    Raises:
        UsageError: there are none, or they carry no probability.
    """
    if not records or any("probability" not in record for record in records):
        raise UsageError("the Bayes accuracy needs preferences with a 'probability', as tasks synthesise them")
    return sum(max(record["probability"], 1 - record["probability"]) for record in records) / len(records)
