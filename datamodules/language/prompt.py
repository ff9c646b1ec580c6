"""Experience of a language model: completions of prompts, generated every epoch, in minibatches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from datamodules.experience import LazyLoader
from datamodules.language import dialogues
from datamodules.language.ahead import WrittenAhead, round_ahead, write_ahead
from datamodules.language.arguments import named_functions
from datamodules.language.base import Batch, LanguageDataModule, Record
from datamodules.language.curriculum import Curriculum
from datamodules.language.demonstrations import Demonstrations, demonstrations_of
from datamodules.language.dynamic_sampling import replenished
from datamodules.language.environments import replayable
from datamodules.language.mixture import MixedOrder
from datamodules.language.reward_arguments import columns_of
from datamodules.language.reward_calls import RewardFunctions
from datamodules.language.reward_threads import EarlyRewards
from datamodules.language.rollouts import store
from datamodules.language.rows import RowLengths, cut, joined_sequences, require_rewards
from datamodules.registered import code_of_names, code_of_settings
from rl_modules.checkpoints import resumed_position
from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.common.seeding import generator_of, stream_seed
from rl_modules.core.seams import require_rows
from rl_modules.core.settings import made, setting
from rl_modules.core.state import forget_state, persistent, transient
from rl_modules.language import vision
from rl_modules.language.sampling import Completions

if TYPE_CHECKING:
    from rl_modules.language.contract import CompletionLearner


def without_environment(data: "PromptDataModule") -> str | None:
    """Says that an argument of dialogues is idle in a run of single turns."""
    return "without environment; set that" if data.hparams["environment"] is None else None


def _written_ahead(data: "PromptDataModule") -> WrittenAhead:
    """Returns the queue of rounds that are written ahead."""
    in_thread = not data.async_generations or data.policy.hparams["sampler"] == "vllm_server"
    return WrittenAhead(lambda first: write_ahead(data, first), in_thread)


class PromptDataModule(LanguageDataModule):
    """Prompts for which the model in training generates completions; one epoch is one generation.

    Per epoch ``batch_size · steps_per_generation`` completions are generated and scored, then yielded
    ``num_iterations`` times in ``steps_per_generation`` optimizer steps, each time in a new order.
    """

    kind = "prompts"

    num_generations: int = setting(
        default=8, says="G, completions per prompt: the group of GRPO; 1 for RLHF with PPO", least=1
    )
    steps_per_generation: int = setting(default=1, says="optimizer steps over which one generation is spread", least=1)
    num_iterations: int = setting(default=1, says="passes over each generation", least=1)
    dynamic_sampling: int = setting(
        default=0,
        says="maximum number of rounds in which new prompts replace groups with equal rewards (DAPO, "
        "arXiv:2503.14476); "
        "afterwards such groups fill the remaining places. 0: no replacement",
        least=0,
    )
    curriculum: Annotated[Callable[..., dict[str, float]] | str | None, str | None] = setting(
        default=None,
        says="function from the running pass rates p of the sources of ``task`` and their weights, each by name, "
        "to the weights of the next generation: ``learnable``, in proportion to p (1 - p), or an import path",
        stores=named_functions,
        code=code_of_names,
    )
    async_generations: int = setting(
        default=0,
        says="k, number of generations that are generated ahead of training, with weights at most k generations old. "
        "With ``model.sampler: vllm_server`` they are generated and scored during training; the samplers of this "
        "process generate them before, and only the reward functions run during training. 0: every generation uses the "
        "current weights",
        least=0,
    )
    rollouts_path: str | None = setting(
        default=None,
        says="folder to which the completions of every generation are written with their records, rewards and what "
        "the update used, for ``rl rollouts`` and ``rl rescore``; None: none",
    )
    ptx_batch_size: int = setting(
        default=0, says="demonstrations per optimizer step and rank, for PPO-ptx; 0: none", least=0
    )
    ptx_path: str | None = setting(
        default=None,
        says="JSONL file of them, with prompt and completion; None: the task's or source's own",
        idle=lambda data: not data.ptx_batch_size and "at ptx_batch_size=0; set that above 0",
    )
    environment: Annotated[Callable[..., Any] | str | None, str | None] = setting(
        default=None,
        says="import path of a class with ``reset(record)`` and ``step(message)``, ``my_package.games:Guess``, which "
        "answers the model turn after turn; in Python also the class. Its rewards are those of the function "
        "``environment``. None: one turn, without one",
        stores=named_functions,
        code=code_of_names,
    )
    environment_kwargs: dict[str, Any] | None = setting(
        default=None, says="the environment's own settings", idle=without_environment, code=code_of_settings
    )
    max_turns: int = setting(default=10, says="turns of a dialogue at most", least=1, idle=without_environment)
    max_turn_tokens: int | None = setting(
        default=None,
        says="tokens that the model writes in a turn at most; None: ``max_completion_length``, which limits the whole "
        "dialogue after its first prompt, the environment's tokens included",
        least=1,
        idle=without_environment,
    )
    env_timeout_s: float | None = setting(
        default=60.0,
        says="longest that a call of an environment may take; its dialogue then ends without a reward. None: no limit",
        above=0,
        idle=without_environment,
    )
    env_workers: int = setting(
        default=0,
        says="processes that hold the environments; 0: this one, which calls them in threads",
        least=0,
        idle=without_environment,
    )
    env_patience_s: float = setting(
        default=0.005,
        says="how long decoding waits for an environment's answer before other dialogues go on without it. Answers "
        "within it leave a run reproducible to the last bit; later ones change the rounding of its neighbours",
        least=0,
        idle=without_environment,
    )

    #: Prompts taken from the stream so far, over all ranks, and generations written.
    drawn: int = persistent(0)
    generation: int = persistent(0)
    #: Micro-batches of the generation handed out, and what is left of it: the module's fields, the rows' order.
    _position: int = persistent(0)
    _fields: dict[str, Tensor] | None = persistent()
    _order: Tensor | None = persistent()
    #: The images of each of its prompts.
    _images: list[dict[str, Tensor]] | None = persistent()
    _shuffler: torch.Generator = persistent(lambda self: generator_of(self.seed, self._rank, "minibatches"))
    #: The optimizer step whose weights wrote the generation; -1: older ones.
    _written_at: int = persistent(-1)
    #: The queue of rounds that are written ahead; of a run without any it is made for the checkpoint.
    _ahead: Any = persistent(_written_ahead)
    #: The trainer's state that reward functions receive, of rounds written ahead by the place of their first prompt.
    _states: dict[int, dict[str, Any]] = persistent({})
    #: Their rewards that are being computed in this process.
    _early: dict[int, Any] = transient({})
    _reward_state: RewardFunctions = persistent(lambda self: self.rewards)
    #: Of a curriculum: the sources' weights from a place of the stream on, and their running pass rates.
    _segments: list[Any] = persistent([])
    _pass_rates: dict[str, float] = persistent({})
    _solved: dict[str, list[float]] = transient({})  # right completions of this generation and all, by source
    _lengths: RowLengths | None = transient()  # of the rows of `_fields`, on the host
    _warned_of_lacking: bool = transient(False)
    _dialogues: Any = made(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_generation_size()
        self.reweigh: Curriculum | None = None
        if self.curriculum is not None:
            self.reweigh = Curriculum(self.curriculum, self.mixture, len(self.rewards) > 0)
        self.demonstrations: Demonstrations | None = None
        if self.environment is not None and self.reward_overlap:
            raise UsageError(
                "reward_overlap=true scores completions one by one, and an environment rewards whole "
                "dialogues; leave one of them out"
            )

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if stage == "fit":
            micro = self.learner_trainer.accumulate_grad_batches
            if self.batch_size % micro:
                raise UsageError(
                    f"trainer.accumulate_grad_batches={micro} does not divide batch_size={self.batch_size}"
                )
            if self.ptx_batch_size:
                self.demonstrations = demonstrations_of(self, micro)
            self.policy.samples_ahead = self.async_generations > 0
            forget_state(self.rewards)

    def encode(self, records: list[Record]) -> list[Record]:
        if len(self.rewards):  # here, because the first call comes after the first generation
            columns_of(records)
        return super().encode(records)

    @property
    def reads_all(self) -> bool:
        return self.ptx_batch_size > 0 and self.ptx_path is None

    def forget_records(self) -> None:
        super().forget_records()
        self.demonstrations = None

    if TYPE_CHECKING:

        @property
        def policy(self) -> "CompletionLearner": ...

    def require_images(self) -> None:
        super().require_images()
        judge = self.policy.hparams.get("reward_model_name_or_path")
        given = {"environment": self.environment, "async_generations": self.async_generations or None}
        for name, value in {**given, "reward_model_name_or_path": judge}.items():
            if value is not None:
                raise UsageError(f"{self.source} has images, with which there is no {name}; leave {value!r} out")

    @property
    def generation_size(self) -> int:
        """Completions per generation and rank."""
        return self.batch_size * self.steps_per_generation

    def _check_generation_size(self) -> None:
        n_each = self.num_generations
        if self.generation_size % n_each:
            raise UsageError(
                f"num_generations={n_each} does not divide batch_size*steps_per_generation="
                f"{self.generation_size}; {n_each * max(1, round(self.batch_size / n_each))} is a "
                "batch_size that fits"
            )

    @property
    def epochs_seen(self) -> float:
        return self.drawn / max(1, len(self.train_records if self.stream is None else self.stream))

    # ---------------------------------------------------------------- training batches

    def train_dataloader(self) -> LazyLoader:
        self._check_generation_size()  # again: Lightning's batch-size finder sets the attribute
        return self.training_loader(self.steps_per_generation * self.num_iterations, self._minibatches)

    def _minibatches(self) -> Iterator[Batch]:
        """Yields one generation's micro-batches, from the checkpoint's position."""
        n_micro = self._n_micro
        per_pass = self.steps_per_generation * n_micro
        length = self.num_iterations * per_pass
        if self._position >= length:
            self._position = 0
        step: list[Batch] = []
        for position in range(self._position, length):
            if position == 0:
                self._fields, self._lengths = self._new_generation(), None
            if position % per_pass == 0:
                self._order = torch.randperm(self.generation_size, generator=self._shuffler)
            if position % n_micro == 0 or not step:
                step = self._step(position % per_pass // n_micro, n_micro)
                if self.demonstrations is not None:
                    number = (self.generation - 1) * (length // n_micro) + position // n_micro
                    parts = self.demonstrations.parts(number, self._rank, self._world_size, n_micro, self._pad_id)
                    step = [{**batch, **part} for batch, part in zip(step, parts, strict=True)]
            self._position = position + 1
            if self._position == length:
                self._fields = self._images = None  # used up: a checkpoint that is written now needs them no more
            yield step[position % n_micro]

    def _step(self, number: int, n_micro: int) -> list[Batch]:
        """Returns the micro-batches of one optimizer step, each of rows of similar length."""
        fields = self._fields
        assert fields is not None and self._order is not None
        self._lengths = lengths = self._lengths or RowLengths.of(fields)
        rows = self._order[number * self.batch_size : (number + 1) * self.batch_size].tolist()
        if n_micro > 1:
            rows.sort(key=lengths.total.__getitem__)
        size = self.batch_size // n_micro
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        # At least one row, so that every rank makes the same steps.
        learned = [[row for row in part if lengths.keep[row]] or part[:1] for part in parts]
        sizes = [len(part) for part in [*parts, *learned]]
        numbers = [row for part in [*parts, *learned] for row in part]
        on_device = torch.tensor(numbers, dtype=torch.int64)
        on_device = on_device.to(fields["tokens"].device, non_blocking=True).split(sizes)
        # Tokens that count, of the whole step and of each part: averaged over ranks, as their gradients will be.
        tokens = torch.stack([fields["mask"][part].sum() for part in on_device[:n_micro]]).float()
        if self._world_size > 1:
            # The strategy's `reduce` would have all ranks wait for each other first.
            torch.distributed.all_reduce(tokens)
            tokens /= self._world_size
        shared = {
            "on_policy": self.learner_trainer.global_step == self._written_at,
            "step_rows": self.batch_size,
            "step_tokens": tokens.sum(),
            "n_micro": n_micro,
        }
        step = []
        for index, part, count in zip(on_device[n_micro:], learned, tokens, strict=True):
            extent = lengths.extent(part)
            batch = cut({name: value[index] for name, value in fields.items()}, extent, fields["mask"].shape[1])
            own = {"micro_rows": size, "micro_tokens": count, "shortest_prompt": extent[0]}
            if self._images is not None:
                first, *others = (vision.RowImages(self._images[row // self.num_generations]) for row in part)
                own["images"] = first.joined(others)
            step.append({**batch, **shared, **own})
        return step

    # ---------------------------------------------------------------- generation

    def _new_generation(self) -> dict[str, Tensor]:
        """Samples and scores completions, and has the module prepare them for training."""
        module = self.policy
        training = module.training
        module.eval()
        with torch.no_grad(), self.learner_trainer.precision_plugin.forward_context():
            rollout = self._rollout(self.generation_size // self.num_generations)
            prepared = module.prepare(rollout)
        if "images" in rollout:
            self._images = [row.fields for row in rollout["images"][:: self.num_generations]]
        if self.generation == 0:
            require_rows(prepared, (len(rollout["length"]),), "[completions]")
        module.train(training)
        if self.rollouts_path is not None:
            step = self.learner_trainer.global_step
            store(self.rollouts_path, self.generation, self._rank, rollout, prepared, step, self.policy.tokenizer)
        self.generation += 1
        if self.reweigh is not None:
            self._follow(self.reweigh)
        # Whether the stored log-probabilities are those of the present weights: their own, or computed anew by them.
        step, version = self.learner_trainer.global_step, rollout["version"]
        anew = getattr(module, "rescores", True)
        is_older = version is not None and not anew and bool((version < step).any())
        self._written_at = -1 if is_older else step
        return prepared

    def _follow(self, curriculum: Curriculum) -> None:
        """Updates the sources' pass rates by a generation's, and weighs the prompts that are not taken yet anew."""
        solved = [self._solved.pop(name, [0.0, 0.0]) for name in curriculum.names]
        counts = torch.tensor(solved, dtype=torch.float64)
        if self._world_size > 1:
            strategy = self.learner_trainer.strategy
            counts = strategy.reduce(counts.to(strategy.root_device), reduce_op="sum")
        self._pass_rates = curriculum.pass_rates(self._pass_rates, counts)
        weights = curriculum.weights(self._pass_rates)
        assert isinstance(self._passes, MixedOrder)
        # Rounds that are written ahead may be asked for once more.
        self._segments = [*self._segments, self._passes.reweighed(self.drawn, weights)][-8 - self.async_generations :]
        total = sum(weights.values())
        self.policy.record(**{f"{name}/share": weight / total for name, weight in weights.items()})

    def _rollout(self, n_prompts: int) -> dict[str, Any]:
        """Returns completions of ``n_prompts`` prompts; ``dynamic_sampling`` replaces groups without a signal."""
        self.rewards.take_notes()  # an evaluation's
        if self.async_generations > 0 or vars(self).get("_ahead"):  # those of the run that this one resumes
            rollout = round_ahead(self, n_prompts)
        else:
            rollout = self._round(n_prompts)
        if self.generation == 0:
            self._require_some_reward(rollout)
        if not self.dynamic_sampling:
            return {**rollout, **self.rewards.take_notes()}
        return {**replenished(self, rollout, n_prompts), **self.rewards.take_notes()}

    def _require_some_reward(self, rollout: dict[str, Any]) -> None:
        """Refuses a first generation of several prompts without any reward."""
        prompts, names = rollout["prompts"], self.rewards.names
        if not names or (self._world_size == 1 and len(set(prompts)) == 1):
            return
        # One rank may have only prompts to which no function applies.
        is_judged = self.rewards.has_failed or not bool(rollout["rewards"].isnan().all())
        if not self._largest_over_ranks(is_judged):
            raise UsageError(
                f"reward_funcs={', '.join(names)}: None or NaN, which is no reward, for all "
                f"{len(prompts)} completions of the first generation; return a number"
            )

    def _round(self, n_prompts: int) -> dict[str, Any]:
        """Completions of the next prompts of the stream; see ``rl_modules.language.contract.Generation``."""
        first = self._reserve(n_prompts)
        places = range(first, first + n_prompts)
        records, seeds = self._asked(places)
        early = self.early_rewards(records, self.num_generations) if self.reward_overlap else None
        listener = None if early is None else early.on_ended
        written = self.complete(self.policy.act, records, seeds, self.num_generations, on_ended=listener)
        return self._as_rollout(records, written, early)

    def _reserve(self, n_prompts: int) -> int:
        """Takes prompts from the stream; returns the place of this rank's first one."""
        first = self.drawn + self._rank * n_prompts
        self.drawn += n_prompts * self._world_size
        return first

    def _asked(self, places: Sequence[int]) -> tuple[list[Record], list[int]]:
        """Returns the records at places of the stream, and a seed for each of their completions."""
        n_each = self.num_generations
        seeds = [stream_seed(self.seed, 0, "sample", place * n_each + j) for place in places for j in range(n_each)]
        return self.records(places), seeds

    def _as_rollout(self, records: list[Record], written: Completions, early: EarlyRewards | None) -> dict[str, Any]:
        """Completions with their rewards."""
        module, n_each = self.policy, self.num_generations
        if written.dialogues is not None:
            records = dialogues.opened(records, written, n_each)
        if written.version is None and self.async_generations:  # to be joined with rows that were written ahead
            step = torch.full_like(written.length, self.learner_trainer.global_step)
            written = replace(written, version=step)
        rollout = {
            **self.judge(records, written, n_each, early),
            **joined_sequences([record["prompt_ids"] for record in records], written, n_each, self._pad_id),
            "finished": written.finished,
            "log_prob": written.log_prob,
            **({} if written.kept is None else {"kept": written.kept, "kept_count": written.kept_count}),
            "version": written.version,
            "records": [record for record in records for _ in range(n_each)],
            "num_generations": n_each,
            "generation": self.generation,
        }
        if (images := self.row_images(records)) is not None:
            rollout["images"] = [row for row in images for _ in range(n_each)]
        if self.reweigh is not None:
            for record, right in zip(records, rollout["correct"].float().tolist(), strict=True):
                solved = self._solved.setdefault(record["data_source"], [0.0, 0.0])
                solved[0], solved[1] = solved[0] + sum(right), solved[1] + len(right)
        rollout["reward"] = require_rewards(module.rewards(rollout), len(written.finished), module)
        return rollout

    # ---------------------------------------------------------------- dialogues

    def complete(
        self,
        act: Callable[..., Completions],
        records: Sequence[Record],
        seeds: Sequence[int],
        num_generations: int,
        **how: Any,
    ) -> Completions:
        if self.environment is None:
            return super().complete(act, records, seeds, num_generations, **how)
        return dialogues.complete(self, act, records, seeds, num_generations, **how)

    def _teardown(self, stage: str) -> None:
        """Cancels the rounds to write and score ahead, except those that have begun."""
        if "_ahead" in vars(self):
            self._ahead.stop()
        for early in self._early.values():
            early.stop()
        if self._dialogues is not None:
            self._dialogues.calls.stop()
            self._dialogues = None
        super()._teardown(stage)

    # ---------------------------------------------------------------- state

    @property
    def _layout(self) -> dict[str, int]:
        names = ("batch_size", "num_generations", "steps_per_generation", "num_iterations")
        n_micro = self._n_micro
        length = self.steps_per_generation * self.num_iterations * n_micro
        return {**{name: getattr(self, name) for name in names}, "accumulate_grad_batches": n_micro, "length": length}

    def _resumed(self, position: int, saved: dict[str, Any]) -> int:
        if self.environment is not None and not replayable(self.environment):
            notice(
                f"environment={self.hparams['environment']} is not replayable: dialogues that had begun begin "
                "anew, in new environments"
            )
        return resumed_position(position, saved, self._layout, begun=bool(self._ahead))
