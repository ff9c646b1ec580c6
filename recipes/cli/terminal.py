"""Output to the terminal: texts, also into a pipe, and the messages of the libraries."""

import logging
import os
import sys
import warnings

#: Warnings that do not concern the person at the terminal, as regular expressions.
_HIDDEN = (
    ".*LightningCLI's args parameter is intended.*",  # sys.argv stays, because Lightning starts other ranks with it
    ".*is deprecated, use `isinstance.treespec, TreeSpec.*",  # Lightning calls torch by an old name
    ".*smaller than the logging interval.*",  # metrics are written once per epoch, not every n steps
    ".*does not have many workers.*",
    ".*Total length of .* across ranks is zero.*",  # evaluation is off
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*treespec.*",
    ".*callbacks used to create the checkpoint need to be provided.*",  # evaluation writes no checkpoints
    ".*Couldn't infer the batch indices.*",
    ".*your dataloader is not resumable.*",  # the datamodule stores the loader's state
    "Found .* module.s. in eval mode at the start of training.*",  # reference and reward model, on purpose
    ".*recommended to use .self.log.*sync_dist=True.*",  # what is logged so is the same on all ranks
    ".*torch.distributed.nn.functional.all_gather is deprecated.*",  # Lightning calls it
    ".*but have no logger configured.*",  # `test` after `fit` reports in the summary
)


def quiet() -> None:
    """Hides the libraries' messages that are not for the person at the terminal, and shows the datamodules' own."""
    if not (ours := logging.getLogger("datamodules")).handlers:
        ours.addHandler(logging.StreamHandler())
        ours.setLevel(logging.INFO)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # The report of a requested profiler, and the reason for which EarlyStopping with `verbose` ended a run.
    for name in ("lightning.pytorch.profilers", "lightning.pytorch.callbacks.early_stopping"):
        logging.getLogger(name).setLevel(logging.INFO)
    for message in _HIDDEN:
        warnings.filterwarnings("ignore", message)


def show(text: str) -> None:
    """Prints a text. A closed pipe, as in ``rl list | head``, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
