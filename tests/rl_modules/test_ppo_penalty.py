from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import ModelCheckpoint

from rl_modules import PPO
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.distributions import distribution_from, make_distribution, parameter_count
from tests import envs
from tests.training import assert_equal_checkpoints, assert_resumes_exactly, fit, rollouts

ACTIONS = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(2),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
}
MINIBATCHES = {"n_envs": 2, "n_steps": 16, "batch_size": 8, "n_epochs": 3}


def random_policy(space: spaces.Space, seed: int, n: int = 5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(n, parameter_count(space), generator=generator)
    return make_distribution(space, parameters, 0.5 * torch.randn(2, generator=generator))


@pytest.mark.parametrize("name", ACTIONS)
def test_stored_parameters_make_the_same_distribution_again(name: str) -> None:
    policy, other = random_policy(ACTIONS[name], 0), random_policy(ACTIONS[name], 1)
    again = distribution_from(ACTIONS[name], policy.parameters())
    action = policy.sample(torch.Generator().manual_seed(2))
    torch.testing.assert_close(again.log_prob(action), policy.log_prob(action))
    torch.testing.assert_close(again.entropy(), policy.entropy())
    torch.testing.assert_close(again.kl(other), policy.kl(other))
    assert policy.kl(other).mean() > 0.1
    assert not again.parameters().requires_grad


@pytest.mark.parametrize("name", ACTIONS)
def test_loss_is_the_papers(name: str) -> None:
    model = PPO(
        policy_objective="penalty", kl_coef=3.0, normalize_advantage=False, vf_coef=0.25, ortho_init=False,
        observation_space=space_to_dict(spaces.Box(-1, 1, (2,), np.float32)),
        action_space=space_to_dict(ACTIONS[name]),
    )  # fmt: skip
    model.configure_model()
    model.run.logs_this_epoch = False
    old = random_policy(ACTIONS[name], 0)
    action = old.sample(torch.Generator().manual_seed(1))
    batch = {
        "observation": torch.randn(5, 2),
        "action": action,
        "log_prob": old.log_prob(action),
        "policy_parameters": old.parameters(),
        "advantage": torch.randn(5),
        "returns": torch.randn(5),
        "value": torch.randn(5),
    }
    policy, value = model.network(batch["observation"])
    ratio = (policy.log_prob(action) - batch["log_prob"]).exp()
    expected = (
        -(ratio * batch["advantage"]).mean()
        + 3.0 * old.kl(policy).mean()
        + 0.25 * ((value - batch["returns"]) ** 2).mean()
    )
    torch.testing.assert_close(model.training_step(batch, 0), expected)


class Watch(L.Callback):
    """β and the KL over the whole rollout, after every minibatch."""

    def __init__(self) -> None:
        self.betas: list[float] = []
        self.kls: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.betas.append(pl_module.beta)
        fields = trainer.datamodule.rollout
        with torch.no_grad():
            old = distribution_from(pl_module.action_space, fields["policy_parameters"])
            self.kls.append(old.kl(pl_module.network(fields["observation"])[0]).mean().item())


def test_an_infinite_target_is_refused() -> None:
    with pytest.raises(UsageError, match="target_kl=inf must be a finite number"):
        PPO(policy_objective="penalty", target_kl=float("inf"))


@pytest.mark.long
@pytest.mark.parametrize("target_kl", [1e-6, 1e-3, 10.0])
def test_coefficient_changes_once_per_rollout_by_the_kl_of_all_of_it(target_kl: float) -> None:
    watch = Watch()
    model = PPO(policy_objective="penalty", kl_coef=2.0, target_kl=target_kl, learning_rate=1e-3)
    fit(model, rollouts("CartPole-v1", **MINIBATCHES, rollouts_per_epoch=2), max_epochs=3, callbacks=[watch])
    per_rollout = 3 * 4
    assert len(watch.betas) == 6 * per_rollout
    beta = 2.0
    for start in range(0, len(watch.betas), per_rollout):
        # Lightning calls a callback's hook before the module's: what it sees is β before the decision.
        assert watch.betas[start] == watch.betas[start + per_rollout - 1] == beta
        beta = F.adapt_kl_coefficient(beta, watch.kls[start + per_rollout - 1], target_kl)
    assert model.beta == beta
    assert (beta > 2.0) if target_kl == 1e-6 else (beta < 2.0) if target_kl == 10.0 else beta > 0


def test_policy_is_that_of_the_rollout_at_first() -> None:
    found = []

    class Watching(PPO):
        def policy_loss(self, log_prob: torch.Tensor, batch: Any) -> torch.Tensor:
            found.append((batch["kl"].max().item(), (log_prob - batch["log_prob"]).abs().max().item()))
            return super().policy_loss(log_prob, batch)

    data = rollouts(envs.make_identity_box, n_envs=2, n_steps=16)
    fit(Watching(policy_objective="penalty"), data, max_epochs=3)
    assert len(found) == 3
    for kl, difference in found:
        assert kl == pytest.approx(0, abs=1e-6)
        assert difference == pytest.approx(0, abs=1e-5)


def test_kl_is_averaged_over_ranks_before_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = []

    def reduce(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs["reduce_op"] != "mean" or tensor.numel() > 1:
            return tensor  # Lightning's own sums, and metrics
        reduced.append(tensor.item())
        return torch.tensor(100.0)  # what the other ranks saw outweighs this one's

    monkeypatch.setattr("lightning.pytorch.strategies.SingleDeviceStrategy.reduce", reduce)
    model = PPO(policy_objective="penalty", kl_coef=1.0, target_kl=1.0)
    fit(model, rollouts("CartPole-v1", **MINIBATCHES), max_epochs=2)
    assert len(reduced) == 2
    assert model.beta == 4.0


def test_a_dear_kl_keeps_the_policy_near() -> None:
    def moved(kl_coef: float) -> float:
        watch = Watch()
        model = PPO(policy_objective="penalty", kl_coef=kl_coef, learning_rate=3e-3)
        fit(model, rollouts("CartPole-v1", **MINIBATCHES), max_epochs=1, callbacks=[watch])
        return watch.kls[-1]

    assert moved(1000.0) < 0.1 * moved(1e-9)


@pytest.mark.long
@pytest.mark.parametrize("make_env", [envs.make_identity_discrete, envs.make_identity_box])
def test_resumes_bit_for_bit(make_env: Any, tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: PPO(policy_objective="penalty", target_kl=1e-3), lambda: rollouts(make_env, **MINIBATCHES), tmp_path
    )


@pytest.mark.long
def test_resumes_from_every_minibatch_of_a_model_checkpoint(tmp_path: Path) -> None:
    """A callback writes before the module sets β at the end of a rollout's last minibatch."""

    def run(**arguments: Any) -> L.Trainer:
        data = rollouts("CartPole-v1", **MINIBATCHES, rollouts_per_epoch=2)
        return fit(PPO(policy_objective="penalty", target_kl=1e-3), data, max_epochs=1, **arguments)

    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(callbacks=[every], enable_checkpointing=True).save_checkpoint(tmp_path / "whole.ckpt")
    steps = range(10, 16)  # the first rollout's last is 12
    for step in steps:
        run(ckpt_path=tmp_path / f"step={step}.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@pytest.mark.long
def test_coefficient_is_in_the_checkpoint(tmp_path: Path) -> None:
    model = PPO(policy_objective="penalty", kl_coef=1.0, target_kl=10.0)
    fit(model, rollouts("CartPole-v1", **MINIBATCHES), max_epochs=3).save_checkpoint(tmp_path / "x.ckpt")
    assert PPO.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).beta == 0.125


def test_clip_keeps_no_parameters_and_never_adapts() -> None:
    model = PPO(policy_objective="clip", kl_coef=1.0, target_kl=1e-6)
    data = rollouts("CartPole-v1", **MINIBATCHES)
    fit(model, data, max_epochs=2)
    assert "policy_parameters" not in data.rollout
    assert model.beta == 1.0


def test_penalty_aims_at_target_kl_and_never_stops_early() -> None:
    assert PPO(policy_objective="penalty").target_kl == 0.01
    model = PPO(policy_objective="penalty", target_kl=1e-9, learning_rate=1e-2)
    fit(model, rollouts("CartPole-v1", **MINIBATCHES), max_epochs=1)
    assert not model.kl_exceeded


@pytest.mark.parametrize(("argument", "value"), [("policy_objective", "kl"), ("kl_coef", 0.0), ("target_kl", -0.01)])
def test_bad_arguments_are_named(argument: str, value: Any) -> None:
    with pytest.raises(UsageError, match=argument):
        PPO(**{argument: value})
