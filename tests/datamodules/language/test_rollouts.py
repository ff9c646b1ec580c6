"""Rollouts that a run stores, and that `rl rescore` scores again."""

import json

import pytest

from datamodules import PromptDataModule
from recipes.cli.command import main
from rl_modules import GRPO
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
    (["rows.jsonl", "--reward_funcs", '{"length_reward": '], "write JSON"),
    (["rows.jsonl", "--reward_funcs", "exact_answer"], "rows.jsonl:1: a stored rollout has prompt and completion"),
])  # fmt: skip
def test_refuses_by_name(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(SystemExit):
        main(["rescore", *words])
    assert message in capsys.readouterr().err
