"""What algorithms with experience of their own share: frozen models beside the policy, and passes over a generation."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.base import LanguagePolicy, plain_config
from rl_modules.language.critics import check_same_tokens, frozen
from rl_modules.language.models import make_config, make_model, max_length
from rl_modules.language.reward_model import load_reward_model
from rl_modules.language.scoring import sequence_scores
from rl_modules.language.sharding import shard
from rl_modules.language.tokenizer import load_tokenizer

Rollout = dict[str, Any]


class JudgedPolicy(LanguagePolicy):
    """A policy beside a reference to stay near and a reward model, either of which may be missing.

    Both are in a checkpoint, which therefore loads and goes on without the directories that they came from.
    """

    #: Mean score of demonstrations, which rewards are measured from.
    reward_offset: Tensor
    #: Rows per forward pass without gradient.
    forward_rows: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference: Any = None
        self.reward_model: Any = None

    @property
    def wants_reference(self) -> bool:
        """Whether anything asks for the reference's log-probabilities."""
        return True

    # ---------------------------------------------------------------- models

    def describe(self, config: Any) -> dict[str, Any]:
        judges = {"reward_config": self.reward_model, "reference_config": self.reference}
        described = {name: None if model is None else plain_config(model.config) for name, model in judges.items()}
        return {**super().describe(config), **described}

    def shard(self, mesh: Any) -> None:
        super().shard(mesh)
        for judge in (self.reference, self.reward_model):
            if judge is not None:
                shard(judge, mesh)

    def build_model(self, config: Any, source: str | None) -> None:
        """Policy, reference and reward model."""
        super().build_model(config, source)
        hp: Any = self.hparams
        self.register_buffer("reward_offset", torch.zeros(()))
        if hp.description is not None:
            # Their weights are in the checkpoint.
            self.reward_model = self._described("reward_config", "score")
            self.reference = self._described("reference_config", "causal")
            return
        if hp.reward_model_name_or_path is not None:
            self.reward_model = frozen(self._read_reward_model(hp.reward_model_name_or_path))
        if self.wants_reference and hp.ref_model_name_or_path is not None:
            self.reference = frozen(self._read_reference(hp.ref_model_name_or_path))
        elif self.wants_reference and hp.lora is None:
            self.reference = frozen(copy.deepcopy(self.model))

    def train(self, mode: bool = True) -> "JudgedPolicy":
        super().train(mode)
        for judge in (self.reference, self.reward_model):
            if judge is not None:
                judge.eval()
        return self

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.train()

    @contextmanager
    def reference_model(self) -> Iterator[Any]:
        """π_ref: a model of its own, or the policy without its adapters."""
        if self.reference is not None:
            yield self.reference
        else:
            with self.model.disable_adapter():
                yield self.model

    # ---------------------------------------------------------------- passes over a generation

    def scores(self, tokens: Tensor, prompt_length: Tensor, length: Tensor) -> Tensor:
        """The reward model's score of whole texts, [b]."""
        require_room("reward model", self.reward_model, tokens)
        return sequence_scores(self.reward_model, tokens, prompt_length + length) - self.reward_offset

    def in_parts(self, rollout: Rollout, compute: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run a forward pass over a generation in parts of rows of similar length.

        Args:
            rollout: tokens, prompt_length, length.
            compute: from the tokens, prompt lengths and lengths of b rows to tensors [b] or [b, L].

        Returns:
            The same tensors for all rows; what is narrower than the longest completion is filled with 0.
        """
        total = rollout["prompt_length"] + rollout["length"]
        results: dict[str, Tensor] = {}
        for rows in total.argsort(stable=True).split(self.forward_rows):
            tokens = rollout["tokens"][rows, : int(total[rows].max())]
            for name, value in compute(tokens, rollout["prompt_length"][rows], rollout["length"][rows]).items():
                if name not in results:
                    width = (int(rollout["length"].max()),) * (value.ndim - 1)
                    results[name] = value.new_zeros((len(total), *width))
                if value.ndim == 1:
                    results[name][rows] = value
                else:
                    results[name][rows, : value.shape[1]] = value
        return results

    # ---------------------------------------------------------------- helpers

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self._trainer is not None else 1

    def gathered(self, x: Tensor) -> Tensor:
        """The rows of all ranks, [ranks · b, …]."""
        if self._world_size == 1:
            return x
        rows: Any = self.all_gather(x)
        return rows.flatten(0, 1)

    def _read_reward_model(self, path: str) -> Any:
        try:
            hp: Any = self.hparams
            found = load_reward_model(path, self.tokenizer, hp.torch_dtype, hp.attn_implementation)
        except UsageError as error:
            raise UsageError(f"reward_model_name_or_path={path!r} can't judge: {error}") from error
        self.reward_offset.fill_(found.offset)
        return found.model.to(self.model.dtype)

    def _read_reference(self, path: str) -> Any:
        hp: Any = self.hparams
        try:
            tokenizer = load_tokenizer(path)
            config = make_config(path, None, tokenizer, self.dropout)
            model = make_model(config, path, "causal", hp.torch_dtype, hp.attn_implementation)
        except UsageError as error:
            raise UsageError(f"ref_model_name_or_path={path!r} is no reference: {error}") from error
        check_same_tokens(f"ref_model_name_or_path={path!r}", tokenizer, self.tokenizer)
        return model

    def _described(self, which: str, head: str) -> Any:
        """A frozen model whose weights the checkpoint brings, or None."""
        hp: Any = self.hparams
        if hp.description[which] is None:
            return None
        config = make_config(None, hp.description[which], self.tokenizer, self.dropout)
        return frozen(make_model(config, None, head, hp.torch_dtype, hp.attn_implementation))


def require_room(name: str, model: Any, tokens: Tensor) -> None:
    """Refuse texts that are longer than a model beside the policy can take.

    Args:
        name: of the model, for the message.
        model: transformers model.
        tokens: [b, T].

    Raises:
        UsageError: T is too long.
    """
    longest = max_length(model.config)
    if tokens.shape[1] > longest:
        raise UsageError(f"a prompt and its completion have {tokens.shape[1]} tokens, the {name} takes {longest}; "
                         "lower max_completion_length")  # fmt: skip
