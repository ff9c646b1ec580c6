"""Precision of language runs: weights may have 16 bits where they are frozen; everything else stays as it is."""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules.common.errors import UsageError
from rl_modules.language.grpo import GRPO
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.sft import SFT
from tests.marks import quick
from tests.ranks import on_ranks
from tests.training import assert_equal_checkpoints, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
WIDE = {torch.float32, torch.int32, torch.int64, torch.bool}


def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Numbers that bfloat16 rounds: .999 would be 1."""
    return [0.999 if sum(map(ord, text)) % 2 else 0.001 for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("precision")
    judge = RewardModel(model_config=TINY)
    judge.configure_model()
    judge.export(root / "judge")
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i), "answer": str(2 * i), "chosen": str(2 * i),
             "rejected": "x"} for i in range(16)]  # fmt: skip
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def case(name: str, folder: Path, **model: Any) -> tuple[Any, Any]:
    rows = str(folder / "rows.jsonl")
    model = {"model_config": TINY, "lr_scheduler_type": "constant", "learning_rate": 1e-3, "logging_steps": 1, **model}
    written = {**model, "max_completion_length": 4, "completions_steps": 0}
    funcs = {"reward_funcs": [f"{__name__}:reward"], "eval_path": rows, "eval_steps": 1, "n_eval": 4}
    if name == "sft":
        return SFT(**model), InstructionDataModule(path=rows, eval_path=rows, eval_steps=1, n_eval=4, batch_size=8)
    if name == "reward model":
        return RewardModel(**model), PreferenceDataModule(path=rows, eval_path=rows, eval_steps=1, n_eval=4,
                                                          batch_size=8)  # fmt: skip
    if name == "grpo":
        return (GRPO(beta=0.1, top_k=20, **written),
                PromptDataModule(path=rows, batch_size=8, num_generations=4, num_iterations=2, **funcs))  # fmt: skip
    assert name == "rlhf"
    return (
        RLHFPPO(reward_model_name_or_path=str(folder / "judge"), ptx_coef=0.1, **written),
        PromptDataModule(path=rows, batch_size=8, num_generations=1, num_iterations=2, ptx_batch_size=4, **funcs),
    )


def dtypes(tree: Any) -> set[torch.dtype]:
    if isinstance(tree, Tensor):
        return {tree.dtype}
    if isinstance(tree, dict):
        tree = list(tree.values())
    return set().union(*map(dtypes, tree)) if isinstance(tree, list | tuple) else set()


class Boundaries(L.Callback):
    """Collects the dtypes of what goes into and out of the module."""

    def __init__(self) -> None:
        self.seen: dict[str, set[torch.dtype]] = {}
        self.rewards: list[Tensor] = []
        self.autocast: list[bool] = []

    def note(self, where: str, tree: Any) -> None:
        self.seen[where] = self.seen.get(where, set()) | dtypes(tree)

    def wrap(self, module: Any, method: str) -> None:
        inner: Callable[..., Any] = getattr(module, method)

        def noting(*args: Any, **kwargs: Any) -> Any:
            self.note(f"{method} takes", [*args, *kwargs.values()])
            result = inner(*args, **kwargs)
            self.note(f"{method} returns", result)
            return result

        setattr(module, method, noting)

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for method in ("training_step", "validation_step", "prepare", "rewards"):
            if hasattr(pl_module, method):
                self.wrap(pl_module, method)
        if hasattr(pl_module, "prepare"):
            inner = pl_module.prepare

            def keeping(rollout: Any) -> Any:
                self.rewards.append(rollout["rewards"])
                return inner(rollout)

            pl_module.prepare = keeping
        act = pl_module.act if hasattr(pl_module, "act") else None
        if act is not None:

            def noting(*args: Any, **kwargs: Any) -> Any:
                def note_autocast(*_: Any) -> None:
                    # The self-check of a fast path compares in float32.
                    if not any("_check.py" in frame.filename for frame in traceback.extract_stack()):
                        self.autocast.append(torch.is_autocast_enabled("cpu"))

                hook = pl_module.model.register_forward_pre_hook(note_autocast)
                written = act(*args, **kwargs)
                hook.remove()
                self.note("act returns", list(vars(written).values()))
                return written

            pl_module.act = noting

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.note("gradients", [p.grad for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.note("metrics", [row for rows in pl_module._means._rows.values() for row in rows])


PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


def run(name: str, precision: str, folder: Path) -> tuple[Any, Boundaries, L.Trainer]:
    half = precision == "bf16-true"
    module, data = case(name, folder, **({"lora": LORA, "torch_dtype": "bfloat16"} if half else {}))
    watch = Boundaries()
    settings: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # Lightning has it for GPUs only
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        settings = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    trainer = fit(module, data, max_steps=2, accumulate_grad_batches=2, callbacks=[watch], **settings)
    return module, watch, trainer


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", quick(["sft", "reward model", "grpo", "rlhf"], "sft", "grpo"))
def test_what_crosses_a_boundary_is_float32_or_an_integer(name: str, precision: str, folder: Path,
                                                          tmp_path: Path) -> None:  # fmt: skip
    module, watch, trainer = run(name, precision, folder)
    assert trainer.global_step == 2
    for where, seen in watch.seen.items():
        assert seen <= WIDE, f"{where}: {seen}"
    expected = {"training_step takes", "training_step returns", "gradients", "metrics"}
    expected |= {"prepare takes", "prepare returns", "act returns"} if name in ("grpo", "rlhf") else set()
    assert expected <= watch.seen.keys()
    for rewards in watch.rewards:  # no rounding to eight bits on the way
        assert all(min(abs(x - 0.999), abs(x - 0.001)) < 1e-6 for x in rewards[:, 0].tolist())
    assert watch.autocast or name == "reward model"
    assert all(watch.autocast) if precision != "32-true" else not any(watch.autocast)
    trained = {p.dtype for p in module.parameters() if p.requires_grad}
    frozen = {p.dtype for p in module.parameters() if not p.requires_grad}
    assert trained == {torch.float32}
    assert frozen <= ({torch.bfloat16} if precision == "bf16-true" else {torch.float32})
    assert {b.dtype for b in module.buffers()} <= WIDE, "rotary frequencies and offsets keep their precision"
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    for state in trainer.optimizers[0].state.values():
        assert dtypes(state) <= WIDE
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    weights = {k for k, v in saved["state_dict"].items() if v.dtype in (torch.bfloat16, torch.float16)}
    assert bool(weights) == (precision == "bf16-true")
    assert dtypes([saved["optimizer_states"], saved["run"], saved.get("PromptDataModule", {}),
                   saved["gradients"]]) <= WIDE | {torch.uint8}  # fmt: skip


def test_counts_arrive_exactly_under_bf16_true(folder: Path) -> None:
    """1361 tokens are 1360 in bfloat16."""
    seen: list[Any] = []

    class Counting(PromptDataModule):
        def _step(self, number: int, n_micro: int) -> list[Any]:
            step = super()._step(number, n_micro)
            return [{**batch, "step_tokens": torch.tensor(1361.0)} for batch in step]

    class Reading(GRPO):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch["step_tokens"])
            return super().training_step(batch, batch_idx)

    module = Reading(model_config=TINY, lora=LORA, torch_dtype="bfloat16", max_completion_length=3)
    data = Counting(path=str(folder / "rows.jsonl"), batch_size=4, num_generations=4,
                    reward_funcs=[f"{__name__}:reward"])  # fmt: skip
    fit(module, data, max_steps=1, precision="bf16-true")
    assert [float(x) for x in seen] == [1361.0]


@pytest.mark.parametrize("name", ["grpo", "rlhf"])
def test_the_first_minibatch_has_ratio_one_under_bf16_true(name: str, folder: Path) -> None:
    module, data = case(name, folder, lora=LORA, torch_dtype="bfloat16")
    ratios: list[float] = []
    inner = module.policy_loss

    def noting(log_prob: Tensor, batch: Any) -> Tensor:
        difference = torch.where(batch["mask"], log_prob.detach() - batch["log_prob"], 0.0)
        ratios.append(float(difference.abs().max()))
        return inner(log_prob, batch)

    module.policy_loss = noting
    fit(module, data, max_steps=2, precision="bf16-true")
    assert ratios[0] == 0
    assert ratios[1] < 0.05, "stored log-probabilities are those of the training pass, one small step earlier"


@pytest.mark.parametrize(("precision", "torch_dtype", "named"), [
    ("bf16-true", "float32", "trainer.precision=bf16-true"),
    ("bf16-true", "bfloat16", "trainer.precision=bf16-true"),
    ("bf16-mixed", "bfloat16", "torch_dtype=bfloat16"),
    ("32-true", "float16", "torch_dtype=float16"),
    ("16-true", "float32", "trainer.precision=16-true"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["sft", "reward model", "grpo", "rlhf"])
def test_full_fine_tuning_in_16_bits_is_refused(name: str, precision: Any, torch_dtype: str, named: str,
                                                folder: Path) -> None:  # fmt: skip
    module, data = case(name, folder, torch_dtype=torch_dtype)
    with pytest.raises(UsageError, match=f"{named} .*bf16-mixed"):
        fit(module, data, max_steps=1, precision=precision)


def test_why_it_is_refused(folder: Path) -> None:
    """AdamW at lr 1e-6 moves almost no weight of a bfloat16 model, and every one of a float32 model."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(0.05).to(dtype))
        before, optimizer = weight.detach().clone(), torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[dtype] = float((weight != before).float().mean())
    assert moved[torch.float32] > 0.99
    assert moved[torch.bfloat16] < 0.15


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_frozen_models_evaluate_in_any_precision(precision: Any, folder: Path) -> None:
    module, data = case("grpo", folder)
    trainer = L.Trainer(accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    module.model = None
    (metrics,) = trainer.test(module, datamodule=data, verbose=False)
    assert 0 <= metrics["eval/rewards/reward"] <= 0.999 and metrics["eval/mean_length"] >= 1
    assert {p.dtype for p in module.model.parameters()} == {
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    }


def train_sharded(folder: Path, precision: Any, **model: Any) -> dict[str, Any]:
    module, data = case("grpo", folder, **model)
    module.logging_steps = 100
    trainer = fit(module, data, max_steps=2, precision=precision, strategy=ModelParallelStrategy(), devices=2,
                  limit_val_batches=0)  # fmt: skip
    kinds = {"trained": True, "frozen": False}
    return {"steps": trainer.global_step, "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
            **{kind: sorted({str(p.dtype) for p in module.parameters() if p.requires_grad == flag})
               for kind, flag in kinds.items()}}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("precision", "model", "frozen"), [
    ("bf16-mixed", {}, "torch.float32"),
    ("bf16-true", {"lora": LORA}, "torch.bfloat16"),
])  # fmt: skip
def test_sharded_weights_have_the_precision_of_whole_ones(precision: str, model: Any, frozen: str, folder: Path,
                                                          tmp_path: Path) -> None:  # fmt: skip
    """Masters of trained weights are float32 on every rank; frozen ones are converted before they are split."""
    for rank in on_ranks(lambda: train_sharded(folder, precision, **model), tmp_path):
        assert rank == {"steps": 2, "finite": True, "trained": ["torch.float32"], "frozen": [frozen]}


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft", "grpo", "reward model"])
def test_float64_is_kept_by_resuming_and_loading(name: str, folder: Path, tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "part.ckpt")

    def run(**arguments: Any) -> L.Trainer:
        return fit(*case(name, folder), max_steps=2, precision="64-true", **arguments)

    run(callbacks=[Save()]).save_checkpoint(tmp_path / "whole.ckpt")
    run(ckpt_path=tmp_path / "part.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float64}
    loaded = type(case(name, folder)[0]).load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())
