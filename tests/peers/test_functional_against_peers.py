"""The functional core against the libraries that people use today: the same numbers, and the same gradients."""

from types import SimpleNamespace

import pytest
import torch

from rl_modules.functional import (
    approx_kl,
    bradley_terry_loss,
    clip_fraction,
    conjugate_gradient,
    discounted_returns,
    explained_variance,
    gae,
    group_advantages,
    grpo_loss,
    importance_weights,
    n_step_returns,
    quantile_huber_loss,
    rloo_advantages,
    soft_overlong_punishment,
    squashed_gaussian_log_prob,
    token_entropy,
    token_log_probs,
)

pytestmark = pytest.mark.bench


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


# --- Stable-Baselines3 ---------------------------------------------------------------------------------------------


def sb3_buffer(steps: int, envs: int, gamma: float, gae_lambda: float, rollout: dict[str, torch.Tensor]):
    """SB3's buffer, filled as its `collect_rollouts` does: a truncation adds γ V(final observation) to the reward."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    spaces = pytest.importorskip("gymnasium.spaces")
    buffer = buffers.RolloutBuffer(
        steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), gamma=gamma, gae_lambda=gae_lambda, n_envs=envs
    )
    ended = rollout["terminated"] | rollout["truncated"]
    cut_short = rollout["truncated"] & ~rollout["terminated"]
    buffer.rewards[:] = (rollout["reward"] + gamma * rollout["next_value"] * cut_short).numpy()
    buffer.values[:] = rollout["value"].numpy()
    buffer.episode_starts[0] = 1
    buffer.episode_starts[1:] = ended[:-1].numpy()
    buffer.compute_returns_and_advantage(rollout["next_value"][-1], ended[-1].numpy())
    return torch.from_numpy(buffer.advantages), torch.from_numpy(buffer.returns)


@pytest.mark.parametrize(("steps", "envs"), [(5, 8), (32, 8), (300, 4)])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.98, 0.8), (0.9, 0.0), (0.99, 1.0)])
def test_gae_equals_stable_baselines3(steps, envs, gamma, gae_lambda):
    rollout = {
        "reward": randn(0, steps, envs),
        "value": randn(1, steps, envs),
        "next_value": randn(2, steps, envs),
        "terminated": torch.rand(steps, envs, generator=generator(3)) < 0.1,
        "truncated": torch.rand(steps, envs, generator=generator(4)) < 0.1,
    }
    # Inside an episode SB3 takes the next row's value for the successor's.
    goes_on = ~(rollout["terminated"] | rollout["truncated"])[:-1]
    rollout["next_value"][:-1][goes_on] = rollout["value"][1:][goes_on]
    advantage, returns = sb3_buffer(steps, envs, gamma, gae_lambda, rollout)
    ours = gae(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(ours, advantage, atol=2e-5, rtol=1e-5)
    if gae_lambda == 1.0:
        value = rollout.pop("value")
        torch.testing.assert_close(discounted_returns(**rollout, gamma=gamma), returns, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(ours + value, returns, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_n_step_returns_equal_stable_baselines3s_replay_buffer(n):
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    if not hasattr(buffers, "NStepReplayBuffer"):
        pytest.skip("this release of stable-baselines3 has no NStepReplayBuffer")
    import numpy as np
    from gymnasium.spaces import Box, Discrete

    steps, gamma = 40, 0.9
    reward = randn(0, steps, 1)
    terminated = torch.rand(steps, 1, generator=generator(1)) < 0.1
    truncated = (torch.rand(steps, 1, generator=generator(2)) < 0.1) & ~terminated
    # The observation is the time, so that the buffer's "next observation" says how far it looked ahead.
    buffer = buffers.NStepReplayBuffer(
        steps,
        Box(-np.inf, np.inf, (1,)),
        Discrete(2),
        n_envs=1,
        n_steps=n,
        gamma=gamma,
        handle_timeout_termination=True,
    )
    for t in range(steps):
        done = (terminated | truncated)[t].numpy()
        infos = [{"TimeLimit.truncated": bool(truncated[t, 0])}]
        buffer.add(np.array([[t]]), np.array([[t + 1]]), np.zeros((1, 1)), reward[t].numpy(), done, infos)
    # Ours bootstraps at the rollout's end; theirs, once full, does the same at the newest transition.
    sample = buffer._get_samples(np.arange(steps))
    value = randn(3, steps + 1)
    bootstrap = (1 - sample.dones[:, 0]) * sample.discounts[:, 0] * value[sample.next_observations[:, 0].long()]
    expected = sample.rewards[:, 0] + bootstrap
    ours = n_step_returns(reward, value[1:, None], terminated, truncated, gamma, n)[:, 0]
    torch.testing.assert_close(ours, expected)


def test_explained_variance_equals_stable_baselines3():
    utils = pytest.importorskip("stable_baselines3.common.utils")
    value, returns = randn(0, 100), randn(1, 100)
    expected = utils.explained_variance(value.numpy(), returns.numpy())
    assert explained_variance(value, returns).item() == pytest.approx(float(expected), rel=1e-5)
    assert explained_variance(value, torch.ones(100)).isnan()


def test_diagnostics_equal_the_lines_of_stable_baselines3s_ppo():
    # These stand in the middle of PPO.train(), so the formulas are repeated here.
    log_prob, old = randn(0, 200) * 0.3, torch.zeros(200)
    log_ratio = log_prob - old
    expected_kl = ((log_ratio.exp() - 1) - log_ratio).mean()
    torch.testing.assert_close(approx_kl(log_prob, old), expected_kl)
    expected_fraction = ((log_ratio.exp() - 1).abs() > 0.2).float().mean()
    torch.testing.assert_close(clip_fraction(log_prob, old, 0.2), expected_fraction)


def test_squashed_densities_equal_stable_baselines3s():
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    mean, log_std, noise = (randn(i, 50, 3, dtype=torch.float64) for i in range(3))
    u = mean + log_std.exp() * noise
    u = u.clamp(-4, 4)  # theirs adds 1e-6 to 1 - tanh², which dominates beyond
    peer = distributions.SquashedDiagGaussianDistribution(3).proba_distribution(mean, log_std)
    expected = peer.log_prob(u.tanh(), gaussian_actions=u)
    torch.testing.assert_close(squashed_gaussian_log_prob(mean, log_std, u), expected, atol=3e-3, rtol=0)
    near = u.clamp(-0.5, 0.5)
    expected = peer.log_prob(near.tanh(), gaussian_actions=near)
    torch.testing.assert_close(squashed_gaussian_log_prob(mean, log_std, near), expected, atol=5e-6, rtol=0)


# --- sb3-contrib ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [10, 15])
def test_conjugate_gradient_equals_sb3_contrib(iterations):
    utils = pytest.importorskip("sb3_contrib.common.utils")
    factor = randn(0, 30, 30, dtype=torch.float64)
    matrix = factor @ factor.T / 30 + 0.1 * torch.eye(30, dtype=torch.float64)
    b = randn(1, 30, dtype=torch.float64)
    torch.manual_seed(0)  # theirs starts from noise of size 1e-4, ours from 0: the same up to about that
    expected = utils.conjugate_gradient_solver(matrix.mv, b, max_iter=iterations)
    ours = conjugate_gradient(matrix.mv, b, iterations)
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)
    exact = torch.linalg.solve(matrix, b)
    assert (ours - exact).norm() <= (expected - exact).norm() * 1.05


@pytest.mark.parametrize(("count", "targets"), [(5, 5), (25, 46), (1, 3)])
def test_the_quantile_loss_equals_sb3_contrib(count, targets):
    utils = pytest.importorskip("sb3_contrib.common.utils")
    quantiles, target = 2 * randn(0, 8, count), 2 * randn(1, 8, targets)
    inputs = [quantiles.clone().requires_grad_() for _ in range(2)]
    ours, expected = quantile_huber_loss(inputs[0], target), utils.quantile_huber_loss(inputs[1], target)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
    gradient, expected_gradient = (torch.autograd.grad(*pair)[0] for pair in zip((ours, expected), inputs, strict=True))
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)
    assert gradient.abs().sum() > 0


# --- TRL: the GRPO loss --------------------------------------------------------------------------------------------


class FrozenAccelerator:
    """What `_compute_loss` asks of accelerate in a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x):
        return x

    def gather_for_metrics(self, x):
        return x

    def reduce(self, x, reduction="sum"):
        return x


