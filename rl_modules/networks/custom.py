"""User-defined networks: made from an import path with arguments, and checked before a run starts."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as nnf

from rl_modules.common.arguments import Custom
from rl_modules.common.errors import UsageError, what_happened
from rl_modules.common.masks import FORBIDDEN
from rl_modules.common.modules import tree_map
from rl_modules.common.spaces import example_arrays, is_image
from rl_modules.distributions import Distribution, as_distribution, make_distribution, parameter_count
from rl_modules.functional.checks import as_float
from rl_modules.networks.critics import LOG_STD_MAX, LOG_STD_MIN, ActionBounds, PolicyAndCritics, SquashedGaussianPolicy
from rl_modules.networks.images import pixel_scale


def plain_path(name: str, given: Custom) -> dict[str, Any]:
    """A class or callable as its import path with arguments."""
    if isinstance(given, dict):
        if not isinstance(given.get("class_path"), str) or set(given) - {"class_path", "init_args"}:
            raise UsageError(f"{name}={given!r} must have the key class_path, and perhaps init_args")
        return given
    arguments: dict[str, Any] = {}
    target: Any = given
    if isinstance(given, functools.partial) and not given.args:
        target, arguments = given.func, dict(given.keywords)
    path = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    if isinstance(target, nn.Module) or not callable(target) or "<" in path or path.endswith("."):
        raise UsageError(
            f"{name}={given!r} has no import path, by which a checkpoint could find it again; give a "
            "class or function at the first level of a module, or functools.partial of one with keyword "
            "arguments"
        )
    return {"class_path": path, "init_args": arguments}


# ---------------------------------------------------------------- feature extractors


class FeaturesExtractor(nn.Module):
    """A user's feature extractor, called as in Stable-Baselines3: ``cls(observation_space, **init_args)``.

    It receives float observations as in SB3: images divided by 255, Discrete and MultiDiscrete one-hot, a Dict as a
    dictionary. Its ``features_dim`` is the width of its output.

    Shape: [B, *obs] → [B, features_dim].
    """

    #: Networks built on it do not initialise its weights.
    is_users = True

    def __init__(self, given: Custom, space: spaces.Space) -> None:
        super().__init__()
        self.space = space
        self.extractor = make("features_extractor", given, space)
        self.out_features = int(self.extractor.features_dim)  # type: ignore[arg-type]
        check_shape("features_extractor", self, (2, self.out_features), space)

    def forward(self, observation: Any) -> Tensor:
        return self.extractor(in_dtype_of(self.extractor, as_floats(observation, self.space)))


def as_floats(observation: Any, space: spaces.Space) -> Any:
    """Converts a batch of observations to floats, [B, …]: pixels to [0, 1], discrete values to one-hot vectors."""
    if isinstance(space, spaces.Dict):
        return {name: as_floats(observation[name], part) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): as_floats(observation[str(i)], part) for i, part in enumerate(space)}
    if isinstance(space, spaces.Discrete):
        return nnf.one_hot(observation.long().reshape(-1), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        choices = observation.long().flatten(1).unbind(1)
        options = space.nvec.reshape(-1).tolist()
        return torch.cat([nnf.one_hot(x, n) for x, n in zip(choices, options, strict=True)], 1).float()
    x = observation if observation.is_floating_point() else observation.float()
    if isinstance(space, spaces.Box) and is_image(space):
        x = x / (pixel_scale(space) or 255.0)
    return x


# ---------------------------------------------------------------- whole networks


class CustomActorCritic(nn.Module):
    """A user's policy and value network.

    ``cls(observation_space, action_space, **init_args)`` receives observations as rollouts store them, and returns the
    policy and the value [B]; without a critic the policy alone. The policy is a distribution (this project's or
    ``torch.distributions``'), or the numbers that :func:`rl_modules.distributions.make_distribution` reads: logits, and
    for a Box the means and the log standard deviations, [B, 2A], or the means alone if the module has ``log_std``.
    """

    def __init__(
        self, given: Custom, observation_space: spaces.Space, action_space: spaces.Space, critic: bool = True
    ) -> None:
        super().__init__()
        self.action_space, self.critic = action_space, critic
        self.module = make("network", given, observation_space, action_space)
        out = run_on_zeros("network", self.module, observation_space)
        if critic and not (isinstance(out, tuple) and len(out) == 2 and getattr(out[1], "shape", None) == (2,)):
            raise UsageError(
                f"network: {_name(self.module)} returned {shapes_of(out)} for 2 observations; it must "
                "return the policy and the value of shape (2,)"
            )
        policy = out[0] if isinstance(out, tuple) else out
        if isinstance(policy, Tensor) and policy.shape not in self._shapes:
            wanted = " or ".join(map(str, self._shapes))
            raise UsageError(
                f"network: {_name(self.module)} returned a policy of shape {tuple(policy.shape)} for 2 "
                f"observations; the action space {action_space} needs {wanted}"
            )

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        width = parameter_count(self.action_space)
        if not isinstance(self.action_space, spaces.Box):
            return [(2, width)]
        return [(2, 2 * width), *([(2, width)] if isinstance(getattr(self.module, "log_std", None), Tensor) else [])]

    def forward(self, observation: Any) -> tuple[Distribution, Tensor]:
        out = self.module(in_dtype_of(self.module, observation))
        policy, value = out if isinstance(out, tuple) else (out, None)
        if isinstance(policy, Tensor):
            policy = self._distribution(as_float(policy))
        policy = as_distribution(policy)
        if not self.critic or value is None:
            return policy, policy.mode().new_zeros(len(policy.mode()), dtype=torch.float32)
        return policy, as_float(value)

    def _distribution(self, numbers: Tensor) -> Distribution:
        if isinstance(self.action_space, spaces.Box) and numbers.shape[-1] == 2 * parameter_count(self.action_space):
            mean, log_std = numbers.chunk(2, dim=-1)
            return make_distribution(self.action_space, mean, log_std)
        if not isinstance(self.action_space, spaces.Box):
            # A network may forbid actions by logits of -inf, which an entropy or a KL would multiply by 0.
            numbers = numbers.clamp(FORBIDDEN, -FORBIDDEN)
        return make_distribution(self.action_space, numbers, getattr(self.module, "log_std", None))


def custom_q_network(given: Custom, observation_space: spaces.Space, *shape: int) -> nn.Module:
    """Returns a user's network of action values, ``cls(observation_space, action_space, **init_args)``."""
    module = make("network", given, observation_space, spaces.Discrete(shape[-1]))
    check_shape("network", module, (2, *shape), observation_space)
    return CustomNetwork(module)


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
            f"{name}: {_name(module)} can't read two observations of {space}: {what_happened(error)}"
        ) from error
    finally:
        module.train(was_training)


