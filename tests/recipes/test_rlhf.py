"""The RLHF pipeline: comparisons come from the policy's own samples, and stages that are done are not run again."""

import json
import math
import os
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from datamodules import PreferenceDataModule
from datamodules.language.tasks import make_task
from recipes import r1, rlhf
from recipes.pipeline import Pipeline, in_one_process, load_policy
from rl_modules.common.errors import UsageError
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.sft import SFT
from rl_modules.language.tokenizer import load_tokenizer

TINY = (
    '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, '
    '"num_key_value_heads": 2}'
)


@pytest.mark.long
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


@pytest.fixture
def chatting(tmp_path, monkeypatch):
    """Options for a tiny policy whose tokenizer has a chat template with a variable."""
    monkeypatch.chdir(tmp_path)
    policy = SFT(model_config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1})
    policy.tokenizer.chat_template = (
        "{% for m in messages %}({{ sign or 'a' if m['role'] == 'assistant' else m['role'][0] }}:{{ m['content'] }})"
        "{% endfor %}{% if add_generation_prompt %}({{ sign or 'a' }}:{% endif %}"
    )
    policy.configure_model()
    policy.export(tmp_path / "policy")
    return {"model.model_name_or_path": str(tmp_path / "policy"), "model.model_config": "null",
            "model.max_completion_length": "4", "threads": "1", "data.system_prompt": "be",
            "data.chat_template_kwargs": '{"sign": "z"}'}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rlhf", "r1"])
@pytest.mark.parametrize("chat", [False, True])
def test_comparisons_are_read_and_judged_in_the_policys_chat_template(chatting, recipe, chat, tmp_path, monkeypatch):
    read = []
    original = SFT.act
    monkeypatch.setattr(SFT, "act", lambda self, prompts, *rest, **how: read.extend(prompts) or original(
        self, prompts, *rest, **how))  # fmt: skip
    chat_word = "true" if chat else "false"
    if recipe == "rlhf":
        arguments = {**chatting, "data.task_kwargs": f'{{"n_nodes": 5, "chat": {chat_word}}}'}
        rlhf.write_preferences("rlhf/sft.yaml", arguments, 2, [1.0], 1, tmp_path)
    else:
        arguments = {**chatting, "data.task_kwargs": f'{{"chat": {chat_word}}}'}
        r1.write_preferences("r1/cold_start.yaml", arguments, 128, tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "policy"))
    asked = {tokenizer.decode(ids) for ids in read}
    assert all(text.startswith("(s:be)(u:") and text.endswith(")(z:") for text in asked)
    judge = RewardModel(model_name_or_path=str(tmp_path / "policy"))
    # The judge's own settings say otherwise; the pipeline gives chat_template=false, and the pairs bring the rest.
    data = PreferenceDataModule(path=str(tmp_path / "train.jsonl"), chat_template=False)
    data.trainer = SimpleNamespace(lightning_module=judge, global_rank=0, world_size=1, accumulate_grad_batches=1,
                                   state=SimpleNamespace(fn="validate"))  # fmt: skip
    pairs = data.load_split("train", None)
    assert pairs and {tokenizer.decode(record["prompt_ids"]) for record in pairs} <= asked


def test_the_policy_writes_on_the_trainers_device(chatting, monkeypatch):
    # No second device is needed to see where it goes.
    monkeypatch.setattr(SingleDeviceStrategy, "root_device", torch.device("meta"))
    policy = load_policy("rlhf/sft.yaml", {**chatting, "data.task_kwargs": '{"n_nodes": 5}'})
    assert {p.device.type for p in policy.module.parameters()} == {"meta"} and not policy.module.training


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "rounds=0 must be at least 1"),
        (["--rounds", "2"], "rounds=2 must be at least 1, and above 1 only with --preferences dpo"),
        (["--grpo.model.beta=1"], "'--grpo.model.beta=1' is not understood"),
        (["--ppo.model.beta", "1"], "'--ppo.model.beta' is not understood"),
    ],
)
def test_words_that_mean_nothing(words, message):
    with pytest.raises(UsageError, match=message):
        rlhf.parse(words)


