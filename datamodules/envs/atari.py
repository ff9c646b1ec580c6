"""Wrappers for Atari games that Gymnasium lacks."""

from typing import Any

import gymnasium as gym


class PressFire(gym.Wrapper):
    """Starts the game: presses the button after a reset, and again when a life was lost.

    Breakout does not move before this, and never under a greedy policy that has not learned to press. Put this wrapper
    innermost, around an environment made with ``frameskip=1``: each press takes one frame.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        game: Any = env.unwrapped
        self.fire = game.get_action_meanings().index("FIRE")
        self.lives = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        observation, _, _, _, info = self.env.step(self.fire)
        self.lives = info["lives"]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if info["lives"] < self.lives and not (terminated or truncated):
            observation, more, terminated, truncated, info = self.env.step(self.fire)
            reward = float(reward) + float(more)
        self.lives = info["lives"]
        return observation, reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """Ends an episode with each lost life; the next episode continues the same game until the last life is lost.

    For training only (Mnih et al. 2015): give ``eval_wrappers`` without it, so that evaluation plays whole games. It
    belongs around AtariPreprocessing and inside of FrameStackObservation.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.lives = 0
        #: Whether the running episode began within a game.
        self.continues_game = False
        #: Set to true, the next reset begins a new game.
        self.begins_anew = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.continues_game = not self.begins_anew
        if self.continues_game:
            # The policy takes no action in the step between two lives.
            observation, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                self.continues_game = False
        if not self.continues_game:
            observation, info = self.env.reset(seed=seed, options=options)
        self.begins_anew = False
        self.lives = info["lives"]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.begins_anew = terminated or truncated
        lost = 0 < info["lives"] < self.lives
        self.lives = info["lives"]
        return observation, reward, terminated or lost, truncated, info
