"""Updates of subclasses: what their methods get, which of their parts are trained, and in which precision."""

from typing import Any

import pytest
import torch
from torch import nn

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import DQN, PPO, SAC, TD3, TQC, TRPO, CrossQ, RecurrentPPO
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.gradients import averaged, gradients
from rl_modules.run import ControlRun
from tests.training import fit


def rollouts(**changes: Any) -> RolloutDataModule:
    settings = {"n_envs": 4, "n_steps": 16, "batch_size": 16, "n_epochs": 2, "total_timesteps": 256, "eval_freq": 0}
    return RolloutDataModule("CartPole-v1", **{**settings, **changes})


def replayed(env_id: str = "Pendulum-v1", **changes: Any) -> ReplayDataModule:
    settings = {"n_envs": 2, "buffer_size": 500, "learning_starts": 32, "train_freq": 4, "batch_size": 8,
                "total_timesteps": 128, "rollouts_per_epoch": 4, "eval_freq": 0}  # fmt: skip
    return ReplayDataModule(env_id, **{**settings, **changes})


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("base", [TD3, SAC, CrossQ])
def test_critic_loss_gets_one_value_per_critic_and_transition(base: type) -> None:
    class Absolute(base):  # type: ignore[misc, valid-type]
        def critic_loss(self, q: Any, target: Any, weight: Any) -> Any:
            assert q.shape == (2, 8) and target.shape == (8,)
            return (q - target).abs().mean(1).sum()

    fit(Absolute(net_arch=[8]), replayed())


def test_one_quantile_is_a_quantile_too() -> None:
    # Of one quantile τ = ½: half of the Huber loss, and the target's quantiles are its critics'.
    model = TQC(net_arch=[8], n_quantiles=1, top_quantiles_to_drop_per_net=0)
    fit(model, replayed())
    q, target = torch.tensor([[1.0, 4.0], [0.5, 0.0]]), torch.tensor([[1.5], [2.0]])
    huber = F.td_loss(q, target.T.expand(2, -1), "huber")
    assert float(model.critic_loss(q, target, None)) == pytest.approx(0.5 * float(huber), rel=1e-6)


# ---------------------------------------------------------------- parts of one's own


def test_value_loss_of_trpo_gets_all_fields_of_its_minibatch() -> None:
    class Clipped(TRPO):
        def prepare(self, rollout: Any) -> Any:
            return {**super().prepare(rollout), "old_value": rollout["value"]}

        def value_loss(self, value: Any, batch: Any) -> Any:
            # The value that acted is that of the same rows.
            assert batch["old_value"].shape == value.shape == batch["returns"].shape == batch["advantage"].shape
            torch.testing.assert_close(batch["returns"], batch["advantage"] + batch["old_value"])
            assert len(batch["observation"]) == len(value)
            return 2 * F.value_loss(value, batch["returns"], batch["old_value"], 0.2)

    fit(Clipped(net_arch=[8], batch_size=16), rollouts(batch_size=None, n_epochs=1))


def test_a_part_that_trpo_s_value_loss_reads_is_trained_and_others_stay() -> None:
    class Offset(TRPO):
        def build_network(self) -> None:
            super().build_network()
            self.offset = nn.Parameter(torch.zeros(()))
            self.idle = nn.Parameter(torch.ones(()))

        def value_loss(self, value: Any, batch: Any) -> Any:
            return super().value_loss(value + self.offset, batch)

    model = Offset(net_arch=[8])
    trainer = fit(model, rollouts(batch_size=None, n_epochs=1))
    assert model.offset.item() != 0 and model.idle.item() == 1
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert not optimized & {id(p) for p in model.network.parameters()}


