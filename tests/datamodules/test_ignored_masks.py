"""``action_masks=False``: masks in observations are taken out, whatever makes the environments, and forbid nothing."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import C51, DQN, PPO, TRPO, QLearning, RecurrentPPO
from tests.training import fit

SIZES: dict[str, Any] = {"total_timesteps": 96, "eval_freq": 48, "n_eval_episodes": 2}


class Forbids(gym.Env):
    """Each state allows two of four actions, and says so in its observation; counts the others that are taken."""

    forbidden = 0

    def __init__(self, kind: str = "vector", wide: bool = False) -> None:
        observed = spaces.Discrete(3) if kind == "number" else spaces.Box(-1, 1, (3,), np.float32)
        parts = {"observation": observed, "action_mask": spaces.Box(0, 1, (4,), np.int8)}
        self.observation_space = spaces.Dict({**parts, "time": spaces.Box(0, 1, (1,), np.float32)} if wide else parts)
        self.action_space = spaces.Discrete(4)

    def observe(self) -> dict[str, Any]:
        self.mask = np.zeros(4, np.int8)
        self.mask[self.np_random.choice(4, 2, replace=False)] = 1
        seen = {name: space.sample() for name, space in self.observation_space.items()}  # type: ignore[attr-defined]
        return {**seen, "action_mask": self.mask.copy()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Forbids.forbidden += int(self.mask[action] == 0)
        self.t += 1
        return self.observe(), 1.0, False, self.t >= 7, {}


def make_vector(mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([Forbids] * 2, autoreset_mode=mode)


VECTORS = {mode.name: partial(make_vector, mode) for mode in AutoresetMode}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO": (lambda: PPO(net_arch=[8]), {"env_id": Forbids, "norm_obs": True}),
    "PPO wide": (lambda: PPO(net_arch=[8]), {"env_id": Forbids, "env_kwargs": {"wide": True}}),
    "PPO async": (lambda: PPO(net_arch=[8]), {"env_id": Forbids, "vectorization_mode": "async"}),
    "TRPO": (lambda: TRPO(net_arch=[8]), {"env_id": Forbids, "autoreset_mode": "next_step"}),
    "RecurrentPPO": (lambda: RecurrentPPO(net_arch=[8], lstm_hidden_size=8), {"env_id": Forbids}),
    "QLearning": (QLearning, {"env_id": Forbids, "env_kwargs": {"kind": "number"}}),
    "DQN": (lambda: DQN(net_arch=[8]), {"env_id": Forbids}),
    "C51": (lambda: C51(net_arch=[8]), {"env_id": Forbids}),
    **{f"PPO {name}": (lambda: PPO(net_arch=[8]), {"env_id": make}) for name, make in VECTORS.items()},
    **{f"DQN {name}": (lambda: DQN(net_arch=[8]), {"env_id": make}) for name, make in VECTORS.items()},
    "PPO one vector": (lambda: PPO(net_arch=[8]), {"env_id": VECTORS["SAME_STEP"](), "eval_freq": 0}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_forbidden_actions_are_taken_in_training_and_by_a_loaded_module(name: str, tmp_path: Path) -> None:
    make, arguments = CASES[name]
    model = make()
    arguments = {**SIZES, "action_masks": False, "n_envs": 2, **arguments}
    if isinstance(model, DQN | C51):
        data: Any = ReplayDataModule(learning_starts=30, batch_size=8, **arguments)
    else:
        data = RolloutDataModule(**arguments)
    Forbids.forbidden = 0
    trainer = fit(model, data)
    assert not model.masks_actions
    wide, number = (arguments.get("env_kwargs") or {}).get("wide"), "QLearning" in name
    expected = spaces.Dict if wide else spaces.Discrete if number else spaces.Box
    assert isinstance(model.observation_space, expected)
    if "async" not in name:  # counted in this process
        assert Forbids.forbidden > 10
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = type(model).load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    env = Forbids(**(arguments.get("env_kwargs") or {}))
    observation, _ = env.reset(seed=0)
    taken, other = model.predict(observation, deterministic=True)[0], loaded.predict(observation, deterministic=True)[0]
    assert taken == other
    forbidding = {**observation, "action_mask": (np.arange(4) != taken).astype(np.int8)}
    assert loaded.predict(forbidding, deterministic=True)[0] == taken
    # The argument holds, given by a caller who means it.
    only = (np.arange(4) == (taken + 1) % 4).astype(np.int8)
    assert loaded.predict(observation, deterministic=True, action_masks=only)[0] == (taken + 1) % 4


class Clock(Forbids):
    """Observes the time of the episode, beside the mask."""

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "observation": np.full(3, getattr(self, "t", 0) / 10, np.float32)}


class Keeps(PPO):
    """Keeps its rollouts."""

    def prepare(self, rollout: Any) -> dict[str, Any]:
        self.rollout = rollout
        return super().prepare(rollout)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_final_observations_come_without_their_mask(mode: AutoresetMode) -> None:
    make = partial(SyncVectorEnv, [Clock] * 2, autoreset_mode=mode)
    model = Keeps(net_arch=[8])
    fit(model, RolloutDataModule(make, action_masks=False, n_steps=16, total_timesteps=32, eval_freq=0))
    rollout = model.rollout
    assert rollout["observation"].shape == rollout["next_observation"].shape == (16, 2, 3)
    before, after = (rollout[name][rollout["valid"]] for name in ("observation", "next_observation"))
    torch.testing.assert_close(after, before + 0.1)
    assert rollout["truncated"].any()


@pytest.mark.long
def test_masks_may_be_switched_off_between_two_fits() -> None:
    data = RolloutDataModule(Forbids, **SIZES)
    Forbids.forbidden = 0
    fit(PPO(net_arch=[8]), data)
    assert Forbids.forbidden == 0
    data.action_masks = False
    fit(PPO(net_arch=[8]), data)
    assert Forbids.forbidden > 10
