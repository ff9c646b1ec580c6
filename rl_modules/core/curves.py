"""What the curves of both families share: the axis, the loggers, and the values that callbacks monitor."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor


class Curves(L.LightningModule):
    """Base of modules that write their curves by themselves, each over its own axis."""

    @property
    def _place(self) -> int:
        """The place on the x-axis: transitions in control, optimizer steps in language."""
        raise NotImplementedError

    @property
    def is_fitting(self) -> bool:
        """Whether a ``fit`` is running."""
        return self._trainer is not None and self._trainer.state.fn == "fit"

    def _write_point(self, metrics: Mapping[str, float], place: int | None = None) -> None:
        """Writes one point of each curve to each logger."""
        for logger in self.trainer.loggers:
            logger.log_metrics(dict(metrics), step=self._place if place is None else place)

    def _write_evaluation(self, metrics: Mapping[str, Tensor | float], **options: Any) -> None:
        """Makes an evaluation's means known to callbacks. A ``fit`` draws them; otherwise Lightning prints and returns
        them.

        Args:
            metrics: scalars by name.
            **options: of Lightning's ``log_dict``.
        """
        self.log_dict(metrics, logger=not self.is_fitting, **options)
        if self.is_fitting:
            self._write_point({name: float(value) for name, value in metrics.items()})

    def _hand_to_callbacks(self, metrics: Mapping[str, float]) -> None:
        """Makes metrics of training known to callbacks that monitor them, such as ``EarlyStopping``. ``log_dict`` would
        take 0.3 ms per name.
        """
        values = torch.tensor(list(metrics.values()), dtype=torch.float32).unbind()
        self.trainer.callback_metrics.update(zip(metrics, values, strict=True))
