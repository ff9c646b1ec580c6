"""``graph=True`` with environments in torch: the run is the eager one, recorded or not."""

import sys
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from datamodules import RolloutDataModule
from datamodules.envs.torch import CartPole
from rl_modules import A2C, PPO, PQN, REINFORCE, TRPO, RecurrentPPO
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.fast import is_recording
from rl_modules.fast.adam import FusedAdam
from tests.fake_graph import use_tapes
from tests.training import fit

#: Metrics are sums in another order, in single precision.
ROUNDING = 1e-5

#: Torch's RAdam and RMSprop have steps for recordings on GPUs only.
ADAM = partial(FusedAdam, lr=2.5e-4)
RUNS = {
    "PPO": (PPO, "torch/CartPole-v1", {"n_steps": 16, "batch_size": 32, "n_epochs": 2}),
    "PPO, a short minibatch": (PPO, "torch/CartPole-v1", {"n_steps": 16, "batch_size": 48, "n_epochs": 2}),
    "PPO, Box": (PPO, "torch/Pendulum-v1", {"n_steps": 16, "batch_size": None, "n_epochs": 2}),
    "A2C": (partial(A2C, optimizer=ADAM), "torch/CartPole-v1", {"rollouts_per_epoch": 4}),
    "PQN": (partial(PQN, optimizer=ADAM), "torch/Maze-v0", {"n_steps": 16, "batch_size": 64, "n_epochs": 2}),
    "REINFORCE": (REINFORCE, "torch/CartPole-v1", {"n_steps": 16}),
}


class Curves(L.pytorch.loggers.Logger):
    """Keeps the points of the curves."""

    name, version = "curves", 0

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        timed = ("time/fps", "time/time_elapsed")
        self.points.append((step, {name: x for name, x in metrics.items() if name not in timed}))


def train(module: Any, env_id: Any, total: int = 1024, ckpt_path: Any = None, **arguments: Any) -> Any:
    curves = Curves()
    data = RolloutDataModule(env_id, **{"n_envs": 8, "eval_freq": 0, "seed": 3, **arguments}, total_timesteps=total)
    trainer = fit(module, data, ckpt_path, logger=curves)
    return trainer, curves.points


def assert_same(one: Any, other: Any) -> None:
    """Two runs have the same weights, bit for bit, counters and curves."""
    (a, points), (b, others) = one, other
    for name, x in a.lightning_module.state_dict().items():
        assert torch.equal(x, b.lightning_module.state_dict()[name]), name
    assert (a.global_step, a.current_epoch) == (b.global_step, b.current_epoch)
    assert [step for step, _ in points] == [step for step, _ in others]
    for (_, here), (_, there) in zip(points, others, strict=True):
        assert here == pytest.approx(there, rel=ROUNDING, abs=ROUNDING, nan_ok=True)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("records", [False, True])
def test_a_recorded_run_is_the_eager_run(name, records, monkeypatch):
    module, env_id, arguments = RUNS[name]
    eager = train(module(), env_id, **arguments)
    if records:
        tapes = use_tapes(monkeypatch)
    recorded = train(module(graph=True), env_id, **arguments)
    assert_same(eager, recorded)
    if records:
        assert 1 <= tapes.made <= 2
        assert tapes.replayed >= eager[0].datamodule.num_timesteps // (8 * eager[0].datamodule.n_steps) - 2


@pytest.mark.parametrize("rate", [None, "lin_1e-3"])
@pytest.mark.parametrize(("module", "env_id"), [(A2C, "torch/CartPole-v1"), (PQN, "torch/Maze-v0")])
def test_steps_of_torch_for_recordings_are_its_usual_ones(module, env_id, rate, monkeypatch):
    """A2C's RMSprop and PQN's RAdam, with rates and counts in tensors, which torch allows on GPUs only."""
    eager, _ = train(module(learning_rate=rate), env_id, n_steps=16)
    for kind in (torch.optim.RMSprop, torch.optim.RAdam):
        place: Any = sys.modules[kind.__module__]
        monkeypatch.setattr(place, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    tapes = use_tapes(monkeypatch)
    recorded, _ = train(module(learning_rate=rate, graph=True), env_id, n_steps=16)
    assert tapes.replayed > 5 and recorded.optimizers[0].param_groups[0]["capturable"]
    for name, x in eager.lightning_module.state_dict().items():
        torch.testing.assert_close(recorded.lightning_module.state_dict()[name], x, atol=1e-5, rtol=0)


@pytest.mark.parametrize("records", [False, True])
def test_a_learning_rate_that_decays(records, monkeypatch):
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 1}
    eager = train(PPO(learning_rate="lin_1e-3"), "torch/CartPole-v1", **arguments)
    if records:
        use_tapes(monkeypatch)
    assert_same(eager, train(PPO(learning_rate="lin_1e-3", graph=True), "torch/CartPole-v1", **arguments))


