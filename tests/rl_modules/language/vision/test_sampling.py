"""Completions after images: log-probabilities are those of a plain forward pass over prompt and completion."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_modules.language.sampling import sample
from rl_modules.language.vision import ImageReader
from tests.rl_modules.language.vision.models import FAMILIES, make, without_videos  # noqa: F401

pytestmark = pytest.mark.usefixtures("without_videos")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_a_plain_forward_pass(family, tmp_path):
    folder = make(family, tmp_path)
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    reader, rng = ImageReader(processor), np.random.default_rng(1)
    talks = []
    for sizes, text in (([(20, 28)], "what?"), ([(9, 40), (16, 16)], "a longer question"), ([(20, 20)], "what?")):
        images = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
        message = {"role": "user", "content": [*({"type": "image"} for _ in images), {"type": "text", "text": text}]}
        written = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        batch = processor(text=[written], images=[images], return_tensors="pt")
        talks.append((batch, reader.read(images)[0]))
    ids = [batch["input_ids"][0].tolist() for batch, _ in talks]
    order = [0, 1, 2, 0]  # the last prompt is the first again, the third differs from it in its image alone
    found = sample(
        model,
        [ids[i] for i in order],
        images=[talks[i][1] for i in order],
        num_generations=2,
        max_completion_length=9,
        eos_token_id=1,
        pad_token_id=0,
        seeds=range(8),
        max_rows_in_flight=3,
    )
    word = model.config.image_token_id
    for row in range(8):
        batch = dict(talks[order[row // 2]][0])
        tokens = found.tokens[row, : found.length[row]]
        read = torch.where(tokens == word, 0, tokens)[None]
        n = batch["input_ids"].shape[1]
        for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in batch:
                further = read if name == "input_ids" else torch.full_like(read, name == "attention_mask")
                batch[name] = torch.cat([batch[name], further], 1)
        with torch.no_grad():
            plain = model.eval()(**batch).logits[0, n - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(
            found.log_prob[row, : len(tokens)], plain.gather(1, tokens[:, None])[:, 0], atol=2e-5, rtol=1e-5
        )
    first, third = found.tokens[0], found.tokens[4]
    assert len(set(map(tuple, found.tokens.tolist()))) > 4 and not torch.equal(first, third)
