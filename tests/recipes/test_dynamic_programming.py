"""Exact solutions at the command line, and the pictures of what was learned."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

import datamodules  # noqa: F401 (registers Maze-v0)
from datamodules.envs.model import transition_model
from recipes import dynamic_programming
from recipes.callbacks import ValuePictures
from recipes.callbacks.pictures import action_directions, draw_values
from rl_modules import QLearning
from rl_modules import functional as F
from tests.training import fit, rollouts


def trained(tmp_path, env_id="Maze-v0", **arguments):
    agent = QLearning(gamma=0.9, learning_rate=1.0, exploration_final_eps=1.0)
    path = tmp_path / "agent.ckpt"
    fit(agent, rollouts(env_id, n_steps=64, total_timesteps=3000, **arguments)).save_checkpoint(path)
    return path


# ---------------------------------------------------------------- at the command line


def test_the_maze_is_solved_and_printed(capsys):
    dynamic_programming.main(["--env_id", "Maze-v0", "--gamma", "0.9"])
    printed = capsys.readouterr().out
    assert "10.0000 at best" in printed
    # 10, 9, 8.1 and 7.29 along the way.
    assert "   8.100 →   9.000 →  10.000 ↓" in printed
    assert "   7.290 ↑       T         G" in printed


@pytest.mark.parametrize(
    ("arguments", "returns"),
    [
        (["--env_id", "FrozenLake-v1"], ["0.7442 at best", "0.7402 of the policy that is greedy in Q*"]),
        (["--env_id", "FrozenLake-v1", "--max_episode_steps", "5"], ["0.0000 at best"]),
        (["--env_id", "CliffWalking-v1", "--gamma", "1"], ["-13.0000 at best", "no time limit"]),
        (["--env_id", "Taxi-v4"], ["7.9300 at best", "state    0", "and 476 more states"]),
    ],
)
def test_returns_are_those_of_the_literature(arguments, returns, capsys):
    dynamic_programming.main(arguments)
    printed = capsys.readouterr().out
    for expected in returns:
        assert expected in printed


def test_a_checkpoint_is_shown_beside_the_solution_of_its_own_environment(tmp_path, capsys):
    path = trained(tmp_path, env_kwargs={"layout": "SG"})
    dynamic_programming.main(["--ckpt_path", str(path)])
    printed = capsys.readouterr().out
    assert "Maze-v0: 2 states" in printed
    assert "γ = 0.9" in printed
    assert "10.0000 of QLearning's greedy policy" in printed
    assert "of 1 visited states the greedy action is a best one in 1; largest |max Q - V*| there: 0" in printed


def test_a_checkpoint_that_learned_nothing_is_not_called_right(tmp_path, capsys):
    path = tmp_path / "agent.ckpt"
    fit(QLearning(), rollouts("Maze-v0", n_envs=1, n_steps=1, total_timesteps=1)).save_checkpoint(path)
    dynamic_programming.main(["--ckpt_path", str(path)])
    printed = capsys.readouterr().out
    assert "0.0000 of QLearning's greedy policy" in printed
    assert "of 1 visited states the greedy action is a best one in 0" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --env_id or --ckpt_path"),
        (["--env_id", "CartPole-v1"], "CartPole-v1 has no transition table"),
        (["--env_id", "Mase-v0"], "did you mean Maze-v0"),
        (["--env_id", "Maze-v0", "--gamma", "2"], "gamma"),
        (["--ckpt_path", "none.ckpt"], "ckpt_path='none.ckpt' is not a file"),
        (
            ["--ckpt_path", "pyproject.toml"],
            "ckpt_path='pyproject.toml' is damaged: it is cut off, or not a checkpoint",
        ),
    ],
)
def test_bad_input_gets_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        dynamic_programming.main(arguments)
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")


def test_a_checkpoint_of_another_environment_is_refused(tmp_path, capsys):
    path = trained(tmp_path)
    with pytest.raises(SystemExit):
        dynamic_programming.main(["--ckpt_path", str(path), "--env_id", "FrozenLake-v1"])
    assert "the checkpoint's table is (6, 4), FrozenLake-v1 needs (16, 4)" in capsys.readouterr().err


def small_maze(**arguments):
    return gym.make("Maze-v0", layout="SG", **arguments)


def with_settings(path, **settings):
    """Changes what a checkpoint says about its environment, as whoever hands it on could."""
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["env_id"] = settings.get("env_id", checkpoint["env_id"])
    checkpoint["datamodule_hyper_parameters"].update(settings)
    torch.save(checkpoint, path)


@pytest.mark.parametrize("settings", [
    {"env_id": "os:system", "env_kwargs": {"command": "touch ran"}},
    {"env_id": "left_by_a_checkpoint:Maze-v0"},  # gymnasium.make would import the module
    {"wrappers": ["left_by_a_checkpoint.wrap"]},
    {"wrappers": [{"class_path": "left_by_a_checkpoint:wrap", "init_args": {}}]},
    {"wrappers": [{"class_path": "gymnasium.wrappers.os.system"}]},
], ids=str)  # fmt: skip
def test_a_checkpoint_chooses_no_code(settings, tmp_path, capsys, monkeypatch):
    path = trained(tmp_path)
    with_settings(path, **settings)
    (tmp_path / "left_by_a_checkpoint.py").write_text("open('ran', 'w')\ndef wrap(env): return env\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        dynamic_programming.main(["--ckpt_path", str(path)])
    error = capsys.readouterr().err
    assert "must not choose what code runs" in error and "give --env_id" in error
    assert not (tmp_path / "ran").exists() and "left_by_a_checkpoint" not in sys.modules


def test_an_environment_of_ones_own_is_named_by_the_user(tmp_path, capsys):
    env_id = f"{__name__}:small_maze"
    path = trained(tmp_path, env_id=env_id, wrappers=["gymnasium.wrappers.RecordEpisodeStatistics"])
    dynamic_programming.main(["--ckpt_path", str(path), "--env_id", env_id])
    assert "10.0000 of QLearning's greedy policy" in capsys.readouterr().out


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("env_id", "directions"),
    [
        ("Maze-v0", [(0, -1), (1, 0), (0, 1), (-1, 0)]),
        ("FrozenLake-v1", [(0, -1), (1, 0), (0, 1), (-1, 0)]),
        ("CliffWalking-v1", [(-1, 0), (0, 1), (1, 0), (0, -1)]),
        ("CliffWalkingSlippery-v1", [(-1, 0), (0, 1), (1, 0), (0, -1)]),
    ],
)
def test_arrows_point_where_actions_lead(env_id, directions):
    assert action_directions(transition_model(gym.make(env_id))) == directions


def test_a_picture_shows_one_cell_per_state_and_the_best_action():
    model = transition_model(gym.make("Maze-v0"))
    q = torch.zeros(6, 4)
    q[0, 2] = 1.0
    image = draw_values(q, model)
    assert image.dtype == np.uint8
    top = image.shape[0] - 2 * 72
    first, second = image[top : top + 72, :72], image[top : top + 72, 72:144]
    # The first cell is at the top of the scale (yellow), the others at its bottom (purple).
    assert first[8, 60].tolist() == [253, 231, 37]
    assert second[8, 60].tolist() == [68, 1, 84]
    # Its one arrow points right: ink right of the middle, none left of it.
    assert (first[32, 38:55] != first[8, 60]).any()
    assert (first[32, 15:34] == first[8, 60]).all()


def test_training_leaves_pictures_before_and_after(tmp_path):
    logger = TensorBoardLogger(tmp_path, name=None)
    data = rollouts("Maze-v0", n_steps=64, total_timesteps=3000)
    agent = QLearning(gamma=0.9, learning_rate=1.0)
    fit(agent, data, logger=logger, callbacks=[ValuePictures()])
    before, after = (np.asarray(Image.open(f"{logger.log_dir}/values_{when}.png")) for when in ("before", "after"))
    assert before.ndim == 3
    assert before.shape != after.shape or (before != after).any()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Images("values")] == [0, data.num_timesteps]


def test_a_resumed_run_does_not_draw_its_middle_as_the_beginning(tmp_path):
    path = trained(tmp_path)
    agent = QLearning(gamma=0.9, learning_rate=1.0, exploration_final_eps=1.0)
    data = rollouts("Maze-v0", n_steps=64, total_timesteps=4000)
    fit(agent, data, ckpt_path=path, callbacks=[ValuePictures()], default_root_dir=tmp_path)
    assert (tmp_path / "values_after.png").is_file()
    assert not (tmp_path / "values_before.png").exists()


def test_what_is_no_grid_gets_a_sentence_instead_of_a_picture(tmp_path):
    data = rollouts("Taxi-v4", n_envs=1, n_steps=2, total_timesteps=2)
    with pytest.warns(UserWarning, match="QLearning on Taxi-v4 gets no picture"):
        fit(QLearning(), data, callbacks=[ValuePictures()], default_root_dir=tmp_path)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.long
def test_actions_that_masks_forbid_are_not_judged(tmp_path, capsys):
    model = transition_model(gym.make("Taxi-v4"))
    best = F.value_iteration(model.transition, model.reward, 0.9)[:-1]
    agent = QLearning(gamma=0.9)
    trainer = fit(agent, rollouts("Taxi-v4", n_envs=1, n_steps=1, total_timesteps=1))
    allowed = best == best.max(-1, keepdim=True).values
    agent.tables.allowed.copy_(allowed)
    agent.tables.q[0] = torch.where(allowed, best, 100.0)  # as optimistic initial values stay, for nobody takes them
    agent.tables.visits.fill_(1)
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    dynamic_programming.main(["--ckpt_path", str(tmp_path / "agent.ckpt")])
    printed = capsys.readouterr().out
    assert "of 500 visited states the greedy action is a best one in 500; largest |max Q - V*| there: 0" in printed
    assert "100.000" not in printed
