"""What subclasses do: arguments of their own, which may be objects that no checkpoint can hold, and hooks.

Hooks of the control algorithms: ``tests/conformance/test_control.py``.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from datamodules import (
    InstructionDataModule,
    PreferenceDataModule,
    PromptDataModule,
    ReplayDataModule,
    RolloutDataModule,
)
from rl_modules import DPO, DQN, GRPO, KTO, PPO, RLHFPPO, SAC, SFT, TD3, TRPO, CrossQ, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.common.stored_arguments import is_storable
from rl_modules.core.settings import setting
from tests.training import assert_equal_checkpoints, assert_resumes_exactly, fit, rollouts

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


class Tempered(PPO):
    """Names that other algorithms have, with other values."""

    def __init__(self, beta: str = "auto", tau: float = -1.0, **ppo):
        super().__init__(**ppo)


class Signed(GRPO):
    def __init__(self, tau: float = -1.0, clip_obs: str = "never", **grpo):
        super().__init__(**grpo)


class Short(GRPO):
    """Declares an argument, and changes defaults in a line each; GRPO has a method of one of their names."""

    bonus: float = setting(0.5, "added to a right answer's reward", least=0)
    max_completion_length = 7
    advantages = "rloo"


class Rows(RolloutDataModule):
    def __init__(self, *args, beta: float = -0.5, **data):
        super().__init__(*args, **data)


class Discounted(PPO):
    """Redeclares an argument for another default."""

    def __init__(self, gamma: float = 0.9, **ppo):
        super().__init__(gamma=gamma, **ppo)


def test_an_argument_that_only_a_subclass_has_is_its_own():
    assert Tempered().hparams["beta"] == "auto"
    assert Tempered(tau=7.0).hparams["tau"] == 7.0
    assert Signed(model_config={"hidden_size": 16}).hparams["clip_obs"] == "never"
    assert Rows("CartPole-v1").hparams["beta"] == -0.5


def test_a_language_class_declares_arguments_and_changes_defaults():
    module = Short(temperature=0.5)
    assert (module.bonus, module.max_completion_length, module.temperature, module.top_k) == (0.5, 7, 0.5, None)
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0])
    # Each reward minus the other one of its group.
    assert module.advantages(rewards, 2).tolist() == [1.0, -1.0, -3.0, 3.0]
    assert {name: module.hparams[name] for name in ("bonus", "advantages")} == {"bonus": 0.5, "advantages": "rloo"}
    assert list(inspect.signature(Short).parameters)[:2] == ["model_name_or_path", "bonus"]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Tempered(vf_coef=-1.0), "vf_coef=-1.0 must be a finite number of at least 0"),
        (lambda: Discounted(gamma=7.0), r"gamma=7.0 must lie in \[0, 1\]"),
        (lambda: Signed(beta=-1.0), "beta=-1.0 must be a finite number of at least 0"),
        (lambda: Short(bonus=-1.0), "bonus=-1.0 must be a finite number of at least 0"),
        (lambda: SAC(tau=-1.0), r"tau=-1.0 must lie in \(0, 1\]"),
        (lambda: Rows("CartPole-v1", clip_obs=-1.0), "clip_obs=-1.0 must be a finite number above 0"),
    ],
)
def test_the_arguments_of_this_project_keep_their_ranges_in_a_subclass(build, sentence):
    with pytest.raises(UsageError, match=sentence):
        build()


class Shaped(PPO):
    """An argument of its own that may be anything."""

    def __init__(self, shape=None, bonus=0.0, measure=abs, **ppo):
        super().__init__(net_arch=[8], **ppo)
        self.shape, self.bonus, self.measure = shape, bonus, measure


class Judged(GRPO):
    def __init__(self, judge=None, **grpo):
        super().__init__(**grpo)
        self.judge = judge


class Simulated(RolloutDataModule):
    def __init__(self, *args, simulator=None, **data):
        super().__init__(*args, **data)


@dataclass
class Physics:
    gravity: float = 9.8


def make_cartpole(physics=None, callback=None):
    return gym.make("CartPole-v1")


class Best(L.Callback):
    """A state with NumPy's number, as ``np.mean`` returns it."""

    best = None

    def on_train_end(self, trainer, pl_module):
        self.best = np.float64(0.5)

    def state_dict(self):
        return {"best": self.best, "last": [np.int64(3)]}


