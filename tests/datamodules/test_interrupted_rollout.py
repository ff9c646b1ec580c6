"""Checkpoints that Lightning writes on an error or interrupt inside a rollout: a resumed run invents nothing."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import A2C, DQN, PPO, RecurrentPPO
from rl_modules.common.errors import UsageError
from tests.datamodules.envs import Counter, Unreliable
from tests.training import fit

LENGTH = 5


class Interrupts:
    """Raises in the ``at``-th action."""

    at = -1
    error: type[BaseException] = RuntimeError

    def act(self, *arguments: Any, **options: Any) -> dict:
        self.acted = getattr(self, "acted", 0) + 1
        if self.acted == self.at:
            raise self.error("stop")
        return super().act(*arguments, **options)  # type: ignore[misc]


def broken_off(model: Any, data: Any, folder: Path) -> Path:
    """The checkpoint of a run that ends by the model's error."""
    with pytest.raises(BaseException, match="stop") as raised:
        fit(model, data, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    assert not isinstance(raised.value, AssertionError)
    return folder / "on_exception.ckpt"


def test_a_wrong_argument_costs_no_checkpoint_of_an_earlier_error(tmp_path: Path) -> None:
    def data(**arguments: Any) -> RolloutDataModule:
        return RolloutDataModule("CartPole-v1", n_envs=2, n_steps=16, total_timesteps=256, eval_freq=0,
                                 rollouts_per_epoch=1, **arguments)  # fmt: skip

    fails: Any = type("PPO", (Interrupts, PPO), {"at": 40})  # a run resumes with the class that it was
    before = broken_off(fails(net_arch=[4]), data(), tmp_path).read_bytes()
    wrong = [(PPO(net_arch=[4], use_sde=True), data()), (PPO(net_arch=[4]), data(seed=7)), (A2C(), data())]
    for model, source in wrong:
        with pytest.raises(UsageError):
            fit(model, source, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
        assert (tmp_path / "on_exception.ckpt").read_bytes() == before
    resumed = data()
    fit(PPO(net_arch=[4]), resumed, ckpt_path=tmp_path / "on_exception.ckpt")
    assert resumed.num_timesteps == 256


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("at", [9, 10, 11, 12, 15])
def test_replayed_transitions_are_real(mode: str, at: int, tmp_path: Path) -> None:
    seen = []

    class Watched(Interrupts, DQN):
        def prepare(self, sample: Any) -> Any:
            seen.extend(zip(*(sample[k].tolist() for k in ("observation", "next_observation", "reward")), strict=True))
            return super().prepare(sample)

    def data() -> ReplayDataModule:
        return ReplayDataModule(Counter, env_kwargs={"length": LENGTH}, n_envs=2, train_freq=4, total_timesteps=160,
                                learning_starts=8, batch_size=32, buffer_size=1000, eval_freq=0,
                                autoreset_mode=mode)  # fmt: skip

    first = Watched(net_arch=[4])
    first.at = at
    checkpoint = broken_off(first, data(), tmp_path)
    resumed = data()
    seen.clear()
    with pytest.warns(UserWarning, match=r"environments \[0, 1\] start a new episode, because the checkpoint was writ"):
        fit(Watched(net_arch=[4]), resumed, ckpt_path=checkpoint)
    assert len(seen) > 500
    for (start, count), (start_after, count_after), (reward,) in seen:
        assert (start_after, count_after, reward) == (start, count + 1, count + 1)
    assert set(resumed.collector.episodes.lengths) == {LENGTH}
    assert set(resumed.collector.episodes.returns) == {float(sum(range(1, LENGTH + 1)))}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [PPO, RecurrentPPO])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_returns_of_rollouts_are_whole(algorithm: Any, mode: str, tmp_path: Path) -> None:
    class Watched(Interrupts, algorithm):
        pass

    def data() -> RolloutDataModule:
        return RolloutDataModule(Counter, env_kwargs={"length": LENGTH}, n_envs=2, n_steps=8, total_timesteps=128,
                                 eval_freq=0, rollouts_per_epoch=1, autoreset_mode=mode)  # fmt: skip

    first = Watched(net_arch=[4])
    first.at = 14
    checkpoint = broken_off(first, data(), tmp_path)
    resumed = data()
    with pytest.warns(UserWarning, match="start a new episode"):
        fit(Watched(net_arch=[4]), resumed, ckpt_path=checkpoint)
    assert len(resumed.collector.episodes.lengths) > 10
    assert set(resumed.collector.episodes.lengths) == {LENGTH}
    assert set(resumed.collector.episodes.returns) == {float(sum(range(1, LENGTH + 1)))}


@pytest.mark.long
def test_an_interrupt_between_rollouts_repeats_the_episodes(tmp_path: Path, recwarn: Any) -> None:
    """Nothing was lost there: the run resumes as from any checkpoint."""

    class Watched(PPO):
        fails = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.source.num_timesteps == 48:
                raise RuntimeError("stop")
            return super().training_step(batch, batch_idx)

    def data() -> RolloutDataModule:
        return RolloutDataModule(Counter, env_kwargs={"length": LENGTH}, n_envs=2, n_steps=8, total_timesteps=128,
                                 eval_freq=0, rollouts_per_epoch=1)  # fmt: skip

    first = Watched(net_arch=[4])
    first.fails = True
    checkpoint = broken_off(first, data(), tmp_path)
    fit(Watched(net_arch=[4]), data(), ckpt_path=checkpoint)
    assert not [w for w in recwarn if "start a new episode" in str(w.message)]


@pytest.mark.long
@pytest.mark.parametrize(("mode", "how"), [("sync", "raises"), ("async", "raises"), ("async", "dies")])
def test_environments_that_failed_begin_anew(mode: str, how: str, tmp_path: Path) -> None:
    """The step that failed is not repeated, though its action was recorded."""
    flag = tmp_path / "fails"
    flag.touch()

    def data() -> RolloutDataModule:
        return RolloutDataModule(Unreliable, env_kwargs={"file": str(flag), "at": 70, "how": how}, n_envs=2, n_steps=32,
                                 total_timesteps=256, eval_freq=0, rollouts_per_epoch=1,
                                 vectorization_mode=mode)  # fmt: skip

    with pytest.raises(Exception, match="raised ZeroDivisionError" if how == "raises" else "died"):
        fit(PPO(net_arch=[4]), data(), callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    flag.unlink()
    resumed = data()
    with pytest.warns(UserWarning, match="start a new episode"):
        fit(PPO(net_arch=[4]), resumed, ckpt_path=tmp_path / "on_exception.ckpt")
    assert resumed.num_timesteps == 256
