"""Steps a vector of environments with a policy."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from datamodules.digits import Digits
from datamodules.envs import restore
from datamodules.envs.boundary import Boundary
from datamodules.envs.guard import require_finite, require_own_memory
from datamodules.envs.tensors import rows_of
from datamodules.episode_statistics import EpisodeStatistics
from datamodules.normalizers import Normalizers
from rl_modules.common.spaces import observation_arrays, to_environment, tree_map
from rl_modules.contract import Act, Rollout
from rl_modules.core.seams import require_acted
from rl_modules.core.state import Stateful, persistent

if TYPE_CHECKING:  # imported where a policy has a memory
    from datamodules.memory import Memory


class Collector(Stateful):
    """Collects experience from a vector of environments, in order of time, under any autoreset mode.

    Args:
        envs: the vector environment; it is reset by the first ``collect``.
        streams: one seed per environment.
        generator_seed: seed of the action sampling.
        name: the environment's name, for messages.
        normalizers: of observations and rewards, updated with every step.
        sign_reward: learn from the rewards' signs; episode statistics keep the rewards themselves.
        stats_window_size: finished episodes in the running means.
        returns_raw: rollouts hold observations and rewards as they were; only the policy sees normalised ones.
    """

    episodes: EpisodeStatistics = persistent()
    normalizers: Normalizers = persistent()
    generator: torch.Generator | None = persistent()
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
        normalizers: Normalizers | None = None,
        sign_reward: bool = False,
        stats_window_size: int = 100,
        returns_raw: bool = False,
    ) -> None:
        self.envs = envs
        self.boundary = Boundary(envs, name)
        self.returns_raw = returns_raw
        self.streams = streams
        self.name = name
        self.space = envs.single_observation_space
        self.mode = self.boundary.mode
        self.normalizers = normalizers or Normalizers()
        #: Whether observations in float64 are normalised as such.
        self.double = self.normalizers.of_observations is not None
        self.digits = Digits(self.space, name, self.double)
        self.sign_reward = sign_reward
        self.generator_seed = generator_seed
        self.episodes = EpisodeStatistics(envs.num_envs, stats_window_size)
        self.has_episodes = self.boundary.has_episodes
        self._episodes_at_close: list[dict[str, Any]] | None = None
        # Whether an episode has ended in a vector that resets in the same step.
        self._has_ended = False
        #: Environments in which a checkpoint's episode could not be repeated, so that they began another one, [N].
        self.begun_anew = np.zeros(envs.num_envs, bool)
        #: Whether each rollout ends with a call of :meth:`report`; False: the rollout's reader calls it later.
        self.reports_at_once = True

    @property
    def is_fresh(self) -> bool:
        """Whether no experience has been collected yet."""
        return self._observation is None

    def collect(self, act: Act, n_steps: int, device: torch.device) -> Rollout:
        """Collects ``n_steps`` rows of experience.

        Args:
            act: the policy; maps a batch of observations to ``action`` and other values to store.
            n_steps: T.
            device: where the policy is and the rollout will be.

        Returns:
            The rollout's fields, [T, N, …], everything that ``act`` returned among them.

        Raises:
            UsageError: a NaN or infinite reward or observation, or environments that failed.
        """
        self.is_unfinished = True
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.generator_seed)
        if self._observation is None:
            self._observation = self._arrays(self.boundary.reset(seed=self._reset_seed()))
        envs, n = self.envs, self.envs.num_envs
        observations = tree_map(lambda x: np.empty((n_steps + 1, *x.shape), x.dtype), self._observation)
        raw_reward, reward = np.empty((n_steps, n), np.float64), np.empty((n_steps, n), np.float32)
        terminated, truncated = np.empty((n_steps, n), bool), np.empty((n_steps, n), bool)
        valid = np.ones((n_steps, n), bool)
        acted: list[dict[str, Tensor]] = []
        finals: list[tuple[int, int, Any]] = []
        ends: list[list[Any]] = []
        if self.memory is not None:
            self.memory.begin_rollout()
        for t in range(n_steps):
            _write(observations, t, self._observation)
            observed = _tensors(observations, t, device)
            if self.returns_raw and self.normalizers.of_observations is not None:
                observed = _to_tensors(self.normalizers.observation(self._observation))
            if self.memory is None:
                acted.append(act(observed, self.generator))
            else:
                acted.append(self.memory.act(act, observed, self.generator, self.episode_start))
            if t == 0:
                require_acted(acted[0], n)
            action = to_environment(envs.single_action_space, acted[-1]["action"].cpu().numpy())
            raw, raw_reward[t], terminated[t], truncated[t], info = self.boundary.step(action)
            done = terminated[t] | truncated[t]
            if self.mode == AutoresetMode.NEXT_STEP:
                valid[t] = ~self._resets_next
                self.episode_start, self._resets_next = self._resets_next, done
            else:
                self.episode_start = done
            if done.any():
                ends += self.episodes.ends_of(done, info)
            if self.mode != AutoresetMode.NEXT_STEP and done.any():
                # The current statistics, because those of the next step include the observation after the reset.
                new = [(t, int(i), self._stored(final)) for i, final in self._finals(done, raw, info)]
                finals += new
                if self.mode == AutoresetMode.DISABLED:
                    raw = self.boundary.reset(options={"reset_mask": done})
            scaled = self.normalizers.reward(raw_reward[t], done, valid[t])
            reward[t] = raw_reward[t] if self.returns_raw else scaled
            self._observation = self._arrays(raw)
        _write(observations, n_steps, self._observation)
        if self.sign_reward:
            reward = np.sign(raw_reward).astype(np.float32)
        self._unreported = raw_reward, terminated | truncated, valid, ends
        if self.reports_at_once:
            self.report()
        require_finite(self.name, observations, reward, finals)
        rollout = self._rollout(act, device, observations, reward, terminated, truncated, valid, acted, finals)
        self.is_unfinished = False
        return rollout

    def report(self) -> None:
        """Adds the last rollout to the statistics of episodes."""
        if self._unreported is not None:
            self.episodes.update(*self._unreported)
        self._unreported = None

    def _finals(self, done: np.ndarray, raw: Any, info: dict[str, Any]) -> list[tuple[int, Any]]:
        """Environment and final observation, as arrays, of every episode that ended in this step."""
        if self.mode == AutoresetMode.DISABLED:
            ended = observation_arrays(self.space, raw, self.double)
            return [(int(i), tree_map(lambda x, i=i: x[i].copy(), ended)) for i in np.flatnonzero(done)]
        final = self.boundary.final(info)
        if not self._has_ended:
            self._has_ended = True
            require_own_memory(self.envs, self.name, final, done)
        if isinstance(final, dict) or (isinstance(final, tuple) and isinstance(self.space, spaces.Tuple)):
            final = rows_of(final, self.envs.num_envs)  # a batch, not one of each environment
        for i in np.flatnonzero(done):
            self.boundary.require_observation(final[i])
        # A vector may write the next ones into the same memory.
        ended = {int(i): observation_arrays(self.space, final[i], self.double) for i in np.flatnonzero(done)}
        return [(i, tree_map(np.array, arrays)) for i, arrays in ended.items()]

    def _rollout(
        self,
        act: Act,
        device: torch.device,
        observations: Any,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
        acted: list[dict[str, Tensor]],
        finals: list[tuple[int, int, Any]],
    ) -> Rollout:
        successors = tree_map(lambda x: x[1:].copy(), observations)
        for t, i, final in finals:
            tree_map(lambda x, y: x.__setitem__((t, i), y), successors, final)  # noqa: B023
        rollout: Any = {key: torch.stack([row[key] for row in acted]) for key in acted[0]}
        rollout["observation"] = tree_map(lambda x: torch.from_numpy(x[:-1]).to(device), observations)
        rollout["next_observation"] = tree_map(lambda x: torch.from_numpy(x).to(device), successors)
        for key, array in (("reward", reward), ("terminated", terminated), ("truncated", truncated), ("valid", valid)):
            rollout[key] = torch.from_numpy(array).to(device)
        if "value" in rollout:
            unseen = tree_map(lambda x: x[-1], observations)
            if finals:
                final = (f for _, _, f in finals)
                unseen = tree_map(lambda x, *each: np.concatenate([x, np.stack(each)]), unseen, *final)
            tensors = tree_map(lambda x: torch.from_numpy(x).to(device), unseen)
            ends = [(t, i) for t, i, _ in finals]
            rollout["next_value"] = self._next_value(act, device, tensors, rollout["value"], ends)
        return rollout

    def _next_value(
        self, act: Act, device: torch.device, unseen: Any, value: Tensor, ends: list[tuple[int, int]]
    ) -> Tensor:
        """V of every transition's true successor, [T, N].

        Args:
            act: the policy.
            device: where it is.
            unseen: observations after the rollout, and the final ones of episodes that ended in it, [N + F, …].
            value: of the rollout's observations, [T, N].
            ends: row and environment of each final observation.
        """
        # No action is taken in these states: the sampled actions are not used, and the policy's generator does not
        # advance.
        if self.memory is None:
            last = act(unseen, torch.Generator(device))["value"]
        else:
            last = self.memory.value(act, unseen, device, self.episode_start, ends)
        n = self.envs.num_envs
        next_value = torch.cat([value[1:], last[None, :n]])
        if ends:
            rows, columns = (torch.tensor(index, device=value.device) for index in zip(*ends, strict=True))
            next_value[rows, columns] = last[n:]
        return next_value

    # ---------------------------------------------------------------- resets and observations

    def _arrays(self, raw: Any) -> Any:
        if self.digits.left > 0:
            self.digits.see(observation_arrays(self.space, raw, double=True))
        arrays = self._raw = observation_arrays(self.space, raw, self.double)
        if self.normalizers.of_observations is None:
            return arrays
        self.normalizers.of_observations.update(tree_map(lambda x: x[~self._resets_next], arrays))
        return self._stored(arrays)

    def _stored(self, arrays: Any) -> Any:
        """Observations as the rollout holds them."""
        return arrays if self.returns_raw else self.normalizers.observation(arrays)

    def _reset_seed(self) -> Any:
        # An engine is one environment with one stream; vectors of single ones have a stream each.
        return list(self.streams) if self.has_episodes else self.streams[0]

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume exactly, as tensors, numbers, strings, lists and dictionaries."""
        running = None
        if self._observation is not None and self.has_episodes:
            # Environments that failed have none; the episodes of an unfinished rollout are not repeated anyway.
            find = restore.episode_states_or_none if self.is_unfinished else restore.episode_states
            running = self._episodes_at_close or find(self.envs)
        return {**super().state_dict(), "running": running}

    def close(self) -> None:
        """Ends the environments; the state stays available, for a checkpoint written after training."""
        if getattr(self.envs, "closed", False):
            return
        if self._observation is not None and self.has_episodes:
            self._episodes_at_close = restore.episode_states_or_none(self.envs)
        self.envs.close()

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """Restores everything; running episodes are repeated from their seeds and actions.

        ``begun_anew`` then marks the environments whose episode could not be repeated.
        """
        self.begun_anew[:] = False
        super().load_state_dict(state, device)
        if self._observation is None:
            return
        everywhere = np.ones(self.envs.num_envs, bool)
        if not self.has_episodes:
            self._begin_anew(everywhere, "its engine has no state to restore")
            return
        self.boundary.reset(seed=self._reset_seed())
        if state["running"] is None or self.is_unfinished:
            # Their last steps are in no rollout, so continued episodes would have a gap.
            restore.place_episodes(self.envs, state["running"] or [])
            self._begin_anew(everywhere, "the checkpoint was written by an error or interrupt while it stepped")
            return
        differs = restore.repeat_episodes(self.envs, state["running"], self.space, self._raw, self._resets_next)
        if differs.any():
            self._begin_anew(differs, "repeating its episode from seed and actions led elsewhere")

    def _begin_anew(self, which: np.ndarray, why: str) -> None:
        rank_zero_warn(f"{self.name}: environments {np.flatnonzero(which).tolist()} start a new episode, because {why};"
                       " from here on the run differs from one that was never stopped.")  # fmt: skip
        self._resets_next[which] = False
        self.episode_start[which] = True
        self.begun_anew |= which
        self.report()  # what is forgotten began with the last rollout's rewards
        self.episodes.forget(which)
        self.normalizers.forget(which)
        if not self.has_episodes:
            self._observation = self._arrays(self.boundary.reset(seed=self._reset_seed()))
            return
        for i, new in restore.begin_next_episodes(self.envs, which, self.space).items():
            tree_map(lambda x, y: x.__setitem__(i, y), self._raw, new)  # noqa: B023
            tree_map(lambda x, y: x.__setitem__(i, y), self._observation, self._stored(new))  # noqa: B023


def _write(buffers: Any, t: int, values: Any) -> None:
    if isinstance(buffers, dict):
        for key, buffer in buffers.items():
            _write(buffer, t, values[key])
    else:
        buffers[t] = values


def _tensors(observations: Any, t: int, device: torch.device) -> Any:
    if isinstance(observations, dict):
        return {key: _tensors(part, t, device) for key, part in observations.items()}
    tensor = torch.from_numpy(observations[t])
    return tensor if device.type == "cpu" else tensor.to(device)


def _to_tensors(tree: Any) -> Any:
    return None if tree is None else tree_map(lambda x: torch.as_tensor(x).cpu().clone(), tree)
