"""Importance weights for samplers whose probabilities are not training's: closed forms, metrics, whole runs."""

from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from rl_modules import DPO, GRPO, RLHFPPO, SFT
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.language import scoring
from rl_modules.language.fast import tiled_head
from rl_modules.language.rloo import RLOO
from rl_modules.language.sampling.correction import sampling_metrics
from rl_modules.language.sampling.draw import NextToken
from rl_modules.language.sampling.support import Filter, packed_lists
from tests.rl_modules.language.fake_vllm_server import running_server
from tests.rl_modules.language.sampler_cases import FakeLLM, fake_vllm
from tests.rl_modules.language.test_grpo import TINY, addition, built, grpo, spy, weights_of
from tests.training import fit

FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.5}, {"repetition_penalty": 1.3},
    {"top_p": 0.8, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "temperature": 0.7},
]  # fmt: skip


@torch.no_grad()
def kept_mass(module: Any, text: list[int], top_p: float) -> float:
    """The probability of the nucleus after a text, by its definition."""
    logits = module.model(input_ids=torch.tensor([text])).logits[:, -1]
    return float(logits.softmax(-1)[NextToken(top_p=top_p).scores(logits).isfinite()].sum())


def without_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler returns no kept tokens, as an engine that can't."""
    monkeypatch.setattr("rl_modules.language.sampling.decode.Record.kept", lambda self: (None, None))


def test_without_the_kept_tokens_the_ratio_of_a_token_is_the_kept_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """q = π / mass on the nucleus, so π / q is the mass: .9 or so at top-p .8, and not 1."""
    without_support(monkeypatch)
    module = spy(top_p=0.6, importance_sampling_correction="token_truncate", importance_sampling_clip_max=None,
                 learning_rate=0.0)  # fmt: skip
    with pytest.warns(UserWarning, match="sampler='native' does not return the tokens that top_p=0.6 kept"):
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
def test_the_on_policy_gradient_is_that_of_weighted_log_probs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At ratio 1 the gradient of the loss is -Σ w A ∇ log π / tokens, for any weights w."""
    without_support(monkeypatch)
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
    with running_server(built(spy())) as (server, address):
        served = spy(**arguments, sampler="vllm_server", sampler_options={"addresses": [address], "retries": 0})
        fit(served, addition(steps_per_generation=2), max_steps=6)
        assert server.version.endswith(":4")  # the last generation came after the fourth step
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


def of_vllm(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    fake_vllm(monkeypatch)
    return spy(sampler="vllm", max_completion_length=40, **arguments)


def of_vllm_with_masks(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    monkeypatch.setattr(FakeLLM, "masks", True)
    return of_vllm(monkeypatch, **arguments)


def ahead(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    return spy(max_completion_length=40, **arguments)


def tiled(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    monkeypatch.setitem(scoring.TILED_ABOVE, "cpu", 0)
    monkeypatch.setitem(tiled_head.TILE, "cpu", 200)
    return ahead(monkeypatch, **arguments)


def plain(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    monkeypatch.setenv("RL_FAST", "0")
    return ahead(monkeypatch, **arguments)


@pytest.mark.parametrize("make", [of_vllm, of_vllm_with_masks, ahead, tiled, plain])
@pytest.mark.parametrize("filters", FILTERS)
def test_equal_weights_have_ratio_one_under_filters(
    make: Any, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight of a whole completion of 40 tokens is 1, in the sampler's, the scoring's and the training pass."""
    if make in (of_vllm, of_vllm_with_masks) and len(filters) > 1:
        filters = {**filters, "min_p": None}
    module = make(monkeypatch, **filters, importance_sampling_correction="sequence_truncate",
                  importance_sampling_clip_max=None, learning_rate=0.0)  # fmt: skip
    fit(module, addition(), max_steps=1)
    _, fields = module.rollouts[0]
    log_prob, batch = module.seen[0]
    assert int(fields["length"].max()) == 40
    ratio = torch.where(fields["mask"], fields["log_prob"] - fields["sampling_log_prob"], 0.0).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    ratio = torch.where(batch["mask"], log_prob - batch["sampling_log_prob"], 0.0).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    weight = fields["importance_weight"]
    torch.testing.assert_close(weight, torch.ones_like(weight), atol=2e-4, rtol=0)


