"""Base class for algorithms that sample completions and keep a frozen reference and reward model."""

import math
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError, real_number
from rl_modules.core.settings import made, setting
from rl_modules.core.state import persistent, transient
from rl_modules.language.architecture import plain_config
from rl_modules.language.judges import build_judges, require_same_reference, scores_of_texts
from rl_modules.language.policy import LanguagePolicy, with_logged_columns
from rl_modules.language.rereading import scores_of
from rl_modules.language.sampling.correction import warn_of_lacking_support
from rl_modules.language.sampling.support import Filter
from rl_modules.language.tokenizer import tokenizer_to_dict

if TYPE_CHECKING:
    from rl_modules.language.sampling.support import Filter

Rollout = dict[str, Any]


def check_reward_weights(name: str, weights: Any) -> Any:
    """Refuses weights that are not finite: a weight of NaN would make all rewards NaN, which means no reward."""
    if weights is None:
        return None
    is_list = isinstance(weights, list | tuple)
    if not is_list or not all(math.isfinite(real_number(name, weight)) for weight in weights):
        raise UsageError(f"{name}={weights!r} must be a list of finite numbers, one per reward")
    return weights


def require_some(rewards: Sized) -> None:
    """Refuses completions that nothing rewards."""
    if not len(rewards):
        raise UsageError("no rewards for the completions; give data.reward_funcs or model.reward_model_name_or_path")


def without_reference(module: "PolicyWithReference") -> str | None:
    """The reason why settings of the reference are idle."""
    return None if module.wants_reference else "where no reference is read, as with beta=0 or reference_free=true"


def without_sync(module: "PolicyWithReference") -> str | None:
    """The reason why settings of the reference's updates are idle."""
    return None if module.sync_ref_model else "while sync_ref_model is false; set that to true"


