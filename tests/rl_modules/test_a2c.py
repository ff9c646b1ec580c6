from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_modules import A2C
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.optimizers import RMSpropTFLike
from tests.training import assert_resumes_exactly, fit, rollouts

SPACES = {
    "observation_space": space_to_dict(spaces.Box(-1, 1, (3,), np.float32)),
    "action_space": space_to_dict(spaces.Discrete(2)),
}


def made(**arguments: Any) -> A2C:
    model = A2C(**arguments, **SPACES)
    model.configure_model()
    model.run.logs_this_epoch = False
    return model


def random_rollout(seed: int = 0, t: int = 5, n: int = 4) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ends = torch.rand(t, n, generator=g)
    value, final = torch.randn(t + 1, n, generator=g), torch.randn(t, n, generator=g)
    return {
        "observation": torch.randn(t, n, 3, generator=g),
        "action": torch.randint(0, 2, (t, n), generator=g),
        "reward": torch.randn(t, n, generator=g),
        "terminated": ends < 0.2,
        "truncated": ends > 0.8,
        "valid": torch.ones(t, n, dtype=torch.bool),
        "value": value[:-1],
        "next_value": torch.where(ends > 0.8, final, value[1:]),
    }


def test_default_returns_are_n_step() -> None:
    rollout = random_rollout()
    names = ("reward", "next_value", "terminated", "truncated")
    expected = F.n_step_returns(*(rollout[name] for name in names), gamma=0.99, n=5)
    torch.testing.assert_close(made().prepare(rollout)["returns"], expected)


def test_loss_is_the_papers() -> None:
    model = made(ent_coef=0.1, vf_coef=0.25)
    batch = {k: v.flatten(0, 1) for k, v in model.prepare(random_rollout()).items()}
    logits = model.network(batch["observation"])[0].log_p
    policy = torch.distributions.Categorical(logits=logits)
    value = model.network(batch["observation"])[1]
    expected = (
        -(policy.log_prob(batch["action"]) * batch["advantage"]).mean()
        + 0.25 * ((value - batch["returns"]) ** 2).mean()
        - 0.1 * policy.entropy().mean()
    )
    torch.testing.assert_close(model.training_step(batch, 0), expected)


def test_normalized_advantages_have_no_scale() -> None:
    model = made(normalize_advantage=True)
    log_prob, advantage = torch.randn(20), torch.randn(20)
    one = model.policy_loss(log_prob, {"advantage": advantage})
    other = model.policy_loss(log_prob, {"advantage": 50 * advantage - 7})
    assert one.item() == pytest.approx(other.item(), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "expected", "lr"),
    [
        ({}, torch.optim.RMSprop, 7e-4),
        ({"use_rms_prop": False}, torch.optim.Adam, 7e-4),
        ({"optimizer": RMSpropTFLike}, RMSpropTFLike, 7e-4),
        ({"learning_rate": 1e-2}, torch.optim.RMSprop, 1e-2),
    ],
)
def test_optimizers(arguments: dict[str, Any], expected: type, lr: float) -> None:
    model = A2C(**arguments)
    trainer = fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=5), max_epochs=1)
    optimizer = trainer.optimizers[0]
    assert type(optimizer) is expected
    assert optimizer.param_groups[0]["lr"] == lr


def test_rms_prop_eps_reaches_the_optimizer() -> None:
    trainer = fit(A2C(rms_prop_eps=0.5), rollouts("CartPole-v1", n_envs=2, n_steps=5), max_epochs=1)
    assert trainer.optimizers[0].param_groups[0]["eps"] == 0.5


def test_gradients_are_clipped_to_max_grad_norm() -> None:
    class Watching(A2C):
        norms: list[float]

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)
            gradient = torch.cat([p.grad.reshape(-1) for p in self.parameters()])
            self.norms.append(gradient.norm().item())

    for limit, clipped in ((1e-3, True), (None, False)):
        model = Watching(max_grad_norm=limit)
        model.norms = []
        fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=5, rollouts_per_epoch=5), max_epochs=1)
        assert (max(model.norms) <= 1.01e-3) == clipped


def test_learning_rate_decays_to_zero_over_the_rollouts() -> None:
    rates = []

    class Watching(A2C):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    model = Watching(learning_rate="lin_1.0")
    fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=5, rollouts_per_epoch=4, total_timesteps=40))
    assert rates == pytest.approx([0.75, 0.5, 0.25, 0.0])


@pytest.mark.long
def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: A2C(learning_rate="lin_7e-4", ent_coef=0.01),
        lambda: rollouts("CartPole-v1", n_envs=3, n_steps=5, rollouts_per_epoch=7, norm_obs=True, norm_reward=True),
        tmp_path,
    )


@pytest.mark.long
def test_the_seed_decides_everything() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = A2C()
        fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=5, seed=seed, rollouts_per_epoch=5), max_epochs=2)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(("argument", "value"), [("gamma", 1.5), ("gae_lambda", -0.1)])
def test_bad_arguments_are_named(argument: str, value: float) -> None:
    with pytest.raises(UsageError, match=argument):
        A2C(**{argument: value})


@pytest.mark.parametrize("graph", [False, True])
def test_an_epoch_that_total_timesteps_ends_has_a_loss(graph: bool) -> None:
    data = rollouts("torch/CartPole-v1", n_envs=2, n_steps=4, rollouts_per_epoch=2, total_timesteps=8)
    assert "train/loss" in fit(A2C(graph=graph), data).callback_metrics