class Small(Shaped):
    """Chooses arguments of its bases by itself: one new, one as it is by default."""

    def __init__(self, entropy=0.01, **ppo):
        super().__init__(bonus=0.25, ent_coef=entropy, gamma=0.9, vf_coef=0.5, **ppo)


class Saves(PPO):
    """As Lightning's documentation shows it."""

    def __init__(self, share=0.5, weights=None, **ppo):
        super().__init__(**ppo)
        self.save_hyperparameters()


def saved(trainer: L.Trainer, path: Path) -> dict:
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    "shape",
    [abs, lambda x: x, torch.nn.Linear(2, 2), Physics(), Physics],
    ids=["function", "lambda", "network", "object", "class"],
)
def test_an_object_as_argument_costs_no_checkpoint(shape, tmp_path):
    model = Shaped(shape, bonus=0.5)
    checkpoint = saved(fit(model, rollouts("CartPole-v1"), max_epochs=1), tmp_path / "last.ckpt")
    assert "shape" not in checkpoint["hyper_parameters"] and checkpoint["hyper_parameters"]["bonus"] == 0.5
    with pytest.raises(
        UsageError, match=r"trained with shape=[\w.]*.*give it again: load_from_checkpoint\(…, shape=…\)"
    ):
        Shaped.load_from_checkpoint(tmp_path / "last.ckpt")
    loaded = Shaped.load_from_checkpoint(tmp_path / "last.ckpt", shape=shape)
    assert loaded.shape is shape and loaded.bonus == 0.5 and loaded.measure is abs
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_a_subclass_chooses_it_chooses_again_on_loading(tmp_path):
    model = Small(0.02, gae_lambda=0.8, observation_space=None)
    checkpoint = saved(fit(model, rollouts("CartPole-v1"), max_epochs=1), tmp_path / "last.ckpt")
    stored = checkpoint["hyper_parameters"]
    assert stored["gae_lambda"] == 0.8 and stored["entropy"] == 0.02 and "gamma" not in stored
    loaded = Small.load_from_checkpoint(tmp_path / "last.ckpt")
    assert (loaded.gamma, loaded.ent_coef, loaded.bonus, loaded.gae_lambda) == (0.9, 0.02, 0.25, 0.8)
    assert loaded.hparams == model.hparams
    assert torch.equal(loaded(torch.ones(3, 4)), model(torch.ones(3, 4)))
    assert_resumes_exactly(lambda: Small(policy_objective="penalty"), lambda: rollouts("CartPole-v1"), tmp_path, 3)


def test_a_subclass_may_save_its_hyperparameters_itself(tmp_path):
    model = Saves(np.float32(0.25), weights=torch.ones(2), net_arch=[8])
    checkpoint = saved(fit(model, rollouts("CartPole-v1"), max_epochs=1), tmp_path / "last.ckpt")
    assert checkpoint["hyper_parameters"]["share"] == 0.25
    loaded = Saves.load_from_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(loaded.hparams["weights"], torch.ones(2)) and loaded.hparams["net_arch"] == [8]


def test_a_run_with_objects_resumes_exactly(tmp_path):
    def data():
        return Simulated(make_cartpole, n_envs=2, n_steps=8, batch_size=8, n_epochs=2, total_timesteps=96, eval_freq=0,
                         env_kwargs={"physics": Physics(), "callback": abs}, simulator=Physics)  # fmt: skip

    assert_resumes_exactly(lambda: Shaped(abs), data, tmp_path, epochs=3)


def test_names_stand_for_the_objects_of_a_datamodule(tmp_path):
    data = Simulated(make_cartpole, n_envs=2, n_steps=8, batch_size=8, eval_freq=0,
                     env_kwargs={"physics": Physics(), "callback": abs}, simulator=Physics)  # fmt: skip
    checkpoint = saved(fit(PPO(net_arch=[8]), data, max_epochs=1), tmp_path / "last.ckpt")
    stored = checkpoint["datamodule_hyper_parameters"]
    assert stored["env_kwargs"] == {"physics": f"{__name__}.Physics", "callback": "builtins.abs"}
    assert stored["simulator"] == f"{__name__}.Physics" and stored["n_envs"] == 2
    assert data.hparams["env_kwargs"]["callback"] is abs
    assert PPO.load_from_checkpoint(tmp_path / "last.ckpt").is_built