def test_a_gradient_that_no_rank_has_stays_none() -> None:
    w, b, idle = (nn.Parameter(torch.tensor(x)) for x in ([1.0, 2.0], [3.0], [4.0]))
    found = gradients((w * torch.tensor([1.0, -2.0])).sum(), [w, b, idle])
    assert found[1] is None and found[2] is None
    # Another rank's: w twice as large, b's is 6, and nothing of idle.
    other = torch.tensor([2.0, -4.0, 6.0, 0.0, 1.0, 1.0, 0.0])
    means = averaged([w, b, idle], found, lambda flat: (flat + other) / 2)
    torch.testing.assert_close(means[0], torch.tensor([1.5, -3.0]))
    torch.testing.assert_close(means[1], torch.tensor([3.0]))
    assert means[2] is None
    assert averaged([], [], lambda flat: flat) == []


class Curious(SAC):
    """Has a part with a step of its own."""

    def build_network(self) -> None:
        super().build_network()
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        mine = list(self.model.parameters())
        error = (self.model(batch["observation"])[:, 0] - batch["reward"]).square().mean()
        self.step(mine, self.gradients_of(error, mine))
        return loss


def test_a_part_with_a_step_of_its_own_takes_no_other_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for ranks in (1, 2):
        if ranks == 2:  # of which every reduction is this rank's own value
            monkeypatch.setattr(ControlRun, "n_ranks", property(lambda self: 2, lambda self, n: None))
        models.append(Curious(net_arch=[8]))
        trainer = fit(models[-1], replayed())
        assert int(trainer.optimizers[0].state[models[-1].model.weight]["step"]) == models[-1].n_updates > 0
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name


@pytest.mark.parametrize("base", [SAC, TD3, TRPO])
def test_max_grad_norm_of_a_subclass_clips(base: type) -> None:
    norms: list[float] = []
    part = "value_network" if base is TRPO else "network.critics"
    before: dict[str, Any] = {}

    class Clipped(base):  # type: ignore[misc, valid-type]
        max_grad_norm = 1e-3

        def on_train_start(self) -> None:
            before.update({k: v.detach().clone() for k, v in self.named_parameters() if k.startswith(part)})

        def on_train_batch_end(self, *args: Any) -> None:
            norms.append(float(self.run.grad_norm))

    # Steps of plain gradient descent are as long as the gradients: each at most 1e-3.
    model = Clipped(net_arch=[8], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    data = rollouts(batch_size=None, n_epochs=1) if base is TRPO else replayed(total_timesteps=40)
    trainer = fit(model, data)
    after = {k: v.detach() for k, v in model.named_parameters() if k.startswith(part)}
    moved = float(torch.stack([(after[k] - before[k]).norm() for k in before]).norm())
    steps = trainer.global_step if base is not TRPO else 256 // 64 * model.n_critic_updates
    assert norms and 0 < moved <= 1.001e-3 * steps


# ---------------------------------------------------------------- modes and precision


class OwnNet(nn.Module):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, observation: Any) -> Any:
        return self.layers(observation)


def test_prepare_of_replay_runs_in_evaluation_mode() -> None:
    seen = []

    class Online(DQN):
        """Targets of the online network as it was before the round."""

        def target_values(self, observation: Any) -> Any:
            return self.q_values(self.network, observation)

        def prepare(self, sample: Any) -> Any:
            norm = self.network.module.layers[1]
            before = norm.running_mean.clone()
            one, two = (self.target_values(sample["next_observation"]) for _ in range(2))
            seen.append(torch.equal(one, two) and torch.equal(before, norm.running_mean))
            return super().prepare(sample)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.network.training
            return super().training_step(batch, batch_idx)

    fit(Online(network=OwnNet), replayed("CartPole-v1"))
    assert seen and all(seen)


def own_layer(base: type) -> Any:
    """A subclass whose act, prepare and training_step send observations through a layer of its own."""

    class Own(base):  # type: ignore[misc, valid-type]
        def build_network(self) -> None:
            super().build_network()
            self.layer = nn.Linear(self.observation_space.shape[0], 1)

        def act(self, observation: Any, generator: Any = None, deterministic: bool = False, **memory: Any) -> Any:
            self.layer(observation)
            return super().act(observation, generator, deterministic, **memory)

        def prepare(self, experience: Any) -> Any:
            self.layer(experience["next_observation"])
            return super().prepare(experience)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.layer(batch["observation"])
            return super().training_step(batch, batch_idx)

    return Own


