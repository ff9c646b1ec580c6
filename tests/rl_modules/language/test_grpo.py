"""GRPO through its module: losses of whole steps, ratios, references, closed-form optima, exact resume, bad input."""

import importlib.util
import json
import math
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from datamodules.language.prompt import PromptDataModule
from rl_modules.common.errors import UsageError
from rl_modules.functional import gdpo_advantages
from rl_modules.language.entropy import quantile, uncertain_tokens
from rl_modules.language.grpo import GRPO
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.scoring import completion_log_probs
from rl_modules.language.sft import SFT
from tests.conformance.architectures import ARCHITECTURES
from tests.ranks import on_ranks
from tests.training import assert_equal_checkpoints, assert_resumes_exactly, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
LEVELS = ("token", "sequence")


def grpo(**arguments: Any) -> GRPO:
    defaults = {"model_config": TINY, "max_completion_length": 5, "learning_rate": 1e-3,
                "lr_scheduler_type": "constant", "completions_steps": 0}  # fmt: skip
    return GRPO(**{**defaults, **arguments})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def digit_reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    """Differs between most completions, and is None for some of them."""
    return [None if text.startswith("z") else sum(map(ord, text)) % 5 / 4 for text in completions]


def blind_half(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Equal for all completions of every second prompt."""
    return [
        float(len(text)) if sum(map(ord, prompt)) % 2 else 1.0
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def small_tokenizer(folder: Any) -> str:
    """Three tokens: the end, a, and b."""
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    ).save_pretrained(folder)
    return str(folder)


HERE = "tests.rl_modules.language.test_grpo"


def scored_odd_only(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    return [float(i % 4) if i % 2 else None for i in range(len(completions))]


def addition(reward: str = "digit_reward", **arguments: Any) -> PromptDataModule:
    defaults = {"batch_size": 16, "num_generations": 4, "eval_steps": 0, "n_train": 24,
                "reward_funcs": [f"{HERE}:{reward}"]}  # fmt: skip
    return PromptDataModule("addition", **{**defaults, **arguments})


class Spy(GRPO):
    """Keeps what goes into the loss, and what each generation was."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[Any] = []
        self.rollouts: list[Any] = []

    def prepare(self, rollout):
        fields = super().prepare(rollout)
        self.rollouts.append((rollout, fields))
        return fields

    def policy_loss(self, log_prob, batch):
        self.seen.append((log_prob.detach(), batch))
        return super().policy_loss(log_prob, batch)


def spy(**arguments: Any) -> Spy:
    module = grpo(**arguments)
    return Spy(**{k: v for k, v in module.hparams.items() if k != "description"}, optimizer=module.optimizer_factory)


def built(module: Any) -> Any:
    """A module's model, before training."""
    module.configure_model()
    return module.model


def weights_of(module: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.model.parameters()])


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({"importance_sampling_level": "sequence"}, 1),
        ({"importance_sampling_level": "sequence_token", "loss_type": "bnpo"}, 1),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, 0),
        ({}, 0),
    ],
)
def test_what_is_not_gspo_is_warned_of(arguments: dict[str, Any], warned: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(grpo(**arguments), addition(), max_steps=1)
    assert sum("is not GSPO" in str(warning.message) for warning in caught) == warned


# ---------------------------------------------------------------- the loss of a step


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_accumulation_does_not_change_the_step(loss_type, level, beta, tmp_path):
    """Also where β = 0 leaves out rows without advantage, and completions that are cut off are masked."""
    tokenizer, prompts = small_tokenizer(tmp_path / "tokenizer"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", "ab", "bb")))
    ends = []
    for n_micro in (1, 4):
        module = spy(loss_type=loss_type, importance_sampling_level=level, beta=beta, optimizer=sgd, max_grad_norm=None,
                     mask_truncated_completions=True, tokenizer_name_or_path=tokenizer)  # fmt: skip
        data = PromptDataModule(path=str(prompts), batch_size=16, num_generations=4, eval_steps=0, num_iterations=2,
                                reward_funcs=[f"{HERE}:blind_half"])  # fmt: skip
        fit(module, data, max_steps=2, accumulate_grad_batches=n_micro)
        ends.append(weights_of(module))
    ((rollout, fields),) = module.rollouts
    assert 0 < rollout["finished"].sum() < 16 and 0 < (fields["advantage"] == 0).sum() < 16
    assert (ends[0] - weights_of(at_start(module))).abs().max() > 1e-3, "something was learned"
    torch.testing.assert_close(ends[0], ends[1], atol=1e-6, rtol=1e-5)


def at_start(module: GRPO) -> GRPO:
    start = grpo(**{k: module.hparams[k] for k in ("model_config", "tokenizer_name_or_path")})
    start.configure_model()
    return start


def batch_by_hand(module: GRPO, keep: torch.Tensor | None = None) -> dict[str, Any]:
    """Six completions of one to five tokens; the rows that ``keep`` names."""
    generator = torch.Generator().manual_seed(0)
    prompt_length, length = torch.tensor([3, 1, 2, 4, 2, 3]), torch.tensor([5, 1, 3, 2, 5, 4])
    tokens = torch.randint(3, 90, (6, 8), generator=generator)
    with torch.no_grad():
        log_prob, _ = completion_log_probs(module.model, tokens, prompt_length, length, module.temperature)
    noise = [0.3 * torch.randn(6, 5, generator=generator) for _ in range(2)]
    fields = {
        "tokens": tokens, "prompt_length": prompt_length, "length": length,
        "log_prob": log_prob + noise[0], "ref_log_prob": log_prob + noise[1],
        "advantage": torch.tensor([1.5, -0.5, 0.0, 0.7, 0.0, -1.2]),
        "mask": torch.arange(5) < length.unsqueeze(1),
    }  # fmt: skip
    rows = torch.arange(6) if keep is None else keep
    longest = int(length[rows].max())
    batch = {name: x[rows] for name, x in fields.items()}
    for name in ("log_prob", "ref_log_prob", "mask"):
        batch[name] = batch[name][:, :longest]
    total = torch.tensor(20.0)
    return {**batch, "on_policy": False, "step_rows": 6, "micro_rows": 6, "n_micro": 1, "step_tokens": total,
            "micro_tokens": total}  # fmt: skip


def gradient_of(module: GRPO, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = module.training_step(batch, 0)
    gradients = torch.autograd.grad(loss, [p for p in module.model.parameters() if p.requires_grad])
    return loss.detach(), torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", TYPES)
def test_rows_without_advantage_count_in_the_normaliser_though_no_model_reads_them(loss_type, level):
    module = grpo(loss_type=loss_type, importance_sampling_level=level)
    module.configure_model()
    whole = gradient_of(module, batch_by_hand(module))
    kept = gradient_of(module, batch_by_hand(module, torch.tensor([0, 1, 3, 5])))
    for one, other in zip(whole, kept, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert whole[1].abs().max() > 1e-4


def test_only_rows_that_teach_go_through_the_model():
    module = spy()
    fit(module, addition("blind_half"), max_steps=3)
    for (_, fields), (log_prob, batch) in zip(module.rollouts, module.seen, strict=True):
        informative = int((fields["advantage"] != 0).sum())
        assert 0 < informative < 16
        assert len(log_prob) == informative and batch["step_rows"] == batch["micro_rows"] == 16
        assert float(batch["step_tokens"]) == fields["length"].sum()


def test_a_kl_is_paid_by_silent_rows_too():
    module = spy(beta=0.1)
    fit(module, addition("blind_half"), max_steps=1)
    assert len(module.seen[0][0]) == 16


class Forgetful(GRPO):
    def prepare(self, rollout):
        super().prepare(rollout)


class Short(GRPO):
    def prepare(self, rollout):
        return {**super().prepare(rollout), "bonus": torch.zeros(3)}


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Forgetful, "prepare returned None"), (Short, r"prepare returned bonus .* begins with \[completions\]")],
)
def test_what_prepare_returns_is_checked(kind, said):
    with pytest.raises(UsageError, match=said):
        fit(kind(model_config=TINY, max_completion_length=4), addition("blind_half"), max_steps=1)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 0.8, 1.0])
