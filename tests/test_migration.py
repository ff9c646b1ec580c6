"""The tables for people who come from another library name what exists, there and here."""

import ast
import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning as L
import pytest
from torch.nn.parallel import DistributedDataParallel

import datamodules
import rl_modules
from recipes.callbacks import Checkpoints
from recipes.cli.options import ALONE
from tests.training import fit

PAGES = Path(__file__).parents[1] / "docs" / "how_to"


def arguments(*classes: type) -> dict[str, Any]:
    """The arguments of constructors, and of those that get what these pass on, with their defaults."""
    found: dict[str, Any] = {}
    for cls in classes:
        for base in (base for base in inspect.getmro(cls) if "__init__" in base.__dict__):
            parameters = inspect.signature(base).parameters
            for name, parameter in parameters.items():
                found.setdefault(name, parameter.default)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return found


def text_of(page: str) -> str:
    """A page, and the one that has its every argument."""
    more = PAGES / page.replace(".md", "_arguments.md")
    return (PAGES / page).read_text("utf-8") + (more.read_text("utf-8") if more.is_file() else "")


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Both cells of each row of a page's tables of two columns."""
    yield from ((theirs, ours) for theirs, ours in cells(page, 2))


def cells(page: str, n_columns: int) -> Iterator[list[str]]:
    """The cells of each row of a page's tables of so many columns."""
    for line in text_of(page).splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            found = re.split(r"(?<!\\)\|", line)[1:-1]
            if len(found) == n_columns:
                yield found


def names(cell: str) -> list[str]:
    """The bare names in a cell's code."""
    return [name for name in re.findall(r"`([^`]+)`", cell) if re.fullmatch(r"[a-z]\w*", name)]


@pytest.mark.parametrize("name", ["PPO", "A2C", "DQN", "SAC", "TD3", "DDPG"])
def test_settings_of_stable_baselines3_copy_over(name: str) -> None:
    peer = pytest.importorskip("stable_baselines3", reason="needs the test extra")
    data = datamodules.RolloutDataModule if name in ("PPO", "A2C") else datamodules.ReplayDataModule
    ours = arguments(getattr(rl_modules, name), data)
    theirs = {key: p.default for key, p in inspect.signature(getattr(peer, name)).parameters.items()}
    places = {"policy", "env", "policy_kwargs", "tensorboard_log", "verbose", "device", "_init_setup_model",
              "rollout_buffer_class", "rollout_buffer_kwargs", "replay_buffer_class", "replay_buffer_kwargs",
              "optimize_memory_usage", "use_sde_at_warmup"}  # fmt: skip
    assert theirs.keys() - ours.keys() <= places
    # None, auto: the algorithm states its own value.
    fixed = {key for key in theirs.keys() & ours.keys() if ours[key] not in (None, "auto")} - {"seed"}
    assert len(fixed) >= 5
    assert {key: ours[key] for key in fixed} == {key: theirs[key] for key in fixed}


@pytest.mark.parametrize("page", ["from_sb3.md", "from_trl.md", "from_cleanrl.md"])
def test_every_name_of_the_right_column_exists(page: str) -> None:
    known = {"terminated", "truncated", "fit", *arguments(L.Trainer)}
    for module in (rl_modules, datamodules):
        known |= {name for cls in module.__all__ for name in arguments(getattr(module, cls))}
    assert not {name for _, ours in rows(page) for name in names(ours)} - known
    for _, ours in rows(page):
        for part, name in re.findall(r"--(model|data|trainer)\.(\w+)", ours):
            classes = {
                "model": [rl_modules.PPO, rl_modules.C51, rl_modules.PQN],
                "data": [datamodules.RolloutDataModule, datamodules.ReplayDataModule],
                "trainer": [L.Trainer],
            }[part]
            assert name in arguments(*classes), f"{page}: --{part}.{name}"
        for name in re.findall(r"`([A-Z]\w+)`", ours):
            assert any(hasattr(module, name) for module in (rl_modules, datamodules, L)), f"{page}: {name}"


def test_names_that_are_trl_s_are_trl_s() -> None:
    trl = pytest.importorskip("trl", reason="needs the test extra")
    config = {"`GRPO`": trl.GRPOConfig, "`PromptDataModule`": trl.GRPOConfig, "the module": trl.GRPOConfig}
    checked = 0
    for theirs, ours in rows("from_trl.md"):
        place = ours.partition("the same names, in ")[2].strip()
        if place:
            fields = {field.name for field in dataclasses.fields(config[place])}
            # A reward's weight is no setting of the trainer's mathematics here: it stands beside the function.
            assert set(names(theirs)) <= fields
            cls = datamodules.PromptDataModule if place == "`PromptDataModule`" else rl_modules.GRPO
            assert set(names(theirs)) <= arguments(cls).keys(), f"{theirs} in {cls.__name__}"
            checked += len(names(theirs))
    assert checked > 10


