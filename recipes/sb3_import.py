"""Writes the checkpoint of a module from a model that Stable-Baselines3 or sb3-contrib saved; runs none of its code.

An archive of SB3 holds its settings as JSON, with pickles of what JSON has no form for, and its weights as files of
torch. The settings are read as far as they are JSON, the pickles not at all, the weights with ``weights_only``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from gymnasium import spaces
from torch import Tensor

import rl_modules
from datamodules.normalization import Normalizers
from recipes.sb3_files import read_archive, read_spaces, read_statistics, refuse
from rl_modules.base import ControlModule
from rl_modules.common.spaces import SPACES
from rl_modules.networks.layers import ACTIVATIONS

#: Parameters by their prefixes here, and those that SB3 has for them. Several are the parts of one tensor; ``*`` stands
#: for the number of each critic, ``{last}`` for that of the last layer.
_ACTOR_CRITIC = {
    "network.log_std": ("log_std",),
    "network.encoder": ("features_extractor",),
    "network.towers.layers": ("mlp_extractor.policy_net", "mlp_extractor.value_net"),
    "network.towers.0": ("mlp_extractor.policy_net",),
    "network.towers.1": ("mlp_extractor.value_net",),
    "network.policy_head": ("action_net",),
    "network.value_head": ("value_net",),
}
_TRPO = {
    "value_network.encoder": ("vf_features_extractor",),
    "value_network.tower": ("mlp_extractor.value_net",),
    "value_network.head": ("value_net",),
}
_RECURRENT = {
    "network.actor": ("lstm_actor",),
    "network.critic": ("lstm_critic",),
    "network.critic_features": ("critic",),
    "network.policy_tower": ("mlp_extractor.policy_net",),
    "network.value_tower": ("mlp_extractor.value_net",),
}


def _q(net: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{own}.{part}": (f"{net}{target}.{its}",)
        for own, target in (("network", ""), ("target_network", "_target"))
        for part, its in (("encoder", "features_extractor"), ("trunk", net), ("head", f"{net}.{{last}}"))
    }


def _critics(own: str, its: str) -> dict[str, tuple[str, ...]]:
    return {f"{own}.encoder": (f"{its}.features_extractor",), f"{own}.layers": (f"{its}.qf*",)}


_SAC = {
    "log_ent_coef": ("log_ent_coef",),
    "network.policy.encoder": ("actor.features_extractor",),
    "network.policy.trunk": ("actor.latent_pi",),
    "network.policy.head": ("actor.mu", "actor.log_std"),
    **_critics("network.critics", "critic"),
    **_critics("target_network", "critic_target"),
}
_TD3 = {
    f"{own}.policy.{part}": (f"{its}.{name}",)
    for own, its in (("network", "actor"), ("target_network", "actor_target"))
    for part, name in (("encoder", "features_extractor"), ("trunk", "mu"), ("head", "mu.{last}"))
} | {**_critics("network.critics", "critic"), **_critics("target_network.critics", "critic_target")}

PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    "PPO": _ACTOR_CRITIC,
    "A2C": _ACTOR_CRITIC,
    "TRPO": {**_ACTOR_CRITIC, **_TRPO},
    "RecurrentPPO": {**_ACTOR_CRITIC, **_RECURRENT},
    "DQN": _q("q_net"),
    "QRDQN": _q("quantile_net"),
    "SAC": _SAC,
    "TQC": _SAC,
    "TD3": _TD3,
}
#: Algorithms by the module of their policy's class, and a setting that only one of several has.
_POLICIES = {
    "stable_baselines3.common.policies": {"clip_range": "PPO", "cg_max_steps": "TRPO", "gae_lambda": "A2C"},
    "stable_baselines3.dqn.policies": {"gamma": "DQN"},
    "stable_baselines3.sac.policies": {"gamma": "SAC"},
    "stable_baselines3.td3.policies": {"gamma": "TD3"},
    "sb3_contrib.qrdqn.policies": {"gamma": "QRDQN"},
    "sb3_contrib.tqc.policies": {"gamma": "TQC"},
    "sb3_contrib.common.recurrent.policies": {"gamma": "RecurrentPPO"},
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


def _widths(weights: Mapping[str, Tensor], prefix: str) -> list[int]:
    """Returns the widths of the layers of a sequence."""
    found = (re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.weight", name) for name in weights)
    return [len(weights[match[0]]) for match in sorted((m for m in found if m), key=lambda m: int(m[1]))]


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
        pi, vf = (_widths(weights, f"mlp_extractor.{name}_net") for name in ("policy", "value"))
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
        *hidden, outputs = _widths(weights, f"{net}.{net}") or [0]
        return {"net_arch": hidden} | ({"n_quantiles": outputs // int(action_space.n)} if net != "q_net" else {})
    pi = _widths(weights, "actor.mu")[:-1] if algorithm == "TD3" else _widths(weights, "actor.latent_pi")
    *qf, outputs = _widths(weights, "critic.qf0") or [0]
    n = len({name.split(".")[1] for name in weights if name.startswith("critic.qf")})
    arch = {"net_arch": {"pi": pi, "qf": qf}, "n_critics": n}
    return arch | ({"n_quantiles": outputs} if algorithm == "TQC" else {})


def _load(path: Path, module: ControlModule, weights: dict[str, Tensor]) -> None:
    """Loads the weights; refuses an archive in which one is missing, of another shape, or of no use here."""
    used, loaded, here = set(), {}, module.state_dict()
    for name, like in here.items():
        names = _names_of(type(module).__name__, name, weights, module.observation_space)
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


def _names_of(algorithm: str, name: str, weights: dict[str, Tensor], space: spaces.Space) -> list[str]:
    """Returns the names in the archive of the parts of a parameter."""
    table = PARAMETERS[algorithm]
    own = next((prefix for prefix in table if name == prefix or name.startswith(f"{prefix}.")), name)
    rest = name[len(own) :]
    if own.endswith("encoder"):
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else []
        rest = re.sub(r"\.encoders\.(\d+)", lambda match: f".extractors.{keys[int(match[1])]}", rest)
        rest = rest.replace(".convolutions.", ".cnn.").replace(".head.0.", ".linear.0.")
    names = []
    for its in table.get(own, ()):
        if its.endswith("*"):  # the layers of critics, between which SB3 counts activations
            layer = re.sub(r"\d+", lambda match: str(2 * int(match[0])), rest)
            numbers = range(len({key.split(".")[1] for key in weights if key.startswith(its[:-1])}))
            names += [f"{its[:-1]}{i}{layer}" for i in numbers]
        else:
            last = 2 * len(_widths(weights, its.removesuffix(".{last}"))) - 2
            names.append(its.replace("{last}", str(last)) + rest)
    return names
