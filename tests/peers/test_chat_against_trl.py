"""Conversations as token ids against TRL's own preparation: the same tokens, and the same ones that count."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from datamodules import InstructionDataModule
from rl_modules.language.text.chat_template import encoder_of
from rl_modules.language.tokenizer import character_tokenizer

pytestmark = pytest.mark.bench
trl = pytest.importorskip("trl", reason="needs the test extra")
apply_chat_template = pytest.importorskip("trl.data_utils").apply_chat_template

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}  # fmt: skip
RESULT = {"role": "tool", "name": "weather", "content": "rain"}
PROMPTS = {
    "one turn": [USER],
    "system and turns": [{"role": "system", "content": "Be brief."}, USER, ANSWER, {"role": "user", "content": "Why?"}],
    "tools": [USER, CALL, RESULT],
    "prefill": [USER, {"role": "assistant", "content": "It is"}],
}
CONVERSATIONS = {
    "one turn": [USER, ANSWER],
    "two turns": [USER, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}],
    "tools": [{"role": "user", "content": "Rain?"}, CALL, RESULT, {"role": "assistant", "content": "Yes, in Oslo."}],
}


def tokenizer_with(template):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text("utf-8")
    return tokenizer


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1"])
def test_prompts_are_trls(template, name):
    tokenizer, messages = tokenizer_with(template), PROMPTS[name]
    tools = TOOLS if name == "tools" else None
    theirs = apply_chat_template({"prompt": messages}, tokenizer, tools=tools)["prompt"]
    (ours,) = encoder_of(tokenizer).prompts([messages], [{"tools": tools}])
    assert tokenizer.decode(ours) == theirs
    if name == "tools":
        assert "weather" in theirs and "Oslo" in theirs and "rain" in theirs
    if name == "prefill":
        assert theirs.endswith("It is")


@pytest.mark.parametrize("thinking", [True, False])
def test_template_variables_are_trls(thinking):
    tokenizer = tokenizer_with("qwen3")
    settings = {"enable_thinking": thinking}
    theirs = apply_chat_template({"prompt": [USER]}, tokenizer, **settings)["prompt"]
    (ours,) = encoder_of(tokenizer, chat_template_kwargs=settings).prompts([[USER]])
    (of_row,) = encoder_of(tokenizer, chat_template_kwargs={"enable_thinking": not thinking}).prompts(
        [[USER]], [{"chat_template_kwargs": settings}]
    )
    assert tokenizer.decode(ours) == tokenizer.decode(of_row) == theirs
    assert theirs.endswith("</think>\n\n") is not thinking


def trl_labels(tokenizer, rows, folder, **settings):
    """Token ids and labels of TRL's SFTTrainer, a list each."""
    config = AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16,
                                  num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)  # fmt: skip
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_config(config),
        args=trl.SFTConfig(str(folder), report_to=[], use_cpu=True, bf16=False, **{"max_length": None, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    return [(list(row["input_ids"]), list(row["labels"])) for row in trainer.train_dataset]


def our_labels(tokenizer, rows, folder, **settings):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    data = InstructionDataModule(path=str(path), batch_size=1, **settings)
    data.trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(tokenizer=tokenizer, max_length=10_000), accumulate_grad_batches=1,
        global_rank=0, world_size=1, state=SimpleNamespace(fn="fit"),
    )  # fmt: skip
    data.setup("fit")
    rows = []
    for i in range(len(data.sequences)):
        batch = data.sequences.batch(data.sequences.total.argsort()[i : i + 1] * 0 + i, 0)
        ids, counted = batch["tokens"][0].tolist(), set(batch["counted"].tolist())
        rows.append((ids, [token if place in counted else -100 for place, token in enumerate(ids)]))
    return rows


@pytest.mark.parametrize("template", ["qwen2_5_training", "llama3_training", "qwen3", "qwen3_5_think", "gptoss"])
def test_assistant_turns_are_trls_by_the_templates_own_mask(template, tmp_path):
    """Those of Qwen3, Qwen3.5 and gpt-oss are of TRL's training variants, which both take for several turns."""
    tokenizer, names = tokenizer_with(template), ("one turn", "two turns")
    rows = [{"messages": CONVERSATIONS["two turns" if "training" not in template else name]} for name in names]
    theirs = trl_labels(tokenizer, rows, tmp_path, assistant_only_loss=True)
    assert our_labels(tokenizer, rows, tmp_path) == theirs
    assert any(label == -100 for label in theirs[1][1]) and any(label != -100 for label in theirs[1][1])


def test_conversations_with_tools_are_trls(tmp_path):
    tokenizer = tokenizer_with("qwen2_5_training")
    rows = [{"messages": CONVERSATIONS["tools"], "tools": json.dumps(TOOLS)}]
    assert our_labels(tokenizer, rows, tmp_path) == trl_labels(tokenizer, rows, tmp_path, assistant_only_loss=True)


def test_whole_conversations_are_trls(tmp_path):
    tokenizer = tokenizer_with("qwen2_5")
    rows = [{"messages": CONVERSATIONS[name]} for name in ("one turn", "two turns")]
    theirs = [(ids, [-100, *ids[1:]]) for ids, _ in trl_labels(tokenizer, rows, tmp_path)]  # nothing predicts the first
    assert our_labels(tokenizer, rows, tmp_path, completion_only_loss=False) == theirs


def test_completions_of_messages_are_trls(tmp_path):
    tokenizer = tokenizer_with("qwen2_5")
    rows = [{"prompt": CONVERSATIONS["two turns"][:3], "completion": CONVERSATIONS["two turns"][3:]}]
    assert our_labels(tokenizer, rows, tmp_path) == trl_labels(tokenizer, rows, tmp_path)


def test_turns_found_by_prefixes_are_those_of_the_mask_without_the_opening(tmp_path):
    rows = [{"messages": CONVERSATIONS["two turns"]}]
    marked = our_labels(tokenizer_with("qwen2_5_training"), rows, tmp_path)
    found = our_labels(tokenizer_with("qwen2_5"), rows, tmp_path)
    assert marked[0][0] == found[0][0]
    tokenizer = tokenizer_with("qwen2_5")
    text = "".join(tokenizer.decode([t]) if t != -100 else "" for t in found[0][1])
    assert text == "It is 4.<|im_end|>\nYes.<|im_end|>\n"


@pytest.mark.filterwarnings("ignore:.*keep_end:FutureWarning")
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_texts_that_are_too_long_are_cut_as_trls(mode, tmp_path):
    """A prompt that leaves no room for its completion is left out by both."""
    tokenizer = character_tokenizer()
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "ab" * 5, "completion": "cd"},
            {"prompt": "ab", "completion": "cd" * 9}, {"prompt": "abcdef", "completion": "ghij"}]  # fmt: skip
    how = {"max_length": 8, "truncation_mode": mode}
    theirs = trl_labels(tokenizer, rows, tmp_path, **how)
    ours = our_labels(tokenizer, rows, tmp_path, overlong="truncate", **how)
    assert ours == [(ids, [-100, *labels[1:]]) for ids, labels in theirs]  # nothing predicts the first
