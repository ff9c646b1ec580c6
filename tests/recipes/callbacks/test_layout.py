"""TensorBoard's time series page begins with the learning curve."""

from pathlib import Path

from datamodules import ReplayDataModule, RolloutDataModule
from recipes import Trainer
from recipes.callbacks.curves import points
from rl_modules import A2C, DQN


def test_the_learning_curve_comes_first_and_the_last_policy_ends_the_evaluation(tmp_path: Path) -> None:
    """The time series page sorts groups by name and opens the first two."""
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=32, total_timesteps=640, eval_freq=256, n_eval_episodes=2,
                             n_test_episodes=3)  # fmt: skip
    Trainer(default_root_dir=tmp_path, enable_progress_bar=False).fit(A2C(net_arch=[8]), data)
    found = points(next(tmp_path.glob("logs/*/version_0")))
    assert min(tag.partition("/")[0] for tag in found) == "curve"
    assert found["curve/ep_rew_mean"] == found["rollout/ep_rew_mean"] != []
    assert found["curve/eval_mean_reward"] == found["eval/mean_reward"]
    first = sorted(tag for tag in found if "mean_reward" in tag or "mean_ep_length" in tag)[0]
    assert first == "curve/eval_mean_reward"
    assert [step for step, _ in found["eval/mean_reward"]] == [0, 256, 512, 640]
    assert found["eval/mean_reward"][-1] == found["test/mean_reward"][-1]
    # A run whose last evaluation came after its last update has that point alone.
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=32, total_timesteps=512, eval_freq=256, n_eval_episodes=2,
                             n_test_episodes=3)  # fmt: skip
    Trainer(default_root_dir=tmp_path, enable_progress_bar=False).fit(A2C(net_arch=[8]), data)
    found = points(next(tmp_path.glob("logs/*/version_1")))
    assert [step for step, _ in found["eval/mean_reward"]] == [0, 256, 512]


def test_the_curve_of_replay_begins_with_the_first_episodes(tmp_path: Path) -> None:
    """Nothing is learned before 600 transitions; an episode of random actions takes some twenty."""
    data = ReplayDataModule("CartPole-v1", n_envs=1, learning_starts=600, total_timesteps=700, eval_freq=0,
                            n_test_episodes=1)  # fmt: skip
    Trainer(default_root_dir=tmp_path, enable_progress_bar=False).fit(DQN(net_arch=[8]), data)
    steps = [step for step, _ in points(next(tmp_path.glob("logs/*/version_0")))["rollout/ep_rew_mean"]]
    assert steps[:5] == [128, 256, 384, 512, 600] and steps == sorted(set(steps))
