"""TD3 and DDPG: smoothed targets, the delayed policy, action noise."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from datamodules import ReplayDataModule
from rl_modules import DDPG, TD3
from rl_modules.action_noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from tests.training import fit, mean_return

OBSERVATION = space_to_dict(spaces.Box(-1, 1, (3,), np.float32))
ACTION = space_to_dict(spaces.Box(-2, 2, (2,), np.float32))


def made(cls: Any = TD3, **arguments: Any) -> Any:
    model = cls(observation_space=OBSERVATION, action_space=ACTION, **{"net_arch": [8], **arguments})
    model.configure_model()
    return model


def data_module(**arguments: Any) -> ReplayDataModule:
    defaults = {"buffer_size": 500, "learning_starts": 20, "batch_size": 8, "total_timesteps": 60, "eval_freq": 0}
    return ReplayDataModule("Pendulum-v1", **{**defaults, **arguments})


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "observation": torch.randn(5, 3, generator=generator),
        "next_observation": torch.randn(5, 3, generator=generator),
        "reward": torch.randn(5, generator=generator),
        "discount": torch.full((5,), 0.9),
        "terminated": torch.arange(5) % 2 == 0,
        "noise": 10 * torch.randn(5, 2, generator=generator),
    }


def test_the_targets_action_is_smoothed_within_bounds() -> None:
    model, data = made(target_policy_noise=0.2, target_noise_clip=0.3), batch()
    plain = model.target_network.policy(data["next_observation"])
    smoothed = model.target_action(data)
    for row in range(5):
        for i in range(2):
            noise = min(max(0.2 * float(data["noise"][row, i]), -0.3), 0.3)
            expected = min(max(float(plain[row, i]) + noise, -1.0), 1.0)
            assert float(smoothed[row, i]) == pytest.approx(expected, abs=1e-6)
    data["noise"] = torch.full((5, 2), 100.0)
    torch.testing.assert_close(model.target_action(data), (plain + 0.3).clamp(max=1.0))


def test_the_target_takes_the_smallest_critic() -> None:
    model, data = made(n_critics=3), batch()
    with torch.no_grad():
        q = model.target_network.critics(data["next_observation"], model.target_action(data))[..., 0]
        target = model.td_target(data)
    for i in range(5):
        value = 0.0 if data["terminated"][i] else min(float(q[k, i]) for k in range(3))
        assert float(target[i]) == pytest.approx(float(data["reward"][i]) + 0.9 * value, abs=1e-5)


def test_ddpg_is_td3_without_its_three_changes() -> None:
    model = made(DDPG)
    assert (model.policy_delay, model.n_critics) == (1, 1)
    data = batch()
    torch.testing.assert_close(model.target_action(data), model.target_network.policy(data["next_observation"]))


def test_the_policys_gradient_is_that_of_the_first_critic() -> None:
    model, data = made(n_critics=2), batch()
    parameters = list(model.network.policy.parameters())
    found = torch.autograd.grad(model.actor_loss(data), parameters)
    action = model.network.policy(data["observation"])
    expected = torch.autograd.grad(-model.network.critics(data["observation"], action)[0].mean(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_policy_and_targets_wait_for_the_critics() -> None:
    changed = []

    class Watched(TD3):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            parts = (self.network.policy, self.target_network, self.network.critics)
            before = [[p.clone() for p in part.parameters()] for part in parts]
            loss = super().training_step(batch, batch_idx)
            changed.append([any(not torch.equal(p, q) for p, q in zip(old, part.parameters(), strict=True))
                            for old, part in zip(before, parts, strict=True)])  # fmt: skip
            return loss

    model = Watched(net_arch=[8], policy_delay=3)
    fit(model, data_module())
    assert changed == [[i % 3 == 0, i % 3 == 0, True] for i in range(1, 41)]


@pytest.mark.parametrize(
    "arguments", [{"n_steps": 3}, {"prioritized_replay": True}, {"n_envs": 3, "gradient_steps": -1}]
)
def test_replays_variants_train(arguments: dict[str, Any]) -> None:
    model = TD3(net_arch=[8], action_noise=NormalActionNoise())
    fit(model, data_module(**arguments))
    assert model.n_updates >= 39
    assert (model.td_error is not None) == ("prioritized_replay" in arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: TD3(policy_delay=0), "policy_delay=0 must be at least 1"),
     (lambda: TD3(target_noise_clip=-0.1), "target_noise_clip=-0.1 must be a finite number of at least 0"),
     (lambda: NormalActionNoise(sigma=-1.0), "sigma=-1.0 must be a number.*none of them negative"),
     (lambda: OrnsteinUhlenbeckActionNoise(dt=0.0), "dt=0.0 must be positive")],
)  # fmt: skip
def test_arguments_that_can_not_be_used(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# -------------------------------------------------------------------- action noise


def test_drifting_noise_has_its_stationary_spread_and_is_correlated() -> None:
    noise = OrnsteinUhlenbeckActionNoise(mean=0.5, sigma=0.3, theta=0.5, dt=0.1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([noise.sample(torch.Size([200, 1]), generator)[:, 0] for _ in range(500)])[200:]
    # The discretised process is AR(1) with coefficient 1 - θ dt = 0.95 and variance σ² dt / (1 - 0.95²) = 0.0923.
    assert drawn.mean() == pytest.approx(0.5, abs=0.02)
    assert drawn.var() == pytest.approx(0.09 * 0.1 / (1 - 0.95**2), rel=0.1)
    centred = drawn - drawn.mean()
    assert (centred[1:] * centred[:-1]).mean() / centred.square().mean() == pytest.approx(0.95, abs=0.02)


def test_drifting_noise_starts_anew_with_each_episode() -> None:
    starts: list[list[int]] = []

    class Noted(OrnsteinUhlenbeckActionNoise):
        def reset(self, which: Tensor | None = None) -> None:
            super().reset(which)
            if which is not None:
                starts.append([len(model.acted), *which.nonzero()[:, 0].tolist()])
                assert self._noise is None or (self._noise[which] == 0).all()

    class Counted(TD3):
        acted: list[int]

        def act(self, *args: Any, **kwargs: Any) -> dict:
            self.acted.append(1)
            return super().act(*args, **kwargs)

    model = Counted(net_arch=[8], action_noise=Noted())
    model.acted = []
    # Pendulum never terminates: with a limit of 10, two environments and 20 random transitions, episodes of the
    # policy begin at every tenth step.
    fit(model, data_module(n_envs=2, env_kwargs={"max_episode_steps": 10}, total_timesteps=90))
    assert starts == [[0, 0, 1], [10, 0, 1], [20, 0, 1], [30, 0, 1]]


def test_a_checkpoint_brings_its_noise_back() -> None:
    noise = OrnsteinUhlenbeckActionNoise(mean=[0.1, 0.2], sigma=0.4, theta=0.3)
    again = made(action_noise=made(action_noise=noise).hparams["action_noise"]).action_noise
    assert isinstance(again, OrnsteinUhlenbeckActionNoise)
    assert again.mean.tolist() == pytest.approx([0.1, 0.2])
    assert (float(again.sigma), again.theta) == (pytest.approx(0.4), 0.3)

    class Mine(NormalActionNoise):
        pass

    assert made(action_noise=Mine()).hparams["action_noise"] is None


def test_wrong_arguments_of_a_noise_are_named() -> None:
    def described(**arguments: Any) -> dict[str, Any]:
        return {"class_path": "OrnsteinUhlenbeckActionNoise", "init_args": arguments}

    with pytest.raises(UsageError, match="OrnsteinUhlenbeckActionNoise takes no argument 'sigmaa'; did you mean sigma"):
        TD3(action_noise=described(sigmaa=0.1))
    for value in ("much", None, [[0.1], [0.1, 0.2]]):
        with pytest.raises(UsageError, match="sigma=.* must be a number, or a list of one number per action dimension"):
            TD3(action_noise=described(sigma=value))
    assert isinstance(TD3(action_noise={**described(), "init_args": None}).action_noise, OrnsteinUhlenbeckActionNoise)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [TD3, DDPG])
def test_pendulum_is_learned(cls: Any) -> None:
    model = cls(gamma=0.98, net_arch=[64, 64], action_noise=NormalActionNoise())
    data = ReplayDataModule("Pendulum-v1", total_timesteps=9_000, learning_starts=1_000, buffer_size=9_000, eval_freq=0)
    fit(model, data)
    # A policy that does nothing gets about -1,200; after 6,000 transitions TD3 gets -350 to -470, as SB3's does.
    assert mean_return(model, gym.make("Pendulum-v1"), n_episodes=10) > -300


def test_a_target_of_another_shape_is_not_broadcast() -> None:
    class Column(DDPG):
        def td_target(self, *arguments: Any) -> Tensor:
            return super().td_target(*arguments)[:, None]

    data = ReplayDataModule("Pendulum-v1", learning_starts=16, batch_size=8, total_timesteps=32, eval_freq=0)
    with pytest.raises(ValueError, match=r"td_target has shape \(8, 1\), expected \(8,\), one number per transition"):
        fit(Column(net_arch=[8]), data)
