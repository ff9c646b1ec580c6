"""What the contract says of a batch's fields is what the datamodules give and the modules get."""

import json

import pytest

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import GRPO, KTO, RLHFPPO, SFT, RewardModel
from rl_modules.language.contract import (
    CompletionBatch,
    DemonstrationBatch,
    Generation,
    JudgedCompletions,
    PairBatch,
)
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


#: Fields of dialogues only.
IN_TURNS = {"written", "turn", "turn_reward"}


def remembering(cls, **arguments):
    """A module whose ``seen`` has the fields of each kind of batch that it got."""
    seen = {"train": set(), "eval": set(), "rollout": set(), "predict": set()}

    class Remembers(cls):
        def training_step(self, batch, batch_idx):
            seen["train"] |= set(batch)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen["eval"] |= set(batch)
            return super().validation_step(batch, batch_idx)

        def predict_step(self, batch, batch_idx):
            seen["predict"] |= set(batch)
            return super().predict_step(batch, batch_idx)

        if hasattr(cls, "prepare"):

            def prepare(self, rollout):
                seen["rollout"] |= set(rollout)
                return super().prepare(rollout)

    return Remembers(model_config=TINY, **arguments), seen


def fields(*contracts):
    """The fields of batches without images."""
    return {name for contract in contracts for name in contract.__annotations__} - {"images"}


def run(module, data, **arguments):
    trainer = fit(module, data, max_steps=2, **arguments)
    trainer.predict(module, datamodule=data)


@pytest.mark.parametrize("packing", [False, True])
def test_fields_of_demonstrations(packing):
    module, seen = remembering(SFT, max_completion_length=4)
    run(module, InstructionDataModule("addition", packing=packing, n_train=16, n_eval=8, batch_size=4, eval_steps=1))
    only_packed = {"position_ids", "boundaries"}
    packed = only_packed if packing else set()
    assert seen["train"] == fields(DemonstrationBatch) - only_packed | packed
    # Held-out completions, then held-out demonstrations.
    own = {"token_rewards", "correct"} | fields(JudgedCompletions)
    assert seen["eval"] == own | {"tokens", "counted", "filled"} | packed
    assert seen["predict"] == own


@pytest.mark.parametrize("packing", [False, True])
def test_fields_of_pairs(packing):
    module, seen = remembering(RewardModel)
    data = PreferenceDataModule("paths", packing=packing, n_train=16, n_eval=8, batch_size=4, eval_steps=1)
    run(module, data)
    packed = set() if packing else {"position_ids", "segment", "prompt_segment"}
    every = fields(PairBatch) - {"label"} - packed
    of_the_step = {"step_pairs", "step_chosen_tokens", "n_micro", "num_tokens"}
    assert seen["train"] == every - {"texts"}
    assert seen["eval"] == every - {"texts"} - of_the_step
    assert seen["predict"] == every - of_the_step


def test_judged_answers_have_a_label(tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1 + i % 2), "label": i % 2 == 0} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module, seen = remembering(KTO)
    fit(module, PreferenceDataModule(path=str(tmp_path / "a.jsonl"), n_eval=0, batch_size=4), max_steps=1)
    assert "label" in seen["train"] and seen["train"] <= fields(PairBatch)


@pytest.mark.parametrize(("cls", "each"), [(GRPO, 4), (RLHFPPO, 1)])
def test_fields_of_completions(cls, each):
    module, seen = remembering(cls, max_completion_length=4)
    data = PromptDataModule("addition", num_generations=each, batch_size=8, n_eval=8, eval_steps=1, dynamic_sampling=0)
    run(module, data)
    assert seen["rollout"] == fields(Generation) - {"missing", "kept", "kept_count"} - IN_TURNS
    assert seen["eval"] == seen["predict"] == fields(JudgedCompletions)
    of_the_datamodule = fields(CompletionBatch) - {"log_prob", "advantage"}
    assert seen["train"] >= fields(CompletionBatch) >= of_the_datamodule


def test_replaced_groups_are_counted():
    module, seen = remembering(GRPO, max_completion_length=4, top_p=0.9)
    data = PromptDataModule("addition", num_generations=4, batch_size=8, n_eval=0, dynamic_sampling=1)
    fit(module, data, max_steps=1)
    assert seen["rollout"] == fields(Generation) - IN_TURNS
