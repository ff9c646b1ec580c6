"""Metrics of a reward model: accuracy, margin and calibration, by torchmetrics."""

from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MinMetric
from torchmetrics.classification import BinaryAccuracy, BinaryCalibrationError

#: Bins of confidence between 1/2 and 1.
BINS = 10


class Bins(NamedTuple):
    """A reliability diagram as numbers, each [bins]; 0 where a bin is empty."""

    #: Comparisons whose confidence lies in the bin.
    comparisons: Tensor
    #: Their mean confidence σ(|r_c - r_r|), in [1/2, 1].
    confidence: Tensor
    #: Share of them where the answer with the higher score was the chosen one.
    accuracy: Tensor


class Reliability(Metric):
    """Confidence against accuracy, in bins of equal width between 1/2 and 1; summed over batches and ranks."""

    full_state_update = False
    sums: Tensor

    def __init__(self, bins: int = BINS) -> None:
        super().__init__()
        self.bins = bins
        # Rows: comparisons, their confidences, those decided rightly.
        self.add_state("sums", torch.zeros(3, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, lead: Tensor) -> None:
        """Counts comparisons."""
        confidence = lead.abs().sigmoid().double()
        place = ((confidence - 0.5) * 2 * self.bins).long().clamp(max=self.bins - 1)
        columns = torch.stack([torch.ones_like(confidence), confidence, (lead > 0).double()])
        self.sums.index_add_(1, place, columns.to(self.sums.dtype))

    def compute(self) -> Bins:
        """Returns the bins over everything that was counted."""
        count, confidence, right = self.sums
        filled = count.clamp(min=1)
        return Bins(count, confidence / filled, right / filled)


class PreferenceMetrics(nn.Module):
    """Accuracy, loss, margin and calibration (of the confidence σ(|r_c - r_r|)) of a reward model over comparisons."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.calibration = BinaryCalibrationError(n_bins=2 * BINS, norm="l1")
        self.reliability = Reliability()
        self.means: Any = nn.ModuleDict({name: MeanMetric() for name in ("loss", "margin", "mean_reward")})
        # Metrics of comparisons whose probability is known; NaN if there are none.
        self.known: Any = nn.ModuleDict(
            {name: MeanMetric(nan_strategy="ignore") for name in ("bayes_accuracy", "expected_accuracy")}
        )
        self.lowest, self.highest = MinMetric(), MaxMetric()

    def update(self, chosen: Tensor, rejected: Tensor, loss: Tensor, probability: Tensor) -> None:
        """Adds a batch of comparisons."""
        lead = chosen - rejected
        won = lead > 0
        rewards = torch.cat([chosen, rejected])
        self.accuracy.update(won.long(), torch.ones_like(won, dtype=torch.long))
        self.calibration.update(lead.abs().sigmoid(), won.long())
        self.reliability.update(lead)
        self.lowest.update(rewards)
        self.highest.update(rewards)
        self.means["loss"].update(loss, weight=len(lead))
        self.means["margin"].update(lead)
        self.means["mean_reward"].update(rewards)
        self.known["bayes_accuracy"].update(torch.maximum(probability, 1 - probability))
        self.known["expected_accuracy"].update(torch.where(won, probability, 1 - probability))

    def compute(self) -> tuple[dict[str, Tensor], Bins]:
        """Scalars by name over all ranks' comparisons, and the reliability diagram's bins."""
        scalars = {
            "accuracy": self.accuracy.compute(),
            "calibration_error": self.calibration.compute(),
            "min_reward": self.lowest.compute(),
            "max_reward": self.highest.compute(),
        }
        scalars.update({name: mean.compute() for name, mean in self.means.items()})
        known = {name: mean.compute() for name, mean in self.known.items()}
        scalars.update({name: value for name, value in known.items() if not value.isnan()})
        return scalars, self.reliability.compute()

    def reset(self) -> None:
        """Forgets the comparisons."""
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()


_SIZE, _LEFT, _TOP, _BOTTOM, _RIGHT, _HISTOGRAM = 360, 64, 44, 128, 20, 56
_BAR, _GAP, _INK, _GRID = (68, 119, 170), (204, 102, 119), (40, 40, 40), (225, 225, 225)
_OVERSAMPLING = 2


def reliability_diagram(bins: Bins, calibration_error: float) -> np.ndarray:
    """Draws bars of accuracy over confidence, both from 1/2 to 1, with a calibrated model's diagonal."""
    scale = _OVERSAMPLING
    width, height = _LEFT + _SIZE + _RIGHT, _TOP + _SIZE + _BOTTOM
    image = Image.new("RGB", (width * scale, height * scale), "white")
    pen = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(16 * scale), ImageFont.load_default(12 * scale)
    n = len(bins.comparisons)
    total = float(bins.comparisons.sum())

    def x(confidence: float) -> float:
        return (_LEFT + (confidence - 0.5) * 2 * _SIZE) * scale

    def y(accuracy: float) -> float:
        # From 0, because the accuracy of a bin may be below chance.
        return (_TOP + (1 - accuracy) * _SIZE) * scale

    title = f"calibration error {calibration_error:.3f} over {total:,.0f} comparisons"
    pen.text((x(0.5), 14 * scale), title, _INK, font)
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        pen.line((x(0.5), y(tick), x(1.0), y(tick)), _GRID, scale)
        pen.text((x(0.5) - 8 * scale, y(tick)), f"{tick:.2f}", _INK, small, anchor="rm")
    foot = y(0.0) + (_HISTOGRAM + 24) * scale
    for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        pen.text((x(tick), y(0.0) + 6 * scale), f"{tick:.1f}", _INK, small, anchor="ma")
    pen.text((x(0.75), foot + 8 * scale), "confidence; below: share of comparisons", _INK, small, "ma")
    pen.text((x(0.5) + 8 * scale, y(1.0) + 6 * scale), "accuracy (blue) and mean confidence (red)", _INK, small)
    most = float(bins.comparisons.max()) or 1.0
    for i, (count, confidence, accuracy) in enumerate(zip(*(column.tolist() for column in bins), strict=True)):
        if not count:
            continue
        left, right = x(0.5 + i / (2 * n)) + scale, x(0.5 + (i + 1) / (2 * n)) - scale
        pen.rectangle((left, y(accuracy), right, y(0.0)), _BAR)
        pen.line((left, y(confidence), right, y(confidence)), _GAP, 3 * scale)
        pen.rectangle((left, foot - count / most * _HISTOGRAM * scale, right, foot), (170, 170, 170))
    pen.line((x(0.5), y(0.5), x(1.0), y(1.0)), _INK, scale)
    pen.rectangle((x(0.5), y(1.0), x(1.0), y(0.0)), None, _INK, scale)
    return np.asarray(image.reduce(_OVERSAMPLING))
