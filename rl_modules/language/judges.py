"""The frozen models beside a policy, its reference and its reward model: how they are read, and passes of them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.stored_arguments import settings_of
from rl_modules.core.checkpoint_file import read_checkpoint
from rl_modules.language.architecture import make_config, max_length
from rl_modules.language.critics import sequence_scores
from rl_modules.language.lora import check_switched_off
from rl_modules.language.models import frozen_source, make_model
from rl_modules.language.pretrained import tokenizer_from_dict
from rl_modules.language.rereading import reads_in_the_same_form
from rl_modules.language.reward_model import load_reward_model
from rl_modules.language.scoring import completion_log_probs
from rl_modules.language.tokenizer import check_same_tokens, load_tokenizer

if TYPE_CHECKING:
    from rl_modules.language.policy_with_reference import PolicyWithReference
    from rl_modules.language.sampling.support import Filter
    from rl_modules.language.vision import RowImages


def build_judges(policy: PolicyWithReference, config: Any) -> None:
    """Sets ``reference``, ``reward_model``, its tokenizer and offset; a checkpoint's wait for its weights or source."""
    hp = policy.hparams
    described = hp.description is not None
    judge = frozen_source(policy, "reward_model.") if described else hp.get("reward_model_name_or_path")
    if judge is not None:
        policy.reward_model = frozen(_read_reward_model(policy, judge))
    elif described:
        if (files := hp.description.get("reward_tokenizer")) is not None:
            policy.reward_tokenizer = tokenizer_from_dict(files)
        tokenizer = policy.reward_tokenizer or policy.tokenizer
        policy.reward_model = _described(policy, "reward_config", "score", tokenizer)
    if described:
        _build_described_reference(policy, config)
    elif policy.wants_reference and hp[policy.reference_argument] is not None:
        policy.reference = frozen(_read_reference(policy, hp[policy.reference_argument]))
    elif policy.wants_reference and hp.lora is None:
        policy.reference = frozen(copy.deepcopy(policy.model))
    elif policy.wants_reference and not next(policy.model.parameters()).is_meta:
        check_switched_off(policy.model, hp.lora)
    if hp.get("sync_ref_model") and policy.reference is not None:
        shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (policy.model, policy.reference)]
        if shapes[0] != shapes[1]:
            raise UsageError(
                f"sync_ref_model=true mixes weights, but ref_model_name_or_path="
                f"{hp.ref_model_name_or_path!r} has others than the policy; give a reference of the same "
                "architecture"
            )


def frozen(model: Any) -> Any:
    """Freezes a model and sets it to evaluation mode; returns it."""
    return model.requires_grad_(False).eval()


def _build_described_reference(policy: PolicyWithReference, config: Any) -> None:
    hp, source = policy.hparams, frozen_source(policy, "reference.")
    if source is not None and hp[policy.reference_argument] is not None:
        policy.reference = frozen(_read_reference(policy, source))
    elif source is not None:
        policy.reference = frozen(make_model(config, source, policy.model_head, hp.torch_dtype, hp.attn_implementation))
    else:
        policy.reference = _described(policy, "reference_config", policy.model_head, policy.tokenizer)
        if policy.wants_reference and policy.reference is None and hp.lora is None:
            as_it_was = "reference_free=true" if "reference_free" in hp else "beta=0"
            raise UsageError(
                f"beta={hp.beta} needs a reference, which the checkpoint's run did not have; give "
                f"{as_it_was}, or begin a new run from an export of it, whose weights are then the "
                "reference"
            )


def _described(policy: PolicyWithReference, which: str, head: str, tokenizer: Any) -> Any:
    """A frozen model whose weights the checkpoint brings, or None."""
    hp = policy.hparams
    if hp.description[which] is None:
        return None
    config = make_config(None, hp.description[which], tokenizer, policy.dropout)
    return frozen(make_model(config, None, head, hp.torch_dtype, hp.attn_implementation))


