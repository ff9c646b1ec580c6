"""Training runs for tests: quiet, on the CPU, with what a run leaves behind compared exactly."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from datamodules import RolloutDataModule
from rl_modules.base import ControlModule


def fit(model: L.LightningModule, data: Any, ckpt_path: Path | None = None, **trainer_arguments: Any) -> L.Trainer:
    """Train to the datamodule's ``total_timesteps`` (or ``max_epochs``); returns the trainer."""
    warnings.filterwarnings("ignore", message=".*(bar|logger|loader|epoch|treespec|ModelCheckpoint).*")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    arguments = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer_arguments,
    }
    trainer = L.Trainer(**arguments)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=ckpt_path is not None)
    return trainer


def rollouts(env_id: Any, n_envs: int = 8, n_steps: int = 16, **arguments: Any) -> RolloutDataModule:
    """A datamodule without evaluation that takes rollouts whole, unless told otherwise."""
    defaults = {"batch_size": None, "n_epochs": 1, "eval_freq": 0, "total_timesteps": 10**9, "rollouts_per_epoch": 1}
    return RolloutDataModule(env_id, n_envs=n_envs, n_steps=n_steps, **{**defaults, **arguments})


def mean_return(model: ControlModule, env: Any, n_episodes: int = 20, seed: int = 1000) -> float:
    """Mean return over whole episodes of the most likely actions."""
    total = 0.0
    for episode in range(n_episodes):
        observation, _ = env.reset(seed=seed + episode)
        done = False
        while not done:
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            done = terminated or truncated
    return total / n_episodes


def tensors_of(tree: Any, path: str = "", left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every leaf of a checkpoint by its path; the library's version and the callbacks left out."""
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {path: tree}
    leaves: dict[str, Any] = {}
    for key, value in items:
        if key not in ("pytorch-lightning_version", "callbacks", *left_out):
            leaves.update(tensors_of(value, f"{path}/{key}", left_out))
    return leaves


def differences(one: Path, other: Path, loops: bool = False) -> list[str]:
    """What differs between two checkpoints, leaf by leaf; NaN is equal to itself. ``loops``: Lightning's too."""
    left_out = () if loops else ("loops",)
    left, right = (tensors_of(torch.load(path, weights_only=True), left_out=left_out) for path in (one, other))
    found = [f"{path} is there only once" for path in left.keys() ^ right.keys()]
    for path in left.keys() & right.keys():
        a, b = left[path], right[path]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            equal = same and torch.equal(torch.isnan(a), torch.isnan(b))
        else:
            equal = repr(a) == repr(b)
        if not equal:
            found.append(f"{path} differs: {a} and {b}")
    return sorted(found)


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    assert not (found := differences(one, other)), "\n".join(found)


def assert_resumes_exactly(
    make_model: Callable[[], Any],
    make_data: Callable[[], Any],
    folder: Path,
    epochs: int = 4,
    **trainer_arguments: Any,
) -> None:
    """Stop after each epoch, go on from the checkpoint, and end where the uninterrupted run ends, bit for bit."""
    run = partial(fit, **trainer_arguments)
    whole = run(make_model(), make_data(), max_epochs=epochs)
    assert whole.current_epoch == epochs, f"the data last for {whole.current_epoch} epochs, and would not resume"
    whole.save_checkpoint(folder / "whole.ckpt")
    for stop in range(1, epochs):
        run(make_model(), make_data(), max_epochs=stop).save_checkpoint(folder / "part.ckpt")
        resumed = run(make_model(), make_data(), ckpt_path=folder / "part.ckpt", max_epochs=epochs)
        resumed.save_checkpoint(folder / "resumed.ckpt")
        assert_equal_checkpoints(folder / "whole.ckpt", folder / "resumed.ckpt")
