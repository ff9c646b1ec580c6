"""Prompts and conversations as tokens: what reaches the chat template, and what a tokenizer lacks."""

import logging

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from datamodules import PromptDataModule
from datamodules.language.formats import as_conversation, as_judgement, as_preference
from datamodules.language.preference import mismatched
from rl_modules import GRPO
from rl_modules.common.errors import UsageError
from rl_modules.language.text.chat_template import encoder_of
from rl_modules.language.tokenizer import character_tokenizer
from tests.training import fit

EACH = "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}){% endfor %}"
OPEN = "{% if add_generation_prompt %}(a:{% endif %}"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"}]  # fmt: skip
CALLS = [{"function": {"name": "f", "arguments": {}}}]


def encoder(template=EACH + OPEN, **settings):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return encoder_of(tokenizer, **settings)


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


MARKED = ("{% for m in messages %}({{ m['role'][0] }}:{% if m['role'] == 'assistant' %}{% generation %}"
          "{{ m['content'] }}){% endgeneration %}{% else %}{{ m['content'] }}){% endif %}{% endfor %}")  # fmt: skip


@pytest.mark.parametrize("template", [EACH + OPEN, MARKED])
def test_a_message_of_weight_0_is_read_but_not_learned(template):
    encode = encoder(template, system_prompt="be")
    for weights, expected in (((0, 1), "no)"), ((1, 0), "yo)"), ((1, None), "yo)no)")):
        chat = [dict(m) for m in CHAT]
        for message, weight in zip(chat[1::2], weights, strict=True):
            message.update({} if weight is None else {"weight": weight})
        ids, written = encode.conversation(chat, {})
        assert encode.tokenizer.decode(ids) == "(s:be)(u:hi)(a:yo)(u:so)(a:no)"
        assert encode.tokenizer.decode([t for t, flag in zip(ids, written, strict=True) if flag]) == expected
    with pytest.raises(UsageError, match="no assistant message to learn from"):
        encode.conversation([CHAT[0], {**CHAT[1], "weight": 0}], {})
    with pytest.raises(UsageError, match=r"weight=0\.5; give 1, or 0"):
        encode.conversation([CHAT[0], {**CHAT[1], "weight": 0.5}], {})


def test_weights_need_a_passage_for_each_message():
    joined = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[3]]
    template = MARKED.replace("({{ m['role'][0] }}:{% if", "{% if")
    with pytest.raises(UsageError, match="marks 1 passages of 2 assistant messages"):
        encoder(template).conversation(joined, {})


def test_a_template_that_rewrites_earlier_turns_is_refused():
    rewriting = "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] if loop.last else '' }}){% endfor %}"
    with pytest.raises(UsageError, match=r"renders the messages before an answer differently .*generation"):
        encoder(rewriting).conversation(CHAT, {})
    # One that writes them alike until a later message follows.
    with pytest.raises(UsageError, match=r"renders message 1 .* differently when others follow.*generation"):
        encoder(EACH.replace("})", "}{{ ']' if m.role[0] == 'a' and not loop.last else ')' }}") + OPEN).conversation(
            CHAT[:3], {})  # fmt: skip
    encode = encoder(rewriting)
    assert encode.tokenizer.decode(encode.whole(CHAT, {})) == "(u:)(a:)(u:)(a:no)"


def test_turns_of_a_template_that_ends_the_conversation_with_the_eos_token_are_known():
    """Phi-3's and Phi-4's templates; TRL's variants with blocks mark the same tokens."""
    ending = "{% if add_generation_prompt %}(a:{% else %}{{ eos_token }}{% endif %}"
    encode = encoder(EACH + ending)
    ids, written = encode.conversation(CHAT, {})
    eos = encode.tokenizer.eos_token_id
    assert encode.tokenizer.decode(ids[:-1]) == "(u:hi)(a:yo)(u:so)(a:no)" and ids[-1] == eos
    learned = [token for token, flag in zip(ids, written, strict=True) if flag]
    assert encode.tokenizer.decode(learned[:-1]) == "yo)no)" and learned[-1] == eos


