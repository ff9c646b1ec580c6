"""``torch.compile(model)``: few graphs, and the same run."""

import pytest
import torch

from datamodules import RolloutDataModule
from recipes import Trainer
from rl_modules import PPO
from tests.datamodules.test_first_evaluation import Curves
from tests.training import fit

pytest.importorskip("torch._dynamo")


@pytest.mark.long
def test_recording_metrics_compiles_no_graph_per_update() -> None:
    """40 updates: as many graphs would pass Dynamo's limit of 8, after which nothing is compiled any more."""
    sums = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = PPO(net_arch=[8])
        data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=16, batch_size=8, total_timesteps=32, eval_freq=0)
        fit(torch.compile(model, backend="eager") if compiles else model, data)
        sums.append([p.detach().double().sum().item() for p in model.parameters()])
    assert sums[0] == sums[1]
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5


class Logging(PPO):
    """Logs by Lightning's method, too."""

    def minibatch_loss(self, policy, value, batch):
        loss = super().minibatch_loss(policy, value, batch)
        self.log("own/value", value.mean())
        self.log_dict({"own/loss": loss})
        return loss


@pytest.mark.long
def test_what_a_compiled_module_logs_is_the_same() -> None:
    curves = []
    for compiles in (False, True):
        torch._dynamo.reset()
        points = Curves()
        model = Logging(net_arch=[8])
        data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=16, batch_size=8, total_timesteps=32, eval_freq=0)
        fit(torch.compile(model, backend="eager") if compiles else model, data, logger=points)
        curves.append({point for point in points.points if point[0].startswith("own/")})
    assert curves[0] == curves[1] and {name for name, _, _ in curves[0]} == {"own/value", "own/loss"}


@pytest.mark.long
def test_the_recipes_trainer_takes_a_compiled_module(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=16, total_timesteps=32, eval_freq=0, n_test_episodes=1)
    Trainer(accelerator="cpu").fit(torch.compile(PPO(net_arch=[8]), backend="eager"), data)
    assert (tmp_path / "logs/PPO-CartPole-v1/version_0/checkpoints/last.ckpt").is_file()
