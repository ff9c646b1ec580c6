"""CrossQ and batch renormalization: closed forms, sb3-contrib's layer, and what one update does."""

import copy

import pytest
import torch
from torch import Tensor, nn

from datamodules import ReplayDataModule
from rl_modules import CrossQ
from rl_modules.crossq import RenormalizedCritics
from rl_modules.networks.batch_renorm import BatchRenorm, batch_statistics, renormalized
from rl_modules.networks.q_network import apply_tower
from tests.training import fit


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(**arguments: int) -> CrossQ:
    """A CrossQ after a few updates, with statistics that differ from a new layer's."""
    model = CrossQ(net_arch=[16, 8], policy_delay=2, **arguments)
    data = ReplayDataModule("Pendulum-v1", learning_starts=20, total_timesteps=30, batch_size=8, eval_freq=0)
    fit(model, data)
    return model


# ---------------------------------------------------------------- the layer


def test_in_the_warm_up_it_is_torchs_batch_norm() -> None:
    ours, torchs = BatchRenorm(5), nn.BatchNorm1d(5, eps=1e-3, momentum=0.01)
    for seed in range(3):
        x = 3 * randn(seed, 40, 5) + 2
        with batch_statistics(ours):
            y = ours(x)
        # torch normalises by the biased variance and remembers the unbiased one.
        expected = (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torchs(x)
    torch.testing.assert_close(ours.mean[0], torchs.running_mean)
    torch.testing.assert_close(ours.variance[0], torchs.running_var)
    torchs.eval()
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-5, atol=1e-5)


def test_after_it_small_deviations_are_corrected_whole_and_large_ones_are_bounded() -> None:
    """With r and d inside their bounds, ((x - μ_B) / σ_B) r + d = (x - μ) / σ."""
    layer = BatchRenorm(2, warmup_steps=0)
    layer.n_batches += 1
    layer.mean.copy_(torch.tensor([[0.3, 100.0]]))
    layer.variance.copy_(torch.tensor([[1.5, 1.0]]))
    x = randn(0, 50, 2)
    mean, std = x.mean(0), (x.var(0) + 1e-3).sqrt()
    with batch_statistics(layer):
        y = layer(x)
    torch.testing.assert_close(y[:, 0], (x[:, 0] - 0.3) / (1.5 + 1e-3) ** 0.5, rtol=1e-4, atol=1e-5)
    r = std[1] / (1 + 1e-3) ** 0.5
    torch.testing.assert_close(y[:, 1], (x[:, 1] - mean[1]) / std[1] * r - 5, rtol=1e-4, atol=1e-4)


