"""A LightningDataModule of the user's own, with nothing of this project but what the contract states."""

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils.data import DataLoader, default_collate

from rl_modules import DQN, PPO
from rl_modules.common.errors import UsageError
from rl_modules.contract import ExperienceSource
from tests.training import fit


class Recorded(L.LightningDataModule):
    """Transitions of a file, as torch's own loader hands them out."""

    seed = 0
    env_name = "recorded"
    ranks_differ_in_size = False
    partial_return = 0.0
    observation_space = spaces.Box(-1, 1, (3,))
    action_space = spaces.Discrete(2)
    total_timesteps = 64

    def __init__(self) -> None:
        super().__init__()
        self.num_timesteps = 0
        drawn = np.random.default_rng(0).normal(size=(32, 7)).astype(np.float32)
        self.rows = [
            {"observation": row[:3], "next_observation": row[3:6], "reward": row[6:], "action": i % 2,
             "n_steps": 1, "terminated": i % 5 == 0} for i, row in enumerate(drawn)
        ]  # fmt: skip

    @property
    def is_complete(self) -> bool:
        return self.num_timesteps >= self.total_timesteps

    def metrics_over_ranks(self) -> dict[str, float]:
        return {}

    def transition_model(self) -> None:
        return None

    def train_dataloader(self) -> DataLoader:
        def as_minibatch(rows):
            self.num_timesteps += len(rows)
            return self.trainer.lightning_module.prepare(default_collate(rows))

        return DataLoader(self.rows, batch_size=8, collate_fn=as_minibatch)

    def state_dict(self):
        return {"num_timesteps": self.num_timesteps}

    def load_state_dict(self, state):
        self.num_timesteps = state["num_timesteps"]


def test_it_trains_as_the_equation_says() -> None:
    model, data = DQN(net_arch=[4], learning_rate=0.1, optimizer=torch.optim.SGD, gamma=0.9), Recorded()
    fit(model, data, max_steps=0)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    trainer = fit(model, data, max_steps=1)
    # One step of SGD on the Huber loss of the TD error, computed here.
    network = type(model)(net_arch=[4], observation_space=data.observation_space, action_space=data.action_space)
    network.configure_model()
    network.network.load_state_dict(before)
    batch = default_collate(data.rows[:8])
    with torch.no_grad():
        following = network.network(batch["next_observation"]).amax(1)
    target = batch["reward"][:, 0] + 0.9 * ~batch["terminated"] * following
    q = network.network(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
    torch.nn.functional.smooth_l1_loss(q, target).backward()
    torch.nn.utils.clip_grad_norm_(network.network.parameters(), 10.0)
    for (name, parameter), trained in zip(network.network.named_parameters(), model.network.parameters(), strict=True):
        torch.testing.assert_close(trained, before[name] - 0.1 * parameter.grad)
    assert trainer.global_step == 1


def test_it_resumes(tmp_path) -> None:
    def run(epochs, ckpt_path=None):
        model = DQN(net_arch=[4])
        return model, fit(model, Recorded(), ckpt_path, max_epochs=epochs)

    whole, _ = run(4)
    _, trainer = run(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, trainer = run(4, tmp_path / "half.ckpt")
    assert trainer.datamodule.num_timesteps == 128
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [n for n in vars(Recorded) if n in dir(ExperienceSource) and not n.startswith("_")])
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Recorded, name)
    with pytest.raises(UsageError, match=f"Recorded has no {name}, which DQN reads of its datamodule; subclass Replay"):
        fit(DQN(), Recorded(), max_steps=1)


def test_a_datamodule_of_another_project_is_answered_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="LightningDataModule has no .*num_timesteps.*, which PPO reads .*Rollout"):
        fit(PPO(), L.LightningDataModule(), max_steps=1)
