"""The command line with a language module: train, evaluate, write completions, export."""

import csv
import json
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from recipes.cli import main
from recipes.language import require_room
from recipes.summary import export_of
from rl_modules import DPO, GRPO, KTO, SFT
from rl_modules.common.errors import UsageError

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
CONFIG = {
    "model": {"class_path": "SFT", "init_args": {"model_config": TINY, "max_completion_length": 4, "logging_steps": 2}},
    "data": {"class_path": "InstructionDataModule",
             "init_args": {"task": "addition", "n_train": 64, "batch_size": 16, "n_eval": 12, "eval_steps": 2}},
    "trainer": {"max_steps": 5, "accelerator": "cpu"},
}  # fmt: skip


@pytest.fixture
def rl(tmp_path, monkeypatch, capsys):
    """Run ``rl`` in an empty folder; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))

    def run(*args):
        code = 0
        try:
            main(list(args))
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of one short run, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    before = Path.cwd()
    os.chdir(folder)
    try:
        main(["fit", "--config", "tiny.yaml", "--seed_everything", "5"])
    finally:
        os.chdir(before)
    return next(folder.glob("logs/*/version_0"))


def test_fit_leaves_checkpoints_curves_tables_and_settings(trained):
    assert trained.parent.name == "SFT-addition"
    for name in ("best.ckpt", "last.ckpt"):
        checkpoint = torch.load(trained / "checkpoints" / name, weights_only=True)
        assert checkpoint["algorithm"] == "SFT"
    assert checkpoint["global_step"] == 5
    assert checkpoint["datamodule_hyper_parameters"]["seed"] == 5
    assert checkpoint["callbacks"]["Checkpoints"]["monitor"] == "eval/reward"  # pass@1 stays 0
    events = EventAccumulator(str(trained), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "train/loss", "train/perplexity", "train/mean_token_accuracy", "train/entropy", "train/num_tokens",
        "train/grad_norm", "train/learning_rate", "eval/loss", "eval/perplexity", "eval/mean_token_accuracy",
        "eval/pass@1", "eval/mean_length", "eval/clipped_ratio",
        "eval/rewards/accuracy",
    } <= tags  # fmt: skip
    # The axis is the optimizer step; the last point is of what was left at the end.
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4, 5]
    assert sorted(e.step for e in events.Scalars("eval/loss")) == [0, 2, 4, 5]
    texts = events.Tags()["tensors"]
    assert any("config" in tag for tag in texts)
    assert any("eval/completions" in tag for tag in texts)
    assert any("hparams" in tag for tag in events.summary_metadata)


@pytest.mark.long
def test_fit_prints_a_summary(rl):
    code, out, err = rl("fit", "--config", "tiny.yaml")
    assert code == 0, err
    lines = out.splitlines()[1:]
    assert re.match(r"SFT on addition +pass@1 \S+, .*loss \S+, .*perplexity", lines[0])
    assert re.search(r"optimizer steps +5 in \S+ s", out)
    assert re.search(r"tokens +[\d,]+, [\d,]+ per second", out)
    for mark in ("last checkpoint", "best checkpoint"):
        path = next(line.split()[-1] for line in lines if line.startswith(mark))
        assert Path(path).is_file()
    assert "tensorboard --logdir logs/SFT-addition (run version_0)" in out
    command = next(line for line in lines if line.startswith("export")).split(maxsplit=1)[1].split()
    assert "%" not in err
    # What it says how to do can be done.
    code, out, _ = rl(*command[1:])
    assert code == 0
    assert (Path("model") / "model.safetensors").is_file()


def test_the_summarys_export_names_a_class_of_ones_own(rl):
    Path("own_sft.py").write_text("from rl_modules import SFT\n\n\nclass Mine(SFT):\n    pass\n")
    own = {**CONFIG, "model": {**CONFIG["model"], "class_path": "own_sft.Mine"}}
    Path("own.yaml").write_text(yaml.safe_dump(own))
    code, out, err = rl("fit", "--config", "own.yaml", "--trainer.max_steps", "1", "--data.eval_steps", "0")
    assert code == 0, err
    command = next(line for line in out.splitlines() if line.startswith("export")).split()[1:]
    code, _, err = rl(*command[1:])
    assert code == 0, err
    assert (Path("model") / "model.safetensors").is_file()


def test_the_summarys_export_is_python_where_no_command_can_import_the_class():
    class Inner(SFT):
        pass

    assert export_of(SFT(), "a.ckpt") == "rl export --ckpt_path a.ckpt --output model"
    assert export_of(Inner(), "a.ckpt") == 'Inner.load_from_checkpoint("a.ckpt").export("model")'


def test_validate_and_test_print_the_metrics(rl, trained):
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    for command in ("validate", "test"):
        code, out, err = rl(command, "--config", "tiny.yaml", "--ckpt_path", checkpoint)
        assert code == 0, err
        for name in ("eval/pass@1", "eval/loss", "eval/perplexity", "eval/rewards/accuracy"):
            assert name in out


@pytest.mark.parametrize("devices", [["--trainer.devices=2"], []])
def test_predict_writes_every_record(rl, trained, monkeypatch, devices):
    """With several devices each process has a share of the records, of which one process's would be written."""
    words = ["predict", "--config", "tiny.yaml", "--ckpt_path", str(trained / "checkpoints/last.ckpt")]
    # A machine with two devices that Lightning would take both of.
    monkeypatch.setattr("lightning.pytorch.accelerators.cpu.CPUAccelerator.auto_device_count", lambda: 2)
    code, _, err = rl(*words, *devices, "--trainer.accelerator=cpu")
    assert code == 0, err
    with Path("completions.csv").open() as file:
        assert len(list(csv.DictReader(file))) == CONFIG["data"]["init_args"]["n_eval"]


