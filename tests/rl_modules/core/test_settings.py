"""Arguments that are declared in a class's body: what a class, a subclass and a caller can rely on."""

import copy
import inspect
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

import rl_modules
from datamodules import PreferenceDataModule, PromptDataModule, ReplayDataModule, RolloutDataModule
from rl_modules import A2C, DDPG, DPO, GRPO, PPO, SAC, QLearning, RecurrentPPO
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import Declared, changed, fixed, setting
from tests.training import fit, rollouts

if TYPE_CHECKING:
    from fractions import Fraction

CONTROL = [PPO, A2C, SAC, DDPG, QLearning, RecurrentPPO, RolloutDataModule, ReplayDataModule]


class Plain:
    """Stands for Lightning's class."""

    def __init__(self) -> None:
        self._hparams: dict[str, Any] = {}

    def _set_hparams(self, values: dict[str, Any]) -> None:
        self._hparams.update(values)

    @property
    def hparams(self) -> dict[str, Any]:
        return self._hparams


class Walker(Declared, Plain):
    """Walks."""

    step: float = setting(0.5, "length of a step, in metres", above=0, most=2)
    legs: int = setting(2, "how many", least=1)
    gait: str = setting("walk", "how", one_of=("walk", "trot"))
    rests: bool = setting(False, "whether it rests")
    name: str | None = setting(None, "what it is called", kw_only=False)


class Horse(Walker):
    """Trots."""

    legs = 4
    gait = fixed("trot")
    step: float = changed(most=5)
    load: int | None = setting(None, "in kilograms", least=0, idle=lambda h: not h.rests and "while it does not rest")


def names(cls: type) -> list[str]:
    return list(inspect.signature(cls).parameters)


def test_the_signature_has_positional_arguments_first_and_own_ones_before_inherited_ones() -> None:
    assert names(Walker) == ["name", "step", "legs", "gait", "rests"]
    assert names(Horse) == ["name", "load", "step", "legs", "rests"]
    parameters = inspect.signature(Horse).parameters
    assert parameters["name"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["load"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["load"].annotation == int | None and parameters["legs"].default == 4
    assert "load: in kilograms." in (Horse.__doc__ or "")


def test_attributes_and_hyperparameters_are_the_values_as_they_are_used() -> None:
    horse = Horse("Bo", step=np.float32(3), load=2e2)
    assert (horse.name, horse.step, horse.load, horse.legs, horse.gait) == ("Bo", 3.0, 200, 4, "trot")
    assert type(horse.step) is float and type(horse.load) is int
    assert horse.hparams == {"name": "Bo", "step": 3.0, "load": 200, "legs": 4, "rests": False}
    assert Walker().legs == 2, "a subclass's default is its own"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Walker(step=0), r"step=0 must lie in \(0, 2\]"),
        (lambda: Walker(step=math.nan), r"step=nan must lie in \(0, 2\]"),
        (lambda: Walker(step="far"), "step='far' must be a number"),
        (lambda: Walker(step=True), "step=True must be a number"),
        (lambda: Walker(legs=1.5), "legs=1.5 must be a whole number"),
        (lambda: Walker(legs=0), "legs=0 must be at least 1"),
        (lambda: Walker(gait="trod"), "gait='trod' must be one of walk, trot; did you mean trot?"),
        (lambda: Walker(gait=["trot"]), r"gait=\['trot'\] must be one of walk, trot"),
        (lambda: Walker(rests="no"), "rests='no' must be true or false"),
        (lambda: Walker(name=["Bo"]), r"name=\['Bo'\] is a list, where a single text should be"),
        (lambda: Walker(stpe=1), "Walker takes no argument 'stpe'; did you mean step?"),
        (lambda: Walker("Bo", "Jo"), "Walker takes 1 argument without its name, not 2"),
        (lambda: Horse(gait="walk"), "Horse takes no argument 'gait'"),
        (lambda: Horse(step=6), r"step=6 must lie in \(0, 5\]"),
        (lambda: Horse(load=-1), "load=-1 must be at least 0"),
    ],
)
def test_a_value_out_of_range_is_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make()


def test_an_argument_without_effect_is_named_with_its_reason() -> None:
    assert Horse(load=3).idle_arguments() == {"load": "while it does not rest"}
    assert Horse(load=3, rests=True).idle_arguments() == {}


def test_a_subclass_may_have_an_ordinary_constructor() -> None:
    class Mule(Horse):
        def __init__(self, stubborn: float = 0.5, legs: int = 3, **horse: Any) -> None:
            super().__init__(legs=legs + 1, **horse)
            self.stubborn = stubborn

    mule = Mule(0.7, load=5)
    assert (mule.stubborn, mule.legs, mule.load) == (0.7, 4, 5)
    assert mule.hparams["stubborn"] == 0.7 and mule.hparams["legs"] == 4
    assert mule._given.names == ["stubborn", "load"]
    with pytest.raises(UsageError, match="Mule takes no argument 'lod'; did you mean load?"):
        Mule(lod=3)


