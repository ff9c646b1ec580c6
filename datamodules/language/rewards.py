"""Reward functions with TRL's signature, and what an argument names: by name, with settings, by import path.

A reward function is ``f(prompts, completions, completion_ids=None, **columns) -> list[float | None]``: one value per
completion, ``None`` where it does not apply. Completions are strings or lists of chat messages. Columns are the
records'.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from datamodules.language.mathematics import is_equal
from datamodules.language.reward_calls import RewardFunctions, function_name
from datamodules.language.tasks import RewardFunction, Task
from datamodules.language.tasks.answers import (
    TAGS,
    answer_of,
    number_at_end,
    reference_text,
    text_of,
    think_answer_format,
)
from rl_modules.common.errors import UsageError, at_least
from rl_modules.common.loading import load_object, require_settings
from rl_modules.language.critics import sequence_scores
from rl_modules.language.rereading import right_padded
from rl_modules.language.reward_model import load_reward_model
from rl_modules.language.text.chat_template import encoder_of

Rewards = list[float | None]

__all__ = [
    "RewardFunctions",
    "answer_in_tags",
    "cosine_length",
    "exact_answer",
    "last_number",
    "length_reward",
    "load_reward_func",
    "math_accuracy",
    "outside_thought",
    "repetition_penalty",
    "reward_model",
    "soft_overlong_penalty",
    "think_answer_format",
]


def exact_answer(
    prompts: Any, completions: Any, completion_ids: Any = None, *, answer: Sequence[Any], **columns: Any
) -> Rewards:
    """1.0 where the completion is the reference answer (space around it does not count), else 0.0; None without one."""
    return _compared(completions, answer, lambda text, reference: float(text.strip() == reference))


def answer_in_tags(
    prompts: Any, completions: Any, completion_ids: Any = None, *, answer: Sequence[Any], **columns: Any
) -> Rewards:
    """1.0 where the last ``<answer>…</answer>`` holds the reference answer, else 0.0; None without a reference."""
    return _compared(completions, answer, lambda text, reference: float(answer_of(text) == reference))


def last_number(
    prompts: Any, completions: Any, completion_ids: Any = None, *, answer: Sequence[Any], **columns: Any
) -> Rewards:
    """1.0 where the last number of the completion is the reference answer, else 0.0; None without one.

    Commas between digits do not count. Source: after "flexible-extract" of GSM8K in EleutherAI's lm-evaluation-harness.
    """
    return _compared(completions, answer, lambda text, sought: float(number_at_end(text) == sought.replace(",", "")))


def math_accuracy(
    prompts: Any, completions: Any, completion_ids: Any = None, *, answer: Sequence[Any], **columns: Any
) -> Rewards:
    """1.0 where ``math-verify`` finds the completion's answer equal to the reference, 0.0 where not.

    None where the reference is missing or no mathematics. What stands in ``<answer>`` tags is the completion's answer;
    without tags math-verify looks for it. What takes longer than 5 s counts as different.
    """
    return _compared(completions, answer, is_equal)


def _compared(completions: Sequence[Any], answer: Sequence[Any], score: Callable[[str, str], float | None]) -> Rewards:
    """The score of each completion's text and reference; None without a reference."""
    return [
        None if reference is None else score(text_of(completion), reference_text(reference))
        for completion, reference in zip(completions, answer, strict=True)
    ]


def length_reward(target: int) -> RewardFunction:
    """Returns a reward −|length − target| / target, at least −1; in tokens, or without them in characters."""
    at_least("length_reward: target", target)

    def reward(prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any) -> Rewards:
        return [max(-1.0, -abs(length - target) / target) for length in _lengths(completions, completion_ids)]

    return named(reward, "length_reward")


def soft_overlong_penalty(max_completion_length: int, cache_length: int) -> RewardFunction:
    """Returns a reward function that falls from 0 to −1 over the last ``cache_length`` tokens before the limit.

    R(y) = 0                                       where |y| ≤ L_max − L_cache
           (L_max − L_cache − |y|) / L_cache       where |y| ≤ L_max
           −1                                      beyond

    with L_max = ``max_completion_length`` and L_cache = ``cache_length``, in tokens as of :func:`length_reward`.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """
    if not 1 <= cache_length <= max_completion_length:
        raise UsageError(
            f"soft_overlong_penalty: cache_length={cache_length} must lie between 1 and "
            f"max_completion_length={max_completion_length}"
        )
    free = max_completion_length - cache_length

    def penalty(prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any) -> Rewards:
        lengths = _lengths(completions, completion_ids)
        return [-1.0 if n > max_completion_length else min(0.0, (free - n) / cache_length) for n in lengths]

    return named(penalty, "soft_overlong_penalty")


