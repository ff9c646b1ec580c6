"""Every curve of the language algorithms is defined in docs/metrics_language.md or docs/metrics_policies.md."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, GRPO, KTO, RLHFPPO, RLOO, SFT, Distillation, RewardModel
from tests.rl_modules.language.test_run_state import TINY, Curves, fit

DOCS = Path(__file__).parents[3] / "docs"
LANGUAGE = "".join((DOCS / f"metrics_{name}.md").read_text("utf-8") for name in ("language", "policies"))
FIRST_COLUMN = [line.split("|")[1] for line in LANGUAGE.splitlines() if line.startswith("| `")]
DEFINED = [name for cell in FIRST_COLUMN for name in re.findall(r"`([^`]+)`", cell)]
HELD_OUT = {"n_eval": 4, "eval_steps": 2}
PROMPTS = {"batch_size": 8, "num_generations": 4, "n_train": 24, "reward_funcs": ["accuracy"], **HELD_OUT}
PAIRS = {"batch_size": 4, "n_train": 16, **HELD_OUT}
POLICY = {"model_config": TINY, "max_completion_length": 4, "logging_steps": 1, "completions_steps": 0}
RUNS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "SFT": lambda: (SFT(model_config=TINY, max_completion_length=4, logging_steps=1),
                    InstructionDataModule("addition", batch_size=8, n_train=24, **HELD_OUT)),
    "RewardModel": lambda: (RewardModel(model_config=TINY, logging_steps=1), PreferenceDataModule("paths", **PAIRS)),
    "DPO": lambda: (DPO(model_config=TINY, rpo_alpha=1.0, logging_steps=1), PreferenceDataModule("paths", **PAIRS)),
    "KTO": lambda: (KTO(model_config=TINY, logging_steps=1), PreferenceDataModule("paths", **PAIRS)),
    "RLHFPPO": lambda: (RLHFPPO(**POLICY, beta=0.1, target_kl=1.0, ptx_coef=0.5),
                        PromptDataModule("addition", **PROMPTS, ptx_batch_size=4)),
    "GRPO": lambda: (GRPO(**POLICY, beta=0.1, importance_sampling_correction="sequence_mask", top_p=0.9),
                     PromptDataModule("addition", **PROMPTS, dynamic_sampling=1, num_iterations=2)),
    "GRPO, CISPO": lambda: (GRPO(**POLICY, loss_type="cispo", epsilon_high=5.0),
                            PromptDataModule("addition", **PROMPTS)),
    "Distillation": lambda: (Distillation(**POLICY, beta=0.5, lmbda=0.5, lora={"r": 2, "target_modules": "all-linear"}),
                             PromptDataModule("addition", **PROMPTS, ptx_batch_size=4)),
    "Distillation, demonstrations": lambda: (
        Distillation(**POLICY, lora={"r": 2, "target_modules": "all-linear"}),
        InstructionDataModule("addition", batch_size=8, n_train=24, **HELD_OUT)),
    "Distillation, policy gradient": lambda: (
        Distillation(**POLICY, distillation_objective="policy_gradient", lora={"r": 2, "target_modules": "all-linear"}),
        PromptDataModule("addition", **PROMPTS)),
    "RLOO": lambda: (RLOO(**POLICY, beta=0.1), PromptDataModule("addition", **PROMPTS)),
}  # fmt: skip


def is_defined(name: str) -> bool:
    """Whether the glossary has the name, or the one that an evaluation repeats, or a pattern with ``<function>``."""
    patterns = [re.escape(entry).replace("<function>", "[^/]+") for entry in DEFINED]
    candidates = [name, re.sub("^eval/", "train/", name)]
    return any(re.fullmatch(pattern, candidate) for pattern in patterns for candidate in candidates)


def test_names_are_whole() -> None:
    assert len(DEFINED) > 60
    assert [name for name in DEFINED if not re.fullmatch(r"(train|eval|time|curve)/[\w/<>@.]+|completions", name)] == []


@pytest.mark.long
@pytest.mark.parametrize("algorithm", RUNS)
def test_every_language_curve_is_defined(algorithm: str) -> None:
    model, data = RUNS[algorithm]()
    curves = Curves()
    fit(model, data, max_steps=2, logger=curves)
    names = {name for _, point in curves.points for name in point} - {"epoch"}
    assert {"train/learning_rate", "train/grad_norm", "train/num_tokens"} <= names
    assert sorted(name for name in names if not is_defined(name)) == []
