"""Importance weights for samplers whose probabilities are not training's: closed forms, metrics, whole runs."""

import warnings
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from rl_modules import DPO, GRPO, RLHFPPO, SFT
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.language.rloo import RLOO
from rl_modules.language.sampling.correction import sampling_metrics
from rl_modules.language.sampling.draw import NextToken
from tests.rl_modules.language.sampler_cases import fake_vllm, running_server
from tests.rl_modules.language.test_grpo import TINY, addition, grpo, spy, weights_of
from tests.training import fit


@torch.no_grad()
def kept_mass(module: Any, text: list[int], top_p: float) -> float:
    """The probability of the nucleus after a text, by its definition."""
    logits = module.model(input_ids=torch.tensor([text])).logits[:, -1]
    return float(logits.softmax(-1)[NextToken(top_p=top_p).scores(logits).isfinite()].sum())


def test_under_top_p_the_ratio_of_a_token_is_the_kept_mass() -> None:
    """q = π / mass on the nucleus, so π / q is the mass: .9 or so at top-p .8, and not 1."""
    module = spy(top_p=0.6, importance_sampling_correction="token_truncate", importance_sampling_clip_max=None,
                 learning_rate=0.0)  # fmt: skip
    fit(module, addition(), max_steps=1)
    rollout, fields = module.rollouts[0]
    assert torch.equal(fields["sampling_log_prob"], rollout["log_prob"])
    checked = 0
    for row in range(0, 16, 3):
        start, n = int(fields["prompt_length"][row]), int(fields["length"][row])
        tokens = fields["tokens"][row].tolist()
        for j in range(n):
            mass = kept_mass(module, tokens[: start + j], 0.6)
            assert float(fields["importance_weight"][row, j]) == pytest.approx(mass, rel=1e-4)
            checked += mass < 0.95
    assert checked > 10
    assert float(module.latest_metrics["train/sampling/importance_ratio/mean"]) < 0.95


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_on_policy_gradient_is_that_of_weighted_log_probs(mode: str) -> None:
    """At ratio 1 the gradient of the loss is -Σ w A ∇ log π / tokens, for any weights w."""
    module = spy(importance_sampling_correction=mode, importance_sampling_clip_min=0.3, top_p=0.9,
                 importance_sampling_clip_max=0.91)  # fmt: skip
    fit(module, addition(), max_steps=1)
    log_prob, batch = module.seen[0]
    log_prob = log_prob.clone().requires_grad_()
    weight, mask = batch["importance_weight"], batch["mask"]
    assert len(weight[mask].unique()) > 2
    module.policy_loss(log_prob, {**batch, "log_prob": log_prob.detach()}).backward()
    expected = -torch.where(mask, weight * batch["advantage"].unsqueeze(1), 0.0) / batch["step_tokens"]
    torch.testing.assert_close(log_prob.grad, expected, atol=1e-7, rtol=1e-5)


