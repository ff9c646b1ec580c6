"""Steps a vector of environments with a policy."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from datamodules.envs import episodes
from datamodules.envs.boundary import require_numbers
from datamodules.envs.failures import close
from datamodules.envs.foreign import boundary_of
from datamodules.envs.resumed import resume_episodes
from datamodules.episode_statistics import EpisodeStatistics
from rl_modules.common.modules import in_double, is_double, tree_leaves, tree_map
from rl_modules.common.spaces import observation_arrays, to_environment
from rl_modules.contract import Act, Rollout
from rl_modules.core.seams import require_acted, require_rows
from rl_modules.core.state import Stateful, persistent
from rl_modules.distributions.state_dependent import exploring_act

if TYPE_CHECKING:  # imported where a policy has a memory, and where something is normalised
    from datamodules.memory import Memory
    from datamodules.normalization import Normalizers
    from rl_modules.base import ControlModule


class Collector(Stateful):
    """Collects experience from a vector of environments, in order of time, under any autoreset mode.

    The first ``collect`` resets them with the ``streams``. With ``sign_reward`` the rewards' signs are learned from,
    with ``returns_raw`` rollouts hold observations and rewards as they were.
    """

    episodes: EpisodeStatistics = persistent()
    normalizers: "Normalizers | None" = persistent()
    generator: Any = persistent()
    _observation: Any = persistent()
    # As the environments returned it: once normalised by statistics that change, it can't be recovered.
    _raw: Any = persistent()
    _resets_next: np.ndarray = persistent(lambda self: np.zeros(self.envs.num_envs, bool))
    #: Environments whose current observation is the first of its episode, [N].
    episode_start: np.ndarray = persistent(lambda self: np.ones(self.envs.num_envs, bool))
    #: Whether the last rollout is unfinished, as after an error: its rows were not returned.
    is_unfinished: bool = persistent(False)
    # Rewards, ends, valid rows and infos of ends in the last rollout, until they are added to the statistics.
    _unreported: tuple[np.ndarray, np.ndarray, np.ndarray, list[list[Any]]] | None = persistent()
    #: Of a recurrent policy; None: it has none.
    memory: "Memory | None" = persistent()

    def __init__(
        self,
        envs: VectorEnv,
        streams: list[int],
        generator_seed: int,
        name: str,
        normalizers: "Normalizers | None" = None,
        sign_reward: bool = False,
        stats_window_size: int = 100,
        returns_raw: bool = False,
    ) -> None:
        self.envs, self.name, self.streams = envs, name, streams
        self.boundary = boundary_of(envs, name)
        self.space, self.mode, self.has_episodes = self.boundary.space, self.boundary.mode, self.boundary.has_episodes
        self.normalizers, self.sign_reward, self.returns_raw = normalizers, sign_reward, returns_raw
        #: Whether observations in float64 are normalised as such.
        self.double = normalizers is not None and normalizers.of_observations is not None
        #: Observations as the rollout holds them.
        self._stored: Any = (lambda arrays: arrays) if normalizers is None or returns_raw else normalizers.observation
        self.generator_seed = generator_seed
        self.episodes = EpisodeStatistics(envs.num_envs, stats_window_size)
        self._episodes_at_close: list[dict[str, Any]] | None = None
        #: Environments in which a checkpoint's episode could not be repeated, so that they began another one, [N].
        self.begun_anew = np.zeros(envs.num_envs, bool)
        #: Whether each rollout ends with a call of :meth:`report`; False: the rollout's reader calls it later.
        self.reports_at_once = True
        #: Whether what ``act`` and ``prepare`` return has been checked, at their first calls.
        self.has_acted = self.has_prepared = False

    @property
    def is_fresh(self) -> bool:
        """Whether no experience has been collected yet."""
        return self._observation is None

    # ---------------------------------------------------------------- a rollout

    def collect(self, act: Act, n_steps: int, device: torch.device) -> Rollout:
        """Collects ``n_steps`` rows of N environments, [T, N, …] on ``device``, with all that ``act`` returned."""
        self.is_unfinished = True
        if self._observation is None:
            self._begin(device)
        n, normalizers, memory = self.envs.num_envs, self.normalizers, self.memory
        observations = tree_map(lambda x: np.empty((n_steps + 1, *x.shape), x.dtype), self._observation)
        raw_reward, reward = np.empty((n_steps, n), np.float64), np.empty((n_steps, n), np.float32)
        terminated, truncated = np.empty((n_steps, n), bool), np.empty((n_steps, n), bool)
        valid = np.ones((n_steps, n), bool)
        acted: list[dict[str, Tensor]] = []
        finals: list[tuple[int, int, Any]] = []
        ends: list[list[Any]] = []
        if memory is not None:
            memory.begin_rollout()
        for t in range(n_steps):
            tree_map(lambda rows, x, t=t: rows.__setitem__(t, x), observations, self._observation)
            seen = tree_map(lambda rows, t=t: torch.from_numpy(rows[t]).to(device), observations)
            if self.returns_raw and self.double:
                assert normalizers is not None
                seen = tree_map(torch.from_numpy, normalizers.observation(self._observation))
            acted.append(
                act(seen, self.generator)
                if memory is None
                else memory.act(act, seen, self.generator, self.episode_start)
            )
            if not self.has_acted:
                require_acted(acted[0], n)
                self.has_acted = True
            action = to_environment(self.envs.single_action_space, acted[-1]["action"].cpu().numpy())
            raw, raw_reward[t], terminated[t], truncated[t], info = self.boundary.step(action)
            done = terminated[t] | truncated[t]
            if self.mode == AutoresetMode.NEXT_STEP:
                valid[t] = ~self._resets_next
                self.episode_start, self._resets_next = self._resets_next, done
            else:
                self.episode_start = done
            if done.any():
                ends += self.episodes.ends_of(done, info)
                if self.mode != AutoresetMode.NEXT_STEP:
                    # Normalised now: the statistics of the next step include the observation after the reset. Copied:
                    # a vector may write the next ones into the same memory.
                    for i, x in self.boundary.finals(done, raw, info):
                        arrays = observation_arrays(self.space, x, self.double)
                        self._require_numbers(tree_map(lambda leaf: leaf[None], arrays), t, first=i)
                        finals.append((t, i, tree_map(np.array, self._stored(arrays))))
                if self.mode == AutoresetMode.DISABLED:
                    raw = self.boundary.reset(options={"reset_mask": done})
            scaled = raw_reward[t]
            if normalizers is not None:
                require_numbers(self.name, "reward", raw_reward[t], t)
                scaled = normalizers.reward(raw_reward[t], done, valid[t])
            reward[t] = raw_reward[t] if self.returns_raw else scaled
            self._observe(raw, t + 1)
        tree_map(lambda rows, x: rows.__setitem__(n_steps, x), observations, self._observation)
        if self.sign_reward:
            reward = np.sign(raw_reward).astype(np.float32)
        require_numbers(self.name, "reward", raw_reward)
        require_numbers(self.name, "reward", reward)  # as it is learned from, in fewer bits
        for leaf in tree_leaves(observations):
            require_numbers(self.name, "observation", leaf)
        self._unreported = raw_reward, terminated | truncated, valid, ends
        if self.reports_at_once:
            self.report()
        rollout: Any = {key: torch.stack([row[key] for row in acted]) for key in acted[0]}
        successors = tree_map(lambda x: x[1:].copy(), observations)
        for t, i, final in finals:
            tree_map(lambda x, y, at=(t, i): x.__setitem__(at, y), successors, final)
        rollout["observation"] = tree_map(lambda x: torch.from_numpy(x[:-1]).to(device), observations)
        rollout["next_observation"] = tree_map(lambda x: torch.from_numpy(x).to(device), successors)
        for key, array in (("reward", reward), ("terminated", terminated), ("truncated", truncated), ("valid", valid)):
            rollout[key] = torch.from_numpy(array).to(device)
        if "value" in rollout:
            unseen = tree_map(lambda x: x[-1], observations)
            if finals:
                rows = [final for _, _, final in finals]
                unseen = tree_map(lambda x, *each: np.concatenate([x, np.stack(each)]), unseen, *rows)
            unseen = tree_map(lambda x: torch.from_numpy(x).to(device), unseen)
            rollout["next_value"] = self._next_value(act, unseen, rollout["value"], [(t, i) for t, i, _ in finals])
        self.is_unfinished = False
        return rollout

    def report(self) -> None:
        """Adds the last rollout to the statistics of episodes."""
        if self._unreported is not None:
            self.episodes.update(*self._unreported)
        self._unreported = None

    def _begin(self, device: torch.device) -> None:
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.generator_seed)
        self._observe(self.boundary.reset(seed=self._reset_seed))

    @property
    def _reset_seed(self) -> Any:
        # An engine is one environment with one stream; vectors of single ones have a stream each.
        return list(self.streams) if self.has_episodes else self.streams[0]

    def _next_value(self, act: Act, unseen: Any, value: Tensor, ends: list[tuple[int, int]]) -> Tensor:
        """V of each true successor, [T, N]; ``unseen``: what follows the rollout, then finals at ``ends``."""
        # No action is taken in these states: the sampled actions are not used, and the policy's generator does not
        # advance.
        if self.memory is None:
            last = act(unseen, torch.Generator(value.device))["value"]
        else:
            last = self.memory.value(act, unseen, value.device, self.episode_start, ends)
        n = self.envs.num_envs
        next_value = torch.cat([value[1:], last[None, :n]])
        if ends:
            rows, columns = (torch.tensor(index, device=value.device) for index in zip(*ends, strict=True))
            next_value[rows, columns] = last[n:]
        return next_value

    def _observe(self, raw: Any, row: int = 0) -> None:
        """Keeps what the environments returned, in the dtypes in which rollouts store it; row ``row`` of a rollout."""
        arrays = observation_arrays(self.space, raw, self.double)
        if self.normalizers is not None and self.double:
            # Before the statistics have them, and before large ones are clipped.
            self._require_numbers(arrays, row)
            self.normalizers.see(tree_map(lambda x: x[~self._resets_next], arrays))
            self._observation, self._raw = self._stored(arrays), arrays
        else:
            self._observation = self._raw = arrays

    def _require_numbers(self, arrays: Any, row: int, first: int = 0) -> None:
        for leaf in tree_leaves(arrays):
            require_numbers(self.name, "observation", leaf, row, first)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume exactly; the running episodes are seeds and actions."""
        running = None
        if self._observation is not None and self.has_episodes:
            # Environments that failed have none; the episodes of an unfinished rollout are not repeated anyway.
            find = episodes.episode_states_or_none if self.is_unfinished else episodes.episode_states
            is_closed = getattr(self.envs, "closed", False)
            running = self._episodes_at_close if is_closed else find(self.envs)
        return {**super().state_dict(), "running": running}

    def close(self) -> None:
        """Ends the environments; the state stays available, for a checkpoint written after training."""
        if getattr(self.envs, "closed", False):
            return
        if self._observation is not None and self.has_episodes:
            self._episodes_at_close = episodes.episode_states_or_none(self.envs)
        close(self.envs, self.name)

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """Restores everything; running episodes are repeated, and ``begun_anew`` marks those that could not be."""
        self.begun_anew[:] = False
        device = "cpu" if self.returns_raw else device  # replayed experience, and the generator of its actions
        # What this run does not normalise has no statistics.
        super().load_state_dict({**state, "normalizers": None} if self.normalizers is None else state, device)
        if self._observation is not None and (self.is_unfinished or state.get("vector") is None):
            resume_episodes(self, state["running"])