@pytest.mark.long
@pytest.mark.parametrize(("words", "sentence"), [
    (["--preferences", "dpo", "--dpo", "dpo/path.yaml"], "config 'dpo/path.yaml' is neither a file"),
    (["--preferences", "dpo", "--dpo.model.bta=1"], "stage dpo: unknown option 'model.bta'; did you mean beta"),
    (["--ppo.model.vf_coef=x"], "stage ppo: model.vf_coef='x' must be a number"),
    (["--evaluation.data.n_evl=3"], "stage evaluation: unknown option 'data.n_evl'; did you mean n_eval"),
    (["--preferences.model.bta=3"], "stage preferences: unknown option 'model.bta'"),
    (["--sft.data.task=addition", "--sft.data.task_kwargs=null", "--sft.data.reward_funcs=null"],
     "addition can't compare completions"),
])  # fmt: skip
def test_every_stage_is_checked_before_the_first(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rlhf.Pipeline, "stage", lambda *_: pytest.fail("a stage started"))
    with pytest.raises(SystemExit) as exit_:
        rlhf.main(words)
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and re.search(sentence, error)


#: A pipeline of a few steps on a tiny model.
WORDS = [
    "--folder=out", "--samples=1", f"--sft.model.model_config={TINY}", "--sft.trainer.max_steps=4",
    "--sft.data.eval_steps=2", "--sft.data.n_eval=8", "--reward_model.trainer.max_steps=4",
    "--reward_model.data.eval_steps=2", "--ppo.trainer.max_steps=16", "--ppo.data.eval_steps=8",
    "--ppo.data.batch_size=8", "--ppo.data.n_eval=8", "--ppo.model.logging_steps=4", "--dpo.trainer.max_steps=4",
    "--dpo.data.eval_steps=2", "--dpo.data.batch_size=8", "--dpo.data.n_eval=8",
    *(f"--{stage}.threads=1" for stage in ("sft", "preferences", "reward_model", "ppo", "dpo", "evaluation")),
]  # fmt: skip


@pytest.mark.slow
def test_a_small_pipeline_runs_through_and_is_not_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rlhf.main(WORDS)
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
    rlhf.main(WORDS)
    assert capsys.readouterr().out.count("done already") == 7
    assert files == {path: os.path.getmtime(path) for path in (tmp_path / "out").rglob("*.safetensors")}


@pytest.mark.slow
def test_both_roads_learn_from_the_same_comparisons_and_stand_in_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rlhf.main([*WORDS, "--preferences", "dpo", "--rounds", "2"])
    alone = (tmp_path / "out/results.md").read_text()
    rows = [line.split("|")[1].strip() for line in alone.splitlines() if line.startswith("|")]
    assert rows == ["stage", "---", "sft", "dpo", "dpo_2"]
    comparisons = (tmp_path / "out/preferences/train.jsonl").read_bytes()
    first, second = (
        json.loads((tmp_path / f"out/{name}/stage.json").read_text())["settings"]["arguments"]["data.path"]
        for name in ("dpo", "dpo_2")
    )
    assert first.endswith("preferences/train.jsonl") and second.endswith("preferences_2/train.jsonl")
    assert (tmp_path / "out/preferences_2/train.jsonl").read_bytes() != comparisons
    rlhf.main(WORDS)
    assert (tmp_path / "out/preferences/train.jsonl").read_bytes() == comparisons
    table = (tmp_path / "out/results.md").read_text()
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows == ["stage", "---", "sft", "reward_model", "ppo", "dpo", "dpo_2"]
    header = [cell.strip() for cell in table.splitlines()[0].split("|")]
    for line in table.splitlines()[5:7]:
        cells = dict(zip(header, (cell.strip() for cell in line.split("|")), strict=True))
        assert float(cells["optimality"]) >= 0 and float(cells["KL"]) != 0
        assert int(cells["steps"]) == 4
    # Other comparisons are another experiment: what DPO made of the old ones is not shown beside them.
    (tmp_path / "out/preferences/train.jsonl").unlink()
    for name in ("reward_model", "ppo", "reward_model_evaluation", "ppo_evaluation", "sft_evaluation"):
        shutil.rmtree(tmp_path / "out" / name)
    rlhf.main(WORDS)
    assert "dpo" not in (tmp_path / "out/results.md").read_text()


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """The settings that a pipeline gives to its stages, none of which runs."""
    monkeypatch.chdir(tmp_path)
    found = {}

    def stage(self, name, run, outputs, settings=None, after=()):
        found[name] = settings["arguments"]
        return self.folder / name

    monkeypatch.setattr(Pipeline, "stage", stage)
    monkeypatch.setattr(Pipeline, "measure", lambda self, name, config, arguments, after: stage(
        self, name, None, (), {"arguments": arguments}) and {"eval/pass@1": 0.0})  # fmt: skip
    for name in ("table", "curves"):
        monkeypatch.setattr(Pipeline, name, lambda *_: None)
    monkeypatch.setattr(rlhf, "summarise", lambda *_: None)
    for recipe in (rlhf, r1):
        monkeypatch.setattr(recipe, "check", lambda *_: None)
    return found


