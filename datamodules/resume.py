"""A datamodule's part of a checkpoint, written and read."""

from typing import Any

from datamodules.evaluation import count_evaluations
from rl_modules.checkpoints import preparation, resumed_position
from rl_modules.common.errors import UsageError
from rl_modules.core.checkpoint import state_of
from rl_modules.ranks import gather_ranks, state_of_rank


def own_state(data: Any) -> dict[str, Any]:
    """Returns what a datamodule declares, and the settings on which it depends."""
    own = {**state_of(data), "layout": data._layout}
    prepared = preparation(data.trainer and data.trainer.lightning_module)
    return {**own, "preparation": prepared} if prepared else own


def state_of_run(data: Any) -> dict[str, Any]:
    """Returns the state of every rank; empty where the run has no environments."""
    own = {name: getattr(data, name) for name in ("num_timesteps", "n_envs") if hasattr(data, name)}
    if own and data._collector is None:
        return {}
    return {**own, "ranks": gather_ranks(data.rank_state(), data._rank, data._world_size)}


def resume_run(data: Any, state: dict[str, Any]) -> None:
    """Restores what :func:`state_of_run` returned."""
    here = getattr(data, "n_envs", None)
    if here is not None and "n_envs" not in state:
        raise UsageError(
            "the checkpoint is of an earlier version, which stored runs otherwise; init_from starts a new "
            "run from its weights"
        )
    own = state_of_rank(state["ranks"], data._rank, data._world_size)
    if (saved := state.get("n_envs")) != here:
        raise UsageError(f"n_envs={here} differs from the checkpoint's {saved}; resume with as many")
    data.load_rank_state(own)
    if here is not None:
        data._started_at = state["num_timesteps"]
        data.learner_trainer.should_stop |= data.is_complete


def resume_rollout(data: Any, state: dict[str, Any]) -> None:
    """Finds the minibatch at which a run of rollouts resumes, under the settings that it has now."""
    saved, is_ahead = state["layout"], data._next is not None
    if data.hparams["rollouts_per_epoch"] is None and data._position % saved["length"]:
        # It depends on total_timesteps, which may change on resume; this epoch ends with the value with which it began.
        data.rollouts_per_epoch = data._resolved["rollouts_per_epoch"] = saved["rollouts_per_epoch"]
        count_evaluations(data, again=True)
    # Other minibatches can be cut from a rollout that was collected ahead, but its steps are those of the old run.
    begun = is_ahead and saved["n_steps"] != data.n_steps
    data._position = resumed_position(data._position, saved, data._layout, begun)
    half_used = data.has_learner and (data._fields is not None or is_ahead)
    here = preparation(data.learner) if half_used else {}
    for name, value in here.items():
        if (before := state.get("preparation", {}).get(name, value)) != value:
            raise UsageError(
                f"{name}={value!r} (it has {before!r}): the checkpoint is from the "
                "middle of an epoch, and its rollout was prepared for the old setting; resume with that, "
                "or from a finished run"
            )