# ---------------------------------------------------------------- calls of the algorithm


def rollout_act(learner: "ControlModule") -> Act:
    """Returns what collects one rollout: the algorithm's ``act``, with ``use_sde`` with its noise, in its precision."""
    act: Any = learner.act
    if learner.hparams.get("use_sde"):
        act = exploring_act(learner)
    if not is_double(learner):
        return act
    return lambda observation, *args, **arguments: act(in_double(observation), *args, **arguments)


def prepared_by(
    collector: Collector, learner: Any, experience: Any, rows: tuple[int, ...] | None = None, layout: str = "[T, N]"
) -> Any:
    """Returns what ``prepare`` makes of experience, checked once; ``rows``: its first dimensions, named ``layout``."""
    if is_double(learner):
        inputs = ("observation", "next_observation", "action")
        experience = {**experience, **{name: in_double(experience[name]) for name in inputs if name in experience}}
    prepared = learner.prepare(experience)
    if collector.has_prepared:
        return prepared
    if rows is None:
        # The number of rows may differ from the rollout's: Monte Carlo control yields the episodes that have ended.
        valid = prepared.get("valid", experience["valid"]) if isinstance(prepared, dict) else experience["valid"]
        rows, layout = tuple(valid.shape), layout if valid.shape == experience["valid"].shape else "[sequences, N]"
    require_rows(prepared, rows, layout)
    collector.has_prepared = True
    return prepared
