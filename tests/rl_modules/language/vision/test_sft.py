"""Supervised fine-tuning on images: loss and gradients are those of transformers' own forward pass."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from datamodules import InstructionDataModule
from rl_modules import SFT
from tests.rl_modules.language.test_sft import gradient
from tests.rl_modules.language.vision.models import FAMILIES, make, without_videos  # noqa: F401
from tests.training import fit

pytestmark = pytest.mark.usefixtures("without_videos")
SIZES = ((20, 28), (30, 12), (16, 16), (9, 40))


def pictures(folder, n=4):
    """Images of several sizes, as files."""
    rng = np.random.default_rng(0)
    for i, size in enumerate(SIZES[:n]):
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return [f"{i}.png" for i in range(n)]


def conversations(folder):
    """Conversations with no, one and several images, in one turn and in two."""
    a, b, c, d = pictures(folder)
    image = {"type": "image"}
    rows = [
        ([[image, "what?"], "a cat", [image, "and", image, "?"], "two"], [a, b, c]),
        ([["look", image], "yes it is"], [d]),
        ([["2+2"], "4"], []),
        ([[image], "ok"], [b]),
    ]
    path = folder / "talks.jsonl"
    with path.open("w") as file:
        for talk, images in rows:
            messages = [
                {"role": "assistant", "content": turn}
                if isinstance(turn, str)
                else {
                    "role": "user",
                    "content": [{"type": "text", "text": x} if isinstance(x, str) else x for x in turn],
                }
                for turn in talk
            ]
            file.write(json.dumps({"messages": messages, "images": images}) + "\n")
    return path


def expected(model, folder, path, counted):
    """Loss and gradients by transformers alone: the processor's own batch, labels where the answers are."""
    processor, network = AutoProcessor.from_pretrained(model), AutoModelForImageTextToText.from_pretrained(model)
    total, n = 0.0, 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        images = [Image.open(folder / name).convert("RGB") for name in row["images"]]
        messages = [
            {
                **m,
                "content": [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"],
            }
            for m in row["messages"]
        ]
        text = processor.apply_chat_template(messages, tokenize=False)
        batch = processor(text=[text], images=[images] if images else None, return_tensors="pt")
        ids, labels = batch["input_ids"][0].tolist(), []
        opening, end = processor.tokenizer.convert_tokens_to_ids("<|assistant|>"), 1
        inside = False
        for token in ids:
            labels.append(token if inside else -100)
            inside = (inside or token == opening) and token != end
        log_prob = network.train()(**batch).logits.log_softmax(-1)[0, :-1]
        for t, label in enumerate(labels[1:]):
            if label != -100:
                total, n = total - log_prob[t, label], n + 1
    assert n == counted
    (total / n).backward()
    return float((total / n).detach()), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("n_micro", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family, n_micro, tmp_path):
    model = make(family, tmp_path / "model")
    data = InstructionDataModule(path=str(conversations(tmp_path)), batch_size=4, eval_steps=0, packing=True)
    module = SFT(str(model), logging_steps=1)
    found = gradient(module, data, accumulate_grad_batches=n_micro)
    loss, gradients = expected(model, tmp_path, tmp_path / "talks.jsonl", int(data.train_table.counted.sum()))
    assert module.regular_metrics["train/loss"] == pytest.approx(loss, rel=1e-6)
    assert {name.removeprefix("model.") for name, g in found.items() if g.any()} == {
        name for name, g in gradients.items() if g.any()
    }
    for name, own in gradients.items():
        torch.testing.assert_close(found[f"model.{name}"], own, atol=1e-6, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_marks_of_the_template_select_the_same_tokens(family, tmp_path):
    model, path = make(family, tmp_path / "model"), str(conversations(tmp_path))
    tables = []
    for marked in (False, True):
        data = InstructionDataModule(path=path, batch_size=4, eval_steps=0)
        module = SFT(str(model))
        template = module.tokenizer.chat_template
        if marked:
            turn, end = "{% if m.content is string %}", "{% if m.role == 'assistant' %}<eos>{% endif %}"
            body = template[template.index(turn) : template.index(end)]
            own = "{% generation %}{{ m.content[0].text }}<eos>{% endgeneration %}"
            both = "{% if m.role == 'assistant' %}" + own + "{% else %}" + body + "{% endif %}"
            module.tokenizer.chat_template = template.replace(body + end, both)
        fit(module, data, max_steps=0)
        tables.append(data.train_table.batch(torch.arange(4), 0))
    assert all(torch.equal(one, other) for one, other in zip(tables[0].values(), tables[1].values(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "still"),
    [
        ({}, ()),
        ({"freeze": ["vision"]}, ("visual.patch_embed", "visual.blocks")),
        ({"freeze": ["vision", "projector"]}, ("visual.patch_embed", "visual.blocks", "visual.merger")),
        ({"lora": {"r": 2, "target_modules": "all-linear"}}, ("visual.patch_embed", "visual.blocks")),
    ],
)
def test_frozen_parts_do_not_change(arguments, still, tmp_path):
    model = make("qwen2_5_vl", tmp_path / "model")
    data = InstructionDataModule(path=str(conversations(tmp_path)), batch_size=4, eval_steps=0)
    changed = [name for name, g in gradient(SFT(str(model), **arguments), data).items() if g.any()]
    for part in ("visual.patch_embed", "visual.blocks", "visual.merger", "language_model"):
        moves = any(part in name for name in changed)
        assert moves == (part not in still and not (part == "visual.patch_embed" and "lora" in arguments))


@pytest.mark.long
def test_an_export_has_the_processor_and_gives_the_same_numbers(tmp_path):
    model = make("gemma3", tmp_path / "model")
    data = InstructionDataModule(path=str(conversations(tmp_path)), batch_size=4, eval_steps=0)
    module = SFT(str(model), lora={"r": 2, "target_modules": "all-linear"})
    fit(module, data, max_steps=1)
    batch = data.batch(data.train_table, data.train_records, torch.arange(4), False)
    own = module.eval().demonstrated(batch).log_prob
    folder = module.export(tmp_path / "export")
    again = SFT(str(folder))
    other = InstructionDataModule(path=str(tmp_path / "talks.jsonl"), batch_size=4, eval_steps=0)
    fit(again, other, max_steps=0)
    theirs = again.eval().demonstrated(other.batch(other.train_table, other.train_records, torch.arange(4), False))
    torch.testing.assert_close(theirs.log_prob, own, atol=1e-5, rtol=1e-5)
    assert AutoProcessor.from_pretrained(folder).chat_template
