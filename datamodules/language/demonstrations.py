"""Demonstrations that a policy learns from besides experience, so that it does not forget them (PPO-ptx)."""

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from datamodules.language.formats import as_answer
from datamodules.language.on_demand import load_records
from datamodules.language.sequences import Sequences
from datamodules.language.sources import refuse
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed
from rl_modules.language.text.records import PlacedRecord, place_of

if TYPE_CHECKING:
    from datamodules.language.prompt import PromptDataModule


def demonstrations_of(data: "PromptDataModule", n_micro: int) -> "Demonstrations":
    """Returns a datamodule's demonstrations, loaded once."""
    if data.ptx_batch_size < n_micro:
        raise UsageError(
            f"ptx_batch_size={data.ptx_batch_size} is less than one demonstration for each of "
            f"trainer.accumulate_grad_batches={n_micro} micro-batches"
        )
    if not getattr(data.policy, "reads_demonstrations", True):
        rank_zero_warn(
            f"ptx_batch_size={data.ptx_batch_size} does nothing with {type(data.policy).__name__}, whose "
            "loss reads no demonstrations (a subclass whose loss does sets reads_demonstrations = True); "
            "take RLHFPPO with ptx_coef, or leave it out"
        )
    return data.demonstrations or Demonstrations(data)


class Demonstrations:
    """An endless shuffled stream of demonstrations; those of a step depend only on the seed, the step and the rank."""

    def __init__(self, data: "PromptDataModule") -> None:
        self.per_step, self.seed = data.ptx_batch_size, data.seed
        if data.ptx_path is not None:
            records = list(load_records(path=data.ptx_path, required=("prompt", "completion"), texts=()))
        elif data.streaming:
            raise UsageError(
                f"ptx_batch_size={self.per_step} needs a ptx_path, for streaming=true loads no "
                "demonstrations with the prompts"
            )
        else:
            records = list(data.train_records)
        shown = []
        for i, record in enumerate(records):
            place = place_of(record, f"{data.source}: record {i}")
            if record.get("completion") is None:
                raise refuse(
                    place,
                    "completion",
                    f"has no completion to demonstrate, which ptx_batch_size={self.per_step} asks for; give ptx_path",
                )
            answer = as_answer(record["completion"], f"{place}: 'completion'")
            shown.append(PlacedRecord({**record, "completion": answer}, place))
        prompts, (completions,) = data.encode_answers(shown, "completion")
        self.sequences = Sequences(prompts, completions, completion_only=True)
        most, longest = int(self.sequences.total.max()), data.policy.max_length
        if most > longest:
            place = place_of(shown[int(self.sequences.total.argmax())], "")
            raise refuse(
                place, "completion", f"a demonstration has {most} tokens, the model takes {longest}; shorten it"
            )

    def parts(self, step: int, rank: int, ranks: int, n_micro: int, pad_id: int) -> list[dict[str, Any]]:
        """A step's demonstrations in micro-batches: ``ptx_tokens`` [b, T], ``ptx_counted`` [m], ``ptx_step_tokens``."""
        size = self.per_step * ranks
        index = self._stretch(step * size, size)
        step_tokens = int(self.sequences.counted[index].sum()) / ranks
        own = index[rank * self.per_step : (rank + 1) * self.per_step]
        own = own[self.sequences.total[own].argsort(stable=True)]
        batches = [self.sequences.batch(part, pad_id) for part in own.tensor_split(n_micro)]
        return [
            {f"ptx_{name}": value for name, value in batch.items()} | {"ptx_step_tokens": step_tokens}
            for batch in batches
        ]

    def _stretch(self, first: int, count: int) -> Tensor:
        """The demonstrations at ``count`` places of the stream; each pass over them has its own order."""
        n = len(self.sequences)
        passes = range(first // n, (first + count - 1) // n + 1)
        orders = [
            torch.randperm(n, generator=torch.Generator().manual_seed(stream_seed(self.seed, 0, "demonstrations", i)))
            for i in passes
        ]
        return torch.cat(orders)[first % n : first % n + count]
