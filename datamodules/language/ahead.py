"""Rounds of completions that are written while earlier ones train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from datamodules.language.reward_arguments import TrainerState
from datamodules.language.reward_threads import EarlyRewards
from rl_modules.common.errors import UsageError
from rl_modules.core.state import Stateful, persistent
from rl_modules.language.sampling import Completions
from rl_modules.language.sampling.turns import converse

if TYPE_CHECKING:
    from datamodules.language.prompt import PromptDataModule
    from rl_modules.language.sampling.turns import Partner

Record = dict[str, Any]

#: From the place of a round's first prompt in the stream to its completions.
Write = Callable[[int], Completions]


class WrittenAhead(Stateful):
    """A queue of rounds that a thread or a request writes. A checkpoint holds them, of unwritten ones the prompts."""

    #: Of each round the place of its ``first`` prompt in the stream, and what is ``written``, None until it is.
    rounds: list[dict[str, Any]] = persistent([])

    def __init__(self, write: Write, in_thread: bool = True) -> None:
        self._write, self.in_thread = write, in_thread
        self._futures: dict[int, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.rounds)

    def ask(self, first: int) -> None:
        """Requests a round, which is written after those before it."""
        self.rounds.append({"first": first, "written": None})
        self.start()

    def start(self) -> None:
        """Starts the writing of all rounds that have not begun, as after a resume."""
        for waiting in self.rounds:
            if waiting["written"] is None and waiting["first"] not in self._futures:
                if not self.in_thread:
                    self._fill(waiting)
                    continue
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="written ahead")
                self._futures[waiting["first"]] = self._pool.submit(self._fill, waiting)

    def _fill(self, waiting: dict[str, Any]) -> None:
        written = self._write(waiting["first"])
        waiting["written"] = {field.name: getattr(written, field.name) for field in fields(written)}

    def take(self) -> tuple[int, Completions]:
        """Waits for the first round, and takes it out of the queue: the place of its first prompt, its completions."""
        waiting = self.rounds[0]
        if (future := self._futures.get(waiting["first"])) is not None:
            future.result()
        elif waiting["written"] is None:
            self._fill(waiting)
        self.rounds.pop(0)
        self._futures.pop(waiting["first"], None)
        return waiting["first"], Completions(**waiting["written"])

    def stop(self) -> None:
        """Ends the thread after the current round, without waiting for it; the others stay in the queue."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None


# ---------------------------------------------------------------- a prompt datamodule's rounds


def round_ahead(data: PromptDataModule, n_prompts: int) -> dict[str, Any]:
    """Returns a round that was written while earlier generations trained, and asks for further ones."""
    if not hasattr(data.policy, "correction"):
        raise UsageError(
            f"async_generations={data.async_generations} writes with older weights, which "
            f"{type(data.policy).__name__} does not correct for; set it to 0"
        )
    data.policy.update_sampler()
    if not data._ahead.rounds:
        data._ahead.ask(data._reserve(n_prompts))
    data._ahead.start()
    first, written = data._ahead.take()
    records, seeds = data._asked(range(first, first + n_prompts))
    waits = data._ahead.in_thread or data.environment is not None
    early = None if waits else judging(data, first, records, written)
    written = without_stale(data, records, seeds, written)
    while len(data._ahead.rounds) < data.async_generations:
        data._ahead.ask(data._reserve(n_prompts))
    return data._as_rollout(records, written, early)


def write_ahead(data: PromptDataModule, first: int) -> Completions:
    """Writes a round with the sampler's weights; one of this process is scored from then on."""
    places = range(first, first + data.generation_size // data.num_generations)
    records, seeds = data._asked(places)
    module, n_each = data.policy, data.num_generations
    if data._ahead.in_thread:
        return data.complete(partial(_sample, data), records, seeds, n_each)
    listener = None
    if data.environment is None:  # whose rewards come with the dialogues
        data._ready_rewards()
        early = data._early[first] = EarlyRewards(data.rewards, module.tokenizer, records, n_each)
        data._states[first] = state = asdict(early.trainer_state or TrainerState())
        del state["max_steps"]  # of the run, which a resume may make longer
        listener = early.on_ended
    written = data.complete(module.act, records, seeds, n_each, on_ended=listener)
    version = torch.full_like(written.length, data.learner_trainer.global_step)
    return replace(written, version=version)


def _sample(
    data: PromptDataModule,
    prompts: Any,
    seeds: Sequence[int],
    num_generations: int = 1,
    partner: Partner | None = None,
) -> Completions:
    """Writes with the weights that the sampler has, as ``act`` does with the present ones."""
    module = data.policy
    if partner is not None:
        return converse(module.sampler, prompts, seeds, module.settings(), partner)
    return module.sampler.sample(prompts, num_generations, seeds, module.settings())


def judging(data: PromptDataModule, first: int, records: list[Record], written: Completions) -> EarlyRewards:
    """The rewards of a round of this process; after a resume computed again, with the state at its writing."""
    early, state = data._early.pop(first, None), data._states.pop(first, None)
    if early is None:
        data._ready_rewards()
        early = EarlyRewards(data.rewards, data.policy.tokenizer, records, data.num_generations)
        if state is not None:
            early.trainer_state = replace(early.trainer_state or TrainerState(), **state)
        for row, (tokens, n) in enumerate(zip(written.tokens.tolist(), written.length.tolist(), strict=True)):
            early.on_ended(row, tokens[:n])
    return early


def without_stale(data: PromptDataModule, records: list[Record], seeds: list[int], written: Completions) -> Completions:
    """Writes the groups again whose weights are more than ``async_generations`` generations old."""
    assert written.version is not None
    n_each, module = data.num_generations, data.policy
    behind = data.learner_trainer.global_step - written.version
    allowed = data.async_generations * data.steps_per_generation * data.num_iterations
    old = (behind > allowed).view(-1, n_each).any(1)
    module.record(**{"sampling/steps_behind": behind.float().mean(), "sampling/rewritten": old.float().mean()})
    if not bool(old.any()):
        return written
    groups = old.nonzero().flatten().tolist()
    rows = [group * n_each + j for group in groups for j in range(n_each)]
    again = data.complete(module.act, [records[group] for group in groups], [seeds[row] for row in rows], n_each)
    return replaced(written, rows, again, data._pad_id)


def replaced(written: Completions, rows: Sequence[int], by: Completions, pad_token_id: int) -> Completions:
    """Completions with some rows replaced, as wide as the longest of them."""
    device, chosen = written.length.device, dict[str, Any]()
    order = torch.arange(len(written.length), device=device)
    order[torch.tensor(list(rows), device=device)] = len(order) + torch.arange(len(rows), device=device)
    width = int(torch.cat([written.length, by.length])[order].max())
    for name, own in vars(written).items():
        other = getattr(by, name)
        if own is None or other is None:
            continue
        if isinstance(own, list):
            chosen[name] = [[*own, *other][row] for row in order.tolist()]
            continue
        if own.ndim > 1:
            fill, widest = pad_token_id if name == "tokens" else 0, max(own.shape[1], other.shape[1])
            own, other = (torch.nn.functional.pad(x, (0, widest - x.shape[1]), value=fill) for x in (own, other))
        both = torch.cat([own, other])[order]
        chosen[name] = both[:, :width] if both.ndim > 1 and name != "kept" else both
    return Completions(**chosen)
