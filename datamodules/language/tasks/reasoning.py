"""The datasets of reasoning-gym as tasks, with their own scorers."""

import ast
import functools
import inspect
import random
import re
import sys
from typing import Any

from datamodules.language.tasks.base import Question, Record, Task
from rl_modules.common.errors import UsageError, did_you_mean, naming
from rl_modules.common.extras import install
from rl_modules.common.seeding import stream_seed

#: Functions that an answer may contain to be passed to SymPy's parser, which evaluates it, besides sums, products and
#: small powers of numbers and of one-letter variables.
_FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "sec",
    "csc",
    "cot",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "exp",
    "log",
    "ln",
    "sqrt",
    "pi",
}
_ARITHMETIC = re.compile(r"[0-9A-Za-z+\-*/(). \n]{1,1000}")
_EXPONENT = r"(?:-?\d{1,2}(?![\d.])|\(\s*-?\d{1,2}(?:/\d{1,2})?\s*\))"
_HARMFUL = (
    re.compile(r"\.(?!\d)|[A-Za-z)]\s*\."),  # a point that is no decimal point: an attribute
    re.compile(r"\d\s*[eE]\s*[-+]?\s*\d"),  # 1e999999999
    re.compile(rf"\*\*(?!\s*{_EXPONENT})"),  # an exponent that is not a small number
    re.compile(rf"\*\*\s*{_EXPONENT}\s*\*\*"),  # 9**99**99
)
#: Questions that are drawn from, where the config has no size: some datasets keep a list of that length.
SIZE = 20_000
_PARSES = re.compile(r"(?<!\w)(?:parse_expr|sympify)\s*\(")
#: A call of the built-in by its own name, which :func:`secure_scorer` can replace in the scorer's module.
_EVALUATES = re.compile(r"(?<![\w.])eval\s*\(")
#: Calls that run text as code and can't be replaced by a reader of literals.
_RUNS = re.compile(r"(?<!\w)exec\s*\(|(?<![\w.])compile\s*\(|\.\s*eval\s*\(|(?<!\w)__import__\s*\(")


class ReasoningGym(Task):
    """A dataset of the ``reasoning-gym`` package: its questions, its answers, its scorer as the accuracy.

    Some of its scorers evaluate the answer as Python code. Here they read literals only, and those that use SymPy's
    parser are shown nothing but plain arithmetic; any other answer counts as wrong.

    Args:
        seed: of the questions.
        dataset: its name in reasoning-gym.
        think_format: the answer is read from ``<answer>`` tags, after ``<think>`` ones.
        template: the prompt, with the field ``question``.
        chat: prompts are user messages.
        **config: the dataset's own settings.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        seed: int = 0,
        dataset: str = "chain_sum",
        think_format: bool = False,
        template: str | None = None,
        chat: bool = False,
        **config: Any,
    ) -> None:
        super().__init__(seed, think_format, template, chat)
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the task reasoning_gym:{dataset} needs a package that is not installed, {error.name}: "
                f"{install('language')}"
            ) from error

        if dataset not in DATASETS:
            raise UsageError(f"reasoning-gym has no dataset {dataset!r}{did_you_mean(dataset, DATASETS)}")
        self.name = f"reasoning_gym:{dataset}"  # type: ignore[misc]
        settings = {"seed": stream_seed(seed, 0, "reasoning_gym") % 2**31, "size": SIZE, **config}
        if dataset == "composite":  # its parts come from a config as plain dicts
            from reasoning_gym.composite import DatasetSpec

            settings["datasets"] = [
                DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in settings.get("datasets", [])
            ]
        with naming(f"reasoning-gym's {dataset!r} refuses its settings {config}", AssertionError):
            self.dataset = create_dataset(dataset, **settings)
        self._entry = functools.lru_cache(maxsize=SIZE)(self.dataset.__getitem__)
        self._parses = secure_scorer(self.dataset)

    def draw(self, rng: random.Random) -> Question:
        index = rng.randrange(len(self.dataset))
        return {"question": self._entry(index)["question"], "index": index}

    def key(self, question: Question) -> str:
        return question["question"]

    def solve(self, question: Question, rng: random.Random) -> Record:
        answer = self._entry(question["index"])["answer"]
        return {"answer": None if answer is None else str(answer), "index": question["index"]}

    def score(self, record: Record, completion: str) -> float:
        """Returns the scorer's value; 0 if there is no answer, or if the scorer fails on it."""
        answer = self.final_answer(completion)
        if answer is None or (self._parses and not is_arithmetic(answer)):
            return 0.0
        try:
            return float(self.dataset.score_answer(answer, self._entry(record["index"])))
        except Exception:
            # Many scorers raise at answers that they can't parse; such an answer is wrong, and no reason to end a run.
            return 0.0


def secure_scorer(dataset: Any) -> bool:
    """Keeps a dataset's scorer from running an answer as code; returns whether one hands answers to SymPy's parser."""
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, dict):
        secured = [secure_scorer(part) for part in parts.values()]  # all of them, where any() would stop at the first
        return any(secured)
    scorer = type(dataset).score_answer
    source = inspect.getsource(scorer)
    found = _RUNS.search(source)
    if found is not None:
        raise UsageError(
            f"the scorer of {type(dataset).__name__} calls {found[0].strip('. (')}, which could run an "
            "answer as code; take another dataset"
        )
    if _EVALUATES.search(source):
        sys.modules[scorer.__module__].__dict__["eval"] = ast.literal_eval
    return _PARSES.search(source) is not None


def is_arithmetic(answer: str) -> bool:
    """Returns whether a text is plain arithmetic, which is safe to evaluate and can't take long."""
    if not _ARITHMETIC.fullmatch(answer) or any(pattern.search(answer) for pattern in _HARMFUL):
        return False
    if any(len(word) > 1 and word not in _FUNCTIONS for word in re.findall(r"[A-Za-z]+", answer)):
        return False
    # Powers of powers multiply: (((9**99)**99)**99)**99.
    return len(re.findall(r"\)\s*\*\*", answer)) <= 2
