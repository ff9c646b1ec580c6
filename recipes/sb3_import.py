"""Writes the checkpoint of a module from a model that Stable-Baselines3 or sb3-contrib saved; runs none of its code.

An archive of SB3 holds its settings as JSON, with pickles of what JSON has no form for, and its weights as files of
torch. The settings are read as far as they are JSON, the pickles not at all, the weights with ``weights_only``.
"""

import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

import rl_modules
from datamodules.normalization import Normalizers
from recipes.sb3_files import read_archive, read_spaces, read_statistics, refuse
from recipes.sb3_parameters import PARAMETERS, names_of, widths
from rl_modules.base import ControlModule
from rl_modules.common.spaces import SPACES
from rl_modules.networks.layers import ACTIVATIONS

#: Algorithms by the module of their policy's class, and a setting that only one of several has.
_POLICIES = {
    "stable_baselines3.common.policies": {"clip_range": "PPO", "cg_max_steps": "TRPO", "gae_lambda": "A2C"},
    "stable_baselines3.dqn.policies": {"gamma": "DQN"},
    "stable_baselines3.sac.policies": {"gamma": "SAC"},
    "stable_baselines3.td3.policies": {"gamma": "TD3"},
    "sb3_contrib.qrdqn.policies": {"gamma": "QRDQN"},
    "sb3_contrib.tqc.policies": {"gamma": "TQC"},
    "sb3_contrib.common.recurrent.policies": {"gamma": "RecurrentPPO"},
    "sb3_contrib.common.maskable.policies": {"clip_range": "PPO"},
}
#: Entries of ``policy_kwargs`` that the shapes of the weights show, or that no prediction depends on.
_SHOWN = re.compile(
    ":|net_arch|ortho_init|log_std_init|optimizer_|n_critics|n_quantiles|share_features_extractor|lstm_hidden|n_lstm|"
    "shared_lstm|enable_critic_lstm|activation_fn"
)


def import_sb3(model: Path, output: Path, vecnormalize: Path | None = None, env: str | None = None) -> ControlModule:
    """Writes the checkpoint of a model that SB3 saved, and returns its module.

    Args:
        model: the archive that ``model.save`` wrote.
        output: the checkpoint to write.
        vecnormalize: what ``VecNormalize.save`` wrote: its statistics of observations; None: none.
        env: the environment whose spaces the module has; None: those that the archive describes.

    Raises:
        UsageError: the file is no archive of SB3, or its policy has no counterpart here.
    """
    settings, weights = read_archive(model)
    module = _module_of(model, settings, weights, read_spaces(model, settings, env))
    _load(model, module, weights)
    if vecnormalize is not None and (normalizer := read_statistics(vecnormalize, module.observation_space)) is not None:
        module.observation_statistics = normalizer.statistics()
        module.normalizer_state = Normalizers(normalizer).state_dict()
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.save_checkpoint(output)
    return module


# ---------------------------------------------------------------- the module


def _module_of(path: Path, settings: dict[str, Any], weights: dict[str, Tensor], of: dict[str, Any]) -> ControlModule:
    """Builds the module with the settings of an archive, and the widths that its weights show."""
    policy = settings.get("policy_class", {}).get("__module__")
    algorithm = next((name for key, name in _POLICIES.get(policy, {}).items() if key in settings), None)
    if algorithm is None:
        refuse(path, f"its policy is of {policy}; those of {', '.join(PARAMETERS)} can be")
    kwargs = settings.get("policy_kwargs") or {}
    function = re.findall(r"\w+", kwargs.get("activation_fn", "Tanh" if algorithm in _ON_POLICY else "ReLU"))[-1]
    names = {kind.__name__: name for name, kind in ACTIVATIONS.items()}
    others = [name for name, value in kwargs.items() if not _SHOWN.match(name) and value not in (False, None)]
    if settings.get("use_sde") or others or function not in names:
        refuse(path, f"policy_kwargs or use_sde is not supported: {', '.join(others) or 'use_sde'}, {function}")
    cls: Any = getattr(rl_modules, algorithm)
    known = {
        name: settings[name]
        for name in cls.declared_settings
        if name in settings and name not in SPACES and isinstance(settings[name], int | float | str | None)
    }
    shown = {**_shown(algorithm, weights, of["action_space"]), "activation_fn": names[function]}
    module: ControlModule = cls(**{**known, **shown, **of})
    module.configure_model()
    return module


