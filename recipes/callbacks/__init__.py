"""Lightning callbacks for checkpoints, progress, evaluation files, videos and pictures.

The command line adds what it needs; in Python they go into ``Trainer(callbacks=[...])``. Classes are imported when they
are first used, so that a command such as ``rl list`` imports no Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "checkpoints": ["Checkpoints"], "config_record": ["ConfigRecord"], "episode_monitor": ["EpisodeMonitor"],
    "recorder": ["EpisodeRecorder", "record_episodes"], "episode_writer": ["EpisodeWriter"],
    "stops": ["FiniteCheck", "StopTrainingOnRewardThreshold"],
    "progress": ["StepProgressBar", "TransitionProgressBar"],
}  # fmt: skip
_EXPORTS = {name: f"recipes.callbacks.{module}" for module, names in _MODULES.items() for name in names}
_EXPORTS["ValuePictures"] = "recipes.pictures"

__all__ = [
    "Checkpoints", "ConfigRecord", "EpisodeMonitor", "EpisodeRecorder", "EpisodeWriter", "FiniteCheck",
    "StepProgressBar", "StopTrainingOnRewardThreshold", "TransitionProgressBar", "ValuePictures", "record_episodes",
]  # fmt: skip

if TYPE_CHECKING:
    from recipes.callbacks.checkpoints import Checkpoints
    from recipes.callbacks.config_record import ConfigRecord
    from recipes.callbacks.episode_monitor import EpisodeMonitor
    from recipes.callbacks.episode_writer import EpisodeWriter
    from recipes.callbacks.progress import StepProgressBar, TransitionProgressBar
    from recipes.callbacks.recorder import EpisodeRecorder, record_episodes
    from recipes.callbacks.stops import FiniteCheck, StopTrainingOnRewardThreshold
    from recipes.pictures import ValuePictures


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
