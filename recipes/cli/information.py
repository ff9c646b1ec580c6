"""What ``rl`` prints without a run: help, configs, versions, missing extras, completion of a shell."""

import importlib.util
import inspect
import logging
import os
import platform
import re
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import rl_modules
from recipes import configs
from recipes.cli.options import COMMON, Parser
from rl_modules.common.errors import UsageError, did_you_mean, naming
from rl_modules.common.extras import install

COMMANDS = ("fit", "validate", "test", "predict", "record")

_HELP = """\
usage: rl <command> [options]

Reinforcement learning on PyTorch Lightning.

commands:
  fit        train:                 rl fit --config ppo/cartpole.yaml
  validate   evaluate a checkpoint: rl validate --config ppo/cartpole.yaml --ckpt_path PATH
  test       evaluate a checkpoint on other seeds and more episodes (a language model: as validate)
  predict    play episodes to a file: rl predict --config … --ckpt_path PATH --output episodes.csv
             (a language model's completions of held-out prompts: --output completions.jsonl)
  record     film whole episodes:   rl record --config … --ckpt_path PATH --output videos --episodes 3
{alone}

options of fit, validate, test, predict and record:
  --config NAME            a YAML file, or the name of an installed config; repeated, later files override earlier ones
  --model CLASS            an algorithm by name (PPO) or import path (my_package.MyPPO)
  --data CLASS             a datamodule by name (RolloutDataModule) or import path
  --model.X, --data.X, --trainer.X
                           any argument of the model, the datamodule or Lightning's Trainer
  --model.init_from PATH   fit: start a new run from the weights of a checkpoint (warm start); a language model starts
                           from a directory that `rl export` wrote: --model.model_name_or_path FOLDER
  --resume                 fit: resume the newest run of this model on this data, in its folder
  --ckpt_path PATH|last|best|previous
                           a checkpoint file, or a checkpoint of the newest run
  --seed_everything N      seed of environments, actions, minibatches and weights, and of the global generators
  --seeds N [--jobs J]     fit: train on N seeds from that one, J at a time, and compare them as `rl compare` does
  --run_name NAME          fit: name of the run in its folder's and in TensorBoard; default: what the command changes
  --print_config           print the complete resolved config and stop
  --help [GROUP|WORD|all]  with --config or --model: print the arguments of these classes
                         of another command: rl COMMAND --help
  --version                print the version: rl --version

Every algorithm but DiscreteSAC, RecurrentA2C, DPO, KTO, RLOO and Distillation has a short Python program:
python -m recipes.ppo. With a command it is rl with a default config (dpo, kto, rloo and distillation too):
python -m recipes.ppo fit
"""

