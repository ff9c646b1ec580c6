"""The charts of TensorBoard's CUSTOM SCALARS tab name curves that are logged."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.callbacks.curves import CHARTS, layout_of, points
from recipes.cli import main
from rl_modules import A2C, PPO, RLOO, SAC

GLOSSARY = "".join(page.read_text("utf-8") for page in Path(__file__).parents[3].joinpath("docs").glob("metrics*.md"))
DEFINED = {name for line in GLOSSARY.splitlines() if line.startswith("| `")
           for name in re.findall(r"`([^`]+)`", line.split("|")[1])}  # fmt: skip
#: The glossary writes these together with their neighbours, or under the name of their group.
TOGETHER = {"train/completions/max_length", "eval/accuracy", "eval/rewards/accuracies", "eval/rewards/margins"}


@pytest.mark.parametrize("algorithm", CHARTS)
def test_every_curve_of_a_chart_is_defined(algorithm: str) -> None:
    tags = {tag for chart in CHARTS[algorithm].values() for tag in chart}
    assert tags - TOGETHER <= DEFINED
    assert 3 <= len(CHARTS[algorithm]) <= 4


def test_a_subclass_has_its_bases_charts_and_others_those_of_control() -> None:
    assert list(layout_of(RLOO(model_config={"hidden_size": 16}))["RLOO"]) == list(CHARTS["GRPO"])
    assert "return" in layout_of(SAC())["SAC"]


@pytest.mark.long
def test_a_runs_charts_match_what_it_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", "--model", "PPO", "--data", "RolloutDataModule", "--data.env_id", "CartPole-v1",
          "--data.n_steps", "32", "--data.total_timesteps", "1024", "--data.eval_freq", "512",
          "--data.n_test_episodes", "2"])  # fmt: skip
    events = EventAccumulator(str(next(tmp_path.glob("logs/*/version_0"))), size_guidance={"tensors": 0}).Reload()
    (config,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(config.tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == "PPO" and [chart.title for chart in category.chart] == list(layout_of(PPO())["PPO"])
    for chart in category.chart:
        for pattern in chart.multiline.tag:
            assert any(re.match(pattern, tag) for tag in events.Tags()["scalars"]), pattern


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
