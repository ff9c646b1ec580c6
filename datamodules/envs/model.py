"""The transition table of an environment as tensors, for environments that have one."""

from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces, wrappers
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from datamodules.envs.episodes import SeededEpisodes
from rl_modules import functional as F

#: Wrappers that change neither transitions nor observations nor rewards.
_TRANSPARENT = (
    SeededEpisodes,
    wrappers.OrderEnforcing,
    wrappers.PassiveEnvChecker,
    wrappers.RecordEpisodeStatistics,
    wrappers.RecordVideo,
    wrappers.RenderCollection,
    wrappers.TimeLimit,
)
_MOST_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class TransitionModel:
    """A known Markov decision process.

    The end of an episode is an additional absorbing state, the last one, so S is the environment's number of states
    plus 1.

    Args:
        transition: P(s'|s, a), [S, A, S] float64.
        reward: expected r(s, a), [S, A] float64.
        start: distribution of the first state, [S] float64.
        horizon: the environment's time limit in steps; None: no limit.
        cells: rows of a grid world's letters, one cell per state: ``S`` start, ``G`` end, ``#`` unreachable, or those
            of the environment's own map; None: no grid.
    """

    transition: Tensor
    reward: Tensor
    start: Tensor
    horizon: int | None
    cells: tuple[str, ...] | None = None

    @property
    def states(self) -> int:
        """The environment's states, without the end."""
        return len(self.reward) - 1

    def expected_return(self, policy: Tensor) -> float:
        """Returns the exact mean of an episode's undiscounted return, within the time limit if there is one.

        Args:
            policy: π(a|s) of the environment's states, [states, A].

        Raises:
            ValueError: no time limit, and the policy need not end.
        """
        anything = policy.new_full((1, policy.shape[1]), 1 / policy.shape[1])
        policy = torch.cat([policy, anything]).double()
        if self.horizon is None:
            value = F.policy_evaluation(self.transition, self.reward, policy, gamma=1.0)
        else:
            value = F.finite_horizon_evaluation(self.transition, self.reward, policy, self.horizon)
        return float(self.start @ value)

    def optimal_return(self) -> float:
        """Returns the best mean return of any policy, including policies that depend on the time step."""
        if self.horizon is None:
            value = F.value_iteration(self.transition, self.reward, gamma=1.0).amax(-1)
        else:
            value = F.finite_horizon_value_iteration(self.transition, self.reward, self.horizon)
        return float(self.start @ value)

    def may_never_end(self) -> bool:
        """True where some policy never ends an episode."""
        forever = torch.ones(len(self.reward), dtype=torch.bool)
        forever[-1] = False
        while True:
            # A state stays in the set while some action leads only to states of the set.
            outside = self.transition[:, :, ~forever].sum(-1)
            smaller = forever & (outside <= 0).any(-1)
            if torch.equal(smaller, forever):
                break
            forever = smaller
        return bool((forever & self.reachable()).any())

    def reachable(self) -> Tensor:
        """Returns the states that some policy reaches, [S] bool."""
        reached = self.start > 0
        leads_to = (self.transition > 0).any(1)
        while True:
            grown = reached | leads_to[reached].any(0)
            if torch.equal(grown, reached):
                return reached
            reached = grown

    def acts_in(self) -> Tensor:
        """States in which an agent acts: some policy reaches them, and the episode has not ended; [states] bool."""
        ended = (self.transition[:-1, :, -1] == 1).all(-1) & (self.reward[:-1] == 0).all(-1)
        return self.reachable()[:-1] & ~ended


def transition_model(env: gym.Env) -> TransitionModel | None:
    """Reads an environment's table ``env.unwrapped.P``, as FrozenLake, CliffWalking, Taxi and Maze have one.

    ``P[s][a]`` is a list of (probability, s', reward, terminated); ``initial_state_distrib`` says where episodes
    start. The horizon is the shortest TimeLimit among the wrappers.

    Args:
        env: an environment, wrapped or not.

    Returns:
        None where there is no such table, where a wrapper might change rewards or observations, where Taxi has fickle
        passengers, or (with a warning) where the tensors would take more than 2 GiB.
    """
    table = getattr(env.unwrapped, "P", None)
    start = getattr(env.unwrapped, "initial_state_distrib", None)
    state_space, action_space = env.observation_space, env.action_space
    discrete = isinstance(state_space, spaces.Discrete) and isinstance(action_space, spaces.Discrete)
    # Taxi's fickle passengers change their destination in a way that its table does not have.
    if table is None or start is None or not discrete or getattr(env.unwrapped, "fickle_passenger", False):
        return None
    horizon: int | None = None
    layer = env
    while isinstance(layer, gym.Wrapper):
        if not isinstance(layer, _TRANSPARENT):
            return None
        if isinstance(layer, wrappers.TimeLimit):
            limit = layer._max_episode_steps
            horizon = limit if horizon is None else min(horizon, limit)
        layer = layer.env
    assert isinstance(state_space, spaces.Discrete) and isinstance(action_space, spaces.Discrete)
    n_states, n_actions = int(state_space.n), int(action_space.n)
    size = 8 * (n_states + 1) ** 2 * n_actions
    if size > _MOST_BYTES:
        rank_zero_warn(
            f"{env}: its transition table would take {size / 1024**3:.1f} GiB, so that nothing is evaluated exactly"
        )
        return None
    transition = torch.zeros(n_states + 1, n_actions, n_states + 1, dtype=torch.float64)
    reward = torch.zeros(n_states + 1, n_actions, dtype=torch.float64)
    transition[n_states, :, n_states] = 1.0
    ends: set[int] = set()
    for s in range(n_states):
        for a in range(n_actions):
            for probability, successor, r, terminated in table[s + state_space.start][a + action_space.start]:
                reward[s, a] += probability * float(r)
                transition[s, a, n_states if terminated else int(successor) - state_space.start] += probability
                if terminated:
                    ends.add(int(successor) - int(state_space.start))
    first = torch.from_numpy(np.append(np.asarray(start, np.float64), 0.0))
    model = TransitionModel(transition, reward, first, horizon)
    return replace(model, cells=_cells(env.unwrapped, model, ends))


def _cells(env: gym.Env, model: TransitionModel, ends: set[int]) -> tuple[str, ...] | None:
    desc = getattr(env, "desc", None)
    if desc is not None and np.asarray(desc).size == model.states:
        return tuple("".join(cell.decode() if isinstance(cell, bytes) else cell for cell in row) for row in desc)
    shape = getattr(env, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] * shape[1] != model.states:
        return None
    reachable = model.reachable()
    letters = [
        "G" if s in ends else "S" if model.start[s] > 0 else "." if reachable[s] else "#" for s in range(model.states)
    ]
    return tuple("".join(letters[row * shape[1] : (row + 1) * shape[1]]) for row in range(shape[0]))
