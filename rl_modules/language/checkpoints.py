"""Checkpoints of the language algorithms: plain data, exact resume, frozen weights by their path and digest."""

from typing import Any

from torch import Tensor

from rl_modules.common.arguments import make_loadable, settings_of
from rl_modules.common.checkpoint_file import LoadsCheckpoints, check_optimizers, widen
from rl_modules.common.errors import UsageError
from rl_modules.common.generators import GlobalGenerators
from rl_modules.core.resume import (
    accumulated_gradients,
    begin_next_epoch,
    finish_batch,
    is_cut_off,
    keep_earlier_checkpoint,
    reopen_epoch,
    skip_first_evaluation,
)
from rl_modules.core.state import load_state, state_of
from rl_modules.language.frozen_weights import Sources, frozen_parameters, require_same_weights
from rl_modules.language.lora import require_same_adapters
from rl_modules.language.metric_names import monitors
from rl_modules.language.metrics import LanguageMetrics
from rl_modules.language.sharding import is_sharded, share, whole
from rl_modules.ranks import of_other_ranks, of_this_rank


class LanguageCheckpoints(LoadsCheckpoints, LanguageMetrics):
    """Saves and restores a run's state besides weights and optimizer, and checks a checkpoint before loading."""

    #: The model that is trained.
    model: Any
    given_objects: dict[str, str]
    began_at: tuple[int, int]
    # Sources of frozen weights, and those of the loaded checkpoint that it holds only a digest of.
    _sources: Sources
    _left_out: set[str]
    # Gradients of the unfinished step in the loaded checkpoint, until training resumes.
    _gradients: dict[str, Tensor]
    _generators: GlobalGenerators

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict; frozen weights that the checkpoint does not contain keep the values from their
        directory.
        """
        if missing := self._left_out - state_dict.keys():
            own = self.state_dict()
            state_dict = {**state_dict, **{name: own[name] for name in missing}}
        return super().load_state_dict(state_dict, strict, assign)

    def load_weights(self, state_dict: dict[str, Tensor]) -> None:
        """Loads a checkpoint's weights into the model built from its description."""
        sources = self.hparams["description"]["frozen"]
        self._left_out = {name for prefix in sources for name in frozen_parameters(self, prefix)}
        self.load_state_dict(state_dict)

    @property
    def is_cut_off(self) -> bool:
        """Whether a run that resumes has batches left in the last epoch."""
        return is_cut_off(self.trainer)

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_earlier_checkpoint(self._trainer, self._has_begun)
        make_loadable(checkpoint, self, getattr(self._trainer, "datamodule", None))
        # `WeightAveraging`, whose hook ran before, has stored averages there and the module's weights under another
        # key.
        states = [checkpoint[key] for key in ("state_dict", "current_model_state") if key in checkpoint]
        for prefix in self.hparams["description"]["frozen"]:
            for name in frozen_parameters(self, prefix):
                for state in states:
                    del state[name]
        checkpoint["algorithm"] = type(self).__name__
        checkpoint["num_tokens"] = self.num_tokens
        checkpoint["gradients"] = self._gradients_so_far()
        watched = {} if self._trainer is None else monitors(self.trainer)
        checkpoint["monitored"] = {name: value for name, value in self.latest_metrics.items() if name in watched}
        checkpoint["latest"] = dict(self.regular_metrics)
        sums, weights = ({name: x.cpu() for name, x in part.items()} for part in (self._sums, self._weights))
        checkpoint["unlogged"] = {"sums": sums, "weights": weights, "at": self._logged_at}
        checkpoint["generators"] = self._generators.state(self.device)
        if self.is_fitting and self.is_cut_off:
            reopen_epoch(self.trainer, checkpoint)
        # Lightning saves what the first rank has.
        checkpoint["run"] = state_of(self, complete=self._trainer is not None and self.is_fitting)
        own = {name: checkpoint[name] for name in ("run", "unlogged", "generators")}
        checkpoint["other_ranks"] = of_other_ranks(own, self._trainer)

    def _gradients_so_far(self) -> dict[str, Tensor]:
        """Returns the accumulated gradients of an unfinished optimizer step, as means over ranks; empty between
        steps.
        """
        if not self.is_fitting:
            return {}
        gradients = accumulated_gradients(self)
        if is_sharded(self.model):  # and averaged already
            return whole(gradients)
        # After a fit the module is on the CPU, but the ranks' collectives still use the strategy's device.
        strategy = self.trainer.strategy
        there = {name: g.detach().to(strategy.root_device, copy=True) for name, g in gradients.items()}
        return {name: strategy.reduce(g, reduce_op="mean").cpu() for name, g in there.items()}

    def _on_train_start(self) -> None:
        self.began_at = (0 if self._trainer is None else self.trainer.global_step, self.num_tokens)
        self._throughput.restart(self.num_tokens)
        if self.latest_metrics:
            self._hand_to_callbacks(self.latest_metrics)
        # A checkpoint's are on the CPU.
        self._sums = {name: value.to(self.device) for name, value in self._sums.items()}
        self._weights = {name: value.to(self.device) for name, value in self._weights.items()}
        if self._sums and self._trainer is not None:
            self.write_due_metrics()  # a ModelCheckpoint saves a step before its point is written
        for name, parameter in self.named_parameters():
            if name in self._gradients:
                parameter.grad = share(self._gradients[name].to(parameter.device, parameter.dtype), parameter)
        self._gradients = {}
        self._has_begun = True
        if self._trainer is not None:
            check_optimizers(self.trainer.optimizers)
            begin_next_epoch(self.trainer)
        # Not earlier, because the preparation of a run may draw from them.
        self._generators.start(self.device)
        if self._trainer is not None:
            finish_batch(self.trainer)

    def _on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        algorithm, here = checkpoint.get("algorithm"), type(self).__name__
        if algorithm != here:
            raise UsageError(f"the checkpoint holds {algorithm or 'no language algorithm'}, not {here}; load it with "
                             "that class")  # fmt: skip
        parameters = settings_of(checkpoint)
        if "lora" in parameters:
            require_same_adapters(self.hparams["lora"], parameters["lora"])
        description = parameters.get("description") or {}
        saved = description.get("frozen", {})
        require_same_weights(self._sources, saved, self.hparams)
        # The checkpoint's weights may differ from the current ones at the path, so later checkpoints contain them too.
        own = self.hparams["description"]
        kept = {prefix: source for prefix, source in own["frozen"].items() if prefix in saved}
        self.hparams["description"] = {**own, "frozen": kept}
        self._left_out = {name for prefix in saved for name in frozen_parameters(self, prefix)}
        if "averaging_state" in checkpoint:
            # `WeightAveraging` loads them into a copy of this module, without its `load_state_dict`.
            own_state = self.state_dict()
            left_out = self._left_out - checkpoint["state_dict"].keys()
            checkpoint["state_dict"].update({name: own_state[name] for name in left_out})
        widen(self, checkpoint.get("state_dict", {}))
        self.num_tokens = checkpoint["num_tokens"]
        self._gradients = checkpoint["gradients"]
        self.regular_metrics = dict(checkpoint.get("latest", {}))
        self.latest_metrics = {**self.regular_metrics, **checkpoint.get("monitored", {})}
        own_part = of_this_rank(checkpoint, checkpoint.get("other_ranks", []), self._trainer)
        load_state(self, own_part.get("run", {}), settings=parameters)
        self._generators.load(own_part.get("generators"))
        unlogged = own_part["unlogged"]
        self._sums, self._weights = dict(unlogged["sums"]), dict(unlogged["weights"])
        self._logged_at = unlogged["at"]
        if self.is_fitting:
            skip_first_evaluation(self.trainer)
