"""The configs of the tabular agents reach what their headers promise, judged by the greedy policy's exact return."""

from pathlib import Path

import pytest
import torch

from datamodules.envs.model import transition_model
from datamodules.envs.vector import make_env
from recipes import configs
from recipes.cli import main
from rl_modules import SARSA, MonteCarlo, QLearning

# Config, least exact return. FrozenLake and Taxi: 1 % below the best that is possible with an eye on the clock.
EXACT = [
    ("monte_carlo/maze.yaml", 10.0),
    ("sarsa/maze.yaml", 10.0),
    ("q_learning/maze.yaml", 10.0),
    ("monte_carlo/frozenlake.yaml", 0.99 * 0.7442),
    ("sarsa/frozenlake.yaml", 0.99 * 0.7442),
    ("q_learning/frozenlake.yaml", 0.99 * 0.7442),
    ("q_learning/taxi.yaml", 0.99 * 7.93),
    ("q_learning/cliffwalking.yaml", -13.0),
    ("sarsa/cliffwalking_decay.yaml", -13.0),
]
AGENTS = {"MonteCarlo": MonteCarlo, "SARSA": SARSA, "QLearning": QLearning}


def exact_return(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Train by the config, as a user does, and evaluate the checkpoint exactly."""
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", config, "--seed_everything", "11"])
    [path] = tmp_path.glob("logs/*/version_0/checkpoints/last.ckpt")
    saved = torch.load(path, weights_only=True)
    agent = AGENTS[saved["algorithm"]].load_from_checkpoint(path)
    model = transition_model(make_env(saved["env_id"], saved["datamodule_hyper_parameters"]["env_kwargs"]))
    assert model is not None
    return model.expected_return(agent.greedy_policy())


@pytest.mark.slow
@pytest.mark.parametrize(("config", "least"), EXACT)
def test_the_greedy_policy_is_as_good_as_promised(config, least, tmp_path, monkeypatch):
    assert exact_return(config, tmp_path, monkeypatch) >= least - 1e-9


@pytest.mark.slow
def test_sarsa_that_keeps_exploring_takes_the_safe_path(tmp_path, monkeypatch):
    assert exact_return("sarsa/cliffwalking.yaml", tmp_path, monkeypatch) == pytest.approx(-17.0)


def test_every_tabular_config_is_covered():
    covered = {config for config, _ in EXACT} | {"sarsa/cliffwalking.yaml"}
    folders = ("monte_carlo/", "sarsa/", "q_learning/")
    assert {name for name in configs.names() if name.startswith(folders)} == covered
