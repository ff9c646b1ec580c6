"""Writes the archive of a checkpoint's model that Stable-Baselines3 or sb3-contrib loads; needs these libraries."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor

import rl_modules
from datamodules.normalization import Normalizers, ObservationNormalizer, RewardNormalizer, RunningMeanStd
from recipes import saved_runs
from recipes.sb3_parameters import PARAMETERS, names_of
from rl_modules.base import ControlModule
from rl_modules.common.errors import UsageError
from rl_modules.common.images import is_large
from rl_modules.common.schedules import Schedule, parse_schedule
from rl_modules.common.stored_arguments import settings_of
from rl_modules.networks.layers import ACTIVATIONS, tower_widths

#: Arguments of SB3's constructors that are not those of the same name here, or are no numbers.
_NOT_SETTINGS = ("policy", "env", "seed", "verbose", "device", "buffer_size", "use_sde", "sde_sample_freq")
#: Arguments of a policy that are the module's.
_OF_POLICY = (
    "n_critics",
    "n_quantiles",
    "log_std_init",
    "ortho_init",
    "lstm_hidden_size",
    "n_lstm_layers",
    "shared_lstm",
    "enable_critic_lstm",
)
#: Arguments that both libraries take as a function of the remaining progress.
_SCHEDULED = ("learning_rate", "clip_range", "clip_range_vf", "ent_coef")


class _Spaces(gym.Env):
    """An environment of which SB3 reads the spaces alone."""

    def __init__(self, module: ControlModule) -> None:
        self.observation_space, self.action_space = module.observation_space, module.action_space


def export_sb3(checkpoint: Path, output: Path) -> tuple[str, Path | None]:
    """Writes a checkpoint's model for SB3, and beside it what ``VecNormalize.load`` reads, if the run normalised.

    Args:
        checkpoint: of one of the algorithms in :data:`recipes.sb3_parameters.PARAMETERS`.
        output: the archive to write.

    Returns:
        The class of SB3 that loads the archive, and the file of the statistics; None: none.

    Raises:
        UsageError: the algorithm or its network has no counterpart there.
    """
    if importlib.util.find_spec("sb3_contrib") is None:
        raise UsageError("export-sb3 needs Stable-Baselines3 and sb3-contrib: pip install sb3-contrib")
    saved = saved_runs.read(checkpoint)
    if (name := saved.get("algorithm")) not in PARAMETERS:
        raise UsageError(f"{checkpoint} holds {name}, which can't be exported; those of {', '.join(PARAMETERS)} can")
    module = getattr(rl_modules, str(name)).load_from_checkpoint(checkpoint, map_location="cpu")
    if module.hparams.get("use_sde") or getattr(module.action_space, "start", 0):
        raise UsageError(
            f"{checkpoint} can't be exported: use_sde and actions that do not start at 0 are not supported"
        )
    settings = settings_of(saved, "datamodule_hyper_parameters")
    model = _model_of(module, settings)
    own = _own_parts(module, model)
    if own is None:
        raise UsageError(f"{checkpoint} can't be exported: {type(model).__name__} of SB3 has no network like it")
    with torch.no_grad():
        for parts in own.values():
            for _, there, value in parts:
                there.copy_(value)
    if saved.get("optimizer_states"):
        _set_optimizers(module, model, saved, own)
    model.num_timesteps = int(saved.get(_datamodule_of(saved), {}).get("num_timesteps", 0))
    if "exploration_rate" in saved.get("run", {}):
        model.exploration_rate = saved["run"]["exploration_rate"]
    model.save(output)
    return type(model).__name__, _save_statistics(module, model, settings, output)


def _datamodule_of(saved: dict[str, Any]) -> str:
    return next((name for name in saved if name.endswith("DataModule")), "")


# ---------------------------------------------------------------- the model


def _model_of(module: ControlModule, settings: dict[str, Any]) -> Any:
    """Makes SB3's model with the module's settings and widths, and the datamodule's settings."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    name = "MaskablePPO" if module.masks_actions and type(module).__name__ == "PPO" else type(module).__name__
    cls: Any = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name)
    wanted, replays = module.experience, module.experience.kind == "replay"
    defaults = {name: getattr(wanted, name) for name in ("batch_size", "n_epochs", "train_freq")}
    defaults["n_steps"] = 1 if replays else wanted.n_steps
    set_here = {key: value for key, value in {**settings, **module.hparams}.items() if value not in (None, "auto")}
    given = {**defaults, **set_here}
    taken = {
        key: _value(key, given[key])
        for key in inspect.signature(cls).parameters
        if key not in _NOT_SETTINGS and isinstance(given.get(key), int | float | str)
    }
    kind = _policy_kind(module)
    of_policy = inspect.signature(cls.policy_aliases[kind]).parameters
    env = DummyVecEnv([lambda: _Spaces(module)] * int(settings.get("n_envs", 1)))
    made = cls(
        kind,
        env,
        device="cpu",
        policy_kwargs={key: value for key, value in _policy_kwargs(module).items() if key in of_policy},
        **taken,
        **({"buffer_size": 1} if replays else {}),
    )
    if replays:
        made.buffer_size = int(settings.get("buffer_size", 1_000_000))
    return made


