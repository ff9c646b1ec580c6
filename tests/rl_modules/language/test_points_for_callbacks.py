"""What callbacks that monitor a training curve see, and arguments that nothing reads."""

import json
import math
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, GRPO, RLHFPPO, RLOO, SFT
from rl_modules.common.errors import UsageError
from tests.ranks import on_ranks
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def demonstrations(**arguments):
    return InstructionDataModule("addition", n_train=64, n_eval=0, batch_size=4, **arguments)


class Diverges(SFT):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.trainer.global_step == 3 else loss


def test_a_loss_that_is_no_number_is_shown_and_stops_early_stopping():
    stop = EarlyStopping("train/loss", check_finite=True, check_on_train_epoch_end=False, patience=100)
    stop.on_train_batch_end = lambda trainer, module, *_: stop._run_early_stopping_check(trainer)
    trainer = fit(Diverges(model_config=TINY, logging_steps=1), demonstrations(), max_steps=12, callbacks=[stop])
    # The weights are no numbers after step 4; the next loss shows it.
    assert math.isnan(trainer.callback_metrics["train/loss"]) and trainer.global_step == 5


def rising(completions, trainer_state, **columns):
    return [trainer_state.global_step + i % 2 for i in range(len(completions))]


@pytest.mark.parametrize("micro", [1, 2])
def test_a_checkpoint_is_ranked_by_the_point_of_its_own_step(micro, tmp_path):
    kept = ModelCheckpoint(tmp_path, monitor="train/reward", mode="max", save_top_k=-1, every_n_train_steps=2,
                           filename="{step}")  # fmt: skip
    data = PromptDataModule("addition", num_generations=4, batch_size=8, reward_funcs=[rising], n_eval=0)
    fit(GRPO(model_config=TINY, max_completion_length=4, logging_steps=2), data, max_steps=8, callbacks=[kept],
        enable_checkpointing=True, accumulate_grad_batches=micro)  # fmt: skip
    scores = {path.rpartition("=")[2]: float(score) for path, score in kept.best_k_models.items()}
    # Steps 0 and 1 earn 0.5 and 1.5 on average, and so on.
    assert scores == {"2.ckpt": 1.0, "4.ckpt": 3.0, "6.ckpt": 5.0, "8.ckpt": 7.0}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"optimizer": torch.optim.SGD, "weight_decay": 0.5}, "weight_decay=0.5 does nothing beside optimizer"),
        ({"lr_scheduler": lambda o: torch.optim.lr_scheduler.ConstantLR(o), "warmup_steps": 3},
         "warmup_steps=3 does nothing beside lr_scheduler"),
        ({"lr_scheduler": lambda o: torch.optim.lr_scheduler.ConstantLR(o), "lr_scheduler_type": "cosine"},
         "lr_scheduler_type='cosine' does nothing beside lr_scheduler"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps=3 .*take constant_with_warmup"),
    ],
)  # fmt: skip
def test_what_a_part_of_the_user_s_replaces_is_named(arguments, sentence):
    with pytest.warns(UserWarning, match=sentence):
        fit(SFT(model_config=TINY, **arguments), demonstrations(), max_steps=1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 does nothing without loss_type='sapo'"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon=0.1 does nothing with loss_type='sapo'"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, "epsilon=0.1 does nothing with loss_type"),
        ({"scale_rewards": "none", "advantages": "rloo"}, "scale_rewards='none' does nothing beside advantages"),
        ({"ref_model_name_or_path": "x"}, "ref_model_name_or_path='x' does nothing where no reference is read"),
        ({"sync_ref_model": True}, "sync_ref_model=True does nothing where no reference is read"),
        ({"ref_model_mixup_alpha": 0.5}, "ref_model_mixup_alpha=0.5 does nothing while sync_ref_model is false"),
        ({"importance_sampling_clip_max": 2.0}, "clip_max=2.0 does nothing without an importance_sampling_correction"),
    ],
)  # fmt: skip
def test_what_another_loss_reads_is_named(arguments, sentence):
    data = PromptDataModule("addition", num_generations=4, batch_size=8, n_eval=0)
    with pytest.warns(UserWarning, match=sentence):
        fit(GRPO(model_config=TINY, max_completion_length=4, **arguments), data, max_steps=1)


