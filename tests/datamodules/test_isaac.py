"""Environments with Isaac Lab's interface: a small one against a simulation by hand, and mjlab's where installed."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.envs.isaac import IsaacVector
from datamodules.tensor_collector import TensorCollector
from rl_modules import PPO, SAC
from rl_modules.common.errors import UsageError
from tests.training import fit

LENGTH = 5


class Drift:
    """Points on a line as Isaac Lab's ``ManagerBasedRLEnv``: they start in [0, 1], move by the action, end above 1.5.

    As there, the infos of all steps are one dictionary and rewards are written into the same memory.
    """

    is_vector_env = True

    def __init__(self, num_envs: int, mode: AutoresetMode = AutoresetMode.SAME_STEP, **cfg: Any) -> None:
        self.num_envs, self.device, self.cfg = num_envs, "cpu", SimpleNamespace(**cfg)
        self.metadata = {"render_modes": [None], "autoreset_mode": mode}
        self.single_observation_space = gym.spaces.Dict({"policy": gym.spaces.Box(-np.inf, np.inf, (2,))})
        self.single_action_space: Any = gym.spaces.Box(-np.inf, np.inf, (1,))
        self.extras: dict[str, Any] = {}
        self.reward_buf = torch.zeros(num_envs)
        self.x, self.t = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.long)
        self.generator, self.pending = torch.Generator(), torch.ones(num_envs, dtype=torch.bool)
        self.closed, self.resets_itself = False, mode == AutoresetMode.SAME_STEP

    @property
    def unwrapped(self) -> Any:
        return self

    def reset(self, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator.manual_seed(seed)
        self._reset(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self._observations(), self.extras

    def _reset(self, ids: Tensor) -> None:
        self.x[ids] = torch.rand(len(ids), generator=self.generator)
        self.t[ids], self.pending[ids] = 0, False
        self.extras["log"] = {"Episode_Reward/low": torch.tensor(0.5)}

    def _observations(self) -> dict[str, Any]:
        policy = torch.stack([self.x, self.t.float()], 1)
        # Noise, which is drawn anew whenever the simulator observes.
        return {"policy": policy, "critic": {"noise": torch.rand(self.num_envs, 3, generator=self.generator)}}

    def step(self, action: Tensor) -> Any:
        assert not self.pending.any(), "reset the environments that ended"
        self.x, self.t = self.x + action[:, 0], self.t + 1
        self.reward_buf[:] = -self.x
        terminated, truncated = self.x > 1.5, self.t >= LENGTH
        done = (terminated | truncated).nonzero().flatten()
        self.extras.pop("final_obs", None)
        if self.resets_itself and len(done):
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self._observations()
            self._reset(done)
        self.pending[done] = not self.resets_itself
        return self._observations(), self.reward_buf, terminated, truncated, self.extras

    def close(self) -> None:
        self.closed = True


def lab(num_envs: int = 3, **arguments: Any) -> IsaacVector:
    return IsaacVector(Drift(num_envs, compute_final_obs=True), **arguments)


def lab_without_resets(num_envs: int = 3, **arguments: Any) -> IsaacVector:
    return IsaacVector(Drift(num_envs, AutoresetMode.DISABLED), **arguments)


def lab_of_others(num_envs: int = 3, **arguments: Any) -> IsaacVector:
    """As mjlab: without Gymnasium's spaces and without a mode of resets, which the configuration says."""
    env = Drift(num_envs, auto_reset=False)
    env.resets_itself = False
    del env.metadata["autoreset_mode"]
    env.single_action_space = SimpleNamespace(shape=(1,), low=-float("inf"), high=float("inf"))
    return IsaacVector(env, **arguments)


MAKERS = [lab, lab_without_resets, lab_of_others]


@pytest.mark.parametrize("make", MAKERS)
def test_successors_at_an_end_are_those_of_a_simulation_by_hand(make: Any) -> None:
    rng = np.random.default_rng(0)
    actions = torch.from_numpy(rng.uniform(-0.2, 0.6, (40, 3, 1)).astype(np.float32))
    at = iter(actions)

    def act(observation: Tensor, _: torch.Generator) -> dict[str, Tensor]:
        return {"action": next(at, actions[0]), "value": 10 * observation[:, 0] + observation[:, 1]}

    rollout: Any = TensorCollector(make(), [0, 1, 2], 0, "drift").collect(act, 40, torch.device("cpu"))
    now, ends, cuts = rollout["observation"][0], 0, 0
    assert ((now[:, 0] >= 0) & (now[:, 0] <= 1)).all() and len({*now[:, 0].tolist()}) == 3
    for t in range(40):
        wanted = now + torch.cat([actions[t], torch.ones(3, 1)], 1)
        torch.testing.assert_close(rollout["next_observation"][t], wanted)
        torch.testing.assert_close(rollout["next_value"][t], 10 * wanted[:, 0] + wanted[:, 1])
        torch.testing.assert_close(rollout["reward"][t], -wanted[:, 0])
        assert rollout["terminated"][t].tolist() == (wanted[:, 0] > 1.5).tolist()
        assert rollout["truncated"][t].tolist() == (wanted[:, 1] >= LENGTH).tolist()
        done = rollout["terminated"][t] | rollout["truncated"][t]
        ends, cuts = ends + int(rollout["terminated"][t].sum()), cuts + int(rollout["truncated"][t].sum())
        if t < 39:
            now = rollout["observation"][t + 1]
            torch.testing.assert_close(now[~done], wanted[~done])
            assert (now[done, 1] == 0).all() and ((now[done, 0] >= 0) & (now[done, 0] <= 1)).all()
    assert ends > 3 and cuts > 3


