"""Batches that no datamodule of this project made."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from rl_modules import DPO, GRPO, KTO, RLOO, SFT, Distillation, RewardModel
from rl_modules.common.errors import UsageError
from tests.rl_modules.language.test_contract import TINY
from tests.training import fit

TOKENS = torch.randint(3, 20, (8, 6), generator=torch.Generator().manual_seed(0))


class Foreign(L.LightningDataModule):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.mark.parametrize(
    ("cls", "fitting"),
    [(SFT, "Instruction"), (RewardModel, "Preference"), (DPO, "Preference"), (KTO, "Preference"), (GRPO, "Prompt"),
     (RLOO, "Prompt"), (Distillation, "Prompt")],
)  # fmt: skip
def test_a_loader_of_token_ids_is_answered_with_the_datamodule_that_fits(cls, fitting):
    said = f"{cls.__name__} reads batches that have tokens, and got a Tensor: .*datamodule={fitting}DataModule"
    teacher = {"lora": {"r": 2, "target_modules": "all-linear"}} if cls is Distillation else {}
    with pytest.raises(UsageError, match=said):
        fit(cls(model_config=TINY, **teacher), Foreign(TOKENS), max_steps=1, limit_val_batches=0)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluations_are_answered_likewise(stage):
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    with pytest.raises(UsageError, match="got the fields input_ids, labels: .*PreferenceDataModule"):
        getattr(trainer, stage)(RewardModel(model_config=TINY), datamodule=Foreign(rows))


def test_a_step_of_ones_own_reads_what_it_likes():
    class NextToken(SFT):
        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch, labels=batch).loss

    assert fit(NextToken(model_config=TINY), Foreign(TOKENS), max_steps=2, limit_val_batches=0).global_step == 2
