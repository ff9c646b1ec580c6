"""Rollouts that a run stores, and that `rl rescore` scores again."""

import json

import pytest
import torch

from datamodules import PromptDataModule
from recipes.cli.command import main
from rl_modules import GRPO
from rl_modules.functional import group_advantages
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def longer(completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    data = PromptDataModule("addition", batch_size=8, num_generations=4, eval_steps=0, rollouts_path=str(folder))
    module = GRPO(model_config=TINY, max_completion_length=3, logging_steps=1)
    fit(module, data, max_steps=2)
    return folder, module


def test_a_generation_is_stored_with_its_records_and_rewards(stored):
    folder, module = stored
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"generation-00000{i}-rank-0.jsonl" for i in range(2)]
    for row in rows_of(files[0]):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(a) + int(b)
        assert row["rewards/accuracy"] == float(row["completion"].strip() == row["answer"])
        assert module.tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == row["completion"]
    assert len({row["prompt"] for row in rows_of(files[0])}) == 2


def test_a_rollout_has_what_the_update_used_and_is_shown(stored, tmp_path, capsys):
    folder, module = stored
    rows = [row for file in sorted(folder.iterdir()) for row in rows_of(file)]
    for number, row in enumerate(rows):
        ids = row["completion_ids"]
        assert row["update/step"] == number // 8
        assert module.tokenizer.decode(row["update/prompt_ids"]) == row["prompt"]
        assert "".join(row["update/tokens"]) == module.tokenizer.decode(ids)
        assert row["update/finish_reason"] == ("stop" if ids[-1] == module.tokenizer.eos_token_id else "length")
        assert row["update/reward"] == row["rewards/accuracy"] and len(row["update/log_probs"]) == len(ids)
    text = torch.tensor([rows[8]["update/prompt_ids"] + rows[8]["completion_ids"]])
    assert len(rows[8]["update/log_probs"]) < text.shape[1] and all(x < 0 for x in rows[8]["update/log_probs"])
    groups = torch.tensor([row["update/reward"] for row in rows]).view(-1, 4)
    advantages = group_advantages(groups.flatten(), 4)
    torch.testing.assert_close(torch.tensor([row["update/advantage"] for row in rows]), advantages, atol=1e-5, rtol=0)
    main(["rollouts", str(folder), "--step", "1", "--sort", "length", "--reverse", "-n", "3"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.split()[0] == "1" for line in lines)
    lengths = [int(line[26:32]) for line in lines]
    assert lengths == sorted((len(r["completion_ids"]) for r in rows[8:]), reverse=True)[:3] and "reward" in header


def test_the_page_of_rollouts_runs_nothing_and_shows_log_ratios(tmp_path, capsys):
    row = {"prompt": [{"role": "user", "content": "<script>alert(1)</script>"}], "completion": "a<b>c\x1b[2J",
           "completion_ids": [1, 2], "update/tokens": ["a<b>", "c"], "update/log_probs": [-0.5, -2.0],
           "update/ref_log_probs": [-1.0, -0.5], "update/step": 3, "update/reward": 1.0, "update/advantage": -0.5,
           "update/finish_reason": "stop", "rewards/x<y": 1.0}  # fmt: skip
    (tmp_path / "generation-000000-rank-0.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "run").mkdir()
    config = {"data": {"class_path": "PromptDataModule", "init_args": {"rollouts_path": str(tmp_path)}}}
    (tmp_path / "run/config.yaml").write_text(json.dumps(config))
    main(["rollouts", str(tmp_path / "run")])
    assert "\x1b" not in capsys.readouterr().out
    main(["rollouts", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page and "a&lt;b&gt;" in page and "x&lt;y" in page
    assert 'rgba(0,160,60,0.50)" title="log π -0.500, log-ratio +0.500"' in page
    assert 'rgba(220,40,40,1.00)" title="log π -2.000, log-ratio -1.500"' in page and "http" not in page
    capsys.readouterr()
    for words in (["--contains", "zzz"], ["--step", "4"], ["--finish", "length"]):
        main(["rollouts", str(tmp_path), *words])
        assert len(capsys.readouterr().out.splitlines()) == 1


def test_stored_rollouts_are_scored_again(stored, tmp_path, capsys):
    folder, _ = stored
    output = tmp_path / "new.jsonl"
    names = ["exact_answer", '{"length_reward": {"target": 2}}', f"{__name__}:longer", "accuracy"]
    main(["rescore", str(folder), "--task", "addition", "--reward_funcs", *names, "--output", str(output)])
    found = rows_of(output)
    assert len(found) == 16
    for row in found:
        assert row["rewards/exact_answer"] == row["rewards/accuracy"]
        assert row["rewards/length_reward"] == max(-1.0, -abs(len(row["completion_ids"]) - 2) / 2)
        assert row["rewards/longer"] == len(row["completion"])
    shown = capsys.readouterr().out
    mean = sum(len(row["completion"]) for row in found) / 16
    assert f"{mean:.4f}" in shown and "16 completions written" in shown
    # What was stored under the same name is compared.
    (line,) = [line for line in shown.splitlines() if line.startswith("accuracy")]
    assert line.split()[-1] == "0"


@pytest.mark.parametrize(("words", "message"), [
    (["rows.jsonl"], "give --reward_funcs, or a --task"),
    (["empty", "--reward_funcs", "exact_answer"], "no *.jsonl file is in empty"),
    (["rows.jsonl", "--reward_funcs", '{"length_reward": '], "JSONDecodeError"),
    (["rows.jsonl", "--reward_funcs", "exact_answer"], "rows.jsonl:1: a stored rollout has prompt and completion"),
])  # fmt: skip
def test_refuses_by_name(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(SystemExit):
        main(["rescore", *words])
    assert message in capsys.readouterr().err
