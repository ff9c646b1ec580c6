"""Models that are used together with a policy in training: frozen models, and a value model initialised from one."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError
from rl_modules.language.dropout import remove_dropout
from rl_modules.language.lora import begins_unchanged, merged
from rl_modules.language.models import add_lora, make_model
from rl_modules.language.sampling.decode import transformers_model
from rl_modules.language.scoring import Extent, completion_log_probs, completion_positions, extent_of
from rl_modules.language.sharding import Splitter


def frozen(model: Any) -> Any:
    """Freezes a model and sets it to evaluation mode; returns it."""
    return model.requires_grad_(False).eval()


def with_weights_in(model: Any, dtype: torch.dtype) -> Any:
    """Converts a model's parameters to a dtype and returns it; buffers such as rotary frequencies keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def without_dropout(config: Any) -> Any:
    """Returns a copy of a transformers config with every dropout rate at 0."""
    config = copy.deepcopy(config)
    remove_dropout(config)
    return config


def value_model_from(
    reward_model: Any, gradient_checkpointing: bool | str = False, lora: dict[str, Any] | None = None
) -> Any:
    """Copies a reward model to a trainable value model, which will estimate the value of unfinished texts.

    Args:
        reward_model: model with a ``score`` head of one output.
        gradient_checkpointing: recompute activations in the backward pass, see :func:`make_model`.
        lora: arguments of ``peft.LoraConfig``; the copy's own weights are then frozen, but for the head's.
    """
    weight = next(reward_model.parameters())
    dtype, attention = str(weight.dtype).removeprefix("torch."), reward_model.config._attn_implementation
    model = make_model(without_dropout(reward_model.config), None, "score", dtype, attention, gradient_checkpointing)
    model.to(weight.device).load_state_dict(reward_model.state_dict())
    model.requires_grad_(True).train()
    return model if lora is None else add_lora(model, lora, "SEQ_CLS", gradient_checkpointing)


def value_model_from_policy(
    policy: Any, gradient_checkpointing: bool | str = False, lora: dict[str, Any] | None = None
) -> Any:
    """Copies a policy's body to a trainable value model with a head of one output, which is 0 at first.

    Args:
        policy: causal language model, with or without new adapters of ``peft``, which are merged if they do not begin
            at 0.
        gradient_checkpointing: recompute activations in the backward pass, see :func:`make_model`.
        lora: arguments of ``peft.LoraConfig``; the copy's own weights are then frozen, but for the head's.

    Raises:
        UsageError: the architecture has no such head on the same body.
    """
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
        raise UsageError(f"a value model of {causal.config.model_type} can't start from the policy: the body of its "
                         "sequence classification is another; set value_head_on_policy=true") from error  # fmt: skip
    nn.init.zeros_(model.score.weight)
    model.to(weight.device).train()
    return model if lora is None else add_lora(model, lora, "SEQ_CLS", gradient_checkpointing)


class HeadOnPolicy(nn.Module):
    """A value head on the policy's last hidden states: V = w·h + b, initialised to V = 0.

    The head does not start from the reward model's head, because that head reads the states of another network.

    Args:
        hidden_size: of the policy.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def shard(self, split: Splitter) -> None:
        """Splits the weights over ranks."""
        split(self.linear)

    def forward(
        self, model: Any, tokens: Tensor, prompt_length: Tensor, length: Tensor, temperature: float,
        entropy: bool = False, extent: Extent | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """Computes log-probabilities, entropies and values of completions by one forward pass of the policy.

        Args:
            model: the policy.
            tokens: prompts and completions, right-padded, [b, T].
            prompt_length: [b], ≥ 1.
            length: tokens of the completions, [b], ≥ 1.
            temperature: the one that the tokens were sampled with.
            entropy: also return the entropies.
            extent: of the batch; None asks the device.

        Returns:
            Log-probabilities, entropies (or None) and values of the completions' tokens, [b, L] each.
        """
        states: list[Tensor] = []
        extent = extent_of(prompt_length, length) if extent is None else extent
        body = transformers_model(model).base_model
        hook = body.register_forward_hook(lambda module, inputs, output: states.append(output.last_hidden_state))
        try:
            log_prob, spread = completion_log_probs(model, tokens, prompt_length, length, temperature, entropy, extent)
        finally:
            hook.remove()
        place = (completion_positions(prompt_length, length, extent[2]) - 1).unsqueeze(-1)
        # The passes of a self-check come before this one.
        before = states[-1].gather(1, place.expand(-1, -1, states[-1].shape[-1]))
        with torch.autocast(before.device.type, enabled=False):  # values are not rounded to 16 bits
            value = self.linear(before.to(self.linear.weight.dtype)).squeeze(-1).float()
        return log_prob, spread, value


def check_same_tokens(argument: str, other: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Refuses a model whose tokens differ from those that the policy writes.

    Args:
        argument: the argument that named the model, with its value, for the message.
        other: the model's tokenizer.
        policy: the policy's.

    Raises:
        UsageError: an id stands for different tokens.
    """
    theirs, ours = other.get_vocab(), policy.get_vocab()
    if theirs == ours:
        return
    by_id = {i: token for token, i in ours.items()}
    differing = sorted({i for token, i in set(theirs.items()) ^ set(ours.items())})
    theirs_by_id = {i: token for token, i in theirs.items()}
    i = differing[0]
    raise UsageError(
        f"{argument} has a tokenizer with {len(theirs)} tokens in which id {i} is {theirs_by_id.get(i)!r}, in the "
        f"policy's {len(ours)} it is {by_id.get(i)!r}; both must be trained with one tokenizer"
    )
