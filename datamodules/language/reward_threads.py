"""Calls of reward functions on a prompt's completions while others are written."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from datamodules.language.reward_arguments import Call
from datamodules.language.reward_calls import RewardFunctions


class EarlyRewards:
    """Calls reward functions from threads on each prompt's completions as soon as all of them have ended."""

    def __init__(
        self, rewards: RewardFunctions, tokenizer: Any, records: Sequence[dict[str, Any]], num_generations: int
    ) -> None:
        self.rewards, self.tokenizer = rewards, tokenizer
        #: Passed to every call, including calls that run during later training.
        self.trainer_state = rewards.trainer_state
        self.records, self.num_generations = records, num_generations
        self._ids: dict[int, dict[int, list[int]]] = {}
        self._pool = ThreadPoolExecutor(rewards.workers, thread_name_prefix="reward")
        self._parts: list[Future[list[Call]]] = []

    def on_ended(self, row: int, tokens: list[int], finished: bool = True) -> None:
        """Notes a completion; the last one of its prompt starts the calls."""
        group = row // self.num_generations
        ended = self._ids.setdefault(group, {})
        ended[row] = tokens
        if len(ended) == self.num_generations:
            ids = [tokens for _, tokens in sorted(self._ids.pop(group).items())]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            records = [self.records[group]] * self.num_generations
            first = group * self.num_generations
            call = self.rewards.score
            self._parts.append(self._pool.submit(call, first, records, texts, ids, self.trainer_state))

    def result(self, records: Sequence[dict[str, Any]], texts: Sequence[str]) -> Tensor:
        """Waits for all calls; returns what :class:`RewardFunctions` returns for the whole batch."""
        try:
            calls = [call for part in self._parts for call in part.result()]
        finally:
            self._pool.shutdown(cancel_futures=True)
        return self.rewards.joined(calls, records, texts)

    def stop(self) -> None:
        """Ends the calls that have not begun, without waiting for the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)
