import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from datamodules import RolloutDataModule
from rl_modules import PPO
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from tests.marks import quick

CARTPOLE = {"n_envs": 4, "n_steps": 16, "batch_size": 16, "n_epochs": 2, "eval_freq": 0}


class Observe(Callback):
    """Collects something after every minibatch."""

    def __init__(self, see):
        self.see, self.seen = see, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(self.see(pl_module))


def run(make_trainer, callbacks=(), total_timesteps=256, data=None, ckpt_path=None, trainer=None, **kwargs):
    module = PPO(**kwargs)
    datamodule = RolloutDataModule("CartPole-v1", total_timesteps=total_timesteps, **{**CARTPOLE, **(data or {})})
    trainer = make_trainer(callbacks=list(callbacks), **(trainer or {}))
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
    return module, datamodule, trainer


def equal(a, b, path=""):
    """Compare two checkpoints leaf by leaf; returns the paths that differ."""
    if isinstance(a, dict):
        keys = a.keys() | b.keys()
        return [p for k in keys for p in (equal(a[k], b[k], f"{path}/{k}") if k in a and k in b else [f"{path}/{k}"])]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [path]
        return [p for i, (x, y) in enumerate(zip(a, b, strict=True)) for p in equal(x, y, f"{path}/{i}")]
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    return [] if a == b or (a != a and b != b) else [path]


@pytest.mark.long
@pytest.mark.parametrize("stop_at", quick(["epoch", "minibatch", "last minibatch"], "minibatch"))
@pytest.mark.parametrize("normalized", [False, True])
def test_resumed_run_equals_the_uninterrupted_one(make_trainer, tmp_path, stop_at, normalized):
    data = {"norm_obs": True, "norm_reward": True, "vectorization_mode": "async"} if normalized else {}
    settings = {"learning_rate": "lin_1e-3", "clip_range": "lin_0.2", "ent_coef": 0.01, "target_kl": 0.02}
    _, _, trainer = run(make_trainer, data=data, **settings)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")

    # A rollout is 64 transitions: 2 passes of 4 minibatches. Steps 13 and 16 are inside and at the end of the second.
    cadence = {"epoch": {"every_n_epochs": 2}, "minibatch": {"every_n_train_steps": 13},
               "last minibatch": {"every_n_train_steps": 16}}[stop_at]  # fmt: skip
    saver = ModelCheckpoint(
        dirpath=tmp_path, filename="stopped", save_top_k=-1, enable_version_counter=False, **cadence
    )
    run(make_trainer, callbacks=[saver], data=data, trainer={"enable_checkpointing": True, "max_steps": 17}, **settings)
    torch.manual_seed(12345)  # the global generator has no part in it
    np.random.seed(12345)  # noqa: NPY002
    _, _, trainer = run(make_trainer, data=data, ckpt_path=tmp_path / "stopped.ckpt", **settings)
    trainer.save_checkpoint(tmp_path / "resumed.ckpt")

    one, other = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "resumed"))
    for part in ("state_dict", "optimizer_states", "RolloutDataModule", "hyper_parameters", "observation_statistics"):
        assert equal(one[part], other[part]) == [], part
    assert one["global_step"] == other["global_step"] == 32


def test_first_minibatch_has_ratio_one(make_trainer):
    largest = []

    class Ratio(PPO):
        def policy_loss(self, log_prob, batch):
            largest.append((log_prob.detach() - batch["log_prob"]).abs().max().item())
            return super().policy_loss(log_prob, batch)

    datamodule = RolloutDataModule("CartPole-v1", total_timesteps=256, **CARTPOLE)
    make_trainer().fit(Ratio(learning_rate=1e-2), datamodule=datamodule)
    firsts, others = largest[::8], [x for i, x in enumerate(largest) if i % 8]
    assert max(firsts) <= 1e-6
    assert max(others) > 1e-3


@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_rollout_and_update_agree_in_low_precision(make_trainer, precision):
    largest = []

    class Ratio(PPO):
        def policy_loss(self, log_prob, batch):
            largest.append((log_prob.detach() - batch["log_prob"]).abs().max().item())
            return super().policy_loss(log_prob, batch)

    datamodule = RolloutDataModule("CartPole-v1", total_timesteps=64, **CARTPOLE)
    make_trainer(precision=precision).fit(Ratio(), datamodule=datamodule)
    # bfloat16 keeps 8 bits; with the rollout in float32 the difference would be that of the rounding of the logits.
    assert largest[0] <= 1e-6


def test_schedules_run_to_zero_over_total_timesteps(make_trainer):
    observe = Observe(lambda m: (m.trainer.optimizers[0].param_groups[0]["lr"], m.clip_range))
    run(make_trainer, [observe], learning_rate="lin_1e-3", clip_range="lin_0.4")
    rates = [observe.seen[i * 8][0] for i in range(4)]
    clips = [observe.seen[i * 8][1] for i in range(4)]
    # The rollout just collected counts, as in Stable-Baselines3.
    np.testing.assert_allclose(rates, [0.75e-3, 0.5e-3, 0.25e-3, 0.0], atol=1e-12)
    np.testing.assert_allclose(clips, [0.3, 0.2, 0.1, 0.0], atol=1e-7)


