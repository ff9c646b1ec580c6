"""Lightning callbacks for checkpoints, progress, evaluation files, videos and pictures.

The command line adds what it needs; in Python they go into ``Trainer(callbacks=[...])``.
"""

from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.curves import ConfigRecord
from recipes.callbacks.episode_monitor import EpisodeMonitor, EpisodeWriter
from recipes.callbacks.pictures import ValuePictures
from recipes.callbacks.progress import StepProgressBar, TransitionProgressBar
from recipes.callbacks.recorder import EpisodeRecorder, record_episodes
from recipes.callbacks.stops import FiniteCheck, StopTrainingOnRewardThreshold

__all__ = [
    "Checkpoints",
    "ConfigRecord",
    "EpisodeMonitor",
    "EpisodeRecorder",
    "EpisodeWriter",
    "FiniteCheck",
    "StepProgressBar",
    "StopTrainingOnRewardThreshold",
    "TransitionProgressBar",
    "ValuePictures",
    "record_episodes",
]
