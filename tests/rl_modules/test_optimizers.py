import copy
import math
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import PPO, SAC
from rl_modules.common.errors import UsageError
from rl_modules.fast.adam import FusedAdam
from rl_modules.optimizers import RMSpropTFLike
from tests.training import fit


def problem(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3,), (2, 4), ())]


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], n: int) -> None:
    for step in range(n):
        for i, p in enumerate(parameters):
            p.grad = torch.sin(p.detach() * (i + 1) + step)
        optimizer.step()


def test_two_steps_by_hand() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = RMSpropTFLike([p], lr=0.1, alpha=0.9, eps=0.01)
    p.grad = torch.tensor([2.0])
    optimizer.step()
    after_one = 1 - 0.1 * 2 / math.sqrt(0.9 * 1 + 0.1 * 4 + 0.01)
    assert p.item() == pytest.approx(after_one, rel=1e-6)
    p.grad = torch.tensor([-1.0])
    optimizer.step()
    mean_square = 0.9 * 1.3 + 0.1 * 1
    assert p.item() == pytest.approx(after_one + 0.1 / math.sqrt(mean_square + 0.01), rel=1e-6)


def test_first_step_is_shorter_than_that_of_torch() -> None:
    ours, theirs = problem(), problem()
    take_steps(RMSpropTFLike(ours, lr=0.1), ours, 1)
    take_steps(torch.optim.RMSprop(theirs, lr=0.1, alpha=0.99, eps=1e-5), theirs, 1)
    for p, q, origin in zip(ours, theirs, problem(), strict=True):
        assert (p - origin).norm() < 0.5 * (q - origin).norm()


def test_parameters_without_gradient_are_passed_over() -> None:
    used, unused = problem()[0], problem()[1]
    before = unused.detach().clone()
    optimizer = RMSpropTFLike([used, unused])
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert torch.equal(unused, before)
    assert unused not in optimizer.state


def test_closure_computes_the_gradient_and_its_loss_comes_back() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = RMSpropTFLike([p], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert p.item() < 3.0


def test_state_goes_on_exactly() -> None:
    whole, halves = problem(), problem()
    optimizer = RMSpropTFLike(whole, lr=0.1)
    take_steps(optimizer, whole, 4)
    take_steps(optimizer, whole, 4)
    first = RMSpropTFLike(halves, lr=0.1)
    take_steps(first, halves, 4)
    second = RMSpropTFLike(halves, lr=0.5)
    second.load_state_dict(first.state_dict())
    take_steps(second, halves, 4)
    for p, q in zip(whole, halves, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("alpha", 1.0), ("alpha", -0.1), ("eps", 0.0)])
def test_bad_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        RMSpropTFLike(problem(), **{name: value})


@pytest.mark.bench
def test_equals_the_one_of_stable_baselines3() -> None:
    theirs_class = pytest.importorskip("stable_baselines3.common.sb2_compat.rmsprop_tf_like").RMSpropTFLike
    ours, theirs = problem(), problem()
    take_steps(RMSpropTFLike(ours, lr=0.05, alpha=0.95, eps=1e-3), ours, 20)
    take_steps(theirs_class(theirs, lr=0.05, alpha=0.95, eps=1e-3), theirs, 20)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # foreach fuses differently in the last bit


def test_fused_adam_equals_torchs_bit_for_bit_and_takes_over_its_state() -> None:
    ours, theirs = problem(), problem()
    adam, torchs = FusedAdam(ours, lr=0.1, eps=1e-5), torch.optim.Adam(theirs, lr=0.1, eps=1e-5, fused=True)
    take_steps(adam, ours, 5)
    take_steps(torchs, theirs, 5)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], problem()[0])

    resumed = FusedAdam(ours, lr=0.5, eps=1e-5)
    resumed.load_state_dict(copy.deepcopy(torchs.state_dict()))
    take_steps(resumed, ours, 5)
    take_steps(torchs, theirs, 5)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_fused_adam_heeds_what_groups_ask_for() -> None:
    asked = [{"weight_decay": 0.3}, {"maximize": True, "betas": (0.5, 0.6)}, {"lr": 0.2, "amsgrad": True}]
    ours, theirs = problem(), problem()
    groups = ([{"params": [p], **a} for p, a in zip(parameters, asked, strict=True)] for parameters in (ours, theirs))
    adam, torchs = FusedAdam(next(groups)), torch.optim.Adam(next(groups), fused=True)
    take_steps(adam, ours, 5)
    take_steps(torchs, theirs, 5)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", [FusedAdam, RMSpropTFLike])
