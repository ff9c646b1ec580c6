"""Answers within completions: between tags, in a box, or after a text; and thoughts before them."""

import re
from typing import Any

from rl_modules.common.errors import UsageError

#: Tags of thoughts and answers.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# An answer does not contain <answer>, because an earlier thought may mention the tag.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# A minus behind a digit or a bracket is one of a difference.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d(?:[\d,]*\d)?(?:\.\d+)?")
_THINK_ANSWER = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion, which is a string or a list of chat messages (the last one counts)."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as one text for tables and logs; messages with their roles, a line each."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in prompt)


def answer_of(text: str) -> str | None:
    """What stands in the last ``<answer>…</answer>``, stripped; None where there is no such pair."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def number_at_end(text: str) -> str | None:
    """The last number of a text, without commas between its digits; None where there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def voted_answer(text: str, after: str | None = None) -> str:
    r"""A completion's answer for a vote: its last ``<answer>`` tags, ``\boxed{…}``, what follows ``after``, or all."""
    tagged = answer_of(text)
    if tagged is not None:
        text = tagged
    boxed = _last_box(text)
    if boxed is not None:
        return boxed
    return (text.rpartition(after)[2] if after and tagged is None else text).strip()


def _last_box(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}``, stripped; None where there is none that is closed."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:end].strip()
    return None


def reference_text(reference: Any) -> str:
    """A reference answer as text, stripped; a number as it is written."""
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise UsageError(
            f"answer={str(reference)[:60]!r} is a {type(reference).__name__}, where text or a number should be"
        )
    return str(reference).strip()


def think_and_answer(thought: str, answer: str) -> str:
    """``<think>thought</think><answer>answer</answer>``."""
    return f"<think>{thought}</think><answer>{answer}</answer>"


def is_think_and_answer(text: str) -> bool:
    """Whether a text is one ``<think>…</think>`` followed by one ``<answer>…</answer>``, and nothing else but space."""
    return all(text.count(tag) == 1 for tag in TAGS) and _THINK_ANSWER.fullmatch(text) is not None


def opened_thought(prompt: str | list[dict[str, Any]]) -> str:
    """``<think>`` where a prompt, or a message that the model continues, ends with it; else nothing."""
    continues = isinstance(prompt, str) or prompt[-1]["role"] == "assistant"
    return TAGS[0] if continues and text_of(prompt).rstrip().endswith(TAGS[0]) else ""


def think_answer_format(
    prompts: Any, completions: Any, completion_ids: Any = None, *, rendered_prompts: Any = None, **columns: Any
) -> list[float | None]:
    """1.0 where the completion is one ``<think>…</think><answer>…</answer>`` and nothing else, 0.0 otherwise.

    A prompt that ends with ``<think>`` as the model reads it, after the chat template, has opened the first part.

    Source: DeepSeek-AI 2025, arXiv:2501.12948, section 2.2.2.
    """
    prompts = rendered_prompts or prompts
    opened = [""] * len(completions) if prompts is None else [opened_thought(prompt) for prompt in prompts]
    return [
        float(is_think_and_answer(start + text_of(completion)))
        for start, completion in zip(opened, completions, strict=True)
    ]
