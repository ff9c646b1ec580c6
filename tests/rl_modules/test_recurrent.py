"""Recurrent policies: the unrolled network, the state while acting, sequences, checkpoints, tasks that need memory."""

import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import RolloutDataModule
from rl_modules import A2C, PPO, RecurrentA2C, RecurrentPPO
from rl_modules.common.errors import UsageError
from rl_modules.recurrent import RecurrentActorCritic
from tests.marks import quick
from tests.masked_envs import make_guarded, make_remember
from tests.training import assert_resumes_exactly, differences, fit, rollouts

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
NETWORKS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "gru": {"rnn": "gru"},
    "two layers": {"n_layers": 2},
    "shared": {"shared": True, "critic_rnn": False},
    "no critic memory": {"critic_rnn": False},
}


def make_short() -> gym.Env:
    return gym.make("CartPole-v1", max_episode_steps=5)


def small(cls: Any = RecurrentPPO, **arguments: Any) -> Any:
    return cls(**{"lstm_hidden_size": 8, "net_arch": [8], **arguments})


# -------------------------------------------------------------------- the network


@pytest.mark.parametrize("arguments", NETWORKS.values(), ids=NETWORKS)
def test_unrolled_sequences_equal_single_steps_with_a_reset_at_every_start(arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = RecurrentActorCritic(BOX, spaces.Discrete(3), hidden_size=6, net_arch=[5], **arguments)
    observation, state = torch.randn(4, 9, 3), torch.randn(4, *network.state_shape)
    starts = torch.rand(4, 9) < 0.3
    policy, value, after = network(observation, state, starts)
    log_p, values = [], []
    for t in range(9):
        state = torch.where(starts[:, t, None, None], 0.0, state)
        step, v, state = network(observation[:, t : t + 1], state)
        log_p.append(step.log_p)
        values.append(v)
    torch.testing.assert_close(policy.log_p.unflatten(0, (4, 9)), torch.stack(log_p, 1))
    torch.testing.assert_close(value.unflatten(0, (4, 9)), torch.stack(values, 1))
    torch.testing.assert_close(after, state)


def test_without_a_bfloat16_kernel_the_lstm_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    lstm, features, state = torch.nn.LSTM(3, 6), torch.randn(5, 4, 3), torch.randn(4, 2, 6)
    monkeypatch.setattr("rl_modules.networks.recurrent.lstm_runs_in", lambda dtype: False)
    with torch.autocast("cpu", torch.bfloat16):
        read, after = RecurrentActorCritic._run(lstm, features, state)
    expected, last = lstm(
        features, (state[:, :1].transpose(0, 1).contiguous(), state[:, 1:].transpose(0, 1).contiguous())
    )
    torch.testing.assert_close(read, expected, rtol=0, atol=0)
    torch.testing.assert_close(after, torch.cat(last).transpose(0, 1), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variable limits x86's instructions")
def test_recurrent_ppo_trains_in_bfloat16_on_a_processor_without_avx512() -> None:
    """In a process of its own, because oneDNN reads the variable once."""
    program = """
import torch
from rl_modules import RecurrentPPO
from rl_modules.networks.recurrent import lstm_runs_in
from tests.training import fit, rollouts

assert not lstm_runs_in(torch.bfloat16)
fit(RecurrentPPO(lstm_hidden_size=8), rollouts("CartPole-v1", n_envs=2), max_epochs=1, precision="bf16-mixed")
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_unrolled_lstm_equals_torchs_cell() -> None:
    torch.manual_seed(0)
    network = RecurrentActorCritic(BOX, spaces.Discrete(3), hidden_size=6)
    cell = torch.nn.LSTMCell(3, 6)
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in network.actor.state_dict().items()})
    observation = torch.randn(2, 5, 3)
    h, c = torch.zeros(2, 6), torch.zeros(2, 6)
    read = []
    for t in range(5):
        h, c = cell(observation[:, t], (h, c))
        read.append(h)
    latents, after = network.unroll(observation.transpose(0, 1), network.initial_state(2))
    torch.testing.assert_close(latents[0], torch.stack(read))
    torch.testing.assert_close(after[:, 0], h)
    torch.testing.assert_close(after[:, 1], c)


def test_a_shared_memory_gets_no_gradient_from_the_critic() -> None:
    network = RecurrentActorCritic(BOX, spaces.Discrete(3), hidden_size=6, shared=True, critic_rnn=False)
    network(torch.randn(2, 5, 3), network.initial_state(2))[1].sum().backward()
    assert all(p.grad is None for p in network.actor.parameters())


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("memories", [{}, {"shared_lstm": True, "enable_critic_lstm": False},
                                      {"enable_critic_lstm": False}])  # fmt: skip
def test_same_weights_give_sb3_contribs_log_probabilities(layers: int, memories: dict[str, bool]) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    peer = contrib.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=16, seed=0, device="cpu", policy_kwargs={
        "lstm_hidden_size": 8, "n_lstm_layers": layers, "net_arch": [8], **memories}).policy  # fmt: skip
    space = peer.observation_space
    ours = RecurrentActorCritic(space, peer.action_space, "lstm", 8, layers, memories.get("shared_lstm", False),
                                memories.get("enable_critic_lstm", True), [8])  # fmt: skip
    pairs = [(ours.actor, peer.lstm_actor), (ours.critic, peer.lstm_critic), (ours.critic_features, peer.critic),
             (ours.policy_tower, peer.mlp_extractor.policy_net), (ours.value_tower, peer.mlp_extractor.value_net),
             (ours.policy_head, peer.action_net), (ours.value_head, peer.value_net)]  # fmt: skip
    for mine, its in pairs:
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            mine.load_state_dict(its.state_dict())
    torch.manual_seed(1)
    observation, action = torch.randn(3, 7, 4), torch.randint(2, (3, 7))
    starts = torch.rand(3, 7) < 0.3
    state = torch.randn(3, *ours.state_shape)
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    def of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, cell = rows.transpose(0, 1).contiguous().chunk(2)
        return hidden.contiguous(), cell.contiguous()

    actor = of(state[:, : ours.rows])
    critic = of(state[:, ours.rows :]) if ours.critic is not None else actor
    value, log_prob, entropy = peer.evaluate_actions(
        observation.flatten(0, 1), action.flatten(), RNNStates(actor, critic), starts.flatten().float()
    )
    policy, ours_value, _ = ours(observation, state, starts)
    torch.testing.assert_close(policy.log_prob(action.flatten()), log_prob)
    torch.testing.assert_close(policy.entropy(), entropy)
    torch.testing.assert_close(ours_value, value.flatten())


# -------------------------------------------------------------------- acting and learning


class Watch:
    """Keeps rollouts, and the log-ratios of each first minibatch."""

    def prepare(self, rollout: Any) -> Any:
        self.__dict__.setdefault("rollouts", []).append(rollout)
        self.__dict__["fresh"] = True
        return super().prepare(rollout)  # type: ignore[misc]

    def minibatch_loss(self, policy: Any, value: Any, batch: Any) -> Any:
        if self.__dict__.pop("fresh", False):
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).detach()
            self.__dict__.setdefault("log_ratios", []).append(ratio)
            self.__dict__.setdefault("value_errors", []).append((value - batch["value"]).detach())
        return super().minibatch_loss(policy, value, batch)  # type: ignore[misc]


class Watched(Watch, RecurrentPPO):
    pass


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("arguments", [{}, {"rnn": "gru", "burn_in": 3}, {"sequence_length": 4}, {"burn_in": 10}],
                         ids=["plain", "gru burn-in", "short", "long burn-in"])  # fmt: skip
def test_the_first_ratio_is_one_in_every_rollout(mode: str, arguments: dict[str, Any]) -> None:
    model = small(Watched, learning_rate=0.01, **arguments)
    fit(model, rollouts(make_short, n_envs=4, n_steps=16, batch_size=32, n_epochs=2, total_timesteps=256,
                        autoreset_mode=mode))  # fmt: skip
    assert len(model.log_ratios) >= 4
    for ratio, error in zip(model.log_ratios, model.value_errors, strict=True):
        torch.testing.assert_close(ratio, torch.zeros_like(ratio), atol=2e-6, rtol=0)
        torch.testing.assert_close(error, torch.zeros_like(error), atol=2e-6, rtol=0)
    # Memories go on from one rollout to the next.
    assert any((~r["episode_start"][0]).any() and (r["state"][0] != 0).any() for r in model.rollouts[1:])


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_states_begin_with_episodes_and_truncation_is_valued_with_the_state_reached(mode: str) -> None:
    model = small(Watched, learning_rate=0.0)
    fit(model, rollouts(make_short, n_envs=3, n_steps=32, total_timesteps=96, autoreset_mode=mode))
    rollout = model.rollouts[0]
    ended = rollout["terminated"] | rollout["truncated"]
    checked = 0
    for i in range(3):
        begin = 0
        for t in range(32):
            if not rollout["valid"][t, i]:
                begin = t + 1
                continue
            assert bool(rollout["episode_start"][t, i]) == (t == begin)
            if t == begin:
                assert (rollout["state"][t, i] == 0).all()
            if ended[t, i]:
                episode = torch.cat(
                    [rollout["observation"][begin : t + 1, i], rollout["next_observation"][t : t + 1, i]]
                )
                with torch.no_grad():
                    _, value, _ = model.network(episode[None], model.initial_state(1))
                torch.testing.assert_close(rollout["next_value"][t, i], value[-1], atol=1e-5, rtol=0)
                torch.testing.assert_close(rollout["value"][begin : t + 1, i], value[:-1], atol=1e-5, rtol=0)
                checked += 1
                begin = t + 1
    assert checked > 6


def test_sequences_of_one_step_equal_the_whole_where_every_step_begins_an_episode() -> None:
    def one_step() -> gym.Env:
        return gym.make("CartPole-v1", max_episode_steps=1)

    final = []
    for length in (None, 1):
        model = small(sequence_length=length)
        fit(model, rollouts(one_step, n_envs=2, n_steps=8, total_timesteps=64))
        final.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(final[0], final[1])


@pytest.mark.parametrize("cls", [RecurrentPPO, RecurrentA2C])
def test_policy_and_value_of_sequences_are_those_of_acting_step_by_step(cls: Any) -> None:
    model = small(cls, observation_space=BOX, action_space=spaces.Discrete(3))
    model.configure_model()
    observation, starts = torch.randn(4, 6, 3), torch.rand(4, 6) < 0.3
    with torch.no_grad():
        policy, value = model.policy_and_value(observation, starts=starts)
    state, actions, log_probs, values = None, [], [], []
    for t in range(6):
        if state is not None:
            state = torch.where(starts[:, t, None, None], 0.0, state)
        with torch.no_grad():
            acted = model.act(observation[:, t], torch.Generator().manual_seed(t), state=state)
        state = acted["next_state"]
        actions.append(acted["action"])
        log_probs.append(acted["log_prob"])
        values.append(acted["value"])
    torch.testing.assert_close(policy.log_prob(torch.stack(actions, 1).flatten()), torch.stack(log_probs, 1).flatten())
    torch.testing.assert_close(value, torch.stack(values, 1).flatten())


def test_burn_in_brings_the_state_up_to_the_current_weights() -> None:
    """After an update the state of a burned-in sequence is what the weights of now reach from the rollout's start."""
    model = small(Watched, burn_in=8, sequence_length=8)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Spy(Watched):
        def _first_state(self, batch: Any) -> torch.Tensor:
            state = super()._first_state(batch)
            seen.append((batch["burn_in"]["exists"], state.detach()))
            rollout = self.rollouts[-1]
            with torch.no_grad():
                self.now = self.network(rollout["observation"][:8].transpose(0, 1), rollout["state"][0],
                                        rollout["episode_start"][:8].transpose(0, 1))[2]  # fmt: skip
            return state

    model = small(Spy, burn_in=8, sequence_length=8, learning_rate=0.05)
    fit(model, rollouts("CartPole-v1", n_envs=4, n_steps=16, n_epochs=3, total_timesteps=64))
    assert len(seen) == 3
    exists, state = seen[-1]
    # Rows are sequences: the first four the rollout's first halves, the others their second.
    assert exists.tolist() == [False] * 4 + [True] * 4
    torch.testing.assert_close(state[:4], model.rollouts[0]["state"][0])
    torch.testing.assert_close(state[4:], model.now)
    assert not torch.allclose(state[4:], model.rollouts[0]["state"][8])


def test_reset_rows_count_nowhere() -> None:
    """The same transitions give the same update, whether reset rows lie between them or not."""
    sizes: list[int] = []

    class Counts(RecurrentPPO):
        def minibatch_loss(self, policy: Any, value: Any, batch: Any) -> Any:
            sizes.append(len(value))
            assert len(policy.log_prob(batch["action"])) == len(batch["advantage"]) == len(value)
            return super().minibatch_loss(policy, value, batch)

    data = rollouts(make_short, n_envs=2, n_steps=12, autoreset_mode="next_step", total_timesteps=40)
    fit(small(Counts), data)
    assert sum(sizes) == data.num_timesteps < 48


@pytest.mark.parametrize("cls", [RecurrentPPO, RecurrentA2C])
@pytest.mark.parametrize("space", ["discrete", "multidiscrete", "multibinary"])
def test_masks_and_memory_together(cls: Any, space: str) -> None:
    # The environment fails on anything forbidden.
    for mode in ("same_step", "next_step"):
        fit(small(cls), rollouts(make_guarded, env_kwargs={"space": space, "source": "method"}, n_envs=2,
                                 total_timesteps=128, autoreset_mode=mode))  # fmt: skip


def test_masked_first_ratio_is_one() -> None:
    model = small(Watched)
    fit(model, rollouts(make_guarded, n_envs=2, n_steps=16, batch_size=16, total_timesteps=64))
    torch.testing.assert_close(model.log_ratios[0], torch.zeros_like(model.log_ratios[0]), atol=2e-6, rtol=0)


@pytest.mark.parametrize("action", ["Pendulum-v1", "tests.envs:make_identity_multibinary"])
def test_other_spaces(action: str) -> None:
    fit(small(burn_in=2), rollouts(action, n_envs=2, batch_size=16, total_timesteps=64, norm_obs=action[0] == "P",
                                   autoreset_mode="next_step"))  # fmt: skip


# -------------------------------------------------------------------- prediction and checkpoints


def test_predict_carries_the_state() -> None:
    model = small()
    fit(model, rollouts("CartPole-v1", total_timesteps=128))
    observations = np.random.default_rng(0).normal(size=(6, 2, 4)).astype(np.float32)
    state, start, actions = None, np.ones(2, bool), []
    for t, observation in enumerate(observations):
        start = np.array([t == 0, t in (0, 3)])
        action, state = model.predict(observation, state, start, deterministic=True)
        actions.append(action)
    starts = torch.tensor([[t == 0, t in (0, 3)] for t in range(6)]).T
    with torch.no_grad():
        policy, _, after = model.network(torch.from_numpy(observations).transpose(0, 1), model.initial_state(2), starts)
    np.testing.assert_array_equal(np.stack(actions, 1).ravel(), policy.mode().numpy())
    np.testing.assert_allclose(state, after.numpy(), atol=1e-6)
    one, after_one = model.predict(observations[0, 0], None, None, deterministic=True)
    assert one.shape == () and after_one.shape == (1, *model.network.state_shape)
    with pytest.raises(RuntimeError, match="shape"):
        model.predict(np.zeros((3, 4), np.float32), state)
    with pytest.raises(RuntimeError, match="size"):
        model.predict(observations[0], state, np.ones(3, bool))


def test_sb3s_evaluate_policy_carries_the_state() -> None:
    evaluate = pytest.importorskip("stable_baselines3.common.evaluation").evaluate_policy
    monitor = pytest.importorskip("stable_baselines3.common.monitor").Monitor
    model = small()
    fit(model, rollouts(make_short, total_timesteps=64))
    mean, _ = evaluate(model, monitor(make_short()), n_eval_episodes=3)
    assert mean == 5.0


@pytest.mark.parametrize("arguments", [{}, {"rnn": "gru", "burn_in": 2}], ids=["lstm", "gru burn-in"])
@pytest.mark.parametrize("mode", quick(["same_step", "next_step"], "next_step"))
def test_resumes_exactly(arguments: dict[str, Any], mode: str, tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: small(**arguments),
        lambda: rollouts("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, n_epochs=2, autoreset_mode=mode),
        tmp_path, epochs=3,
    )  # fmt: skip


def test_resumes_exactly_within_a_rollout(tmp_path: Path) -> None:
    def run(steps: int, resume: Path | None = None) -> Path:
        data = rollouts("CartPole-v1", n_envs=2, n_steps=8, batch_size=8, n_epochs=3)
        path = tmp_path / f"{steps}{'r' if resume else ''}.ckpt"
        fit(small(), data, ckpt_path=resume, max_steps=steps).save_checkpoint(path)
        return path

    # Lightning counts the epoch that a resumed run stops in once more.
    found = differences(run(16), run(16, run(9)))
    assert [x for x in found if not x.startswith("/epoch")] == []


def test_a2c_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: small(RecurrentA2C), lambda: rollouts("CartPole-v1", n_envs=2, n_steps=5), tmp_path)


# -------------------------------------------------------------------- tasks that need memory


def remembered(model: Any, masked: bool = False, **data: Any) -> float:
    module = rollouts(make_remember, env_kwargs={"masked": masked}, n_test_episodes=100, rollouts_per_epoch=10, **data)
    trainer = fit(model, module)
    return trainer.test(model, datamodule=module, verbose=False)[0]["test/mean_reward"]


PPO_DATA = {"n_envs": 8, "n_steps": 16, "batch_size": 64, "n_epochs": 5, "total_timesteps": 12_800}


@pytest.mark.slow
@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_recurrent_ppo_remembers(rnn: str) -> None:
    model = RecurrentPPO(rnn=rnn, lstm_hidden_size=16, net_arch=[], learning_rate=0.005, gamma=0.9)
    assert remembered(model, **PPO_DATA) > 0.95


@pytest.mark.slow
def test_feed_forward_ppo_cannot() -> None:
    assert remembered(PPO(learning_rate=0.005, gamma=0.9), **PPO_DATA) < 0.75


@pytest.mark.slow
def test_recurrent_ppo_remembers_behind_masks() -> None:
    model = RecurrentPPO(lstm_hidden_size=16, net_arch=[], learning_rate=0.005, gamma=0.9)
    assert remembered(model, masked=True, **{**PPO_DATA, "total_timesteps": 25_600}) > 0.95


@pytest.mark.slow
def test_recurrent_a2c_remembers() -> None:
    arguments: dict[str, Any] = {
        "learning_rate": 0.005,
        "gamma": 0.9,
        "use_rms_prop": False,
        "normalize_advantage": True,
    }
    data = {"n_envs": 16, "n_steps": 8, "total_timesteps": 40_000}
    assert remembered(RecurrentA2C(lstm_hidden_size=16, net_arch=[], **arguments), **data) > 0.95
    assert remembered(A2C(**arguments), **{**data, "total_timesteps": 10_000}) < 0.75


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"rnn": "rnn"}, "rnn='rnn' must be one of lstm, gru"),
     ({"shared_lstm": True}, "shared_lstm=True and enable_critic_lstm=True contradict each other"),
     ({"lstm_hidden_size": 0}, "lstm_hidden_size=0 must be at least 1"),
     ({"burn_in": -1}, "burn_in=-1 must be at least 0")],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RecurrentPPO(**arguments)


