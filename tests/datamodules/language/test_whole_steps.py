"""What a pass in whole optimizer steps leaves out is said."""

import json

import pytest

from datamodules import InstructionDataModule, PreferenceDataModule
from datamodules.language.passes import whole_steps
from rl_modules import SFT, RewardModel
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_steps_of_a_pass():
    assert [whole_steps(n, 8) for n in (3, 8, 15, 16)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("n", "ends", "said"),
    [
        (15, {"max_epochs": 1}, "of 15 records, 8 to an optimizer step, the last 7 of a pass {}"),
        (3, {"max_epochs": 1}, "a step of 8 records repeats the 3 that there are"),
        (16, {"max_epochs": 1}, None),
        (15, {"max_steps": 1}, None),
    ],
)
@pytest.mark.parametrize("kind", ["demonstrations", "pairs"])
def test_the_rest_of_a_pass_is_named_where_epochs_end_the_run(kind, n, ends, said, tmp_path, caplog):
    rows = [{"prompt": f"{i}+1=", "completion": "2", "chosen": "2", "rejected": "3"} for i in range(n)]
    if kind == "demonstrations":
        keys, make, model, fate = ("prompt", "completion"), InstructionDataModule, SFT, "begin the next pass"
    else:
        keys, make, model, fate = ("prompt", "chosen", "rejected"), PreferenceDataModule, RewardModel, "are left out"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows))
    fit(model(model_config=TINY), make(path=str(path), batch_size=8, eval_steps=0), **ends)
    if said is None:
        assert "batch_size:" not in caplog.text
    else:
        assert said.format(fate) in caplog.text