def hand_made() -> dict[str, torch.Tensor]:
    """Two completions with log-ratios (ln 2, ln 4, ·) and (−ln 2, 0, ln 8)."""
    ratio = torch.tensor([[2.0, 4.0, 99.0], [0.5, 1.0, 8.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return {"log_prob": ratio.log(), "sampling_log_prob": torch.zeros((2, 3), dtype=torch.float32), "mask": mask}


@pytest.mark.parametrize(
    ("mode", "ratio", "masked"),
    [
        ("token_truncate", (1.0, (2 + 3 + 1 + 1 + 3) / 5, 3.0), 0.0),
        ("token_mask", (0.0, (2 + 0 + 0 + 1 + 0) / 5, 2.0), 3 / 5),
        ("sequence_truncate", (3.0, 3.0, 3.0), 0.0),  # 8 and 4
        ("sequence_mask", (0.0, 0.0, 0.0), 1.0),
    ],
)
def test_metrics_by_hand(mode: str, ratio: tuple[float, float, float], masked: float) -> None:
    fields = hand_made()
    fields["importance_weight"] = F.importance_weights(
        fields["log_prob"], fields["sampling_log_prob"], fields["mask"], mode, 1.0, 3.0
    )
    metrics = {name: float(value) for name, value in sampling_metrics(fields, mode, lambda x: x).items()}
    ln2 = 0.693147
    assert metrics["sampling/logp_difference/mean"] == pytest.approx((1 + 2 + 1 + 0 + 3) * ln2 / 5, rel=1e-5)
    assert metrics["sampling/logp_difference/max"] == pytest.approx(3 * ln2, rel=1e-5)
    found = tuple(metrics[f"sampling/importance_ratio/{name}"] for name in ("min", "mean", "max"))
    assert found == pytest.approx(ratio, rel=1e-5)
    assert metrics["sampling/masked"] == pytest.approx(masked)


@pytest.mark.long
def test_a_run_through_a_server_learns_what_the_native_sampler_does() -> None:
    """The same draws and, up to rounding, the same probabilities: weights of 1, ratios of 1, the same steps."""
    arguments: dict[str, Any] = {"learning_rate": 1e-2}
    native = spy(**arguments)
    fit(native, addition(steps_per_generation=2), max_steps=6)
    with running_server() as (service, address):
        served = spy(**arguments, sampler="vllm_server", sampler_options={"addresses": [address], "retries": 0})
        fit(served, addition(steps_per_generation=2), max_steps=6)
        assert service.version == 4  # the last generation came after the fourth step
    for (ours, _), (theirs, _) in zip(served.rollouts, native.rollouts, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
    torch.testing.assert_close(weights_of(served), weights_of(native), atol=1e-4, rtol=0)
    assert served.latest_metrics["train/sampling/logp_difference/max"] < 1e-4
    assert served.latest_metrics["train/sampling/importance_ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert "train/sampling/logp_difference/max" not in native.latest_metrics
    for log_prob, batch in served.seen:
        if batch["on_policy"]:
            assert torch.equal(batch["log_prob"], log_prob)


def test_a_sampler_that_is_off_is_corrected_to_the_true_gradient() -> None:
    """The mean over draws from q of w A ∇ log π is the policy gradient: by enumeration of a two-token vocabulary."""
    logits = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = torch.autograd.grad(-(logits.softmax(-1) * reward).sum(), logits)[0]
    log_prob = logits.log_softmax(-1)
    weight = F.importance_weights(log_prob.detach()[:, None], q.log()[:, None], torch.ones((3, 1), dtype=torch.bool),
                                  "token_truncate", None, None)  # fmt: skip
    total = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        one = log_prob[token].view(1, 1)
        total = total + q[token] * F.grpo_loss(
            one, one.detach(), reward[token].view(1), torch.ones((1, 1), dtype=torch.bool),
            importance_weight=weight[token].view(1, 1),
        )  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], exact, atol=1e-12, rtol=0)


def test_rloo_weights_whole_completions() -> None:
    module = RLOO(model_config=TINY, max_completion_length=5, top_k=5, beta=0.0, learning_rate=0.0,
                  importance_sampling_correction="sequence_truncate", completions_steps=0)  # fmt: skip
    seen: list[Any] = []
    original = module.policy_loss

    def noting(log_prob: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        seen.append((log_prob.detach(), batch))
        return original(log_prob, batch)

    module.policy_loss = noting  # type: ignore[method-assign]
    fit(module, addition(), max_steps=1)
    log_prob, batch = seen[0]
    difference = torch.where(batch["mask"], log_prob - batch["sampling_log_prob"], 0.0).sum(1)
    torch.testing.assert_close(batch["importance_weight"][:, 0], difference.exp().clamp(max=3.0), atol=1e-4, rtol=0)


def of_vllm(monkeypatch: pytest.MonkeyPatch, **filters: Any) -> Any:
    fake_vllm(monkeypatch)
    return spy(sampler="vllm", max_completion_length=40, **filters)


def ahead(monkeypatch: pytest.MonkeyPatch, **filters: Any) -> Any:
    return spy(max_completion_length=40, **filters)


@pytest.mark.parametrize("make", [of_vllm, ahead])
@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.5}, {"repetition_penalty": 1.3}, {}])
def test_weights_of_filtered_sampling_do_not_shrink_with_the_length(
    make: Any, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """top-p .8 keeps at least .8 of a token's mass, which bounds its weight; 40 tokens multiply to 1e-4 or less."""
    module = make(monkeypatch, **filters)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(module, addition(async_generations=int(make is ahead)), max_steps=1)
    said = [str(warning.message) for warning in warned if "importance_sampling_correction" in str(warning.message)]
    assert [all(f"{name}={value}" in text for name, value in filters.items()) for text in said] == [True] * len(filters)
    _, fields = module.rollouts[0]
    weight = fields["importance_weight"][fields["mask"]]
    assert int(fields["length"].max()) == 40
    assert float(weight.min()) > {"top_p": 0.799}.get(next(iter(filters), ""), 0.05)
    if not filters:
        torch.testing.assert_close(weight, torch.ones_like(weight), atol=1e-3, rtol=0)


def test_rloo_has_no_weight_under_a_filter() -> None:
    module = RLOO(model_config=TINY, max_completion_length=5, top_p=0.8, completions_steps=0)
    with pytest.warns(UserWarning, match=r"importance_sampling_correction is none .* under top_p=0.8 the weight of a"):
        fit(module, addition(async_generations=1), max_steps=1)


def test_a_given_weight_of_completions_is_warned_of_under_a_filter() -> None:
    with pytest.warns(UserWarning, match="'sequence_mask': under top_k=5, min_p=0.1 the .*take token_truncate"):
        fit(spy(top_k=5, min_p=0.1, importance_sampling_correction="sequence_mask"), addition(), max_steps=1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"importance_sampling_correction": "tokens"}, "importance_sampling_correction='tokens' must be one of none"),
        ({"importance_sampling_clip_min": 4.0}, "importance_sampling_clip_min=4.0 must not be above"),
        (
            {"importance_sampling_clip_max": -1.0},
            "importance_sampling_clip_max=-1.0 must be a finite number of at least 0",
        ),
        ({"sampler": "vlm"}, "sampler='vlm' must be one of native, vllm, vllm_server; did you mean vllm"),
        ({"sampler": "vllm_server"}, "sampler=vllm_server needs sampler_options"),
        ({"sampler_options": {"addresses": ["a:1"]}}, "is no option of sampler=native"),
        ({"max_rows_in_flight": 0}, "max_rows_in_flight=0 must be at least 1"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        grpo(**arguments)


@pytest.mark.parametrize("module", [GRPO, RLOO, RLHFPPO, SFT, DPO])
def test_the_command_line_knows_the_samplers_arguments(module: Any) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(module, "model")
    known = {action.dest for action in parser._actions}
    assert {"model.sampler", "model.sampler_options", "model.max_rows_in_flight", "model.lora"} <= known


def test_rloo_refuses_weights_per_token() -> None:
    with pytest.raises(UsageError, match="RLOO's action is the whole completion"):
        RLOO(importance_sampling_correction="token_mask")
