"""What every function must do: the published signature, compiled graphs without breaks, inputs left alone."""

import inspect
import subprocess
import sys

import pytest
import torch

from rl_modules import functional

from .helpers import coins, randn, random_rollout

SIGNATURES = {
    "discounted_returns": "(reward, next_value, terminated, truncated, gamma)",
    "n_step_returns": "(reward, next_value, terminated, truncated, gamma, n)",
    "n_step_rewards": "(reward, n_steps, gamma)",
    "gae": "(reward, value, next_value, terminated, truncated, gamma, gae_lambda)",
    "dqn_target": "(reward, terminated, next_q_target, gamma, next_q_online=None)",
    "td_loss": "(prediction, target, loss='mse', weight=None)",
    "policy_gradient_loss": "(log_prob, weight, mask=None)",
    "ppo_clip_loss": "(log_prob, old_log_prob, advantage, clip_range, mask=None)",
    "ppo_penalty_loss": "(log_prob, old_log_prob, advantage, kl, beta, mask=None)",
    "adapt_kl_coefficient": "(beta, kl, target)",
    "value_loss": "(value, returns, old_value=None, clip_range=None, mask=None)",
    "kl_estimate": "(log_prob, ref_log_prob, estimator)",
    "conjugate_gradient": "(matvec, b, iterations=10, tolerance=1e-10)",
    "bradley_terry_loss": "(chosen_reward, rejected_reward, margin=None, center_rewards_coefficient=0.0)",
    "token_log_probs": "(logits, tokens, temperature=1.0)",
    "token_entropy": "(logits, temperature=1.0)",
    "masked_mean": "(x, mask, dim=None)",
    "masked_whiten": "(x, mask, shift_mean=True)",
    "rlhf_rewards": "(score, log_prob, ref_log_prob, mask, beta)",
    "group_advantages": "(reward, num_generations, scale_rewards='group')",
    "grpo_loss": (
        "(log_prob, old_log_prob, advantage, mask, *, epsilon=0.2, epsilon_high=None, delta=None, beta=0.0, "
        "ref_log_prob=None, kl_estimator='k3', use_bias_correction_kl=False, loss_type='grpo', "
        "importance_sampling_level='token', max_completion_length=None, num_items_in_batch=None, "
        "importance_weight=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)"
    ),
    "quantile_huber_loss": "(quantiles, target_quantiles, weight=None)",
    "categorical_projection": "(reward, terminated, next_probability, gamma, v_min, v_max)",
    "squashed_gaussian_log_prob": "(mean, log_std, pre_tanh)",
    "soft_q_target": "(reward, terminated, next_q, next_log_prob, alpha, gamma)",
    "dpo_loss": (
        "(chosen_log_prob, rejected_log_prob, ref_chosen_log_prob, ref_rejected_log_prob, beta=0.1, "
        "loss_type='sigmoid', label_smoothing=0.0, *, chosen_length=None, rejected_length=None, "
        "f_divergence_type='reverse_kl', f_alpha_divergence_coef=0.5, discopop_tau=0.05, simpo_gamma=0.5)"
    ),
    "kto_loss": ("(log_prob, ref_log_prob, desirable, kl, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)"),
    "simpo_loss": "(chosen_log_prob, rejected_log_prob, beta=2.0, simpo_gamma=0.5)",
    "odds_ratio_loss": "(chosen_log_prob, rejected_log_prob)",
    "distillation_advantage": "(log_prob, teacher_log_prob, mask)",
    "generalized_jsd": "(log_prob, teacher_log_prob, beta=0.5)",
    "with_tail": "(log_prob)",
    "rloo_advantages": "(reward, num_generations)",
    "batch_advantages": "(reward)",
    "gdpo_advantages": "(rewards, num_generations, weights=None)",
    "importance_weights": ("(log_prob, sampling_log_prob, mask, mode='token_truncate', clip_min=None, clip_max=3.0)"),
    "soft_overlong_punishment": "(length, max_completion_length, soft_punish_cache)",
    "pass_at_k": "(num_samples, num_correct, k)",
    "cons_at_k": "(answers, reference, k)",
    "policy_evaluation": "(transition, reward, policy, gamma)",
    "value_iteration": "(transition, reward, gamma, tolerance=1e-08)",
    "approx_kl": "(log_prob, old_log_prob)",
    "clip_fraction": "(log_prob, old_log_prob, clip_range)",
    "explained_variance": "(value, returns)",
    "proportional_kl_coefficient": "(beta, kl, target, gain=0.1)",
    "combine_rewards": "(rewards, weights=None)",
    "finite_horizon_evaluation": "(transition, reward, policy, horizon, gamma=1.0)",
    "finite_horizon_value_iteration": "(transition, reward, horizon, gamma=1.0)",
    "soft_value": "(q, log_prob, alpha)",
    "random_search_direction": "(deltas, plus, minus, n_top=None)",
}


