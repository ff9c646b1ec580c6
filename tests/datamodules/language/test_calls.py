import json
import time

import pytest

from datamodules.language.call_forms import FORMS
from datamodules.language.calls import calls_of, with_call_ids
from datamodules.language.message_reader import MessageReader, message_of
from rl_modules.common.errors import UsageError

ARGUMENTS = {"city": 'Zürich "old" </b> {x}', "days": 3, "exact": True, "at": [1.5, None]}
WRITTEN = json.dumps(ARGUMENTS)


def calls(text, form="hermes"):
    return [(call.name, call.arguments, call.error) for call in calls_of(message_of(text, form))]


@pytest.mark.parametrize(("form", "text"), [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'),
    ("hermes", 'Let me see.<tool_call>{"arguments": %s, "name": "weather"}'),
    ("llama", '{"name": "weather", "parameters": %s}'),
    ("llama", '<|python_tag|>{"name": "weather", "parameters": %s}<|eom_id|>'),
    ("llama", '{"type": "function", "function": {"name": "weather", "parameters": %s}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": %s, "id": "a1b2c3d4e"}]'),
    ("mistral", "[TOOL_CALLS]weather[ARGS]%s"),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]%s"),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
                "to=functions.weather <|constrain|>json<|message|>%s<|call|>"),
    ("harmony", " to=functions.weather<|channel|>commentary json<|message|>%s<|call|>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```"
                 "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
])  # fmt: skip
def test_a_call_is_read_in_its_form(form, text):
    assert calls(text.replace("%s", WRITTEN), form) == [("weather", ARGUMENTS, "")]


TYPES = {"text": {"type": "string"}, "n": {"type": "integer"}, "on": {"type": "boolean"}, "at": {"type": "array"}}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}}
TYPED = {"text": "0 3", "n": 3, "on": True, "at": [1.5, None]}


@pytest.mark.parametrize(("form", "text"), [
    ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=text>\n0 3\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
                 "<parameter=on>\nTrue\n</parameter>\n<parameter=at>\n[1.5, null]\n</parameter>\n</function>\n"
                 "</tool_call>"),
    ("glm", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>0 3</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3"
            "</arg_value>\n<arg_key>on</arg_key>\n<arg_value>true</arg_value>\n<arg_key>at</arg_key>\n<arg_value>"
            "[1.5, null]</arg_value>\n</tool_call>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
                 "<｜tool▁calls▁end｜>"),
    ("atem", ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="text">0 3'
             '</atem:parameter>\n<atem:parameter name="n">3</atem:parameter>\n<atem:parameter name="on">true'
             '</atem:parameter>\n<atem:parameter name="at">[1.5, null]</atem:parameter>\n</atem:invoke>\n'
             "</atem:function_calls>"),
    ("gemma", '<|tool_call>call:f{text:<|"|>0 3<|"|>,n:3,on:true,at:[1.5,null]}<tool_call|>'),
    ("lfm", "<|tool_call_start|>[f(text='0 3', n=3, on=True, at=[1.5, None])]<|tool_call_end|>"),
    ("lfm", '<|tool_call_start|>f(text="0 3", n=3, on=true, at=[1.5, null])<|tool_call_end|>'),
])  # fmt: skip
def test_arguments_in_tags_get_the_types_of_the_schema(form, text):
    message = MessageReader(form).read(text.replace("%s", json.dumps(TYPED)), tools=[SCHEMA])
    assert [(c.name, c.arguments, c.error) for c in calls_of(message)] == [("f", TYPED, "")]
    assert message["content"] == ""


