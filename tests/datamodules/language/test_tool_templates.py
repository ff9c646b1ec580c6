"""Calls of tools under all templates for tools that TRL ships: rendered, read, answered, rendered again."""

import json
import re
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken

from datamodules.language.calls import calls_of
from datamodules.language.dialogues import Dialogues, Limits
from datamodules.language.environment_calls import EnvironmentCalls
from datamodules.language.tools import ToolEnvironment
from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.protocol import SamplingSettings
from rl_modules.language.sampling.rows import completions_of
from rl_modules.language.sampling.turns import by_turns
from rl_modules.language.text.chat_template import encoder_of
from tests.datamodules.language.test_templates import TEMPLATES, byte_tokenizer
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


def dialogue(tokenizer, *texts, environment=Weather, prompt="?"):
    """A dialogue whose turns are given, and what the sampler read before each; a text without a stop token is cut."""
    stops = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([s for s in STOPS if s in tokenizer.get_vocab()])]
    calls, script = EnvironmentCalls(environment, 0, 10.0), Writes(tokenizer, stops, *texts)
    settings = SamplingSettings(10_000, tuple(stops), 0)

    def act(prompts, seeds, partner):
        return by_turns(script, prompts, seeds, settings, partner)

    writer = Dialogues(calls, encoder_of(tokenizer), stops, "Weather", 1.0)
    try:
        written = writer.write(
            act, [{"prompt": prompt, "prompt_ids": [1]}], [0], 1, Limits(9, 10_000, 10_000, 40_000), 0
        )
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


TOOLS_FIRST = "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
ASSISTANT = "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
NINE = "{{ raise_exception('ids have nine letters and digits') }}"
#: As Mistral's of 2024 and 2025 and DeepSeek's V3.1 are written: ids of nine characters, arguments that are text.
FAMILIES = {
    "mistral 2024": TOOLS_FIRST + "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}" + NINE + "{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}" + NINE
    + "{% endif %}{{ (c.function | tojson)[:-1] }}, \"id\": \"{{ c.id }}\"}{{ ', ' if not loop.last }}{% endfor %}]</s>"
    + ASSISTANT,
    "mistral 2025": TOOLS_FIRST + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls is defined %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}" + NINE + "{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}</s>" + ASSISTANT,
    "deepseek": TOOLS_FIRST + "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.tool_calls is defined %}<｜Assistant｜></think><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}<｜tool▁calls▁end｜></s>" + ASSISTANT
    + "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜></think>{% endif %}",
}  # fmt: skip


def family_tokenizer(name):
    tokenizer = byte_tokenizer(FAMILIES[name])
    marks = ["</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[CALL_ID]",
             "[TOOL_CONTENT]", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
             "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
             "<｜tool▁sep｜>"]  # fmt: skip
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks], special_tokens=True)
    tokenizer.eos_token = "</s>"
    return tokenizer


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_have_ids_and_arguments_as_a_template_takes_them(name, count):
    """The expectation is transformers' rendering with the ids that the message has, and JSON text for arguments."""
    tokenizer, calls = family_tokenizer(name), [CALL, {**CALL, "id": "jklmnopqr"}][:count]
    as_text = (lambda value: json.dumps(value, ensure_ascii=False)) if name == "deepseek" else dict
    written, (_, second) = dialogue(tokenizer, as_written(tokenizer, as_text, calls), "Cold.</s>")
    (talk,) = written.dialogues
    read = calls_of(talk["messages"][0])
    assert [(call.name, call.arguments, call.error) for call in read] == [
        ("weather", {"days": 3, "city": CITY}, "")
    ] * count
    results = [{**RESULT, "tool_call_id": call.id} for call in read]
    assert talk["messages"][1:-1] == results and talk["rewards"] == [0.0, 1.0]
    assert [call.id for call in read] == [call["id"] for call in calls] or name == "deepseek"
    said = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": call.id} for call in read]}
    whole = rendered(tokenizer, [*ASKED, said, *results], as_text, add_generation_prompt=True)
    assert second == whole