def _value(name: str, value: Any) -> Any:
    """Returns a setting as SB3 takes it: a schedule is its class of straight lines, or else its first value."""
    from stable_baselines3.common.utils import LinearSchedule

    if name not in _SCHEDULED or not isinstance(value, str) or value.startswith("auto"):
        return value
    schedule: Schedule = parse_schedule(value, name)
    if schedule.shape == "lin":
        return LinearSchedule(schedule.initial, 0.0, 1.0)
    if schedule.shape == "points" and len(schedule.points) == 2 and schedule.points[0][0] == 0:
        (_, first), (share, last) = schedule.points
        return LinearSchedule(first, last, share)
    return schedule.initial


def _policy_kind(module: ControlModule) -> str:
    space = module.observation_space
    has_cnn = isinstance(space, spaces.Box) and space.dtype == "uint8" and len(space.shape) == 3 and is_large(space)
    kind = "Cnn" if has_cnn else "MultiInput" if isinstance(space, spaces.Dict) else "Mlp"
    return f"{kind}{'Lstm' if type(module).__name__ == 'RecurrentPPO' else ''}Policy"


def _policy_kwargs(module: ControlModule) -> dict[str, Any]:
    hparams, space = module.hparams, module.observation_space
    second = "qf" if hasattr(module, "default_net_arch") else "vf"
    first, other = tower_widths(
        space, hparams["net_arch"], ("pi", second), getattr(module, "default_net_arch", (64, 64))
    )
    is_q = type(module).__name__ in ("DQN", "QRDQN")
    found: dict[str, Any] = {
        "net_arch": first if is_q else {"pi": first, second: other},
        "activation_fn": ACTIVATIONS[hparams["activation_fn"]],
    }
    if type(module).__name__ == "TRPO":
        found["share_features_extractor"] = False
    own = {name: hparams[name] for name in _OF_POLICY if name in hparams}
    return found | own


# ---------------------------------------------------------------- weights and moments

#: For a parameter here its parts there: the name, the tensor to fill, and its value.
Parts = dict[str, list[tuple[str, Tensor, Tensor]]]


def _own_parts(module: ControlModule, model: Any) -> Parts | None:
    """Returns where the weights go; None if the two networks differ."""
    there = dict(model.policy.state_dict(keep_vars=True))
    if getattr(model, "log_ent_coef", None) is not None:
        there["log_ent_coef"] = model.log_ent_coef
    own: Parts = {}
    for name, value in module.state_dict().items():
        names = [its for its in names_of(type(module).__name__, name, there, module.observation_space) if its in there]
        values = _split(value, [there[its] for its in names])
        if values is None:
            return None
        own[name] = [(its, there[its], part) for its, part in zip(names, values, strict=True)]
    filled = {id(tensor) for parts in own.values() for _, tensor, _ in parts}
    return own if all(id(tensor) in filled for tensor in there.values()) else None


