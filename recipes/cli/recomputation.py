"""``rl replay``, and how a part of a finished run runs again from one of its checkpoints, in a temporary folder."""

import code
import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml

from datamodules.language.rollouts import StoredRewards
from recipes import saved_runs
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.stops import plain_batch
from recipes.cli.lightning_cli import RLCLI
from recipes.cli.trust import require_registered
from recipes.run_files import Unreadable, group, mapping
from recipes.signals import Stopped
from rl_modules.common.errors import UsageError, visible
from rl_modules.core.hooks import is_cut_off
from rl_modules.core.resume import epoch_to_reopen


class Reached(Exception):
    """The recomputation has reached its target."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a run, and where in the run it was written."""

    path: Path
    #: Optimizer steps before it.
    step: int
    #: Batches of all epochs before it, and the epochs begun and finished; equal for checkpoints of the same moment.
    position: tuple[int, int, int]

    @property
    def name(self) -> str:
        """File name without its ending."""
        return self.path.stem


def position_in(loops: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the batches completed, and the epochs started and processed, of a checkpoint's ``loops``."""
    epochs = loops["fit_loop"]["epoch_progress"]["current"]
    batches = loops["fit_loop"]["epoch_loop.batch_progress"]["total"]
    return batches["completed"], epochs["started"], epochs["processed"]


def position_of(trainer: L.Trainer) -> tuple[int, int, int]:
    """Returns the same for a running Trainer, as in a checkpoint written now."""
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.current
    started, processed = epochs.started, epochs.processed
    if is_cut_off(trainer) and (number := epoch_to_reopen(trainer)) is not None:
        started, processed = number, number - 1
    return loop.epoch_loop.batch_progress.total.completed, started, processed


def checkpoints_of(run: Path) -> list[Saved]:
    """Returns a run's checkpoints in order, those of one moment once, without ``best.ckpt``, of an evaluation."""
    if not (run / "config.yaml").exists():
        raise UsageError(
            f"{run} has no config.yaml; give the folder of a run of `rl fit`, as "
            "logs/PPO-CartPole-v1/version_0; a run of recipes.Trainer records no config"
        )
    found: dict[tuple[int, int, int], Saved] = {}
    for path in sorted((run / "checkpoints").glob("*.ckpt")):
        if path.name in ("best.ckpt", "next.ckpt"):
            continue
        content = saved_runs.read(path)
        try:
            saved = Saved(path, int(content["global_step"]), position_in(content["loops"]))
        except (KeyError, TypeError, ValueError) as error:
            raise Unreadable(path, f"no checkpoint of a fit: {error!r}") from error
        found[saved.position] = saved
    return sorted(found.values(), key=lambda saved: saved.position)


class Recomputation(RLCLI):
    """``rl fit`` of a recorded config in another folder, without a summary.

    With ``rewards``, completions that the run stored have the rewards that it stored, and no function is called.
    """

    summarizes = False

    def __init__(
        self, args: list[str], callback: L.Callback, observe: Any = None, rewards: StoredRewards | None = None
    ) -> None:
        self.own_callback, self.observe, self.rewards = callback, observe, rewards
        super().__init__("fit", args)

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        data: Any = self.datamodule
        if self.rewards is not None:  # so it is a PromptDataModule, which alone stores them
            data.rewards = self.rewards.instead_of(data.rewards, lambda: data.generation)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list) -> Any:
        trainer: Any = super()._instantiate_trainer(config, callbacks)
        trainer.callbacks.insert(0, self.own_callback)
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoints) and self.observe is not None:
                callback.observers.append(self.observe)
        return trainer

    def before_fit(self) -> None:
        self.checkpoint = None  # its tensors are mapped from the file


