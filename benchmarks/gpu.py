"""Every language module at the size of Qwen2.5-0.5B, and PPO and DQN, for a few steps on one GPU.

    python -m benchmarks.gpu                        with CUDA, under ten minutes; elsewhere says what it would do
    python -m benchmarks.gpu --only GRPO --json gpu.json
    python -m benchmarks.gpu --tiny --device cpu    the same code at toy size, anywhere

Weights are random and no network is needed. Per module: tokens per second of sampling and of training, peak memory,
waits of the host for the device per optimizer step, the share of the card's matrix-product speed that training takes
(6 · parameters · tokens) and the share of its memory bandwidth that sampling takes (the weights, read once per step of
decoding), both against speeds measured here. Resume is checked bit for bit on the same device, with a small model:
three steps against two, a checkpoint, and one.
"""

import argparse
import json
import logging
import os
import resource
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # bit-exact repeats; read when CUDA starts

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_cases import CASES, HALF_BILLION, TINY, Case, Size, write_data, write_judge

#: Operators whose result the host waits for.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")
COLUMNS = ("sampling tokens/s", "training tokens/s", "peak GiB", "waits/step", "of matmul speed", "of bandwidth",
           "resume exact", "seconds")  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts operators whose result the host waits for, and copies from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _WAITS or (name.startswith("index") and _has_mask(args)):
            self.count += 1
        elif name in ("_to_copy", "copy_") and args and isinstance(result, torch.Tensor):
            source = args[1] if name == "copy_" else args[0]
            self.count += source.device.type == "cuda" and result.device.type == "cpu"
        return result


def _has_mask(args: Any) -> bool:
    """Returns whether an indexing operator gets a mask, whose true places must be counted first."""
    places = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in places)


