"""DPO and KTO by the command line: a run, its best checkpoint, implicit rewards in a file, an export."""

import json
import re
from pathlib import Path

import pytest
import torch

from recipes.cli import main
from tests.rl_modules.language.preferences import JUDGEMENTS, PAIRS, TINY, write


@pytest.fixture
def rl(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*args):
        try:
            main(list(args))
            code = 0
        except SystemExit as exit_:
            code = exit_.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.long
@pytest.mark.parametrize(("model", "rows", "names"), [
    ("DPO", PAIRS, ["prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"]),
    ("KTO", JUDGEMENTS, ["prompt", "completion", "label", "reward"]),
])  # fmt: skip
def test_train_judge_and_export(rl, tmp_path, model, rows, names):
    path = write(tmp_path / "data.jsonl", rows)
    arguments = [
        "--model", model, "--model.model_config", json.dumps(TINY), "--data", "PreferenceDataModule", "--data.path",
        path, "--data.eval_path", path, "--data.n_eval", "8", "--trainer.accelerator", "cpu",
    ]  # fmt: skip
    code, _, err = rl("fit", *arguments, "--data.batch_size", "8", "--data.eval_steps", "2", "--trainer.max_steps", "4")
    assert code == 0, err
    folder = Path(f"logs/{model}-data/version_0/checkpoints")
    best = torch.load(folder / "best.ckpt", weights_only=True)["callbacks"]["Checkpoints"]
    assert best["monitor"] == {"DPO": "eval/rewards/accuracies", "KTO": "eval/rewards/margins"}[model]
    code, _, err = rl("predict", *arguments, "--ckpt_path", str(folder / "last.ckpt"), "--output", "judged.jsonl")
    assert code == 0, err
    judged = [json.loads(line) for line in Path("judged.jsonl").read_text().splitlines()]
    assert len(judged) == 8 and all(list(row) == names for row in judged)
    code, _, err = rl("export", "--ckpt_path", str(folder / "last.ckpt"), "--output", "model")
    assert code == 0, err
    assert {path.name for path in Path("model").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.long
def test_a_run_without_held_out_records_says_what_its_last_steps_reached(rl, tmp_path):
    path = write(tmp_path / "data.jsonl", PAIRS)
    arguments = ["--model", "DPO", "--model.model_config", json.dumps(TINY), "--data", "PreferenceDataModule",
                 "--data.path", path, "--data.n_eval", "0", "--data.batch_size", "8"]  # fmt: skip
    code, out, err = rl("fit", *arguments, "--trainer.accelerator", "cpu", "--trainer.max_steps", "3")
    assert code == 0, err
    assert re.search(r"^DPO on .* train/rewards/accuracies [\d.]+, .*train/loss [\d.]+, of the last steps", out, re.M)
    assert re.search(r"^best checkpoint +the last: none was evaluated in training$", out, re.M)