def test_the_quantile_is_torchs(q):
    values = torch.rand(7, 31)
    values[torch.rand(7, 31) < 0.4] = torch.nan
    torch.testing.assert_close(quantile(values, q), values.nanquantile(q), rtol=1e-6, atol=0)
    assert quantile(torch.full((2, 3), torch.nan), q).isnan()


@pytest.mark.slow
def test_the_quantile_takes_a_micro_batch_of_many_ranks():
    values = torch.arange(2**24 + 3, dtype=torch.float32) / 2**24
    with pytest.raises(RuntimeError, match="too large"):
        values.nanquantile(0.8)
    torch.testing.assert_close(quantile(values, 0.8), torch.tensor(0.8), rtol=0, atol=1e-6)


def test_policy_gradient_is_of_the_tokens_with_the_highest_entropy():
    module = grpo(top_entropy_quantile=0.25)
    module.configure_model()
    batch = batch_by_hand(module)
    with torch.no_grad():
        text = (batch["tokens"], batch["prompt_length"], batch["length"])
        _, entropy = completion_log_probs(module.model, *text, entropy=True)
    chosen = torch.where(uncertain_tokens(module, entropy, batch["mask"]), batch["advantage"].unsqueeze(1), 0.0)
    ordered = entropy[batch["mask"]].sort(descending=True).values
    expected = batch["mask"] & (entropy >= ordered[4])  # 5 of 20 tokens
    assert torch.equal(chosen != 0, expected & (batch["advantage"] != 0).unsqueeze(1))
    everything = grpo()
    everything.configure_model()
    loss, _ = gradient_of(module, batch)
    selected, _ = gradient_of(everything, {**batch, "advantage": chosen})
    torch.testing.assert_close(loss, selected)