class Meter(L.Callback):
    """Times and counts of the steps after the first, and the waits of the last one."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps = device, steps
        self.sampled = self.decoded = self.trained = 0
        self.sampling_s = self.total_s = 0.0
        self.waits = Waits()
        self._counting = False

    def now(self) -> float:
        """Seconds, once the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._seen = 0
        if hasattr(pl_module, "model"):
            act = pl_module.act if hasattr(pl_module, "act") else None
            if act is not None:
                pl_module.act = lambda *args, **kwargs: self._sample(act, *args, **kwargs)

    def _sample(self, act: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = self.now()
        written = act(*args, **kwargs)
        if self._seen and not self._counting:
            self.sampling_s += self.now() - began_s
            self.sampled += int(written.length.sum())
            self.decoded += int(written.length.max())
        return written

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        step = trainer.global_step
        if step == self._seen:
            return
        self._seen = step
        tokens = getattr(pl_module, "num_tokens", 0)
        if step == 1:  # the first step warms up
            self._began_s, self._began_tokens = self.now(), tokens
        elif step == self.steps - 1:
            self.total_s = self.now() - self._began_s
            self.trained = tokens - self._began_tokens
            self._counting = True
            self.waits.__enter__()  # for the last step, which is not timed

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._counting:
            self.waits.__exit__(None, None, None)
        pl_module.__dict__.pop("act", None)


def fit(case: Case, size: Size, folder: Path, device: torch.device, steps: int, **more: Any) -> tuple[L.Trainer, Any]:
    """Trains a new module for a number of optimizer steps."""
    module, data = case.make(size, folder)
    settings = {"accelerator": device.type, "devices": 1, "logger": False, "enable_checkpointing": False,
                "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": -1, "max_steps": steps,
                "precision": "bf16-mixed" if device.type == "cuda" and case.is_language else "32-true"}  # fmt: skip
    ckpt_path = more.pop("ckpt_path", None)
    trainer = L.Trainer(**{**settings, **more})
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer, module


def resumes_exactly(case: Case, folder: Path, device: torch.device) -> bool:
    """Returns whether two steps, a checkpoint and a third step give the same bits as three steps."""
    whole, _ = fit(case, TINY, folder, device, 3, deterministic="warn")
    part, _ = fit(case, TINY, folder, device, 2, deterministic="warn")
    whole.save_checkpoint(folder / "whole.ckpt")
    part.save_checkpoint(folder / "part.ckpt")
    again, _ = fit(case, TINY, folder, device, 3, deterministic="warn", ckpt_path=folder / "part.ckpt")
    again.save_checkpoint(folder / "again.ckpt")
    torch.use_deterministic_algorithms(False)
    one, other = (torch.load(folder / f"{name}.ckpt", weights_only=True)["state_dict"] for name in ("whole", "again"))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def measure(case: Case, size: Size, folder: Path, device: torch.device, steps: int, speed: dict[str, float]) -> dict:
    """One row of the table."""
    began_s = time.perf_counter()
    small = folder / "small"
    exact = None if case.is_vllm else resumes_exactly(case, small, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    meter = Meter(device, steps)
    _, module = fit(case, size, folder, device, steps, callbacks=[meter])
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = {"case": case.name, "resume exact": exact, "peak GiB": peak / 2**30, "waits/step": meter.waits.count}
    if case.is_language:
        parameters = sum(p.numel() for p in module.model.parameters())
        width = 2 if device.type == "cuda" else 4
        training_s = meter.total_s - meter.sampling_s
        row["training tokens/s"] = meter.trained / training_s
        row["of matmul speed"] = 6 * parameters * row["training tokens/s"] / speed["matmul"]
        if meter.sampled:
            row["sampling tokens/s"] = meter.sampled / meter.sampling_s
            row["of bandwidth"] = meter.decoded * parameters * width / meter.sampling_s / speed["bandwidth"]
    return {**row, "seconds": time.perf_counter() - began_s}


def speeds(device: torch.device, side: int) -> dict[str, float]:
    """Measures the operations per second of a matrix product and the bytes per second of a copy on this device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(side, side, dtype=dtype, device=device)
    b, c = torch.randn(side, side, dtype=dtype, device=device), torch.empty(side, side, dtype=dtype, device=device)

    def seconds(run: Any, times: int = 10) -> float:
        meter = Meter(device, 0)
        run()
        began_s = meter.now()
        for _ in range(times):
            run()
        return (meter.now() - began_s) / times

    return {"matmul": 2 * side**3 / seconds(lambda: torch.mm(a, b, out=c)),
            "bandwidth": 2 * a.nbytes / seconds(lambda: c.copy_(a))}  # fmt: skip


def plan(size: Size, cases: list[Case]) -> str:
    """Describes the planned runs, and the memory of weights, gradients and AdamW's moments in float32."""
    parameters = 0.494e9
    lines = ["No CUDA device here. On one, this would run, at the size of Qwen2.5-0.5B with random weights:"]
    for case in cases:
        if case.is_language:
            gib = 4 * parameters * (case.copies + 3 * case.trained) / 2**30
            lines.append(f"  {case.name}: {size.batch_size} x ({size.prompt} + {size.completion}) tokens a step, "
                         f"bf16-mixed, {gib:.1f} GiB of weights, gradients and moments, and activations")  # fmt: skip
        else:
            lines.append(f"  {case.name}: CartPole-v1")
    lines.append("each but vLLM's (which needs vLLM installed) with a check that it resumes bit for bit. python -m "
                 "benchmarks.gpu --tiny --device cpu runs all others here at toy size.")  # fmt: skip
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """Returns the rows in Markdown."""

    def cell(value: Any) -> str:
        if isinstance(value, bool) or value is None:
            return {None: "", True: "yes", False: "NO"}[value]
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    lines = [f"| module | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {row['case']} | {' | '.join(cell(row.get(c)) for c in COLUMNS)} |" for row in rows]
    return "\n".join(lines)


def main(args: list[str] | None = None) -> list[dict]:
    """Runs the cases and prints the table; returns its rows, which are empty if only a plan was printed.

    Args:
        args: of the command line; None: ``sys.argv``.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy size")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each module, at least 3")
    parser.add_argument("--only", action="append", help="a module's name as the table has it; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    given = parser.parse_args(args)
    if given.steps < 3:
        parser.error(f"--steps={given.steps} must be at least 3: the first warms up, the last is counted")
    cases = [case for case in CASES if not given.only or case.name in given.only]
    if not cases:
        parser.error(f"--only {given.only} names no module; there are {', '.join(case.name for case in CASES)}")
    size = TINY if given.tiny else HALF_BILLION
    if given.device == "cuda" and not torch.cuda.is_available():
        print(plan(size, cases))
        return []
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    if device.type == "cpu" or find_spec("vllm") is None:
        for case in cases:
            if case.is_vllm:
                print(f"{case.name}: left out, needs vLLM and a CUDA device")
        cases = [case for case in cases if not case.is_vllm]
    speed = speeds(device, 256 if given.tiny else 8192)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}: {speed['matmul'] / 1e12:.3g} Tflop/s in a matrix product, {speed['bandwidth'] / 1e9:.3g} GB/s")
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "small").mkdir()
        for where, of in ((folder, size), (folder / "small", TINY)):
            write_data(of, where)
            if any(case.name == "RLHFPPO" for case in cases):
                write_judge(of, where)
        for case in cases:
            rows.append(measure(case, size, folder, device, given.steps, speed))
            print(f"{case.name}: {rows[-1]['seconds']:.0f} s", flush=True)
    print(f"\n{table(rows)}")
    if given.json is not None:
        given.json.write_text(json.dumps({"device": name, **speed, "rows": rows}, indent=1), "utf-8")
    return rows


if __name__ == "__main__":
    main()
