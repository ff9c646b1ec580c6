import copy
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from datamodules import ReplayDataModule
from rl_modules import DQN
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.networks.q_network import QNetwork
from tests import envs
from tests.training import assert_equal_checkpoints, assert_resumes_exactly, fit, mean_return

STATES = {
    "observation_space": space_to_dict(spaces.Discrete(3)),
    "action_space": space_to_dict(spaces.Discrete(2)),
}


class Table(torch.nn.Module):
    """Q(s, ·) looked up."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values))

    def forward(self, observation):
        return self.values[observation]


def tabular(online, target, timesteps=0, **kwargs):
    """A DQN over three states and two actions with known values, and no training around it."""
    model = DQN(**STATES, **kwargs)
    model.configure_model()
    model.network, model.target_network = Table(online), Table(target).requires_grad_(False)
    model._trainer = SimpleNamespace(datamodule=SimpleNamespace(num_timesteps=timesteps))
    return model


def replay(env_id="CartPole-v1", **arguments):
    defaults = {"total_timesteps": 10**9, "eval_freq": 0, "buffer_size": 2000, "learning_starts": 16, "batch_size": 16}
    return ReplayDataModule(env_id, **{**defaults, **arguments})


SAMPLE = {
    "observation": torch.tensor([0, 1, 2]),
    "action": torch.tensor([1, 0, 1]),
    # Two steps, one step to a truncation, two steps to a termination.
    "reward": torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]]),
    "n_steps": torch.tensor([2, 1, 2]),
    "terminated": torch.tensor([False, False, True]),
    "next_observation": torch.tensor([2, 1, 0]),
}
ONLINE = [[0.0, 10.0], [20.0, 0.0], [5.0, 4.0]]
TARGET = [[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]


@pytest.mark.parametrize(("double", "expected"), [
    # γ = 0.5: 1 + 0.5·2 + 0.25·32;  3 + 0.5·8;  5 + 0.5·6.
    (False, [10.0, 7.0, 8.0]),
    # The network prefers action 0 in states 2 and 1, which the target network values at 16 and 4.
    (True, [1 + 1 + 0.25 * 16, 3 + 0.5 * 4, 8.0]),
])  # fmt: skip
def test_hand_worked_targets_over_up_to_two_steps(double, expected):
    model = tabular(ONLINE, TARGET, gamma=0.5, double=double)
    assert model.td_target(model.prepare(SAMPLE)).tolist() == expected


def test_loss_compares_the_value_of_the_action_taken_and_only_moves_the_network():
    model = tabular(ONLINE, TARGET, gamma=0.5, loss="mse", double=True)
    model.run.logs_this_epoch = False
    loss = model.training_step(model.prepare(SAMPLE), 0)
    # Q(0, 1) = 10 against 6, Q(1, 0) = 20 against 5, Q(2, 1) = 4 against 8.
    assert loss.item() == pytest.approx((4**2 + 15**2 + 4**2) / 3)
    loss.backward()
    gradient = 2 / 3 * torch.tensor([[0.0, 4.0], [15.0, 0.0], [0.0, -4.0]])
    torch.testing.assert_close(model.network.values.grad, gradient)
    assert model.target_network.values.grad is None


@pytest.mark.parametrize(("loss", "expected"), [("mse", [16.0, 225.0, 16.0]), ("huber", [3.5, 14.5, 3.5])])
def test_importance_weights_scale_each_error(loss, expected):
    model = tabular(ONLINE, TARGET, gamma=0.5, loss=loss, double=True)
    model.run.logs_this_epoch = False
    weight = torch.tensor([1.0, 0.5, 0.25])
    sample = {**SAMPLE, "weight": weight, "index": torch.arange(3)}
    value = model.training_step(model.prepare(sample), 0).item()
    assert value == pytest.approx((torch.tensor(expected) * weight).sum().item() / 3)
    assert model.td_error.tolist() == [4.0, 15.0, 4.0]


# ---------------------------------------------------------------- the target network


def test_target_is_copied_when_enough_transitions_of_all_environments_have_passed():
    class Watch(DQN):
        def prepare(self, sample):
            before = copy.deepcopy(self.target_network.state_dict())
            prepared = super().prepare(sample)
            moved = any(not torch.equal(before[k], v) for k, v in self.target_network.state_dict().items())
            self.seen.append((self.trainer.datamodule.num_timesteps, moved))
            if moved:
                for name, value in self.network.state_dict().items():
                    assert torch.equal(value, self.target_network.state_dict()[name])
            return prepared

    model = Watch(target_update_interval=10, learning_rate=0.01)
    model.seen = []
    fit(model, replay(n_envs=4, train_freq=1, learning_starts=0, total_timesteps=60))
    assert [t for t, _ in model.seen] == list(range(4, 61, 4))
    # The first multiple of ten that is reached: 10 at 12, 20 at 20, 30 at 32 and so on.
    assert [t for t, moved in model.seen if moved] == [12, 20, 32, 40, 52, 60]


def test_polyak_moves_as_often_as_intervals_have_passed():
    model = tabular([[8.0, 8.0]], [[0.0, 0.0]], timesteps=29, tau=0.5, target_update_interval=10)
    model.update_target()
    # Half of the way, twice.
    assert model.target_network.values.tolist() == [[6.0, 6.0]]
    model.update_target()
    assert model.target_network.values.tolist() == [[6.0, 6.0]]
    model.trainer.datamodule.num_timesteps = 30
    model.update_target()
    assert model.target_network.values.tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize("interval", [10, 120])
def test_a_resumed_run_moves_the_target_at_its_own_interval(tmp_path, interval):
    moved_at = []

    class Watch(DQN):
        def update_target(self):
            before = copy.deepcopy(self.target_network.head.weight)
            super().update_target()
            if not torch.equal(before, self.target_network.head.weight):
                moved_at.append(self.source.num_timesteps)

    fit(Watch(target_update_interval=40), replay(total_timesteps=240)).save_checkpoint(tmp_path / "old.ckpt")
    assert moved_at == [40, 80, 120, 160, 200, 240]
    moved_at.clear()
    fit(Watch(target_update_interval=interval), replay(total_timesteps=480), ckpt_path=tmp_path / "old.ckpt")
    # The first multiple that a round of four transitions reaches.
    assert moved_at == [-(-t // 4) * 4 for t in range(240 + interval, 481, interval)]


@pytest.mark.long
def test_an_interval_that_a_callback_sets_resumes_exactly(tmp_path):
    class Sets(Callback):
        def on_train_epoch_start(self, trainer, module):
            module.target_update_interval = 100

    make_model, make_data = partial(DQN, target_update_interval=40), partial(replay, rollouts_per_epoch=15)
    assert_resumes_exactly(make_model, make_data, tmp_path, callbacks=[Sets()])


def test_the_interval_of_the_target_may_be_set_between_two_updates():
    model = tabular([[8.0, 8.0]], [[0.0, 0.0]], timesteps=200, tau=0.5, target_update_interval=10)
    model.update_target()
    model.target_network.values.zero_()
    model.target_update_interval = 100
    for timesteps, value in ((299, 0.0), (300, 4.0)):
        model.trainer.datamodule.num_timesteps = timesteps
        model.update_target()
        assert model.target_network.values.tolist() == [[value, value]]
    model.target_update_interval, model.trainer.datamodule.num_timesteps = 1, 301
    model.update_target()
    # Half of the way, once.
    assert model.target_network.values.tolist() == [[6.0, 6.0]]


def test_target_network_is_not_optimized():
    model = DQN()
    trainer = fit(model, replay(total_timesteps=40))
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in model.network.parameters()}
    # No interval has passed, so that the target is still what the network was.
    fresh = DQN(observation_space=model.hparams.observation_space, action_space=model.hparams.action_space)
    fresh.configure_model()
    for name, value in fresh.network.state_dict().items():
        assert torch.equal(value, model.target_network.state_dict()[name])
    assert not torch.equal(fresh.network.head.weight, model.network.head.weight)


# ---------------------------------------------------------------- exploration


def test_environments_explore_independently_of_each_other():
    model = tabular([[1.0, 0.0]] * 3, [[0.0, 0.0]] * 3)
    model.exploration_rate = 0.5
    generator = torch.Generator().manual_seed(0)
    n = 4000
    actions = torch.stack([model.act(torch.zeros(4, dtype=torch.int64), generator)["action"] for _ in range(n)]).float()
    # Half of the actions are random, half of those are not the greedy 0; five standard errors.
    assert (actions.mean(0) - 0.25).abs().max() < 5 * (0.25 * 0.75 / n) ** 0.5
    # One coin for all would correlate them with 1/3.
    assert (torch.corrcoef(actions.T) - torch.eye(4)).abs().max() < 5 / n**0.5


def test_greedy_when_deterministic_or_epsilon_is_zero():
    model = tabular(ONLINE, TARGET)
    states = torch.tensor([0, 1, 2])
    assert model.act(states, deterministic=True)["action"].tolist() == [1, 0, 0]
    model.exploration_rate = 0.0
    assert model.act(states, torch.Generator())["action"].tolist() == [1, 0, 0]


def test_epsilon_falls_over_its_share_of_the_run_and_stays():
    class Watch(Callback):
        def __init__(self):
            self.seen = {}

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.seen[trainer.datamodule.num_timesteps] = pl_module.exploration_rate

    watch = Watch()
    model = DQN(exploration_fraction=0.4, exploration_initial_eps=0.9, exploration_final_eps=0.1)
    fit(model, replay(train_freq=10, total_timesteps=100, learning_starts=0), callbacks=[watch])
    expected = {10: 0.7, 20: 0.5, 30: 0.3, **dict.fromkeys(range(40, 101, 10), 0.1)}
    assert watch.seen == pytest.approx(expected)


# ---------------------------------------------------------------- networks and observations


def test_dueling_head_is_value_plus_centred_advantage():
    torch.manual_seed(0)
    network = QNetwork(spaces.Box(-1, 1, (3,), np.float32), 4, [16, 8], dueling=True)
    x = torch.randn(5, 3)
    q = network(x)
    for_value, for_advantage = network.streams(network.trunk(x))
    value, advantage = network.value_head(for_value), network.head(for_advantage)
    torch.testing.assert_close(q.mean(1, keepdim=True), value)
    torch.testing.assert_close(q - q.mean(1, keepdim=True), advantage - advantage.mean(1, keepdim=True))
    with torch.no_grad():
        network.head.bias += 3.0
    torch.testing.assert_close(network(x), q)


class Pictures(gym.Env):
    """A picture that is white or black tells which of two actions pays."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.white = 0, int(self.np_random.integers(2))
        return self._picture(), {}

    def step(self, action):
        reward = float(action - 5 == self.white)
        self.t, self.white = self.t + 1, int(self.np_random.integers(2))
        return self._picture(), reward, False, self.t >= 10, {}

    def _picture(self):
        return np.full((36, 36, 1), 255 * self.white, np.uint8)


