"""``attn_implementation: varlen``: texts packed without a mask have the numbers of sdpa and of each alone."""

import pytest
import torch
import torch.nn.attention.varlen as kernels
from transformers import AutoModelForCausalLM

from rl_modules import SFT, Distillation
from rl_modules.common.errors import UsageError
from rl_modules.language.fast import varlen
from rl_modules.language.fast.packing import can_pack_pairs, can_pack_texts, packed_inputs
from rl_modules.language.fast.shared_scoring import can_share
from rl_modules.language.sampling import sample
from tests.conformance.architectures import ARCHITECTURES
from tests.datamodules.language.test_instruction import attached
from tests.rl_modules.language.test_sft import TINY, TINY_LLAMA, assert_same_gradient, demonstrations, gradient

WINDOW = ARCHITECTURES["Mistral, window 8"]
MODELS = {"llama": TINY_LLAMA, "qwen2": TINY, "mistral": WINDOW, "both kinds of layers": ARCHITECTURES["Gemma-3 text"]}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}
INDEX = torch.tensor([3, 14, 5, 8, 1, 12])


def kernel(query, key, value, ends, ends_of_keys, longest, longest_of_keys, *, scale, window_size, enable_gqa):
    """What torch documents of ``varlen_attn``, by the definition: [T, heads, size], a window's left side inclusive."""
    assert ends.dtype == torch.int32 and ends is ends_of_keys and (ends[0], ends[-1]) == (0, len(query))
    assert longest == longest_of_keys >= int(ends.diff().max()) and enable_gqa == (query.shape[1] != key.shape[1])
    place = torch.arange(len(query))
    text = torch.bucketize(place, ends[1:], right=True)
    back = place[:, None] - place
    sees = (text[:, None] == text) & (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[2] ** -0.5)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value)


@pytest.fixture(params=["text by text", "kernel"])
def way(request, monkeypatch):
    if request.param == "kernel":
        monkeypatch.setattr(kernels, "varlen_attn", kernel)
        monkeypatch.setattr(varlen, "_text_by_text", varlen._by_kernel)


