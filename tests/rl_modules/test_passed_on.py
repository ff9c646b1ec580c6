"""A constructor of the user's that passes on other values than it received, under the same names or of its own choice:
the run goes by what was passed on, and a checkpoint leads to the same object again.
"""

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from datamodules import InstructionDataModule, PromptDataModule, ReplayDataModule, RolloutDataModule
from recipes.language import export
from rl_modules import GRPO, PPO, SAC, SFT
from rl_modules.common.errors import UsageError
from rl_modules.common.stored_arguments import settings_of
from tests.networks import Features
from tests.training import assert_resumes_exactly, fit, rollouts

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


class Square(PPO):
    """Takes one width in place of a list, and the learning rate in thousandths."""

    def __init__(self, net_arch: int = 8, learning_rate: float = 1.0, **ppo):
        super().__init__(net_arch=[net_arch, net_arch], learning_rate=learning_rate * 1e-3, **ppo)


class SavesItself(PPO):
    """As Lightning's documentation shows it."""

    def __init__(self, net_arch: int = 8, bonus: float = 0.5, **ppo):
        super().__init__(net_arch=[net_arch], **ppo)
        self.save_hyperparameters()


class ChangesFirst(PPO):
    """Changes what it received before it passes it on."""

    def __init__(self, net_arch: int = 8, bonus: float = 2.0, **ppo):
        net_arch, bonus = [net_arch] * 2, bonus * 10
        ppo["gamma"] = ppo.get("gamma", 0.5) + 0.25
        super().__init__(net_arch=net_arch, **ppo)
        self.bonus = bonus


class Doubled(RolloutDataModule):
    """Chooses settings, and changes others."""

    def __init__(self, env_id: str = "CartPole", batch_size: int = 4, **data):
        super().__init__(f"{env_id}-v1", n_envs=2, batch_size=batch_size * 2, eval_freq=0, seed=7, **data)


class Halved(ReplayDataModule):
    def __init__(self, env_id="Pendulum-v1", buffer_size: int = 10, gradient_steps: int = 1, **data):
        super().__init__(
            env_id, buffer_size=buffer_size * 100, gradient_steps=2 * gradient_steps, train_freq=2, learning_starts=16,
            batch_size=8, total_timesteps=64, eval_freq=0, rollouts_per_epoch=4, **data,
        )  # fmt: skip


class Coefficient(SAC):
    def __init__(self, ent_coef: float = 2.0, **sac):
        super().__init__(ent_coef=ent_coef / 10, net_arch=[8], **sac)


class Prompts(PromptDataModule):
    def __init__(self, batch_size: int = 2, eval_steps: int = 1, **data):
        super().__init__("addition", batch_size=batch_size * 4, eval_steps=eval_steps * 2, num_generations=2, **data)


class Answers(GRPO):
    def __init__(self, max_completion_length: str = "short", **grpo):
        length = {"short": 3, "long": 6}[max_completion_length]
        super().__init__(model_config=TINY, max_completion_length=length, logging_steps=1, **grpo)


class Adapted(SFT):
    """Chooses its adapters by one number."""

    def __init__(self, lora: int = 2, **sft):
        super().__init__(lora={"r": lora}, **sft)


def saved(trainer, path: Path) -> dict:
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def data(**arguments):
    return Doubled(**{"n_steps": 16, "n_epochs": 1, "total_timesteps": 128, **arguments})


def test_the_run_goes_by_what_was_passed_on():
    model = Square(4, policy_objective="penalty")
    assert model.hparams["net_arch"] == [4, 4] and model.hparams["learning_rate"] == model.learning_rate == 1e-3
    experience = data()
    assert experience.hparams["batch_size"] == 8 and experience.hparams["env_id"] == "CartPole-v1"
    trainer = fit(model, experience, max_epochs=1)
    assert [m.out_features for m in model.network.modules() if isinstance(m, torch.nn.Linear)][-2:] == [2, 1]
    assert model(torch.ones(3, 4)).shape == (3,) and experience.batch_size == 8
    assert {group["lr"] for group in trainer.optimizers[0].param_groups} == {1e-3}
    widths = {x.shape[0] for name, x in model.state_dict().items() if name.endswith("head.weight")}
    assert widths == {1, 2} and {x.shape[1] for n, x in model.state_dict().items() if n.endswith("head.weight")} == {4}


def test_a_checkpoint_has_what_the_constructors_received(tmp_path):
    model = Square(4)
    checkpoint = saved(fit(model, data(batch_size=2), max_epochs=1), tmp_path / "a.ckpt")
    stored = checkpoint["hyper_parameters"]
    assert stored["net_arch"] == 4 and stored["learning_rate"] == 1.0
    assert settings_of(checkpoint)["net_arch"] == [4, 4] and settings_of(checkpoint)["learning_rate"] == 1e-3
    stored, key = checkpoint["datamodule_hyper_parameters"], "datamodule_hyper_parameters"
    assert (stored["env_id"], stored["batch_size"]) == ("CartPole", 2) and "n_envs" not in stored
    assert settings_of(checkpoint, key)["n_envs"] == 2 and settings_of(checkpoint, key)["seed"] == 7
    loaded, experience = Square.load_from_checkpoint(tmp_path / "a.ckpt"), Doubled.load_from_checkpoint(
        tmp_path / "a.ckpt"
    )  # fmt: skip
    assert loaded.hparams == model.hparams and torch.equal(loaded(torch.ones(3, 4)), model(torch.ones(3, 4)))
    assert (experience.env_id, experience.n_envs, experience.batch_size) == ("CartPole-v1", 2, 4)
    again = saved(fit(loaded, experience, max_epochs=1), tmp_path / "b.ckpt")
    assert again["hyper_parameters"]["net_arch"] == 4 and again[key]["env_id"] == "CartPole"


