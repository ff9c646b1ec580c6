"""Which datamodule goes with which algorithm."""

from typing import Any

from rl_modules.common.errors import UsageError

#: The datamodule that makes each kind of experience.
DATAMODULES = {
    "rollouts": "RolloutDataModule",
    "replay": "ReplayDataModule",
    "prompts": "PromptDataModule",
    "preferences": "PreferenceDataModule",
    "demonstrations": "InstructionDataModule",
}


def check_pairing(module: Any, data: Any) -> None:
    """Refuses a module and a datamodule that don't belong together. Classes that state no kind are not judged.

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