@pytest.mark.parametrize("tags", [
    ("{%generation%}", "{%endgeneration%}"), ("{%-  generation -%}", "{%-  endgeneration -%}"),
    ("{%\n generation\n%}", "{% endgeneration %}"),
])  # fmt: skip
def test_marks_are_found_as_transformers_finds_them(tags):
    # The closing bracket is not marked: turn by turn it would count.
    template = MARKED.replace("{% generation %}", tags[0])
    template = template.replace("){% endgeneration %}", tags[1] + ")") + OPEN
    encode = encoder(template)
    expected = encode.tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids, written = encode.conversation(CHAT, {})
    assert ids == list(expected["input_ids"])
    assert written == [bool(flag) for flag in expected["assistant_masks"]]
    assert encode.tokenizer.decode([t for t, flag in zip(ids, written, strict=True) if flag]) == "yono"


def test_a_last_character_of_the_prompt_that_is_joined_with_the_answer_is_learned(caplog):
    words = Tokenizer(WordLevel({"<eos>": 0, "u:": 1, "hi": 2, "a:": 3, " ": 4, " yo": 5}, unk_token="<eos>"))
    words.pre_tokenizer = Split(Regex(r"[ua]:| ?[a-z]+| "), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<eos>")
    tokenizer.chat_template = ("{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}a: {% endif %}")  # fmt: skip
    ids, written = encoder_of(tokenizer).conversation(CHAT[:2], {})
    assert tokenizer.convert_ids_to_tokens(ids[-1:]) == [" yo"] and written == [False] * (len(ids) - 1) + [True]
    assert "opens an answer with ' '" in caplog.text
    caplog.clear()
    tokenizer.chat_template = tokenizer.chat_template.replace("a: {%", "a:{%")
    assert encoder_of(tokenizer).conversation(CHAT[:2], {}) == (ids, written) and not caplog.text


@pytest.mark.parametrize(
    ("messages", "record", "message"),
    [
        (CHAT[:1], {"tools": [{"name": "f"}]}, "a record has tools, which the tokenizer's chat template does not read"),
        ([*CHAT[:1], {"role": "assistant", "content": "", "tool_calls": CALLS}], {}, "a record has tool_calls"),
        (CHAT[:1], {"tools": "[{"}, "tools='.*': JSONDecodeError: "),
        (CHAT[:1], {"tools": {"name": "f"}}, "tools is a dict, where a list"),
    ],
)
def test_tools_that_would_be_lost_are_refused(messages, record, message):
    with pytest.raises(UsageError, match=message):
        encoder().prompts([messages], [record])


@pytest.mark.parametrize(
    "written",
    ["{{ c.function.arguments | tojson }}",  # Qwen2.5
     "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
     "{% endif %}",  # Qwen3
     "{% for k, v in c.function.arguments.items() %}{{ '{' }}{{ k | tojson }}: {{ v | tojson }}{{ '}' }}{% endfor %}",
     "{{ '' + c.function.arguments }}"],  # DeepSeek-V3: text alone
    ids=["quotes text", "either", "refuses text", "refuses objects"],
)  # fmt: skip
def test_arguments_of_tool_calls_may_be_the_text_of_an_object(written):
    """Rendered as the object, whatever of both forms the template takes; what is no object stays a text."""
    encode = encoder("{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}[" + written
                     + "]{% endfor %}{% else %}({{ m.content }}){% endif %}{% endfor %}")  # fmt: skip

    def render(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        ids = encode.whole(messages, {})
        assert messages[1]["tool_calls"] == [call], "the record stays as it is"
        return encode.tokenizer.decode(ids)

    assert render('{"x": "a b"}') == '(hi)[{"x": "a b"}]'
    if "'' +" not in written:
        assert render({"x": "a b"}) == '(hi)[{"x": "a b"}]'
    if "items" not in written:
        assert render("x") in ("(hi)[x]", '(hi)["x"]')


def test_an_error_of_the_template_names_the_roles():
    with pytest.raises(UsageError, match=r"refuses a conversation with roles user \(only systems\)"):
        encoder("{{ raise_exception('only systems') }}").prompts(["hi"])


def test_characters_that_the_tokenizer_lacks_are_named_once(caplog):
    encode = encoder_of(character_tokenizer())
    with caplog.at_level(logging.WARNING):
        assert encode.tokenizer.unk_token_id in encode.prompts(["plain", "é中a"])[1]
        encode.answered(["a"], ["ñé"])
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


def test_answers_that_call_tools_are_rendered():
    answer = {"role": "assistant", "content": "", "tool_calls": CALLS}
    pair = as_preference({"chosen": CHAT[:2], "rejected": [CHAT[0], answer]}, "here")
    assert pair == {"prompt": CHAT[:1], "chosen": "yo", "rejected": [answer]}
    with pytest.raises(UsageError, match="record 0: a record has tool_calls, which the tokenizer's chat template"):
        encoder().answered([pair["prompt"]], [pair["rejected"]])
    calls = EACH.replace("}}){%", "}}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}){%")
    encode = encoder(calls + OPEN)
    (prompt,), ((chosen,), (rejected,)) = encode.answered([pair["prompt"]], [pair["chosen"]], [pair["rejected"]])
    assert encode.tokenizer.batch_decode([prompt, chosen, rejected]) == ["(u:hi)(a:", "yo)", "<f>)"]


def test_an_eos_token_that_is_written_out_is_not_written_twice():
    encode = encoder_of(character_tokenizer())
    eos = encode.tokenizer.eos_token
    _, ((one, other),) = encode.answered(["?", "?"], ["ab", f"ab{eos}"])
    assert one == other == encode.text("ab")
    assert encode.text(f"ab{eos}") == encode.text("ab")


def test_a_tokenizer_that_adds_eos_leaves_prompts_open():
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {tokenizer.eos_token}", special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)]
    )
    assert tokenizer("ab").input_ids[-1] == tokenizer.eos_token_id
    encode = encoder_of(tokenizer)
    assert tokenizer.decode(encode.prompts(["ab"])[0]) == "ab"
    assert tokenizer.decode(encode.text("ab")) == f"ab{tokenizer.eos_token}"


def test_a_bos_token_that_a_text_begins_with_is_not_written_twice():
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    a, b = tokenizer("ab").input_ids
    assert encoder_of(tokenizer).text("<s>ab") == [bos, a, b, eos], "this tokenizer adds none"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    encode = encoder_of(tokenizer)
    assert encode.text("ab") == encode.text("<s>ab") == [bos, a, b, eos]
    assert encode.prompts(["ab", "<s>ab"]) == [[bos, a, b]] * 2
    assert encode.text("<s><s>ab") == [bos, bos, a, b, eos], "two that are written out are meant"


def test_a_text_that_was_rendered_already_is_refused():
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
    rendered = tokenizer.apply_chat_template(CHAT[:1], tokenize=False)
    with pytest.raises(UsageError, match="holds '<turn>', which the chat template writes.*chat_template=false"):
        encoder_of(tokenizer).prompts(["hi", rendered])
    for asked, text in ((False, "<turn>hi"), (True, "<turn><turn>hi")):
        (ids,) = encoder_of(tokenizer, chat_template=asked).prompts([rendered])
        assert tokenizer.decode(ids) == text


def test_a_prompt_with_the_bos_token_that_the_template_writes_by_name_is_refused():
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    rendered = tokenizer.apply_chat_template(CHAT[:1], tokenize=False)
    assert rendered == "<s>[INST] hi [/INST]"
    with pytest.raises(UsageError, match="holds '<s>', which the chat template writes.*chat_template=false"):
        encoder_of(tokenizer).prompts([rendered])
    (ids,) = encoder_of(tokenizer, chat_template=False).prompts([rendered])
    assert tokenizer.decode(ids) == rendered


CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip


def test_the_end_of_a_turn_that_ends_no_completion_is_known():
    """As of a Qwen base model: its template is ChatML, its EOS token <|endoftext|>."""
    encode = encoder(CHATML)
    tokenizer = encode.tokenizer
    assert encode.unknown_end([tokenizer.eos_token_id]) is None, "characters that may stand in any text"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encode.unknown_end([tokenizer.eos_token_id]) == "<|im_end|>"
    assert encode.unknown_end([tokenizer.eos_token_id, end]) is None
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert encode.unknown_end([tokenizer.eos_token_id]) is None


@pytest.mark.parametrize("is_special", [True, False])
def test_what_completions_do_not_end_with_and_rewards_do_not_see_is_said_once(is_special, caplog):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"], special_tokens=is_special)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = GRPO(model_config={**sizes, "vocab_size": len(tokenizer)}, tokenizer_name_or_path=tokenizer,
                 max_completion_length=3)  # fmt: skip
    data = PromptDataModule("addition", num_generations=2, batch_size=4, n_train=4, eval_steps=0)
    with caplog.at_level(logging.WARNING):
        fit(model, data, max_steps=2)
    told = [message for message in caplog.messages if message.startswith("addition: ")]
    assert len(told) == (2 if is_special else 0)
    if is_special:
        assert "end with '<eos>', and not with '<|im_end|>'" in told[0]
        assert "completions have the special tokens" in told[1]