def repetition_penalty(ngram_size: int = 3, max_penalty: float = -1.0) -> RewardFunction:
    """Returns a reward function of −|p| times the share of a completion's n-grams of tokens that repeat another one.

    Source: Yeo et al. 2025, arXiv:2502.03373, appendix C.2. Equals TRL 1.16.
    """
    if ngram_size < 1 or max_penalty > 0:
        raise UsageError(
            f"repetition_penalty: ngram_size={ngram_size} must be at least 1, and max_penalty={max_penalty} at most 0"
        )

    def penalty(prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any) -> Rewards:
        texts = completion_ids if completion_ids is not None else map(text_of, completions)
        grams = [[tuple(ids[i : i + ngram_size]) for i in range(len(ids) - ngram_size + 1)] for ids in texts]
        return [max_penalty * (1 - len({*found}) / len(found)) if found else 0.0 for found in grams]

    return named(penalty, "repetition_penalty")


def cosine_length(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    reward: str | dict[str, Any] = "math_accuracy",
) -> RewardFunction:
    """Returns a reward function that prefers short right completions and long wrong ones.

    R(y) = long + ½ (short − long) (1 + cos(π min(|y| / L_max, 1)))

    from ``max_value_correct`` (short) to ``min_value_correct`` (long) where ``reward`` gives at least 1, from
    ``min_value_wrong`` to ``max_value_wrong`` where it gives less; None where it gives None.

    Source: Yeo et al. 2025, arXiv:2502.03373, appendix C.1. Equals TRL 1.16.
    """
    judge = load_reward_func(reward)
    at_least("cosine_length: max_len", max_len)

    @functools.wraps(judge)
    def scaled(completions: Any, **columns: Any) -> Rewards:
        found: Rewards = []
        lengths = _lengths(completions, columns.get("completion_ids"))
        for value, length in zip(judge(completions=completions, **columns), lengths, strict=True):
            short, long = (
                (max_value_correct, min_value_correct) if value and value >= 1 else (min_value_wrong, max_value_wrong)
            )
            share = (1 + math.cos(math.pi * min(length / max_len, 1))) / 2
            found.append(None if value is None else long + (short - long) * share)
        return found

    return named(scaled, "cosine_length")


def outside_thought(reward: str | dict[str, Any]) -> RewardFunction:
    """Returns a reward function that sees only what follows a completion's last ``</think>``, nothing without one."""
    judge = load_reward_func(reward)

    @functools.wraps(judge)
    def outside(completions: Any, **columns: Any) -> Rewards:
        texts = [text.rpartition(TAGS[1])[2] if TAGS[1] in text else "" for text in map(text_of, completions)]
        said: Any = [
            text if isinstance(given, str) else [{"role": "assistant", "content": text}]
            for text, given in zip(texts, completions, strict=True)
        ]
        return judge(completions=said, **columns)

    return named(outside, f"outside_thought.{function_name(judge)}")


def reward_model(path: str, name: str = "reward_model", rows: int = 64) -> RewardFunction:
    """Returns a reward function of a reward model's scores minus its offset; one of several may have each ``name``.

    Args:
        path: exported directory, hub name or checkpoint, as of ``reward_model_name_or_path``; read at the first call.
            Texts are tokenized by its own tokenizer and chat template. Truncated completions are scored as ended ones.
        name: of the function.
        rows: per forward pass.
    """

    @functools.cache
    def loaded() -> tuple[Any, Any]:

        found = load_reward_model(path)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return found._replace(model=found.model.to(device).eval()), encoder_of(found.tokenizer)

    @torch.no_grad()
    def score(prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any) -> Rewards:

        judge, encoder = loaded()
        asked, (answers,) = encoder.answered(prompts, list(map(text_of, completions)))
        texts = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores: Rewards = [None] * len(texts)
        for part in (order[i : i + rows] for i in range(0, len(order), rows)):
            tokens, length = (x.to(judge.model.device) for x in right_padded([texts[i] for i in part]))
            found = sequence_scores(judge.model, tokens, length) - judge.offset
            for i, value in zip(part, found.tolist(), strict=True):
                scores[i] = value
        return scores

    return named(score, name)


