"""Two processes with half the rows each learn from dialogues and mixtures what one process learns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules import PromptDataModule
from rl_modules import GRPO
from tests.datamodules.language.dialogue_cases import data_of, folder_of_tokenizer, module_of
from tests.datamodules.language.test_mixture import grpo
from tests.ranks import on_ranks
from tests.training import fit

MIXTURE: dict[str, Any] = {
    "task": [{"name": "addition", "weight": 2}, {"name": "sort"}], "n_eval": 0, "num_generations": 4,
    "reward_funcs": [{"length_reward": {"target": 2}}],
}  # fmt: skip


def sgd(parameters: Any) -> torch.optim.Optimizer:
    # Its step is the gradient: a difference in one is a difference in the other.
    return torch.optim.SGD(parameters, lr=0.1)


def in_turns(name: str, **arguments: Any) -> Callable[[str, int], Any]:
    """A model and dialogues of one of the environments for tests."""
    data = {key: arguments.pop(key) for key in ("env_timeout_s",) if key in arguments}

    def make(folder: str, batch_size: int) -> Any:
        module = module_of(GRPO, folder, optimizer=sgd, max_grad_norm=None, loss_type="dapo", **arguments)
        return module, data_of(name, batch_size=batch_size, **data)

    return make


CASES: dict[str, Callable[[str, int], Any]] = {
    "reward to go": in_turns("Count", reward_to_go=True),
    "one to three turns": in_turns("Short"),
    "dialogues that fail": in_turns("Fragile", env_timeout_s=0.3),
    "mixture": lambda _, n: (grpo(optimizer=sgd, max_grad_norm=None), PromptDataModule(batch_size=n, **MIXTURE)),
    "curriculum": lambda _, n: (
        grpo(optimizer=sgd, max_grad_norm=None),
        PromptDataModule(batch_size=n, curriculum="learnable", **MIXTURE),
    ),
}


def train(ranks: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """Every case's weights after three steps."""
    results = {}
    for case, make in CASES.items():
        module, data = make(folder, 16 // ranks)
        fit(module, data, max_steps=3, devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        results[case] = dict(module.model.state_dict())
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, list[dict]]:
    path: Path = tmp_path_factory.mktemp("ranks")
    folder = folder_of_tokenizer(path / "tokenizer")
    return train(1, folder), *on_ranks(lambda: train(2, folder), path / "ranks")  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_learns(case: str, trained: Any, tmp_path: Path) -> None:
    one, first, second = (weights[case] for weights in trained)
    module, data = CASES[case](folder_of_tokenizer(tmp_path / "tokenizer"), 16)
    fit(module, data, max_steps=0)
    start = module.model.state_dict()
    for name, weight in one.items():
        torch.testing.assert_close(first[name], weight, atol=1e-6, rtol=1e-4)
        assert torch.equal(first[name], second[name])
    assert max(float((weight - start[name]).abs().max()) for name, weight in one.items()) > 1e-4