def test_a_language_algorithm_takes_objects_too(tmp_path):
    judge = torch.nn.Linear(2, 2)
    model = Judged(judge, model_config=TINY, max_completion_length=4)
    data = PromptDataModule("addition", n_train=8, n_eval=0, batch_size=8, num_generations=2)
    checkpoint = saved(fit(model, data, max_steps=1), tmp_path / "last.ckpt")
    assert checkpoint["left_out"] == {"judge": "torch.nn.modules.linear.Linear"}
    with pytest.raises(UsageError, match="give it again"):
        Judged.load_from_checkpoint(tmp_path / "last.ckpt")
    loaded = Judged.load_from_checkpoint(tmp_path / "last.ckpt", judge=torch.nn.Linear(2, 2))
    assert torch.equal(loaded.judge.weight, judge.weight)


@pytest.mark.parametrize(
    ("base", "make_data"),
    [
        (SFT, lambda cls: cls("addition", n_train=16, n_eval=4, eval_steps=1, batch_size=4)),
        (DPO, lambda cls: cls("paths", n_train=16, n_eval=4, eval_steps=1, batch_size=4)),
        (GRPO, lambda cls: cls("addition", n_train=16, n_eval=4, eval_steps=1, batch_size=4, num_generations=2)),
    ],
    ids=["SFT", "DPO", "GRPO"],
)
def test_hooks_of_a_language_algorithm_need_no_super(base, make_data, tmp_path):
    modules = {SFT: InstructionDataModule, DPO: PreferenceDataModule, GRPO: PromptDataModule}
    hooks = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end",
             "on_train_epoch_end", "on_train_end", "on_validation_start", "on_validation_end",
             "on_validation_epoch_end", "on_save_checkpoint", "on_load_checkpoint")  # fmt: skip
    called = []

    def without_super(cls, names):
        own = {name: lambda self, *args, n=name, **kwargs: called.append(n) for name in names}
        return type("Mine", (cls,), {"__module__": __name__, **own})

    arguments = {"model_config": TINY, "logging_steps": 1, "max_completion_length": 4}
    run = {"max_steps": 2}
    plain = fit(without_super(base, ())(**arguments), make_data(without_super(modules[base], ())), **run)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    model, data = without_super(base, hooks), without_super(modules[base], ("setup", "teardown"))
    own = fit(model(**arguments), make_data(data), **run)
    own.save_checkpoint(tmp_path / "own.ckpt")
    assert_equal_checkpoints(tmp_path / "plain.ckpt", tmp_path / "own.ckpt")
    assert own.callback_metrics.keys() == plain.callback_metrics.keys()
    fit(model(**arguments), make_data(data), ckpt_path=tmp_path / "own.ckpt", max_steps=3)
    assert set(called) == {*hooks, "teardown"}


@pytest.mark.parametrize(
    ("base", "data"),
    [(SFT, InstructionDataModule), (DPO, PreferenceDataModule), (RewardModel, PreferenceDataModule),
     (GRPO, PromptDataModule), (RLHFPPO, PromptDataModule)],
    ids=["SFT", "DPO", "RewardModel", "GRPO", "RLHFPPO"],
)  # fmt: skip
def test_hooks_of_a_language_algorithm_are_called_as_often_as_a_callback_s(base, data):
    called = {"module": [], "callback": []}
    both = set(dir(L.Callback)) & set(dir(L.LightningModule))
    hooks = [name for name in both if name.startswith("on_") and "checkpoint" not in name]
    own = {name: lambda self, *args, n=name, **kwargs: called["module"].append(n) for name in hooks}
    watch = {name: lambda self, *args, n=name, **kwargs: called["callback"].append(n) for name in hooks}
    short = {"max_completion_length": 4} if data is PromptDataModule else {}
    model = type("Mine", (base,), {"__module__": __name__, **own})(model_config=TINY, **short)
    task = "paths" if data is PreferenceDataModule else "addition"
    experience = data(task, n_train=16, n_eval=4, eval_steps=1, batch_size=8)
    trainer = fit(model, experience, callbacks=[type("Watch", (L.Callback,), watch)()], max_steps=2)
    trainer.test(model, datamodule=experience, verbose=False)
    assert sorted(called["module"]) == sorted(called["callback"])
    assert {"on_before_optimizer_step", "on_test_epoch_end"} <= set(called["module"])


