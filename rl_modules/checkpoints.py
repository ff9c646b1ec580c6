"""Checkpoints of the control algorithms: plain data, exact resume, warm starts."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rl_modules.common.arguments import make_loadable, settings_of
from rl_modules.common.checkpoint_file import check_optimizers, read_checkpoint, widen
from rl_modules.common.contract import Statistics
from rl_modules.common.errors import UsageError
from rl_modules.common.factories import factory_names, missing_factories
from rl_modules.common.generators import GlobalGenerators
from rl_modules.common.spaces import check_same_space, space_brief, space_from_dict, tree_map
from rl_modules.core.resume import (
    accumulated_gradients,
    begin_next_epoch,
    finish_batch,
    keep_earlier_checkpoint,
    reopen_epoch,
    skip_first_evaluation,
)
from rl_modules.core.state import declared, load_state, state_of
from rl_modules.metrics import MetricsMixin
from rl_modules.optimizers import class_names
from rl_modules.ranks import of_other_ranks, of_this_rank


class CheckpointMixin(MetricsMixin):
    """Saves and restores a run's state besides weights and optimizer, and checks a checkpoint before loading."""

    observation_space: spaces.Space
    action_space: spaces.Space
    given_objects: dict[str, str]

    def __init__(self) -> None:
        super().__init__()
        #: Statistics that normalise observations; the datamodule sets them after every rollout.
        self.observation_statistics: Statistics = None
        #: State of the normalisers that the weights were trained with; None: raw observations and rewards.
        self.normalizer_state: dict[str, Any] | None = None
        # The `learning_rate` that the optimizers were last set to.
        self._rate_applied: float | str | None = None
        # Classes of the optimizers whose state the loaded checkpoint holds; None: nothing is loaded.
        self._optimizers_saved: list[str] | None = None
        # Gradients of the unfinished step in the loaded checkpoint, until training resumes.
        self._gradients: dict[str, torch.Tensor] = {}
        self._generators = GlobalGenerators()
        # Whether this fit's training has begun.
        self._has_begun = False
        # Factories of the loaded checkpoint that this module was not given; a fit warns of them.
        self._missing_factories: dict[str, str] = {}

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_earlier_checkpoint(self._trainer, self._has_begun)
        make_loadable(checkpoint, self, getattr(self._trainer, "datamodule", None))
        checkpoint["factories"] = factory_names(self)
        checkpoint["algorithm"] = type(self).__name__
        checkpoint["env_id"] = getattr(getattr(self._trainer, "datamodule", None), "env_name", None)
        checkpoint["observation_statistics"] = statistics_to_tensors(self.observation_statistics)
        checkpoint["normalizer_state"] = self.normalizer_state
        checkpoint["optimizer_classes"] = class_names(self.trainer.optimizers) if self.is_fitting else None
        if self.is_fitting and self.is_cut_off:
            reopen_epoch(self.trainer, checkpoint)
        accumulates = self.is_fitting and self.automatic_optimization
        gradients = accumulated_gradients(self) if accumulates else {}
        own = {
            "run": state_of(self, complete=self.is_fitting),
            "unlogged": self.metrics_state(),
            "gradients": {name: gradient.cpu().clone() for name, gradient in gradients.items()},
            "generators": self._generators.state(self.device),
        }
        # Lightning saves what the first rank has.
        checkpoint.update(own, other_ranks=of_other_ranks(own, self._trainer))

    def _on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._check_algorithm(checkpoint)
        if self._trainer is not None:
            self._check_resumable(checkpoint)
        if self._trainer is None or self.is_fitting:
            self._missing_factories = missing_factories(self, checkpoint)
        self._load_statistics(checkpoint)
        if not self.is_built:
            self.configure_model()
        widen(self, checkpoint.get("state_dict", {}))
        own = of_this_rank(checkpoint, checkpoint.get("other_ranks", []), self._trainer)
        load_state(self, own.get("run", {}), settings=settings_of(checkpoint))
        if self.is_fitting:
            self.load_metrics_state(own["unlogged"])
            self._gradients = own["gradients"]
            self._generators.load(own["generators"])
            # In the optimizers' state; absent where a subclass sets it by itself.
            self._rate_applied = settings_of(checkpoint).get("learning_rate", self._rate_applied)
            self._optimizers_saved = checkpoint.get("optimizer_classes")
            skip_first_evaluation(self.trainer)

    def __getstate__(self) -> dict[str, Any]:
        passing = set(declared(self, kept=False))
        return {name: value for name, value in super().__getstate__().items() if name not in passing}

    def _on_train_start(self) -> None:
        """Restores the state that Lightning does not load.

        Raises:
            UsageError: the checkpoint holds another optimizer's state.
        """
        before, here = self._optimizers_saved, class_names(self.trainer.optimizers)
        if before is not None and before != here:
            raise UsageError(f"the checkpoint has the state of the optimizer {', '.join(before) or 'none'}, this run "
                             f"has {', '.join(here) or 'none'}; resume with the same")  # fmt: skip
        self._optimizers_saved = None
        check_optimizers(self.trainer.optimizers)
        for name, parameter in self.named_parameters():
            if name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter.device, parameter.dtype)
        self._gradients = {}
        self._has_begun = True
        begin_next_epoch(self.trainer)
        # Not earlier, because the preparation of a run may draw from them.
        self._generators.start(self.device)
        # Of the epoch that ends there, if one does: Lightning counts it as done.
        self.logs_this_epoch = self.current_epoch % self.log_every == 0
        finish_batch(self.trainer)

    def load_initial_weights(self, path: str) -> None:
        """Loads the weights and the normalisers' statistics of a checkpoint; everything else starts from scratch.

        Raises:
            UsageError: another algorithm's checkpoint, or one of other spaces or another network.
        """
        checkpoint = read_checkpoint(path, "init_from")
        if checkpoint.get("algorithm") not in [cls.__name__ for cls in type(self).__mro__]:
            self._check_algorithm(checkpoint)
        for name in ("observation_space", "action_space"):
            trained = space_from_dict(settings_of(checkpoint)[name])
            check_same_space(
                name, trained, space_from_dict(self.hparams[name]), f"init_from={path!r}", self.source.env_name
            )
        try:
            self.load_state_dict(self.weights_to_start_from(checkpoint))
        except RuntimeError as error:
            raise UsageError(f"init_from={path!r} holds another network: {' '.join(str(error).split())}") from error
        self._load_statistics(checkpoint)

    def weights_to_start_from(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns the weights that ``init_from`` loads; an algorithm omits those that a new argument replaces.

        Args:
            checkpoint: of the earlier run.
        """
        return checkpoint["state_dict"]

    def _check_resumable(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of other spaces; in a ``fit`` also one of another environment, seed or datamodule."""
        for name in ("observation_space", "action_space"):
            saved: Any = settings_of(checkpoint).get(name)
            here = self.hparams[name]
            if saved != here:
                raise UsageError(f"the checkpoint is of another environment, {checkpoint['env_id']}: its {name} is "
                                 f"{space_brief(saved)}, here it is {space_brief(here)}")  # fmt: skip
        if not self.is_fitting:
            return
        if "run" not in checkpoint:
            raise UsageError("the checkpoint is of an earlier version, which stored runs otherwise; init_from starts "
                             "a new run from its weights")  # fmt: skip
        source = self.source
        # Lightning files a datamodule's state under its class's name and ignores what it does not find.
        name = type(source).__qualname__
        if name not in checkpoint:
            stored = ", ".join(key for key in checkpoint if key.endswith("DataModule")) or "none"
            raise UsageError(f"the checkpoint has no state of {name}; it has that of {stored}, so training could not "
                             "resume where it was")  # fmt: skip
        if checkpoint["env_id"] != source.env_name:
            raise UsageError(f"the checkpoint is of another environment: it was trained on {checkpoint['env_id']}, "
                             f"this run is on {source.env_name}; a run resumes only where it was (init_from takes the "
                             "weights alone)")  # fmt: skip
        seed = settings_of(checkpoint, "datamodule_hyper_parameters").get("seed", source.seed)
        if seed != source.seed:
            raise UsageError(f"seed={source.seed} differs from the checkpoint's {seed}; its random streams resume "
                             "where they were, so give the same")  # fmt: skip

    def _load_statistics(self, checkpoint: dict[str, Any]) -> None:
        self.observation_statistics = statistics_to_arrays(checkpoint.get("observation_statistics"))
        self.normalizer_state = checkpoint.get("normalizer_state")

    def _check_algorithm(self, checkpoint: dict[str, Any]) -> None:
        saved, here = checkpoint.get("algorithm"), type(self).__name__
        if saved != here:
            raise UsageError(f"the checkpoint holds {saved or 'no control algorithm'}, not {here}; load it with that "
                             "class")  # fmt: skip


def statistics_to_tensors(tree: Statistics) -> Any:
    """Converts statistics to lists of tensors and numbers, which a checkpoint may hold."""
    # The mean of a scalar observation is a number of NumPy's.
    return tree_map(lambda s: s and [torch.from_numpy(np.array(s[0])), torch.from_numpy(np.array(s[1])), s[2]], tree)


def statistics_to_arrays(tree: Any) -> Statistics:
    """The inverse of :func:`statistics_to_tensors`."""
    return tree_map(lambda s: s and (s[0].cpu().numpy(), s[1].cpu().numpy(), s[2]), tree)