def test_a_sequence_length_that_does_not_fit() -> None:
    with pytest.raises(UsageError, match="sequence_length=5 must divide n_steps=16 and be at most batch_size=128"):
        fit(small(sequence_length=5), rollouts("CartPole-v1", total_timesteps=128))


def test_masked_velocities() -> None:
    data = RolloutDataModule("CartPole-v1", wrappers=["datamodules.envs.velocity.MaskVelocity"])
    data.setup("validate")
    observation, _ = data.example_env.reset(seed=0)
    observation, *_ = data.example_env.step(1)
    assert observation[[1, 3]].tolist() == [0.0, 0.0] and (observation[[0, 2]] != 0).all()
    with pytest.raises(UsageError, match="MaskVelocity knows the velocities of CartPole"):
        RolloutDataModule("Taxi-v4", wrappers=["datamodules.envs.velocity.MaskVelocity"]).setup("validate")


@pytest.mark.parametrize(("arguments", "says"), [({}, True), ({"sequence_length": 8}, False)])
def test_a_burn_in_that_no_sequence_has_room_for_is_named(arguments: dict[str, Any], says: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(small(burn_in=4, **arguments), rollouts("CartPole-v1", total_timesteps=256))
    assert says == any("burn_in=4 does nothing: in rollouts of 16 steps" in str(one.message) for one in caught)