def _read_reward_model(policy: PolicyWithReference, path: str) -> Any:

    hp = policy.hparams
    try:
        found = load_reward_model(path, None, hp.torch_dtype, hp.attn_implementation)
    except UsageError as error:
        raise UsageError(f"reward_model_name_or_path={path!r} can't judge: {error}") from error
    in_same_form = reads_in_the_same_form(found.tokenizer, policy.tokenizer)
    policy.reward_tokenizer = None if in_same_form else found.tokenizer
    policy.reward_offset.fill_(found.offset)
    for parameter in found.model.parameters():  # buffers such as rotary frequencies keep their dtype
        parameter.data = parameter.data.to(policy.model.dtype)
    return found.model


def _read_reference(policy: PolicyWithReference, path: str) -> Any:
    hp, argument = policy.hparams, policy.reference_argument
    try:
        if str(path).endswith(".ckpt"):
            model, tokenizer = _causal_model_of(path, hp)
        else:
            tokenizer = load_tokenizer(path)
            config = make_config(path, None, tokenizer, policy.dropout)
            model = make_model(config, path, policy.model_head, hp.torch_dtype, hp.attn_implementation)
    except UsageError as error:
        raise UsageError(f"{argument}={path!r} is no reference: {error}") from error
    check_same_tokens(f"{argument}={path!r}", tokenizer, policy.tokenizer)
    return model


def _causal_model_of(path: str, hp: Any) -> tuple[Any, Any]:
    """The model that a checkpoint's run trained, and its tokenizer."""
    saved = read_checkpoint(path, None)
    settings = settings_of(saved)
    described = settings.get("description")
    if described is None or settings.get("lora") is not None or saved.get("algorithm") == "RewardModel":
        raise UsageError("the checkpoint holds no whole language model; give the directory that `rl export` writes")
    tokenizer = tokenizer_from_dict(described["tokenizer"])
    config = make_config(None, described["config"], tokenizer, False)
    head = "images" if "processor" in described else "causal"
    model = make_model(config, None, head, hp.torch_dtype, hp.attn_implementation)
    weights = {name.removeprefix("model."): weight for name, weight in saved["state_dict"].items()}
    own = model.state_dict()
    model.load_state_dict({name: weights[name] for name in own})
    return model, tokenizer


def require_same_reference(policy: PolicyWithReference, checkpoint: dict[str, Any]) -> None:
    """Refuses a checkpoint of a run that had a reference where this one has none, and the reverse."""
    description = settings_of(checkpoint).get("description") or {}
    had_reference = description.get("reference_config") is not None
    if "reference_config" in description and had_reference != (policy.reference is not None):
        names = [name for name in ("beta", "reference_free", "ref_model_name_or_path") if name in policy.hparams]
        settings = ", ".join(f"{name}={policy.hparams[name]!r}" for name in names)
        raise UsageError(
            f"{settings} give the run {'no' if had_reference else 'a'} reference of its own, and the "
            f"checkpoint's had {'one' if had_reference else 'none'}; resume with the settings that it "
            "had, or begin a new run from an export"
        )


# ---------------------------------------------------------------- passes over a generation


def scores_of_texts(policy: PolicyWithReference, tokens: Tensor, prompt_length: Tensor, length: Tensor) -> Tensor:
    """The reward model's score of whole texts minus its offset, [b]."""
    require_room("reward model", policy.reward_model, tokens)
    return sequence_scores(policy.reward_model, tokens, prompt_length + length) - policy.reward_offset


def reference_log_probs_of(
    policy: PolicyWithReference,
    tokens: Tensor,
    prompt_length: Tensor,
    length: Tensor,
    filtered: Filter | None = None,
    images: RowImages | None = None,
) -> Tensor:
    """Returns log π_ref of the completions' tokens, [b, L]."""
    with policy.reference_model() as reference:
        require_room("reference", reference, tokens)
        text = (tokens, prompt_length, length)
        return completion_log_probs(reference, *text, policy.temperature, filtered=filtered, images=images)[0]


def require_room(name: str, model: Any, tokens: Tensor) -> None:
    """Refuses texts that are longer than the context of the reference or reward model."""
    longest = max_length(model.config)
    if tokens.shape[1] > longest:
        raise UsageError(
            f"a prompt and its completion have {tokens.shape[1]} tokens, the {name} takes {longest}; "
            "lower max_completion_length"
        )
