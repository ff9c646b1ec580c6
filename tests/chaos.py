"""Kills runs at random moments, starts them again, and compares where they end with a run that was never killed.

python -m tests.chaos                      every case, some hundred kills
python -m tests.chaos --kills 20 ppo dqn   the cases whose names contain these words

Every run is ``rl fit … --resume`` in a process of its own, killed by SIGKILL at a moment drawn uniformly from its
length, start and writing of checkpoints included. The survivor's ``last.ckpt`` and ``best.ckpt`` must hold what those
of the run that was never killed hold, tensor by tensor, the progress of Lightning's loops included, and each logger's
files the same points. Every run logs to TensorBoard and to CSV files, with Lightning's ``LearningRateMonitor``.
Runs of ``…-served`` sample on a stand-in for ``rl serve``, which every other kill kills in their place and starts
again.
"""

import argparse
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.training import differences

#: Curves of the clock, which no two runs share.
CLOCKS = ("time/fps", "time/time_elapsed")
#: Likewise; a process that resumed just before a point has measured nothing for it.
RATES = ("time/sampling_tokens_per_second", "time/training_tokens_per_second")

#: All that a run logs: each logger has a folder, and the monitor reads Lightning's own counts.
LOGGED = [
    '--trainer.logger=[{"class_path": "TensorBoardLogger", "init_args": {"save_dir": "logs", "name": "run"}}, '
    '{"class_path": "CSVLogger", "init_args": {"save_dir": "csv", "name": "run"}}]',
    "--trainer.callbacks=LearningRateMonitor", "--trainer.log_every_n_steps=3",
]  # fmt: skip
#: Evaluation, so that there is a best checkpoint, and a checkpoint as often as can be written.
COMMON = [
    "--data.n_eval_episodes=2", "--data.n_test_episodes=2", "--checkpoint.interval_s=0.05", "--checkpoint.max_share=1",
    *LOGGED,
]  # fmt: skip
ROLLOUTS = ["--data=RolloutDataModule", "--data.n_envs=4", "--data.eval_freq=512", *COMMON]
TABULAR = [*ROLLOUTS, "--data.n_steps=8", "--data.batch_size=null", "--data.n_epochs=1", "--data.total_timesteps=16000",
           "--data.rollouts_per_epoch=10", "--data.env_id=Maze-v0"]  # fmt: skip
WHOLE = [*ROLLOUTS, "--data.env_id=CartPole-v1", "--data.n_steps=32", "--data.batch_size=null", "--data.n_epochs=1"]
PPO = ["--model=PPO", *ROLLOUTS, "--data.n_steps=64", "--data.batch_size=32", "--data.n_epochs=4",
       "--data.total_timesteps=3072"]  # fmt: skip
DQN = ["--model=DQN", "--data=ReplayDataModule", "--data.env_id=CartPole-v1", "--data.eval_freq=500", *COMMON,
       "--data.total_timesteps=2000", "--data.rollouts_per_epoch=50"]  # fmt: skip

SWING = ["--data=ReplayDataModule", "--data.env_id=Pendulum-v1", "--data.eval_freq=250", *COMMON,
         "--data.total_timesteps=1000", "--data.rollouts_per_epoch=50", "--data.batch_size=32",
         "--model.net_arch=[32, 32]"]  # fmt: skip

TINY = ('{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, '
        '"num_key_value_heads": 2}')  # fmt: skip
LANGUAGE = ["--data.task=addition", "--data.n_eval=8", "--data.eval_steps=5", "--model.logging_steps=3",
            "--trainer.accelerator=cpu", "--trainer.max_steps=24", "--checkpoint.interval_s=0.05",
            "--checkpoint.max_share=1", *LOGGED]  # fmt: skip
PROMPTS = ["--data=PromptDataModule", *LANGUAGE, "--model.max_completion_length=4", "--data.steps_per_generation=2",
           "--data.num_iterations=2"]  # fmt: skip
