"""Two processes with N environments each learn what one process with 2N environments learns."""

import errno
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from datamodules import InstructionDataModule, ReplayDataModule, RolloutDataModule
from datamodules.collector import Collector
from datamodules.envs.vector import make_vector_env
from datamodules.normalization import Normalizers, ObservationNormalizer, RewardNormalizer, RunningMeanStd
from recipes.callbacks.checkpoint_files import rotate
from recipes.callbacks.checkpoints import Checkpoints
from recipes.signals import Stopped
from rl_modules import A2C, C51, DDPG, DQN, PPO, PQN, QRDQN, REINFORCE, SAC, SFT, TD3, TQC, TRPO, CrossQ
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.ranks import explained_variance, gather_ranks
from tests.ranks import on_ranks
from tests.rl_modules.test_subclass_updates import Curious
from tests.training import assert_equal_checkpoints, fit, rollouts

T, N = 8, 6


class Recorded(RolloutDataModule):
    """The same experience of 2N environments in any number of processes, each of which takes its share.

    With ``holes``, some rows are no transitions, and the ranks have different numbers of those that are; with
    ``one_row``, the first of two ranks has a single one.
    """

    holes = False
    one_row = False

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            assert self.collector is not None
            self.collector.collect = self.recorded  # type: ignore[method-assign]

    @property
    def ranks_differ_in_size(self) -> bool:
        return self.holes

    def recorded(self, act: Callable, n_steps: int, device: torch.device) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(3)
        observation = torch.randn(T + 1, N, 4, generator=draw)
        acted = [act(observation[t], draw) for t in range(T + 1)]
        ended = torch.rand(T, N, generator=draw) < 0.2
        rollout = {key: torch.stack([row[key] for row in acted[:-1]]) for key in acted[0]}
        if "value" in rollout:
            rollout["next_value"] = torch.cat([rollout["value"][1:], acted[-1]["value"][None]])
        valid = torch.ones(T, N, dtype=torch.bool)
        if self.holes:
            valid[1::3, : N // 2] = False
        if self.one_row:
            valid[:, : N // 2] = False
            valid[0, 0] = True
        rollout.update(
            observation=observation[:-1], next_observation=observation[1:], valid=valid, terminated=ended,
            truncated=torch.zeros_like(ended), reward=torch.randn(T, N, generator=draw) * 3 + 1,
        )  # fmt: skip
        share = N // self._world_size
        mine = slice(self._rank * share, (self._rank + 1) * share)
        return {key: value[:, mine] for key, value in rollout.items()}


class RecordedReplay(ReplayDataModule):
    """Likewise: minibatches drawn from one buffer, of which each process takes its share."""

    def _draw(self, remaining: int) -> None:
        draw = torch.Generator().manual_seed(self.num_timesteps)
        n = 2 * 8
        sample = {
            "observation": torch.randn(n, *self.observation_space.shape, generator=draw),
            "next_observation": torch.randn(n, *self.observation_space.shape, generator=draw),
            "action": torch.randint(2, (n,), generator=draw)
            if isinstance(self.action_space, spaces.Discrete)
            else torch.rand(n, *self.action_space.shape, generator=draw),
            "reward": torch.randn(n, 1, generator=draw),
            "n_steps": torch.ones(n, dtype=torch.int64),
            "terminated": torch.rand(n, generator=draw) < 0.3,
        }
        share = n // self._world_size
        mine = slice(self._rank * share, (self._rank + 1) * share)
        with torch.no_grad():
            self._drawn.append(self.trainer.lightning_module.prepare({k: v[mine] for k, v in sample.items()}))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    # Its step is the gradient: a difference in one is a difference in the other.
    return torch.optim.SGD(parameters, lr=0.1)


def small_sgd(parameters: Any) -> torch.optim.Optimizer:
    # Squared errors of Pendulum's rewards have gradients of hundreds.
    return torch.optim.SGD(parameters, lr=0.003)


def recorded(**arguments: Any) -> Callable[[int], Recorded]:
    def make(world_size: int) -> Recorded:
        defaults = {"batch_size": None, "n_epochs": 1, "eval_freq": 0, "total_timesteps": 3 * T * N}
        return Recorded("CartPole-v1", n_envs=N // world_size, n_steps=T, **{**defaults, **arguments})

    return make


def with_holes(**arguments: Any) -> Callable[[int], Recorded]:
    def make(world_size: int) -> Recorded:
        data = recorded(autoreset_mode="next_step", total_timesteps=2 * T * N, **arguments)(world_size)
        data.holes = True
        return data

    return make


def with_one_row(**arguments: Any) -> Callable[[int], Recorded]:
    def make(world_size: int) -> Recorded:
        data = with_holes(**arguments)(world_size)
        data.one_row = True
        return data

    return make


def replayed(world_size: int, env_id: str = "CartPole-v1") -> RecordedReplay:
    return RecordedReplay(env_id, n_envs=2 // world_size, train_freq=4, total_timesteps=48, learning_starts=8,
                          rollouts_per_epoch=2, eval_freq=0, batch_size=16 // world_size)  # fmt: skip


def swings(world_size: int) -> RecordedReplay:
    return replayed(world_size, "Pendulum-v1")


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "ppo": (lambda: PPO(optimizer=sgd, ent_coef=0.01), recorded(n_epochs=3)),
    "ppo early stop": (lambda: PPO(optimizer=sgd, target_kl=1e-3), recorded(n_epochs=5)),
    "ppo penalty": (lambda: PPO(optimizer=sgd, policy_objective="penalty", target_kl=1e-3), recorded(n_epochs=3)),
    "ppo rows that are none": (lambda: PPO(optimizer=sgd), with_holes(n_epochs=2)),
    "a2c": (lambda: A2C(optimizer=sgd), recorded()),
    "a2c normalized": (lambda: A2C(optimizer=sgd, normalize_advantage=True), recorded()),
    "a2c rows that are none": (lambda: A2C(optimizer=sgd), with_holes()),
    "a2c a single row": (lambda: A2C(optimizer=sgd, normalize_advantage=True), with_one_row()),
    "ppo a single row": (lambda: PPO(optimizer=sgd), with_one_row(n_epochs=2)),
    "reinforce": (lambda: REINFORCE(optimizer=sgd, psi="baseline", normalize_advantage=True), recorded()),
    "reinforce a single row": (
        lambda: REINFORCE(optimizer=sgd, psi="baseline", normalize_advantage=True),
        with_one_row(),
    ),
    "trpo": (lambda: TRPO(optimizer=sgd, batch_size=T * N, target_kl=0.05), recorded()),
    "trpo rows that are none": (lambda: TRPO(optimizer=sgd, batch_size=T * N, target_kl=0.05), with_holes()),
    "dqn": (lambda: DQN(optimizer=sgd, target_update_interval=16), replayed),
    "dqn double": (lambda: DQN(optimizer=sgd, double=True, loss="mse"), replayed),
    "c51": (lambda: C51(optimizer=sgd, target_update_interval=16, n_atoms=5, v_min=0, v_max=20), replayed),
    "qrdqn": (lambda: QRDQN(optimizer=sgd, target_update_interval=16, n_quantiles=5), replayed),
    "pqn": (lambda: PQN(optimizer=sgd), recorded(n_epochs=2)),
    "sac": (lambda: SAC(optimizer=small_sgd), swings),
    "tqc": (lambda: TQC(optimizer=small_sgd), swings),
    "crossq": (lambda: CrossQ(optimizer=small_sgd, policy_delay=1, renorm_warmup_steps=2, net_arch=[64]), swings),
    "td3": (lambda: TD3(optimizer=small_sgd), swings),
    "ddpg": (lambda: DDPG(optimizer=small_sgd), swings),
}


def train_all(world_size: int) -> dict[str, dict[str, Tensor]]:
    """Weights before and after a few updates, of every case."""
    results = {}
    for name, (make_model, make_data) in CASES.items():
        model, data = make_model(), make_data(world_size)
        strategy = {"devices": world_size, "strategy": "ddp"} if world_size > 1 else {}
        fit(model, data, **strategy)
        weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
        weights["kl_coef"] = torch.tensor(getattr(model, "kl_coef", 0.0))
        weights["rejected"] = torch.tensor(float(getattr(model, "rejected_updates", 0)))
        weights["steps"] = torch.tensor(float(model.trainer.global_step))
        results[name] = weights
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[dict]]:
    """Every case, in one process and in two."""
    folder = tmp_path_factory.mktemp("ranks")
    return train_all(1), on_ranks(lambda: train_all(2), folder)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_mean_the_same_as_one(case: str, trained: tuple[dict, list[dict]]) -> None:
    one, two = trained
    fresh = fit(CASES[case][0](), CASES[case][1](1), max_epochs=0).lightning_module.state_dict()
    assert any(not torch.equal(fresh[name], one[case][name]) for name in fresh), "nothing was learned"
    # Fifteen iterations of conjugate gradient in float32 make more of a rounding error.
    atol = 3e-6 if case.startswith("trpo") else 1e-6
    for name, value in one[case].items():
        for rank in two:
            torch.testing.assert_close(rank[case][name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(two[0][case][name], two[1][case][name]), name


# -------------------------------------------------------------------- normalisers


def statistics_on_two_ranks() -> list[Tensor]:
    data = RolloutDataModule("Pendulum-v1", n_envs=2, n_steps=16, batch_size=None, n_epochs=1, norm_obs=True,
                             norm_reward=True, eval_freq=0, total_timesteps=128)  # fmt: skip
    fit(PPO(), data, devices=2, strategy="ddp")
    parts = data.collector.normalizers.parts()
    seen = data.rollout["observation"]
    return [*(torch.from_numpy(np.append(np.append(p.mean, p.var), p.count)) for p in parts), seen]


@pytest.mark.long
def test_normalisers_of_all_ranks_have_seen_what_any_has(tmp_path: Path) -> None:
    one, other = on_ranks(statistics_on_two_ranks, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one[:2], other[:2], strict=True))
    assert not torch.equal(one[2], other[2])
    # Two rollouts of 16 steps and the first observation, of 2 × 2 environments.
    assert one[0][-1] == pytest.approx(4 * (2 * 16 + 1), abs=1e-3)
    assert one[1][-1] == pytest.approx(4 * 2 * 16, abs=1e-3)


def test_shared_statistics_are_those_of_all_samples_together() -> None:
    rng = np.random.default_rng(0)
    shares: list[list[np.ndarray]] = [[], []]
    ranks = [ObservationNormalizer(make_vector_env("Pendulum-v1", 1).single_observation_space).parts()[0]
             for _ in range(2)]  # fmt: skip
    for part in ranks:
        part.track_own()
    for _ in range(3):
        for part, share in zip(ranks, shares, strict=True):
            share.append(rng.normal(5, 3, (int(rng.integers(0, 9)), 3)))
            part.update(share[-1])
        own = [part.own() for part in ranks]
        for part in ranks:
            part.merge_ranks(own)
    every = np.concatenate([sample for share in shares for sample in share])
    for part in ranks:
        assert np.allclose(part.mean, every.mean(0), rtol=1e-4)  # the prior weighs 1e-4 of a sample
        assert np.allclose(part.var, every.var(0), rtol=1e-3)
    assert np.array_equal(ranks[0].mean, ranks[1].mean) and np.array_equal(ranks[0].var, ranks[1].var)


def test_statistics_between_two_merges_are_restored() -> None:
    """As where a rollout was collected ahead of a checkpoint, on each rank another."""
    rng = np.random.default_rng(0)

    def fresh() -> list[RunningMeanStd]:
        ranks = [RunningMeanStd((2,)) for _ in range(2)]
        for part in ranks:
            part.track_own()
        return ranks

    def merge(ranks: list[RunningMeanStd]) -> None:
        own = [part.own() for part in ranks]
        for part in ranks:
            part.merge_ranks(own)

    ranks, resumed = fresh(), fresh()
    for _ in range(2):
        merge(ranks)
        for rank, part in enumerate(ranks):
            part.update(rng.normal(5 * rank, 1, (10, 2)))
    for part, other in zip(ranks, resumed, strict=True):
        other.load_state_dict(part.state_dict())
        assert np.array_equal(part.mean, other.mean) and part.count == other.count
    for _ in range(2):
        merge(ranks)
        merge(resumed)
        for part, other in zip(ranks, resumed, strict=True):
            assert np.array_equal(part.mean, other.mean) and np.array_equal(part.var, other.var)
            assert part.count == other.count
        assert np.array_equal(resumed[0].mean, resumed[1].mean) and resumed[0].count == resumed[1].count
        for part in (*ranks, *resumed):
            part.update(np.ones((3, 2)))


@pytest.mark.long
def test_a_run_of_two_ranks_that_collects_ahead_resumes_with_its_statistics(tmp_path: Path) -> None:
    def train(steps: int, ckpt_path: Path | None = None) -> list[Tensor]:
        data = RolloutDataModule("Pendulum-v1", n_envs=2, n_steps=16, batch_size=None, n_epochs=1, norm_obs=True,
                                 norm_reward=True, eval_freq=0, total_timesteps=512, rollouts_per_epoch=1,
                                 overlap=True)  # fmt: skip
        trainer = fit(PPO(), data, ckpt_path=ckpt_path, max_steps=steps, devices=2, strategy="ddp")
        if ckpt_path is None and steps < 5:
            trainer.save_checkpoint(tmp_path / "part.ckpt")
        seen = [torch.from_numpy(np.atleast_1d(x)) for x in data.learner.observation_statistics[:2]]
        return [*seen, *(p.detach() for p in data.learner.parameters())]

    def both() -> list[list[Tensor]]:
        train(2)
        return [train(5), train(5, tmp_path / "part.ckpt")]

    (whole, resumed), (other_whole, other_resumed) = on_ranks(both, tmp_path / "ranks")
    assert all(torch.equal(a, b) for a, b in zip(whole, other_whole, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(resumed, other_resumed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_normalisers_of_two_ranks_merge_what_each_saw() -> None:
    space = make_vector_env("Pendulum-v1", 1).single_observation_space
    ranks = [Normalizers(ObservationNormalizer(space), RewardNormalizer(2, 0.9)) for _ in range(2)]
    for rank, normalizers in enumerate(ranks):
        for part in normalizers.parts():
            part.track_own()
        collector = Collector(make_vector_env("Pendulum-v1", 2), [rank, 5 + rank], 3, "test", normalizers)
        collector.collect(lambda o, g: {"action": torch.zeros(2, 1)}, 4, torch.device("cpu"))
    flat = [np.concatenate([part.own() for part in normalizers.parts()]) for normalizers in ranks]
    for normalizers in ranks:
        normalizers.merge_ranks(lambda _: flat)
    for one, other in zip(ranks[0].parts(), ranks[1].parts(), strict=True):
        assert np.array_equal(one.mean, other.mean) and np.array_equal(one.var, other.var)
    # Two ranks of two environments: four steps and the first observation each.
    assert ranks[0].of_observations.running.count == pytest.approx(20, abs=1e-3)
    assert ranks[0].of_rewards.running.count == pytest.approx(16, abs=1e-3)


# -------------------------------------------------------------------- evaluations


class Played(PPO):
    """Evaluates to known episodes: each rank's have other returns and lengths, and one of two knows of successes."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rank = self.global_rank
        known = {"success": torch.tensor([1.0, 1.0, 0.0])} if rank else {}
        returns = torch.tensor([10.0, 20.0, 60.0]) + 100 * rank
        super().validation_step({"return": returns, "length": torch.tensor([1, 2, 3]) + rank, **known}, batch_idx)


@pytest.mark.long
def test_an_evaluation_of_two_ranks_is_of_all_their_episodes(tmp_path: Path) -> None:
    def evaluate() -> list[dict[str, float]]:
        points = Points()
        data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, eval_freq=32, n_eval_episodes=3,
                                 total_timesteps=32, eval_max_steps=2)  # fmt: skip
        trainer = fit(Played(), data, devices=2, strategy="ddp", logger=points)
        monitored = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return [{name: x[name] for name in x if name.startswith("eval/")} for x in (points.last, monitored)]

    (logged, monitored), (_, elsewhere) = on_ranks(evaluate, tmp_path)
    returns = np.array([10, 20, 60, 110, 120, 160])
    expected = {"eval/mean_reward": returns.mean(), "eval/std_reward": returns.std(), "eval/mean_ep_length": 2.5,
                "eval/success_rate": 2 / 6}  # fmt: skip
    assert logged == pytest.approx(expected)
    assert monitored == elsewhere == logged


# -------------------------------------------------------------------- subclasses


class Logs(PPO):
    """Logs this rank's number, which each reduction merges over both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = float(self.global_rank + 1)
        for how in ("mean", "sum", "max", "min"):
            self.log(f"my/{how}", number, reduce_fx=how)
        if self.global_rank == 1:
            self.log("my/other", number, reduce_fx="max")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.record(rank=float(self.global_rank))


def logged_on_two_ranks() -> dict[str, float]:
    points = Points()
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, n_epochs=1, eval_freq=0,
                             rollouts_per_epoch=1, total_timesteps=32)  # fmt: skip
    fit(Logs(net_arch=[8]), data, devices=2, strategy="ddp", logger=points)
    return {name: x for name, x in points.last.items() if name.startswith("my/") or name == "train/rank"}


@pytest.mark.long
def test_what_a_subclass_logs_is_reduced_over_all_ranks(tmp_path: Path) -> None:
    found, _ = on_ranks(logged_on_two_ranks, tmp_path)
    # Two minibatches of each rank.
    expected = {"my/mean": 1.5, "my/sum": 6.0, "my/max": 2.0, "my/min": 1.0, "my/other": 2.0, "train/rank": 0.5}
    assert found == expected


class CuriousWithAnIdlePart(Curious):
    """Has a part with a step of its own, and one that nothing trains."""

    def build_network(self) -> None:
        super().build_network()
        self.idle = torch.nn.Linear(3, 1)


def parts_on_two_ranks() -> dict[str, Any]:
    data = ReplayDataModule("Pendulum-v1", n_envs=1, train_freq=4, learning_starts=16, batch_size=8, eval_freq=0,
                            total_timesteps=96)  # fmt: skip
    model = CuriousWithAnIdlePart(net_arch=[8])
    trainer = fit(model, data, devices=2, strategy="ddp")
    state = trainer.optimizers[0].state
    return {"weight": model.model.weight.detach(), "steps": int(state[model.model.weight]["step"]),
            "updates": model.n_updates, "idle steps": len(state.get(model.idle.weight, {}))}  # fmt: skip


@pytest.mark.long
def test_a_part_of_one_s_own_takes_its_steps_alone_on_two_ranks(tmp_path: Path) -> None:
    one, other = on_ranks(parts_on_two_ranks, tmp_path)
    assert torch.equal(one["weight"], other["weight"])
    assert one["steps"] == one["updates"] > 0 and one["idle steps"] == 0


# -------------------------------------------------------------------- resuming


def evaluated_on_two_ranks(folder: Path, ckpt_path: Path | None = None) -> tuple[dict[str, Any], int]:
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, n_epochs=1, eval_freq=1,
                             n_eval_episodes=2, rollouts_per_epoch=1, total_timesteps=10**9)  # fmt: skip
    stop = EarlyStopping("eval/mean_reward", mode="max", patience=100)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    model = PPO(net_arch=[8])
    fit(model, data, ckpt_path, devices=2, strategy="ddp", callbacks=[stop, saves], enable_checkpointing=True,
        max_epochs=4)  # fmt: skip
    return {name: x.detach().clone() for name, x in model.state_dict().items()}, stop.wait_count


@pytest.mark.long
def test_two_ranks_do_what_was_due_after_the_batch_of_their_checkpoint(tmp_path: Path) -> None:
    (whole, waited), _ = on_ranks(lambda: evaluated_on_two_ranks(tmp_path / "whole"), tmp_path / "a")
    assert waited > 0
    saved = tmp_path / "whole/step=4.ckpt"  # of the second epoch's last batch
    resumed = on_ranks(lambda: evaluated_on_two_ranks(tmp_path / "rest", saved), tmp_path / "b")
    for weights, waited_too in resumed:
        assert waited_too == waited
        assert all(torch.equal(weights[name], x) for name, x in whole.items())


# -------------------------------------------------------------------- importance weights


class Weights(L.Callback):
    """The largest importance weight of each minibatch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch["weight"].max()))


def weights_on_two_ranks() -> list[float]:
    weights = Weights()
    data = ReplayDataModule("CartPole-v1", n_envs=1, train_freq=4, total_timesteps=160, learning_starts=16,
                            prioritized_replay=True, eval_freq=0, batch_size=8)  # fmt: skip
    fit(DQN(), data, devices=2, strategy="ddp", callbacks=[weights])
    return weights.seen


@pytest.mark.slow
def test_the_largest_importance_weight_is_that_of_all_ranks(tmp_path: Path) -> None:
    one, other = on_ranks(weights_on_two_ranks, tmp_path)
    assert [max(pair) for pair in zip(one, other, strict=True)] == [1.0] * len(one)
    assert min(one) < 1 and min(other) < 1


# -------------------------------------------------------------------- a run of two processes


def run(folder: Path, last: Path | None = None, world_size: int = 2, **arguments: Any) -> int:
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, n_epochs=2, eval_freq=0, norm_obs=True,
                             total_timesteps=160)  # fmt: skip
    strategy = {"devices": 2, "strategy": "ddp"} if world_size == 2 else {}
    trainer = fit(PPO(), data, last, **strategy, **arguments)
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer.global_step


class SignalOneRank(L.Callback):
    """SIGTERM for the second rank alone, in the middle of a batch."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By their pace ranks ask each other four times a second: this run may be over by then.
    monkeypatch.setattr("recipes.signals.AGREEMENT_INTERVAL_S", 0.01)

    def stopped() -> str:
        checkpoints = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run"}
        try:
            run(tmp_path, callbacks=[Checkpoints(), SignalOneRank()], **checkpoints)
        except Stopped as error:
            return f"{error.signum} {error.checkpoint}"
        return "not stopped"

    def both() -> list:
        return [stopped(), run(tmp_path / "rest", tmp_path / "run/checkpoints/last.ckpt"), run(tmp_path / "whole")]

    ranks = on_ranks(both, tmp_path)
    assert ranks == [[f"15 {tmp_path}/run/checkpoints/last.ckpt", 20, 20]] * 2
    step = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"]
    assert 6 <= step < 20  # ranks ask each other now and then, not at every step
    assert_equal_checkpoints(tmp_path / "whole/end.ckpt", tmp_path / "rest/end.ckpt")


class Clock(L.Callback):
    """The time that ranks exchange their wishes by: ten batches a second, so that they would after every second one."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def on_train_batch_end(self, *args: Any) -> None:
        self.now_s += 0.1


@pytest.mark.long
def test_ranks_agree_between_optimizer_steps_whatever_their_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("recipes.signals.time", clock)

    def both() -> str:
        checkpoints = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run", "accumulate_grad_batches": 2}
        try:
            run(tmp_path, callbacks=[Checkpoints(), SignalOneRank(), clock], **checkpoints)
        except Stopped as error:
            return f"{error.signum}"
        return "not stopped"

    assert on_ranks(both, tmp_path) == ["15", "15"]
    step = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"]
    assert 6 <= step < 10


@pytest.mark.long
def test_a_rank_that_can_not_rename_a_checkpoint_tries_again_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails_once(folder: Path, keep_previous: bool) -> None:
        calls.append(folder)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        rotate(folder, keep_previous)

    monkeypatch.setattr("recipes.callbacks.checkpoints.rotate", fails_once)

    def both() -> list:
        signal.alarm(120)  # ranks that wait for each other end here
        checkpoints = Checkpoints(interval_s=0.0, max_share=1.0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            done = run(tmp_path, callbacks=[checkpoints], enable_checkpointing=True, default_root_dir=tmp_path / "run")
        warned = [str(one.message) for one in said if "can't be written" in str(one.message)]
        return [done, len(calls) > 1, warned, checkpoints._saved_at[0]]

    first, second = on_ranks(both, tmp_path)
    why = "[Errno 5] Input/output error; there is none before it. Training continues and tries again."
    assert first == [20, True, [f"The checkpoint can't be written: {why}"], 20]
    assert second == [20, False, [], 20]
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 20


@pytest.mark.long
def test_two_ranks_resume_exactly_and_another_number_is_refused(tmp_path: Path) -> None:
    def both() -> list[int]:
        return [run(tmp_path / "whole"), run(tmp_path / "half", max_epochs=2),
                run(tmp_path / "rest", tmp_path / "half/end.ckpt")]  # fmt: skip

    steps, others = on_ranks(both, tmp_path)
    assert steps == others == [20, 8, 20]
    assert_equal_checkpoints(tmp_path / "whole/end.ckpt", tmp_path / "rest/end.ckpt")
    ranks = torch.load(tmp_path / "whole/end.ckpt", weights_only=True)["RolloutDataModule"]["ranks"]
    assert not torch.equal(*(rank["collector"]["observation"]["numpy.ndarray"] for rank in ranks))
    with pytest.raises(UsageError, match="written by 2 ranks, this run has 1; resume with as many"):
        run(tmp_path, tmp_path / "half/end.ckpt", world_size=1)


@pytest.mark.long
def test_two_ranks_of_trpo_resume_exactly_where_their_rollouts_differ_in_size(tmp_path: Path) -> None:
    """Reset rows are no transitions: the critic's minibatches are drawn from another number of them on each rank."""

    def train(max_epochs: int, **arguments: Any) -> L.Trainer:
        data = rollouts("CartPole-v1", n_envs=2, n_steps=16, autoreset_mode="next_step")
        model = TRPO(n_critic_updates=2, batch_size=8, target_kl=0.1)
        return fit(model, data, max_epochs=max_epochs, devices=2, strategy="ddp", **arguments)

    def both() -> list[int]:
        train(4).save_checkpoint(tmp_path / "whole.ckpt")
        train(2).save_checkpoint(tmp_path / "part.ckpt")
        train(4, ckpt_path=tmp_path / "part.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
        return []

    on_ranks(both, tmp_path / "ranks")
    part = torch.load(tmp_path / "part.ckpt", weights_only=True)
    assert not torch.equal(*(p["run"]["shuffler"]["torch.Generator"] for p in (part, part["other_ranks"][0])))
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@pytest.mark.long
def test_a_rank_with_fewer_transitions_than_trpos_minibatches_spoils_none(tmp_path: Path) -> None:
    def both() -> dict[str, Tensor]:
        model = TRPO(n_critic_updates=2, batch_size=T)
        fit(model, with_one_row()(2), devices=2, strategy="ddp")
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    one, other = on_ranks(both, tmp_path)
    assert all(value.isfinite().all() and torch.equal(value, other[name]) for name, value in one.items())


class SaveAt(L.Callback):
    """Writes a checkpoint after a number of minibatches."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


class Points(DummyLogger):
    """Keeps the last point of every curve but the clock's."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.last.update({name: value for name, value in metrics.items() if not re.search("time|fps|per_s", name)})


def sft() -> tuple[Any, Any]:
    model = SFT(model_config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                              "num_attention_heads": 2}, logging_steps=4)  # fmt: skip
    return model, InstructionDataModule("addition", n_train=64, batch_size=8, eval_steps=0)


def ppo() -> tuple[Any, Any]:
    return PPO(), RolloutDataModule("CartPole-v1", n_envs=2, n_steps=16, batch_size=16, n_epochs=4, eval_freq=0,
                                    total_timesteps=64)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("make", "micro"), [(sft, 1), (ppo, 1), (ppo, 2)], ids=["sft", "ppo", "ppo, accumulated"])
def test_a_point_of_a_resumed_curve_is_over_all_ranks(
    make: Callable[..., tuple[Any, Any]], micro: int, tmp_path: Path
) -> None:
    """The checkpoint is from between two points, or from within a step: what each rank has added up is in it."""

    def train(**arguments: Any) -> dict[str, float]:
        points = Points()
        fit(*make(), max_steps=8 // micro, devices=2, logger=points, accumulate_grad_batches=micro,
            **arguments)  # fmt: skip
        return points.last

    def both() -> list[dict[str, float]]:
        return [train(callbacks=[SaveAt(tmp_path / "part.ckpt", 7)]), train(ckpt_path=tmp_path / "part.ckpt")]

    (whole, resumed), _ = on_ranks(both, tmp_path)
    assert "train/loss" in resumed
    assert {name: whole[name] for name in resumed} == resumed


TINY = '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}'
COMMANDS = {
    "PPO": ["--model=PPO", "--data=RolloutDataModule", "--data.env_id=CartPole-v1", "--data.n_envs=2",
            "--data.n_steps=16", "--data.batch_size=16", "--data.n_epochs=1", "--data.total_timesteps=256",
            "--data.eval_freq=128", "--data.n_eval_episodes=2", "--data.n_test_episodes=2", "--data.overlap=true"],
    "SFT": ["--model=SFT", "--data=InstructionDataModule", "--data.task=addition", "--data.n_eval=4",
            "--data.batch_size=8", "--data.n_train=32", "--trainer.max_steps=2", f"--model.model_config={TINY}"],
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_ends_a_run_of_two_ranks_with_one_summary(name: str, tmp_path: Path) -> None:
    def train() -> None:
        from recipes.cli import main

        os.chdir(tmp_path)
        main(["fit", *COMMANDS[name], "--trainer.devices=2", "--trainer.accelerator=cpu"])

    on_ranks(train, tmp_path / "ranks")
    first, second = ((tmp_path / f"ranks/{rank}.txt").read_text() for rank in range(2))
    assert "last checkpoint" in first and "last checkpoint" not in second
    assert len(list(tmp_path.glob("logs/*/version_0/checkpoints/last.ckpt"))) == 1


class Explained(Points):
    """Keeps all points of the share of variance that the critic explains."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.seen += [value for name, value in metrics.items() if name == "train/explained_variance"]


EXPLAINED = ["ppo", "ppo rows that are none", "ppo a single row", "a2c", "a2c a single row", "trpo", "reinforce"]


def explained_by_all(world_size: int) -> list[list[float]]:
    curves = [Explained() for _ in EXPLAINED]
    for name, curve in zip(EXPLAINED, curves, strict=True):
        make_model, make_data = CASES[name]
        strategy = {"devices": world_size, "strategy": "ddp"} if world_size > 1 else {}
        fit(make_model(), make_data(world_size), logger=curve, **strategy)
    return [curve.seen for curve in curves]


@pytest.mark.long
def test_the_explained_variance_is_that_of_all_ranks_transitions(tmp_path: Path) -> None:
    """And callbacks of all ranks see the same number: ModelCheckpoint writes it into the name of its file."""
    one, (first, second) = explained_by_all(1), on_ranks(lambda: explained_by_all(2), tmp_path)
    assert first == second
    for expected, seen in zip(one, first, strict=True):
        assert len(expected) >= 2 and seen == pytest.approx(expected, abs=1e-5)


def test_constant_returns_leave_nothing_to_explain_on_two_ranks(tmp_path: Path) -> None:
    def explained() -> list[float]:
        torch.distributed.init_process_group("gloo")
        value = torch.tensor([5.0]) if torch.distributed.get_rank() else torch.tensor([1.0, 2.0])
        means = torch.full_like(value, float(value.mean()))
        every = (torch.full_like(value, 7.1), value + 3, means)
        return [float(explained_variance(value, returns)) for returns in every]

    expected = F.explained_variance(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.5, 1.5, 5.0]))
    for constant, perfect, means in on_ranks(explained, tmp_path):
        assert np.isnan(constant) and perfect == 1 and means == pytest.approx(float(expected))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_replay_buffers_are_gathered_on_the_cpu(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a gloo group of their own beside NCCL's, made once per default group."""
    used: list[Any] = []
    inner = torch.distributed.gather_object

    def gather(*args: Any, group: Any = None, **kwargs: Any) -> None:
        used.append(group)
        inner(*args, group=group, **kwargs)

    def gathered() -> list[Any]:
        rank, found = int(os.environ["RANK"]), []
        for run in ("first", "second"):
            store = f"file://{tmp_path / run}"
            torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
            with monkeypatch.context() as patch:
                patch.setattr(torch.distributed, "get_backend", lambda group=None: backend)
                patch.setattr(torch.distributed, "gather_object", gather)
                found += [gather_ranks({"rank": rank}, rank, 2) for _ in range(2)]
            torch.distributed.destroy_process_group()
        a, b, c, d = used
        assert all(group is None for group in used) if backend == "gloo" else (a is b is not None and c is d is not a)
        return found

    first, second = on_ranks(gathered, tmp_path / "ranks")
    assert first == [[{"rank": 0}, {"rank": 1}]] * 4 and second == [[None, None]] * 4