@pytest.mark.parametrize(
    ("made", "name", "reason"),
    [
        (lambda: DPO(model_config=TINY, loss_type="ipo", label_smoothing=0.1), "label_smoothing", "with this"),
        (lambda: DPO(model_config=TINY, loss_type=["ipo", "robust"], label_smoothing=0.1), "label_smoothing", None),
        (lambda: DPO(model_config=TINY, reference_free=True, sync_ref_model=True), "sync_ref_model", "where no ref"),
        (lambda: RLHFPPO(model_config=TINY, target_kl=1.0, beta=0.0), "target_kl", "with beta=0, which stays 0"),
        (lambda: RLHFPPO(model_config=TINY, target_kl=1.0), "target_kl", None),
        (lambda: PromptDataModule(dataset="d", eval_path="e", eval_split="dev"), "eval_split", "beside eval_path"),
    ],
)  # fmt: skip
def test_what_another_argument_leaves_unread_is_idle(made, name, reason):
    found = made().idle_arguments().get(name)
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_turns": 3}, "max_turns=3 does nothing without environment"),
        ({"ptx_path": "shown.jsonl"}, "ptx_path='shown.jsonl' does nothing at ptx_batch_size=0"),
        ({"eval_num_generations": 2}, "eval_num_generations=2 does nothing at eval_temperature=0"),
    ],
)  # fmt: skip
def test_what_the_data_do_not_read_is_named(arguments, sentence):
    data = PromptDataModule("addition", num_generations=4, batch_size=8, n_eval=0, **arguments)
    with pytest.warns(UserWarning, match=sentence):
        fit(GRPO(model_config=TINY, max_completion_length=4), data, max_steps=1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"simpo_gamma": 1.0}, "simpo_gamma=1.0 does nothing without loss_type=simpo"),
        ({"discopop_tau": 0.1}, "discopop_tau=0.1 does nothing without loss_type=discopop"),
        ({"f_alpha_divergence_coef": 0.1}, "does nothing without f_divergence_type=alpha_divergence"),
    ],
)  # fmt: skip
def test_what_another_loss_of_dpo_reads_is_named(arguments, sentence):
    data = PreferenceDataModule("paths", batch_size=4, n_train=8, eval_steps=0)
    with pytest.warns(UserWarning, match=sentence):
        fit(DPO(model_config=TINY, **arguments), data, max_steps=1)


class WithDemonstrations(GRPO):
    reads_demonstrations = True


@pytest.mark.parametrize("cls", [GRPO, RLOO, WithDemonstrations])
def test_demonstrations_that_no_loss_reads_are_named(cls):
    data = PromptDataModule("addition", num_generations=4, batch_size=8, n_eval=0, ptx_batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(cls(model_config=TINY, max_completion_length=4), data, max_steps=1)
    named = [str(warning.message) for warning in caught if "ptx_batch_size=2 does nothing with" in str(warning.message)]
    assert len(named) == (cls is not WithDemonstrations)


@pytest.mark.parametrize(
    "arguments", [{"columns": {"prompt": "question"}}, {"answer_after": "####"}, {"dataset_config": "main"}]
)
def test_what_a_task_does_not_read_is_refused(arguments):
    with pytest.raises(UsageError, match=f"^{next(iter(arguments))}="):
        PromptDataModule("addition", num_generations=4, batch_size=8, **arguments)


def test_nothing_is_named_where_all_is_read():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(SFT(model_config=TINY, weight_decay=0.5, warmup_steps=3), demonstrations(), max_steps=1)
        fit(SFT(model_config=TINY, lr_scheduler_type="constant"), demonstrations(), max_steps=1)
        data = PromptDataModule("addition", num_generations=4, batch_size=8, n_eval=0)
        fit(GRPO(model_config=TINY, max_completion_length=4, epsilon=0.1), data, max_steps=1)
    assert not [w for w in caught if "does nothing" in str(w.message)]


def test_an_optimizer_and_a_scheduler_are_callables_that_need_no_metric():
    with pytest.raises(UsageError, match="optimizer='adamw' must be a callable, such as a class of torch.optim$"):
        SFT(optimizer="adamw")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(MisconfigurationException, match="must include a monitor when a `ReduceLROnPlateau`"):
        fit(SFT(model_config=TINY, lr_scheduler=lambda o: plateau(o)), demonstrations(), max_steps=1)


def test_overfit_batches_is_answered_by_what_repeats_one(caplog):
    fit(SFT(model_config=TINY), demonstrations(), max_steps=1, overfit_batches=1)
    assert "overfit_batches=1 repeats no batch" in caplog.text and "give n_train=4" in caplog.text


@pytest.mark.parametrize("rate", [math.inf, math.nan])
def test_a_rate_is_finite(rate):
    with pytest.raises(UsageError, match=f"learning_rate={rate} must be .*at least 0"):
        SFT(learning_rate=rate)


def of_one_domain(completions, domain, **columns):
    return [float(len(c)) if d == "arithmetic" else None for c, d in zip(completions, domain, strict=True)]


def rewarded(path, ranks):
    data = PromptDataModule(path=str(path), num_generations=2, batch_size=8 // ranks, reward_funcs=[of_one_domain],
                            n_eval=0)  # fmt: skip
    model = GRPO(model_config=TINY, max_completion_length=4, logging_steps=1, learning_rate=1e-3)
    fit(model, data, max_steps=2, **({"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}))
    return model.latest_metrics["train/rewards/of_one_domain/mean"]


@pytest.mark.long
def test_a_rank_whose_prompts_no_function_judges_trains_with_the_others(tmp_path):
    rows = [{"prompt": f"{i}+1=", "domain": "arithmetic" if i % 3 == 0 else "talk"} for i in range(30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = rewarded(path, 1)
    assert on_ranks(lambda: rewarded(path, 2), tmp_path / "ranks") == pytest.approx([one, one])
    path.write_text("".join(json.dumps({**row, "domain": "talk"}) + "\n" for row in rows))
    with pytest.raises(UsageError, match="None or NaN, which is no reward, for all 8 completions"):
        rewarded(path, 1)
