"""RLOO, CISPO, SAPO and advantages of one's own: what differs from GRPO, through the module."""

import json
import math
import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules.language.prompt import PromptDataModule
from rl_modules import GRPO, RLOO
from rl_modules.common.errors import UsageError
from rl_modules.language.entropy import entropy_terms
from rl_modules.language.scoring import completion_log_probs
from tests.training import assert_equal_checkpoints, fit

from .test_grpo import (
    GPT2,
    HERE,
    TINY,
    VALUES,
    addition,
    at_start,
    batch_by_hand,
    distribution,
    gradient_of,
    grpo,
    sgd,
    small_tokenizer,
    weights_of,
)

VARIANTS = {"cispo": {"loss_type": "cispo", "epsilon_high": 1.1}, "sapo": {"loss_type": "sapo"}}


def rloo(**arguments: Any) -> RLOO:
    defaults = {"model_config": TINY, "max_completion_length": 5, "learning_rate": 1e-3,
                "lr_scheduler_type": "constant", "completions_steps": 0}  # fmt: skip
    return RLOO(**{**defaults, **arguments})


def small_addition(folder: Any, **arguments: Any) -> PromptDataModule:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", "ab", "bb")))
    return PromptDataModule(path=str(prompts), batch_size=16, num_generations=4, eval_steps=0, num_iterations=2,
                            reward_funcs=[f"{HERE}:blind_half"], **arguments)  # fmt: skip


