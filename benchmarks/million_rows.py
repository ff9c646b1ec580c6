"""Time to the first batch, and peak memory, of a JSONL file of a million addition questions.

    python -m benchmarks.million_rows [--rows 1000000] [--kinds sft dpo grpo]

Each kind of data runs in a process of its own, with a model of one layer. Seconds are those of ``Trainer.fit`` until
the first batch, without imports; MiB are the highest resident size of the process, imports included.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import resident

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = ("sft", "dpo", "grpo")


def write_rows(path: Path, n: int) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(n):
            a, b = draw.randrange(1000), draw.randrange(1000)
            texts = {"completion": str(a + b), "answer": str(a + b), "chosen": str(a + b), "rejected": str(a + b + 1)}
            file.write(json.dumps({"prompt": f"{a}+{b}=", **texts}) + "\n")


def begin(kind: str, path: str) -> dict[str, float]:
    """Fits one step in this process."""
    import lightning as L

    import rl_modules
    from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule

    found: dict[str, float] = {}

    class FirstBatch(L.Callback):
        def on_train_batch_start(self, *others: Any) -> None:
            found.setdefault("seconds", time.perf_counter() - start_s)
            found.setdefault("MiB", resident("VmHWM"))

    module: Any
    if kind == "sft":
        module, data = rl_modules.SFT(model_config=MODEL), InstructionDataModule(path=path)
    elif kind == "dpo":
        module, data = rl_modules.DPO(model_config=MODEL), PreferenceDataModule(path=path)
    else:
        module = rl_modules.GRPO(model_config=MODEL, max_completion_length=4)
        data = PromptDataModule(path=path, reward_funcs="exact_answer")
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, callbacks=[FirstBatch()])  # fmt: skip
    start_s = time.perf_counter()
    trainer.fit(module, datamodule=data)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--path", help="run one kind on this file, in this process")
    arguments = parser.parse_args()
    if arguments.path is not None:
        print(json.dumps(begin(arguments.kinds[0], arguments.path)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        write_rows(path, arguments.rows)
        for kind in arguments.kinds:
            command = [sys.executable, "-m", "benchmarks.million_rows", "--kinds", kind, "--path", str(path)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            result = json.loads(output.splitlines()[-1])
            print(f"{kind}: first batch after {result['seconds']:.1f} s, peak {result['MiB']:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
