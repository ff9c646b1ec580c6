"""The model of ``recipes.agent --world arithmetic`` without its calculator: SFT on products with their answers.

    python -m benchmarks.without_tool [--seed 200] [--products 8000]

Model, tokenizer, steps and held-out products are those of the recipe's first stage (configs/agent/sft_tools.yaml); a
row is a question and its answer in place of a dialogue with a call. Prints the share of right answers, greedy and
sampled at temperature 1.
"""

import argparse
import json
import tempfile
from pathlib import Path

import lightning as L
import torch
import yaml

from datamodules import InstructionDataModule
from datamodules.language.worlds import Arithmetic
from recipes import Trainer, configs
from recipes.agent import write_records
from rl_modules import SFT


def trained(folder: Path, seed: int, products: int) -> SFT:
    """Returns the model after SFT."""
    write_records("arithmetic", 1, seed, folder)
    rows = [{"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"]}]}
            for r in Arithmetic.records("train", products, seed)]  # fmt: skip
    (folder / "direct.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    settings = yaml.safe_load(configs.text("agent/sft_tools.yaml"))
    model, data = (dict(settings[part]["init_args"]) for part in ("model", "data"))
    L.seed_everything(seed, verbose=False)
    module = SFT(**{**model, "learning_rate": float(model["learning_rate"])},
                 tokenizer_name_or_path=str(folder / "tokenizer"))  # fmt: skip
    source = InstructionDataModule(**{**data, "path": str(folder / "direct.jsonl")}, seed=seed)
    Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, evaluate=False, default_root_dir=folder,
            max_steps=settings["trainer"]["max_steps"]).fit(module, datamodule=source)  # fmt: skip
    return module.eval()


@torch.no_grad()
def share_of_right(module: SFT, seed: int, is_sampled: bool) -> float:
    """Returns the share of 256 held-out products that the model answers rightly."""
    records, tokenizer = Arithmetic.records("test", 256, seed), module.tokenizer
    asked = [[{"role": "user", "content": record["prompt"]}] for record in records]
    ids = torch.tensor([tokenizer.apply_chat_template(x, add_generation_prompt=True)["input_ids"] for x in asked])
    written = module.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=is_sampled,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    texts = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == record["answer"] for text, record in zip(texts, records, strict=True)) / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--products", type=int, default=8000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        module = trained(Path(folder), given.seed, given.products)
    for name, is_sampled in (("greedy", False), ("sampled", True)):
        print(f"{name}: {share_of_right(module, given.seed, is_sampled):.3f} of 256")


if __name__ == "__main__":
    main()
