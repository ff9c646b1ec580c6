"""Every stage learns what a chat template renders of the whole conversation: all text templates that TRL ships."""

import importlib.util
import json
import logging
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules.common.errors import UsageError
from rl_modules.language.text import rendering, training_template
from rl_modules.language.text.chat_template import encoder_of

FOUND = importlib.util.find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND is not None else Path("none")
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
USER, ASKED = {"role": "user", "content": "One and one?"}, {"role": "user", "content": "Sure?"}
GOOD, BAD = {"role": "assistant", "content": "It is two."}, {"role": "assistant", "content": "Three, I think."}
PROMPTS = {"one turn": [USER], "two turns": [USER, {"role": "assistant", "content": "Two."}, ASKED]}
#: Templates of processors, which read a message's parts and no text.
FOR_PARTS = {"idefics3", "llava_next", "smolvlm"}
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="TRL, of the test extra, brings the templates")


def byte_tokenizer(template):
    """Bytes, and two line breaks as one token, as Qwen's tokenizers have it."""
    pieces = ["<eos>", "<pad>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [("Ċ", "Ċ")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")
    found.chat_template = template
    return found


def tokenizer_with(name):
    return byte_tokenizer((FOLDER / f"{name}.jinja").read_text("utf-8"))


def prepared(tokenizer, data, unpaired=False):
    """A datamodule with its records, encoded as for training."""
    module = SimpleNamespace(tokenizer=tokenizer, max_length=100_000, can_pack=False, unpaired=unpaired,
                             scores_demonstrations=False)  # fmt: skip
    data.trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=1, global_rank=0, world_size=1,
                                   state=SimpleNamespace(fn="fit"), global_step=0)  # fmt: skip
    data.setup("fit")
    return data


def sft(tokenizer, path):
    """Per row the tokens before those that are learned, and from the first of these on."""
    sequences = prepared(tokenizer, InstructionDataModule(path=path, batch_size=1)).sequences
    pairs = []
    for i in range(len(sequences)):
        batch = sequences.batch(sequences.total.new_tensor([i]), 0)
        ids, first = batch["tokens"][0].tolist(), int(batch["counted"].min())
        pairs.append((ids[:first], ids[first:]))
    return pairs


def preferences(tokenizer, path):
    found = prepared(tokenizer, PreferenceDataModule(path=path, batch_size=1)).train_records
    return [(r["prompt_ids"], r[f"{name}_ids"]) for r in found for name in ("chosen", "rejected")]


def judgements(tokenizer, path):
    found = prepared(tokenizer, PreferenceDataModule(path=path, batch_size=1), unpaired=True).train_records
    return [(r["prompt_ids"], r["chosen_ids"]) for r in found]


def rows_of(stage, before, good, bad):
    """A stage's records of two answers to a prompt."""
    if stage == "messages":
        return [{"messages": [*before, good]}, {"messages": [*before, bad]}]
    if stage == "completions":
        return [{"prompt": before, "completion": [good]}, {"prompt": before, "completion": [bad]}]
    if stage == "judgements":
        return [{"prompt": before, "completion": [good], "label": True},
                {"prompt": before, "completion": [bad], "label": False}]  # fmt: skip
    if stage == "texts":
        return [{"prompt": before, "completion": good["content"]}, {"prompt": before, "completion": bad["content"]}]
    if stage == "conversations":
        return [{"chosen": [*before, good], "rejected": [*before, bad]}]
    return [{"prompt": before, "chosen": [good], "rejected": [bad]}]


STAGES = {"messages": sft, "completions": sft, "texts": sft, "pairs": preferences, "conversations": preferences,
          "judgements": judgements}  # fmt: skip


def shared(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def rendered(tokenizer, messages, **how):
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **how)["input_ids"])


def squeezed(text):
    return "".join(text.split())