def test_defaults_that_differ_are_trl_s() -> None:
    trl = pytest.importorskip("trl", reason="needs the test extra")
    given = {"num_generations": trl.RLOOConfig, "disable_dropout": trl.GRPOConfig}
    checked = 0
    for what, theirs, _ in cells("from_trl.md", 3):
        for name, value in [*re.findall(r"`(\w+)=([^`]+)`", theirs), *((name, theirs.strip()) for name in names(what))]:
            defaults = {field.name: field.default for field in dataclasses.fields(given.get(name, trl.SFTConfig))}
            if name in defaults and re.fullmatch(r"[\d,]+|true|false", value):
                stated = {"true": True, "false": False}.get(value, value.replace(",", ""))
                assert str(defaults[name]).removesuffix(".0") == str(stated), f"{name}: TRL has {defaults[name]}"
                checked += 1
    assert checked >= 6


def test_batches_count_as_the_page_says() -> None:
    """Independent source: TRL's own generation batch, and the prompts that a run asks for."""
    trl = pytest.importorskip("trl", reason="needs the test extra")
    common = {"num_generations": 4, "use_cpu": True, "bf16": False}
    for given in (None, 4, 8):
        theirs = trl.GRPOConfig(
            "folder", per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=given, **common
        )
        ours = datamodules.PromptDataModule(
            "addition", num_generations=4, batch_size=2 * 4, steps_per_generation=(given or 4) // 4
        )
        assert ours.generation_size == theirs.generation_batch_size
        assert ours.steps_per_generation * 4 == theirs.steps_per_generation


