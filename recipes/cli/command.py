"""Dispatches the words after ``rl`` to a command, and turns errors and signals into a sentence and an exit code."""

import errno
import os
import shlex
import signal
import sys
from pathlib import Path

from recipes import configs
from recipes.callbacks.signals import Stopped, end_with_starter
from recipes.cli import config_files, information
from recipes.cli.information import COMMAND_HELP, COMMANDS, HELP, OTHERS
from recipes.cli.options import CLASS_OPTIONS, refuse_keys
from recipes.cli.terminal import add_working_directory, quiet, show
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.fast.imports import defer_imports


def main(args: list[str] | None = None, default_config: str | None = None) -> None:
    """Runs one command."""
    args = sys.argv[1:] if args is None else args
    end_with_starter()
    defer_imports()
    try:
        _dispatch(args, default_config)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except Stopped as stopped:
        if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0:
            print(f"{stopped}; resume with\n  {_resume_command(args, default_config, stopped)}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except SystemExit as exit_:
        # Without a checkpoint, Lightning exits with 1 after Ctrl-C, like after an error, and with 0 after SIGTERM, like
        # after a success.
        if isinstance(exit_.__context__, KeyboardInterrupt):
            raise SystemExit(130) from None
        lightning = sys.modules.get("lightning.pytorch.utilities.exceptions")  # help does without the library
        if lightning is not None and isinstance(exit_, lightning.SIGTERMException):
            print(f"stopped by SIGTERM{', without a checkpoint' if args[0] == 'fit' else ''}", file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: the disk is full ({error}); the checkpoints written so far are whole: free some space, then add "
              "--resume", file=sys.stderr)  # fmt: skip
        raise SystemExit(1) from error


def _resume_command(args: list[str], default_config: str | None, stopped: Stopped) -> str:
    """Returns the command line that resumes the stopped run, by the number of its folder where it is not the newest."""
    if args[0] == "sweep":
        return shlex.join(["rl", *args])  # a sweep always resumes where it stopped
    command, rest = args[0], [arg for arg in args[1:] if arg != "--resume"]
    for i, arg in enumerate(rest):
        if arg == "--ckpt_path" or arg.startswith("--ckpt_path="):
            del rest[i : i + (2 if arg == "--ckpt_path" else 1)]
            break
    given = any(arg in ("-c", "--config") or arg.startswith("--config=") for arg in rest)
    default = ["--config", default_config] if default_config is not None and not given else []
    if not stopped.is_found_again:
        return shlex.join(["rl", command, *default, *rest, "--ckpt_path", str(stopped.checkpoint)])
    named = [] if stopped.number is None else ["--trainer.logger.version", str(stopped.number)]
    return shlex.join(["rl", command, *default, *rest, *named, "--resume"])


def _dispatch(args: list[str], default_config: str | None) -> None:
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in ("--help", "-h", "help"):
        show(HELP)
    elif command in COMMAND_HELP and {"-h", "--help"} & set(rest):
        show(COMMAND_HELP[command])
    elif command == "list":
        show(information.listing(rest))
    elif command in ("--version", "-V", "version"):
        show(information.version(rest))
    elif command == "doctor":
        show(information.doctor(rest))
    elif command == "completion":
        show(information.completion(rest))
    elif command == "copy":
        if len(rest) != 2:
            raise UsageError(
                f"copy takes a config and a target, as in `rl copy ppo/cartpole.yaml mine.yaml`; got {rest}"
            )
        print(f"copied to {configs.copy(*rest)}")
    elif command == "export":
        _export(rest)
    elif command == "serve":
        from recipes.cli.serve import serve

        serve(rest)
    elif command == "sweep":
        _sweep(rest)
    elif command in ("replay", "verify"):
        _recompute(command, rest)
    elif command in COMMANDS:
        _run(command, _with_configs_found(rest, default_config))
    elif command.startswith("-"):
        raise UsageError(f"{command!r} comes before the command; write it after one, as in `rl fit {command} …`")
    else:
        known = (*COMMANDS, *OTHERS)
        raise UsageError(f"unknown command {command!r}; the commands are {', '.join(known)}"
                         f"{did_you_mean(command, known)}")  # fmt: skip


def _announce(command: str, args: list[str]) -> None:
    """Prints what is about to start: the libraries take seconds to import."""
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0:
        what = " ".join(configs.short_name(arg) for arg in args[:4])
        print(f"rl {command} {what}{' …' if len(args) > 4 else ''}: starting", flush=True)


def _export(args: list[str]) -> None:
    given: dict[str, str] = {}
    pending = iter(args)
    for arg in pending:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in ("ckpt_path", "output", "model"):
            raise UsageError(f"export takes --ckpt_path PATH, --output FOLDER and perhaps --model CLASS; got {arg!r}")
        given[name] = value if equals else next(pending, "")
    add_working_directory()
    from recipes.language import export

    quiet()
    folder = export(given.get("ckpt_path"), given.get("output"), given.get("model"))
    print(f"exported to {folder}: transformers' from_pretrained({str(folder)!r}) loads it")


def _sweep(args: list[str]) -> None:
    add_working_directory()
    from recipes.cli.sweep import sweep_command

    quiet()
    sweep_command(args)


def _recompute(command: str, args: list[str]) -> None:
    add_working_directory()
    from recipes.cli.recomputation import replay_command, verify_command

    quiet()
    (replay_command if command == "replay" else verify_command)(args)


def _with_configs_found(args: list[str], default_config: str | None) -> list[str]:
    """Replaces every ``--config NAME`` by the path of its file, which is checked.

    Configs come first, in their order: the parser takes the last of two values, and an option overrides every file.
    """
    named: list[str] = []
    options: list[str] = []
    pending = iter(args)
    for arg in pending:
        name, equals, value = arg.partition("=")
        if name in ("--config", "-c"):
            value = value if equals else next(pending, "")
            if not value:
                raise UsageError("--config needs a file or the name of an installed config, as in --config "
                                 "ppo/cartpole.yaml")  # fmt: skip
            path = configs.find(value)
            refuse_keys(path, config_files.check(path))
            named += ["--config", str(path)]
        else:
            options.append(arg)
    if default_config is not None and not named:
        named = ["--config", str(configs.find(default_config))]
    config_files.check_order([Path(path) for path in named[1::2]])
    return [*named, *_with_classes_first(options)]


def _with_classes_first(options: list[str]) -> list[str]:
    """Puts the options that name a class first: the parser knows no arguments of a class that comes later."""
    classes: list[str] = []
    others: list[str] = []
    pending = iter(options)
    for option in pending:
        name, equals, value = option.partition("=")
        words = [option]
        if name in CLASS_OPTIONS and not equals and (value := next(pending, "")):
            words.append(value)
        names_class = name in CLASS_OPTIONS and bool(value) and not value.startswith(("-", "{"))
        (classes if names_class else others).extend(words)
    return [*classes, *others]


def _run(command: str, args: list[str]) -> None:
    add_working_directory()
    wants_help = bool({"-h", "--help"} & set(args))
    if wants_help and "all" not in args:
        from recipes.cli.classes import chosen_classes
        from recipes.cli.information import short_help

        show(short_help(command, chosen) if (chosen := chosen_classes(args)) else HELP)
        return
    if not wants_help and not any(arg.startswith("--print_config") for arg in args):
        _announce(command, args)
    from recipes.cli.lightning_cli import RLCLI

    quiet()  # after the import, which sets the loggers' levels itself
    RLCLI(command, [arg for arg in args if not (wants_help and arg == "all")])
