"""Rollouts that are collected in a thread while the rollout before them trains."""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch

from datamodules.collector import rollout_act
from rl_modules.base import ControlModule
from rl_modules.contract import Act, Rollout

#: Attributes that a copy does not share with the learner.
_OWN = ("_trainer", "_modules", "_parameters", "_buffers", "training")


class CollectedAhead:
    """The next rollout, collected by a copy of the policy as it was at :meth:`begin`, while the policy trains."""

    def __init__(self, collect: Callable[[Act], Rollout]) -> None:
        self._collect = collect
        self._policy: Any = None
        # The learner's attributes at the last `begin`.
        self._seen: dict[str, Any] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._future: Future[Rollout] | None = None

    def begin(self, learner: Any, precision: Callable[[], AbstractContextManager]) -> None:
        """Starts to collect with the learner's present weights, in a context of its own, as autocast needs."""
        if self._policy is None:
            self._policy = frozen_copy(learner)
        else:
            for name, part in self._policy._modules.items():
                part.load_state_dict(learner._modules[name].state_dict())
            # Changed attributes, such as an exploration rate, are copied. The copy keeps those that it changed itself.
            present = learner.__dict__.items()
            changed = {k: x for k, x in present if k not in _OWN and x is not self._seen.get(k, _OWN)}
            self._policy.__dict__.update({**changed, **_own_tensors(learner)})
        self._seen = dict(learner.__dict__)

        def collect() -> Rollout:
            with torch.no_grad(), precision():
                return self._collect(rollout_act(self._policy))

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="collects ahead")
        self._future = self._pool.submit(collect)

    def take(self) -> Rollout | None:
        """Returns the rollout that was begun, complete and once; None: no rollout was begun."""
        future, self._future = self._future, None
        return None if future is None else future.result()

    def stop(self) -> None:
        """Waits for the rollout that is being collected, and ends the thread."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def frozen_copy(learner: ControlModule) -> Any:
    """A copy in evaluation mode with networks of its own, and the learner's other attributes."""
    other = copy.copy(learner)
    other.__dict__["_trainer"] = learner._trainer  # a copy has none
    other.__dict__["_modules"] = {name: copy.deepcopy(part).eval() for name, part in learner.named_children()}
    other.__dict__.update(_own_tensors(learner), training=False)
    return other.requires_grad_(False)


def _own_tensors(learner: ControlModule) -> dict[str, Any]:
    """Copies of the parameters and buffers that the learner itself has, beside those of its networks."""
    copies = {}
    for kind in ("_parameters", "_buffers"):
        copies[kind] = {name: None if x is None else x.detach().clone() for name, x in getattr(learner, kind).items()}
    return copies