def test_the_policies_are_measured_as_their_stages_write(noted):
    rlhf.run(*rlhf.parse([
        "--sft.data.system_prompt=be", "--sft.model.max_completion_length=48", "--sft.model.learning_rate=1",
        "--ppo.model.max_completion_length=40", "--ppo.model.top_k=5", "--ppo.model.beta=1", "--ppo.data.n_eval=9",
        "--evaluation.data.n_eval=8",
    ]))  # fmt: skip
    written, measured = noted["preferences"], noted["ppo_evaluation"]
    assert written["data.system_prompt"] == "be" and written["model.max_completion_length"] == "48"
    assert measured["model.max_completion_length"] == "40" and measured["model.top_k"] == "5"
    assert measured["data.n_eval"] == "8", "an evaluation's own options come last"
    assert {"model.learning_rate", "model.beta"}.isdisjoint(written | measured)
    r1.run(*r1.parse(["--final", "r1/final.yaml", "--grpo.model.max_completion_length=99", "--grpo.data.n_eval=7"]))
    for name in ("cold_start_evaluation", "grpo_evaluation", "preferences"):
        assert noted[name]["model.max_completion_length"] == "99" and noted[name]["data.n_eval"] == "7"


def test_a_reward_model_that_trains_on_two_devices_is_evaluated_on_one(noted):
    rlhf.run(*rlhf.parse([
        "--reward_model.trainer.devices=2", "--reward_model.trainer.strategy=ddp", "--reward_model.data.n_eval=16",
    ]))  # fmt: skip
    assert noted["reward_model"]["trainer.devices"] == "2"
    arguments = in_one_process(noted["reward_model_evaluation"])
    assert arguments["trainer.devices"] == "1" and "trainer.strategy" not in arguments
    assert arguments["data.n_eval"] == "16"


def test_every_row_with_the_reward_models_score_depends_on_its_stage(noted, monkeypatch):
    """Another reward model gives other scores; a row of the old one would stand beside them."""
    read, measure = {}, Pipeline.measure

    def noting(self, name, config, arguments, after):
        read[name] = {path.name for path in after}
        return measure(self, name, config, arguments, after)

    monkeypatch.setattr(Pipeline, "measure", noting)
    rlhf.run(*rlhf.parse([]))
    stages = {"sft", "preferences", "reward_model"}
    assert read == {"sft_evaluation": stages, "ppo_evaluation": {*stages, "ppo"}, "reward_model_evaluation": stages}


def test_a_base_model_is_measured_before_it_is_trained(noted):
    words = ["--cold_start", "none", "--grpo", "r1/zero.yaml", "--grpo.model.model_name_or_path=mine",
             "--grpo.model.beta=0"]  # fmt: skip
    r1.run(*r1.parse(words))
    assert noted["base_evaluation"]["model.model_name_or_path"] == noted["grpo"]["model.model_name_or_path"] == "mine"
    assert noted["grpo_evaluation"]["model.model_name_or_path"].endswith("grpo/model")
