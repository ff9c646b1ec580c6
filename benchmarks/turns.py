"""Time of dialogues of four turns, over that of the same tokens in one turn; and with a slow tool in a fifth of them.

A model of 1M parameters, 8 prompts of about 40 tokens, 8 dialogues each, 4 turns of 24 written tokens (no EOS is drawn,
so that all rows are as long), and about 8 tokens of the environment between two turns. One turn is a
completion of as many tokens as the dialogues have in all, written by the sampler from the same prompts. Medians over
pairs, in turn.

    python -m benchmarks.turns --pairs 5
"""

import argparse
import json
import statistics
import time
from functools import partial
from typing import Any

import torch

from benchmarks.sampling import build
from datamodules.language.dialogues import Dialogues, Limits
from datamodules.language.environment_calls import EnvironmentCalls
from rl_modules.language.sampling.native import NativeSampler
from rl_modules.language.sampling.protocol import Completions, SamplingSettings
from rl_modules.language.sampling.turns import by_turns, converse
from rl_modules.language.text.chat_template import encoder_of
from rl_modules.language.tokenizer import character_tokenizer

TURNS, WRITTEN, PROMPTS, GENERATIONS, SLOW_S = 4, 24, 8, 8, 0.05
#: No token is this one: a row ends by its limit alone.
NEVER = 99
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}>{{ m.content }}\n{% else %}:{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


class Answers:
    """Answers with a number; in a fifth of the dialogues after a while."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s

    def reset(self, record: dict[str, Any]) -> list[dict[str, str]]:
        self.turns, self.is_slow = 0, record["seed"] % 5 == 0
        return [{"role": "user", "content": record["prompt"]}]

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        if self.is_slow and self.slow_s:
            time.sleep(self.slow_s)
        self.turns += 1
        return [{"role": "user", "content": f"no {self.turns}"}], 0.0, self.turns >= TURNS


def timed(call: Any) -> tuple[float, Completions]:
    begin_s = time.perf_counter()
    found = call()
    return time.perf_counter() - begin_s, found


def compare(pairs: int, slow_s: float) -> dict[str, Any]:
    model = build("1M")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    sampler = NativeSampler(model)
    settings = SamplingSettings(400, (NEVER,), 0)
    records = [{"prompt": "What is it that answers question " + str(i) * 8, "prompt_ids": [1]} for i in range(PROMPTS)]
    seeds = list(range(PROMPTS * GENERATIONS))
    limits = Limits(TURNS, WRITTEN, 400, 1000)

    def dialogues(slow_s: float, write: Any = converse) -> Completions:
        calls = EnvironmentCalls(partial(Answers, slow_s), 0, 10.0)
        writer = Dialogues(calls, encoder_of(tokenizer), [NEVER], "Answers", 0.005)
        try:
            return writer.write(
                lambda prompts, seeds, partner: write(sampler, prompts, seeds, settings, partner),
                records, seeds, GENERATIONS, limits, 0,
            )  # fmt: skip
        finally:
            calls.stop()

    written = dialogues(0.0)
    prompts = [dialogue["prompt_ids"] for dialogue in (written.dialogues or ())[::GENERATIONS]]
    longest = int(written.length.max())
    once = SamplingSettings(longest, (NEVER,), 0)
    seconds: dict[str, list[float]] = {}
    for _ in range(pairs):
        for name, call in {
            "one turn": lambda: sampler.sample(prompts, GENERATIONS, seeds, once),
            "turns": lambda: dialogues(0.0),
            "turns, slow tool": lambda: dialogues(slow_s),
            "turns, each read from its beginning": lambda: dialogues(0.0, by_turns),
        }.items():
            took_s, found = timed(call)
            seconds.setdefault(name, []).append(took_s)
            if name != "one turn":
                assert torch.equal(found.tokens, written.tokens)
    tokens = {"one turn": longest, "turns": round(float(written.length.float().mean()), 1)}
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)), 3)

    return {
        "rows": len(seeds), "tokens_per_row": tokens, "seconds": medians,
        "turns / one turn": ratio("turns", "one turn"),
        "slow tool / without": ratio("turns, slow tool", "turns"),
        "read from the beginning / one turn": ratio("turns, each read from its beginning", "one turn"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--slow-s", type=float, default=SLOW_S)
    options = parser.parse_args()
    print(json.dumps(compare(options.pairs, options.slow_s), indent=1))


if __name__ == "__main__":
    main()
