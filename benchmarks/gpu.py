"""What a GPU does here: targets and peers, then every language module, PPO and DQN for a few steps.

    python -m benchmarks.gpu                        with CUDA, at most eight minutes; elsewhere says what it would do
    python -m benchmarks.gpu --only decoding --only SAC --json gpu.json
    python -m benchmarks.gpu --cpu                  the same code at toy size, anywhere

Each row is printed as soon as it is there. A case that takes longer than its budget is stopped, and one that would
begin after the end is left out, each with a line that says so. What hangs within the driver ends the command, and so
does an error after which the device computes no more; the file of ``--json`` is whole at any time.

First come decoding, GRPO and SFT at the size of Qwen2.5-0.5B with random weights beside TRL and a plain loop, GRPO on a
real checkpoint, PPO in torch, SAC and TD3 beside Stable-Baselines3 (:mod:`benchmarks.gpu_targets`). Then per module:
tokens per second of sampling and of training, peak memory, waits of the host for the device per optimizer step, the
share of the card's matrix-product speed that training takes (6 · parameters · tokens) and the share of its memory
bandwidth that sampling takes (the weights, read once per step of decoding), both against speeds measured here. Resume
is checked bit for bit on the same device, with a small model: three steps against two, a checkpoint, and one.
"""

import argparse
import faulthandler
import gc
import json
import logging
import math
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # bit-exact repeats; read when CUDA starts

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu_cases import CASES, HALF_BILLION, TINY, Case, Size, drawn_once, write_data, write_judge
from benchmarks.gpu_targets import TARGETS, Place, Target

#: Operators whose result the host waits for.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")
COLUMNS = ("sampling tokens/s", "training tokens/s", "peak GiB", "waits/step", "of matmul speed", "of bandwidth",
           "resume exact", "seconds")  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts operators whose result the host waits for, and copies from the device to the host. On CUDA those between
    tensors of the host don't count: AdamW that is not fused reads a count of steps per weight there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _WAITS or (name.startswith("index") and _has_mask(args)):
            devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            self.count += "cuda" in devices or not torch.cuda.is_available()
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
            self._counting = False
            self.waits.__exit__(None, None, None)
        pl_module.__dict__.pop("act", None)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)  # the next case runs without this one's mode


def fit(case: Case, size: Size, folder: Path, device: torch.device, steps: int, **more: Any) -> tuple[L.Trainer, Any]:
    """Trains a new module for a number of optimizer steps."""
    module, data = case.make(size, folder)
    settings = {"accelerator": device.type, "devices": 1, "logger": False, "enable_checkpointing": False,
                "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": -1, "max_steps": steps,
                "precision": "bf16-mixed" if device.type == "cuda" and case.is_language else "32-true"}  # fmt: skip
    ckpt_path = more.pop("ckpt_path", None)
    trainer = L.Trainer(**{**settings, **more})
    with drawn_once() if case.is_language else nullcontext():
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer, module


def resumes_exactly(case: Case, folder: Path, device: torch.device) -> bool:
    """Returns whether two steps, a checkpoint and a third step give the same bits as three steps."""
    try:
        whole, _ = fit(case, TINY, folder, device, 3, deterministic="warn")
        part, _ = fit(case, TINY, folder, device, 2, deterministic="warn")
        whole.save_checkpoint(folder / "whole.ckpt")
        part.save_checkpoint(folder / "part.ckpt")
        again, _ = fit(case, TINY, folder, device, 3, deterministic="warn", ckpt_path=folder / "part.ckpt")
        again.save_checkpoint(folder / "again.ckpt")
    finally:  # also where the time is over
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
    micro = case.micro_batches if device.type == "cuda" else 1
    _, module = fit(case, size, folder, device, steps, callbacks=[meter], accumulate_grad_batches=micro)
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


@contextmanager
def within(seconds: float, again: float = 15.0) -> Iterator[None]:
    """Raises TimeoutError after that time, and again where a library keeps it to itself."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cell(value: Any) -> str:
    """A value of the table as text."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {None: "", True: "yes", False: "NO"}.get(value, value)
    return "-" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Report:
    """Prints rows as they come and keeps them, until the time is over."""

    def __init__(self, total_s: float, path: Path | None, about: dict[str, Any]) -> None:
        self.began_s, self.path, self.about = time.perf_counter(), path, about
        self.ends_s = self.began_s + total_s
        self.rows: list[dict[str, Any]] = []

    def show(self, case: str, cells: list[Any], row: dict[str, Any]) -> None:
        print(f"| {case} | {' | '.join(map(cell, cells))} |", flush=True)
        self.rows.append({"case": case, **row})
        if self.path is not None:  # a run that is stopped from outside leaves what it has
            part = self.path.with_name(f"{self.path.name}.part")
            so_far = {**self.about, "seconds": time.perf_counter() - self.began_s, "rows": self.rows}
            part.write_text(json.dumps(so_far, indent=1), "utf-8")
            part.replace(self.path)

    def run(self, case: str, budget_s: float, run: Callable[[], None]) -> None:
        """Runs a case within its budget; what goes wrong in it is a row too."""
        left = self.ends_s - time.perf_counter()
        if left < 5:
            self.show(case, ["left out: the time is over"], {"left out": True})
            return
        try:
            with within(min(budget_s, left)):
                run()
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            self.show(case, [f"not measured: {said}"], {"error": said})
        gc.collect()
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # of the kind after which every call fails
                said = f"{' '.join(str(error).split())[:160]}; run the cases after it by --only"
                self.show(case, [f"the device is lost: {said}"], {"error": said})
                raise SystemExit(1) from error


