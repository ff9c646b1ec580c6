"""Weights split over ranks (FSDP2), under Lightning's ``ModelParallelStrategy``.

Every rank holds its share of each weight, of its gradient and of the optimizer's moments; a layer's weights are put
together when the layer runs, and freed after it (Zhao et al. 2023, arXiv:2304.11277). Losses, batches and checkpoints
are the same as without sharding; only the memory differs.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import transformers_model

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


#: Splits the weights of one module over ranks, in place.
Splitter = Callable[[nn.Module], Any]


class ShardedStrategy(ModelParallelStrategy):
    """Sharding whose checkpoints are those of a run without: one file that a run resumes from under any strategy."""

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gathers all weights; all ranks call this, and the first keeps them."""
        assert self.lightning_module is not None
        # As parameters, so that two that are one (an output layer tied to the embedding) stay one.
        return whole(self.lightning_module.state_dict(keep_vars=True), keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return whole(getattr(optimizer, "optimizer", optimizer).state_dict(), keep=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        ours = module.state_dict()
        state = {name: share(value, ours.get(name)) for name, value in checkpoint["state_dict"].items()}
        module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            state = {
                number: {name: share(value, parameter) for name, value in saved["state"][number].items()}
                for number, parameter in zip(numbers, parameters, strict=True)
                if number in saved["state"]
            }
            optimizer.load_state_dict({**saved, "state": state})


def adopt(strategy: Any) -> None:
    """Turns Lightning's strategy, made before the module was known, into :class:`ShardedStrategy`."""
    if isinstance(strategy, FSDPStrategy):
        raise UsageError(
            "trainer.strategy=fsdp is the older way of sharding, which knows whole models only; take "
            "ModelParallelStrategy"
        )
    if strategy.precision_plugin.precision == "16-mixed":
        raise UsageError(
            "trainer.precision=16-mixed scales the loss by what one rank sees of a gradient; where "
            "weights are sharded take bf16-mixed"
        )
    strategy.__class__ = ShardedStrategy


def split_models(module: "LanguageModule", is_new: bool) -> None:
    """Splits the weights of a module's models over ranks; those of new models come from the first rank."""
    weights, split = whole_tensors(module), splitter(module.trainer.strategy)
    parts: Any = module.children()
    for part in parts:
        if next(part.parameters(), None) is not None:  # a metric has none
            part.shard(split) if hasattr(part, "shard") else shard(part, split)
    if is_new:
        scatter(module, weights, module.trainer.strategy.root_device)


def splitter(strategy: Any) -> Splitter:
    """How the strategy's sizes and precision split a module's weights.

    ``tensor_parallel_size`` ranks share one copy of the weights, and ``data_parallel_size`` such copies exist (HSDP).
    Where either is 1, all ranks share one. In 16 bits the shares that train, and sums of gradients, are float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = strategy.device_mesh
    if 1 in mesh.shape:
        mesh = init_device_mesh(strategy.root_device.type, (strategy.world_size,))
    policy = MixedPrecisionPolicy()
    if strategy.precision_plugin.precision in ("bf16-mixed", "bf16-true"):
        # Inputs keep their types: positions, masks and rewards would be rounded too.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    return partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def shard(model: Any, split: Splitter) -> None:
    """Splits a transformers model's weights over ranks; in place."""
    network = transformers_model(model)
    blocks = set(getattr(network, "_no_split_modules", None) or ())
    parts = [module for module in network.modules() if type(module).__name__ in blocks]
    parts += [network.base_model, network.score] if hasattr(network, "score") else [network]
    for part in parts:
        # The outermost part is resharded too, because code that reads weights between forward passes expects shards.
        split(part)


@contextmanager
def storage_on_first_rank() -> Iterator[None]:
    """Models made inside have weights on the first rank, and shapes alone (torch's meta device) on the others."""
    if torch.distributed.get_rank() == 0:
        yield
        return
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        yield


def of_first_rank(make: Callable[[], Any]) -> Any:
    """Returns the result of ``make`` on the first rank, the only one that calls it, on all ranks."""
    found = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def whole_tensors(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name, those that a checkpoint leaves out too; each tensor once."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


@torch.no_grad()
def scatter(module: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Sends every rank its share of the first rank's weights, one whole tensor at a time."""
    from torch.distributed.tensor import distribute_tensor

    is_first = torch.distributed.get_rank() == 0
    if not is_first:
        module.to_empty(device=device)
    for name, own in whole_tensors(module).items():
        given = weights[name]
        tensor = given.to(device) if is_first else torch.empty(given.shape, dtype=given.dtype, device=device)
        if hasattr(own, "device_mesh"):
            own.to_local().copy_(distribute_tensor(tensor, own.device_mesh, own.placements).to_local())
        else:
            torch.distributed.broadcast(tensor, src=0)
            own.copy_(tensor)


@contextmanager
def gathered_once(model: nn.Module) -> Iterator[None]:
    """Gathers a sharded model's weights once for all passes inside, if they take less than half of the device."""
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts or not _fits_whole(model):
        yield
        return
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


def _fits_whole(model: nn.Module) -> bool:
    """Whether the whole weights take at most half of the device's memory: the same answer on ranks with equal cards."""
    parameters = list(model.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        return True
    size = sum(p.numel() * p.element_size() for p in parameters)
    return 2 * size <= torch.cuda.get_device_properties(device).total_memory


def whole(tree: Any, keep: bool = True) -> dict[str, Any]:
    """Gathers the tensors of a state on the CPU; all ranks call this."""
    known: dict[int, Tensor | None] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            tensor = value.detach()
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            known[id(value)] = tensor.cpu() if keep else None
        return known[id(value)]

    return visit(tree)


def share(value: Any, like: Any) -> Any:
    """This rank's part of a tensor that all ranks have, split as a parameter is; anything else as it came."""
    if not (isinstance(value, Tensor) and hasattr(like, "device_mesh") and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
