"""Stable-Baselines3's methods for training, saving and loading; each raises an error that names the method to use."""

from typing import Any, NoReturn

from rl_modules.common.calls import three_lines
from rl_modules.common.errors import UsageError


class ForeignCalls:
    """Methods of another library's modules, which raise an error with the equivalent call."""

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