@pytest.mark.parametrize("case", ["cispo", "sapo", "rloo", "rloo without a reference"])
def test_accumulation_does_not_change_the_step(case, tmp_path):
    tokenizer, ends = small_tokenizer(tmp_path / "tokenizer"), []
    for n_micro in (1, 4):
        options = {"optimizer": sgd, "max_grad_norm": None, "tokenizer_name_or_path": tokenizer,
                   "mask_truncated_completions": True}  # fmt: skip
        if case in VARIANTS:
            module: GRPO = grpo(**options, **VARIANTS[case])
        else:
            module = rloo(**options, beta=0.0 if "without" in case else 0.3)
        fit(module, small_addition(tmp_path), max_steps=2, accumulate_grad_batches=n_micro)
        ends.append(weights_of(module))
    assert (ends[0] - weights_of(at_start(module))).abs().max() > 1e-3, "something was learned"
    torch.testing.assert_close(ends[0], ends[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", ["cispo", "sapo", "rloo"])
def test_rows_without_advantage_count_though_no_model_reads_them(case):
    module = rloo(beta=0.0) if case == "rloo" else grpo(**VARIANTS[case])
    module.configure_model()
    module.record = lambda *a, **k: None
    whole = gradient_of(module, batch_by_hand(module))
    part = gradient_of(module, batch_by_hand(module, torch.tensor([0, 1, 3, 5])))
    torch.testing.assert_close(part[1], whole[1], atol=1e-6, rtol=1e-5)


def test_cispos_bound_is_counted_as_trl_does():
    module = grpo(loss_type="cispo", epsilon_high=1.1)
    module.configure_model()
    recorded = {}
    module.record = lambda weight=1.0, **metrics: recorded.update(metrics)
    batch = batch_by_hand(module)
    gradient_of(module, batch)
    with torch.no_grad():
        text = (batch["tokens"], batch["prompt_length"], batch["length"])
        ratio = (completion_log_probs(module.model, *text)[0] - batch["log_prob"]).exp()
    bounded = batch["mask"] & (ratio > 1.1) & (batch["advantage"][:, None] > 0)
    assert recorded["cispo_clip_ratio"].item() == pytest.approx(bounded.sum().item() / 20) and bounded.any()
    assert not any(name.startswith("clip_ratio") for name in recorded)


# -------------------------------------------------------------------- RLOO


def test_the_loss_is_trls():
    trainer_class = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    module = rloo(beta=0.0, epsilon=0.01, epsilon_high=0.02)
    module.configure_model()
    recorded = {}
    module.record = lambda weight=1.0, **metrics: recorded.update(metrics)
    batch = batch_by_hand(module)
    text = (batch["tokens"], batch["prompt_length"], batch["length"])
    log_prob, _ = completion_log_probs(module.model, *text)
    identity = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_prob, torch.zeros_like(log_prob), None),
        aux_loss_enabled=False, beta=0.0, epsilon_low=0.01, epsilon_high=0.02, accelerator=identity,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        current_gradient_accumulation_steps=1,
    )  # fmt: skip
    ids = torch.zeros_like(batch["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": batch["mask"].long(),
        "old_logps": (batch["log_prob"] * batch["mask"]).sum(1), "advantages": batch["advantage"],
    }  # fmt: skip
    expected = trainer_class._compute_loss(trainer, None, inputs)
    parameters = [p for p in module.model.parameters() if p.requires_grad]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(expected, parameters)])
    loss, ours = gradient_of(module, batch)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours, gradient, atol=1e-6, rtol=1e-5)
    metrics = trainer._metrics["train"]
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert recorded[name].item() == pytest.approx(metrics[name][0], abs=1e-6), name
    assert recorded["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("leaves_out", [False, True])
def test_rewards_pay_for_the_distance_and_the_others_are_the_baseline(leaves_out, tmp_path):
    seen = []

    class Spy(RLOO):
        def prepare(self, rollout):
            fields = super().prepare(rollout)
            seen.append((rollout, fields))
            return fields

    other = grpo(model_config={**TINY, "num_hidden_layers": 2})
    other.configure_model()
    other.export(tmp_path / "reference")
    options = {k: v for k, v in rloo().hparams.items() if k in ("model_config", "max_completion_length")}
    module = Spy(**options, beta=0.3, ref_model_name_or_path=str(tmp_path / "reference"), learning_rate=0.0,
                 mask_truncated_completions=leaves_out, logging_steps=1)  # fmt: skip
    fit(module, addition(reward="blind_half"), max_steps=1)
    ((rollout, fields),) = seen
    text = (rollout["tokens"], rollout["prompt_length"], rollout["length"])
    with torch.no_grad():
        kl = (completion_log_probs(module.model, *text)[0] - completion_log_probs(module.reference, *text)[0]).sum(-1)
    counted = rollout["length"].sum()
    if leaves_out:  # TRL's RLOOTrainer takes them out of the mask before it sums
        finished = rollout["finished"]
        assert finished.any() and not finished.all()
        kl, counted = kl * finished, (rollout["length"] * finished).sum()
    assert module.latest_metrics["train/kl"] == pytest.approx(float(kl.sum() / counted), rel=1e-4)
    priced = (rollout["reward"] - 0.3 * kl).view(-1, 4)
    expected = priced - (priced.sum(-1, keepdim=True) - priced) / 3
    torch.testing.assert_close(fields["advantage"], expected.flatten(), atol=1e-4, rtol=1e-4)
    assert kl.abs().max() > 0.1 and "ref_log_prob" not in fields


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_equal_weights_have_no_distance_in_any_precision(precision):
    """With one update per generation nothing else compares the sampler's log-probabilities with a forward pass's."""
    paid = []

    class Watched(RLOO):
        def advantages(self, reward, num_generations):
            paid.append(reward)
            return super().advantages(reward, num_generations)

    module = Watched(model_config=TINY, max_completion_length=16, beta=0.5, learning_rate=0.0, logging_steps=1)
    fit(module, addition(reward_funcs=[f"{HERE}:blind_half"]), max_steps=1, precision=precision)
    assert module.latest_metrics["train/kl"] == pytest.approx(0, abs=0 if precision == "bf16-mixed" else 1e-6)
    torch.testing.assert_close(paid[0], paid[0].round(decimals=1), atol=1e-5, rtol=0)


@pytest.mark.fast_path
def test_the_policy_reads_a_generation_once(monkeypatch):
    read, module = [], rloo(beta=0.3, importance_sampling_correction="sequence_mask")

    def counted(model, *arguments, **options):
        read.append(model)
        return completion_log_probs(model, *arguments, **options)

    for name in ("grpo", "judges"):
        monkeypatch.setattr(f"rl_modules.language.{name}.completion_log_probs", counted)
    fit(module, addition(), max_steps=1)
    assert [model is module.model for model in read] == [True, False]


@pytest.mark.parametrize("case", ["rloo", "cispo"])
def test_a_run_stopped_within_a_generation_resumes_exactly(case, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(name, ckpt_path=None, callbacks=None):
        data = addition(steps_per_generation=2, num_iterations=2)
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        module = rloo() if case == "rloo" else grpo(**VARIANTS["cispo"])
        fit(module, data, ckpt_path=ckpt_path, max_steps=5, **checkpoints).save_checkpoint(tmp_path / name)

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run("whole.ckpt", callbacks=[every_step])
    for step in (2, 3):
        run("resumed.ckpt", tmp_path / f"step={step}.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def test_a_checkpoint_loads_alone(tmp_path):
    module = rloo(beta=0.2)
    fit(module, addition(), max_steps=1).save_checkpoint(tmp_path / "rloo.ckpt")
    loaded = RLOO.load_from_checkpoint(tmp_path / "rloo.ckpt", weights_only=True)
    assert loaded.kl_coefficient == 0.2 and loaded.beta == 0.0
    assert torch.equal(weights_of(loaded), weights_of(module))


@pytest.mark.slow
def test_the_policy_converges_to_the_optimum_under_a_kl(tmp_path):
    """π*(y) ∝ π_ref(y) exp(r(y)/β), with small groups: the baseline leaves the completion itself out."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    module = rloo(
        tokenizer_name_or_path=small_tokenizer(tmp_path / "tokenizer"), beta=0.8, max_completion_length=2,
        learning_rate=1e-2, lr_scheduler_type="cosine",
        model_config={**GPT2, "initializer_range": 0.2, "tie_word_embeddings": False},
    )  # fmt: skip
    data = PromptDataModule(path=str(tmp_path / "prompts.jsonl"), batch_size=256, num_generations=4, eval_steps=0,
                            reward_funcs=[f"{HERE}:table_reward"])  # fmt: skip
    fit(module, data, max_steps=200)
    reference, learned = distribution(module.reference, 2), distribution(module.model, 2)
    optimum = {text: p * math.exp(VALUES[text] / 0.8) for text, p in reference.items()}
    total = sum(optimum.values())
    distance = sum(abs(learned[text] - optimum[text] / total) for text in learned) / 2
    moved = sum(abs(reference[text] - optimum[text] / total) for text in learned) / 2
    assert moved > 0.15, "the optimum is far from the start"
    assert distance <= 0.05


# -------------------------------------------------------------------- an advantage of one's own


class BatchNormalised(GRPO):
    """REINFORCE++: rewards standardised over the whole batch, without a baseline per prompt."""

    def score_group(self, rewards):
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def test_a_subclass_overrides_the_advantage():
    module = BatchNormalised(model_config=TINY)
    reward = torch.tensor([1.0, 0.0, 4.0, 3.0])
    torch.testing.assert_close(module.advantages(reward, 2), (reward - 2) / (reward.std() + 1e-4))
    kinds = {
        "group": grpo(), "batch": grpo(scale_rewards="batch"), "none": grpo(scale_rewards="none"), "others": rloo()
    }  # fmt: skip
    expected = {
        "group": torch.tensor([0.5, -0.5, 0.5, -0.5]) / (0.5**0.5 + 1e-4),
        "batch": torch.tensor([0.5, -0.5, 0.5, -0.5]) / (reward.std() + 1e-4),
        "none": torch.tensor([0.5, -0.5, 0.5, -0.5]),
        "others": torch.tensor([1.0, -1.0, 1.0, -1.0]),
    }
    for name, module in kinds.items():
        torch.testing.assert_close(module.advantages(reward, 2), expected[name])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_advantages_by_name_are_those_of_the_literature(name):
    reward = torch.tensor([0.0, 1.0, 1.0, 0.0, 4.0, math.nan])
    expected = {
        "grpo": [-(0.5**0.5), 0.5**0.5, 0.5**0.5, -(0.5**0.5), 0.0, 0.0],
        "dr_grpo": [-0.5, 0.5, 0.5, -0.5, 0.0, 0.0],
        "rloo": [-1.0, 1.0, 1.0, -1.0, 0.0, 0.0],
        # of all scored: mean 1.2, squared deviations 1.44 + .04 + .04 + 1.44 + 7.84 = 10.8
        "reinforce_plus_plus": [*(x / 2.7**0.5 for x in (-1.2, -0.2, -0.2, -1.2, 2.8)), 0.0],
    }[name]
    torch.testing.assert_close(grpo(advantages=name).advantages(reward, 2), torch.tensor(expected), atol=2e-4, rtol=0)


def signs(rewards):
    return (rewards - rewards.mean(1, keepdim=True)).sign()


@pytest.mark.parametrize("given", ["tests.rl_modules.language.test_rloo.signs", signs])
def test_an_advantage_of_ones_own_by_import_path_or_as_a_function(given, tmp_path):
    module = grpo(advantages=given)
    seen = []
    module.score_group = lambda rewards, own=module.score_group: seen.append((rewards, own(rewards))) or seen[-1][1]
    fit(module, small_addition(tmp_path), max_steps=1).save_checkpoint(tmp_path / "signs.ckpt")
    rewards, advantages = seen[0]
    assert rewards.shape == (4, 4) and torch.equal(advantages, signs(rewards)) and advantages.any()
    with pytest.raises(UsageError, match="give it again"):
        GRPO.load_from_checkpoint(tmp_path / "signs.ckpt")
    loaded = GRPO.load_from_checkpoint(tmp_path / "signs.ckpt", weights_only=True, advantages=given)
    assert torch.equal(loaded.score_group(rewards), advantages)


def test_a_checkpoint_imports_no_module_that_its_user_does_not_name(tmp_path, monkeypatch):
    path = tmp_path / "changed.ckpt"
    fit(grpo(advantages="rloo"), small_addition(tmp_path), max_steps=1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"]["advantages"] = "named_by_a_checkpoint:scores"
    torch.save(checkpoint, path)
    (tmp_path / "named_by_a_checkpoint.py").write_text("def scores(rewards): return 2 * rewards\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="names advantages=named_by_a_checkpoint:scores.*must not choose what code"):
        GRPO.load_from_checkpoint(path)
    assert "named_by_a_checkpoint" not in sys.modules
    loaded = GRPO.load_from_checkpoint(path, advantages="named_by_a_checkpoint:scores")
    assert loaded.score_group(torch.tensor([[1.0, 3.0]])).tolist() == [[2.0, 6.0]]
    del sys.modules["named_by_a_checkpoint"]
    with pytest.raises(UsageError, match="advantages 'no.such': the module 'no' can't be imported"):
        GRPO.load_from_checkpoint(path, advantages="no.such")  # the user's own is checked at once


def test_rewards_standardised_over_the_batch_keep_the_signal_of_groups_without_spread(tmp_path):
    module = grpo(advantages="reinforce_plus_plus")
    reward = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert (module.advantages(reward, 2) != 0).all() and not grpo().advantages(reward, 2).any()


def too_few(rewards):
    return rewards.mean(1)


@pytest.mark.parametrize(("advantages", "sentence"), [
    ("rlo", r"advantages 'rlo' is not known.*did you mean.*rloo"),
    ("tests.rl_modules.language.test_rloo:nothing", r"has no 'nothing'"),
    ("tests.rl_modules.language.test_rloo:VARIANTS", r"is a dict, where a function from rewards"),
    (lambda rewards: rewards, r"advantages=<function .* has no import path, .*; give a function at the first level"),
    (partial(signs), r"has no import path"),
    (3, r"advantages=3 has no import path"),
])  # fmt: skip
def test_refused_advantages(advantages, sentence):
    with pytest.raises(UsageError, match=sentence):
        grpo(advantages=advantages)


def test_advantages_of_another_shape_are_refused():
    with pytest.raises(UsageError, match=r"returned shape \(2,\) for rewards of shape \(2, 3\)"):
        grpo(advantages=f"{__name__}:too_few").score_group(torch.zeros(2, 3))


@pytest.mark.parametrize(("make", "arguments", "sentence"), [
    (grpo, {"loss_type": "cispo"}, "epsilon_high=None leaves loss_type='cispo' without its bound"),
    (grpo, {"loss_type": "sapo", "sapo_temperature_pos": 0.0}, "sapo_temperature_pos=0.0 must be a finite number"),
])  # fmt: skip
def test_refused_arguments(make, arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        make(**arguments)


def test_options_that_rloo_fixes_are_none_of_its_arguments():
    for name in ("loss_type", "importance_sampling_level", "scale_rewards", "top_entropy_quantile", "kl_estimator"):
        with pytest.raises(UsageError, match=f"RLOO sets {name} itself"):
            rloo(**{name: "group"})


@pytest.mark.long
def test_the_curve_of_rewards_is_that_of_the_task_without_the_price_of_kl(tmp_path):
    other = grpo(model_config={**TINY, "num_hidden_layers": 2})
    other.configure_model()
    other.export(tmp_path / "reference")
    module = rloo(beta=5.0, ref_model_name_or_path=str(tmp_path / "reference"), learning_rate=0.0)
    module.write_metrics = lambda: None  # keeps the sums
    fit(module, addition(reward="blind_half"), max_steps=1)
    means = module._means.means()
    for name in ("reward", "reward_std"):
        of_function = "rewards/blind_half/" + {"reward": "mean", "reward_std": "std"}[name]
        assert means[name] == pytest.approx(means[of_function]), name
    assert abs(means["kl"]) > 1e-3, "the price is not 0"


def test_each_uncertain_token_of_a_step_counts_the_same_in_the_bonus():
    """Micro-batches of 3 and 7 tokens, of which the quantile takes 1 and 2 of the step's 3."""
    module = grpo(entropy_coef=1.0, top_entropy_quantile=0.3)
    weights: list[float] = []
    for n in (3, 7):
        entropy = torch.rand(1, n, generator=torch.Generator().manual_seed(n)).requires_grad_()
        counts = {"step_tokens": torch.tensor(10), "n_micro": 2}
        batch = {"mask": torch.ones(1, n, dtype=torch.bool), "advantage": torch.ones(1), **counts}
        entropy_terms(module, entropy, batch)[1].backward()
        weights += [weight for weight in entropy.grad[0].tolist() if weight]
    assert weights == pytest.approx([2 / 3] * 3), "n_micro times a third"


def test_the_curve_of_the_loss_has_the_entropy_bonus():
    module = grpo(entropy_coef=0.7)
    module.configure_model()
    batch = batch_by_hand(module)
    with torch.no_grad():
        loss = module.training_step(batch, 0)
        bonus = loss - module.policy_loss(module.log_probs(batch)[0], batch)
    assert bonus < -0.1 and module._means.means()["loss"] == pytest.approx(float(loss))
