"""A mixture of experts is trained with its own loss for balance, as transformers computes it, or not at all."""

import pytest
import torch

from rl_modules import DPO, GRPO, KTO, RLHFPPO, RLOO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.sampling import sample
from tests.conformance.architectures import ARCHITECTURES
from tests.rl_modules.language.test_sft import assert_same_gradient, demonstrations, gradient

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def sft(name, **fields):
    return SFT(model_config={**ARCHITECTURES[name], **fields}, lr_scheduler_type="constant", logging_steps=1)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_the_gradient_is_that_of_transformers_own_loss(name, packing, tmp_path):
    module, data = sft(name, **BALANCED), demonstrations(tmp_path, n=8, packing=packing, completion_only_loss=False)
    found = gradient(module, data)
    reference = sft(name, **BALANCED)
    reference.configure_model()
    batch = data.sequences.batch(torch.arange(8), 0)
    labels = torch.full_like(batch["tokens"], -100)
    labels.view(-1)[batch["counted"]] = batch["tokens"].view(-1)[batch["counted"]]
    mask = torch.arange(batch["tokens"].shape[1]) < batch["filled"][:, None]
    output = reference.model(input_ids=batch["tokens"], attention_mask=mask.long(), labels=labels)
    assert output.aux_loss > 0.5
    output.loss.backward()
    expected = {f"model.{n}": p.grad for n, p in reference.model.named_parameters()}
    assert_same_gradient(expected, found)
    assert module.latest_metrics["train/aux_loss"] == pytest.approx(0.5 * float(output.aux_loss.detach()), rel=1e-5)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_completions_are_written_without_it(name):
    """With eager attention rows have caches of their own, as on a GPU, whose masks cover more than the new tokens."""
    texts = []
    for fields in ({}, BALANCED):
        module = SFT(model_config={**ARCHITECTURES[name], **fields}, attn_implementation="eager")
        module.configure_model()
        written = sample(module.model, [[5, 6, 7], [8]], num_generations=2, max_completion_length=6, eos_token_id=1,
                         pad_token_id=0, seeds=range(4))  # fmt: skip
        texts.append(written.tokens)
        assert module.model.config.output_router_logits is bool(fields)
    assert torch.equal(*texts)


def test_without_it_nothing_is_added(tmp_path):
    module = sft("Mixtral", output_router_logits=False, router_aux_loss_coef=0.5)
    gradient(module, demonstrations(tmp_path))
    assert "train/aux_loss" not in module.latest_metrics


@pytest.mark.parametrize("algorithm", [RLHFPPO, DPO, KTO, RewardModel])
def test_an_algorithm_that_does_not_add_it_says_so(algorithm):
    module = algorithm(model_config={**ARCHITECTURES["Mixtral"], **BALANCED})
    module.configure_model()
    with pytest.raises(UsageError, match=f"output_router_logits=true asks for a loss .* {algorithm.__name__} does not"):
        module.check_architecture()
    module = algorithm(model_config=ARCHITECTURES["Mixtral"])
    module.configure_model()
    with pytest.warns(UserWarning, match=f"router_aux_loss_coef=0.001 .* no effect: {algorithm.__name__} trains"):
        module.check_architecture()


def test_a_coefficient_that_nothing_reads_is_refused():
    module = SFT(model_config={**ARCHITECTURES["Mixtral"], "router_aux_loss_coef": 0.5})
    module.configure_model()
    with pytest.raises(UsageError, match="router_aux_loss_coef=0.5, which does nothing without output_router_logits"):
        module.check_architecture()


@pytest.mark.parametrize("algorithm", [GRPO, RLOO])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_completions_balance_experts_as_transformers_does(name, algorithm):
    """TRL adds the model's `aux_loss` of the attended tokens, times the coefficient."""
    gradients = {}
    prompts, width = [[5, 6, 7], [5, 6, 7], [8], [8]], 7
    tokens = torch.zeros(4, width, dtype=torch.long)
    length = torch.tensor([4, 2, 3, 1])
    prompt_length = torch.tensor([len(p) for p in prompts])
    for i, prompt in enumerate(prompts):
        answer = torch.randint(3, 60, (int(length[i]),), generator=torch.Generator().manual_seed(i))
        tokens[i, : len(prompt) + len(answer)] = torch.cat([torch.tensor(prompt), answer])
    mask = torch.arange(4) < length[:, None]
    batch = {"tokens": tokens, "prompt_length": prompt_length, "length": length, "mask": mask, "on_policy": True,
             "group": torch.tensor([0, 0, 1, 1]), "advantage": torch.tensor([1.0, -1.0, 0.5, -0.5]), "step_rows": 4,
             "step_tokens": mask.sum(), "micro_tokens": mask.sum(), "n_micro": 1, "shortest_prompt": 1,
             "log_prob": torch.zeros(4, 4)}  # fmt: skip
    filled = torch.arange(width) < (prompt_length + length)[:, None]
    for fields in ({}, BALANCED):
        torch.manual_seed(0)
        module = algorithm(model_config={**ARCHITECTURES[name], **fields}, max_completion_length=4)
        module.configure_model()
        recorded = {}
        module.record = lambda *weight, recorded=recorded, **metrics: recorded.update(metrics)
        module.record_minibatch = lambda *arguments: None
        loss = module.training_step(batch, 0)
        if fields:
            output = module.model(input_ids=tokens[:, :-1], attention_mask=filled[:, :-1].long())
            torch.testing.assert_close(recorded["aux_loss"], 0.5 * output.aux_loss.detach(), rtol=1e-5, atol=0)
            loss = loss - 0.5 * output.aux_loss
        parameters = [p for p in module.model.parameters() if p.requires_grad]
        gradients[bool(fields)] = torch.autograd.grad(loss, parameters, allow_unused=True)
    for with_it, without in zip(gradients[True], gradients[False], strict=True):
        assert (with_it is None) == (without is None)
        if without is not None:
            torch.testing.assert_close(with_it, without, atol=1e-6, rtol=1e-4)
