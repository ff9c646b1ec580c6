"""GRPO and RLOO on prompts with images: ratios are 1 before the first update, and a run resumes inside a generation."""

import json

import pytest

from datamodules import PromptDataModule
from rl_modules import GRPO, RLOO
from tests.rl_modules.language.vision.models import FAMILIES, make, without_videos  # noqa: F401
from tests.rl_modules.language.vision.test_sft import pictures
from tests.training import assert_equal_checkpoints, fit

pytestmark = [pytest.mark.usefixtures("without_videos"), pytest.mark.long]


def variety(prompts, completions, completion_ids, **columns):
    """Different tokens of a completion, as a share of 9; needs no image."""
    assert all(isinstance(image, str) for images in columns["images"] for image in images)
    return [len(set(ids)) / 9 for ids in completion_ids]


def prompts(folder, **arguments):
    a, b, c, d = pictures(folder)
    rows = [
        {"prompt": "what?", "image": a},
        {"prompt": [{"role": "user", "content": "<image> and <image>?"}], "images": [b, c]},
        {"prompt": "only words", "images": []},
        {"prompt": "what?", "images": [d]},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {"batch_size": 8, "num_generations": 4, "reward_funcs": variety, "eval_steps": 0}
    return PromptDataModule(path=str(folder / "prompts.jsonl"), **{**usual, **arguments})


class Watched(GRPO):
    """Compares the sampler's log-probabilities with those of the forward pass that trains."""

    def training_step(self, batch, batch_idx):
        own = self.log_probs(batch)[0].detach()
        self.worst = max(getattr(self, "worst", 0.0), float((own - batch["log_prob"])[batch["mask"]].abs().max()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_ratio_is_1_and_the_kl_to_the_start_is_0(family, tmp_path):
    module = Watched(str(make(family, tmp_path / "model")), max_completion_length=9, logging_steps=1, beta=0.1)
    data = prompts(tmp_path, batch_size=16)
    fit(module, data, max_steps=1, accumulate_grad_batches=2)
    assert module.worst < 3e-5
    assert module.regular_metrics["train/kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("algorithm", [GRPO, RLOO])
def test_resumes_inside_a_generation(algorithm, tmp_path):
    folder = make("qwen2_5_vl", tmp_path / "model")

    def run(steps, ckpt=None):
        module = algorithm(
            str(folder), max_completion_length=6, learning_rate=1e-2, lr_scheduler_type="constant", beta=0.05
        )
        data = prompts(tmp_path, steps_per_generation=2, num_iterations=2, dynamic_sampling=1)
        return fit(module, data, ckpt, max_steps=steps)

    run(6).save_checkpoint(tmp_path / "whole.ckpt")
    part = run(3)
    assert part.datamodule._images is not None
    part.save_checkpoint(tmp_path / "part.ckpt")
    run(6, tmp_path / "part.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
    # The checkpoint has the processor, too.
    loaded = algorithm.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    assert loaded.reads_images and loaded.image_reader.placeholder == "<|image_pad|>"
