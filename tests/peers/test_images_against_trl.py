"""SFT on images: loss and gradient norm of a step are those of TRL's trainer on the same batch."""

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor

from datamodules import InstructionDataModule
from rl_modules import SFT
from tests.rl_modules.language.vision.models import make, without_videos  # noqa: F401
from tests.training import fit

trl = pytest.importorskip("trl", reason="needs the test extra")


@pytest.mark.long
@pytest.mark.usefixtures("without_videos")
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_loss_and_gradient_norm_are_trls(family, tmp_path):
    folder, rng = make(family, tmp_path / "model"), np.random.default_rng(0)
    shown = [Image.fromarray(rng.integers(0, 255, (*s, 3), dtype=np.uint8)) for s in ((20, 28), (30, 12), (16, 16))]
    rows = [
        {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]}
        for question, answer in (("what?", "a cat"), ("and these", "two"))
    ]
    images = [[shown[0]], shown[1:]]
    data = Dataset.from_list([{**row, "images": own} for row, own in zip(rows, images, strict=True)])
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=2,
        max_steps=1,
        learning_rate=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        completion_only_loss=True,
    )
    processor = AutoProcessor.from_pretrained(folder)
    trainer = trl.SFTTrainer(str(folder), args=arguments, train_dataset=data, processing_class=processor)
    trainer.train()
    theirs = next(point for point in trainer.state.log_history if "loss" in point)
    module = SFT(str(folder), logging_steps=1, learning_rate=0.0, max_grad_norm=None)
    fit(module, InstructionDataModule(dataset=data, batch_size=2, eval_steps=0), max_steps=1)
    assert module.regular_metrics["train/loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert module.regular_metrics["train/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
