"""Lightning's CLI with this project's defaults. Imported only when a run starts, because it imports Lightning."""

import os
import re
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import PositiveInt, register_type
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from datamodules.base import ControlDataModule
from recipes import language, saved_runs
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.curves import ConfigRecord
from recipes.callbacks.episode_monitor import CompletionWriter, EpisodeWriter
from recipes.callbacks.recorder import EpisodeRecorder, record_episodes
from recipes.cli import runs
from recipes.cli.classes import chosen_classes, prepared, refuse_given, which_class
from recipes.cli.options import arguments_of, changed_in
from recipes.run import SavedRun, continue_folder, held, require_own_folder
from recipes.signals import Stopped, end_at_sigterm
from recipes.terminal import is_of_users_code, wait_for
from recipes.trainer import Trainer
from rl_modules.base import ControlModule
from rl_modules.common.arguments import OWN_NETWORKS
from rl_modules.common.errors import UsageError
from rl_modules.common.loading import load_object
from rl_modules.common.named_code import refuse_named
from rl_modules.common.stored_arguments import settings_of
from rl_modules.core.seams import check_pairing
from rl_modules.core.settings import Setting

# A default of StochasticWeightAveraging's; the recorded config holds its name.
register_type(torch.device)


#: Seeds that NumPy takes too.
SEED = Setting(None, "the seed of everything random", least=0, most=2**32 - 1).of_kind(int)
#: Environment variables of programs that start a process per machine.
LAUNCHERS = ("MASTER_ADDR", "SLURM_JOB_ID", "LSB_JOBID", "KUBERNETES_PORT", "OMPI_COMM_WORLD_RANK")


class ParserError(ValueError):
    """The parser's own message."""


class RLParser(LightningArgumentParser):
    """Lightning's parser, whose errors are exceptions."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Raises the parser's message; an error of a class's own is raised as it is."""
        if cause := _cause(ex, UsageError):
            raise cause
        raise ParserError(message) from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Argparse's help, with the names of classes in place of their representations."""
        return re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", super().format_help(*args, **kwargs))


