"""Checks that a datamodule fits its algorithm."""

from collections.abc import Mapping
from typing import Any

from rl_modules.common.contract import ExperienceSource
from rl_modules.common.errors import UsageError

#: The datamodule that makes each kind of experience.
DATAMODULES = {
    "rollouts": "RolloutDataModule",
    "replay": "ReplayDataModule",
    "prompts": "PromptDataModule",
    "preferences": "PreferenceDataModule",
    "demonstrations": "InstructionDataModule",
}


#: Attributes of a datamodule that an algorithm reads.
SOURCE_PARTS = tuple(
    sorted({*ExperienceSource.__annotations__, *(name for name in vars(ExperienceSource) if not name.startswith("_"))})
)


def check_pairing(module: Any, data: Any) -> None:
    """Refuses a datamodule that does not fit the module. Classes that state no kind are not checked.

    Args:
        module: ``experience.kind`` or ``learns_from`` states what it learns from.
        data: ``kind`` states what it makes.

    Raises:
        UsageError: names both, and the datamodule that fits.
    """
    wanted = getattr(getattr(module, "experience", None), "kind", None) or getattr(module, "learns_from", None)
    made = getattr(data, "kind", None)
    if wanted is None or made is None or wanted == made:
        return
    fitting = DATAMODULES.get(wanted, f"a datamodule of kind {wanted!r}")
    raise UsageError(f"{type(module).__name__} learns from {wanted}, {type(data).__name__} makes {made}; use {fitting}")


def check_source(module: Any, source: Any, fitting: bool) -> None:
    """Refuses a datamodule that lacks what a control algorithm reads of it.

    Args:
        module: the algorithm, with ``experience``.
        source: the datamodule of its run.
        fitting: whether the run is a ``fit``; the others need the spaces alone.

    Raises:
        UsageError: names what is missing, and the datamodule to subclass.
    """
    # The values of properties are not read, because they may not exist yet.
    parts = SOURCE_PARTS if fitting else ("observation_space", "action_space")
    missing = [name for name in parts if not hasattr(type(source), name) and not hasattr(source, name)]
    if missing:
        raise UsageError(f"{type(source).__name__} has no {', '.join(missing)}, which {type(module).__name__} reads of "
                         f"its datamodule; subclass {DATAMODULES[module.experience.kind]}, or define what "
                         "rl_modules.common.contract.ExperienceSource states")  # fmt: skip


def check_batch(module: Any, batch: Any, step: str) -> None:
    """Refuses a batch that a language algorithm can't read, such as one of a ``DataLoader`` of token ids.

    Batches of a user-defined step are not checked.

    Args:
        module: ``learns_from`` states which datamodule fits.
        batch: argument of the step.
        step: name of the method, such as ``training_step``.

    Raises:
        UsageError: names what came, and the datamodule that fits.
    """
    if isinstance(batch, Mapping) and "tokens" in batch:
        return
    fitting = DATAMODULES.get(getattr(module, "learns_from", ""))
    if fitting is None or not getattr(type(module), step).__module__.startswith("rl_modules."):
        return
    came = f"the fields {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise UsageError(f"{type(module).__name__} reads batches that have tokens, and got {came}: give the Trainer "
                     f"datamodule={fitting}(...), or batches as rl_modules.language.contract states them")  # fmt: skip
