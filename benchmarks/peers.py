"""Rows of the table of results, learned by Stable-Baselines3 and sb3-contrib with the same settings.

    python -m benchmarks.peers a2c/lunarlander qrdqn/acrobot --seeds 10 --jobs 2

A published benchmark is often one run, in an earlier version of the environment. This program trains the peer's
algorithm of the same name with a config's arguments, for as many transitions, and plays 100 deterministic episodes.
Arguments that the config leaves out have the peer's defaults, and a config with an argument that the peer lacks is
refused. Each seed is kept as ``benchmarks/results/<row>/stable-baselines3/<seed>.json``; what is there already is not
run again. ``python -m benchmarks.results report`` puts both side by side.
"""

import argparse
import inspect
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import yaml

from benchmarks.results import PEER, ROWS, STORE, Row, check_settings
from recipes import configs
from rl_modules.common.schedules import parse_schedule, schedule_value
from rl_modules.networks.layers import activation

#: Arguments that the peer takes in its ``policy_kwargs``.
OF_POLICY = ("net_arch", "activation_fn", "log_std_init", "ortho_init", "n_quantiles", "n_critics")
SCHEDULES = ("learning_rate", "clip_range")
#: Arguments without an effect on learning.
WITHOUT_EFFECT = ("log_every", "rollouts_per_epoch", "eval_freq", "n_eval_episodes", "n_test_episodes")


@dataclass(frozen=True)
class Contest:
    """A row of the table in the form that the peer trains.

    ``algorithm`` is its class, ``arguments`` those of the class, and the rest makes its environments.
    """

    algorithm: Any
    arguments: dict[str, Any]
    env_id: str
    env_kwargs: dict[str, Any]
    n_envs: int
    total_timesteps: int
    norm_obs: bool
    norm_reward: bool

    def environments(self, n_envs: int, seed: int, gamma: float | None = None) -> Any:
        """A vector of environments, normalised as the row says; without ``gamma``, by statistics that stay fixed."""
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize

        envs = make_vec_env(self.env_id, n_envs, seed=seed, env_kwargs=self.env_kwargs)
        if not self.norm_obs and not self.norm_reward:
            return envs
        if gamma is None:
            return VecNormalize(envs, training=False, norm_obs=self.norm_obs, norm_reward=False)
        return VecNormalize(envs, norm_obs=self.norm_obs, norm_reward=self.norm_reward, gamma=gamma)


def contest(row: Row) -> Contest:
    """Translates a row's config.

    Raises:
        ValueError: the peer has no such algorithm or argument.
    """
    import sb3_contrib
    import stable_baselines3

    content = yaml.safe_load(configs.text(row.config))
    name = content["model"]["class_path"]
    algorithm = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name, None)
    if algorithm is None:
        raise ValueError(f"{row.config}: Stable-Baselines3 and sb3-contrib have no {name}")
    known = inspect.signature(algorithm).parameters
    data = {name: _number(value) for name, value in content["data"]["init_args"].items()}
    arguments = {name: _number(value) for name, value in content["model"].get("init_args", {}).items()}
    if ":" in str(data["env_id"]):
        raise ValueError(f"{row.config}: env_id={data['env_id']} is an import path, which only this project resolves")
    is_replay = content["data"]["class_path"] == "ReplayDataModule"
    if not is_replay and not {"n_envs", "n_steps"} <= set(data):
        raise ValueError(f"{row.config}: n_envs and n_steps have other defaults in Stable-Baselines3")
    made = {
        "env_id": data.pop("env_id"),
        "env_kwargs": data.pop("env_kwargs", {}),
        "n_envs": data.pop("n_envs", 1),
        "total_timesteps": data.pop("total_timesteps"),
        "norm_obs": data.pop("norm_obs", False),
        "norm_reward": data.pop("norm_reward", False),
    }
    if data.get("batch_size", 0) is None:
        # Whole rollouts: the peer's A2C and TRPO, which learn from them once, do nothing else.
        del data["batch_size"]
        if "n_epochs" in known:
            data["batch_size"] = made["n_envs"] * data["n_steps"]
        elif data.get("n_epochs") == 1:
            del data["n_epochs"]
    arguments = {name: value for name, value in {**arguments, **data}.items() if name not in WITHOUT_EFFECT}
    policy = {name: arguments.pop(name) for name in OF_POLICY if name in arguments}
    if "activation_fn" in policy:
        policy["activation_fn"] = type(activation(policy["activation_fn"]))
    for name in SCHEDULES:
        if name in arguments:
            arguments[name] = partial(schedule_value, parse_schedule(arguments[name], name))
    if "action_noise" in arguments:
        arguments["action_noise"] = _action_noise(arguments["action_noise"], made["env_id"], made["env_kwargs"])
    unknown = set(arguments) - set(known)
    if unknown:
        raise ValueError(f"{row.config}: {algorithm.__name__} of the peer has no {', '.join(sorted(unknown))}")
    if policy:
        arguments["policy_kwargs"] = policy
    return Contest(algorithm, arguments, **made)


