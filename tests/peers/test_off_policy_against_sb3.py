"""Updates of SAC, TD3, DDPG, TQC and CrossQ equal those of Stable-Baselines3, on the same weights and noise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rl_modules
from datamodules import ReplayDataModule
from tests.training import fit

stable_baselines3 = pytest.importorskip("stable_baselines3", reason="needs the test extra")
sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs the test extra")

pytestmark = pytest.mark.bench

UPDATES, BATCH, WIDTHS = 6, 32, [16, 24]

Batches = list[dict[str, Tensor]]


def make_batches(n_noises: int) -> Batches:
    """Transitions of Pendulum's spaces with terminal ones among them, and standard normal noise."""
    torch.manual_seed(3)
    return [
        {
            "observation": torch.randn(BATCH, 3),
            "action": 4 * torch.rand(BATCH, 1) - 2,
            "reward": torch.randn(BATCH, 1),
            "terminated": torch.rand(BATCH) < 0.3,
            "next_observation": torch.randn(BATCH, 3),
            "n_steps": torch.ones(BATCH, dtype=torch.int64),
            "noise": torch.randn(BATCH, n_noises, 1) if n_noises == 2 else torch.randn(BATCH, 1),
        }
        for _ in range(UPDATES)
    ]


def ours(name: str, batches: Batches, **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
    """The module after an update with each batch, and its state before."""
    cls: Any = getattr(rl_modules, name)
    start: dict[str, Tensor] = {}

    class Fed(cls):  # type: ignore[misc]
        def prepare(self, sample: Any) -> dict[str, Any]:
            if not start:
                start.update({key: value.clone() for key, value in self.state_dict().items()})
            batch = batches[self.n_updates]
            prepared = super().prepare({key: value for key, value in batch.items() if key != "noise"})
            noise = batch["noise"] if name != "DDPG" else batch["noise"][:, :0]
            assert prepared["noise"].shape == noise.shape
            return {**prepared, "noise": noise}

    model = Fed(net_arch=WIDTHS, **arguments)
    data = ReplayDataModule("Pendulum-v1", learning_starts=10, total_timesteps=10 + UPDATES, batch_size=BATCH,
                            buffer_size=100, eval_freq=0)  # fmt: skip
    fit(model, data)
    assert model.n_updates == UPDATES
    return model, start


def theirs(name: str, start: dict[str, Tensor], batches: Batches, monkeypatch: Any, **arguments: Any) -> Any:
    """Stable-Baselines3's model, from the same weights, after the same updates."""
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    cls: Any = getattr(sb3_contrib if name in ("TQC", "CrossQ") else stable_baselines3, name)
    renorm = {}
    if name == "CrossQ":
        renorm = {"renorm_warmup_steps": arguments.pop("renorm_warmup_steps"),
                  "batch_norm_eps": arguments.pop("batch_norm_eps"), "activation_fn": torch.nn.Tanh}  # fmt: skip
        arguments.pop("activation_fn")
    model = cls("MlpPolicy", "Pendulum-v1", device="cpu", policy_kwargs={"net_arch": WIDTHS, **renorm},
                **arguments)  # fmt: skip
    model._logger = Logger(None, [])
    take_weights(model, start)
    queue = iter(batches)

    def sample(*_: Any, **__: Any) -> Any:
        batch = next(queue)
        if batch["noise"].dim() == 3:
            noises = iter([batch["noise"][:, 0], batch["noise"][:, 1]])
            if name == "CrossQ":  # samples a' first
                noises = iter([batch["noise"][:, 1], batch["noise"][:, 0]])
            monkeypatch.setattr("torch.distributions.normal._standard_normal", lambda *_, **__: next(noises))
        else:
            monkeypatch.setattr(Tensor, "normal_", lambda self, mean, std: self.copy_(mean + std * batch["noise"]))
        return ReplayBufferSamples(
            batch["observation"], batch["action"] / 2, batch["next_observation"], batch["terminated"].float()[:, None],
            batch["reward"], None,
        )  # fmt: skip

    model.replay_buffer.sample = sample
    for _ in range(UPDATES):
        model.train(1, BATCH)
    monkeypatch.undo()
    return model


def take_weights(model: Any, start: dict[str, Tensor]) -> None:
    """Load our weights into Stable-Baselines3's networks."""
    with torch.no_grad():
        for own, other in pairs(model, start):
            assert own.shape == other.shape
            own.copy_(other)


def pairs(model: Any, state: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Parameters of Stable-Baselines3's model, each with its place in our state dict, in their layout."""
    found = []

    def renorms(part: Any, prefixes: list[str], k: int | None = None) -> None:
        layers = [module for module in part.modules() if type(module).__name__ == "BatchRenorm1d"]
        for layer, prefix in zip(layers, prefixes if layers else [], strict=True):
            for theirs_, ours_ in {"scale": "scale", "bias": "bias", "ra_mean": "mean", "ra_var": "variance"}.items():
                own = state[f"{prefix}.{ours_}"]
                found.append((getattr(layer, theirs_), own[0] if k is None else own[k, 0]))

    def policy(part: Any, prefix: str) -> None:
        trunk = [name.removesuffix(".weight") for name in state if name.startswith(f"{prefix}.trunk.")
                 and name.endswith(".weight")]  # fmt: skip
        renorms(part, [name.removesuffix(".scale") for name in state if name.startswith(prefix)
                       and name.endswith(".scale")])  # fmt: skip
        linear = [module for module in part.modules() if isinstance(module, torch.nn.Linear)]
        heads = 2 if hasattr(part, "log_std") else 1
        for i, layer in enumerate(linear[:-heads]):
            found.extend([(layer.weight, state[f"{trunk[i]}.weight"]), (layer.bias, state[f"{trunk[i]}.bias"])])
        for layer, weight, bias in zip(
            linear[-heads:], state[f"{prefix}.head.weight"].chunk(heads), state[f"{prefix}.head.bias"].chunk(heads),
            strict=True,
        ):  # fmt: skip
            found.extend([(layer.weight, weight), (layer.bias, bias)])

    def critics(part: Any, prefix: str) -> None:
        networks = part.q_networks if hasattr(part, "q_networks") else part.quantile_critics if hasattr(
            part, "quantile_critics") else part.critics  # fmt: skip
        for k, network in enumerate(networks):
            renorms(network, [f"{prefix}.renorms.{i}" for i in range(len(WIDTHS) + 1)], k)
            for i, layer in enumerate(module for module in network.modules() if isinstance(module, torch.nn.Linear)):
                found.extend([(layer.weight, state[f"{prefix}.layers.{i}.weight"][k].t()),
                              (layer.bias, state[f"{prefix}.layers.{i}.bias"][k, 0])])  # fmt: skip

    policy(model.actor, "network.policy")
    critics(model.critic, "network.critics")
    if hasattr(model, "actor_target"):
        policy(model.actor_target, "target_network.policy")
        critics(model.critic_target, "target_network.critics")
    elif hasattr(model, "critic_target"):
        critics(model.critic_target, "target_network")
    return found


#: A ReLU that is 0 for the whole batch leaves rounding errors for gradients, and Adam makes whole steps of them.
TANH = {"activation_fn": "tanh"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "SAC": ("SAC", 2, {}),
    "SAC, given coefficient": ("SAC", 2, {"ent_coef": 0.2, "gamma": 0.9}),
    "SAC, from 0.1": ("SAC", 2, {"ent_coef": "auto_0.1", "target_entropy": -0.5, "tau": 0.02, "learning_rate": 1e-3}),
    "TQC": ("TQC", 2, {}),
    "TQC, five dropped": ("TQC", 2, {"top_quantiles_to_drop_per_net": 5, "ent_coef": "auto_0.5"}),
    "CrossQ": ("CrossQ", 2, {**TANH, "policy_delay": 2, "renorm_warmup_steps": 100, "batch_norm_eps": 1e-3}),
    # theirs adds ε after the correction, Ioffe's (and ours) before: next to nothing.
    "CrossQ, corrected": ("CrossQ", 2, {**TANH, "policy_delay": 1, "renorm_warmup_steps": 2, "batch_norm_eps": 1e-9}),
    "TD3": ("TD3", 1, {}),
    "TD3, every third": ("TD3", 1, {"policy_delay": 3, "target_policy_noise": 0.4, "target_noise_clip": 0.3}),
    "DDPG": ("DDPG", 1, {"tau": 0.01}),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_of_stable_baselines3(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, n_noises, arguments = CASES[case]
    batches = make_batches(n_noises)
    module, start = ours(name, batches, **arguments)
    peer = theirs(name, start, batches, monkeypatch, **arguments)
    end = module.state_dict()
    moved = 0
    for theirs_, ours_ in pairs(peer, end):
        # Adam divides by a gradient's size: the rounding errors of small ones count through CrossQ's normalisation.
        torch.testing.assert_close(theirs_.detach(), ours_, rtol=2e-4, atol=1e-4 if name == "CrossQ" else 2e-5)
    for _, value in pairs(peer, {key: end[key] - start[key] for key in end}):
        moved += int(value.abs().max() > 5e-4)
    assert moved >= len(pairs(peer, end)) // 2
    if "log_ent_coef" in end:
        assert (end["log_ent_coef"] - start["log_ent_coef"]).abs() > 1e-3
        torch.testing.assert_close(peer.log_ent_coef.detach()[0], end["log_ent_coef"], rtol=1e-4, atol=1e-6)


def test_a_policy_predicts_what_stable_baselines3_predicts() -> None:
    module, _ = ours("SAC", make_batches(2))
    peer: Any = stable_baselines3.SAC("MlpPolicy", "Pendulum-v1", device="cpu", policy_kwargs={"net_arch": WIDTHS})
    take_weights(peer, module.state_dict())
    observation = torch.randn(16, 3).numpy()
    expected, _ = peer.predict(observation, deterministic=True)
    action, _ = module.predict(observation, deterministic=True)
    torch.testing.assert_close(torch.from_numpy(action), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", ["NormalActionNoise", "OrnsteinUhlenbeckActionNoise"])
def test_action_noise_is_that_of_stable_baselines3(cls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from stable_baselines3.common import noise as peers

    from rl_modules import action_noise

    mean, sigma = [0.1, -0.2], [0.3, 0.5]
    make: Callable[..., Any] = getattr(action_noise, cls)
    noise = make(mean=mean, sigma=sigma)
    peer = getattr(peers, cls)(np.array(mean), np.array(sigma))
    generator, again = (torch.Generator().manual_seed(5) for _ in range(2))

    def normal(loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return loc + scale * torch.randn(1, 2, generator=again)[0].numpy()

    monkeypatch.setattr(np.random, "normal", normal)
    for i in range(10):
        if i == 6:
            noise.reset(torch.tensor([True]))
            peer.reset()
        np.testing.assert_allclose(noise.sample(torch.Size([1, 2]), generator)[0].numpy(), peer(), rtol=1e-5, atol=1e-6)