def test_target_kl_stops_updates_until_the_next_rollout(make_trainer):
    weights = Observe(lambda m: m.network.policy_head.weight.detach().clone())
    moments = Observe(
        lambda m: m.trainer.optimizers[0].state[m.network.policy_head.weight].get("step", torch.zeros(())).item()
    )
    _, _, trainer = run(make_trainer, [weights, moments], learning_rate=0.05, target_kl=0.001, total_timesteps=128)
    assert len(weights.seen) == 16  # the epoch keeps its length
    assert trainer.global_step == moments.seen[-1]  # a skipped minibatch is no step
    for rollout in (weights.seen[:8], weights.seen[8:]):
        moved = [not torch.equal(a, b) for a, b in zip(rollout[:-1], rollout[1:], strict=True)]
        assert not moved[-1]
        # Once stopped, stopped for the rest of the rollout.
        assert moved == sorted(moved, reverse=True)
    assert not torch.equal(weights.seen[7], weights.seen[8])
    assert moments.seen[-1] < 16


def test_gradients_are_clipped_by_the_module_or_by_the_trainer(make_trainer):
    norms = {}
    for name, module_norm, trainer_norm in (("module", 0.01, None), ("trainer", 0.5, 0.002), ("none", None, None)):
        seen = []

        class Norm(PPO):
            def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
                seen.append(torch.cat([p.grad.flatten() for p in self.parameters()]).norm().item())  # noqa: B023

        datamodule = RolloutDataModule("CartPole-v1", total_timesteps=64, **CARTPOLE)
        make_trainer(gradient_clip_val=trainer_norm).fit(Norm(max_grad_norm=module_norm), datamodule=datamodule)
        norms[name] = max(seen)
    assert norms["module"] == pytest.approx(0.01, rel=1e-3)
    assert norms["trainer"] == pytest.approx(0.002, rel=1e-3)
    assert norms["none"] > 0.1


@pytest.mark.long
def test_three_lines_train_cartpole_and_the_checkpoint_predicts_alone(tmp_path):
    data = RolloutDataModule("CartPole-v1", n_envs=8, n_steps=32, batch_size=256, n_epochs=20, total_timesteps=12_000,
                             norm_obs=True, eval_freq=0)  # fmt: skip
    model = PPO(gamma=0.98, gae_lambda=0.8, learning_rate=1e-3)
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(model, datamodule=data)
    # An untrained policy reaches about 20, this much experience well over 100.
    assert data.metrics()["rollout/ep_rew_mean"] > 80

    path = tmp_path / "final.ckpt"
    trainer.save_checkpoint(path)
    loaded = PPO.load_from_checkpoint(path)
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=3)
    action, state = loaded.predict(observation, deterministic=True)
    assert action in (0, 1)
    assert np.shape(action) == ()
    assert state is None
    batch = np.stack([env.observation_space.sample() for _ in range(50)])
    batch[:, [1, 3]] = np.random.default_rng(0).normal(size=(50, 2))
    expected, _ = model.predict(batch, deterministic=True)
    got, _ = loaded.predict(batch, deterministic=True)
    assert got.shape == (50,)
    # The normaliser's statistics came along: without them the same weights choose otherwise.
    np.testing.assert_array_equal(got, expected)
    loaded.observation_statistics = None
    assert not np.array_equal(loaded.predict(batch, deterministic=True)[0], expected)


def test_stable_baselines3_evaluate_policy_accepts_the_module():
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation", reason="Stable-Baselines3 is not installed")
    env = gym.make("CartPole-v1")
    model = PPO(observation_space=space_to_dict(env.observation_space), action_space=space_to_dict(env.action_space))
    from stable_baselines3.common.monitor import Monitor

    returns, lengths = evaluation.evaluate_policy(model, Monitor(env), n_eval_episodes=3, return_episode_rewards=True)
    assert returns == lengths
    assert len(returns) == 3
    assert all(8 <= r <= 500 for r in returns)


def test_box_actions_are_stored_as_sampled_and_clipped_for_the_environment(make_trainer):
    seen = []

    class Wide(PPO):
        def prepare(self, rollout):
            seen.append(rollout["action"])
            return super().prepare(rollout)

    data = RolloutDataModule("Pendulum-v1", n_envs=2, n_steps=32, batch_size=16, total_timesteps=64, eval_freq=0)
    model = Wide(log_std_init=1.5)
    make_trainer().fit(model, datamodule=data)
    assert seen[0].abs().max() > 2.0
    actions, _ = model.predict(np.tile([[1.0, 0.0, 0.0]], (200, 1)))
    assert actions.shape == (200, 1)
    assert np.abs(actions).max() == 2.0


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_an_observation_read_backwards_is_its_copy(dtype):
    """Renderers turn pictures upside down by a view with negative strides."""
    space = gym.spaces.Box(0, 255, (6,), dtype)
    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    model = PPO(ortho_init=False, observation_space=space_to_dict(space), action_space=space_to_dict(box))
    observation = np.arange(6, dtype=dtype)
    forwards, backwards, copied = (
        model.predict(x, deterministic=True)[0] for x in (observation, observation[::-1], observation[::-1].copy())
    )
    np.testing.assert_array_equal(backwards, copied)
    assert not np.array_equal(backwards, forwards)


