"""The tables for people who come from another library name what exists, there and here."""

import collections
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import datamodules
import rl_modules
from tests.training import fit

PAGES = Path(__file__).parents[1] / "docs" / "how_to"


def arguments(*classes: type) -> dict[str, Any]:
    """The arguments of constructors and of those that they extend, with their defaults."""
    found: dict[str, Any] = {}
    for base in (base for cls in classes for base in inspect.getmro(cls) if "__init__" in base.__dict__):
        for name, parameter in inspect.signature(base).parameters.items():
            found.setdefault(name, parameter.default)
    return found


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Both cells of each row of a page's tables of two columns."""
    yield from ((theirs, ours) for theirs, ours in cells(page, 2))


def cells(page: str, n_columns: int) -> Iterator[list[str]]:
    """The cells of each row of a page's tables of so many columns."""
    for line in (PAGES / page).read_text("utf-8").splitlines():
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
