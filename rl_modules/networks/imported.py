"""A user's network by its import path: made from the spaces, and tried on two observations before a run starts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.arguments import Custom
from rl_modules.common.errors import UsageError, what_happened
from rl_modules.common.loading import import_user_module, member_of
from rl_modules.common.modules import tree_map
from rl_modules.common.spaces import example_arrays


def in_dtype_of(module: nn.Module, observation: Any) -> Any:
    """Observations with their floats in the dtype of a module's parameters."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, observation)


def run_on_zeros(name: str, module: nn.Module, space: spaces.Space, *others: Tensor) -> Any:
    """Returns the module's output for two observations of zeros, and ``others``."""
    zeros = tree_map(lambda x: torch.from_numpy(np.stack([x] * 2)), example_arrays(space))
    was_training = module.training
    try:
        with torch.no_grad():
            return module.eval()(*(in_dtype_of(module, x) for x in (zeros, *others)))
    except Exception as error:
        raise UsageError(
            f"{name}: {class_name(module)} can't read two observations of {space}: {what_happened(error)}"
        ) from error
    finally:
        module.train(was_training)


def check_shape(name: str, module: nn.Module, shape: tuple[int, ...], space: spaces.Space) -> None:
    """Raises a UsageError if a module does not return a tensor of ``shape`` for two observations."""
    out = run_on_zeros(name, module, space)
    if not isinstance(out, Tensor) or out.shape != shape:
        raise UsageError(
            f"{name}: {class_name(module)} returned {shapes_of(out)} for 2 observations; it must return a "
            f"tensor of shape {shape}"
        )


def shapes_of(out: Any) -> str:
    """What a module returned, for a message."""
    if isinstance(out, Tensor):
        return f"a tensor of shape {tuple(out.shape)}"
    if isinstance(out, tuple):
        return " and ".join(shapes_of(part) for part in out) or "nothing"
    return type(out).__name__


def class_name(module: nn.Module) -> str:
    """Name of the class that the user wrote, also inside a :class:`~rl_modules.networks.features.FeaturesExtractor`."""
    return type(getattr(module, "extractor", module)).__name__


def make(name: str, given: Custom, *arguments: Any) -> nn.Module:
    """Imports and calls what an argument names."""
    described: Any = given if isinstance(given, dict) else {"class_path": given}
    path, settings = described["class_path"], described.get("init_args") or {}
    found = _imported(name, path)
    try:
        made = found(*arguments, **settings)
    except Exception as error:
        spaces_given = " and ".join(str(space) for space in arguments)
        raise UsageError(
            f"{name}: {path} can't be made from {spaces_given} with init_args={settings}: {what_happened(error)}"
        ) from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"{name}: {path} made {type(made).__name__}; it must make a torch.nn.Module")
    return made


def require_class(name: str, saved: Any) -> None:
    """Refuses a function that a checkpoint names, because loading would call arbitrary code."""
    if saved is None:
        return
    path = saved["class_path"] if isinstance(saved, dict) else saved
    found = _imported(name, path)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UsageError(
            f"the checkpoint names {name}={path}, which is no class of torch.nn.Module, and a checkpoint "
            "must not choose which functions are called; if you trust it, give it again: "
            f"load_from_checkpoint(…, {name}={path.rpartition('.')[2]})"
        )


def _imported(name: str, path: str) -> Callable[..., Any]:

    module, _, attribute = path.replace(":", ".").rpartition(".")
    return member_of(import_user_module(module, f"{name}={path!r}"), attribute, f"{name}={path!r}")
