"""Fast paths are taken where they give the model's own numbers; a model that can't be right is refused by name."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_modules import GRPO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import make_config
from rl_modules.language.fast import self_check
from rl_modules.language.fast.packing import can_pack_pairs, can_pack_texts
from rl_modules.language.fast.self_check import agrees, require_left_to_right, shortest_window, warn_of_noise
from rl_modules.language.fast.shared_scoring import can_share
from rl_modules.language.models import make_model
from rl_modules.language.sampling import sample
from rl_modules.language.scoring import completion_log_probs
from rl_modules.language.tokenizer import character_tokenizer
from tests.conformance.architectures import ARCHITECTURES, network
from tests.rl_modules.language.test_sft import assert_same_gradient, demonstrations, gradient
from tests.training import fit

pytestmark = pytest.mark.fast_path


def halves_only(module, query, key, value, mask, **rest):
    """Attention that refuses float32 outside of autocast, as flash attention within transformers does."""
    if query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return sdpa_attention_forward(module, query, key, value, mask, **rest)


def test_flash_attention_under_mixed_precision_is_checked_in_16_bits(tmp_path):
    """A fit begins, and a datamodule asks, outside of autocast."""
    AttentionInterface.register("flash_of_the_test", halves_only)
    AttentionMaskInterface.register("flash_of_the_test", sdpa_mask)
    module = built(SFT, SMALL, logging_steps=1)
    module.model.config._attn_implementation = "flash_of_the_test"
    fit(module, demonstrations(tmp_path), max_steps=1, precision="bf16-mixed")
    assert module.latest_metrics["train/loss"] > 0


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def built(algorithm, fields, **arguments):
    module = algorithm(model_config=fields, **arguments)
    module.configure_model()
    return module


# -------------------------------------------------------------------- log-probabilities with shared prompts


@pytest.mark.parametrize("name", ["Mistral, window 8", "Gemma-3 text", "Phi-3", "EXAONE-4", "MPT", "GPT-Neo"])
def test_grouped_log_probs_are_those_of_a_plain_pass(name):
    """A long prompt with a short completion beside the reverse: each row fits into the window, the layout does not."""
    module = GRPO(model_config=ARCHITECTURES[name])
    module.model = network(name)
    prompt_length, length = torch.tensor([7, 7, 1, 1]), torch.tensor([1, 1, 7, 6])
    tokens = torch.randint(3, 90, (4, 8), generator=torch.Generator().manual_seed(0))
    tokens[1, :7], tokens[3, 0] = tokens[0, :7], tokens[2, 0]
    batch = {"tokens": tokens, "prompt_length": prompt_length, "length": length, "group": torch.tensor([0, 0, 1, 1])}
    with torch.no_grad():
        found, _ = module.log_probs(batch)
        for i in range(4):
            start, n = int(prompt_length[i]), int(length[i])
            logits = module.model(input_ids=tokens[i : i + 1, : start + n]).logits[0, start - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, tokens[i, start : start + n, None]).squeeze(1)
            torch.testing.assert_close(found[i, :n], expected, atol=5e-6, rtol=1e-5)


def test_learned_positions_never_pass_the_table():
    """A layout of 30 columns on a model with 20 positions, none of whose rows is longer than 16."""
    module = built(GRPO, {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20})
    prompt_length, length = torch.tensor([15, 15, 1, 1]), torch.tensor([1, 1, 15, 15])
    tokens = torch.full((4, 16), 7)
    batch = {"tokens": tokens, "prompt_length": prompt_length, "length": length, "group": torch.tensor([0, 0, 1, 1])}
    found, _ = module.log_probs(batch)
    torch.testing.assert_close(found, completion_log_probs(module.model, tokens, prompt_length, length)[0])


# -------------------------------------------------------------------- packing


#: Falcon's texts ran together before transformers 5.24.
FALCON = Version(transformers.__version__) >= Version("5.24")
APART = ["Llama", "Mistral, window 8", "Gemma-2", "Gemma-3", "GPT-2", "GPT-NeoX", "Qwen3-MoE", *["Falcon"] * FALCON]
LEAKING = ["OPT", "Bloom", "MPT", "gpt-oss", "LFM2", "Mamba-2", "Jamba", "Qwen3-Next", *["Falcon"] * (not FALCON)]


@pytest.mark.parametrize("name", LEAKING)
def test_texts_that_would_leak_are_padded(name, tmp_path, caplog):
    data = demonstrations(tmp_path, packing=True)
    module = SFT(model_config=ARCHITECTURES[name], lr_scheduler_type="constant")
    with caplog.at_level(logging.WARNING, "rl_modules"):
        packed = gradient(module, data)
    assert sum("packing" in record.message for record in caplog.records) == 1
    assert "every text has a row of its own" in caplog.text
    assert not module.can_pack
    padded = gradient(SFT(model_config=ARCHITECTURES[name], lr_scheduler_type="constant"), demonstrations(tmp_path))
    assert_same_gradient(padded, packed)


@pytest.mark.parametrize("name", APART)
def test_texts_that_stay_apart_are_packed(name):
    assert can_pack_texts(network(name))


def test_a_check_within_a_validation_says_the_same():
    model = network("Llama")
    with torch.inference_mode():
        assert can_pack_texts(model) and can_pack_pairs(model)


@pytest.mark.parametrize("name", ["Bloom", "LFM2", "Mamba-2", "Jamba", "Qwen3-Next"])
def test_a_leak_smaller_than_rounding_is_found(name):
    """In bfloat16, and with initial weights, what comes over from another text is less than a product's rounding."""
    module = built(SFT, ARCHITECTURES[name], torch_dtype="bfloat16")
    assert not can_pack_texts(module.model)