@pytest.mark.parametrize(("wrong", "says"), [
    ("<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>", "no known form"),
    ("<tool_call>{{ c.function | tojson }}</tool_call>", "leaves out what a tool answers"),
])  # fmt: skip
def test_a_template_whose_calls_are_not_read_or_answered_is_refused_before_the_first_turn(wrong, says):
    answered = "" if "leaves" in says else "{% elif m.role == 'tool' %}<r>{{ m.content }}</r>"
    tokenizer = byte_tokenizer(
        "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}"
        f"{answered}{{% elif m.tool_calls is defined %}}<a>{{% set c = m.tool_calls[0] %}}{wrong}<eos>"
        "{% elif m.role == 'assistant' %}<a>{{ m.content }}<eos>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    with pytest.raises(UsageError, match=f"{says}.*response_template"):
        dialogue(tokenizer, "?")
    if says == "no known form":
        # The setting that helps.
        name, call = r"<call>(?P<name>[a-z_]+)", {"close": "</call>", "content": "json", "repeats": True}
        transform = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
        tokenizer.response_template = {
            "start_anchor": "<a>",
            "fields": {"tool_calls": {"open_pattern": name, **call, "transform": transform},
                       "content": {"close": "<eos>"}},
        }  # fmt: skip
        written, _ = dialogue(tokenizer, as_written(tokenizer), "Cold.<eos>")
        assert written.dialogues[0]["rewards"] == [0.0, 1.0]


class Deletes(Weather):
    """Ends the dialogue at the third message, whatever it is."""

    def reset(self, record):
        self.said = []
        return super().reset(record)

    def step(self, message):
        self.said.append(message)
        messages, reward, _ = super().step(message)
        return (messages or [{"role": "user", "content": "Go on."}]), reward, len(self.said) == 3


@pytest.mark.skipif(not TEMPLATES, reason="TRL, of the test extra, brings the templates")
@pytest.mark.parametrize("name", ["qwen3_5_think", "nemotron_3_nano", "gptoss", "muse_glimmer", "glm4moe"])
def test_a_turn_cut_inside_a_thought_runs_nothing_and_is_closed_as_the_template_closes_it(name):
    """The expectation is transformers' rendering of a thought and its answer."""
    tokenizer = tokenizer_of(name)
    open_thought = {"gptoss": "<|channel|>analysis<|message|>", "muse_glimmer": " to=self<|message|>",
                    "glm4moe": "\n<think>"}.get(name, "")  # fmt: skip
    call = as_written(tokenizer).rpartition("</think>")[2].partition(tokenizer.eos_token)[0].partition("<|obs")[0]
    thought = "Perhaps" if "<|message|>" in call else f"Perhaps {call}"
    written, (_, second, _) = dialogue(tokenizer, open_thought + thought, "x", "y", environment=Deletes)
    (talk,) = written.dialogues
    said = talk["messages"][0]
    assert said == {"role": "assistant", "content": "", "reasoning_content": thought.strip()}
    assert not written.finished.any()
    message = {"role": "assistant", "content": "Answ3r", "reasoning_content": "Perhaps", "thinking": "Perhaps"}
    between = rendered(tokenizer, [*ASKED, message]).rpartition("Perhaps")[2].partition("Answ3r")[0]
    talk = [*ASKED, {"role": "assistant", "content": "Answ3r"}, {"role": "user", "content": "Go on."}]
    rest = rendered(tokenizer, talk, add_generation_prompt=True).rpartition("Answ3r")[2]
    assert second.endswith(thought + between + rest)


class Own(Weather):
    """Leaves the opening to the record's prompt."""

    def reset(self, record):
        super().reset(record)
        return []


@pytest.mark.skipif(not TEMPLATES, reason="TRL, of the test extra, brings the templates")
@pytest.mark.parametrize(("end", "content"), [("</think>Cold.<|im_end|>", "Cold."), ("", "")])
def test_a_thought_that_the_prompt_s_last_message_begins_goes_on(end, content):
    tokenizer = tokenizer_of("qwen3")
    thought = 'or <tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    prompt = [*ASKED, {"role": "assistant", "content": "<think>\nSnow"}]
    written, (first,) = dialogue(tokenizer, f" {thought}{end}", environment=Own, prompt=prompt)
    (said,) = written.dialogues[0]["messages"]
    assert first.endswith("<think>\nSnow")
    assert said == {"role": "assistant", "content": content, "reasoning_content": thought}


@pytest.mark.skipif(not TEMPLATES, reason="TRL, of the test extra, brings the templates")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "gemma4", "llama3_1"])
def test_two_calls_of_a_turn_are_both_answered(name):
    """Llama's template renders one call at most, and the model may write two."""
    tokenizer, other = tokenizer_of(name), {"name": "weather", "arguments": {"days": 4, "city": CITY}}
    if name == "llama3_1":
        calls = [{"name": "weather", "parameters": {"days": days, "city": CITY}} for days in (3, 4)]
        text = "; ".join(json.dumps(call, ensure_ascii=False) for call in calls) + "<|eot_id|>"
    else:
        text = as_written(tokenizer, calls=[CALL, {**CALL, "id": "jklmnopqr", "function": other}])
    written, (_, second) = dialogue(tokenizer, text, f"Cold.{tokenizer.eos_token}")
    said, *answered, _ = written.dialogues[0]["messages"]
    assert written.dialogues[0]["rewards"] == [0.0, 1.0]
    assert [message["tool_call_id"] for message in answered] == [call.id for call in calls_of(said)]
    assert second.index(weather(3, CITY)) < second.index(weather(4, CITY))
