"""Whatever an environment returns costs its dialogue at most, never the run: one run whose dialogues each get another
kind of nonsense, with everything that reads dialogues afterwards.
"""

import asyncio
import json
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from datamodules.language.call_forms import FORMS
from datamodules.language.dialogues import transcript
from datamodules.language.message_reader import MessageReader
from datamodules.language.messages import WrongAnswer, content_of, messages, plain, valid_text
from datamodules.language.prompt import PromptDataModule
from datamodules.language.tools import Tools
from rl_modules.language.grpo import GRPO
from tests.datamodules.language.dialogue_cases import TEMPLATE, folder_of_tokenizer, module_of
from tests.datamodules.language.test_turns import rollouts_of
from tests.training import fit


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Ugly:
    def __repr__(self) -> str:
        raise ValueError("no text")


def raised(error: BaseException) -> Any:
    raise error


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def says(content: Any, **others: Any) -> Any:
    return [{"role": "user", "content": content, **others}], 0.0, False


#: What ``step`` returns at the first turn, and the content that the model then reads; None: the dialogue fails.
STEPS: dict[str, tuple[Any, str | None]] = {
    "content None": (lambda: says(None), None),
    "content missing": (lambda: ([{"role": "user"}], 0.0, False), None),
    "content a number": (lambda: says(7), "7"),
    "content of NumPy": (lambda: says(np.float64(0.5)), "0.5"),
    "content a truth": (lambda: says(True), "True"),
    "content parts": (lambda: says([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "ab"),
    "content parts of the Responses API": (lambda: says([{"type": "input_text", "text": "a"}]), "a"),
    "content an image": (lambda: says([{"type": "image_url", "image_url": {"url": "x"}}]), None),
    "content a part without text": (lambda: says([{"type": "text"}]), None),
    "content nested parts": (lambda: says(nested(10**5)), None),
    "content bytes": (lambda: says(b"ab"), "ab"),
    "content bytes of another encoding": (lambda: says(b"a\xff"), "a\ufffd"),
    "content a dict": (lambda: says({"text": "a"}), None),
    "content an object": (lambda: says(Ugly()), None),
    "content an array": (lambda: says(np.zeros(3)), None),
    "half a surrogate pair": (lambda: says("a\ud83d"), "a\ufffd"),
    "two halves": (lambda: says("\ud83d\ude00"), "\U0001f600"),
    "a huge number": (lambda: says(10**5000), None),
    "3 MB": (lambda: says("x" * 3_000_000), "length"),
    "30 MB": (lambda: says("x" * 30_000_000), None),
    "control characters": (lambda: says("\x00\x1b[2J\u202e"), "\x00\x1b[2J\u202e"),
    "no text": (lambda: says(""), ""),
    "a refused role": (lambda: ([{"role": "critic", "content": "a"}], 0.0, False), None),
    "the model's own role": (lambda: ([{"role": "assistant", "content": "a"}], 0.0, False), None),
    "a role that is no text": (lambda: ([{"role": 3, "content": "a"}], 0.0, False), None),
    "no role": (lambda: ([{"content": "a"}], 0.0, False), None),
    "half a surrogate pair as role": (lambda: ([{"role": "\ud83d", "content": "a"}], 0.0, False), None),
    "another key with an object": (lambda: says("a", extra=Ugly()), None),
    "another key with a circle": (lambda: says("a", extra=circle()), None),
    "another key, nested deeply": (lambda: says("a", extra=nested(200)), None),
    "another key with an array": (lambda: says("a", extra=np.arange(2)), "a"),
    "a key that is no text": (lambda: ([{"role": "user", "content": "a", 3: 4}], 0.0, False), None),
    "calls in a user's message": (lambda: says("a", tool_calls=[{"function": None}]), None),
    "a message that is text": (lambda: (["a"], 0.0, False), None),
    "messages that are text": (lambda: ("a", 0.0, False), None),
    "messages that are a dict": (lambda: ({"role": "user", "content": "a"}, 0.0, False), None),
    "messages None": (lambda: (None, 0.0, False), None),
    "no messages": (lambda: ([], 0.0, False), None),
    "None": (lambda: None, None),
    "a text": (lambda: "abc", None),
    "four values": (lambda: ([], 0.0, True, False, {}), None),
    "a generator": (lambda: (x for x in ([], 0.0, True)), None),
    "reward 1e308": (lambda: ([], 1e308, True), None),
    "reward NaN": (lambda: ([], math.nan, True), None),
    "reward infinite": (lambda: ([], -math.inf, True), None),
    "reward None": (lambda: ([], None, True), None),
    "reward a text": (lambda: ([], "1", True), None),
    "reward of a tensor": (lambda: ([], torch.tensor(1.0), True), "done"),
    "reward of two numbers": (lambda: ([], torch.ones(2), True), None),
    "reward 10**400": (lambda: ([], 10**400, True), None),
    "done a text": (lambda: ([], 1.0, "false"), None),
    "done an array": (lambda: ([], 1.0, np.array([True, False])), None),
    "done None": (lambda: ([], 1.0, None), None),
    "GeneratorExit": (lambda: raised(GeneratorExit()), None),
    "KeyboardInterrupt": (lambda: raised(KeyboardInterrupt()), None),
    "SystemExit": (lambda: raised(SystemExit(0)), None),
    "StopIteration": (lambda: raised(StopIteration()), None),
    "CancelledError": (lambda: raised(asyncio.CancelledError()), None),
    "RecursionError": (lambda: raised(RecursionError()), None),
    "MemoryError": (lambda: raised(MemoryError()), None),
    "an error without a text": (lambda: raised(Silent()), None),
    "an error with half a surrogate pair": (lambda: raised(ValueError("\ud83d\x1b[2J")), None),
}  # fmt: skip
#: What ``reset`` returns; all of them fail.
RESETS: dict[str, Any] = {
    "opening None content": lambda: says(None)[0],
    "opening of 3 MB": lambda: says("x" * 3_000_000)[0],
    "opening of a refused role": lambda: [{"role": "critic", "content": "a"}],
    "opening a text": lambda: "abc",
    "opening a number": lambda: 3,
    "opening of the model": lambda: [{"role": "assistant", "content": "a"}],
    "GeneratorExit at the opening": lambda: raised(GeneratorExit()),
}
KINDS = [*STEPS, *RESETS]


class Nonsense:
    """Returns the record's kind of nonsense once, then counts its turns. It spoils what it gets, and what it gave."""

    def reset(self, record: dict[str, Any]) -> Any:
        self.kind, self.turns, self.gave = record["kind"], 0, []
        record.clear()
        return RESETS[self.kind]() if self.kind in RESETS else [{"role": "user", "content": "go"}]

    def step(self, message: dict[str, Any]) -> Any:
        message.clear()
        for old in self.gave:
            old.clear()
        self.turns += 1
        if self.turns == 1:
            return STEPS[self.kind][0]()
        self.gave = [{"role": "user", "content": str(self.turns)}]
        return self.gave, 0.25, self.turns == 3


def read_all(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Writes every message as a file would."""
    return [float(len(json.dumps(completion, ensure_ascii=False).encode())) / 1e9 for completion in completions]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """How the dialogues of each kind ended, and what they hold."""
    folder = tmp_path_factory.mktemp("nonsense")
    refusing = TEMPLATE.replace("{% else %}", "{% elif m.role not in ['user', 'system', 'tool'] %}"
                                "{{ raise_exception('an unknown role') }}{% else %}")  # fmt: skip
    records = [{"prompt": kind, "kind": kind} for kind in KINDS]
    (folder / "kinds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    module = module_of(GRPO, folder_of_tokenizer(folder / "tokenizer", refusing), completions_steps=1,
                       model_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                                     "num_attention_heads": 1, "num_key_value_heads": 1})  # fmt: skip
    data = PromptDataModule(path=str(folder / "kinds.jsonl"), batch_size=2 * len(KINDS), num_generations=2,
                            eval_steps=0, environment=f"{__name__}:Nonsense", max_turn_tokens=3,
                            reward_funcs=[f"{__name__}:read_all"], rollouts_path=str(folder / "rollouts"))  # fmt: skip
    seen = rollouts_of(module)
    trainer = fit(module, data, max_steps=1, logger=CSVLogger(folder))
    trainer.save_checkpoint(folder / "last.ckpt")
    torch.load(folder / "last.ckpt", weights_only=True)
    rollout, _ = seen[0]
    assert len(list((folder / "rollouts").iterdir())) == 1
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for record, dialogue in zip(rollout["records"], rollout["dialogues"], strict=True):
        found[record["kind"]].append(dialogue)
    return found


class Seeded:
    """Says the seeds that it gets."""

    def reset(self, record: dict[str, Any]) -> Any:
        self.said = f"{record['seed']} {record['start_seed']}"
        return []

    def step(self, message: dict[str, Any]) -> Any:
        return [{"role": "user", "content": self.said}], 0.0, False


def test_a_record_s_own_column_seed_reaches_its_environment(tmp_path):
    (tmp_path / "seeds.jsonl").write_text('{"prompt": "x", "seed": 17, "start_seed": 18}\n' * 2)
    module = module_of(GRPO, folder_of_tokenizer(tmp_path / "tokenizer"))
    data = PromptDataModule(path=str(tmp_path / "seeds.jsonl"), batch_size=4, num_generations=2, eval_steps=0,
                            max_turns=2, environment=f"{__name__}:Seeded", max_turn_tokens=3)  # fmt: skip
    seen = rollouts_of(module)
    fit(module, data, max_steps=1)
    assert all(dialogue["messages"][1]["content"] == "17 18" for dialogue in seen[0][0]["dialogues"])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_costs_its_dialogue_at_most(ends, kind):
    wanted = STEPS[kind][1] if kind in STEPS else None
    assert len(ends[kind]) == 2
    for dialogue in ends[kind]:
        if wanted is None:
            assert dialogue["ended"] == "failed" and dialogue["error"].isprintable() and len(dialogue["error"]) < 500
        elif wanted in ("done", "length"):
            assert dialogue["ended"] == wanted
        else:
            assert dialogue["ended"] == "done" and dialogue["rewards"] == [0.0, 0.25, 0.25]
            assert [m["content"] for m in dialogue["messages"] if m["role"] == "user"] == [wanted, "2"]
        assert all(message for message in dialogue["messages"])


#: What a model writes inside of the marks of a call.
WRITTEN = {
    "half a surrogate pair": '{"name": "echo", "arguments": {"text": "\\ud83d"}}',
    "half a surrogate pair as name": '{"name": "\\ud83d", "arguments": {"\\udc00": 1}}',
    "a number without end": '{"name": "echo", "arguments": {"text": 1e999}}',
    "a number of 5,000 digits": '{"name": "echo", "arguments": {"text": ' + "9" * 5000 + "}}",
    "no number": '{"name": "echo", "arguments": {"text": NaN}}',
    "nested without end": '{"name": "echo", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
    "open brackets": "[" * 100_000,
    "control characters": '{"name": "echo\\u001b[2J", "arguments": {"text": "\\u0000"}}',
    "arguments as a list": '{"name": "echo", "arguments": [1]}',
    "arguments as text": '{"name": "echo", "arguments": "{\\"text\\": \\"\\\\ud83d\\"}"}',
    "a name as a list": '{"name": ["echo"], "arguments": {}}',
    "a list": "[1, 2]",
    "nothing": "",
    "ends of everything": "</think></tool_call><|im_end|>\x00",
}


def echo(text: str) -> str:
    """Repeats.

    Args:
        text: Any.
    """
    return text


@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_writes_can_be_written_to_files_and_answered(form):
    reader, tools = MessageReader(form, ["<|im_end|>"]), Tools([echo])
    for inner in WRITTEN.values():
        for text in (f"<tool_call>{inner}</tool_call>", f"<|python_tag|>{inner}", f"[TOOL_CALLS][{inner}]", inner):
            message = reader.read(text, "", "<|im_end|>", list(tools.schemas.values()))
            answers = tools.answer(message)
            messages(answers)
            talk = {"messages": [message, *answers], "error": None, "ended": "done"}
            (transcript(talk) + json.dumps(talk, ensure_ascii=False, allow_nan=False)).encode()


@pytest.mark.parametrize(
    "mark", ["<tool_call>", "<think>", '{"name": "f"};', "[TOOL_CALLS]", "<|channel|>", "<|im_end|>"]
)
def test_marks_without_number_take_linear_time(mark):
    """A hundred thousand took 11 s; the time is the processor's, of all forms."""
    readers = [MessageReader(form, ["<|im_end|>"]) for form in FORMS]
    began_s = time.process_time()
    for reader in readers:
        reader.read(mark * 20_000)
    assert time.process_time() - began_s < 2.0


def test_values_are_made_plain_and_copied():
    given = {"a": (np.int64(3), np.float32(0.5), True, None), "b": {"c": bytearray(b"x")}, "d": "\ud83d\ude00\ud83d"}
    made = plain(given)
    assert made == {"a": [3, 0.5, True, None], "b": {"c": "x"}, "d": "\U0001f600\ufffd"}
    assert [type(x) for x in made["a"]] == [int, float, bool, type(None)]
    inner = [{"role": "user", "content": "x", "extra": []}]
    copy = messages(inner)
    inner[0]["extra"].append(1)
    assert copy == [{"role": "user", "content": "x", "extra": []}]
    assert valid_text("a\udfff\ud800b") == "a\ufffd\ufffdb" and content_of(["a", {"type": "text", "text": "b"}]) == "ab"
    with pytest.raises(WrongAnswer, match="nested more than 100 levels"):
        plain(nested(101))
