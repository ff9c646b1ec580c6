"""Kills the trainer and the server of an asynchronous run in turn, and counts the prompts that training has used.

python -m tests.chaos_async --kills 20

The reward function writes down the prompts of each generation with its optimizer step. After the run every step must
have the prompts of a run that was never killed: none lost, none used twice. A step that a kill took back, because no
checkpoint was written behind it, is done again with the same prompts.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LOG = "CHAOS_PROMPTS"
TINY = ('{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, '
        '"num_key_value_heads": 2}')  # fmt: skip


def noted(prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """A reward that writes down what it is asked about."""
    with Path(os.environ[LOG]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([trainer_state.global_step, prompts[::4]]) + "\n")
    return [sum(map(ord, text)) % 5 / 4 for text in completions]


def fit_command(folder: Path, steps: int, sampler: list[str]) -> list[str]:
    return [
        sys.executable, "-m", "recipes", "fit", "--model=GRPO", "--data=PromptDataModule", "--data.task=addition",
        "--data.reward_funcs=[tests.chaos_async:noted]", "--data.n_train=4000", "--data.n_eval=0",
        "--data.batch_size=16", "--data.num_generations=4", f"--model.model_config={TINY}",
        "--model.max_completion_length=4", "--model.completions_steps=0", f"--trainer.default_root_dir={folder}",
        f"--trainer.max_steps={steps}", "--trainer.accelerator=cpu", "--checkpoint.interval_s=0.05",
        "--checkpoint.max_share=1", "--resume", *sampler,
    ]  # fmt: skip


def serve(port: int, folder: Path) -> subprocess.Popen:
    """A stand-in for ``rl serve``, with the run's architecture."""
    if not (folder / "model").exists():
        from rl_modules import SFT

        module = SFT(model_config=json.loads(TINY))
        module.configure_model()
        module.export(folder / "model")
    command = [sys.executable, "-m", "tests.rl_modules.language.fake_vllm_server", str(folder / "model"), str(port),
               str(folder / "token")]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    assert server.stdout.readline().startswith("serving on")
    return server


def read(path: Path) -> dict[int, list[list[str]]]:
    """By step, what each attempt at it asked about."""
    steps: dict[int, list[list[str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        step, prompts = json.loads(line)
        steps.setdefault(step, []).append(prompts)
    return steps


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port that nobody listens on; the server comes back to it after each kill."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps_in(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="of the trainer, and as many of the server")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps; by default 12 per pair of kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    port = free_port()
    steps = options.steps or 12 * options.kills + 12
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        whole, log = folder / "whole.jsonl", folder / "killed.jsonl"
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        subprocess.run(fit_command(folder / "whole", steps, []), env={**os.environ, LOG: str(whole)}, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        elsewhere = ["--model.sampler=vllm_server", "--data.async_generations=2",
                     f'--model.sampler_options={{"addresses": ["127.0.0.1:{port}"], "retries": 300, '
                     f'"retry_wait_s": 0.5, "token_file": "{folder / "token"}"}}']  # fmt: skip
        server = serve(port, folder)
        environment = {**os.environ, LOG: str(log)}
        command = fit_command(folder / "killed", steps, elsewhere)
        trainer = subprocess.Popen(command, env=environment, **quiet)
        kills = {"trainer": 0, "server": 0}
        for number in range(2 * options.kills):
            seen, wanted = steps_in(log), random.randint(2, 6)
            while trainer.poll() is None and steps_in(log) < seen + wanted:
                time.sleep(0.05)
            time.sleep(random.random() * 0.5)
            if trainer.poll() is not None:
                break
            if number % 2:
                kill(server)
                server = serve(port, folder)
                kills["server"] += 1
            else:
                kill(trainer)
                trainer = subprocess.Popen(command, env=environment, **quiet)
                kills["trainer"] += 1
        _, errors = trainer.communicate()
        kill(server)
        if trainer.returncode:
            raise SystemExit(f"the run ended with {trainer.returncode}:\n{errors}")
        expected, found = read(whole), read(log)
    lost = [step for step in expected if step not in found]
    wrong = [step for step, attempts in found.items() if any(a != expected[step][0] for a in attempts)]
    again = sum(len(attempts) - 1 for attempts in found.values())
    print(f"{kills['trainer']} kills of the trainer, {kills['server']} of the server, {steps} steps of 4 prompts: "
          f"{len(lost)} steps lost, {len(wrong)} with other prompts; {again} done again after a kill")  # fmt: skip
    raise SystemExit(1 if lost or wrong else 0)


if __name__ == "__main__":
    main()
