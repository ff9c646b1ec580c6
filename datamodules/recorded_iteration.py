"""Rollout, advantages and updates as one function that can be recorded, with environments in torch."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from datamodules.collector import prepared_by, rollout_act
from datamodules.envs.boundary import largest
from datamodules.envs.tensors import action_tensors, observation_tensors, torch_env
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import evaluation_mode, tree_leaves, tree_map
from rl_modules.core.resume import count_step
from rl_modules.fast.updates import NUMBERS, Recorded


class RecordedIteration(Recorded):
    """One rollout and all updates on it, on tensors that stay where they are, for a recording."""

    def __init__(self, data: Any) -> None:
        module, collector = data.learner, data.collector
        self.data, self.collector = data, collector
        self.envs = torch_env(collector.envs)
        self._check()
        self.device = device = module.device
        if collector.generator is None or collector.generator.device.type != device.type:
            collector.generator = torch.Generator(device).manual_seed(collector.generator_seed)
        if collector.is_fresh:
            collector.boundary.reset(seed=collector.streams[0])
        # Bounds of the spaces go to the device here: a recording holds no copies from the host.
        observation_tensors(collector.space, self.envs.observe(self.envs.state))
        some = torch.as_tensor(self.envs.action_space.sample(), device=device)
        before = self.envs.state_dict()
        collector.boundary.step(action_tensors(self.envs.single_action_space, some))  # checks what a step returns
        self.envs.load_state_dict(before)
        # Of actions that are not taken, in the successors of transitions.
        self._unused = torch.Generator(device)
        super().__init__(module, [collector.generator, self.envs.generator, self._unused])
        self.numbers = {
            name: torch.zeros((), dtype=torch.float32, device=device) for name in NUMBERS if hasattr(module, name)
        }
        places = (data.n_epochs, data.n_envs * data.n_steps)
        is_whole = data.batches_per_pass == 1
        self.orders = None if is_whole else torch.zeros(places, dtype=torch.int64, device=device)
        #: Where every recording leaves the rollout, for those that read it after the updates.
        self.fields: Any = None
        self._write_episodes()

    def _check(self) -> None:
        data, module = self.data, self.data.learner
        what = f"{type(module).__name__}(graph=True)"
        if self.envs is None:
            raise UsageError(
                f"{what} replays the environments' steps too, and {data.env_name} is not in torch; take "
                "torch/CartPole-v1, another id of torch/ or a datamodules.envs.torch.TorchEnv of yours, "
                "or leave graph out"
            )
        kept_on_host = {
            "norm_obs": data.norm_obs,
            "norm_reward": data.norm_reward,
            "overlap": data.overlap,
            "a recurrent policy": self.collector.memory is not None,
            "EpisodeMonitor": self.collector.episodes.on_finished is not None,
        }
        for name, is_used in kept_on_host.items():
            if is_used:
                raise UsageError(
                    f"{what} keeps a rollout on the device, and {name} reads it on the host; leave one of them out"
                )

    # ---------------------------------------------------------------- one step of Lightning's loop

    def iterations(self) -> Iterator[dict[str, Any]]:
        """One epoch's iterations, as a datamodule yields their minibatches; the step collects by itself."""
        data = self.data
        per_rollout, position, length = data._batches_per_rollout, data._position, data._layout["length"]
        for _ in range(data.rollouts_per_epoch):
            position = (0 if position >= length else position) + per_rollout
            batch = self.begin()
            data.num_timesteps += data.n_envs * data.n_steps
            data._position = position
            if data.num_timesteps >= data.total_timesteps:
                data.learner_trainer.should_stop = True
                data._position = length
            yield batch

    def begin(self) -> dict[str, Any]:
        """Called before the iteration counts; returns the batch with which Lightning calls the step."""
        learner = self.module
        for name, number in self.numbers.items():
            number.fill_(getattr(learner, name))
        if self.orders is None:
            return {}
        size, shuffler = self.orders.shape[1], self.data._shuffler
        orders = torch.stack([torch.randperm(size, generator=shuffler) for _ in range(self.data.n_epochs)])
        return {"order": orders.pin_memory() if self.device.type == "cuda" else orders}

    def __call__(self, batch: dict[str, Any], batch_idx: int) -> None:
        if self.orders is not None:
            self.orders.copy_(batch["order"], non_blocking=True)
        self.step()
        for _ in range(self.data._batches_per_rollout):
            count_step(self.trainer)

    # ---------------------------------------------------------------- the function

    def run(self) -> None:
        data, learner = self.data, self.module
        state = learner.__dict__
        numbers = {name: state[name] for name in self.numbers}
        state.update(self.numbers)
        try:
            with evaluation_mode(learner.modules()), torch.no_grad(), self.trainer.precision_plugin.forward_context():
                prepared = prepared_by(self.collector, learner, self.collect())
        finally:
            state.update(numbers)
        fields = tree_map(lambda x: x.flatten(0, 1), prepared)
        if self.fields is None:
            self.fields = tree_map(torch.clone, fields)
        torch._foreach_copy_(tree_leaves(self.fields), tree_leaves(fields))
        data._fields = fields = self.fields
        sizes, index = data.sizes(data.n_envs * data.n_steps), 0
        for epoch in range(data.n_epochs):
            order = None if self.orders is None else self.orders[epoch]
            shuffled = fields if order is None else tree_map(lambda x, order=order: x[order], fields)
            for i, _ in enumerate(sizes):
                minibatch = shuffled if order is None else tree_map(lambda x, i=i: x.split(sizes)[i], shuffled)
                self.update(minibatch, index)
                index += 1

    def _beside_states(self, x: Tensor) -> Tensor:
        """An observation in memory of its own, because the next step writes over the states."""
        is_state = x.untyped_storage().data_ptr() == self.envs.state.untyped_storage().data_ptr()
        return x.clone() if is_state else x

    def collect(self) -> dict[str, Any]:
        """A rollout, as :meth:`datamodules.tensor_collector.TensorCollector.collect` returns it."""
        envs, space, generator = self.envs, self.collector.space, self.collector.generator
        act = rollout_act(self.module)
        acted: list[dict[str, Tensor]] = []
        rows: list[tuple[Tensor, ...]] = []
        observations, successors = [], []
        observation = observation_tensors(space, envs.observe(envs.state))
        for _ in range(self.data.n_steps):
            observation = tree_map(self._beside_states, observation)
            observations.append(observation)
            acted.append(act(observation, generator))
            raw, reward, terminated, truncated, info = envs.step(
                action_tensors(envs.single_action_space, acted[-1]["action"])
            )
            observation = observation_tensors(space, raw)
            successors.append(observation_tensors(space, info["final_obs"]))
            done = terminated | truncated
            self.running.add_(torch.stack([reward.double(), torch.ones_like(reward, dtype=torch.float64)]))
            rows.append((reward.float(), terminated, truncated, done, self.running.clone()))
            self.running.masked_fill_(done, 0.0)
        reward, terminated, truncated, done, running = (torch.stack(column) for column in zip(*rows, strict=True))
        self._note_episodes(done.flatten(), running.movedim(1, 0).flatten(1))
        successor = tree_map(lambda *steps: torch.stack(steps), successors[0], *successors[1:])
        seen = [x for x in (*tree_leaves(successor), reward) if x.is_floating_point()]
        self.is_finite.logical_and_(torch.stack([(x.abs() <= largest(x.dtype)).all() for x in seen]).all())
        rollout: dict[str, Any] = {key: torch.stack([row[key] for row in acted]) for key in acted[0]}
        rollout.update(
            observation=tree_map(lambda *steps: torch.stack(steps), observations[0], *observations[1:]),
            next_observation=successor,
            reward=reward.sign() if self.collector.sign_reward else reward,
            terminated=terminated,
            truncated=truncated,
            valid=torch.ones_like(done),
        )
        if "value" in rollout:
            values = act(tree_map(lambda x: x.flatten(0, 1), successor), self._unused)["value"]
            rollout["next_value"] = values.reshape(reward.shape)
        return rollout

    # ---------------------------------------------------------------- statistics of episodes

    def _write_episodes(self) -> None:
        """Copies the statistics of a run that resumes to the device."""
        episodes, n = self.collector.episodes, self.envs.num_envs
        options: Any = {"dtype": torch.float64, "device": self.device}
        self.window = episodes.window
        #: Return and length of the running episodes, [2, N].
        self.running = torch.zeros((2, n), **options)
        self.running.copy_(
            torch.stack(
                [torch.as_tensor(episodes.running_return).double(), torch.as_tensor(episodes.running_length).double()]
            )
        )
        # Those of the last finished ones in a ring, after which one column takes what is written nowhere.
        self.ring = torch.zeros((2, self.window + 1), **options)
        known = torch.tensor([list(episodes.returns), list(episodes.lengths)], **options)
        self.ring[:, : known.shape[1]] = known
        self.finished = torch.tensor(known.shape[1], dtype=torch.int64, device=self.device)
        self.is_finite = torch.ones((), dtype=torch.bool, device=self.device)

    def _note_episodes(self, done: Tensor, running: Tensor) -> None:
        """Writes the ended episodes' returns and lengths, [2, T·N], into the ring, in the order of time."""
        place = done.cumsum(0) - 1 + self.finished
        self.finished.add_(done.sum())
        is_kept = done & (place >= self.finished - self.window)
        self.ring.index_copy_(1, torch.where(is_kept, place % self.window, self.window), running)

    def read_episodes(self) -> None:
        """Brings statistics and observations to the host; refuses NaN and infinite ones."""
        collector, episodes = self.collector, self.collector.episodes
        if not self.is_finite:
            raise UsageError(
                f"the environment {collector.name} returned a NaN, infinite or too large observation or reward; "
                "bound it, or look at it with graph=False"
            )
        finished, window = int(self.finished), self.window
        ring = self.ring[:, :window].cpu()
        order = [i % window for i in range(max(finished - window, 0), finished)]
        episodes.returns = deque(ring[0, order].tolist(), window)
        episodes.lengths = deque(ring[1, order].long().tolist(), window)
        running = self.running.cpu().numpy()
        episodes.running_return, episodes.running_length = running[0], running[1].astype("int64")
        collector._observation = collector._raw = observation_tensors(
            collector.space, self.envs.observe(self.envs.state)
        )
        collector.episode_start = (self.envs.steps == 0).cpu().numpy()
