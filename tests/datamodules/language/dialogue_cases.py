"""Environments, a tokenizer with a chat template and small modules for tests of dialogues."""

import time
from typing import Any

from datamodules.language.prompt import PromptDataModule
from rl_modules.language.grpo import GRPO
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.rloo import RLOO
from rl_modules.language.tokenizer import character_tokenizer

HERE = "tests.datamodules.language.dialogue_cases"
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}>{{ m.content }}<eos>\n"
    "{% else %}{{ m.role[0] }}:{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


class Count:
    """Answers each message with its number and length; the reward of a turn is the share of letters in it."""

    def __init__(self, turns: int = 3, slow_s: float = 0.0) -> None:
        self.turns, self.slow_s = turns, slow_s

    def reset(self, record: dict[str, Any]) -> list[dict[str, str]]:
        self.said: list[str] = []
        self.is_slow = record["seed"] % 5 == 0
        return [{"role": "user", "content": record["prompt"]}]

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        if self.is_slow and self.slow_s:
            time.sleep(self.slow_s)
        self.said.append(message["content"])
        letters = sum(character.isalpha() for character in message["content"])
        reward = letters / max(1, len(message["content"]))
        answer = [{"role": "user", "content": f"{len(self.said)}/{len(message['content'])}"}]
        return answer, reward, len(self.said) >= self.turns


class Later(Count):
    """The same with coroutines."""

    async def reset(self, record):  # type: ignore[override]
        return super().reset(record)

    async def step(self, message):  # type: ignore[override]
        return super().step(message)


class Fragile(Count):
    """Raises in every fourth dialogue's first step and hangs in another fourth's second one."""

    def reset(self, record):
        self.kind = record["seed"] % 4
        return super().reset(record)

    def step(self, message):
        if self.kind == 0:
            raise ValueError("broken")
        if self.kind == 1 and self.said:
            time.sleep(60)
        return super().step(message)


class Short(Count):
    """Ends after one to three turns."""

    def reset(self, record):
        self.turns = 1 + record["seed"] % 3
        return super().reset(record)


class Outside(Count):
    """Has a state that the record and the messages do not determine."""

    replayable = False


class Broken(Count):
    def reset(self, record):
        raise RuntimeError("never")


class Moody(Count):
    """Opens the dialogues of a prompt differently."""

    def reset(self, record):
        return [{"role": "user", "content": str(record["seed"])}]


class Talks(Count):
    def reset(self, record):
        return [{"role": "user", "content": "so much " * 40}]


def folder_of_tokenizer(folder: Any, template: str = TEMPLATE) -> str:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def module_of(kind: type, folder: str | None, **arguments: Any) -> Any:
    usual: dict[str, Any] = {"model_config": TINY, "tokenizer_name_or_path": folder, "max_completion_length": 60,
                             "completions_steps": 0, "learning_rate": 1e-3}  # fmt: skip
    return kind(**{**usual, **arguments})


def data_of(name: str = "Count", **arguments: Any) -> PromptDataModule:
    usual: dict[str, Any] = {"batch_size": 16, "num_generations": 4, "eval_steps": 0, "n_train": 24,
                             "environment": f"{HERE}:{name}", "max_turn_tokens": 6,
                             "reward_funcs": [f"{HERE}:nothing"]}  # fmt: skip
    return PromptDataModule("addition", **{**usual, **arguments})


def nothing(prompts: Any, completions: Any, **columns: Any) -> list[None]:
    """Applies to no completion."""
    return [None] * len(completions)


ALGORITHMS = {"GRPO": GRPO, "RLOO": RLOO, "RLHFPPO": RLHFPPO}