def _number(value: Any) -> Any:
    """Converts a number that YAML 1.1 reads as text, such as 1e-5."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _action_noise(given: dict[str, Any], env_id: str, env_kwargs: dict[str, Any]) -> Any:
    """Returns the peer's noise, which needs mean and standard deviation per dimension of the action."""
    from stable_baselines3.common import noise

    shape = gym.make(env_id, **env_kwargs).action_space.shape
    sizes = {name: x * np.ones(shape) for name, x in given.get("init_args", {}).items()}
    return getattr(noise, given["class_path"])(np.zeros(shape), **sizes)


def train(row: Row, seed: int) -> str:
    """Trains one seed and stores its result; returns a line about it."""
    import torch
    from stable_baselines3.common.evaluation import evaluate_policy

    path = STORE / row.config / PEER / f"{seed}.json"
    if path.exists():
        return f"{row.config} seed {seed}: there already"
    torch.set_num_threads(1)
    start_s = time.process_time()
    task = contest(row)
    gamma = task.arguments.get("gamma", inspect.signature(task.algorithm).parameters["gamma"].default)
    envs = task.environments(task.n_envs, seed, gamma)
    model = task.algorithm("MlpPolicy", envs, seed=seed, device="cpu", **task.arguments)
    model.learn(task.total_timesteps)
    # Training's environments have the seeds from `seed` on.
    test_envs = task.environments(1, 10_000 + seed)
    if task.norm_obs:
        test_envs.obs_rms = envs.obs_rms
    final, _ = evaluate_policy(model, test_envs, n_eval_episodes=100, deterministic=True)
    took_s = time.process_time() - start_s
    result = {"seed": seed, "final": float(final), "total_timesteps": model.num_timesteps,
              "cpu_s": round(took_s, 1), "version": _version(task.algorithm)}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), encoding="utf-8")
    return f"{row.config} seed {seed}: {result['final']:.2f}, {took_s:.0f} s of processor time"


def _version(algorithm: Callable[..., Any]) -> str:
    from importlib.metadata import version

    package = algorithm.__module__.partition(".")[0].replace("_", "-")
    return f"{package} {version(package)}, gymnasium {gym.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", metavar="ROW", choices=[*ROWS], help="configs of the table of results")
    parser.add_argument("--seeds", type=int, default=5, help="from 0 on")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    args = parser.parse_args()
    for name in args.rows:
        # Rows that can't be compared are refused before the first run.
        contest(ROWS[name])
        check_settings(ROWS[name])
    with ProcessPoolExecutor(args.jobs) as pool:
        for run in [pool.submit(train, ROWS[name], seed) for seed in range(args.seeds) for name in args.rows]:
            print(run.result(), flush=True)


if __name__ == "__main__":
    main()
