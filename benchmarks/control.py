"""Steps per second beside Stable-Baselines3 and a bare torch loop: the same work, in one process, alternating.

    python -m benchmarks.control --algorithm ppo --pairs 5 --json ppo.json

Each contestant trains on CartPole-v1 with the rl-baselines3-zoo settings. ``dqn_defaults``: the settings of
Stable-Baselines3 itself, an update per four transitions of one environment; ``sac`` and ``td3``: Pendulum-v1 with its
defaults and two hidden layers of 256, an update with 256 transitions per step; ``ppo_envpool``: PPO's whole run with
EnvPool's engine, beside ``sync``, the steps of ``sync`` alone, whose share of the run the ratio is, and
Stable-Baselines3; ``overlap_cheetah`` and ``overlap_pong``: PPO on HalfCheetah-v5
with one environment and on Pong with eight, the zoo's settings, environments in processes of their own, with
``overlap``, without it, and with the environments in this process; ``pong``: environments alone, eight games of Pong
with their preprocessing and random actions, a step is four frames.

Evaluation and progress bars are off, logging is each library's default. Ratios are taken within a round and their
median is reported, for machines are noisy.
"""

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ZOO_PPO = {"n_steps": 32, "batch_size": 256, "n_epochs": 20}
ZOO_DQN = {"buffer_size": 100_000, "learning_starts": 1_000, "train_freq": 256, "gradient_steps": 128, "batch_size": 64}
DEFAULT_DQN = {"buffer_size": 100_000, "learning_starts": 100, "train_freq": 4, "gradient_steps": 1, "batch_size": 32}
EXPLORATION = {"target_update_interval": 10, "exploration_fraction": 0.16, "exploration_final_eps": 0.04}


def ours_ppo(total_timesteps: int, vectorization_mode: str = "sync") -> None:
    from datamodules import RolloutDataModule
    from rl_modules import PPO

    data = RolloutDataModule("CartPole-v1", n_envs=8, total_timesteps=total_timesteps, eval_freq=0,
                             vectorization_mode=vectorization_mode, **ZOO_PPO)  # fmt: skip
    model = PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", clip_range="lin_0.2", log_every=4)
    _fit(model, data)


def sb3_ppo(total_timesteps: int) -> None:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    def linear(initial: float) -> Callable[[float], float]:
        return lambda remaining: remaining * initial

    envs = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    PPO("MlpPolicy", envs, gamma=0.98, gae_lambda=0.8, learning_rate=linear(1e-3), clip_range=linear(0.2), device="cpu",
        **ZOO_PPO).learn(total_timesteps)  # fmt: skip
    envs.close()


def bare_ppo(total_timesteps: int) -> None:
    from benchmarks.bare import bare_ppo

    bare_ppo(total_timesteps)


def ours_a2c(total_timesteps: int) -> None:
    from datamodules import RolloutDataModule
    from rl_modules import A2C

    data = RolloutDataModule("CartPole-v1", n_envs=8, total_timesteps=total_timesteps, eval_freq=0)
    _fit(A2C(), data)


def sb3_a2c(total_timesteps: int) -> None:
    from stable_baselines3 import A2C
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    A2C("MlpPolicy", envs, device="cpu").learn(total_timesteps)
    envs.close()


def ours_dqn(total_timesteps: int) -> None:
    from datamodules import ReplayDataModule
    from rl_modules import DQN

    data = ReplayDataModule("CartPole-v1", total_timesteps=total_timesteps, eval_freq=0, **ZOO_DQN)
    _fit(DQN(learning_rate=2.3e-3, net_arch=[256, 256], **EXPLORATION), data)


def sb3_dqn(total_timesteps: int) -> None:
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("CartPole-v1", n_envs=1, seed=0)
    DQN("MlpPolicy", envs, learning_rate=2.3e-3, policy_kwargs={"net_arch": [256, 256]}, device="cpu",
        **ZOO_DQN, **EXPLORATION).learn(total_timesteps)  # fmt: skip
    envs.close()


def ours_dqn_defaults(total_timesteps: int) -> None:
    from datamodules import ReplayDataModule
    from rl_modules import DQN

    data = ReplayDataModule("CartPole-v1", total_timesteps=total_timesteps, eval_freq=0, **DEFAULT_DQN)
    _fit(DQN(learning_rate=1e-4, net_arch=[64, 64], target_update_interval=10_000), data)


def sb3_dqn_defaults(total_timesteps: int) -> None:
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("CartPole-v1", n_envs=1, seed=0)
    DQN("MlpPolicy", envs, learning_rate=1e-4, target_update_interval=10_000, device="cpu",
        **DEFAULT_DQN).learn(total_timesteps)  # fmt: skip
    envs.close()


def _ours_on_pendulum(name: str, total_timesteps: int) -> None:
    import rl_modules
    from datamodules import ReplayDataModule

    data = ReplayDataModule("Pendulum-v1", total_timesteps=total_timesteps, eval_freq=0)
    _fit(getattr(rl_modules, name)(net_arch=[256, 256]), data)


def _sb3_on_pendulum(name: str, total_timesteps: int) -> None:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("Pendulum-v1", n_envs=1, seed=0)
    algorithm = getattr(stable_baselines3, name)
    algorithm("MlpPolicy", envs, policy_kwargs={"net_arch": [256, 256]}, device="cpu").learn(total_timesteps)
    envs.close()


def cartpole_steps(total_timesteps: int) -> None:
    from datamodules.envs.vector import make_vector_env

    _step(make_vector_env("CartPole-v1", 8, "sync"), total_timesteps, n_actions=2)


def ours_pong(total_timesteps: int, vectorization_mode: str = "envpool") -> None:
    from datamodules.envs.vector import make_vector_env

    envs = make_vector_env("ALE/Pong-v5", 8, vectorization_mode)
    _step(envs, total_timesteps)


