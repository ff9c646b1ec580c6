"""Prompts and conversations as tokens: what reaches the chat template, and what a tokenizer lacks."""

import logging

import pytest

from datamodules.language.conversations import as_conversation
from datamodules.language.encoding import TextEncoder
from datamodules.language.preference_forms import as_preference
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer

EACH = "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}){% endfor %}"
OPEN = "{% if add_generation_prompt %}(a:{% endif %}"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"}]  # fmt: skip
CALLS = [{"function": {"name": "f", "arguments": {}}}]


def encoder(template=EACH + OPEN, **settings):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return TextEncoder(tokenizer, **settings)


def test_a_conversation_keeps_a_system_message_of_its_own():
    encode = encoder(system_prompt="be")
    own = [{"role": "system", "content": "do"}, CHAT[0]]
    ids = encode.prompts([own, CHAT[:1], "hi"])
    assert encode.tokenizer.batch_decode(ids) == ["(s:do)(u:hi)(a:", "(s:be)(u:hi)(a:", "(s:be)(u:hi)(a:"]


def test_turns_are_found_by_prefixes_and_count_from_where_they_are_told():
    encode = encoder(system_prompt="be")
    for first, expected in ((0, "yo)no)"), (2, "no)")):
        ids, written = encode.conversation(CHAT, {}, first)
        assert encode.tokenizer.decode(ids) == "(s:be)(u:hi)(a:yo)(u:so)(a:no)"
        assert encode.tokenizer.decode([t for t, flag in zip(ids, written, strict=True) if flag]) == expected


def test_a_template_with_marks_counts_from_where_it_is_told():
    marked = ("{% for m in messages %}{% if m['role'] == 'assistant' %}(a{% generation %}:{{ m['content'] }})"
              "{% endgeneration %}{% else %}(u:{{ m['content'] }}){% endif %}{% endfor %}")  # fmt: skip
    encode = encoder(marked)
    for first, expected in ((0, ":yo):no)"), (2, ":no)")):
        ids, written = encode.conversation(CHAT, {}, first)
        assert encode.tokenizer.decode([t for t, flag in zip(ids, written, strict=True) if flag]) == expected


def test_a_template_that_rewrites_earlier_turns_is_refused():
    rewriting = "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] if loop.last else '' }}){% endfor %}"
    with pytest.raises(UsageError, match=r"renders message 1 .* differently when others follow.*generation"):
        encoder(rewriting).conversation(CHAT, {})
    encode = encoder(rewriting)
    assert encode.tokenizer.decode(encode.whole(CHAT, {})) == "(u:)(a:)(u:)(a:no)"


@pytest.mark.parametrize(
    ("messages", "record", "message"),
    [
        (CHAT[:1], {"tools": [{"name": "f"}]}, "a record has tools, which the tokenizer's chat template does not read"),
        ([*CHAT[:1], {"role": "assistant", "content": "", "tool_calls": CALLS}], {}, "a record has tool_calls"),
        (CHAT[:1], {"tools": "[{"}, "tools='.*' is not valid JSON"),
        (CHAT[:1], {"tools": {"name": "f"}}, "tools is a dict, where a list"),
    ],
)
def test_tools_that_would_be_lost_are_refused(messages, record, message):
    with pytest.raises(UsageError, match=message):
        encoder().prompts([messages], [record])


def test_an_error_of_the_template_names_the_roles():
    with pytest.raises(UsageError, match=r"refuses a conversation with roles user \(only systems\)"):
        encoder("{{ raise_exception('only systems') }}").prompts(["hi"])


def test_characters_that_the_tokenizer_lacks_are_named_once(caplog):
    encode = TextEncoder(character_tokenizer())
    with caplog.at_level(logging.WARNING):
        assert encode.tokenizer.unk_token_id in encode.prompts(["plain", "é中a"])[1]
        encode.completions(["ñé"])
        encode.report_unknown("here")
        encode.report_unknown("here")
        encode.prompts(["é", "plain"])
        encode.report_unknown("there")
        encode.prompts(["ß"])
        encode.report_unknown("there")
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "here: the tokenizer lacks 'é' '中' 'ñ'",
        "there: the tokenizer lacks 'ß'",
    ]
    assert "<unk>" in caplog.messages[0] and "tokenizer_name_or_path" in caplog.messages[0]


def test_conversations_as_records():
    record = as_conversation({"messages": CHAT, "id": 3}, "here")
    assert record["prompt"] == CHAT[:1] and record["conversation"] == CHAT and record["completion"] == "yo"
    assert record["id"] == 3
    record = as_conversation({"prompt": "hi", "completion": CHAT[1:2]}, "here")
    assert record["prompt"] == CHAT[:1] and record["conversation"] == CHAT[:2]
    assert as_conversation({"prompt": "hi", "completion": "yo", "messages": 1}, "here")["messages"] == 1
    for messages in (CHAT[:1], CHAT[1:2]):
        with pytest.raises(UsageError, match="here: 'messages' has roles .*user's message and then an assistant's"):
            as_conversation({"messages": messages}, "here")
    with pytest.raises(UsageError, match="here: 'messages' is int 3"):
        as_conversation({"messages": 3}, "here")


def test_answers_that_call_tools_are_refused_as_preferences():
    answer = {"role": "assistant", "content": "", "tool_calls": CALLS}
    with pytest.raises(UsageError, match="here: 'rejected' calls tools"):
        as_preference({"chosen": CHAT[:2], "rejected": [CHAT[0], answer]}, "here")