def test_a_prompt_may_speak_of_a_tag_that_the_chat_template_writes():
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>"
    (ids,) = encoder_of(tokenizer).prompts(["answer after <think>"])
    assert tokenizer.decode(ids) == "answer after <think><think>"


@pytest.mark.parametrize("settings", [{"system_prompt": "be"}, {"chat_template_kwargs": {"think": False}}])
def test_settings_of_the_chat_template_need_it(settings):
    for template, why in ((None, "the tokenizer has none"), (EACH, "chat_template=false")):
        encode = encoder(template, chat_template=None if template is None else False, **settings)
        with pytest.raises(UsageError, match=f"{next(iter(settings))}=.* is read by the chat template.*{why}"):
            encode.prompts(["hi"])


def test_templates_that_end_turns_with_eos():
    eos = character_tokenizer().eos_token
    assert encoder().note_demonstrations("here")
    assert not encoder(EACH.replace("){%", f"){eos}{{%") + OPEN).note_demonstrations("here")
    # Of these nothing can be said, which ends no run.
    refuses = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('who am I?') }}{% endif %}"
    assert not encoder(refuses + EACH).note_demonstrations("here")
    assert encoder(refuses + EACH, system_prompt="be").note_demonstrations("here")
    assert not encoder("{{ messages[0]['content'] }}").note_demonstrations("here")


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_answers_keep_what_is_more_than_their_text(key):
    answer = {"role": "assistant", "content": "no", key: CALLS if key == "tool_calls" else "I think"}
    pair = {"prompt": CHAT[:1], "chosen": [CHAT[1]], "rejected": [answer]}
    judgement = {"prompt": CHAT[:1], "completion": [answer], "label": False}
    assert as_preference(pair, "here") == {**pair, "chosen": "yo"}
    assert as_judgement(judgement, "here") == judgement
    assert as_judgement({**judgement, "completion": CHAT[1:2]}, "here")["completion"] == "yo"
    with pytest.raises(UsageError, match="here: 'completion' has messages of user, where the last one should"):
        as_judgement({**judgement, "completion": CHAT[:1]}, "here")


