"""Warnings on rank 0."""

import logging

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rl_modules.common.errors import visible

log = logging.getLogger(__name__)


@rank_zero_only
def notice(text: str) -> None:
    """Logs a warning on rank 0, which ``rl fit`` does not silence as it does Lightning's ``rank_zero_info``."""
    log.warning(visible(text))
