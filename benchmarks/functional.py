"""Time and peak memory of the functional core beside plain implementations, and beside TRL where it is installed.

    python -m benchmarks.functional [--json PATH] [--device cuda] [--pairs 15] [--quick]

Runs alternate, ours after theirs, and the ratio is the median over pairs: the load of a shared machine changes from
second to second, and hits both. Set OMP_NUM_THREADS to the number of cores that you mean.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rl_modules.functional import gae, ppo_clip_loss, token_entropy, token_log_probs, value_loss

try:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    TOKEN_REFERENCE = "TRL selective_log_softmax"
    ENTROPY_REFERENCE = "TRL entropy_from_logits"
except ImportError:
    TOKEN_REFERENCE = "log_softmax + gather"
    ENTROPY_REFERENCE = "log_softmax, exp, sum"

    def selective_log_softmax(logits: Tensor, index: Tensor, temperature: float = 1.0) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def entropy_from_logits(logits: Tensor) -> Tensor:
        log_prob = logits.log_softmax(-1)
        return -(log_prob.exp() * log_prob).sum(-1)


@dataclass
class Row:
    """One comparison; times are medians in milliseconds, memory is the peak of what was allocated on the way."""

    case: str
    reference: str
    reference_ms: float
    ours_ms: float
    speedup: float
    reference_mb: float
    ours_mb: float


def loop_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Computes GAE by the loop that most code bases have, in tensors."""
    result = torch.zeros_like(reward)
    last = torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * next_value[t] * (1 - terminated[t].float()) - value[t]
        last = delta + gamma * gae_lambda * (1 - (terminated[t] | truncated[t]).float()) * last
        result[t] = last
    return result


def clamped_ppo_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """Computes the clipped loss as in Stable-Baselines3's PPO."""
    ratio = torch.exp(log_prob - old_log_prob)
    first = advantage * ratio
    second = advantage * torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    return -torch.min(first, second).mean()


def peak_mb(function: Callable[[], object], device: torch.device) -> float:
    """Returns the largest sum of allocations alive at once while the function runs, in MB."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        function()
    alive = peak = 0
    for event in recording.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak / 1e6


def seconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    start_s = time.perf_counter()
    for _ in range(repeats):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / repeats


def compare(
    case: str,
    reference_name: str,
    reference: Callable[[], object],
    ours: Callable[[], object],
    pairs: int,
    device: torch.device,
) -> Row:
    reference(), ours()
    once = max(seconds(reference, 1, device), seconds(ours, 1, device))
    repeats = max(1, int(0.01 / once))  # at least 10 ms a measurement, so that the clock and the queue don't matter
    times = [(seconds(reference, repeats, device), seconds(ours, repeats, device)) for _ in range(pairs)]
    return Row(
        case,
        reference_name,
        round(1e3 * statistics.median(theirs for theirs, _ in times), 4),
        round(1e3 * statistics.median(own for _, own in times), 4),
        round(statistics.median(theirs / own for theirs, own in times), 2),
        round(peak_mb(reference, device), 2),
        round(peak_mb(ours, device), 2),
    )


def with_gradient(function: Callable[[], Tensor], leaf: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(function().sum(), leaf)


def gae_rows(pairs: int, device: torch.device, quick: bool) -> list[Row]:
    rows = []
    for steps, envs in [(5, 8), (32, 8), (128, 8)] + ([] if quick else [(2048, 64)]):
        tensors = [torch.randn(steps, envs, device=device) for _ in range(3)]
        tensors += [torch.rand(steps, envs, device=device) < 0.02 for _ in range(2)]
        rows.append(
            compare(
                f"gae [{steps}, {envs}]",
                "Python loop over T",
                lambda tensors=tensors: loop_gae(*tensors, 0.99, 0.95),
                lambda tensors=tensors: gae(*tensors, 0.99, 0.95),
                pairs,
                device,
            )
        )
    return rows


def minibatch_rows(pairs: int, device: torch.device) -> list[Row]:
    log_prob = torch.randn(256, device=device, requires_grad=True)
    old, advantage = torch.randn(256, device=device), torch.randn(256, device=device)
    return [
        compare(
            "ppo_clip_loss [256], with gradient",
            "exp, clamp, min",
            with_gradient(lambda: clamped_ppo_loss(log_prob, old, advantage, 0.2), log_prob),
            with_gradient(lambda: ppo_clip_loss(log_prob, old, advantage, 0.2), log_prob),
            pairs,
            device,
        ),
        compare(
            "value_loss [256], with gradient",
            "(v - r)² mean",
            with_gradient(lambda: 0.5 * (log_prob - old).square().mean(), log_prob),
            with_gradient(lambda: value_loss(log_prob, old), log_prob),
            pairs,
            device,
        ),
    ]


def token_rows(pairs: int, device: torch.device, quick: bool) -> list[Row]:
    rows = []
    shapes = [(256, 6, 32), (8, 64, 4096)] if quick else [(256, 6, 32), (8, 256, 8192), (4, 128, 50257)]
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            logits = (torch.randn(*shape, device=device) * 3).to(dtype).requires_grad_()
            tokens = torch.randint(shape[-1], shape[:-1], device=device)
            for temperature in (1.0, 0.7):

                def reference(logits: Tensor = logits, tokens: Tensor = tokens, t: float = temperature) -> Tensor:
                    return selective_log_softmax(logits, tokens, t)

                def ours(logits: Tensor = logits, tokens: Tensor = tokens, t: float = temperature) -> Tensor:
                    return token_log_probs(logits, tokens, t)

                name = f"token_log_probs {list(shape)} {str(dtype)[6:]}, T = {temperature}"
                rows.append(compare(name, TOKEN_REFERENCE, reference, ours, pairs, device))
                rows.append(
                    compare(
                        f"{name}, with gradient",
                        TOKEN_REFERENCE,
                        with_gradient(reference, logits),
                        with_gradient(ours, logits),
                        pairs,
                        device,
                    )
                )
            constant = logits.detach()
            rows.append(
                compare(
                    f"token_entropy {list(shape)} {str(dtype)[6:]}",
                    ENTROPY_REFERENCE,
                    lambda constant=constant: entropy_from_logits(constant),
                    lambda constant=constant: token_entropy(constant),
                    pairs,
                    device,
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows and the machine to this file")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--pairs", default=15, type=int, help="alternating measurements per comparison")
    parser.add_argument("--quick", action="store_true", help="small shapes only: a few seconds")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    rows = gae_rows(arguments.pairs, arguments.device, arguments.quick)
    rows += minibatch_rows(arguments.pairs, arguments.device)
    rows += token_rows(arguments.pairs, arguments.device, arguments.quick)

    line = "{:<66} {:<26} {:>10} {:>10} {:>8} {:>9} {:>9}"
    print(line.format("case", "reference", "ref ms", "ours ms", "speedup", "ref MB", "ours MB"))
    for row in rows:
        print(
            line.format(
                row.case,
                row.reference,
                f"{row.reference_ms:.3f}",
                f"{row.ours_ms:.3f}",
                f"{row.speedup:.2f}x",
                f"{row.reference_mb:.1f}",
                f"{row.ours_mb:.1f}",
            )
        )
    if arguments.json:
        machine = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "device": str(arguments.device),
        }
        arguments.json.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
