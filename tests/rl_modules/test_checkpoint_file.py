"""Every way to load a checkpoint checks checksums, tensors that kernels take by address, and names of settings."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import DQN, PPO
from rl_modules.common.errors import UsageError
from rl_modules.core.checkpoint_file import check_optimizers
from tests.training import assert_equal_checkpoints, fit, rollouts


def data(**arguments: Any) -> RolloutDataModule:
    return rollouts("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, total_timesteps=64, n_eval_episodes=1,
                    n_test_episodes=1, **arguments)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "whole.ckpt"
    fit(PPO(net_arch=[8]), data(), max_epochs=1).save_checkpoint(path)
    return path


#: Every way that loads a file in Python. Through the command line go `fit`, `test` and `load_from_checkpoint`.
WAYS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda path: fit(PPO(net_arch=[8]), data(), ckpt_path=path, max_epochs=2),
    "test": lambda path: fit(PPO(net_arch=[8]), data(), max_epochs=1).test(PPO(), data(), ckpt_path=path),
    "module": PPO.load_from_checkpoint,
    "datamodule": RolloutDataModule.load_from_checkpoint,
    "init_from": lambda path: fit(PPO(net_arch=[8], init_from=str(path)), data(), max_epochs=1),
}


def moment(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint["optimizer_states"][0]["state"][0]


def expand(checkpoint: dict[str, Any]) -> None:
    moment(checkpoint)["exp_avg"] = torch.zeros(1).expand_as(moment(checkpoint)["exp_avg"])


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an expanded tensor": (expand, r"optimizer_states.0.state.0.exp_avg of shape .* less memory than elements"),
    "an expanded weight": (
        lambda c: c["state_dict"].update(x=torch.zeros(1).expand(1000)), "state_dict.x of shape .* less memory"
    ),
    "a sparse tensor": (lambda c: c["gradients"].update(x=torch.eye(2).to_sparse()), "gradients.x as a .*sparse"),
    "an instantiator": (
        lambda c: c["hyper_parameters"].update(_instantiator="os.system"), "'_instantiator' in hyper_parameters"
    ),
    "a class": (
        lambda c: c["datamodule_hyper_parameters"].update(_class_path="os.system"),
        "'_class_path' in datamodule_hyper_parameters",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_load(way: str, whole: Path, tmp_path: Path) -> None:
    content = bytearray(whole.read_bytes())
    weight = next(iter(torch.load(whole, weights_only=True)["state_dict"].values())).numpy().tobytes()
    content[content.index(weight) + 3] ^= 1
    (tmp_path / "flipped.ckpt").write_bytes(content)
    with pytest.raises(UsageError, match="flipped.ckpt' is damaged: its part .* does not match its checksum"):
        WAYS[way](tmp_path / "flipped.ckpt")
    os.mkfifo(tmp_path / "pipe")
    for device in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UsageError, match="is not a file, so it can't be read"):
            WAYS[way](device)
    for change, message in CHANGES.values():
        checkpoint = torch.load(whole, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, tmp_path / "changed.ckpt")
        with pytest.raises(UsageError, match=message):
            WAYS[way](tmp_path / "changed.ckpt")


@pytest.mark.parametrize(
    ("name", "value"), [("exp_avg", torch.zeros(1)), ("exp_avg_sq", torch.zeros(3, 3)), ("step", torch.zeros(0))]
)
def test_a_moment_of_another_shape_is_refused(name: str, value: torch.Tensor, whole: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(whole, weights_only=True)
    moment(checkpoint)[name] = value
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    with pytest.raises(UsageError, match=rf"Adam's {name} with shape \({value.shape[0]},.* resume from"):
        WAYS["fit"](tmp_path / "changed.ckpt")


@pytest.mark.parametrize(
    ("part", "name"),
    [("episodes", "running_return"), ("", "resets_next"), ("replay", "reward"), ("replay", "head")]
)  # fmt: skip
def test_state_of_another_shape_is_refused_and_not_spread(part: str, name: str, tmp_path: Path) -> None:
    def run(path: Path | None = None) -> Any:
        replay = ReplayDataModule("CartPole-v1", n_envs=2, total_timesteps=40, learning_starts=10, buffer_size=100,
                                  rollouts_per_epoch=5, eval_freq=0)  # fmt: skip
        return fit(DQN(), replay, ckpt_path=path, max_epochs=1 if path is None else 2)

    run().save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    own = checkpoint["ReplayDataModule"]["ranks"][0]
    place = own["replay"] if part == "replay" else own["collector"].get(part, own["collector"])
    if part != "replay":
        place, name_there = place[name], "numpy.ndarray"
    else:
        name_there = name
    place[name_there] = place[name_there][:1].clone() if name != "resets_next" else place[name_there].float()
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    with pytest.raises(UsageError, match=f"the checkpoint has {name} as .*, where this run has"):
        run(tmp_path / "changed.ckpt")


@pytest.mark.parametrize("fused", [False, True])
def test_moments_get_the_layout_of_their_parameters(fused: bool) -> None:
    """Fused kernels read both in the order of memory."""
    torch.manual_seed(0)
    start, gradient = torch.randn(5, 3), torch.randn(5, 3)

    def stepped(transpose: bool) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Adam([parameter], lr=0.1, fused=fused)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {
            "step": torch.tensor(3.0),
            "exp_avg": gradient.t().contiguous().t() if transpose else gradient.clone(),
            "exp_avg_sq": gradient.square().t().contiguous().t() if transpose else gradient.square(),
        }}})  # fmt: skip
        check_optimizers([optimizer])
        parameter.grad = gradient.flip(0)
        optimizer.step()
        return parameter.detach()

    assert torch.equal(stepped(transpose=True), stepped(transpose=False))


def test_a_whole_checkpoint_resumes_exactly(whole: Path, tmp_path: Path) -> None:
    fit(PPO(net_arch=[8]), data(), max_epochs=2).save_checkpoint(tmp_path / "straight.ckpt")
    WAYS["fit"](whole).save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "straight.ckpt", tmp_path / "resumed.ckpt")