_RUN = {"type": Path, "help": "folder of the run, for example logs/PPO-CartPole-v1/version_0"}
_TRUST = {
    "action": "store_true",
    "help": "run code that the folder's config.yaml names, such as an environment or a network of your own",
}
#: What the commands that start no run do, and their arguments.
ALONE_COMMANDS: dict[str, tuple[str, dict[str | tuple[str, ...], dict[str, Any]]]] = {
    "export": (
        "Writes the language model of a checkpoint as a Hugging Face directory that from_pretrained loads.",
        {
            "--ckpt_path": {
                "required": True,
                "metavar": "PATH",
                "help": "a checkpoint file, as in logs/SFT-addition/version_0/checkpoints/last.ckpt",
            },
            "--output": {"required": True, "metavar": "FOLDER", "help": "the directory to write"},
            "--adapters": {
                "action": "store_true",
                "help": "of a run with lora: the adapters alone, a folder that peft loads; without it they are merged",
            },
            "--push_to_hub": {
                "metavar": "NAME",
                "help": "also upload the directory to this repository of the Hugging Face Hub, as the logged-in user",
            },
            "--model": {"metavar": "CLASS", "help": "import path of the algorithm, if it is not part of rl_modules"},
        },
    ),
    "import-sb3": (
        "Writes a checkpoint of a model that Stable-Baselines3 or sb3-contrib saved, without its optimizer's state; "
        "runs no code of the file.",
        {
            "model": {"type": Path, "metavar": "MODEL", "help": "the file that model.save wrote, as in model.zip"},
            "vecnormalize": {"nargs": "?", "type": Path, "help": "the file that VecNormalize.save wrote"},
            ("-o", "--output"): {"required": True, "type": Path, "metavar": "FILE", "help": "the checkpoint to write"},
            "--env": {
                "metavar": "ENV",
                "help": "a Gymnasium id or the import path of a callable, whose spaces the module takes instead of "
                "those of the file",
            },
        },
    ),
    "export-sb3": (
        "Writes a checkpoint's model for Stable-Baselines3 or sb3-contrib, which must be installed, and beside it the "
        "statistics that VecNormalize.load reads, if the run normalised.",
        {
            "checkpoint": {"type": Path, "metavar": "CKPT", "help": "a checkpoint file of a control algorithm"},
            ("-o", "--output"): {"required": True, "type": Path, "metavar": "FILE", "help": "as in model.zip"},
        },
    ),
    "serve": (
        "Serves a model by vLLM. It generates completions for runs with --model.sampler vllm_server, which send "
        "their weights, and scores texts for Distillation. It answers only runs that know its token: that of the "
        "variable RL_SERVE_TOKEN, or a new one, which it writes to a file.",
        {
            "--model": {
                "metavar": "MODEL",
                "help": "a directory or hub name: the run's model.model_name_or_path, or a teacher for "
                "model.teacher_model_server_url",
            },
            "--engine": {
                "choices": ("vllm", "native"),
                "default": "vllm",
                "help": "vllm; the native engine needs no server",
            },
            "--dtype": {
                "choices": ("float32", "bfloat16", "float16"),
                "help": "that in which training computes: float32, or bfloat16 under bf16-mixed; default: bfloat16 on "
                "CUDA, else float32",
            },
            "--host": {"default": "127.0.0.1", "help": "the address to listen on; default: 127.0.0.1"},
            "--port": {"type": int, "default": 8000, "help": "the port to listen on; 0: any free port; default: 8000"},
            "--token_file": {
                "metavar": "FILE",
                "help": "where to write the token, for this user alone to read; default: "
                "~/.cache/lightning-rl-recipes/serve-PORT.token",
            },
            "--gpu_memory_utilization": {
                "type": float,
                "default": 0.9,
                "metavar": "SHARE",
                "help": "share of the GPU's memory to use; default: 0.9",
            },
            "--max_rows_in_flight": {
                "type": int,
                "metavar": "N",
                "help": "maximum number of completions decoded together; default: vLLM's",
            },
            "vllm": {"nargs": "*", "metavar": "-- OPTION", "help": "further options of `vllm serve`, after --"},
        },
    ),
    "compare": (
        "Prints what differs in the settings of runs, and what they reached: mean over seeds with a 95 % "
        "bootstrap interval, interquartile mean, probability of improvement over the first.",
        {
            "runs": {
                "nargs": "+",
                "metavar": "RUN",
                "help": "a run's folder, one with runs below it (of an algorithm, a sweep), or a pattern",
            },
            "--metric": {"metavar": "NAME", "help": "what is compared; default: the evaluation that all runs have"},
            "--mode": {"choices": ("max", "min"), "help": "where it is better; default: min for a loss, else max"},
            "--plot": {
                "type": Path,
                "metavar": "FILE",
                "help": "draw the curves with their intervals: .png, .pdf or .svg",
            },
            "--csv": {"type": Path, "metavar": "FILE", "help": "write the whole table"},
        },
    ),
    "sweep": (
        "Searches settings with Optuna, as in rl sweep sweeps/trpo/lunarlander.yaml. Options of rl fit hold for "
        "all trials. A trial trains in one process. The same command resumes a stopped sweep, and several at "
        "once share the trials.",
        {
            "file": {
                "metavar": "FILE",
                "help": "names a config and ranges of its arguments; a config alone takes its algorithm's ranges",
            },
            "--n_trials": {
                "metavar": "N",
                "help": "number of trials, also to extend a finished sweep; default: the file's, or 50",
            },
        },
    ),
    "check": (
        "Runs Gymnasium's check of an environment and plays it with random actions twice; prints its spaces, the "
        "algorithms that fit them, and what is worth changing.",
        {"env": {"metavar": "ENV", "help": "a Gymnasium id, or the import path of a callable, as in my_envs:make"}},
    ),
    "list": (
        "Lists the installed configs with their one-line descriptions.",
        {"word": {"nargs": "?", "help": "only those whose name or description contains it"}},
    ),
    "copy": (
        "Copies an installed config to a file, as in rl copy ppo/cartpole.yaml mine.yaml.",
        {"name": {"help": "of the config"}, "target": {"help": "a file, or a folder that exists"}},
    ),
    "doctor": (
        "Prints versions, the device, and for each missing extra the command that installs it.",
        {
            "--model": {
                "metavar": "FOLDER",
                "help": "print how completions of this language model are decoded here, and why not in a faster way",
            },
        },
    ),
    "learn": (
        "Copies the field guide's notebooks into a folder, where your changes stay, and opens JupyterLab.",
        {
            "--folder": {"type": Path, "default": Path("field_guide"), "help": "default: field_guide"},
            "--copy_only": {"action": "store_true", "help": "do not open JupyterLab"},
        },
    ),
    "completion": (
        'Prints a completion script: eval "$(rl completion bash)".',
        {"shell": {"choices": ("bash", "zsh"), "help": "for which"}},
    ),
    "replay": (
        "Rebuilds the batch, the loss and the gradient's norm of one update, from the nearest checkpoint before it.",
        {
            "run": _RUN,
            "--step": {"type": int, "required": True, "help": "number of the update, from 1"},
            "--output": {"type": Path, "help": "file to write; default: update-<step>.pt"},
            "--interactive": {"action": "store_true", "help": "open a Python console with the update and the model"},
            "--trust": _TRUST,
        },
    ),
    "rescore": (
        "Scores stored completions with other reward functions, as in rl rescore rollouts --reward_funcs "
        "exact_answer; the rollouts come from data.rollouts_path, or from rl predict.",
        {
            "paths": {"nargs": "+", "type": Path, "metavar": "PATH", "help": "JSONL files, or folders of them"},
            "--reward_funcs": {
                "nargs": "+",
                "default": [],
                "metavar": "NAME",
                "help": 'names, import paths, or JSON such as \'{"length_reward": {"target": 20}}\'',
            },
            "--task": {"help": "task whose reward functions may be named; alone: its own"},
            "--output": {
                "type": Path,
                "default": Path("rescored.jsonl"),
                "help": "file to write; default: rescored.jsonl",
            },
        },
    ),
    "rollouts": (
        "Shows a run's stored rollouts: rewards, advantages, prompts and completions; as an HTML page with each token "
        "colored by its log-ratio. They come from data.rollouts_path.",
        {
            "run": {"type": Path, "help": "folder of the run, or of its rollouts, or a JSONL file of them"},
            "--step": {"type": int, "help": "of this optimizer step alone"},
            "--contains": {"metavar": "TEXT", "help": "with this text in prompt or completion"},
            "--finish": {"choices": ["stop", "length"], "help": "ended by EOS or a stop string, or by the limit"},
            "--sort": {"choices": ["step", "reward", "advantage", "length"], "default": "step", "help": "the order"},
            "--reverse": {"action": "store_true", "help": "the highest first"},
            ("-n", "--rows"): {"type": int, "default": 20, "help": "rows to show; default: 20"},
            "--html": {"type": Path, "metavar": "FILE", "help": "write the page to this file instead"},
        },
    ),
    "verify": (
        "Recomputes a run from one checkpoint to its last and compares bit for bit.",
        {
            "run": _RUN,
            "--from": {
                "dest": "start",
                "help": "checkpoint to start from, for example step-100; start: the "
                "run's beginning; default: the checkpoint before the last",
            },
            "--trust": _TRUST,
        },
    ),
}


