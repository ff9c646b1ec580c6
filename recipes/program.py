"""Start of an algorithm's program: the program itself, or the ``rl`` command with the algorithm's default config."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from recipes.cli import main
from recipes.terminal import one_sentence


def end_if_missed(missed: Sequence[str], target: str) -> None:
    """Ends a program with exit status 1 where results miss their target.

    Args:
        missed: each such result, in words.
        target: what they should be.

    Raises:
        SystemExit: there is one; the sentence stands on standard error.
    """
    if missed:
        print(f"error: {', '.join(missed)}; the target is {target}", file=sys.stderr)
        raise SystemExit(1)


def run_program(program: Callable[[], Any], default_config: str, target: float | None = None) -> None:
    """Runs a program; with words on the command line, runs ``rl`` with them instead.

    ``python -m recipes.ppo`` runs the program, ``python -m recipes.ppo fit --model.gamma 0.9`` is ``rl fit`` with the
    default config where the words name none.

    Args:
        program: called without arguments.
        default_config: name of an installed config.
        target: least result of the program, as its first line states it; None: it states none.

    Raises:
        SystemExit: 1 where the target is missed or after an error, in one sentence; 128 + n after stopping at signal n.
    """
    if len(sys.argv) > 1:
        main(default_config=default_config)
        return
    from recipes.trainer import Trainer

    Trainer.raises_when_stopped = True
    with one_sentence():
        result = program()
    if target is not None and not result >= target:
        end_if_missed([f"the result of the test is {result:.4g}"], f"at least {target:g}")