@pytest.mark.long
def test_predict_writes_completions_with_rewards(rl, trained):
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    for name in ("a.csv", "a.jsonl"):
        code, out, err = rl("predict", "--config", "tiny.yaml", "--ckpt_path", checkpoint, "--output", name,
                            "--data.eval_num_generations", "2", "--data.eval_temperature", "1.0")  # fmt: skip
        assert code == 0, err
        assert f"24 completions written to {name}" in out
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    with Path("a.csv").open() as file:
        assert [row["completion"] for row in csv.DictReader(file)] == [row["completion"] for row in rows]
    assert {tuple(row) for row in rows} == {
        ("prompt", "completion", "length", "finished", "correct", "rewards/accuracy")
    }
    assert rows[0]["prompt"] == rows[1]["prompt"] != rows[2]["prompt"]
    for row in rows:
        left, right = row["prompt"].rstrip("=").split("+")
        assert row["correct"] == (row["completion"] == str(int(left) + int(right)))
        assert row["rewards/accuracy"] == float(row["correct"])


@pytest.mark.long
def test_export_gives_the_same_logits_through_transformers(rl, trained):
    from rl_modules import SFT

    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    code, out, err = rl("export", "--ckpt_path", checkpoint, "--output=exported")
    assert code == 0, err
    assert "exported to exported" in out
    assert "%" not in err
    ours = SFT.load_from_checkpoint(checkpoint, weights_only=True).model.eval()
    theirs = AutoModelForCausalLM.from_pretrained("exported").eval()
    tokens = torch.tensor([AutoTokenizer.from_pretrained("exported")("12+34=").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=tokens).logits, ours(input_ids=tokens).logits)
    # And training goes on from there.
    code, _, err = rl("fit", "--config", "tiny.yaml", "--model.model_config", "null", "--model.model_name_or_path",
                      "exported", "--trainer.max_steps", "1", "--data.eval_steps", "0")  # fmt: skip
    assert code == 0, err


def last_checkpoint(version):
    (path,) = Path("logs/SFT-addition").glob(f"version_{version}*/checkpoints/last.ckpt")
    return path