def header(first: str, columns: tuple[str, ...]) -> None:
    """Prints the first two lines of a table in Markdown."""
    print(f"\n| {first} | {' | '.join(columns)} |\n" + "|---" * (1 + len(columns)) + "|", flush=True)


def compare(report: Report, target: Target, place: Place) -> None:
    """The rows of one case with a target."""

    def run() -> None:
        for line in target.run(place):
            ratio = None if line.theirs is None else line.ours / line.theirs
            cells = [line.quantity, line.ours, line.peer, line.theirs, ratio, line.target]
            report.show(target.name, cells, {**line._asdict(), "ratio": ratio})

    report.run(target.name, target.budget_s, run)


def main(args: list[str] | None = None) -> list[dict]:
    """Runs the cases and prints their rows; returns them, none if only a plan was printed.

    Args:
        args: of the command line; None: ``sys.argv``.
    """
    names = [case.name for case in (*TARGETS, *CASES)]
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--cpu", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of each module, at least 3")
    parser.add_argument("--seconds", type=float, default=470, help="after which no case begins")
    parser.add_argument("--only", action="append", help=f"a case; may be repeated: {', '.join(names)}")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    given = parser.parse_args(args)
    if given.steps < 3:
        parser.error(f"--steps={given.steps} must be at least 3: the first warms up, the last is counted")
    targets = [target for target in TARGETS if not given.only or target.name in given.only]
    cases = [case for case in CASES if not given.only or case.name in given.only]
    if not targets and not cases:
        parser.error(f"--only {given.only} names no case; there are {', '.join(names)}")
    if not given.cpu and not torch.cuda.is_available():
        print(f"No CUDA device here. On one, this would run within {given.seconds:.0f} s: "
              f"{', '.join(case.name for case in (*targets, *cases))}.\n"
              "python -m benchmarks.gpu --cpu runs all but vLLM's at toy size.")  # fmt: skip
        return []
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    disable_progress_bar()
    device = torch.device("cpu") if given.cpu else torch.device("cuda", 0)
    size = TINY if given.cpu else HALF_BILLION
    speed = speeds(device, 256 if given.cpu else 8192)
    name = "CPU" if given.cpu else torch.cuda.get_device_name(device)
    print(f"{name}, torch {torch.__version__}: {speed['matmul'] / 1e12:.3g} Tflop/s in a matrix product, "
          f"{speed['bandwidth'] / 1e9:.3g} GB/s", flush=True)  # fmt: skip
    report = Report(given.seconds, given.json, {"device": name, "torch": torch.__version__, **speed})
    place = Place(device, given.cpu, speed["matmul"])
    # An alarm waits for the end of a call into the driver, this doesn't.
    faulthandler.dump_traceback_later(given.seconds + 20, exit=True, file=sys.__stderr__)
    try:
        if targets:
            header("case", ("quantity", "ours", "peer", "its", "ratio", "target"))
        for target in targets:
            compare(report, target, place)
        if cases:
            header("module", COLUMNS)
            measure_modules(report, cases, size, device, given.steps, speed)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"\nAll of it took {time.perf_counter() - report.began_s:.0f} s (≤ 480).", flush=True)
    return report.rows


def measure_modules(
    report: Report, cases: list[Case], size: Size, device: torch.device, steps: int, speed: dict[str, float]
) -> None:
    """The rows of the modules."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "small").mkdir()
        for where, of in ((folder, size), (folder / "small", TINY)):
            write_data(of, where)
        for case in cases:
            if case.is_vllm and (device.type == "cpu" or find_spec("vllm") is None):
                print(f"| {case.name} | left out: needs vLLM and a CUDA device |", flush=True)
                continue

            def run(case: Case = case) -> None:
                if case.name.startswith("RLHFPPO") and not (folder / "small" / "judge").exists():
                    write_judge(size, folder)
                    write_judge(TINY, folder / "small")
                own, place = (case.size(size), folder / case.name) if device.type == "cuda" else (size, folder)
                if case.lengths is not None and place != folder:
                    place.mkdir()
                    write_data(own, place)
                    (place / "judge").symlink_to(folder / "judge")
                    (place / "small").symlink_to(folder / "small")
                row = measure(case, own, place if case.lengths else folder, device, steps, speed)
                report.show(case.name, [row.get(column) for column in COLUMNS], row)

            report.run(case.name, 60, run)


if __name__ == "__main__":
    main()
