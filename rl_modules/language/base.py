"""Base class of the language algorithms: arguments, model and tokenizer, optimizer."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_modules.common.arguments import build, require_callable
from rl_modules.common.named_code import named_code, named_kernels
from rl_modules.core.hooks import copy_for_averages
from rl_modules.core.settings import Converted, made, setting, warn_of_idle
from rl_modules.fast import is_fast
from rl_modules.language import checkpoints, vision
from rl_modules.language.architecture import (
    has_router,
    is_sharded,
    make_config,
    max_length,
    plain_config,
    refuse_loading_arguments,
    text_config,
    transformers_model,
)
from rl_modules.language.experts import check_router_loss
from rl_modules.language.export import export_model
from rl_modules.language.fast.cast_weights import cast_together
from rl_modules.language.fast.kernels import use_liger_kernel
from rl_modules.language.fast.light_layers import lighten
from rl_modules.language.fast.self_check import require_left_to_right, warn_of_noise
from rl_modules.language.loop import LanguageLoop
from rl_modules.language.lora import refuse_biases_of_16_bits
from rl_modules.language.metrics import LanguageMetrics
from rl_modules.language.models import (
    DTYPES,
    adapters_of,
    adopt_strategy,
    build_models,
    check_lora,
    check_parts,
    check_quantization,
    code_of_adapters,
    float32_by_default,
    make_model,
    name_alone,
    name_or_object,
)
from rl_modules.language.muon import muon_with_adamw
from rl_modules.language.optimizer import (
    KINDS,
    OPTIMIZERS,
    adamw,
    beside_optimizer,
    beside_scheduler,
    schedule_of,
    without_arguments,
    without_warmup,
)
from rl_modules.language.precision import adopt_precision, require_float32_masters
from rl_modules.language.pretrained import check_model_object, prepared, tokenizer_from_dict, tokenizer_name
from rl_modules.language.throughput import Throughput
from rl_modules.language.tokenizer import load_tokenizer, tokenizer_to_dict

if TYPE_CHECKING:
    from rl_modules.language.vision import ImageReader

OptimizerFactory = Callable[[Iterable], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Configuration(Protocol):
    """A configuration of peft or transformers as an object."""

    def to_dict(self) -> dict[str, Any]: ...


#: Arguments of such a configuration.
Config = Converted[Annotated[dict[str, Any] | Configuration | None, dict[str, Any] | None], dict[str, Any] | None]


class LanguageModule(LanguageMetrics):
    """Base class of the language algorithms; a subclass defines ``training_step``."""

    #: ``causal`` or ``score``, see :func:`rl_modules.language.models.make_model`.
    head = "causal"
    #: Whether the balance loss of a mixture of experts is added to the algorithm's loss.
    balances_experts = False
    #: Off in reinforcement learning, because dropout would make the policy's ratio to itself differ from 1.
    dropout = False
    #: Metric that selects the best checkpoint, and its mode, ``max`` or ``min``.
    best_metric: ClassVar[tuple[str, str]] = ("eval/loss", "min")
    learning_curve = "train/loss"
    #: The default optimizer's eps, which is added to the root of the second moment.
    adam_eps = 1e-8

    #: The model that was given as an object, in a tuple, because an attribute would become a part of this module.
    _given_model: Converted[Annotated[str | PathLike[str] | PreTrainedModel | None, str | None], Any] = setting(
        alias="model_name_or_path",
        default=None,
        says="directory, hub name or GGUF file (``package/file.gguf`` within an installed package) of a pretrained "
        "model, or a folder of LoRA adapters, which are merged into their base; in Python also the model itself, which "
        "is copied; None: a randomly initialised model. A checkpoint of a run that began with an object holds all of "
        "its weights",
        kw_only=False,
        check=name_or_object,
        stores=name_alone,
    )
    model_config: dict[str, Any] | None = setting(
        default=None,
        says="fields of the model's config to change; without a pretrained model the default is a Qwen2 of 1.06 "
        "million parameters (another ``model_type`` starts from that type's own defaults)",
    )
    _tokenizer: Converted[Annotated[str | PathLike[str] | PreTrainedTokenizerBase | None, str | None], Any] = setting(
        alias="tokenizer_name_or_path",
        default=None,
        says="directory or hub name, in Python also a tokenizer; None: the model's, or, without a pretrained model, "
        "the character tokenizer",
        check=name_or_object,
        stores=name_alone,
    )
    lora: Config = setting(
        default=None,
        says="arguments of ``peft.LoraConfig`` such as ``{r: 16, lora_alpha: 32}``, in Python also a ``LoraConfig``; "
        "None: all weights train. The model's head decides the ``task_type``. Reinforcement learning trains without "
        "dropout, so ``lora_dropout`` is 0 there",
        check=check_lora,
        code=code_of_adapters,
    )
    torch_dtype: str = setting(
        default="float32",
        says="of the weights: float32; bfloat16 or float16 for the frozen weights under ``lora``. The Trainer's "
        "``precision`` sets the precision of computations",
        one_of=DTYPES,
    )
    quantization_config: Config = setting(
        default=None,
        says="arguments of transformers' ``BitsAndBytesConfig`` such as ``{load_in_4bit: true}``, or ``{quant_method: "
        "torchao, quant_type: Int8WeightOnlyConfig}``, in Python also such an object: quantizes the frozen weights "
        "under ``lora`` while they are read; None: they have ``torch_dtype``",
        check=check_quantization,
        code=named_code,
    )
    attn_implementation: str | None = setting(
        default=None,
        says="sdpa, eager, flash_attention_2 …; varlen: sdpa, and packed texts without a mask; None: the library's "
        "choice",
        code=named_kernels,
    )
    frozen_parts: list[str] | None = setting(
        alias="freeze",
        default=None,
        says="parts of a model that takes images which are not trained: ``vision``, ``projector``, ``language``; None: "
        "``[vision]`` under ``lora``, else none. Of records without images it has no effect",
        check=check_parts,
    )
    gradient_checkpointing: bool | str = setting(
        default=False,
        says="recompute activations in the backward pass instead of keeping them: true: all of a layer; "
        "``selective``: all except matrix products and attention, which are expensive",
    )
    torch_compile: bool = setting(
        default=False,
        says="compile each layer with ``torch.compile`` where training begins: one compilation for all layers and "
        "lengths, some tens of seconds; sampling does not use it",
    )
    use_liger_kernel: bool = setting(
        default=False,
        says="train with the GPU kernels of the package ``liger-kernel``; losses are computed in tiles without it",
    )
    learning_rate: float = setting(default=1e-3, says="peak step size", least=0, idle=beside_optimizer)
    lr_scheduler_type: str = setting(
        default="linear",
        says="``linear`` or ``cosine`` decay to 0 over the run, ``constant``, or another of transformers' that "
        "goes by steps",
        one_of=KINDS,
        idle=beside_scheduler,
    )
    lr_scheduler_kwargs: dict[str, Any] | None = setting(
        default=None,
        says="further arguments of that schedule, such as ``{min_lr_rate: 0.1}`` of ``cosine_with_min_lr`` or "
        "``{num_decay_steps: 100}`` of ``warmup_stable_decay``",
        idle=without_arguments,
    )
    warmup_steps: int = setting(default=0, says="optimizer steps of linear warm-up", least=0, idle=without_warmup)
    optim: str = setting(
        default="adamw",
        says="``adamw``; ``muon``: torch's Muon for hidden matrices and AdamW for embeddings, the output layer, norms "
        "and biases; ``adamw_8bit``, ``paged_adamw_8bit`` or ``paged_adamw_32bit`` of bitsandbytes",
        one_of=OPTIMIZERS,
        idle=beside_optimizer,
    )
    weight_decay: float = setting(
        default=0.0, says="of AdamW and Muon, on matrices (not on biases and norms)", least=0, idle=beside_optimizer
    )
    max_grad_norm: float | None = setting(
        default=1.0,
        says="global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None: no "
        "clipping",
        above=0,
    )
    optimizer_factory: OptimizerFactory | None = setting(
        alias="optimizer",
        default=None,
        says="callable from parameters to an optimizer with its own learning rate; None: ``optim``",
        stores=False,
        check=require_callable,
        code=named_code,
    )
    scheduler_factory: SchedulerFactory | None = setting(
        alias="lr_scheduler",
        default=None,
        says="callable from the optimizer to a torch scheduler, stepped once per optimizer step",
        stores=False,
        check=require_callable,
        code=named_code,
    )
    logging_steps: int = setting(default=10, says="optimizer steps between two points of the training curves", least=1)
    save_frozen_weights: bool = setting(
        default=False,
        says="write weights that are never trained (the base under ``lora``, a reference, a reward model) into every "
        "checkpoint too; False: store the path and a digest of weights that were loaded from a path. Such a checkpoint "
        "needs these directories unchanged",
    )
    description: dict[str, Any] | None = setting(
        default=None,
        says="architecture and tokenizer as plain data, from which a checkpoint loads without the model's directory; "
        "set internally",
    )

    #: The model that is trained.
    model: Any = made()
    _reader: "ImageReader | None" = made(None)
    stores_own_gradients = False  # their mean over ranks is smaller than all of them
    # Path and digest of frozen weights, by prefix.
    _sources: dict[str, dict[str, str]] = made()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hparams["description"] is None:
            refuse_loading_arguments(self.model_config)
        self.model = self._reader = None
        tokenizer, self._tokenizer = self._tokenizer, None
        if isinstance(tokenizer, tuple):
            self._tokenizer = prepared(tokenizer[0], "tokenizer_name_or_path")
        if not isinstance(self._given_model, tuple):
            self._given_model = None
        else:
            check_model_object(self._given_model[0], self.model_config)
        self._own_names: set[str] = {"train/learning_rate", "train/num_tokens"}
        self._logged_names: dict[str, str] = {}
        self.throughput = Throughput()
        self._sources = {}

    def __getattr__(self, name: str) -> Any:
        # Python calls this when a property raised AttributeError; torch would report the property itself as missing.
        found = getattr(type(self), name, None)
        return found.__get__(self) if isinstance(found, property) else super().__getattr__(name)

    # ---------------------------------------------------------------- images

    #: Whether the algorithm learns from records with images.
    takes_images: ClassVar[bool] = False

    @property
    def reads_images(self) -> bool:
        """Whether the datamodule's records, or those of the checkpoint's run, have images."""
        if (known := self.hparams["description"]) is not None:
            return "processor" in known
        return self._trainer is not None and getattr(getattr(self.trainer, "datamodule", None), "has_images", False)

    @property
    def image_reader(self) -> "ImageReader":
        """The checkpoint's processor of images, loaded on first access."""
        if self._reader is None:
            if (known := self.hparams["description"]) is not None:
                self._reader = vision.ImageReader.from_files(known["processor"])
            elif self._source is None:
                self._reader = vision.ImageReader(vision.small_processor())
                self._tokenizer = prepared(self._reader.processor.tokenizer, "the small processor")
            else:
                name = tokenizer_name(self._given_model[0]) if self._given_model else str(self._source)
                self._reader = vision.ImageReader.of(name)
            if self.tokenizer.chat_template is None:
                self.tokenizer.chat_template = self._reader.processor.chat_template
        return self._reader

    @property
    def model_head(self) -> str:
        """The head of the model: ``images`` where it is one that takes them with text."""
        return "images" if self.head == "causal" and self.reads_images else self.head

    # ---------------------------------------------------------------- model and tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded on first access, because datamodules need it before the model is built."""
        if self._tokenizer is None:
            if self.hparams["description"] is not None:
                self._tokenizer = tokenizer_from_dict(self.hparams["description"]["tokenizer"])
            elif self._given_model and self.hparams["tokenizer_name_or_path"] is None:
                self._tokenizer = load_tokenizer(tokenizer_name(self._given_model[0]))
            else:
                self._tokenizer = load_tokenizer(
                    self.hparams["tokenizer_name_or_path"] or self.hparams["model_name_or_path"]
                )
        return self._tokenizer

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self._planned_length if self.model is None else max_length(self.model.config)

    @cached_property
    def _planned_length(self) -> int:
        """``max_length`` before the model is built, made once: datamodules ask for it at each record."""
        return max_length(self._architecture())

    def _architecture(self) -> Any:
        """The config of the checkpoint's description, or of the source with changed fields."""
        known = self.hparams["description"]
        source, fields = (self._source, self.model_config) if known is None else (None, known["config"])
        if source is None and known is None and self.reads_images:
            fields = vision.small_config(self.model_config)
        return make_config(source, fields, self.tokenizer, self.dropout)

    @property
    def _source(self) -> Any:
        """Source of the weights: a directory, hub name or model; None: new weights."""
        return self._given_model[0] if self._given_model else self.hparams["model_name_or_path"]

    def configure_model(self) -> None:
        """Builds the model from its source or, when loading a checkpoint, from the checkpoint's description.

        Under ``ModelParallelStrategy`` the first rank reads the weights and scatters them over all ranks. At the start
        of ``fit`` the last run's state is cleared.
        """
        sharding, is_new = adopt_strategy(self._trainer), self.model is None
        is_half = self._trainer is not None and isinstance(self.trainer.precision_plugin, HalfPrecision)
        if is_half:
            adopt_precision(self.trainer, self.lora is not None)
        if self.lora is not None:
            precision = self.trainer.precision if self.is_fitting else "32-true"
            refuse_biases_of_16_bits(self.lora, self.torch_dtype, precision)
        if is_new:
            with float32_by_default(), nullcontext() if sharding is None else sharding.storage_on_first_rank():
                build_models(self, sharding)
        if self._trainer is None:
            return
        if is_half:  # before weights may be split over ranks
            self.trainer.precision_plugin.convert_module(self)
        if self.is_fitting:
            if is_half or self.torch_dtype != "float32":
                require_float32_masters(self, self.lora is not None, self.torch_dtype, self.learning_rate)
            if self.use_liger_kernel:
                use_liger_kernel(self.model, self.trainer.strategy.root_device)
            self.begin_run()
        brings_own_layers = self.torch_compile or self.use_liger_kernel
        if sharding is not None:
            if not is_sharded(self.model):
                sharding.split_models(self, is_new)
        elif is_fast() and not brings_own_layers and self.trainer.strategy.root_device.type != "cpu":
            lighten(self)
            # Several ranks exchange gradients while others are computed, so they come one by one.
            if self.is_fitting and self.trainer.precision.endswith("-mixed") and self.trainer.world_size == 1:
                cast_together(self)
        if self.is_fitting and is_new:
            copy_for_averages(self)

    def frozen_arguments(self) -> dict[str, str]:
        """Maps prefixes of parameter names to the argument that named the directory of frozen weights."""
        return (
            {"model.": "model_name_or_path"}
            if self.lora is not None and self.hparams["model_name_or_path"] is not None
            else {}
        )

    def describe(self, config: Any) -> dict[str, Any]:
        """Describes the models as plain data, from which a checkpoint builds them again."""
        described = {"config": plain_config(config), "tokenizer": tokenizer_to_dict(self.tokenizer)}
        generation = getattr(transformers_model(self.model), "generation_config", None)
        if generation is not None:  # the list of EOS tokens, and the sampling defaults that an export hands on
            described["generation_config"] = plain_config(generation)
        if self.model_head == "images":
            described["processor"] = self.image_reader.files()
        return described

    def build_model(self, config: Any, source: Any) -> None:
        """Sets ``self.model``; algorithms with further models (reference, value) extend this.

        Args:
            config: the architecture.
            source: directory, hub name or model that the weights come from; None: new ones.
        """
        self.model = make_model(
            config,
            source,
            self.model_head,
            self.torch_dtype,
            self.attn_implementation,
            self.gradient_checkpointing,
            adapters_of(self),
            self.quantization_config,
            freeze=["vision"] * (self.lora is not None) if self.frozen_parts is None else self.frozen_parts,
        )

    @property
    def hidden_size(self) -> int:
        """Width of the model's layers."""
        return int(text_config(self.model.config).hidden_size)

    def export(self, folder: str | Path) -> Path:
        """Writes the model as a Hugging Face directory that ``from_pretrained`` loads; LoRA adapters are merged.

        With sharded weights all ranks must call this, and the first writes.
        """
        if self.model_head == "images":
            self.image_reader.processor.save_pretrained(folder)
        return export_model(self.model, self.tokenizer, folder)

    def make_loop(self) -> LanguageLoop:
        # Another loader's batches are checked: this project's datamodules have a kind.
        return LanguageLoop(getattr(getattr(self.trainer, "datamodule", None), "kind", None) is None)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def begin_fit(self) -> None:
        """Called at the start of each fit, after the weights are there; a subclass extends it."""
        # `from_pretrained` returns a model in evaluation mode, and Lightning leaves modes as they are.
        self.model.train()
        self.check_architecture()

    def begin_batch(self) -> None:
        """Called before each batch of training; does nothing here."""

    def end_training(self) -> None:
        """Called after the last batch of a fit and its point of the curves; does nothing here."""

    def begin_evaluation(self) -> None:
        """Called before each validation and test; does nothing here."""

    def end_validation(self) -> None:
        """Called after each validation; does nothing here."""

    def check_architecture(self) -> None:
        """Checks which fast paths are exact for the model; algorithms with further fast paths extend this.

        Raises:
            UsageError: a model that no algorithm can train.
        """
        require_left_to_right(self.model)
        if not self.dropout:
            warn_of_noise(self.model)
        if has_router(self.model):
            name, given = type(self).__name__, self.model_config or {}
            check_router_loss(self.model, given, name, self.balances_experts)

    # ---------------------------------------------------------------- checkpoints

    def load_weights(self, state_dict: dict[str, Tensor]) -> None:
        """Loads a checkpoint's weights into the model built from its description."""
        checkpoints.add_frozen(self, state_dict)
        self.load_state_dict(state_dict)

    def gradients_so_far(self) -> dict[str, Tensor]:
        return checkpoints.gradients_so_far(self)

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super()._on_save_checkpoint(checkpoint)
        checkpoints.complete(self, checkpoint)

    def _require_own(self, checkpoint: dict[str, Any]) -> None:
        super()._require_own(checkpoint)
        checkpoints.require_same_adapters(self, checkpoint)

    def _on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._require_own(checkpoint)
        checkpoints.add_frozen_to(self, checkpoint)
        super()._on_load_checkpoint(checkpoint)
        self.latest_metrics = {**self.regular_metrics, **checkpoint.get("monitored", {})}

    # ---------------------------------------------------------------- optimizer

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns ``optim`` with weight decay on matrices, but not on biases and norms."""
        return (muon_with_adamw if self.optim == "muon" else adamw)(self, parameters)

    def configure_optimizers(self) -> Any:
        warn_of_idle(self.declared_settings, self.hparams, self.idle_arguments())
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = build("optimizer", self.optimizer_factory or self.default_optimizer, trainable)
        own = self.scheduler_factory
        scheduler = schedule_of(self, optimizer) if own is None else build("lr_scheduler", own, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips to the Trainer's ``gradient_clip_val``, else to ``max_grad_norm``; logs the norm."""
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        limit = self.max_grad_norm if gradient_clip_val is None else gradient_clip_val
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        self.run.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.record(grad_norm=self.run.grad_norm)