def trl_grpo_loss(log_prob, batch, **settings):
    """TRL's own `_compute_loss`, with a stand-in for the trainer that returns our log-probs for the model's."""
    from collections import defaultdict

    trainer_class = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    steps = settings.pop("accumulation_steps", 1)
    args = SimpleNamespace(
        delta=settings.pop("delta"),
        use_bias_correction_kl=settings.pop("use_bias_correction_kl"),
        steps_per_generation=steps,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_prob, torch.zeros_like(log_prob), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm="importance_weight" in batch,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=steps,
        accelerator=FrozenAccelerator(),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        args=args,
        **settings,
    )
    length = batch["mask"].shape[1]
    inputs = {
        "prompt_ids": torch.zeros(len(batch["mask"]), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(batch["mask"]), 1, dtype=torch.long),
        "completion_ids": torch.zeros(len(batch["mask"]), length, dtype=torch.long),
        "completion_mask": batch["mask"].long(),
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["old_log_prob"],
        "ref_per_token_logps": batch["ref_log_prob"],
        "num_items_in_batch": batch["num_items_in_batch"],
        "importance_sampling_ratio": batch.get("importance_weight"),
    }
    return trainer_class._compute_loss(trainer, None, inputs)


def grpo_batch(dtype: torch.dtype, rows: int = 6, length: int = 9):
    lengths = torch.tensor([9, 3, 1, 7, 0, 5])  # one row without a single token
    log_prob = randn(0, rows, length, dtype=dtype) - 2
    return log_prob, {
        "old_log_prob": log_prob + 0.4 * randn(1, rows, length, dtype=dtype),
        "ref_log_prob": log_prob + 0.4 * randn(2, rows, length, dtype=dtype),
        "advantage": randn(3, rows, dtype=dtype),
        "mask": torch.arange(length) < lengths[:, None],
        "num_items_in_batch": torch.tensor(40),
    }


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("beta", "corrected"), [(0.0, False), (0.04, False), (0.04, True)])
@pytest.mark.parametrize(("epsilon", "epsilon_high", "delta"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.2, 1.4)])
def test_grpo_loss_and_gradient_equal_trl(loss_type, level, beta, corrected, epsilon, epsilon_high, delta):
    log_prob, batch = grpo_batch(torch.float64)
    ours_input, trl_input = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
    expected = trl_grpo_loss(
        trl_input,
        batch,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        use_bias_correction_kl=corrected,
        max_completion_length=12,
    )
    ours = grpo_loss(
        ours_input,
        batch["old_log_prob"],
        batch["advantage"],
        batch["mask"],
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        beta=beta,
        ref_log_prob=batch["ref_log_prob"],
        use_bias_correction_kl=corrected,
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=12,
        num_items_in_batch=batch["num_items_in_batch"],
    )
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(ours, ours_input)
    (expected_gradient,) = torch.autograd.grad(expected, trl_input)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("beta", "corrected"), [(0.0, False), (0.04, True)])