class PolicyWithReference(LanguagePolicy):
    """A policy with a reference policy and a reward model, either of which may be missing.

    A checkpoint has the path and a digest of both; with ``save_frozen_weights`` it holds their weights, and then loads
    and resumes without the directories that they came from.
    """

    #: Mean score of demonstrations, which is subtracted from rewards.
    reward_offset: Tensor = made()
    #: The argument that names the reference's directory.
    reference_argument = "ref_model_name_or_path"
    #: Rows per forward pass without gradient.
    reward_weights: list[float] | None = setting(
        default=None, says="one per reward function, the reward model's last; None: all 1", check=check_reward_weights
    )
    reward_model_name_or_path: str | None = setting(
        default=None,
        says="exported directory or checkpoint of a RewardModel, whose score is an additional reward; with another "
        "tokenizer, the texts are tokenized again",
    )
    ref_model_name_or_path: str | None = setting(
        default=None,
        says="the reference; None: the policy at its start (under LoRA: the adapters switched off)",
        idle=without_reference,
    )
    sync_ref_model: bool = setting(
        default=False, says="update the reference towards the policy (TR-DPO, arXiv:2404.09656)", idle=without_reference
    )
    ref_model_mixup_alpha: float = setting(
        default=0.6, says="α of π_ref ← α π + (1 - α) π_ref, on the weights", above=0, most=1, idle=without_sync
    )
    ref_model_sync_steps: int = setting(
        default=512, says="optimizer steps between two such updates", least=1, idle=without_sync
    )
    forward_rows: int = setting(
        alias="local_rollout_forward_batch_size",
        default=64,
        says="rows per forward pass without gradient; changes memory, not results",
        least=1,
    )
    completions_steps: int = setting(
        default=100, says="optimizer steps between two tables of completions in the loggers; 0: none", least=0
    )
    # The step of the last update of the reference.
    _synced_at: int = persistent(0)
    # The step from which on the next table of completions is due.
    _table_due_at: int = persistent(0)
    #: Whether the sampler has not returned which tokens its filters kept.
    lacks_support: bool = transient(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_ref_model and self.lora is not None and self.ref_model_name_or_path is None:
            raise UsageError(
                "sync_ref_model=true can't move the reference under lora, which is the model without its "
                "adapters; set one of them only"
            )
        self.reference: Any = None
        self.reward_model: Any = None
        #: The reward model's tokenizer if it encodes texts differently from the policy's, so that they are encoded
        #: again.
        self.reward_tokenizer: Any = None

    #: The monitored metric if no reward function decides which completions are right.
    score_metric = "eval/rewards/reward_model"

    @property
    def best_metric(self) -> tuple[str, str]:  # type: ignore[override]
        """Accuracy on held-out prompts or, without a reward function that decides it, the reward model's score."""
        datamodule: Any = getattr(self._trainer, "datamodule", None)
        has_rewards = datamodule is None or len(getattr(datamodule, "rewards", ())) > 0
        return ("eval/pass@1" if has_rewards else self.score_metric, "max")

    @property
    def wants_reference(self) -> bool:
        """Whether the loss or the rewards need the reference's log-probabilities."""
        return True

    @property
    def reference_is_frozen(self) -> bool:
        """Whether the reference keeps its initial weights; if not, checkpoints must hold its weights."""
        return not self.sync_ref_model

    # ---------------------------------------------------------------- models

    def describe(self, config: Any) -> dict[str, Any]:
        judges = {"reward_config": self.reward_model, "reference_config": self.reference}
        described = {name: None if model is None else plain_config(model.config) for name, model in judges.items()}
        other = None if self.reward_tokenizer is None else tokenizer_to_dict(self.reward_tokenizer)
        return {**super().describe(config), **described, "reward_tokenizer": other}

    def build_model(self, config: Any, source: Any) -> None:
        """Policy, reference and reward model."""
        super().build_model(config, source)
        self.register_buffer("reward_offset", torch.zeros((), dtype=torch.float32))
        if (
            self.hparams["description"] is not None
            or self.wants_reference
            or self.reward_model_name_or_path is not None
        ):
            build_judges(self, config)

    def frozen_arguments(self) -> dict[str, str]:
        arguments = super().frozen_arguments()
        if self.reward_model is not None:
            arguments["reward_model."] = "reward_model_name_or_path"
        if self.reference is not None and self.reference_is_frozen:
            own = self.reference_argument
            name = own if self.hparams[own] is not None else "model_name_or_path"
            if self.hparams[name] is not None:  # else a copy of new weights
                arguments["reference."] = name
        return arguments

    def train(self, mode: bool = True) -> "PolicyWithReference":
        super().train(mode)
        for judge in (self.reference, self.reward_model):
            if judge is not None:
                judge.eval()
        return self

    def begin_fit(self) -> None:
        super().begin_fit()
        self.train()

    @contextmanager
    def reference_model(self) -> Iterator[Any]:
        """Yields π_ref: a separate model, or the policy without its adapters."""
        if self.reference is not None:
            yield self.reference
        else:
            with self.model.disable_adapter():
                yield self.model

    def begin_batch(self) -> None:
        super().begin_batch()
        if self.sync_ref_model and self.wants_reference:
            self.sync_reference()

    @torch.no_grad()
    def sync_reference(self) -> bool:
        """Updates the reference, π_ref ← α π + (1 - α) π_ref, if it is due; returns whether it did."""
        step = self.trainer.global_step
        if not self.sync_ref_model or step == self._synced_at or step % self.ref_model_sync_steps:
            return False
        self._synced_at = step
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            theirs.lerp_(ours.to(theirs), self.ref_model_mixup_alpha)
        return True

    # ---------------------------------------------------------------- rewards

    def require_rewards(self) -> None:
        """Refuses a run without any reward, which its first generation would refuse.

        Raises:
            UsageError: neither the datamodule nor this module has a source of rewards.
        """
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.hparams["reward_model_name_or_path"] is None and hasattr(data, "rewards"):
            require_some(data.rewards)

    def combined_rewards(self, rollout: Rollout) -> Tensor:
        """Returns the weighted sum of all rewards of each completion, [B]; NaN if none applies.

        A reward model's score joins the rollout's ``rewards`` as the column ``reward_model``.

        Args:
            rollout: see :class:`~rl_modules.language.contract.Generation`.

        Raises:
            UsageError: there are no rewards, or the number of weights differs from theirs.
        """
        if self.reward_model is not None:
            score = self.reward_model_scores(rollout)
            rollout["rewards"] = torch.cat([rollout["rewards"].to(score), score.unsqueeze(1)], 1)
            rollout["reward_names"] = [*rollout["reward_names"], "reward_model"]
        require_some(rollout["reward_names"])
        return F.combine_rewards(rollout["rewards"], self.weights_of(rollout["reward_names"]))

    def weights_of(self, reward_names: Sequence[str]) -> list[float] | None:
        weights = self.reward_weights
        if weights is None:
            return None
        judged = [] if self.reward_model is None or "reward_model" in reward_names else ["reward_model"]
        if len(weights) != len(names := [*reward_names, *judged]):
            raise UsageError(
                f"reward_weights={weights} are {len(weights)} numbers for {len(names)} rewards, "
                f"{', '.join(names)}; give one for each"
            )
        return weights[: len(reward_names)]

    def log_completions(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs evaluation metrics, with the reward model's score of held-out completions if there is one."""
        super().log_completions(batch, batch_idx)
        if self.reward_model is not None:
            self.log_evaluation({self.score_metric: self.reward_model_scores(batch).mean()}, len(batch["answers"]))

    # ---------------------------------------------------------------- passes over a generation

    def scores(self, tokens: Tensor, prompt_length: Tensor, length: Tensor) -> Tensor:
        """Returns the reward model's score of whole texts minus its offset, [b]."""
        return scores_of_texts(self, tokens, prompt_length, length)

    def reward_model_scores(self, rollout: Rollout) -> Tensor:
        """Returns the reward model's score of each completion minus its offset, [B]."""
        return scores_of(self, rollout)

    def filter_of(self, fields: dict[str, Any]) -> "Filter | None":
        """Returns how sampling changed the distribution of completions, for log-probabilities of the same."""
        if "kept" not in fields:
            if self.truncations and not self.lacks_support:
                self.lacks_support = True
                warn_of_lacking_support(self)
            if self.repetition_penalty == 1:
                return None

        return Filter(self.repetition_penalty, fields.get("kept"), fields.get("kept_count"))

    def write_completions(self, rollout: Rollout, **columns: Tensor) -> None:
        """Writes a table of the first completions with their rewards and further columns, [B] each."""
        if not self.trainer.is_global_zero:
            return
        rewards = dict(zip(rollout["reward_names"], rollout["rewards"].unbind(-1), strict=True)) | columns
        table = {"prompt": rollout["prompts"], "completion": rollout["texts"]}
        table |= {name: column.tolist() for name, column in rewards.items()}
        self.write_table("completions", with_logged_columns(table, rollout))

    # ---------------------------------------------------------------- the run

    def _require_own(self, checkpoint: dict[str, Any]) -> None:
        super()._require_own(checkpoint)

        require_same_reference(self, checkpoint)

    # ---------------------------------------------------------------- helpers

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self._trainer is not None else 1

    def most_over_ranks(self, number: int) -> int:
        """Returns the largest of the ranks' numbers; the collective runs on the strategy's device."""
        if self._world_size == 1:
            return number
        value = torch.tensor(number, dtype=torch.int64, device=self.trainer.strategy.root_device)
        return int(self.trainer.strategy.reduce(value, reduce_op="max"))

    def gathered(self, x: Tensor) -> Tensor:
        """Returns the rows of all ranks, [ranks · b, …]."""
        if self._world_size == 1:
            return x
        rows: Any = self.all_gather(x)
        return rows.flatten(0, 1)