@pytest.mark.parametrize("dueling", [False, True])
def test_learns_from_images_and_actions_that_do_not_start_at_zero(dueling):
    model = DQN(gamma=0.0, learning_rate=1e-3, dueling=dueling, exploration_fraction=0.5)
    data = replay(Pictures, total_timesteps=160, learning_starts=32, train_freq=4, gradient_steps=1)
    fit(model, data)
    assert data.replay.observation.dtype == torch.uint8
    assert mean_return(model, Pictures(), 5) >= 9.5


# ---------------------------------------------------------------- known answers


@pytest.mark.long
def test_a_time_limit_is_not_an_end():
    # Reward 1 for ever is worth 1 / (1 - 0.9) = 10; with the limit of 8 taken for an end at most 5.7.
    model = DQN(gamma=0.9, learning_rate="lin_0.02", net_arch=[32], target_update_interval=32, loss="mse")
    fit(model, replay(envs.make_infinite_horizon, n_envs=4, train_freq=8, gradient_steps=8, total_timesteps=2000))
    q = model.network(torch.arange(4))
    assert (q - 10).abs().max() < 0.5


@pytest.mark.long
@pytest.mark.parametrize("n_steps", [1, 2])
def test_the_second_of_two_steps_is_discounted(n_steps):
    model = DQN(gamma=0.5, learning_rate="lin_0.02", net_arch=[32], target_update_interval=32)
    fit(model, replay(envs.make_two_steps, n_envs=2, train_freq=8, gradient_steps=4, total_timesteps=600,
                      n_steps=n_steps))  # fmt: skip
    q = model.network(torch.tensor([[0.0], [1.0]]))[:, 0]
    torch.testing.assert_close(q, torch.tensor([0.5, 1.0]), atol=0.03, rtol=0)