@pytest.mark.parametrize("records", [False, True])
def test_the_adaptive_penalty(records, monkeypatch):
    arguments = {"n_steps": 16, "batch_size": None, "n_epochs": 2}
    eager = train(PPO(policy_objective="penalty"), "torch/CartPole-v1", 2048, **arguments)
    if records:
        use_tapes(monkeypatch)
    recorded = train(PPO(policy_objective="penalty", graph=True), "torch/CartPole-v1", 2048, **arguments)
    assert_same(eager, recorded)
    assert recorded[0].lightning_module.beta == eager[0].lightning_module.beta != 1.0


@pytest.mark.parametrize("records", [False, True])
def test_a_run_resumes_exactly(records, monkeypatch, tmp_path):
    if records:
        use_tapes(monkeypatch)
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 2, "rollouts_per_epoch": 2}
    whole = train(PPO(graph=True), "torch/CartPole-v1", **arguments)
    part = train(PPO(graph=True), "torch/CartPole-v1", 512, **arguments)
    part[0].save_checkpoint(tmp_path / "part.ckpt")
    again = train(PPO(graph=True), "torch/CartPole-v1", ckpt_path=tmp_path / "part.ckpt", **arguments)
    assert_same((whole[0], whole[1][-len(again[1]) :]), again)
    eager, _ = train(PPO(), "torch/CartPole-v1", ckpt_path=tmp_path / "part.ckpt", **arguments)
    for name, x in eager.lightning_module.state_dict().items():
        assert torch.equal(x, again[0].lightning_module.state_dict()[name]), name


class Alternates(PPO):
    """Has two recordings, which take turns, and reads each rollout after its updates."""

    def recording_key(self) -> tuple[Any, ...]:
        return (*super().recording_key(), self.source.num_timesteps // 128 % 2)

    def end_rollout(self, rollout: Any) -> None:
        self.record_now(last_return=rollout["returns"].mean())


def test_each_recording_leaves_its_rollout(monkeypatch):
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 2, "rollouts_per_epoch": 1}
    eager = train(Alternates(), "torch/CartPole-v1", **arguments)
    tapes = use_tapes(monkeypatch)
    assert_same(eager, train(Alternates(graph=True), "torch/CartPole-v1", **arguments))
    assert (tapes.made, tapes.replayed) == (2, 6)


class Extremes(PPO):
    """Draws more than means."""

    def value_loss(self, value: Tensor, batch: dict[str, Any]) -> Tensor:
        self.log("highest", value.max(), reduce_fx="max")
        self.log("lowest", value.min(), reduce_fx=torch.min)
        self.log("sum", value.mean(), reduce_fx="sum")
        return super().value_loss(value, batch)


@pytest.mark.parametrize("records", [False, True])
def test_what_is_logged_as_an_extreme_or_a_sum_counts_in_every_update(records, monkeypatch):
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 2, "rollouts_per_epoch": 4}
    eager = train(Extremes(), "torch/CartPole-v1", **arguments)
    assert {"highest", "lowest", "sum"} <= set(eager[1][-1][1])
    if records:
        use_tapes(monkeypatch)
    assert_same(eager, train(Extremes(graph=True), "torch/CartPole-v1", **arguments))


class WithOwnLoss(PPO):
    """A loss in Huber's form, a metric and an entropy bonus of the user's."""

    def value_loss(self, value: Tensor, batch: dict[str, Any]) -> Tensor:
        loss = torch.nn.functional.smooth_l1_loss(value, batch["returns"])
        self.record(huber=loss)
        self.log("share", (value > 0).float().mean())
        return loss

    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        return F.ppo_clip_loss(log_prob, batch["log_prob"], batch["advantage"].tanh(), self.clip_range)


@pytest.mark.parametrize("records", [False, True])
def test_a_subclass_with_a_loss_of_its_own(records, monkeypatch):
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 2}
    eager = train(WithOwnLoss(), "torch/CartPole-v1", **arguments)
    if records:
        use_tapes(monkeypatch)
    recorded = train(WithOwnLoss(graph=True), "torch/CartPole-v1", **arguments)
    assert_same(eager, recorded)
    assert {"train/huber", "share"} <= recorded[1][-1][1].keys()


class Annealed(PPO):
    def update_schedules(self, progress: float) -> None:
        super().update_schedules(progress)
        self.vf_coef = 0.5 * (1 - progress)


def test_a_number_that_a_subclass_changes_is_the_present_one(monkeypatch):
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 2}
    eager = train(Annealed(), "torch/CartPole-v1", **arguments)
    use_tapes(monkeypatch)
    assert_same(eager, train(Annealed(graph=True), "torch/CartPole-v1", **arguments))


