"""Methods by which Stable-Baselines3 trains, saves and loads, each of which says how that is done here."""

from typing import Any, NoReturn

from rl_modules.common.calls import three_lines
from rl_modules.common.errors import UsageError


class ForeignCalls:
    """Answers calls of another library by the call that does the same here."""

    def learn(self, *args: Any, **arguments: Any) -> NoReturn:
        """Stable-Baselines3's name for the Trainer's ``fit``.

        Raises:
            UsageError: always; says how to train.
        """
        raise UsageError(f"{type(self).__name__} has no learn; train with {three_lines(type(self))}")

    def save(self, *args: Any, **arguments: Any) -> NoReturn:
        """Stable-Baselines3's name for the Trainer's ``save_checkpoint``.

        Raises:
            UsageError: always; says how to save.
        """
        raise UsageError(f"{type(self).__name__} has no save; write a checkpoint with trainer.save_checkpoint(path)")

    @classmethod
    def load(cls, *args: Any, **arguments: Any) -> NoReturn:
        """Stable-Baselines3's name for ``load_from_checkpoint``.

        Raises:
            UsageError: always; says how to load.
        """
        raise UsageError(
            f"{cls.__name__} has no load; read a checkpoint with {cls.__name__}.load_from_checkpoint(path)"
        )

    def set_env(self, *args: Any, **arguments: Any) -> NoReturn:
        """Stable-Baselines3's name for another environment, which here is another datamodule.

        Raises:
            UsageError: always; says how to train on it.
        """
        raise UsageError(
            f"{type(self).__name__} has no environment; train on another one with {three_lines(type(self))}"
        )
