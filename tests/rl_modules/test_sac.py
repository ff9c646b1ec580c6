"""SAC and TQC: densities, targets, gradients and schedules against hand-worked values and torch.distributions."""

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from datamodules import ReplayDataModule
from rl_modules import SAC, TQC, CrossQ
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.networks.critics import ActionBounds, Critics
from tests.training import assert_resumes_exactly, fit, mean_return

OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))


def made(cls: Any = SAC, action_space: spaces.Space = BOX, **arguments: Any) -> Any:
    arguments = {"net_arch": [8], **arguments}
    model = cls(observation_space=space_to_dict(OBSERVATION), action_space=space_to_dict(action_space), **arguments)
    model.configure_model()
    return model


def batch(n: int = 6, width: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "observation": torch.randn(n, 3, generator=generator),
        "next_observation": torch.randn(n, 3, generator=generator),
        "action": 2 * torch.rand(n, width, generator=generator) - 1,
        "reward": torch.randn(n, generator=generator),
        "discount": torch.rand(n, generator=generator),
        "terminated": torch.arange(n) % 2 == 0,
        "noise": torch.randn(n, 2, width, generator=generator),
    }


# -------------------------------------------------------------------- policy and critics


def test_samples_have_the_density_of_a_squashed_gaussian() -> None:
    policy = made().network.policy
    observation, noise = batch(50)["observation"], torch.randn(50, 2, generator=torch.Generator().manual_seed(2))
    action, log_prob = policy.sample(observation, noise)
    mean, log_std = policy(observation)
    expected = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    torch.testing.assert_close(action, (mean + log_std.exp() * noise).tanh())
    torch.testing.assert_close(log_prob, expected.log_prob(action), rtol=1e-3, atol=1e-3)


def test_critics_equal_separate_networks_of_linear_layers() -> None:
    critics = Critics(OBSERVATION, 2, 3, [16, 8])
    data = batch(40)
    together = critics(data["observation"], data["action"])
    for k in range(3):
        layers: list[nn.Module] = []
        for layer in critics.layers:
            linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[2])
            linear.weight.data, linear.bias.data = layer.weight[k].t().detach(), layer.bias[k, 0].detach()
            layers += [linear, nn.ReLU()]
        alone = nn.Sequential(*layers[:-1])(torch.cat([data["observation"], data["action"]], 1))
        torch.testing.assert_close(together[k], alone, rtol=1e-4, atol=1e-5)
    first = critics(data["observation"], data["action"], only_first=True)
    torch.testing.assert_close(first, together[:1], rtol=1e-4, atol=1e-5)


def test_normalised_critics_equal_separate_networks_with_layer_norm() -> None:
    critics = Critics(OBSERVATION, 2, 3, [16, 8], layer_norm=True)
    data = batch(40)
    for norm in critics.norms:
        norm.weight.data.uniform_(0.5, 2), norm.bias.data.uniform_(-1, 1)
    together = critics(data["observation"], data["action"])
    for k in range(3):
        x = torch.cat([data["observation"], data["action"]], 1)
        for layer, norm in zip(critics.layers, [*critics.norms, None], strict=True):
            x = x @ layer.weight[k] + layer.bias[k]
            if norm is not None:
                x = nn.functional.layer_norm(x, x.shape[1:], norm.weight[k, 0], norm.bias[k, 0]).relu()
        torch.testing.assert_close(together[k], x, rtol=1e-4, atol=1e-5)
    first = critics(data["observation"], data["action"], only_first=True)
    torch.testing.assert_close(first, together[:1], rtol=1e-4, atol=1e-5)


def test_dropout_zeroes_its_share_of_hidden_units_in_training_mode_only() -> None:
    critics = Critics(OBSERVATION, 2, 2, [400], activation_fn="leaky_relu", dropout_rate=0.25)
    zeros: list[Tensor] = []
    critics.activation.register_forward_hook(lambda _, __, x: zeros.append((x == 0).float().mean()))
    data = batch(40)
    critics(data["observation"], data["action"])
    critics.eval()(data["observation"], data["action"])
    assert abs(zeros[0] - 0.25) < 0.02 and zeros[1] == 0


