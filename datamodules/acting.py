"""How a datamodule calls its algorithm: in the dtype of the weights.

Under ``precision=64-true`` Lightning converts the batches of ``training_step`` to float64. Layers of a subclass's own,
which need inputs of their weights' dtype, get such in ``act`` and ``prepare``, too.
"""

from collections.abc import Callable
from typing import Any

from rl_modules.common.double import in_double, is_double

#: Fields of experience that are inputs of networks.
INPUTS = ("observation", "next_observation", "action")


def rollout_act(learner: Any) -> Callable[..., Any]:
    """What experience is collected with: ``rollout_act()`` of an algorithm that has one, else ``act``."""
    act: Callable[..., Any] = learner.rollout_act() if hasattr(learner, "rollout_act") else learner.act
    if not is_double(learner):
        return act

    def act_in_double(observation: Any, *args: Any, **arguments: Any) -> Any:
        return act(in_double(observation), *args, **arguments)

    return act_in_double


def prepared_by(learner: Any, experience: Any) -> Any:
    """What an algorithm's ``prepare`` returns.

    Args:
        learner: the algorithm.
        experience: a rollout, or a sample of the replay buffer.
    """
    if is_double(learner):
        experience = {**experience, **{name: in_double(experience[name]) for name in INPUTS if name in experience}}
    return learner.prepare(experience)
