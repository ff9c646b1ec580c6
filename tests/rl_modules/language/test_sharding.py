"""Two ranks that split every weight between them learn what one rank with twice the rows learns, and can be stopped."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from recipes.callbacks.checkpoints import Checkpoints
from recipes.cli import main
from recipes.saved_runs import read
from recipes.signals import Stopped
from rl_modules import GRPO, PPO, RLHFPPO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.core.checkpoint_file import damage_of
from rl_modules.language.sharding import whole
from tests.ranks import on_ranks
from tests.training import assert_equal_checkpoints, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}  # fmt: skip
STEPS = 3
#: Of a micro-batch: other ones have others.
OF_A_PART = {"train/min_reward", "train/max_reward",
             *(f"train/clip_ratio/{side}_{end}" for side in ("low", "high") for end in ("min", "max"))}  # fmt: skip


def descent(parameters: Any) -> torch.optim.Optimizer:
    # Its steps are gradients, and it has a state of its own.
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def some_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Differs between most completions of one prompt, and is equal for all of the other."""
    return [sum(map(ord, text)) % 5 / 4 if prompt == "a=" else 1.0
            for prompt, text in zip(prompts, completions, strict=True)]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations, comparisons, prompts, and a judge."""
    folder = tmp_path_factory.mktemp("sharding")
    rows = [{"prompt": "ab"[: 1 + i % 2] + "=", "completion": "xyz"[i % 3] * (i * 7 % 17)} for i in range(24)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"] + "c", "rejected": "x" * (i % 5)}
             for i, row in enumerate(rows)]  # fmt: skip
    for name, lines in (("shown", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    judge = RewardModel(model_config=TINY)
    judge.configure_model()
    judge.export(folder / "judge")
    return folder


def case(name: str, folder: Path, ranks: int) -> tuple[Any, Any]:
    """A module and a datamodule with this rank's share of the rows."""
    model: dict[str, Any] = {"model_config": TINY, "lr_scheduler_type": "linear", "logging_steps": 1,
                             "optimizer": descent}  # fmt: skip
    written = {**model, "max_completion_length": 5, "completions_steps": 0}
    shown, pairs = str(folder / "shown.jsonl"), str(folder / "pairs.jsonl")
    if name.startswith("sft"):
        data: Any = InstructionDataModule(path=shown, eval_path=shown, batch_size=8 // ranks, eval_steps=2)
        lora = {"r": 4, "lora_alpha": 32} if name == "sft lora" else None
        return SFT(max_completion_length=5, max_grad_norm=0.1, lora=lora, **model), data
    if name == "reward model":
        return RewardModel(**model), PreferenceDataModule(path=pairs, batch_size=6 // ranks)
    grpo, rlhf = name.startswith("grpo"), name.startswith("rlhf")
    assert grpo or rlhf
    prompts = {"path": shown, "num_generations": 4 if grpo else 1, "batch_size": 16 // ranks, "n_eval": 0,
               "num_iterations": 2, "reward_funcs": [f"{__name__}:some_reward"] if grpo else []}  # fmt: skip
    if grpo:
        settings = {"grpo": {}, "grpo reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}}
        return GRPO(**written, **settings[name]), PromptDataModule(**prompts)
    head = name == "rlhf head"
    module = RLHFPPO(reward_model_name_or_path=str(folder / "judge"), value_head_on_policy=head,
                     ptx_coef=0.0 if head else 0.5, **written)  # fmt: skip
    return module, PromptDataModule(**prompts, ptx_batch_size=0 if head else 4 // ranks)


EXPORTED = {"sft": AutoModelForCausalLM, "reward model": AutoModelForSequenceClassification}
CASES = ("sft", "sft lora", "reward model", "grpo", "grpo reference", "rlhf", "rlhf head")


class Curves(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        measured = {name: value for name, value in metrics.items() if not name.startswith("time/")}
        self.points.append({**measured, "step": step})


def train(name: str, folder: Path, output: Path, ranks: int, **arguments: Any) -> list[dict[str, float]]:
    """Train; write the last checkpoint; return the curve."""
    module, data = case(name, folder, ranks)
    curves = Curves()
    settings = {"max_steps": STEPS, "devices": ranks, "strategy": ModelParallelStrategy() if ranks > 1 else "auto",
                "accumulate_grad_batches": 1 if name == "grpo" else 2, "logger": curves, **arguments}  # fmt: skip
    trainer = fit(module, data, **settings)
    sharded = isinstance(settings["strategy"], ModelParallelStrategy)
    assert all(hasattr(parameter, "full_tensor") == sharded for parameter in module.parameters())
    trainer.save_checkpoint(output / f"{name}.ckpt")
    if name in EXPORTED and (sharded or trainer.is_global_zero):  # whole weights: each rank would write the files
        module.export(output / name)
    return curves.points


@pytest.fixture(scope="module")
def trained(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, Path]:
    """The curves of every case, on one rank and on two, and where their checkpoints are: in ``1`` and in ``2``."""
    output = tmp_path_factory.mktemp("trained")
    one = {name: train(name, files, output / "1", 1) for name in CASES}
    two = on_ranks(lambda: {name: train(name, files, output / "2", 2) for name in CASES}, output / "ranks")
    return one, two[0], output


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_half_of_every_weight_learn_what_one_learns(name: str, trained: tuple, files: Path) -> None:
    one, two, output = trained
    assert len(one[name]) == len(two[name]) >= STEPS
    for left, right in zip(one[name], two[name], strict=True):
        left, right = ({k: v for k, v in point.items() if k not in OF_A_PART} for point in (left, right))
        assert left == pytest.approx(right, rel=2e-4, abs=2e-5, nan_ok=True)
    left, right = (torch.load(output / ranks / f"{name}.ckpt", weights_only=True) for ranks in "12")
    assert left["state_dict"].keys() == right["state_dict"].keys()
    start = case(name, files, 1)[0]
    start.configure_model()
    moved = 0.0
    weights = start.state_dict()
    assert {key.partition(".")[0] for key in weights.keys() - left["state_dict"].keys()} <= {"reward_model"}
    for key in left["state_dict"]:
        value = weights[key]
        torch.testing.assert_close(right["state_dict"][key], left["state_dict"][key], rtol=1e-4, atol=3e-6)
        moved = max(moved, float((left["state_dict"][key] - value).abs().max()))
    assert moved > 1e-2, "something was learned"
    left, right = (state["optimizer_states"][0] for state in (left, right))
    assert left["param_groups"] == right["param_groups"]
    for number, state in left["state"].items():
        torch.testing.assert_close(right["state"][number], state, rtol=1e-3, atol=3e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTED)
def test_weights_in_parts_become_one_directory(name: str, trained: tuple, tmp_path: Path) -> None:
    """Written by the ranks themselves, and from their checkpoint."""
    _, _, output = trained
    checkpoint = output / "2" / f"{name}.ckpt"
    main(["export", "--ckpt_path", str(checkpoint), "--output", str(tmp_path / "exported")])
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    for folder in (tmp_path / "exported", output / "2" / name):
        found = EXPORTED[name].from_pretrained(folder).state_dict()
        assert {f"model.{key}" for key in found} == weights.keys()
        assert all(torch.equal(value, weights[f"model.{key}"]) for key, value in found.items())


# -------------------------------------------------------------------- stopped, and elsewhere gone on


class SaveAt(L.Callback):
    """Writes a checkpoint behind a number of micro-batches."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)


class SignalOneRank(L.Callback):
    """SIGTERM for the second rank alone, in the middle of a batch."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(files: Path, folder: Path) -> None:
    """SIGTERM, and go on from what the command line's own checkpoints leave behind."""
    checkpoints = {"callbacks": [Checkpoints(), SignalOneRank()], "enable_checkpointing": True, "max_steps": 12}
    with pytest.raises(Stopped) as stop:
        train("grpo", files, folder / "stopped", 2, default_root_dir=folder / "run", **checkpoints)
    train("grpo", files, folder / "rest", 2, ckpt_path=stop.value.checkpoint, max_steps=12)
    train("grpo", files, folder / "whole", 2, max_steps=12)


def resumed(files: Path, folder: Path) -> None:
    """Each case, and again from a checkpoint inside of its second optimizer step (GRPO's: behind the first)."""
    for name in ("sft", "grpo reference", "rlhf head"):
        half = folder / "half" / f"{name}.ckpt"
        train(name, files, folder / "whole", 2, callbacks=[SaveAt(half, 3)])
        train(name, files, folder / "rest", 2, ckpt_path=half)
    stopped(files, folder)
    train("sft", files, folder / "unsharded", 2, ckpt_path=folder / "half" / "sft.ckpt", strategy="ddp")


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(files: Path, tmp_path: Path) -> None:
    on_ranks(lambda: resumed(files, tmp_path), tmp_path / "ranks")
    for name in ("sft", "grpo reference", "rlhf head"):
        assert torch.load(tmp_path / "half" / f"{name}.ckpt", weights_only=True)["gradients"]
        assert_equal_checkpoints(tmp_path / "whole" / f"{name}.ckpt", tmp_path / "rest" / f"{name}.ckpt")
    assert_equal_checkpoints(tmp_path / "whole/grpo.ckpt", tmp_path / "rest/grpo.ckpt")
    last = tmp_path / "run/checkpoints/last.ckpt"
    assert damage_of(last) is None and 1 < torch.load(last, weights_only=True)["global_step"] < 12
    # Sharded or not is nothing that a checkpoint knows of.
    one, other = (torch.load(tmp_path / run / "sft.ckpt", weights_only=True) for run in ("whole", "unsharded"))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=3e-6)


# -------------------------------------------------------------------- sampling


def sampled(files: Path, ranks: int) -> dict[str, Any]:
    """What a generation writes, how often it gathers weights, and whether they are split again behind it."""
    module, data = case("grpo", files, ranks)
    gathers, found = [0], []
    # What FSDP2 gathers with goes by another name since torch 2.13.
    name = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"
    gather, act = getattr(torch.distributed, name), module.act

    def counted(*args: Any, **kwargs: Any) -> Any:
        gathers[0] += 1
        return gather(*args, **kwargs)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = gathers[0]
        written = act(*args, **kwargs)
        split = all(hasattr(parameter, "full_tensor") for parameter in module.model.parameters())
        found.append({"gathers": gathers[0] - before, "split": split, "tokens": written.tokens.tolist()})
        return written

    module.act = watched
    setattr(torch.distributed, name, counted)
    try:
        fit(module, data, max_steps=1, devices=ranks, strategy=ModelParallelStrategy() if ranks > 1 else "auto")
    finally:
        setattr(torch.distributed, name, gather)
    parts = len([m for m in module.model.modules() if hasattr(m, "set_reshard_after_forward")])
    return {"generations": found, "parts": parts}


@pytest.mark.long
def test_a_generation_gathers_each_weight_once(files: Path, tmp_path: Path) -> None:
    alone = sampled(files, 1)["generations"][0]
    first, second = on_ranks(lambda: sampled(files, 2), tmp_path / "ranks")
    for rank in (first, second):
        (generation,) = rank["generations"]
        assert 0 < generation["gathers"] <= rank["parts"] and generation["split"]
    rows = [row for rank in (first, second) for row in rank["generations"][0]["tokens"]]
    width = max(map(len, [*rows, *alone["tokens"]]))
    padded = [[row + [0] * (width - len(row)) for row in some] for some in (rows, alone["tokens"])]
    assert padded[0] == padded[1]


# -------------------------------------------------------------------- copies, and bfloat16


def placed(name: str, files: Path, output: Path, **sizes: int) -> dict[str, Any]:
    """Train on four ranks; the curve, and how a matrix lies on them."""
    module, data = case(name, files, 4)
    curves = Curves()
    fit(module, data, max_steps=STEPS, devices=4, strategy=ModelParallelStrategy(**sizes), logger=curves,
        accumulate_grad_batches=2)  # fmt: skip
    weight: Any = next(p for p in module.model.parameters() if p.dim() == 2)
    return {"curves": curves.points, "mesh": list(weight.device_mesh.shape), "share": weight.to_local().shape[0],
            "whole": weight.shape[0]}  # fmt: skip


@pytest.mark.slow
def test_two_copies_on_two_ranks_each_learn_what_one_rank_learns(trained: tuple, files: Path, tmp_path: Path) -> None:
    ranks = on_ranks(lambda: placed("sft", files, tmp_path, data_parallel_size=2, tensor_parallel_size=2),
                     tmp_path / "ranks", world_size=4)  # fmt: skip
    assert [rank["mesh"] for rank in ranks] == [[2, 2]] * 4
    assert sum(rank["share"] for rank in ranks) == 2 * ranks[0]["whole"]
    one = trained[0]["sft"]
    assert len(one) == len(ranks[0]["curves"])
    for left, right in zip(one, ranks[0]["curves"], strict=True):
        assert left == pytest.approx(right, rel=2e-4, abs=2e-5, nan_ok=True)


def bfloat16(files: Path, ranks: int) -> dict[str, Any]:
    """Train in mixed precision; the curve, and the types in which weights are gathered and gradients are summed."""
    module, data = case("sft", files, ranks)
    curves = Curves()
    kinds: dict[str, set[str]] = {"gathered": set(), "reduced": set()}
    names = {"gathered": ("all_gather_single", "all_gather_into_tensor"),
             "reduced": ("reduce_scatter_single", "reduce_scatter_tensor")}  # fmt: skip
    originals = {}

    def watch(kind: str, name: str) -> None:
        original = originals[name] = getattr(torch.distributed, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            kinds[kind].update(str(x.dtype) for x in tensors)
            return original(*args, **kwargs)

        setattr(torch.distributed, name, watched)

    for kind, some in names.items():
        for name in some:
            if hasattr(torch.distributed, name):
                watch(kind, name)
    try:
        fit(module, data, max_steps=STEPS, devices=ranks, strategy=ModelParallelStrategy() if ranks > 1 else "auto",
            precision="bf16-mixed", logger=curves, accumulate_grad_batches=2)  # fmt: skip
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)
    return {"curves": curves.points, **{kind: sorted(found) for kind, found in kinds.items()},
            "masters": sorted({str(p.dtype) for p in module.parameters()})}  # fmt: skip


@pytest.mark.long
def test_weights_are_gathered_in_bfloat16_and_gradients_summed_in_float32(files: Path, tmp_path: Path) -> None:
    one = bfloat16(files, 1)
    first, _ = on_ranks(lambda: bfloat16(files, 2), tmp_path / "ranks")
    # Gathers travel as bytes, or in the weights' type; float32 would be twice as much.
    assert first["gathered"] and "torch.float32" not in first["gathered"]
    assert first["reduced"] == ["torch.float32"] and first["masters"] == ["torch.float32"]
    for left, right in zip(one["curves"], first["curves"], strict=True):
        losses = {name for name in left if name.endswith("loss")}
        assert losses and {n: left[n] for n in losses} == pytest.approx({n: right[n] for n in losses}, rel=1e-2)


# -------------------------------------------------------------------- reading


def read_by(folder: Path) -> dict[str, Any]:
    """What a rank reads of the disk, and what it has afterwards."""
    calls: list[str] = []
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        read_weights = kind.from_pretrained

        def counted(path: Any, *args: Any, read_weights: Any = read_weights, **kwargs: Any) -> Any:
            calls.append(Path(path).name)
            return read_weights(path, *args, **kwargs)

        kind.from_pretrained = counted
    module = RLHFPPO(str(folder / "policy"), reward_model_name_or_path=str(folder / "judge"), max_completion_length=5,
                     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))  # fmt: skip
    data = PromptDataModule(path=str(folder / "shown.jsonl"), num_generations=1, batch_size=8, n_eval=0)
    trainer = fit(module, data, max_steps=1, devices=2, strategy=ModelParallelStrategy())
    weights = whole(module.state_dict(keep_vars=True))
    trainer.strategy.barrier()
    return {"calls": calls, "weights": weights, "generation_config": module.model.generation_config.eos_token_id,
            "frequencies": module.model.model.rotary_emb.inv_freq}  # fmt: skip


@pytest.mark.long
def test_the_first_rank_alone_reads_weights(files: Path, tmp_path: Path) -> None:
    policy = SFT(model_config=TINY)
    policy.configure_model()
    policy.model.generation_config.eos_token_id = ends = [policy.tokenizer.eos_token_id, 3, 5]
    policy.export(files / "policy")
    first, second = on_ranks(lambda: read_by(files), tmp_path / "ranks")
    assert first["calls"] and not second["calls"]
    own = AutoModelForCausalLM.from_pretrained(files / "policy")
    judge = AutoModelForSequenceClassification.from_pretrained(files / "judge")
    for rank in (first, second):
        assert rank["generation_config"] == ends, "every rank must stop at the same tokens"
        assert torch.equal(rank["frequencies"], own.model.rotary_emb.inv_freq), "no checkpoint holds these buffers"
        for name, value in own.state_dict().items():
            assert torch.equal(rank["weights"][f"model.{name}"], value)
            assert torch.equal(rank["weights"][f"reference.{name}"], value)
        for name, value in judge.state_dict().items():
            assert torch.equal(rank["weights"][f"value_model.{name}"], value)


# -------------------------------------------------------------------- what people get wrong


@pytest.mark.parametrize(("module", "strategy", "message"), [
    (SFT, "fsdp", "trainer.strategy=fsdp is the older way"),
    (PPO, "fsdp2", "splits the weights of language models over ranks, not those of PPO"),
])  # fmt: skip
def test_what_is_not_sharded(module: Any, strategy: Any, message: str) -> None:
    model = module()
    made = {"fsdp": FSDPStrategy, "fsdp2": ModelParallelStrategy}[strategy]()
    model._trainer = SimpleNamespace(strategy=made, datamodule=None)
    with pytest.raises(UsageError, match=message):
        model.configure_model()


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder, as Lightning.s sharded strategies write it"):
        read(tmp_path)
