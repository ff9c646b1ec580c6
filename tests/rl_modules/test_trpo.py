from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_modules import TRPO
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from tests import envs
from tests.marks import quick
from tests.training import assert_resumes_exactly, fit, rollouts

OBSERVATION = space_to_dict(spaces.Box(-1, 1, (2,), np.float32))
ACTIONS = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(2),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
}


def made(space: str = "Discrete", **arguments: Any) -> TRPO:
    defaults = {"net_arch": [3], "ortho_init": False, "log_std_init": -0.3}
    spaces_given = {"observation_space": OBSERVATION, "action_space": space_to_dict(ACTIONS[space])}
    model = TRPO(**{**defaults, **arguments}, **spaces_given)
    model.configure_model()
    return model


def batch_of(model: TRPO, n: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(n, 2, generator=generator)
    with torch.no_grad():
        acted = model.act(observation, generator)
    advantage = torch.randn(n, generator=generator)
    return {"observation": observation, **acted, "advantage": advantage, "returns": advantage + acted["value"]}


def policy_vector(model: TRPO) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.network.parameters()).detach().clone()


def critic_vector(model: TRPO) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.value_network.parameters()).detach().clone()


def every_action(space: str) -> torch.Tensor:
    if space == "Discrete":
        return torch.arange(3)
    if space == "MultiDiscrete":
        return torch.cartesian_prod(torch.arange(2), torch.arange(3))
    return torch.cartesian_prod(torch.arange(2), torch.arange(2))


def fisher_matrix(model: TRPO, space: str, observation: torch.Tensor) -> torch.Tensor:
    """E[∇log π ∇log πᵀ], by its definition: no KL, no second derivative."""
    parameters = list(model.network.parameters())
    size = sum(p.numel() for p in parameters)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1)
                          for p, g in zip(parameters, found, strict=True)])  # fmt: skip

    total = torch.zeros(size, size)
    for row in observation:
        policy = model.policy(row[None])
        if space == "Box":
            # Of a normal: 1/σ² for the mean, 2 for log σ.
            for mean, log_std in zip(policy.mean[0], policy.log_std, strict=True):
                by_mean, by_log_std = gradient(mean), gradient(log_std)
                total += torch.outer(by_mean, by_mean) * (-2 * log_std.detach()).exp()
                total += 2 * torch.outer(by_log_std, by_log_std)
        else:
            for action in every_action(space):
                log_prob = policy.log_prob(action[None])[0]
                score = gradient(log_prob)
                total += log_prob.exp().detach() * torch.outer(score, score)
    return total / len(observation)


@pytest.mark.parametrize("space", ACTIONS)
def test_fisher_product_is_that_with_the_explicit_matrix(space: str) -> None:
    model = made(space, cg_damping=0.25)
    observation = batch_of(model, n=6)["observation"]
    policy = model.policy(observation)
    product = model.fisher_product(policy.detach().kl(policy).mean(), list(model.network.parameters()))
    matrix = fisher_matrix(model, space, observation)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        vector = torch.randn(len(matrix), generator=generator)
        torch.testing.assert_close(product(vector), matrix @ vector + 0.25 * vector, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", ACTIONS)
def test_step_is_the_natural_gradient_at_the_trust_regions_edge(space: str) -> None:
    # A radius so small that the KL is quadratic within it: the full step must be taken.
    model = made(space, cg_max_steps=200, cg_damping=0.05, target_kl=1e-5, normalize_advantage=False)
    batch = batch_of(model)
    before = policy_vector(model)
    surrogate = model.surrogate(model.policy(batch["observation"]), batch)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(surrogate, list(model.network.parameters()))])
    matrix = fisher_matrix(model, space, batch["observation"]) + 0.05 * torch.eye(len(before))
    direction = torch.linalg.solve(matrix, gradient)
    expected = (2e-5 / (direction @ matrix @ direction)).sqrt() * direction
    found = model.update_policy(batch)
    assert found["line_search_steps"] == 1
    torch.testing.assert_close(policy_vector(model) - before, expected, rtol=0.02, atol=0.02 * expected.abs().max())


@pytest.mark.parametrize("space", ACTIONS)
def test_policy_stays_in_the_trust_region_and_improves(space: str) -> None:
    model = made(space, target_kl=0.02)
    for seed in range(5):
        batch = batch_of(model, seed=seed)
        old = model.policy(batch["observation"]).detach()
        found = model.update_policy(batch)
        policy = model.policy(batch["observation"])
        std, mean = torch.std_mean(batch["advantage"])
        whitened = (batch["advantage"] - mean) / (std + 1e-8)
        ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
        improvement = (ratio * whitened).mean() - whitened.mean()
        assert found["is_line_search_success"] == 1
        assert improvement > 0
        assert found["policy_objective"].item() == pytest.approx(improvement.item(), abs=1e-5)
        assert 0 < old.kl(policy).mean() <= 0.02
        assert found["approx_kl"].item() == pytest.approx(old.kl(policy).mean().item(), abs=1e-6)


def searched(model: TRPO, factor: float) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A line search along the surrogate's gradient, ``factor`` times its length."""
    batch = batch_of(model)
    parameters = list(model.network.parameters())
    policy = model.policy(batch["observation"])
    surrogate = model.surrogate(policy, batch)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(surrogate, parameters)])
    return model.line_search(factor * gradient, parameters, policy.detach(), surrogate, batch), batch


def test_a_step_that_is_too_long_is_shortened() -> None:
    model = made(line_search_max_iter=50)
    found, _ = searched(model, 30.0)
    assert found["is_line_search_success"] == 1
    assert found["line_search_steps"] > 2
    assert 0 < found["approx_kl"] <= 0.01


