"""``graph=True`` with a replay buffer: the updates are the eager ones, recorded or not."""

from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules import ReplayDataModule
from rl_modules import C51, DDPG, DQN, QRDQN, SAC, TD3, TQC
from rl_modules.common.errors import UsageError
from tests.fake_graph import Tape, use_tapes
from tests.rl_modules.test_recorded_iteration import Curves, assert_same
from tests.training import fit

SMALL = {"net_arch": [16]}
RUNS = {
    "DQN": (DQN, "CartPole-v1", {"gradient_steps": 2}, {"target_update_interval": 50}),
    "double DQN": (DQN, "CartPole-v1", {"prioritized_replay": True}, {"double": True, "target_update_interval": 50}),
    "C51": (C51, "CartPole-v1", {"n_steps": 3}, {"target_update_interval": 50}),
    "QRDQN": (QRDQN, "CartPole-v1", {}, {"target_update_interval": 50}),
    "SAC": (SAC, "Pendulum-v1", {}, {}),
    "SAC, fixed entropy": (SAC, "Pendulum-v1", {}, {"ent_coef": 0.1, "target_update_interval": 3}),
    "TD3": (TD3, "Pendulum-v1", {"prioritized_replay": True}, {"learning_rate": "lin_1e-3"}),
    "DDPG": (DDPG, "Pendulum-v1", {}, {}),
    "TQC, in torch": (TQC, "torch/Pendulum-v1", {"n_envs": 2}, {"n_quantiles": 5}),
}  # fmt: skip


def train(module: Any, env_id: str, total: int = 130, ckpt_path: Any = None, **arguments: Any) -> Any:
    curves = Curves()
    data = ReplayDataModule(env_id, **{"learning_starts": 40, "batch_size": 16, "eval_freq": 0, "seed": 3,
                            "buffer_size": 1000, "rollouts_per_epoch": 10, **arguments},
                            total_timesteps=total)  # fmt: skip
    return fit(module, data, ckpt_path, logger=curves), curves.points


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("records", [False, True])
def test_a_recorded_run_is_the_eager_run(name, records, monkeypatch):
    module, env_id, arguments, settings = RUNS[name]
    eager = train(module(**SMALL, **settings), env_id, **arguments)
    if records:
        tapes = use_tapes(monkeypatch)
    recorded = train(module(**SMALL, **settings, graph=True), env_id, **arguments)
    assert_same(eager, recorded)
    if records:
        assert 1 <= tapes.made <= 2 and tapes.replayed > 20


def test_a_run_resumes_exactly(monkeypatch, tmp_path):
    use_tapes(monkeypatch)
    whole = train(SAC(**SMALL, graph=True), "Pendulum-v1")
    part, _ = train(SAC(**SMALL, graph=True), "Pendulum-v1", 90)
    part.save_checkpoint(tmp_path / "part.ckpt")
    again = train(SAC(**SMALL, graph=True), "Pendulum-v1", ckpt_path=tmp_path / "part.ckpt")
    assert_same((whole[0], whole[1][-len(again[1]) :]), again)


def test_a_recording_keeps_no_tensor_and_the_stand_in_finds_those_that_are_gone():
    x, total = torch.ones(3), torch.zeros(3)
    tape = Tape(torch.device("cpu"), ())
    tape.capture(lambda: total.add_(x))
    tape.replay()
    assert total.tolist() == [1, 1, 1]
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="is gone"):
        tape.replay()


def test_recordings_that_share_memory_spoil_what_later_ones_leave():
    left = {}
    first, x = Tape(torch.device("cpu"), ()), torch.ones(3)
    first.capture(lambda: left.update(first=x + 1))
    second = Tape(torch.device("cpu"), (), first.pool)
    second.capture(lambda: left.update(second=x + 2))
    for tape in (first, second):
        tape.replay()
    assert (left["first"].tolist(), left["second"].tolist()) == ([2, 2, 2], [3, 3, 3])
    first.replay()
    assert left["first"].tolist() == [2, 2, 2] and left["second"].isnan().all()


class ReadsBack(SAC):
    def actor_loss(self, q: Tensor, log_prob: Tensor, ent_coef: Any) -> Tensor:
        return super().actor_loss(q, log_prob, float(ent_coef))


def test_a_value_that_is_read_back_names_its_line():
    with pytest.raises(UsageError) as caught:
        train(ReadsBack(**SMALL, graph=True), "Pendulum-v1")
    assert f"ReadsBack(graph=True): {__file__}:" in str(caught.value)
    assert "float(ent_coef))) reads a value back" in str(caught.value)


def test_a_noisy_network_draws_on_the_host():
    with pytest.raises(UsageError, match="draws from a generator"):
        train(DQN(**SMALL, noisy=True, graph=True), "CartPole-v1")


def test_a_part_that_is_frozen_later_stays_as_it_was(monkeypatch):
    use_tapes(monkeypatch)

    class Freezes(SAC):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 5:
                self.network.policy.requires_grad_(False)
                self.kept = [p.clone() for p in self.network.policy.parameters()]

    trainer, _ = train(Freezes(**SMALL, graph=True), "Pendulum-v1")
    module: Any = trainer.lightning_module
    assert trainer.current_epoch > 7
    assert all(torch.equal(p, q) for p, q in zip(module.network.policy.parameters(), module.kept, strict=True))