IDENTITY = {
    "plain": ({}, {}),
    "double, dueling, Polyak": ({"double": True, "dueling": True, "tau": 0.5}, {}),
    "prioritized": ({}, {"prioritized_replay": True}),
}


@pytest.mark.long
@pytest.mark.parametrize("variant", IDENTITY)
def test_identity_is_learned_in_two_thousand_transitions(variant):
    model_arguments, data_arguments = IDENTITY[variant]
    model = DQN(gamma=0.4, learning_rate=5e-3, target_update_interval=32, exploration_fraction=0.4, **model_arguments)
    fit(model, replay(envs.make_identity_discrete, n_envs=4, train_freq=4, gradient_steps=2, batch_size=32,
                      total_timesteps=2000, **data_arguments))  # fmt: skip
    assert mean_return(model, envs.make_identity_discrete(), 2) >= 90


@pytest.mark.long
@pytest.mark.bench
def test_identity_environment_of_stable_baselines3():
    identity = pytest.importorskip("stable_baselines3.common.envs.identity_env")
    model = DQN(gamma=0.4, learning_rate=2e-3, target_update_interval=50, exploration_fraction=0.4)
    fit(model, replay(lambda: identity.IdentityEnv(4), total_timesteps=2000, gradient_steps=2))
    assert mean_return(model, identity.IdentityEnv(4), 5) >= 90


