"""What `benchmarks.gpu` runs: every language module and two control algorithms, at two sizes, on made-up data."""

import json
import random
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from datamodules import (
    InstructionDataModule,
    PreferenceDataModule,
    PromptDataModule,
    ReplayDataModule,
    RolloutDataModule,
)
from rl_modules import DPO, DQN, GRPO, PPO, RLHFPPO, SAC, SFT, RewardModel
from rl_modules.language.fast.grouped_attention import without_plans


@dataclass(frozen=True)
class Size:
    """A model's config, and the amount of text in a step."""

    model_config: dict[str, Any]
    #: Sequences, pairs or completions of an optimizer step.
    batch_size: int
    prompt: int
    completion: int


#: The config of Qwen2.5-0.5B, random weights; the texts are those of 16 × 512 tokens.
HALF_BILLION = Size(
    {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
     "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    batch_size=16, prompt=128, completion=384,
)  # fmt: skip
TINY = Size(
    {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
     "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 64},
    batch_size=4, prompt=6, completion=5,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A module and a datamodule, made anew for every run."""

    name: str
    make: Callable[[Size, Path], tuple[Any, Any]]
    #: Number of copies of the weights on the device, and of those that AdamW trains.
    copies: float
    trained: float
    is_language: bool = True
    #: Needs vLLM, whose runs repeat without loss but not bit for bit.
    is_vllm: bool = False
    #: Rows of an optimizer step on a GPU, tokens per prompt and completion, and micro-batches; None: the size's.
    lengths: tuple[int, int, int] | None = None
    micro_batches: int = 1

    def size(self, usual: Size) -> Size:
        """Returns the case's own amount of text."""
        if self.lengths is None:
            return usual
        rows, prompt, completion = self.lengths
        return replace(usual, batch_size=rows, prompt=prompt, completion=completion)


def some_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Returns a number that differs between completions, at negligible cost."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def write_data(size: Size, folder: Path, n: int = 256) -> None:
    """``texts.jsonl`` and ``pairs.jsonl``: random letters, one token each."""
    rng = random.Random(0)

    def text(length: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=length))

    with (folder / "texts.jsonl").open("w") as texts, (folder / "pairs.jsonl").open("w") as pairs:
        for _ in range(n):
            prompt = text(size.prompt)
            texts.write(json.dumps({"prompt": prompt, "completion": text(size.completion - 1)}) + "\n")
            row = {"prompt": prompt, "chosen": text(size.completion - 1), "rejected": text(size.completion - 1)}
            pairs.write(json.dumps(row) + "\n")


@contextmanager
def drawn_once() -> Iterator[None]:
    """Leaves the first numbers of large layers to transformers, which draws them again: half a model's making."""
    before = {kind: kind.reset_parameters for kind in (nn.Linear, nn.Embedding)}

    def small(layer: Any) -> None:
        if layer.weight.numel() < 2**16:
            next(reset for kind, reset in before.items() if isinstance(layer, kind))(layer)

    for kind in before:
        kind.reset_parameters = small  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, reset in before.items():
            kind.reset_parameters = reset  # type: ignore[method-assign]


def write_judge(size: Size, folder: Path) -> None:
    """A reward model with random weights, in ``judge``."""
    module = RewardModel(model_config=size.model_config)
    with drawn_once():
        module.configure_model()
    module.export(folder / "judge")


def _model(size: Size) -> dict[str, Any]:
    return {"model_config": size.model_config, "learning_rate": 1e-5, "lr_scheduler_type": "constant",
            "logging_steps": 1}  # fmt: skip


def _prompts(size: Size, folder: Path, num_generations: int) -> PromptDataModule:
    reward = [f"{__name__}:some_reward"] if num_generations > 1 else None
    return PromptDataModule(path=str(folder / "texts.jsonl"), batch_size=size.batch_size, eval_steps=0,
                            num_generations=num_generations, reward_funcs=reward)  # fmt: skip


def _sft(**more: Any) -> Callable[[Size, Path], tuple[Any, Any]]:
    def make(size: Size, folder: Path) -> tuple[Any, Any]:
        data = InstructionDataModule(path=str(folder / "texts.jsonl"), batch_size=size.batch_size, eval_steps=0)
        return SFT(**_model(size), **more), data

    return make


def _packed(**more: Any) -> Callable[[Size, Path], tuple[Any, Any]]:
    """Texts of all lengths up to the size's, several to a row."""

    def make(size: Size, folder: Path) -> tuple[Any, Any]:
        rng, path = random.Random(0), folder / "mixed.jsonl"
        longest = size.prompt + size.completion
        texts = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, longest - 1))) for _ in range(1024)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = InstructionDataModule(path=str(path), batch_size=4 * size.batch_size, eval_steps=0, packing=True)
        return SFT(**_model(size), **more), data

    return make