def general_help() -> str:
    """Returns what ``rl --help`` prints."""
    lines = [f"  {name:10} {says.partition('. ')[0].rstrip('.')}" for name, (says, _) in ALONE_COMMANDS.items()]
    wrapped = [textwrap.fill(line, WIDTH, subsequent_indent=" " * 13, break_on_hyphens=False) for line in lines]
    return _HELP.replace("{alone}", "\n".join(wrapped))


def parser_of(command: str) -> Parser:
    """Returns the parser of a command that starts no run."""
    says, arguments = ALONE_COMMANDS[command]
    parser = Parser(f"rl {command}", says)
    for name, settings in arguments.items():
        parser.add_argument(*([name] if isinstance(name, str) else name), **settings)
    return parser


#: Characters of a line of help.
WIDTH = 120
#: What people set most, in the order in which help shows it.
MOST_USED = (
    "learning_rate",
    "gamma",
    "model_name_or_path",
    "max_completion_length",
    "temperature",
    "lora",
    "beta",
    "epsilon",
    "loss_type",
    "env_id",
    "task",
    "path",
    "dataset",
    "reward_funcs",
    "num_generations",
    "total_timesteps",
    "n_envs",
    "n_steps",
    "batch_size",
    "n_epochs",
    "buffer_size",
    "train_freq",
    "learning_starts",
    "clip_range",
    "gae_lambda",
    "ent_coef",
    "exploration_fraction",
    "net_arch",
    "norm_obs",
    "eval_freq",
    "n_eval",
    "eval_steps",
    "warmup_steps",
    "init_from",
    "chat_template",
    "num_iterations",
    "wrappers",
    "n_eval_episodes",
    "seed",
)
#: Names of the groups of arguments by the class that introduces them; another class is its own.
GROUP_NAMES = {
    "LanguageModule": "model",
    "LanguagePolicy": "sampling",
    "PolicyWithReference": "reference",
    "Algorithm": "learning",
    "ControlModule": "learning",
    "ActorCriticModule": "actor_critic",
    "LanguageArguments": "records",
    "ControlDataModule": "environments",
}
_TRAINER = {
    "trainer.accelerator": "cpu, gpu or auto",
    "trainer.devices": "processes, or GPUs",
    "trainer.max_steps": "optimizer steps after which training ends",
    "trainer.precision": "32-true or bf16-mixed",
    "trainer.logger": "TensorBoardLogger, CSVLogger, WandbLogger, or false",
    "trainer.default_root_dir": "folder of the logs",
    "seed_everything": "seed of everything random",
    "threads": "CPU threads of torch",
    "resume": "resume the newest run of this model on this data",
    "record_every": "transitions between two videos",
}


