"""Names of the parameters of an algorithm's network here, and those that Stable-Baselines3 has for them."""

import re
from collections.abc import Mapping

from gymnasium import spaces
from torch import Tensor

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
    "DDPG": _TD3,
}


def widths(weights: Mapping[str, Tensor], prefix: str) -> list[int]:
    """Returns the widths of the layers of a sequence."""
    found = (re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.weight", name) for name in weights)
    return [len(weights[match[0]]) for match in sorted((m for m in found if m), key=lambda m: int(m[1]))]


def names_of(algorithm: str, name: str, weights: Mapping[str, Tensor], space: spaces.Space) -> list[str]:
    """Returns SB3's names of the parts of a parameter, among those of its ``weights``."""
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
            last = 2 * len(widths(weights, its.removesuffix(".{last}"))) - 2
            names.append(its.replace("{last}", str(last)) + rest)
    return names
