"""Every curve of the control algorithms is defined in docs/metrics.md, once."""

import re
from collections import Counter
from pathlib import Path

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import (
    A2C,
    ARS,
    C51,
    DDPG,
    DQN,
    PPO,
    PQN,
    QRDQN,
    REINFORCE,
    SAC,
    SARSA,
    TD3,
    TQC,
    TRPO,
    CrossQ,
    DiscreteSAC,
    RecurrentA2C,
    RecurrentPPO,
)  # fmt: skip

CONTROL = Path(__file__).parents[1].joinpath("docs/metrics.md").read_text(encoding="utf-8")
FIRST_COLUMN = "\n".join(line.split("|")[1] for line in CONTROL.splitlines() if line.startswith("| `"))
DEFINED = Counter(re.findall(r"`([^`]+)`", FIRST_COLUMN))
WHOLE = {"n_envs": 2, "n_steps": 32, "batch_size": None, "n_epochs": 1}
RUNS = {
    "A2C": (A2C, RolloutDataModule, WHOLE),
    "DQN": (DQN, ReplayDataModule, {"learning_starts": 16}),
    "QRDQN": (lambda: QRDQN(n_quantiles=5), ReplayDataModule, {"learning_starts": 16}),
    "C51": (lambda: C51(n_atoms=5), ReplayDataModule, {"learning_starts": 16}),
    "ARS": (lambda: ARS(n_delta=1, delta_std="lin_0.1"), RolloutDataModule, {"n_envs": 2}),
    "DiscreteSAC": (DiscreteSAC, ReplayDataModule, {"learning_starts": 16, "batch_size": 8}),
    "PQN": (PQN, RolloutDataModule, {"n_envs": 2, "n_steps": 32, "batch_size": 64}),
    "RecurrentA2C": (lambda: RecurrentA2C(lstm_hidden_size=8), RolloutDataModule, WHOLE),
    "RecurrentPPO": (
        lambda: RecurrentPPO(lstm_hidden_size=8), RolloutDataModule, {"n_envs": 2, "n_steps": 32, "batch_size": 64}
    ),
    "PPO": (PPO, RolloutDataModule, {"n_envs": 2, "n_steps": 32, "batch_size": 64}),
    "PPO penalty": (
        lambda: PPO(policy_objective="penalty", target_kl=0.01), RolloutDataModule,
        {"n_envs": 2, "n_steps": 32, "batch_size": 64},
    ),
    "REINFORCE": (lambda: REINFORCE(psi="baseline"), RolloutDataModule, WHOLE),
    "SARSA": (SARSA, RolloutDataModule, {**WHOLE, "env_id": "Maze-v0"}),
    "TRPO": (TRPO, RolloutDataModule, WHOLE),
    **{cls.__name__: (cls, ReplayDataModule, {"learning_starts": 16, "env_id": "Pendulum-v1", "batch_size": 8})
       for cls in (DDPG, TD3, SAC, TQC, CrossQ)},
}  # fmt: skip


class Names(DummyLogger):
    """Remembers what was logged."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def log_metrics(self, metrics, step=None):
        self.seen |= set(metrics)


def test_names_are_defined_once():
    assert len(DEFINED) > 20
    assert {name for name, count in DEFINED.items() if count > 1} == set()


@pytest.mark.long
@pytest.mark.parametrize("algorithm", RUNS)
def test_every_curve_is_defined(algorithm, make_trainer):
    make_model, datamodule, settings = RUNS[algorithm]
    logger = Names()
    data = datamodule(**{"env_id": "CartPole-v1", **settings}, total_timesteps=192, eval_freq=64, n_eval_episodes=2)
    make_trainer(logger=logger).fit(make_model(), datamodule=data)
    assert {"train/learning_rate", "time/fps", "eval/mean_reward"} <= logger.seen
    assert logger.seen - {"epoch"} <= set(DEFINED)