def test_kept_tokens_come_over_the_wire() -> None:
    with running_server(built(spy())) as (_, address):
        served = spy(top_p=0.7, repetition_penalty=1.2, sampler="vllm_server", max_completion_length=20,
                     sampler_options={"addresses": [address], "retries": 0})  # fmt: skip
        fit(served, addition(), max_steps=1)
    native = spy(top_p=0.7, repetition_penalty=1.2, max_completion_length=20)
    fit(native, addition(), max_steps=1)
    ours, theirs = served.rollouts[0][0], native.rollouts[0][0]
    assert all(torch.equal(ours[name], theirs[name]) for name in ("tokens", "kept", "kept_count"))
    weight = served.rollouts[0][1]["importance_weight"]
    torch.testing.assert_close(weight, torch.ones_like(weight), atol=1e-4, rtol=0)


@pytest.mark.parametrize("filters", FILTERS)
def test_training_follows_the_gradient_of_the_filtered_policy(filters: dict[str, Any]) -> None:
    """The mean over the filtered policy's draws of r ∇ log π_K is the gradient of its mean reward, by enumeration."""
    torch.manual_seed(0)
    words, rule = 9, NextToken(**filters)
    logits = torch.randn(words, words, dtype=torch.float64, requires_grad=True)  # of the next word, by the last one
    reward = torch.rand(words, words, dtype=torch.float64)
    start = 4
    value = torch.zeros((), dtype=torch.float64)  # of the filtered policy, from its definition
    texts, kept, probability = [], [], []
    for first in range(words):
        for second in range(words):
            chance: Any = torch.ones((), dtype=torch.float64)
            sets = []
            for last, word, seen in ((start, first, [start]), (first, second, [start, first])):
                mask = torch.zeros((1, words), dtype=torch.bool)
                mask[0, seen] = True
                sets.append(rule.scores(logits[last].detach()[None], mask)[0].isfinite().nonzero().flatten().tolist())
                z = logits[last] * torch.where(mask[0], torch.where(logits[last] < 0, rule.repetition_penalty,
                                                                   1 / rule.repetition_penalty), 1.0)  # fmt: skip
                weight = (z / rule.temperature).exp()
                chance = chance * (weight[word] / weight[sets[-1]].sum() if word in sets[-1] else 0.0)
            value = value + chance * reward[first, second]
            if float(chance) > 0:
                texts.append([start, first, second])
                kept.append(sets)
                probability.append(float(chance))
    assert len(texts) < words**2 or "repetition_penalty" in filters
    exact = torch.autograd.grad(value, logits)[0]
    tokens = torch.tensor(texts)
    filtered = Filter(rule.repetition_penalty, *packed_lists(kept, 2))
    row, column = torch.ones((len(texts), 2)).nonzero(as_tuple=True)
    process = filtered.at(tokens, torch.ones(len(texts), dtype=torch.int64), row, column)
    of_each = process(logits[tokens[row, column]][None].double(), slice(0, len(row)))
    log_prob = F.token_log_probs(of_each, tokens[row, column + 1][None], rule.temperature).view(-1, 2)
    weight = torch.tensor(probability, dtype=torch.float64)
    loss = -(weight * reward[tokens[:, 1], tokens[:, 2]] * log_prob.sum(1)).sum()
    single = filters == {"repetition_penalty": 1.3} or len(filters) > 1  # the penalty is computed in float32
    torch.testing.assert_close(-torch.autograd.grad(loss, logits)[0], exact, atol=1e-6 if single else 1e-12, rtol=0)


def test_an_engine_without_kept_tokens_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of each token is then its kept mass, at least .8."""
    monkeypatch.setattr("rl_modules.language.sampling.vllm._FEW", 3)
    module = of_vllm(monkeypatch, top_p=0.8)
    with pytest.warns(UserWarning, match=r"sampler='vllm' does not return .* top_p=0.8 kept.* is token_truncate in"):
        fit(module, addition(), max_steps=1)
    weight = module.rollouts[0][1]["importance_weight"][module.rollouts[0][1]["mask"]]
    assert 0.799 < float(weight.min()) < 0.95


def test_rloo_has_no_weight_without_the_kept_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    without_support(monkeypatch)
    module = RLOO(model_config=TINY, max_completion_length=5, top_p=0.8, completions_steps=0)
    with pytest.warns(UserWarning, match=r"importance_sampling_correction is none in this run"):
        fit(module, addition(async_generations=1), max_steps=1)


def test_a_given_weight_of_completions_is_warned_of_without_the_kept_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    without_support(monkeypatch)
    with pytest.warns(UserWarning, match="top_k=5, min_p=0.1 kept.*'sequence_mask' the weight of a completion is"):
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
