"""Language runs on a pretend device: what a GPU would refuse is refused, what it would wait for is counted."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules.language.dpo import DPO
from rl_modules.language.grpo import GRPO
from rl_modules.language.kto import KTO
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.sft import SFT
from tests.fake_device import DEVICE, FakeRanks, FakeStrategy, OnDevice, fake_device
from tests.marks import PRESENT_TRANSFORMERS, quick
from tests.ranks import on_ranks
from tests.training import fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
HERE = "tests.rl_modules.language.test_device"


def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Equal for all completions of every second prompt."""
    return [sum(map(ord, text)) % 5 / 4 if sum(map(ord, prompt)) % 2 else 1.0
            for prompt, text in zip(prompts, completions, strict=True)]  # fmt: skip


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


MODEL = {"model_config": TINY, "attn_implementation": "eager", "optimizer": sgd, "lr_scheduler_type": "constant",
         "logging_steps": 2}  # fmt: skip
WRITTEN = {**MODEL, "max_completion_length": 5, "completions_steps": 0}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = RewardModel(model_config=TINY)
    model.configure_model()
    return str(model.export(tmp_path_factory.mktemp("judge")))


def case(name: str, judge: str) -> tuple[Any, Any]:
    if name == "sft":
        return SFT(**MODEL), InstructionDataModule("addition", n_train=32, batch_size=8, eval_steps=2, n_eval=4,
                                                    eval_max_completion_length=5)  # fmt: skip
    if name == "reward model":
        return RewardModel(**MODEL), PreferenceDataModule("paths", n_train=32, batch_size=8, eval_steps=0)
    if name in ("dpo", "kto"):
        module = (DPO if name == "dpo" else KTO)(**MODEL)
        return module, PreferenceDataModule("paths", n_train=32, batch_size=8, eval_steps=2, n_eval=8, packing=False)
    prompts = {"n_train": 24, "batch_size": 16, "reward_funcs": [f"{HERE}:reward"], "eval_steps": 2, "n_eval": 4}
    if name == "rlhf":
        module = RLHFPPO(reward_model_name_or_path=judge, whiten_rewards=True, target_kl=1.0, **WRITTEN)
        return module, PromptDataModule("addition", num_generations=1, num_iterations=2, **prompts)
    settings = {"grpo": {}, "grpo kl": {"beta": 0.1, "top_entropy_quantile": 0.5, "sync_ref_model": True,
                                        "ref_model_sync_steps": 2}}[name]  # fmt: skip
    data = PromptDataModule("addition", num_generations=4, num_iterations=2, dynamic_sampling=2, **prompts)
    return GRPO(**WRITTEN, **settings), data


CASES = ["sft", "reward model", "grpo", "grpo kl", "rlhf"]


class Waits(L.Callback):
    """The waits of each micro-batch, from the batch's arrival to its end."""

    def __init__(self, counter: Counter[str]) -> None:
        self.counter, self.before, self.steps = counter, Counter(counter), []  # type: ignore[var-annotated]
        self.lengths: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if hasattr(pl_module, "prepare"):
            inner = pl_module.prepare

            def noting(rollout: Any) -> Any:
                self.lengths.append(max(rollout["length"].tolist()))
                return inner(rollout)

            pl_module.prepare = noting

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert all(isinstance(p, OnDevice) for p in pl_module.parameters())
        self.before = Counter(self.counter)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.steps.append(self.counter - self.before)


# ------------------------------------------------------------------- the pretend device itself


def test_the_pretend_device_computes_refuses_and_counts() -> None:
    with fake_device() as mode:
        x = torch.tensor([1.0, 2.0, 3.0]).to(DEVICE, non_blocking=True)
        assert isinstance(x, OnDevice) and not mode.waits
        assert (x * 2).sum().cpu() == 12 and mode.waits == {"elsewhere to cpu": 1}
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3, dtype=torch.float32)
        mode.waits.clear()
        assert (float(x[0]), x.tolist(), len(x[x > 1]), bool((x > 0).all())) == (1.0, [1.0, 2.0, 3.0], 2, True)
        torch.tensor(1.0, device=DEVICE)
        torch.full((), 1.0, dtype=torch.float32, device=DEVICE)
        expected = {"_local_scalar_dense": 2, "tolist": 1, "index": 1, "to device": 1}
        assert mode.waits == {f"elsewhere {what}": n for what, n in expected.items()}
        layer = torch.nn.Linear(3, 1).to(DEVICE)
        layer(x).sum().backward()
        assert layer.weight.grad.tolist() == [[1.0, 2.0, 3.0]]


# ------------------------------------------------------------------- one device


@pytest.mark.long
@pytest.mark.parametrize("name", quick(CASES, "grpo kl"))
def test_every_algorithm_trains_evaluates_and_resumes_on_a_device(name: str, judge: str, tmp_path: Path) -> None:
    """Every tensor that meets one of the device is there itself, also after a resume in the middle of a point."""
    ends = {}
    for device in ("cpu", "device"):
        for stop in (3, 4):
            with fake_device():
                module, data = case(name, judge)
                settings: dict[str, Any] = {"accelerator": "auto", "strategy": FakeStrategy()}
                path = tmp_path / f"{device}-3.ckpt" if stop == 4 else None
                trainer = fit(module, data, ckpt_path=path, max_steps=stop, accumulate_grad_batches=2,
                              **({} if device == "cpu" else settings))  # fmt: skip
                trainer.save_checkpoint(tmp_path / f"{device}-{stop}.ckpt")
        ends[device] = torch.load(tmp_path / f"{device}-4.ckpt", weights_only=True)["state_dict"]
    for key, value in ends["cpu"].items():
        # On a CPU the sampler shares prompts, with sums in another order; weights move by hundredths.
        torch.testing.assert_close(ends["device"][key], value, atol=1e-4, rtol=1e-3)


