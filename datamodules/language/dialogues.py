"""Dialogues between the model in training and environments."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from datamodules.language.calls import calls_of, with_call_ids
from datamodules.language.environment_calls import Answer, EnvironmentCalls, wait
from datamodules.language.environments import RunSeed, load_environment
from datamodules.language.messages import MOST_REWARD, Message, WrongAnswer, valid_text
from datamodules.language.reward_arguments import TooLong
from datamodules.language.tasks.base import Record
from datamodules.language.turn_reader import TurnReaders
from datamodules.language.turn_template import TurnTemplate
from rl_modules.common.errors import UsageError, visible, what_happened
from rl_modules.common.notices import notice
from rl_modules.common.seeding import stream_seed
from rl_modules.language.sampling import Completions
from rl_modules.language.sampling.turns import Further
from rl_modules.language.text.chat_template import ChatEncoder
from rl_modules.language.text.rendering import tools_of

if TYPE_CHECKING:
    from datamodules.language.prompt import PromptDataModule


@dataclass
class Limits:
    """Most turns of a dialogue, tokens of a turn, tokens after the first prompt, and tokens of the model's context."""

    turns: int
    turn_tokens: int
    tokens: int
    context: int


@dataclass
class Row:
    """A dialogue so far."""

    record: Record
    seed: int
    #: Its environment's number.
    number: int
    messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    #: Tokens after the prompt, and those of each turn that the model wrote last.
    used: int = 0
    last: int | None = None
    #: The text that the model read last, and what ends a thought within which its turn was cut.
    read: str = ""
    closing: str = ""
    rewards: list[float] = field(default_factory=list)
    #: What ended it: ``done``, ``max_turns``, ``length``, or ``failed``.
    ended: str = ""
    error: str = ""

    def described(self) -> dict[str, Any]:
        """What a checkpoint and reward functions get of it."""
        names = ("prompt_ids", "rewards", "ended", "error")
        empty = [{"role": "assistant", "content": ""}]
        return {
            **{name: getattr(self, name) for name in names},
            "messages": self.messages or empty,
            "prompt": self.record["prompt"],
        }


