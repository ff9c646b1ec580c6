"""Protects an earlier checkpoint from an exception before training."""

import sys
from typing import Any


def keep_earlier_checkpoint(trainer: Any, has_begun: bool) -> None:
    """Raises the exception that ended a fit before its training, instead of writing a checkpoint of it.

    ``OnExceptionCheckpoint`` overwrites the checkpoint of an earlier exception, from which its next fit resumes. A
    wrong argument would therefore destroy that run's checkpoint.

    Args:
        trainer: of the module that is to be saved; None: there is none.
        has_begun: whether training has begun.

    Raises:
        BaseException: the one that interrupted the fit.
    """
    error = sys.exc_info()[1]
    if error is not None and not has_begun and trainer is not None and trainer.interrupted:
        raise error
