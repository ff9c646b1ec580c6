"""The configs for models of the hub, with tiny random models of the same architectures: they run and resume exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

import datamodules
import rl_modules
from recipes import configs
from rl_modules.language.models import export_model, make_config, make_model
from rl_modules.language.tokenizer import load_tokenizer
from tests.training import assert_equal_checkpoints, fit

QWEN = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
PYTHIA = {"model_type": "gpt_neox", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "max_position_embeddings": 512}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
ARCHITECTURES = {"grpo/gsm8k.yaml": QWEN, "grpo/gsm8k_dapo.yaml": QWEN, "r1/zero.yaml": QWEN, "sft/gsm8k.yaml": QWEN,
                 "sft/tldr.yaml": PYTHIA, "reward_model/tldr.yaml": PYTHIA, "rlhf_ppo/tldr.yaml": PYTHIA}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for what the configs name: models, judges, and the datasets with their splits and columns."""
    root = tmp_path_factory.mktemp("hub")
    tokenizer = load_tokenizer(None)
    tokenizer.chat_template = TEMPLATE
    for name, fields in (("qwen2", QWEN), ("gpt_neox", PYTHIA)):
        for head in ("causal", "score"):
            model = make_model(make_config(None, fields, tokenizer, dropout=True), head=head)
            export_model(model, tokenizer, root / f"{name}-{head}")
    for split in ("train", "test", "validation"):
        rows = [{"question": f"{i}+{i}?", "answer": f"think #### {2 * i}", "prompt": f"{i}+{i}=",
                 "completion": f" {2 * i}", "chosen": f" {2 * i}", "rejected": " x"} for i in range(24)]  # fmt: skip
        for data, names in (("gsm8k", ("question", "answer")), ("tldr", ("prompt", "completion")),
                            ("tldr-preference", ("prompt", "chosen", "rejected"))):  # fmt: skip
            (root / data).mkdir(exist_ok=True)
            lines = [json.dumps({name: row[name] for name in names}) + "\n" for row in rows]
            (root / data / f"{split}.jsonl").write_text("".join(lines))
    return root


def run(name: str, hub: Path, ckpt_path: Path | None = None, **trainer: Any) -> Any:
    """A shipped config with fewer and shorter rows; precision, checkpointing, adapters and losses are its own."""
    config = yaml.safe_load((configs.CONFIGS / name).read_text(encoding="utf-8"))
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    kind = ARCHITECTURES[name]["model_type"]
    model |= {"model_name_or_path": str(hub / f"{kind}-causal"), "logging_steps": 1, "learning_rate": 1e-3}
    if "max_completion_length" in model:
        model["max_completion_length"] = 6
    if "reward_model_name_or_path" in model:
        model["reward_model_name_or_path"] = str(hub / f"{kind}-score")
    if "dataset" in data:
        data |= {"dataset": str(hub / data["dataset"].split("/")[1]), "dataset_config": None}
    data |= {"batch_size": 8, "n_train": 16, "n_eval": 4, "eval_steps": 2, "eval_batch_size": 4}
    if "num_generations" in data:
        data["num_generations"] = min(4, data["num_generations"])
    # Random weights of this size solve nothing: what they write earns rewards that differ.
    if config["model"]["class_path"] == "GRPO":
        others = data["reward_funcs"][1:] if "reward_funcs" in data else ["think_answer_format"]
        data["reward_funcs"] = [f"{__name__}:some_reward", *others]
        data["correct_threshold"] = 2.0
    module = getattr(rl_modules, config["model"]["class_path"])(**model)
    source = getattr(datamodules, config["data"]["class_path"])(**data)
    return fit(module, source, ckpt_path=ckpt_path, max_steps=3, accumulate_grad_batches=2,
               precision=config["trainer"]["precision"], **trainer)  # fmt: skip


def some_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [sum(map(ord, str(text))) % 5 / 4 for text in completions]


def test_every_config_with_a_model_of_the_hub_is_here() -> None:
    found = {name for name in configs.names() if "precision:" in (configs.CONFIGS / name).read_text(encoding="utf-8")}
    assert found == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_for_gpus_runs_three_steps_and_resumes_exactly(name: str, hub: Path, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    whole = run(name, hub, callbacks=[saving], enable_checkpointing=True)
    whole.save_checkpoint(tmp_path / "whole.ckpt")
    resumed = run(name, hub, tmp_path / "step=2.ckpt")
    assert whole.global_step == resumed.global_step == 3
    resumed.save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
