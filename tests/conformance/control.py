"""Every control algorithm as the conformance suite runs it: small, with its defaults where there are some."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import rl_modules
from datamodules import ReplayDataModule, RolloutDataModule


@dataclass(frozen=True)
class Case:
    """An algorithm with data small enough for a second or two.

    Args:
        name: the class in ``rl_modules``.
        env_id: where it trains.
        other_env_id: another environment of the same spaces; None: there is none.
        foreign_env_id: an environment of other spaces that the algorithm could act in.
        model: the module's arguments.
        data: the datamodule's.
        has_gradient: false for tables.
        is_manual: true where the algorithm steps its optimizer itself.
        label: of a variant of the algorithm, whose tests are slow ones.
    """

    name: str
    env_id: str = "CartPole-v1"
    other_env_id: str | None = "tests.conformance.envs:make_short_cartpole"
    foreign_env_id: str = "Acrobot-v1"
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    replays: bool = False
    has_gradient: bool = True
    is_manual: bool = False
    label: str = ""

    def make_model(self, **arguments: Any) -> Any:
        return getattr(rl_modules, self.name)(**{**self.model, **arguments})

    def make_data(self, env_id: Any = None, **arguments: Any) -> Any:
        kind: Callable[..., Any] = ReplayDataModule if self.replays else RolloutDataModule
        defaults = {"eval_freq": 0, "n_eval_episodes": 2, "n_test_episodes": 2, "total_timesteps": 128}
        return kind(self.env_id if env_id is None else env_id, **{**defaults, **self.data, **arguments})

    def make_epochs(self, **arguments: Any) -> Any:
        """Data of as many epochs as one likes, a learning one from the first on."""
        per_epoch = 8 if self.replays else 1
        return self.make_data(**{"rollouts_per_epoch": per_epoch, "total_timesteps": 10**6, **arguments})


ON_POLICY = {"n_envs": 4, "n_steps": 16}
REPLAY = {"n_envs": 2, "buffer_size": 1000, "learning_starts": 32, "train_freq": 4, "batch_size": 8}
MAZE = {"env_id": "Maze-v0", "other_env_id": "tests.conformance.envs:make_short_maze",
        "foreign_env_id": "FrozenLake-v1", "data": {"n_envs": 2, "total_timesteps": 64},
        "has_gradient": False, "is_manual": True}  # fmt: skip
SWING: dict[str, Any] = {"env_id": "Pendulum-v1", "other_env_id": "tests.conformance.envs:make_short_pendulum",
                         "foreign_env_id": "MountainCarContinuous-v0", "replays": True, "is_manual": True,
                         "data": {"n_envs": 2, "buffer_size": 1000, "learning_starts": 32, "train_freq": 4,
                                  "batch_size": 8}}  # fmt: skip
NOISE = {"class_path": "OrnsteinUhlenbeckActionNoise", "init_args": {"sigma": 0.3}}

CASES = [
    Case("PPO", data={**ON_POLICY, "batch_size": 16, "n_epochs": 2}),
    Case("A2C", data={"n_envs": 4}),
    Case("REINFORCE", model={"psi": "baseline"}, data=ON_POLICY),
    Case("TRPO", model={"n_critic_updates": 2, "batch_size": 32}, data=ON_POLICY, is_manual=True),
    Case("DQN", model={"target_update_interval": 20}, data=REPLAY, replays=True),
    Case("QRDQN", model={"target_update_interval": 20, "n_quantiles": 5}, data=REPLAY, replays=True),
    Case("C51", model={"target_update_interval": 20, "n_atoms": 5, "v_min": 0, "v_max": 20}, data=REPLAY, replays=True),
    Case("PQN", data={**ON_POLICY, "batch_size": 16, "n_epochs": 2}),
    Case("DDPG", model={"action_noise": NOISE, "net_arch": [32, 32]}, **SWING),
    Case("TD3", model={"action_noise": NOISE, "net_arch": [32, 32]}, **SWING),
    Case("SAC", model={"net_arch": [32, 32]}, **SWING),
    Case("DiscreteSAC", model={"net_arch": [32, 32]}, data=REPLAY, replays=True, is_manual=True),
    Case("TQC", model={"net_arch": [32, 32]}, **SWING),
    Case("CrossQ", model={"net_arch": [32, 32], "policy_delay": 2, "renorm_warmup_steps": 10}, **SWING),
    Case("RecurrentPPO", model={"lstm_hidden_size": 16}, data={**ON_POLICY, "batch_size": 16, "n_epochs": 2}),
    Case("RecurrentA2C", model={"lstm_hidden_size": 16, "rnn": "gru"}, data={"n_envs": 4}),
    Case("PPO", model={"network": "tests.networks.PolicyAndValue"}, label="network",
         data={**ON_POLICY, "batch_size": 16, "n_epochs": 2}),
    Case("PPO", label="overlap", data={**ON_POLICY, "batch_size": 16, "n_epochs": 2, "overlap": True}),
    Case("DQN", model={"target_update_interval": 20, "network": "tests.networks.ActionValues"}, label="network",
         data=REPLAY, replays=True),
    Case("QRDQN", model={"target_update_interval": 20, "n_quantiles": 5, "noisy": True, "dueling": True}, label="noisy",
         data=REPLAY, replays=True),
    Case("C51", model={"target_update_interval": 20, "n_atoms": 5, "v_min": 0, "v_max": 20, "noisy": True,
                       "dueling": True, "double": True}, label="rainbow", replays=True,
         data={**REPLAY, "prioritized_replay": True, "n_steps": 3}),
    Case("SAC", model={"network": "tests.networks.PolicyAndCritics"}, label="network", **SWING),
    Case("SAC", model={"net_arch": [32, 32], "use_sde": True, "sde_sample_freq": 3}, label="sde", **SWING),
    Case("SAC", model={"net_arch": [32, 32], "layer_norm": True, "n_critics": 3,
                       "target_subset": 2, "policy_delay": 2}, label="redq", **SWING),
    Case("SAC", model={"features_extractor": "tests.networks.Features"}, label="features", **SWING),
    Case("ARS", "tests.conformance.envs:make_guess", "tests.conformance.envs:make_other_guess", "Pendulum-v1",
         model={"n_delta": 2}, data={"n_envs": 4}, is_manual=True),
    Case("MonteCarlo", **MAZE),
    Case("SARSA", **MAZE),
    Case("QLearning", **MAZE),
]  # fmt: skip
