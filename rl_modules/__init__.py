"""Reinforcement-learning algorithms as LightningModules.

Classes are imported when they are first used, so that control tasks do not import the language-model libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_modules.common.foreign_names import refuse_import

#: Names by the file that has them.
_MODULES = {
    "a2c": ["A2C"],
    "ars": ["ARS"],
    "c51": ["C51"],
    "crossq": ["CrossQ"],
    "discrete_sac": ["DiscreteSAC"],
    "dqn": ["DQN"],
    "language.distillation": ["Distillation"],
    "language.dpo": ["DPO"],
    "language.grpo": ["GRPO"],
    "language.kto": ["KTO"],
    "language.reward_model": ["RewardModel"],
    "language.rlhf_ppo": ["RLHFPPO"],
    "language.rloo": ["RLOO"],
    "language.sft": ["SFT"],
    "monte_carlo": ["MonteCarlo"],
    "ppo": ["PPO"],
    "pqn": ["PQN"],
    "q_learning": ["QLearning"],
    "qrdqn": ["QRDQN"],
    "recurrent": ["RecurrentA2C", "RecurrentPPO"],
    "reinforce": ["REINFORCE"],
    "sac": ["SAC"],
    "sarsa": ["SARSA"],
    "td3": ["DDPG", "TD3"],
    "tqc": ["TQC"],
    "trpo": ["TRPO"],
}
_EXPORTS = {name: f"rl_modules.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "A2C",
    "ARS",
    "C51",
    "DDPG",
    "DPO",
    "DQN",
    "GRPO",
    "KTO",
    "PPO",
    "PQN",
    "QRDQN",
    "REINFORCE",
    "RLHFPPO",
    "RLOO",
    "SAC",
    "SARSA",
    "SFT",
    "TD3",
    "TQC",
    "TRPO",
    "CrossQ",
    "DiscreteSAC",
    "Distillation",
    "MonteCarlo",
    "QLearning",
    "RecurrentA2C",
    "RecurrentPPO",
    "RewardModel",
]
#: The algorithms that learn from environments, which need no language-model libraries.
CONTROL = [name for name in __all__ if not _EXPORTS[name].startswith("rl_modules.language.")]

if TYPE_CHECKING:
    from rl_modules.a2c import A2C
    from rl_modules.ars import ARS
    from rl_modules.c51 import C51
    from rl_modules.crossq import CrossQ
    from rl_modules.discrete_sac import DiscreteSAC
    from rl_modules.dqn import DQN
    from rl_modules.language.distillation import Distillation
    from rl_modules.language.dpo import DPO
    from rl_modules.language.grpo import GRPO
    from rl_modules.language.kto import KTO
    from rl_modules.language.reward_model import RewardModel
    from rl_modules.language.rlhf_ppo import RLHFPPO
    from rl_modules.language.rloo import RLOO
    from rl_modules.language.sft import SFT
    from rl_modules.monte_carlo import MonteCarlo
    from rl_modules.ppo import PPO
    from rl_modules.pqn import PQN
    from rl_modules.q_learning import QLearning
    from rl_modules.qrdqn import QRDQN
    from rl_modules.recurrent import RecurrentA2C, RecurrentPPO
    from rl_modules.reinforce import REINFORCE
    from rl_modules.sac import SAC
    from rl_modules.sarsa import SARSA
    from rl_modules.td3 import DDPG, TD3
    from rl_modules.tqc import TQC
    from rl_modules.trpo import TRPO


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    refuse_import(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
