"""Tokens per second of the sampler and of transformers' ``generate``: same model, same rows, same lengths, paired.

32 prompts of 64 tokens, 8 completions each, every length from 4 to 64 about equally often, temperature 1. Our sampler
draws EOS tokens, with a hazard by position that makes the lengths so (set by a hook on the model; its time counts).
Then ``generate`` stops each row at the very length that ours had, without the hook. It gives no log-probabilities and
computes none; ours come with them.

    python -m benchmarks.sampling                    # both models, the thread count of OMP_NUM_THREADS
    python -m benchmarks.sampling --model 25M --pairs 3
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, StoppingCriteriaList

from rl_modules.language.sampling import Completions, sample

PROMPTS, GENERATIONS, PROMPT_LENGTH, SHORTEST, LONGEST = 32, 8, 64, 4, 64
PAD, EOS, WORDS = 0, 1, 99
SIZES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "25M": {"hidden_size": 512, "intermediate_size": 1344, "num_hidden_layers": 8, "num_attention_heads": 8},
}
DTYPES = {"1M": torch.float32, "25M": torch.bfloat16}


def build(size: str) -> PreTrainedModel:
    torch.manual_seed(0)
    fields = SIZES[size]
    config = Qwen2Config(
        vocab_size=WORDS, num_key_value_heads=fields["num_attention_heads"], tie_word_embeddings=True,
        max_position_embeddings=1024, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, **fields,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(DTYPES[size]).eval()


def uniform_lengths(model: PreTrainedModel) -> Any:
    """Gives EOS the probability at each position that makes lengths uniform on [SHORTEST, LONGEST]."""

    def set_eos(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        position = kwargs["position_ids"][:, -1:] - (PROMPT_LENGTH - 1)  # tokens that the completion has
        hazard = 1 / (LONGEST - position).clamp(min=1).float()
        hazard = torch.where(position + 1 < SHORTEST, 0.0, hazard.clamp(max=1 - 1e-6))
        logits = output.logits[:, -1].float()
        logits[:, EOS] = -torch.inf
        output.logits[:, -1, EOS] = (logits.logsumexp(-1) + torch.logit(hazard.squeeze(-1))).to(output.logits.dtype)

    return model.register_forward_hook(set_eos, with_kwargs=True)


def ours(model: PreTrainedModel, prompts: list[list[int]], seed: int) -> Completions:
    rows = range(seed * 10_000, seed * 10_000 + PROMPTS * GENERATIONS)
    return sample(model, prompts, num_generations=GENERATIONS, max_completion_length=LONGEST, eos_token_id=EOS,
                  pad_token_id=PAD, seeds=rows)  # fmt: skip


@torch.no_grad()
def theirs(model: PreTrainedModel, prompts: list[list[int]], length: torch.Tensor) -> torch.Tensor:
    tokens = torch.tensor(prompts).repeat_interleave(GENERATIONS, 0)
    config = GenerationConfig(
        max_new_tokens=LONGEST, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD,
    )  # fmt: skip
    done = StoppingCriteriaList([lambda ids, scores: ids.shape[1] - PROMPT_LENGTH >= length])
    return model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=config, stopping_criteria=done
    )


def compare(size: str, pairs: int) -> dict[str, Any]:
    model = build(size)
    model.generation_config.eos_token_id = None
    # The sampler checks a model once; the hook, which counts a row's tokens, would look like a fault.
    sample(model, [[5, 6], [7]], max_completion_length=1, eos_token_id=EOS, pad_token_id=PAD, seeds=[0, 1])
    seconds: dict[str, list[float]] = {"ours": [], "generate": []}
    tokens: list[int] = []
    for seed in range(pairs + 1):
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(3, WORDS, (PROMPTS, PROMPT_LENGTH), generator=generator).tolist()
        hook = uniform_lengths(model)
        start_s = time.perf_counter()
        completions = ours(model, prompts, seed)
        middle_s = time.perf_counter()
        hook.remove()
        between_s = time.perf_counter()
        theirs(model, prompts, completions.length)
        end_s = time.perf_counter()
        if seed:  # The first pair warms up.
            seconds["ours"].append(middle_s - start_s)
            seconds["generate"].append(end_s - between_s)
            tokens.append(int(completions.length.sum()))
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["generate"], strict=True)]
    return {
        "model": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(DTYPES[size]).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "mean_length": round(statistics.mean(tokens) / (PROMPTS * GENERATIONS), 1),
        "ours_tokens_per_s": round(sum(tokens) / sum(seconds["ours"])),
        "generate_tokens_per_s": round(sum(tokens) / sum(seconds["generate"])),
        "ratio_median": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, action="append", help="one size only (default: all)")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    for size in arguments.model or SIZES:
        print(json.dumps(compare(size, arguments.pairs)), flush=True)


if __name__ == "__main__":
    main()
