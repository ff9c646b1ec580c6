"""TensorBoard's HPARAMS tab, whose table begins with the settings that were given."""

from collections.abc import Collection
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger


def write_hparams(
    logger: TensorBoardLogger, settings: dict[str, Any], chosen: Collection[str], metrics: dict[str, float], step: int
) -> None:
    """Writes a run's row of the HPARAMS tab, and its metrics as points of their curves.

    TensorBoard sorts settings by name, but puts those first that differ between runs, and selects the first five.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    logger.log_metrics(metrics, step)
    experiment, start, end = hparams(settings, metrics)
    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        info.differs = info.name in chosen
    plugin.content = data.SerializeToString()
    for summary in (experiment, start, end):
        logger.experiment._get_file_writer().add_summary(summary, step)
