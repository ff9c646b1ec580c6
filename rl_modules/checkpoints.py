"""Checkpoints of the control algorithms: what a run may resume from, warm starts, statistics as plain data."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rl_modules.common.errors import UsageError
from rl_modules.common.loading import name_of
from rl_modules.common.modules import tree_map
from rl_modules.common.spaces import SPACES, space_from_dict, space_to_dict
from rl_modules.common.stored_arguments import settings_of
from rl_modules.contract import Statistics
from rl_modules.core.checkpoint import load_run, save_run
from rl_modules.core.checkpoint_file import read_checkpoint
from rl_modules.fast.adam import class_names

if TYPE_CHECKING:
    from rl_modules.base import ControlModule


def save(module: "ControlModule", checkpoint: dict[str, Any]) -> None:
    """Adds what a control algorithm needs to resume to Lightning's checkpoint."""
    if module.is_fitting:
        # At the end of a minibatch callbacks, which may write a checkpoint, come before the module.
        module.finish_rollout()
    save_run(module, checkpoint)
    checkpoint["factories"] = factory_names(module)
    checkpoint["env_id"] = getattr(getattr(module._trainer, "datamodule", None), "env_name", None)
    checkpoint["observation_statistics"] = statistics_to_tensors(module.observation_statistics)
    checkpoint["normalizer_state"] = module.normalizer_state
    checkpoint["optimizer_classes"] = class_names(module.trainer.optimizers) if module.is_fitting else None


def load(module: "ControlModule", checkpoint: dict[str, Any]) -> None:
    """Restores what :func:`save` added; refuses a checkpoint of another run."""
    module._require_own(checkpoint)
    if module._trainer is not None:
        require_resumable(module, checkpoint)
    load_statistics(module, checkpoint)
    if not module.is_built:
        module.configure_model()
    is_strict = module._trainer is not None and module.strict_loading
    require_same_network(module, checkpoint, checkpoint["state_dict"], "the checkpoint", is_strict)
    load_run(module, checkpoint)
    if module._trainer is None or module.is_fitting:
        module.run.missing_factories = missing_factories(module, checkpoint)
    if module.is_fitting:
        # In the optimizers' state; absent where a subclass sets it by itself.
        module.run.rate_applied = settings_of(checkpoint).get("learning_rate", module.run.rate_applied)
        module.run.optimizers_saved = checkpoint.get("optimizer_classes")


def require_resumable(module: "ControlModule", checkpoint: dict[str, Any]) -> None:
    """Refuses a checkpoint of other spaces; in a ``fit`` also one of another environment, seed or datamodule."""
    for name in SPACES:
        saved: Any = settings_of(checkpoint).get(name)
        here = module.hparams[name]
        if saved != here:
            raise UsageError(
                f"the checkpoint is of another environment, {checkpoint['env_id']}: its {name} is "
                f"{space_brief(saved)}, here it is {space_brief(here)}"
            )
    if not module.is_fitting:
        return
    if "run" not in checkpoint:
        raise UsageError(
            "the checkpoint is of an earlier version, which stored runs otherwise; init_from starts "
            "a new run from its weights"
        )
    source = module.source
    # Lightning files a datamodule's state under its class's name and ignores what it does not find.
    name = type(source).__qualname__
    if name not in checkpoint:
        stored = ", ".join(key for key in checkpoint if key.endswith("DataModule")) or "none"
        raise UsageError(
            f"the checkpoint has no state of {name}; it has that of {stored}, so training could not resume where it was"
        )
    if checkpoint["env_id"] != source.env_name:
        raise UsageError(
            f"the checkpoint is of another environment: it was trained on {checkpoint['env_id']}, "
            f"this run is on {source.env_name}; a run resumes only where it was (init_from takes the "
            "weights alone)"
        )
    seed = settings_of(checkpoint, "datamodule_hyper_parameters").get("seed", source.seed)
    if seed != source.seed:
        raise UsageError(
            f"seed={source.seed} differs from the checkpoint's {seed}; its random streams resume "
            "where they were, so give the same"
        )


def require_same_optimizers(module: "ControlModule") -> None:
    """Refuses to resume with optimizers of other classes than those whose state was loaded."""
    before, here = module.run.optimizers_saved, class_names(module.trainer.optimizers)
    if before is not None and before != here:
        raise UsageError(
            f"the checkpoint has the state of the optimizer {', '.join(before) or 'none'}, this run "
            f"has {', '.join(here) or 'none'}; resume with the same"
        )
    module.run.optimizers_saved = None


def load_initial_weights(module: "ControlModule", path: str) -> None:
    """Loads the weights and the normalisers' statistics of a checkpoint; everything else starts from scratch."""
    checkpoint = read_checkpoint(path, "init_from")
    if checkpoint.get("algorithm") not in [cls.__name__ for cls in type(module).__mro__]:
        module._require_own(checkpoint)
    for name in SPACES:
        trained = space_from_dict(settings_of(checkpoint)[name])
        here = space_from_dict(module.hparams[name])
        check_same_space(name, trained, here, f"init_from={path!r}", module.source.env_name)
    weights = module.weights_to_start_from(checkpoint)
    require_same_network(module, checkpoint, weights, f"init_from={path!r}", is_strict=True)
    module.load_state_dict(weights)
    load_statistics(module, checkpoint)


