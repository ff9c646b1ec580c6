"""What several test modules share: plain reference implementations, and settings that make hypothesis repeatable."""

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

# Derandomized, so that a red test stays red; few examples, because each runs dozens of small kernels.
repeatable = settings(derandomize=True, deadline=None, max_examples=20, database=None)

seeds = st.integers(0, 10_000)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def coins(seed: int, probability: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator(seed)) < probability


def random_rollout(
    seed: int, steps: int, envs: int, dtype: torch.dtype = torch.float64, end: float = 0.15
) -> dict[str, Tensor]:
    return {
        "reward": randn(seed, steps, envs, dtype=dtype),
        "value": randn(seed + 1, steps, envs, dtype=dtype),
        "next_value": randn(seed + 2, steps, envs, dtype=dtype),
        "terminated": coins(seed + 3, end, steps, envs),
        "truncated": coins(seed + 4, end, steps, envs),
    }


def n_step_sum(rollout: dict[str, Tensor], t: int, env: int, gamma: float, n: float) -> float:
    """The n-step return of one state, summed term by term in Python numbers, as a textbook defines it."""
    reward, next_value = rollout["reward"], rollout["next_value"]
    total, discount, steps = 0.0, 1.0, len(reward)
    for k in range(t, steps):
        total += discount * reward[k, env].item()
        discount *= gamma
        if rollout["terminated"][k, env]:
            return total
        if rollout["truncated"][k, env] or k == steps - 1 or k - t + 1 == n:
            return total + discount * next_value[k, env].item()
    raise AssertionError("a rollout has at least one step")


def gae_sum(rollout: dict[str, Tensor], t: int, env: int, gamma: float, gae_lambda: float) -> float:
    """GAE of one state as the explicit sum of (γλ)^k δ_{t+k}, up to the end of the episode."""
    total = 0.0
    for k in range(t, len(rollout["reward"])):
        bootstrap = 0.0 if rollout["terminated"][k, env] else rollout["next_value"][k, env].item()
        delta = rollout["reward"][k, env].item() + gamma * bootstrap - rollout["value"][k, env].item()
        total += (gamma * gae_lambda) ** (k - t) * delta
        if rollout["terminated"][k, env] or rollout["truncated"][k, env]:
            break
    return total


def categorical_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
