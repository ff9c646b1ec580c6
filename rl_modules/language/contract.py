"""What a language algorithm and its data expect of each other: Protocols, and the fields of batches.

A module is a :class:`TextLearner` to its datamodule; modules that write completions or compare pairs implement further
Protocols. Neither imports the other: both import this file, and mypy checks both sides. A module reads the datamodule's
``seed``, from which new weights are drawn, and ``rewards``, whose number decides which metric selects the best
checkpoint.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from torch import Tensor

from rl_modules.language.sampling.protocol import Completions, RowListener, Sampler, SamplingSettings

if TYPE_CHECKING:
    from rl_modules.language.vision import ImageReader, RowImages


class DemonstrationBatch(TypedDict, total=False):
    """A micro-batch of demonstrations, from ``InstructionDataModule``."""

    tokens: Tensor
    """Texts with their prompts, [rows, width] int64, padded on the right; several to a row where packed."""
    counted: Tensor
    """Places in ``tokens.flatten()`` of the tokens that the loss counts, [m] int64."""
    filled: Tensor
    """Tokens of each row before its padding, [rows] int64."""
    position_ids: Tensor
    """Places in the texts, [rows, width]; where packed only: they begin again at 0 where a text begins."""
    boundaries: Tensor
    """Places in ``tokens.flatten()`` where texts and padding begin, and its length, [n + 1] int32; packed only."""
    step_tokens: float
    """Counted tokens of the whole optimizer step: the mean over ranks, as gradients are averaged."""
    n_micro: int
    """Micro-batches of the step, by which Lightning divides the loss."""
    num_tokens: int
    """Tokens of the step over all ranks, in its last micro-batch; 0 in the others. Absent in evaluations."""
    images: "RowImages"
    """Of rows with images."""
    seed: int
    """Of dropout."""


class PairBatch(TypedDict, total=False):
    """A micro-batch of b pairs, from ``PreferenceDataModule``; for unpaired learners b judged answers, each with a
    mismatched one in the place of the rejected.
    """

    tokens: Tensor
    """[rows, width] int64, 0 in padding. A row is a prompt and an answer, the chosen ones first, [2b, width]; packed:
    prompt, chosen and rejected answer one after the other, several pairs to a row."""
    lengths: Tensor
    """Tokens of prompt, chosen and rejected answer, [b, 3] int64."""
    last: Tensor
    """Places in ``tokens.flatten()`` of each sequence's last token, [2b] int64, the chosen ones first."""
    position_ids: Tensor
    """Places in the texts, [rows, width]; where packed only, as the next two."""
    segment: Tensor
    """The piece that a token belongs to, [rows, width] int64; -1: none."""
    prompt_segment: Tensor
    """The piece that it reads besides its own, [rows, width] int64."""
    images: "RowImages"
    """Of records with images: those of the prompts, once for the chosen and once for the rejected answers."""
    index: Tensor
    """Number of each pair in its source, [b] int64; absent where it is streamed."""
    margin: Tensor
    """By how much the chosen answer is better, [b] float32; 0 where the record does not say."""
    probability: Tensor
    """That the chosen answer wins, [b] float32; NaN: not known."""
    label: Tensor
    """Whether a judged answer is good, [b] bool; of unpaired records only."""
    step_pairs: int
    """This rank's pairs in the whole optimizer step."""
    step_chosen_tokens: float
    """Tokens of the step's chosen answers: the mean over ranks."""
    n_micro: int
    num_tokens: int
    texts: list[dict[str, Any]]
    """The records themselves, for ``predict`` only."""


class JudgedCompletions(TypedDict, total=False):
    """Completions of P prompts, K each, with the results of reward functions; row p · K + k is prompt p's k-th.

    Evaluations and ``predict`` receive it, and :class:`Generation` extends it.
    """

    tokens: Tensor
    """Prompts with their completions, [P·K, T] int64, padded on the right."""
    prompt_length: Tensor
    """[P·K] int64."""
    length: Tensor
    """Tokens of each completion, EOS included, [P·K] int64."""
    finished: Tensor
    """Whether it ended by EOS, [P·K] bool."""
    prompts: list[str]
    texts: list[str]
    asked: list[Any]
    """The prompts as texts, or as messages for the chat template."""
    rewards: Tensor
    """[P·K, F] float32; NaN: the function does not apply."""
    reward_names: list[str]
    token_rewards: Tensor | None
    """[P·K, L, F] float32, where a function gives a number per token."""
    correct: Tensor | None
    """[P, K] bool; None: no reward function says so."""
    answers: list[list[str | None]]
    """The final answers, P lists of K."""
    extra: list[dict[str, Any]]
    """What functions logged of each by ``log_extra``."""
    logged: dict[str, tuple[float, int]]
    """Mean and weight of what they logged by ``log_metric``."""


class Generation(JudgedCompletions, total=False):
    """The argument of ``rewards`` and ``prepare``: a generation of B = P·K completions to learn from."""

    log_prob: Tensor
    """log π of each token under the sampler, [B, L] float32; 0 in padding."""
    written: Tensor
    """Of dialogues only, as the next two: whether the model wrote a token, [B, L] bool."""
    turn: Tensor
    """The turn that a token belongs to, [B, L] int64."""
    turn_reward: Tensor
    """The reward of each turn on its last written token, [B, L] float32."""
    kept: Tensor
    """The tokens that filters kept, [B, N] int32, where sampling was truncated and the sampler returned them."""
    kept_count: Tensor
    """Their number for each token, [B, L] int32; see :func:`rl_modules.language.sampling.support.packed`."""
    version: Tensor | None
    """The optimizer step of the weights that wrote a row, [B] int64; None: the present ones."""
    reward: Tensor
    """What the module's ``rewards`` returned, [B] float32, of some algorithms [B, L]; NaN: nothing could judge."""
    num_generations: int
    """K."""
    generation: int
    """Number of the generation in the run, from 0."""
    records: list[dict[str, Any]]
    """The record of each completion's prompt."""
    images: "list[RowImages]"
    """Of records with images: those of each completion's prompt."""
    failed: dict[str, int]
    """Completions of this rank that each reward function failed on, by its name."""
    missing: float
    """Share of groups without signal after ``dynamic_sampling``."""