@pytest.mark.parametrize("thoughts", [False, True], ids=["plain", "reasoning"])
@pytest.mark.parametrize("turns", PROMPTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_stage_learns_what_the_template_renders(name, turns, thoughts, tmp_path):
    """The expectation is transformers' rendering of the conversation, and the place where it leaves the prompt's."""
    tokenizer, before = tokenizer_with(name), PROMPTS[turns]
    answers = [GOOD, {**BAD, "reasoning_content": "Add them."} if thoughts else BAD]
    try:
        opened = rendered(tokenizer, before, add_generation_prompt=True)
        wholes = [rendered(tokenizer, [*before, answer]) for answer in answers]
    except Exception:  # a template that takes no text as content
        assert name.removesuffix("_training") in FOR_PARTS
        return
    texts = [squeezed(tokenizer.decode(ids)) for ids in wholes]
    is_lost = not all(squeezed(part) in text for answer, text in zip(answers, texts, strict=True)
                      for part in (answer["content"], answer.get("reasoning_content", "")))  # fmt: skip
    assert is_lost or name.removesuffix("_training") not in FOR_PARTS
    earlier = rendered(tokenizer, before[:2])
    for stage, encoded in STAGES.items():
        if stage == "texts" and thoughts:
            continue
        path = tmp_path / f"{stage}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(stage, before, *answers)))
        found, refusal = [], ""
        try:
            found = encoded(tokenizer, str(path))
        except UsageError as error:
            refusal = str(error)
        expected, variant = wholes, FOLDER / f"{name}_training.jinja"
        if stage == "messages" and not all(whole[: len(earlier)] == earlier for whole in wholes) and variant.is_file():
            trained = variant.read_text("utf-8")
            expected = [rendered(tokenizer, [*before, answer], chat_template=trained) for answer in answers]
        if "differently when others follow" in refusal:
            assert stage == "messages" and wholes[0][: len(earlier)] != earlier and not variant.is_file()
            continue
        assert is_lost == ("leaves out the" in refusal), refusal
        if is_lost:
            continue
        assert [[*prompt, *answer] for prompt, answer in found] == expected
        starts = [shared(opened, ids) for ids in wholes]
        if encoded is preferences:
            starts = [min(starts)] * 2
        for (prompt, answer), start, message in zip(found, starts, answers, strict=True):
            # Of a conversation the first turn counts too, and blocks of the template's own say from where on.
            assert stage == "messages" or squeezed(message["content"]) in squeezed(tokenizer.decode(answer))
            assert squeezed(message["content"]) not in squeezed(tokenizer.decode(prompt))
            if stage not in ("messages", "completions"):
                assert len(prompt) == start


CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}]}  # fmt: skip
TURNS = {
    "plain": [USER, GOOD, ASKED, BAD],
    "reasoning": [USER, {**GOOD, "reasoning_content": "Add."}, ASKED, {**BAD, "reasoning_content": "Add them."}],
    "call": [USER, CALL, {"role": "tool", "name": "weather", "content": "20"}, GOOD, ASKED, BAD],
}


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "gptoss"])
def test_of_several_turns_all_that_the_assistant_wrote_is_learned(name, turns, monkeypatch, caplog):
    """The expectation is what stands between the family's marks of an assistant's turn."""
    tokenizer, messages = tokenizer_with(name), TURNS[turns]
    turn = r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>\n?"
    if name == "gptoss":  # whose opening TRL's blocks have, too
        turn = r"<\|start\|>assistant.*?(?:<\|end\|>|<\|return\|>|<\|call\|>)"
    with caplog.at_level(logging.INFO):
        ids, written = encoder_of(tokenizer).conversation(messages, {})
        encoder_of(tokenizer).conversation(messages[:2], {})
    text = tokenizer.decode(ids)
    turns = re.findall(turn, text, re.DOTALL)
    assert all(m["content"] in "".join(turns) for m in messages if m["role"] == "assistant") and len(turns) > 1
    learned = tokenizer.decode([token for token, flag in zip(ids, written, strict=True) if flag])
    assert learned.replace("<|im_end|>\n", "<|im_end|>") == "".join(turns).replace("<|im_end|>\n", "<|im_end|>")
    told = [record.message for record in caplog.records if f"{name}_training.jinja" in record.message]
    assert len(told) <= 1 and (told or turns != "plain")
    monkeypatch.setattr(training_template, "find_spec", lambda name: None)
    if told:
        with pytest.raises(UsageError, match=r"pip install trl.*chat_template\.jinja"):
            encoder_of(tokenizer).conversation(messages, {})


