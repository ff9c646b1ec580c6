"""Messages to the user that are shown whatever log level a recipe sets."""

import logging

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rl_modules.common.errors import visible

log = logging.getLogger(__name__)


@rank_zero_only
def notice(text: str) -> None:
    """Log a warning on rank 0: without any logging configured Python writes it to standard error.

    Lightning's own ``rank_zero_info`` is silenced by ``rl fit`` together with Lightning's messages.
    """
    log.warning(visible(text))
