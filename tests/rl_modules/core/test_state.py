"""State that is declared by name: it begins anew with each run, and comes back from a checkpoint as it was."""

import copy
import io
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import RolloutDataModule
from rl_modules import PPO
from rl_modules.common.errors import UsageError
from rl_modules.core.state import Stateful, forget_state, load_state, persistent, state_of, transient
from tests.training import fit


class Counter(Stateful):
    count: int = persistent(0)


class Run(Stateful):
    mean: np.ndarray = persistent(lambda run: np.zeros(run.n))
    nothing: Any = persistent()
    pair: Any = persistent((1, "two"))
    last: Any = persistent(lambda run: deque(maxlen=2))
    nested: Counter = persistent(lambda run: Counter())
    _generator: torch.Generator = persistent(lambda run: torch.Generator().manual_seed(3))
    _numpys: np.random.Generator = persistent(lambda run: np.random.default_rng(3))
    cache: Any = transient([])

    def __init__(self, n: int) -> None:
        self.n = n


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def used() -> Run:
    run = Run(2)
    run.mean = np.array([0.1, np.pi])
    run.nothing = {"a": [torch.arange(2), np.arange(3), None], 5: 1.5}
    run.pair = (torch.ones(1), np.zeros((), np.float64))
    run.last.extend([1, 2, 3])
    run.nested.count = 7
    torch.rand(5, generator=run._generator)
    run._numpys.random(5)
    run.cache.append(1)
    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the generator continues its own stream")
def test_a_generator_of_a_gpu_becomes_one_of_the_cpu_that_repeats_nothing() -> None:
    drawn = []
    for place in (0, 0, 4):  # a state of CUDA's: the seed, and how far its stream is
        run, state = Run(2), used().state_dict()
        state["generator"] = {"torch.Generator": torch.tensor([3, place]).view(torch.uint8), "device": "cuda"}
        run.load_state_dict(through_a_file(state))
        drawn.append(torch.rand(3, generator=run._generator))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_loaded_run_goes_on_as_the_saved_one() -> None:
    run, other = used(), Run(2)
    other.load_state_dict(through_a_file(run.state_dict()))
    assert other.mean.dtype == np.float64 and other.mean.tolist() == [0.1, np.pi]
    assert other.nothing["a"][0].tolist() == [0, 1] and isinstance(other.nothing["a"][1], np.ndarray)
    assert other.nothing["a"][2] is None and other.nothing[5] == 1.5
    assert isinstance(other.pair, tuple) and other.pair[1].shape == ()
    assert list(other.last) == [2, 3] and other.last.maxlen == 2
    assert other.nested.count == 7
    assert other._numpys.random() == run._numpys.random()
    assert torch.equal(torch.rand(3, generator=other._generator), torch.rand(3, generator=run._generator))
    assert other.cache == []


def test_each_run_begins_with_the_initial_values() -> None:
    run = used()
    forget_state(run)
    fresh = Run(2)
    assert run.mean.tolist() == [0, 0] and run.nothing is None and run.pair == (1, "two") and run.cache == []
    assert run.nested.count == 0 and len(run.last) == 0
    assert torch.equal(torch.rand(3, generator=run._generator), torch.rand(3, generator=fresh._generator))
    run.cache.append(1)
    assert fresh.cache == [] and Run(2).cache == []  # no two objects share one


def test_an_array_of_another_shape_is_refused() -> None:
    run = Run(3)
    run.mean = np.zeros(3)
    with pytest.raises(UsageError, match=r"the checkpoint has mean as \(2,\) torch.float64, where this run has \(3,\)"):
        run.load_state_dict(used().state_dict())


def test_state_that_is_saved_is_no_view_of_the_run() -> None:
    run = used()
    state = run.state_dict()
    run.mean[:] = 0
    run.last.append(9)
    other = Run(2)
    other.load_state_dict(state)
    assert other.mean.tolist() == [0.1, np.pi]


def test_a_new_argument_overrides_the_value_that_began_with_the_old_one() -> None:
    model = PPO(kl_coef=2.0, policy_objective="penalty")
    model.beta = 4.0
    state = state_of(model)
    for kl_coef, beta in ((2.0, 4.0), (3.0, 3.0)):
        other = PPO(kl_coef=kl_coef, policy_objective="penalty")
        load_state(other, state, settings=model.hparams)
        assert other.beta == beta


def test_a_copy_of_a_module_has_its_state_but_not_what_passes() -> None:
    model = PPO(kl_coef=2.0, policy_objective="penalty")
    model.beta, model.run.point = 4.0, ({}, 7)
    other = copy.deepcopy(model)
    assert other.beta == 4.0 and other.run.point is None


def test_a_run_of_an_earlier_version_is_not_resumed_but_its_weights_load(tmp_path: Any) -> None:
    def data() -> Any:
        return RolloutDataModule("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=32, eval_freq=0)

    model = PPO(net_arch=[4])
    trainer = fit(model, data(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "now.ckpt")
    checkpoint = torch.load(tmp_path / "now.ckpt", weights_only=True)
    del checkpoint["run"]
    torch.save(checkpoint, tmp_path / "before.ckpt")
    with pytest.raises(UsageError, match="of an earlier version, which stored runs otherwise; init_from"):
        fit(PPO(net_arch=[4]), data(), ckpt_path=tmp_path / "before.ckpt")
    loaded = PPO.load_from_checkpoint(tmp_path / "before.ckpt")
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


class Strange(PPO):
    strange: Any = persistent(lambda module: random.Random(3))


class Hooked(PPO):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [{"best": np.float64(1.5)}]


@pytest.mark.parametrize(("module", "where"), [(Strange, "run.strange as a random.Random"),
                                               (Hooked, "mine.0.best as a numpy.float64")])  # fmt: skip
def test_a_checkpoint_that_could_not_be_loaded_is_not_written(module: Any, where: str, tmp_path: Any) -> None:
    trainer = fit(
        module(), RolloutDataModule("CartPole-v1", n_steps=8, n_envs=1, batch_size=8, eval_freq=0), max_steps=1
    )
    with pytest.raises(UsageError, match=where):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())
