"""A reliability diagram as an image: accuracy of a reward model over its confidence."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rl_modules.language.preference_metrics import Bins

_SIZE, _LEFT, _TOP, _BOTTOM, _RIGHT, _HISTOGRAM = 360, 64, 44, 128, 20, 56
_BAR, _GAP, _INK, _GRID = (68, 119, 170), (204, 102, 119), (40, 40, 40), (225, 225, 225)
_OVERSAMPLING = 2


def reliability_diagram(bins: Bins, calibration_error: float) -> np.ndarray:
    """Draws bars of accuracy over confidence, both from 1/2 to 1, with the diagonal of a calibrated model.

    Red marks show the mean confidence of each bin, grey bars below them its number of comparisons.

    Args:
        bins: see :class:`~rl_modules.language.preference_metrics.Bins`.
        calibration_error: expected calibration error, for the title.

    Returns:
        Pixels [H, W, 3], uint8.
    """
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
