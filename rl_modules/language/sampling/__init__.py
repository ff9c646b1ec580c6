"""Samplers: from prompts to completions with their log-probabilities; by their name on the command line.

``sample`` decodes with the model itself; :class:`Sampler` is the interface of every sampler.
"""

from __future__ import annotations

from typing import Any

from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.language.architecture import is_sharded
from rl_modules.language.sampling.native import NativeSampler, sample
from rl_modules.language.sampling.protocol import Completions, Sampler, SamplingSettings
from rl_modules.language.sampling.vllm import VLLMSampler

__all__ = ["Completions", "NativeSampler", "Sampler", "SamplingSettings", "check_options", "make_sampler", "sample"]

#: Options of each sampler.
OPTIONS: dict[str, tuple[str, ...]] = {
    "native": ("graph_memory",),
    "vllm": ("gpu_memory_utilization", "enforce_eager"),
    "vllm_server": ("addresses", "token_file", "timeout_s", "retries", "retry_wait_s"),
}


def check_options(kind: str, options: dict[str, Any]) -> None:
    """Refuses options that a sampler does not have, and a server without an address."""
    for name in options:
        if name not in OPTIONS[kind]:
            known = ", ".join(OPTIONS[kind]) or "none"
            raise UsageError(
                f"sampler_options={{{name}: …}} is no option of sampler={kind} (its options: {known})"
                f"{did_you_mean(name, OPTIONS[kind])}"
            )
    if kind == "vllm_server" and not options.get("addresses"):
        raise UsageError("sampler=vllm_server needs sampler_options={addresses: [host:port]} of a running `rl serve`")


def make_sampler(
    kind: str,
    options: dict[str, Any],
    max_rows_in_flight: int | None,
    model: Any,
    cache_implementation: str = "auto",
    ranks: tuple[int, int, int] = (0, 1, 0),
    run: str | None = None,
) -> Sampler:
    """Returns a sampler for a model; ``ranks``: the rank in the run, the number of ranks, the rank on the machine."""
    if kind == "native":
        return NativeSampler(model, max_rows_in_flight, cache_implementation, **options)
    device = next(model.parameters()).device
    if kind == "vllm_server":
        from rl_modules.language.sampling.remote import ServerSampler

        return ServerSampler(device=device, pushes=ranks[0] == 0, run=run, **options)
    if ranks[1] > 1 and is_sharded(model):
        raise UsageError(
            "sampler=vllm has whole weights on each rank, and the strategy splits them; start `rl serve` "
            "and take sampler=vllm_server, or strategy=ddp"
        )
    return VLLMSampler(model, max_rows_in_flight=max_rows_in_flight, ranks=ranks, **options)