def test_the_training_templates_are_trls():
    utilities = pytest.importorskip("trl.chat_template_utils")
    for name in TEMPLATES:
        found = training_template.training_template(tokenizer_with(name).chat_template)
        try:
            theirs = utilities.get_training_chat_template(tokenizer_with(name))
        except ValueError:  # TRL has none
            theirs = None
        assert theirs is None or found == (f"{name}_training.jinja", theirs)
        assert (found is None) == (not (FOLDER / f"{name}_training.jinja").is_file())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_policy_completes_what_the_template_opens(name, tmp_path):
    tokenizer, path = tokenizer_with(name), tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": before}) + "\n" for before in PROMPTS.values()))
    try:
        opened = [rendered(tokenizer, before, add_generation_prompt=True) for before in PROMPTS.values()]
    except Exception:
        with pytest.raises(UsageError, match="the chat template refuses a conversation with roles user"):
            prepared(tokenizer, PromptDataModule(path=str(path), batch_size=8))
        return
    found = prepared(tokenizer, PromptDataModule(path=str(path), batch_size=8)).train_records
    assert [record["prompt_ids"] for record in found] == opened


THINKS = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
          "{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}")  # fmt: skip


def test_what_opens_a_completion_and_is_in_no_conversation_is_told_once(caplog):
    encode = encoder_of(byte_tokenizer(THINKS))
    with caplog.at_level(logging.WARNING):
        prompts, (answers,) = encode.answered(["a", "b"], ["yes", "no"])
        encode.answered(["a"], ["yes"])
    assert [encode.tokenizer.decode(ids) for ids in prompts] == ["[user]a[assistant]", "[user]b[assistant]"]
    assert [encode.tokenizer.decode(ids) for ids in answers] == ["yes<eos>", "no<eos>"]
    assert len(caplog.messages) == 1 and r"opens an answer with '<think>\n', which" in caplog.messages[0]


def test_an_answer_continues_the_beginning_of_a_message():
    template = THINKS.replace("<think>\n", "")
    encode = encoder_of(byte_tokenizer(template))
    begun = [USER, {"role": "assistant", "content": "It "}]
    (prompt,), ((answer,),) = encode.answered([begun], ["is two."])
    assert encode.tokenizer.decode(prompt).endswith("[assistant]It ") and encode.tokenizer.decode(answer) == (
        "is two.<eos>")  # fmt: skip
    assert encode.prompts([begun]) == [prompt]
    assert encode.tokenizer.decode(encode.unfinished([USER], "It")) == f"[user]{USER['content']}[assistant]It"
    # One that writes the whole message otherwise than its beginning has no place where the answer begins.
    encode.tokenizer.chat_template = template.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(UsageError, match=r"record 0: .*messages before an answer differently .*'It ' becomes '2<eos>'"):
        encode.answered([begun], ["is</think>2"], complete=False)


