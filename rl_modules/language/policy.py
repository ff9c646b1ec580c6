"""Base class of language algorithms that generate completions: sampling, and evaluation on held-out prompts."""

import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import setting
from rl_modules.language.base import LanguageModule
from rl_modules.language.models import eos_token_ids
from rl_modules.language.sampling import Completions, Sampler, SamplingSettings, check_options, make_sampler
from rl_modules.language.sampling.check import CACHES
from rl_modules.language.sampling.protocol import RowListener
from rl_modules.language.sampling.stop_strings import StopStrings
from rl_modules.language.sampling.turns import converse
from rl_modules.language.sampling.vllm import require_vllm
from rl_modules.language.scoring import prepare_head, tokens_written
from rl_modules.language.throughput import Stopwatch
from rl_modules.loggers import adapters


def check_stop(name: str, value: Any) -> Any:
    """Refuses an empty list or text, which would end every completion."""
    if value is not None and (isinstance(value, str) or not value or not all(value)):
        raise UsageError(f"{name}={value!r} must be a list of texts of at least one character each, or null")
    return value


class LanguagePolicy(LanguageModule):
    """Base class of modules that generate completions: sampling, and evaluation on held-out prompts."""

    sampler_name: str = setting(
        default="native",
        says="engine that generates completions: ``native``, the model itself; ``vllm``, vLLM in this process, "
        "which receives the weights after every update; ``vllm_server``, vLLM's own server, started by ``rl serve``",
        alias="sampler",
        one_of=("native", "vllm", "vllm_server"),
    )
    sampler_options: dict[str, Any] | None = setting(
        default=None,
        says="the sampler's own settings: ``gpu_memory_utilization`` and ``enforce_eager`` of ``vllm``; "
        "``addresses``, ``token_file``, ``timeout_s``, ``retries`` and ``retry_wait_s`` of "
        "``vllm_server``",
    )
    max_rows_in_flight: int | None = setting(
        default=None,
        says="maximum number of completions decoded together, which limits memory; others take the places of those "
        "that end. Null: all, on CUDA as many as fit into free memory",
        least=1,
        idle=lambda m: m.sampler_name == "vllm_server" and "with a server; give it to `rl serve`",
    )
    cache_implementation: str = setting(
        default="auto",
        says="of ``native``: ``dynamic``, a cache that grows with the text; ``graph`` or ``static``, one of fixed "
        "size, with which steps become CUDA graphs; ``auto``, ``graph`` on CUDA and ``dynamic`` elsewhere",
        one_of=CACHES,
        idle=lambda m: m.sampler_name != "native" and "with a sampler that has its own cache",
    )
    temperature: float = setting(default=1.0, says="of sampling, and of all log-probabilities", above=0)
    top_k: int | None = setting(default=None, says="sample from the k likeliest tokens; None: all", least=1)
    top_p: float | None = setting(
        default=None, says="sample from the nucleus of this probability; None: all", above=0, most=1
    )
    min_p: float | None = setting(
        default=None,
        says="sample from tokens with this fraction of the likeliest one's probability; None: all",
        least=0,
        most=1,
    )
    repetition_penalty: float = setting(default=1.0, says="of sampling; 1: none", above=0)
    max_completion_length: int = setting(default=256, says="maximum number of tokens per completion", least=1)
    stop: list[str] | None = setting(
        default=None,
        says="texts that end a completion as the EOS token does, with the token that completes them. vLLM writes on, "
        "and its completions are cut; completions in turns end by EOS alone",
        check=check_stop,
    )

    best_metric = ("eval/pass@1", "max")
    #: What selects the best checkpoint while a metric is 0 in every evaluation; that metric then says nothing.
    best_while_zero: ClassVar[dict[str, str]] = {"eval/pass@1": "eval/reward"}
    #: Whether the datamodule lets completions be written ahead of training, with older weights (``async_generations``).
    samples_ahead = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self.sampler_name, self.sampler_options or {})
        self._sampler: Sampler | None = None
        self._sampler_run: str | None = None

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        self._forget_weights()
        if self.sampler_name == "vllm":
            require_vllm("sampler=vllm")
        if self.sampler_name == "vllm_server" and self._sampler_run is None:
            self._sampler_run = self.trainer.strategy.broadcast(uuid.uuid4().hex)

    @property
    def sampler(self) -> Sampler:
        """The engine that generates completions, created on first access with the current weights."""
        if self._sampler is None:
            trainer: Any = self._trainer
            ranks = (0, 1, 0) if trainer is None else (trainer.global_rank, trainer.world_size, trainer.local_rank)
            self._sampler = make_sampler(
                self.sampler_name,
                self.sampler_options or {},
                self.max_rows_in_flight,
                self.model,
                self.cache_implementation,
                ranks,
                self._sampler_run,
            )
        return self._sampler

    def update_sampler(self) -> None:
        """Sends the current weights to the sampler if it does not have them."""
        self.sampler.update_weights(self.model, 0 if self._trainer is None else self.trainer.global_step)

    def _forget_weights(self) -> None:
        """Makes the sampler load the weights again: fused optimizers and callbacks change them undetected."""
        if self._sampler is not None:
            self._sampler.forget_weights()

    def begin_evaluation(self) -> None:
        self._forget_weights()  # `WeightAveraging` evaluates averages

    def end_validation(self) -> None:
        self._forget_weights()

    def begin_batch(self) -> None:
        if self._sampler is not None:
            self._sampler.sleep()

    def act(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        num_generations: int = 1,
        on_ended: RowListener | None = None,
        partner: Any = None,
        images: Sequence[Any] | None = None,
        **sampling: Any,
    ) -> Completions:
        """Generates ``num_generations`` completions per prompt with the current weights.

        Args:
            prompts: token ids, P lists.
            seeds: one per completion, P · num_generations; completions of a prompt are adjacent.
            num_generations: completions per prompt.
            on_ended: called with each completion as it ends, see :class:`~rl_modules.language.sampling.Sampler`.
            partner: the other party of completions in turns, one per prompt.
            images: of each prompt, P :class:`~rl_modules.language.vision.RowImages`, which ``native`` takes.
            sampling: settings that differ from the module's own, such as ``temperature=0.0`` for greedy decoding.
        """
        # An evaluation's loader asks for completions outside of a step, where Lightning has no precision context.
        precision = nullcontext() if self._trainer is None else self.trainer.precision_plugin.forward_context()
        with precision:
            self.update_sampler()
            watch = Stopwatch(self.device)
            settings = self.settings(**sampling)
            if partner is None:
                shown = {} if images is None else {"images": images}
                written = self.sampler.sample(prompts, num_generations, seeds, settings, on_ended, **shown)
            else:
                written = converse(self.sampler, prompts, seeds, replace(settings, stop=None), partner)
            watch.stop()
        if self._trainer is not None and self.trainer.training:
            self.throughput.add(written.length if written.written is None else written.written.sum(1), watch)
        return written

    def settings(self, **different: Any) -> SamplingSettings:
        """Returns the sampling settings: the module's arguments, overridden by those given."""
        own: dict[str, Any] = {
            "max_completion_length": self.max_completion_length,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "stop": None if self.stop is None else StopStrings(tuple(self.stop), self.tokenizer),
            # What differs is for an evaluation, which does not train on its completions.
            "return_sampling_mask": not different and bool(self.truncations),
            **different,
        }
        stops = tuple(eos_token_ids(self.model, self.tokenizer))
        return SamplingSettings(eos_token_id=stops, pad_token_id=int(self.tokenizer.pad_token_id), **own)

    @property
    def truncations(self) -> list[str]:
        """The arguments with which some tokens are never sampled, as ``name=value``."""
        idle: dict[str, tuple] = {"top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0)}
        return [f"{name}={value}" for name, off in idle.items() if (value := getattr(self, name)) not in off]

    def check_architecture(self) -> None:
        super().check_architecture()
        prepare_head(self.model)

    # ---------------------------------------------------------------- evaluation on held-out prompts

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Evaluates completions of held-out prompts, or what the datamodule holds out besides."""
        if "answers" in batch:
            self.log_completions(batch, batch_idx)
        else:
            self.log_held_out(batch)

    def log_held_out(self, batch: dict[str, Any]) -> None:
        """Logs the loss and metrics of a batch of held-out demonstrations or pairs."""
        raise NotImplementedError

    def weights_of(self, reward_names: Sequence[str]) -> list[float] | None:
        """Returns the weights of reward functions in the reward; None: all 1."""
        return None

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return batch

    def log_completions(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs success rates, rewards and lengths of held-out completions, and a table of the first ones."""
        correct, rewards = batch["correct"], batch["rewards"].float()
        prompts, k = len(batch["answers"]), len(batch["answers"][0])
        metrics = {
            "eval/mean_length": tokens_written(batch).float().mean(),
            "eval/clipped_ratio": 1 - batch["finished"].float().mean(),
        }
        if correct is not None:
            metrics["eval/pass@1"] = correct.float().mean()
            if k > 1:
                metrics[f"eval/pass@{k}"] = F.pass_at_k(k, correct.sum(-1), k).mean()
                metrics[f"eval/cons@{k}"] = majority_is_right(batch["answers"], correct).mean()
        self.log_evaluation(metrics, prompts)
        # Each mean is over the completions that its function scored; this batch or rank may have none.
        scored = ~rewards.isnan()
        columns = zip(batch["reward_names"], rewards.unbind(-1), scored.unbind(-1), scored.sum(0).tolist(), strict=True)
        for name, column, counts, n in columns:
            self.log_evaluation({f"eval/rewards/{name}": F.masked_mean(column, counts)}, n)
        if batch["reward_names"]:
            reward = F.combine_rewards(rewards, self.weights_of(batch["reward_names"]))
            self.log_evaluation({"eval/reward": F.masked_mean(reward, ~reward.isnan())}, int((~reward.isnan()).sum()))
        self.log_logged(batch.get("logged", {}))
        if batch_idx == 0 and self.trainer.is_global_zero:
            table = {"prompt": batch["prompts"], "completion": batch["texts"]}
            table |= {n: c.tolist() for n, c in zip(batch["reward_names"], rewards.unbind(-1), strict=True)}
            self.write_table("eval/completions", with_logged_columns(table, batch))

    def write_table(self, name: str, columns: dict[str, Any], rows: int = 8) -> None:
        """Writes a table to every logger that supports tables, at the current optimizer step."""
        if self.trainer.loggers:
            for adapter in adapters(self.trainer):
                adapter.write_table(name, columns, rows, self.trainer.global_step)

    def log_logged(self, logged: dict[str, tuple[float, int]]) -> None:
        """Logs what reward functions logged about held-out completions, as ``eval/<name>``."""
        names = list(logged)
        if self.trainer.world_size > 1:
            # Lightning reduces each metric over the ranks, which must all have it, in one order.
            ranks: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(ranks, names)
            names = sorted({name for own in ranks for name in own})
        for name in names:
            mean, weight = logged.get(name, (0.0, 0))
            self.claim_logged({f"eval/{name}": name})
            self._log_means({f"eval/{name}": torch.tensor(mean, dtype=torch.float32, device=self.device)}, weight)


def with_logged_columns(columns: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Adds the values that reward functions logged to a table of completions; None for completions without a value."""
    extra = batch.get("extra", [])
    names = dict.fromkeys(name for row in extra for name in row)
    if (taken := next((name for name in names if name in columns), None)) is not None:
        raise UsageError(
            f"log_extra({taken!r}, …) of a reward function: the table of completions has a column of this "
            "name; choose another"
        )
    return {**columns, **{name: [row.get(name) for row in extra] for name in names}}


def majority_is_right(answers: Sequence[Sequence[str | None]], correct: Tensor) -> Tensor:
    """Whether the most frequent answer of each prompt is right (cons@k, also called maj@k)."""
    results = []
    for row, flags in zip(answers, correct.tolist(), strict=True):
        right = {answer for answer, flag in zip(row, flags, strict=True) if flag}
        results.append(max((float(F.cons_at_k([list(row)], [a], len(row))) for a in right), default=0.0))
    return torch.tensor(results, dtype=torch.float32, device=correct.device)