def _split(value: Tensor, like: list[Tensor]) -> list[Tensor] | None:
    """Returns the parts of a tensor for those that SB3 has; None if they do not fit."""
    if value.dim() == 3 and len(value) == len(like):  # of parallel layers, [K, in, out] and [K, 1, out]
        parts = [x.T if part.dim() == 2 else x[0] for x, part in zip(value, like, strict=True)]
    elif not like or sum(part.numel() for part in like) != value.numel():
        return None
    else:  # α is a number here, and a vector of one there
        parts = list(value.split([len(part) for part in like])) if len(like) > 1 else [value.reshape(like[0].shape)]
    return parts if all(x.shape == part.shape for x, part in zip(parts, like, strict=True)) else None


def _set_optimizers(module: ControlModule, model: Any, saved: dict[str, Any], own: Parts) -> None:
    """Gives SB3's optimizers the moments of the checkpoint's, where they are of the same class."""
    from stable_baselines3.common.save_util import recursive_getattr

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    moments: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(module.trainable_parameters()):
        there = [tensor for _, tensor, _ in own[names[id(parameter)]]]
        for key, x in saved["optimizer_states"][0]["state"].get(index, {}).items():
            parts = [x.clone() for _ in there] if key == "step" else _split(x, there)
            for tensor, part in zip(there, parts or [], strict=True):
                moments.setdefault(id(tensor), {})[key] = part
    for optimizer in (recursive_getattr(model, name) for name in model.get_parameters() if name.endswith("optimizer")):
        if saved.get("optimizer_classes") == [type(optimizer).__name__]:
            trained = (p for group in optimizer.param_groups for p in group["params"])
            optimizer.state.update({p: moments[id(p)] for p in trained if id(p) in moments})


# ---------------------------------------------------------------- statistics


def _save_statistics(module: ControlModule, model: Any, settings: dict[str, Any], output: Path) -> Path | None:
    """Writes the statistics of observations and rewards as ``VecNormalize.save`` does; returns the file."""
    from stable_baselines3.common.vec_env import VecNormalize

    state = module.normalizer_state
    if state is None:
        return None
    space, gamma = module.observation_space, settings.get("norm_gamma") or model.gamma
    own = Normalizers(
        ObservationNormalizer(space, settings.get("clip_obs", 10.0)) if state["observation"] is not None else None,
        RewardNormalizer(1, gamma, settings.get("clip_reward", 10.0)) if state["reward"] is not None else None,
    )
    own.warm_start(state)
    pairs: list[tuple[Any, RunningMeanStd]] = []
    keys = None
    if own.of_observations is not None:
        running = own.of_observations.running
        keys = [key for key, part in running.items() if part is not None] if isinstance(running, dict) else None
    env = VecNormalize(
        model.env,
        norm_obs=own.of_observations is not None,
        norm_reward=own.of_rewards is not None,
        clip_obs=settings.get("clip_obs", 10.0),
        clip_reward=settings.get("clip_reward", 10.0),
        gamma=gamma,
        norm_obs_keys=keys,
    )
    if own.of_observations is not None:
        pairs = [(env.obs_rms, running)] if keys is None else [(env.obs_rms[key], running[key]) for key in keys]
    if own.of_rewards is not None:
        pairs.append((env.ret_rms, own.of_rewards.running))
    for theirs, ours in pairs:
        theirs.mean, theirs.var, theirs.count = ours.mean, ours.var, ours.count
    file = output.with_suffix(".vecnormalize.pkl")
    env.save(str(file))
    return file
