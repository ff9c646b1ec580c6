"""The sampler against independent answers: a teacher-forced forward, ``generate``, transformers' logits processors."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from rl_modules.common.errors import UsageError
from rl_modules.functional import token_log_probs
from rl_modules.language.fast import held_graphs, shared_prompts
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling import Completions, check, decode, native, request, sample

WORDS, PAD, EOS, POSITIONS = 40, 0, 1, 64
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HALF_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "gpt2": lambda: GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS,
                               bos_token_id=None, eos_token_id=None),
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "gemma": lambda: GemmaConfig(**COMMON, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=POSITIONS),
    "gemma3 sliding": lambda: Gemma3TextConfig(**COMMON, head_dim=8, **HALF_SLIDING),
    "mistral sliding": lambda: MistralConfig(**COMMON, sliding_window=8),
}  # fmt: skip
FAMILIES = [name for name in CONFIGS if "sliding" not in name]
SAME_LENGTH = [[5, 6, 7, 8, 9], [9, 5, 6, 8, 3]]
OF_ALL_LENGTHS = [[5, 6, 7, 8, 9], [9], [3] * 11, [7, 2, 4]]


def build(name: str, attention: str = "sdpa"):
    """A tiny model with peaked logits, so that a mistake in masks or positions shows."""
    torch.manual_seed(0)
    config: PretrainedConfig = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


@pytest.fixture(scope="module")
def qwen2():
    return build("qwen2")


def draw(model, prompts, num_generations=3, **options) -> Completions:
    """:func:`sample` with the settings that most tests share."""
    rows = len(prompts) * num_generations
    defaults = {"max_completion_length": 12, "eos_token_id": EOS, "pad_token_id": PAD, "seeds": range(rows)}
    return sample(model, prompts, num_generations=num_generations, **{**defaults, **options})


def checked(model):
    """The model, whose self-checks are over: they call it as sampling does."""
    draw(model, [[5]], max_completion_length=1, max_rows_in_flight=2)
    return model


def rows_of(completions: Completions) -> list[list[int]]:
    return [tokens[:n].tolist() for tokens, n in zip(completions.tokens, completions.length, strict=True)]


@torch.no_grad()
def teacher_forced(model, prompt, completion, temperature=1.0):
    """log π of a completion from one forward pass over the whole text: no cache, no padding, no other rows."""
    text = torch.tensor([prompt + completion])
    logits = model(input_ids=text).logits[:, len(prompt) - 1 : -1]
    return token_log_probs(logits, text[:, len(prompt) :], temperature)[0]


def assert_log_probs_are_the_models(model, prompts, completions, num_generations=3, temperature=1.0):
    assert completions.log_prob.dtype == torch.float32
    for i, completion in enumerate(rows_of(completions)):
        expected = teacher_forced(model, prompts[i // num_generations], completion, temperature)
        actual = completions.log_prob[i, : len(completion)]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert (completions.log_prob[~completions.mask] == 0).all()


@pytest.mark.parametrize("prompts", [SAME_LENGTH, OF_ALL_LENGTHS], ids=["unpadded", "padded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_equal_a_teacher_forced_forward(family, prompts):
    model = build(family)
    completions = draw(model, prompts, temperature=1.3, eos_token_id=list(range(1, 5)))
    assert_log_probs_are_the_models(model, prompts, completions, temperature=1.3)
    assert len(set(completions.length.tolist())) > 2  # rows left the batch at different times


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_functions_that_cannot_share_prompts(family, monkeypatch):
    monkeypatch.setattr(native, "generate", None)  # would fail if called
    model = build(family, attention="eager")
    completions = draw(model, OF_ALL_LENGTHS)
    assert_log_probs_are_the_models(model, OF_ALL_LENGTHS, completions)
    # One model, two ways to attend: the draws are the same.
    assert torch.equal(draw(build(family), OF_ALL_LENGTHS).tokens, completions.tokens)


class Spy:
    """Counts the calls of a function that it stands before."""

    def __init__(self, monkeypatch, module, name):
        self.calls, self.function = 0, getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


@pytest.mark.fast_path
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_share_the_keys_and_values_of_their_prompt(family, monkeypatch):
    model = checked(build(family))
    attend = Spy(monkeypatch, shared_prompts, "_attend")
    completions = draw(model, SAME_LENGTH)
    assert attend.calls == 2 * (int(completions.length.max()) - 1)  # two layers, and the first token is the prompt's
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_changes_keys_after_the_cache_shares_nothing(monkeypatch):
    """Multi-head latent attention caches a projection, and attends to what it makes of it."""
    attend = Spy(monkeypatch, shared_prompts, "_attend")
    fields = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        DeepseekV3Config(**fields, first_k_dense_replace=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
                         qk_nope_head_dim=4, v_head_dim=8)
    ).eval()  # fmt: skip
    assert_log_probs_are_the_models(model, OF_ALL_LENGTHS, draw(model, OF_ALL_LENGTHS))
    assert attend.calls == 0


@pytest.mark.fast_path
def test_prompts_whose_rows_have_ended_are_let_go(qwen2, monkeypatch):
    sizes = []
    checked(qwen2)
    attend = shared_prompts._attend

    def spy(cache, prompt_key, *args):
        sizes.append(len(prompt_key))
        return attend(cache, prompt_key, *args)

    monkeypatch.setattr(shared_prompts, "_attend", spy)
    prompts = [[5, 6, n] for n in range(10, 26)] + [[7, 8]]
    completions = draw(qwen2, prompts, eos_token_id=list(range(1, 9)), temperature=2.0, max_completion_length=30)
    assert sizes[0] == 17 and 1 <= sizes[-1] <= 4
    assert_log_probs_are_the_models(qwen2, prompts, completions, temperature=2.0)


def test_a_window_longer_than_the_text_needs_no_generate(monkeypatch):
    monkeypatch.setattr(native, "generate", None)  # would fail if called
    config = Gemma3TextConfig(**COMMON, head_dim=8, **{**HALF_SLIDING, "sliding_window": 20})
    assert RowCache.for_model(config, 20) is not None
    assert RowCache.for_model(config, 21) is None
    model = AutoModelForCausalLM.from_config(config).eval()
    assert_log_probs_are_the_models(model, [[5, 6], [7] * 8], draw(model, [[5, 6], [7] * 8]))


@torch.no_grad()
def generated(model, prompts, **options):
    """What transformers' ``generate`` gives for left-padded prompts, without prompts and padding."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    stops = options.get("eos_token_id", EOS)
    result = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=PAD,
        **{"eos_token_id": stops, **options},
    )[:, width:].tolist()  # fmt: skip
    stops = [stops] if isinstance(stops, int) else stops
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in result]
    return [row[:end] for row, end in zip(result, ends, strict=True)]