class RLCLI(LightningCLI):
    """One subcommand of ``rl``."""

    #: Whether ``fit`` evaluates the final policy and prints a summary.
    summarizes = True

    def __init__(self, command: str, args: list[str]) -> None:
        # Lightning's subcommands are methods of the Trainer; `record` takes the arguments of `predict`.
        self.records = command == "record"
        self.command = command = "predict" if self.records else command
        self._folder = tempfile.TemporaryDirectory()
        self.arguments = args
        self.chosen = chosen_classes(args)
        args = prepared(args, command, self.chosen.values(), Path(self._folder.name))
        language.hide_transformers_bars()
        wait_for("reading the settings")
        #: The checkpoint to resume from, and the run that is resumed in its own folder.
        self.checkpoint: dict[str, Any] | None = None
        self.resumed: SavedRun | None = None
        #: Holds the resumed run's folder while this process trains in it.
        self._lock = ExitStack()
        try:
            super().__init__(
                parser_class=RLParser,
                save_config_callback=ConfigRecord,
                seed_everything_default=False,
                trainer_defaults={
                    "max_epochs": -1,  # total_timesteps ends the training
                    "enable_model_summary": False,
                    "logger": runs.LOGGER,
                },
                parser_kwargs={"allow_abbrev": False},
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                args=[command, *args],
            )
        except ParserError as error:
            try:
                refuse_given(command, args, self.chosen, str(error))
            except UsageError as sentence:
                raise sentence from error

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.command: LightningCLI.subcommands()[self.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if self.records:
            parser.add_argument("--output", type=str, default="videos", help="Folder of the videos.")
            parser.add_argument("--episodes", type=int, default=1, help="Number of episodes to record.")
        elif self.command == "predict":
            parser.add_argument(
                "--output",
                type=str,
                default=None,
                help="File, .csv or .jsonl; default: episodes.csv, for a language model completions.csv.",
            )
        if self.command == "fit":
            parser.add_lightning_class_args(Checkpoints, "checkpoint")
            parser.add_argument(
                "--resume",
                action="store_true",
                help="Resume the newest run of this model on this data; start one if there is none.",
            )
            parser.add_argument(
                "--run_name",
                type=str,
                default=None,
                help="Name of the run in that of its folder and in TensorBoard; default: what is changed.",
            )
            parser.add_argument(
                "--record_every", type=int, default=0, help="Transitions between two recorded episodes; 0: none."
            )
        parser.add_argument(
            "--threads", type=PositiveInt, default=1, help="CPU threads of torch; 1 is fastest for small networks."
        )

    def _parse_ckpt_path(self) -> None:
        """Keeps the command line's arguments: a checkpoint's hyperparameters do not replace them."""

    def _set_seed(self) -> None:
        """Seeds the private streams through ``data.seed``, and the global generators for code that reads those."""
        config = self.config[self.command]
        seed = config.get("seed_everything")
        if seed is False or seed is None:
            return
        seed = runs.drawn_seed() if seed is True else SEED.checked("seed_everything", seed)
        config["seed_everything"] = seed  # the recorded config runs the same again
        L.seed_everything(seed, workers=True, verbose=False)
        if config.get("data") is not None and "seed" in arguments_of(load_object(config["data"]["class_path"], "data")):
            config["data"]["init_args"]["seed"] = seed

    def before_instantiate_classes(self) -> None:
        config = self.config[self.command]
        if config.get("model") is None or config.get("data") is None:
            missing = "model" if config.get("model") is None else "data"
            raise UsageError(which_class(missing, config.get("ckpt_path")))
        torch.set_num_threads(config["threads"])
        _gather_init_args(config["model"])
        runs.set_folder(config)
        self.checkpoint, self.resumed = runs.find_checkpoint(config, self.command, self.arguments, self._hold)

    def _hold(self, folder: Path) -> None:
        """Holds a run's folder until the command ends; one rank does so for all."""
        if getattr(rank_zero_only, "rank", 0) == 0:  # before there is a Trainer
            self._lock.enter_context(held(folder))

    def _require_weights(self, config: Any) -> None:
        """Raises an error if a command would evaluate random weights."""
        settings = config["model"].get("init_args") or {}
        given = [settings.get(name) for name in ("model_name_or_path", "init_from")]
        if self.command != "fit" and config.get("ckpt_path") is None and not any(given):
            name = "record" if self.records else self.command
            other = ", or --model.model_name_or_path PATH" if "model_name_or_path" in settings else ""
            raise UsageError(
                f"{name} needs --ckpt_path PATH (or last, best), the checkpoint of the weights{other}; "
                "without it they would be random"
            )

    def before_fit(self) -> None:
        """Prints what is resumed and what is changed; prepares the loggers."""
        trainer = self.trainer
        if self.checkpoint is not None and trainer.is_global_zero:
            saved_runs.announce(self.checkpoint, self.config[self.command]["ckpt_path"], self.model, self.datamodule)
        if self.resumed is not None:
            continue_folder(self.resumed, self.checkpoint, trainer)
        else:
            require_own_folder(trainer, self._get(self.config, "ckpt_path"))
        self.checkpoint = None  # its tensors are mapped from the file, which the run replaces

    def instantiate_classes(self) -> None:
        wait_for("making the environments or records, and the model")
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, ModuleNotFoundError) as error:
            if cause := _cause(error, UsageError):
                raise cause from error
            first: BaseException = error
            while (before := first.__cause__ or first.__context__) is not None:
                first = before
            if is_of_users_code(first):  # the parser's sentence lacks its file and line
                raise first from None
            raise
        self._require_weights(self.config[self.command])
        self._take_description()
        self._check_environment()

    def _take_description(self) -> None:
        """Takes a language model's architecture and tokenizer from the checkpoint: their directory may be gone."""
        saved = self.checkpoint or {}
        parameters = settings_of(saved)
        description = parameters.get("description")
        if description is not None and saved.get("algorithm") == type(self.model).__name__:
            lora = self.model.hparams["lora"]
            if (lora is None) != (parameters.get("lora") is None):
                from rl_modules.language.lora import refuse_other_adapters  # imports transformers

                refuse_other_adapters(lora, parameters.get("lora"))
            self.model.hparams["description"] = description

    def _check_environment(self) -> None:
        """Raises for environments, spaces and model names that can't work, before anything is written."""
        data, model = self.datamodule, self.model
        check_pairing(model, data)
        if isinstance(data, ControlDataModule) and isinstance(model, ControlModule):
            data.setup("check")
            model.observation_space, model.action_space = data.observation_space, data.action_space
            model.check_spaces()
            data.teardown("check")
        if hasattr(model, "tokenizer"):
            language.require_room(model, data, fits=self.command == "fit")

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list) -> Any:
        if (clip := config.get("gradient_clip_val") or 0) < 0:
            raise UsageError(f"trainer.gradient_clip_val={clip} would turn gradients around; give at least 0")
        if (config.get("num_nodes") or 1) > 1 and not any(name in os.environ for name in LAUNCHERS):
            raise UsageError(
                f"trainer.num_nodes={config['num_nodes']} would wait for other machines, which nothing "
                "has started; start the command on each by torchrun or SLURM"
            )
        if self.command != "fit":  # the result is printed or written to a file
            config["logger"], config["enable_progress_bar"] = False, bool(config.get("enable_progress_bar"))
        elif every := self._get(self.config, "record_every"):
            if not self._controls:
                raise UsageError("record_every films episodes of an environment; leave it out for a language model")
            callbacks.append(EpisodeRecorder(every))
        if self.records and not self._controls:
            raise UsageError(
                f"record films episodes of an environment, which {type(self.model).__name__} has not; "
                "`rl predict` writes its completions to a file"
            )
        if self.command == "predict" and not self.records:
            output = self._get(self.config, "output")
            callbacks.append(
                EpisodeWriter(output or "episodes.csv")
                if self._controls
                else CompletionWriter(output or "completions.csv")
            )
            if not self._controls:  # each rank has other records, and one process writes
                config["devices"] = 1
        if self.command != "fit":
            evaluates = super()._instantiate_trainer(config, callbacks)
            end_at_sigterm(evaluates)  # `Checkpoints` does so in a run
            return evaluates
        self.trainer_class = partial(Trainer, None, self.summarizes)
        trainer: Any = super()._instantiate_trainer(config, callbacks)
        trainer.raises_when_stopped, trainer.resumed = True, self.resumed
        trainer.runs_name = runs.configured_name(self.config[self.command])
        trainer.run_name, trainer.changed = self._get(self.config, "run_name"), changed_in(self.arguments)
        return trainer

    @property
    def _controls(self) -> bool:
        """Whether the run acts in environments; else it trains a language model."""
        return isinstance(self.datamodule, ControlDataModule)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # A checkpoint is untrusted data: no code in it may run.
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if arguments.get("weights_only") is False:
            raise UsageError(
                "weights_only=False would run whatever code a checkpoint holds, and this project's hold "
                "none; leave it out"
            )
        return {**arguments, "weights_only": True}

    def _run_subcommand(self, subcommand: str) -> None:
        wait_for("" if self.command == "fit" else "evaluating")
        if self.records:
            self._record()
            return
        try:
            with self._lock:
                super()._run_subcommand(subcommand)
        except Stopped as stopped:
            stopped.is_found_again = runs.is_found_again(self.config[self.command])
            raise

    def _record(self) -> None:
        """Films episodes of a checkpoint's policy."""
        checkpoint = self._get(self.config, "ckpt_path")
        self._require_own_networks()
        # The command's values take precedence over the checkpoint's.
        own = {name: self.model.hparams[name] for name in OWN_NETWORKS if name in self.model.hparams}
        policy = type(self.model).load_from_checkpoint(checkpoint, weights_only=True, map_location="cpu", **own)
        folder, episodes = Path(self._get(self.config, "output")), self._get(self.config, "episodes")
        for file in record_episodes(policy, self.datamodule, folder, episodes):
            print(file)

    def _require_own_networks(self) -> None:
        """Refuses a checkpoint's class for its network that the command does not name, because it would be run."""
        saved = (self.checkpoint or {}).get("hyper_parameters") or {}
        for name in OWN_NETWORKS:
            if saved.get(name) not in (None, self.model.hparams.get(name)):
                path = saved[name].get("class_path") if isinstance(saved[name], dict) else saved[name]
                again = f"give --model.{name} as it was trained (the run's config.yaml has it)"
                refuse_named("the checkpoint", name, [str(path)], again)


def _cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """Returns the exception of a kind from which the parser or Lightning made an error."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _gather_init_args(model: Any) -> None:
    """Moves a user's network's arguments into its ``init_args``, beside which the parser puts them."""
    settings = model.get("init_args") or {}
    for name in OWN_NETWORKS:
        given = settings.get(name)
        if isinstance(given, dict) and "class_path" in given:
            beside = {key: value for key, value in given.items() if key not in ("class_path", "init_args")}
            if beside:
                arguments = {**(given.get("init_args") or {}), **beside}
                settings[name] = {"class_path": given["class_path"], "init_args": arguments}