def ours_overlapping(kind: str, total_timesteps: int, overlap: bool, vectorization_mode: str = "async") -> None:
    from datamodules import RolloutDataModule
    from rl_modules import PPO

    common: dict[str, Any] = {"eval_freq": 0, "overlap": overlap, "total_timesteps": total_timesteps,
                              "vectorization_mode": vectorization_mode}  # fmt: skip
    if kind == "cheetah":
        data = RolloutDataModule("HalfCheetah-v5", 1, n_steps=512, batch_size=64, n_epochs=20, norm_obs=True,
                                 norm_reward=True, **common)  # fmt: skip
        model = PPO(learning_rate=2e-5, clip_range=0.1, net_arch=[256, 256], activation_fn="relu", log_std_init=-2.0)
    else:
        stack = {"class_path": "FrameStackObservation", "init_args": {"stack_size": 4}}
        data = RolloutDataModule("ALE/Pong-v5", 8, n_steps=128, batch_size=256, n_epochs=4, sign_reward=True,
                                 env_kwargs={"frameskip": 1, "repeat_action_probability": 0.0},
                                 wrappers=["AtariPreprocessing", stack], **common)  # fmt: skip
        model = PPO(learning_rate="lin_2.5e-4", clip_range="lin_0.1", ent_coef=0.01)
    _fit(model, data)


def sb3_pong(total_timesteps: int) -> None:
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=8, seed=0), 4)
    _step(envs, total_timesteps)


def _step(envs: Any, total_timesteps: int, n_actions: int = 6) -> None:
    """Takes ``total_timesteps`` transitions of eight environments with random actions."""
    actions = np.random.default_rng(0).integers(n_actions, size=(total_timesteps // 8, 8))
    envs.reset()
    for action in actions:
        envs.step(action)
    envs.close()


def _fit(model: object, data: object) -> None:
    import lightning as L

    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=-1, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False
        )  # fmt: skip
        trainer.fit(model, datamodule=data)


CONTESTANTS: dict[str, dict[str, Callable[[int], None]]] = {
    "ppo": {"ours": ours_ppo, "stable-baselines3": sb3_ppo, "bare torch loop": bare_ppo},
    "ppo_envpool": {"ours": partial(ours_ppo, vectorization_mode="envpool"), "ours, sync": ours_ppo,
                    "sync's steps alone": cartpole_steps, "stable-baselines3": sb3_ppo},
    **{
        f"overlap_{kind}": {
            "ours": partial(ours_overlapping, kind, overlap=True),
            "ours, in turn": partial(ours_overlapping, kind, overlap=False),
            "ours, sync": partial(ours_overlapping, kind, overlap=False, vectorization_mode="sync"),
        }
        for kind in ("cheetah", "pong")
    },
    "pong": {"ours": ours_pong, "ours, ALE's engine": partial(ours_pong, vectorization_mode="vector_entry_point"),
             "stable-baselines3": sb3_pong},
    "a2c": {"ours": ours_a2c, "stable-baselines3": sb3_a2c},
    "dqn": {"ours": ours_dqn, "stable-baselines3": sb3_dqn},
    "dqn_defaults": {"ours": ours_dqn_defaults, "stable-baselines3": sb3_dqn_defaults},
    **{
        name.lower(): {"ours": partial(_ours_on_pendulum, name), "stable-baselines3": partial(_sb3_on_pendulum, name)}
        for name in ("SAC", "TD3")
    },
}  # fmt: skip
TIMESTEPS = {
    "ppo": 40_960,
    "ppo_envpool": 40_960,
    "overlap_cheetah": 8_192,
    "overlap_pong": 8_192,
    "pong": 8_000,
    "a2c": 40_000,
    "dqn": 10_240,
    "dqn_defaults": 20_480,
    "sac": 2_000,
    "td3": 3_000,
}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(algorithm: str, pairs: int, total_timesteps: int, clock: str = "wall") -> dict:
    """Alternates the contestants and compares them round by round."""
    now = CLOCKS[clock]
    contestants = CONTESTANTS[algorithm]
    for run in contestants.values():
        run(min(2_048, total_timesteps))  # imports, allocator, first-call costs
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(pairs):
        for name, run in contestants.items():
            start_s = now()
            run(total_timesteps)
            speeds[name].append(total_timesteps / (now() - start_s))
    ratios = {
        name: statistics.median(own / other for own, other in zip(speeds["ours"], speeds[name], strict=True))
        for name in contestants
    }
    return {
        "algorithm": algorithm,
        "total_timesteps": total_timesteps,
        "pairs": pairs,
        "clock": clock,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steps_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "ours_over": ratios,
        "rounds": speeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=[*CONTESTANTS], nargs="+", default=[*CONTESTANTS])
    parser.add_argument("--pairs", type=int, default=5, help="rounds; the median is reported")
    parser.add_argument("--timesteps", type=int, help="transitions per run; default: enough for some seconds")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, for every contestant")
    parser.add_argument(
        "--clock", choices=[*CLOCKS], default="wall", help="cpu: the processor's time, where other work runs beside"
    )
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    results = [measure(name, args.pairs, args.timesteps or TIMESTEPS[name], args.clock) for name in args.algorithm]
    for result in results:
        print(f"\n{result['algorithm']}: {result['total_timesteps']:,} transitions, {result['pairs']} rounds, "
              f"{result['threads']} thread(s), {result['clock']} time")  # fmt: skip
        print(f"{'contestant':<20}{'steps/s':>10}{'ours ÷ it':>12}")
        for name, speed in result["steps_per_second"].items():
            print(f"{name:<20}{speed:>10,.0f}{result['ours_over'][name]:>12.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
