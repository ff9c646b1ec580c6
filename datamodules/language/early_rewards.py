"""Rewards of completions that have ended, computed while others are still written."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from datamodules.language.reward_calls import RewardFunctions


class EarlyRewards:
    """Calls the reward functions on each prompt's completions as soon as all of them have ended.

    Args:
        rewards: the functions; they are called from ``rewards.workers`` threads.
        tokenizer: turns completions into texts.
        records: P, one per prompt.
        num_generations: completions per prompt.
    """

    def __init__(
        self, rewards: RewardFunctions, tokenizer: Any, records: Sequence[dict[str, Any]], num_generations: int
    ) -> None:
        self.rewards, self.tokenizer = rewards, tokenizer
        #: Passed to every call, including calls that run during later training.
        self.trainer_state = rewards.trainer_state
        self.records, self.num_generations = records, num_generations
        self._ids: dict[int, list[int]] = {}
        self._left = [num_generations] * len(records)
        self._pool = ThreadPoolExecutor(rewards.workers, thread_name_prefix="reward")
        self._parts: list[Future[Any]] = []

    def on_ended(self, row: int, tokens: list[int], finished: bool) -> None:
        """Notes a completion; the last one of its prompt starts the calls."""
        self._ids[row] = tokens
        group = row // self.num_generations
        self._left[group] -= 1
        if self._left[group] == 0:
            first = group * self.num_generations
            ids = [self._ids.pop(first + j) for j in range(self.num_generations)]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            repeated = [self.records[group]] * self.num_generations
            call = self.rewards.score_part
            self._parts.append(self._pool.submit(call, first, repeated, texts, ids, self.trainer_state))

    def on_written(self, tokens: Sequence[Sequence[int]], finished: Sequence[bool]) -> None:
        """Notes completions that have all ended, by their token ids."""
        for row, (ids, ended) in enumerate(zip(tokens, finished, strict=True)):
            self.on_ended(row, list(ids), ended)

    def result(self, records: Sequence[dict[str, Any]], texts: Sequence[str]) -> Tensor:
        """Waits for all calls.

        Args:
            records: B, one per completion.
            texts: B.

        Returns:
            [B, F] float32, as :class:`RewardFunctions` gives them for the whole batch.

        Raises:
            UsageError: what the functions' values are refused for.
        """
        try:
            calls = [call for part in self._parts for call in part.result()]
        finally:
            self._pool.shutdown(cancel_futures=True)
        return self.rewards.join_parts(calls, records, texts)

    def stop(self) -> None:
        """Ends the calls that have not begun, without waiting for the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)
