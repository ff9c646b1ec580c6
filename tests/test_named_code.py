"""A checkpoint chooses no code: every argument of every class, with an import path in every place that may hold one."""

import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

import datamodules
import rl_modules
from datamodules import PromptDataModule, RolloutDataModule
from datamodules.language.rewards import FACTORIES, FUNCTIONS
from datamodules.language.tasks import TASKS, make_task
from datamodules.language.tools import ToolEnvironment
from datamodules.registered import OBJECTS
from rl_modules import DPO, DQN, GRPO, PPO, SFT
from rl_modules.common.arguments import OWN_NETWORKS
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.core.settings import Setting, setting
from rl_modules.language.advantages import code_of_advantages, dr_grpo
from tests.training import fit

TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
CODE = """
from pathlib import Path
MARK = Path(__file__).with_suffix(".mark")
MARK.write_text("imported")
def run(*args, **kwargs):
    MARK.write_text("ran")
    raise SystemExit("ran")
"""
DATA = [getattr(datamodules, name) for name in datamodules.__all__]
MODULES = [getattr(rl_modules, name) for name in rl_modules.__all__]
CLASSES = [cls for cls in DATA + MODULES if hasattr(cls, "declared_settings")]


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """Names of two modules that leave a mark: one that nothing has imported, and one whose functions must not run."""
    for name in ("unseen_canary", "seen_canary"):
        (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    __import__("seen_canary")
    yield tmp_path
    for name in ("unseen_canary", "seen_canary"):
        sys.modules.pop(name, None)


def require_silence(folder: Path, case: Any) -> None:
    assert "unseen_canary" not in sys.modules, f"{case}: a module was imported"
    assert (folder / "seen_canary.mark").read_text() == "imported", f"{case}: a function was called"


def values(*paths: str) -> Iterator[Any]:
    """Everything that could name code: alone, in lists, as keys and in settings."""
    for path in paths:
        yield from (path, [path], {path: {}}, [{path: {"args": ["x"]}}], {"x": path}, {"x": [{"y": path}]})
        yield from (
            {"class_path": path},
            [{"class_path": path, "init_args": {}}],
            {"class_path": path, "init_args": {}},
        )
        yield from ([{"task": path}], [{"name": path}], [{"path": "a.jsonl", "reward_funcs": [path]}])
        yield [{"task": "addition", "reward_funcs": {path: {}}}]
    yield from ("unseen_canary", ["unseen_canary"], "subprocess:Popen", "org/kernel", "org/kernel@v1:name")
    yield from ({"megatron_core": "unseen_canary"}, {"": "org/kernel"})


#: Of these, those with which a run is tried where they load.
USED = ("unseen_canary:run", "seen_canary.run", ["unseen_canary:run"], {"x": "unseen_canary.run"})


def settings_of_the_registered() -> Iterator[tuple[dict[str, Any], str]]:
    """Arguments of what the project registers, in which a path stands: of environments, wrappers, rewards and tasks."""
    paths = ("unseen_canary:run", "unseen_canary", "seen_canary.run", ["seen_canary:run"], {"unseen_canary:run": {}})
    for path in paths:
        for module, names in OBJECTS.items():
            for found in (f"{module}:{name}" for name in names if name[0].isupper() and "tasks" not in module):
                for name in inspect.signature(load(found)).parameters:
                    yield {"environment": found, "environment_kwargs": {name: path}}, "PromptDataModule"
        for reward, factory in FACTORIES.items():
            for name in inspect.signature(factory).parameters:
                yield {"reward_funcs": [{reward: {"target": 3, name: path}}]}, "PromptDataModule"
        for task in TASKS:
            for name in inspect.signature(load(TASKS[task])).parameters:
                yield {"task": task, "task_kwargs": {name: path}}, "PromptDataModule"
                yield {"task": [{"task": task, "task_kwargs": {name: path}}]}, "PromptDataModule"
        for name in gym.wrappers.__all__:
            arguments = ("env_xp", "target_xp")  # of ArrayConversion, which imports what these name
            if name in COVERED:
                arguments = tuple(inspect.signature(getattr(gym.wrappers, name)).parameters)
            for argument in arguments:
                yield {"wrappers": [{"class_path": name, "init_args": {argument: path}}]}, "RolloutDataModule"
        yield {"env_kwargs": {"render_mode": path}}, "RolloutDataModule"


#: Wrappers of gymnasium that need no package of its extras.
COVERED = {
    name for name in gym.wrappers.__all__ if not any(part in name for part in ("vector", "Jax", "Numpy", "Array"))
}


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)


