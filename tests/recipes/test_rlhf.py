"""The RLHF pipeline: comparisons come from the policy's own samples, and stages that are done are not run again."""

import json
import math
import os
from collections import Counter

import pytest

from datamodules.language.tasks import make_task
from recipes import rlhf
from rl_modules.common.errors import UsageError
from rl_modules.language.sft import SFT

TINY = (
    '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, '
    '"num_key_value_heads": 2}'
)


def test_comparisons_are_of_samples_of_the_policy_and_decided_by_their_utilities(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = SFT(model_config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1})
    policy.configure_model()
    policy.export(tmp_path / "policy")
    arguments = {"model.model_name_or_path": str(tmp_path / "policy"), "data.task_kwargs": '{"n_nodes": 5}',
                 "model.model_config": "null", "model.max_completion_length": "4", "threads": "1"}  # fmt: skip
    rlhf.write_preferences("rlhf/sft.yaml", arguments, 3, [1.0, 2.0], 2, tmp_path)
    task = make_task("paths", n_nodes=5)
    pairs = {split: [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
             for split in ("train", "test")}  # fmt: skip
    prompts = {split: {record["prompt"] for record in task.records(split, None)} for split in pairs}
    for split, rows in pairs.items():
        assert {row["prompt"] for row in rows} == prompts[split]
        # Six completions a prompt, paired twice: of a model that knows nothing, hardly two samples are equal.
        assert len(rows) == 2 * 3 * len(prompts[split])
        texts = Counter((row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected"))
        assert set(texts.values()) == {2}
        assert len({(row["prompt"], frozenset([row["chosen"], row["rejected"]])) for row in rows}) > 0.6 * len(rows)
        for row in rows:
            assert len(row["chosen"]) <= 4 and row["chosen"] != row["rejected"]
            gap = task.utility(row, row["chosen"]) - task.utility(row, row["rejected"])
            assert row["probability"] == pytest.approx(1 / (1 + math.exp(-10 * gap)))
    before = (tmp_path / "train.jsonl").read_text()
    rlhf.write_preferences("rlhf/sft.yaml", arguments, 3, [1.0, 2.0], 2, tmp_path)
    assert (tmp_path / "train.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "1", "--temperatures", "1"], "samples=1 at one temperature leave nothing to compare"),
        (["--comparisons", "0"], "comparisons=0 must be at least 1"),
        (["--grpo.model.beta=1"], "'--grpo.model.beta=1' is not understood"),
        (["--ppo.model.beta", "1"], "'--ppo.model.beta' is not understood"),
    ],
)
def test_words_that_mean_nothing(words, message):
    with pytest.raises(UsageError, match=message):
        rlhf.parse(words)


def test_preferences_need_a_task_that_compares(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="addition can't compare completions"):
        rlhf.write_preferences(
            "rlhf/sft.yaml", {"data.task": "addition", "data.reward_funcs": "null"}, 2, [1.0], 1, tmp_path
        )


@pytest.mark.slow
def test_a_small_pipeline_runs_through_and_is_not_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "--folder=out", "--samples=1", f"--sft.model.model_config={TINY}", "--sft.trainer.max_steps=4",
        "--sft.data.eval_steps=2", "--sft.data.n_eval=8", "--reward_model.trainer.max_steps=4",
        "--reward_model.data.eval_steps=2", "--ppo.trainer.max_steps=16", "--ppo.data.eval_steps=8",
        "--ppo.data.batch_size=8", "--ppo.data.n_eval=8", "--ppo.model.logging_steps=4",
        *(f"--{stage}.threads=1" for stage in ("sft", "preferences", "reward_model", "ppo", "evaluation")),
    ]  # fmt: skip
    rlhf.main(words)
    out = capsys.readouterr().out
    table = (tmp_path / "out/results.md").read_text()
    assert table in out
    for stage in ("sft", "reward_model", "ppo"):
        assert f"| {stage} |" in table
    sft = json.loads((tmp_path / "out/sft_evaluation/metrics.json").read_text())
    ppo = json.loads((tmp_path / "out/ppo_evaluation/metrics.json").read_text())
    assert sft["eval/kl"] == pytest.approx(0.0, abs=1e-5) and ppo["eval/kl"] > 0
    assert (tmp_path / "out/curves.png").stat().st_size > 1000
    files = {path: os.path.getmtime(path) for path in (tmp_path / "out").rglob("*.safetensors")}
    rlhf.main(words)
    assert capsys.readouterr().out.count("done already") == 7
    assert files == {path: os.path.getmtime(path) for path in (tmp_path / "out").rglob("*.safetensors")}
