"""Counting the dots of a picture."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from datamodules.language.tasks.base import LISTED, Question, Record, Task
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed

#: Pixels of a picture's side, and of a dot's radius.
SIDE, RADIUS = 40, 2


@dataclass(eq=False)
class Dots(Task):
    """How many dots are in a picture of 40 x 40 pixels: one to ``most``, white, which do not touch each other.

    Picture i of the ``size`` pictures is the same for every seed.
    """

    name = "dots"
    default_template = "How many?"
    most: int = 9
    size: int | None = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("most", 1, 9)
        if self.size is None or not 20 <= self.size <= LISTED:
            raise UsageError(f"size={self.size} of task {self.name!r} must be from 20 to {LISTED} pictures")

    def questions(self) -> Iterator[Question]:
        return ({"picture": i} for i in range(self.size or 0))

    def prompt(self, question: Question) -> list[dict[str, Any]]:
        text = {"type": "text", "text": self.template}
        return [{"role": "user", "content": [{"type": "image"}, text]}]

    def solve(self, question: Question, rng: Random) -> Record:
        drawn = Random(stream_seed(0, 0, "dots", question["picture"]))
        number = drawn.randint(1, self.most)
        return {"answer": str(number), "images": [picture(number, drawn)]}


def picture(number: int, rng: Random) -> Image.Image:
    """Draws so many dots at random places."""
    apart, places = 2 * RADIUS + 2, list[tuple[int, int]]()
    while len(places) < number:
        x, y = (rng.randrange(RADIUS, SIDE - RADIUS) for _ in "xy")
        if all((x - a) ** 2 + (y - b) ** 2 >= apart**2 for a, b in places):
            places.append((x, y))
    row, column = np.mgrid[:SIDE, :SIDE]
    shown = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for x, y in places:
        shown[(column - x) ** 2 + (row - y) ** 2 <= RADIUS**2] = 255
    return Image.fromarray(shown)