def test_gradients_pass_through_the_batch_and_not_through_the_correction() -> None:
    layer = BatchRenorm(3, warmup_steps=0)
    layer.n_batches += 1
    layer.mean.copy_(randn(1, 1, 3))
    x = randn(0, 20, 3).double().requires_grad_()
    mean, std = x.mean(0), (x.var(0) + 1e-3).sqrt()
    running = (layer.variance[0].double() + 1e-3).sqrt()
    r, d = (std / running).detach(), ((mean - layer.mean[0]) / running).detach()
    direction = randn(2, 20, 3).double()
    [expected] = torch.autograd.grad((x - mean) / std * r + d, x, direction)
    x32 = x.detach().float().requires_grad_()
    with batch_statistics(layer):
        [found] = torch.autograd.grad(layer(x32), x32, direction.float())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_layer_equals_that_of_sb3_contrib() -> None:
    peers = pytest.importorskip("sb3_contrib.common.torch_layers", reason="needs the test extra")
    # An ε of nothing: theirs is added after the correction, Ioffe's (and ours) before.
    ours, theirs = BatchRenorm(4, eps=1e-12, warmup_steps=3), peers.BatchRenorm1d(4, eps=1e-12, warmup_steps=3)
    for seed in range(8):
        x = (1 + 0.2 * seed) * randn(seed, 64, 4) + 0.3 * seed
        with batch_statistics(ours):
            y = ours(x)
        torch.testing.assert_close(y, theirs(x), rtol=1e-4, atol=1e-5)
    theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_each_of_k_networks_has_statistics_of_its_own() -> None:
    together, alone = BatchRenorm(4, 3), [BatchRenorm(4) for _ in range(3)]
    x = randn(0, 3, 30, 4) * torch.tensor([1.0, 2.0, 5.0])[:, None, None]
    with batch_statistics(together):
        y = together(x)
    for k, layer in enumerate(alone):
        with batch_statistics(layer):
            torch.testing.assert_close(y[k], layer(x[k]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(together.variance[k], layer.variance)


def test_elsewhere_it_learns_nothing_and_rows_do_not_depend_on_each_other() -> None:
    layer = BatchRenorm(4).train()
    with batch_statistics(layer):
        layer(3 * randn(0, 30, 4))
    before = copy.deepcopy(layer.state_dict())
    x = randn(1, 6, 4)
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_wide_hidden_layers_keep_their_normalisation() -> None:
    """The fast MLP of plain layers is not taken for a trunk with other parts."""
    trunk = renormalized(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), 0.01, 1e-3, 10)
    head = nn.Linear(256, 256)
    for part in trunk:
        if isinstance(part, BatchRenorm):
            part.mean += 1.0
    x = randn(0, 256, 256)
    torch.testing.assert_close(apply_tower(trunk, head, x), head(trunk(x)))
    assert [type(part).__name__ for part in trunk] == ["BatchRenorm", "Linear", "ReLU", "BatchRenorm"]


# ---------------------------------------------------------------- the algorithm


def test_values_and_targets_come_from_one_batch() -> None:
    """With both halves equal, the batch statistics are those of either half, and so are the values."""
    model = made()
    observation, action = randn(0, 12, 3), randn(1, 12, 1).tanh()
    batch = {"observation": observation, "next_observation": observation, "action": action}
    state = copy.deepcopy(model.network.critics.state_dict())
    q, next_q = model.joint_values(batch, action)
    torch.testing.assert_close(q, next_q)
    assert q.requires_grad and not next_q.requires_grad
    model.network.critics.load_state_dict(state)
    shifted, _ = model.joint_values({**batch, "next_observation": observation + 3}, action)
    assert not torch.allclose(shifted, q)


def test_the_target_is_worked_by_hand() -> None:
    model = made()
    batch = {"reward": torch.tensor([1.0, 2.0]), "terminated": torch.tensor([False, True]),
             "discount": torch.tensor([0.5, 0.5])}  # fmt: skip
    next_q = torch.tensor([[[4.0], [9.0]], [[3.0], [9.0]]])
    target = model.td_target(batch, next_q, torch.tensor([-2.0, 7.0]), 0.5)
    torch.testing.assert_close(target, torch.tensor([1 + 0.5 * (3.0 + 0.5 * 2.0), 2.0]))


def test_policy_and_alpha_move_every_policy_delay_updates() -> None:
    moved = []

    class Watched(CrossQ):
        def training_step(self, batch, batch_idx):
            before = [self.network.policy.head.weight.detach().clone(), self.log_ent_coef.detach().clone()]
            loss = super().training_step(batch, batch_idx)
            after = [self.network.policy.head.weight, self.log_ent_coef]
            moved.append(not any(torch.equal(one, other) for one, other in zip(before, after, strict=True)))
            return loss

    data = ReplayDataModule("Pendulum-v1", learning_starts=20, total_timesteps=30, batch_size=8, eval_freq=0)
    fit(Watched(net_arch=[16], policy_delay=3), data)
    assert moved == [(i + 1) % 3 == 0 for i in range(10)]


def test_alpha_keeps_adams_own_momentum() -> None:
    model = made()
    [optimizer] = model.trainer.optimizers
    betas = {id(p): group["betas"] for group in optimizer.param_groups for p in group["params"]}
    assert betas.pop(id(model.log_ent_coef)) == (0.9, 0.999)
    assert set(betas.values()) == {(0.5, 0.999)}
    assert len(betas) == len(list(model.network.parameters()))


def test_default_widths_and_no_target_network() -> None:
    model = CrossQ()
    fit(model, ReplayDataModule("Pendulum-v1", eval_freq=0), max_epochs=0)
    assert isinstance(model.network.critics, RenormalizedCritics)
    assert [tuple(layer.weight.shape) for layer in model.network.critics.layers] == [
        (2, 4, 1024), (2, 1024, 1024), (2, 1024, 1)]  # fmt: skip
    assert [part.out_features for part in model.network.policy.trunk if isinstance(part, nn.Linear)] == [256, 256]
    assert not any(name.startswith("target") for name in model.state_dict())
