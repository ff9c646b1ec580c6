"""``torch_compile``: the same run from compiled layers, one compilation for all of them and for texts of any length."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, GRPO, RLHFPPO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from tests.marks import quick
from tests.training import fit

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces as ever, and calls torch's own operators in place of generated code."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def first_letter(completions: list[str], **_: Any) -> list[float]:
    return [ord(text[0]) / 100 if text else 0.0 for text in completions]


def case(name: str, folder: Path, **settings: Any) -> tuple[Any, Any]:
    settings = {"model_config": SMALL, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 2,
                **settings}  # fmt: skip
    if name.startswith("sft"):
        more = {"sft": {}, "sft lora": {"lora": {"r": 2, "target_modules": "all-linear"}},
                "sft checkpointing": {"gradient_checkpointing": True}}[name]  # fmt: skip
        return SFT(**settings, **more), InstructionDataModule("addition", n_train=48, batch_size=8, eval_steps=0)
    if name == "reward model":
        return RewardModel(**settings), PreferenceDataModule("paths", n_train=32, batch_size=8, eval_steps=0)
    if name == "dpo":
        return DPO(**settings), PreferenceDataModule("paths", n_train=32, batch_size=8, eval_steps=0)
    prompts = {"n_train": 24, "batch_size": 16, "eval_steps": 0, "num_iterations": 2}
    settings |= {"max_completion_length": 5, "completions_steps": 0}
    if name == "grpo":  # answers of a random model are all wrong, which would leave a gradient of rounding alone
        rewarded = PromptDataModule("addition", num_generations=4, reward_funcs=[first_letter], **prompts)
        return GRPO(beta=0.1, **settings), rewarded
    judge = folder / "judge"
    if not judge.exists():
        model = RewardModel(model_config=SMALL)
        model.configure_model()
        model.export(judge)
    return RLHFPPO(reward_model_name_or_path=str(judge), **settings), PromptDataModule("addition", **prompts)


NAMES = ["sft", "sft lora", "sft checkpointing", "reward model", "dpo", "grpo", "rlhf"]


@pytest.mark.long
@pytest.mark.parametrize("name", quick(NAMES, "sft", "grpo"))
def test_the_run_is_the_same_and_resumes(name: str, tmp_path: Path, without_inductor: None) -> None:
    def state(ckpt: Path | None, steps: int, **settings: Any) -> tuple[dict[str, Any], Any]:
        module, data = case(name, tmp_path, **settings)
        trainer = fit(module, data, max_steps=steps, ckpt_path=ckpt)
        return module.state_dict(), trainer

    eager, _ = state(None, 6)
    whole, _ = state(None, 6, torch_compile=True)
    # One sees whether torch can compile; then with and without a gradient, a mask, and several rows.
    assert 2 <= counters["stats"]["unique_graphs"] <= 5
    assert eager.keys() == whole.keys()
    for key, value in eager.items():
        # Adam's first steps make 1e-3 of any rounding.
        torch.testing.assert_close(whole[key], value, atol=2e-3, rtol=0)
    _, trainer = state(None, 3, torch_compile=True)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    again, _ = state(tmp_path / "part.ckpt", 6, torch_compile=True)
    assert all(torch.equal(again[key], whole[key]) for key in whole)


@pytest.mark.slow
def test_generated_code_learns_the_same(tmp_path: Path) -> None:
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        trainer = fit(*case("sft", tmp_path, torch_compile=compiled), max_steps=6)
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_cannot_be_compiled_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand more")

    with pytest.raises(UsageError, match="gradient_checkpointing=selective"):
        fit(*case("sft", tmp_path, torch_compile=True, gradient_checkpointing="selective"), max_steps=1)
    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(UsageError, match=r"can't compile on cpu here \(InvalidCxxCompiler: No working C\+\+ .*found\)"):
        fit(*case("sft", tmp_path, torch_compile=True), max_steps=1)