@pytest.mark.parametrize(
    "prompts",
    ["aabbcc", "abcabc", "aaab", "abababab", "aabbccaabbcc"],
    ids=["pairs", "concatenated", "one other", "alternating", "repeated"],
)
def test_mismatched_answers_are_those_to_other_prompts(prompts):
    ids = [[ord(prompt)] for prompt in prompts]
    partners = mismatched(ids)
    assert all(ids[i] != ids[partner] for i, partner in enumerate(partners))


def test_mismatched_answers_stand_half_the_list_away_where_that_is_another_prompt():
    assert mismatched([[i] for i in range(6)]) == [3, 4, 5, 0, 1, 2]
    assert mismatched([[0]] * 4) == [2, 3, 0, 1]


def test_mismatched_answers_cost_as_many_comparisons_as_there_are_records():
    compared = 0

    class Prompt(list):
        def __ne__(self, other):
            nonlocal compared
            compared += 1
            return list(self) != list(other)

    prompts = [Prompt([max(0, i - 900)]) for i in range(1000)]
    partners = mismatched(prompts)
    assert compared <= 4 * len(prompts)
    assert all(prompts[partner] != prompt for partner, prompt in zip(partners, prompts, strict=True))


def test_a_conversation_may_repeat_its_first_message_as_prompt():
    record = as_conversation({"prompt": "hi", "messages": CHAT[:2]}, "here")
    assert record["conversation"] == CHAT[:2] and record["prompt"] == CHAT[:1]


@pytest.mark.parametrize("value", ["high", 1.5, True])
def test_a_probability_is_a_number(value):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "probability": value}
    with pytest.raises(UsageError, match=r"here: 'probability' is .*, where a number in \[0, 1\]"):
        as_preference(row, "here")
    assert as_preference({**row, "probability": None}, "here")["chosen"] == "b"
