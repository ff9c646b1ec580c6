"""Steps a vector of environments with a policy and keeps the books."""

import contextlib
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from datamodules.normalization import ObservationNormalizer, RewardNormalizer, RunningMeanStd
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import observation_arrays, to_environment, tree_leaves, tree_map

Act = Callable[[Any, torch.Generator], dict[str, Tensor]]


class Collector:
    """Experience from a vector of environments, in order, whatever their way of resetting.

    Args:
        envs: the vector environment; it is reset when the first experience is asked for.
        streams: one seed per environment.
        generator_seed: seed of the action sampling.
        name: the environment's name, for messages.
        observation_normalizer: updated with every observation and applied to it; None: raw observations.
        reward_normalizer: likewise for rewards.
        sign_reward: learn from the rewards' signs; the books keep the rewards themselves.
        gather_news: with several ranks, takes what this one's statistics have seen in a rollout and returns all ranks';
            called at the end of every rollout.
        stats_window_size: finished episodes in the running means.
    """

    def __init__(
        self,
        envs: VectorEnv,
        streams: list[int],
        generator_seed: int,
        name: str,
        observation_normalizer: ObservationNormalizer | None = None,
        reward_normalizer: RewardNormalizer | None = None,
        sign_reward: bool = False,
        gather_news: Callable[[np.ndarray], list[np.ndarray]] | None = None,
        stats_window_size: int = 100,
    ) -> None:
        self.envs = envs
        self.streams = streams
        self.name = name
        self.space = envs.single_observation_space
        self.mode = envs.metadata["autoreset_mode"]
        self.observation_normalizer = observation_normalizer
        self.reward_normalizer = reward_normalizer
        self.sign_reward = sign_reward
        self.gather_news = gather_news
        self._statistics: list[RunningMeanStd] = []
        if gather_news is not None:
            self._statistics = [part for normalizer in (observation_normalizer, reward_normalizer) if normalizer
                                for part in normalizer.parts()]  # fmt: skip
            for part in self._statistics:
                part.keep_news()
        self.generator_seed = generator_seed
        self.generator: torch.Generator | None = None
        self.episode_return = np.zeros(envs.num_envs, np.float64)
        self.episode_length = np.zeros(envs.num_envs, np.int64)
        self.recent_returns: deque[float] = deque(maxlen=stats_window_size)
        self.recent_lengths: deque[int] = deque(maxlen=stats_window_size)
        self._observation: Any = None
        # The same as the environments returned it: with statistics that move on, it can't be told from the normalised.
        self._raw: Any = None
        self._episodes_at_close: list[dict[str, Any]] | None = None
        self._resets_next = np.zeros(envs.num_envs, bool)

    def collect(self, act: Act, n_steps: int, device: torch.device) -> dict[str, Any]:
        """``n_steps`` rows of experience.

        Args:
            act: the policy, from a batch of observations to ``action`` and what else is to be kept.
            n_steps: T.
            device: where the policy is and the rollout shall be.

        Returns:
            Tensors [T, N, …]: observation, action, reward, terminated, truncated, valid, next_observation (the true
            successor), everything that ``act`` returned, and next_value where it returned ``value``.

        Raises:
            UsageError: a NaN or infinite reward or observation, or an environment process that died.
        """
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.generator_seed)
        if self._observation is None:
            self._observation = self._arrays(self._guarded(self.envs.reset, seed=self._reset_seed())[0])
        n = self.envs.num_envs
        observations = tree_map(lambda x: np.empty((n_steps + 1, *x.shape), x.dtype), self._observation)
        reward = np.empty((n_steps, n), np.float32)
        terminated, truncated, valid = (np.empty((n_steps, n), bool) for _ in range(3))
        acted: list[dict[str, Tensor]] = []
        final_rows: list[tuple[int, int]] = []
        finals: list[Any] = []
        for t in range(n_steps):
            tree_map(lambda buffer, x: buffer.__setitem__(t, x), observations, self._observation)  # noqa: B023
            acted.append(act(self._tensors(observations, t, device), self.generator))
            action = to_environment(self.envs.single_action_space, acted[-1]["action"].cpu().numpy())
            valid[t] = ~self._resets_next
            raw, raw_reward, terminated[t], truncated[t], info = self._guarded(self.envs.step, action)
            done = terminated[t] | truncated[t]
            any_done = done.any()
            if any_done and self.mode == AutoresetMode.SAME_STEP:
                for i in np.flatnonzero(done):
                    final_rows.append((t, int(i)))
                    finals.append(observation_arrays(self.space, info["final_obs"][i]))
            elif any_done and self.mode == AutoresetMode.DISABLED:
                ended = observation_arrays(self.space, raw)
                for i in np.flatnonzero(done):
                    final_rows.append((t, int(i)))
                    finals.append(tree_map(lambda x: x[i].copy(), ended))  # noqa: B023
                raw, _ = self._guarded(self.envs.reset, options={"reset_mask": done})
            elif self.mode == AutoresetMode.NEXT_STEP:
                self._resets_next = done.copy()
            self._count(raw_reward, done, valid[t], any_done)
            reward[t] = np.sign(raw_reward) if self.sign_reward else raw_reward
            if self.reward_normalizer is not None:
                reward[t] = self.reward_normalizer(raw_reward, done, valid[t])
            self._observation = self._arrays(raw)
        tree_map(lambda buffer, x: buffer.__setitem__(n_steps, x), observations, self._observation)
        self._check_finite(observations, reward, finals, final_rows)
        rollout = self._rollout(act, device, observations, reward, terminated, truncated, valid, acted, final_rows,
                                finals)  # fmt: skip
        self._share_statistics()
        return rollout

    def _share_statistics(self) -> None:
        """Let every rank's statistics know what the others have seen in this rollout."""
        if self.gather_news is None or not self._statistics:
            return
        sizes = np.cumsum([len(part.news()) for part in self._statistics])[:-1]
        everyone = self.gather_news(np.concatenate([part.news() for part in self._statistics]))
        for part, news in zip(self._statistics, zip(*(np.split(x, sizes) for x in everyone), strict=True), strict=True):
            part.absorb(list(news))

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
        final_rows: list[tuple[int, int]],
        finals: list[Any],
    ) -> dict[str, Any]:
        if self.observation_normalizer is not None:
            finals = [self.observation_normalizer(final) for final in finals]
        rows, columns = (np.array(index, np.int64) for index in zip(*final_rows, strict=True)) if finals else ([], [])
        final = tree_map(lambda *each: np.stack(each), *finals) if finals else None
        successors = tree_map(lambda x: x[1:].copy(), observations)
        if final is not None:
            tree_map(lambda x, y: x.__setitem__((rows, columns), y), successors, final)
        rollout: dict[str, Any] = {key: torch.stack([row[key] for row in acted]) for key in acted[0]}
        rollout["observation"] = tree_map(lambda x: torch.from_numpy(x[:-1]).to(device), observations)
        rollout["next_observation"] = tree_map(lambda x: torch.from_numpy(x).to(device), successors)
        for key, array in (("reward", reward), ("terminated", terminated), ("truncated", truncated), ("valid", valid)):
            rollout[key] = torch.from_numpy(array).to(device)
        if "value" in rollout:
            last = tree_map(lambda x: x[-1], observations)
            unseen = last if final is None else tree_map(lambda x, y: np.concatenate([x, y]), last, final)
            # Values of states in which nobody acted: the sampled actions are not used, nor their randomness missed.
            tensors = tree_map(lambda x: torch.from_numpy(x).to(device), unseen)
            value = act(tensors, torch.Generator(device))["value"]
            n = self.envs.num_envs
            rollout["next_value"] = torch.cat([rollout["value"][1:], value[None, :n]])
            if final is not None:
                rollout["next_value"][torch.from_numpy(rows), torch.from_numpy(columns)] = value[n:]
        return rollout

    # ---------------------------------------------------------------- one step

    def _arrays(self, raw: Any) -> Any:
        arrays = self._raw = observation_arrays(self.space, raw)
        if self.observation_normalizer is None:
            return arrays
        self.observation_normalizer.update(tree_map(lambda x: x[~self._resets_next], arrays))
        return self.observation_normalizer(arrays)

    @staticmethod
    def _tensors(observations: Any, t: int, device: torch.device) -> Any:
        if device.type == "cpu":
            return tree_map(lambda x: torch.from_numpy(x[t]), observations)
        return tree_map(lambda x: torch.from_numpy(x[t]).to(device), observations)

    def _count(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray, any_done: bool) -> None:
        self.episode_return += reward * valid
        self.episode_length += valid
        if any_done:
            for i in np.flatnonzero(done):
                self.recent_returns.append(float(self.episode_return[i]))
                self.recent_lengths.append(int(self.episode_length[i]))
            self.episode_return[done] = 0.0
            self.episode_length[done] = 0

    def _reset_seed(self) -> Any:
        # Engines are one environment with one stream; vectors of single ones have a stream each.
        return list(self.streams) if hasattr(self.envs, "get_attr") else self.streams[0]

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into the environments; what goes wrong there is told in one sentence.

        Raises:
            UsageError: a process died, which is named instead of its broken pipe; or an environment raised.
        """
        try:
            return call(*args, **kwargs)
        except UsageError:
            raise
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            processes = getattr(self.envs, "processes", [])
            dead = []
            for i, process in enumerate(processes):
                process.join(0.1)  # its end may not have been noticed yet
                if not process.is_alive():
                    dead.append(f"{i} (exit code {process.exitcode})")
                process.terminate()
            self.envs.closed = True  # closing would wait for answers that never come
            raise UsageError(f"the process of environment {', '.join(dead) or '?'} of {self.name} died; go on from "
                             "the last checkpoint with --resume") from error  # fmt: skip
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename}:{place.lineno}"
            if processes := getattr(self.envs, "processes", []):
                where = "its own traceback stands above"
                for process in processes:
                    process.terminate()
                self.envs.closed = True
            raise UsageError(f"the environment {self.name} raised {type(error).__name__}: {error} ({where}); once that "
                             "is mended, go on from the last checkpoint with --resume") from error  # fmt: skip

    def _check_finite(self, observations: Any, reward: np.ndarray, finals: list[Any], final_rows: list) -> None:
        """Refuse experience that would poison the network.

        Raises:
            UsageError: names the environment and the row.
        """
        bad = ~np.isfinite(reward)
        what = "reward"
        if not bad.any():
            what = "observation"
            for leaf in tree_leaves(observations):
                if leaf.dtype == np.float32:
                    bad = ~np.isfinite(leaf).reshape(*leaf.shape[:2], -1).all(-1)
                    if bad.any():
                        break
        if not bad.any() and finals:
            bad_finals = [row for row, final in zip(final_rows, finals, strict=True)
                          if not all(np.isfinite(leaf).all() for leaf in tree_leaves(final))]  # fmt: skip
            for row in bad_finals[:1]:
                bad = np.zeros_like(bad)
                bad[row] = True
        if bad.any():
            t, i = np.argwhere(bad)[0]
            raise UsageError(f"environment {i} of {self.name} returned a NaN or infinite {what} in row {t} of this "
                             "rollout; nothing was learned from it, and earlier checkpoints are untouched")  # fmt: skip

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, as tensors, numbers, strings, lists and dictionaries."""
        state: dict[str, Any] = {
            "episode_return": torch.from_numpy(self.episode_return.copy()),
            "episode_length": torch.from_numpy(self.episode_length.copy()),
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "resets_next": torch.from_numpy(self._resets_next.copy()),
            "generator": None if self.generator is None else self.generator.get_state(),
            "observation": _to_tensors(self._observation),
            "raw": None if self.observation_normalizer is None else _to_tensors(self._raw),
            "episodes": None,
        }
        if self._observation is not None and hasattr(self.envs, "get_attr"):
            state["episodes"] = self._episodes_at_close or self._episodes()
        for name in ("observation_normalizer", "reward_normalizer"):
            normalizer = getattr(self, name)
            state[name] = None if normalizer is None else normalizer.state_dict()
        return state

    def close(self) -> None:
        """End the environments; the state stays available, for a checkpoint written after training."""
        if self.envs.closed:
            return
        if self._observation is not None and hasattr(self.envs, "get_attr"):
            with contextlib.suppress(gym.error.Error, OSError, EOFError):  # an engine that failed has none
                self._episodes_at_close = self._episodes()
        self.envs.close()

    def _episodes(self) -> list[dict[str, Any]]:
        return [
            {**episode, "actions": torch.from_numpy(np.array(episode["actions"])) if episode["actions"] else None}
            for episode in self.envs.get_attr("episode_state")  # type: ignore[attr-defined]
        ]

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Bring everything back; running episodes are repeated from their seeds and actions."""
        self.episode_return = state["episode_return"].numpy().copy()
        self.episode_length = state["episode_length"].numpy().copy()
        self.recent_returns.extend(state["recent_returns"])
        self.recent_lengths.extend(state["recent_lengths"])
        self._resets_next = state["resets_next"].numpy().copy()
        if state["generator"] is not None:
            self.generator = torch.Generator(device)
            self.generator.set_state(state["generator"].cpu())
        for name in ("observation_normalizer", "reward_normalizer"):
            if state[name] is not None:
                getattr(self, name).load_state_dict(state[name])
        if state["observation"] is None:
            return
        self._observation = tree_map(lambda x: x.numpy(), state["observation"])
        raw = state["observation"] if state["raw"] is None else state["raw"]
        self._raw = tree_map(lambda x: x.numpy().copy(), raw)
        if state["episodes"] is None:
            self._begin_anew(np.ones(self.envs.num_envs, bool), "its engine has no state to bring back")
            return
        self._repeat(state["episodes"])

    def _repeat(self, episodes: list[dict[str, Any]]) -> None:
        self.envs.reset(seed=self._reset_seed())
        replays = [{**e, "actions": [] if e["actions"] is None else list(e["actions"].numpy())} for e in episodes]
        self.envs.set_attr("episode_state", replays)  # type: ignore[attr-defined]
        if self.mode == AutoresetMode.NEXT_STEP and hasattr(self.envs, "_autoreset_envs"):
            self.envs._autoreset_envs = self._resets_next.copy()
        reached = [observation_arrays(self.space, o) for o in self.envs.get_attr("last_observation")]  # type: ignore[attr-defined]
        differs = np.array([
            any(not np.array_equal(a, b[i]) for a, b in zip(tree_leaves(o), tree_leaves(self._raw), strict=True))
            for i, o in enumerate(reached)
        ])  # fmt: skip
        if differs.any():
            self._begin_anew(differs, "repeating its episode from seed and actions led elsewhere")

    def _begin_anew(self, which: np.ndarray, why: str) -> None:
        rank_zero_warn(f"{self.name}: environments {np.flatnonzero(which).tolist()} start a new episode, because {why};"
                       " from here on the run differs from one that was never stopped.")  # fmt: skip
        if not hasattr(self.envs, "get_attr"):
            raw, _ = self.envs.reset(seed=self._reset_seed())
            self._observation = self._arrays(raw)
            self._resets_next[:] = False
        else:
            states = self.envs.get_attr("episode_state")
            fresh = [{**s, "episode": s["episode"] + 1, "actions": []} if w else s
                     for s, w in zip(states, which, strict=True)]  # fmt: skip
            self.envs.set_attr("episode_state", fresh)  # type: ignore[attr-defined]
            for i in np.flatnonzero(which):
                new = observation_arrays(self.space, self.envs.get_attr("last_observation")[i])
                tree_map(lambda x, y: x.__setitem__(i, y), self._raw, new)  # noqa: B023
                if self.observation_normalizer is not None:
                    new = self.observation_normalizer(new)
                tree_map(lambda x, y: x.__setitem__(i, y), self._observation, new)  # noqa: B023
            self._resets_next[which] = False
        self.episode_return[which] = 0.0
        self.episode_length[which] = 0


def _to_tensors(tree: Any) -> Any:
    return None if tree is None else tree_map(lambda x: torch.from_numpy(np.array(x)), tree)
