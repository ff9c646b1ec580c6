"""What TensorBoard's own backend makes of the settings that a run writes."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.backend_context import Context

from datamodules import RolloutDataModule
from recipes.callbacks.hparams import write_hparams
from recipes.cli import main
from recipes.cli.summary import changed_settings
from rl_modules import PPO


def experiment(folder: Path) -> Any:
    """The HPARAMS tab's table as its backend describes it."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context, request = Context(TBContext(data_provider=provider)), RequestContext()
    return context.experiment_from_metadata(
        request, "", True, context.hparams_metadata(request, ""), context.hparams_from_data_provider(request, "", None)
    )


def test_the_table_begins_with_what_was_chosen(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", default_hp_metric=False)
    settings = {"activation_fn": "tanh", "batch_size": 64, "gamma": 0.9, "zeta": True}
    write_hparams(logger, settings, ["zeta", "gamma"], {"test/mean_reward": 3.5}, step=7)
    logger.finalize("success")
    found = experiment(tmp_path)
    assert [info.name for info in found.hparam_infos] == ["gamma", "zeta", "activation_fn", "batch_size"]
    assert [info.name.tag for info in found.metric_infos] == ["test/mean_reward"]
    assert "gamma: 0.9" in (Path(logger.log_dir) / "hparams.yaml").read_text("utf-8")


@pytest.mark.long
def test_settings_that_differ_from_their_defaults_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", "--model", "PPO", "--model.gamma", "0.9", "--data", "RolloutDataModule", "--data.env_id",
                      "CartPole-v1", "--data.total_timesteps", "64", "--data.n_steps", "8", "--data.eval_freq", "0",
                      "--data.n_test_episodes", "2"])  # fmt: skip
    infos = experiment(tmp_path / "logs/PPO-CartPole-v1").hparam_infos
    first = {"gamma", "total_timesteps", "n_steps", "eval_freq", "n_test_episodes"}
    assert first <= {info.name for info in infos[: len(first) + 1]}  # with env_id, which an id fills in


def test_nested_settings_are_compared_with_the_argument_that_holds_them() -> None:
    model, data = PPO(gamma=0.9), RolloutDataModule("Acrobot-v1", env_kwargs={"max_episode_steps": 3})
    settings = {"gamma": 0.9, "gae_lambda": 0.95, "env_id": "Acrobot-v1", "env_kwargs.max_episode_steps": 3}
    assert changed_settings(settings, [model, data]) == ["gamma", "env_id", "env_kwargs.max_episode_steps"]