def file_of(cls: Any, settings: dict[str, Any], path: Path) -> Path:
    """A checkpoint that holds these arguments."""
    key = "datamodule_hyper_parameters" if cls in DATA else "hyper_parameters"
    content = {"state_dict": {"x": torch.zeros(1)}, "pytorch-lightning_version": "2.6.6", "algorithm": cls.__name__,
               "hyper_parameters": {"x": 1}, key: settings}  # fmt: skip
    torch.save(content, path)
    return path


def basis(cls: Any) -> dict[str, Any]:
    """Arguments with which a class can be made and used."""
    if cls in DATA:
        names = cls.declared_settings
        given = {"task": "addition", "n_train": 8, "batch_size": 4, "num_generations": 2, "env_id": "CartPole-v1",
                 "n_envs": 1, "n_steps": 8, "learning_starts": 4, "total_timesteps": 64}  # fmt: skip
        return {name: value for name, value in given.items() if name in names}
    names = cls.declared_settings
    if "model_config" in names:
        given = {"model_config": TINY, "max_completion_length": 4, "teacher_model_name_or_path": "x"}
        return {name: value for name, value in given.items() if name in names}
    continuous = any(name in cls.__name__ for name in ("SAC", "TD3", "DDPG", "TQC", "CrossQ"))
    action = gym.spaces.Box(-1, 1, (1,)) if continuous else gym.spaces.Discrete(2)
    tabular = cls.__name__ in ("MonteCarlo", "SARSA", "QLearning")
    observation = gym.spaces.Discrete(3) if tabular else gym.spaces.Box(-1, 1, (2,))
    return {"observation_space": space_to_dict(observation), "action_space": space_to_dict(action)}


def declared() -> dict[str, tuple[Any, Setting]]:
    """Every declared argument once, with a class that takes it; a changed rule counts as another one."""
    found: dict[tuple[str, int], tuple[str, Any, Setting]] = {}
    for cls in CLASSES:
        for name, one in cls.declared_settings.items():
            found.setdefault((name, id(one)), (name, cls, one))
    return {f"{cls.__name__}.{name}": (cls, one) for name, cls, one in found.values()}


def may_hold_a_path(one: Setting) -> bool:
    """Whether an argument takes anything but numbers and words of a list."""
    return not one.one_of and bool({*one.kinds} - {int, float, bool, type(None)})


ARGUMENTS = [name for name, (cls, one) in declared().items() if may_hold_a_path(one)]


def try_to_load(cls: Any, settings: dict[str, Any], source: Callable[[Path], Any] = str) -> Any:
    """The object of a checkpoint with these arguments, or None: it is refused, by whatever exception."""
    try:
        return cls.load_from_checkpoint(source(file_of(cls, settings, Path("a.ckpt"))))
    except SystemExit:
        raise AssertionError("it ran") from None
    except Exception:
        return None


@pytest.mark.long
@pytest.mark.parametrize("where", ARGUMENTS)
def test_an_import_path_in_an_argument_of_a_checkpoint_is_not_imported(where, canary):
    cls, one = declared()[where]
    name = where.partition(".")[2]
    if name in OWN_NETWORKS:  # the exception: what is no subclass of nn.Module is imported, and not called
        pytest.skip("a network of one's own")
    paths = (
        "unseen_canary:run",
        "seen_canary.run",
        *(() if one.code is None else ("unseen_canary.run", "seen_canary:run")),
    )
    for value in values(*paths):
        made = try_to_load(cls, {**basis(cls), name: value})
        require_silence(canary, (where, value))
        if made is not None and cls in (PPO, DQN, GRPO, *DATA) and value in USED:
            use(made)
            require_silence(canary, (where, value, "used"))