@pytest.mark.bench
def test_stable_baselines3_evaluate_policy_accepts_the_module():
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation")
    from stable_baselines3.common.monitor import Monitor

    model = DQN()
    fit(model, replay(total_timesteps=100))
    returns, _ = evaluation.evaluate_policy(model, Monitor(gym.make("CartPole-v1")), 3, return_episode_rewards=True)
    assert len(returns) == 3


# ---------------------------------------------------------------- the run


FULL = {"double": True, "dueling": True, "tau": 0.3, "target_update_interval": 20, "exploration_fraction": 1.0}
VARIANTS = {
    "plain": ({"target_update_interval": 20}, {"gradient_steps": 3}),
    "everything": (FULL, {"prioritized_replay": True, "n_steps": 3, "gradient_steps": 3, "n_envs": 2}),
    "reset rows": ({}, {"n_envs": 3, "autoreset_mode": "next_step"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_equals_the_uninterrupted_one_at_epochs(tmp_path, variant):
    model, data = VARIANTS[variant]
    assert_resumes_exactly(
        lambda: DQN(learning_rate="lin_1e-3", **model),
        # The buffer is run over several times.
        lambda: replay(total_timesteps=800, buffer_size=60, rollouts_per_epoch=6, **data),
        tmp_path,
        epochs=3,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", [10, 12])
def test_resumed_run_equals_the_uninterrupted_one_within_an_epoch(tmp_path, variant, step):
    model, arguments = VARIANTS[variant]

    def run(ckpt_path=None, **trainer):
        data = replay(total_timesteps=220, buffer_size=60, rollouts_per_epoch=6, **arguments)
        return fit(DQN(learning_rate="lin_1e-3", **model), data, ckpt_path=ckpt_path, **trainer)

    # With three minibatches per round, step 10 lies within one and step 12 between two.
    saver = ModelCheckpoint(dirpath=tmp_path, filename="stopped", every_n_train_steps=step, save_top_k=-1,
                            enable_version_counter=False)  # fmt: skip
    run(max_steps=step, callbacks=[saver], enable_checkpointing=True)
    run().save_checkpoint(tmp_path / "whole.ckpt")
    run(ckpt_path=tmp_path / "stopped.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def test_same_seed_same_run_whatever_the_global_generators_and_evaluation(tmp_path):
    for name, torch_seed, seed, eval_freq in (("a", 0, 1, 0), ("b", 9, 1, 50), ("c", 0, 2, 0)):
        torch.manual_seed(torch_seed)
        np.random.seed(torch_seed)  # noqa: NPY002
        data = replay(total_timesteps=100, seed=seed, eval_freq=eval_freq, n_eval_episodes=2, rollouts_per_epoch=5)
        trainer = fit(DQN(), data)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt", weights_only=True)
    weights = {n: torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["state_dict"] for n in "abc"}
    assert all(torch.equal(value, weights["b"][key]) for key, value in weights["a"].items())
    assert not torch.equal(weights["a"]["network.head.weight"], weights["c"]["network.head.weight"])


def test_checkpoint_alone_is_enough_to_act(tmp_path):
    model = DQN(exploration_final_eps=0.07, exploration_fraction=0.5)
    trainer = fit(model, replay(total_timesteps=100))
    trainer.save_checkpoint(tmp_path / "dqn.ckpt")
    loaded = DQN.load_from_checkpoint(tmp_path / "dqn.ckpt", weights_only=True)
    assert loaded.exploration_rate == model.exploration_rate == pytest.approx(0.07)
    observations = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    expected, _ = model.predict(observations, deterministic=True)
    assert loaded.predict(observations, deterministic=True)[0].tolist() == expected.tolist()
    assert loaded.predict(observations[0])[0].shape == ()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"buffer_size": 100}, "buffer_size=100 differs from the checkpoint's 60; resume with that"),
    ({"prioritized_replay": True}, "prioritized_replay=True differs from the checkpoint's"),
])  # fmt: skip
def test_another_replay_than_the_checkpoint_is_refused(tmp_path, arguments, message):
    fit(DQN(), replay(total_timesteps=40, buffer_size=60)).save_checkpoint(tmp_path / "dqn.ckpt")
    with pytest.raises(UsageError, match=message):
        fit(DQN(), replay(**{"total_timesteps": 80, "buffer_size": 60, **arguments}), ckpt_path=tmp_path / "dqn.ckpt")


def test_metrics_carry_stable_baselines3_names(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    logged = []
    logger.log_metrics = lambda metrics, step=None: logged.append((step, metrics))
    fit(DQN(), replay(total_timesteps=80, rollouts_per_epoch=10, learning_starts=0), logger=logger)
    step, metrics = logged[-1]
    assert step == 80
    assert {"train/loss", "train/q_mean", "train/learning_rate", "train/n_updates", "rollout/exploration_rate",
            "rollout/ep_rew_mean", "time/total_timesteps"} <= metrics.keys()  # fmt: skip
    assert metrics["rollout/exploration_rate"] == pytest.approx(0.05)


def test_continuous_actions_are_refused_with_the_algorithms_that_fit():
    message = r"action space must be Discrete, not Box\(-2.0, 2.0, \(1,\), float32\); REINFORCE, A2C, TRPO and PPO fit"
    with pytest.raises(UsageError, match=message):
        fit(DQN(), replay("Pendulum-v1"))
