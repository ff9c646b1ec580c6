"""Every format on docs/language/datasets.md loads from every source, every one on refused_formats.md is refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import DPO, KTO, SFT
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import character_tokenizer
from tests.training import fit

DOCS = Path(__file__).parents[3] / "docs/language"
PAGE = "".join((DOCS / f"{name}.md").read_text("utf-8") for name in ("datasets", "refused_formats"))
BLOCKS = {
    name: [json.loads(line) for line in text.splitlines()]
    for name, text in re.findall(r"```jsonl ([^\n]+)\n(.*?)```", PAGE, re.DOTALL)
}
#: The kind of data that each refused format was meant as, and what the errors of its rows name.
REFUSED = {
    "stepwise supervision": ("prompt-completion", ["stepwise supervision of a process reward model"] * 3),
    "missing images": ("prompt-completion", ["'images' has no image in place 0"] * 3),
    "ShareGPT of other speakers": ("language modeling, conversational", [
        f"message {i} from '{who}', where one of" for i, who in ((0, "alien"), (1, "bing"), (1, "function_call"))]),
    "other parts": ("prompt-completion, conversational",
                    ["message 0 has the part"] * 2 + ["'images' has 0 images for 1 places"]),
    "a conversation without an answer": ("language modeling, conversational", [
        "'messages' has roles user,", "'messages' has roles assistant, user,", "'messages' has roles system, user,"]),
    "no pair": ("preference, conversational", [
        "'chosen' is a str and 'rejected' a list", "'chosen' and 'rejected' share no message",
        "'rejected' .*user"]),
    "no judgement": ("unpaired preference, conversational", [
        "'label' is 'good', where true or false should be", "'completion' and 'label', or 'chosen'",
        "'completion' has .*messages"]),
}  # fmt: skip
KINDS = {
    "language modeling": InstructionDataModule, "prompt-only": PromptDataModule,
    "prompt-completion": InstructionDataModule, "preference": PreferenceDataModule,
    "unpaired preference": PreferenceDataModule,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


def tokenizer(name):
    found = character_tokenizer()
    if "conversational" in name:
        found.chat_template = TEMPLATE
    return found


def records(name, **source):
    """The training records of a block, as the datamodule of its kind encodes them."""
    data = KINDS[name.partition(",")[0]](**source)
    module = SimpleNamespace(tokenizer=tokenizer(name), max_length=200, can_pack=False, unpaired="unpaired" in name,
                             scores_demonstrations=False)  # fmt: skip
    data.trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=1, global_rank=0, world_size=1,
                                   state=SimpleNamespace(fn="fit"), global_step=0)  # fmt: skip
    data.setup("fit")
    return data.train_records


def write(rows, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answers(name, found):
    """Prompt and answers of encoded records, as text."""
    decode = tokenizer(name).decode
    names = [
        key for key in ("prompt_ids", "text_ids", "completion_ids", "chosen_ids", "rejected_ids") if key in found[0]
    ]
    return [{key: decode(record[key]) for key in names} for record in found]


def test_all_formats_of_trl_are_on_the_page():
    assert {name.partition(",")[0] for name in BLOCKS} == {*KINDS, *REFUSED}
    assert all(len(rows) == 3 for rows in BLOCKS.values())


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in REFUSED])
def test_a_format_is_the_same_from_every_source(name, tmp_path):
    rows = BLOCKS[name]
    found = answers(name, records(name, path=write(rows, tmp_path / "rows.jsonl")))
    assert len(found) == 3
    table = Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    DatasetDict(train=table).save_to_disk(tmp_path / "disk")
    for source in (
        {"path": str(tmp_path / "rows.parquet")}, {"dataset": str(tmp_path / "disk")}, {"dataset": table},
        {"dataset": DatasetDict(train=table)},
    ):  # fmt: skip
        assert answers(name, records(name, **source)) == found


def test_what_is_learned_of_each_format(tmp_path):
    def first(name):
        return answers(name, records(name, path=write(BLOCKS[name], tmp_path / "rows.jsonl")))[0]

    assert first("language modeling")["text_ids"] == "The sky is blue.<eos>"
    talk = first("language modeling, conversational")
    assert talk["text_ids"] == "<u>What color is the sky?<a>Blue.<eos>"
    assert first("language modeling, conversational, ShareGPT")["text_ids"] == talk["text_ids"]
    alpaca = first("prompt-completion, Alpaca")
    assert alpaca == {"prompt_ids": "Which color?\nthe sky", "completion_ids": "Blue.<eos>"}
    assert first("prompt-only, conversational")["prompt_ids"] == "<u>2+2=<a>"
    assert first("prompt-completion")["completion_ids"] == " blue.<eos>"
    explicit, implicit = (first(f"preference, {kind} prompt") for kind in ("explicit", "implicit"))
    assert explicit == implicit == {"prompt_ids": "The sky is", "chosen_ids": " blue.<eos>",
                                    "rejected_ids": " green.<eos>"}  # fmt: skip
    explicit, implicit = (first(f"preference, {kind} prompt, conversational") for kind in ("explicit", "implicit"))
    assert explicit == implicit and explicit["prompt_ids"] == "<u>The sky?<a>"
    assert first("unpaired preference")["chosen_ids"] == " blue.<eos>"
    assert first("unpaired preference, conversational")["prompt_ids"] == "<u>The sky?<a>"


def test_rows_of_other_formats_with_a_system_prompt_a_history_and_answers_alone(tmp_path):
    def read(name, row):
        return answers(name, records(name, path=write([row], tmp_path / "rows.jsonl")))[0]

    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    sharegpt = read("language modeling, conversational", {"conversations": talk, "system": "Be kind."})
    assert sharegpt["text_ids"] == "<s>Be kind.<u>Hi<a>Hello.<eos>"
    pair = {"conversations": talk[:1], "chosen": talk[1], "rejected": {"from": "gpt", "value": "No."}}
    found = read("preference, conversational", {**pair, "prompt": pair["conversations"]})
    assert found == {"prompt_ids": "<u>Hi<a>", "chosen_ids": "Hello.<eos>", "rejected_ids": "No.<eos>"}
    row = {"instruction": "And two?", "input": "2", "output": "II", "system": "Roman.", "history": [["One?", "I"]]}
    alpaca = read("prompt-completion, conversational", row)
    assert alpaca == {"prompt_ids": "<s>Roman.<u>One?<a>I<eos><u>And two?\n2<a>", "completion_ids": "II<eos>"}
    assert read("language modeling", {**row, "text": "Whole."})["text_ids"] == "Whole.<eos>"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("number", range(3))
def test_what_nothing_learns_from_is_refused_by_name(name, number, tmp_path):
    kind, errors = REFUSED[name]
    path = write([BLOCKS[name][number]], tmp_path / "rows.jsonl")
    with pytest.raises(UsageError, match=f"rows.jsonl:1: .*{errors[number]}"):
        records(kind, path=path)


@pytest.mark.parametrize(("module", "data", "name"), [
    (SFT, InstructionDataModule, "language modeling"),
    (DPO, PreferenceDataModule, "preference, implicit prompt"),
    (KTO, PreferenceDataModule, "unpaired preference"),
])  # fmt: skip
def test_a_run_on_an_object_trains_and_its_checkpoint_holds_a_description(module, data, name, tmp_path):
    table = Dataset.from_list(BLOCKS[name])
    policy = module(model_config=TINY, learning_rate=1e-2)
    fit(policy, data(dataset=table, batch_size=2), max_steps=2).save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["datamodule_hyper_parameters"]["dataset"]
    assert saved.startswith("Dataset of 3 rows, ") and table._fingerprint in saved


def test_another_object_is_refused():
    with pytest.raises(UsageError, match=r"dataset is a list, where a hub name, a directory, a file"):
        InstructionDataModule(dataset=[{"text": "a"}])