def use(made: Any) -> None:
    """Trains with a loaded module or datamodule for one step, if it can be trained with."""
    pairs = {"rollouts": PPO, "replay": DQN, "prompts": GRPO, "demonstrations": SFT, "preferences": DPO}
    try:
        if type(made) in DATA:
            module, data = pairs[made.kind](**basis(pairs[made.kind])), made
        else:
            module, data = made, next(cls for cls in DATA if pairs[cls.kind] is type(made))
            data = data(**basis(data))
        fit(module, data, max_steps=1)
    except SystemExit:
        raise AssertionError("it ran") from None
    except Exception:
        pass


@pytest.mark.long
def test_an_import_path_in_the_settings_of_what_is_registered_is_not_imported(canary):
    for settings, kind in settings_of_the_registered():
        cls = getattr(datamodules, kind)
        made = try_to_load(cls, {**basis(cls), **settings})
        require_silence(canary, settings)
        # Those that load are used where only a run imports.
        if made is not None and {"environment", "wrappers"} & {*settings} and "['seen_canary:run']" in str(settings):
            use(made)
            require_silence(canary, settings)


@pytest.mark.parametrize("source", [str, Path, lambda path: io.BytesIO(path.read_bytes()), lambda path: path.as_uri()])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (PromptDataModule, {"task": "addition", "reward_funcs": [{"subprocess:Popen": {"args": ["touch", "ran"]}}]}),
        (RolloutDataModule, {"env_id": "subprocess:Popen", "env_kwargs": {"args": ["touch", "ran"]}}),
        (GRPO, {"model_config": TINY, "advantages": "unseen_canary:run"}),
    ],
)
def test_whatever_a_checkpoint_is_read_from_it_names_the_argument_to_give_again(cls, settings, source, canary):
    (canary / "a.ckpt").unlink(missing_ok=True)
    argument = next(name for name in ("reward_funcs", "env_id", "advantages") if name in settings)
    with pytest.raises(UsageError, match=rf"names {argument}=.*load_from_checkpoint\(…, {argument}=…\)"):
        cls.load_from_checkpoint(source(file_of(cls, settings, canary / "a.ckpt")))
    require_silence(canary, settings)
    assert not (canary / "ran").exists()


def test_a_setting_without_the_rule_would_be_found(canary):
    class Careless(PPO):
        hook: str | None = setting(default=None, says="an import path, without the rule")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.hook:
                __import__(self.hook.partition(":")[0])

    try_to_load(Careless, {**basis(PPO), "hook": "unseen_canary:run"})
    with pytest.raises(AssertionError, match="imported"):
        require_silence(canary, "hook")


def test_a_checkpoints_hparams_file_is_not_read(canary):
    (canary / "hparams.yaml").write_text("env_id: !!python/name:seen_canary.run\n")
    path = file_of(RolloutDataModule, basis(RolloutDataModule), canary / "a.ckpt")
    for cls in (RolloutDataModule, PPO):
        with pytest.raises(UsageError, match="hparams_file=.*leave it out"):
            cls.load_from_checkpoint(path, hparams_file=str(canary / "hparams.yaml"))
    require_silence(canary, "hparams_file")


def test_a_subclasss_own_argument_brings_no_code_either(canary):
    class Renamed(RolloutDataModule):
        def __init__(self, game: str = "CartPole-v1", **others: Any) -> None:
            super().__init__(env_id=game, **others)

    class Chosen(RolloutDataModule):
        def __init__(self, **others: Any) -> None:
            super().__init__(env_id="seen_canary:run", **others)

    path = file_of(RolloutDataModule, {"game": "unseen_canary:run"}, canary / "a.ckpt")
    with pytest.raises(UsageError, match="names game=unseen_canary:run"):
        Renamed.load_from_checkpoint(path)
    assert Renamed.load_from_checkpoint(path, game="seen_canary:run").env_id == "seen_canary:run"
    path = file_of(RolloutDataModule, {"n_envs": 3}, canary / "a.ckpt")
    assert Chosen.load_from_checkpoint(path).n_envs == 3  # its own code names the environment


def test_what_the_project_registers_loads_by_its_name():
    data = PromptDataModule(
        "addition", reward_funcs=["exact_answer", {"cosine_length": {"max_len": 9, "reward": "exact_answer"}}],
        environment="datamodules.language.tools:ToolEnvironment",
        environment_kwargs={"tools": ["datamodules.language.calculator:calculator"]},
    )  # fmt: skip
    content = io.BytesIO()
    torch.save({"datamodule_hyper_parameters": dict(data.hparams), "pytorch-lightning_version": "2.6.6"}, content)
    content.seek(0)
    loaded = PromptDataModule.load_from_checkpoint(content)
    assert loaded.hparams == data.hparams and len(loaded.rewards) == len(data.rewards)


