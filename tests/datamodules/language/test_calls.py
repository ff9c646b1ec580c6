import json

import pytest

from datamodules.language.calls import FORMATS, calls_of, format_of, message_of, message_parser
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer

ARGUMENTS = {"city": 'Zürich "old" </b> {x}', "days": 3, "exact": True, "at": [1.5, None]}
WRITTEN = json.dumps(ARGUMENTS)


def calls(text, form=None):
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
def test_a_call_is_read_in_its_format_and_by_its_marker_alone(form, text):
    text = text.replace("%s", WRITTEN)
    assert calls(text, form) == calls(text) == [("weather", ARGUMENTS, "")]


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


@pytest.mark.parametrize(("text", "says"), [
    ('<tool_call>{"name": "f", "arguments": {"x": 1}', "no valid JSON"),
    ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN"),
    ("<tool_call>[1]</tool_call>", "object with name"),
    ('<tool_call>{"name": 3}</tool_call>', "no name"),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no valid JSON"),
    ('<|python_tag|>{"name": "f", "parameters": {}}; oops', "no valid JSON"),
    ("[TOOL_CALLS] nothing", "no valid JSON"),
    (" to=functions.f<|channel|>commentary json<|message|>{oops<|call|>", "no valid JSON"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{oops<｜tool▁call▁end｜>", "no valid JSON"),
])  # fmt: skip
def test_a_wrong_call_is_a_call_with_a_sentence_that_says_what_is_wrong(text, says):
    assert says in calls(text)[-1][2]


@pytest.mark.parametrize("text", ["42", '{"answer": 42}', "a {b} c", "", "{", "<tool_cal", "to=functions.f"])
def test_an_answer_without_a_call_is_content(text):
    assert message_of(text) == {"role": "assistant", "content": text.strip()}


def test_thoughts_are_no_content_and_hold_no_calls():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = message_of(f"<think>{call}</think>Done.")
    assert message == {"role": "assistant", "content": "Done.", "reasoning_content": call}
    assert calls(f"{call} as the prompt opened the thought</think>{call}") == [("f", {}, "")]
    assert calls(f"<think>{call} never closed") == []


def test_channels_of_gpt_oss_are_reasoning_and_content():
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    assert message_of(text) == {"role": "assistant", "content": "42", "reasoning_content": "Hm."}


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="hermes"):
        message_of("x", "hermess")


FAMILIES = {"qwen2_5": "hermes", "qwen3": "hermes", "llama3_1": "llama", "llama3_2": "llama", "gptoss": "harmony",
            "deepseekv3": "deepseek", "deepseekv3_training": "deepseek"}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_s_template_writes_is_read_back(family):
    """The templates are TRL's copies of the families' own."""
    folder = pytest.importorskip("trl.chat_template_utils")._CHAT_TEMPLATES_DIR
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (folder / f"{family}.jinja").read_text("utf-8")
    arguments = WRITTEN if family == "deepseekv3" else ARGUMENTS
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    asked = [{"role": "user", "content": "How is it?"}]
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}],
                                          tokenize=False)  # fmt: skip
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    if not whole.startswith(prompt):  # DeepSeek's and Qwen's open a thought
        prompt = tokenizer.apply_chat_template(asked, tokenize=False)
    assert format_of(tokenizer) == FAMILIES[family]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"]})
    message = message_parser(tokenizer)(whole.removeprefix(prompt), prompt)
    [read] = calls_of(message)
    assert (read.name, read.arguments, read.error) == ("weather", ARGUMENTS, "")


def test_a_tokenizer_s_own_response_template_parses_first():
    trl = pytest.importorskip("trl.chat_template_utils")
    tokenizer = character_tokenizer()
    tokenizer.response_template = trl.qwen3_5_template
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>"
    schema = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"days": {"type": "integer"}}}}}  # fmt: skip
    [read] = calls_of(message_parser(tokenizer, [schema])(text, "<|im_start|>assistant\n"))
    assert (read.name, read.arguments, read.error) == ("weather", {"days": 3}, "")


def test_every_format_survives_noise():
    for form, (marker, _) in FORMATS.items():
        for noise in ("", marker, marker * 50, marker + "{}", marker + "\x00" + marker, "</think>" + marker):
            calls_of(message_of(noise, form))
