"""What a model says about texts: against Transformers' own forward pass, one unpadded sequence at a time."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_modules.language.critics import HeadOnPolicy, sequence_scores, token_values
from rl_modules.language.scoring import completion_log_probs, completion_mask

FAMILIES = {
    "qwen2": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    # Gemma 2 caps its final logits: whoever multiplies by the output matrix alone gets other numbers.
    "gemma2": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 16},
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
COMPLETIONS = [[12, 13], [14, 15, 16, 17, 18], [19]]


def config_of(family, **fields):
    # The pad token occurs inside of the texts, as it does where it is the EOS token.
    return AutoConfig.for_model(family, vocab_size=40, pad_token_id=13, **FAMILIES[family], **fields)


def padded(filler=13):
    sequences = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    width = max(map(len, sequences))
    tokens = torch.tensor([s + [filler] * (width - len(s)) for s in sequences])
    return tokens, torch.tensor([len(p) for p in PROMPTS]), torch.tensor([len(c) for c in COMPLETIONS])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_entropies_are_those_of_each_unpadded_sequence(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    tokens, prompt_length, length = padded()
    with torch.no_grad():
        log_prob, entropy = completion_log_probs(model, tokens, prompt_length, length, temperature=0.7, entropy=True)
        for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = torch.distributions.Categorical(logits=logits)
            n = len(completion)
            torch.testing.assert_close(log_prob[i, :n], expected.log_prob(torch.tensor(completion)))
            torch.testing.assert_close(entropy[i, :n], expected.entropy(), atol=1e-5, rtol=1e-5)
            assert (log_prob[i, n:] == 0).all() and (entropy[i, n:] == 0).all()


def test_scores_and_values_are_not_rounded_by_autocast():
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of("qwen2", num_labels=1)).eval()
    tokens, prompt_length, length = padded()
    on_policy = HeadOnPolicy(32)
    torch.nn.init.normal_(on_policy.linear.weight)
    causal = AutoModelForCausalLM.from_config(config_of("qwen2")).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        values = [
            sequence_scores(model, tokens, prompt_length + length),
            token_values(model, tokens, prompt_length, length),
            on_policy(causal, tokens, prompt_length, length, 1.0)[2],
        ]
    for value in values:
        assert value.dtype == torch.float32 and not torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_values_are_read_by_length_whatever_the_padding_holds(family):
    torch.manual_seed(0)
    config = config_of(family, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    results = []
    for filler in (13, 20):
        tokens, prompt_length, length = padded(filler)
        with torch.no_grad():
            results.append((sequence_scores(model, tokens, prompt_length + length),
                            token_values(model, tokens, prompt_length, length)))  # fmt: skip
    torch.testing.assert_close(results[0], results[1])
    scores, values = results[0]
    assert values.shape == (3, 5)
    with torch.no_grad():
        for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            states = model.base_model(torch.tensor([prompt + completion])).last_hidden_state[0]
            expected = model.score(states).squeeze(-1)
            torch.testing.assert_close(scores[i], expected[-1])
            torch.testing.assert_close(values[i, : len(completion)], expected[len(prompt) - 1 : -1])


def test_padding_receives_no_gradient_and_changes_none():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("qwen2"))
    gradients = []
    for filler in (13, 20):
        model.zero_grad()
        tokens, prompt_length, length = padded(filler)
        wider = torch.cat([tokens, torch.full((3, 2), filler)], 1)
        completion_log_probs(model, wider, prompt_length, length)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0].abs().sum() > 0


def test_mask_counts_each_completion_to_its_end():
    expected = [[True, True, False], [True, False, False]]
    assert completion_mask(torch.tensor([2, 1]), width=3).tolist() == expected
    assert completion_mask(torch.tensor([2, 1])).shape == (2, 2)
