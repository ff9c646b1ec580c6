"""A whole number may come as a float, such as 1e6; it is stored as an int, for torch takes no float as a size."""

from functools import partial
from typing import Any

import pytest

from datamodules import (
    InstructionDataModule,
    PreferenceDataModule,
    PromptDataModule,
    ReplayDataModule,
    RolloutDataModule,
)
from rl_modules import GRPO, SFT, TQC, RecurrentA2C, RecurrentPPO
from rl_modules.common.errors import UsageError
from tests.training import fit

REPLAY = partial(ReplayDataModule, "CartPole-v1", total_timesteps=300, learning_starts=50, eval_freq=0)
ROLLOUTS = partial(RolloutDataModule, "CartPole-v1", total_timesteps=64)
MEMORY = {"sequence_length": 4, "burn_in": 2, "lstm_hidden_size": 8, "n_lstm_layers": 2}
CASES: dict[str, tuple[Any, dict[str, int]]] = {
    "replay": (
        REPLAY, {"n_envs": 1, "buffer_size": 1000, "n_steps": 3, "gradient_steps": 2,
        "rollouts_per_epoch": 2, "checkpoint_buffer_size": 100, "stats_window_size": 10, "train_freq": 2},
    ),
    "hindsight": (REPLAY, {"n_sampled_goal": 4}),
    "rollouts": (ROLLOUTS, {"n_envs": 2, "n_steps": 8, "batch_size": 8, "n_epochs": 2, "rollouts_per_epoch": 2}),
    "memory": (RecurrentPPO, MEMORY),
    "memory of A2C": (RecurrentA2C, MEMORY),
    "TQC": (TQC, {"n_quantiles": 9, "top_quantiles_to_drop_per_net": 1, "n_critics": 3}),
    "GRPO": (GRPO, {"max_completion_length": 8, "top_k": 4, "warmup_steps": 2, "max_rows_in_flight": 4}),
    "SFT": (SFT, {"max_completion_length": 8}),
    "prompts": (
        partial(PromptDataModule, "addition"), {"num_generations": 4, "steps_per_generation": 2, "n_eval": 8, "seed": 1,
        "async_generations": 1, "ptx_batch_size": 2, "reward_workers": 2, "batch_size": 8},
    ),
    "instructions": (partial(InstructionDataModule, "addition"), {"max_length": 16, "streaming_buffer": 9}),
    "preferences": (partial(PreferenceDataModule, "addition"), {"max_length": 16, "n_demonstrations": 8}),
}  # fmt: skip


#: Compared only (`learning_starts`), a clock, and what only a constructor reads.
NO_SIZES = {"learning_starts", "_started_s", "n_quantiles", "top_quantiles_to_drop_per_net"}


def numbers(made: Any) -> dict[str, str]:
    """Numbers that a module or datamodule reads, as Python writes them; an attribute before the hyperparameter."""
    found = {**made.hparams, **vars(made), **vars(getattr(made, "rewards", made))}
    return {k: repr(v) for k, v in found.items() if isinstance(v, int | float) and k not in NO_SIZES}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_float_is_stored_as_an_int(name: str) -> None:
    make, arguments = CASES[name]
    assert numbers(make(**{name: float(value) for name, value in arguments.items()})) == numbers(make(**arguments))


@pytest.mark.parametrize(
    ("make", "name"),
    [(REPLAY, "gradient_steps"), (REPLAY, "checkpoint_buffer_size"), (TQC, "top_quantiles_to_drop_per_net"),
     (partial(PromptDataModule, "addition"), "async_generations")],
)  # fmt: skip
def test_a_fraction_is_refused(make: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=2.5 must be a whole number"):
        make(**{name: 2.5})


@pytest.mark.long
def test_a_run_takes_whole_floats() -> None:
    sizes = {"lstm_hidden_size": 8.0, "sequence_length": 4.0, "burn_in": 2.0}
    data = ROLLOUTS(n_envs=2.0, n_steps=8.0, batch_size=8.0)  # type: ignore[arg-type]
    fit(RecurrentPPO(**sizes), data)  # type: ignore[arg-type]
    assert data.num_timesteps == 64
