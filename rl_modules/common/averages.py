"""Lightning's averages of weights, on modules that build their networks when a fit sets them up."""

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging


def copy_for_averages(module: L.LightningModule) -> None:
    """Makes ``StochasticWeightAveraging`` copy a module again, because its ``setup`` ran before the networks were
    built.

    Args:
        module: just built, in a fit.
    """
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            callback.setup(module.trainer, module, "fit")