def short_help(command: str, chosen: Mapping[str, type], topic: str = "") -> str:
    """Returns what people set most, and the other names by group; with a topic, the arguments of a group or word."""
    parts = [line for group, cls in chosen.items() for line in _section(group, cls, topic)]
    if topic and not parts:
        known = {name: None for cls in chosen.values() for name in _groups(cls)}
        raise UsageError(
            f"--help {topic}: no argument and no group of arguments is called so; the groups are "
            f"{', '.join(known)}{did_you_mean(topic, known)}, and all lists everything"
        )
    if topic:
        return "\n".join(parts).strip("\n")
    head = [
        f"usage: rl {command} --config NAME [--model.X VALUE] [--data.X VALUE] [--trainer.X VALUE]",
        f"       rl {command} … --help GROUP, or --help WORD, describes the arguments of a group, or those with a word",
        f"       rl {command} … --help all lists every option, with all of Lightning's",
    ]
    trainer = [line for name, text in _TRAINER.items() for line in _entry(name, None, text)]
    return "\n".join([*head, *parts, "", "trainer and run", *trainer])


def _groups(cls: type) -> dict[str, list[str]]:
    """Names of a class's arguments by group."""
    from recipes.cli.classes import declared_arguments

    found: dict[str, list[str]] = {}
    for name in (name for name in declared_arguments(cls) if name not in ("description", "self")):
        owner = [base for base in cls.__mro__ if name in getattr(base, "declared_settings", ())] or [cls]
        found.setdefault(GROUP_NAMES.get(owner[-1].__name__, owner[-1].__name__), []).append(name)
    return found


