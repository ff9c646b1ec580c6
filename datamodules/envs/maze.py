"""A small maze that is defined by text, for tabular algorithms."""

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_modules.common.errors import UsageError

LAYOUT = """
S..
.TG
"""

#: Row and column steps of the actions, in FrozenLake's order: left, down, right, up.
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))

CHARACTERS = {"S": "start", "G": "goal", "T": "trap", "#": "wall", ".": "floor"}

_COLORS = {"S": (198, 219, 239), "G": (116, 196, 118), "T": (239, 101, 72), "#": (70, 70, 70), ".": (245, 245, 245)}
_CELL = 64


class Maze(gym.Env):
    """Find the goal, avoid the trap; both end the episode.

    Moves are certain. A move into a wall, or out of the maze, leaves the agent where it is. The table ``P`` is in
    Gymnasium's format, ``P[s][a] = [(probability, s', reward, terminated)]``, as FrozenLake's is.

    Observation: ``row * columns + column``, Discrete. Walls have numbers too, although no agent reaches them.
    Actions: 0 left, 1 down, 2 right, 3 up.
    Rewards: ``goal_reward`` on entering a goal, ``trap_reward`` on entering a trap, 0 for any other move.

    Args:
        layout: rows of ``S`` (start; of several, one is drawn for each episode), ``G`` (goal), ``T`` (trap), ``#``
            (wall) and ``.`` (floor). Indentation and empty lines around it do not count.
        goal_reward: in units of reward.
        trap_reward: in units of reward.
        render_mode: ``ansi``, ``rgb_array`` or None.

    Raises:
        UsageError: an unknown character, rows of different lengths, no start or no goal.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 (Gymnasium reads this attribute)

    def __init__(
        self,
        layout: str = LAYOUT,
        goal_reward: float = 10.0,
        trap_reward: float = -10.0,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise UsageError(f"render_mode={render_mode!r} must be ansi or rgb_array")
        self.desc = _parse(layout)
        self.shape = self.desc.shape
        self.render_mode = render_mode
        self.observation_space = spaces.Discrete(self.desc.size)
        self.action_space = spaces.Discrete(len(MOVES))
        self.initial_state_distrib = (self.desc == "S").ravel() / (self.desc == "S").sum()
        rewards = {"G": float(goal_reward), "T": float(trap_reward)}
        self.P = {
            state: {action: [self._outcome(state, action, rewards)] for action in range(len(MOVES))}
            for state in range(self.desc.size)
        }
        self._state = 0

    def _outcome(self, state: int, action: int, rewards: dict[str, float]) -> tuple[float, int, float, bool]:
        cells = self.desc.ravel()
        if cells[state] in ("G", "T", "#"):
            # No action is taken here; FrozenLake's table has the same form.
            return 1.0, state, 0.0, True
        row, column = divmod(state, self.shape[1])
        row, column = row + MOVES[action][0], column + MOVES[action][1]
        inside = 0 <= row < self.shape[0] and 0 <= column < self.shape[1]
        successor = row * self.shape[1] + column if inside else state
        if cells[successor] == "#":
            successor = state
        return 1.0, successor, rewards.get(cells[successor], 0.0), bool(cells[successor] in ("G", "T"))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._state = int(self.np_random.choice(self.desc.size, p=self.initial_state_distrib))
        return self._state, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        [(_, self._state, reward, terminated)] = self.P[self._state][int(action)]
        return self._state, reward, terminated, False, {}

    def render(self) -> Any:
        """The maze with the agent in it: text with ``A`` for the agent, or pixels [64·rows, 64·columns, 3], uint8."""
        if self.render_mode == "ansi":
            cells = self.desc.copy()
            cells.ravel()[self._state] = "A"
            return "\n".join("".join(row) for row in cells) + "\n"
        if self.render_mode == "rgb_array":
            return self._pixels()
        gym.logger.warn("Maze-v0 was made without a render_mode; give gymnasium.make ansi or rgb_array")
        return None

    def _pixels(self) -> np.ndarray:
        tiles = np.array([[_COLORS[cell] for cell in row] for row in self.desc], np.uint8)
        image = tiles.repeat(_CELL, 0).repeat(_CELL, 1)
        image[::_CELL] = image[:, ::_CELL] = (200, 200, 200)
        row, column = np.unravel_index(self._state, self.shape)
        y, x = np.ogrid[:_CELL, :_CELL]
        disc = (y - _CELL / 2) ** 2 + (x - _CELL / 2) ** 2 <= (_CELL * 0.3) ** 2
        image[row * _CELL : (row + 1) * _CELL, column * _CELL : (column + 1) * _CELL][disc] = (49, 88, 150)
        return image


def _parse(layout: str) -> np.ndarray:
    """Returns the layout as an array [rows, columns] of single characters."""
    lines = [line.rstrip() for line in inspect.cleandoc(layout).split("\n")]
    legend = ", ".join(f"{character!r} {meaning}" for character, meaning in CHARACTERS.items())
    for number, line in enumerate(lines, 1):
        unknown = next((character for character in line if character not in CHARACTERS), None)
        if unknown is not None:
            raise UsageError(f"layout, line {number} ({line!r}): {unknown!r} is no cell; a maze is drawn with {legend}")
        if len(line) != len(lines[0]):
            raise UsageError(
                f"layout, line {number} ({line!r}) has {len(line)} cells, line 1 ({lines[0]!r}) has "
                f"{len(lines[0])}; fill the shorter one with '#' or '.'"
            )
    for needed in "SG":
        if not any(needed in line for line in lines):
            raise UsageError(f"layout={layout!r} has no {CHARACTERS[needed]}; draw at least one {needed!r}")
    return np.array([list(line) for line in lines])
