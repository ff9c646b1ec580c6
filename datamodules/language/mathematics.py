"""Compares a completion's answer and a reference mathematically, by math-verify.

math-verify ends long computations, such as of ``9^{9^{9}}``, by a signal, which only the main thread of a process
receives. Outside of it a separate process makes the comparison: ``python -m datamodules.language.mathematics`` answers
each line of JSON by one.
"""

import atexit
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

from datamodules.language.tasks.answers import answer_of

# A warning of a text that takes too long repeats the text: such an answer is wrong, which the reward says already.
logging.getLogger("math_verify").setLevel(logging.ERROR)
#: Seconds after which math-verify gives up on a text, or on a comparison.
LIMIT_S = 5
#: Seconds after which a process that the signal does not reach is ended.
_PROCESS_LIMIT_S = 60
#: Marks by which math-verify finds LaTeX itself.
_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
#: One number, thousands apart or not, with a unit, a currency or a short word beside it.
_NUMBER_IN_PROSE = re.compile(r"[^\d\\^_=({\[<>+/-]*[-+]?(\d{1,3}([, ]\d{3})+|\d+)(\.\d+)?%?(\s+[A-Za-z/]+)?[.*\s]*$")
_TEXT_IN_LATEX = re.compile(r"\\(text|textbf|textrm|mathrm|mbox)\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\(begin|end)\{\w*\*?\}|\\[A-Za-z]+")

#: Processes that wait for a question; a thread takes one out while it asks.
_waiting: list["subprocess.Popen[str]"] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)


def is_equal(text: str, reference: str) -> float | None:
    """1.0 if the answer in a text equals a reference, 0.0 if not or too slow to tell; None: no mathematics."""
    is_main = threading.current_thread() is threading.main_thread()
    return _compare(text, reference, LIMIT_S) if is_main else _ask(text, reference)


def _compare(text: str, reference: str, limit_s: int) -> float | None:
    from math_verify import parse, verify

    gold = _mathematics(reference, limit_s)
    if not gold:
        return None
    tagged = answer_of(text)
    found = parse(text, parsing_timeout=limit_s) if tagged is None else _mathematics(tagged, limit_s)
    return float(verify(gold, found, timeout_seconds=limit_s))


def _mathematics(text: str, limit_s: int) -> list[Any]:
    """Parses a short text, LaTeX also without dollars, where math-verify would read only the 2 of 2√3."""
    from math_verify import parse

    forms = [text] if _has_words(text) else [f"${text}$", text]
    if _MARKED.search(text) or _NUMBER_IN_PROSE.match(text):
        forms.reverse()
    return next((found for form in forms if (found := parse(form, parsing_timeout=limit_s))), [])


def _has_words(text: str) -> bool:
    """Whether a text has words of prose, apart from units and the like beside its mathematics."""
    mathematics = _TEXT_IN_LATEX.sub("", text)
    words = _COMMAND.sub("", mathematics if re.search(r"\w", mathematics) else text)
    return re.search(r"[A-Za-z]{3}", words) is not None


# -------------------------------------------------------------------- in a process


def _ask(text: str, reference: str) -> float | None:
    """:func:`is_equal` by another process; a RuntimeError for what math-verify raised there."""
    try:
        process = _waiting.pop()
    except IndexError:
        process = _start()
    assert process.stdin is not None and process.stdout is not None
    end = threading.Timer(_PROCESS_LIMIT_S, process.kill)
    end.start()
    try:
        process.stdin.write(json.dumps([text, reference, LIMIT_S]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        end.cancel()
    if not line:
        if (code := process.wait()) >= 0:
            raise RuntimeError(f"math-verify's process ended with code {code}; what it said is above")
        return 0.0  # ended by us, or by the system for the memory that it took
    _waiting.append(process)
    value: float | None
    value, reason = json.loads(line)
    if reason:
        raise RuntimeError(reason)
    return value


def _start() -> "subprocess.Popen[str]":
    path = os.pathsep.join(place for place in sys.path if place)
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@atexit.register
def _end() -> None:
    while _waiting:
        with _waiting.pop():  # which closes its input, after which it ends
            pass


def _answer() -> None:
    """Answers questions until the run that asks has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C ends the run, which closes the input
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            found = _compare(*json.loads(line)), ""
        except Exception as error:
            found = None, f"{type(error).__name__}: {error}"
        try:
            print(json.dumps(found), file=answers, flush=True)
        except BrokenPipeError:
            os._exit(0)


if __name__ == "__main__":
    _answer()
