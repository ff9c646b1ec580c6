"""How often the host waits for the device in one optimizer step, on a stand-in for a GPU.

Counted is everything between two steps: the loader, the forward and backward passes (transformers' own code among
them), Lightning's loop, clipping, the optimizer, curves. What waits is a number, a shape or a row of booleans that the
host reads, and a copy that it waits for.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import rl_modules
from datamodules import PreferenceDataModule, PromptDataModule, ReplayDataModule, RolloutDataModule
from rl_modules import DPO, GRPO, KTO
from tests.fake_device import FakeStrategy, fake_device
from tests.marks import PRESENT_TRANSFORMERS, quick
from tests.rl_modules.language import test_device
from tests.rl_modules.language.test_device import TINY, reward
from tests.training import fit


class PerStep(L.Callback):
    """The waits of each optimizer step, and of the whole run by their places."""

    def __init__(self, counter: Counter[str]) -> None:
        self.counter, self.before, self.seen = counter, Counter[str](), 0
        self.steps: list[Counter[str]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != self.seen:
            self.seen = trainer.global_step
            self.steps.append(self.counter - self.before)
            self.before = Counter(self.counter)


LANGUAGE: dict[str, Any] = {"model_config": TINY, "lr_scheduler_type": "constant", "logging_steps": 100}


def language(name: str, judge: str) -> tuple[Any, Any]:
    if name in ("dpo", "kto"):
        module = (DPO if name == "dpo" else KTO)(**LANGUAGE)
        return module, PreferenceDataModule("paths", n_train=24, batch_size=8, eval_steps=0)
    if name == "grpo":
        prompts = PromptDataModule("addition", num_generations=4, num_iterations=4, n_train=24, batch_size=16,
                                   eval_steps=0, reward_funcs=[reward])  # fmt: skip
        return GRPO(**LANGUAGE, max_completion_length=5, completions_steps=0), prompts
    return test_device.case(name, judge)


#: Waits of a step of one micro-batch. Transformers waits once in a pass whose rows aren't packed, to see whether they
#: are; pairs are laid out by their lengths; references are kept on the host; shared prompts are sorted there.
STEP = {"sft": 1, "reward model": 1, "dpo": 4, "kto": 4, "grpo": 3, "rlhf": 2}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = rl_modules.RewardModel(model_config=TINY)
    model.configure_model()
    return model.export(tmp_path_factory.mktemp("judge"))


@pytest.mark.long
@PRESENT_TRANSFORMERS
@pytest.mark.parametrize("name", quick(STEP, "dpo", "grpo"))
def test_a_step_of_a_language_model(name: str, judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW as it is by default, clipping, transformers' default attention; generations are beside the steps."""
    monkeypatch.setattr(test_device, "MODEL", LANGUAGE)
    monkeypatch.setattr(test_device, "WRITTEN", {**LANGUAGE, "max_completion_length": 5, "completions_steps": 0})
    with fake_device() as mode:
        module, data = language(name, str(judge))
        steps = PerStep(mode.waits)
        trainer = fit(module, data, max_steps=5, accelerator="auto", strategy=FakeStrategy(), callbacks=[steps],
                      limit_val_batches=0)  # fmt: skip
    assert trainer.optimizers[0].param_groups[0]["fused"], "AdamW for each weight would read its count of steps"
    # Of RLHF and GRPO every second or fourth step begins with a generation.
    quiet = [step for step in steps.steps[1:] if not any("decode" in place for place in step)]
    assert len(quiet) >= 2 and all(sum(step.values()) <= STEP[name] for step in quiet), steps.steps[1:]


@pytest.mark.parametrize("name", quick(["PPO", "A2C", "DQN", "SAC", "TD3", "TQC"], "PPO", "SAC"))
def test_an_update_of_control_never_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.rl_modules.test_recorded_on_device import OfTheHost

    class Updates(PerStep):
        def on_train_batch_start(self, *args: Any) -> None:
            self.before = Counter(self.counter)

    monkeypatch.setattr(torch, "Generator", OfTheHost)
    with fake_device() as mode:
        data: Any
        if name in ("PPO", "A2C"):
            data = RolloutDataModule("CartPole-v1", n_envs=4, n_steps=8, total_timesteps=96, eval_freq=0)
        else:
            data = ReplayDataModule("CartPole-v1" if name == "DQN" else "Pendulum-v1", learning_starts=20, batch_size=8,
                                    buffer_size=500, total_timesteps=40, eval_freq=0)  # fmt: skip
        updates = Updates(mode.waits)
        fit(getattr(rl_modules, name)(net_arch=[16]), data, accelerator="auto", strategy=FakeStrategy(),
            callbacks=[updates])  # fmt: skip
    assert len(updates.steps) >= 3 and not any(updates.steps), updates.steps
