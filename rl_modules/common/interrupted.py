"""What an exception before training must not cost."""

import sys
from typing import Any


def keep_earlier_checkpoint(trainer: Any, has_begun: bool) -> None:
    """Lets an exception pass that ends a fit before its training, in place of a checkpoint of it.

    ``OnExceptionCheckpoint`` writes over the checkpoint of an earlier exception, from which its next fit resumes: a
    wrong argument would cost that run.

    Args:
        trainer: of the module that is to be saved; None: there is none.
        has_begun: whether training has begun.

    Raises:
        BaseException: the one that interrupted the fit.
    """
    error = sys.exc_info()[1]
    if error is not None and not has_begun and trainer is not None and trainer.interrupted:
        raise error