def test_a_target_takes_the_smallest_of_the_drawn_critics() -> None:
    model, data = made(n_critics=5, target_subset=2, ent_coef=0.1), batch()
    order = torch.tensor([0.3, -2.0, 1.0, -0.5, 2.0])  # smallest: critics 1 and 3
    after = data["noise"][:, 1]
    target = model.td_target({**data, "critic_order": order.expand(6, 5)}, after, 0.1)
    action, log_prob = model.network.policy.sample(data["next_observation"], after)
    values = model.target_network(data["next_observation"], action)[..., 0]
    soft = torch.minimum(values[1], values[3]) - 0.1 * log_prob
    expected = data["reward"] + data["discount"] * torch.where(data["terminated"], 0.0, soft)
    torch.testing.assert_close(target, expected)
    q = torch.arange(10.0).view(5, 2, 1)  # means over critics: 4 and 5
    assert model.actor_loss(q, torch.tensor([1.0, 2.0]), 0.1) == pytest.approx(0.15 - 4.5)


def test_every_update_draws_its_own_critics() -> None:
    model = made(n_critics=10, target_subset=2)
    model.generator = torch.Generator().manual_seed(0)
    rows = {**batch(3000), "n_steps": torch.ones(3000, dtype=torch.long), "reward": torch.zeros(3000, 1)}
    order = model.prepare(rows)["critic_order"]
    counts = order.argsort(1)[:, :2].flatten().bincount(minlength=10) / 3000
    assert order.shape == (3000, 10) and (counts - 0.2).abs().max() < 0.03  # four standard deviations


def test_policy_and_temperature_move_in_every_policy_delay_th_update() -> None:
    moved = []

    class Watched(SAC):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            parts = (self.network.policy, self.network.critics)
            before = [nn.utils.parameters_to_vector(p.parameters()).clone() for p in parts], self.ent_coef
            loss = super().training_step(batch, batch_idx)
            after = [nn.utils.parameters_to_vector(p.parameters()) for p in parts], self.ent_coef
            moved.append(
                (*(bool((a != b).any()) for a, b in zip(before[0], after[0], strict=True)), bool(before[1] != after[1]))
            )
            return loss

    data = ReplayDataModule("Pendulum-v1", learning_starts=16, total_timesteps=28, batch_size=8, eval_freq=0)
    fit(Watched(net_arch=[8], policy_delay=3), data)
    assert len(moved) >= 9 and moved[:9] == [(False, True, False), (False, True, False), (True, True, True)] * 3


@pytest.mark.long
def test_a_run_with_dropout_resumes_exactly(tmp_path: Path) -> None:
    def make_data() -> ReplayDataModule:
        return ReplayDataModule(
            "Pendulum-v1", learning_starts=16, total_timesteps=10**6, batch_size=8, eval_freq=0, rollouts_per_epoch=10
        )

    def make_model() -> SAC:
        torch.manual_seed(0)  # dropout draws from torch's global generator, which `rl fit` seeds
        return SAC(net_arch=[8], layer_norm=True, dropout_rate=0.3, target_subset=2)

    assert_resumes_exactly(make_model, make_data, tmp_path, epochs=4)


def test_more_drawn_critics_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="target_subset=3 must be at most n_critics=2"):
        SAC(target_subset=3)


def test_own_critics_are_any_module_of_observations_and_actions() -> None:
    class Plain(nn.Module):
        def __init__(self, width: int, outputs: tuple[int, ...]) -> None:
            super().__init__()
            self.layer, self.outputs = nn.Linear(3 + width, math.prod(outputs)), outputs

        def forward(self, observation: Tensor, action: Tensor) -> Tensor:
            return self.layer(torch.cat([observation, action], 1)).unflatten(1, self.outputs).movedim(0, 1)

    class Own(SAC):
        outputs = (2, 1)

        def make_critics(self, width: int, net_arch: Any) -> nn.Module:
            return Plain(width, self.outputs)

    class Narrow(Own):
        outputs = (2,)

    data = ReplayDataModule("Pendulum-v1", learning_starts=16, total_timesteps=28, batch_size=8, eval_freq=0)
    assert fit(Own(net_arch=[8]), data).lightning_module.n_updates == 12
    with pytest.raises(UsageError, match=r"make_critics returned .*\(2, 2\) for 2 observations; .*\(2, 2, 1\)"):
        made(Narrow)


def test_critics_start_like_linear_layers_and_differ() -> None:
    torch.manual_seed(0)
    critics = Critics(OBSERVATION, 2, 2, [64, 64])
    for layer in critics.layers:
        bound = 1 / math.sqrt(layer.weight.shape[1])
        for values in (layer.weight, layer.bias):
            assert values.abs().max() <= bound
        assert layer.weight.abs().max() > 0.9 * bound
        assert not torch.equal(layer.weight[0], layer.weight[1])