def test_cispo_sapo_and_importance_weights_equal_trl(loss_type, level, beta, corrected, weighted):
    log_prob, batch = grpo_batch(torch.float64)
    if weighted:
        batch["importance_weight"] = randn(7, *log_prob.shape, dtype=torch.float64).exp()
    ours_input, trl_input = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
    expected = trl_grpo_loss(
        trl_input,
        batch,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=1.3,
        delta=None,
        use_bias_correction_kl=corrected,
        max_completion_length=12,
    )
    ours = grpo_loss(
        ours_input,
        batch["old_log_prob"],
        batch["advantage"],
        batch["mask"],
        epsilon_high=1.3,
        beta=beta,
        ref_log_prob=batch["ref_log_prob"],
        use_bias_correction_kl=corrected,
        loss_type=loss_type,
        importance_sampling_level=level,
        num_items_in_batch=batch["num_items_in_batch"],
        importance_weight=batch.get("importance_weight"),
    )
    # TRL keeps sapo's temperatures in float32: 1.05 is off by 5e-8 there.
    tolerance = {"rtol": 1e-7, "atol": 1e-7} if loss_type == "sapo" else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ours, expected, **tolerance)
    (gradient,) = torch.autograd.grad(ours, ours_input)
    (expected_gradient,) = torch.autograd.grad(expected, trl_input)
    torch.testing.assert_close(gradient, expected_gradient, **tolerance)
    assert gradient.abs().sum() > 0


