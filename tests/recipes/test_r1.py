"""The R1 pipeline on a tiny model: every stage, the table, what is skipped, what is refused."""

import json
import re

import pytest

from recipes import r1
from recipes.pipeline import Pipeline

TINY = json.dumps({"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 2})  # fmt: skip


def arguments(folder):
    small = ["data.n_eval=16", "model.max_completion_length=8", "trainer.max_steps=2", "data.eval_steps=1"]
    return [
        "--folder", str(folder), "--final", "r1/final.yaml", f"--cold_start.model.model_config={TINY}",
        *(f"--{stage}.{word}" for stage in ("cold_start", "grpo", "final") for word in small),
        "--grpo.data.batch_size=16", "--final.data.batch_size=16", "--reward_model.trainer.max_steps=2",
        "--reward_model.data.eval_steps=1", "--reward_model.data.batch_size=8", "--reward_model.data.n_eval=8",
        "--preference_prompts", "64",
    ]  # fmt: skip


@pytest.mark.slow
def test_every_stage_and_nothing_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    r1.main(arguments("r1"))
    out = capsys.readouterr().out
    for stage in ("cold_start", "grpo", "preferences", "reward_model", "final"):
        assert f"{stage}: in r1/{stage}" in out
    table = (tmp_path / "r1" / "results.md").read_text().splitlines()
    assert table[0].startswith("| stage | cons@8 | pass@1 | pass@8 | rewards/accuracy | rewards/think_answer_format")
    assert [line.split("|")[1].strip() for line in table[2:5]] == ["cold_start", "grpo", "final"]
    assert (tmp_path / "r1" / "curves.png").stat().st_size > 1000
    assert (tmp_path / "r1" / "final" / "model" / "model.safetensors").is_file()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "r1").glob("*/model/model.safetensors")}
    r1.main(arguments("r1"))
    out = capsys.readouterr().out
    assert out.count("done already") == 8, "five stages and three evaluations"
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_pairs_are_of_the_best_and_the_worst():
    def row(text, correct, finished=True):
        return {"completion": text, "correct": correct, "finished": finished, "length": len(text)}

    rows = [row("long and right", True), row("right", True), row("wrong", False), row("no end", False, False)]
    pair = r1.preference("p", rows)
    assert pair == {"prompt": "p", "chosen": "right", "rejected": "no end"}
    assert r1.preference("p", [row("a", True), row("b", True)]) is None


@pytest.mark.parametrize(("words", "sentence"), [
    (["--grop.model.beta=1"], "'--grop.model.beta=1' is not understood.*the stages are cold_start, grpo"),
    (["--grpo.model.beta", "1"], "'--grpo.model.beta' is not understood"),
    (["--cold_start", "r1/cold.yaml"], "config 'r1/cold.yaml' is neither a file nor an installed config"),
    (["--grpo.model.bta=1"], "stage grpo: unknown option 'model.bta'; did you mean beta"),
    (["--grpo.model.beta=-1"], "stage grpo: beta=-1"),
    (["--grpo.data.task=additon"], "stage grpo: .*additon.*did you mean addition"),
    (["--cold_start.model=GRPO"], "stage cold_start: .*GRPO.*InstructionDataModule"),
    (["--grpo.trainer.accelerator=cuda5"], "stage grpo: .*cuda5"),
    (["--final", "r1/final.yaml", "--reward_model.trainer.max_steps=soon"], "stage reward_model: .*max_steps='soon'"),
    (["--final", "r1/final.yaml", "--final.model.learning_rate=fast"], "stage final: .*learning_rate='fast'"),
    (["--final", "r1/final.yaml", "--grpo.data.task=null", "--grpo.data.task_kwargs=null",
      "--grpo.data.path=sums.jsonl", "--grpo.data.reward_funcs=exact_answer", "--grpo.model.reward_weights=null"],
     r"sums\.jsonl is no task, whose training prompts"),
    (["--final", "r1/final.yml"], "config 'r1/final.yml' is neither a file nor an installed config"),
    (["--folder", "taken"], "File exists: 'taken'"),
    (["--seed", "-1"], "stage cold_start: seed_everything=-1 must lie in"),
])  # fmt: skip
def test_refused_arguments(words, sentence, tmp_path, monkeypatch, capsys):
    """Whatever is wrong in any stage is said before the first one starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setattr(Pipeline, "stage", lambda *_: pytest.fail("a stage started"))
    with pytest.raises(SystemExit) as exit_:
        r1.main(words)
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and re.search(sentence, error)