@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_generate(family, penalty):
    model = build(family)
    # generate penalises the padding's token, too, so padded prompts are only for a penalty of 1.
    prompts = OF_ALL_LENGTHS if penalty == 1 else SAME_LENGTH
    stops = [3, 11, 12]
    completions = draw(model, prompts, num_generations=1, temperature=0, repetition_penalty=penalty, eos_token_id=stops)
    assert rows_of(completions) == generated(model, prompts, repetition_penalty=penalty, eos_token_id=stops)
    assert (completions.log_prob == 0).all()  # the choice was certain


def test_padding_is_not_penalized(qwen2):
    alone = [rows_of(draw(qwen2, [prompt], 1, temperature=0, repetition_penalty=2.0)) for prompt in OF_ALL_LENGTHS]
    together = rows_of(
        draw(qwen2, OF_ALL_LENGTHS, 1, temperature=0, repetition_penalty=2.0, pad_token_id=alone[1][0][0])
    )
    assert together == [row for rows in alone for row in rows]


def test_tokens_depend_on_prompt_and_seed_not_on_the_batch(qwen2):
    seeds = torch.arange(12) + 100
    whole = draw(qwen2, OF_ALL_LENGTHS, seeds=seeds, temperature=1.2)
    for i, prompt in enumerate(OF_ALL_LENGTHS):
        for g in range(3):
            row = 3 * i + g
            alone = draw(qwen2, [prompt], 1, seeds=seeds[row : row + 1], temperature=1.2)
            assert rows_of(alone)[0] == rows_of(whole)[row]
            torch.testing.assert_close(
                alone.log_prob[0], whole.log_prob[row, : alone.tokens.shape[1]], atol=1e-5, rtol=0
            )
    again = draw(qwen2, OF_ALL_LENGTHS, seeds=seeds.tolist(), temperature=1.2)
    assert torch.equal(again.tokens, whole.tokens) and torch.equal(again.log_prob, whole.log_prob)
    other = draw(qwen2, OF_ALL_LENGTHS, seeds=seeds + 1, temperature=1.2)
    assert not torch.equal(other.tokens, whole.tokens)