def test_truncated_episodes_differ_by_rounding():
    """Values of final observations are computed in a batch of another size."""
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 2, "env_kwargs": {"max_episode_steps": 30}}
    eager, recorded = (train(PPO(graph=graph), "torch/CartPole-v1", **arguments)[0] for graph in (False, True))
    for name, x in eager.lightning_module.state_dict().items():
        torch.testing.assert_close(recorded.lightning_module.state_dict()[name], x, rtol=1e-3, atol=1e-4)


class Parts(CartPole):
    """Places and speeds apart."""

    single_observation_space = spaces.Dict({name: spaces.Box(-10, 10, (2,)) for name in ("place", "speed")})

    def observe(self, state: Tensor) -> Any:
        return {"place": state[:, ::2], "speed": state[:, 1::2]}


def in_parts(num_envs: int = 8) -> Parts:
    return Parts(num_envs, max_episode_steps=500)


@pytest.mark.parametrize("records", [False, True])
def test_observations_in_parts(records, monkeypatch):
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 2}
    eager = train(PPO(), in_parts, **arguments)
    if records:
        use_tapes(monkeypatch)
    assert_same(eager, train(PPO(graph=True), in_parts, **arguments))


class ReadsBack(PPO):
    def value_loss(self, value: Tensor, batch: dict[str, Any]) -> Tensor:
        if value.mean() > 0:
            return value.square().mean()
        return super().value_loss(value, batch)


class ChangesShape(PPO):
    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        return -log_prob[batch["advantage"] > 0].sum()


class DrawsByItself(PPO):
    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        self.own = torch.Generator().manual_seed(0)
        return (log_prob * torch.rand(log_prob.shape, generator=self.own)).mean()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (ReadsBack, "if value.mean() > 0:) reads a value back"),
        (ChangesShape, 'return -log_prob[batch["advantage"] > 0].sum()) reads a value back'),
        (DrawsByItself, "generator=self.own)).mean()) draws from a generator"),
    ],
)
def test_what_can_not_be_recorded_names_its_line(module, said):
    with pytest.raises(UsageError) as caught:
        train(module(graph=True), "torch/CartPole-v1", n_steps=16)
    assert said in str(caught.value)
    assert f"{module.__name__}(graph=True): {__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (PPO(graph=True), {"env_id": "CartPole-v1"}, "CartPole-v1 is not in torch"),
        (PPO(graph=True, target_kl=0.01), {}, "ppo.py"),
        (PPO(graph=True, clip_range="lin_0.2"), {}, "clip_range='lin_0.2' changes"),
        (PPO(graph=True, lr_scheduler=torch.optim.lr_scheduler.ConstantLR), {}, "lr_scheduler"),
        (PPO(graph=True), {"norm_obs": True}, "norm_obs"),
        (PPO(graph=True), {"overlap": True}, "overlap"),
        (TRPO(graph=True), {}, "TRPO(graph=True)"),
        (RecurrentPPO(graph=True), {}, "a recurrent policy"),
    ],
)
def test_what_does_not_go_together(module, arguments, said):
    with pytest.raises(UsageError) as caught:
        train(module, **{"env_id": "torch/CartPole-v1", "n_steps": 16, **arguments})
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


class Fails(CartPole):
    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        following, reward, terminated = super().transition(state, action)
        return following, torch.where(self.steps > 5, torch.nan, reward), terminated


class Columns(CartPole):
    def transition(self, state: Tensor, action: Tensor) -> Any:
        following, reward, terminated = super().transition(state, action)
        return following, reward[:, None], terminated


class Longer(CartPole):
    def observe(self, state: Tensor) -> Tensor:
        return torch.cat([state, state], 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Columns(8), r"must return observations, 8 rewards, .* not torch.float32 \(8, 1\)"),
        (lambda: Longer(8), r"returned the observation .* of shape \(8, 8\), which does not fit"),
    ],
)
def test_what_an_environment_returns_is_checked(make, said):
    with pytest.raises(UsageError, match=said):
        train(PPO(graph=True), make, n_steps=16)


def test_a_reward_that_is_not_finite_ends_the_run():
    with pytest.raises(UsageError, match="returned a NaN, infinite or too large observation or reward"):
        train(PPO(graph=True), Fails(8), n_steps=16)


def test_evaluation_and_a_second_fit():
    module = PPO(graph=True)
    for _ in range(2):
        trainer, _ = train(module, "torch/CartPole-v1", n_steps=16, eval_freq=256)
        assert float(trainer.callback_metrics["eval/mean_reward"]) >= 8
        assert "training_step" not in vars(module)
        assert not is_recording()