@pytest.mark.parametrize(
    ("make", "experience"),
    [
        (Square, data),
        (lambda: Square(policy_objective="penalty"), lambda: data(norm_obs=True)),
        (lambda: SavesItself(4), data),
        (lambda: ChangesFirst(4, gamma=0.5), data),
        (Coefficient, Halved),
    ],
    ids=["PPO", "penalty", "saves itself", "changes first", "SAC"],
)
def test_such_a_run_resumes_exactly(make, experience, tmp_path):
    assert_resumes_exactly(make, experience, tmp_path, 3)


def test_another_seed_than_the_chosen_one_is_refused_on_resume(tmp_path):
    trainer = fit(Square(), data(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = rollouts("CartPole-v1", n_envs=2, batch_size=8, n_steps=16, total_timesteps=128, seed=8)
    other.__class__ = Doubled
    with pytest.raises(UsageError, match="seed=8 differs from the checkpoint's 7"):
        fit(Square(), other, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)


def test_a_subclass_that_saves_its_hyperparameters_keeps_what_it_passed_on(tmp_path):
    model = SavesItself(4)
    assert model.hparams["net_arch"] == [4] and model.hparams["bonus"] == 0.5
    saved(fit(model, data(), max_epochs=1), tmp_path / "a.ckpt")
    loaded = SavesItself.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.hparams["net_arch"] == [4] and torch.equal(loaded(torch.ones(3, 4)), model(torch.ones(3, 4)))


class Teacher(PPO):
    """Makes another module first."""

    def __init__(self, net_arch: int = 8, **ppo):
        pupil = Square(2 * net_arch)
        super().__init__(net_arch=[net_arch], **ppo)
        self.widths = pupil.hparams["net_arch"]


GIVEN: list = []


class Scaled(gym.Wrapper):
    def __init__(self, env, gains):
        super().__init__(env)
        GIVEN.append(gains)


def make_scaled(options):
    GIVEN.append(options["gains"][0])
    return gym.make("CartPole-v1")


class Weighted(Features):
    def __init__(self, observation_space, gains):
        super().__init__(observation_space)
        GIVEN.append(gains)


class Weighing(PPO):
    def __init__(self, gains=None, **ppo):
        super().__init__(**ppo)
        GIVEN.append(gains)


@pytest.mark.parametrize("by_path", [False, True])
def test_the_user_s_code_gets_the_arrays_that_were_given_also_from_a_checkpoint(by_path, tmp_path):
    gains = np.array([[1, 2], [3, 4]], np.float32)
    wrapper = {"class_path": f"{__name__}.Scaled", "init_args": {"gains": gains}}
    extractor: Any = functools.partial(Weighted, gains=gains)
    if by_path:
        extractor = {"class_path": f"{__name__}.Weighted", "init_args": {"gains": gains}}
    settings = {"env_kwargs": {"options": {"gains": [gains]}}, "wrappers": [wrapper]}
    GIVEN.clear()
    model = Weighing(gains=gains, features_extractor=extractor)
    rows = rollouts(make_scaled, total_timesteps=128, **settings)
    trainer = fit(model, rows)
    assert len(GIVEN) >= 4 and all(x is gains for x in GIVEN)
    assert rows.hparams["env_kwargs"] == {"options": {"gains": [[[1, 2], [3, 4]]]}}
    assert (
        model.hparams["features_extractor"]["init_args"]
        == {"gains": [[1, 2], [3, 4]]}
        == {"gains": model.hparams["gains"]}
    )
    checkpoint = saved(trainer, tmp_path / "run.ckpt")
    assert checkpoint["hyper_parameters"]["gains"] == [[1, 2], [3, 4]]
    GIVEN.clear()
    Weighing.load_from_checkpoint(tmp_path / "run.ckpt")
    loaded = RolloutDataModule.load_from_checkpoint(tmp_path / "run.ckpt", env_id=make_scaled, wrappers=None)
    GIVEN.append(loaded.env_kwargs["options"]["gains"][0])
    assert len(GIVEN) == 3
    for x in GIVEN:
        np.testing.assert_array_equal(x, gains, strict=True)


def test_a_constructor_may_make_another_module():
    model = Teacher(4)
    assert model.hparams["net_arch"] == [4] and model.widths == [8, 8]


def test_what_a_constructor_changes_in_place_is_changed_once(tmp_path):
    model = ChangesFirst(4, bonus=3.0, gamma=0.25)
    assert (model.gamma, model.bonus) == (0.5, 30.0)
    checkpoint = saved(fit(model, data(), max_epochs=1), tmp_path / "a.ckpt")
    stored = checkpoint["hyper_parameters"]
    assert (stored["gamma"], stored["bonus"], stored["net_arch"]) == (0.25, 3.0, 4)
    loaded = ChangesFirst.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (loaded.gamma, loaded.bonus, loaded.hparams["net_arch"]) == (0.5, 30.0, [4, 4])
    assert ChangesFirst.load_from_checkpoint(tmp_path / "a.ckpt", gamma=0.0).gamma == 0.25


def test_replay_s_numbers_are_those_passed_on(tmp_path):
    model, experience = Coefficient(5.0), Halved()
    assert (experience.buffer_size, experience.gradient_steps) == (1000, 2)
    fit(model, experience).save_checkpoint(tmp_path / "a.ckpt")
    loaded = Halved.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (loaded.buffer_size, loaded.gradient_steps) == (1000, 2)
    assert float(Coefficient.load_from_checkpoint(tmp_path / "a.ckpt").ent_coef) == 0.5
    # Begins with the entropy coefficient of the checkpoint, which is no new value.
    fit(Coefficient(5.0, init_from=str(tmp_path / "a.ckpt")), Halved())


def test_an_object_that_is_made_a_setting_is_asked_for_again(tmp_path):
    class Sized(PPO):
        def __init__(self, net_arch=abs, **ppo):
            super().__init__(net_arch=[net_arch(-8)], **ppo)

    by_default = Sized()
    fit(by_default, data(), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    assert Sized.load_from_checkpoint(tmp_path / "a.ckpt").hparams["net_arch"] == [8]
    fit(Sized(lambda x: 4), data(), max_epochs=1).save_checkpoint(tmp_path / "b.ckpt")
    with pytest.raises(UsageError, match="trained with net_arch=.*lambda.*give it again"):
        Sized.load_from_checkpoint(tmp_path / "b.ckpt")
    assert Sized.load_from_checkpoint(tmp_path / "b.ckpt", net_arch=lambda x: 4).hparams["net_arch"] == [4]


def test_a_language_run_goes_by_what_was_passed_on(tmp_path):
    def prompts():
        return Prompts(n_train=16, n_eval=2, eval_on_start=False)

    model, experience = Answers("long"), prompts()
    assert (experience.batch_size, experience.hparams["eval_steps"], model.max_completion_length) == (8, 2, 6)
    checkpoint = saved(fit(model, experience, max_steps=1), tmp_path / "a.ckpt")
    assert checkpoint["hyper_parameters"]["max_completion_length"] == "long"
    assert checkpoint["datamodule_hyper_parameters"]["batch_size"] == 2
    assert Answers.load_from_checkpoint(tmp_path / "a.ckpt").max_completion_length == 6
    assert Prompts.load_from_checkpoint(tmp_path / "a.ckpt").batch_size == 8
    assert_resumes_exactly(Answers, prompts, tmp_path, 3)


def test_a_model_with_adapters_of_a_subclass_s_choice_is_exported(tmp_path):
    model = Adapted(4, model_config=TINY)
    fit(model, InstructionDataModule("addition", n_train=8, n_eval=0, batch_size=4), max_steps=1).save_checkpoint(
        tmp_path / "a.ckpt"
    )
    loaded = Adapted.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.hparams["lora"] == model.hparams["lora"] and loaded.hparams["lora"]["r"] == 4
    assert export(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), f"{__name__}.Adapted") is not None


def test_a_command_line_gives_what_the_constructor_receives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["program"])
    cli = LightningCLI(Square, Doubled, run=False, save_config_callback=None, args=[
        "--model.net_arch", "4", "--data.batch_size", "2", "--data.n_steps", "16", "--data.total_timesteps", "32",
        "--trainer.max_epochs", "1", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false",
        "--trainer.enable_model_summary", "false", "--trainer.accelerator", "cpu"])  # fmt: skip
    assert cli.model.hparams["net_arch"] == [4, 4] and cli.datamodule.hparams["batch_size"] == 4
    cli.trainer.fit(cli.model, cli.datamodule)
    cli.trainer.save_checkpoint("a.ckpt")
    stored = torch.load("a.ckpt", weights_only=True)["hyper_parameters"]
    assert stored["net_arch"] == 4
    assert Square.load_from_checkpoint("a.ckpt").hparams["net_arch"] == [4, 4]


@pytest.mark.parametrize("chosen", [3, [1], None, "x", {"hyper_parameters": [1]}])
def test_settings_that_are_none_are_one_sentence(chosen, tmp_path):
    trainer = fit(PPO(net_arch=[8]), rollouts("CartPole-v1", total_timesteps=128))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    torch.save({**checkpoint, "chosen": chosen}, tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match="the checkpoint is damaged: it has .* where hyper_parameters should be"):
        PPO.load_from_checkpoint(tmp_path / "a.ckpt")