# ---------------------------------------------------------------- ratios


@pytest.mark.parametrize("config", [
    {**TINY, "attention_dropout": 0.5},
    {**GPT2, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
])  # fmt: skip
@pytest.mark.parametrize("n_micro", [1, 2])
def test_the_first_minibatch_has_ratio_exactly_one(config, n_micro):
    """With dropout in the config, temperature other than 1, prompts and completions of different lengths."""
    module = spy(model_config=config, temperature=0.7)
    fit(module, addition(num_iterations=2), max_steps=2, accumulate_grad_batches=n_micro)
    first, second = module.seen[:n_micro], module.seen[n_micro:]
    assert len({int(n) for n in module.rollouts[0][0]["prompt_length"]}) > 1
    for log_prob, batch in first:
        assert torch.equal(log_prob, batch["log_prob"])
    assert any(not torch.equal(log_prob, batch["log_prob"]) for log_prob, batch in second)


@pytest.mark.parametrize("config", [
    TINY, GPT2, {**ARCHITECTURES["OPT"], "layerdrop": 0.5}, {**ARCHITECTURES["Mixtral"], "router_jitter_noise": 0.5},
])  # fmt: skip
def test_the_samplers_log_probs_are_those_of_training(config):
    module = spy(model_config=config, temperature=0.7, learning_rate=0.0)
    fit(module, addition(num_iterations=2), max_steps=2)
    log_prob, batch = module.seen[1]
    assert not batch["on_policy"]
    assert (log_prob - batch["log_prob"]).abs().max() < 1e-5


@pytest.mark.parametrize("sampling", [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.9}, {"repetition_penalty": 1.5}])
def test_filtered_samplings_log_probs_are_those_of_training(sampling):
    module = spy(learning_rate=0.0, temperature=0.7, **sampling)
    fit(module, addition(num_iterations=2), max_steps=2)
    (rollout, fields), (log_prob, batch) = module.rollouts[0], module.seen[1]
    assert torch.equal(rollout["log_prob"], fields["log_prob"]), "the generation is not read again"
    assert torch.where(batch["mask"], log_prob - batch["log_prob"], 0.0).abs().max() < 1e-5


# ---------------------------------------------------------------- rewards and advantages


