"""Dispatches the words after ``rl`` to a command."""

import json
import shlex
import sys
from typing import Any

from recipes import configs
from recipes.cli import information
from recipes.cli.information import ALONE_COMMANDS, COMMANDS, general_help, parser_of, short_help
from recipes.cli.options import CLASS_OPTIONS, options_in
from recipes.signals import Stopped, end_with_starter
from recipes.terminal import add_working_directory, is_first_rank, one_sentence, quiet, show, wait_for
from rl_modules.common.errors import UsageError, did_you_mean, naming
from rl_modules.fast.imports import defer_imports

#: Names that two classes have, and the one that is meant: it takes what to monitor.
AMBIGUOUS = {"ReduceLROnPlateau": "lightning.pytorch.cli.ReduceLROnPlateau"}


def main(args: list[str] | None = None, default_config: str | None = None) -> None:
    """Runs one command."""
    args = sys.argv[1:] if args is None else args
    end_with_starter()
    defer_imports()
    with one_sentence(lambda stopped: _resume_command(args, default_config, stopped)):
        try:
            _dispatch(args, default_config)
        finally:
            wait_for("")


def _resume_command(args: list[str], default_config: str | None, stopped: Stopped) -> str:
    """Returns the command line that resumes the stopped run, by the number of its folder where it is not the newest."""
    if args[0] == "sweep":
        return shlex.join(["rl", *args])  # a sweep always resumes where it stopped
    options = [(name, words) for name, _, words in options_in(args[1:]) if name not in ("--resume", "--ckpt_path")]
    rest = [word for _, words in options for word in words]
    given = any(name in ("-c", "--config") for name, _ in options)
    default = ["--config", default_config] if default_config is not None and not given else []
    if not stopped.is_found_again:
        return shlex.join(["rl", args[0], *default, *rest, "--ckpt_path", str(stopped.checkpoint)])
    named = [] if stopped.number is None else ["--trainer.logger.version", str(stopped.number)]
    return shlex.join(["rl", args[0], *default, *rest, *named, "--resume"])


def _dispatch(args: list[str], default_config: str | None) -> None:
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    known = (*COMMANDS, *ALONE_COMMANDS)
    if command in ("--help", "-h", "help"):
        show(general_help())
    elif command in ("--version", "-V", "version"):
        show(information.version())
    elif command in ALONE_COMMANDS and {"-h", "--help"} & set(rest):
        show(parser_of(command).format_help())
    elif command == "sweep":
        add_working_directory()
        from recipes.cli.sweep import sweep_command

        quiet()
        sweep_command(rest)
    elif command in ALONE_COMMANDS:
        _run_alone(command, parser_of(command).parse_args(rest))
    elif command == "fit" and any(word.partition("=")[0] == "--seeds" for word in rest) and "--help" not in rest:
        add_working_directory()
        words = _in_order(rest, default_config)
        _announce(command, words)
        from recipes.cli.seeds import seeds_command

        quiet()
        seeds_command(words)
    elif command in COMMANDS:
        _run(command, _in_order(rest, default_config))
    else:
        raise UsageError(
            f"unknown command {command!r}; options stand after the command, which is one of {', '.join(known)}"
            f"{did_you_mean(command, known)}"
        )