@pytest.mark.long
def test_resume_ends_where_the_uninterrupted_run_ends(rl, trained):
    code, _, err = rl("fit", "--config", "tiny.yaml", "--seed_everything", "5", "--trainer.max_steps", "3",
                      "--model.lr_scheduler_type", "constant")  # fmt: skip
    assert code == 0, err
    code, out, err = rl("fit", "--config", "tiny.yaml", "--seed_everything", "5", "--trainer.max_steps", "5",
                        "--model.lr_scheduler_type", "constant", "--resume")  # fmt: skip
    assert code == 0, err
    assert "resuming from" in out
    assert "description" not in out
    # The rate is that of this process, as the seconds are.
    assert re.search(r"optimizer steps +5 \(2 since the run resumed\) in \S+ s", out)
    whole, part = map(int, re.search(r"tokens +(\d+) \((\d+) since the run resumed\), [\d,]+ per second", out).groups())
    assert whole / 5 * 1.5 < part < whole / 5 * 2.5
    code, _, err = rl("fit", "--config", "tiny.yaml", "--seed_everything", "5", "--model.lr_scheduler_type", "constant")
    assert code == 0, err
    resumed, whole = (torch.load(last_checkpoint(i), weights_only=True) for i in range(2))
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value)


@pytest.mark.long
def test_a_run_whose_source_directory_is_gone_resumes_exactly(rl, trained):
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    assert rl("export", "--ckpt_path", checkpoint, "--output", "start")[0] == 0
    settings = ["fit", "--config", "tiny.yaml", "--model.model_config", "null", "--model.model_name_or_path", "start",
                "--model.lr_scheduler_type", "constant", "--seed_everything", "5"]  # fmt: skip
    assert rl(*settings)[0] == 0
    assert rl(*settings, "--trainer.max_steps", "3")[0] == 0
    Path("start").rename("elsewhere")
    code, out, err = rl(*settings, "--resume")
    assert code == 0, err
    assert "resuming from" in out and "description" not in out
    whole, resumed = (torch.load(last_checkpoint(i), weights_only=True) for i in range(2))
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value)
    code, out, err = rl("test", *settings[1:5], "--model.model_name_or_path", "start", "--ckpt_path", "last")
    assert code == 0 and "eval/pass@1" in out, err
    code, _, err = rl(*settings)
    assert code == 1 and "'start' can't be loaded" in err


def test_progress_bar_counts_optimizer_steps(monkeypatch, capsys, make_trainer):
    from datamodules import InstructionDataModule
    from recipes.callbacks.progress import StepProgressBar
    from rl_modules import SFT

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "150")
    settings = {**CONFIG["data"]["init_args"], "eval_steps": 2}
    trainer = make_trainer(max_steps=4, accumulate_grad_batches=2, enable_progress_bar=True,
                           callbacks=[StepProgressBar(refresh_s=0.0)])  # fmt: skip
    trainer.fit(SFT(**CONFIG["model"]["init_args"]), InstructionDataModule(**settings))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"SFT .* 50 % +2 of 4 +[\d.]+/s", shown)
    assert re.search(r"SFT .*100 % +4 of 4 .*pass@1 \S+  loss \S+", shown)