@pytest.mark.parametrize("row", [
    {"prompt": "", "chosen": "yes", "rejected": "no"}, {"question": "Sure?", "chosen": "yes", "rejected": "no"}
])  # fmt: skip
def test_a_pair_without_a_prompt_is_refused_although_the_template_has_tokens_for_an_empty_one(row, tmp_path):
    (path := tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    module = SimpleNamespace(tokenizer=byte_tokenizer(THINKS), max_length=99, can_pack=False, check_pairs=print)
    data = PreferenceDataModule(path=str(path), batch_size=1)
    data.trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=1, global_rank=0, world_size=1,
                                   state=SimpleNamespace(fn="fit"), global_step=0)  # fmt: skip
    with pytest.raises(UsageError, match=r"pairs\.jsonl:1: 'prompt' is empty, where a text should be"):
        data.setup("fit")


def test_an_answer_without_a_place_of_its_own_is_refused():
    drops = "{% for m in messages if m.role == 'user' %}({{ m.content }}){% endfor %}"
    with pytest.raises(UsageError, match="record 0: .* leaves out the content 'no' of an answer"):
        encoder_of(byte_tokenizer(drops)).answered(["a"], ["no"])
    last = "{% for m in messages %}({{ m.content if loop.last else '' }}){% endfor %}"
    with pytest.raises(UsageError, match=r"differently when it follows \('a\)' becomes '\)\(no\)'\)"):
        encoder_of(byte_tokenizer(last)).answered(["a"], ["no"])


def test_a_text_goes_through_the_template_with_an_answer_that_does():
    encode = encoder_of(byte_tokenizer(THINKS.replace("{{ m.content }}", "{{ m.content }}{{ m.note }}")), False)
    noted = [{"role": "assistant", "content": "yes", "note": "!"}]
    (plain, prompt), ((_, good), (end, bad)) = encode.answered(["a", "a"], ["yes", noted], ["no", "no"])
    texts = encode.tokenizer.batch_decode([plain, end, prompt, good, bad])
    assert texts == ["a", "no<eos>", "[user]a[assistant]", "yes!<eos>", "no<eos>"]


def test_the_end_of_a_text_is_not_written_twice():
    encode = encoder_of(byte_tokenizer(THINKS))
    _, ((one, other),) = encode.answered(["a", "a"], ["yes", "yes<eos>"])
    assert one == other


@pytest.mark.parametrize("loop", [
    "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
], ids=["loops", "recursion"])  # fmt: skip
def test_a_conversation_without_an_end_is_a_sentence(loop, monkeypatch):
    monkeypatch.setattr(rendering, "TEMPLATE_LIMIT_S", 0.1)
    tokenizer = byte_tokenizer("{% if messages[0].content == 'hang' %}" + loop + "{% endif %}" + THINKS)
    tokenizer.name_or_path = "mine/looping"
    encode = encoder_of(tokenizer)
    assert encode.prompts(["a"])
    with pytest.raises(UsageError, match=r"the chat template of mine/looping takes more than 0\.1 s"):
        encode.prompts(["hang"])


@pytest.mark.parametrize("bomb", [
    pytest.param("{{ 9**(9**9) % 7 }}", marks=pytest.mark.long),
    pytest.param("{{ ('a '*3000000)|wordwrap(1) }}", marks=pytest.mark.long),
    pytest.param("{% if tools %}{{ 9**(9**9) % 7 }}{% endif %}", marks=pytest.mark.long),
    "{{ 'a' * 10**10 }}",
    "{% generation %}{{ messages[0].content * 10**10 }}{% endgeneration %}",
])  # fmt: skip
def test_a_template_without_bounds_is_refused_before_this_process_renders_with_it_also_in_a_thread(bomb):
    encode = encoder_of(byte_tokenizer(bomb + THINKS))
    with ThreadPoolExecutor() as pool, pytest.raises(UsageError, match="takes more than 2 s .* or 512 MiB of memory"):
        pool.submit(encode.prompts, ["a"]).result(60)


def test_a_template_is_tried_once_in_a_process(monkeypatch):
    runs, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: runs.append(args) or run(*args, **how))
    for number in range(3):
        encoder_of(byte_tokenizer(THINKS + "{# its own text #}")).prompts([str(number)])
    assert len(runs) == 1
