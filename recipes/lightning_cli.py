"""LightningCLI with this project's defaults: imported only when a run starts, for it imports Lightning."""

import contextlib
import inspect
import math
import os
import re
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import datamodules
import rl_modules
from datamodules.base import ControlDataModule
from recipes import curves, language, resume
from recipes.callbacks import ConfigRecord, EpisodeWriter, TransitionProgressBar
from recipes.checkpoints import Checkpoints
from recipes.record import EpisodeRecorder, record_episodes
from rl_modules.base import ControlModule
from rl_modules.common.errors import UsageError, did_you_mean


class RLParser(LightningArgumentParser):
    """Lightning's parser; an unknown key is answered with the nearest known one."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Raise the parser's complaint as one sentence."""
        argument = getattr(ex, "argument_name", None)
        raise UsageError(f"{argument}: {_one_sentence(message)}" if argument else _one_sentence(message)) from ex


class RLCLI(LightningCLI):
    """One subcommand of ``rl``.

    Args:
        command: ``fit``, ``validate``, ``test``, ``predict`` or ``record``; only its parser is built, which halves the
            start.
        args: the arguments behind it.
    """

    def __init__(self, command: str, args: list[str]) -> None:
        # Lightning's subcommands are methods of the Trainer; recording takes the arguments of predicting.
        self.records = command == "record"
        self.command = command = "predict" if self.records else command
        _import_named(args)
        language.hide_transformers_bars()
        self.started_s = time.monotonic()
        self.arguments = args
        #: The checkpoint to go on from, and the run whose folder is gone on in.
        self.checkpoint: dict[str, Any] | None = None
        self.resumed: resume.Run | None = None
        super().__init__(
            parser_class=RLParser,
            save_config_callback=ConfigRecord,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=False,
            trainer_defaults={
                "max_epochs": -1,  # total_timesteps ends the training
                "enable_model_summary": False,
                "logger": {
                    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                    "init_args": {"save_dir": "logs", "name": None, "default_hp_metric": False},
                },
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=[command, *args],
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.command: LightningCLI.subcommands()[self.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if self.records:
            parser.add_argument("--output", type=str, default="videos", help="Folder for the videos.")
            parser.add_argument("--episodes", type=int, default=1, help="How many to record.")
        elif self.command == "predict":
            parser.add_argument(
                "--output", type=str, default=None,
                help="File, .csv or .jsonl; default: episodes.csv, and completions.csv of a language model.",
            )  # fmt: skip
        if self.command == "fit":
            parser.add_lightning_class_args(Checkpoints, "checkpoint")
            parser.add_argument(
                "--resume", action="store_true",
                help="Go on with the newest run of this model on this data, or begin it where there is none.",
            )  # fmt: skip
            parser.add_argument(
                "--record_every", type=int, default=0, help="Transitions between recorded episodes; 0: none."
            )
        parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch; small networks want 1.")

    def _parse_ckpt_path(self) -> None:
        """Do not let the checkpoint's hyperparameters replace what the command line says."""

    def _set_seed(self) -> None:
        """Every stream of randomness is private and comes from ``data.seed``: set that, not the global generators."""
        config = self.config[self.command]
        seed = config.get("seed_everything")
        if seed is not False and config.get("data") is not None and "seed" in config["data"]["init_args"]:
            config["data"]["init_args"]["seed"] = int(torch.seed() % 2**31) if seed is True else seed

    def before_instantiate_classes(self) -> None:
        config = self.config[self.command]
        if config.get("model") is None or config.get("data") is None:
            missing = "model" if config.get("model") is None else "data"
            raise UsageError(_nothing_says_which(missing))
        torch.set_num_threads(config["threads"])
        logger = config["trainer"]["logger"]
        if hasattr(logger, "init_args") and logger.init_args.get("name", "") is None:
            algorithm = config["model"]["class_path"].rpartition(".")[2]
            settings = config["data"]["init_args"]
            task = settings.get("env_id") or language.task_name(settings)
            task = task or config["data"]["class_path"].rpartition(".")[2]
            logger.init_args.name = re.sub(r"[^\w.-]+", "_", f"{algorithm}-{task}")
        self._find_checkpoint(config)

    # ---------------------------------------------------------------- going on

    def _find_checkpoint(self, config: Any) -> None:
        """Turn ``--resume``, and names such as ``last``, into a path; check the file before anything is written."""
        given = config.get("ckpt_path")
        logger = config["trainer"]["logger"]
        watched = str(getattr(logger, "class_path", "")).endswith("TensorBoardLogger")
        if self.command == "fit" and given is None and watched and SLURMEnvironment.detect():
            # A job that is handed back to the queue comes again under its number, and finds its runs by their commands.
            command = zlib.crc32(" ".join(self.arguments).encode())
            if logger.init_args.get("version") is None:
                logger.init_args.version = f"job_{os.environ['SLURM_JOB_ID']}_{command:08x}"
                folder = self._parent_folder(config) / logger.init_args.version
                config["trainer"]["default_root_dir"] = config["trainer"]["default_root_dir"] or str(folder)
                config["resume"] = folder.is_dir()
        # As in Lightning, where `last` may be given before there is any.
        if self.command == "fit" and given == "last":
            config["resume"] = True
        if given in resume.NAMES or config.get("resume"):
            if given is not None and given not in resume.NAMES:
                raise UsageError(f"--resume finds its checkpoint by itself; leave out --ckpt_path {given}, or --resume")
            given = self._resolve(config, given or "last")
        config["ckpt_path"] = None if given is None else str(given)
        if given is None:
            return
        if not Path(given).exists():
            raise UsageError(f"ckpt_path={given!r} is no file; give the path of a .ckpt file, or one of "
                             f"{', '.join(resume.NAMES)} for the newest run's")  # fmt: skip
        self.checkpoint = resume.read(Path(given))

    def _resolve(self, config: Any, name: str) -> Path | None:
        """The newest run's checkpoint; its run goes on in the same folder."""
        folder = self._run_folder(config)
        found = None if folder is None else resume.find(folder, name)
        if found is None and not config.get("resume"):
            raise UsageError(f"ckpt_path={name}: there is no {name}.ckpt of this model on this data in "
                             f"{folder or self._parent_folder(config)}; give a path")  # fmt: skip
        if self.command == "fit" and folder is not None:
            self.resumed = resume.Run(folder, found)
            if hasattr(config["trainer"]["logger"], "init_args"):
                config["trainer"]["logger"].init_args.version = folder.name
        return found

    def _run_folder(self, config: Any) -> Path | None:
        """The folder of the newest run, or of the one whose ``version`` is given; None where there is no run."""
        parent = self._parent_folder(config)
        logger = config["trainer"]["logger"]
        if not hasattr(logger, "init_args"):
            return parent
        version = logger.init_args.get("version")
        if version is None:
            return resume.newest_run(parent)
        return parent / (version if isinstance(version, str) else f"version_{version}")

    def _parent_folder(self, config: Any) -> Path:
        logger = config["trainer"]["logger"]
        if logger in (False, None):
            return Path(config["trainer"]["default_root_dir"] or ".")
        settings = getattr(logger, "init_args", None)
        if settings is None or not logger.class_path.endswith("TensorBoardLogger"):
            raise UsageError("the newest run is found by the folders of TensorBoardLogger; with another logger give "
                             "--ckpt_path PATH")  # fmt: skip
        return Path(settings.save_dir) / (settings.name or "")

    def before_fit(self) -> None:
        """Say what is gone on with and what is changed; take the points from the curves that will be written again."""
        if self.checkpoint is not None and self.trainer.is_global_zero:
            done = self.checkpoint.get(type(self.datamodule).__qualname__, {}).get("num_timesteps")
            at = f"{done:,} transitions" if done is not None else f"step {self.checkpoint['global_step']:,}"
            print(f"going on from {self.config[self.command]['ckpt_path']} ({at})")
            for line in resume.changes(self.checkpoint, self.model, self.datamodule):
                print(line)
        if self.resumed is not None:
            if self.resumed.checkpoint is None and self.trainer.is_global_zero:
                print(f"{self.resumed.folder} has no checkpoint yet: its run begins again")
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ConfigRecord):
                    callback.resumes = self.checkpoint is not None
                if isinstance(callback, Checkpoints):
                    callback.last_path = self.resumed.checkpoint
            states = (self.checkpoint or {}).get("callbacks", {})
            for logger in self.trainer.loggers:
                if isinstance(logger, TensorBoardLogger) and self.trainer.is_global_zero:
                    curves.cut(Path(logger.log_dir), states.get("Checkpoints", {}).get("curves", {}))
        self.checkpoint = None  # its tensors are mapped from the file that is about to be replaced

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            # The parser wraps what a class says about its arguments into its own account of the types it tried.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UsageError):
                cause = cause.__cause__ or cause.__context__
            raise cause or UsageError(" ".join(str(error).split())) from error
        except MisconfigurationException as error:
            raise UsageError(" ".join(str(error).split())) from error
        if self.checkpoint is not None and self.checkpoint.get("algorithm") == type(self.model).__name__:
            # Tokenizer and architecture come from the checkpoint: their directory may be gone.
            self.model.hparams["description"] = self.checkpoint["hyper_parameters"]["description"]
        self._check_environment()

    def _check_environment(self) -> None:
        """Refuse what can't work before anything is written: environments, spaces, names of models."""
        data, model = self.datamodule, self.model
        if isinstance(data, ControlDataModule) and isinstance(model, ControlModule):
            data.setup("check")
            model.observation_space, model.action_space = data.observation_space, data.action_space
            model.check_spaces()
            data.teardown("check")
        if hasattr(model, "tokenizer"):
            assert model.max_length  # the tokenizer and the model's config are found and fit to each other

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list) -> Any:
        if self.command == "predict":
            output = self._get(self.config, "output")
            if self.records and not self._controls:
                raise UsageError(f"record films episodes; {type(self.model).__name__} has none: `rl predict` writes "
                                 "its completions to a file")  # fmt: skip
            if not self.records and self._controls:
                callbacks.append(EpisodeWriter(output or "episodes.csv"))
            elif not self.records:
                callbacks.append(language.CompletionWriter(output or "completions.csv"))
            config["logger"] = False
        if self.command in ("validate", "test"):
            config["logger"] = False
        if self.command == "fit":
            if self._get(self.config, "record_every") and not self._controls:
                raise UsageError("record_every films episodes of an environment; leave it out for a language model")
            if self._get(self.config, "record_every"):
                callbacks.append(EpisodeRecorder(self._get(self.config, "record_every")))
            # Every callback is called some ten times per batch: none that would do nothing.
            shows = config.get("enable_progress_bar") is not False and sys.stderr.isatty()
            config["enable_progress_bar"] = shows
            bar = TransitionProgressBar if self._controls else language.StepProgressBar
            callbacks += [bar()] if shows else []
        elif config.get("enable_progress_bar") is None:
            config["enable_progress_bar"] = False
        trainer = super()._instantiate_trainer(config, callbacks)
        asked = str(config.get("precision"))
        if asked in ("16", "16-mixed") and trainer.precision != "16-mixed":
            # Lightning warns, and goes on in another precision.
            raise UsageError(f"trainer.precision={asked} needs a GPU; on a CPU take bf16-mixed")
        return trainer

    @property
    def _controls(self) -> bool:
        """Whether the run acts in environments; else it is a language model's."""
        return isinstance(self.datamodule, ControlDataModule)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # A checkpoint is data from outside: nothing in it may run.
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}

    def _run_subcommand(self, subcommand: str) -> None:
        if not self.records:
            super()._run_subcommand(subcommand)
            return
        checkpoint = self._get(self.config, "ckpt_path")
        if checkpoint is None:
            raise UsageError("record needs --ckpt_path, the checkpoint whose policy to show")
        policy = type(self.model).load_from_checkpoint(checkpoint, weights_only=True, map_location="cpu")
        folder, episodes = Path(self._get(self.config, "output")), self._get(self.config, "episodes")
        for file in record_episodes(policy, self.datamodule, folder, episodes):
            print(file)

    # ---------------------------------------------------------------- after training

    def after_fit(self) -> None:
        """Evaluate the final policy, write hyperparameters with the result, and say what happened."""
        if self._controls:
            final, step, rows = self._finish_control()
        else:
            seconds, step = time.monotonic() - self.started_s, self.trainer.global_step
            final = language.final_metrics(self.trainer, self.model, self.datamodule)
            rows = language.summary(self.model, self.datamodule, final, step, seconds)
        settings = {**_flat(self.model.hparams), **_flat(self.datamodule.hparams)}
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(settings, final, step=step)
                logger.save()
        folder = self.trainer.log_dir or "logs"  # asked for by all ranks, which agree on it
        if self.trainer.is_global_zero:
            self._summarize(rows, folder)

    def _finish_control(self) -> tuple[dict[str, float], int, dict[str, str]]:
        """The final evaluation on fresh seeds, the transitions so far, and what to say of both."""
        metrics = self.datamodule.metrics()
        loggers, self.trainer.loggers = self.trainer.loggers, []
        self.trainer.test(self.model, datamodule=self.datamodule, verbose=False, weights_only=True)
        self.trainer.loggers = loggers
        final = {"final/mean_reward": self.trainer.callback_metrics["test/mean_reward"].item(),
                 "final/std_reward": self.trainer.callback_metrics["test/std_reward"].item()}  # fmt: skip
        name = f"{type(self.model).__name__} on {self.datamodule.env_name}"
        rows = {
            name: f"mean return {final['final/mean_reward']:.1f} ± {final['final/std_reward']:.1f} over "
            f"{self.datamodule.hparams.n_test_episodes * self.trainer.world_size} episodes",
            "transitions": f"{metrics['time/total_timesteps']:,.0f} in {metrics['time/time_elapsed']:.1f} s "
            f"({metrics['time/fps']:,.0f} per second)",
        }
        if (ranks := self.trainer.world_size) > 1:
            data = self.datamodule
            n_envs, size = data.n_envs, data.batch_size
            rows["ranks"] = f"{ranks}, each with {n_envs} environments and minibatches of {size}"
            rows["together"] = (
                f"{ranks * n_envs} environments, minibatches of {ranks * size}; transitions are of all ranks"
            )
        return final, self.datamodule.num_timesteps, rows

    def _summarize(self, rows: dict[str, str], folder: str) -> None:
        checkpoints = self.trainer.checkpoint_callback
        assert isinstance(checkpoints, Checkpoints)
        best = checkpoints.best_model_path
        rows = {
            **rows,
            "last checkpoint": str(checkpoints.last_path),
            "best checkpoint": _relative(best) if best else "none (no evaluation)",
            "curves": f"tensorboard --logdir {folder}",
        }
        if not self._controls:
            path = _relative(best) if best else str(checkpoints.last_path)
            rows["export"] = f"rl export --ckpt_path {path} --output model"
        # Nothing is wrapped here: a path or command that is copied stays whole.
        width = max(map(len, rows))
        for left, right in rows.items():
            print(f"{left:{width}}  {right}")