def model_of(attention, fields=TINY, algorithm=SFT, **arguments):
    module = algorithm(model_config=fields, attn_implementation=attention, **arguments)
    module.configure_model()
    return module


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "lora": LORA}], ids=["plain", "recomputed"])
def test_packed_texts_have_the_numbers_of_sdpa_and_of_each_alone(name, options, way, tmp_path):
    sequences = attached(demonstrations(tmp_path)).sequences
    batch = sequences.batch(INDEX, 0, packing=True)
    assert 1 < len(batch["tokens"]) < len(INDEX) and batch["tokens"].shape[1] > 8
    found = {}
    for attention in ("varlen", "sdpa"):
        module = model_of(attention, MODELS[name], **options)
        if options:
            torch.manual_seed(0)
            for key, weight in module.model.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(weight, std=0.1)
        module.train()
        log_prob = module.demonstrated(batch)[0]
        (log_prob * torch.linspace(1, 2, log_prob.numel())).sum().backward()
        gradients = {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
        alone = [module.demonstrated(sequences.batch(INDEX[i : i + 1], 0))[0].squeeze(0) for i in range(len(INDEX))]
        found[attention] = log_prob.detach(), gradients
        torch.testing.assert_close(log_prob.squeeze(0).sort()[0], torch.cat(alone).sort()[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found["varlen"][0], found["sdpa"][0], atol=2e-6, rtol=1e-5)
    assert_same_gradient(found["varlen"][1], found["sdpa"][1])


def test_no_mask_is_made_and_the_texts_are_told_by_the_batch(way, tmp_path, monkeypatch):
    batch = attached(demonstrations(tmp_path)).sequences.batch(INDEX, 0, packing=True)
    position, tokens = batch["position_ids"].flatten().tolist(), batch["tokens"].flatten().tolist()
    begins = {i for i, token in enumerate(tokens) if token and position[i] == 0}
    ends = batch["boundaries"].tolist()
    assert begins < set(ends) and ends == sorted(set(ends)) and ends[-1] == len(tokens)
    assert not any(position[end] for end in ends[:-1]) and len(ends) <= len(INDEX) + len(batch["tokens"]) + 1
    module = model_of("varlen")
    inputs = packed_inputs(module.model, batch["tokens"], batch["position_ids"], batch["boundaries"])
    assert inputs["cu_seq_lens_q"] is batch["boundaries"] and inputs["max_length_q"] == batch["tokens"].shape[1]
    searched = packed_inputs(module.model, batch["tokens"], batch["position_ids"])
    masks = []
    for layer in module.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda part, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        told, found = (module.model(**given, use_cache=False).logits for given in (inputs, searched))
    assert [mask.numel() for mask in masks] == [0] * len(masks) and masks
    torch.testing.assert_close(told, found)


def test_what_is_no_packed_row_is_sdpa_bit_for_bit(monkeypatch):
    monkeypatch.setattr(varlen, "_text_by_text", None)
    found = []
    for attention in ("varlen", "sdpa"):
        model = model_of(attention, WINDOW).model.eval()
        tokens = torch.arange(3, 43).view(2, 20)
        mask = torch.ones_like(tokens)
        mask[0, :11] = 0
        with torch.no_grad():
            padded = model(input_ids=tokens, attention_mask=mask).logits
            plain = model(input_ids=tokens[:1]).logits
        written = sample(model, [[5, 6, 7], [8]], num_generations=2, max_completion_length=12, eos_token_id=1,
                         pad_token_id=0, seeds=range(4))  # fmt: skip
        found.append((padded, plain, written.tokens, written.log_prob))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_pairs_pack_and_prompts_are_shared_as_with_sdpa(attention):
    model = model_of(attention, TINY_LLAMA).model.eval()
    assert can_pack_pairs(model) and can_share(model, 8)


@pytest.mark.parametrize("algorithm", [SFT, Distillation])
def test_a_step_of_training_is_that_of_sdpa(algorithm, way, tmp_path):
    teacher = tmp_path / "teacher"
    model_of("sdpa", {**TINY, "initializer_range": 0.3}).export(teacher)
    own = {"teacher_model_name_or_path": str(teacher)} if algorithm is Distillation else {}
    found = []
    for attention in ("varlen", "sdpa"):
        module = algorithm(model_config=TINY, attn_implementation=attention, lr_scheduler_type="constant", **own)
        found.append(gradient(module, demonstrations(tmp_path, packing=True)))
        assert can_pack_texts(module.model)
    assert_same_gradient(*found)


def test_a_model_that_varlen_does_not_fit_is_refused_or_has_a_row_for_each_text(caplog):
    for name in ("gpt-oss", "Falcon", "Gemma-2"):
        with pytest.raises(UsageError, match="attn_implementation can't be used with .* give eager or sdpa"):
            model_of("varlen", ARCHITECTURES[name])
    assert not can_pack_texts(model_of("varlen", ARCHITECTURES["OPT"]).model)
    assert "every text has a row of its own" in caplog.text


def test_refusals_in_a_packed_row(tmp_path):
    batch = attached(demonstrations(tmp_path)).sequences.batch(INDEX, 0, packing=True)
    module = model_of("varlen", {**TINY, "attention_dropout": 0.2}).train()
    with pytest.raises(UsageError, match="has no dropout in packed rows.* packing=false"):
        module.demonstrated({**batch, "seed": 1})
    row = batch["tokens"].view(1, -1), batch["position_ids"].view(1, -1)
    with pytest.raises(UsageError, match="without cu_seq_lens_q"):
        module.model.eval()(input_ids=row[0], position_ids=row[1], use_cache=False)


def test_exports_do_not_name_it(tmp_path):
    model_of("varlen").export(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config._attn_implementation == "sdpa"
