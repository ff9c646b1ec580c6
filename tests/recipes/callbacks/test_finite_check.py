"""A loss, gradient or weight that is NaN or infinite stops the run, and never gets into a checkpoint."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from recipes.callbacks import Checkpoints, FiniteCheck
from rl_modules import PPO, TRPO
from rl_modules.common.errors import UsageError
from tests.recipes.callbacks.test_checkpoints import ppo_data, saving, whole
from tests.training import fit


class Broken(PPO):
    """Its loss, or a gradient, is NaN in the step ``at``."""

    def __init__(self, what: str, at: int = 5, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.what, self.at = what, at

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.what == "loss" and self.global_step == self.at else loss

    def on_after_backward(self) -> None:
        if self.what == "gradient" and self.global_step == self.at:
            next(iter(self.parameters())).grad[0] = float("inf")


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_no_number_stops_the_run(what: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=rf"{what}.* of optimizer step 6 \(epoch 0\) is (nan|inf).*bad_batch.pt.*last good"
    ):
        fit(Broken(what), ppo_data(), **saving(tmp_path))
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 5
    assert all(torch.isfinite(value).all() for value in last["state_dict"].values())
    saved = torch.load(tmp_path / "checkpoints/bad_batch.pt", weights_only=True)
    assert saved["batch"]["observation"].shape == (8, 4)
    assert saved["step"] == 6


def test_a_critic_whose_loss_is_no_number_stops_trpo(tmp_path: Path) -> None:
    class BrokenCritic(TRPO):
        def value_loss(self, value: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
            return super().value_loss(value, batch) * (float("nan") if self.current_epoch == 3 else 1.0)

    with pytest.raises(UsageError, match=r"the loss of optimizer step \d+ \(epoch 3\) is nan.*last good checkpoint"):
        fit(BrokenCritic(batch_size=8, n_critic_updates=2), whole(), **saving(tmp_path))
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert last["RolloutDataModule"]["num_timesteps"] == 3 * 16
    assert all(torch.isfinite(value).all() for value in last["state_dict"].values())


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    # Nothing is clipped, so that the gradient's norm is unknown and the loss of its own step still finite.
    with pytest.raises(UsageError, match=r"after step 6 the parameter network\S+ is NaN.*last good checkpoint"):
        fit(Broken("gradient", max_grad_norm=None), ppo_data(), **saving(tmp_path))
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 5


# -------------------------------------------------------------------- in Python


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_the_callback_alone_stops_a_plain_trainer(what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{what}.* of optimizer step 6 .* no checkpoint had been written before"):
        fit(Broken(what), ppo_data(), callbacks=[FiniteCheck()], default_root_dir=tmp_path)
    assert torch.load(tmp_path / "bad_batch.pt", weights_only=True)["step"] == 6


def test_the_callback_guards_lightning_s_own_checkpoints(tmp_path: Path) -> None:
    # Nothing is clipped: the loss of step 6 is finite and its gradient's norm unknown, but the weights are infinite.
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    model = Broken("gradient", max_grad_norm=None)
    with pytest.raises(UsageError, match=r"after step 6 the parameter network\S+ is NaN.*last good .*step=5.ckpt"):
        fit(model, ppo_data(), callbacks=[FiniteCheck(), saves], enable_checkpointing=True, default_root_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [f"step={n}.ckpt" for n in range(1, 6)]


def test_a_second_fit_starts_without_the_first_one_s_batches(tmp_path: Path) -> None:
    check = FiniteCheck()
    with pytest.raises(UsageError):
        fit(Broken("loss"), ppo_data(), callbacks=[check], default_root_dir=tmp_path)
    fit(PPO(), ppo_data(), callbacks=[check], default_root_dir=tmp_path)


@pytest.mark.long
def test_checkpoints_leave_the_check_to_the_user_s_callback(tmp_path: Path) -> None:
    class Counts(FiniteCheck):
        checked = 0

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.checked += 1
            super().on_train_batch_end(*arguments)

    check, checkpoints = Counts(), Checkpoints()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(PPO(), ppo_data(), callbacks=[check, checkpoints], enable_checkpointing=True, default_root_dir=tmp_path)
    assert check.checked == 32
    assert checkpoints._finite is None