@pytest.mark.long
def test_passes_over_prompts_take_as_many_epochs_as_the_page_says() -> None:
    passes, prompts, g, batch_size, steps = 3, 16, 4, 8, 2
    asked: collections.Counter[str] = collections.Counter()
    rows_of_steps = []

    def count(prompts: list[str], **columns: Any) -> list[float]:
        asked.update(prompts[::g])
        return [0.0] * len(prompts)

    class Spy(rl_modules.GRPO):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rows_of_steps.append(self.rows)
            self.rows = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rows = getattr(self, "rows", 0) + batch["micro_rows"]
            return super().training_step(batch, batch_idx)

    data = datamodules.PromptDataModule("addition", num_generations=g, batch_size=batch_size, reward_funcs=[count],
                                        steps_per_generation=steps, n_train=prompts, eval_steps=0)  # fmt: skip
    model = Spy(model_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
                max_completion_length=2)  # fmt: skip
    fit(model, data, max_epochs=passes * prompts * g // (batch_size * steps), accumulate_grad_batches=4)
    assert len(asked) == prompts and set(asked.values()) == {passes}
    assert set(rows_of_steps) == {batch_size}


# ---------------------------------------------------------------- the tables of every argument

#: Where the classes are that the pages name without a path.
PLACES = (
    "rl_modules", "datamodules", "lightning", "recipes.callbacks", "rl_modules.action_noise", "gymnasium.vector",
    "gymnasium.wrappers", "lightning.pytorch.callbacks", "lightning.pytorch.strategies", "lightning.pytorch.loggers",
    "lightning.pytorch.tuner", "peft",
)  # fmt: skip
#: The public modules of Stable-Baselines3 and sb3-contrib.
SB3 = ("stable_baselines3", *(f"stable_baselines3.common.{name}" for name in (
    "vec_env", "env_util", "callbacks", "monitor", "buffers", "noise", "atari_wrappers", "torch_layers", "evaluation")),
    "sb3_contrib", "sb3_contrib.common.wrappers", "sb3_contrib.common.maskable.callbacks")  # fmt: skip
#: Modules and datamodules by the peer's algorithms.
COUNTERPARTS = {
    "from_sb3.md": {
        "on-policy": {name: (getattr(rl_modules, name.removeprefix("Maskable")), datamodules.RolloutDataModule)
                      for name in ("PPO", "A2C", "TRPO", "RecurrentPPO", "MaskablePPO")},
        "off-policy": {name: (getattr(rl_modules, name), datamodules.ReplayDataModule)
                       for name in ("DQN", "QRDQN", "SAC", "TQC", "CrossQ", "TD3", "DDPG")},
        "random search": {"ARS": (rl_modules.ARS, datamodules.RolloutDataModule)},
    },
    "from_trl.md": {
        "trained": {
            "SFT": (rl_modules.SFT, datamodules.InstructionDataModule),
            "Reward": (rl_modules.RewardModel, datamodules.PreferenceDataModule),
            "DPO": (rl_modules.DPO, datamodules.PreferenceDataModule),
            "KTO": (rl_modules.KTO, datamodules.PreferenceDataModule),
            "GRPO": (rl_modules.GRPO, datamodules.PromptDataModule),
            "RLOO": (rl_modules.RLOO, datamodules.PromptDataModule),
        }
    },
}  # fmt: skip
#: Pages, and the first columns of their tables of every argument.
OTHERS = "argument of a class or function"
KINDS = [("from_trl.md", kind) for kind in ("config field", "trainer argument", "script field", OTHERS)] + [
    ("from_sb3.md", kind) for kind in ("argument", "key of policy_kwargs", "argument of a method", OTHERS)
]
Row = tuple[list[str], list[str], str]


def table(page: str, kind: str) -> list[Row]:
    """The rows of the tables with the columns ``kind``, of and here: their names, owners and counterparts."""
    found: list[Row] = []
    inside = False
    for line in text_of(page).splitlines():
        columns = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if columns[1:] == ["of", "here"]:
            inside = columns[0] == kind
        elif not columns:
            inside = False
        elif inside and columns[0].startswith("`"):
            found.append((re.findall(r"`(\w+)`", columns[0]), columns[1].split(", "), columns[2]))
    assert found, f"{page} has no table with the columns {kind}, of, here"
    return found


def peer_arguments(page: str, kind: str) -> dict[str, dict[str, Any]]:
    """The peer's arguments with their defaults, by what the tables of one kind call their owners."""
    if page == "from_trl.md":
        trl = pytest.importorskip("trl", reason="needs the bench extra")
        ends = {"config field": "Config", "trainer argument": "Trainer"}
        owners = [*COUNTERPARTS[page]["trained"], "Distillation"] if kind in ends else labels(page, kind)
        return {name: parameters(getattr(trl, name.strip("`") + ends.get(kind, ""))) for name in owners}
    base, contrib = (pytest.importorskip(name, reason="needs the bench extra")
                     for name in ("stable_baselines3", "sb3_contrib"))  # fmt: skip
    names = [name for group in COUNTERPARTS[page].values() for name in group]
    algorithms = {name: getattr(base, name, None) or getattr(contrib, name) for name in names}
    if kind == "argument":
        return {name: parameters(cls) for name, cls in algorithms.items()}
    if kind == "key of policy_kwargs":
        return {name: parameters(*cls.policy_aliases.values()) for name, cls in algorithms.items()}
    if kind == "argument of a method":
        return {label: parameters(*(getattr(cls, label.strip("`"), list) for cls in algorithms.values()))
                for label in labels(page, kind)}  # fmt: skip
    return {label: parameters(resolve(label.strip("`"), SB3)) for label in labels(page, kind)}


def labels(page: str, kind: str) -> list[str]:
    """What the tables of one kind call the owners of arguments."""
    return list(dict.fromkeys(label for _, of, _ in table(page, kind) for label in of))


def parameters(*functions: Any) -> dict[str, Any]:
    """The arguments of functions and classes with their defaults; of a dataclass its fields."""
    found = {name: p.default for f in functions if f is not list for name, p in inspect.signature(f).parameters.items()}
    return {name: default for name, default in found.items() if name != "self"}


def resolve(name: str, places: Iterable[str] = PLACES) -> Any:
    """A class or function by its bare name."""
    for place in places:
        with contextlib.suppress(ModuleNotFoundError):  # an extra
            if (found := getattr(importlib.import_module(place), name, None)) is not None:
                return found
    raise AssertionError(f"{name} does not exist")


def entries(page: str, kind: str, theirs: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Each owner, argument and counterpart of the tables; "all" and a group are those owners that have the argument."""
    groups: dict[str, Any] = {"all": theirs, **COUNTERPARTS[page]}
    for row, of, here in table(page, kind):
        for name, label in ((name, label) for name in row for label in of):
            found = [owner for owner in groups[label] if name in theirs[owner]] if label in groups else [label]
            assert found, f"{name}: nothing in {label} has it"
            yield from ((owner, name, here) for owner in found)


@functools.lru_cache
def known_here(page: str, owner: str) -> dict[str, Any]:
    """The arguments of an algorithm's counterparts and of the Trainer; for another owner those of all counterparts."""
    algorithms = {name: pair for group in COUNTERPARTS[page].values() for name, pair in group.items()}
    classes = algorithms.get(owner) or [cls for pair in algorithms.values() for cls in pair]
    return arguments(*classes, L.Trainer)


def check_code(code: str, known: Collection[str]) -> None:
    """Asserts that the arguments, options, classes and methods in a piece of code exist."""
    for option in re.findall(r"--([\w.]+)", code) if code.startswith(("rl ", "--")) else ():
        group, _, rest = option.partition(".")
        assert option in ALONE or rest in arguments({"trainer": L.Trainer, "checkpoint": Checkpoints}[group]), code
    for text in (code, f"f({code})"):
        with contextlib.suppress(SyntaxError):  # else a path or a command
            check_tree(ast.parse(text.replace("…", "..."), mode="eval").body, known)
            break


def check_tree(node: ast.expr, known: Collection[str]) -> None:
    text = ast.unparse(node)
    if isinstance(node, ast.Name):
        assert text in known or (text[0].isupper() and resolve(text)), f"{text} does not exist here"
    elif isinstance(node, ast.Attribute) and text[0].isupper():
        assert hasattr(resolve(text.split(".")[0]), node.attr), f"{text} does not exist"
    elif isinstance(node, ast.Attribute) and text.split(".")[0] in ("rl_modules", "datamodules", "recipes"):
        assert locate(text), f"{text} does not exist"
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        taken: Collection[str] = known
        if called != "f":
            check_tree(node.func, known)
            if not called[0].isupper() or "." in called:
                return
            more = [DistributedDataParallel] if called == "DDPStrategy" else []
            taken = arguments(resolve(called), *more)
        for keyword in node.keywords:
            assert keyword.arg in taken, f"{called} takes no {keyword.arg}"
            if isinstance(keyword.value, ast.Call):
                check_tree(keyword.value, known)


@pytest.mark.parametrize(("page", "kind"), KINDS)
def test_the_page_lists_every_argument_of_the_peer(page: str, kind: str) -> None:
    theirs = peer_arguments(page, kind)
    missing = {owner: set(found) for owner, found in theirs.items()}
    for owner, name, _ in entries(page, kind, theirs):
        assert name in theirs[owner], f"{owner} has no {name}"
        missing[owner].discard(name)
        if owner == "GRPO" and "Distillation" in missing:  # as the page says
            missing["Distillation"].discard(name)
    assert {owner: names for owner, names in missing.items() if names} == {}


def test_the_pages_list_every_class_of_the_peers() -> None:
    """Those that a user makes: configs, trainers, algorithms, wrappers, callbacks, buffers, noises, extractors."""
    trl = pytest.importorskip("trl", reason="needs the bench extra")
    public = {name for name in dir(trl) if re.search("(Config|Arguments|Callback)$", name)}
    named = {label.strip("`") for kind in ("script field", OTHERS) for label in labels("from_trl.md", kind)}
    configs = {f"{name}Config" for name in peer_arguments("from_trl.md", "config field")}
    assert public - named - configs == {"RichProgressCallback"}  # without an argument

    peer_arguments("from_sb3.md", OTHERS)  # skips where the peer is missing
    classes = {name: cls for place in SB3 for name, cls in vars(importlib.import_module(place)).items()
               if inspect.isclass(cls) and cls.__module__.startswith(("stable_baselines3", "sb3_contrib"))}  # fmt: skip
    ends = ("Callback", "Env", "Wrapper", "Buffer", "Noise", "CNN", "Extractor")
    made = {cls for cls in classes.values() for base in cls.__mro__ if base.__name__.endswith(ends)}
    assert len(made) > 30
    named = {label.strip("`") for label in labels("from_sb3.md", OTHERS)}
    bases = {"VecEnv", "VecEnvWrapper", "BaseBuffer", "BaseFeaturesExtractor", "MlpExtractor", "CloudpickleWrapper"}
    assert {cls.__name__ for cls in made if parameters(cls)} - named == bases
    algorithms = {name for name, cls in classes.items() if hasattr(cls, "learn")}
    assert algorithms - peer_arguments("from_sb3.md", "argument").keys() <= {"BaseAlgorithm", "OnPolicyAlgorithm"}


@pytest.mark.parametrize(("page", "kind"), KINDS)
def test_what_the_page_names_here_exists(page: str, kind: str) -> None:
    for owner, name, here in entries(page, kind, peer_arguments(page, kind)):
        known = known_here(page, owner)
        if here.startswith("the same name"):
            assert name in known, f"{owner} has no {name} here"
        if owner not in ("ARS", "Distillation"):  # of which nothing is here, or which has no network of its own
            for code in re.findall(r"`([^`]+)`", here):
                check_code(code, known)


@pytest.mark.parametrize(("page", "kind"), [KINDS[0], *KINDS[4:6]])
def test_a_default_that_differs_is_on_the_page(page: str, kind: str) -> None:
    theirs = peer_arguments(page, kind)
    table_of_defaults = {name for what, *_ in cells(page, 3) for name in names(what)} if kind == "config field" else ()
    checked = 0
    for owner, name, here in entries(page, kind, theirs):
        default, ours = theirs[owner][name], known_here(page, owner).get(name)
        # A peer's class and its name here are compared elsewhere; None and auto are the algorithm's own value.
        if here.startswith("the same name") and isinstance(default, bool | int | float | str | None):
            checked += 1
            stated = "default" in here or name in table_of_defaults or ours in (None, "auto")
            assert ours == default or stated, f"{owner}: {name} is {default} there, {ours} here"
    assert checked > 20
