"""What a stranger does next, for every control algorithm: a second fit, another environment, a subclass, callbacks."""

import copy
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.utils import parameters_to_vector

from rl_modules.common.errors import UsageError
from tests.conformance.control import CASES, Case
from tests.training import assert_equal_checkpoints, fit

#: Algorithms that differ from another one in the loss or the cell: their cases run among the slow tests.
VARIANTS = ("QRDQN", "C51", "DDPG", "TQC", "CrossQ", "RecurrentA2C")


def over(cases):
    """A test over algorithms."""
    marked = [
        pytest.param(
            case,
            id=f"{case.name}-{case.label}" if case.label else case.name,
            marks=[pytest.mark.slow] * (case.name in VARIANTS or bool(case.label)),
        )
        for case in cases
    ]
    return pytest.mark.parametrize("case", marked)


each = over(CASES)
each_gradient = over(case for case in CASES if case.has_gradient)


class Rows:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def logger(self, folder: Path) -> CSVLogger:
        logger = CSVLogger(folder)
        logger.log_metrics = lambda metrics, step=None: self.rows.append((step, dict(metrics)))  # type: ignore[method-assign,misc,assignment]
        return logger

    def curve(self, name: str) -> dict[int, float]:
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


# -------------------------------------------------------------------- fits


@each
def test_the_datamodules_defaults_fit_the_algorithm(case: Case) -> None:
    kept = {k: v for k, v in case.data.items() if k in ("n_envs", "buffer_size", "learning_starts", "total_timesteps")}
    data = type(case.make_data())(case.env_id, eval_freq=0, **{"total_timesteps": 64, **kept})
    fit(case.make_model(), data)
    assert data.num_timesteps >= 64


@each
def test_a_second_fit_learns_like_the_first(case: Case) -> None:
    model = case.make_model()
    fit(model, case.make_data())
    first = weights(model)
    data = case.make_data()
    fit(model, data)
    assert data.num_timesteps >= data.total_timesteps
    assert differ(first, weights(model))


@each
def test_a_second_fit_with_the_same_trainer_and_more_transitions(case: Case, make_trainer: Any) -> None:
    model, trainer = case.make_model(), make_trainer()
    trainer.fit(model, datamodule=case.make_data())
    trainer.should_stop = False
    more = case.make_data(total_timesteps=512 if case.has_gradient else 128)
    trainer.fit(model, datamodule=more)
    assert more.num_timesteps >= more.total_timesteps


@each
def test_a_second_fit_may_have_another_number_of_environments(case: Case) -> None:
    model = case.make_model()
    fit(model, case.make_data())
    data = case.make_data(n_envs=3, **({"batch_size": "auto"} if case.name == "PPO" else {}))
    fit(model, data)
    assert data.num_timesteps >= data.total_timesteps