#: Reward functions that are ready.
FUNCTIONS: dict[str, RewardFunction] = {
    func.__name__: func for func in (exact_answer, answer_in_tags, last_number, think_answer_format, math_accuracy)
}
#: Those that settings make.
FACTORIES: dict[str, Callable[..., RewardFunction]] = {
    func.__name__: func
    for func in (length_reward, soft_overlong_penalty, repetition_penalty, cosine_length, outside_thought, reward_model)
}


def _lengths(completions: Any, completion_ids: Any) -> list[int]:
    return [len(ids) for ids in (completion_ids if completion_ids is not None else map(text_of, completions))]


def named(func: RewardFunction, name: str) -> RewardFunction:
    """The same function by a name."""
    func.__name__ = func.__qualname__ = name
    return func


# ---------------------------------------------------------------- what an argument names


def load_reward_func(spec: str | dict[str, Any] | RewardFunction, task: Any = None) -> RewardFunction:
    """Returns the reward function of an entry in a config: a built-in name; a name of one of the task's own
    (``accuracy``, ``utilities``); an import path ``package.module:function`` or ``package.module.function``; any of
    these with settings, ``{length_reward: {target: 20}}``, which calls what the name stands for to make the function;
    or a function. Those of ``trl.rewards`` read chat messages only, so they are given strings in that form.

    Raises:
        UsageError: an unknown name, an import path without a function, a model, missing or unknown settings.
    """
    if not isinstance(spec, str | dict):
        # A partial has the name of what it calls.
        return _adapted(spec, getattr(getattr(spec, "func", spec), "__name__", type(spec).__name__))
    if isinstance(spec, dict):
        if len(spec) != 1 or not isinstance(next(iter(spec.values())), dict):
            raise UsageError(
                f"reward function {spec} must be one name with its settings, such as {{length_reward: {{target: 20}}}}"
            )
        ((name, settings),) = spec.items()
        factory = FACTORIES.get(name) or _imported(name, [*FUNCTIONS, *FACTORIES])
        require_settings(factory, settings, f"reward function {name!r}")
        return _adapted(factory(**settings), name)
    own = {} if task is None else {func.__name__: func for func in [*task.reward_funcs, task.utilities]}
    if spec in FACTORIES:
        needed = ", ".join(inspect.signature(FACTORIES[spec]).parameters)
        raise UsageError(f"reward function {spec!r} needs settings ({needed}): write {{{spec}: {{…}}}}")
    known = {**FUNCTIONS, **own}
    return _adapted(known.get(spec) or _imported(spec, [*known, *FACTORIES]), spec)


def load_reward_funcs(given: Any, task: Task | None) -> list[RewardFunction]:
    """The reward functions of an argument, one or several entries; those of a mixture's sources come before them."""
    specs: Any = [given] if isinstance(given, str | dict) or callable(given) else given
    sources = task.reward_funcs if task is not None and task.is_mixture else []
    return [load_reward_func(spec, task) for spec in [*sources, *specs]]


def _imported(path: str, known: list[str]) -> Any:
    """The object of an import path; the name or directory of a model is refused."""
    if ("/" in path and ":" not in path) or (Path(path) / "config.json").is_file():
        raise UsageError(
            f"reward function {path!r} is the name or directory of a model; give it to the module as "
            "reward_model_name_or_path, not to the datamodule in reward_funcs"
        )
    return load_object(path, "reward function", known, "a function")


def _adapted(func: Any, spec: str) -> RewardFunction:
    """A function with a name, that takes completions as strings or as chat messages."""
    if isinstance(func, nn.Module) and "completions" not in inspect.signature(func.forward).parameters:
        raise UsageError(
            f"reward function {spec!r} is a model; write it with save_pretrained and give the directory to the module "
            "as reward_model_name_or_path, not to the datamodule in reward_funcs"
        )
    if not callable(func) or inspect.isclass(func):
        raise UsageError(f"reward function {spec!r} is a {type(func).__name__}, not a function")
    name = getattr(func, "__name__", re.split("[.:]", spec)[-1])  # TRL's functions with settings are nameless objects
    if getattr(func, "__module__", "").startswith("trl.rewards"):
        return named(_with_messages(func), name)
    return func if hasattr(func, "__name__") else named(functools.partial(func), name)


def _with_messages(func: RewardFunction) -> RewardFunction:
    @functools.wraps(func)
    def call(*, completions: Any, **columns: Any) -> Rewards:
        chats = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
        return func(completions=chats, **columns)

    return call
