"""Resume, compared: kills training processes at random moments and compares with the run that was never killed.

python -m benchmarks.resume run                  every case, 30 kills each; a second call continues
python -m benchmarks.resume run sb3 --kills 10   the cases whose names contain these words
python -m benchmarks.resume table                writes the table into docs/resume_compared.md
"""

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.resume.table import RESULTS, write

MODULES = ("sb3", "cleanrl", "lightning_example", "trl_trainers", "ours")
NAMES = {
    "sb3": ("sb3-ppo", "sb3-dqn", "sb3-sac"), "cleanrl": ("cleanrl",),
    "lightning_example": ("lightning-steps", "lightning-epochs"),
    "trl_trainers": ("trl-sft", "trl-dpo", "trl-grpo"),
    "ours": tuple(f"ours-{name}" for name in (
        "ppo", "dqn", "grpo", "sft", "q-learning", "a2c", "reinforce", "trpo", "sarsa", "monte-carlo", "reward-model",
        "dpo", "kto", "rloo", "rlhf-ppo", "qrdqn", "ddpg", "td3", "sac", "tqc", "recurrent-ppo", "recurrent-a2c")),
}  # fmt: skip


def main() -> None:
    """Runs cases, each in a process of its own, or writes the table."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.resume", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("command", choices=["run", "case", "table"])
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--kills", type=int, default=30, help="per case")
    options = parser.parse_args()
    if options.command == "table":
        write()
        return
    cases = [(module, name) for module in MODULES for name in NAMES[module]]
    if options.command == "case":
        from benchmarks.resume.harness import run

        ((module, name),) = [case for case in cases if case[1] == options.names[0]]
        case = import_module(f"benchmarks.resume.{module}").CASES[name]()
        run(case, RESULTS / f"{name}.json", options.kills)
        return
    failed = 0
    for _, name in cases:
        if not options.names or any(word in name for word in options.names):
            command = [sys.executable, "-m", "benchmarks.resume", "case", name, "--kills", str(options.kills)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path.cwd()),
                           "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
            failed += subprocess.run(command, env=environment, check=False).returncode != 0
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