@pytest.mark.parametrize("space", [BOX, spaces.Box(-1, 1, (2, 3), np.float32), spaces.Box(3, 3, (1,), np.float64)])
def test_actions_reach_the_boxs_bounds_and_come_back(space: spaces.Box) -> None:
    bounds = ActionBounds(space)
    width = int(np.prod(space.shape))
    low, high = bounds.to_box(-torch.ones(1, width))[0], bounds.to_box(torch.ones(1, width))[0]
    np.testing.assert_allclose(low.numpy(), space.low, rtol=1e-6)
    np.testing.assert_allclose(high.numpy(), space.high, rtol=1e-6)
    squashed = torch.linspace(-1, 1, 5)[:, None].expand(5, width)
    there = bounds.to_box(squashed)
    assert there.shape == (5, *space.shape)
    expected = torch.zeros_like(squashed) if (space.low == space.high).all() else squashed
    torch.testing.assert_close(bounds.from_box(there), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-np.inf, 1, (2,)), spaces.Box(0, 5, (2,), np.int64)])
def test_spaces_that_do_not_fit(space: spaces.Space) -> None:
    with pytest.raises(UsageError, match="must be a bounded Box of floats, not"):
        made(action_space=space)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"ent_coef": "automatic"}, "ent_coef='automatic' must be"), ({"ent_coef": "auto_0"}, "ent_coef='auto_0' must be"),
     ({"ent_coef": -1.0}, "ent_coef=-1.0 must be"), ({"target_entropy": "low"}, "target_entropy='low' must be"),
     ({"tau": 0.0}, r"tau=0.0 must lie in \(0, 1\]"), ({"n_critics": 0}, "n_critics=0 must be at least 1"),
     ({"target_update_interval": 0}, "target_update_interval=0 must be at least 1"),
     ({"net_arch": {"pi": [8], "vf": [8]}}, "must be a dictionary with the keys pi and qf"),
     ({"action_noise": {"class_path": "os.system"}}, "must be a NormalActionNoise or")],
)  # fmt: skip
def test_arguments_that_can_not_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(**arguments)


def test_policy_and_critics_may_have_widths_of_their_own() -> None:
    model = made(net_arch={"pi": [5], "qf": [7, 6]})
    assert [layer.weight.shape[2] for layer in model.network.critics.layers] == [7, 6, 1]
    assert model.network.policy.head.in_features == 5


# -------------------------------------------------------------------- losses


def test_target_by_hand() -> None:
    model, data = made(ent_coef=0.3), batch()
    with torch.no_grad():
        action, log_prob = model.network.policy.sample(data["next_observation"], data["noise"][:, 1])
        smallest = model.target_network(data["next_observation"], action)[..., 0].min(0).values
        target = model.td_target(data, data["noise"][:, 1], 0.3)
    for i in range(6):
        value = 0.0 if data["terminated"][i] else float(smallest[i] - 0.3 * log_prob[i])
        assert float(target[i]) == pytest.approx(float(data["reward"][i] + data["discount"][i] * value), abs=1e-5)


def test_losses_by_hand() -> None:
    model = made()
    q = torch.tensor([[[1.0], [2.0]], [[0.0], [4.0]]])
    target = torch.tensor([2.0, 2.0])
    # ½ (mean of 1, 0 + mean of 4, 4).
    assert float(model.critic_loss(q, target, None)) == pytest.approx(0.5 * (0.5 + 4.0))
    assert float(model.critic_loss(q, target, torch.tensor([0.0, 2.0]))) == pytest.approx(0.5 * 4.0)
    # min_k Q: 0 and 2.
    assert float(model.actor_loss(q, torch.tensor([1.0, 3.0]), 0.5)) == pytest.approx(0.5 * 2 - 1)
    assert model.absolute_error(q, target).tolist() == [1.5, 1.0]


def test_gradient_of_the_entropy_coefficient() -> None:
    model = made(ent_coef="auto_0.5", target_entropy=-1.5)
    log_prob = torch.tensor([2.0, 4.0])
    [gradient] = torch.autograd.grad(model.ent_coef_loss(model.log_ent_coef, log_prob), model.log_ent_coef)
    # Entropy -3 below the target -1.5: descent raises α.
    assert float(gradient) == pytest.approx(-(3.0 - 1.5))
    assert float(model.ent_coef) == pytest.approx(0.5)
    assert made(target_entropy="auto").target_entropy == -2.0
    assert made(ent_coef=0.2).log_ent_coef is None


