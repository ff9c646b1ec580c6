"""Scores of texts by reward and value models, and what a value model begins as: a copy of either, or a head."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import body_of, remove_dropout, transformers_model
from rl_modules.language.lora import add_lora, begins_unchanged, merged
from rl_modules.language.models import make_model
from rl_modules.language.sampling.support import Filter
from rl_modules.language.scoring import Extent, completion_log_probs, completion_positions, extent_of
from rl_modules.language.sharding import Splitter


def without_dropout(config: Any) -> Any:
    """Returns a copy of a transformers config with every dropout rate at 0."""
    config = copy.deepcopy(config)
    remove_dropout(config)
    return config


def value_model_from(
    reward_model: Any, gradient_checkpointing: bool | str = False, lora: dict[str, Any] | None = None
) -> Any:
    """Copies a reward model to a trainable value model, which will estimate the value of unfinished texts."""
    weight = next(reward_model.parameters())
    dtype, attention = str(weight.dtype).removeprefix("torch."), reward_model.config._attn_implementation
    model = make_model(without_dropout(reward_model.config), None, "score", dtype, attention, gradient_checkpointing)
    model.to(weight.device).load_state_dict(reward_model.state_dict())
    model.requires_grad_(True).train()
    return model if lora is None else add_lora(model, lora, "SEQ_CLS", gradient_checkpointing)


def value_model_from_policy(
    policy: PreTrainedModel, gradient_checkpointing: bool | str = False, lora: dict[str, Any] | None = None
) -> Any:
    """Copies a policy's body to a trainable value model with a head of one output, which is 0 at first."""
    if getattr(policy, "is_quantized", False):
        raise UsageError(
            "a value model can't start from a policy with quantized weights; set "
            "value_head_on_policy=true, or give a reward model"
        )
    causal = transformers_model(policy)
    weight = next(causal.parameters())
    if lora is not None and not weight.is_meta and not begins_unchanged(policy):
        causal = merged(policy)  # adapters that begin with a part of the weights leave others in the base
    dtype, attention = str(weight.dtype).removeprefix("torch."), causal.config._attn_implementation
    model = make_model(causal.config, None, "score", dtype, attention, gradient_checkpointing)
    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in causal.base_model.state_dict().items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }
    try:
        model.base_model.load_state_dict({n.replace(".original_module.", "."): t for n, t in weights.items()})
    except RuntimeError as error:
        raise UsageError(
            f"a value model of {causal.config.model_type} can't start from the policy: the body of its "
            "sequence classification is another; set value_head_on_policy=true"
        ) from error
    nn.init.zeros_(model.score.weight)
    model.to(weight.device).train()
    return model if lora is None else add_lora(model, lora, "SEQ_CLS", gradient_checkpointing)


class HeadOnPolicy(nn.Module):
    """A value head on the policy's last hidden states: V = w·h + b, initialised to V = 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def shard(self, split: Splitter) -> None:
        """Splits the weights over ranks."""
        split(self.linear)

    def forward(
        self,
        model: Any,
        tokens: Tensor,
        prompt_length: Tensor,
        length: Tensor,
        temperature: float,
        entropy: bool = False,
        extent: Extent | None = None,
        filtered: Filter | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes log-probabilities, entropies and values of completions by one forward pass of the policy."""
        states: list[Tensor] = []
        extent = extent_of(prompt_length, length) if extent is None else extent
        # Where a model's own forward pass skips the outer module, as OPT's does, the hook of this part is called.
        body = body_of(transformers_model(model))
        hook = body.register_forward_hook(lambda module, inputs, output: states.append(output.last_hidden_state))
        try:
            log_prob, spread = completion_log_probs(
                model, tokens, prompt_length, length, temperature, entropy, extent, filtered
            )
        finally:
            hook.remove()
        place = (completion_positions(prompt_length, length, extent[2]) - 1).unsqueeze(-1)
        # The passes of a self-check come before this one.
        before = states[-1].gather(1, place.expand(-1, -1, states[-1].shape[-1]))
        with torch.autocast(before.device.type, enabled=False):  # values are not rounded to 16 bits
            value = self.linear(before.to(self.linear.weight.dtype)).squeeze(-1).float()
        return log_prob, spread, value


# ---------------------------------------------------------------- scores


def token_values(model: Any, tokens: Tensor, prompt_length: Tensor, length: Tensor, width: int | None = None) -> Tensor:
    """Computes V of the state before each completion token, which is the text up to there, [b, L] float32."""
    place = completion_positions(prompt_length, length, width) - 1
    return score_head(model, _gather_states(_hidden(model, tokens), place)).squeeze(-1).float()


def sequence_scores(model: Any, tokens: Tensor, total_length: Tensor) -> Tensor:
    """Returns the score of each sequence, [b] float32, read at its last token by length, not by a pad id."""
    states = _gather_states(_hidden(model, tokens), total_length.unsqueeze(1) - 1)
    return score_head(model, states).view(-1).float()


def scores_at(model: Any, tokens: Tensor, place: Tensor, **inputs: Any) -> Tensor:
    """Computes scores of the text up to some places of a batch, [m] float32."""
    states = _hidden(model, tokens, **inputs).flatten(0, 1).index_select(0, place)
    return score_head(model, states).view(-1).float()


def score_head(model: Any, states: Tensor) -> Tensor:
    """The head's output for hidden states, [..., 1], in its own dtype, which autocast would round."""
    head = transformers_model(model).score
    dtype = next((p.dtype for p in head.parameters() if p.requires_grad), next(head.parameters()).dtype)
    with torch.autocast(states.device.type, enabled=False):
        return head(states.to(dtype))


def _hidden(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """Returns the last layer's states, [b, T, hidden]."""
    return transformers_model(model).base_model(input_ids=tokens, use_cache=False, **inputs).last_hidden_state


def _gather_states(states: Tensor, place: Tensor) -> Tensor:
    return states.gather(1, place.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