@pytest.mark.parametrize("make", MAKERS[1:])
def test_a_reset_of_some_leaves_the_observations_of_others(make: Any) -> None:
    """The simulator draws the noise of all environments anew."""
    envs = make(group=["policy", "critic"])
    before = envs.reset(seed=3)[0]["critic"]["noise"].clone()
    after = envs.reset(options={"reset_mask": torch.tensor([False, True, False])})[0]["critic"]["noise"]
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and not torch.equal(after[1], before[1])


def test_a_policy_reads_the_groups_that_it_is_given() -> None:
    assert lab().single_observation_space.shape == (2,)
    both = lab(group=["critic", "policy"])
    assert both.single_observation_space["critic"]["noise"].shape == (3,)
    assert list(both.reset(seed=0)[0]) == ["critic", "policy"]
    with pytest.raises(UsageError, match="group='actor' has actor, and .* have the groups policy, critic"):
        lab(group="actor")


def test_actions_are_bounded_where_the_environment_leaves_them_unbounded() -> None:
    for make in MAKERS:
        assert make().single_action_space == gym.spaces.Box(-np.inf, np.inf, (1,))
        assert make(action_limit=2.0).single_action_space == gym.spaces.Box(-2.0, 2.0, (1,))
    narrow = Drift(2, compute_final_obs=True)
    narrow.single_action_space = gym.spaces.Box(-0.5, 3.0, (1,))
    assert IsaacVector(narrow, action_limit=2.0).single_action_space == gym.spaces.Box(-0.5, 2.0, (1,))


def test_a_time_limit_that_belongs_to_the_task_is_an_end() -> None:
    envs = IsaacVector(Drift(2, compute_final_obs=True, is_finite_horizon=True))
    envs.reset(seed=0)
    for _ in range(LENGTH):
        _, _, terminated, truncated, _ = envs.step(torch.zeros(2, 1))
    assert terminated.all() and not truncated.any()


@pytest.mark.parametrize(
    ("cfg", "setting"), [({}, "compute_final_obs=True"), ({"auto_reset": True}, "auto_reset=False")]
)
def test_an_environment_without_final_observations_is_refused(cfg: dict[str, bool], setting: str) -> None:
    with pytest.raises(UsageError, match=f"Drift resets in the step in which an episode ends .*; set {setting} in"):
        IsaacVector(Drift(2, **cfg))


def rollouts(make: Any, **settings: Any) -> RolloutDataModule:
    given = {"n_steps": 32, "n_epochs": 2, "batch_size": 128, "total_timesteps": 16_384, "eval_freq": 0}
    return RolloutDataModule(make, **{**given, **settings})


def test_a_policy_learns_to_stay_low_and_a_replay_buffer_stores_arrays() -> None:
    data = rollouts(lab_of_others, env_kwargs={"num_envs": 16, "action_limit": 1.0})
    fit(PPO(learning_rate=3e-3, net_arch=[16]), data)
    assert data.metrics()["rollout/ep_rew_mean"] > 8  # of at most 14: it moves by at most 1 in each of 5 steps
    for make in MAKERS:
        data = ReplayDataModule(make, env_kwargs={"action_limit": 1.0}, total_timesteps=99, learning_starts=50,
                                eval_freq=99, n_eval_episodes=2)  # fmt: skip
        trainer = fit(SAC(net_arch=[8]), data)
        assert trainer.callback_metrics["eval/mean_ep_length"] <= LENGTH


@pytest.mark.slow
def test_environments_of_mjlab_train_and_are_evaluated() -> None:
    pytest.importorskip("mjlab")
    made = {"name": "Mjlab-Cartpole-Balance", "num_envs": 4, "device": "cpu"}
    data = rollouts("datamodules.envs.isaac:mjlab", env_kwargs=made, n_steps=16, batch_size=64, total_timesteps=128,
                    eval_freq=128, n_eval_episodes=2, eval_max_steps=20)  # fmt: skip
    trainer = fit(PPO(net_arch=[8]), data)
    assert trainer.callback_metrics["eval/mean_ep_length"] == 20
    # At most 1 in a step, times the step's duration of .05 s.
    assert 0 < float(trainer.callback_metrics["eval/mean_reward"]) <= 20 * 0.05


@pytest.mark.slow
def test_an_episode_of_mjlab_ends_with_its_own_last_observation() -> None:
    """Position and velocity of the cart hardly change in the step of a time limit, and begin anew after it."""
    pytest.importorskip("mjlab")
    from datamodules.envs.isaac import mjlab

    envs = mjlab("Mjlab-Cartpole-Swingup", 2, "cpu")
    env = envs.env
    env.cfg.episode_length_s = 8 * env.step_dt
    collector = TensorCollector(envs, [0, 1], 0, "mjlab")

    def act(observation: Tensor, _: torch.Generator) -> dict[str, Tensor]:
        return {"action": torch.full((2, 1), 0.3), "value": observation[:, 0]}

    rollout: Any = collector.collect(act, 20, torch.device("cpu"))
    assert rollout["truncated"].nonzero().tolist() == [[7, 0], [7, 1], [15, 0], [15, 1]]
    assert not rollout["terminated"].any()
    cart, after = rollout["observation"][..., 0], rollout["next_observation"][..., 0]
    for t in range(20):
        moved = (after[t] - cart[t]).abs()
        assert (moved < 0.1).all()
        if t in (7, 15):
            assert (cart[t + 1] != after[t]).all()
        elif t < 19:
            assert torch.equal(cart[t + 1], after[t])