def test_truncated_target_by_hand() -> None:
    model, data = made(TQC, n_quantiles=3, top_quantiles_to_drop_per_net=1), batch()
    with torch.no_grad():
        action, log_prob = model.network.policy.sample(data["next_observation"], data["noise"][:, 1])
        quantiles = model.target_network(data["next_observation"], action)
        target = model.td_target(data, data["noise"][:, 1], 0.3)
    assert target.shape == (6, 4)
    for i in range(6):
        # The two largest of six are dropped, whichever critic they are from.
        kept = sorted(float(x) for x in quantiles[:, i].flatten())[:4]
        for j, z in enumerate(kept):
            value = 0.0 if data["terminated"][i] else z - 0.3 * float(log_prob[i])
            assert float(target[i, j]) == pytest.approx(
                float(data["reward"][i] + data["discount"][i] * value), abs=1e-5
            )


def test_quantile_loss_by_hand() -> None:
    model = made(TQC, n_quantiles=2, top_quantiles_to_drop_per_net=0, n_critics=1)
    q, target = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[0.5, 3.0]])
    # τ = ¼, ¾; δ = 0.5, 3 | -0.5, 2; Huber ⅛, 2½ | ⅛, 1½.
    expected = (0.25 * 0.125 + 0.25 * 2.5 + 0.25 * 0.125 + 0.75 * 1.5) / 4
    assert float(model.critic_loss(q, target, None)) == pytest.approx(expected)
    with pytest.raises(UsageError, match="top_quantiles_to_drop_per_net=2 must lie in"):
        TQC(n_quantiles=2)


# -------------------------------------------------------------------- training


def data_module(env_id: Any = "Pendulum-v1", **arguments: Any) -> ReplayDataModule:
    defaults = {"buffer_size": 500, "learning_starts": 20, "batch_size": 8, "total_timesteps": 60, "eval_freq": 0}
    return ReplayDataModule(env_id, **{**defaults, **arguments})


@pytest.mark.parametrize("cls", [SAC, CrossQ])
@pytest.mark.parametrize(
    ("before", "after", "alpha"),
    [("auto_0.5", 0.2, 0.2), (0.2, "auto_0.5", 0.5), ("auto_0.5", "auto_0.3", 0.3), ("auto", "auto_1", None)],
)
def test_a_run_from_other_weights_begins_with_the_alpha_that_it_is_given(
    cls: Any, before: Any, after: Any, alpha: float | None, tmp_path: Path
) -> None:
    """A second run with the argument of the first continues with the α that the first one learned."""
    begins: list[dict[str, Tensor]] = []

    class Watched(cls):
        def begin_run(self) -> None:
            super().begin_run()
            assert float(self.ent_coef) == pytest.approx(learned if alpha is None else alpha)
            begins.append({name: x.clone() for name, x in self.state_dict().items()})

    first = cls(net_arch=[8], ent_coef=before)
    fit(first, data_module()).save_checkpoint(tmp_path / "first.ckpt")
    learned = float(first.ent_coef)
    assert before == 0.2 or abs(learned - float(str(before).removeprefix("auto").removeprefix("_") or 1)) > 1e-3
    second = Watched(net_arch=[8], ent_coef=after, init_from=str(tmp_path / "first.ckpt"))
    fit(second, data_module())
    trained = {name: x for name, x in first.state_dict().items() if name != "log_ent_coef"}
    assert trained.keys() == begins[0].keys() - {"log_ent_coef"}
    assert all(torch.equal(x, begins[0][name]) for name, x in trained.items())
    assert (second.log_ent_coef is None) == (after == 0.2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"), [({}, {}), ({"ent_coef": 0.2}, {"ent_coef": 0.2}), ({}, {"ent_coef": 0.2})]
)
def test_a_subclass_with_a_constructor_of_its_own_starts_from_weights(before: Any, after: Any, tmp_path: Path) -> None:
    """Its checkpoints hold no argument of SAC's that nobody gave: the constructor may choose it, and would again."""

    def subclass(**chosen: Any) -> Any:
        class Mine(SAC):
            def __init__(self, own: float = 1.0, **arguments: Any) -> None:
                super().__init__(**chosen, **arguments)
                self.own = own

            def begin_run(self) -> None:
                super().begin_run()
                self.begins = {name: x.clone() for name, x in self.state_dict().items()}

        return Mine

    first = subclass(**before)(net_arch=[8])
    fit(first, data_module()).save_checkpoint(tmp_path / "first.ckpt")
    assert "ent_coef" not in torch.load(tmp_path / "first.ckpt", weights_only=True)["hyper_parameters"]
    second = subclass(**after)(net_arch=[8], init_from=str(tmp_path / "first.ckpt"))
    fit(second, data_module())
    trained = first.state_dict()
    assert ("log_ent_coef" in second.begins) == (not after)
    assert all(torch.equal(x, trained[name]) for name, x in second.begins.items())