def require_same_network(
    module: "ControlModule", checkpoint: dict[str, Any], weights: dict[str, Any], what: str, is_strict: bool
) -> None:
    """Refuses weights of other shapes than the module's, under ``is_strict`` of other names too."""
    here, there = (
        {name: tuple(value.shape) for name, value in of.items() if isinstance(value, torch.Tensor)}
        for of in (module.state_dict(), weights)
    )
    names = [name for name in here | there if here.get(name) != there.get(name)]
    names = names if is_strict else [name for name in names if name in here and name in there]
    if not names:
        return
    saved = settings_of(checkpoint)
    differ = [
        f"{name}={saved[name]!r} there, {value!r} here"
        for name, value in module.hparams.items()
        if name in saved and saved[name] != value and name not in SPACES and not isinstance(value, float)
    ]
    # The arguments of networks come first, because others may differ too.
    differ.sort(key=lambda text: not text.startswith(("net_arch", "network", "features_extractor")))
    first = (
        f"{names[0]} has the shape {there.get(names[0], 'of nothing')} there, {here.get(names[0], 'of nothing')} here"
    )
    raise UsageError(f"{what} holds another network ({'; '.join(differ[:2]) or first}); give the same arguments")


def load_statistics(module: "ControlModule", checkpoint: dict[str, Any]) -> None:
    """Restores the statistics that observations are normalised with."""
    module.observation_statistics = tree_map(
        lambda s: s and (s[0].cpu().numpy(), s[1].cpu().numpy(), s[2]), checkpoint.get("observation_statistics")
    )
    module.normalizer_state = checkpoint.get("normalizer_state")


def statistics_to_tensors(tree: Statistics) -> Any:
    """Converts statistics to lists of tensors and numbers, which a checkpoint may hold."""
    # The mean of a scalar observation is a number of NumPy's.
    return tree_map(lambda s: s and [torch.from_numpy(np.array(s[0])), torch.from_numpy(np.array(s[1])), s[2]], tree)


# ---------------------------------------------------------------- spaces


def space_brief(space: spaces.Space | dict[str, Any]) -> str:
    """Returns a one-line description of a space, without its bounds and the dtypes of choices."""
    data = without_integers(space if isinstance(space, dict) else space_to_dict(space))
    return f"Box{tuple(data['shape'])} {data['dtype']}" if data["type"] == "Box" else str(space_from_dict(data))


def without_integers(described: Any) -> Any:
    """Returns the description of a space without the dtypes of choices, which no weight depends on."""
    if isinstance(described, list):
        return [without_integers(part) for part in described]
    if not isinstance(described, dict):
        return described
    chooses = described.get("type") in ("Discrete", "MultiDiscrete")
    return {key: without_integers(part) for key, part in described.items() if not (chooses and key == "dtype")}


def check_same_space(name: str, trained: spaces.Space, here: spaces.Space, whose: str, env_name: str) -> None:
    """Refuses weights that were trained in another space; the bounds of observations may differ."""
    mine, its = (without_integers(space_to_dict(space)) for space in (trained, here))
    if mine == its or (name == "observation_space" and _without_bounds(mine) == _without_bounds(its)):
        return
    differ = space_brief(mine) != space_brief(its)
    ours, theirs = (space_brief(mine), space_brief(its)) if differ else (str(trained), str(here))
    raise UsageError(
        f"{whose} was trained with the {name} {ours}, but {env_name} has {theirs}; use an environment of "
        "the same spaces, or a new module"
    )


def _without_bounds(described: Any) -> Any:
    if isinstance(described, dict):
        return {key: _without_bounds(part) for key, part in described.items() if key not in ("low", "high")}
    return [_without_bounds(part) for part in described] if isinstance(described, list) else described


# ---------------------------------------------------------------- callables that make optimizers and schedulers

#: Arguments of a module, and the attributes that hold them.
_ATTRIBUTES = {"optimizer": "optimizer_factory", "lr_scheduler": "scheduler_factory"}


def factory_names(module: "ControlModule") -> dict[str, str]:
    """Returns the names of a module's factories by argument."""
    made_by = {name: getattr(module, attribute, None) for name, attribute in _ATTRIBUTES.items()}
    # A partial is named by its class.
    return {
        name: name_of(getattr(factory, "func", factory)) for name, factory in made_by.items() if factory is not None
    }


def missing_factories(module: "ControlModule", checkpoint: dict[str, Any]) -> dict[str, str]:
    """Returns the names of the factories that the checkpoint's module had and this one lacks."""
    here = factory_names(module)
    return {name: given for name, given in checkpoint.get("factories", {}).items() if name not in here}


def warn_of_missing(module: "ControlModule", missing: dict[str, str]) -> None:
    """Warns at the start of a fit of the checkpoint's factories that the module lacks."""
    given = " and ".join(f"{name}={value}" for name, value in missing.items())
    again = ", ".join(f"{name}=…" for name in missing)
    rank_zero_warn(
        f"the checkpoint of {type(module).__name__} was trained with {given}, code that no checkpoint can "
        f"hold, and this fit has the default instead; to train as before, give it again: "
        f"load_from_checkpoint(…, {again})"
    )


# ---------------------------------------------------------------- minibatches


def resumed_position(position: int, saved: dict[str, int], layout: dict[str, int], begun: bool = False) -> int:
    """Returns the minibatch of its epoch at which a run resumes; ``begun``: the next epoch's experience is there."""
    if saved == layout:
        return position
    if position % saved["length"] or begun:
        changed = ", ".join(
            f"{name}={value} (it has {saved.get(name)})"
            for name, value in layout.items()
            if value != saved.get(name) and name != "length"
        )
        why = "holds experience of the next epoch" if begun else "is from the middle of an epoch"
        raise UsageError(
            f"{changed}: the checkpoint {why}, whose minibatches can't change; resume with the old "
            "settings, or from a finished run"
        )
    return 0


def preparation(algorithm: Any) -> dict[str, Any]:
    """Returns the settings of an algorithm that decide which fields its ``prepare`` returns, by name."""
    return {name: algorithm.hparams.get(name) for name in getattr(algorithm, "shapes_batch", ())}
