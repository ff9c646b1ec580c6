"""The losses of preference learning against TRL's trainers: the same numbers and gradients on the same tensors."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rl_modules.functional import dpo_loss, kto_loss, odds_ratio_loss, simpo_loss

pytestmark = pytest.mark.bench

TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def token_log_probs(seed: int, rows: int, length: int):
    """Log-probs of completions (0 outside), and their lengths: the first tokens of each row are its prompt."""
    lengths = torch.randint(1, length, (rows, 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(length) >= length - lengths
    return (randn(seed, rows, length, dtype=torch.float64) * 0.7 - 2) * mask, mask


def outputs_of(log_prob):
    zero = torch.zeros_like(log_prob)
    return SimpleNamespace(
        log_probs=log_prob, entropy=zero, mean_logits=zero, is_top1=zero.bool(), log_sum_sq_probs=zero, aux_loss=None
    )


def stand_in(**settings):
    """What TRL's `_compute_loss` asks of its trainer in a single process."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def trl_dpo(log_prob, mask, ref_chosen, ref_rejected, **settings):
    trainer_class = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    loss_types = settings.pop("loss_types")
    settings = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5,
                "loss_weights": [1.0] * len(loss_types), **settings}  # fmt: skip
    trainer = stand_in(loss_types=loss_types, use_weighting=False, **settings)
    # TRL's masks carry one more column, for the first token, which nothing predicts.
    padded = torch.cat((torch.zeros(len(mask), 1, dtype=torch.bool), mask), 1)
    inputs = {
        "input_ids": torch.zeros_like(padded, dtype=torch.long),
        "attention_mask": torch.ones_like(padded, dtype=torch.long),
        "completion_mask": padded.long(),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = trainer_class._compute_loss(trainer, lambda **kwargs: outputs_of(log_prob), inputs, False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize(
    ("loss_type", "smoothing"),
    [
        ("sigmoid", 0.0), ("ipo", 0.0), ("hinge", 0.0), ("robust", 0.0), ("robust", 0.2), ("exo_pair", 0.01),
        ("nca_pair", 0.0), ("bco_pair", 0.0), ("sppo_hard", 0.0), ("aot", 0.0), ("aot", 0.2), ("aot_unpaired", 0.2),
        ("apo_zero", 0.0), ("apo_down", 0.0), ("discopop", 0.0), ("sigmoid_norm", 0.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_loss_and_gradient_equal_trl(loss_type, smoothing, beta):
    log_prob, mask = token_log_probs(0, 12, 9)
    reference = log_prob.sum(-1) + randn(1, 12, dtype=torch.float64)
    ours_input, trl_input = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
    expected, _ = trl_dpo(
        trl_input, mask, *reference.chunk(2), loss_types=[loss_type], beta=beta, label_smoothing=smoothing,
        args=SimpleNamespace(discopop_tau=0.05),
    )  # fmt: skip
    lengths = dict(zip(("chosen_length", "rejected_length"), mask.sum(-1).chunk(2), strict=True))
    ours = dpo_loss(*ours_input.sum(-1).chunk(2), *reference.chunk(2), beta, loss_type, smoothing, **lengths)
    # TRL has EXO's ε in float32.
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if loss_type == "exo_pair" else TOLERANCE
    torch.testing.assert_close(ours, expected, **tolerance)
    (gradient,) = torch.autograd.grad(ours, ours_input)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, trl_input)[0], **tolerance)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo", "hinge", "discopop"])
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergences_equal_trl(divergence, loss_type):
    log_prob, mask = (x.float() for x in token_log_probs(0, 12, 9))  # TRL has no bound for float64
    mask = mask.bool()
    reference = log_prob.sum(-1) + randn(1, 12)
    options = {"f_divergence_type": divergence, "f_alpha_divergence_coef": 0.3}
    expected, _ = trl_dpo(log_prob, mask, *reference.chunk(2), loss_types=[loss_type], beta=0.4, label_smoothing=0.0,
                          args=SimpleNamespace(discopop_tau=0.05), **options)  # fmt: skip
    lengths = dict(zip(("chosen_length", "rejected_length"), mask.sum(-1).chunk(2), strict=True))
    ours = dpo_loss(*log_prob.sum(-1).chunk(2), *reference.chunk(2), 0.4, loss_type, **lengths, **options)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_label_smoothing_equals_trls_cpo_with_the_reference_taken_off():
    trainer_class = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    chosen, rejected, ref_chosen, ref_rejected = randn(0, 4, 8, dtype=torch.float64)
    trainer = SimpleNamespace(
        alpha=0.0, accelerator=SimpleNamespace(device="cpu"), loss_type="sigmoid", beta=0.4, label_smoothing=0.15
    )
    losses, _, _ = trainer_class.cpo_loss(trainer, chosen - ref_chosen, rejected - ref_rejected)
    ours = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.4, "sigmoid", 0.15)
    torch.testing.assert_close(ours, losses.mean(), **TOLERANCE)


def trl_kto(log_prob, mask, label, reference, kl_log_prob, ref_kl_log_prob, **settings):
    trainer_class = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    trainer = stand_in(calculate_KL=True, loss_type="kto", _compute_kl_logps=lambda *a: kl_log_prob, **settings)
    padded = torch.cat((torch.zeros(len(mask), 1, dtype=torch.bool), mask), 1)
    inputs = {
        "input_ids": torch.zeros_like(padded, dtype=torch.long),
        "attention_mask": torch.ones_like(padded, dtype=torch.long),
        "completion_mask": padded.long(),
        "label": label,
        "ref_logps": reference,
        "ref_KL_logps": ref_kl_log_prob,
    }
    loss = trainer_class._compute_loss(trainer, lambda **kwargs: outputs_of(log_prob), inputs, False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.6)])