def test_hooks_around_a_step_are_called(kind: type[torch.optim.Optimizer]) -> None:
    parameters = problem()
    optimizer = kind(parameters)
    take_steps(optimizer, parameters, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    take_steps(optimizer, parameters, 1)
    after.remove()
    take_steps(optimizer, parameters, 1)
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("everywhere"))
    take_steps(optimizer, parameters, 1)
    everywhere.remove()
    assert calls == ["before", "after", "before", "everywhere", "before"]


@pytest.mark.parametrize("kind", [FusedAdam, RMSpropTFLike])
def test_a_profiler_sees_the_step(kind: type[torch.optim.Optimizer]) -> None:
    parameters = problem()
    optimizer = kind(parameters)
    with torch.autograd.profiler.profile() as profile:
        take_steps(optimizer, parameters, 1)
    assert any(event.name == f"Optimizer.step#{kind.__name__}.step" for event in profile.function_events)


def small() -> RolloutDataModule:
    return RolloutDataModule("CartPole-v1", n_envs=2, n_steps=16, total_timesteps=96, eval_freq=0, rollouts_per_epoch=1)


@pytest.mark.long
@pytest.mark.parametrize(("saved", "resumed", "sentence"), [
    (torch.optim.SGD, None, "the checkpoint has the state of the optimizer SGD, this run has Adam; resume with the"),
    (None, torch.optim.SGD, "the checkpoint has the state of the optimizer Adam, this run has SGD; resume with the"),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_another_optimizer_is_named_on_resume(saved, resumed, sentence, algorithm, tmp_path) -> None:
    def data():
        if algorithm is PPO:
            return small()
        return ReplayDataModule("Pendulum-v1", learning_starts=16, total_timesteps=96, rollouts_per_epoch=16,
                                eval_freq=0)  # fmt: skip

    def model(kind):
        return algorithm(net_arch=[8], optimizer=kind and partial(kind, lr=0.01))

    fit(model(saved), data(), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match=sentence):
        fit(model(resumed), data(), ckpt_path=tmp_path / "a.ckpt")
    fit(model(saved), data(), ckpt_path=tmp_path / "a.ckpt")


def test_torchs_adam_resumes_the_state_of_the_fused_one(tmp_path) -> None:
    fit(PPO(net_arch=[8]), small(), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    adam = partial(torch.optim.Adam, lr=3e-4, eps=1e-5)
    trainer = fit(PPO(net_arch=[8], optimizer=adam), small(), ckpt_path=tmp_path / "a.ckpt")
    assert type(trainer.optimizers[0]) is torch.optim.Adam


@pytest.mark.parametrize(("argument", "factory"), [
    ("optimizer", partial(torch.optim.Adam, betas=(2.0, 3.0))),
    ("lr_scheduler", partial(torch.optim.lr_scheduler.StepLR)),
])  # fmt: skip
def test_arguments_that_a_class_refuses_are_one_sentence(argument: str, factory: Any) -> None:
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=16, eval_freq=0)
    with pytest.raises(UsageError, match=rf"{argument}: \w+Error: .*(beta|step_size)"):
        fit(PPO(net_arch=[8], **{argument: factory}), data)


def test_a_module_without_an_optimizer_collects_and_learns_nothing() -> None:
    class Frozen(PPO):
        def configure_optimizers(self) -> None:
            """Lightning allows this."""

    class Start(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.weights = copy.deepcopy(pl_module.state_dict())

    model, start = Frozen(net_arch=[8]), Start()
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, total_timesteps=64, eval_freq=32,
                             n_eval_episodes=1)  # fmt: skip
    trainer = fit(model, data, callbacks=[start])
    assert all(torch.equal(value, start.weights[name]) for name, value in model.state_dict().items())
    assert data.num_timesteps == 64 and "eval/mean_reward" in trainer.callback_metrics