class Curves(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.points = []

    def log_metrics(self, metrics, step=None):
        self.points.append(metrics)


@pytest.mark.parametrize(
    ("base", "hook"), [(DPO, "loss"), (KTO, "loss"), (RewardModel, "loss"), (PPO, "act")],
    ids=["DPO", "KTO", "RewardModel", "PPO"],
)  # fmt: skip
def test_what_a_hook_records_while_it_evaluates_stays_out_of_the_training_curve(base, hook):
    stages = []

    def noting(self, *args, **kwargs):
        stages.append(str(self.trainer.state.stage.value))
        self.record(evaluates=float(stages[-1] != "train"))
        return getattr(base, hook)(self, *args, **kwargs)

    mine, curves = type("Mine", (base,), {"__module__": __name__, hook: noting}), Curves()
    if base is PPO:
        data = rollouts("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=64, eval_freq=16, n_eval_episodes=1)
        fit(mine(), data, logger=curves)
    else:
        data = PreferenceDataModule("paths", n_train=16, n_eval=4, eval_steps=1, batch_size=8)
        fit(mine(model_config=TINY, logging_steps=1), data, max_steps=3, logger=curves)
    points = [point["train/evaluates"] for point in curves.points if "train/evaluates" in point]
    assert len(points) >= 3 and set(points) == {0.0}
    assert {"train", "sanity_check", "validate"} == set(stages), "the hook is called in all of them"


def test_a_callback_s_numpy_number_costs_no_checkpoint(tmp_path):
    trainer = fit(PPO(net_arch=[8]), rollouts("CartPole-v1"), max_epochs=1, callbacks=[Best()])
    states = saved(trainer, tmp_path / "last.ckpt")["callbacks"]
    assert states["Best"] == {"best": 0.5, "last": [3]}


@pytest.mark.parametrize(
    ("value", "loads"),
    [
        (None, True), ([1, (2.0, {"a": "b"})], True), (np.float64(1), True), (np.ones(2), True), (Path("a"), True),
        (torch.ones(2), True), (torch.float32, True), ({1, 2}, True), (1j, True), (abs, False), (Physics, False),
        ({"a": [Physics()]}, False), (torch.nn.ReLU(), False), (iter([]), False),
    ],
)  # fmt: skip
def test_what_a_checkpoint_can_hold(value, loads):
    assert is_storable(value) == loads


# ---------------------------------------------------------------- what a subclass's methods return


def replayed(env_id="CartPole-v1", **arguments):
    defaults = {
        "n_envs": 2,
        "buffer_size": 500,
        "learning_starts": 32,
        "train_freq": 4,
        "batch_size": 8,
        "eval_freq": 0,
    }
    return ReplayDataModule(env_id, **{**defaults, "total_timesteps": 96, **arguments})


def with_method(base, name, change):
    """A subclass whose method returns what ``change`` makes of the inherited one's result."""

    def method(self, *args, **kwargs):
        return change(getattr(base, name)(self, *args, **kwargs))

    return type("Mine", (base,), {name: method, "__module__": __name__})


@pytest.mark.parametrize("base", [PPO, DQN])
@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("act", lambda acted: acted["action"], r"^act returned a tensor of shape \(2,\); it must return a dictionary"),
        ("act", lambda acted: None, "^act returned None; it must return a dictionary with the key action"),
        ("act", lambda acted: {"action": acted["action"][:1]}, r"^act returned action as a .*\(1,\); .* 2 obs"),
        ("prepare", lambda fields: None, "^prepare returned None; it must return a dictionary"),
        ("prepare", lambda fields: {**fields, "mine": 3.0}, "^prepare returned mine as float 3.0; it must be a tensor"),
        ("prepare", lambda fields: {**fields, "mine": torch.ones(5)}, r"^prepare returned mine as .*\(5,\); it must"),
    ],
)  # fmt: skip
def test_what_act_and_prepare_return_is_checked(base, name, change, sentence):
    data = rollouts("CartPole-v1", n_envs=2) if base is PPO else replayed()
    with pytest.raises(UsageError, match=sentence):
        fit(with_method(base, name, change)(), data, max_epochs=1)