def _dpo(size: Size, folder: Path) -> tuple[Any, Any]:
    data = PreferenceDataModule(path=str(folder / "pairs.jsonl"), batch_size=size.batch_size // 2, eval_steps=0)
    return DPO(**_model(size)), data


def _reward_model(size: Size, folder: Path) -> tuple[Any, Any]:
    data = PreferenceDataModule(path=str(folder / "pairs.jsonl"), batch_size=size.batch_size, eval_steps=0,
                                n_demonstrations=4)  # fmt: skip
    return RewardModel(**_model(size)), data


def _grpo(**more: Any) -> Callable[[Size, Path], tuple[Any, Any]]:
    def make(size: Size, folder: Path) -> tuple[Any, Any]:
        module = GRPO(max_completion_length=size.completion, **_model(size), **more)
        return module, _prompts(size, folder, 4)

    return make


def _rlhf_ppo(size: Size, folder: Path) -> tuple[Any, Any]:
    module = RLHFPPO(reward_model_name_or_path=str(folder / "judge"), max_completion_length=size.completion,
                     **_model(size))  # fmt: skip
    return module, _prompts(size, folder, 1)


def _ppo(size: Size, folder: Path) -> tuple[Any, Any]:
    return PPO(), RolloutDataModule("CartPole-v1", n_envs=8, n_steps=128, batch_size=256, n_epochs=4, eval_freq=0,
                                    total_timesteps=10**9)  # fmt: skip


def _dqn(size: Size, folder: Path) -> tuple[Any, Any]:
    return DQN(), ReplayDataModule("CartPole-v1", learning_starts=256, batch_size=64, buffer_size=4096, eval_freq=0,
                                   total_timesteps=10**9)  # fmt: skip


def _ppo_graph(size: Size, folder: Path) -> tuple[Any, Any]:
    # An update for each rollout, so that steps are iterations: the third is a replay, or after a resume the first.
    return PPO(graph=True), RolloutDataModule("torch/CartPole-v1", n_envs=64, n_steps=16, batch_size=None, n_epochs=1,
                                              eval_freq=0, total_timesteps=10**9)  # fmt: skip


def _sac_graph(size: Size, folder: Path) -> tuple[Any, Any]:
    return SAC(graph=True), ReplayDataModule("Pendulum-v1", learning_starts=64, batch_size=64, buffer_size=4096,
                                             eval_freq=0, total_timesteps=10**9)  # fmt: skip


CASES = (
    # The short ones first: where time runs out, the last are left out.
    Case("PPO", _ppo, 0, 0, is_language=False),
    Case("DQN", _dqn, 0, 0, is_language=False),
    Case("PPO, one graph", _ppo_graph, 0, 0, is_language=False),
    Case("SAC, a graph", _sac_graph, 0, 0, is_language=False),
    Case("SFT", _sft(), 1, 1),
    Case("RewardModel", _reward_model, 1, 1),
    Case("DPO", _dpo, 2, 1),
    Case("GRPO", _grpo(), 1, 1),
    Case("GRPO with a reference", _grpo(beta=0.04), 2, 1),
    Case("GRPO, 8 rows in flight", _grpo(max_rows_in_flight=8), 1, 1),
    Case("GRPO, growing cache", _grpo(cache_implementation="dynamic"), 1, 1, lengths=(16, 128, 32)),
    Case("GRPO, vLLM", _grpo(sampler="vllm"), 2, 1, is_vllm=True),
    Case("GRPO, LoRA", _grpo(lora={"r": 16, "target_modules": "all-linear"}), 1, 0.02),
    Case("RLHFPPO", _rlhf_ppo, 4, 2),
    Case("SFT, compiled layers", _sft(torch_compile=True), 1, 1),
    Case("SFT, packed", _packed(), 1, 1),
    Case("SFT, packed, varlen", _packed(attn_implementation="varlen"), 1, 1),
    # The lengths of verl's published step of PPO on Qwen2.5-0.5B and GSM8K, which takes 67.6 s on one card.
    Case("RLHFPPO, verl's lengths", _rlhf_ppo, 4, 2, lengths=(256, 103, 305), micro_batches=16),
)


def attention_us(
    rows: int, columns: int, device: torch.device, heads: int = 14, shared: int = 2, size: int = 64
) -> dict[str, float]:
    """Microseconds of one layer's attention in a step of decoding, by how keys are read and by sdpa's backends.

    The sampler takes "grouped, without cuDNN". ``enable_gqa`` under a mask has no backend but cuDNN and the plain one.

    Args:
        rows: decoded together.
        columns: of each row's keys, of which a random number counts.
        device: on CUDA in bfloat16, elsewhere in float32.
        heads: of queries.
        shared: heads of keys and values.
        size: of a head.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.randn(rows, heads, 1, size, device=device, dtype=dtype)
    key, value = torch.randn(2, rows, shared, columns, size, device=device, dtype=dtype)
    length = torch.randint(columns // 2, columns + 1, (rows, 1), device=device)
    mask = torch.zeros(rows, columns, device=device, dtype=dtype)
    mask = mask.masked_fill_(torch.arange(columns, device=device) >= length, -torch.inf)[:, None, None]
    grouped = query.reshape(rows, shared, heads // shared, size)

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(-1, -1, heads // shared, -1, -1).reshape(rows, heads, columns, size)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "repeated": lambda: sdpa(query, repeated(key), repeated(value), attn_mask=mask),
        "grouped": lambda: sdpa(grouped, key, value, attn_mask=mask),
        "enable_gqa": lambda: sdpa(query, key, value, attn_mask=mask, enable_gqa=True),
    }
    found: dict[str, float] = {}
    for plans in (True, False):
        with nullcontext() if plans else without_plans():
            for name, attend in ways.items():
                seconds = seconds_of(attend, device)
                found[f"{name}, {'with' if plans else 'without'} cuDNN"] = 1e6 * seconds
    return found


def seconds_of(call: Callable[[], object], device: torch.device, calls: int = 50) -> float:
    """Mean time of a call after three that plan and load."""
    for i in range(calls + 3):
        if i == 3:
            _wait(device)
            began_s = time.perf_counter()
        call()
    _wait(device)
    return (time.perf_counter() - began_s) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