def test_every_exported_name_is_in_the_contract():
    assert set(functional.__all__) == set(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(functional, name))
    bare = signature.replace(
        parameters=[p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_docstrings_name_arguments_results_errors_and_source(name):
    function = getattr(functional, name)
    text = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Source:"):
        assert section in text, section
    for argument in inspect.signature(function).parameters:
        assert f"    {argument}: " in text, argument


def test_importing_the_mathematics_imports_torch_only():
    code = (
        "import sys, rl_modules.functional;"
        "print([m for m in ('lightning', 'gymnasium', 'transformers', 'numpy.testing') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def cases():
    """One call of each function, as (function, tensors); the tensors' first floating one carries gradient."""
    rollout = random_rollout(0, 40, 3, dtype=torch.float32)
    ends = (rollout["terminated"], rollout["truncated"])
    lp, old, adv = (randn(i, 4, 6, dtype=torch.float32) for i in range(3))
    mask = coins(0, 0.7, 4, 6)
    logits = randn(3, 4, 6, 9, dtype=torch.float32)
    chosen = torch.randint(9, (4, 6))
    f = functional
    yield (
        "gae",
        lambda r, v, n, a, b: f.gae(r, v, n, a, b, 0.9, 0.8),
        (
            rollout["reward"],
            rollout["value"],
            rollout["next_value"],
            *ends,
        ),
    )
    back = (rollout["reward"], rollout["next_value"], *ends)
    yield "discounted_returns", lambda r, n, a, b: f.discounted_returns(r, n, a, b, 0.9), back
    yield "n_step_returns", lambda r, n, a, b: f.n_step_returns(r, n, a, b, 0.9, 3), back
    yield "n_step_rewards", lambda r, n: f.n_step_rewards(r, n, 0.9)[0], (lp, torch.randint(1, 7, (4,)))
    yield "dqn_target", lambda r, t, q, o: f.dqn_target(r, t, q, 0.9, o), (lp[0], mask[0], logits[0], logits[1])
    for loss in ("mse", "huber"):
        yield f"td_loss {loss}", lambda p, t, w, loss=loss: f.td_loss(p, t, loss, w), (lp, old, adv)
    yield "policy_gradient_loss", f.policy_gradient_loss, (lp, adv, mask)
    yield "ppo_clip_loss", lambda a, b, c: f.ppo_clip_loss(a, b, c, 0.2), (lp, old, adv)
    yield "ppo_clip_loss masked", lambda a, b, c, m: f.ppo_clip_loss(a, b, c, 0.2, m), (lp, old, adv, mask)
    yield "ppo_penalty_loss", lambda a, b, c, k: f.ppo_penalty_loss(a, b, c, k, 0.2), (lp, old, adv, adv.square())
    yield "value_loss", lambda a, b: f.value_loss(a, b), (lp, old)
    yield "value_loss clipped", lambda a, b, c, m: f.value_loss(a, b, c, 0.2, m), (lp, old, adv, mask)
    for estimator in ("k1", "k2", "k3"):
        yield f"kl_estimate {estimator}", lambda a, b, e=estimator: f.kl_estimate(a, b, e), (lp, old)
    yield "conjugate_gradient", lambda b: f.conjugate_gradient(lambda v: 2 * v + v.sum(), b), (lp[0],)
    yield "bradley_terry_loss", lambda a, b, m: f.bradley_terry_loss(a, b, m, 0.1), (lp, old, adv)
    yield "token_log_probs", lambda x, t: f.token_log_probs(x, t, 0.8), (logits, chosen)
    yield "token_entropy", lambda x: f.token_entropy(x, 0.8), (logits,)
    yield "masked_mean", lambda x, m: f.masked_mean(x, m, 1), (lp, mask)
    yield "masked_whiten", f.masked_whiten, (lp, mask)
    yield "rlhf_rewards", lambda s, a, b, m: f.rlhf_rewards(s, a, b, m, 0.1), (lp[:, 0], old, adv, mask)
    for scale in ("group", "batch", "none"):
        yield f"group_advantages {scale}", lambda r, s=scale: f.group_advantages(r, 2, s), (lp[:, 0],)
    yield "combine_rewards", lambda r: f.combine_rewards(r, [0.5, 1.0, 2.0, 0.0, 1.0, 1.0]), (lp,)
    for kind in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo"):
        for level in ("token", "sequence"):
            options = {
                "loss_type": kind,
                "importance_sampling_level": level,
                "max_completion_length": 8,
                "beta": 0.1,
                "epsilon_high": 1.5,
            }
            yield (
                f"grpo_loss {kind} {level}",
                lambda a, b, c, m, o=options: f.grpo_loss(a, b, c, m, ref_log_prob=b, importance_weight=b, **o),
                (lp, old, adv[:, 0], mask),
            )
    yield "quantile_huber_loss", f.quantile_huber_loss, (lp, old[:, :5], adv[:, 0])
    yield (
        "categorical_projection",
        lambda r, t, p: f.categorical_projection(r, t, p, 0.9, -2.0, 3.0),
        (lp[:, 0], mask[:, 0], logits[:, 0].softmax(-1)),
    )
    yield "squashed_gaussian_log_prob", f.squashed_gaussian_log_prob, (lp, old, adv)
    one = torch.tensor(0.3)
    yield "soft_q_target", lambda r, t, q, p, a: f.soft_q_target(r, t, q, p, a, 0.9), (lp, mask, old, adv, one)
    yield "soft_value", lambda q, p: f.soft_value(q, p, 0.3), (lp, old)
    yield "random_search_direction", f.random_search_direction, (lp, old[:, 0], adv[:, 0])
    pair = (lp[:, 0], lp[:, 1], old[:, 0], old[:, 1])
    for kind in ("sigmoid", "robust", "ipo", "hinge"):
        smoothing = 0.1 if kind in ("sigmoid", "robust") else 0.0
        yield (
            f"dpo_loss {kind}",
            lambda a, b, c, d, k=kind, s=smoothing: f.dpo_loss(a, b, c, d, 0.2, k, s),
            pair,
        )
    yield "kto_loss", lambda a, r, d, k: f.kto_loss(a, r, d, k, 0.2, 1.1, 0.9), (lp[0], old[0], mask[0], one)
    yield "simpo_loss", f.simpo_loss, pair[:2]
    yield "odds_ratio_loss", f.odds_ratio_loss, (-pair[0].abs() - 0.1, -pair[1].abs() - 0.1)
    yield "generalized_jsd", f.generalized_jsd, (logits.log_softmax(-1), logits.flip(-1).log_softmax(-1))
    yield "with_tail", f.with_tail, (logits.log_softmax(-1)[..., :5],)
    yield "distillation_advantage", f.distillation_advantage, (lp, old, mask)
    yield "rloo_advantages", lambda r: f.rloo_advantages(r, 2), (lp[:, 0],)
    yield "batch_advantages", f.batch_advantages, (lp[:, 0],)
    yield "gdpo_advantages", lambda x: f.gdpo_advantages(x, 2), (lp[:, :3],)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        yield (
            f"importance_weights {mode}",
            lambda a, b, m, o=mode: f.importance_weights(a, b, m, o, 0.2, 2.0),
            (lp, old, mask),
        )
    yield "soft_overlong_punishment", lambda n: f.soft_overlong_punishment(n, 12, 4), (torch.arange(20),)
    yield "pass_at_k", lambda n, c: f.pass_at_k(n, c, 3), (torch.tensor([5, 6]), torch.tensor([1, 4]))
    yield "cons_at_k", lambda a, r: f.cons_at_k(a, r, 3), (chosen, chosen[:, 0])
    yield "approx_kl", f.approx_kl, (lp, old)
    yield "clip_fraction", lambda a, b: f.clip_fraction(a, b, 0.2), (lp, old)
    yield "explained_variance", f.explained_variance, (lp, old)


CASES = {name: (function, tensors) for name, function, tensors in cases()}
# These return a Python number, or check that their tables hold distributions.
DATA_DEPENDENT = {
    "adapt_kl_coefficient",
    "proportional_kl_coefficient",
    "policy_evaluation",
    "value_iteration",
    "finite_horizon_evaluation",
    "finite_horizon_value_iteration",
}


def test_every_function_has_a_case():
    assert {name.split()[0] for name in CASES} | DATA_DEPENDENT == set(SIGNATURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiles_into_one_graph_with_the_same_values_and_gradients(name):
    function, tensors = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for call in (function, compiled):
        inputs = [t.detach().clone() for t in tensors]
        if inputs[0].is_floating_point():
            inputs[0].requires_grad_()
        result = call(*inputs)
        gradient = torch.autograd.grad(result.sum(), inputs[0])[0] if result.requires_grad else None
        results.append((result.detach(), gradient))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_never_changed(name):
    function, tensors = CASES[name]
    inputs = [t.detach().clone() for t in tensors]
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    result = function(*inputs)
    if result.requires_grad:
        result.sum().backward()
    for given, kept in zip(inputs, tensors, strict=True):
        assert torch.equal(given, kept)


#: Arguments that may be numbers or lists.
TAKE_LISTS = {
    ("soft_q_target", 4),
    ("kto_loss", 3),
    ("pass_at_k", 0),
    ("pass_at_k", 1),
    ("cons_at_k", 0),
    ("cons_at_k", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_list_in_place_of_a_tensor_is_refused(name):
    function, tensors = CASES[name]
    for i, tensor in enumerate(tensors):
        if (name, i) not in TAKE_LISTS:
            with pytest.raises(ValueError, match=r"must be a tensor, got list; torch\.as_tensor converts it"):
                function(*tensors[:i], tensor.tolist(), *tensors[i + 1 :])


# pass_at_k checks its counts, once per evaluation, as documented.
@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0] != "pass_at_k"])
def test_no_value_is_read_off_the_device(name):
    """Meta tensors hold no data: a function that looks at a value fails on them."""
    function, tensors = CASES[name]
    result = function(*(t.detach().to("meta") for t in tensors))
    assert result.shape == function(*tensors).shape


# The matrix product of conjugate_gradient is the caller's, in bfloat16; test_linalg looks at the dtypes.
@pytest.mark.parametrize("name", [name for name in CASES if name != "conjugate_gradient"])
def test_bfloat16_inputs_give_float32_results(name):
    function, tensors = CASES[name]
    half = [t.bfloat16() if t.is_floating_point() else t for t in tensors]
    result = function(*half)
    assert result.dtype is torch.float32
    # The inputs were rounded to three digits, and the results may be differences of them.
    exact = function(*(t.float() if t.is_floating_point() else t for t in half))
    torch.testing.assert_close(result, exact, atol=1e-5, rtol=1e-5)
