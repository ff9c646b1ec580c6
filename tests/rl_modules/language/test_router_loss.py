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


@pytest.mark.parametrize("algorithm", [GRPO, RLOO, RLHFPPO, DPO, KTO, RewardModel])
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