def test_torchs_global_generator_is_neither_read_nor_moved(qwen2):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw(qwen2, SAME_LENGTH)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(draw(qwen2, SAME_LENGTH).tokens, first.tokens)


class Calls:
    """The shapes of what a model is called with."""

    def __init__(self, model):
        self.shapes: list[tuple[int, ...]] = []
        self.hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: self.shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_prompt_is_prefilled_once_and_ended_rows_cost_nothing(family):
    model = checked(build(family))
    calls = Calls(model)
    prompts = [*OF_ALL_LENGTHS, OF_ALL_LENGTHS[1], OF_ALL_LENGTHS[0]]
    completions = draw(model, prompts, num_generations=4, eos_token_id=list(range(1, 9)))
    longest = int(completions.length.max())
    alive = [int((completions.length > step).sum()) for step in range(1, longest)]
    assert calls.shapes == [(4, 11), *((n, 1) for n in alive)]
    assert len(set(alive)) > 3


def test_gradient_checkpointing_dropout_and_train_mode_are_set_aside_and_come_back():
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS,
                   bos_token_id=None, eos_token_id=None, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    )  # fmt: skip
    expected = draw(model.eval(), OF_ALL_LENGTHS)
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    frozen = model.transformer.h[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    calls = Calls(model)
    completions = draw(model, OF_ALL_LENGTHS)
    assert all(shape[1] == 1 for shape in calls.shapes[1:])
    assert torch.equal(completions.tokens, expected.tokens) and torch.equal(completions.log_prob, expected.log_prob)
    assert [module.training for module in model.modules()] == modes and not frozen.training
    # The results can enter a loss: made without gradient, but not in inference mode.
    assert not completions.log_prob.requires_grad and not completions.log_prob.is_inference()


def test_train_mode_comes_back_after_an_error(qwen2):
    hook = qwen2.register_forward_pre_hook(lambda module, args: 1 / 0)
    qwen2.train()
    with pytest.raises(ZeroDivisionError):
        draw(qwen2, SAME_LENGTH)
    hook.remove()
    assert qwen2.training
    qwen2.eval()


def test_a_row_ends_at_the_first_of_several_eos_tokens(qwen2):
    stops = [EOS, 5, 17, 23, 30]
    completions = draw(qwen2, OF_ALL_LENGTHS, num_generations=8, eos_token_id=stops, temperature=2.0)
    ends = set()
    for row, finished, reason in zip(
        rows_of(completions), completions.finished.tolist(), completions.finish_reason, strict=True
    ):
        assert not set(row[:-1]) & set(stops)
        assert finished == (row[-1] in stops)
        assert reason == ("stop" if finished else "length")
        assert finished or len(row) == 12
        ends.add(row[-1] if finished else None)
    assert len(ends) > 3 and None in ends
    assert torch.equal(completions.mask.sum(-1), completions.length)
    assert (completions.tokens[~completions.mask] == PAD).all()


def test_padding_with_an_eos_token_keeps_the_one_that_was_drawn(qwen2):
    apart = draw(qwen2, OF_ALL_LENGTHS, eos_token_id=[EOS, 5, 17])
    same = draw(qwen2, OF_ALL_LENGTHS, eos_token_id=[EOS, 5, 17], pad_token_id=5)
    assert torch.equal(same.length, apart.length) and rows_of(same) == rows_of(apart)
    assert apart.finished.any() and (same.tokens[~same.mask] == 5).all()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_end_where_the_models_positions_do(family):
    model = build(family)
    prompts = [[5] * (POSITIONS - 1), [6] * (POSITIONS - 5), [7, 8]]
    completions = draw(model, prompts, eos_token_id=EOS)
    assert completions.length.view(3, 3)[0].tolist() == [1, 1, 1]
    assert completions.length.view(3, 3)[1].max() == 5 and not completions.finished[3:6].all()
    assert completions.length.view(3, 3)[2].max() == 12
    assert_log_probs_are_the_models(model, prompts, completions)


def test_the_cache_grows(qwen2, monkeypatch):
    expected = draw(qwen2, OF_ALL_LENGTHS, max_completion_length=40)
    monkeypatch.setattr(decode, "_ROOM", 2)
    completions = draw(qwen2, OF_ALL_LENGTHS, max_completion_length=40)
    assert torch.equal(completions.tokens, expected.tokens)
    assert_log_probs_are_the_models(qwen2, OF_ALL_LENGTHS, completions)


def test_generate_draws_the_same(qwen2, monkeypatch, caplog):
    options = {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
    expected = draw(qwen2, OF_ALL_LENGTHS, eos_token_id=[1, 2, 3], **options)
    monkeypatch.setattr(RowCache, "for_model", lambda config, longest: None)
    check.warn_once.cache_clear()
    # What a downloaded model's generation config asks for is not what the caller asked for.
    qwen2.generation_config.update(
        repetition_penalty=9.0, eos_token_id=[int(expected.tokens[0, 0])], suppress_tokens=[7]
    )
    own = qwen2.generation_config
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            completions = draw(qwen2, OF_ALL_LENGTHS, eos_token_id=[1, 2, 3], **options)
    assert qwen2.generation_config is own
    qwen2.generation_config.update(repetition_penalty=None, eos_token_id=None, suppress_tokens=None)
    assert [record.message for record in caplog.records if "generate()" in record.message] == [
        "Qwen2ForCausalLM keeps other things than keys and values of all tokens, so sampling goes through its "
        "generate(): prompts are not shared, rows that have ended stay, and max_rows_in_flight rows are written part "
        "after part"
    ]
    assert torch.equal(completions.tokens, expected.tokens)
    assert torch.equal(completions.length, expected.length) and torch.equal(completions.finished, expected.finished)
    torch.testing.assert_close(completions.log_prob, expected.log_prob, atol=1e-5, rtol=0)


def test_lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    checked(model.eval())
    calls = Calls(model)
    completions = draw(model, OF_ALL_LENGTHS)
    assert calls.shapes[0] == (4, 11) and calls.shapes[1][1] == 1
    assert_log_probs_are_the_models(model, OF_ALL_LENGTHS, completions)
    with model.disable_adapter():
        assert not torch.equal(draw(model, OF_ALL_LENGTHS).tokens, completions.tokens)


def test_virtual_tokens_are_refused():
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UsageError, match="virtual tokens"):
        draw(model, SAME_LENGTH)


def test_a_device_without_float64_is_refused(qwen2):
    there = SimpleNamespace(device=torch.device("mps"))
    model = SimpleNamespace(config=qwen2.config, parameters=lambda: iter([there]))
    with pytest.raises(UsageError, match="mps"):
        draw(model, SAME_LENGTH)


def test_a_rank_that_is_done_goes_on_calling_the_model(qwen2, monkeypatch):
    """A stand-in for the other ranks, which draw for twenty steps."""
    steps = iter(range(1, 100))

    def all_reduce(flag, op):
        assert op == torch.distributed.ReduceOp.MAX
        flag.clamp_(min=int(next(steps) < 20))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    expected = draw(qwen2, OF_ALL_LENGTHS)
    calls = Calls(qwen2)
    completions = draw(qwen2, OF_ALL_LENGTHS, synced_gpus=True)
    calls.hook.remove()
    assert len(calls.shapes) == 20  # the prompts, and 19 steps
    assert torch.equal(completions.tokens, expected.tokens)


def sharded(rank: int, folder: str) -> None:
    """One of two processes that hold half of each weight, with prompts of its own and completions of other lengths."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    model = build("llama")
    for layer in model.model.layers:
        fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    prompts, longest = (SAME_LENGTH, 3) if rank == 0 else (OF_ALL_LENGTHS, 12)
    completions = draw(model, prompts, max_completion_length=longest, synced_gpus=True)
    torch.save(completions.tokens, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_weights(tmp_path):
    torch.multiprocessing.start_processes(sharded, (str(tmp_path),), nprocs=2, start_method="fork")
    for rank, prompts, longest in ((0, SAME_LENGTH, 3), (1, OF_ALL_LENGTHS, 12)):
        expected = draw(build("llama"), prompts, max_completion_length=longest)
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt", weights_only=True), expected.tokens)


def test_bfloat16():
    model = build("qwen2").bfloat16()
    completions = draw(model, OF_ALL_LENGTHS)
    for i, completion in enumerate(rows_of(completions)):
        expected = teacher_forced(model, OF_ALL_LENGTHS[i // 3], completion)
        # bfloat16 has eight bits: logits of about 5 are rounded by about 0.02, in every layer.
        torch.testing.assert_close(completions.log_prob[i, : len(completion)], expected, atol=0.15, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_reported(temperature):
    model = build("qwen2")
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        draw(model, SAME_LENGTH, temperature=temperature)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[5], []], {}, "prompt 1 is empty"),
        ([[5], [6] * POSITIONS], {}, "prompt 1 has 64 tokens, the model takes 64"),
        ([[5], [WORDS]], {}, r"prompt 1 has a token id outside of \[0, 40\)"),
        ([[-1]], {}, r"prompt 0 has a token id outside of \[0, 40\)"),
        ([[5]], {"num_generations": 0}, "num_generations=0 must be 1 or more"),
        ([[5]], {"max_completion_length": 0}, "max_completion_length=0 must be 1 or more"),
        ([[5]], {"eos_token_id": []}, "eos_token_id is empty"),
        ([[5]], {"seeds": range(4)}, "seeds has 4 numbers, .* make 3 rows"),
        ([[5]], {"temperature": -1.0}, "temperature=-1.0 must be 0"),
        ([[5]], {"temperature": float("nan")}, "temperature=nan must be 0"),
        ([[5]], {"top_k": -1}, "top_k=-1 must be 1 or more"),
        ([[5]], {"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ([[5]], {"min_p": 1.5}, r"min_p=1.5 must be in \[0, 1\]"),
        ([[5]], {"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
    ],
)
def test_refused_input(qwen2, prompts, options, message):
    with pytest.raises(UsageError, match=message):
        draw(qwen2, prompts, **options)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mistral sliding"])
@pytest.mark.parametrize("cap", [1, 5, 8])
def test_a_cap_on_rows_in_flight_changes_no_completion(family, cap):
    """Parts of 5 rows split the groups of 4; the windows of 8 go through ``generate``."""
    model = checked(build(family))
    options = {"num_generations": 4, "eos_token_id": [1, 2, 3], "temperature": 1.3, "top_p": 0.9}
    expected = draw(model, OF_ALL_LENGTHS, **options)
    calls = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(len(kwargs["input_ids"])),
                                           with_kwargs=True)  # fmt: skip
    completions = draw(model, OF_ALL_LENGTHS, max_rows_in_flight=cap, **options)
    hook.remove()
    assert max(calls) <= cap
    for name in ("tokens", "length", "finished"):
        assert torch.equal(getattr(completions, name), getattr(expected, name))
    # Products of other sizes round differently.
    torch.testing.assert_close(completions.log_prob, expected.log_prob, atol=1e-5, rtol=0)


def test_on_a_cuda_device_the_cap_follows_from_its_free_memory(qwen2, monkeypatch):
    """2 layers · 2 heads · 8 numbers · 4 bytes, keys and values, 17 tokens; 40 words of 20 bytes."""
    per_row = 2 * 2 * 2 * 8 * 4 * 17 + 40 * 20
    assert held_graphs.row_bytes(qwen2, 17) == per_row
    parameter = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 4)
    there = SimpleNamespace(config=qwen2.config, parameters=lambda: iter([parameter]))
    arguments = [[5] * 5, [9]], 8, 12
    for room, rows in ((1, 1), (2, 2), (3, 3), (5, 4), (7, 6), (8, 8), (11, 8), (12, 12), (15, 12), (16, 16), (99, 16)):
        monkeypatch.setattr(held_graphs, "free_memory", lambda device, room=room: int(per_row * (room + 0.5) / 0.4))
        assert request.rows_in_flight(there, *arguments, None, False) == rows
    assert request.rows_in_flight(there, *arguments, 100, False) == 16  # all rows
    assert request.rows_in_flight(qwen2, *arguments, None, False) == 16
    monkeypatch.setattr(held_graphs, "free_memory", lambda device: 0)
    assert request.rows_in_flight(there, *arguments, None, False) == 1
    with pytest.raises(UsageError, match="max_rows_in_flight=0 must be at least 1"):
        draw(qwen2, SAME_LENGTH, max_rows_in_flight=0)


@pytest.mark.parametrize("family", ["qwen2", "mistral sliding"])
def test_a_listener_hears_of_each_row_once_and_as_it_ends(family):
    model = checked(build(family))
    heard = {}
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(len(heard)))
    completions = draw(model, OF_ALL_LENGTHS, eos_token_id=[1, 2, 3], max_rows_in_flight=7,
                       on_ended=lambda row, tokens, finished: heard.update({row: (tokens, finished)}))  # fmt: skip
    hook.remove()
    assert sorted(heard) == list(range(12))
    for row, (tokens, finished) in heard.items():
        assert tokens == completions.tokens[row, : completions.length[row]].tolist()
        assert finished == bool(completions.finished[row])
    assert any(0 < n < 12 for n in calls)  # the model was called after some rows had been announced
