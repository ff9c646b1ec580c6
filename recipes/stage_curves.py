"""Curves of several training stages in one picture."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

_INKS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_TEXT, _GRID = "#333333", "#dddddd"
#: Pixels: height of a panel, room above it for its title and the ticks of the panel before, left and right margins.
_PANEL, _TOP, _LEFT, _RIGHT = 150, 44, 80, 10


def draw_curves(
    points: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], metrics: Sequence[str], width: int = 900
) -> Image.Image:
    """Draws the curves of several stages, one after the other, in one panel per metric."""
    shown = [metric for metric in metrics if any(metric in curves for curves in points.values())]
    length = {stage: max((c[-1][0] for c in curves.values() if c), default=1) for stage, curves in points.items()}
    scale = (width - _LEFT - _RIGHT) / (sum(length.values()) or 1)
    image = Image.new("RGB", (width, max(1, len(shown)) * (_PANEL + _TOP) + _TOP), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for row, metric in enumerate(shown):
        values = [value for curves in points.values() for _, value in curves.get(metric, ())]
        ticks = round_numbers(min(values), max(values))
        bottom, spread = (row + 1) * (_PANEL + _TOP), ticks[-1] - ticks[0]
        pen.text((_LEFT, bottom - _PANEL - 22), metric, "black", font)
        for tick, label in zip(ticks, labels(ticks), strict=True):
            y = bottom - _PANEL * (tick - ticks[0]) / spread
            pen.line((_LEFT, y, width - _RIGHT, y), _GRID)
            pen.text((_LEFT - 8 - pen.textlength(label, font), y - 9), label, _TEXT, font)
        start = 0
        for i, (stage, curves) in enumerate(points.items()):
            line = [(_LEFT + scale * (start + step), bottom - _PANEL * (value - ticks[0]) / spread)
                    for step, value in curves.get(metric, ())]  # fmt: skip
            if len(line) > 1:
                pen.line(line, _INKS[i % len(_INKS)], 2)
            start += length[stage]
        _mark_steps(pen, font, length, scale, bottom)
    x, y = float(_LEFT), len(shown) * (_PANEL + _TOP) + 24
    for i, stage in enumerate(points):
        pen.text((x, y), stage, _INKS[i % len(_INKS)], font)
        x += pen.textlength(stage, font) + 24
    return image


def _mark_steps(pen: Any, font: Any, length: Mapping[str, int], scale: float, bottom: int) -> None:
    """Marks round numbers of optimizer steps below a panel, which each stage counts from 0, as far as there is room."""
    start, free = 0, 0.0
    for steps in length.values():
        x = _LEFT + scale * start
        pen.line((x, bottom - _PANEL, x, bottom + 4), "#888888")
        for tick in round_numbers(0, steps, at_most=max(2, int(scale * steps / 70))):
            label, x = f"{tick:,.0f}", _LEFT + scale * (start + tick)
            half = pen.textlength(label, font) / 2
            if tick <= steps and x - half >= free:
                pen.line((x, bottom, x, bottom + 4), "#888888")
                pen.text((x - half if tick < steps else x - 2 * half, bottom + 4), label, _TEXT, font)
                free = x + half + 10
        start += steps


def round_numbers(low: float, high: float, at_most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from at or below ``low`` to at or above ``high``."""
    if high <= low:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / at_most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= at_most:
            break
    return [i * step for i in range(first, last + 1)]


def labels(ticks: Sequence[float]) -> list[str]:
    """Formats numbers with enough decimals to distinguish them."""
    step = ticks[1] - ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or max(map(abs, ticks)) >= 1e6:
        return [f"{tick:.3g}" for tick in ticks]
    return [f"{tick:,.{decimals}f}" for tick in ticks]
