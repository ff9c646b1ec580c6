"""Metrics of a reward model: accuracy, margin and calibration, by torchmetrics."""

from typing import Any, NamedTuple

import torch
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
    """Confidence against accuracy, in bins of equal width between 1/2 and 1; summed over batches and ranks.

    Args:
        bins: their number, ≥ 1.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, bins: int = BINS) -> None:
        super().__init__()
        self.bins = bins
        # Rows: comparisons, their confidences, those decided rightly.
        self.add_state("sums", torch.zeros(3, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, lead: Tensor) -> None:
        """Counts comparisons.

        Args:
            lead: r_c - r_r, [b].
        """
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
    """Accuracy, loss, margin and calibration of a reward model over held-out comparisons.

    The calibration error is that of the confidence σ(|r_c - r_r|) that the answer with the higher score was chosen.
    With the chosen answer always first, every outcome would be a win, and calibration would be undefined.
    """

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
        """Adds a batch of comparisons.

        Args:
            chosen: r_c, [b].
            rejected: r_r, [b].
            loss: mean over the batch, scalar.
            probability: true probability that the chosen answer wins, [b]; NaN if unknown.
        """
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
        """Scalars by name, over the comparisons of all ranks, and the reliability diagram's bins.

        If the true probabilities are known, they include ``bayes_accuracy`` (of a model that knows the probabilities)
        and ``expected_accuracy`` (of this model over all possible outcomes of the comparisons).
        """
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
