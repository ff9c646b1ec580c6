"""DPO and KTO on prompts with images: the gradient is that of transformers' own forward passes."""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from datamodules import PreferenceDataModule
from rl_modules import DPO, KTO
from tests.rl_modules.language.test_sft import gradient
from tests.rl_modules.language.vision.models import make, without_videos  # noqa: F401
from tests.rl_modules.language.vision.test_sft import pictures
from tests.training import fit

pytestmark = [pytest.mark.usefixtures("without_videos"), pytest.mark.long]


def preferences(folder):
    a, b, c, _ = pictures(folder)
    rows = [
        {"prompt": "what?", "chosen": "a cat", "rejected": "no", "images": [a]},
        {"prompt": "<image> or <image>", "chosen": "first", "rejected": "the second", "images": [b, c]},
        {"prompt": "2+2", "chosen": "4", "rejected": "22", "images": []},
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows, PreferenceDataModule(path=str(folder / "pairs.jsonl"), batch_size=3, eval_steps=0, n_eval=0)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
def test_the_gradient_is_that_of_transformers(family, tmp_path):
    folder = make(family, tmp_path / "model")
    rows, data = preferences(tmp_path)
    found = gradient(DPO(str(folder), beta=0.5, logging_steps=1), data)
    processor, network = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    total = 0.0
    for row in rows:
        images = [Image.open(tmp_path / name).convert("RGB") for name in row["images"]]
        text = [{"type": "text", "text": row["prompt"]}]
        parts = [*({"type": "image"} for _ in images), *text]
        if "<image>" in row["prompt"]:
            parts = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
        talk = processor.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        for side, sign in (("chosen", 1), ("rejected", -1)):
            written = row[side] + "<eos>"
            batch = processor(text=[talk + written], images=[images] if images else None, return_tensors="pt")
            n = len(processor.tokenizer(written, add_special_tokens=False).input_ids)
            log_prob = network.train()(**batch).logits[0, -n - 1 : -1].log_softmax(-1)
            total = total + sign * log_prob.gather(1, batch["input_ids"][0, -n:, None]).sum()
    (-0.5 * total / 2 / 3).backward()  # the policy is its reference: the sigmoid is a half
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[f"model.{name}"], parameter.grad, atol=2e-6, rtol=1e-4)


def test_kto_trains_on_images(tmp_path):
    folder, (_, data) = make("llava", tmp_path / "model"), preferences(tmp_path)
    module = KTO(str(folder), logging_steps=1)
    fit(module, data, max_steps=2)
    assert module.regular_metrics["train/loss"] == pytest.approx(0.5, abs=0.05)