@pytest.mark.parametrize("base", [PPO, TRPO, RecurrentPPO, DQN, SAC])
def test_layers_of_a_subclass_compute_in_double_precision(base: type, tmp_path: Any) -> None:
    cls = own_layer(base)
    model = cls() if base is RecurrentPPO else cls(net_arch=[8])
    env_id = "Pendulum-v1" if base is SAC else "CartPole-v1"
    evaluated: dict[str, Any] = {"n_eval_episodes": 1, "eval_freq": 64}
    whole = {"n_epochs": 1, "batch_size": None} if base is TRPO else {}
    data = replayed(env_id, **evaluated) if base in (DQN, SAC) else rollouts(**evaluated, **whole)
    trainer = fit(model, data, precision="64-true")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = cls.load_from_checkpoint(tmp_path / "last.ckpt")
    observation = model.observation_space.sample()
    assert loaded.predict(observation, deterministic=True)[0] == model.predict(observation, deterministic=True)[0]


# ---------------------------------------------------------------- PPO and its memory


def test_target_kl_holds_with_a_minibatch_loss_of_one_s_own() -> None:
    class Own(PPO):
        def minibatch_loss(self, policy: Any, value: Any, batch: Any) -> Any:
            return self.policy_loss(policy.log_prob(batch["action"]), batch) + 0.5 * self.value_loss(value, batch)

    class OwnRecurrent(RecurrentPPO):
        minibatch_loss = Own.minibatch_loss

    for base, cls in ((PPO, Own), (RecurrentPPO, OwnRecurrent)):
        taken = []
        for kind in (base, cls):
            model = kind(target_kl=1e-9, learning_rate=1e-2, ent_coef=0.0)
            trainer = fit(model, rollouts())
            taken.append(int(next(iter(trainer.optimizers[0].state.values()))["step"]))
        # The first minibatch of each of the four rollouts is on-policy; the next one exceeds the bound.
        assert taken == [4, 4]


def test_a_recurrent_loss_gets_the_observations() -> None:
    class Reads(RecurrentPPO):
        def value_loss(self, value: Any, batch: Any) -> Any:
            assert batch["observation"].shape == (len(value), 4)
            return super().value_loss(value, batch)

    fit(Reads(), rollouts())
    fit(Reads(), rollouts(autoreset_mode="next_step"))


def test_a_field_of_a_subclass_is_cut_into_sequences() -> None:
    class Adds(RecurrentPPO):
        def prepare(self, rollout: Any) -> Any:
            return {**super().prepare(rollout), "following": self.in_sequences(rollout["next_observation"])}

        def value_loss(self, value: Any, batch: Any) -> Any:
            following, here = batch["following"].view(-1, 16, 4), batch["observation"].view(-1, 16, 4)
            same = (following[:, :-1] == here[:, 1:]).all(-1)
            assert same.float().mean() > 0.8  # all but at an episode's end
            return super().value_loss(value, batch)

    fit(Adds(sequence_length=16), rollouts(n_envs=2))

    class Forgets(RecurrentPPO):
        def prepare(self, rollout: Any) -> Any:
            return {**super().prepare(rollout), "following": rollout["next_observation"]}

    with pytest.raises(UsageError, match=r"shape begins with \[sequences, N\] = \(1, 4\)"):
        fit(Forgets(sequence_length=16), rollouts())


def test_what_replay_does_not_store_is_said_once() -> None:
    class Returns(DQN):
        def act(self, *args: Any, **arguments: Any) -> Any:
            acted = super().act(*args, **arguments)
            return {**acted, "noise": acted["action"].float()}

    with pytest.warns(UserWarning, match="act returned noise beside action; replay stores actions alone") as found:
        fit(Returns(net_arch=[8]), replayed("CartPole-v1"))
    assert sum("replay stores" in str(one.message) for one in found) == 1