#: Waits of one micro-batch outside of the passes that share prompts. Transformers waits once in each pass without a
#: mask, to see whether rows are packed: the reward model makes one, RLHF two (policy and value model).
PER_MICRO_BATCH = {"sft": 0, "reward model": 1, "grpo": 0, "grpo kl": 0, "rlhf": 2}
#: Waits of one generation beside those for tokens: the sampler's beginning and end and judging on the host in each of
#: up to three rounds, then one for the rows' lengths, and one per further forward pass.
PER_GENERATION = {"grpo": 50, "grpo kl": 60, "rlhf": 35}
#: Shared prompts: which rows have one prompt, and how wide their layout is.
SHARED = 10


@pytest.mark.long
@PRESENT_TRANSFORMERS
@pytest.mark.parametrize("name", quick(CASES, "grpo kl"))
def test_waits_for_the_device(name: str, judge: str) -> None:
    module, data = case(name, judge)
    module.logging_steps = 100
    with fake_device() as mode:
        watch = Waits(mode.waits)
        fit(module, data, max_steps=4, accumulate_grad_batches=2, accelerator="auto", strategy=FakeStrategy(),
            callbacks=[watch], limit_val_batches=0)  # fmt: skip
    assert len(watch.steps) == 8
    for step in watch.steps:
        shared = {
            place: n
            for place, n in step.items()
            if re.match(r"(shared_scoring|self_check)\.py|scoring\.py:logits_at", place)
        }
        assert sum(shared.values()) <= SHARED, shared
        assert sum(step.values()) - sum(shared.values()) <= PER_MICRO_BATCH[name], step
    if name in PER_GENERATION:
        # One wait per drawn token, whatever the number of rows: which rows have ended decides which are decoded next.
        per_token = sum(n for place, n in mode.waits.items() if place == "decode.py:_draw tolist")
        rounds = 1 + 2 * (name != "rlhf")
        assert 0 < per_token <= rounds * sum(watch.lengths)
        of_training = sum(sum(step.values()) for step in watch.steps)
        ours = sum(n for place, n in mode.waits.items() if not place.startswith("elsewhere"))
        assert ours - of_training - per_token <= PER_GENERATION[name] * len(watch.lengths), mode.waits


# ------------------------------------------------------------------- collectives


def on_two_devices(name: str, judge: str, folder: Path) -> dict[str, Any]:
    with fake_device():
        module, data = case(name, judge)
        trainer = fit(module, data, max_steps=3, accelerator="auto", strategy=FakeRanks(), devices=2)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        module, data = case(name, judge)
        fit(module, data, ckpt_path=folder / f"{name}.ckpt", max_steps=4, accelerator="auto", strategy=FakeRanks(),
            devices=2)  # fmt: skip
    return {"steps": trainer.global_step}


@pytest.mark.long
@pytest.mark.parametrize("name", quick([*CASES, "dpo", "kto"], "grpo kl", "dpo"))
def test_collectives_get_tensors_of_the_strategys_device(name: str, judge: str, tmp_path: Path) -> None:
    """Whitening, quantiles of entropies, replaced groups, metrics, evaluation, checkpoints: all that ranks exchange."""
    assert on_ranks(lambda: on_two_devices(name, judge, tmp_path), tmp_path / "ranks") == [{"steps": 3}] * 2


class StopsWithinAStep(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.fit_loop.batch_idx == 2


def saved_within_a_step(judge: str, folder: Path) -> int:
    with fake_device():
        module, data = case("sft", judge)
        trainer = fit(module, data, max_steps=4, accumulate_grad_batches=2, accelerator="auto", strategy=FakeRanks(),
                      devices=2, callbacks=[StopsWithinAStep()])  # fmt: skip
        trainer.save_checkpoint(folder / "last.ckpt")
    return len(torch.load(folder / "last.ckpt", weights_only=True)["gradients"])


@pytest.mark.long
def test_gradients_of_an_unfinished_step_are_saved_after_the_fit(judge: str, tmp_path: Path) -> None:
    """The module is on the CPU by then, and the ranks still exchange on the device."""
    first, second = on_ranks(lambda: saved_within_a_step(judge, tmp_path), tmp_path / "ranks")
    assert first == second > 0


def reduce_a_cpu_tensor() -> dict[str, bool]:
    seen = {}

    class Reducing(GRPO):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for device in ("cpu", DEVICE):
                refused = False
                try:
                    self.trainer.strategy.reduce(torch.zeros((1,), dtype=torch.float32, device=device))
                except RuntimeError as error:
                    refused = "got a tensor of the CPU" in str(error)
                seen[str(device)] = refused
            return super().training_step(batch, batch_idx)

    with fake_device():
        _, data = case("grpo", "")
        fit(Reducing(**WRITTEN), data, max_steps=1, accelerator="auto", strategy=FakeRanks(), devices=2,
            limit_val_batches=0)  # fmt: skip
    return seen


@pytest.mark.long
def test_the_guard_refuses_a_cpu_tensor(tmp_path: Path) -> None:
    assert on_ranks(reduce_a_cpu_tensor, tmp_path) == [{"cpu": True, "meta": False}] * 2
