"""Start of an algorithm's program: the program itself, or the ``rl`` command with the algorithm's default config."""

import sys
from collections.abc import Callable
from typing import Any

from recipes.cli.terminal import one_sentence


def run_program(program: Callable[[], Any], default_config: str) -> None:
    """Runs a program; with words on the command line, runs ``rl`` with them instead.

    ``python -m recipes.ppo`` runs the program, ``python -m recipes.ppo fit --model.gamma 0.9`` is ``rl fit`` with the
    default config where the words name none.

    Args:
        program: called without arguments.
        default_config: name of an installed config.

    Raises:
        SystemExit: 1 after an error in one sentence, 128 + n after stopping at signal n.
    """
    if len(sys.argv) > 1:
        from recipes.cli import main

        main(default_config=default_config)
        return
    from recipes.trainer import Trainer

    Trainer.raises_when_stopped = True
    with one_sentence():
        program()