#: Dialogues whose environments sleep in a fifth of the rows, within the patience of decoding.
TURNS = [
    "--data.environment=tests.datamodules.language.dialogue_cases:Count",
    "--data.environment_kwargs.slow_s=0.02",
    "--data.max_turn_tokens=4",
    "--data.env_patience_s=5",
    "--model.max_completion_length=40",
    "--model.reward_to_go=true",
    "--data.batch_size=16",
    "--data.num_generations=4",
    "--trainer.max_steps=48",
]

#: Environments that a record and messages do not bring back.
OUTSIDE = "--data.environment=tests.datamodules.language.dialogue_cases:Outside"

CASES: dict[str, list[str]] = {
    "ppo-recorded": [*PPO, "--data.env_id=torch/CartPole-v1", "--data.rollouts_per_epoch=4", "--model.graph=true",
                     "--data.total_timesteps=8192", "--trainer.accelerator=cpu"],
    "ppo": [*PPO, "--data.env_id=CartPole-v1", "--model.learning_rate=lin_0.001", "--model.clip_range=lin_0.2"],
    "ppo-async": [*PPO, "--data.env_id=CartPole-v1", "--data.vectorization_mode=async", "--data.n_envs=2"],
    "ppo-overlap": [*PPO, "--data.env_id=Pendulum-v1", "--data.norm_obs=true", "--data.overlap=true"],
    "ppo-normalized": [*PPO, "--data.env_id=Pendulum-v1", "--data.norm_obs=true", "--data.norm_reward=true",
                       "--model.log_every=3"],
    "ppo-next-step": [*PPO, "--data.env_id=CartPole-v1", "--data.autoreset_mode=next_step", "--data.norm_obs=true"],
    "ppo-penalty": [*PPO, "--data.env_id=CartPole-v1", "--model.policy_objective=penalty", "--model.target_kl=0.001"],
    "ppo-early-stop": [*PPO, "--data.env_id=CartPole-v1", "--model.target_kl=0.0005", "--model.lr_scheduler=StepLR",
                       "--model.lr_scheduler.step_size=2", "--model.lr_scheduler.gamma=0.9"],
    "ppo-accumulated": [*PPO, "--data.env_id=CartPole-v1", "--trainer.accumulate_grad_batches=2"],
    "a2c": ["--model=A2C", *WHOLE, "--data.n_steps=5", "--data.rollouts_per_epoch=20", "--data.total_timesteps=4000"],
    "reinforce": ["--model=REINFORCE", *WHOLE, "--data.total_timesteps=5000"],
    "reinforce-baseline": ["--model=REINFORCE", "--model.psi=baseline", *WHOLE, "--data.total_timesteps=5000"],
    "trpo": ["--model=TRPO", "--model.batch_size=64", *WHOLE, "--data.total_timesteps=2560"],
    "dqn-recorded": [*DQN, "--model.graph=true", "--trainer.accelerator=cpu"],
    "dqn": [*DQN, "--data.gradient_steps=2", "--data.learning_starts=200"],
    "dqn-prioritized": [*DQN, "--data.prioritized_replay=true", "--data.n_steps=3", "--model.double=true",
                        "--data.gradient_steps=4", "--data.n_envs=2", "--data.buffer_size=1000"],
    "dqn-hindsight": [*DQN, "--data.env_id=datamodules.envs.bit_flipping:BitFlipping", "--data.n_sampled_goal=4",
                      "--data.learning_starts=200"],
    "sac-recorded": ["--model=SAC", *SWING, "--model.graph=true", "--trainer.accelerator=cpu"],
    "sac": ["--model=SAC", *SWING, "--data.gradient_steps=2", "--model.ent_coef=auto_0.5",
            "--model.learning_rate=lin_0.001"],
    "sac-dropout": ["--model=SAC", *SWING, "--data.gradient_steps=2", "--model.layer_norm=true",
                    "--model.dropout_rate=0.1", "--data.learning_starts=100", "--seed_everything=1"],
    "tqc-prioritized": ["--model=TQC", *SWING, "--data.prioritized_replay=true", "--data.n_steps=3", "--data.n_envs=2",
                        "--data.gradient_steps=2"],
    "crossq": ["--model=CrossQ", "--model.policy_delay=2", "--model.renorm_warmup_steps=200", *SWING,
               "--data.gradient_steps=2"],
    "td3": ["--model=TD3", *SWING, "--model.action_noise=OrnsteinUhlenbeckActionNoise",
            "--model.action_noise.sigma=0.3", "--data.n_envs=2", "--data.env_kwargs.max_episode_steps=30"],
    "ddpg": ["--model=DDPG", *SWING, "--model.action_noise=NormalActionNoise", "--data.autoreset_mode=next_step"],
    "qrdqn": [*DQN, "--model=QRDQN", "--model.n_quantiles=5", "--data.gradient_steps=2", "--data.learning_starts=200"],
    "rainbow": [*DQN, "--model=C51", "--model.n_atoms=5", "--model.v_min=0", "--model.v_max=50", "--model.noisy=true",
                "--model.double=true", "--model.dueling=true", "--data.prioritized_replay=true", "--data.n_steps=3",
                "--data.gradient_steps=2", "--data.learning_starts=200"],
    "pqn": [*PPO, "--model=PQN", "--data.env_id=CartPole-v1", "--data.total_timesteps=2048"],
    "recurrent-ppo": [*PPO, "--model=RecurrentPPO", "--model.lstm_hidden_size=16", "--model.burn_in=4",
                      "--data.env_id=CartPole-v1", "--data.total_timesteps=1536"],
    "recurrent-a2c": ["--model=RecurrentA2C", "--model.lstm_hidden_size=16", "--model.rnn=gru", *WHOLE,
                      "--data.n_steps=5", "--data.rollouts_per_epoch=20", "--data.total_timesteps=2000"],
    "ppo-masks": [*PPO, "--data.env_id=datamodules.envs.invalid_actions:InvalidActions"],
    "dqn-masks": [*DQN, "--data.env_id=datamodules.envs.invalid_actions:InvalidActions", "--data.learning_starts=200"],
    "monte-carlo": ["--model=MonteCarlo", *TABULAR],
    "sarsa": ["--model=SARSA", *TABULAR],
    "q-learning": ["--model=QLearning", "--model.double=true", *TABULAR],
    "sft": ["--model=SFT", f"--model.model_config={TINY}", "--data=InstructionDataModule", *LANGUAGE,
            "--model.max_completion_length=4", "--data.n_train=96", "--data.batch_size=16",
            "--trainer.accumulate_grad_batches=2"],
    "reward-model": ["--model=RewardModel", f"--model.model_config={TINY}", "--data=PreferenceDataModule", *LANGUAGE,
                     "--data.task=paths", "--data.n_train=96", "--data.batch_size=16"],
    "dpo": ["--model=DPO", f"--model.model_config={TINY}", "--model.rpo_alpha=0.5", "--data=PreferenceDataModule",
            *LANGUAGE, "--data.task=paths", "--data.n_train=96", "--data.batch_size=16"],
    "kto": ["--model=KTO", f"--model.model_config={TINY}", "--data=PreferenceDataModule", *LANGUAGE,
            "--data.task=paths", "--data.n_train=48", "--data.batch_size=16", "--trainer.accumulate_grad_batches=2"],
    "dpo-sync": ["--model=DPO", f"--model.model_config={TINY}", "--model.sync_ref_model=true",
                 "--model.ref_model_sync_steps=5", "--data=PreferenceDataModule", *LANGUAGE, "--data.task=paths",
                 "--data.n_train=64", "--data.batch_size=8"],
    "kto-sync": ["--model=KTO", f"--model.model_config={TINY}", "--model.sync_ref_model=true",
                 "--model.ref_model_sync_steps=5", "--data=PreferenceDataModule", *LANGUAGE, "--data.task=paths",
                 "--data.n_train=64", "--data.batch_size=8"],
    "grpo": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=16",
             "--data.num_generations=4", "--model.beta=0.01", "--trainer.max_steps=72"],
    "grpo-curriculum": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=16",
                        '--data.task=[{"name": "addition"}, {"name": "sort"}]', "--data.num_generations=4",
                        "--data.curriculum=learnable", '--data.reward_funcs=[{"length_reward": {"target": 3}}]'],
    "grpo-ahead": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=16",
                   "--data.num_generations=4", "--data.async_generations=1", "--trainer.max_steps=48"],
    "grpo-turns": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, *TURNS],
    "grpo-turns-ahead": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, *TURNS,
                         "--data.async_generations=1"],
    "grpo-turns-outside": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, *TURNS, OUTSIDE],
    "grpo-served": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=16",
                    "--data.num_generations=4", "--trainer.max_steps=48", "--model.sampler=vllm_server"],
    "grpo-turns-served": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, *TURNS,
                          "--model.sampler=vllm_server"],
    "rloo": ["--model=RLOO", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=16",
             "--data.num_generations=4", "--model.entropy_coef=0.01", "--trainer.max_steps=48"],
    "grpo-filters": ["--model=GRPO", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=16",
                     "--data.num_generations=4", "--model.top_p=0.8", "--data.num_iterations=2",
                     "--trainer.max_steps=48"],
    "distillation": ["--model=Distillation", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=8",
                     "--data.num_generations=1", "--data.ptx_batch_size=4", "--model.lmbda=0.5", "--model.beta=0.5",
                     "--trainer.max_steps=48"],
    "distillation-gradient": ["--model=Distillation", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=8",
                              "--data.num_generations=1", "--model.distillation_objective=policy_gradient",
                              "--data.num_iterations=2", "--trainer.max_steps=48"],
    "rlhf-ppo": ["--model=RLHFPPO", *PROMPTS, "--data.batch_size=8", "--data.num_generations=1"],
    "rlhf-ppo-verifiers": ["--model=RLHFPPO", f"--model.model_config={TINY}", *PROMPTS, "--data.batch_size=8",
                           "--data.num_generations=1", "--model.beta=0.01", "--trainer.max_steps=48"],
}  # fmt: skip