def _run_alone(command: str, given: Any) -> None:
    """Runs a command that starts no run; what it needs is imported only now."""
    if command == "list":
        show(information.listing(given.word))
    elif command == "doctor":
        show(information.doctor(given.model))
    elif command == "check":
        add_working_directory()
        quiet()
        show(information.checked(given.env))
    elif command == "completion":
        show(information.completion(given.shell))
    elif command == "copy":
        print(f"copied to {configs.copy(given.name, given.target)}")
    elif command == "compare":
        from recipes.comparison import compare_command

        compare_command(given)
    elif command == "learn":
        configs.learn(given.folder, opens=not given.copy_only)
    elif command == "serve":
        from recipes.language import serve

        serve(given)
    elif command == "export":
        add_working_directory()
        from recipes.language import export, push_folder

        quiet()
        folder = export(given.ckpt_path, given.output, given.model, given.adapters)
        loads = "peft's AutoPeftModelForCausalLM" if given.adapters else "transformers'"
        print(f"exported to {folder}: {loads}.from_pretrained({str(folder)!r}) loads it".replace("'.from", "' from"))
        if given.push_to_hub:
            print(f"uploaded to {push_folder(folder, given.push_to_hub)}")
    elif command == "import-sb3":
        add_working_directory()
        from recipes.sb3_import import import_sb3

        quiet()
        name = type(import_sb3(given.model, given.output, given.vecnormalize, given.env)).__name__
        print(f"wrote {given.output}: {name}.load_from_checkpoint({str(given.output)!r}) loads it")
    elif command == "export-sb3":
        add_working_directory()
        from recipes.sb3_export import export_sb3

        quiet()
        name, statistics = export_sb3(given.checkpoint, given.output)
        print(f"wrote {given.output}: {name}.load({str(given.output)!r}) loads it")
        if statistics is not None:
            print(f"wrote {statistics}: VecNormalize.load({str(statistics)!r}, env) loads it")
    elif command == "rescore":
        add_working_directory()
        from datamodules.language.rollouts import rescore

        quiet()
        specs = [json_or_text(word) for word in given.reward_funcs]
        print(rescore(given.paths, specs, given.task, given.output))
    elif command == "rollouts":
        from recipes import rollouts_view

        stored = rollouts_view.rollout_rows(given.run)
        rows = rollouts_view.chosen(stored, given.step, given.contains, given.finish, given.sort, given.reverse)
        rows = rows[: given.rows]
        if given.html is None:
            print(rollouts_view.table(rows))
        else:
            given.html.write_text(rollouts_view.page(rows, f"Rollouts of {given.run}"), "utf-8")
            print(f"{len(rows)} of {len(stored)} completions written to {given.html}")
    elif command == "replay":
        add_working_directory()
        from recipes.cli.recomputation import replay_command

        quiet()
        replay_command(given)
    else:
        add_working_directory()
        from recipes.cli.verify import verify

        quiet()
        verdict = verify(given.run, given.start, given.trust)
        print(verdict)
        if not verdict.is_same:
            raise SystemExit(1)


def json_or_text(word: str) -> Any:
    """An entry of a list of reward functions: a name, or JSON of a name with its settings."""
    if not word.startswith("{"):
        return word
    with naming(f"--reward_funcs {word}"):
        return json.loads(word)


def _in_order(args: list[str], default_config: str | None) -> list[str]:
    """Replaces config names by paths, and orders options: configs, classes, others, as the parser must read them."""
    configs_named: list[str] = []
    classes: list[str] = []
    others: list[str] = []
    for name, value, words in options_in(args):
        if name in ("--config", "-c"):
            path = configs.find(value)
            configs.checked(path)
            configs_named += ["--config", str(path)]
        else:
            if name.endswith(".lr_scheduler") and value in AMBIGUOUS:
                words = [f"{name}={AMBIGUOUS[value]}"]
            names_class = name in CLASS_OPTIONS and bool(value) and not value.startswith(("-", "{"))
            (classes if names_class else others).extend(words)
    if default_config is not None and not configs_named:
        configs_named = ["--config", str(configs.find(default_config))]
    return [*configs_named, *classes, *others]


def _announce(command: str, args: list[str]) -> None:
    """Prints what begins: the libraries take seconds to import."""
    if is_first_rank():
        what = " ".join(configs.short_name(arg) for arg in args[:4])
        print(f"{f'rl {command} {what}'.rstrip()}{' …' if len(args) > 4 else ''}: starting", flush=True)
        wait_for("importing PyTorch and Lightning")


def _run(command: str, args: list[str]) -> None:
    add_working_directory()
    wants_help = next((i for i, word in enumerate(args) if word in ("-h", "--help")), None)
    topic = "" if wants_help is None else next(iter(args[wants_help + 1 :]), "")
    if wants_help is not None and topic != "all":
        from recipes.cli.classes import chosen_classes

        topic = "" if topic.startswith("-") else topic
        show(short_help(command, chosen, topic) if (chosen := chosen_classes(args)) else general_help())
        return
    if wants_help is None and not any(arg.startswith("--print_config") for arg in args):
        _announce(command, args)
    from recipes.cli.lightning_cli import RLCLI

    quiet()  # after the import, which sets the loggers' levels itself
    RLCLI(command, [arg for arg in args if arg != topic or not topic])
