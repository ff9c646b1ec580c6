"""GRPO's training step against TRL's own `_compute_loss`: the same weights, tokens and numbers, the same gradients."""

import functools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from rl_modules.language.advantages import gdpo, scores_of_each
from rl_modules.language.grpo import GRPO
from rl_modules.language.tokenizer import character_tokenizer

trl = pytest.importorskip("trl", reason="needs the test extra")
pytestmark = pytest.mark.bench

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
LEVELS = ("token", "sequence")
#: Prompts of different lengths, completions too; the fifth is masked for being cut off.
PROMPT_LENGTH, LENGTH = torch.tensor([3, 1, 2, 4, 2, 3, 1, 2]), torch.tensor([5, 1, 3, 2, 6, 4, 6, 2])
CUT_OFF = 4


class Accelerator:
    """What `_compute_loss` asks of accelerate in a single process."""

    num_processes, sync_gradients = 1, True

    def gather(self, x):
        return x

    def reduce(self, x, reduction="sum"):
        return x

    def pad_across_processes(self, x, dim=0, pad_index=0):
        return x


def experience(model: Any, temperature: float) -> dict[str, torch.Tensor]:
    """Eight completions, right-padded; log-probabilities before, now and of a reference differ by noise."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 90, (8, int((PROMPT_LENGTH + LENGTH).max())), generator=generator)
    mask = torch.arange(6) < LENGTH.unsqueeze(1)
    mask[CUT_OFF] = False
    now = torch.zeros(8, 6)
    for i, (p, n) in enumerate(zip(PROMPT_LENGTH, LENGTH, strict=True)):
        with torch.no_grad():
            log_softmax = (model(tokens[i : i + 1, : p + n]).logits[0, p - 1 : -1] / temperature).log_softmax(-1)
        now[i, :n] = log_softmax.gather(1, tokens[i, p : p + n].unsqueeze(1)).squeeze(1)
    noise = [0.3 * torch.randn(8, 6, generator=generator) for _ in range(2)]
    return {
        "tokens": tokens, "prompt_length": PROMPT_LENGTH, "length": LENGTH, "mask": mask,
        "log_prob": now + noise[0], "ref_log_prob": now + noise[1],
        "advantage": torch.randn(8, generator=generator),
    }  # fmt: skip


def left_padded_log_probs(
    module: GRPO, _: Any, ids: torch.Tensor, attention_mask: torch.Tensor, keep: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """TRL's layout through transformers' own forward pass: log-probabilities and entropies of the completions."""
    position = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = module.model(input_ids=ids, attention_mask=attention_mask, position_ids=position).logits
    log_softmax = (logits[:, -keep - 1 : -1] / module.temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, ids[:, -keep:].unsqueeze(-1)).squeeze(-1), entropy, None


def trl_loss(
    module: GRPO, fields: dict[str, Any], rows: slice, n_micro: int, first: bool, metrics: Any = None
) -> torch.Tensor:
    """TRL's loss of these rows as one of ``n_micro`` micro-batches of an optimizer step; its metrics go to a dict."""
    trainer_class = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    fields = {name: x[rows] for name, x in fields.items()} | {"all": fields["mask"]}
    n, widest, longest = len(fields["mask"]), int(fields["prompt_length"].max()), 6
    prompts, completions = torch.zeros(n, widest, dtype=torch.long), torch.zeros(n, longest, dtype=torch.long)
    prompt_mask = torch.zeros(n, widest, dtype=torch.long)
    for i, (p, m) in enumerate(zip(fields["prompt_length"], fields["length"], strict=True)):
        prompts[i, widest - p :], prompt_mask[i, widest - p :] = fields["tokens"][i, :p], 1
        completions[i, :m] = fields["tokens"][i, p : p + m]
    hp: Any = module.hparams
    trainer = SimpleNamespace(
        aux_loss_enabled=False, off_policy_mask_threshold=None, use_vllm=False, entropy_coef=hp.entropy_coef,
        _entropy_bonus_enabled=hp.entropy_coef > 0, use_adaptive_entropy=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=n_micro, accelerator=Accelerator(),
        _metrics={"train": defaultdict(list) if metrics is None else metrics},
        top_entropy_quantile=hp.top_entropy_quantile,
        loss_type=hp.loss_type, importance_sampling_level=hp.importance_sampling_level, beta=hp.beta,
        epsilon_low=hp.epsilon, epsilon_high=hp.epsilon if hp.epsilon_high is None else hp.epsilon_high,
        max_completion_length=hp.max_completion_length,
        args=SimpleNamespace(delta=hp.delta, use_bias_correction_kl=hp.use_bias_correction_kl,
                             steps_per_generation=n_micro, use_adaptive_entropy=False),
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = functools.partial(left_padded_log_probs, module)
    trainer.get_high_entropy_mask = lambda *a: trainer_class.get_high_entropy_mask(trainer, *a)
    inputs = {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": completions,
        "completion_mask": fields["mask"].long(), "advantages": fields["advantage"],
        "old_per_token_logps": None if first else fields["log_prob"], "ref_per_token_logps": fields["ref_log_prob"],
        "num_items_in_batch": fields["all"].sum(),
    }  # fmt: skip
    # A masked completion is no text to TRL; to us it is one that does not count. Its loss is 0 either way.
    return trainer_class._compute_loss(trainer, None, inputs)


def our_loss(module: GRPO, fields: dict[str, Any], rows: slice, n_micro: int, first: bool) -> torch.Tensor:
    part = {name: x[rows] for name, x in fields.items()}
    total = int((part["prompt_length"] + part["length"]).max())
    longest = int(part["length"].max())
    part["tokens"] = part["tokens"][:, :total]
    for name in ("mask", "log_prob", "ref_log_prob"):
        part[name] = part[name][:, :longest]
    batch = {**part, "on_policy": first, "step_rows": len(fields["mask"]), "step_tokens": fields["mask"].sum(),
             "micro_rows": len(part["mask"]), "micro_tokens": part["mask"].sum(), "n_micro": n_micro}  # fmt: skip
    return module.training_step(batch, 0) / n_micro  # as Lightning divides


def assert_equals_trl(n_micro: int = 1, first: bool = False, **arguments: Any) -> None:
    module = GRPO(**{"model_config": TINY, "max_completion_length": 7, "temperature": 0.8, **arguments})
    module.configure_model()
    module.model.double()
    fields = {k: x.double() if x.is_floating_point() else x for k, x in experience(module.model, 0.8).items()}
    gradients, losses = [], []
    for loss_of in (our_loss, trl_loss):
        module.zero_grad()
        parts = [slice(i * 8 // n_micro, (i + 1) * 8 // n_micro) for i in range(n_micro)]
        total = 0.0
        for rows in parts:
            loss = loss_of(module, fields, rows, n_micro, first)
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients.append(torch.cat([p.grad.flatten() for p in module.model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=1e-9)
    # Log-probabilities come in float32 from a float64 model's logits in neither; rounding is of the last digits.
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-8)
    assert gradients[0].abs().max() > 1e-4


@pytest.mark.parametrize("n_micro", [1, 4])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", TYPES)
@pytest.mark.parametrize("arguments", [
    {},
    {"beta": 0.2},
    {"beta": 0.2, "use_bias_correction_kl": True, "epsilon_high": 0.28, "delta": 1.4, "epsilon": 0.1},
])  # fmt: skip
def test_loss_and_gradient_equal_trl(loss_type, level, arguments, n_micro):
    assert_equals_trl(n_micro, loss_type=loss_type, importance_sampling_level=level, **arguments)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", TYPES)
def test_the_first_minibatch_equals_trl(loss_type, level):
    assert_equals_trl(first=True, loss_type=loss_type, importance_sampling_level=level, beta=0.1)


@pytest.mark.parametrize("loss_type", TYPES)
def test_tokens_of_high_entropy_equal_trl(loss_type):
    assert_equals_trl(loss_type=loss_type, top_entropy_quantile=0.3, beta=0.1)


@pytest.mark.parametrize("quantile", [1.0, 0.3])
@pytest.mark.parametrize("loss_type", TYPES)
def test_the_entropy_bonus_equals_trl(loss_type, quantile):
    assert_equals_trl(loss_type=loss_type, top_entropy_quantile=quantile, entropy_coef=0.7)


@pytest.mark.parametrize("level", LEVELS)
def test_clip_ratios_equal_trl(level):
    module = GRPO(model_config=TINY, max_completion_length=7, temperature=0.8, epsilon=0.05,
                  importance_sampling_level=level)  # fmt: skip
    module.configure_model()
    recorded: dict[str, Any] = {}
    module.record = lambda weight=1.0, **metrics: recorded.update(metrics)  # type: ignore[method-assign]
    fields = experience(module.model, 0.8)
    theirs: Any = defaultdict(list)
    our_loss(module, fields, slice(0, 8), 1, False)
    trl_loss(module, fields, slice(0, 8), 1, False, theirs)
    for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
        assert float(recorded[f"clip_ratio/{name}"]) == pytest.approx(theirs[f"clip_ratio/{name}"][0], rel=1e-5), name
    assert recorded["clip_ratio/high_max"] > 0


def test_gdpo_equals_trl(tmp_path):
    """The rewards of three functions for four prompts; some score nothing, one group nothing at all."""
    nan, generator = torch.nan, torch.Generator().manual_seed(0)
    rewards = torch.randn(16, 3, generator=generator) * torch.tensor([1.0, 10.0, 0.1])
    rewards[0], rewards[3, 1], rewards[4:8, 0], rewards[12:] = nan, nan, 0.5, nan
    tokenizer, weights = character_tokenizer(), [1.0, 0.5, 2.0]
    names = ("one", "two", "three")
    functions = [lambda completions, **columns: [0.0] * len(completions) for _ in names]
    for function, name in zip(functions, names, strict=True):
        function.__name__ = name
    args = trl.GRPOConfig(
        str(tmp_path), report_to=[], use_cpu=True, bf16=False, num_generations=4, per_device_train_batch_size=16,
        max_completion_length=2, multi_objective_aggregation="normalize_then_sum", reward_weights=weights,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), **TINY))
    prompts = [{"prompt": text} for text in "abcd" for _ in range(4)]
    trainer = trl.GRPOTrainer(network, functions, args, Dataset.from_list(prompts), processing_class=tokenizer)
    trainer._calculate_rewards = lambda *given: rewards
    theirs = trainer._generate_and_score_completions(prompts)["advantages"]
    module = GRPO(model_config=TINY, advantages="gdpo", reward_weights=weights)
    rollout = {"rewards": rewards, "num_generations": 4}
    torch.testing.assert_close(scores_of_each(module, gdpo, rollout), theirs, atol=1e-5, rtol=0)
