"""What TensorBoard's own backend makes of the settings that a run writes."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.backend_context import Context

from datamodules import PromptDataModule, RolloutDataModule
from recipes import Trainer
from rl_modules import GRPO, PPO
from tests.chaos import TINY


def experiment(folder: Path) -> Any:
    """The HPARAMS tab's table as its backend describes it."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context, request = Context(TBContext(data_provider=provider)), RequestContext()
    return context.experiment_from_metadata(
        request, "", True, context.hparams_metadata(request, ""), context.hparams_from_data_provider(request, "", None)
    )


class Noting(Logger):
    """Another logger, such as Weights & Biases."""

    name, version = "noting", 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(params)

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.calls.append(metrics)


def control(way: Any, **arguments: Any) -> None:
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, batch_size=16, total_timesteps=16, eval_freq=0)
    way(max_epochs=-1, **arguments).fit(PPO(gamma=0.9, net_arch=[8]), datamodule=data)


def language(way: Any, **arguments: Any) -> None:
    data = PromptDataModule(task="addition", batch_size=8, num_generations=4, eval_steps=0)
    model = GRPO(model_config=json.loads(TINY), max_completion_length=2, temperature=0.9)
    way(max_steps=1, **arguments).fit(model, datamodule=data)


@pytest.mark.parametrize("way", [L.Trainer, Trainer])
@pytest.mark.parametrize(("fit", "cls", "setting", "of_data"), [
    (control, PPO, {"gamma": 0.9}, {"env_id": "CartPole-v1"}),
    pytest.param(language, GRPO, {"temperature": 0.9}, {"task": "addition"}, marks=pytest.mark.long),
])  # fmt: skip
def test_every_logger_has_the_settings_before_the_first_step(
    fit: Any, cls: Any, setting: Any, of_data: Any, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, files, other = TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "csv"), Noting()

    def killed(self: Any, batch: Any, batch_idx: int) -> Any:
        raise KeyError("killed")

    monkeypatch.setattr(cls, "training_step", killed)
    with pytest.raises(KeyError, match="killed"):
        fit(way, accelerator="cpu", logger=[table, files, other], enable_checkpointing=False,
            enable_progress_bar=False)  # fmt: skip
    expected = {**setting, **of_data}
    for logger in (table, files):
        written = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text("utf-8"))
        assert expected.items() <= written.items() and "observation_space" not in written
    assert expected.items() <= other.calls[0].items()
    table.experiment.flush()
    assert expected.keys() <= {info.name for info in experiment(Path(table.log_dir)).hparam_infos}


def test_settings_are_left_out_where_the_trainer_is_told_so() -> None:
    logger = Noting()
    control(L.Trainer, accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False,
            enable_autolog_hparams=False)  # fmt: skip
    assert not [call for call in logger.calls if "gamma" in call]
