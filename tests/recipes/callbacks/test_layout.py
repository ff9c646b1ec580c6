"""The charts of TensorBoard's CUSTOM SCALARS tab name curves that are logged."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from recipes.callbacks.curves import CHARTS, layout_of
from recipes.cli import main
from rl_modules import PPO, RLOO, SAC

GLOSSARY = Path(__file__).parents[3].joinpath("docs/metrics.md").read_text("utf-8")
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