def _import_named(args: list[str]) -> None:
    """Import the classes that the arguments or their config files name.

    Short names (``--model PPO``) are looked up among the classes that are imported; the help shows all of those. The
    others stay out, for a control task shall pay for no language model.
    """
    files = [Path(arg.rpartition("=")[2]) for arg in args]
    texts = [file.read_text("utf-8") for file in files if file.suffix in (".yaml", ".yml", ".json") and file.is_file()]
    words = set(re.findall(r"\w+", " ".join([*args, *texts])))
    for package in (rl_modules, datamodules):
        for name in package.__all__:
            if name in words or not {"-h", "--help"}.isdisjoint(args):
                try:
                    getattr(package, name)
                except ModuleNotFoundError as error:
                    if name in words:
                        raise UsageError(f"{name} needs {error.name}, which is not installed: pip install "
                                         "'lightning-rl-recipes[language]'") from error  # fmt: skip


def _relative(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def _flat(hparams: Any, prefix: str = "") -> dict[str, Any]:
    """Hyperparameters as TensorBoard takes them: numbers, strings and booleans under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in hparams.items():
        if key in resume.FILLED_IN:
            continue
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            known = isinstance(value, int | float | str | bool) and not (isinstance(value, float) and math.isnan(value))
            flat[f"{prefix}{key}"] = value if known else str(value)
    return flat


def _one_sentence(message: str) -> str:
    """What jsonargparse says, as one sentence: what was given, where, and the nearest that is known."""
    text = " ".join(message.split())
    if missing := re.search(r"arguments are required: (?:\w+\.)?(model|data)\b", text):
        return _nothing_says_which(missing.group(1))
    group = re.search(r'Parser key "(?:\w+\.)*?(model|data|trainer)\b', text)
    where = group.group(1) if group else ""
    # What a class can be is a union with None; the part about the class is the one that matters.
    union = re.search(r"Errors: - (.+?) (?:- Expected a <class 'NoneType'>|Given value type)", text)
    if union and not union.group(1).startswith("Expected a dot import path"):
        inner = union.group(1)
        plain = re.search(r'Parser key "([\w.]+)".*?Errors: - Expected an? (.+?) - Expected.*Given value: (\S+)$', text)
        if plain and inner.startswith("Expected a"):
            key, expected, got = plain.groups()
            return f"{key}={got!r} can't be used; it must be of type {_plain_types(expected)}"
        if own := re.search(r"(?:unknown option '|^)([\w.]+)(?:'|=\S+ can't be used)", inner):
            name = own.group(1)
            if "unknown option" in inner and name in _known_options(where):
                return f"{where}.{name} is given, but not whose it is; say which class with --{where} CLASS or --config"
            if "unknown option" in inner:
                return f"unknown option '{where}.{name}'{did_you_mean(name, _known_options(where))}"
            return f"{where}.{inner}"
        return inner
    unknown = (
        re.search(r"Option '([\w.]+)' is not accepted", text)
        or re.search(r"[Uu]nrecognized arguments: (?:--)?([\w.]+)", text)
        or re.search(r"does not accept option '([\w.]+)'", text)
    )
    if unknown:
        first, _, rest = unknown.group(1).partition(".")
        known = _known_options(first) if rest else {"model", "data", "trainer", "seed_everything", "ckpt_path"}
        return f"unknown option {unknown.group(1)!r}{did_you_mean(rest or first, known)}"
    if klass := re.search(r"Expected a dot import path string: (\S+)", text):
        classes = rl_modules.__all__ if where == "model" else datamodules.__all__
        name = klass.group(1).rpartition(".")[2]
        return f"{where} class {name!r} is unknown; known are {', '.join(classes)}{did_you_mean(name, classes)}"
    if wrong := re.search(r'Parser key "([\w.]+)": Expected an? (.+?)\.? Got value: (.+?)(?: - |$)', text):
        key, expected, got = wrong.groups()
        return f"{key}={got!r} can't be used; it must be of type {_plain_types(expected)}"
    return text


def _nothing_says_which(what: str) -> str:
    return f"nothing says which {what} to use; give --config (`rl list` shows them) or --{what} CLASS"


def _plain_types(text: str) -> str:
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def _known_options(where: str) -> set[str]:
    """Every option that the classes of a group take."""
    classes: list[Any] = [Trainer] if where == "trainer" else []
    for package, group in ((rl_modules, "model"), (datamodules, "data")):
        if where in (group, ""):
            for name in package.__all__:
                # A language class whose libraries are not installed has no options to offer.
                with contextlib.suppress(ModuleNotFoundError):
                    classes.append(getattr(package, name))
    bases = {base for cls in classes for base in cls.__mro__ if "__init__" in vars(base)}
    names = {name for base in bases for name in inspect.signature(base.__init__).parameters}
    return names - {"self", "args", "kwargs"}