def two(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    return [None if i % 4 == 3 else float(i) for i in range(len(completions))]


def test_rewards_are_weighted_and_what_nothing_scores_has_no_advantage():
    module = spy(reward_weights=[1.0, 0.5], scale_rewards="none")
    data = addition(batch_size=8, reward_funcs=[f"{HERE}:two", {f"{HERE}:half_of": {"n": 4}}])
    fit(module, data, max_steps=1)
    ((rollout, fields),) = module.rollouts
    # Rows 3 and 7 have neither reward; the second function gives 2 to rows 0 to 2 and nothing after.
    expected = torch.tensor([1.0, 2.0, 3.0, math.nan, 4.0, 5.0, 6.0, math.nan])
    torch.testing.assert_close(rollout["reward"], expected, equal_nan=True)
    torch.testing.assert_close(fields["advantage"], torch.tensor([-1.0, 0, 1, 0, -1, 0, 1, 0]))


def half_of(n: int) -> Any:
    return lambda prompts, completions, **columns: [2.0 if i < 3 else None for i in range(len(completions))]


def test_metrics_have_trls_names_and_values(tmp_path):
    module = spy(reward_weights=[1.0], logging_steps=1, beta=0.1, completions_steps=1)
    logger = TensorBoardLogger(tmp_path, name=None)
    fit(module, addition(batch_size=8, reward_funcs=[f"{HERE}:two"]), max_steps=1, logger=logger)
    ((rollout, _),) = module.rollouts
    events = EventAccumulator(logger.log_dir).Reload()
    metrics = {
        tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"] if events.Scalars(tag)[0].step == 1
    }
    table = events.Tensors("completions/text_summary")[0].tensor_proto.string_val[0].decode()
    assert table.startswith("| prompt | completion | two | advantage |") and len(table.splitlines()) == 2 + 8
    assert events.Histograms("train/completions/length")[0].histogram_value.num == 8
    scored = torch.tensor([0.0, 1, 2, 4, 5, 6])
    assert metrics["train/reward"] == metrics["train/rewards/two/mean"] == pytest.approx(3.0)
    assert metrics["train/reward_std"] == metrics["train/rewards/two/std"] == pytest.approx(scored.std().item())
    assert metrics["train/frac_reward_zero_std"] == 0
    lengths = rollout["length"].float()
    assert metrics["train/completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert (
        metrics["train/completions/min_length"] == lengths.min()
        and metrics["train/completions/max_length"] == lengths.max()
    )
    assert metrics["train/completions/clipped_ratio"] == pytest.approx(1 - rollout["finished"].float().mean().item())
    assert metrics["train/num_tokens"] == (rollout["length"] + rollout["prompt_length"]).sum()
    assert metrics["train/kl"] == pytest.approx(0, abs=1e-6), "the policy is still its reference"
    assert (
        metrics["train/clip_ratio/low_mean"]
        == metrics["train/clip_ratio/high_mean"]
        == metrics["train/clip_ratio/region_mean"]
        == 0
    )
    with torch.no_grad():
        _, entropy = completion_log_probs(module.reference, rollout["tokens"], rollout["prompt_length"],
                                          rollout["length"], entropy=True)  # fmt: skip
    # Estimated from some 40 sampled tokens of a nearly uniform distribution.
    assert "train/entropy" not in metrics
    assert metrics["train/sampled_entropy"] == pytest.approx((entropy.sum() / lengths.sum()).item(), rel=0.05)


def test_clip_ratios_are_shares_of_all_tokens():
    module = grpo(epsilon=0.1, epsilon_high=0.2)
    module.configure_model()
    batch = batch_by_hand(module)
    with torch.no_grad():
        text = (batch["tokens"], batch["prompt_length"], batch["length"])
        now, _ = completion_log_probs(module.model, *text)
    batch["log_prob"] = now - torch.tensor([0.15, -0.15, 0.5, 0.25, -0.5, -0.15]).unsqueeze(1)
    module.training_step(batch, 0)
    means = module._means.means()
    # Row 1 (1 token) falls too low with A < 0, row 5 (4 tokens) too; row 3 (2 tokens) rises too far with A > 0.
    assert means["clip_ratio/low_mean"] == pytest.approx(5 / 20)
    assert means["clip_ratio/high_mean"] == pytest.approx(2 / 20)
    assert means["clip_ratio/region_mean"] == pytest.approx(7 / 20)
    assert {name: means[f"clip_ratio/{name}"] for name in ("low_min", "low_max", "high_min", "high_max")} == {
        "low_min": 0.0, "low_max": 1.0, "high_min": 0.0, "high_max": 1.0,
    }  # fmt: skip


def test_groups_that_dynamic_sampling_could_not_replace_are_logged():
    module = grpo(logging_steps=100)
    module.write_metrics = lambda: None  # keeps the sums
    fit(module, addition("blind_half", dynamic_sampling=1, batch_size=32), max_steps=4)
    missing, silent = (module._means.means()[name] for name in
                       ("dynamic_sampling/missing", "frac_reward_zero_std"))  # fmt: skip
    assert missing == silent and 0 < missing < 1


def test_a_reward_model_is_one_more_reward(tmp_path):
    judge = RewardModel(model_config=TINY)
    judge.configure_model()
    judge.reward_offset = 0.25
    judge.export(tmp_path / "judge")
    module = spy(reward_model_name_or_path=str(tmp_path / "judge"), reward_weights=[2.0, 3.0])
    fit(module, addition("blind_half"), max_steps=1)
    ((rollout, _),) = module.rollouts
    assert rollout["reward_names"] == ["blind_half", "reward_model"]
    score = judge.score(rollout["prompts"], rollout["texts"])
    finished = rollout["finished"]
    if finished.any():
        torch.testing.assert_close(rollout["rewards"][finished, 1], score[finished], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rollout["reward"], rollout["rewards"] @ torch.tensor([2.0, 3.0]))


# ---------------------------------------------------------------- reference


def test_under_lora_the_reference_is_the_model_without_adapters():
    start = grpo()
    start.configure_model()
    module = spy(beta=0.1, lora={"r": 4, "target_modules": ["q_proj", "v_proj"]}, learning_rate=0.1)
    fit(module, addition(), max_steps=4)
    assert module.reference is None
    rollout, fields = module.rollouts[-1]
    text = (rollout["tokens"], rollout["prompt_length"], rollout["length"])
    with torch.no_grad():
        expected, _ = completion_log_probs(start.model, *text)
        now, _ = completion_log_probs(module.model, *text)
    torch.testing.assert_close(fields["ref_log_prob"], expected, atol=1e-5, rtol=0)
    assert (now - expected).abs().max() > 1e-3, "the adapters have learned something"


def test_the_reference_follows_every_so_many_steps():
    module = grpo(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
    policies = []

    class Remember(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *others):
            policies.append(weights_of(pl_module))

    module.configure_model()
    reference = weights_of(module)
    fit(module, addition(), max_steps=5, callbacks=[Remember()])
    for after_step in (2, 4):
        reference = 0.25 * policies[after_step - 1] + 0.75 * reference
    now = torch.cat([p.flatten() for p in module.reference.parameters()])
    torch.testing.assert_close(now, reference)


def test_without_a_kl_there_is_no_reference():
    module = grpo()
    fit(module, addition(), max_steps=1)
    assert module.reference is None


# ---------------------------------------------------------------- resuming


@pytest.mark.long
@pytest.mark.parametrize("arguments", [
    {},
    {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "loss_type": "grpo", "top_p": 0.9},
])  # fmt: skip
def test_a_run_stopped_within_a_generation_resumes_exactly(tmp_path, arguments):
    def run(name, ckpt_path=None, callbacks=None):
        data = addition(steps_per_generation=2, num_iterations=2)
        limits = {"max_steps": 6, "accumulate_grad_batches": 2}
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        fit(grpo(**arguments), data, ckpt_path=ckpt_path, **limits, **checkpoints).save_checkpoint(tmp_path / name)

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run("whole.ckpt", callbacks=[every_step])
    for step in range(1, 6):
        run("resumed.ckpt", tmp_path / f"step={step}.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@pytest.mark.long
def test_runs_resume_exactly_between_generations_with_a_reward_model_whose_directory_is_gone(tmp_path):
    judge = RewardModel(model_config=TINY)
    judge.configure_model()
    judge.export(tmp_path / "judge")

    def make():
        return grpo(reward_model_name_or_path=str(tmp_path / "judge"), beta=0.1, save_frozen_weights=True)

    assert_resumes_exactly(make, addition, tmp_path, epochs=3)
    (tmp_path / "judge").rename(tmp_path / "elsewhere")
    loaded = GRPO.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    one, other = judge.model.state_dict(), loaded.reward_model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- closed-form optima


#: Rewards of what is written: of one token, and of paths of two steps.
VALUES = {"a": 1.0, "b": 0.0, "": 0.25, "aa": 0.0, "ab": 1.0, "ba": 0.6, "bb": 0.2}


def table_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [VALUES[text.replace(" ", "")] for text in completions]


@torch.no_grad()
def distribution(model: Any, steps: int) -> dict[str, float]:
    """The probability of every completion of at most ``steps`` tokens to the prompt a, by enumeration."""
    found: dict[str, float] = {}
    open_ = {"": 1.0}
    for _ in range(steps):
        following: dict[str, float] = {}
        for text, mass in open_.items():
            ids = torch.tensor([[1] + [1 + "ab".index(c) for c in text]])
            p = model(input_ids=ids).logits[0, -1].softmax(-1)
            found[text] = mass * float(p[0])
            for i, letter in enumerate("ab", 1):
                following[text + letter] = mass * float(p[i])
        open_ = following
    return found | open_


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("steps", "beta"), [(1, 0.5), (2, 0.8)])
def test_the_policy_converges_to_the_optimum_under_a_kl(tmp_path, steps, beta, level):
    r"""π*(y) ∝ π_ref(y) exp(r(y)/β): a bandit, and paths of up to two steps with every end rewarded by a table.

    A group's mean contains the completion itself: rewards pull with (G-1)/G of their size, hence the large groups.
    """
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    module = grpo(
        tokenizer_name_or_path=small_tokenizer(tmp_path / "tokenizer"), scale_rewards="none", beta=beta,
        use_bias_correction_kl=True, loss_type="dr_grpo", importance_sampling_level=level,
        max_completion_length=steps, learning_rate=1e-2, lr_scheduler_type="cosine",
        # Positions are learned and embeddings untied: a rotary model can't tell the texts a and aa apart.
        model_config={**GPT2, "initializer_range": 0.2, "tie_word_embeddings": False},
    )  # fmt: skip
    data = PromptDataModule(path=str(tmp_path / "prompts.jsonl"), batch_size=256, num_generations=128, eval_steps=0,
                            reward_funcs=[f"{HERE}:table_reward"])  # fmt: skip
    fit(module, data, max_steps=200)
    reference, learned = distribution(module.reference, steps), distribution(module.model, steps)
    optimum = {text: p * math.exp(VALUES[text] / beta) for text, p in reference.items()}
    total = sum(optimum.values())
    distance = sum(abs(learned[text] - optimum[text] / total) for text in learned) / 2
    moved = sum(abs(reference[text] - optimum[text] / total) for text in learned) / 2
    assert moved > 0.15, "the optimum is far from the start"
    assert distance <= 0.05


# ---------------------------------------------------------------- ranks


ON_RANKS: dict[str, dict[str, Any]] = {
    **{loss_type: {"loss_type": loss_type, "beta": 0.1} for loss_type in TYPES},
    "rows left out": {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    "one scale": {"loss_type": "grpo", "scale_rewards": "batch"},
    "uncertain tokens": {"loss_type": "dapo", "top_entropy_quantile": 0.3},
}


def train_on_ranks(ranks: int, steps: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for name, arguments in ON_RANKS.items():
        module = grpo(optimizer=sgd, max_grad_norm=None, **arguments)
        data = addition("blind_half", batch_size=16 // ranks)
        fit(module, data, max_steps=steps, devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        results[name] = module.model.state_dict()
    return results


@pytest.fixture(scope="module")
def on_one_and_two(tmp_path_factory):
    return train_on_ranks(1), on_ranks(lambda: train_on_ranks(2), tmp_path_factory.mktemp("ranks"))


@pytest.mark.long
@pytest.mark.parametrize("case", ON_RANKS)
def test_two_ranks_learn_what_one_learns(case, on_one_and_two):
    one, (two, other) = on_one_and_two[0][case], (rank[case] for rank in on_one_and_two[1])
    start = at_start(grpo()).model.state_dict()
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], atol=1e-6, rtol=1e-4)
        assert torch.equal(two[name], other[name])
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 1e-3


# ---------------------------------------------------------------- evaluation


def number_if_asked(prompts, completions, **columns):
    """The prompt's number; does not apply to prompts with a question mark."""
    return [None if "?" in prompt else float(prompt[0]) for prompt in prompts]


def evaluated(path, ranks=1, eval_batch_size=256):
    module = grpo(max_completion_length=2)
    data = PromptDataModule(path=path, eval_path=path, num_generations=2, eval_num_generations=2, batch_size=8,
                            eval_batch_size=eval_batch_size, reward_funcs=[number_if_asked, blind_half])  # fmt: skip
    trainer = L.Trainer(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", logger=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.validate(module, data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.long
@pytest.mark.parametrize("eval_batch_size", [2, 6, 256])
def test_an_evaluations_mean_reward_is_over_the_scored_completions(eval_batch_size, tmp_path):
    """Batches may hold none of them, some, or all; on two ranks the second one has none."""
    path = tmp_path / "prompts.jsonl"
    prompts = ["1=", "2?", "6=", "4=", "5?", "6?", "7?", "8?"]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    mean = (1 + 6 + 4) / 3
    one = evaluated(str(path), 1, eval_batch_size)
    assert one["eval/rewards/number_if_asked"] == pytest.approx(mean)
    ranks = on_ranks(lambda: evaluated(str(path), 2, eval_batch_size), tmp_path / "ranks")
    for rank in ranks:
        assert rank == pytest.approx(one)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scales_may_be_trls_booleans(given, meant):
    """``GRPOConfig.scale_rewards`` of TRL 1.16."""
    module = GRPO(scale_rewards=given)
    assert module.scale_rewards == module.hparams["scale_rewards"] == module.hparams_initial["scale_rewards"] == meant


@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"loss_type": "ppo"}, "loss_type='ppo' must be one of grpo, bnpo, dapo, dr_grpo"),
    ({"scale_rewards": "std"}, "scale_rewards='std' must be one of group, batch, none"),
    ({"importance_sampling_level": "word"}, "importance_sampling_level='word' must be one of token, sequence"),
    ({"kl_estimator": "k4"}, "kl_estimator='k4' must be one of k1, k2, k3"),
    ({"beta": -0.1}, "beta=-0.1 must be a finite number of at least 0"),
    ({"delta": 0.0}, "delta=0.0 must be a finite number above 0"),
    ({"temperature": 0.0}, "temperature=0.0 must be a finite number above 0"),
    ({"top_p": 1.5}, r"top_p=1.5 must lie in \(0, 1\]"),
    ({"top_entropy_quantile": 0.0}, r"top_entropy_quantile=0.0 must lie in \(0, 1\]"),
    ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1"),
    ({"beta": 0.1, "sync_ref_model": True, "lora": {"r": 2}}, "can't move the reference under lora"),
])  # fmt: skip
def test_refused_arguments(arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        grpo(**arguments)


def test_a_group_of_one_is_refused():
    with pytest.raises(UsageError, match="num_generations=1 leaves a completion nothing to be compared with"):
        fit(grpo(), addition(num_generations=1), max_steps=1)


def test_weights_must_be_as_many_as_rewards():
    with pytest.raises(UsageError, match="are 2 numbers for 1 rewards, digit_reward"):
        fit(grpo(reward_weights=[1.0, 2.0]), addition(), max_steps=1)


@pytest.mark.parametrize("algorithm", [GRPO, RLHFPPO])
@pytest.mark.parametrize(("weights", "sentence"), [
    ([1.0, math.nan], "must be a list of finite numbers, one per reward"),
    ([math.inf], "must be a list of finite numbers, one per reward"),
    (["1"], "reward_weights='1' must be a number"),
    (2.0, r"reward_weights=2\.0 must be a list of finite numbers"),
])  # fmt: skip
def test_weights_are_finite_numbers(algorithm, weights, sentence):
    with pytest.raises(UsageError, match=sentence):
        algorithm(model_config=TINY, reward_weights=weights)


def test_completions_without_any_reward_are_refused(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    data = PromptDataModule(path=str(tmp_path / "prompts.jsonl"), batch_size=4, num_generations=4, eval_steps=0)
    model = grpo()
    model.act = None  # the first generation would call it
    with pytest.raises(UsageError, match="no rewards for the completions"):
        fit(model, data, max_steps=1)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_engine_is_refused_with_its_command_before_anything_is_made():
    model = grpo(sampler="vllm")
    model.build_model = None
    with pytest.raises(UsageError, match="sampler=vllm needs a package that is not installed: pip install vllm"):
        fit(model, PromptDataModule("addition", batch_size=4, num_generations=4, eval_steps=0), max_steps=1)


def test_a_reward_model_with_another_tokenizer_brings_it_along(tmp_path):
    judge = RewardModel(model_config=TINY, tokenizer_name_or_path=small_tokenizer(tmp_path / "tokenizer"))
    judge.configure_model()
    judge.export(tmp_path / "judge")
    module = grpo(reward_model_name_or_path=str(tmp_path / "judge"))
    module.configure_model()
    assert len(module.reward_tokenizer) == 3 and len(module.tokenizer) == 99


def test_references_that_do_not_fit_are_refused(tmp_path):
    other = SFT(model_config=TINY, tokenizer_name_or_path=small_tokenizer(tmp_path / "tokenizer"))
    other.configure_model()
    other.export(tmp_path / "other_tokens")
    with pytest.raises(UsageError, match="other_tokens' has a tokenizer with 3 tokens"):
        grpo(beta=0.1, ref_model_name_or_path=str(tmp_path / "other_tokens")).configure_model()
    wider = SFT(model_config={**TINY, "hidden_size": 32})
    wider.configure_model()
    wider.export(tmp_path / "wider")
    with pytest.raises(UsageError, match="wider' has others than the policy"):
        grpo(beta=0.1, ref_model_name_or_path=str(tmp_path / "wider"), sync_ref_model=True).configure_model()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty' is no reference"):
        grpo(beta=0.1, ref_model_name_or_path=str(tmp_path / "empty")).configure_model()


def test_what_a_subclass_keeps_per_token_is_as_wide_as_its_micro_batch():
    class Distilled(GRPO):
        """Keeps two numbers per token, such as a teacher's likeliest, [B, L, 2]."""

        def prepare(self, rollout):
            fields = super().prepare(rollout)
            fields.pop("keep", None)
            place = torch.arange(fields["mask"].shape[1]).expand_as(fields["mask"])
            return {**fields, "teacher": torch.stack([place, fields["length"][:, None].expand_as(place)], 2)}

        def policy_loss(self, log_prob, batch):
            widths.add(log_prob.shape[1])
            place, length = batch["teacher"].unbind(2)
            assert torch.equal(batch["mask"], place < length)
            return super().policy_loss(log_prob, batch)

    widths: set[int] = set()
    data = PromptDataModule("addition", n_train=8, n_eval=0, batch_size=8, num_generations=2)
    fit(Distilled(model_config=TINY, max_completion_length=24), data, max_steps=2, accumulate_grad_batches=4)
    assert len(widths) > 1


@pytest.mark.long
@pytest.mark.parametrize("eval_batch_size", [2, 6, 256])
def test_two_ranks_evaluate_the_records_that_one_does_where_they_do_not_divide_them(eval_batch_size, tmp_path):
    path = tmp_path / "prompts.jsonl"
    prompts = ["1=", "2?", "6=", "4=", "5?", "6?", "7="]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    one = evaluated(str(path), 1, eval_batch_size)
    assert one["eval/rewards/number_if_asked"] == pytest.approx((1 + 6 + 4 + 7) / 4)
    for rank in on_ranks(lambda: evaluated(str(path), 2, eval_batch_size), tmp_path / "ranks"):
        assert rank == pytest.approx(one)


# ---------------------------------------------------------------- advantages of a subclass


class Baseline(GRPO):
    """A subclass with a baseline of its own, and a chosen result."""

    def advantages(self, reward, num_generations):
        return self.given(reward)


def test_an_unscored_completion_has_no_advantage_whatever_a_subclass_returns():
    module = Baseline(model_config=TINY, max_completion_length=5, learning_rate=1e-3)
    module.given = lambda reward: reward - reward.nanmean()
    fit(module, addition("scored_odd_only", num_generations=1), max_steps=1)
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


@pytest.mark.parametrize(("given", "sentence"), [
    (lambda reward: reward - reward.mean(), r"completion 1, whose reward is 1, are not finite; a reward"),
    (lambda reward: reward.view(-1, 4).mean(1), r"shape \(4,\) for 16 completions of up to \d tokens"),
    (lambda reward: reward.view(-1, 1).expand(-1, 1), r"shape \(16, 1\) for 16 completions"),
])  # fmt: skip
def test_advantages_that_can_not_be_used_are_refused(given, sentence):
    module = Baseline(model_config=TINY, max_completion_length=5)
    module.given = given
    with pytest.raises(UsageError, match=sentence):
        fit(module, addition("scored_odd_only"), max_steps=1)


def of_each(rewards_per_func, weights):
    return (rewards_per_func * torch.tensor(weights)).amax(2) - rewards_per_func.mean((1, 2)).unsqueeze(1)


@pytest.mark.long
@pytest.mark.parametrize("given", [of_each, "gdpo"])
def test_a_function_of_advantages_may_read_the_rewards_of_each_function(given, monkeypatch):
    module, seen = grpo(advantages=given, reward_weights=[1.0, 2.0], entropy_coef=0.1), []
    monkeypatch.setattr(
        module, "prepare", lambda rollout, own=module.prepare: seen.append((rollout, own(rollout))) or seen[-1][1]
    )
    fit(module, addition(reward_funcs=[f"{HERE}:digit_reward", "accuracy"]), max_steps=1)
    ((rollout, fields),) = seen
    rewards = rollout["rewards"].view(-1, rollout["num_generations"], 2)
    expected = (
        of_each(rewards, [1.0, 2.0]).flatten()
        if given is of_each
        else gdpo_advantages(rollout["rewards"], rollout["num_generations"], [1.0, 2.0])
    )
    torch.testing.assert_close(fields["advantage"], expected)
    assert 0 < module.latest_metrics["train/entropy"] <= math.log(len(module.tokenizer))


@pytest.mark.long
def test_a_baseline_over_the_batch_takes_groups_of_one():
    module = grpo(advantages="reinforce_plus_plus")
    fit(module, addition(num_generations=1), max_steps=1)
    assert module.latest_metrics["train/grad_norm"] > 0
    with pytest.raises(UsageError, match="num_generations=1 leaves a completion nothing"):
        fit(grpo(advantages="rloo"), addition(num_generations=1), max_steps=1)


@pytest.mark.parametrize(("given", "sentence"), [
    (lambda reward: reward.tolist(), "returned a list for 16 completions"),
    (lambda reward: reward.view(-1, 1), r"returned shape \(16, 1\) for 16 completions"),
    (lambda reward: reward.view(-1, 4).mean(1), r"returned shape \(4,\) for 16 completions"),
])  # fmt: skip
def test_rewards_of_another_shape_are_refused(given, sentence):
    class Rewarded(GRPO):
        def rewards(self, rollout):
            return given(super().rewards(rollout))

    with pytest.raises(UsageError, match=f"Rewarded.rewards {sentence}; return a tensor with one number for each"):
        fit(Rewarded(model_config=TINY, max_completion_length=2), addition(), max_steps=1)
