"""Reward models: a scalar head on a transformer, fitted to preferences; and loading of trained ones."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.core.checkpoint_file import read_checkpoint
from rl_modules.core.curves import write_evaluation
from rl_modules.core.settings import changed, setting
from rl_modules.core.state import persistent
from rl_modules.language.architecture import make_config, text_config
from rl_modules.language.base import LanguageModule
from rl_modules.language.critics import sequence_scores
from rl_modules.language.export import export_model
from rl_modules.language.fast.packing import can_pack_scores
from rl_modules.language.lora import merged
from rl_modules.language.models import make_model
from rl_modules.language.pairs import pair_scores
from rl_modules.language.preference_metrics import PreferenceMetrics, reliability_diagram
from rl_modules.language.rereading import right_padded
from rl_modules.language.text.chat_template import encoder_of
from rl_modules.language.tokenizer import check_same_tokens, load_tokenizer


class RewardModel(LanguageModule):
    """Reward model: learns scores of texts from comparisons (Ouyang et al. 2022, arXiv:2203.02155, section 3.5).

    -log σ(r_c - r_r - margin) + center_rewards_coefficient · (r_c + r_r)², mean over the pairs of an optimizer step

    The score is read at the last token of prompt, answer and EOS, found by length. Preferences do not determine the
    zero of scores: each checkpoint and export contains the mean score of demonstrations, ``reward_offset``, to
    subtract.
    """

    learning_curve = "train/accuracy"

    learns_from = "preferences"
    head = "score"
    #: The datamodule loads demonstrations, whose mean reward :meth:`normalize` sets to 0.
    scores_demonstrations = True

    model_name_or_path = changed(
        says="directory or hub name: of a causal model, such as an exported SFT model, which gets a new head, or of a "
        "reward model to train further; None: a randomly initialised model"
    )
    center_rewards_coefficient: float = setting(
        default=0.0, says="c, weight of the term that keeps scores near 0 in training; TRL suggests 0.01", least=0
    )

    #: Mean raw score of demonstrations; until :meth:`normalize` measures it that of the model trained further.
    reward_offset: float = persistent(lambda m: float(getattr(getattr(m.model, "config", None), "reward_offset", 0.0)))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preference_metrics = PreferenceMetrics()

    def build_model(self, config: Any, source: Any) -> None:
        trained = source is not None and is_reward_model(config)
        self.model = make_model(
            config,
            source,
            "score",
            self.torch_dtype,
            self.attn_implementation,
            self.gradient_checkpointing,
            self.lora,
            self.quantization_config,
            None if trained else lambda model: initialize_head(model.score),
        )
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    # ---------------------------------------------------------------- training

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        chosen, rejected = self.pair_scores(batch)
        loss = self.loss(chosen, rejected, batch["margin"])
        with torch.no_grad():
            lead, rewards = chosen - rejected, torch.cat([chosen, rejected])
            self.record(
                len(lead),
                loss=loss,
                accuracy=(lead > 0).float().mean(),
                margin=lead.mean(),
                min_reward=rewards.min(),
                mean_reward=rewards.mean(),
                max_reward=rewards.max(),
            )
        self.num_tokens += batch["num_tokens"]
        # Lightning divides by the number of micro-batches: each counts by its share of the step's pairs.
        return loss * (len(lead) * batch["n_micro"] / batch["step_pairs"])

    @property
    def can_pack(self) -> bool:
        """Whether batches may pack several texts into a row."""
        return can_pack_scores(self.model)

    def pair_scores(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns raw scores of the chosen and the rejected answers from one forward pass, [b] each."""
        return pair_scores(self.model, batch)

    def loss(self, chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
        """Returns the loss, mean over the pairs.

        Args:
            chosen: r_c, [b].
            rejected: r_r, [b].
            margin: of the chosen answer, [b].
        """
        return F.bradley_terry_loss(chosen, rejected, margin, self.center_rewards_coefficient)

    # ---------------------------------------------------------------- evaluation

    def begin_evaluation(self) -> None:
        self.preference_metrics.reset()  # of an evaluation that was interrupted

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        chosen, rejected = self.pair_scores(batch)
        loss = self.loss(chosen, rejected, batch["margin"])
        self.preference_metrics.update(chosen, rejected, loss, batch["probability"])

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Returns normalised scores of both answers, [b] each, with their ``texts``."""
        chosen, rejected = (scores - self.reward_offset for scores in self.pair_scores(batch))
        return {"texts": batch["texts"], "chosen_reward": chosen, "rejected_reward": rejected}

    def finish_evaluation(self) -> None:
        scalars, bins = self.preference_metrics.compute()
        self.preference_metrics.reset()
        metrics = {f"eval/{name}": value.float() for name, value in scalars.items()}
        # The numbers are already those of all ranks.
        write_evaluation(self, metrics)
        for logger in self.trainer.loggers if self.is_fitting and self.trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                picture = reliability_diagram(bins, float(scalars["calibration_error"]))
                logger.experiment.add_image("eval/reliability", picture, self.place, dataformats="HWC")

    # ---------------------------------------------------------------- normalisation, export, checkpoints

    @torch.no_grad()
    def normalize(self, batches: Any) -> float:
        """Computes ``reward_offset``, the mean score of demonstrations, whose rewards then average 0.

        Args:
            batches: this rank's batches, with ``tokens`` [b, T] right-padded, ``length`` [b] and ``weight`` [b] (0:
                ignored).

        Returns:
            The offset, the same on all ranks.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2; Ouyang et al. 2022, section 3.5.
        """
        training = self.training
        self.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with self.trainer.precision_plugin.forward_context():
            for batch in batches:
                scores = sequence_scores(self.model, batch["tokens"].to(self.device), batch["length"].to(self.device))
                weight = batch["weight"].double()
                total += torch.stack([(scores.double().cpu() * weight).sum(), weight.sum()])
        self.train(training)
        if self.trainer.world_size > 1:
            # After a fit the module is on the CPU, the ranks' collectives still work on the strategy's device.
            total = self.trainer.strategy.reduce(total.to(self.trainer.strategy.root_device), reduce_op="sum").cpu()
        if total[1]:
            self.reward_offset = float(total[0] / total[1])
        return self.reward_offset

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        completions: Sequence[str],
        chat_template: bool | None = None,
    ) -> Tensor:
        """Returns normalised rewards of complete answers, [b] float32.

        Args:
            prompts: b texts or lists of chat messages.
            completions: b texts; the chat template, or an EOS token, ends them.
            chat_template: put prompts that are text into the tokenizer's chat template; None: where it has one, as
                ``PreferenceDataModule`` does by default. Its ``system_prompt`` and ``chat_template_kwargs`` are not
                known here: give the system prompt as the first message.

        Raises:
            UsageError: messages, and no chat template to put them in.
        """
        if self.model is None:
            self.configure_model()
        # Imported here, because the modules can be used without the datamodules.

        encoded, (answers,) = encoder_of(self.tokenizer, chat_template).answered(prompts, completions)
        ids = [[*prompt, *answer] for prompt, answer in zip(encoded, answers, strict=True)]
        tokens, length = (x.to(self.device) for x in right_padded(ids))
        training = self.training
        scores = sequence_scores(self.eval().model, tokens, length)
        self.train(training)
        return scores - self.reward_offset

    def export(self, folder: str | Path) -> Path:
        """Writes a directory that ``AutoModelForSequenceClassification`` and TRL load; LoRA adapters are merged. They
        return raw scores, because their heads have no bias; config.json contains ``reward_offset``, which
        :func:`load_reward_model` reads. Their heads find the last token by the pad token, so that a tokenizer that pads
        with its EOS token is written with another special token as its pad token.
        """
        self.model.config.reward_offset = self.reward_offset
        tokenizer = padding_apart(self.tokenizer)
        for config in (self.model.config, text_config(self.model.config)):
            config.pad_token_id = tokenizer.pad_token_id
        return export_model(self.model, tokenizer, folder)

    def end_training(self) -> None:
        # `score` and `export` read the offset; the last checkpoint may be older than the weights, or not exist.
        self._measure_offset()

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._measure_offset()
        super()._on_save_checkpoint(checkpoint)

    def _measure_offset(self) -> None:
        demonstrations = getattr(getattr(self._trainer, "datamodule", None), "demonstrations", None)
        if demonstrations is not None:
            self.normalize(demonstrations())


class FrozenReward(NamedTuple):
    """A trained reward model: the reward of a text is its score minus ``offset``."""

    #: Transformers model with a ``score`` head, without gradient, in evaluation mode, on the CPU.
    model: Any
    #: Mean raw score of demonstrations.
    offset: float
    tokenizer: PreTrainedTokenizerBase


def load_reward_model(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    torch_dtype: str = "float32",
    attn_implementation: str | None = None,
) -> FrozenReward:
    """Loads a trained reward model from a Lightning checkpoint, an exported directory or a hub name.

    ``sequence_scores(model, tokens, length) - offset`` are the rewards.

    Args:
        path: a ``.ckpt`` file of :class:`RewardModel`, or a directory or hub name for
            ``AutoModelForSequenceClassification``.
        tokenizer: the policy's, to compare with the reward model's; None: no comparison.
        torch_dtype: of the weights of a directory or hub name; a checkpoint's stay as they were trained.
        attn_implementation: sdpa, eager, flash_attention_2 …; None: the library's choice, or the checkpoint's own.

    Raises:
        UsageError: it can't be loaded, is not a reward model, or has another tokenizer than the policy.
    """
    path = str(path)
    if path.endswith(".ckpt"):
        module = _from_checkpoint(path, attn_implementation)
        found = FrozenReward(module.model, module.reward_offset, module.tokenizer)
        if hasattr(found.model, "merge_and_unload"):
            found = found._replace(model=merged(found.model))
    else:
        own = load_tokenizer(path)
        config = make_config(path, None, own, dropout=False)
        if not is_reward_model(config):
            kind = ", ".join(config.architectures or ["model without a named architecture"])
            raise UsageError(
                f"{path!r} holds a {kind}, which has no reward head; give what `rl export` wrote of a "
                "RewardModel, or its .ckpt file"
            )
        model = make_model(config, path, "score", torch_dtype, attn_implementation)
        found = FrozenReward(model, float(getattr(config, "reward_offset", 0.0)), own)
    if tokenizer is not None:
        check_same_tokens(f"reward model {path!r}", found.tokenizer, tokenizer)
    found.model.requires_grad_(False).eval()
    return found


def is_reward_model(config: Any) -> bool:
    """Returns whether a config is that of a trained model with one score per sequence."""
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        return False
    if config.num_labels != 1:
        raise UsageError(
            f"the model is a classifier with {config.num_labels} labels, where a reward model has 1; give "
            "a causal model, or a reward model"
        )
    return True


def padding_apart(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer, or a copy, whose pad token is not its EOS token, at which scores are read, where it can be."""
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return tokenizer
    taken = {tokenizer.bos_token, tokenizer.eos_token}
    marks = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    template = str(tokenizer.chat_template)
    free = [mark for mark in marks if mark not in taken and mark not in template]
    if not free:
        rank_zero_warn(
            f"the tokenizer pads with its EOS token {tokenizer.eos_token!r} and has no other special token: "
            "AutoModelForSequenceClassification and TRL read scores before the EOS token, not at it; set "
            "pad_token in tokenizer_config.json"
        )
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    # The token named for padding, else the one for unknown characters, else any that the template does not use.
    tokenizer.pad_token = min(free, key=lambda mark: ("pad" not in mark.lower(), mark != tokenizer.unk_token))
    return tokenizer


def initialize_head(head: nn.Linear) -> None:
    """Initialises a head's weights with standard deviation 1/√(d+1) (Ziegler et al. 2019, section 2.2)."""
    nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    if head.bias is not None:
        nn.init.zeros_(head.bias)


def _from_checkpoint(path: str, attn_implementation: str | None) -> RewardModel:
    algorithm = read_checkpoint(path, None, ("algorithm",))["algorithm"]
    if algorithm != RewardModel.__name__:
        kind = algorithm or "no language algorithm"
        raise UsageError(
            f"checkpoint {path!r} holds {kind}, where a RewardModel should be; export that of a subclass "
            "by `rl export` with --model, and give the directory"
        )
    given: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    return RewardModel.load_from_checkpoint(path, map_location="cpu", weights_only=True, **given)