@pytest.mark.parametrize(("form", "text"), [
    ("qwen_xml", "<tool_call>\n<function=delete>\n<parameter=path>\n/tmp\n</parameter>\n<parameter=keep>\n/tm"),
    ("glm", "<tool_call>delete\n<arg_key>path</arg_key>\n<arg_value>/tmp</arg_value>\n<arg_key>keep"),
    ("atem", 'to=delete<|message|><atem:function_calls>\n<atem:invoke name="delete">\n<atem:parameter name="path">/tmp'
             "</atem:parameter>\n"),
    ("gemma", '<|tool_call>call:delete{path:<|"|>/tmp<|"|>,keep:'),
    ("lfm", "<|tool_call_start|>[delete(path='/tmp', keep="),
    ("hermes", '<tool_call>{"name": "delete", "arguments": {"path": "/tmp", "keep"'),
    ("harmony", ' to=functions.delete<|channel|>commentary json<|message|>{"path": "/tmp", "keep"'),
])  # fmt: skip
def test_a_call_that_is_cut_off_is_a_wrong_call(form, text):
    [call] = calls_of(message_of(text, form))
    assert call.error and not call.arguments


@pytest.mark.parametrize(("form", "text"), [
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
                 "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
])  # fmt: skip
def test_several_calls_keep_their_order(form, text):
    assert calls(text, form) == [("f", {}, ""), ("g", {}, "")]


@pytest.mark.parametrize(("form", "text", "says"), [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', "no valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "inf"),
    ("hermes", "<tool_call>[1]</tool_call>", "object with name"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', "no name"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "no valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 99 + "]" * 99 + "}}</tool_call>", "levels deep"),
    ("hermes", "<tool_call></tool_call>" * 10_000, "more than 512 marks"),
    ("qwen_xml", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "not the form"),
    ("atem", '<atem:function_calls>{"name": "f"}</atem:function_calls>', "not the form"),
    ("lfm", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "each argument needs its name"),
    ("lfm", "<|tool_call_start|>[f(x=open('x'))]<|tool_call_end|>", "no list of"),
    ("lfm", "<|tool_call_start|>" + "(" * 10_000 + "<|tool_call_end|>", "no list of"),
    ("gemma", "<|tool_call>call:f{oops<tool_call|>", "ValueError"),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}}; oops', "no valid JSON"),
    ("mistral", "[TOOL_CALLS] nothing", "no valid JSON"),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>{oops<|call|>", "no valid JSON"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{oops<｜tool▁call▁end｜>", "no valid JSON"),
])  # fmt: skip
def test_a_wrong_call_is_a_call_with_a_sentence_that_says_what_is_wrong(form, text, says):
    assert says in calls(text, form)[-1][2]


def test_half_a_character_in_a_call_is_made_valid():
    [call] = calls_of(message_of('<tool_call>{"name": "f", "arguments": {"x\\ud83d": ["\\ud83d"]}}</tool_call>'))
    assert call.arguments == {"x\ufffd": ["\ufffd"]}


def test_calls_get_ids_that_their_answers_carry():
    """Mistral's templates want nine letters and digits, in the call and in its answer."""
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a1b2c3d4e"}, {"name": "g", "arguments": {}, "id": "1"}]'
    message = MessageReader("mistral").read(text, first=7)
    assert [call.id for call in calls_of(message)] == ["a1b2c3d4e", "call00008"]
    answers = [{"role": "tool", "content": "1"}, {"role": "user", "content": "?"}, {"role": "tool", "content": "2"},
               {"role": "tool", "content": "3"}]  # fmt: skip
    ids = [answer.get("tool_call_id") for answer in with_call_ids(message, answers)]
    assert ids == ["a1b2c3d4e", None, "call00008", None] and "tool_call_id" not in answers[0]
    assert with_call_ids(message, [{"role": "tool", "tool_call_id": "own"}])[0]["tool_call_id"] == "own"


@pytest.mark.parametrize("text", ["42", '{"answer": 42}', "a {b} c", "", "{", "<tool_cal", "to=functions.f"])
def test_an_answer_without_a_call_is_content(text):
    assert message_of(text) == {"role": "assistant", "content": text.strip()}


def test_thoughts_are_no_content_and_hold_no_calls():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = message_of(f"<think>{call}</think>Done.")
    assert message == {"role": "assistant", "content": "Done.", "reasoning_content": call}
    assert calls(f"{call} as the prompt opened the thought</think>{call}") == [("f", {}, "")]
    assert calls(f"<think>{call} never closed") == []