_ON_POLICY = ("PPO", "A2C", "TRPO", "RecurrentPPO")


def _shown(algorithm: str, weights: dict[str, Tensor], action_space: Any) -> dict[str, Any]:
    """Returns the arguments that the shapes of the weights show."""
    if algorithm in _ON_POLICY:
        pi, vf = (widths(weights, f"mlp_extractor.{name}_net") for name in ("policy", "value"))
        found: dict[str, Any] = {"net_arch": pi if pi == vf else {"pi": pi, "vf": vf}}
        if algorithm == "RecurrentPPO":
            layers = [x for name, x in weights.items() if name.startswith("lstm_actor.weight_hh")]
            critic = any(name.startswith("lstm_critic") for name in weights)
            found |= {
                "lstm_hidden_size": layers[0].shape[1] if layers else 0,
                "n_lstm_layers": len(layers),
                "enable_critic_lstm": critic,
                "shared_lstm": not critic and "critic.weight" not in weights,
            }
        return found
    if algorithm in ("DQN", "QRDQN"):
        net = "q_net" if algorithm == "DQN" else "quantile_net"
        *hidden, outputs = widths(weights, f"{net}.{net}") or [0]
        return {"net_arch": hidden} | ({"n_quantiles": outputs // int(action_space.n)} if net != "q_net" else {})
    pi = widths(weights, "actor.mu")[:-1] if algorithm == "TD3" else widths(weights, "actor.latent_pi")
    *qf, outputs = widths(weights, "critic.qf0") or [0]
    n = len({name.split(".")[1] for name in weights if name.startswith("critic.qf")})
    arch = {"net_arch": {"pi": pi, "qf": qf}, "n_critics": n}
    return arch | ({"n_quantiles": outputs} if algorithm == "TQC" else {})


def _load(path: Path, module: ControlModule, weights: dict[str, Tensor]) -> None:
    """Loads the weights; refuses an archive in which one is missing, of another shape, or of no use here."""
    used, loaded, here = set(), {}, module.state_dict()
    for name, like in here.items():
        names = names_of(type(module).__name__, name, weights, module.observation_space)
        parts = [weights[its] for its in names if its in weights]
        used |= set(names)
        if parts and like.dim() == 3:  # of parallel layers, [K, in, out] and [K, 1, out]
            parts = [torch.stack([x.T if x.dim() == 2 else x[None] for x in parts])]
        loaded[name] = torch.cat(parts).reshape(like.shape) if parts and _fits(parts, like) else None
    # A shared encoder is in the archive under three names.
    again = {name: re.sub("^(pi|vf)_", "", name) for name in weights}
    left = [
        name
        for name, first in again.items()
        if name not in used and not (first != name and first in used and torch.equal(weights[name], weights[first]))
    ]
    missing = [name for name, value in loaded.items() if value is None]
    if missing or [name for name in left if name != "ent_coef_tensor"]:
        which = f"{missing[0]} here" if missing else f"{left[0]} there"
        refuse(path, f"its network is another than {type(module).__name__} has here: {which} has no counterpart")
    module.load_state_dict(loaded)


def _fits(parts: list[Tensor], like: Tensor) -> bool:
    first = parts[0].shape
    rest = all(part.shape[1:] == first[1:] for part in parts) and first[1:] == like.shape[1:]
    return rest and sum(part.numel() for part in parts) == like.numel()
