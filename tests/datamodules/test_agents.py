"""Agents as a vector, in the form of SuperSuit's: unbatched spaces, infos in a list, the final observation in them."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.collector import Collector
from datamodules.envs.engines import AgentsVector
from datamodules.envs.vector import as_vector
from rl_modules import DQN, PPO
from rl_modules.common.errors import UsageError
from tests.training import fit


class Games(VectorEnv):
    """Two games of three agents each; game g lasts 4 + g steps, and agent a sees [time, agent]."""

    metadata: dict[str, Any] = {"name": "games"}  # noqa: RUF012
    render_mode = None

    def __init__(self, dies: bool = False) -> None:
        self.num_envs, self.dies = 6, dies
        self.observation_space = gym.spaces.Box(-1, 10, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.closed_games = False

    def _observe(self) -> np.ndarray:
        return np.array([[self.time[i // 3], i % 3] for i in range(6)], np.float32)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        assert seed is None or 0 <= seed < 2**31
        self.time = [0, 0]
        return self._observe(), [{} for _ in range(6)]

    def step(self, actions: Any) -> Any:
        self.time = [t + 1 for t in self.time]
        observation, infos = self._observe(), [{} for _ in range(6)]
        over = np.array([self.time[i // 3] == 4 + i // 3 for i in range(6)])
        for i in np.flatnonzero(over):
            infos[i] = {"terminal_observation": observation[i], "is_success": i % 3 == 0}
        self.time = [0 if t == 4 + g else t for g, t in enumerate(self.time)]
        truncated = np.where(np.arange(6) < 3, over, False).astype(np.uint8)
        terminated = (over & ~truncated.astype(bool)).astype(np.uint8)
        if self.dies and self.time[0] == 2:
            terminated[1] = 1
        return self._observe(), np.asarray(actions, np.float32), terminated, truncated, infos

    def close(self) -> None:
        self.closed_games = True


def test_rollouts_have_the_true_successors() -> None:
    envs = as_vector(Games())
    assert isinstance(envs, AgentsVector)
    assert envs.single_observation_space.shape == (2,) and envs.observation_space.shape == (6, 2)
    collector = Collector(envs, [2**40 + 5] * 6, 1, "games")

    def act(observation: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"action": torch.ones(6, dtype=torch.int64), "value": observation[:, 0]}

    rollout = collector.collect(act, 12, torch.device("cpu"))
    for game, length in ((0, 4), (1, 5)):
        own = slice(3 * game, 3 * game + 3)
        times = torch.arange(12) % length
        torch.testing.assert_close(rollout["observation"][:, own, 0], times.float()[:, None].expand(-1, 3))
        torch.testing.assert_close(rollout["next_observation"][:, own, 0], times.float()[:, None].expand(-1, 3) + 1)
        torch.testing.assert_close(rollout["next_value"][:, own], times.float()[:, None].expand(-1, 3) + 1)
        ends = (times == length - 1)[:, None].expand(-1, 3)
        assert torch.equal(rollout["truncated" if game == 0 else "terminated"][:, own], ends)
    assert not rollout["terminated"][:, :3].any()
    means = collector.episodes.means()
    assert means["rollout/success_rate"] == pytest.approx(1 / 3)
    assert means["rollout/ep_rew_mean"] == means["rollout/ep_len_mean"]


def test_an_agent_that_dies_alone_is_refused() -> None:
    envs = as_vector(Games(dies=True))
    envs.reset(seed=0)
    envs.step(np.zeros(6, np.int64))
    with pytest.raises(UsageError, match=r"agent 1 ended before its game did \(black_death=True\)"):
        envs.step(np.zeros(6, np.int64))


@pytest.mark.parametrize("given", [Games, Games()])
def test_a_policy_is_trained_for_all_agents(given: Any) -> None:
    evaluates = given is Games
    data = RolloutDataModule(given, n_steps=16, total_timesteps=192, eval_freq=96 if evaluates else 0,
                             n_eval_episodes=6)  # fmt: skip
    trainer = fit(PPO(), data)
    assert data.n_envs == 6 and data.num_timesteps == 192
    assert ("eval/mean_reward" in trainer.callback_metrics) == evaluates


def test_transitions_of_agents_can_be_replayed() -> None:
    data = ReplayDataModule(Games, learning_starts=12, total_timesteps=60, batch_size=4, eval_freq=0)
    fit(DQN(), data)
    assert data.replay.valid.sum() == 60


def test_a_vector_of_gymnasium_stays_as_it_is() -> None:
    envs = gym.make_vec("CartPole-v1", 2)
    assert as_vector(envs) is envs


def test_closing_closes_the_games() -> None:
    games = Games()
    as_vector(games).close()
    assert games.closed_games