def test_without_reward_functions_the_best_is_that_of_the_least_loss(rl):
    for name in ("train", "held_out"):
        lines = [json.dumps({"prompt": f"{i}=", "completion": str(i)}) + "\n" for i in range(16)]
        Path(f"{name}.jsonl").write_text("".join(lines))
    code, out, err = rl(
        "fit", "--model", "SFT", "--model.model_config", json.dumps(TINY), "--model.max_completion_length", "3",
        "--data", "InstructionDataModule", "--data.path", "train.jsonl", "--data.eval_path", "held_out.jsonl",
        "--data.n_eval", "16", "--data.eval_steps", "2", "--data.batch_size", "8", "--trainer.max_steps", "4",
        "--trainer.accelerator", "cpu",
    )  # fmt: skip
    assert code == 0, err
    assert "pass@1" not in out
    folder = Path("logs/SFT-train/version_0")
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["callbacks"]["Checkpoints"]
    assert best["monitor"] == "eval/loss"
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert float(best["best_model_score"]) == pytest.approx(min(e.value for e in events.Scalars("eval/loss")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--config", "tiny.yaml", "--model.learning_rat", "1"], "did you mean learning_rate"),
        (["fit", "--config", "tiny.yaml", "--data.packin", "true"], "did you mean packing"),
        (["fit", "--config", "tiny.yaml", "--model.init_from", "x.ckpt"], "--model.model_name_or_path .*rl export"),
        (["fit", "--config", "tiny.yaml", "--init_from", "x.ckpt"], "--model.model_name_or_path .*rl export"),
        (["fit", "--config", "tiny.yaml", "--data.task", "additon"], "did you mean addition"),
        (["fit", "--config", "tiny.yaml", "--model.model_name_or_path", "no/such"], "no/such.*give a directory"),
        (["fit", "--config", "tiny.yaml", "--data.task", "null"], "exactly one of task, path and dataset; got none"),
        (["fit", "--config", "tiny.yaml", "--record_every", "10"], "record_every films episodes"),
        (["record", "--config", "tiny.yaml", "--ckpt_path", "tiny.yaml"], "damaged|record films episodes"),
        (["predict", "--config", "tiny.yaml", "--output", "x.txt"], "must end in .csv or .jsonl"),
        (["export"], "required: --ckpt_path, --output"),
        (["export", "--ckpt_path", "none.ckpt", "--output", "x"], "none.ckpt is not a file"),
        (["export", "--ckpt", "x"], "required: --ckpt_path, --output"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence_and_writes_nothing(rl, arguments, message):
    code, out, err = rl(*arguments)
    assert code != 0
    assert len(err.strip().splitlines()) == 1, err
    assert re.search(message, err), err
    assert "Traceback" not in out + err
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]


SHORT = {**TINY, "max_position_embeddings": 64}
ROW = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3", "label": True}
HELD_OUT = {"eval_steps": 1, "eval_path": "rows.jsonl"}


@pytest.mark.parametrize(("model", "data", "fits", "is_refused"), [
    (lambda: DPO(model_config=SHORT), lambda: PreferenceDataModule(path="rows.jsonl", **HELD_OUT), True, False),
    (lambda: KTO(model_config=SHORT), lambda: PreferenceDataModule(path="rows.jsonl"), False, False),
    (lambda: DPO(model_config=SHORT, max_completion_length=64), lambda: PreferenceDataModule(path="rows.jsonl"), True,
     True),
    (lambda: DPO(model_config=SHORT, max_completion_length=63), lambda: PreferenceDataModule(path="rows.jsonl"), True,
     False),
    (lambda: SFT(model_config=SHORT), lambda: InstructionDataModule(path="rows.jsonl"), True, False),
    (lambda: SFT(model_config=SHORT), lambda: InstructionDataModule(path="rows.jsonl", **HELD_OUT), True, True),
    (lambda: SFT(model_config=SHORT), lambda: InstructionDataModule("addition"), True, True),
    (lambda: SFT(model_config=SHORT), lambda: InstructionDataModule(path="rows.jsonl"), False, True),
    (lambda: GRPO(model_config=SHORT), lambda: PromptDataModule("addition", n_eval=0), True, True),
    (lambda: GRPO(model_config=SHORT, max_completion_length=8), lambda: PromptDataModule("addition"), True, False),
])  # fmt: skip
def test_completions_that_leave_no_room_are_refused_where_they_are_written(model, data, fits, is_refused):
    expected = pytest.raises(UsageError, match=r"max_completion_length=\d+ leaves no room .* takes 64 tokens")
    with expected if is_refused else nullcontext():
        require_room(model(), data(), fits)


@pytest.mark.parametrize(("model", "data"), [
    ("SFT", "InstructionDataModule"), ("DPO", "PreferenceDataModule"), ("KTO", "PreferenceDataModule")
])  # fmt: skip
def test_short_models_are_trained_by_the_command_line(rl, model, data):
    answers = {"SFT": ["completion"], "DPO": ["chosen", "rejected"], "KTO": ["completion", "label"]}[model]
    row = {name: ROW[name] for name in answers}
    Path("rows.jsonl").write_text("".join(json.dumps({**row, "prompt": f"{i}+1="}) + "\n" for i in range(8)))
    code, _, err = rl("fit", "--model", model, "--model.model_config", json.dumps(SHORT), "--data", data,
                      "--data.path", "rows.jsonl", "--data.batch_size", "4", "--trainer.max_steps", "1",
                      "--trainer.accelerator", "cpu")  # fmt: skip
    assert code == 0, err


def test_weights_of_another_network_are_named_without_an_argument_of_control(rl, trained):
    checkpoint = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    lost = next(iter(checkpoint["state_dict"]))
    del checkpoint["state_dict"][lost]
    torch.save(checkpoint, "cut.ckpt")
    code, _, err = rl("validate", "--config", "tiny.yaml", "--ckpt_path", "cut.ckpt")
    assert code == 1
    assert "loading state_dict" in err and lost in err


@pytest.mark.long
def test_weights_with_adapters_are_evaluated_with_the_same_lora(rl, tmp_path):
    start = SFT(model_config=TINY)
    start.configure_model()
    start.export(tmp_path / "start")
    run = ["--config", "tiny.yaml", "--model.model_config", "null", "--model.model_name_or_path", "start"]
    lora = ["--model.lora", "{r: 2}"]
    assert rl("fit", *run, *lora, "--trainer.max_steps", "1")[0] == 0
    (last,) = tmp_path.glob("logs/*/version_0/checkpoints/last.ckpt")
    code, _, err = rl("validate", *run, "--ckpt_path", str(last))
    assert code == 1 and "lora=None, but the checkpoint's run trained adapters with lora={'r': 2}" in err
    code, out, err = rl("validate", *run, *lora, "--ckpt_path", str(last))
    assert code == 0 and "eval/loss" in out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.accumulate_grad_batches", "3"], "accumulate_grad_batches=3 does not divide batch_size=16"),
        (["--trainer.max_steps", "-1"], "needs an end of the run"),
    ],
)
def test_what_only_the_trainer_knows_gets_one_sentence_too(rl, arguments, message):
    code, _, err = rl("fit", "--config", "tiny.yaml", *arguments)
    assert code == 1
    assert len(err.strip().splitlines()) == 1, err
    assert message in err


