"""Curves of the control algorithms: means of an epoch, drawn over transitions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rl_modules.common.errors import UsageError
from rl_modules.core.curves import hand_to_callbacks, write_evaluation, write_point
from rl_modules.ranks import episodes_of_all_ranks

#: Prefix of the names of logged values. A logged value replaces one that the algorithm records under the same name.
LOGGED = "log:"
#: Reductions that ``log`` takes, by what Lightning accepts.
REDUCE_FX: dict[Any, str] = {
    "mean": "mean", torch.mean: "mean", "max": "max", torch.max: "max", "min": "min", torch.min: "min", "sum": "sum",
    torch.sum: "sum",
}  # fmt: skip


def draw(module: Any, name: str, value: Any, reduce_fx: Any, logger: bool | None) -> bool:
    """Adds a value that ``log`` was given in training to the next point of its curve; returns whether it did."""
    trainer, reduction = module._trainer, REDUCE_FX.get(reduce_fx)
    if trainer is None or not trainer.training or reduction is None:
        return False
    if logger is not False and module.logs_this_epoch:
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, Tensor | int | float):
            module._objects[name] = value  # of torchmetrics
        elif reduction == "mean":
            module._means.add({LOGGED + name: value})
        else:
            module._means.reduce(LOGGED + name, value, reduction)
    return True


@_disable_dynamo
def log_outside_of_graphs(module: Any, *args: Any, **options: Any) -> None:
    """Lightning inspects signatures and stores values by name, which Dynamo can't trace."""
    module.log(*args, **options)


def means_so_far(module: Any) -> dict[str, float]:
    """Means since the last point of the curves, over all ranks, which call this together. A logged value replaces a
    recorded one of the same name.
    """
    means = module._means.means(module.trainer)
    logged = {name.removeprefix(LOGGED): x for name, x in means.items() if name.startswith(LOGGED)}
    logged |= {name: float(metric.compute()) for name, metric in module._objects.items()}
    return {**{name: x for name, x in means.items() if not name.startswith(LOGGED)}, **logged}


def write_metrics(module: Any, rollout: dict[str, float], step: int) -> None:
    """Writes one point of every training curve, with the datamodule's metrics, and begins the next."""
    latest = {name: float(value) for name, value in module._latest.items()}
    metrics = {**rollout, **latest, **means_so_far(module)}
    write_point(module.trainer, metrics, step)
    hand_to_callbacks(module.trainer, {name: x for name, x in metrics.items() if not name.startswith("time/")})
    module._means, module._latest, module._objects = module._means.begun_anew(), {}, {}


def log_evaluation(module: Any, batch: dict[str, Tensor], prefix: str) -> None:
    """Logs mean and spread of the returns of evaluation episodes, over all ranks."""
    if not module._is_alone:
        batch = episodes_of_all_ranks(batch, module.device)
    reward, length = batch["return"], batch["length"]
    metrics = {
        f"{prefix}/mean_reward": reward.mean(),
        f"{prefix}/std_reward": reward.std(correction=0),
        f"{prefix}/mean_ep_length": length.float().mean(),
    }
    if "success" in batch:
        metrics[f"{prefix}/success_rate"] = batch["success"].mean()
    write_evaluation(module, metrics, batch_size=len(reward), sync_dist=True)


def require_finite_weights(module: Any) -> None:
    """Stops the run before a callback saves weights that are not finite."""
    named = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
    if not named or bool(torch.stack(torch._foreach_norm(list(named.values()))).isfinite().all()):
        return
    bad = next((name for name, p in named.items() if not torch.isfinite(p).all()), None)
    if bad is not None:  # else the square of a large weight is infinite
        raise UsageError(f"after {module.source.num_timesteps:,} transitions the parameter {bad} is NaN or infinite; "
                         "earlier checkpoints are untouched: lower learning_rate or max_grad_norm")  # fmt: skip