@contextmanager
def settings(run: Path, start: Saved | None, trusted: bool = False) -> Iterator[tuple[Path, list[str]]]:
    """Yields a temporary folder, and the arguments that run ``run`` again in it from ``start`` or its beginning.

    Settings that name code which this project does not register are refused unless the folder is ``trusted``.
    """
    file = run / "config.yaml"
    config = mapping(file)
    trainer, checkpoints = group(config, "trainer", file), group(config, "checkpoint", file)
    if trainer.get("num_nodes", 1) != 1 or trainer.get("devices") not in ("auto", 1, "1", [0]):
        raise UsageError(f"{run} had trainer.devices={trainer.get('devices')}; only runs of one rank can be recomputed")
    with tempfile.TemporaryDirectory(prefix="rl-") as name:
        folder = Path(name)
        trainer["default_root_dir"] = name
        trainer["logger"] = {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": {"save_dir": name, "name": "again", "version": 0, "default_hp_metric": False},
        }
        trainer["enable_progress_bar"] = False
        if not trusted:
            others = {key: value for key, value in trainer.items() if key not in ("logger", "default_root_dir")}
            require_registered({**config, "trainer": others}, file)
        config["checkpoint"] = {**checkpoints, "interval_s": 1e9, "keep_previous": False, "keep_all": False}
        config.update(ckpt_path=None if start is None else str(start.path), resume=False, record_every=0)
        (folder / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
        try:
            yield folder, ["--config", str(folder / "config.yaml")]
        except Stopped as stopped:  # its checkpoint goes with the folder
            raise SystemExit(128 + stopped.signum) from None


def with_stored_rewards(arguments: list[str]) -> tuple[list[str], StoredRewards | None]:
    """Returns arguments that write no rollouts over the run's own, and the rewards of these; None where it has none."""
    config = Path(arguments[arguments.index("--config") + 1])
    folder = (yaml.safe_load(config.read_text("utf-8"))["data"].get("init_args") or {}).get("rollouts_path")
    if folder is None or not Path(folder).is_dir():
        return arguments, None
    return [*arguments, "--data.rollouts_path=null"], StoredRewards(folder)


class UpdateRecorder(L.Callback):
    """Records the batches, losses and gradient norms of one update, then ends the run."""

    def __init__(self, step: int, interactive: bool = False) -> None:
        self.step, self.interactive = step, interactive
        self.update: dict[str, Any] | None = None
        self._begin()

    def _begin(self) -> None:
        self._batches: list[Any] = []
        self._losses: list[torch.Tensor | None] = []
        self._norms: list[torch.Tensor] = []
        self._norm_of: dict[str, torch.Tensor] = {}
        self._weights: dict[str, Any] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *others: Any) -> None:
        self._before = trainer.global_step
        self._given = batch
        self._batches.append(plain_batch(batch, copy=True))
        if self.interactive and self._weights is None:
            self._weights = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Takes the norms of the gradients, which are not clipped yet."""
        norms = {
            name: parameter.grad.detach().float().norm()
            for name, parameter in pl_module.named_parameters()
            if parameter.grad is not None
        }
        if norms:
            self._norm_of = norms
            self._norms.append(torch.stack(list(norms.values())).norm())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *others: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._losses.append(loss.detach().cpu().clone() if isinstance(loss, torch.Tensor) else None)
        if trainer.global_step < self.step:
            if trainer.global_step > self._before:
                self._begin()
            return
        self.update = {
            "algorithm": type(pl_module).__name__,
            "step": self.step,
            "epoch": trainer.current_epoch,
            "batches": self._batches,
            # The whole update's loss: Lightning divides each micro-batch's by their number.
            "loss": sum(known) if (known := [loss for loss in self._losses if loss is not None]) else None,
            "losses": self._losses,
            "grad_norm": self._norms[0].cpu() if self._norms else None,
            "grad_norms": {name: norm.cpu() for name, norm in self._norm_of.items()},
            "dialogue": dialogue_in(self._batches[0], getattr(pl_module, "tokenizer", None)),
        }
        if self.interactive:
            self._open_console(trainer, pl_module)
        raise Reached

    def _open_console(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._weights is not None
        pl_module.load_state_dict(self._weights)
        variables = {
            "update": self.update,
            "batch": self._given,
            "model": pl_module,
            "data": trainer.datamodule,  # type: ignore[attr-defined]
            "trainer": trainer,
            "torch": torch,
        }
        code.interact(
            f"update {self.step}: {', '.join(variables)}; `model` has the weights from before the update",
            local=variables,
            exitmsg="",
        )


def dialogue_in(batch: Any, tokenizer: Any) -> str | None:
    """The first dialogue of a minibatch as text, with what the model wrote between » and «; None: there is none."""
    if tokenizer is None or not isinstance(batch, dict) or not {"tokens", "mask", "prompt_length"} <= batch.keys():
        return None
    mask = batch["mask"]
    rows = (mask[:, 1:] & ~mask[:, :-1]).any(1).nonzero().flatten().tolist()  # those in which a further turn begins
    if not rows:
        return None
    row = rows[0]
    begin, own = int(batch["prompt_length"][row]), mask[row].tolist()
    ids = batch["tokens"][row].tolist()
    parts = [tokenizer.decode(ids[:begin])]
    for is_written, places in itertools.groupby(range(int(batch["length"][row])), own.__getitem__):
        text = tokenizer.decode([ids[begin + place] for place in places])
        parts.append(f"»{text}«" if is_written else text)
    return "".join(parts)


def replay(run: Path, step: int, output: Path, interactive: bool = False, trusted: bool = False) -> dict[str, Any]:
    """Rebuilds one update of a run and writes it to a file."""
    saved = checkpoints_of(run)
    if saved and step > saved[-1].step:
        raise UsageError(
            f"step={step} is after the run's last checkpoint, {saved[-1].path}, which has {saved[-1].step} updates"
        )
    start = max((one for one in saved if one.step < step), key=lambda one: one.position, default=None)
    recorder = UpdateRecorder(step, interactive)
    with settings(run, start, trusted) as (_, arguments):
        arguments, rewards = with_stored_rewards(arguments)
        print(
            f"update {step} of {run}, from {'its beginning' if start is None else f'{start.name}.ckpt, {start.step}'}"
        )
        with contextlib.suppress(Reached):
            Recomputation(arguments, recorder, rewards=rewards)
    if recorder.update is None:
        raise UsageError(f"{run} has no update {step}: recomputed, it ended before")
    output.parent.mkdir(parents=True, exist_ok=True)
    torch.save(recorder.update, output)
    return recorder.update


def replay_command(given: Any) -> None:
    """Rebuilds the update that a command names, writes it, and prints its loss and norm."""
    output = given.output or Path(f"update-{given.step}.pt")
    update = replay(given.run, given.step, output, given.interactive, given.trust)
    loss, norm = update["loss"], update["grad_norm"]
    print(f"loss           {'none: not gradient descent on a loss' if loss is None else f'{loss.item():.9g}'}")
    print(f"gradient norm  {'none: no gradient' if norm is None else f'{norm.item():.9g}, before clipping'}")
    if update["dialogue"] is not None:
        print("a dialogue, »written by the model«", *map(visible, update["dialogue"].split("\n")), "", sep="\n")
    print(f"written to     {output}: torch.load({str(output)!r}, weights_only=True)")
