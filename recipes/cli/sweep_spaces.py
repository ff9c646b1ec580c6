"""Default ranges of ``rl sweep``, by algorithm.

The ranges are those of rl-baselines3-zoo, ``rl_zoo3/hyperparams_opt.py``, with these departures: PPO and TRPO take
rollouts that every batch size divides, for any number of environments; ``gamma`` and ``gae_lambda`` of PPO and A2C are
drawn from TRPO's lists; learning rates end at 0.01, above which networks diverge; there is a gradient step per
transition (the zoo's DQN draws fewer), the first after 10,000 transitions at most; DQN steps 256 times per round at
most, which fits the smallest buffer; TD3 has Gaussian noise only; gSDE is not searched; TQC drops four quantiles per
net at most, so that a range does not depend on another.
"""

from typing import Any

GAMMAS = {"values": [0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999]}
LAMBDAS = {"values": [0.8, 0.9, 0.92, 0.95, 0.98, 0.99, 1.0]}
ACTIVATIONS = {"values": ["tanh", "relu"]}

_ACTOR_CRITIC: dict[str, Any] = {
    "model.learning_rate": {"log": [1e-5, 2e-3]},
    "model.gamma": GAMMAS,
    "model.gae_lambda": LAMBDAS,
    "model.ent_coef": {"log": [1e-8, 0.1]},
    "model.max_grad_norm": {"uniform": [0.3, 2.0]},
    "model.activation_fn": ACTIVATIONS,
}
_REPLAY: dict[str, Any] = {
    "model.learning_rate": {"log": [1e-5, 1e-2]},
    "model.gamma": GAMMAS,
    "data.buffer_size": {"values": [10_000, 100_000, 1_000_000]},
    "data.gradient_steps": {"values": [-1]},
}
_CONTINUOUS: dict[str, Any] = {
    **_REPLAY,
    "model.tau": {"values": [0.001, 0.005, 0.01, 0.02, 0.05, 0.08]},
    "model.net_arch": {"values": [[64, 64], [256, 256], [400, 300]]},
    "data.batch_size": {"pow2": [16, 2048]},
    "data.train_freq": {"values": [1, 4, 8, 16, 32, 64, 128, 256, 512]},
}
_SAC: dict[str, Any] = {**_CONTINUOUS, "data.learning_starts": {"values": [0, 1000, 10_000]}}

#: Ranges as the key ``search`` of a sweep's file has them, by the name of the algorithm's class.
SPACES: dict[str, dict[str, Any]] = {
    "PPO": {
        **_ACTOR_CRITIC,
        "model.clip_range": {"values": [0.1, 0.2, 0.3, 0.4]},
        "model.net_arch": {"values": [[64], [64, 64], [256, 256]]},
        "data.n_epochs": {"values": [1, 5, 10, 20]},
        "data.n_steps": {"pow2": [512, 2048]},
        "data.batch_size": {"pow2": [32, 512]},
    },
    "A2C": {
        **_ACTOR_CRITIC,
        "model.net_arch": {"values": [[64, 64], [256, 256]]},
        "data.n_steps": {"pow2": [32, 2048]},
    },
    "TRPO": {
        "model.learning_rate": {"log": [1e-5, 1e-2]},
        "model.gamma": GAMMAS,
        "model.gae_lambda": LAMBDAS,
        "model.target_kl": {"values": [0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.001]},
        "model.n_critic_updates": {"values": [5, 10, 20, 25, 30]},
        "model.cg_max_steps": {"values": [5, 10, 20, 25, 30]},
        "model.net_arch": {"values": [[64, 64], [256, 256]]},
        "model.activation_fn": ACTIVATIONS,
        "model.ortho_init": {"values": [False]},
        "model.batch_size": {"pow2": [8, 512]},
        "data.n_steps": {"pow2": [512, 2048]},
    },
    "DQN": {
        **_REPLAY,
        "model.exploration_fraction": {"uniform": [0.01, 0.5]},
        "model.exploration_final_eps": {"uniform": [0.0, 0.2]},
        "model.target_update_interval": {"values": [1, 1000, 5000, 10_000, 15_000, 20_000]},
        "model.net_arch": {"values": [[64], [64, 64], [256, 256]]},
        "data.buffer_size": {"values": [10_000, 50_000, 100_000, 1_000_000]},
        "data.batch_size": {"pow2": [16, 512]},
        "data.learning_starts": {"values": [0, 1000, 5000, 10_000]},
        "data.train_freq": {"values": [1, 4, 8, 16, 128, 256]},
    },
    "SAC": _SAC,
    "TD3": {
        **_CONTINUOUS,
        "model.action_noise": {
            "values": [None]
            + [{"class_path": "NormalActionNoise", "init_args": {"sigma": n / 10}} for n in (1, 2, 3, 5, 7, 10)]
        },
    },
    "TQC": {
        **_SAC,
        "model.n_quantiles": {"int": [5, 50]},
        "model.top_quantiles_to_drop_per_net": {"int": [0, 4]},
    },
}