@pytest.mark.parametrize("base", [PPO, DQN])
@pytest.mark.parametrize("change", [lambda acted: acted["action"], lambda acted: {"action": acted["action"].numpy()}])
def test_what_act_returns_is_checked_where_the_first_evaluation_comes_before_the_first_rollout(base, change):
    environment = gym.make("CartPole-v1")
    model = with_method(base, "act", change)(
        observation_space=space_to_dict(environment.observation_space),
        action_space=space_to_dict(environment.action_space),
    )
    with pytest.raises(UsageError, match=r"^act returned (a tensor|action as ndarray)"):
        model.predict(environment.reset(seed=0)[0])


def test_what_act_stores_needs_a_row_per_observation():
    mine = with_method(PPO, "act", lambda acted: {**acted, "mine": [1, 2]})
    with pytest.raises(
        UsageError, match=r"^act returned mine as list \[1, 2\]; it must be a tensor with a row for each"
    ):
        fit(mine(), rollouts("CartPole-v1", n_envs=2), max_epochs=1)


def test_a_network_that_is_set_too_early_is_answered():
    class Early(PPO):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(4, 2)

    with pytest.raises(
        UsageError, match=r"Early.network was set before its spaces were known; set it in build_network"
    ):
        fit(Early(), rollouts("CartPole-v1"), max_epochs=1)


def test_weights_load_into_a_module_that_knows_its_spaces():
    trained = PPO(net_arch=[8])
    fit(trained, rollouts("CartPole-v1"), max_epochs=1)
    spaces = {name: trained.hparams[name] for name in ("observation_space", "action_space")}
    fresh = PPO(net_arch=[8], **spaces)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(torch.ones(3, 4)), trained(torch.ones(3, 4)))
    with pytest.raises(UsageError, match="PPO knows no spaces"):
        PPO(net_arch=[8]).load_state_dict(trained.state_dict())


# ---------------------------------------------------------------- optimizers of one's own


class TwoOptimizers(SAC):
    """One optimizer for the policy, one for the rest; together they do what one does."""

    def configure_optimizers(self):
        policy = list(self.network.policy.parameters())
        rest = [p for p in self.trainable_parameters() if not any(p is q for q in policy)]
        made = [self.default_optimizer(policy), self.default_optimizer(rest)]
        return made, [StepLR(optimizer, 1, 0.5) for optimizer in made]


class OneOptimizer(SAC):
    def configure_optimizers(self):
        made = self.default_optimizer(self.trainable_parameters())
        return [made], [StepLR(made, 1, 0.5)]


def test_an_optimizer_for_each_part_learns_what_one_learns():
    weights = []
    for cls in (OneOptimizer, TwoOptimizers):
        model = cls(net_arch=[16])
        trainer = fit(model, replayed("Pendulum-v1", rollouts_per_epoch=4))
        assert {o.param_groups[0]["lr"] for o in trainer.optimizers} == {3e-4 * 0.5**trainer.current_epoch}
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Predicts(DQN):
    """Learns to predict the reward, with a network of its own."""

    def build_network(self):
        super().build_network()
        self.predictor = torch.nn.Linear(4, 1)

    def minibatch_loss(self, batch):
        error = self.predictor(batch["observation"])[:, 0] - batch["reward"]
        return super().minibatch_loss(batch) + error.square().mean()


def test_a_part_of_a_subclass_is_trained_and_the_target_network_is_not():
    model = Predicts(net_arch=[8], target_update_interval=10**9)
    fit(model, replayed(total_timesteps=40))
    start = model.predictor.weight.detach().clone(), model.target_network.state_dict()
    longer = Predicts(net_arch=[8], target_update_interval=10**9)
    fit(longer, replayed(total_timesteps=96))
    assert not torch.equal(longer.predictor.weight, start[0])
    assert all(torch.equal(x, start[1][name]) for name, x in longer.target_network.state_dict().items())


def test_the_optimizer_has_the_network_first_then_the_rest():
    model = SAC(net_arch=[8])
    trainer = fit(model, replayed("Pendulum-v1"))
    ours = [*model.network.parameters(), model.log_ent_coef]
    assert all(a is b for a, b in zip(trainer.optimizers[0].param_groups[0]["params"], ours, strict=True))


class Plateau(SAC):
    def configure_optimizers(self):
        made = self.default_optimizer(self.trainable_parameters())
        return [made], [ReduceLROnPlateau(made, "max", factor=0.5, patience=0)]


