"""``optim``: Muon and AdamW beside torch's own, each over its weights; bitsandbytes' by their names."""

import importlib.util
from typing import Any

import lightning as L
import pytest
import torch

from datamodules import InstructionDataModule
from rl_modules import SFT
from rl_modules.common.errors import UsageError
from tests.training import assert_resumes_exactly, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
HIDDEN = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
LORA = {"r": 2, "init_lora_weights": False, "target_modules": "all-linear"}


def module(**arguments: Any) -> SFT:
    defaults = {"optim": "muon", "learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "constant"}
    return SFT(model_config=TINY, **{**defaults, **arguments})


def data() -> InstructionDataModule:
    return InstructionDataModule("addition", batch_size=8, n_train=16, eval_steps=0)


class Beside(L.Callback):
    """Takes the run's gradients and rates, and steps torch's two optimizers over copies of the weights."""

    def __init__(self, of_muon: int) -> None:
        self.of_muon, self.copies, self.steps = of_muon, dict[str, Any](), list[Any]()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        if not self.copies:
            self.copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in named.items()}
            matrices = [name for name, p in named.items() if HIDDEN & set(name.split(".")) and p.ndim == 2]
            assert len(matrices) == self.of_muon
            parts = [[self.copies[name] for name in named if name in matrices]]
            parts += [[self.copies[n] for n, p in named.items() if n not in matrices and p.ndim == k] for k in (2, 1)]
            self.steps = [torch.optim.Muon(parts[0], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
            self.steps += [torch.optim.AdamW(part, weight_decay=decay, eps=pl_module.adam_eps)
                           for part, decay in zip(parts[1:], (0.1, 0.0), strict=True) if part]  # fmt: skip
        for name, copy in self.copies.items():
            copy.grad = named[name].grad.clone()
        for own in self.steps:
            own.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
            own.step()


@pytest.mark.parametrize(("lora", "of_muon"), [(None, 7), (LORA, 14)], ids=["full", "lora"])
def test_muon_steps_hidden_matrices_and_adamw_the_rest(lora, of_muon, caplog):
    ours, beside = module(lr_scheduler_type="cosine", max_grad_norm=None, lora=lora), Beside(of_muon)
    fit(ours, data(), max_steps=5, callbacks=[beside])
    for name, parameter in ours.named_parameters():
        if name in beside.copies:
            torch.testing.assert_close(parameter, beside.copies[name], atol=1e-6, rtol=0)
    assert f"Muon trains {of_muon} hidden matrices" in caplog.text


def test_a_run_with_muon_resumes_exactly(tmp_path):
    assert_resumes_exactly(module, data, tmp_path, epochs=3)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_an_optimizer_of_bitsandbytes_trains_and_resumes_or_names_the_package(name, tmp_path):
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(UsageError, match=f"optim={name} needs a package .*pip install bitsandbytes"):
            fit(module(optim=name), data(), max_steps=1)
    else:
        assert_resumes_exactly(lambda: module(optim=name), data, tmp_path, epochs=2)