def _section(group: str, cls: type, topic: str) -> list[str]:
    from recipes.cli.classes import declared_arguments

    settings, groups = declared_arguments(cls), _groups(cls)
    if topic:
        names = groups.get(topic) or [name for name, x in settings.items() if topic in f"{name} {x.says}"]
        return [
            line
            for name in names
            for line in ["", *_entry(f"{group}.{name}", settings[name].default, settings[name].says)]
        ]
    shown = [name for name in MOST_USED if name in settings][:10]
    summary = (inspect.getdoc(cls) or cls.__name__).partition("\n")[0]
    lines = ["", *textwrap.wrap(f"{group}: {cls.__name__}, {summary}", WIDTH)]
    for name in shown:
        first = re.split(r"; |\. ", settings[name].says)[0]
        lines += _entry(f"{group}.{name}", settings[name].default, first)
    for title, names in groups.items():
        if rest := [name for name in names if name not in shown]:
            text = f"{title}: {', '.join(rest)}"
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _entry(name: str, default: Any, text: str) -> list[str]:
    """Returns the lines of an option: name, default, meaning."""
    left = f"  --{name}{'' if default is None else f' {default}'}"
    return textwrap.wrap(
        f"{left:42} {text.replace('``', '')}",
        WIDTH,
        subsequent_indent=" " * 43,
        drop_whitespace=True,
        break_on_hyphens=False,
        break_long_words=False,
    )


#: Packages that every run needs.
NEEDED = ("torch", "lightning", "jsonargparse", "gymnasium", "numpy", "tensorboard", "rich", "pillow")
#: Modules of each extra by feature; they are looked up without being imported.
OPTIONAL = {
    "box2d": ("LunarLander, BipedalWalker", ("Box2D",)),
    "mujoco": ("HalfCheetah, Hopper, Walker2d", ("mujoco",)),
    "atari": ("Pong, Breakout", ("ale_py", "cv2")),
    "sweep": ("rl sweep", ("optuna",)),
    "compare": ("rl compare, rl fit --seeds", ("pandas", "rliable", "matplotlib")),
    "video": ("rl record, --record_every", ("moviepy", "pygame")),
    "language": ("language models", ("transformers", "peft", "datasets", "reasoning_gym", "math_verify")),
}


def listing(word: str | None) -> str:
    """Returns every installed config with its one-line description; with a word, those that hold it."""
    rows = {name: configs.describe(name) for name in (*configs.names(), *configs.sweeps())}
    if word is not None:
        rows = {name: text for name, text in rows.items() if word.lower() in f"{name} {text}".lower()}
        if not rows:
            raise UsageError(f"no installed config has {word!r} in its name or description; `rl list` shows all")
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows.items())


def checked(env_id: str) -> str:
    """Returns what ``rl check`` prints of an environment that can be used."""
    from datamodules import check_env
    from datamodules.check import algorithms_for
    from datamodules.envs.vector import make_env

    advice = check_env(env_id)
    env = make_env(env_id)
    observed, acts = env.observation_space, env.action_space
    env.close()
    lines = [
        f"observation_space  {observed}",
        f"action_space       {acts}",
        f"algorithms         {', '.join(algorithms_for(observed, acts)) or 'none'}",
    ]
    return "\n".join([*lines, *(f"advice             {one}" for one in advice), f"{env_id} can be used"])


