"""Episodes of single lives, and the Atari recipe."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from datamodules import ReplayDataModule
from datamodules.envs.atari import EpisodicLife
from datamodules.envs.episodes import SeededEpisodes
from rl_modules import DQN
from rl_modules.common.errors import UsageError
from tests.marks import quick
from tests.training import assert_resumes_exactly, rollouts

LIFE = "datamodules.envs.atari.EpisodicLife"


class Lives(gym.Env):
    """Three lives; observations are the game's own random numbers, so that a new game shows."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.games = getattr(self, "games", 0) + 1
        self.lives, self.t, self.game = 3, 0, self.np_random.normal()
        return self.see(), {"lives": self.lives}

    def see(self):
        return np.array([self.game, self.t, self.lives], np.float32)

    def step(self, action):
        self.t += 1
        self.lives -= int(self.np_random.random() < 0.3)
        return self.see(), 1.0, self.lives == 0, self.t == 40, {"lives": self.lives}


def play(env, seed, steps):
    """What is seen over some steps, with a reset after each end."""
    rows = [(*env.reset(seed=seed)[0], False)]
    for _ in range(steps):
        observation, _, terminated, truncated, _ = env.step(0)
        rows.append((*observation, terminated or truncated))
        if terminated or truncated:
            rows.append((*env.reset()[0], False))
    return rows


def test_an_episode_ends_with_a_life_and_the_game_goes_on():
    rows = play(EpisodicLife(Lives()), 0, 200)
    games, ends = [row[0] for row in rows], [row[3] for row in rows]
    per_game = {game: sum(end for end, g in zip(ends, games, strict=True) if g == game) for game in games}
    assert len(per_game) > 5
    # Two lives end an episode each, and so does the game's end (or its time limit, or a life lost between two).
    assert set(list(per_game.values())[:-1]) <= {1, 2, 3}
    assert 3 in per_game.values()
    for before, after in zip(rows, rows[1:], strict=False):
        if before[3] and before[2] > 0 and before[1] < 39:
            goes_on = after[0] == before[0]  # in the same game, unless its last life was lost in the step between
            assert after[1] == (before[1] + 1 if goes_on else 0)
            assert goes_on or before[2] == 1


def test_a_seed_begins_a_new_game():
    env = SeededEpisodes(EpisodicLife(Lives()))
    assert play(env, 3, 7) == play(env, 3, 7)
    env.reset(seed=3)
    games = env.unwrapped.games
    env.reset(seed=3)
    assert env.unwrapped.games == games + 1


@pytest.mark.parametrize("steps", range(0, 60, 7))
def test_a_game_is_repeated_through_its_lives(steps):
    one, other = (SeededEpisodes(EpisodicLife(Lives())) for _ in range(2))
    play(one, 5, steps)
    play(other, 6, 3)
    other.episode_state = one.episode_state
    np.testing.assert_array_equal(one.last_observation, other.last_observation)
    for _ in range(60):
        (a, *ends, _), (b, *others, _) = one.step(1), other.step(1)
        np.testing.assert_array_equal(a, b)
        assert ends == others
        if ends[1] or ends[2]:
            np.testing.assert_array_equal(one.reset()[0], other.reset()[0])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_a_run_on_single_lives_resumes_exactly(mode, tmp_path, recwarn):
    data = lambda: rollouts(Lives, n_envs=2, n_steps=8, wrappers=[LIFE], autoreset_mode=mode)  # noqa: E731
    from rl_modules import A2C

    assert_resumes_exactly(A2C, data, tmp_path, epochs=4)
    assert not [w for w in recwarn if "start a new episode" in str(w.message)]


def test_evaluation_plays_whole_games():
    data = ReplayDataModule(Lives, n_envs=1, learning_starts=10, total_timesteps=40, eval_freq=20, wrappers=[LIFE],
                            eval_wrappers=[], n_eval_episodes=4, rollouts_per_epoch=5)  # fmt: skip
    from tests.training import fit

    trainer = fit(DQN(), data)
    lengths = data.metrics()["rollout/ep_len_mean"]
    assert trainer.callback_metrics["eval/mean_ep_length"] > 1.5 * lengths


