"""The global random generators of a process, from which custom networks, losses and dropout draw."""

import random
from typing import Any

import numpy as np
import torch

from rl_modules.common.spaces import tree_leaves, tree_map


class GlobalGenerators:
    """The states of Python's, NumPy's and torch's global generators, for the checkpoints of a run that draws from them.

    A run that does not draw stores no states, so its checkpoint does not depend on earlier code of the process.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._at_start: dict[str, Any] | None = None
        self._resumed = False

    def load(self, state: dict[str, Any] | None) -> None:
        """Keeps what :meth:`state` returned until :meth:`start`."""
        self._loaded = state

    def start(self, device: torch.device) -> None:
        """Sets the generators to the loaded state, if there is one; called when training begins.

        Args:
            device: of the module; its generator is set unless the state is of another kind of device.
        """
        self._resumed = self._loaded is not None
        if self._loaded is not None:
            _restore(self._loaded, device)
        self._loaded, self._at_start = None, _states(device)

    def state(self, device: torch.device) -> dict[str, Any] | None:
        """Returns the states as a checkpoint may hold them; None where nothing has drawn since the run's start.

        Args:
            device: of the module; its generator is included.
        """
        if self._at_start is None:
            return self._loaded  # of a run that was complete
        now = _states(device)
        return now if self._resumed or not _are_same(now, self._at_start) else None


def _states(device: torch.device) -> dict[str, Any]:
    of_numpy = tree_map(_to_tensor, np.random.get_state(legacy=False))  # noqa: NPY002
    state = {"python": random.getstate(), "numpy": of_numpy, "torch": torch.get_rng_state()}
    if device.type in ("cuda", "mps"):
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def _restore(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(tree_map(_to_array, state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


def _are_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


def _to_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf.astype(np.int64)) if isinstance(leaf, np.ndarray) else leaf


def _to_array(leaf: Any) -> Any:
    return leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf
