"""Folders of adapters: exported for peft, read as the start of a run, pushed to the Hub."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from datamodules import InstructionDataModule
from recipes.cli.command import main
from recipes.language import export
from rl_modules import SFT
from rl_modules.common.errors import UsageError
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def data():
    return InstructionDataModule("addition", batch_size=8, n_train=16, eval_steps=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base, a checkpoint of adapters on it, and the folder of the exported adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    base = SFT(model_config=TINY)
    fit(base, data(), max_steps=1)
    base.export(folder / "base")
    module = SFT(str(folder / "base"), lora={"r": 2, "target_modules": "all-linear"}, learning_rate=1e-2)
    fit(module, data(), max_steps=3).save_checkpoint(folder / "run.ckpt")
    export(str(folder / "run.ckpt"), str(folder / "lora"), adapters=True)
    return folder, module.eval()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS).logits


def test_peft_loads_the_exported_adapters(trained):
    folder, module = trained
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    theirs = PeftModel.from_pretrained(base, folder / "lora")
    torch.testing.assert_close(logits(theirs), logits(module.model), atol=1e-6, rtol=0)
    config = json.loads((folder / "lora/adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == folder / "base"
    assert not list(folder.glob("lora/model*")) and (folder / "lora/tokenizer.json").is_file()
    card = (folder / "lora/README.md").read_text()
    assert card.startswith("---\n") and "trained by SFT on addition" in card and "AutoPeftModelForCausalLM" in card
    assert "The licence is not stated" in card and "learning_rate: 0.01" in card


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["all weights", "new adapters"])
def test_a_run_starts_from_a_folder_of_adapters(trained, lora, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    folder, module = trained
    further = SFT(str(folder / "lora"), lora=lora)
    further.configure_model()
    torch.testing.assert_close(logits(further.model), logits(module.model), atol=1e-5, rtol=0)
    assert "LoRA adapters are merged into" in caplog.text and "all weights of the result are trained" in caplog.text
    fit(further, data(), max_steps=1).save_checkpoint(tmp_path / "further.ckpt")
    again = SFT.load_from_checkpoint(tmp_path / "further.ckpt", weights_only=True)
    torch.testing.assert_close(logits(again.model), logits(further.model))


def test_updates_below_16_bits_survive_the_merge(trained, tmp_path, monkeypatch):
    """A change of a thousandth of a weight is lost where bfloat16 weights are merged, and is in what a run reads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    folder, _ = trained
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "half")
    for file in folder.glob("base/*token*"):
        (tmp_path / "half" / file.name).write_bytes(file.read_bytes())
    how = {"lora": {"r": 2, "target_modules": ["q_proj"]}, "torch_dtype": "bfloat16", "learning_rate": 0.0}
    module = SFT(str(tmp_path / "half"), **how)
    module.configure_model()
    with torch.no_grad():
        layer = module.model.base_model.model.model.layers[0].self_attn.q_proj
        layer.lora_B.default.weight.normal_(std=1e-5)
        change, weight = layer.get_delta_weight("default").float(), layer.base_layer.weight
    assert weight.dtype == torch.bfloat16 and (weight + change.bfloat16() == weight).float().mean() > 0.5
    fit(module, data(), max_steps=1).save_checkpoint(tmp_path / "run.ckpt")
    export(str(tmp_path / "run.ckpt"), str(tmp_path / "lora"), adapters=True)
    export(str(tmp_path / "run.ckpt"), str(tmp_path / "merged"))
    read = SFT(str(tmp_path / "lora"))
    read.configure_model()
    found = {"read": read.model.state_dict(), "merged": load_file(tmp_path / "merged/model.safetensors")}
    for state in found.values():
        own = state["model.layers.0.self_attn.q_proj.weight"]
        assert own.dtype == torch.float32
        torch.testing.assert_close(own - weight.float(), change, atol=1e-7, rtol=0)


def test_what_has_no_adapters_is_refused(tmp_path):
    module = SFT(model_config=TINY, lora={"r": 2})
    fit(module, data(), max_steps=1).save_checkpoint(tmp_path / "new.ckpt")
    with pytest.raises(UsageError, match="--adapters: the checkpoint's run began with new weights"):
        export(str(tmp_path / "new.ckpt"), str(tmp_path / "out"), adapters=True)
    (tmp_path / "other").mkdir()
    given = {"peft_type": "LORA", "base_model_name_or_path": "x", "megatron_config": {}, "megatron_core": "os"}
    (tmp_path / "other/adapter_config.json").write_text(json.dumps(given))
    with pytest.raises(UsageError, match="can't be read as adapters"):
        SFT(str(tmp_path / "other"))
    (tmp_path / "other/adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="has adapters of kind 'LORA'"):
        SFT(str(tmp_path / "other"))


def test_an_export_is_uploaded(trained, tmp_path, monkeypatch, capsys):
    folder, _ = trained
    seen = {}
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda self, name, **how: f"https://hub/{name}")
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda self, **how: seen.update(how))
    words = ["--ckpt_path", str(folder / "run.ckpt"), "--output", str(tmp_path / "out"), "--push_to_hub", "me/sums"]
    main(["export", *words])
    assert seen == {"repo_id": "me/sums", "folder_path": tmp_path / "out"}
    shown = capsys.readouterr().out
    assert "uploaded to https://hub/me/sums" in shown and f"from_pretrained('{tmp_path / 'out'}')" in shown
