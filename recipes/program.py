"""Start of an algorithm's program: the program itself, or the ``rl`` command with the algorithm's default config."""

import sys
from collections.abc import Callable
from typing import Any


def run_program(program: Callable[[], Any], default_config: str) -> None:
    """Runs a program; with words on the command line ``rl`` with them, and the default config where they name none."""
    if len(sys.argv) > 1:
        from recipes.cli import main

        main(default_config=default_config)
        return
    from recipes.callbacks.signals import Stopped
    from recipes.trainer import Trainer
    from rl_modules.common.errors import UsageError

    Trainer.raises_when_stopped = True
    try:
        program()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