def check_shape(name: str, module: nn.Module, shape: tuple[int, ...], space: spaces.Space) -> None:
    """Raises a UsageError if a module does not return a tensor of ``shape`` for two observations."""
    out = run_on_zeros(name, module, space)
    if not isinstance(out, Tensor) or out.shape != shape:
        raise UsageError(
            f"{name}: {_name(module)} returned {shapes_of(out)} for 2 observations; it must return a "
            f"tensor of shape {shape}"
        )


def shapes_of(out: Any) -> str:
    """What a module returned, for a message."""
    if isinstance(out, Tensor):
        return f"a tensor of shape {tuple(out.shape)}"
    if isinstance(out, tuple):
        return " and ".join(shapes_of(part) for part in out) or "nothing"
    return type(out).__name__


def _name(module: nn.Module) -> str:
    return type(module.extractor if isinstance(module, FeaturesExtractor) else module).__name__


class CustomGaussianPolicy(SquashedGaussianPolicy):
    """A user's policy for SAC and its kin: from observations to mean and log standard deviation before tanh, [B, A]."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        mean, log_std = self.module(in_dtype_of(self.module, observation))
        return as_float(mean), as_float(log_std).clamp(LOG_STD_MIN, LOG_STD_MAX)


class CustomNetwork(nn.Module):
    """A user's action values, or policy for TD3 and DDPG: observations in its dtype, numbers in float32 at least."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Any) -> Tensor:
        return as_float(self.module(in_dtype_of(self.module, observation)))


class CustomCritics(nn.Module):
    """A user's critics, from observations and actions in [-1, 1]^A to action values, [K, B, n_outputs]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Any, action: Tensor, only_first: bool = False, frozen: bool = False) -> Tensor:
        # `frozen` spares work only: the algorithms ask for the gradients of the policy alone.
        observation = in_dtype_of(self.module, observation)
        q = as_float(self.module(observation, in_dtype_of(self.module, action)))
        return q[:1] if only_first else q


def custom_policy_and_critics(
    given: Custom,
    observation_space: spaces.Space,
    action_space: spaces.Box,
    bounds: ActionBounds,
    shape: tuple[int, int],
    gaussian: bool,
) -> PolicyAndCritics:
    """A user's ``cls(observation_space, action_space, **init_args)`` with the modules ``policy`` and ``critics``."""
    module: Any = make("network", given, observation_space, action_space)
    name = type(module).__name__
    out = run_on_zeros("network", module.policy, observation_space)
    parts = out if isinstance(out, tuple) else (out,)
    wanted = (2, bounds.width)
    if len(parts) != 1 + gaussian or any(getattr(part, "shape", None) != wanted for part in parts):
        kind = "mean and log standard deviation" if gaussian else "actions"
        raise UsageError(
            f"network: {name}.policy returned {shapes_of(out)} for 2 observations; it must return {kind} "
            f"of shape {wanted}"
        )
    policy = CustomGaussianPolicy(module.policy) if gaussian else CustomNetwork(module.policy)
    critics = custom_critics(f"network: {name}.critics", module.critics, observation_space, bounds.width, shape)
    return PolicyAndCritics(policy, critics, bounds)


def custom_critics(
    name: str, module: nn.Module, observation_space: spaces.Space, width: int, shape: tuple[int, int]
) -> Any:
    """A user's critics, which return [K, B, outputs], from ``shape``, K and outputs."""
    action = torch.zeros((2, width), dtype=torch.float32, device="cpu")
    q = run_on_zeros(name.partition(":")[0], module, observation_space, action)
    if getattr(q, "shape", None) != (shape[0], 2, shape[1]):
        raise UsageError(
            f"{name} returned {shapes_of(q)} for 2 observations; it must return a tensor "
            f"of shape {(shape[0], 2, shape[1])}: n_critics, batch, outputs per value"
        )
    return CustomCritics(module)


# ---------------------------------------------------------------- import paths


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
    from rl_modules.common.loading import import_user_module, member_of

    module, _, attribute = path.replace(":", ".").rpartition(".")
    return member_of(import_user_module(module, f"{name}={path!r}"), attribute, f"{name}={path!r}")
