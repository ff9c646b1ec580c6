"""Steps a vector of environments whose tensors are on a device."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from datamodules.collector import Collector
from datamodules.envs.boundary import largest, require_numbers
from datamodules.envs.foreign import ForeignBoundary
from datamodules.envs.tensors import action_tensors, observation_tensors
from datamodules.normalization import Normalizers
from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.common.spaces import example_arrays
from rl_modules.contract import Act, Rollout
from rl_modules.core.seams import require_acted
from rl_modules.core.state import persistent


class TensorCollector(Collector):
    """Collects rollouts from environments of torch tensors; numbers go to the host once per rollout."""

    boundary: ForeignBoundary
    envs: Any
    #: A vector that can be saved, whose running episodes go on where a run resumes; None: they begin anew.
    vector: Any = persistent(lambda self: self.envs if hasattr(self.envs, "state_dict") else None)

    def collect(self, act: Act, n_steps: int, device: torch.device) -> Rollout:
        """As :meth:`Collector.collect`, on ``device``; an end without its final observation is refused."""
        self.is_unfinished = True
        if self._observation is None:
            self._begin(device)
        envs, n = self.envs, self.envs.num_envs
        on = tree_leaves(self._observation)[0].device
        observations, successors = (
            tree_map(lambda x, rows=rows: x.new_empty((rows, *x.shape), device=device), self._observation)
            for rows in (n_steps + 1, n_steps)
        )
        reward = torch.empty((n_steps, n), dtype=torch.float32, device=device)
        terminated, truncated = (torch.empty((n_steps, n), dtype=torch.bool, device=device) for _ in range(2))
        valid = torch.ones_like(terminated)
        starts, resets_next = (torch.from_numpy(x).to(on) for x in (self.episode_start, self._resets_next))
        normalizers = TensorNormalizers(self.normalizers or Normalizers(), self.space, device)
        acted: list[dict[str, Tensor]] = []
        infos: list[dict[str, Tensor]] = []
        if self.memory is not None:
            self.memory.begin_rollout()
        for t in range(n_steps):
            tree_map(lambda buffer, x, t=t: buffer[t].copy_(x), observations, self._observation)
            observed = normalizers.observation(tree_map(lambda buffer, t=t: buffer[t], observations))
            if self.memory is None:
                acted.append(act(observed, self.generator))
            else:
                acted.append(self.memory.act(act, observed, self.generator, starts))
            if not self.has_acted:
                require_acted(acted[0], n)
                self.has_acted = True
            raw, raw_reward, ended, cut, info = self.boundary.step(
                action_tensors(envs.single_action_space, acted[-1]["action"].to(on))
            )
            ended, cut = ended.bool(), cut.bool()
            reward[t], terminated[t], truncated[t] = raw_reward, ended, cut
            done = ended | cut
            infos.append(_copied(info, ("is_success", *self.episodes.info_keywords)))
            if self.mode == AutoresetMode.NEXT_STEP:
                valid[t] = ~resets_next
                starts, resets_next = resets_next, done
                self._observe(raw)
                final = self._observation
            else:
                starts = done
                raw, final = self._after_a_reset(raw, done, info)
                self._observe(raw)
            tree_map(
                lambda buffer, x, last, t=t, done=done: buffer[t].copy_(_where(done, last, x)),
                successors,
                self._observation,
                final,
            )
        tree_map(lambda buffer, x: buffer[n_steps].copy_(x), observations, self._observation)
        self.episode_start, self._resets_next = (x.cpu().numpy().copy() for x in (starts, resets_next))
        done = terminated | truncated
        self._require_numbers_of_rollout(observations, successors, reward)
        self._remember(reward, done, valid, infos)
        reward = reward.sign() if self.sign_reward else normalizers.reward(reward, done, valid)
        normalizers.update(tree_map(lambda x: x[:-1], observations), valid)
        observations, successors = normalizers.observation(observations), normalizers.observation(successors)
        rollout: Any = {key: torch.stack([row[key] for row in acted]) for key in acted[0]}
        rollout.update(
            observation=tree_map(lambda x: x[:-1], observations),
            next_observation=successors,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
        )
        if "value" in rollout:
            rollout["next_value"] = self._value_of_successors(act, device, observations, rollout)
        self.is_unfinished = False
        return rollout

    def _after_a_reset(self, raw: Any, done: Tensor, info: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the vector's observations after resets, and final observations in the rows of episodes that ended."""
        if self.mode == AutoresetMode.DISABLED:
            if not done.any():
                return raw, self._tensors(raw)
            final = tree_map(torch.clone, self._tensors(raw))  # the reset may write into the same memory
            return self.boundary.reset(options={"reset_mask": done}), final
        if info.get("final_obs") is not None or done.any():
            return raw, self._tensors(self.boundary.batch_of_finals(info))
        return raw, self._tensors(raw)

    def _remember(self, reward: Tensor, done: Tensor, valid: Tensor, infos: list[dict[str, Tensor]]) -> None:
        """Keeps the rollout's rewards and ends for the statistics of episodes, in the host's memory."""
        arrays = [x.cpu().numpy() for x in (reward.double(), done, valid)]
        ends: list[list[Any]] = []
        for t, info in enumerate(infos):
            if arrays[1][t].any():
                ends += self.episodes.ends_of(arrays[1][t], {key: x.cpu().numpy() for key, x in info.items()})
        self._unreported = arrays[0], arrays[1], arrays[2], ends
        if self.reports_at_once:
            self.report()

    def _require_numbers_of_rollout(self, observations: Any, successors: Any, reward: Tensor) -> None:
        real = [x for tree in (observations, successors) for x in tree_leaves(tree) if x.is_floating_point()]
        if torch.stack([(x.abs() <= largest(x.dtype)).all() for x in [*real, reward]]).all():
            return
        require_numbers(self.name, "reward", reward.cpu().numpy())
        for x in real:
            require_numbers(self.name, "observation", x.cpu().numpy())

    def _value_of_successors(self, act: Act, device: torch.device, observations: Any, rollout: Any) -> Tensor:
        """V of every transition's true successor, [T, N]."""
        rows = columns = torch.zeros(0, dtype=torch.int64, device=device)
        if self.mode != AutoresetMode.NEXT_STEP:
            rows, columns = (rollout["terminated"] | rollout["truncated"]).nonzero(as_tuple=True)
        unseen = tree_map(lambda x, y: torch.cat([x[-1], y[rows, columns]]), observations, rollout["next_observation"])
        ends = list(zip(rows.tolist(), columns.tolist(), strict=True))
        return self._next_value(act, unseen, rollout["value"], ends)

    def _observe(self, raw: Any, row: int = 0) -> None:
        self._observation = self._raw = self._tensors(raw)

    def _tensors(self, raw: Any) -> Any:
        return observation_tensors(self.space, raw, self.double)