# --- TRL: the other pieces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_log_probs_and_entropy_equal_trl(dtype, temperature):
    utils = pytest.importorskip("trl.trainer.utils")
    logits = (randn(0, 3, 7, 500) * 3).to(dtype)
    tokens = torch.randint(500, (3, 7), generator=generator(1))
    ours_input, trl_input = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    # TRL computes in bfloat16 where the logits are, with a relative error of 2^-8 in values of up to 15.
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.01}
    pairs = [
        (token_log_probs(ours_input, tokens, temperature), utils.selective_log_softmax(trl_input, tokens, temperature)),
        (token_entropy(ours_input, temperature), utils.entropy_from_logits(trl_input / temperature)),
    ]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected.float(), **tolerance)
        (gradient,) = torch.autograd.grad(ours.sum(), ours_input)
        (expected_gradient,) = torch.autograd.grad(expected.sum(), trl_input)
        # bfloat16: both round a gradient of size up to 1.4, TRL after rounding the log-probs as well.
        gradient_tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.05}
        torch.testing.assert_close(gradient, expected_gradient, **gradient_tolerance)


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_the_reward_loss_equals_trl(with_margin, coefficient):
    from collections import defaultdict

    trainer_class = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    scores = randn(0, 12)
    ours_input, trl_input = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    margin = randn(1, 6).abs()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=coefficient),
        accelerator=FrozenAccelerator(),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
    )
    inputs = {"attention_mask": torch.ones(12, 3)}
    if with_margin:
        inputs["margin"] = margin

    def model(**kwargs):
        return SimpleNamespace(logits=trl_input.unsqueeze(-1))

    expected = trainer_class.compute_loss(trainer, model, inputs)
    ours = bradley_terry_loss(
        ours_input[:6],
        ours_input[6:],
        margin if with_margin else None,
        0.0 if coefficient is None else coefficient,
    )
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, ours_input)[0], torch.autograd.grad(expected, trl_input)[0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_equal_the_lines_of_trl(scale):
    # They stand in the middle of _generate_and_score_completions; only nanstd is a function that one can call.
    utils = pytest.importorskip("trl.trainer.utils")
    reward = randn(0, 24)
    reward[torch.rand(24, generator=generator(1)) < 0.2] = torch.nan
    reward[:3] = torch.tensor([0.5, 0.25, 1.0])
    grouped = reward.view(-1, 6)
    advantage = grouped - torch.nanmean(grouped, dim=1, keepdim=True)
    if scale == "group":
        advantage = advantage / (utils.nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    elif scale == "batch":
        advantage = advantage / (utils.nanstd(reward) + 1e-4)
    torch.testing.assert_close(group_advantages(reward, 6, scale), advantage.view(-1).nan_to_num(0.0))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.5, 2.0), (0.5, None)])
def test_importance_weights_equal_the_lines_of_trl(mode, low, high):
    # They stand in the middle of _generate_and_score_completions.
    old, sampling = randn(0, 6, 5), randn(1, 6, 5)
    sampling[0, 1] = torch.nan
    mask = torch.rand(6, 5, generator=generator(2)) < 0.7
    difference = torch.nan_to_num((old - sampling) * mask, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        ratio = ratio.clamp(min=low, max=high)
    else:
        low_value, high_value = -torch.inf if low is None else low, torch.inf if high is None else high
        ratio = ratio.masked_fill((ratio < low_value) | (ratio > high_value), 0.0)
    ours = importance_weights(old, sampling, mask, mode, low, high)
    torch.testing.assert_close(ours, ratio.expand(6, 5), atol=1e-6, rtol=1e-6)


def test_leave_one_out_equals_the_lines_of_trl():
    reward = randn(0, 24)
    reward[torch.rand(24, generator=generator(1)) < 0.2] = torch.nan
    grouped = reward.view(-1, 6)
    count = (~grouped.isnan()).sum(1, keepdim=True)
    baseline = (torch.nansum(grouped, 1, keepdim=True) - grouped) / (count - 1)
    expected = (reward - baseline.view(-1)).nan_to_num(0.0)
    torch.testing.assert_close(rloo_advantages(reward, 6), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("longest", "ramp"), [(100, 20), (10, 10), (7, 1)])
def test_the_overlong_punishment_equals_trl(longest, ramp):
    rewards = pytest.importorskip("trl.rewards")
    lengths = list(range(longest + 5))
    expected = rewards.get_soft_overlong_punishment(longest, ramp)([[1] * n for n in lengths])
    torch.testing.assert_close(soft_overlong_punishment(torch.tensor(lengths), longest, ramp), torch.tensor(expected))
