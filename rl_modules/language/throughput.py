"""Tokens per second of sampling and of updates."""

import threading
import time
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class Stopwatch:
    """Seconds between its making and ``stop`` of work on a device. Neither of them waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._times_s = [time.perf_counter()] * 2
        for event in self._events:
            event.record()

    def stop(self) -> None:
        self._times_s[1] = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Returns the time between both; waits for the end of the work."""
        if not self._events:
            return self._times_s[1] - self._times_s[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


class Throughput:
    """Counts tokens and seconds between two points of the curves. A resumed run counts from 0."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, num_tokens: int) -> None:
        """Begins to count."""
        self._began_s = time.perf_counter()
        self._num_tokens = num_tokens
        self._paused_s = 0.0
        self._pause_began_s: float | None = None
        self._written: list[tuple[Tensor, Stopwatch, bool]] = []

    def add(self, tokens: Tensor, watch: Stopwatch) -> None:
        """Counts completions that were written for training."""
        # Completions that another thread writes during updates do not reduce the updates' time.
        self._written.append((tokens, watch, threading.current_thread() is threading.main_thread()))

    def pause(self) -> None:
        """Pauses the clock when an evaluation begins."""
        self._pause_began_s = time.perf_counter()

    def resume(self) -> None:
        """Resumes the clock after the evaluation."""
        if self._pause_began_s is not None:
            self._paused_s += time.perf_counter() - self._pause_began_s
            self._pause_began_s = None

    def rates(self, num_tokens: int, strategy: Strategy, world_size: int) -> dict[str, float]:
        """Rates since the last point that had any, over all ranks, which call this together."""
        written, self._written = self._written, []
        seconds = [watch.seconds() for _, watch, _ in written]
        tokens = float(torch.stack([count.sum().float() for count, _, _ in written]).sum()) if written else 0.0
        together_s = sum(seconds)
        if world_size > 1:
            own = torch.tensor([tokens, together_s], dtype=torch.float32, device=strategy.root_device)
            tokens, together_s = strategy.reduce(own, reduce_op="sum").tolist()
        found = {}
        if together_s > 0:
            found["time/sampling_tokens_per_second"] = tokens / (together_s / world_size)
        self._paused_s += sum(s for s, (_, _, blocks) in zip(seconds, written, strict=True) if blocks)
        now_s = time.perf_counter()
        if num_tokens > self._num_tokens and (busy_s := now_s - self._began_s - self._paused_s) > 0:
            found["time/training_tokens_per_second"] = (num_tokens - self._num_tokens) / busy_s
            self._began_s, self._num_tokens, self._paused_s = now_s, num_tokens, 0.0
        return found


#: Peak speeds of dense matrix products in bfloat16 by their makers, in operations per second, by part of the name.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "L4": 121e12,
}


def device_figures(model: Any, trainer: Any, rates: dict[str, float]) -> dict[str, float]:
    """Peak memory of this rank, and the share of peak speed that training takes: 6 operations per token and weight."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return {}
    found = {"time/peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    name = torch.cuda.get_device_name(device)
    peak = next((speed for part, speed in PEAKS.items() if part in name), None)
    rate = rates.get("time/training_tokens_per_second")
    if peak is not None and rate is not None and trainer.precision.startswith("bf16"):
        operations = sum(p.numel() * (6 if p.requires_grad else 4) for p in model.parameters())
        found["time/model_flops_utilization"] = operations * rate / (peak * trainer.world_size)
    return found
