"""Calls of the algorithm by a datamodule, with inputs in the dtype of the weights.

Under ``precision=64-true`` Lightning converts the batches of ``training_step`` to float64. The functions here convert
the inputs of ``act`` and ``prepare`` too, because layers that a subclass adds need inputs of their weights' dtype.
"""

from collections.abc import Callable
from typing import Any

from rl_modules.common.modules import in_double, is_double

#: Fields of experience that are inputs of networks.
INPUTS = ("observation", "next_observation", "action")


def rollout_act(learner: Any) -> Callable[..., Any]:
    """Returns the function that collects experience: ``rollout_act()`` if the algorithm has it, else ``act``."""
    act: Callable[..., Any] = learner.rollout_act() if hasattr(learner, "rollout_act") else learner.act
    if not is_double(learner):
        return act

    def act_in_double(observation: Any, *args: Any, **arguments: Any) -> Any:
        return act(in_double(observation), *args, **arguments)

    return act_in_double


def prepared_by(learner: Any, experience: Any) -> Any:
    """Returns the result of an algorithm's ``prepare``.

    Args:
        learner: the algorithm.
        experience: a rollout, or a sample of the replay buffer.
    """
    if is_double(learner):
        experience = {**experience, **{name: in_double(experience[name]) for name in INPUTS if name in experience}}
    return learner.prepare(experience)