def test_value_loss_weighs_as_in_stable_baselines3():
    model = PPO()
    value, returns = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])
    assert model.value_loss(value, {"returns": returns, "value": value + 9}) == pytest.approx(2.0)  # mean of 4 and 0


def test_clipped_value_loss_takes_the_worse_of_both():
    model = PPO(clip_range_vf=0.5)
    batch = {"returns": torch.tensor([3.0, 0.0]), "value": torch.tensor([1.0, 1.0])}
    # First: clipped to 1.5, (1.5-3)² = 2.25 > (2.9-3)². Second: 0.2 clips to 0.5, 0.25 > 0.04.
    assert model.value_loss(torch.tensor([2.9, 0.2]), batch) == pytest.approx((2.25 + 0.25) / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 1.5}, r"gamma=1.5 must lie in \[0, 1\]"),
        ({"clip_range": "linear"}, "clip_range='linear' is no schedule"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 is no schedule"),
        ({"log_every": 0}, "log_every=0 must be at least 1"),
        (
            {"learning_rate": "lin_1", "lr_scheduler": torch.optim.lr_scheduler.LinearLR},
            "both change the learning rate",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, message):
    with pytest.raises(UsageError, match=message):
        PPO(**arguments)


@pytest.mark.parametrize(("given", "meant"), [("tan", "tanh"), (torch.nn.ReLU, "relu")])
def test_unknown_activation_is_named(given, meant):
    """Stable-Baselines3 takes the class."""
    box = space_to_dict(gym.spaces.Box(-1, 1, (2,)))
    model = PPO(activation_fn=given, observation_space=box, action_space=space_to_dict(gym.spaces.Discrete(2)))
    with pytest.raises(UsageError, match=f"activation_fn=.* is unknown; .* did you mean {meant}"):
        model.configure_model()
    with pytest.raises(UsageError, match="activation_fn is a ReLU; it takes numbers, texts"):
        PPO(activation_fn=torch.nn.ReLU())


def test_checkpoint_of_another_environment_or_class_is_refused(make_trainer, tmp_path):
    _, _, trainer = run(make_trainer, total_timesteps=64)
    trainer.save_checkpoint(tmp_path / "cartpole.ckpt")
    data = RolloutDataModule("Acrobot-v1", total_timesteps=64, **CARTPOLE)
    with pytest.raises(UsageError, match=r"of another environment, CartPole-v1: its observation_space is Box\(4,\)"):
        make_trainer().fit(PPO(), datamodule=data, ckpt_path=tmp_path / "cartpole.ckpt", weights_only=True)

    class Other(PPO):
        pass

    data = RolloutDataModule("CartPole-v1", total_timesteps=64, **CARTPOLE)
    with pytest.raises(UsageError, match="the checkpoint holds PPO, not Other"):
        make_trainer().fit(Other(), datamodule=data, ckpt_path=tmp_path / "cartpole.ckpt", weights_only=True)


def test_checkpoint_without_this_datamodules_state_is_refused(make_trainer, tmp_path):
    class Renamed(RolloutDataModule):
        pass

    _, _, trainer = run(make_trainer, total_timesteps=64)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    data = Renamed("CartPole-v1", total_timesteps=64, **CARTPOLE)
    with pytest.raises(UsageError, match=r"no state of .*Renamed; it has that of RolloutDataModule"):
        make_trainer().fit(PPO(), datamodule=data, ckpt_path=tmp_path / "one.ckpt", weights_only=True)


def test_another_algorithm_takes_few_lines(make_trainer):
    """A user's variant: advantages from one-step TD errors, and a loss without clipping."""
    from rl_modules import functional as F

    class VanillaTD(PPO):
        def advantages(self, rollout):
            return F.gae(rollout["reward"], rollout["value"], rollout["next_value"], rollout["terminated"],
                         rollout["truncated"], self.gamma, 0.0)  # fmt: skip

        def policy_loss(self, log_prob, batch):
            return F.policy_gradient_loss(log_prob, batch["advantage"])

    data = RolloutDataModule("CartPole-v1", total_timesteps=128, **CARTPOLE)
    make_trainer().fit(VanillaTD(), datamodule=data)
    assert data.num_timesteps == 128


def test_spaces_may_be_given_as_they_are(make_trainer, tmp_path):
    env = gym.make("CartPole-v1")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    observation, _ = env.reset(seed=0)
    assert PPO(**spaces).predict(observation)[0] in env.action_space
    model, _, trainer = run(make_trainer, total_timesteps=64, **spaces)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = PPO.load_from_checkpoint(tmp_path / "one.ckpt")
    assert loaded.hparams.observation_space == model.hparams.observation_space == space_to_dict(env.observation_space)