def test_target_networks_move_by_tau_every_interval() -> None:
    moved = []

    class Watched(SAC):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            before = [p.clone() for p in self.target_network.parameters()]
            loss = super().training_step(batch, batch_idx)
            after = list(self.target_network.parameters())
            own = self.network.critics.parameters()
            if self.n_updates % 3 == 0:
                for old, new, other in zip(before, after, own, strict=True):
                    torch.testing.assert_close(new, old + 0.1 * (other.detach() - old))
            else:
                assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
            moved.append(self.n_updates % 3 == 0)
            return loss

    fit(Watched(net_arch=[8], tau=0.1, target_update_interval=3), data_module())
    assert sum(moved) == len(moved) // 3 > 5


def test_an_update_is_one_step_to_lightning() -> None:
    model = SAC(net_arch=[8])
    trainer = fit(model, data_module(gradient_steps=2))
    assert trainer.global_step == model.n_updates == 80
    assert trainer.max_steps == -1


@pytest.mark.parametrize("arguments", [{"n_steps": 3}, {"prioritized_replay": True}, {"autoreset_mode": "next_step"}])
def test_replays_variants_train(arguments: dict[str, Any]) -> None:
    for model in (SAC(net_arch=[8]), TQC(net_arch=[8], n_quantiles=5)):
        fit(model, data_module(**arguments))
        assert model.n_updates == 40
        assert (model.td_error is not None) == ("prioritized_replay" in arguments)


def test_n_step_rewards_are_discounted_sums() -> None:
    model = made(gamma=0.5)
    model.trainer = None
    model.generator = torch.Generator()
    sample: Any = {"observation": torch.zeros(2, 3), "next_observation": torch.zeros(2, 3), "action": torch.zeros(2, 2),
                   "reward": torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]]), "n_steps": torch.tensor([3, 1]),
                   "terminated": torch.tensor([False, True])}  # fmt: skip
    prepared = model.prepare(sample)
    assert prepared["reward"].tolist() == [3.0, 8.0]
    assert prepared["discount"].tolist() == [0.125, 0.5]
    # 0 in the first Box is its centre, in the second its lower bound.
    assert prepared["action"].tolist() == [[0.0, -1.0], [0.0, -1.0]]
    assert prepared["noise"].shape == (2, 2, 2)


def test_rounds_of_whole_episodes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"train_freq=\[1, 'episode'\] must be a number"):
        data_module(train_freq=[1, "episode"])


def test_half_precision_with_a_loss_scaler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match="trainer.precision=16-mixed scales one loss, SAC has several"):
        fit(SAC(net_arch=[8]), data_module(), plugins=[plugin])


def test_acting_explores_and_predicting_does_not() -> None:
    noise = {"class_path": "NormalActionNoise", "init_args": {"mean": 5.0, "sigma": 0.0}}
    model = made(action_noise=noise)
    observation = torch.zeros(4, 3)
    # Noise of five half ranges: every action is at its upper bound.
    assert model.act(observation)["action"].tolist() == [[2.0, 10.0]] * 4
    assert (model.act(observation, deterministic=True)["action"] < torch.tensor([2.0, 10.0])).all()
    action, _ = model.predict(observation.numpy())
    assert (action < np.array([2.0, 10.0])).all()
    assert model.hparams["action_noise"] == noise  # as given


@pytest.mark.slow
@pytest.mark.parametrize("cls", [SAC, TQC])
def test_pendulum_is_learned(cls: Any) -> None:
    model = cls(learning_rate=1e-3, net_arch=[64, 64])
    fit(model, ReplayDataModule("Pendulum-v1", total_timesteps=5_000, buffer_size=5_000, eval_freq=0))
    # A policy that does nothing gets about -1,200.
    assert mean_return(model, gym.make("Pendulum-v1"), n_episodes=10) > -250
