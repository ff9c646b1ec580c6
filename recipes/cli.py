"""The ``rl`` command: Lightning's CLI with configs found by name, errors in one sentence, and a summary at the end.

rl fit --config ppo/cartpole.yaml
rl validate --config ppo/cartpole.yaml --ckpt_path logs/.../last.ckpt
"""

import errno
import logging
import os
import shlex
import sys
import warnings

from recipes import configs
from recipes.signals import Stopped
from rl_modules.common.errors import UsageError

HELP = """\
usage: rl <command> [options]

Reinforcement learning on PyTorch Lightning.

commands:
  fit        train:                 rl fit --config ppo/cartpole.yaml
  validate   evaluate a checkpoint: rl validate --config ppo/cartpole.yaml --ckpt_path PATH
  test       the same, on other seeds and more episodes
  predict    play episodes to a file: rl predict --config … --ckpt_path PATH --output episodes.csv
             (a language model's completions of held-out prompts: --output completions.jsonl)
  record     film whole episodes:   rl record --config … --ckpt_path PATH --output videos --episodes 3
  export     a Hugging Face directory of a language model: rl export --ckpt_path PATH --output FOLDER
  list       every installed config with its one-line description
  copy       copy a config to edit: rl copy ppo/cartpole.yaml mine.yaml

options of fit, validate, test, predict and record:
  --config NAME            a YAML file, or the name of an installed config; several are layered
  --model CLASS            an algorithm by name (PPO) or import path (my_package.MyPPO)
  --data CLASS             a datamodule by name (RolloutDataModule) or import path
  --model.X, --data.X, --trainer.X
                           any argument of the model, the datamodule or Lightning's Trainer
  --resume                 fit: go on with the newest run of this model on this data, in its folder
  --ckpt_path PATH|last|best|previous
                           a checkpoint, or one of the newest run's
  --seed_everything N      seed of environments, actions, minibatches and weights
  --print_config           print the complete resolved config and stop
  --help                   every option; --model.help PPO explains one class's

Any recipe also runs by itself, with its own default config: python -m recipes.ppo fit
"""

COMMANDS = ("fit", "validate", "test", "predict", "record")


def main(args: list[str] | None = None, default_config: str | None = None) -> None:
    """Run one command.

    Args:
        args: the command line without the program's name; None: ``sys.argv``.
        default_config: installed config to use where the arguments name none.

    Raises:
        SystemExit: with 0 after help, 1 after an error, 128 + n after stopping at signal n (130: Ctrl-C, 143: SIGTERM).
    """
    args = sys.argv[1:] if args is None else args
    try:
        _dispatch(args, default_config)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except Stopped as stopped:
        if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0:
            print(f"{stopped}; go on with\n  {_resume_command(args, default_config)}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except SystemExit as exit_:
        # Lightning answers Ctrl-C with exit code 1, as if something had failed.
        raise SystemExit(130) if isinstance(exit_.__context__, KeyboardInterrupt) else exit_ from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: the disk is full ({error}); checkpoints written so far are whole: make room, then add --resume",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(1) from error


def _resume_command(args: list[str], default_config: str | None) -> str:
    """The command line that goes on where this one stopped."""
    command, rest = args[0], [arg for arg in args[1:] if arg != "--resume"]
    for i, arg in enumerate(rest):
        if arg == "--ckpt_path" or arg.startswith("--ckpt_path="):
            del rest[i : i + (2 if arg == "--ckpt_path" else 1)]
            break
    given = any(arg in ("-c", "--config") or arg.startswith("--config=") for arg in rest)
    default = ["--config", default_config] if default_config is not None and not given else []
    return shlex.join(["rl", command, *default, *rest, "--resume"])


def _dispatch(args: list[str], default_config: str | None) -> None:
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in ("--help", "-h", "help"):
        _show(HELP)
    elif command == "list":
        width = max(len(name) for name in configs.names())
        _show("\n".join(f"{name:{width}}  {configs.describe(name)}" for name in configs.names()))
    elif command == "copy":
        if len(rest) != 2:
            raise UsageError(
                f"copy takes a config and a target, as in `rl copy ppo/cartpole.yaml mine.yaml`; got {rest}"
            )
        print(f"copied to {configs.copy(*rest)}")
    elif command == "export":
        _export(rest)
    elif command in COMMANDS:
        _run(command, _with_configs_found(rest, default_config))
    else:
        raise UsageError(f"unknown command {command!r}; the commands are {', '.join(COMMANDS)}, export, list and "
                         "copy")  # fmt: skip


def _export(args: list[str]) -> None:
    given: dict[str, str] = {}
    pending = iter(args)
    for arg in pending:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in ("ckpt_path", "output", "model"):
            raise UsageError(f"export takes --ckpt_path PATH, --output FOLDER and perhaps --model CLASS; got {arg!r}")
        given[name] = value if equals else next(pending, "")
    sys.path.insert(0, os.getcwd())
    from recipes.language import export

    quiet()
    folder = export(given.get("ckpt_path"), given.get("output"), given.get("model"))
    print(f"exported to {folder}: transformers' from_pretrained({str(folder)!r}) loads it")


def _show(text: str) -> None:
    """Print; not an error where the reader has left, as in ``rl list | head``."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_configs_found(args: list[str], default_config: str | None) -> list[str]:
    """Replace every ``--config NAME`` by the file it stands for."""
    found, given = [], False
    pending = iter(args)
    for arg in pending:
        if arg in ("--config", "-c"):
            value = next(pending, None)
            if value is None:
                raise UsageError("--config needs a file or the name of an installed config")
            found += ["--config", str(configs.find(value))]
            given = True
        elif arg.startswith("--config="):
            found += ["--config", str(configs.find(arg.removeprefix("--config=")))]
            given = True
        else:
            found.append(arg)
    if default_config is not None and not given:
        found = ["--config", str(configs.find(default_config)), *found]
    return found


def _run(command: str, args: list[str]) -> None:
    # A user's own modules are found from where the command is run, as with `python -m`.
    sys.path.insert(0, os.getcwd())
    from recipes.lightning_cli import RLCLI

    quiet()  # after the import, which sets the loggers' levels itself
    RLCLI(command, args)


def quiet() -> None:
    """Leave out messages that are not for the person at the terminal, and show our own, such as a buffer's size."""
    if not (ours := logging.getLogger("datamodules")).handlers:
        ours.addHandler(logging.StreamHandler())
        ours.setLevel(logging.INFO)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*LightningCLI's args parameter is intended.*",  # and sys.argv stays, for Lightning starts other ranks with it
        ".*is deprecated, use `isinstance.treespec, TreeSpec.*",  # Lightning calls torch's old name
        ".*smaller than the logging interval.*",  # metrics are written once per epoch, not every n steps
        ".*does not have many workers.*",
        ".*Total length of .* across ranks is zero.*",  # evaluation is off
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*treespec.*",
        ".*callbacks used to create the checkpoint need to be provided.*",  # evaluation writes no checkpoints
        ".*Couldn't infer the batch indices.*",
        ".*your dataloader is not resumable.*",  # its state is the datamodule's
        "Found .* module.s. in eval mode at the start of training.*",  # reference and reward model, on purpose
        ".*but have no logger configured.*",  # `test` after `fit` reports in the summary
    ):
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    main()