@pytest.mark.long
@pytest.mark.parametrize("name", quick(["dqn/breakout.yaml", "dqn/pong.yaml"], "dqn/breakout.yaml"))
def test_the_recipe_of_a_game(name, tmp_path):
    """The config's own environments: stacks of grey pictures, lives in training, whole games in evaluation."""
    pytest.importorskip("ale_py", reason="needs the atari extra")
    pytest.importorskip("cv2", reason="needs the atari extra")
    import yaml

    from recipes import configs

    settings = yaml.safe_load((configs.CONFIGS / name).read_text())["data"]["init_args"]
    data = ReplayDataModule(**{**settings, "total_timesteps": 400, "learning_starts": 200, "buffer_size": 2000,
                               "eval_freq": 0, "batch_size": 4, "rollouts_per_epoch": 10})  # fmt: skip
    assert data.share_frames
    assert LIFE in data.wrappers
    assert LIFE not in data.eval_wrappers
    data.setup("check")
    assert data.observation_space.shape == (4, 84, 84)
    data.teardown("check")
    make = lambda: ReplayDataModule(**{**settings, "total_timesteps": 400, "learning_starts": 200,  # noqa: E731
                                       "buffer_size": 2000, "eval_freq": 0, "batch_size": 4,
                                       "rollouts_per_epoch": 5})  # fmt: skip
    assert_resumes_exactly(lambda: DQN(net_arch=[8]), make, tmp_path, epochs=2)


ENGINES = {
    "envpool": {"episodic_life": True, "noop_max": 30},
    "vector_entry_point": {"episodic_life": True, "reward_clipping": False},
}
PICTURES = {"eval_env_kwargs": {"frameskip": 1, "repeat_action_probability": 0.0, "max_num_frames_per_episode": 800},
            "eval_wrappers": ["AtariPreprocessing", {"class_path": "FrameStackObservation",
                                                     "init_args": {"stack_size": 4}}]}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mode", quick(ENGINES, "envpool"))
def test_an_engine_makes_the_pictures_that_evaluation_sees(mode):
    pytest.importorskip("ale_py", reason="needs the atari extra")
    pytest.importorskip("cv2", reason="needs the atari extra")
    if mode == "envpool":
        pytest.importorskip("envpool", reason="needs the envpool extra")
    from rl_modules import PPO
    from tests.training import fit

    data = rollouts("ALE/Pong-v5", n_envs=2, n_steps=8, total_timesteps=32, vectorization_mode=mode,
                    env_kwargs=ENGINES[mode], n_test_episodes=1, **PICTURES)  # fmt: skip
    model = PPO()
    trainer = fit(model, data)
    assert data.num_timesteps == 32
    assert model.observation_space.shape == (4, 84, 84)
    assert trainer.test(model, datamodule=data, verbose=False)[0]["test/mean_ep_length"] <= 200


@pytest.mark.long
@pytest.mark.parametrize("mode", ENGINES)
def test_an_engine_whose_pictures_differ_is_refused(mode):
    pytest.importorskip("ale_py", reason="needs the atari extra")
    if mode == "envpool":
        pytest.importorskip("envpool", reason="needs the envpool extra")
    data = rollouts("ALE/Pong-v5", n_envs=2, vectorization_mode=mode)
    with pytest.raises(
        UsageError, match=r"with the observation_space Box\(210, 160, 3\) uint8, in training it is Box\(4,"
    ):
        data.setup("fit")


@pytest.mark.long
def test_replay_of_an_engine_s_frames(tmp_path):
    """Each frame once, with the reset rows of an engine between episodes."""
    pytest.importorskip("ale_py", reason="needs the atari extra")
    pytest.importorskip("cv2", reason="needs the atari extra")
    from tests.training import fit

    data = ReplayDataModule("ALE/Breakout-v5", n_envs=2, vectorization_mode="vector_entry_point", share_frames=True,
                            env_kwargs=ENGINES["vector_entry_point"], learning_starts=600, buffer_size=5000,
                            total_timesteps=640, eval_freq=0, batch_size=4, **PICTURES)  # fmt: skip
    fit(DQN(), data)
    assert data.collector.episodes.returns  # lives were lost