def with_models(case: str, folder: Path) -> list[str]:
    """A case's arguments; where it starts from models, those are made in ``folder``."""
    if "turns" in case:
        from tests.datamodules.language.dialogue_cases import folder_of_tokenizer

        return [*CASES[case], f"--model.tokenizer_name_or_path={folder_of_tokenizer(folder / 'tokenizer')}"]
    from rl_modules import SFT, RewardModel

    models = {"rlhf-ppo": ((SFT, "model_name_or_path"), (RewardModel, "reward_model_name_or_path"))}
    if case.startswith("distillation"):
        models[case] = ((SFT, "teacher_model_name_or_path"),)  # type: ignore[assignment]
    arguments = []
    for cls, name in models.get(case, ()):
        if not (folder / name).exists():
            model = cls(model_config=json.loads(TINY))
            model.configure_model()
            model.export(folder / name)
        arguments.append(f"--model.{name}={folder / name}")
    return [*CASES[case], *arguments]


class Served:
    """A stand-in for ``rl serve`` in a process of its own, on a port that it keeps when it starts again."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        from rl_modules import SFT

        self.token, self.model = folder / "token", folder / "served"
        given = dict(word.removeprefix("--model.").split("=", 1) for word in arguments if word.startswith("--model."))
        module = SFT(model_config=json.loads(TINY), tokenizer_name_or_path=given.get("tokenizer_name_or_path"))
        module.configure_model()
        module.export(self.model)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def arguments(self) -> list[str]:
        """What a run needs to find it, and to wait for it as long as its start takes."""
        options = {"addresses": [f"127.0.0.1:{self.port}"], "token_file": str(self.token), "retries": 120,
                   "retry_wait_s": 0.25}  # fmt: skip
        return [f"--model.sampler_options={json.dumps(options)}"]

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.rl_modules.language.fake_vllm_server", str(self.model), str(self.port),
                   str(self.token)]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline().startswith("serving on")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Outcome:
    """What became of one case."""

    kills: int = 0
    #: Of these, kills of the server.
    of_the_server: int = 0
    #: Kills before the first checkpoint, after which the run began again.
    from_the_start: int = 0
    #: Kills whose last checkpoint is from the middle of an epoch.
    mid_epoch: int = 0
    survivors: int = 0
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Run:
    """One process of ``rl fit … --resume`` in a folder of its own.

    Args:
        arguments: words after ``rl fit``.
        folder: where it runs.
        forks: copy this process, which has everything imported, instead of starting Python anew.
        resume: whether to give ``--resume``.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, forks: bool, resume: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "output.txt"
        command = ["fit", *arguments, *(["--resume"] if resume else [])]
        if forks:
            self.pid = os.fork() or self._become(command, folder)
        else:
            with self.output.open("w") as output:
                self.pid = subprocess.Popen(
                    [sys.executable, "-m", "recipes", *command], cwd=folder, stdout=output, stderr=output,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
                ).pid  # fmt: skip

    def _become(self, command: list[str], folder: Path) -> int:
        code = 1
        try:
            os.chdir(folder)
            descriptor = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
            from recipes.cli import main

            main(command)
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, at_most_s: float | None = None) -> int | None:
        """Returns the exit code; None if the run has not ended after ``at_most_s``."""
        end = None if at_most_s is None else time.monotonic() + at_most_s
        while True:
            pid, status = os.waitpid(self.pid, 0 if end is None else os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if end is not None and time.monotonic() >= end:
                return None
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: another exit code than 0, with the output.
        """
        if code := self.wait():
            raise RuntimeError(f"exit code {code}:\n{self.output.read_text()}")


def chaos(arguments: Sequence[str], kills: int, folder: Path, rng: random.Random, forks: bool = True,
          kills_per_run: int = 5) -> Outcome:  # fmt: skip
    """Kill runs of one case until there were ``kills`` kills; each run is killed at most ``kills_per_run`` times."""
    served = Served(folder, arguments) if "--model.sampler=vllm_server" in arguments else None
    arguments = [*arguments, *(served.arguments if served else [])]
    began_s = time.monotonic()
    whole = folder / "whole"
    try:
        Run(arguments, whole, forks).finish()
        length_s = time.monotonic() - began_s
        outcome = Outcome()
        while outcome.kills < kills:
            survivor = folder / f"killed-{outcome.survivors}"
            run = None
            for _ in range(min(kills_per_run, kills - outcome.kills)):
                run = run or Run(arguments, survivor, forks)
                code = run.wait(rng.uniform(0.0, length_s))
                if code is not None:
                    if code and (served is None or "; start `rl serve` there" not in run.output.read_text()):
                        raise RuntimeError(f"exit code {code}:\n{run.output.read_text()}")
                    run = None
                    if code:  # it began while the server was starting
                        continue
                    break
                outcome.kills += 1
                if served is not None and outcome.kills % 2:
                    served.kill()
                    served.start()
                    outcome.of_the_server += 1
                    continue
                run.kill()
                run = None
                last = next(survivor.glob("logs/*/*/checkpoints/last.ckpt"), None)
                outcome.from_the_start += last is None
                outcome.mid_epoch += last is not None and is_mid_epoch(last)
            if run is None or run.wait():
                Run(arguments, survivor, forks).finish()
            outcome.survivors += 1
            outcome.differences += compare(whole, survivor)
            shutil.rmtree(survivor)
    finally:
        if served is not None:
            served.kill()
    outcome.seconds = time.monotonic() - began_s
    return outcome


def is_mid_epoch(checkpoint: Path) -> bool:
    """Whether some batches of its epoch were over, and others not yet."""
    loops = torch.load(checkpoint, weights_only=True, mmap=True)["loops"]["fit_loop"]
    epoch, batch = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]["current"]
    return epoch["processed"] < epoch["started"] and batch["completed"] > 0


def compare(whole: Path, survivor: Path) -> list[str]:
    """What differs between two finished runs; nothing, if all is well."""
    from recipes.callbacks import curves

    one, other = (next(iter(sorted(folder.glob("logs/*/*/checkpoints")))) for folder in (whole, survivor))
    found = [f"runs: {len(list(survivor.glob('logs/*/*')))}"] if len(list(survivor.glob("logs/*/*"))) != 1 else []
    for name in ("last.ckpt", "best.ckpt"):
        if (one / name).exists() != (other / name).exists():
            found.append(f"{name} is there only once")
        elif (one / name).exists():
            found += [f"{name}: {difference}" for difference in differences(one / name, other / name, loops=True)]
    found += _differing_points("curve", *(curves.points(path.parent) for path in (one, other)))
    left, right = ({path.relative_to(folder): path for path in _logged(folder)} for folder in (whole, survivor))
    found += [f"{name} is there only once" for name in left.keys() ^ right.keys()]
    for name in left.keys() & right.keys():
        if name.name == "metrics.csv":
            found += _differing_points(str(name), *(_columns(files[name]) for files in (left, right)))
        elif left[name].read_bytes() != right[name].read_bytes():
            found.append(f"{name} differs")
    return found


def _logged(folder: Path) -> list[Path]:
    """The files that loggers wrote, besides TensorBoard's."""
    return [path for pattern in ("csv/**/*.*", "logs/*/*/hparams.yaml") for path in folder.glob(pattern)]


def _columns(path: Path) -> dict[str, list[tuple[int, str]]]:
    """Every column of a CSV file: (step, value) by name."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [(int(row["step"]), row[name]) for row in rows if row[name]] for name in (rows or [{}])[0]}


def _differing_points(what: str, left: dict[str, list], right: dict[str, list]) -> list[str]:
    found = []
    for tag in sorted(left.keys() | right.keys()):
        a, b = left.get(tag, []), right.get(tag, [])
        if tag in (*CLOCKS, *RATES):
            a, b = [step for step, _ in a], [step for step, _ in b]
        if tag in RATES and b == sorted(set(b) & set(a)):
            continue
        if repr(a) != repr(b):  # NaN is equal to itself here
            found.append(f"{what} {tag}: {a} and {b}")
    return found


def main() -> None:
    """Run the cases and print a table; exit code 1 where anything differs."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m tests.chaos", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("cases", nargs="*", help="parts of names; none: all")
    parser.add_argument("--kills", type=int, default=8, help="per case")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--exact", action="store_true", help="the cases are whole names")
    parser.add_argument("--fresh", action="store_true", help="start Python anew for every run, instead of forking")
    options = parser.parse_args()
    chosen = {
        part: [name for name in CASES if name == part or (part in name and not options.exact)] for part in options.cases
    }
    for part, found in chosen.items():
        if not found:
            parser.error(f"{part} is no case; the cases are {', '.join(CASES)}")
    names = [name for name in CASES if not options.cases or any(name in found for found in chosen.values())]
    results: dict[str, Outcome] = {}
    print(f"{'case':20} {'kills':>5} {'no checkpoint':>13} {'mid-epoch':>9} {'runs':>5} {'identical':>9} {'s':>6}")
    for name in names:
        rng = random.Random(f"{options.seed} {name}")
        with tempfile.TemporaryDirectory() as folder:
            if not options.fresh:
                import_everything(CASES[name])
            arguments = with_models(name, Path(folder) / "models")
            result = results[name] = chaos(arguments, options.kills, Path(folder), rng, not options.fresh)
        verdict = "no" if result.differences else "yes"
        print(f"{name:20} {result.kills:5} {result.from_the_start:13} {result.mid_epoch:9} {result.survivors:5} "
              f"{verdict:>9} {result.seconds:6.1f}"
              + (f"  ({result.of_the_server} of the server)" if result.of_the_server else ""), flush=True)  # fmt: skip
        for difference in result.differences[:5]:
            print(f"    {difference[:300]}", flush=True)
    differing = sum(bool(result.differences) for result in results.values())
    print(f"{sum(r.kills for r in results.values())} kills, {sum(r.survivors for r in results.values())} runs, "
          f"{differing} cases that differ")  # fmt: skip
    raise SystemExit(1 if differing else 0)


def import_everything(arguments: Sequence[str]) -> None:
    """Everything a run with these arguments imports, so that copies of this process need not."""
    from tensorboard.backend.event_processing import event_accumulator  # noqa: F401

    import datamodules
    import recipes.cli.lightning_cli  # noqa: F401
    import rl_modules

    torch.set_num_threads(1)
    packages: tuple[Any, ...] = (rl_modules, datamodules)
    named = {argument.rpartition("=")[2] for argument in arguments}
    for package in packages:
        for name in named.intersection(package.__all__):
            getattr(package, name)


if __name__ == "__main__":
    main()
