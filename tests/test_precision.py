"""Half precision: acting and learning compute the same, and what is added up stays in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rl_modules import A2C, DQN, PPO, REINFORCE, SAC, TD3, TQC, TRPO, CrossQ, RecurrentPPO
from rl_modules.common.errors import UsageError
from tests.recipes.callbacks.test_checkpoints import ppo_data, replay, whole
from tests.training import assert_resumes_exactly, fit, rollouts


class Watch(L.Callback):
    """Notes what the first minibatch holds, and what the module makes of it."""

    def __init__(self) -> None:
        self.batch: dict[str, Any] = {}
        self.ratio = torch.tensor(0.0)
        self.weights: set[torch.dtype] = set()

    @torch.no_grad()
    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # New policies are nearly uniform, whatever the precision.
        for name, parameter in pl_module.named_parameters():
            if "policy_head" in name:
                parameter.mul_(100)

    @torch.no_grad()
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.batch:
            return
        self.batch = batch
        self.weights = {p.dtype for p in pl_module.parameters()}
        if "log_prob" in batch:
            with trainer.precision_plugin.forward_context():
                policy = pl_module.policy(batch["observation"]) if isinstance(pl_module, TRPO) else pl_module.network(
                    batch["observation"])[0]  # fmt: skip
                self.ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "ppo": (PPO, ppo_data),
    "ppo of a Box": (PPO, lambda: ppo_data(env_id="Pendulum-v1", norm_obs=True, norm_reward=True)),
    "ppo penalty": (lambda: PPO(policy_objective="penalty"), ppo_data),
    "trpo": (lambda: TRPO(batch_size=16, n_critic_updates=1), whole),
    "a2c": (A2C, whole),
    "reinforce": (lambda: REINFORCE(psi="baseline"), whole),
    "dqn": (DQN, lambda: replay(gradient_steps=2)),
    "sac": (SAC, lambda: replay(env_id="Pendulum-v1", gradient_steps=2)),
    "tqc": (TQC, lambda: replay(env_id="Pendulum-v1")),
    "crossq": (lambda: CrossQ(net_arch=[32, 32], policy_delay=1), lambda: replay(env_id="Pendulum-v1")),
    "td3": (TD3, lambda: replay(env_id="Pendulum-v1", prioritized_replay=True)),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("ppo", "32-true"),
        *(
            pytest.param(case, "bf16-mixed", marks=[] if case in ("ppo", "dqn", "td3") else [pytest.mark.slow])
            for case in CASES
        ),
    ],
)
def test_acting_and_learning_agree_and_targets_are_float32(case: str, precision: str) -> None:
    make_model, make_data = CASES[case]
    watch, data = Watch(), make_data()
    trainer = fit(make_model(), data, precision=precision, callbacks=[watch])
    assert watch.weights == {torch.float32}
    targets = {name: value for name, value in watch.batch.items()
               if name in ("advantage", "returns", "weight", "value", "log_prob", "reward", "next_q")}  # fmt: skip
    assert targets
    assert {name: value.dtype for name, value in targets.items()} == dict.fromkeys(targets, torch.float32)
    if "log_prob" in watch.batch:
        # Acting in float32 and learning in bfloat16 would be a thousandth apart.
        assert (watch.ratio - 1).abs().max() < 1e-4
    assert all(torch.isfinite(p).all() for p in trainer.lightning_module.parameters())
    if data.hparams.get("norm_obs"):
        for part in data.collector.normalizers.parts():
            assert part.mean.dtype == part.var.dtype == "float64"


def test_autocast_is_on_while_acting() -> None:
    seen = []

    class Noting(PPO):
        def act(self, observation: Any, generator: Any = None, deterministic: bool = False) -> dict:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().act(observation, generator, deterministic)

    fit(Noting(), ppo_data(total_timesteps=32), precision="bf16-mixed")
    assert seen and all(seen)


IN_FLOAT64 = {"a2c of a Box": (A2C, lambda: rollouts("Pendulum-v1", n_envs=2, n_steps=8)),
              "recurrent": (lambda: RecurrentPPO(lstm_hidden_size=8), lambda: rollouts("Pendulum-v1", n_envs=2)),
              "trpo of a Box": (lambda: TRPO(batch_size=16), lambda: rollouts("Pendulum-v1", n_envs=2)),
              "sac with gSDE": (lambda: SAC(net_arch=[8], use_sde=True), CASES["sac"][1]),
              "dqn": CASES["dqn"], "td3": CASES["td3"], "crossq": CASES["crossq"]}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", IN_FLOAT64)
def test_float64_is_kept_by_resuming_and_loading(case: str, tmp_path: Path) -> None:
    make_model, make_data = IN_FLOAT64[case]
    assert_resumes_exactly(make_model, make_data, tmp_path, epochs=2, precision="64-true")
    loaded = type(make_model()).load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float64}
    torch.testing.assert_close(dict(loaded.state_dict()), dict(saved), rtol=0, atol=0)
    # A Trainer that computes in 32 bits asks for weights of 32 bits.
    narrow = fit(make_model(), make_data(), ckpt_path=tmp_path / "part.ckpt", max_epochs=2).lightning_module
    assert {value.dtype for value in narrow.state_dict().values() if value.is_floating_point()} == {torch.float32}


def test_trpo_refuses_the_scaled_loss() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    make_model, make_data = CASES["trpo"]
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match="trainer.precision=16-mixed scales one loss, TRPO has several; take bf16"):
        fit(make_model(), make_data(), plugins=[plugin])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="16-mixed needs a CUDA device, and there is none here")
@pytest.mark.parametrize("case", ["ppo", "a2c", "dqn"])
def test_float16_on_a_gpu(case: str) -> None:
    make_model, make_data = CASES[case]
    watch = Watch()
    trainer = fit(make_model(), make_data(), precision="16-mixed", accelerator="cuda", devices=1, callbacks=[watch])
    assert trainer.precision == "16-mixed"
    assert watch.weights == {torch.float32}
    if "log_prob" in watch.batch:
        # Rollout and minibatch are products of other sizes: some of their sums round to the next number of 11 bits.
        assert (watch.ratio - 1).abs().max() < 2e-2
        assert watch.batch["advantage"].dtype == watch.batch["returns"].dtype == torch.float32
    assert all(torch.isfinite(p).all() for p in trainer.lightning_module.parameters())


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_weights_in_16_bits_are_refused(precision: Any) -> None:
    with pytest.raises(UsageError, match=f"trainer.precision={precision} would keep weights"):
        fit(PPO(), ppo_data(), precision=precision)
