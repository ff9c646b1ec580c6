"""Classes for TRL's ``environment_factory``, as they are.

environment: datamodules.language.adapters.trl:TRLEnvironment
environment_kwargs: {factory: my_package.envs:WordleEnv}
"""

import inspect
from collections.abc import Callable
from typing import Any

from datamodules.language.environments import Step, own_columns
from datamodules.language.event_loop import awaited
from datamodules.language.messages import Message, content_of
from datamodules.language.tools import Tools
from rl_modules.common.errors import UsageError
from rl_modules.common.loading import load_object


class TRLEnvironment:
    """One instance of a class for ``GRPOTrainer(environment_factory=…)``: its public methods are tools,
    ``reset(**record)`` returns text that is appended to the last user message, and ``get_reward()``, where it has one,
    scores the dialogue when the model answers without a call.

    Not carried: images that a tool returns; several environments in one run (``environment_factory`` as a dict). Of a
    class without ``get_reward`` the reward is 0, and ``reward_funcs`` score the dialogue, without TRL's argument
    ``environments``.

    Args:
        factory: import path of the class, or of a function without arguments that makes an instance.
        settings: keyword arguments for it.
    """

    replayable = False  # what a class draws in reset is not known

    def __init__(self, factory: str | Callable[..., Any], settings: dict[str, Any] | None = None) -> None:
        made = load_object(factory, "factory") if isinstance(factory, str) else factory
        self.instance = made(**(settings or {}))
        members = dict(inspect.getmembers(type(self.instance), inspect.isfunction))
        if "reset" not in members:
            raise UsageError(f"factory={factory!r} makes a {type(self.instance).__name__} without a method reset")
        names = [name for name in members if not name.startswith("_") and name not in ("reset", "get_reward")]
        self._tools = Tools([getattr(self.instance, name) for name in names])
        self.tools = list(self._tools.schemas.values())

    def reset(self, record: dict[str, Any]) -> list[Message]:
        """Resets the instance; returns the record's prompt with what it said."""
        said = awaited(self.instance.reset(**own_columns(record)))
        prompt = record["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if said is not None:
            messages[-1]["content"] = content_of(messages[-1]["content"]) + content_of(said)
        return messages

    def step(self, message: Message) -> Step:
        """Runs calls; scores the dialogue at a message without one."""
        if results := self._tools.answer(message):
            return results, 0.0, False
        score = getattr(self.instance, "get_reward", None)
        return [], 0.0 if score is None else float(awaited(score())), True