def test_an_uphill_step_out_of_reach_is_undone_exactly() -> None:
    model = made(line_search_max_iter=3)
    before = policy_vector(model)
    found, _ = searched(model, 1000.0)
    assert found["is_line_search_success"] == 0
    assert found["line_search_steps"] == 3
    assert torch.equal(policy_vector(model), before)


def test_a_step_within_the_region_that_improves_nothing_is_undone_exactly() -> None:
    model = made(target_kl=1e6)
    before = policy_vector(model)
    found, _ = searched(model, -0.1)
    assert found["is_line_search_success"] == 0
    assert found["approx_kl"] == 0
    assert torch.equal(policy_vector(model), before)


def test_without_a_gradient_nothing_moves_and_the_update_counts_as_rejected() -> None:
    model = made()
    batch = batch_of(model)
    batch["advantage"] = torch.ones(64)
    before = policy_vector(model)
    found = model.update_policy(batch)
    assert torch.equal(policy_vector(model), before)
    assert found["is_line_search_success"] == 0
    assert model.rejected_updates == 1
    assert model.run.latest["train/rejected_updates"] == 1


def test_policy_and_value_are_those_of_acting() -> None:
    model = TRPO(observation_space=spaces.Box(-1, 1, (3,)), action_space=spaces.Box(-1, 1, (2,)))
    model.configure_model()
    observation = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    policy, value = model.policy_and_value(observation)
    acted = model.act(observation, deterministic=True)
    torch.testing.assert_close(value, model.value_network(observation))
    torch.testing.assert_close(value, acted["value"])
    torch.testing.assert_close(policy.mode(), acted["action"])


def test_policy_update_leaves_the_critic_alone_and_the_other_way_round() -> None:
    data = rollouts("CartPole-v1", n_envs=2, n_steps=32)
    moved = {}

    class Watching(TRPO):
        def update_policy(self, batch: Any) -> Any:
            before = critic_vector(self)
            result = super().update_policy(batch)
            moved["critic"] = not torch.equal(before, critic_vector(self))
            return result

        def update_critic(self, batch: Any) -> Any:
            before, critic = policy_vector(self), critic_vector(self)
            result = super().update_critic(batch)
            moved["policy"] = not torch.equal(before, policy_vector(self))
            moved["critic by itself"] = not torch.equal(critic, critic_vector(self))
            return result

    model = Watching()
    fit(model, data, max_epochs=1)
    assert moved == {"critic": False, "policy": False, "critic by itself": True}


def test_critic_sees_every_transition_once_per_pass() -> None:
    seen: list[torch.Tensor] = []

    class Watching(TRPO):
        def value_loss(self, value: torch.Tensor, batch: Any) -> torch.Tensor:
            seen.append(batch["returns"])
            return super().value_loss(value, batch)

    class Returns(Watching):
        def advantages(self, rollout: Any) -> torch.Tensor:
            return torch.arange(64.0).reshape(32, 2) - rollout["value"]

    trainer = fit(Returns(n_critic_updates=3, batch_size=24), rollouts("CartPole-v1", 2, 32), max_epochs=1)
    assert [len(returns) for returns in seen] == [24, 24, 16] * 3
    passes = [torch.cat(seen[i : i + 3]) for i in (0, 3, 6)]
    for returns in passes:
        torch.testing.assert_close(returns.sort().values, torch.arange(64.0))
    assert not torch.equal(passes[0], passes[1])
    assert trainer.global_step == 9


@pytest.mark.long
@pytest.mark.parametrize(
    "space",
    quick(["identity_discrete", "identity_multidiscrete", "identity_multibinary", "identity_box"], "identity_box"),
)
def test_resumes_bit_for_bit(space: str, tmp_path: Path) -> None:
    make_env = getattr(envs, f"make_{space}")
    assert_resumes_exactly(
        lambda: TRPO(batch_size=20, n_critic_updates=2), lambda: rollouts(make_env, n_envs=2, n_steps=25), tmp_path
    )


@pytest.mark.long
def test_the_seed_decides_everything() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = TRPO()
        fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=32, seed=seed), max_epochs=3)
        return torch.cat([policy_vector(model), critic_vector(model)])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_learning_rate_of_the_critic_is_scheduled() -> None:
    data = {"n_envs": 2, "n_steps": 16}
    by_progress = fit(TRPO(learning_rate="lin_1.0"), rollouts("CartPole-v1", **data, total_timesteps=128), max_epochs=3)
    assert by_progress.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25)
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    by_epoch = fit(TRPO(lr_scheduler=scheduler), rollouts("CartPole-v1", **data), max_epochs=3)
    assert by_epoch.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**3)


def test_the_trust_region_shrinks_to_a_sliver_over_total_timesteps() -> None:
    model, sizes = TRPO(target_kl="lin_0.04"), []

    class Watch(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            sizes.append(model.target_kl)

    fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=16, total_timesteps=128), callbacks=[Watch()])
    assert sizes == pytest.approx([0.03, 0.02, 0.01, 4e-5])


@pytest.mark.parametrize("value", ["linear", -0.01])
def test_a_target_kl_that_is_no_schedule_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match=f"target_kl={value!r} is no schedule"):
        TRPO(target_kl=value)


def test_minibatches_of_a_rollout_are_refused() -> None:
    with pytest.raises(UsageError, match="n_epochs=1 and batch_size=None"):
        fit(TRPO(), rollouts("CartPole-v1", n_envs=2, n_steps=16, n_epochs=10), max_epochs=1)
