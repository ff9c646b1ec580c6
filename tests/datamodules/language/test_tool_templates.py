"""Calls of tools under all templates for tools that TRL ships: rendered, read, answered, rendered again."""

import re
from types import SimpleNamespace

import pytest

from datamodules.language.calls import calls_of
from datamodules.language.chat_template import encoder_of
from datamodules.language.dialogues import Dialogues, Limits
from datamodules.language.environment_calls import EnvironmentCalls
from datamodules.language.tools import ToolEnvironment
from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.protocol import SamplingSettings
from rl_modules.language.sampling.rows import completions_of
from rl_modules.language.sampling.turns import by_turns
from tests.datamodules.language.test_templates import TEMPLATES
from tests.datamodules.language.test_turn_templates import tokenizer_of

#: Templates that a conversation with calls goes through, by TRL's own check; 28 of families, and their training forms.
TOOLS = [name for name in TEMPLATES if re.match(
    "deepseekv3|diffusion_gemma|gemma4|glm4moe|gptoss|lfm2_2_5|lfm2_v2|llama3_[12]|muse|nemotron|qwen2_5$|qwen2_5_training|"
    "qwen3", name)]  # fmt: skip
#: These write calls, and leave out what the tools are.
WITHOUT_SCHEMAS = {"deepseekv3", "deepseekv3_training"}
#: Tokens that end a turn in the families' generation configs, beside the template's end of an answer.
STOPS = ("<|call|>", "<|tool_response>", "<|observation|>", "<|eom|>")
CITY, THOUGHT = "Zürich", "Hm.\n</think>\n\n"


def weather(days: int, city: str) -> str:
    """Tells the weather.

    Args:
        days: How many.
        city: Where.
    """
    return f"{days} days of snow in {city}"


CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"days": 3, "city": CITY}}}
ASKED = [{"role": "user", "content": "How is it?"}]
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": weather(3, CITY)}


class Weather(ToolEnvironment):
    def __init__(self):
        super().__init__([weather])

    def reset(self, record):
        super().reset(record)
        return ASKED

    def score(self, record, answer):
        return float(answer == "Cold.")


class Writes:
    """A sampler that writes given texts, the last one with an EOS token."""

    def __init__(self, tokenizer, stops, *texts):
        self.tokenizer, self.stops, self.texts, self.asked = tokenizer, stops, list(texts), []

    def sample(self, prompts, num_generations, seeds, settings, on_ended=None):
        ids = self.tokenizer(self.texts[len(self.asked)], add_special_tokens=False).input_ids
        self.asked.append(list(prompts[0]))
        row = SimpleNamespace(tokens=ids, log_prob=[-1.0] * len(ids), finished=ids[-1] in self.stops, kept=None)
        return completions_of([row], 0, "cpu", [0])


def dialogue(tokenizer, *texts, environment=Weather, kwargs=None):
    """A dialogue whose turns are given, and what the sampler read before each; a text without a stop token is cut."""
    stops = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([s for s in STOPS if s in tokenizer.get_vocab()])]
    calls, script = EnvironmentCalls(environment, 0, 10.0), Writes(tokenizer, stops, *texts)
    settings = SamplingSettings(10_000, tuple(stops), 0)

    def act(prompts, seeds, partner):
        return by_turns(script, prompts, seeds, settings, partner)

    writer = Dialogues(calls, encoder_of(tokenizer, None, None, kwargs), stops, "Weather", 1.0)
    try:
        written = writer.write(act, [{"prompt": "?", "prompt_ids": [1]}], [0], 1, Limits(9, 10_000, 10_000, 40_000), 0)
    finally:
        calls.stop()
    return written, [tokenizer.decode(ids) for ids in script.asked]


def rendered(tokenizer, messages, arguments=dict, **how):
    """Transformers' rendering, with arguments as objects or as text."""
    given = [
        {**m, "tool_calls": [{**c, "function": {**c["function"], "arguments": arguments(c["function"]["arguments"])}}
                             for c in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]  # fmt: skip
    return tokenizer.apply_chat_template(given, tokenize=False, tools=Weather().tools, **how)


def thinks(tokenizer):
    """Whether the prompt opens a thought."""
    return rendered(tokenizer, ASKED, add_generation_prompt=True).rstrip().endswith("<think>")


def as_written(tokenizer, arguments=dict, calls=(CALL,)):
    """What a model writes that calls as the template renders it: up to the token that ends its turn."""
    prompt = rendered(tokenizer, ASKED, add_generation_prompt=True)
    whole = rendered(tokenizer, [*ASKED, {"role": "assistant", "content": "", "tool_calls": list(calls)}], arguments)
    place = next(i for i, (a, b) in enumerate(zip(prompt + "\0", whole, strict=False)) if a != b)
    text = whole[place:]
    if thinks(tokenizer) and "</think>" not in text:
        text = f"{THOUGHT}{text}"
    begin, _, end = text.rpartition(CITY)
    ends = [end.index(stop) + len(stop) for stop in (tokenizer.eos_token, *STOPS) if stop in end]
    return begin + CITY + (end[: min(ends)] if ends else end + "<|observation|>")


@pytest.mark.skipif(not TEMPLATES, reason="TRL, of the test extra, brings the templates")
@pytest.mark.parametrize("name", TOOLS)
def test_a_right_call_is_read_and_answered_under_every_template(name):
    """The expectation of what is read next is transformers' rendering of the conversation with the call's result."""
    tokenizer = tokenizer_of(name)
    if name in WITHOUT_SCHEMAS:
        with pytest.raises(UsageError, match="tools, which the tokenizer's chat template does not read"):
            dialogue(tokenizer, "?")
        return
    answer = f"{THOUGHT if thinks(tokenizer) else ''}Cold.{tokenizer.eos_token}"
    written, (_, second) = dialogue(tokenizer, as_written(tokenizer), answer)
    (talk,) = written.dialogues
    said, answered, last = talk["messages"]
    (call,) = calls_of(said)
    assert (call.name, call.arguments, call.error) == ("weather", {"days": 3, "city": CITY}, "")
    assert len(call.id) == 9 and call.id.isalnum() and answered == {**RESULT, "tool_call_id": call.id}
    assert (talk["ended"], talk["rewards"]) == ("done", [0.0, 1.0]) and last["content"] == "Cold."
    whole = rendered(tokenizer, [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
                     add_generation_prompt=True)  # fmt: skip
    assert second.partition(CITY)[2] == whole.partition(CITY)[2]