@pytest.mark.parametrize("name", ["LFM2", "Mamba-2", "Jamba", "Qwen3-Next"])
def test_a_leak_of_small_weights_is_found(name):
    """A run that is resumed asks again, with larger weights, and must get the same answer."""
    model = network(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2e-3)
    assert not can_pack_texts(model)
    assert not can_pack_pairs(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_in_a_deep_model_is_no_disagreement(dtype):
    fields = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 24, "num_attention_heads": 8,
              "num_key_value_heads": 2}  # fmt: skip
    model = built(GRPO, fields, torch_dtype=dtype).model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    assert can_pack_texts(model) and can_share(model, 8)
    sample(model, [[5, 6]], max_completion_length=1, eos_token_id=2, pad_token_id=0, seeds=[0])
    assert all(found for found in self_check._known[model].values())


def test_attention_in_chunks_of_a_row_does_not_pack():
    fields = {"model_type": "llama4_text", **SMALL, "attention_chunk_size": 64, "num_key_value_heads": 2}
    assert not can_pack_texts(built(SFT, fields).model)


# -------------------------------------------------------------------- the check itself


def test_a_check_runs_once_and_leaves_no_trace(caplog):
    model = network("Llama").train()
    state, calls = torch.random.get_rng_state(), []

    def compare():
        calls.append(torch.rand(1))
        assert not model.training and not torch.is_grad_enabled()
        return torch.ones(2), torch.zeros(2), torch.zeros(2)

    for _ in range(2):
        assert not agrees(model, "counting", compare, "fingers are used")
    assert len(calls) == 1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training and all(part.training for part in model.modules())
    messages = [record.message for record in caplog.records]
    assert messages == ["LlamaForCausalLM: counting differs by 1 nats on this model, so that fingers are used"]
    # Another implementation of attention is another question.
    model.config._attn_implementation = "eager"
    assert not agrees(model, "counting", compare, "") and len(calls) == 2


def test_a_way_that_fails_is_not_taken(caplog):
    def fail():
        raise ValueError("no such thing")

    assert not agrees(network("Llama"), "failing", fail, "the other way is taken")
    assert "failing fails: no such thing on this model, so that the other way is taken" in caplog.text


def test_numbers_of_another_shape_are_no_agreement():
    """Those of a fast path by a hook, which a compiled model does not call; also where they would broadcast."""
    for shape in ((9, 3), (1, 3)):
        fast, alone = torch.zeros(shape), torch.zeros(4, 3)
        assert not agrees(network("Llama"), "hooked", lambda fast=fast, alone=alone: (fast, alone, alone), "")