#: As TRL gives tokenizers of Qwen 3.5 one.
QWEN_XML = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


@pytest.mark.parametrize(("form", "prompt", "text"), [
    ("hermes", "assistant\n<think>\n", 'Perhaps <tool_call>{"name": "delete", "arguments": {}}</tool_call>'),
    ("qwen_xml", "assistant\n<think>", "Perhaps <tool_call>\n<function=delete>\n</function>\n</tool_call>"),
    ("gemma", "<|channel>thought\n", "Perhaps <|tool_call>call:delete{}<tool_call|>"),
])  # fmt: skip
def test_a_cut_thought_that_the_prompt_opened_is_no_answer_and_runs_no_call(form, prompt, text):
    reader = MessageReader(form)
    assert reader.read(text, prompt) == {"role": "assistant", "content": "", "reasoning_content": text}
    assert reader.ends_in_thought(text, prompt) and len(calls_of(reader.read(text, "assistant\n"))) == 1


def test_a_response_template_that_looks_for_the_end_of_a_thought_runs_no_call_of_a_cut_one():
    """TRL's template of Nemotron 3 takes a thought without an end as content."""
    thought = {"open_pattern": r"(?=[\s\S]*?</think>)", "close_pattern": r"</think>\s*", "content": "text"}
    template = {**QWEN_XML, "start_anchor_pattern": r"<\|im_start\|>assistant\n<think>(?:\n|</think>)?",
                "fields": {**QWEN_XML["fields"], "reasoning_content": thought}}  # fmt: skip
    text, prompt = "Perhaps <tool_call>\n<function=f>\n</function>\n</tool_call>", "<|im_start|>assistant\n<think>\n"
    reader = MessageReader(template)
    assert calls_of(reader.read(text, prompt)) == []
    assert [call.name for call in calls_of(reader.read(f"Hm.</think>{text}", prompt))] == ["f"]


def test_channels_of_gpt_oss_are_reasoning_and_content():
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    assert message_of(text, "harmony") == {"role": "assistant", "content": "42", "reasoning_content": "Hm."}


def test_an_unknown_form_is_refused():
    with pytest.raises(UsageError, match="hermes"):
        message_of("x", "hermess")


def test_a_response_template_of_transformers_is_a_form():
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    schema = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"days": {"type": "integer"}}}}}  # fmt: skip
    reader = MessageReader(QWEN_XML)
    [read] = calls_of(reader.read(text, "<|im_start|>assistant\n", "<|im_end|>", [schema]))
    assert (read.name, read.arguments, read.error) == ("weather", {"days": 3}, "")


@pytest.mark.parametrize("repeats", [True, False])
def test_a_field_of_a_response_template_may_hold_several_calls(repeats):
    field = {"open": "<calls>", "close": "</calls>", "content": "json", "repeats": repeats}
    reader = MessageReader({"start_anchor": "<a>", "fields": {"tool_calls": field, "content": {"close": "<eos>"}}})
    for text, names in (('[{"name": "f"}, {"name": "g"}]', ["f", "g"]), ('{"name": "f"}', ["f"])):
        read = calls_of(reader.read(f"<calls>{text}</calls>", "<a>"))
        assert [(call.name, call.error) for call in read] == [(name, "") for name in names]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_survives_noise(form):
    marks = [str(x) for x in FORMS[form].call.values() if isinstance(x, str)] + ["<tool_call>", "<|message|>", "[ARGS]"]
    for mark in marks:
        for noise in ("", mark, mark * 50, mark + "{}", mark + "\x00\x01" + mark, "</think>" + mark, "\ud83d" + mark):
            calls_of(message_of(noise, form))


@pytest.mark.parametrize("form", FORMS)
def test_reading_takes_bounded_time(form):
    """Ten thousand marks were read in quadratic time."""
    marks = (
        "<tool_call>",
        "<tool_call></tool_call>",
        "<think></think>",
        "<|message|>",
        "to=functions.f",
        "[TOOL_CALLS]",
    )
    for mark in marks:
        before = time.process_time()
        message_of(mark * 10_000, form)
        assert time.process_time() - before < 1