def version() -> str:
    """Returns the project's name and version."""
    return f"lightning-rl-recipes {_of_checkout() or _version('lightning-rl-recipes') or 'unknown'}"


def doctor(model: str | None = None) -> str:
    """Returns versions, device and extras, or how a language model is decoded; see ``rl doctor --help``."""
    if model is not None:
        return f"{'decoding':14}{explain(model)}"
    lines = [
        version(),
        f"{'installed in':14}{Path(__file__).resolve().parents[2]}",
        f"{'Python':14}{platform.python_version()} ({sys.executable})",
        *(f"{name:14}{_version(name) or 'missing: pip install ' + name}" for name in NEEDED),
        f"{'device':14}{_device()}",
        f"{'CPU cores':14}{_cores()}",
        "",
    ]
    for extra, (use, modules) in OPTIONAL.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        state = f"no ({', '.join(missing)} missing): {install(extra)}" if missing else "yes"
        lines.append(f"{extra:14}{use}: {state}")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def _of_checkout() -> str | None:
    """Returns the version in a checkout's pyproject.toml, whatever is installed beside it; None in a wheel."""
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return next((line.partition('"')[2].rstrip('"') for line in lines if line.startswith("version = ")), None)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{', '.join(names)} (CUDA {torch.version.cuda}); --trainer.accelerator auto takes it"
    if torch.backends.mps.is_available():
        return "Apple GPU (MPS); --trainer.accelerator auto takes it"
    return "CPU (torch sees no GPU)"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable}; a run of a small network uses one (--threads N for more)"


_BASH = """\
_rl() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
  elif [ "$before" = --config ] || [ "$before" = -c ] || [ "${{COMP_WORDS[1]}}" = copy ]; then
    COMPREPLY=($(compgen -W "$(rl list 2>/dev/null | cut -d' ' -f1)" -- "$word") $(compgen -f -- "$word"))
  elif [ "$before" = --model ]; then
    COMPREPLY=($(compgen -W "{models}" -- "$word"))
  elif [ "$before" = --data ]; then
    COMPREPLY=($(compgen -W "{datamodules}" -- "$word"))
  elif [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "{options}" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o default -F _rl rl
"""


def completion(shell: str) -> str:
    """Returns the completion script of a shell."""
    import datamodules

    text = _BASH.format(
        commands=" ".join([*COMMANDS, *ALONE_COMMANDS]),
        models=" ".join(rl_modules.__all__),
        datamodules=" ".join(name for name in datamodules.__all__ if name.endswith("DataModule")),
        options=" ".join(COMMON),
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def explain(folder: str) -> str:
    """How completions of a saved model are decoded on this machine, and why not in a faster way."""
    import torch
    from transformers import AutoModelForCausalLM

    from rl_modules.language.architecture import max_length
    from rl_modules.language.fast.graphs import GraphCache
    from rl_modules.language.fast.grouped_attention import without_plans
    from rl_modules.language.fast.shared_prompts import SharedPromptCache
    from rl_modules.language.row_cache import RowCache
    from rl_modules.language.sampling.check import cache_for

    with naming(f"--model={folder!r} can't be loaded"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    said: list[str] = [] if torch.cuda.is_available() else ["CUDA graphs need a CUDA device"]
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rl_modules").addHandler(handler)
    try:
        with torch.no_grad(), without_plans():
            cache = cache_for("auto", model, min(1024, max_length(model.config)), False, 1, 0.1)
    finally:
        logging.getLogger("rl_modules").removeHandler(handler)
    ways = {
        GraphCache: "steps are replayed from CUDA graphs",
        SharedPromptCache: "step by step; completions share the keys and values of their prompt",
        RowCache: "step by step; rows that end make room",
    }
    way = "by the model's own generate()" if cache is None else ways[type(cache)]
    if isinstance(cache, GraphCache):
        way += ", each key is read once" if cache.grouped else ", with the model's own attention"
    return "\n".join([f"{type(model).__name__}: {way}", *said])