def test_export_refuses_other_checkpoints_and_full_folders(rl, trained):
    whole = {"state_dict": {"w": torch.zeros(1)}, "global_step": 0, "pytorch-lightning_version": "2"}
    torch.save(whole, "other.ckpt")
    code, _, err = rl("export", "--ckpt_path", "other.ckpt", "--output", "x")
    assert code == 1
    assert "which is no language model" in err
    torch.save({**whole, "algorithm": "Mine", "hyper_parameters": {"a": 1}}, "mine.ckpt")
    code, _, err = rl("export", "--ckpt_path", "mine.ckpt", "--output", "x")
    assert code == 1
    assert "give its class with --model package.module.Mine" in err
    code, _, err = rl("export", "--ckpt_path", str(trained / "checkpoints" / "last.ckpt"), "--output", ".")
    assert code == 1
    assert "exists already" in err


def test_rows_that_are_left_out_are_reported_during_fit(rl, caplog):
    pairs = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no" * (1 + i % 3)} for i in range(8)]
    pairs += [{"prompt": "same?", "chosen": "a", "rejected": "a"}] * 2 + [
        {"prompt": "x" * 90, "chosen": "a", "rejected": "b"}
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = {**CONFIG, "model": {"class_path": "RewardModel", "init_args": {"model_config": TINY}},
              "data": {"class_path": "PreferenceDataModule", "init_args": {
                  "path": "pairs.jsonl", "batch_size": 4, "max_length": 64, "overlong": "drop"}}}  # fmt: skip
    Path("pairs.yaml").write_text(yaml.safe_dump(config))
    code, _, err = rl("fit", "--config", "pairs.yaml", "--trainer.max_steps", "1")
    assert code == 0, err
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert said == [
        "pairs.jsonl: 1 of 11 pairs left out, they are longer than 64 tokens",
        "pairs.jsonl: 2 of 11 pairs left out, they have chosen equal to rejected",
    ]
