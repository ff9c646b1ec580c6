"""Under ``bf16-mixed`` each weight is cast once in a step, and the output layer once more for all of its tiles."""

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, GRPO, SFT, RewardModel
from rl_modules.fast import is_fast
from rl_modules.language import scoring
from rl_modules.language.fast import tiled_head
from rl_modules.language.sampling.native import sample
from tests.rl_modules.language.test_device import TINY, reward
from tests.training import fit

MODEL: dict[str, Any] = {"model_config": {**TINY, "num_hidden_layers": 2}, "logging_steps": 100}


class Casts(TorchDispatchMode):
    """Counts by name how often weights are copied to another dtype."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.names = {weight.data_ptr(): name for name, weight in module.named_parameters()}
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_to_copy" and kwargs.get("dtype") not in (None, args[0].dtype):
            self.count.update([self.names[args[0].data_ptr()]] if args[0].data_ptr() in self.names else [])
        return func(*args, **kwargs)


class LastStep(L.Callback):
    """The casts of the last micro-batch and its optimizer step."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.mode = Casts(pl_module)
        self.mode.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.mode.__exit__(None, None, None)


def case(name: str) -> tuple[Any, Any]:
    if name == "sft":
        return SFT(**MODEL), InstructionDataModule("addition", n_train=32, batch_size=8, eval_steps=0)
    if name == "grpo":
        data = PromptDataModule("addition", num_generations=4, num_iterations=2, n_train=24, batch_size=16,
                                eval_steps=0, reward_funcs=[reward])  # fmt: skip
        return GRPO(**MODEL, max_completion_length=5, completions_steps=0), data
    data = PreferenceDataModule("paths", n_train=16, batch_size=8, eval_steps=0)
    return (RewardModel if name == "reward model" else DPO)(**MODEL), data


@pytest.mark.parametrize("name", ["sft", "reward model", "dpo", "grpo"])
@pytest.mark.parametrize("tiled", [False, True])
def test_each_weight_is_cast_once(name: str, tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiled:
        monkeypatch.setattr(scoring, "TILED_ABOVE", {"cpu": 1})
        monkeypatch.setattr(tiled_head, "TILE", {"cpu": 600})
    last = LastStep()
    fit(*case(name), max_steps=6, precision="bf16-mixed", callbacks=[last], limit_val_batches=0)
    head = last.mode.count.pop("model.model.embed_tokens.weight", 0)
    passes = 2 if name == "grpo" and is_fast() else 1  # prompts that rows share, then what was written
    assert last.mode.count and max(last.mode.count.values()) == passes
    # Tiles have a cast of their own in each pass, forward and backward.
    assert head <= passes * ({"sft": 2, "grpo": 3}.get(name, 1) if tiled else 1)


def test_sampling_casts_each_weight_once() -> None:
    module = GRPO(**MODEL)
    module.configure_model()
    asked: Any = {"num_generations": 2, "max_completion_length": 6, "eos_token_id": 1, "pad_token_id": 0,
                  "seeds": [1, 2]}  # fmt: skip
    model = module.model.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as Lightning does
        expected = sample(model, [[5, 6, 7]], **asked)
        with Casts(model) as casts:
            written = sample(model, [[5, 6, 7]], **asked)
        assert set(casts.count.values()) == {1} and written.tokens.equal(expected.tokens)
        # Without gradient, and so not kept for a pass that has one.
        loss = model(input_ids=torch.tensor([[5, 6, 7]])).logits.float().logsumexp(-1).sum()
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
