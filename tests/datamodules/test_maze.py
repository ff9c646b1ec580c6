"""Maze-v0, the numbering wrapper, and environments' transition tables as tensors."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import datamodules  # noqa: F401 (registers Maze-v0)
from datamodules.envs.discrete import FlattenDiscrete
from datamodules.envs.maze import Maze
from datamodules.envs.model import transition_model
from rl_modules.common.errors import UsageError

LEFT, DOWN, RIGHT, UP = range(4)


def walk(env, *actions):
    env.reset(seed=0)
    return [env.step(action)[:4] for action in actions]


# ---------------------------------------------------------------- the maze


@pytest.mark.filterwarnings("error")
def test_gymnasium_accepts_the_maze():
    check_env(gym.make("Maze-v0").unwrapped)


def test_the_maze_of_the_notes_pays_ten_for_the_goal_and_minus_ten_for_the_trap():
    env = gym.make("Maze-v0")
    assert env.observation_space.n == 6
    assert walk(env, RIGHT, RIGHT, DOWN) == [(1, 0, False, False), (2, 0, False, False), (5, 10, True, False)]
    assert walk(env, DOWN, RIGHT) == [(3, 0, False, False), (4, -10, True, False)]


def test_walls_and_borders_leave_the_agent_where_it_is():
    env = Maze("S#G\n..T")
    assert walk(env, RIGHT, UP, LEFT) == [(0, 0, False, False)] * 3
    assert walk(env, DOWN, UP)[1][0] == 0


def test_a_policy_in_circles_meets_the_time_limit():
    env = gym.make("Maze-v0")
    env.reset(seed=0)
    ends = [env.step(UP)[2:4] for _ in range(100)]
    assert ends[-1] == (False, True)
    assert ends[-2] == (False, False)


def test_the_table_says_what_step_does():
    env = Maze("S.#\n..T\n#G.")
    for state in range(9):
        if env.desc.ravel()[state] in "GT#":
            continue
        for action in range(4):
            env.reset(seed=0)
            env._state = state
            [(probability, successor, reward, terminated)] = env.P[state][action]
            assert env.step(action)[:3] == (successor, reward, terminated)
            assert probability == 1.0


def test_several_starts_are_all_used():
    env = Maze("SSG")
    assert {env.reset(seed=seed)[0] for seed in range(20)} == {0, 1}


def test_rendering_shows_maze_and_agent():
    env = gym.make("Maze-v0", render_mode="ansi")
    env.reset(seed=0)
    env.step(RIGHT)
    assert env.render() == "SA.\n.TG\n"
    env = gym.make("Maze-v0", render_mode="rgb_array")
    env.reset(seed=0)
    before = env.render()
    env.step(RIGHT)
    after = env.render()
    assert before.shape == (128, 192, 3)
    assert before.dtype == np.uint8
    # The disc has moved from the first cell to the second; nothing else has changed.
    changed = (before != after).any(-1)
    assert changed[:64, :64].any()
    assert changed[:64, 64:128].any()
    assert not changed[64:].any()
    assert not changed[:, 128:].any()


def test_a_layout_in_a_config_may_be_indented():
    assert Maze("\n    S.G\n    .#T\n").shape == (2, 3)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("S..\n.XG", r"line 2 \('.XG'\): 'X' is no cell; .*'#' wall"),
        ("S..\n.TG.", r"line 2 \('.TG.'\) has 4 cells, line 1 \('S..'\) has 3"),
        ("...\n.TG", "has no start; draw at least one 'S'"),
        ("S..\n.T.", "has no goal; draw at least one 'G'"),
        ("", "has no start"),
    ],
)
def test_a_wrong_layout_is_named(layout, message):
    with pytest.raises(UsageError, match=message):
        Maze(layout)


def test_importing_datamodules_does_not_import_the_maze():
    code = "import datamodules, sys; sys.exit('datamodules.envs.maze' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- transition tables

REFERENCES = [
    # Exact optima of gymnasium 1.4.0, rounded to four digits.
    ("FrozenLake-v1", 100, 0.7442),
    ("FrozenLake8x8-v1", 200, 0.9132),
    ("CliffWalking-v1", 200, -13.0),
    ("CliffWalkingSlippery-v1", 1000, -64.7092),
    ("Taxi-v4", 200, 7.93),
    ("Maze-v0", 100, 10.0),
]


@pytest.mark.parametrize(("env_id", "limit", "best"), REFERENCES)
def test_best_returns_within_the_time_limit(env_id, limit, best):
    model = transition_model(gym.make(env_id, max_episode_steps=limit))
    assert model.horizon == limit
    # 5e-5: the references have four digits.
    assert model.optimal_return() == pytest.approx(best, abs=5e-5)


def test_expected_return_agrees_with_sampled_episodes():
    env = gym.make("FrozenLake-v1", max_episode_steps=12)
    model = transition_model(env)
    policy = torch.full((16, 4), 0.25, dtype=torch.float64)
    policy[:, 1] = 0.5
    policy[:, 3] = 0.0
    generator = np.random.default_rng(0)
    total, episodes = 0.0, 1500
    for episode in range(episodes):
        state, _ = env.reset(seed=episode)
        done = False
        while not done:
            state, reward, terminated, truncated, _ = env.step(int(generator.choice(4, p=policy[state].numpy())))
            total, done = total + reward, terminated or truncated
    exact = model.expected_return(policy)
    assert 0.005 < exact < 0.1
    # Four standard errors of a Bernoulli mean.
    assert total / episodes == pytest.approx(exact, abs=4 * (exact / episodes) ** 0.5)


def test_without_a_time_limit_a_policy_that_ends_has_a_return_and_one_in_circles_has_none():
    model = transition_model(gym.make("CliffWalking-v1"))
    assert model.horizon is None
    assert model.optimal_return() == pytest.approx(-13.0)
    up = torch.nn.functional.one_hot(torch.zeros(48, dtype=torch.int64), 4).double()
    with pytest.raises(ValueError, match="never reaches"):
        model.expected_return(up)


def test_circles_are_found_where_there_are_any():
    assert transition_model(Maze("S.G")).may_never_end()

    class Corridor(Maze):
        def _outcome(self, state, action, rewards):
            return super()._outcome(state, RIGHT, rewards)

    assert not transition_model(Corridor("S.G")).may_never_end()


def test_a_wrapper_that_changes_rewards_hides_the_table():
    env = gym.make("FrozenLake-v1")
    assert transition_model(gym.wrappers.RecordEpisodeStatistics(env)) is not None
    assert transition_model(gym.wrappers.TransformReward(env, lambda r: 2 * r)) is None
    assert transition_model(gym.make("CartPole-v1")) is None


def test_a_grid_world_knows_its_cells():
    assert transition_model(gym.make("FrozenLake-v1")).cells == ("SFFF", "FHFH", "FFFH", "HFFG")
    assert transition_model(gym.make("CliffWalking-v1")).cells[3] == "S##########G"
    assert transition_model(gym.make("Taxi-v4")).cells is None


# ---------------------------------------------------------------- numbering


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
def test_blackjack_hands_are_numbered_without_gaps():
    env = FlattenDiscrete(gym.make("Blackjack-v1"))
    assert env.observation_space.n == 32 * 11 * 2
    numbers = {env.observation((a, b, c)) for a in range(32) for b in range(11) for c in range(2)}
    assert numbers == set(range(704))
    assert env.observation((20, 10, 1)) == (20 * 11 + 10) * 2 + 1
    check_env(env)


def test_parts_may_start_elsewhere_than_at_zero():
    class Pair(gym.Env):
        observation_space = gym.spaces.MultiDiscrete([3, 2], start=[5, -1])
        action_space = gym.spaces.Discrete(2)

    env = FlattenDiscrete(Pair())
    assert env.observation_space.n == 6
    assert env.observation(np.array([5, -1])) == 0
    assert env.observation(np.array([7, 0])) == 5


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gym.spaces.Box(0, 1, (2,)), "not the observation space Box"),
        (gym.spaces.MultiDiscrete([10_000, 10_000]), "100,000,000 combinations"),
    ],
)
def test_what_cannot_be_numbered_is_named(space, message):
    class Wide(gym.Env):
        observation_space = space
        action_space = gym.spaces.Discrete(2)

    with pytest.raises(UsageError, match=message):
        FlattenDiscrete(Wide())


def test_taxis_fickle_passengers_are_in_no_table():
    # They change where they go during the ride: the best policy's returns there average 8.37, not the table's 7.93.
    assert transition_model(gym.make("Taxi-v4", fickle_passenger=True)) is None