@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_kto_loss_and_gradient_equal_trl(weights, shift):
    log_prob, mask = token_log_probs(0, 10, 9)
    label = torch.rand(10, generator=torch.Generator().manual_seed(0)) < 0.6
    reference = log_prob.sum(-1) + randn(1, 10, dtype=torch.float64)
    kl_log_prob = randn(2, 10, dtype=torch.float64)
    ref_kl_log_prob = kl_log_prob + shift + 0.1 * randn(3, 10, dtype=torch.float64)
    ours_input, trl_input = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
    expected, _ = trl_kto(
        trl_input,
        mask,
        label,
        reference,
        kl_log_prob,
        ref_kl_log_prob,
        beta=0.3,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
    )
    kl = (kl_log_prob - ref_kl_log_prob).mean()
    ours = kto_loss(ours_input.sum(-1), reference, label, kl, 0.3, *weights)
    torch.testing.assert_close(ours, expected, **TOLERANCE)
    (gradient,) = torch.autograd.grad(ours, ours_input)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, trl_input)[0], **TOLERANCE)


def test_simpo_and_the_odds_ratio_equal_trl():
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    chosen, rejected = -randn(0, 2, 8).abs() - 0.01
    accelerator = SimpleNamespace(device="cpu")
    trainer = SimpleNamespace(
        alpha=0.0, accelerator=accelerator, loss_type="simpo", beta=2.0, simpo_gamma=0.7, label_smoothing=0.0
    )
    losses, _, _ = cpo.cpo_loss(trainer, chosen, rejected)
    torch.testing.assert_close(simpo_loss(chosen, rejected, 2.0, 0.7), losses.mean(), atol=1e-6, rtol=1e-6)
    trainer = SimpleNamespace(accelerator=accelerator, beta=1.0)
    losses, *_ = orpo.odds_ratio_loss(trainer, chosen, rejected)
    torch.testing.assert_close(odds_ratio_loss(chosen, rejected), -losses.mean(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("loss_type", ["cpo", "simpo"])
def test_the_step_without_a_reference_equals_trls_cpo(loss_type):
    """CPO as its trainer computes it: the loss of the pair plus the chosen answers' likelihood per token."""
    from rl_modules import DPO

    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    more = {"simpo_gamma": 0.7} if loss_type == "simpo" else {}
    module, recorded = prepared(DPO(model_config=TINY, beta=0.6, loss_type=loss_type, **more))
    assert module.reference is None
    loss, gradients, parameters = step_of(module, PROMPTS, CHOSEN, REJECTED, False)
    tokens, mask = rows_as_in_trl(PROMPTS * 2, CHOSEN + REJECTED)
    log_prob = fused(module.model)(tokens, tokens.masked_fill(mask == 0, -100)).log_probs
    sums, lengths = log_prob.sum(-1), mask.sum(-1)
    trainer = SimpleNamespace(alpha=0.0, accelerator=SimpleNamespace(device="cpu"), beta=0.6, label_smoothing=0.0,
                              loss_type="sigmoid" if loss_type == "cpo" else loss_type, simpo_gamma=0.7)  # fmt: skip
    losses, chosen_reward, _ = cpo.cpo_loss(trainer, *(sums if loss_type == "cpo" else sums / lengths).chunk(2))
    expected = losses.mean()
    if loss_type == "cpo":
        expected = expected - log_prob[:4].sum() / lengths[:4].sum()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert recorded["rewards/chosen"] == pytest.approx(chosen_reward.mean().item(), rel=1e-6)


# --- whole modules -------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
PROMPTS = [[5, 6, 7], [3], [8, 9], [4, 4]]
CHOSEN = [[9, 1], [10, 11, 1], [1], [7, 1]]
REJECTED = [[12, 13, 14, 1], [1], [15, 1], [16, 1]]


def rows_as_in_trl(prompts, answers):
    """Right-padded tokens and completion masks, as TRL's collators make them."""
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens, mask = (torch.zeros(len(prompts), width, dtype=torch.long) for _ in range(2))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[i, :end] = torch.tensor(prompt + answer)
        mask[i, len(prompt) : end] = 1
    return tokens, mask


def fused(network):
    """TRL's fused head in Transformers' own arithmetic: log π of the labels, 0 where there is none."""

    def call(input_ids, labels, **kwargs):
        log_prob = network(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
        target = labels[:, 1:]
        chosen = log_prob.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return outputs_of(torch.where(target >= 0, chosen, 0.0))

    return call


def prepared(module):
    """A module whose policy has left its reference, both in float64."""
    module.configure_model()
    module.double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    recorded = {}
    module.record = lambda weight=1.0, **metrics: recorded.update({k: v.item() for k, v in metrics.items()})
    return module, recorded


def step_of(module, prompts, chosen, rejected, packing, **more):
    from datamodules.language.sequences import Pairs

    b = len(prompts)
    batch = {
        **Pairs(prompts, chosen, rejected).batch(torch.arange(b), packing), "index": torch.arange(b), "n_micro": 1,
        "step_pairs": b, "step_chosen_tokens": sum(map(len, chosen)), "num_tokens": 0, **more,
    }  # fmt: skip
    loss = module.training_step(batch, 0)
    parameters = [p for p in module.model.parameters() if p.requires_grad]
    return loss, torch.autograd.grad(loss, parameters), parameters


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("arguments", [
    {"loss_type": "sigmoid"}, {"loss_type": "ipo"}, {"loss_type": "hinge"},
    {"loss_type": "robust", "label_smoothing": 0.2}, {"loss_type": "sigmoid", "rpo_alpha": 0.7},
    {"loss_type": "aot"}, {"loss_type": "apo_down", "ld_alpha": 0.3}, {"f_divergence_type": "js_divergence"},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]},  # MPO
])  # fmt: skip
def test_the_step_of_dpo_equals_trls(arguments, packing):
    from rl_modules import DPO

    module, recorded = prepared(DPO(model_config=TINY, beta=0.3, **arguments))
    loss, gradients, parameters = step_of(module, PROMPTS, CHOSEN, REJECTED, packing)
    tokens, mask = rows_as_in_trl(PROMPTS * 2, CHOSEN + REJECTED)
    trainer_class = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    alpha = arguments.get("rpo_alpha")
    names = arguments.get("loss_type", "sigmoid")
    names = [names] if isinstance(names, str) else names
    weights = arguments.get("loss_weights", [1.0])
    trainer = stand_in(
        ld_alpha=arguments.get("ld_alpha"), f_divergence_type=arguments.get("f_divergence_type", "reverse_kl"),
        use_weighting=False, beta=0.3, label_smoothing=arguments.get("label_smoothing", 0.0),
        loss_types=[*names, *(["sft"] if alpha else [])], loss_weights=[*weights, *([alpha] if alpha else [])],
    )  # fmt: skip
    with torch.no_grad():
        reference = fused(module.reference)(tokens, tokens.masked_fill(mask == 0, -100)).log_probs
    if trainer.ld_alpha is not None:
        number = mask[:, 1:].cumsum(-1)
        shorter = mask.sum(-1).view(2, 4).min(0).values.repeat(2)
        reference = reference * torch.where(number > shorter[:, None], trainer.ld_alpha, 1.0)
    reference = reference.sum(-1)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask,
              "ref_chosen_logps": reference[:4], "ref_rejected_logps": reference[4:]}  # fmt: skip
    expected = trainer_class._compute_loss(trainer, fused(module.model), inputs, False)
    # The table of reference log-probabilities is in float32.
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    for name, values in trainer._metrics["train"].items():
        if name.startswith(("rewards/", "logps/")):
            assert recorded[name] == pytest.approx(values[0], abs=1e-6, rel=1e-6), name


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("answers", ["as they are", "swapped"])  # one of the two has a positive KL estimate
def test_the_step_of_kto_equals_trls(loss_type, packing, answers):
    from rl_modules import KTO

    own, other = (CHOSEN, REJECTED) if answers == "as they are" else (REJECTED, CHOSEN)
    module, recorded = prepared(
        KTO(model_config=TINY, beta=0.3, loss_type=loss_type, desirable_weight=1.3, undesirable_weight=0.6)
    )
    label = torch.tensor([True, False, True, True])
    loss, gradients, parameters = step_of(module, PROMPTS, own, other, packing, label=label)
    trainer_class = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    (tokens, mask), (kl_tokens, kl_mask) = rows_as_in_trl(PROMPTS, own), rows_as_in_trl(PROMPTS, other)
    trainer = stand_in(
        calculate_KL=loss_type == "kto", loss_type=loss_type, beta=0.3, desirable_weight=1.3, undesirable_weight=0.6
    )
    trainer._compute_kl_logps = lambda model, batch: trainer_class._compute_kl_logps(trainer, model, batch)
    with torch.no_grad():
        reference, ref_kl = (
            fused(module.reference)(ids, ids.masked_fill(m == 0, -100)).log_probs.sum(-1)
            for ids, m in ((tokens, mask), (kl_tokens, kl_mask))
        )
    inputs = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask, "label": label,
        "KL_input_ids": kl_tokens, "KL_attention_mask": torch.ones_like(kl_tokens), "KL_completion_mask": kl_mask,
        "ref_logps": reference, "ref_KL_logps": ref_kl,
    }  # fmt: skip
    expected = trainer_class._compute_loss(trainer, fused(module.model), inputs, False)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    for name, values in trainer._metrics["train"].items():
        if name.startswith(("rewards/chosen", "rewards/rejected", "logps/")):
            assert recorded[name] == pytest.approx(values[0], abs=1e-6, rel=1e-6), name
    if loss_type == "kto":
        assert recorded["kl"] == pytest.approx(trainer._metrics["train"]["kl"][0], abs=1e-6)