class CompletionBatch(TypedDict, total=False):
    """A micro-batch of b completions: rows of what ``prepare`` returned, and these fields of ``PromptDataModule``.

    ``prepare`` returns at least ``tokens`` [B, T], ``prompt_length`` and ``length`` [B], and ``mask`` [B, L]; ``keep``
    [B] bool leaves rows out that teach nothing.
    """

    tokens: Tensor
    prompt_length: Tensor
    length: Tensor
    mask: Tensor
    """Whether a completion's token counts, [b, L] bool."""
    log_prob: Tensor
    """log π_old, [b, L] float32."""
    advantage: Tensor
    """[b] or [b, L] float32."""
    on_policy: bool
    """Whether the stored log-probabilities are those of the present weights."""
    step_rows: int
    """Completions of the whole optimizer step on this rank, those left out included."""
    step_tokens: Tensor
    """Its tokens that count: the mean over ranks."""
    micro_rows: int
    """Completions of the micro-batch, those left out included."""
    micro_tokens: Tensor
    """Its tokens that count: the mean over ranks."""
    n_micro: int
    shortest_prompt: int
    """Tokens of the shortest prompt in the micro-batch."""
    images: "RowImages"
    """Of records with images: those of the rows' prompts."""


class TextLearner(Protocol):
    """The interface of a module that every language datamodule uses."""

    @property
    def tokenizer(self) -> Any:
        """A tokenizer of transformers."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and completion together."""

    @property
    def image_reader(self) -> "ImageReader":
        """The processor of images, asked for where records have some."""


class PackingLearner(TextLearner, Protocol):
    """The interface of a module whose datamodule packs several texts into a row."""

    @property
    def can_pack(self) -> bool:
        """Whether the model keeps the texts of a row apart."""


class PairLearner(PackingLearner, Protocol):
    """The interface of a module that a datamodule of preferences uses.

    Four members are optional. ``hidden_size``: width of the layers, from which the datamodule decides whether packing
    saves work. ``unpaired``: whether the module learns from answers judged one by one instead of pairs
    (by default false). ``scores_demonstrations``: whether it measures its rewards from those of demonstrations, which
    are then loaded (by default true). The last is the method of :class:`PredictsAnswers`.
    """


@runtime_checkable
class PredictsAnswers(Protocol):
    """Additional method of a preference learner in which a prompt must predict the answer's first token."""

    def check_pairs(self, pairs: Any, name: str) -> None:
        """Refuses pairs that it can't learn from."""


class WritingLearner(TextLearner, Protocol):
    """The interface of a module that generates completions, as in every evaluation on prompts."""

    def act(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        num_generations: int = 1,
        on_ended: RowListener | None = None,
        partner: Any = None,
        **sampling: Any,
    ) -> Completions:
        """Generates completions of prompts with the current weights, one seed each."""

    def settings(self) -> SamplingSettings:
        """Returns the sampling settings."""


class CompletionLearner(WritingLearner, Protocol):
    """The interface of a module that trains on generated completions.

    Four attributes are optional: ``takes_token_rewards`` (rewards may be [B, L]), ``rescores`` (``prepare`` computes
    log-probabilities again), ``reads_demonstrations`` (the loss has a term of demonstrations) and ``correction`` (the
    mode of the correction for older weights).
    """

    training: bool
    #: Whether completions are written ahead of training, with older weights; the datamodule sets it.
    samples_ahead: bool

    @property
    def hparams(self) -> Any:
        """The module's arguments, ``sampler`` among them."""

    @property
    def sampler(self) -> Sampler:
        """The engine that generates completions."""

    def update_sampler(self) -> None:
        """Sends the current weights to the sampler."""

    def eval(self) -> Any:
        """Evaluation mode, as of :class:`torch.nn.Module`."""

    def train(self, mode: bool = True) -> Any:
        """Training mode, or with false evaluation mode."""

    def rewards(self, rollout: Any) -> Tensor:
        """Returns the reward of each completion of a :class:`Generation`, [B]."""

    def prepare(self, rollout: Any) -> dict[str, Tensor]:
        """Computes the inputs of the loss from a :class:`Generation`, [B, …] each; see :class:`CompletionBatch`."""

    def record(self, weight: Any = 1.0, /, **metrics: Any) -> None:
        """Adds to the curves."""


if TYPE_CHECKING:  # mypy compares the modules with what they must be
    from rl_modules.language.grpo import GRPO
    from rl_modules.language.preference_policy import PreferencePolicy
    from rl_modules.language.reward_model import RewardModel
    from rl_modules.language.rlhf_ppo import RLHFPPO
    from rl_modules.language.sft import SFT

    def _learn_from_completions(grpo: GRPO, ppo: RLHFPPO) -> tuple[CompletionLearner, CompletionLearner]:
        return grpo, ppo

    def _learn_from_pairs(policy: PreferencePolicy, judge: RewardModel) -> tuple[PairLearner, PairLearner]:
        return policy, judge

    def _write(policy: PreferencePolicy, sft: SFT) -> tuple[WritingLearner, WritingLearner]:
        return policy, sft

    def _packs(sft: SFT) -> PackingLearner:
        return sft
