"""Runs that resume, and modules that load, with other settings than the checkpoint's."""

import math

import pytest
import torch

from datamodules import ReplayDataModule
from rl_modules import C51, DQN, PPO, QRDQN, SAC, TQC, CrossQ
from rl_modules.common.errors import UsageError
from rl_modules.run import require_finite_weights
from tests.training import fit, rollouts


def replay(env_id: str, **arguments):
    sizes = {"buffer_size": 500, "learning_starts": 16, "batch_size": 8, "eval_freq": 0, "rollouts_per_epoch": 4}
    return ReplayDataModule(env_id, **{**sizes, "total_timesteps": 64, **arguments})


def alpha(path):
    return float(torch.load(path, weights_only=True)["state_dict"]["log_ent_coef"].exp())


@pytest.mark.parametrize("algorithm", [SAC, TQC, CrossQ])
def test_a_new_entropy_coefficient_overrides_the_learned_one(algorithm, tmp_path):
    def make(ent_coef):
        return algorithm(net_arch=[8], ent_coef=ent_coef)

    path, again = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    fit(make("auto_0.5"), replay("Pendulum-v1")).save_checkpoint(path)
    learned = alpha(path)
    assert learned != pytest.approx(0.5, abs=1e-6)
    fit(make("auto_0.5"), replay("Pendulum-v1", total_timesteps=68), ckpt_path=path).save_checkpoint(again)
    assert alpha(again) == pytest.approx(learned, rel=0.05)
    fit(make("auto_0.01"), replay("Pendulum-v1", total_timesteps=68), ckpt_path=path).save_checkpoint(again)
    assert alpha(again) == pytest.approx(0.01, rel=0.05)
    with pytest.raises(ValueError, match="holds another network"):
        fit(make(0.1), replay("Pendulum-v1", total_timesteps=68), ckpt_path=path)
    loaded = algorithm.load_from_checkpoint(path)
    assert float(loaded.ent_coef) == pytest.approx(learned)
    assert float(algorithm.load_from_checkpoint(path, ent_coef="auto_0.1").ent_coef) == pytest.approx(0.1)
    fixed = algorithm.load_from_checkpoint(path, ent_coef=0.1)
    assert fixed.ent_coef == 0.1 and torch.equal(fixed(torch.ones(2, 3)), loaded(torch.ones(2, 3)))


def test_a_run_with_a_fixed_coefficient_does_not_begin_to_learn_it(tmp_path):
    fit(SAC(net_arch=[8], ent_coef=0.2), replay("Pendulum-v1")).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="holds another network"):
        fit(SAC(net_arch=[8]), replay("Pendulum-v1", total_timesteps=68), ckpt_path=tmp_path / "a.ckpt")
    loaded = SAC.load_from_checkpoint(tmp_path / "a.ckpt", ent_coef="auto_0.5")
    assert float(loaded.log_ent_coef) == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("algorithm", [DQN, QRDQN, C51])
@pytest.mark.parametrize("double", [True, False])
def test_minibatches_of_the_other_target_are_drawn_anew(algorithm, double, tmp_path):
    def data():
        return replay("CartPole-v1", train_freq=4, gradient_steps=4)

    stopped = fit(algorithm(net_arch=[8], double=not double), data(), max_steps=5)
    stopped.save_checkpoint(tmp_path / "a.ckpt")
    resumed = fit(algorithm(net_arch=[8], double=double), data(), ckpt_path=tmp_path / "a.ckpt", max_steps=9)
    assert stopped.global_step == 5 and resumed.global_step == 9
    assert resumed.datamodule.num_timesteps == 16 + 3 * 4


@pytest.mark.parametrize("penalizes", [True, False])
def test_a_rollout_that_is_half_used_keeps_its_objective(penalizes, tmp_path):
    objectives = ["clip", "penalty"] if penalizes else ["penalty", "clip"]
    before, after = (lambda name=name: PPO(net_arch=[8], policy_objective=name) for name in objectives)

    def data():
        return rollouts("CartPole-v1", n_envs=2, n_steps=16, batch_size=8, n_epochs=2, total_timesteps=128)

    fit(before(), data(), max_steps=5).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(
        UsageError,
        match=rf"^policy_objective='{objectives[1]}' \(it has '{objectives[0]}'\): the checkpoint is from the middle",
    ):
        fit(after(), data(), ckpt_path=tmp_path / "a.ckpt", max_steps=9)
    fit(before(), data(), max_epochs=1).save_checkpoint(tmp_path / "b.ckpt")
    assert fit(after(), data(), ckpt_path=tmp_path / "b.ckpt", max_epochs=2).current_epoch == 2


def test_an_unknown_hyperparameter_is_refused_on_loading(tmp_path):
    fit(PPO(net_arch=[8]), rollouts("CartPole-v1"), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match="PPO takes no argument 'gama'; did you mean gamma"):
        PPO.load_from_checkpoint(tmp_path / "a.ckpt", gama=0.5)
    loaded = PPO.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu", strict=True, gamma=0.5)
    assert loaded.gamma == 0.5


def test_large_weights_are_numbers(tmp_path):
    model = PPO(net_arch=[8])
    fit(model, rollouts("CartPole-v1"), max_epochs=1)
    with torch.no_grad():
        next(model.network.parameters()).fill_(1e30)
    require_finite_weights(model)
    with torch.no_grad():
        next(model.network.parameters()).fill_(math.inf)
    with pytest.raises(UsageError, match="the parameter network.* is NaN or infinite"):
        require_finite_weights(model)