def _copied(info: dict[str, Any], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Some infos of a step with their masks, in copies: a vector may write into its own tensors again."""
    info = info.get("final_info", info)
    return {key: torch.as_tensor(info[key]).clone() for name in names for key in (name, f"_{name}") if key in info}


def _where(done: Tensor, last: Tensor, x: Tensor) -> Tensor:
    """``last`` in the rows that are ``done``, else ``x``."""
    return x if last is x else torch.where(done.reshape(-1, *[1] * (x.dim() - 1)), last, x)


class TensorNormalizers:
    """The normalisers of a run on a device: by the statistics from before a rollout, which then changes them."""

    def __init__(self, normalizers: Normalizers, space: spaces.Space, device: torch.device) -> None:
        self.normalizers = normalizers

        def on_device(statistic: Any, example: np.ndarray) -> Any:
            if statistic is None:
                return None
            mean, std, clip = statistic
            return *(torch.from_numpy(np.asarray(x, example.dtype)).to(device) for x in (mean, std)), clip

        # The CPU's statistics are float64; those of a device are where its observations may be.
        given = normalizers.statistics()
        examples = example_arrays(space, double=device.type != "mps")
        self.statistics = None if given is None else tree_map(on_device, given, examples)

    def observation(self, observation: Any) -> Any:
        """Observations, [..., *obs], in units of their running standard deviation, or as they are."""
        return observation if self.statistics is None else tree_map(_normalize, observation, self.statistics)

    def reward(self, reward: Tensor, done: Tensor, valid: Tensor) -> Tensor:
        """Returns a rollout's rewards, [T, N], scaled or as they are; updates the statistics of returns."""
        normalizer = self.normalizers.of_rewards
        if normalizer is None:
            return reward
        scale, running = float(normalizer.running.scale()), torch.from_numpy(normalizer.returns).to(reward)
        returns = torch.empty_like(reward)
        for t in range(len(reward)):
            running = torch.where(valid[t], running * normalizer.gamma + reward[t], running)
            returns[t] = running
            running = torch.where(done[t], 0.0, running)
        normalizer.running.merge(*_moments(returns, valid))
        normalizer.returns = running.double().cpu().numpy()
        return (reward / scale).clamp(-normalizer.clip, normalizer.clip)

    def update(self, observation: Any, valid: Tensor) -> None:
        """Adds a rollout's observations, [T, N, *obs] as the environments returned them, to the statistics."""
        if self.normalizers.of_observations is not None:
            tree_map(
                lambda running, x: running and running.merge(*_moments(x, valid)),
                self.normalizers.of_observations.running,
                observation,
            )


def _normalize(x: Tensor, statistic: Any) -> Tensor:
    if statistic is None:
        return x.float() if x.dtype is torch.float64 else x
    mean, std, clip = statistic
    return ((x - mean) / std).clamp(-clip, clip).float()


def _moments(x: Tensor, valid: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean and variance over the valid rows of [T, N, *shape], and how many these are."""
    weight = valid.reshape(*valid.shape, *[1] * (x.dim() - 2)).double()
    count = valid.sum()
    mean = (x * weight).sum((0, 1)) / count
    variance = ((x - mean).square() * weight).sum((0, 1)) / count
    return mean.cpu().numpy(), variance.cpu().numpy(), int(count)