class PlateauTRPO(TRPO):
    configure_optimizers = Plateau.configure_optimizers


@pytest.mark.parametrize(
    ("cls", "make_data"),
    [
        (Plateau, lambda: replayed("Pendulum-v1", rollouts_per_epoch=2)),
        (PlateauTRPO, lambda: rollouts("CartPole-v1", n_envs=2)),
    ],
)
def test_a_scheduler_that_needs_a_metric_asks_for_it(cls, make_data):
    with pytest.raises(UsageError, match="ReduceLROnPlateau needs a metric, .* override step_schedulers"):
        fit(cls(net_arch=[16]), make_data(), max_epochs=1)

    def step_schedulers(self):
        self.trainer.lr_scheduler_configs[0].scheduler.step(self.trainer.callback_metrics["rollout/ep_rew_mean"])

    monitoring = type("Monitoring", (cls,), {"step_schedulers": step_schedulers, "__module__": __name__})
    trainer = fit(monitoring(net_arch=[16]), make_data(), max_epochs=3)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


def scheduled(algorithm, **config):
    """The algorithm with a rate that a scheduler halves, and the rates at the start of each minibatch."""

    class Halves(algorithm):
        rates: ClassVar[list[float]] = []

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), **config}}

        def on_train_batch_start(self, batch, batch_idx):
            Halves.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    return Halves


def four_minibatches(algorithm):
    """Data of four minibatches per epoch."""
    if algorithm in (PPO, TRPO):
        return rollouts("CartPole-v1", n_envs=2, n_steps=4, rollouts_per_epoch=4)
    env_id = "CartPole-v1" if algorithm is DQN else "Pendulum-v1"
    return replayed(env_id, n_envs=1, rollouts_per_epoch=4, train_freq=1, learning_starts=8, total_timesteps=10**6)


@pytest.mark.parametrize("algorithm", [DQN, PPO, SAC, TD3, CrossQ, TRPO])  # the first two optimize automatically
@pytest.mark.parametrize(
    ("config", "halvings"),
    [
        ({}, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        ({"frequency": 2}, [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]),
        ({"interval": "step"}, list(range(12))),
        ({"interval": "step", "frequency": 3}, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]),
    ],
)
def test_interval_and_frequency_of_a_scheduler_mean_the_same_to_all_algorithms(algorithm, config, halvings):
    cls = scheduled(algorithm, **config)
    fit(cls(net_arch=[8], learning_rate=0.5), four_minibatches(algorithm), max_epochs=3)
    assert cls.rates == [0.5**n * 0.5 for n in halvings]


@pytest.mark.long
@pytest.mark.parametrize("config", [{"frequency": 2}, {"interval": "step", "frequency": 3}])
def test_a_resumed_run_steps_its_scheduler_when_the_uninterrupted_one_does(tmp_path, config):
    make_data = lambda: four_minibatches(SAC)  # noqa: E731
    whole = scheduled(SAC, **config)
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, save_weights_only=False)
    fit(whole(net_arch=[8], learning_rate=0.5), make_data(), max_epochs=4, callbacks=[saves], enable_checkpointing=True)
    for stop in (1, 2, 3, 4, 7, 8, 11, 12):
        resumed = scheduled(SAC, **config)
        fit(resumed(net_arch=[8], learning_rate=0.5), make_data(), tmp_path / f"step={stop}.ckpt", max_epochs=4)
        assert resumed.rates == whole.rates[stop:], stop


@pytest.mark.parametrize("config", [{"interval": "batch"}, {"frequency": 0}])
def test_an_interval_that_no_scheduler_has_is_refused(config):
    with pytest.raises(UsageError, match="Halves.configure_optimizers returns a scheduler with interval='.*; give"):
        fit(scheduled(SAC, **config)(net_arch=[8]), four_minibatches(SAC), max_epochs=1)


# ---------------------------------------------------------------- hooks of mixins


class Counts:
    """A mixin for several algorithms, which knows none of their bases."""

    def on_train_epoch_end(self):
        self.epochs = getattr(self, "epochs", 0) + 1


class CountsAsModule(L.LightningModule):
    def on_train_epoch_end(self):
        self.epochs = getattr(self, "epochs", 0) + 1


