"""What the language algorithms do at the hooks of a run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_modules.algorithm import begin_training
from rl_modules.common.errors import UsageError
from rl_modules.core.hooks import OfRun
from rl_modules.core.seams import DATAMODULES
from rl_modules.language import checkpoints
from rl_modules.language.fast.kernels import compile_layers
from rl_modules.loggers import log_settings

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


class LanguageLoop(OfRun):
    """What every language algorithm does at the hooks of a run, in order, before a subclass's own hooks.

    After the own hook of a batch's end a due point of the curves is written (``_after_on_train_batch_end``), after that
    of an epoch's end monitoring callbacks get the running means (``_after_on_train_epoch_end``).

    Args:
        checks_batches: refuse batches that a language algorithm can't read, such as those of a ``DataLoader`` of ids.
    """

    def __init__(self, checks_batches: bool) -> None:
        self.checks_batches = checks_batches

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if trainer.loggers:
            log_settings(trainer)
        module.begin_fit()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if module.torch_compile:
            compile_layers(module)
        module.run.began_at = (trainer.global_step, module.num_tokens)
        module.throughput.restart(module.num_tokens)
        if module.run.resumes:
            checkpoints.take_up(module)
        begin_training(module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.checks_batches:
            require_tokens(module, batch, "training_step")
        module.begin_batch()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.write_last_point()
        module.end_training()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        # A complete run that is resumed does not train; its checkpoint was written before the last point.
        if not module.run.has_begun:
            module.throughput.restart(module.num_tokens)
            module.write_last_point()

    # ---------------------------------------------------------------- evaluations

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if module.is_fitting and not trainer.sanity_checking:
            module.answer_monitors()
            module.throughput.pause()
        module.begin_evaluation()

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *others: Any) -> None:
        if self.checks_batches:
            require_tokens(module, batch, "validation_step")

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.finish_evaluation()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.throughput.resume()
        module.end_validation()

    def on_test_start(self, trainer: Any, module: Any) -> None:
        module.begin_evaluation()

    def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, *others: Any) -> None:
        if self.checks_batches:
            require_tokens(module, batch, "test_step")

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        module.finish_evaluation()

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, *others: Any) -> None:
        if self.checks_batches:
            require_tokens(module, batch, "predict_step")


def require_tokens(module: "LanguageModule", batch: Any, step: str) -> None:
    """Refuses a batch without tokens. Batches of a user-defined step are not checked."""
    if isinstance(batch, Mapping) and "tokens" in batch:
        return
    kind = getattr(module, "learns_from", "")
    fitting = DATAMODULES.get(kind if isinstance(kind, str) else kind[0])
    if fitting is None or not getattr(type(module), step).__module__.startswith("rl_modules."):
        return
    came = f"the fields {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise UsageError(
        f"{type(module).__name__} reads batches that have tokens, and got {came}: give the Trainer "
        f"datamodule={fitting}(...), or batches as rl_modules.language.contract states them"
    )
