"""Solves small environments exactly, and compares what an agent has learned with the solution.

python -m recipes.dynamic_programming --env_id FrozenLake-v1
python -m recipes.dynamic_programming --ckpt_path logs/QLearning-FrozenLake-v1/version_0/checkpoints/last.ckpt
"""

import sys
from typing import Any

import torch
from torch import Tensor

import rl_modules
from datamodules.envs.model import TransitionModel, transition_model
from datamodules.envs.vector import make_env
from datamodules.registered import code_of_environment, code_of_settings, code_of_wrappers
from recipes.callbacks.pictures import action_directions
from recipes.cli.options import Parser
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.named_code import refuse_named
from rl_modules.common.stored_arguments import settings_of
from rl_modules.core.checkpoint_file import read_checkpoint

_ARROWS = {(0, -1): "←", (1, 0): "↓", (0, 1): "→", (-1, 0): "↑", (0, 0): "·"}
_MOST_ROWS = 24


def main(args: list[str] | None = None) -> None:
    """Prints V*, the best policy and the best return of an environment."""
    parser = Parser("python -m recipes.dynamic_programming", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--env_id", help="environment with a transition table; default: the checkpoint's")
    parser.add_argument("--ckpt_path", help="checkpoint of MonteCarlo, SARSA or QLearning to compare with the solution")
    parser.add_argument("--gamma", type=float, help="discount γ; default: the checkpoint's, or 0.99")
    parser.add_argument("--max_episode_steps", type=int, help="time limit; default: the environment's own")
    try:
        options = parser.parse_args(args)
        solve(options.env_id, options.ckpt_path, options.gamma, options.max_episode_steps)
    except ValueError as error:  # a UsageError, or what the functional core refuses
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def solve(
    env_id: str | None = None,
    ckpt_path: str | None = None,
    gamma: float | None = None,
    max_episode_steps: int | None = None,
) -> Tensor:
    """Solves an environment by value iteration over its own transition table, and prints the solution."""
    agent, saved = (None, {}) if ckpt_path is None else _load(ckpt_path)
    if env_id is None:
        if agent is None:
            raise UsageError("no environment is named; give --env_id or --ckpt_path")
        env_id = saved["env_id"]
        refuse_named("the checkpoint", "env_id", code_of_environment(env_id), f"give --env_id {env_id}")
    same = env_id == saved.get("env_id")
    settings = settings_of(saved, "datamodule_hyper_parameters") if same else {}
    again = "give --env_id an import path of a function that makes and wraps the environment"
    refuse_named("the checkpoint", "wrappers", code_of_wrappers(settings.get("wrappers")), again)
    refuse_named("the checkpoint", "env_kwargs", code_of_settings(settings.get("env_kwargs")), again)
    env_kwargs = dict(settings.get("env_kwargs") or {})
    if max_episode_steps is not None:
        env_kwargs["max_episode_steps"] = max_episode_steps
    env = make_env(str(env_id), env_kwargs, settings.get("wrappers") or ())
    model = transition_model(env)
    if model is None:
        raise UsageError(
            f"{env_id} has no transition table to solve (Maze-v0, FrozenLake-v1, CliffWalking-v1 and "
            "Taxi-v4 have one; wrappers that change observations or rewards hide it, and Taxi's "
            "fickle_passenger makes it wrong)"
        )
    gamma = gamma if gamma is not None else agent.gamma if agent is not None else 0.99
    if agent is not None and agent.q.shape != (model.states, model.reward.shape[1]):
        raise UsageError(
            f"the checkpoint's table is {tuple(agent.q.shape)}, {env_id} needs {(model.states, model.reward.shape[1])}"
        )
    q = F.value_iteration(model.transition, model.reward, gamma)[: model.states]
    _report(str(env_id), model, q, gamma, agent)
    return q


def _load(path: str) -> tuple[Any, dict[str, Any]]:
    saved = read_checkpoint(path, "ckpt_path")
    name = saved.get("algorithm")
    if name not in ("MonteCarlo", "SARSA", "QLearning"):
        raise UsageError(
            f"ckpt_path={path!r} holds {name or 'no control algorithm'}; a table is kept by MonteCarlo, "
            "SARSA and QLearning"
        )
    return getattr(rl_modules, name).load_from_checkpoint(path, map_location="cpu"), saved


def _report(env_id: str, model: TransitionModel, q: Tensor, gamma: float, agent: Any) -> None:
    limit = "no time limit" if model.horizon is None else f"at most {model.horizon} steps an episode"
    print(f"{env_id}: {model.states} states, {q.shape[1]} actions, {limit}; γ = {gamma:g}")
    one_hot = torch.nn.functional.one_hot(q.argmax(-1), q.shape[1]).double()
    print(f"expected return   {_return(model.optimal_return())} at best, by a policy that knows the time left")
    print(f"                  {_return(_expected_return(model, one_hot))} of the policy that is greedy in Q*")
    tables = {"V* and the best action": q}
    if agent is not None:
        name = type(agent).__name__
        print(f"                  {_return(_expected_return(model, agent.greedy_policy()))} of {name}'s greedy policy")
        tables[f"{name}: max Q and the greedy action"] = agent.allowed_q
    for title, table in tables.items():
        print(f"\n{title}")
        print("\n".join(_table(model, table)))
    if agent is not None:
        visited = agent.tables.visits.sum(0).sum(-1) > 0
        value, greedy = agent.allowed_q.max(-1)
        loss = q.max(-1).values - q.gather(1, greedy[:, None])[:, 0]
        print(
            f"\nof {int(visited.sum())} visited states the greedy action is a best one in "
            f"{int((loss[visited] < 1e-6).sum())}; largest |max Q - V*| there: "
            f"{float((value - q.max(-1).values)[visited].abs().max()):.3g}"
        )


def _expected_return(model: TransitionModel, policy: Tensor) -> float | None:
    try:
        return model.expected_return(policy)
    except ValueError:
        return None


def _return(value: float | None) -> str:
    return "  unbounded" if value is None else f"{value:11.4f}"


def _table(model: TransitionModel, q: Tensor) -> list[str]:
    value, action = q.max(-1).values.tolist(), q.argmax(-1).tolist()
    if model.cells is None:
        lines = [f"state {s:4d}  {value[s]:9.3f}  action {action[s]}" for s in range(min(model.states, _MOST_ROWS))]
        return lines + [f"… and {model.states - _MOST_ROWS} more states"] * (model.states > _MOST_ROWS)
    arrows = [_ARROWS[direction] for direction in action_directions(model)]
    columns, lives = len(model.cells[0]), model.acts_in().tolist()
    cells = [
        f"{value[s]:8.3f} {arrows[action[s]]}" if lives[s] else f"{model.cells[s // columns][s % columns]:>8}  "
        for s in range(model.states)
    ]
    return ["".join(cells[row * columns : (row + 1) * columns]) for row in range(len(model.cells))]


if __name__ == "__main__":
    main()