@each
def test_scheduled_values_begin_anew(case: Case) -> None:
    decays = {"learning_rate": "lin_0.001"}
    others = {"PPO": {"clip_range": "lin_0.2", **decays}, "TRPO": {"target_kl": "lin_0.01"}}
    schedules = others.get(case.name, decays if case.has_gradient else {"learning_rate": "lin_0.5"})
    seen: list[dict[str, float]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            names = ("clip_range", "target_kl", "exploration_rate", "epsilon", "step_size")
            now = {name: float(getattr(module, name)) for name in names if hasattr(module, name)}
            now["lr"] = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0.0
            seen.append(now)

    model = case.make_model(**schedules)
    fit(model, case.make_data(), callbacks=[Watch()])
    first, last = seen[0], seen[-1]
    assert first != last
    seen.clear()
    fit(model, case.make_data(), callbacks=[Watch()])
    assert seen[0] == first


def test_the_target_network_moves_in_a_second_fit() -> None:
    case = next(case for case in CASES if case.name == "DQN")
    moves = 0

    class Counted(type(case.make_model())):  # type: ignore[misc]
        def update_target(self) -> None:
            nonlocal moves
            before = self._target_seen_at // self.target_update_interval
            super().update_target()
            moves += self._target_seen_at // self.target_update_interval > before

    model = Counted(target_update_interval=20)
    counts = []
    for _ in range(2):
        moves = 0
        fit(model, case.make_data(total_timesteps=256))
        counts.append(moves)
    assert counts[0] == counts[1] >= 8


@each
def test_another_environment_of_the_same_spaces(case: Case) -> None:
    model = case.make_model()
    fit(model, case.make_data())
    data = case.make_data(case.other_env_id)
    trainer = fit(model, data)
    assert data.num_timesteps >= data.total_timesteps
    assert "test/mean_reward" in trainer.test(model, datamodule=data, verbose=False)[0]


@each
def test_another_space_is_answered_with_both(case: Case) -> None:
    model = case.make_model()
    fit(model, case.make_data())
    before = weights(model)
    with pytest.raises(UsageError, match=r"was trained with the \w+_space .*, but .* has"):
        fit(model, case.make_data(case.foreign_env_id))
    assert not differ(before, weights(model))


@each
def test_a_loaded_checkpoint_is_a_warm_start(case: Case, tmp_path: Path) -> None:
    model = case.make_model()
    fit(model, case.make_data()).save_checkpoint(tmp_path / "a.ckpt")
    loaded = type(model).load_from_checkpoint(tmp_path / "a.ckpt")
    assert not differ(weights(model), weights(loaded))
    data = case.make_data(case.other_env_id)
    fit(loaded, data)
    assert data.num_timesteps >= data.total_timesteps
    assert differ(weights(model), weights(loaded))


@each
def test_init_from_takes_the_weights_and_nothing_else(case: Case, tmp_path: Path) -> None:
    model = case.make_model()
    fit(model, case.make_data()).save_checkpoint(tmp_path / "a.ckpt")
    trained = weights(model)
    started: list[dict[str, torch.Tensor]] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            started.append(weights(module))
            assert trainer.datamodule.num_timesteps == 0

    fit(case.make_model(init_from=str(tmp_path / "a.ckpt")), case.make_data(case.other_env_id), callbacks=[Watch()])
    assert not differ(trained, started[0])
    with pytest.raises(UsageError, match="has"):
        fit(case.make_model(init_from=str(tmp_path / "a.ckpt")), case.make_data(case.foreign_env_id))
    with pytest.raises(UsageError, match="init_from='nowhere.ckpt' is not a file"):
        fit(case.make_model(init_from="nowhere.ckpt"), case.make_data())


@pytest.mark.long
def test_a_warm_start_carries_the_normalisers_statistics(tmp_path: Path) -> None:
    case = CASES[0]
    normal = {"norm_obs": True, "norm_reward": True, "total_timesteps": 256}
    model, data = case.make_model(), case.make_data(**normal)
    fit(model, data).save_checkpoint(tmp_path / "a.ckpt")
    trained = data.collector.normalizers.of_observations.running
    for init in ("load", "init_from"):
        if init == "load":
            start = type(model).load_from_checkpoint(tmp_path / "a.ckpt")
        else:
            start = case.make_model(init_from=str(tmp_path / "a.ckpt"))
        again = case.make_data(**normal)
        fit(start, again)
        count = again.collector.normalizers.of_observations.running.count
        # Four environments: a step's observations each, and the first.
        assert count == pytest.approx(trained.count + 256 + 4, abs=1e-3)
        assert again.collector.normalizers.of_rewards.running.count > 2 * 256 - 1
    anew = case.make_data(**normal, warm_start_statistics=False)
    fit(type(model).load_from_checkpoint(tmp_path / "a.ckpt"), anew)
    assert anew.collector.normalizers.of_observations.running.count == pytest.approx(256 + 4, abs=1e-3)


def test_weights_of_normalised_observations_warn_on_raw_ones() -> None:
    model = CASES[0].make_model()
    fit(model, CASES[0].make_data(norm_obs=True))
    with pytest.warns(UserWarning, match="norm_obs=False, but the weights were trained on normalised observations"):
        fit(model, CASES[0].make_data())
    assert model.observation_statistics is None


def test_a_vector_instance_that_is_not_evaluated_says_so() -> None:
    from datamodules import RolloutDataModule
    from tests.conformance.envs import make_counting

    data = RolloutDataModule(make_counting(3), n_steps=8, total_timesteps=48)
    with pytest.warns(UserWarning, match="Counting was given as one vector.* it is not evaluated"):
        fit(CASES[0].make_model(), data)
    assert data.num_timesteps >= 48


def test_a_failed_fit_leaves_the_statistics_it_trained_with() -> None:
    case = CASES[0]
    model, data = case.make_model(), case.make_data(norm_obs=True)

    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                raise KeyError("something else")

    with pytest.raises(KeyError):
        fit(model, data, callbacks=[Fails()])
    mean = data.collector.normalizers.of_observations.running.mean
    np.testing.assert_array_equal(model.observation_statistics[0], mean)
    raw = np.array([0.3, 1.0, -0.1, 0.5], np.float32)
    normalised = data.collector.normalizers.observation(raw)
    observed: list[Any] = []
    inner, model.act = model.act, lambda o, **k: (observed.append(o), inner(o, **k))[1]
    model.predict(raw)
    np.testing.assert_array_equal(observed[0][0].numpy(), normalised)


# -------------------------------------------------------------------- metrics and callbacks


@each
def test_a_subclass_records_in_half_of_its_updates(case: Case, tmp_path: Path) -> None:
    base = type(case.make_model())

    class Mine(base):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.record(every=float(batch_idx))
            if batch_idx % 2 == 0:
                self.record(mine=torch.tensor(2.0), other=torch.tensor(float(batch_idx)))
            self.log("logged", 3.0)
            return super().training_step(batch, batch_idx)

    rows = Rows()
    model, data = Mine(**case.model), case.make_data()
    fit(model, data, logger=rows.logger(tmp_path))
    plain = Rows()
    fit(case.make_model(), case.make_data(), logger=plain.logger(tmp_path))
    assert set(rows.curve("train/mine").values()) == {2.0}
    assert set(rows.curve("logged").values()) == {3.0}
    # On the transitions axis, like every other curve.
    assert rows.curve("logged").keys() == rows.curve("train/mine").keys() <= rows.curve("time/total_timesteps").keys()
    assert all(step == value for step, value in rows.curve("time/total_timesteps").items())
    ours = {name for _, metrics in plain.rows for name in metrics if name.startswith("train/")}
    for name in ours:
        assert rows.curve(name) == plain.curve(name), name


@each
@pytest.mark.parametrize("log_every", [1, 3])
def test_callbacks_that_monitor(case: Case, log_every: int, tmp_path: Path) -> None:
    callbacks = [
        EarlyStopping("rollout/ep_rew_mean", mode="max", patience=50),
        ModelCheckpoint(tmp_path, monitor="rollout/ep_rew_mean", mode="max", save_top_k=1),
        Timer(interval="epoch"),
    ]
    small = {} if case.replays else {"rollouts_per_epoch": 1}
    data = case.make_data(**small)
    trainer = fit(case.make_model(log_every=log_every), data, callbacks=callbacks, enable_checkpointing=True)
    assert data.num_timesteps >= data.total_timesteps
    assert trainer.callback_metrics["rollout/ep_rew_mean"].isfinite()
    assert Path(callbacks[1].best_model_path).is_file()


@each
def test_callbacks_monitor_what_a_subclass_records(case: Case, tmp_path: Path) -> None:
    class Mine(type(case.make_model())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.record(mine=float(self.current_epoch))
            return super().training_step(batch, batch_idx)

    stop = EarlyStopping("train/mine", mode="max", stopping_threshold=0.5)
    saves = ModelCheckpoint(tmp_path, monitor="train/mine", mode="max", save_top_k=1, save_on_train_epoch_end=True)
    small = {"rollouts_per_epoch": 4} if case.replays else {"rollouts_per_epoch": 1}
    data = case.make_data(**small, eval_freq=1, n_eval_episodes=1, total_timesteps=10_000)
    trainer = fit(Mine(**case.model), data, callbacks=[stop, saves], enable_checkpointing=True)
    # In the evaluation at the end of the second epoch, from that epoch's updates.
    assert trainer.current_epoch == 2
    assert saves.best_model_score == 1.0


@each
def test_what_an_evaluation_logs_is_drawn_over_transitions(case: Case, tmp_path: Path) -> None:
    class Mine(type(case.make_model())):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("eval/longest", batch["length"].max().float())

    class Watch(L.Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log("eval/seen", 1.0)

    rows = Rows()
    small = {"rollouts_per_epoch": 4} if case.replays else {"rollouts_per_epoch": 1}
    data = case.make_data(**small, eval_freq=1, n_eval_episodes=1, eval_on_start=False, total_timesteps=10_000)
    fit(Mine(**case.model), data, logger=rows.logger(tmp_path), callbacks=[Watch()], max_epochs=3)
    steps = rows.curve("eval/mean_reward").keys()
    assert len(steps) == 3
    assert rows.curve("eval/longest").keys() == rows.curve("eval/seen").keys() == steps


@each_gradient
def test_learning_rate_monitor_and_csv_share_the_transitions_axis(case: Case, tmp_path: Path) -> None:
    rows = Rows()
    model = case.make_model(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    small = {"rollouts_per_epoch": 4} if case.replays else {"rollouts_per_epoch": 1}
    fit(
        model,
        case.make_data(**small, total_timesteps=256),
        logger=rows.logger(tmp_path),
        callbacks=[LearningRateMonitor()],
    )
    monitored = next(name for _, metrics in rows.rows for name in metrics if name.startswith("lr-"))
    epochs = [0, *rows.curve("time/total_timesteps")]
    steps = list(rows.curve(monitored))  # of replay none within the warm-up, which has no optimizer step
    assert steps and steps == [epoch for epoch in epochs if epoch in steps]
    assert len(rows.curve(monitored)) > 2


# TRPO's step is not the optimizer's.
@over(case for case in CASES if case.has_gradient and case.name != "TRPO")
def test_stochastic_weight_averaging(case: Case) -> None:
    small = {"rollouts_per_epoch": 4} if case.replays else {"rollouts_per_epoch": 1}
    weights: list[torch.Tensor] = []

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            weights.append(parameters_to_vector(module.parameters()).detach())

    model, data = case.make_model(), case.make_data(**small, total_timesteps=10_000)
    averages = [Watch(), StochasticWeightAveraging(1e-3, swa_epoch_start=2)]
    fit(model, data, max_epochs=4, callbacks=averages)
    assert data.num_timesteps > 0
    averaged = torch.stack(weights[1:]).mean(0)
    assert not torch.equal(weights[1], weights[3])
    torch.testing.assert_close(parameters_to_vector(model.parameters()), averaged)


@each
@pytest.mark.parametrize(
    "arguments",
    [{"fast_dev_run": 2}, {"limit_train_batches": 2, "max_epochs": 2}, {"max_steps": 3}, {"max_time": "00:00:00:20"},
     {"overfit_batches": 1, "max_epochs": 2}, {"reload_dataloaders_every_n_epochs": 1},
     {"detect_anomaly": True, "max_steps": 2}, {"accumulate_grad_batches": 2, "max_epochs": 2},
     {"gradient_clip_val": 0.1, "max_epochs": 2}],
    ids=lambda arguments: next(iter(arguments)),
)  # fmt: skip
def test_trainer_arguments(case: Case, arguments: dict[str, Any]) -> None:
    model, data = case.make_model(), case.make_data()
    if case.is_manual and not arguments.keys().isdisjoint(("accumulate_grad_batches", "gradient_clip_val")):
        with pytest.raises((MisconfigurationException, UsageError), match="manual|" + next(iter(arguments))):
            fit(model, data, **arguments)
        return
    fit(model, data, **arguments)
    fit(model, case.make_data(), **arguments)
    assert data.num_timesteps > 0


@each
@pytest.mark.parametrize(
    "given", [{"check_val_every_n_epoch": 3}, {"val_check_interval": 2}, {"val_check_interval": {"seconds": 0}}]
)
def test_validation_cadence_given_to_the_trainer_is_kept(case: Case, given: dict[str, Any], make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=3 if "check_val_every_n_epoch" in given else 1, **given)
    small = {"rollouts_per_epoch": 4} if case.replays else {"rollouts_per_epoch": 2}
    epochs: list[int] = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            epochs.append(trainer.current_epoch)

    trainer.callbacks.append(Watch())
    data = case.make_data(eval_freq=64, eval_on_start=False, n_eval_episodes=1, total_timesteps=10_000, **small)
    trainer.fit(case.make_model(), datamodule=data)
    if "check_val_every_n_epoch" in given:
        assert epochs == [2]
    else:
        assert epochs.count(0) >= 1


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@each
def test_precisions(case: Case, precision: str) -> None:
    model, data = case.make_model(), case.make_data(**({} if case.replays else {"rollouts_per_epoch": 1}))
    if case.label == "overlap" and precision == "64-true":
        pytest.skip("tests/datamodules/test_overlap.py tests its refusal")
    fit(model, data, precision=precision)
    assert data.num_timesteps >= data.total_timesteps
    expected = torch.float64 if precision == "64-true" or not case.has_gradient else torch.float32
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {expected}
    action, _ = model.predict(data.setup("test") or data.observation_space.sample())
    assert np.shape(action) == data.action_space.shape


@over(case for case in CASES if case.has_gradient and not case.is_manual and not case.label)
def test_a_checkpoint_within_an_accumulated_step_resumes_exactly(case: Case, tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "part.ckpt")

    def run(**arguments: Any) -> L.Trainer:
        # Epochs of two minibatches or more, three of which make a step: the fourth is the first of the second step.
        whole = case.name in ("A2C", "RecurrentA2C", "REINFORCE")
        data = case.make_data(total_timesteps=400, rollouts_per_epoch=6 if whole or case.replays else 1)
        return fit(case.make_model(), data, max_epochs=2, accumulate_grad_batches=3, **arguments)

    run(callbacks=[Save()]).save_checkpoint(tmp_path / "whole.ckpt")
    assert torch.load(tmp_path / "part.ckpt", weights_only=True)["gradients"]
    run(ckpt_path=tmp_path / "part.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@each
def test_an_interrupted_fit_can_be_followed_by_another(case: Case) -> None:
    class Interrupt(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyboardInterrupt

    model = case.make_model()
    # Lightning ends the process after Ctrl-C.
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(model, case.make_data(), callbacks=[Interrupt()])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    data = case.make_data()
    fit(model, data)
    assert data.num_timesteps >= data.total_timesteps


@each
def test_the_module_is_copied_and_pickled(case: Case) -> None:
    model, data = case.make_model(), case.make_data()
    fit(model, data)
    data.setup("test")
    observation = np.stack([data.observation_space.sample() for _ in range(8)])
    expected, _ = model.predict(observation, deterministic=True)
    # A batch of none, as a service has it whose queue is empty, is answered too.
    assert model.predict(observation[:0])[0].shape == expected[:0].shape
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again._trainer is None, "the copy holds the Trainer, and with it the environments"
        np.testing.assert_array_equal(again.predict(observation, deterministic=True)[0], expected)
        fit(again, case.make_data())
    assert not differ(weights(model), weights(copy.deepcopy(model)))


@each_gradient
def test_forward_is_the_deterministic_policy_and_can_be_exported(case: Case) -> None:
    model, data = case.make_model(), case.make_data()
    fit(model, data)
    data.setup("test")
    data.observation_space.seed(0)
    observation = torch.from_numpy(np.stack([data.observation_space.sample() for _ in range(8)]))
    expected, _ = model.predict(observation.numpy(), deterministic=True)
    np.testing.assert_array_equal(model(observation).detach().numpy(), expected)
    # An LSTM of torch's fixes the batch.
    fixed = case.name.startswith("Recurrent")
    batch = torch.export.Dim.STATIC if fixed else torch.export.Dim("batch")
    exported = torch.export.export(model.eval(), (observation,), dynamic_shapes=({0: batch},))
    for n in (8,) if fixed else (8, 3):
        found = exported.module()(observation[:n]).detach().numpy()
        np.testing.assert_allclose(found, expected[:n], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@each_gradient
def test_a_compiled_module_trains(case: Case) -> None:
    data = case.make_data()
    if case.name == "TRPO":
        # Its Fisher products are second derivatives, which torch's compiler refuses in a sentence of its own.
        with pytest.raises(RuntimeError, match="double backward"):
            fit(torch.compile(case.make_model()), data)
        return
    fit(torch.compile(case.make_model()), data)
    assert data.num_timesteps >= data.total_timesteps


def test_checkpoints_and_signals_work_with_reloaded_loaders(tmp_path: Path) -> None:
    """Each epoch has another loader, and a checkpoint is due before every batch."""
    from recipes.callbacks import Checkpoints

    case = CASES[0]
    positions: list[int] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for file in tmp_path.rglob("last.ckpt"):
                positions.append(torch.load(file, weights_only=True)["global_step"])
            time.sleep(0.02)

    callbacks = [Checkpoints(interval_s=0.01, max_share=1.0), Watch()]
    fit(case.make_model(), case.make_data(), callbacks=callbacks, enable_checkpointing=True,
        default_root_dir=tmp_path, reload_dataloaders_every_n_epochs=1)  # fmt: skip
    # 32 updates in four epochs: checkpoints within the later ones, not after the last alone.
    assert len({step for step in positions if 8 < step < 32}) >= 3


def test_early_stop_with_a_gradient_scaler() -> None:
    """As 16-mixed on a GPU: a scaler that has no gradients to unscale must not be asked to step."""
    from lightning.pytorch.plugins import MixedPrecision

    model = CASES[0].make_model(target_kl=1e-6)
    stopped = 0

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            nonlocal stopped
            stopped += module.kl_exceeded

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    fit(model, CASES[0].make_data(), plugins=[plugin], callbacks=[Watch()])
    assert stopped > 0


# -------------------------------------------------------------------- environments


@pytest.mark.parametrize("env_id", ["tests.conformance.envs:make_counting", "callable", "instance"])
@pytest.mark.parametrize("name", ["PPO", "DQN"])
def test_a_vector_that_the_user_made(env_id: str, name: str) -> None:
    from tests.conformance.envs import make_counting

    case = next(case for case in CASES if case.name == name)
    given: Any = {"callable": make_counting, "instance": make_counting(3)}.get(env_id, env_id)
    arguments = {**case.data, "total_timesteps": 120, "eval_freq": 0, "n_eval_episodes": 4}
    arguments.pop("batch_size", None)
    data = type(case.make_data())(given, **arguments)
    model = case.make_model()
    trainer = fit(model, data)
    assert data.n_envs == 3
    assert data.num_timesteps >= 120
    assert set(data.collector.episodes.lengths) == {5}
    if env_id == "instance":
        with pytest.raises(UsageError, match="can't be evaluated meanwhile"):
            trainer.validate(model, datamodule=data, verbose=False)
    else:
        assert trainer.validate(model, datamodule=data, verbose=False)[0]["eval/mean_ep_length"] == 5.0


def test_an_environment_that_returns_one_buffer_has_true_final_observations() -> None:
    from datamodules.collector import Collector
    from datamodules.envs.vector import make_vector_env
    from tests.conformance.envs import Buffered

    for mode in ("same_step", "next_step", "disabled"):
        envs = make_vector_env(Buffered, 2, "sync", mode)
        rollout = Collector(envs, [1, 2], 3, "test").collect(
            lambda o, g: {"action": torch.zeros(2, dtype=torch.int64)}, 9, torch.device("cpu")
        )
        over = rollout["truncated"]
        assert over.any()
        assert (rollout["next_observation"][over] == 4.0).all(), mode


@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_final_observations_are_normalised_as_they_were_seen(mode: str) -> None:
    from datamodules.collector import Collector
    from datamodules.envs.vector import make_vector_env
    from datamodules.normalization import Normalizers, ObservationNormalizer
    from tests.conformance.envs import Drift

    def valid_rows(mode: str, n_steps: int) -> dict[str, torch.Tensor]:
        envs = make_vector_env(Drift, 1, "sync", mode)
        collector = Collector(envs, [4], 3, "test", Normalizers(ObservationNormalizer(Drift.observation_space)))
        rollout = collector.collect(
            lambda o, g: {"action": torch.zeros(1, dtype=torch.int64)}, n_steps, torch.device("cpu")
        )
        return {name: rollout[name][rollout["valid"]] for name in ("observation", "next_observation", "truncated")}  # type: ignore[literal-required]

    one, other = valid_rows("same_step", 24), valid_rows(mode, 40)
    assert one["truncated"].sum() > 3
    for name in one:
        assert torch.equal(one[name], other[name][:24]), name


def test_an_evaluation_that_never_ends_is_cut_and_says_so() -> None:
    from tests.conformance.envs import Endless

    case = CASES[0]
    data = case.make_data(Endless, eval_max_steps=50)
    model = case.make_model()
    trainer = fit(model, data)
    started_s = time.monotonic()
    with pytest.warns(UserWarning, match="2 evaluation episodes were cut after eval_max_steps=50"):
        result = trainer.test(model, datamodule=data, verbose=False)[0]
    assert result["test/mean_ep_length"] == 50
    assert time.monotonic() - started_s < 60


def test_an_evaluation_in_which_no_episode_ends_says_what_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conformance.envs import Endless

    monkeypatch.setattr("datamodules.evaluation.SILENT_S", 0.0)
    case = CASES[0]
    data = case.make_data(Endless, eval_max_steps=50)
    model = case.make_model()
    trainer = fit(model, data)
    with pytest.warns(
        UserWarning, match="Endless has ended after .*eval_max_steps=50: lower data.eval_max_steps, or .*TimeLimit"
    ):
        trainer.test(model, datamodule=data, verbose=False)


# -------------------------------------------------------------------- arguments


@each
def test_numpy_numbers_are_stored_as_plain_ones(case: Case, tmp_path: Path) -> None:
    model = case.make_model(gamma=np.float64(0.97), **({"net_arch": [np.int64(8)]} if case.has_gradient else {}))
    data = case.make_data(n_envs=np.int64(case.data["n_envs"]), seed=np.int32(3))
    fit(model, data).save_checkpoint(tmp_path / "a.ckpt")
    again = type(model).load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.hparams["gamma"] == 0.97
    assert type(again.hparams["gamma"]) is float


@each_gradient
def test_weights_that_are_no_numbers_stop_the_run_in_python(case: Case, tmp_path: Path) -> None:
    base = type(case.make_model())

    class Diverges(base):  # type: ignore[misc,valid-type]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            with torch.no_grad():
                next(self.network.parameters()).fill_(float("nan"))

    saver = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    with pytest.raises(UsageError, match=r"the parameter network\.\S+ is NaN or infinite|NaN"):
        fit(Diverges(**case.model), case.make_data(), callbacks=[saver], enable_checkpointing=True)
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("net_arch", [{"pi": [32]}, {"pi": [8], "vf": [8], "q": [8]}, [64, -1], [0], 64, "64"])
def test_a_wrong_net_arch_is_named(net_arch: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"net_arch={net_arch}")):
        fit(CASES[0].make_model(net_arch=net_arch), CASES[0].make_data())


def test_an_environment_instance_is_answered_with_what_to_give() -> None:
    import gymnasium as gym

    from datamodules import RolloutDataModule

    with pytest.raises(UsageError, match=r"is one environment.*RolloutDataModule\('CartPole-v1'\)"):
        RolloutDataModule(gym.make("CartPole-v1"))


def test_a_subclass_of_the_three_pieces_trains() -> None:
    from rl_modules import PPO
    from rl_modules import functional as F

    class Mine(PPO):
        def prepare(self, rollout: Any) -> dict:
            return {**super().prepare(rollout), "reward": rollout["reward"]}

        def policy_loss(self, log_prob: torch.Tensor, batch: dict) -> torch.Tensor:
            return F.policy_gradient_loss(log_prob, self.whiten(batch["advantage"]))

        def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
            self.record(reward=batch["reward"].mean())
            return super().training_step(batch, batch_idx)

    model = Mine()
    model2, data = copy.deepcopy(model), CASES[0].make_data()
    fit(model, data)
    fit(model2, CASES[0].make_data())
    assert not differ(weights(model), weights(model2))


def without_super(base: type, hooks: tuple[str, ...], called: list[str]) -> Any:
    """A subclass that overrides hooks as in a plain LightningModule."""
    overridden = {name: lambda self, *args, n=name, **kwargs: called.append(n) for name in hooks}
    return type("Mine", (base,), {"__module__": __name__, **overridden})


@each
def test_hooks_of_a_subclass_need_no_super(case: Case, tmp_path: Path) -> None:
    import rl_modules

    hooks = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
             "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "on_save_checkpoint",
             "on_load_checkpoint", "teardown")  # fmt: skip
    called: list[str] = []
    drawn: list[Any] = []

    def run(own: bool, ckpt_path: Path | None = None) -> L.Trainer:
        model = without_super(getattr(rl_modules, case.name), hooks if own else (), called)
        data = without_super(type(case.make_data()), ("setup", "teardown") if own else (), called)
        settings = {k: v for k, v in case.make_data().hparams.items() if k != "env_id"}
        rows = Rows()
        drawn.append(rows.rows)
        return fit(model(**case.model), data(case.env_id, **{**settings, "total_timesteps": 128}),
                   logger=rows.logger(tmp_path), ckpt_path=ckpt_path)  # fmt: skip

    run(own=False).save_checkpoint(tmp_path / "plain.ckpt")
    run(own=True).save_checkpoint(tmp_path / "own.ckpt")
    assert_equal_checkpoints(tmp_path / "plain.ckpt", tmp_path / "own.ckpt")
    assert [sorted(metrics) for _, metrics in drawn[0]] == [sorted(metrics) for _, metrics in drawn[1]]
    run(own=True, ckpt_path=tmp_path / "own.ckpt")
    assert set(called) == set(hooks)


@each_gradient
def test_hooks_of_a_gradient_are_called_with_it(case: Case) -> None:
    """Where Lightning's documentation has gradient norms logged, for the module and for a callback."""
    norms: dict[str, list[float]] = {"module": [], "callback": [], "backward": []}

    def norm(module: Any) -> float:
        gradients = [p.grad.double().norm() for p in module.parameters() if p.grad is not None]
        return float(torch.stack(gradients).norm())

    class Watch(L.Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            norms["backward"].append(norm(module))

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms["callback"].append(norm(module))

    def own(self: Any, optimizer: Any) -> None:
        norms["module"].append(norm(self))
        self.log("own_norm", norms["module"][-1])

    base = type(case.make_model())
    mine = type("Mine", (base,), {"__module__": __name__, "on_before_optimizer_step": own})
    trainer = fit(mine(**case.model), case.make_data(), callbacks=[Watch()])
    assert norms["module"] == norms["callback"] == norms["backward"]
    assert len(norms["module"]) >= trainer.global_step
    assert all(value > 0 for value in norms["module"])
    assert "own_norm" in trainer.callback_metrics


@each
def test_hooks_of_a_subclass_are_called_as_often_as_a_callback_s(case: Case) -> None:
    called: dict[str, list[str]] = {"module": [], "callback": []}
    both = set(dir(L.Callback)) & set(dir(L.LightningModule))
    hooks = tuple(name for name in both if name.startswith("on_") and "checkpoint" not in name)

    class Watch(L.Callback):
        pass

    for name in hooks:
        setattr(Watch, name, lambda self, *args, n=name, **kwargs: called["callback"].append(n))
    model = without_super(type(case.make_model()), hooks, called["module"])(**case.model)
    trainer = fit(model, case.make_data(), callbacks=[Watch()])
    trainer.test(model, datamodule=case.make_data(), verbose=False)
    assert sorted(called["module"]) == sorted(called["callback"])
    assert {"on_train_epoch_start", "on_test_epoch_end"} <= set(called["module"])


def test_a_hook_that_calls_super_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_modules import PPO

    calls = []

    class Counts(PPO):
        def on_train_epoch_end(self) -> None:
            calls.append("own")
            super().on_train_epoch_end()

    class Again(Counts):
        def on_train_epoch_end(self) -> None:
            calls.append("again")

    monkeypatch.setattr("rl_modules.base.write_metrics", lambda *args: calls.append("base"))

    fit(Counts(), CASES[0].make_data(), max_epochs=1)
    assert calls == ["own", "base"]
    calls.clear()
    fit(Again(), CASES[0].make_data(), max_epochs=1)
    # The point is written last. What Counts does is its author's, and replaced as in Python.
    assert calls == ["again", "base"]


def test_a_policy_from_torch_distributions_trains() -> None:
    from rl_modules import PPO

    class Mine(PPO):
        def build_network(self) -> None:
            super().build_network()
            inner = self.network.forward
            self.network.forward = lambda o: (  # type: ignore[method-assign]
                torch.distributions.Categorical(logits=inner(o)[0].log_p), inner(o)[1]
            )  # fmt: skip

    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # private randomness: the global generator changes nothing
        model = Mine()
        fit(model, CASES[0].make_data())
        runs.append(weights(model))
    assert not differ(*runs)


def test_the_reward_normaliser_discounts_by_the_algorithms_gamma() -> None:
    case = CASES[0]
    data = case.make_data(norm_reward=True)
    fit(case.make_model(gamma=0.9), data)
    assert data.collector.normalizers.of_rewards.gamma == 0.9


def test_learning_rate_finder() -> None:
    from lightning.pytorch.tuner import Tuner

    case = CASES[0]
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    model, data = case.make_model(learning_rate=1e-3), case.make_data(total_timesteps=100_000)
    finder = Tuner(trainer).lr_find(model, datamodule=data, num_training=20, update_attr=True)
    assert finder is not None
    assert len(finder.results["loss"]) >= 10


def test_a_simple_profiler_reports(tmp_path: Path) -> None:
    from lightning.pytorch.profilers import SimpleProfiler

    fit(CASES[0].make_model(), CASES[0].make_data(), profiler=SimpleProfiler(tmp_path, "profile"))
    assert "run_training_batch" in (tmp_path / "fit-profile.txt").read_text()