def test_a_subclass_of_an_ordinary_constructor_may_declare_an_argument() -> None:
    class Mule(Horse):
        def __init__(self, **horse: Any) -> None:
            super().__init__(**horse)

    class Jenny(Mule):
        bell: bool = setting(True, "whether it wears one")

    assert Jenny(bell=False).bell is False and Jenny(load=1).bell is True


@pytest.mark.parametrize("cls", CONTROL, ids=lambda cls: cls.__name__)
def test_the_command_line_shows_every_argument_with_its_meaning(cls: type) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(cls, "it")
    text = " ".join(parser.format_help().split())
    for name, declared in cls.declared_settings.items():  # type: ignore[attr-defined]
        assert f"--it.{name}" in text
        assert " ".join(declared.says.split())[:40] in text


def test_a_type_that_only_type_checkers_import_takes_no_other_argument_s_type() -> None:
    class Shared(PPO):
        share: "Fraction | None" = setting(None, "of the whole")
        pauses: "int" = setting(3, "between two updates", least=1)
        gamma: "float" = changed(above=0.5)

    kinds = {name: parameter.annotation for name, parameter in inspect.signature(Shared).parameters.items()}
    assert (kinds["share"], kinds["pauses"], kinds["gamma"], kinds["gae_lambda"]) == (Any, int, float, float)
    with pytest.raises(UsageError, match=r"pauses=2\.5 must be a whole number"):
        Shared(pauses=2.5)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Shared, "model")
    assert parser.parse_args(["--model.pauses=4"]).model.pauses == 4
    with pytest.raises(Exception, match="pauses"):
        parser.parse_args(["--model.pauses=often"])


def test_a_declared_argument_of_one_s_own_trains_and_loads(tmp_path: Any) -> None:
    checkpoint = tmp_path / "a.ckpt"
    fit(Bold(bonus=2.0, gamma=0.5), rollouts("CartPole-v1"), max_epochs=1).save_checkpoint(checkpoint)
    stored = torch.load(checkpoint, weights_only=True)["hyper_parameters"]
    assert (stored["bonus"], stored["gamma"], stored["clip_range"]) == (2.0, 0.5, "lin_0.3")
    loaded = Bold.load_from_checkpoint(checkpoint)
    assert (loaded.bonus, loaded.gamma, loaded.clip_range) == (2.0, 0.5, 0.3)
    assert Bold.load_from_checkpoint(checkpoint, bonus=3).bonus == 3.0


class Bold(PPO):
    """PPO that is paid for entropy."""

    bonus: float = setting(1.0, "in units of reward", least=0)
    clip_range = "lin_0.3"


@pytest.mark.parametrize("name", ["PPO", "A2C", "TRPO", "REINFORCE", "DQN", "QRDQN", "C51", "PQN", "SAC", "TD3", "TQC"])
def test_all_defaults_are_in_their_ranges(name: str) -> None:
    cls = getattr(rl_modules, name)
    for argument, declared in cls.declared_settings.items():
        assert declared.checked(argument, declared.default) == declared.default


@pytest.mark.parametrize(("base", "name", "value"), [
    (PPO, "net_arch", [8]), (PPO, "ortho_init", False), (SAC, "ent_coef", 0.1), (SAC, "net_arch", [8]),
    (QLearning, "exploration_fraction", 0.3), (GRPO, "weight_decay", 0.1), (GRPO, "lora", {"r": 2}),
    (DPO, "loss_type", "ipo"),
])  # fmt: skip
def test_a_fixed_argument_of_any_class_has_its_value(base: Any, name: str, value: Any, tmp_path: Any) -> None:
    made = type("Fixing", (base,), {name: fixed(value)})
    language = {"model_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                 "num_attention_heads": 2}} if base in (GRPO, DPO) else {}  # fmt: skip
    data: Any = {
        GRPO: lambda: PromptDataModule("addition", batch_size=4, num_generations=2, n_eval=0, eval_steps=0),
        DPO: lambda: PreferenceDataModule("paths", batch_size=4, n_train=8, eval_steps=0),
        SAC: lambda: ReplayDataModule("Pendulum-v1", learning_starts=4, batch_size=4, eval_freq=0),
        QLearning: lambda: RolloutDataModule("Maze-v0", n_steps=1, n_envs=1, eval_freq=0),
        PPO: lambda: RolloutDataModule("CartPole-v1", n_steps=8, n_envs=1, batch_size=8, eval_freq=0),
    }[base]()
    plain, chosen = base(**language, **{name: value}), made(**language)
    assert chosen.hparams[name] == copy.deepcopy(chosen).hparams[name] == plain.hparams[name]
    assert name not in chosen.hparams and made(**chosen.hparams).hparams == chosen.hparams
    trainer = fit(chosen, data, max_steps=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert name not in saved["hyper_parameters"]
    again = made.load_from_checkpoint(tmp_path / "last.ckpt")
    assert all(torch.equal(x, chosen.state_dict()[key]) for key, x in again.state_dict().items())
