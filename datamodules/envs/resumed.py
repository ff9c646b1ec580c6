"""Running episodes of a checkpoint: repeated from their seeds and actions, or begun anew."""

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from datamodules.envs.episodes import LONGEST
from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.common.spaces import observation_arrays

if TYPE_CHECKING:
    from datamodules.collector import Collector


def resume_episodes(collector: "Collector", running: list[dict[str, Any]] | None) -> None:
    """Continues the episodes of a collector whose other state is loaded; None: the environments had failed."""
    everywhere = np.ones(collector.envs.num_envs, bool)
    interrupted = "the checkpoint was written by an error or interrupt while it stepped"
    if not collector.has_episodes:
        why = interrupted if collector.is_unfinished else "its engine has no state to restore"
        _begin_anew(collector, everywhere, why)
        return
    collector.boundary.reset(seed=collector._reset_seed)
    if running is None or collector.is_unfinished:
        # Their last steps are in no rollout, so continued episodes would have a gap.
        place_episodes(collector.envs, running or [])
        _begin_anew(collector, everywhere, interrupted)
        return
    differs = repeat_episodes(collector.envs, running, collector.space, collector._raw, collector._resets_next)
    is_long = np.array([episode.get("is_long", False) for episode in running])
    if is_long.any():
        _begin_anew(collector, is_long, f"its episode has more than {LONGEST:,} steps, which are not repeated")
    if (elsewhere := differs & ~is_long).any():
        _begin_anew(collector, elsewhere, "repeating its episode from seed and actions led elsewhere")


def _begin_anew(collector: "Collector", which: np.ndarray, why: str) -> None:
    rank_zero_warn(
        f"{collector.name}: environments {np.flatnonzero(which).tolist()} start a new episode, because "
        f"{why}; from here on the run differs from one that was never stopped."
    )
    collector._resets_next[which] = False
    collector.episode_start[which] = True
    collector.begun_anew |= which
    collector.report()  # what is forgotten began with the last rollout's rewards
    collector.episodes.forget(which)
    if collector.normalizers is not None:
        collector.normalizers.forget(which)
    if not collector.has_episodes:
        collector._observe(collector.boundary.reset(seed=collector._reset_seed))
        return
    for i, new in begin_next_episodes(collector.envs, which, collector.space).items():
        tree_map(lambda x, y, i=i: x.__setitem__(i, y), collector._raw, new)
        tree_map(lambda x, y, i=i: x.__setitem__(i, y), collector._observation, collector._stored(new))


def repeat_episodes(
    envs: Any, episodes: list[dict[str, Any]], space: spaces.Space, reached: Any, resets_next: np.ndarray
) -> np.ndarray:
    """Repeats episodes in a freshly reset vector; returns where they led elsewhere than ``reached``, [N]."""
    replays = [
        {**e, "actions": () if e["actions"] is None else e["actions"].numpy(), "resets_next": bool(resets)}
        for e, resets in zip(episodes, resets_next, strict=True)
    ]
    envs.set_attr("episode_state", replays)
    now = [tree_leaves(observation_arrays(space, o, double=True)) for o in envs.get_attr("last_observation")]
    then = tree_leaves(reached)
    return np.array(
        [
            any(not np.array_equal(a.astype(b.dtype), b[i]) for a, b in zip(leaves, then, strict=True))
            for i, leaves in enumerate(now)
        ]
    )


def place_episodes(envs: Any, episodes: list[dict[str, Any]]) -> None:
    """Resets a vector to the beginning of running episodes; none: to the first ones."""
    if episodes:
        lives = [len(e.get("resets", ())) for e in episodes]  # each began an episode of its own
        states = [
            {**e, "episode": e["episode"] + n, "actions": [], "resets": []}
            for e, n in zip(episodes, lives, strict=True)
        ]
        envs.set_attr("episode_state", states)


def begin_next_episodes(envs: Any, which: np.ndarray, space: spaces.Space) -> dict[int, Any]:
    """Begins the next episode in the chosen environments; returns their first observations by index."""
    states = envs.get_attr("episode_state")
    begun: dict[str, Any] = {"actions": (), "resets": [], "resets_next": False}
    fresh = [
        {**s, "episode": s["episode"] + 1 + len(s.get("resets", ())), **begun} if w else s
        for s, w in zip(states, which, strict=True)
    ]
    envs.set_attr("episode_state", fresh)
    last = envs.get_attr("last_observation")
    return {int(i): observation_arrays(space, last[i], double=True) for i in np.flatnonzero(which)}