class GoesOn:
    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.epochs = getattr(self, "epochs", 0) + 1


class Mixed(Counts, PPO):
    pass


class MixedModule(CountsAsModule, PPO):
    pass


class CallsMixin(Counts, PPO):
    def on_train_epoch_end(self):
        super().on_train_epoch_end()


class MixedGoesOn(GoesOn, PPO):
    pass


class Again(Mixed):
    pass


@pytest.mark.parametrize("cls", [Mixed, MixedModule, CallsMixin, MixedGoesOn, Again], ids=lambda cls: cls.__name__)
def test_a_hook_of_a_mixin_needs_no_super(cls):
    points = []
    for kind in (PPO, cls):
        model, curves = kind(net_arch=[8]), Curves()
        fit(model, rollouts("CartPole-v1", n_envs=2), max_epochs=2, logger=curves)
        points.append([{k: x for k, x in point.items() if not k.startswith("time/")} for point in curves.points])
    assert points[0] == points[1] and len(points[0]) == 2
    assert model.epochs == 2


class CallsSuper(RolloutDataModule):
    def setup(self, stage):
        super().setup(stage)
        self.calls = {"own": 0, "begin_run": 0, **getattr(self, "calls", {})}
        self.calls["own"] += 1

    def begin_run(self):
        super().begin_run()
        self.calls = {"begin_run": 1 + getattr(self, "calls", {"begin_run": 0})["begin_run"]}


class CallsSuperAgain(CallsSuper):
    def setup(self, stage):
        super().setup(stage)


class Migrates(PPO):
    restored = 0

    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)

    def _require_own(self, checkpoint):  # of the inherited part
        self.restored += 1
        super()._require_own(checkpoint)


def test_the_inherited_part_of_a_hook_runs_once_where_super_is_called(tmp_path):
    data = CallsSuperAgain("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=32, eval_freq=0)
    trainer = fit(Migrates(net_arch=[8]), data, max_epochs=1)
    assert data.calls == {"own": 1, "begin_run": 1}
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = Migrates(net_arch=[8])
    fit(resumed, CallsSuperAgain(**data.hparams), tmp_path / "last.ckpt", max_epochs=2)
    assert resumed.restored == 1


class Keeps(PPO):
    """Its hooks know nothing of this project's."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 7

    def on_load_checkpoint(self, checkpoint):
        self.mine = checkpoint["mine"]


def test_a_file_of_weights_alone_has_what_a_subclass_needs_to_load(tmp_path):
    model = Keeps(net_arch=[8])
    trainer = fit(model, rollouts("CartPole-v1", n_envs=2), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loaded = Keeps.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert loaded.mine == 7
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())


class Fails(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        raise RuntimeError("mine")


@pytest.mark.parametrize("fails", [False, True])
def test_a_trainer_has_its_user_s_callbacks_after_a_run(fails):
    given = [Fails()] if fails else [Best()]
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, max_epochs=1, callbacks=given)  # fmt: skip
    before = list(trainer.callbacks)
    try:
        trainer.fit(PPO(net_arch=[8]), datamodule=rollouts("CartPole-v1", n_envs=2))
    except RuntimeError:
        assert fails
    assert trainer.callbacks == before


# ---------------------------------------------------------------- parts of one's own under manual optimization


@pytest.mark.parametrize("base", [SAC, TD3, CrossQ])
def test_a_part_that_the_critics_loss_reads_is_trained(base):
    class Learns(base):
        def build_network(self):
            super().build_network()
            self.predictor, self.idle = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
            self.frozen = torch.nn.Linear(1, 1).requires_grad_(False)

        def critic_loss(self, q, target, weight):
            error = self.predictor(torch.ones(1)) - 3 + self.frozen(torch.ones(1))
            return super().critic_loss(q, target, weight) + error.square().sum()

    model = Learns(net_arch=[8], learning_rate=0.05)
    fit(model, replayed("Pendulum-v1", gradient_steps=8))
    start = Learns(net_arch=[8], **{name: model.hparams[name] for name in ("observation_space", "action_space")})
    start.configure_model()
    assert abs(model.predictor(torch.ones(1)) - 3 + model.frozen(torch.ones(1))).item() < 0.5
    for name in ("idle", "frozen"):
        assert torch.equal(getattr(model, name).weight, getattr(start, name).weight), name
