"""TensorBoard's time series page begins with the learning curve."""

from pathlib import Path

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.callbacks.curves import points
from rl_modules import A2C


def test_the_learning_curve_comes_first_and_the_last_policy_ends_the_evaluation(tmp_path: Path) -> None:
    """The time series page sorts groups by name and opens the first two."""
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=32, total_timesteps=640, eval_freq=256, n_eval_episodes=2,
                             n_test_episodes=3)  # fmt: skip
    Trainer(default_root_dir=tmp_path, enable_progress_bar=False).fit(A2C(net_arch=[8]), data)
    found = points(next(tmp_path.glob("logs/*/version_0")))
    assert min(tag.partition("/")[0] for tag in found) == "curve"
    assert found["curve/ep_rew_mean"] == found["rollout/ep_rew_mean"] != []
    assert [step for step, _ in found["eval/mean_reward"]] == [0, 256, 512, 640]
    assert found["eval/mean_reward"][-1] == found["test/mean_reward"][-1]
    # A run whose last evaluation came after its last update has that point alone.
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=32, total_timesteps=512, eval_freq=256, n_eval_episodes=2,
                             n_test_episodes=3)  # fmt: skip
    Trainer(default_root_dir=tmp_path, enable_progress_bar=False).fit(A2C(net_arch=[8]), data)
    found = points(next(tmp_path.glob("logs/*/version_1")))
    assert [step for step, _ in found["eval/mean_reward"]] == [0, 256, 512]