class Dialogues:
    """Writes dialogues: the model's part by a sampler, the other by environments; one that fails gets no reward."""

    def __init__(
        self, calls: EnvironmentCalls, encoder: ChatEncoder, stops: Sequence[int], name: str, patience_s: float
    ) -> None:
        self.calls, self.encoder, self.name, self.patience_s = calls, encoder, name, patience_s
        self.template, self.readers = TurnTemplate(encoder, stops), TurnReaders(encoder, stops)
        self._longest_token = max(map(len, encoder.tokenizer.get_vocab()))
        self._is_checked = self._has_answered = self._reported = False

    def write(
        self,
        act: Callable[..., Completions],
        records: Sequence[Record],
        seeds: Sequence[int],
        num_generations: int,
        limits: Limits,
        pad_token_id: int,
    ) -> Completions:
        """Writes dialogues of records' prompts by the policy's ``act``; a prompt's first seed is its start's."""
        rows = []
        for i, seed in enumerate(seeds):
            start = stream_seed(seeds[i - i % num_generations], 0, "start")
            record = {"seed": RunSeed(seed), "start_seed": RunSeed(start), **records[i // num_generations]}
            rows.append(Row(record, seed, next(self.calls.numbers)))
        try:
            self._open(rows, num_generations, limits)
            going = [row for row in rows if not row.ended]
            written = None
            if going:
                asked, own = [row.prompt_ids for row in going], [row.seed for row in going]
                written = act(asked, own, partner=_Talk(self, going, limits))
        finally:
            for row in rows:
                self.calls.start(row.number, "close")
        self._has_answered |= any(row.ended != "failed" for row in rows)
        if not self._has_answered:
            raise UsageError(f"environment {self.name!r}: {rows[0].error} in each of the first {len(rows)} dialogues")
        return _completions(rows, going, written, pad_token_id)

    def _open(self, rows: list[Row], num_generations: int, limits: Limits) -> None:
        """Resets the environments, and encodes the messages with which they open the dialogues."""
        answers = [self.calls.start(row.number, "reset", row.record) for row in rows]
        wait(answers, None, for_all=True)
        opened: dict[int, Row] = {}
        others = 0
        for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            try:
                messages, tools = answer.value()
            except (Exception, SystemExit) as error:
                self.fail(row, error, "reset")
                continue
            own = {"prompt": messages or row.record["prompt"], **({"tools": tools} if tools else {})}
            self._try_template({**row.record, **own})
            try:
                if (first := opened.get(i // num_generations)) is None:
                    record = {**row.record, **own}
                    row.prompt_ids = self._encoded(record, messages, limits)
                    row.read = self._text_read(record, row.prompt_ids)
                elif any(first.record.get(name) != value for name, value in own.items()):
                    others += 1
                    raise WrongAnswer(
                        "returned other messages for the same record, but the dialogues of a prompt are compared with "
                        "each other; draw what differs from record['start_seed']"
                    )
                else:
                    row.prompt_ids, row.read = first.prompt_ids, first.read
            except (Exception, SystemExit) as error:
                self.fail(row, error, "reset")
                continue
            row.record |= own
            opened.setdefault(i // num_generations, row)
        for i, row in enumerate(rows):
            if not row.prompt_ids:  # reset has failed
                source = opened.get(i // num_generations)
                row.prompt_ids = row.record["prompt_ids"] if source is None else source.prompt_ids
        if not self._has_answered and 0 < others == len(rows) - len(opened):
            said = next(row.error for row in rows if row.error)
            raise UsageError(f"environment {self.name!r}: {said}")

    def _try_template(self, record: Record) -> None:
        """Refuses a chat template that can't continue a dialogue, or writes calls of tools that can't be read."""
        settings = {"chat_template_kwargs": record.get("chat_template_kwargs")}
        if not self._is_checked:
            self.template.check(settings)
            self._is_checked = True
        self.readers.of({**settings, "tools": record.get("tools")})

    def _encoded(self, record: Record, given: Sequence[Message], limits: Limits) -> list[int]:
        """The tokens of the messages that open a dialogue, which must leave the model room to answer."""
        messages = self.encoder.messages(self.encoder.as_text(list(given)) or record["prompt"])
        if self.are_longer(messages, limits.context):
            raise WrongAnswer(f"opens a dialogue with more tokens than the {limits.context} that the model takes")
        (ids,) = self.encoder.prompts([messages], [record])
        if len(ids) >= limits.context:
            raise WrongAnswer(f"opens a dialogue with {len(ids)} tokens, the model takes {limits.context}")
        return ids

    def _text_read(self, record: Record, prompt_ids: list[int]) -> str:
        """The text of a prompt; of one that leaves a thought open that the model is to continue, what opens it."""
        said, reader = self.encoder.messages(record["prompt"])[-1], self.readers.of(record)
        if reader is not None and said["role"] == "assistant" and reader.ends_in_thought(str(said["content"])):
            return reader.opening
        return str(self.encoder.tokenizer.decode(prompt_ids))

    def are_longer(self, messages: Sequence[Message], tokens: int) -> bool:
        """Whether messages have more characters than so many tokens hold, so that they need not be tokenized."""
        return sum(len(str(message.get("content"))) for message in messages) > tokens * self._longest_token

    def written(self, row: Row, tokens: list[int]) -> Message:
        """What a row's model wrote as a message; notes how a thought ends that is cut."""
        tokenizer, reader = self.encoder.tokenizer, self.readers.of(row.record)
        row.closing = ""
        if reader is None:
            text = str(tokenizer.decode(tokens, skip_special_tokens=True))
            return {"role": "assistant", "content": valid_text(text)}
        end = tokens[len(tokens) - (row.last is not None) :]
        text = str(tokenizer.decode(tokens[: len(tokens) - len(end)]))
        if row.last is None and reader.ends_in_thought(text, row.read):
            row.closing = reader.closing
        number = sum(len(message.get("tool_calls", ())) for message in row.messages)
        return reader.read(text, row.read, str(tokenizer.decode(end)), tools_of(row.record), number)

    def fail(self, row: Row, error: BaseException, method: str) -> None:
        """Ends a dialogue whose environment has failed; the first failure is reported."""
        if isinstance(error, TooLong):
            what = f"took longer than {self.calls.limit_s:g} s"
        else:
            what = visible(str(error)) if isinstance(error, WrongAnswer) else f"raised {visible(what_happened(error))}"
        row.ended, row.error = "failed", f"{method} {what}"
        if not self._reported:
            self._reported = True
            notice(
                f"environment {self.name!r}: {row.error}; such dialogues get no reward; from here on see the metric "
                "environment/failed"
            )


class _Talk:
    """The environments of dialogues that are being written, as the sampler's partner."""

    def __init__(self, dialogues: Dialogues, rows: list[Row], limits: Limits) -> None:
        self.dialogues, self.rows, self._limits = dialogues, rows, limits
        self.patience_s = dialogues.patience_s
        self.limits = [self._room(row) for row in rows]
        self._asked: dict[int, Answer] = {}
        #: Rows that have ended a turn since the last call of ``take``, and those that were not answered in time before.
        self._fresh: list[int] = []
        self._slow: set[int] = set()

    @property
    def waiting(self) -> int:
        return len(self._asked)

    def ended(self, row: int, tokens: list[int], finished: bool) -> None:
        own = self.rows[row]
        own.used += len(tokens)
        own.last = tokens[-1] if finished else None
        message = self.dialogues.written(own, tokens)
        own.messages.append(message)
        self._asked[row] = self.dialogues.calls.start(own.number, "step", message)
        self._fresh.append(row)

    def take(self, patience_s: float | None) -> list[Further]:
        if patience_s is None:
            wait(list(self._asked.values()), None, for_all=False)
        elif patience_s:
            # What was slow once is not waited for again.
            wait([self._asked[row] for row in self._fresh if row not in self._slow], patience_s, for_all=True)
            self._slow.update(row for row in self._fresh if not self._asked[row].is_there)
        self._fresh.clear()
        return [self._further(row) for row in sorted(self._asked) if self._asked[row].is_there]

    def _room(self, row: Row) -> int:
        left = min(self._limits.tokens, self._limits.context - len(row.prompt_ids)) - row.used
        return min(self._limits.turn_tokens, left)

    def _further(self, number: int) -> Further:
        row, answer = self.rows[number], self._asked.pop(number)
        over = Further(number, [], 0, 0)
        try:
            messages, reward, done = answer.value()
            row.rewards.append(reward)
            if math.fsum(map(abs, row.rewards)) > MOST_REWARD:
                raise WrongAnswer(f"returned rewards whose sum is above {MOST_REWARD:g}")
            turns = len(row.rewards)
            if done or turns >= self._limits.turns:
                row.ended = "done" if done else "max_turns"
                return replace(over, finished=done and row.last is not None)  # a cut message is truncated
            if not messages:
                raise WrongAnswer("returned no messages, and the dialogue is not over")
            if self.dialogues.are_longer(messages, self._limits.tokens):
                row.ended = "length"
                return over
            messages, last = with_call_ids(row.messages[-1], messages), row.messages[-1]
            tokens = self.dialogues.template.following(last, row.last, messages, row.record, row.closing)
        except (Exception, SystemExit) as error:
            self.dialogues.fail(row, error, "step")
            return over
        row.read = str(self.dialogues.encoder.tokenizer.decode(tokens))
        row.used += len(tokens)
        if (limit := self._room(row)) < 1:
            row.used -= len(tokens)
            row.ended = "length"
            return over
        row.messages += messages
        return Further(number, tokens, stream_seed(row.seed, 0, "turn", turns), limit)


def _completions(rows: list[Row], going: list[Row], written: Completions | None, pad_token_id: int) -> Completions:
    """The completions of all dialogues; those whose ``reset`` failed have one token that nobody wrote."""
    if written is None:
        one = torch.zeros((0, 1))
        written = Completions(one.long(), one, one[:, 0].long(), one[:, 0].bool(), None, one.bool(), one.long())
    assert written.written is not None and written.turn is not None
    place = {id(row): i for i, row in enumerate(going)}
    index = torch.tensor([place.get(id(row), len(going)) for row in rows], device=written.tokens.device)

    def chosen(x: torch.Tensor, value: Any) -> torch.Tensor:
        return torch.cat([x, torch.full_like(x[:1] if len(x) else x.new_zeros((1, *x.shape[1:])), value)])[index]

    mask, turn = chosen(written.written, False), chosen(written.turn, 0)
    reward = torch.zeros(mask.shape, dtype=torch.float32)
    for i, (row, own) in enumerate(zip(rows, torch.where(mask, turn, -1).tolist(), strict=True)):
        last = {number: column for column, number in enumerate(own)}
        for number, earned in enumerate(row.rewards):
            reward[i, last.get(number, -1)] = earned
    version = None if written.version is None else chosen(written.version, int(written.version.max()))
    return Completions(
        tokens=chosen(written.tokens, pad_token_id),
        log_prob=chosen(written.log_prob, 0.0),
        length=chosen(written.length, 1),
        finished=chosen(written.finished, False),
        version=version,
        written=mask,
        turn=turn,
        turn_reward=reward.to(mask.device),
        dialogues=[row.described() for row in rows],
        kept=None if written.kept is None else chosen(written.kept, 0),
        kept_count=None if written.kept_count is None else chosen(written.kept_count, 0),
    )


# ---------------------------------------------------------------- for PromptDataModule: completions, rewards, metrics


def complete(
    data: "PromptDataModule",
    act: Callable[..., Completions],
    records: Sequence[Record],
    seeds: Sequence[int],
    num_generations: int,
    **how: Any,
) -> Completions:
    """Writes dialogues of records' prompts with the datamodule's environment."""
    how.pop("on_ended", None)
    assert data.environment is not None
    settings = data.policy.settings(**how)
    if data._dialogues is None or data._dialogues.encoder is not data.encoder:
        if isinstance(getattr(data.trainer, "strategy", None), ModelParallelStrategy):
            raise UsageError(
                "environment: ranks with sharded weights would have to write turns together; take a "
                "strategy with whole weights, such as ddp"
            )
        kwargs, name = data.environment_kwargs or {}, str(data.hparams["environment"])
        make = partial(load_environment(data.environment, kwargs), **kwargs)
        calls = EnvironmentCalls(make, data.env_workers, data.env_timeout_s)
        data._dialogues = Dialogues(calls, data.encoder, settings.eos_token_id, name, data.env_patience_s)
    whole = settings.max_completion_length
    limits = Limits(data.max_turns, min(data.max_turn_tokens or whole, whole), whole, data.policy.max_length)
    return data._dialogues.write(partial(act, **how), records, seeds, num_generations, limits, settings.pad_token_id)


def opened(records: Sequence[Record], written: Completions, num_generations: int) -> list[Record]:
    """The records with the prompts that environments opened the dialogues with."""
    assert written.dialogues is not None
    first = written.dialogues[::num_generations]
    return [
        {**record, "prompt": dialogue["prompt"], "prompt_ids": dialogue["prompt_ids"]}
        for record, dialogue in zip(records, first, strict=True)
    ]


def environment(
    prompts: Any, completions: Any, completion_ids: Any = None, *, environment_reward: Any, **_: Any
) -> Any:
    """The reward function of the environment: what each dialogue's turns earned."""
    return environment_reward


def judged(
    rewards: Any, records: Sequence[Record], written: Completions
) -> tuple[list[str], list[Any], list[Record], dict[str, Any]]:
    """Dialogues as texts, as messages, and as records with the environment's rewards; their tokens' turns."""
    assert written.dialogues is not None
    rewards.note(dialogue_metrics(written))
    turns = {name: getattr(written, name) for name in ("written", "turn", "turn_reward", "dialogues")}
    said = [dialogue["messages"] for dialogue in written.dialogues]
    return list(map(transcript, written.dialogues)), said, with_rewards(records, written, rewards.by_token), turns


def with_rewards(records: Sequence[Record], written: Completions, by_token: bool) -> list[Record]:
    """Records with ``environment_reward``: the sum over turns, or a number per token; None of a failed environment."""
    assert written.dialogues is not None and written.turn_reward is not None
    rows, lengths = written.turn_reward.tolist(), written.length.tolist()
    earned: list[Any] = []
    for dialogue, row, length in zip(written.dialogues, rows, lengths, strict=True):
        failed = dialogue["ended"] == "failed"
        earned.append(None if failed else row[:length] if by_token else math.fsum(dialogue["rewards"]))
    return [{**record, "environment_reward": value} for record, value in zip(records, earned, strict=True)]


def dialogue_metrics(written: Completions) -> dict[str, tuple[float, int]]:
    """Mean turns, shares that failed and were truncated, and the environment's tokens per dialogue, with the number."""
    assert written.dialogues is not None and written.written is not None
    n = len(written.dialogues)
    ends = [dialogue["ended"] for dialogue in written.dialogues]
    values = {
        "turns": sum(sum(m["role"] == "assistant" for m in d["messages"]) for d in written.dialogues),
        "failed": ends.count("failed"),
        "truncated": n - int(written.finished.sum()) - ends.count("failed"),
        "tokens_read": float(written.length.sum() - written.written.sum()),
    }
    return {f"environment/{name}": (value / n, n) for name, value in values.items()}


def transcript(dialogue: Mapping[str, Any]) -> str:
    """A dialogue after its prompt as text, a line per message, for tables; a call as ``name({arguments})``."""
    parts = []
    for message in dialogue["messages"]:
        thought, calls = message.get("reasoning_content"), calls_of(message) if message.get("tool_calls") else []
        said = [f"<think>{thought}</think>" if thought else "", message.get("content") or ""]
        said += [
            f"{call.name or 'unreadable call'}({json.dumps(call.arguments, ensure_ascii=False)})" for call in calls
        ]
        parts.append(f"{message['role']}: {' '.join(filter(None, said))}")
    return "\n".join([*parts, f"[{dialogue['error'] or dialogue['ended']}]"])