def test_the_table_of_what_is_registered_is_that_of_the_registries():
    assert {*OBJECTS["datamodules.language.rewards"]} == {*FUNCTIONS, *FACTORIES}
    assert {*TASKS.values()} == {f"{m}:{name}" for m, names in OBJECTS.items() if ".tasks." in m for name in names}
    assert not [*code_of_advantages(dr_grpo)] and not [*code_of_advantages("rloo")]
    for module, names in OBJECTS.items():
        assert all(callable(load(f"{module}:{name}")) for name in names)
    assert issubclass(load("datamodules.language.worlds:Islands"), ToolEnvironment)
    assert type(make_task("addition")).__name__ in OBJECTS["datamodules.language.tasks.simple"]


# ---------------------------------------------------------------- resuming


def poisoned(path: Path, value: Any) -> None:
    """Writes a value into every argument of a checkpoint that a resumed run does not compare."""
    saved = torch.load(path, weights_only=True)
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        kept = {"observation_space", "action_space", "description", "lora", "seed", "model_config", "learning_rate"}
        saved[key] = {
            name: old if name in kept or isinstance(old, int | float) else value for name, old in saved[key].items()
        }
    torch.save(saved, path)


def control() -> tuple[Any, Any]:
    return PPO(), RolloutDataModule("CartPole-v1", n_envs=1, n_steps=8, batch_size=8, eval_freq=0, total_timesteps=64)


def language() -> tuple[Any, Any]:
    data = PromptDataModule("addition", batch_size=4, num_generations=2, eval_steps=0, n_train=16)
    return GRPO(model_config=TINY, max_completion_length=4, completions_steps=0, learning_rate=1e-3), data


@pytest.mark.long
@pytest.mark.parametrize("make", [control, language])
def test_a_resumed_run_takes_no_names_from_its_checkpoint(make, canary):
    module, data = make()
    fit(module, data, max_steps=2).save_checkpoint(canary / "run.ckpt")
    whole = (canary / "run.ckpt").read_bytes()
    for value in (*USED, {"class_path": "unseen_canary.run"}, "org/kernel"):
        (canary / "run.ckpt").write_bytes(whole)
        poisoned(canary / "run.ckpt", value)
        module, data = make()
        assert fit(module, data, ckpt_path=canary / "run.ckpt", max_steps=3).global_step == 3
        require_silence(canary, value)


@pytest.mark.long
def test_a_resumed_run_takes_the_names_that_its_user_gives_again(tmp_path):
    for _ in range(2):
        module, data = language()
        data = PromptDataModule(**{**data.hparams, "reward_funcs": ["tests.test_named_code:one"]})
        path = tmp_path / "run.ckpt" if (tmp_path / "run.ckpt").exists() else None
        trainer = fit(module, data, ckpt_path=path, max_steps=2 if path is None else 3)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert trainer.global_step == 3
    with pytest.raises(UsageError, match="give it again"):
        PromptDataModule.load_from_checkpoint(tmp_path / "run.ckpt")
    again = PromptDataModule.load_from_checkpoint(tmp_path / "run.ckpt", reward_funcs=["tests.test_named_code:one"])
    assert again.hparams["reward_funcs"] == ["tests.test_named_code:one"]


def one(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """A reward function of one's own."""
    return [float(len(text)) for text in completions]


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("where", ["directory", "description", "part"])
def test_a_files_config_names_no_kernel_of_a_repository(where, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", pytest.fail)
    from transformers import AutoConfig

    from rl_modules.language.models import make_model

    if where == "part":
        config = AutoConfig.for_model("gemma3")
        config.text_config._attn_implementation = "org/kernel"
    else:
        config = AutoConfig.for_model("qwen2", **TINY, attn_implementation="org/kernel")
    if where == "directory":
        config._attn_implementation = None
        config.save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "attn_implementation": "org/kernel"}))
        config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="attn_implementation=org/kernel.*give it again as attn_implementation"):
        make_model(config)
    make_model(AutoConfig.for_model("qwen2", **TINY), attn_implementation="sdpa")