def test_an_error_of_the_models_own_pass_is_raised():
    def fail(*arguments, **inputs):
        raise ValueError("broken weights")

    model = network("Llama")
    model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="broken weights"):
        require_left_to_right(model)


class Tf32(TorchDispatchMode):
    """Products as tensor cores compute them where ``torch.set_float32_matmul_precision("high")`` allows it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm"):
            args = [self._rounded(x) if x.ndim > 1 and x.dtype == torch.float32 else x for x in args]
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _rounded(x):
        return (x.contiguous().view(torch.int32) + 2**12 & -(2**13)).view(torch.float32)


def test_products_of_tensor_cores_in_single_precision_are_no_disagreement(monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = built(SFT, {**shape, "vocab_size": 500}).model
    with caplog.at_level(logging.WARNING), Tf32():
        for way in ("dynamic", "graph"):
            sample(model, [[5, 6, 7], [9, 8]], num_generations=2, max_completion_length=3, eos_token_id=0,
                   pad_token_id=0, seeds=range(4), cache_implementation=way)  # fmt: skip
    assert not caplog.records


def test_rounding_is_no_disagreement_but_a_little_more_is():
    alone = torch.linspace(-5, -1, 5)
    for error, right in ((3e-6, True), (3e-5, False)):
        assert agrees(network("Llama"), "x", lambda error=error: (alone + error, alone, alone), "") == right
        assert agrees(network("Llama"), "x", lambda error=error: (alone + error, alone, alone + error), "")


def test_small_log_probabilities_of_large_logits_round_as_the_logits_do(monkeypatch):
    """Weights of N(0, 1) have logits of 50, whose last float32 digit is 4e-6."""
    monkeypatch.setenv("RL_FAST", "0")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model(make_config(None, None, character_tokenizer(), dropout=False))
        for parameter in model.parameters():
            parameter.normal_()
    assert model(input_ids=torch.arange(5, 13)[None]).logits.detach().abs().max() > 30
    written = sample(
        model, [[5, 6, 7], [8, 9]], max_completion_length=3, eos_token_id=1, pad_token_id=0, seeds=[1, 2]
    )  # fmt: skip
    assert written.length.max() > 0


def test_a_model_whose_numbers_are_nan_is_asked_again():
    model = network("Llama")
    nan = torch.tensor([torch.nan])
    assert agrees(model, "x", lambda: (nan, nan, nan), "")
    assert not agrees(model, "x", lambda: (torch.ones(1), torch.zeros(1), torch.zeros(1)), "")


def test_all_checks_of_the_default_model_take_less_than_a_second():
    module = built(GRPO, None)
    start = time.process_time()
    module.check_architecture()
    assert can_share(module.model, 64) and can_pack_texts(module.model)
    sample(module.model, [[5, 6]], max_completion_length=1, eos_token_id=2, pad_token_id=0, seeds=[0])
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("name", "window"), [("Llama", None), ("Mistral, window 8", 8), ("Gemma-3", 8), ("EXAONE-4", 8), ("Qwen2", None)]
)
def test_windows_are_found_by_their_fields(name, window):
    assert shortest_window(network(name).config) == window


# -------------------------------------------------------------------- what is refused, by name


@pytest.mark.parametrize("algorithm", [SFT, GRPO, RewardModel])
def test_an_encoder_decoder_is_refused(algorithm):
    with pytest.raises(UsageError, match="t5 is an encoder-decoder"):
        built(algorithm, {"model_type": "t5", "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2})


def test_a_model_that_reads_in_both_directions_is_refused(tmp_path):
    module = SFT(model_config={"model_type": "bert", **SMALL}, lr_scheduler_type="constant")
    with pytest.raises(UsageError, match="BertLMHeadModel lets a token see what stands to its right"):
        gradient(module, demonstrations(tmp_path))


@pytest.mark.parametrize("name", ["Llama", "Mamba-2", "Gemma-3", "Bloom", "Qwen3-Next", "GPT-Neo"])
def test_models_that_read_from_left_to_right_are_not(name):
    require_left_to_right(network(name))


@pytest.mark.parametrize("name", ["Granite", "Cohere", "LFM2", "Mamba"])
def test_reward_models_that_transformers_does_not_have_are_refused(name):
    kind = ARCHITECTURES[name]["model_type"]
    with pytest.raises(UsageError, match=f"transformers has no sequence classification for {kind}"):
        built(RewardModel, ARCHITECTURES[name])


def test_a_model_that_decodes_otherwise_than_it_reads_is_refused():
    module = built(SFT, {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64})
    with pytest.raises(UsageError, match="RwkvForCausalLM gives prompts of unequal length other log-probabilities"):
        sample(module.model, [[5, 6], [7]], max_completion_length=3, eos_token_id=2, pad_token_id=0, seeds=[0, 1])


# -------------------------------------------------------------------- composite configs


@pytest.mark.parametrize("name", ["Gemma-3", "Qwen3.5"])
@pytest.mark.parametrize("algorithm", [SFT, GRPO, RewardModel])
def test_a_composite_config_is_read_where_its_language_model_stands(algorithm, name):
    module = algorithm(model_config=ARCHITECTURES[name])
    assert module.max_length == 128
    module.configure_model()
    assert module.max_length == 128
    text = module.model.config.get_text_config(decoder=True)
    assert text.vocab_size == len(module.tokenizer)
    assert text.pad_token_id == module.tokenizer.pad_token_id
    trained = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert trained and not any("vision" in name or "visual" in name for name in trained)


def test_dropout_of_a_composite_config_is_removed():
    fields = dict(ARCHITECTURES["Gemma-3"])
    fields["text_config"] = {**fields["text_config"], "attention_dropout": 0.5}
    assert built(GRPO, fields).model.config.text_config.attention_dropout == 0.0


def test_noise_that_no_rate_of_the_config_switches_off_is_named(caplog):
    # PhiMoE's router draws in training among experts that are near the best: here all of them.
    fields = {**ARCHITECTURES["Mixtral"], "model_type": "phimoe", "router_jitter_noise": 1.0}
    drawn, plain = (built(GRPO, config).model.train() for config in (fields, ARCHITECTURES["Mixtral"]))
    state = torch.random.get_rng_state()
    warn_of_noise(plain)
    assert not caplog.text
    warn_of_noise(drawn)
    assert "PhimoeForCausalLM draws random numbers in training mode" in caplog.text
    assert torch.equal(torch.random.get_rng_state(), state) and all(part.training for part in drawn.modules())


def test_an_error_inside_of_a_property_is_its_own():
    class Broken(SFT):
        @property
        def max_length(self):
            return self.hparams.optimizer_of_the_moon

    with pytest.raises(AttributeError, match="optimizer_of_the_moon"):
        _ = Broken().max_length
    with pytest.raises(AttributeError, match="'SFT' object has no attribute 'moon'"):
        _ = SFT().moon
    assert isinstance(built(SFT, SMALL).model, nn.Module)


# -------------------------------------------------------------------- how long a text may be


def test_texts_of_a_longrope_model_stay_below_the_switch():
    """Phi-3's angles depend on the longest row of the batch: beyond the original length a text's numbers would too."""
    half = 2
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * half, "long_factor": [4.0] * half,
            "original_max_position_embeddings": 16}  # fmt: skip
    fields = {"model_type": "phi3", **SMALL, "hidden_size": 8, "num_key_value_heads": 2,
              "max_position_embeddings": 64, "original_max_position_embeddings": 16,
              "rope_parameters": rope}  # fmt: skip
    module = built(SFT, fields)
    assert module.max_length == 16
    # What the limit is for: the same text beside a longer one.
    text = torch.randint(3, 90, (1, 10), generator=torch.Generator().manual_seed(0))
    beside = torch.cat([nn.functional.pad(text, (0, 10)), torch.full((1, 20), 7)])
    with torch.no_grad():
        alone, far = (module.model(input_ids=tokens).logits[0, :10] for tokens in (text, beside))
        near = module.model(input_ids=beside[:, :16]).logits[0, :10]
    torch.testing.assert_close(near, alone)
    assert (far - alone).abs().max() > 1e-5
