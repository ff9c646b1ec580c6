"""DQN's configs reach their thresholds: one seed each, the five-seed results stand in docs/results.md."""

import pytest
import torch
import yaml

import datamodules
import rl_modules
from recipes import configs
from tests.training import fit

pytestmark = pytest.mark.slow


def train(name, **data_arguments):
    """Run a config; returns module, datamodule and trainer."""
    config = yaml.safe_load(configs.find(name).read_text(encoding="utf-8"))
    model = getattr(rl_modules, config["model"]["class_path"])(**config["model"]["init_args"])
    data = getattr(datamodules, config["data"]["class_path"])(**{**config["data"]["init_args"], **data_arguments})
    return model, data, fit(model, data)


@pytest.mark.parametrize(("name", "threshold"), [
    ("dqn/cartpole.yaml", 475),
    ("dqn/mountaincar.yaml", -110),
    ("dqn/acrobot.yaml", -85),
    ("dqn/lunarlander.yaml", 154),
])  # fmt: skip
def test_config_reaches_its_threshold(name, threshold):
    if "lunarlander" in name:
        pytest.importorskip("Box2D", reason="needs the box2d extra")
    model, data, trainer = train(name, eval_freq=0, n_test_episodes=100)
    result = trainer.test(model, datamodule=data, verbose=False)[0]
    assert result["test/mean_reward"] >= threshold


ATARI = {
    "dqn": {"total_timesteps": 1000, "learning_starts": 500, "buffer_size": 2000, "n_envs": 2},
    "ppo": {"total_timesteps": 1024, "n_envs": 4, "n_steps": 64},
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("game", ["pong", "breakout"])
@pytest.mark.parametrize("recipe", ATARI)
def test_atari_runs_a_few_thousand_frames(recipe, game, mode):
    pytest.importorskip("ale_py", reason="needs the atari extra")
    pytest.importorskip("cv2", reason="needs the atari extra")
    # An episode of 800 frames is over after 200 transitions.
    kwargs = {"frameskip": 1, "repeat_action_probability": 0.0, "max_num_frames_per_episode": 800}
    arguments = {**ATARI[recipe], "eval_freq": 0, "vectorization_mode": mode, "n_test_episodes": 1,
                 "env_kwargs": kwargs}  # fmt: skip
    model, data, trainer = train(f"{recipe}/{game}.yaml", **arguments)
    assert data.num_timesteps >= arguments["total_timesteps"]
    assert data.collector.episodes.returns
    assert all(torch.isfinite(p).all() for p in model.parameters())
    if recipe == "dqn":
        assert data.replay.observation.dtype == torch.uint8
        assert set(data.replay.reward.tolist()) <= {-1.0, 0.0, 1.0}
    trainer.test(model, datamodule=data, verbose=False)


def test_breakout_starts_by_itself_and_again_after_each_life():
    pytest.importorskip("ale_py", reason="needs the atari extra")
    from datamodules.envs.vector import make_env

    env = make_env("ALE/Breakout-v5", {"frameskip": 1, "repeat_action_probability": 0.0},
                   ["datamodules.envs.atari.PressFire"])  # fmt: skip
    _, info = env.reset(seed=0)
    over, lives = False, [info["lives"]]
    for _ in range(5000):
        # Never presses FIRE itself; without it the first ball would never come.
        _, _, terminated, truncated, info = env.step(0)
        lives.append(info["lives"])
        over = terminated or truncated
        if over:
            break
    assert over
    assert sorted(set(lives)) == [0, 1, 2, 3, 4, 5]
