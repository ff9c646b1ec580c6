"""Reward functions that give every token a number: returns in closed form, and what is refused."""

import math

import numpy as np
import pytest
import torch

from datamodules.language.reward_calls import RewardFunctions
from rl_modules import GRPO
from rl_modules.common.errors import UsageError
from rl_modules.language.rlhf_ppo import RLHFPPO
from tests.rl_modules.language.test_rlhf_ppo import Curves, folders, make  # noqa: F401
from tests.rl_modules.language.test_verifiers import kept, verified
from tests.training import fit

HERE = "tests.rl_modules.language.test_token_rewards"


def each(completion_ids, **columns):
    """A tenth of the token's id, per token."""
    return [[token / 10 for token in ids] for ids in completion_ids]


def total(completion_ids, **columns):
    return [sum(ids) / 10 for ids in completion_ids]


def at_the_end(completion_ids, **columns):
    return [[0.0] * (len(ids) - 1) + [sum(ids) / 10] for ids in completion_ids]


def of_some(completion_ids, **columns):
    """Lists, arrays, single numbers and None, in turn."""
    kinds = [lambda ids: [1.0] * len(ids), lambda ids: np.full(len(ids), 2.0), lambda ids: 3.0, lambda ids: None]
    return [kinds[i % 4](ids) for i, ids in enumerate(completion_ids)]


SETTINGS = {"max_completion_length": 40, "beta": 0.0, "gamma": 1.0, "lam": 1.0, "whiten_advantages": False}


def prepared(make, functions, data=None, **model):  # noqa: F811
    module, module_data = verified(make, kept(RLHFPPO), {"reward_funcs": functions, **(data or {})},
                                   **{**SETTINGS, **model})  # fmt: skip
    fit(module, module_data, max_steps=1)
    return module.seen[0]


def completions(rollout):
    rows = zip(rollout["tokens"], rollout["prompt_length"].tolist(), rollout["length"].tolist(), strict=True)
    return [tokens[start : start + n].tolist() for tokens, start, n in rows]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 1.0)])
def test_returns_are_the_discounted_sums_of_the_rewards_to_come(make, gamma, lam):  # noqa: F811
    """With λ = 1 the return of token t is Σ_k γ^k r_{t+k}, whatever the values are."""
    rollout, fields = prepared(make, [f"{HERE}:each"], gamma=gamma, lam=lam)
    assert len({len(ids) for ids in completions(rollout)}) > 1
    for i, ids in enumerate(completions(rollout)):
        for t in range(len(ids)):
            expected = math.fsum(gamma**k * token / 10 for k, token in enumerate(ids[t:]))
            assert float(fields["returns"][i, t]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert rollout["rewards"][:, 0].tolist() == pytest.approx([sum(ids) / 10 for ids in completions(rollout)])


def test_all_at_the_end_is_one_number_per_completion(make):  # noqa: F811
    one, other = (prepared(make, [f"{HERE}:{name}"], lam=0.95, missing_eos_penalty=1.5)
                  for name in ("total", "at_the_end"))  # fmt: skip
    assert one[0]["token_rewards"] is None and other[0]["token_rewards"] is not None
    for name in ("advantage", "returns", "mask"):
        torch.testing.assert_close(one[1][name], other[1][name], atol=1e-5, rtol=1e-5)


def test_weights_penalty_and_functions_of_both_kinds(make):  # noqa: F811
    rollout, _ = prepared(make, [f"{HERE}:each", f"{HERE}:total"], reward_weights=[2.0, -0.5], missing_eos_penalty=1.5)
    for i, ids in enumerate(completions(rollout)):
        expected = [0.2 * token for token in ids]
        expected[-1] += -0.05 * sum(ids) - 1.5 * (not rollout["finished"][i])
        found = rollout["reward"][i]
        assert found[: len(ids)].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert not found[len(ids) :].any()


@pytest.mark.long
def test_a_reward_model_beside_them_judges_at_the_end(make, folders):  # noqa: F811
    rollout, _ = prepared(make, [f"{HERE}:each"], reward_weights=[1.0, 3.0],
                          reward_model_name_or_path=str(folders / "reward"))  # fmt: skip
    for i, ids in enumerate(completions(rollout)):
        expected = [token / 10 for token in ids]
        expected[-1] += 3 * float(rollout["rewards"][i, 1])
        assert rollout["reward"][i, : len(ids)].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_none_takes_a_completion_out(make, overlap):  # noqa: F811
    """With ``reward_overlap`` too, where prompts are judged one by one."""
    rollout, fields = prepared(make, [f"{HERE}:of_some"], {"reward_overlap": overlap})
    lengths = rollout["length"].tolist()
    for i, n in enumerate(lengths):
        expected = [[1.0] * n, [2.0] * n, [0.0] * (n - 1) + [3.0], None][i % 4]
        if expected is None:
            assert not fields["mask"][i].any()
        else:
            assert rollout["reward"][i, :n].tolist() == expected
    assert rollout["rewards"][:3, 0].tolist() == [lengths[0], 2 * lengths[1], 3]


def test_the_curve_is_of_sums(make):  # noqa: F811
    module, data = verified(make, kept(RLHFPPO), {"reward_funcs": [f"{HERE}:each"]}, **SETTINGS)
    logger = Curves()
    fit(module, data, max_steps=1, logger=logger)
    sums = [sum(ids) / 10 for ids in completions(module.seen[0][0])]
    found = [point["train/rewards/each/mean"] for _, point in logger.points if "train/rewards/each/mean" in point]
    assert found[0] == pytest.approx(sum(sums) / len(sums), rel=1e-5)


def test_grpo_refuses_them(make):  # noqa: F811
    module, data = verified(make, GRPO, {"reward_funcs": [f"{HERE}:each"]})
    with pytest.raises(UsageError, match="a reward per token, which RLHFPPO alone learns from; return one number"):
        fit(module, data, max_steps=1)


def test_dynamic_sampling_refuses_them(make):  # noqa: F811
    with pytest.raises(UsageError, match="dynamic_sampling=1 compares one reward per completion"):
        prepared(make, [f"{HERE}:each"], {"dynamic_sampling": 1})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "returned 1 numbers for sample 0, whose completion has 2 tokens"),
        ([1.0, None], "with a None or NaN in it; where a token earns nothing the number is 0"),
        ([1.0, "x"], "where a finite number or None should be"),
        ([1.0, math.inf], "where a finite number or None should be"),
    ],
)
def test_lists_that_are_no_rewards(value, message):
    rewards = RewardFunctions([lambda completions, **columns: [value]])
    rewards.by_token = True
    with pytest.raises(UsageError, match=message):
        rewards([{"prompt": "a"}], ["bc"], [[5, 6]])


def test_lists_of_parts_go_to_their_samples():
    rewards = RewardFunctions([lambda completion_ids, **columns: [list(map(float, ids)) for ids in completion_ids]],
                              workers=2)  # fmt: skip
    rewards.by_token = True
    records = [{"prompt": prompt} for prompt in "aabb"]
    ids = [[5, 6], [7], [8, 9, 10], [11]]
    scores = rewards(records, ["x"] * 4, ids)
    assert scores[:, 0].tolist() == [11, 7, 27, 11]
    spread = rewards.token_rewards(scores, [2, 1, 3, 1])
    assert spread[..., 0].tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 10], [11, 0, 0]]
