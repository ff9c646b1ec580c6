"""Two processes: each plays its own episodes, and all come to the same policy and the same decisions."""

from typing import Any

import lightning as L
import pytest
import torch

from rl_modules import A2C, PPO, REINFORCE, TRPO
from tests.training import fit, rollouts

pytestmark = pytest.mark.slow

ALGORITHMS = {
    "TRPO": (lambda: TRPO(batch_size=8), {}),
    "A2C": (lambda: A2C(), {}),
    "REINFORCE": (lambda: REINFORCE(psi="baseline"), {}),
    "PPO penalty": (lambda: PPO(policy_objective="penalty", target_kl=1e-3), {"batch_size": 8, "n_epochs": 3}),
}


class Agreement(L.Callback):
    """Fails unless all ranks hold the same numbers, though their experience differs."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        own = torch.cat([p.detach().reshape(-1) for p in pl_module.parameters()])
        decisions = torch.tensor([getattr(pl_module, "kl_coef", 0.0), getattr(pl_module, "rejected_updates", 0.0)])
        for name, x in (("weights", own), ("decisions", decisions)):
            everyone = pl_module.all_gather(x)
            assert torch.equal(everyone[0], everyone[1]), f"{name} differ: {everyone}"
        seen = pl_module.all_gather(trainer.datamodule.rollout["observation"])  # type: ignore[attr-defined]
        assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_agree(algorithm: str) -> None:
    make, data = ALGORITHMS[algorithm]
    fit(
        make(),
        rollouts("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=256, **data),
        devices=2,
        strategy="ddp_fork",
        callbacks=[Agreement()],
    )
