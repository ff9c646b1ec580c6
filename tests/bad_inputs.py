"""Commands and calls that can't work, each with what the answering sentence must name.

A case is a command line of ``rl``, or a Python function that gets a :class:`Place`. The answer is one sentence without
a traceback, and an exit code other than 0. ``says`` are regular expressions: the argument's name, its value, the remedy.
"""

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import torch
from gymnasium import spaces

from datamodules import (
    InstructionDataModule,
    PreferenceDataModule,
    PromptDataModule,
    ReplayDataModule,
    RolloutDataModule,
)
from recipes import configs, r1, rlhf
from recipes.cli.lightning_cli import RLCLI
from rl_modules import (
    A2C,
    DPO,
    DQN,
    GRPO,
    PPO,
    REINFORCE,
    RLOO,
    SAC,
    SARSA,
    SFT,
    TQC,
    TRPO,
    MonteCarlo,
    QLearning,
    RewardModel,
)
from rl_modules import functional as F
from rl_modules.language.tokenizer import character_tokenizer


@dataclass(frozen=True)
class Place:
    """Where a case runs: an empty folder, and two checkpoints.

    Attributes:
        folder: the working directory.
        control: checkpoint of a PPO run on CartPole-v1.
        language: checkpoint of an SFT run on addition.
    """

    folder: Path
    control: str
    language: str


@dataclass(frozen=True)
class Case:
    """One input, and what its answer must name."""

    name: str
    run: Sequence[str] | Callable[[Place], Any]
    says: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)


CASES: list[Case] = []
SHORT = ("--data.total_timesteps=256", "--data.n_eval_episodes=1", "--data.n_test_episodes=1")
BRIEF = ("--data.total_timesteps=1500", *SHORT[1:])
CARTPOLE = ("fit", "--config", "ppo/cartpole.yaml", *SHORT)
ADDITION = ("fit", "--config", "sft/addition.yaml", "--trainer.max_steps=2", "--data.n_eval=4", "--data.n_train=16")
GRPO_ADDITION = (
    "fit", "--model", "GRPO", "--data", "PromptDataModule", "--data.task", "addition", "--data.n_train=16",
    "--data.n_eval=0", "--data.batch_size=8", "--model.max_completion_length=4", "--trainer.max_steps=2",
    "--trainer.accelerator=cpu",
)  # fmt: skip


def cli(name: str, words: str | Sequence[str], *says: str, **files: str | bytes) -> None:
    """A command; ``words`` after ``rl``, files by name (``__`` stands for a dot)."""
    words = words.split() if isinstance(words, str) else list(words)
    CASES.append(Case(name, words, says, {key.replace("__", "."): text for key, text in files.items()}))


def cartpole(option: str, *says: str) -> None:
    """``rl fit`` of PPO on CartPole-v1 with one more option."""
    cli(f"cartpole {option}", [*CARTPOLE, *option.split(" ", 1)], *says)


def config(name: str, text: str | bytes, *says: str) -> None:
    """``rl fit`` of a config file."""
    cli(f"config {name}", "fit --config mine.yaml", *says, mine__yaml=text)


def python(name: str, run: Callable[[Place], Any], *says: str, **files: str | bytes) -> None:
    """Python code that raises."""
    CASES.append(Case(name, run, says, {key.replace("__", "."): text for key, text in files.items()}))


def trainer(**arguments: Any) -> L.Trainer:
    """A Trainer that writes nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu",
             "enable_model_summary": False, "max_epochs": 1}  # fmt: skip
    return L.Trainer(**{**quiet, **arguments})


def fit(model: Any, data: Any, **arguments: Any) -> None:
    """Trains for one epoch."""
    trainer(**arguments).fit(model, datamodule=data)


def rollouts(env_id: Any = "CartPole-v1", **arguments: Any) -> RolloutDataModule:
    """Small rollouts without evaluation."""
    return RolloutDataModule(env_id, **{"n_envs": 2, "n_steps": 8, "eval_freq": 0, "total_timesteps": 32, **arguments})


# ------------------------------------------------------------------------------------------------ commands
cli("no such command", "fitt --config ppo/cartpole.yaml", "'fitt'", "did you mean fit")
cli("train", "train --config ppo/cartpole.yaml", "'train'", "which is one of fit")
cli("eval", "eval --config ppo/cartpole.yaml", "'eval'", "validate")
cli("an option first", "--config ppo/cartpole.yaml", "--config", "after the command")
cli("a config as word", "fit ppo/cartpole.yaml", "ppo/cartpole.yaml", "--config ppo/cartpole.yaml")
cli("a class as word", "fit PPO", "PPO", "--model PPO")
cli("fit alone", "fit", "no model is given", "--config")
cli("list of nothing", "list no-such-thing", "'no-such-thing'", "rl list")
cli("list of two", "list ppo dqn", "unknown option 'dqn'")
cli("copy without target", "copy ppo/cartpole.yaml", "rl copy", "required: target")
cli("copy of nothing", "copy ppo/nothing.yaml x.yaml", "'ppo/nothing.yaml'", "installed config")
cli("copy onto a file", "copy ppo/cartpole.yaml mine.yaml", "mine.yaml exists already", mine__yaml="")
cli("copy into no folder", "copy ppo/cartpole.yaml no/mine.yaml", "No such file")
cli("export without arguments", "export", "--ckpt_path", "--output")
cli("export with another argument", "export --ckpt x --output y", "required: --ckpt_path")
cli("export of no file", "export --ckpt_path no.ckpt --output out", "no.ckpt", "not a file")
cli("export of PPO", "export --ckpt_path {control} --output out", "PPO", "language model")
cli("export into a full folder", "export --ckpt_path {language} --output .", "output='.'", "new folder", x__txt="")
cli("export of a cut file", "export --ckpt_path cut.ckpt --output out", "cut.ckpt", "damaged", cut__ckpt=b"PK\3\4abc")
cli("doctor with words", "doctor now", "rl doctor: unknown option 'now'")
cli("completion of no shell", "completion tcsh", "'tcsh'", "bash", "zsh")

# ------------------------------------------------------------------------------------------------ --config
cli("config misspelled", "fit --config ppo/cartpoel.yaml", "'ppo/cartpoel.yaml'", "did you mean ppo/cartpole.yaml")
cli("config without its folder", "fit --config cartpole.yaml", "'cartpole.yaml'", "ppo/cartpole.yaml")
cli("config is an algorithm", "fit --config ppo", "'ppo'", "ppo/cartpole")
cli("config is an algorithm, capital", "fit --config PPO", "'PPO'", "ppo/cartpole")
cli("config is a folder", "fit --config .", "'.'", "folder")
cli("config is an environment", "fit --config CartPole-v1", "'CartPole-v1'", "ppo/cartpole")
cli("config without a name", "fit --config", "config ''")
cli("config with an empty name", ["fit", "--config="], "config ''")
cli("config is a checkpoint", "fit --config {control}", "ckpt", "not a valid YAML file")
config("syntax", "model: [PPO\n", "mine.yaml:2", "not a valid YAML file")
config("tabs", "model:\n\tclass_path: PPO\n", "mine.yaml:2", r"'.t' that cannot start")
config("empty", "", "mine.yaml", "None")
config("comments alone", "# nothing here\n", "mine.yaml", "None")
config("list", "- model\n- data\n", "mine.yaml", "model, data")
config("text", "just words\n", "mine.yaml", "just words")
config("number", "7\n", "mine.yaml holds 7")
config("duplicate key", "model: PPO\nmodel: A2C\n", "mine.yaml:2", "model", "twice")
config("duplicate nested key", "model:\n  class_path: PPO\n  init_args:\n    gamma: 1.0\n    gamma: 0.5\n",
       "mine.yaml:5", "gamma", "twice")  # fmt: skip
config("a template", "model: PPO\ndata:\n  class_path: RolloutDataModule\n  init_args: {env_id: {{ env }}}\n",
       "mine.yaml:4", "unhashable key")  # fmt: skip
config("a list as key", "[a]: 2\n", "mine.yaml:1", "unhashable key")
config("a list of models", "model: [PPO]\ndata: RolloutDataModule\n", "no model is given", "--model CLASS")
cartpole("--trainer.barebones true", "barebones=True", "Logging can impact raw speed")
cli("an environment that can't be made", [*CARTPOLE, "--data.env_id", "mine:make"], "mine:make can't be made: RuntimeError: boom",
    "mine.py:2", mine__py="def make():\n    raise RuntimeError('boom')\n")  # fmt: skip
cli("an environment that exits", [*CARTPOLE, "--data.env_id", "mine:make"], "mine:make raised SystemExit: 0", "mine.py:4",
    mine__py="import sys\nimport gymnasium as gym\nclass Env(gym.Wrapper):\n    def step(self, action): sys.exit(0)\n"
    "def make():\n    return Env(gym.make('CartPole-v1'))\n")  # fmt: skip
cli("a checkpoint that is a device", [*CARTPOLE, "--ckpt_path", "/dev/zero"], "/dev/zero is not a file", "\\.ckpt file")
config("modle", "modle:\n  class_path: PPO\n", "modle", "did you mean model")
config(
    "flat env_id", "model: PPO\ndata: RolloutDataModule\nenv_id: CartPole-v1\n", "env_id", "did you mean --data.env_id"
)
config("flat gamma", "model: PPO\ndata: RolloutDataModule\ngamma: 0.9\n", "gamma", "did you mean --model.gamma")
config(
    "flat max_steps",
    "model: PPO\ndata: RolloutDataModule\nmax_steps: 9\n",
    "max_steps",
    "did you mean --trainer.max_steps",
)
config("gamma beside class_path", "model:\n  class_path: PPO\n  gamma: 0.9\ndata: RolloutDataModule\n",
       "mine.yaml:3", "'gamma' stands beside class_path", "below init_args")  # fmt: skip
config("init_args of nothing", "model:\n  class_path: PPO\n  init_args:\ndata: RolloutDataModule\n", "mine.yaml:3",
       "'init_args' is empty", "leave it out")  # fmt: skip
config("a number as key", "model: PPO\ndata: RolloutDataModule\n1: 2\n", "mine.yaml", "model, data")
config("a deep list", "model: " + "[" * 3000 + "]" * 3000, "mine.yaml", "recursion depth")
config("init_args alone", "model:\n  init_args:\n    gamma: 0.9\ndata: RolloutDataModule\n", "model", "CLASS")
config("init_args of a list", "model:\n  class_path: PPO\n  init_args: [1]\ndata: RolloutDataModule\n", "init_args")
config("class_path of nothing", "model:\n  class_path:\ndata: RolloutDataModule\n", "model", "CLASS")
config("class_path misspelled", "model:\n  class_path: POP\ndata: RolloutDataModule\n", "'POP'", "PPO")
config("data misspelled", "model: PPO\ndata: RolloutsDataModule\n", "'RolloutsDataModule'",
       "did you mean RolloutDataModule")  # fmt: skip
config("binary", b"\x00\x01\xff\xfe\x80model", "mine.yaml", "UTF-8|text")
config("Latin-1", "model: PPO # für\n".encode("latin-1"), "mine.yaml", "UTF-8")
config("a Python object", "model: !!python/object/apply:os.system ['true']\n", "mine.yaml", "tag|python")
config("JSON that is cut", '{"model": {"class_path": "PPO"', "mine.yaml")
config("unknown argument", "model:\n  class_path: PPO\n  init_args:\n    gama: 0.9\ndata: RolloutDataModule\n",
       "gama", "did you mean gamma")  # fmt: skip
config("unknown Trainer argument", "model: PPO\ndata: RolloutDataModule\ntrainer:\n  max_epoch: 3\n",
       "max_epoch", "did you mean max_epochs")  # fmt: skip
config("logger misspelled", "model: PPO\ndata: RolloutDataModule\ntrainer:\n  logger: TensorbordLogger\n",
       "trainer.logger", "TensorbordLogger")  # fmt: skip

# ------------------------------------------------------------------------------------------------ names of options
for flat, meant in (
    ("lr", "model.learning_rate"), ("env", "data.env_id"), ("env_id", "data.env_id"), ("gamma", "model.gamma"),
    ("total_timesteps", "data.total_timesteps"), ("timesteps", "data.total_timesteps"),
    ("learning_rate", "model.learning_rate"), ("batch_size", "data.batch_size"),
    ("epochs", "trainer.max_epochs"), ("max_epochs", "trainer.max_epochs"), ("n_envs", "data.n_envs"),
    ("device", "trainer.devices"), ("devices", "trainer.devices"), ("gpus", "trainer.devices"),
    ("accelerator", "trainer.accelerator"), ("logger", "trainer.logger"),
    ("checkpoint_path", "ckpt_path"), ("precision", "trainer.precision"), ("algo", "model"),
):  # fmt: skip
    cartpole(f"--{flat} 1", f"'{flat}'|--{flat}", f"--{meant}")
cartpole("--print_confg", "print_confg", "did you mean print_config")
cartpole("--modle PPO", "modle", "did you mean model")
cartpole("--model.gama 1", "model.gama", "did you mean gamma")
cartpole("--model.lr 1", "model.lr", "learning_rate")
cartpole("--model.init_args.gama 1", "gama", "did you mean gamma")
cartpole("--model.clip_range_v 1", "clip_range_v", "did you mean clip_range_vf")
cartpole("--model.n_steps 1", "n_steps", "--data.n_steps")
cartpole("--data.gamma 1", "gamma", "--model.gamma")
cartpole("--data.n_env 1", "data.n_env", "did you mean n_envs")
cartpole("--data.env CartPole-v1", "data.env", "env_id")
cartpole("--data.max_epochs 1", "max_epochs", "--trainer.max_epochs")
cartpole("--trainer.acelerator cpu", "trainer.acelerator", "did you mean accelerator")
cartpole("--trainer.gpus 1", "trainer.gpus", "trainer.devices")
cartpole("--checkpoint.intervall_s 1", "intervall_s", "did you mean interval_s")
cartpole("-lr 1", "-lr|lr", "--model.learning_rate")

# The beginning of an option is not the option: nothing is trained with it, in a pipeline or a sweep neither.
for beginning, meant in {
    "trainer.max_step=3": "did you mean max_steps", "trainer.fast_dev true": "did you mean fast_dev_run",
    "checkpoint.interval 5": "did you mean interval_s", "seed 3": "did you mean --seed_everything",
    "thread 1": "did you mean threads", "ckpt x": "did you mean --ckpt_path", "res": "did you mean resume",
    "dat RolloutDataModule": "did you mean data",
}.items():  # fmt: skip
    cartpole(f"--{beginning}", re.split("[ =]", beginning)[0], meant)
for recipe, word, patterns in (
    (rlhf, "--sft.trainer.max_step=3", ("stage sft", "trainer.max_step", "did you mean max_steps")),
    (rlhf, "--preference=dpo", ("'--preference=dpo'", "did you mean preferences")),
    (rlhf, "--sam=3", ("'--sam=3'", "did you mean samples")),
    (r1, "--grpo.trainer.max_step=3", ("stage grpo", "trainer.max_step", "did you mean max_steps")),
    (r1, "--see=3", ("'--see=3'", "did you mean seed")),
    (r1, "--grp.model.beta=1", ("'--grp.model.beta=1'", "did you mean grpo")),
):  # fmt: skip
    python(
        f"{recipe.__name__} {word}", lambda p, recipe=recipe, word=word: recipe.run(*recipe.parse([word])), *patterns
    )
cli("replay with the beginning of an option", "replay . --step 1 --out x", "--out", "did you mean output")
cli("verify with the beginning of an option", "verify . --fro start", "--fro", "did you mean from")
SWEEP = "config: ppo/cartpole.yaml\nsearch: {model.gamma: {values: [0.9]}}\n"
cli("sweep with the beginning of an option", "sweep s.yaml --trainer.max_step=3", "max_step", "did you mean max_steps",
    s__yaml=SWEEP)  # fmt: skip
cli("sweep over no argument", "sweep s.yaml", "search", "model.gam'", "did you mean gamma",
    s__yaml=SWEEP.replace("gamma", "gam"))  # fmt: skip

# ------------------------------------------------------------------------------------------------ classes
cartpole("--model PPOO", "'PPOO'", "did you mean PPO")
cartpole("--model ppo", "'ppo'", "did you mean PPO")
cartpole("--model my_module.MyPPO", "my_module", "can't be imported|No module")
cartpole("--model numpy.ndarray", "ndarray", "LightningModule|ControlModule|rl_modules")
cartpole("--data RolloutDataModul", "'RolloutDataModul'", "did you mean RolloutDataModule")
cartpole("--data ReplayDataModule", "PPO learns from rollouts", "RolloutDataModule|n_steps")
cartpole("--model.optimizer 7", "optimizer", "7")
cartpole("--model.lr_scheduler StepLRR", "'StepLRR'", "lr_scheduler", "callable")
cartpole("--trainer.logger WanbLogger", "WanbLogger", "trainer.logger")
cartpole("--trainer.logger MLFlowLogger", "Requirement 'mlflow", "pip install")
cartpole("--trainer.logger 7", "trainer.logger", "7")
cartpole("--trainer.callbacks LearningRateMonitr", "trainer.callbacks", "LearningRateMonitr")
cartpole("--trainer.callbacks 7", "trainer.callbacks", "7")
cartpole("--trainer.profiler simpel", "profiler", "simple")
cartpole("--trainer.strategy dpp", "strategy", "dpp", "ddp")
cartpole("--trainer.accelerator tpuu", "accelerator", "tpuu", "auto|cpu")
cartpole("--trainer.accelerator gpu", "gpu backend")
cartpole("--trainer.strategy fsdp", "fsdp", "GPU")

cli("syntax error in the user's module", [*CARTPOLE, "--model", "broken.Mine"], "broken.py:2", "syntax",
    broken__py="import math\nclass Mine(:\n")  # fmt: skip
cli("error while the user's module is imported", [*CARTPOLE, "--model", "broken.Mine"], "broken.py:1",
    "ZeroDivisionError", broken__py="1 / 0\n")  # fmt: skip
# Wherever a file of the user's is named, an error in it is answered with its line.
USED = {
    "env_id": [*CARTPOLE, "--data.env_id", "mine:f"], "reward": [*GRPO_ADDITION, "--data.reward_funcs", "mine:f"],
    "task": [*ADDITION, "--data.task", "mine:f"], "network": [*CARTPOLE, "--model.network", "mine.f"],
    "advantages": [*GRPO_ADDITION, "--model.advantages", "mine:f"], "data": [*CARTPOLE, "--data", "mine.f"],
    "wrappers": [*CARTPOLE, "--data.wrappers", "[{class_path: mine.f}]"],
    "callbacks": [*CARTPOLE, "--trainer.callbacks", "mine.f"], "optimizer": [*CARTPOLE, "--model.optimizer", "mine.f"],
    "logger": [*CARTPOLE, "--trainer.logger", "mine.f"],
    "model": ["export", "--ckpt_path", "{language}", "--output", "out", "--model", "mine.f"],
}  # fmt: skip
BROKEN = {
    "def f(:\n    pass\n": (r"mine\.py:1: syntax error",), "import helper\n": (r"helper\.py:2: syntax error",),
    "import math\nimport no_such_package\n": (r"mine\.py:2 raised ModuleNotFoundError", "no_such_package"),
    "from math import no_such\n": (r"mine\.py:1 raised ImportError", "no_such"),
    "x = 1\nassert x == 2, 'no door'\n": (r"mine\.py:2 raised AssertionError: no door",),
    "x = 1\n": ("module 'mine' has no 'f'",),
}  # fmt: skip
for name, words in USED.items():
    for i, (code, patterns) in enumerate(BROKEN.items()):
        if i < 2 or name == "env_id":
            cli(f"{name} in a file {i}", words, name, *patterns, mine__py=code, helper__py="x = 1\ny = (\n")
cli("env_id in a file that exits", USED["env_id"], "env_id", r"mine\.py:2 raised SystemExit",
    mine__py="import sys\nsys.exit()\n")  # fmt: skip
cartpole("--data.env_id ./mine.py:f", "env_id", "a module is named as Python imports it, mine")
cli("the user's module lacks the class", [*CARTPOLE, "--model", "good.Min"], "good", "'?Min'?", "did you mean Mine",
    good__py="from rl_modules import PPO\n\n\nclass Mine(PPO):\n    pass\n")  # fmt: skip

# ------------------------------------------------------------------------------------------------ values
for option, says in {
    "model.gamma 7": "gamma=7.0", "model.gamma -1": "gamma=-1", "model.gamma nan": "gamma='?nan",
    "model.gamma high": "gamma='high'", "model.gae_lambda 2": "gae_lambda=2", "model.gae_lambda nan": "gae_lambda='?nan",
    "model.clip_range -1": "clip_range", "model.clip_range wide": "clip_range='wide'",
    "model.clip_range_vf -0.1": "clip_range_vf", "model.ent_coef nan": "ent_coef='?nan", "model.vf_coef -1": "vf_coef=-1",
    "model.max_grad_norm -1": "max_grad_norm=-1", "model.max_grad_norm nan": "max_grad_norm='?nan",
    "model.target_kl -1": "target_kl=-1", "model.target_kl 0": "target_kl=0",
    "model.policy_objective clipp": "policy_objective='clipp'",
    "model.kl_coef -1": "kl_coef=-1", "model.activation_fn rely": "activation_fn='rely'.*relu",
    "model.learning_rate fast": "learning_rate='fast'", "model.learning_rate -1": "learning_rate=.*-1",
    "model.learning_rate lin_": "learning_rate='lin_'", "model.learning_rate nan": "learning_rate",
    "model.net_arch [64,-1]": r"net_arch=\[64, -1\]", "model.net_arch [0]": r"net_arch=\[0\]",
    "model.net_arch {pi: [64], vv: [64]}": "net_arch.*vv", "model.net_arch wide": "net_arch='?wide",
    "model.net_arch [64,x]": "net_arch", "model.log_std_init nan": "log_std_init='?nan", "model.log_every 0": "log_every=0",
    "model.init_from no.ckpt": "init_from='no.ckpt'", "model.observation_space 3": "observation_space",
    "model.normalize_advantage perhaps": "normalize_advantage='perhaps'.*true or false",
    "data.n_envs 0": "n_envs=0", "data.n_envs -3": "n_envs=-3", "data.n_envs x": "data.n_envs='x' must be a number",
    "data.n_envs 1.5": "n_envs=1.5 must be a whole number", "data.n_steps 0": "n_steps=0",
    "data.batch_size 0": "batch_size=0", "data.batch_size 300": "batch_size=300 must lie between", "data.n_minibatches 300": "n_minibatches=300 is more",
    "data.batch_size all": "batch_size='all'", "data.n_epochs 0": "n_epochs=0", "data.rollouts_per_epoch 0": "rollouts_per_epoch=0",
    "data.total_timesteps 0": "total_timesteps=0", "data.total_timesteps -5": "total_timesteps=-5",
    "data.total_timesteps 1.5": "total_timesteps=1.5 must be a whole number", "data.total_timesteps 1e": "total_timesteps='1e'",
    "data.total_timesteps inf": "total_timesteps='inf'|total_timesteps=inf",
    "data.seed -1": "seed=-1", "data.vectorization_mode synk": "vectorization_mode='synk'.*sync",
    "data.autoreset_mode next": "autoreset_mode='next'.*next_step", "data.norm_gamma 2": "norm_gamma=2",
    "data.clip_obs -1": "clip_obs=-1", "data.clip_obs 0": "clip_obs=0", "data.clip_reward nan": "clip_reward='?nan",
    "data.eval_freq -1": "eval_freq=-1", "data.n_eval_episodes 0": "n_eval_episodes=0",
    "data.n_test_episodes 0": "n_test_episodes=0", "data.eval_max_steps 0": "eval_max_steps=0",
    "data.stats_window_size 0": "stats_window_size=0", "data.norm_obs maybe": "norm_obs='maybe'.*true or false",
    "data.env_kwargs {max_episode_step: 3}": "env_kwargs.*max_episode_step", "data.env_kwargs 3": "env_kwargs",
    "data.wrappers [NoWrapper]": "wrappers.*'NoWrapper'", "data.wrappers [{class_path: TimeLimit}]": "TimeLimit.*max_episode_steps",
    "data.wrappers TimeLimit": "wrappers", "data.wrappers [3]": "wrappers",
    "trainer.max_epochs x": "max_epochs='x'", "trainer.max_epochs -5": "max_epochs", "trainer.max_steps x": "max_steps='x'",
    "trainer.devices 0": "devices='0'.*not a valid input", "trainer.devices x": "devices.*int > 0", "trainer.devices -2": "devices",
    "trainer.precision fp16": "precision.*fp16|16-mixed",
    "trainer.precision half": "precision.*16-mixed", "trainer.precision bf16-true": "precision=bf16-true.*bf16-mixed",
    "trainer.gradient_clip_algorithm norms": "gradient_clip_algorithm.*norms",
    "trainer.limit_train_batches -1": "limit_train_batches",
    "trainer.max_time 5": "duration", "trainer.num_nodes 0": "num_nodes", "trainer.num_nodes 2": "wait for other machines",
    "trainer.gradient_clip_val -1": "gradient_clip_val=-1",
    "threads 0": "threads.*PositiveInt", "threads -1": "threads.*-1", "threads many": "threads.*many",
    "record_every -1": "record_every=-1",
    "checkpoint.mode maxx": "mode='maxx'.*max", "checkpoint.interval_s -1": "interval_s=-1",
    "checkpoint.max_share 2": "max_share=2", "seed_everything -1": r"seed_everything=-1 must lie in \[0, 4294967295\]", "seed_everything x": "seed_everything",
    "seed_everything 99999999999": "must lie in", "ckpt_path none.ckpt": "ckpt_path='none.ckpt'.*\\.ckpt file",
    "ckpt_path .": "folder", "ckpt_path best": "best",
}.items():  # fmt: skip
    cartpole(f"--{option}", says)

cli("a metric that no evaluation has", ["fit", "--config", "ppo/cartpole.yaml", *BRIEF, "--data.eval_freq=256",
    "--checkpoint.monitor=eval/nothing"], "monitor='eval/nothing'.*eval/mean_reward")  # fmt: skip
cli("learning rate twice", [*CARTPOLE, "--model.lr_scheduler", "StepLR", "--model.lr_scheduler.step_size", "2"],
    "learning_rate='lin_1e-3'", "lr_scheduler")  # fmt: skip
cli("resume and a checkpoint", [*CARTPOLE, "--resume", "--ckpt_path", "{control}"], "--resume", "--ckpt_path")
cli("a log folder that is a file", [*CARTPOLE, "--trainer.default_root_dir", "taken"], "taken", "Not a dir", taken="")
cli("logs is a file", [*CARTPOLE], "logs", "Not a dir", logs="")
cli("frames without a renderer", [*CARTPOLE, "--record_every", "100", "--data.env_id", "FrozenLake-v1",
                                  "--data.env_kwargs", "{render_modes: x}"], "env_kwargs")  # fmt: skip

# ------------------------------------------------------------------------------------------------ other algorithms
for algorithm, options in {
    "dqn/cartpole.yaml": {
        "model.tau 2": "tau=2", "model.target_update_interval 0": "target_update_interval=0",
        "model.exploration_fraction 2": "exploration_fraction=2", "model.exploration_final_eps -1": "exploration_final_eps=-1",
        "model.exploration_initial_eps 2": "exploration_initial_eps=2",
        "model.loss huberr": "loss='huberr'", "data.buffer_size 1": "buffer_size=1", "data.train_freq 0": "train_freq=0",
        "data.gradient_steps 0": "gradient_steps=0", "data.learning_starts 10000000": "learning_starts=10000000",
        "data.buffer_size 100000000000": "buffer_size=100000000000.*GiB|buffer_size=100000000000",
        "data.n_steps 0": "n_steps=0", "data.share_frames true": "share_frames=True", "data.env_id Pendulum-v1": "DQN.*Discrete",
        "model.max_grad_norm -1": "max_grad_norm=-1", "model.net_arch [0]": "net_arch",
    },
    "sarsa/maze.yaml": {
        "model.learning_rate -1": "learning_rate", "model.learning_rate 2": "learning_rate",
        "data.env_id CartPole-v1": "SARSA.*(Discrete|table)", "model.initial_value nan": "initial_value='?nan",
        "model.exploration_fraction -1": "exploration_fraction=-1",
    },
    "trpo/cartpole.yaml": {
        "model.target_kl -1": "target_kl", "model.cg_max_steps 0": "cg_max_steps=0", "model.cg_damping -1": "cg_damping=-1",
        "model.line_search_shrinking_factor 2": "line_search_shrinking_factor=2", "model.batch_size 0": "batch_size=0",
        "model.line_search_max_iter 0": "line_search_max_iter=0", "model.n_critic_updates -1": "n_critic_updates=-1",
        "trainer.gradient_clip_val 1": "gradient_clip_val", "trainer.accumulate_grad_batches 2": "accumulate_grad_batches",
    },
    "a2c/cartpole.yaml": {"model.rms_prop_eps -1": "rms_prop_eps=-1", "data.n_epochs 3": "n_epochs=3"},
    "reinforce/cartpole.yaml": {"model.psi rewards": "psi='rewards'.*reward_to_go"},
}.items():  # fmt: skip
    for option, says in options.items():
        cli(f"{algorithm} --{option}", ["fit", "--config", algorithm, *BRIEF, *f"--{option}".split(" ", 1)], says)
cli("hindsight without goals", ["fit", "--config", "dqn/cartpole.yaml", *BRIEF, "--data.n_steps", "1",
    "--data.n_sampled_goal", "4"],
    "n_sampled_goal", "achieved_goal", "CartPole-v1")  # fmt: skip
cli("hindsight by another strategy", ["fit", "--config", "dqn/bit_flipping.yaml", "--data.goal_selection_strategy",
    "random"], "goal_selection_strategy='random'", "future, final, episode")  # fmt: skip
cli("A2C with overlap", ["fit", "--config", "a2c/cartpole.yaml", *BRIEF, "--data.overlap", "true"], "overlap=True",
    "A2C's update", "leave overlap out")  # fmt: skip
cartpole("--data.overlap 2", "overlap", "2")
cartpole(
    "--trainer.callbacks EarlyStoping", "trainer.callbacks 'EarlyStoping' is not known; did you mean EarlyStopping"
)
cartpole("--model.optimizer Adma", "model.optimizer 'Adma' is not known; did you mean Adam")
cli("a module's environment with a dot", [*CARTPOLE, "--data.env_id", "envs.Good"], "did you mean envs:Good",
    envs__py="class Good: ...")  # fmt: skip
cli("a file as environment", [*CARTPOLE, "--data.env_id", "envs.py"], "after a colon: envs:make_env",
    envs__py="class Good: ...")  # fmt: skip
cli("token ids as demonstrations", "fit --model SFT --data InstructionDataModule --data.path rows.jsonl",
    "rows.jsonl:1: 'prompt' is missing, there is only input_ids, labels; give it as text",
    rows__jsonl='{"input_ids": [1, 2], "labels": [1, 2]}\n')  # fmt: skip
cli("overlap in float64", [*CARTPOLE, "--data.overlap", "true", "--trainer.precision", "64-true"], "overlap=True",
    "64-true")  # fmt: skip
cli("PPO with generations ahead", "fit --config rlhf_ppo/addition.yaml --model.model_name_or_path null "
    "--data.async_generations 1 --trainer.max_steps 1", "async_generations=1", "RLHFPPO does not correct")  # fmt: skip

# ------------------------------------------------------------------------------------------------ evaluation commands
for command in ("validate", "test", "predict", "record"):
    cli(f"{command} without a checkpoint", [command, "--config", "ppo/cartpole.yaml"], "ckpt_path", command)
cli("validate a language model without weights", "validate --config sft/addition.yaml", "ckpt_path",
    "model_name_or_path")  # fmt: skip
cli("test with an option of fit", "test --config ppo/cartpole.yaml --ckpt_path {control} --checkpoint.interval_s 1",
    "checkpoint.interval_s", "rl fit")  # fmt: skip
cli("predict to text", "predict --config ppo/cartpole.yaml --ckpt_path {control} --output x.txt", ".csv", ".jsonl")
cli("record a language model", "record --config sft/addition.yaml --ckpt_path {language}", "rl predict")
cli("validate with another algorithm's", "validate --config a2c/cartpole.yaml --ckpt_path {control}", "PPO", "A2C")
cli("validate with a language model's", "validate --config ppo/cartpole.yaml --ckpt_path {language}", "SFT", "PPO")
cli("validate a language model with a policy's", "validate --config sft/addition.yaml --ckpt_path {control}", "PPO",
    "SFT")  # fmt: skip
cli("validate on another environment", "validate --config ppo/pendulum.yaml --ckpt_path {control}", "CartPole-v1")
cli("validate with another network", "validate --config ppo/cartpole.yaml --ckpt_path {control} --model.net_arch [8]",
    "the checkpoint holds another network", r"net_arch=.* there, \[8\] here")  # fmt: skip
cli("validate with text", "validate --config ppo/cartpole.yaml --ckpt_path x.ckpt", "x.ckpt", "damaged", x__ckpt="hi")
cli("validate with nothing", "validate --config ppo/cartpole.yaml --ckpt_path x.ckpt", "x.ckpt", "damaged", x__ckpt="")
cli("validate with the config", "validate --config ppo/cartpole.yaml --ckpt_path x.yaml", "x.yaml", x__yaml="a: 1")
cli("init_from a language model's", [*CARTPOLE, "--model.init_from", "{language}"], "init_from|SFT", "PPO")
cli("init_from text", [*CARTPOLE, "--model.init_from", "x.ckpt"], "init_from='x.ckpt'", x__ckpt="hi")

# ------------------------------------------------------------------------------------------------ environments
cartpole("--data.env_id CartPol-v1", "'CartPol-v1'", "did you mean CartPole-v1")
cartpole("--data.env_id cartpole", "'cartpole'", "CartPole-v1")
cartpole("--data.env_id CartPole-v7", "CartPole-v7", "v1")
cartpole("--data.env_id null", "env_id", "Gymnasium id")
cartpole("--data.env_id 7", "env_id")
cartpole("--data.env_id no_module:make", "no_module", "can't be imported")
cartpole("--data.env_id math:nothing", "math", "nothing")
cartpole("--data.env_id math:pi", "env_id", "pi")
cartpole("--data.env_id broken:make", "broken.py:1|broken")

WORLDS = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces


class World(gym.Env):
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 0.0, False, False, {}


class OldStep(World):
    def step(self, action):
        return np.zeros(3, np.float32), 0.0, False, {}


class OldReset(World):
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32)


class OldSeed(World):
    def reset(self):
        return np.zeros(3, np.float32), {}


class WrongShape(World):
    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}


class WrongShapeLater(World):
    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, False, {}


class NoObservationSpace(World):
    observation_space = None


class NoActionSpace(World):
    action_space = None


class TextReward(World):
    def step(self, action):
        return np.zeros(3, np.float32), "good", False, False, {}


class NoReward(World):
    def step(self, action):
        return np.zeros(3, np.float32), None, False, False, {}


class TextEnd(World):
    def step(self, action):
        return np.zeros(3, np.float32), 0.0, "False", False, {}


class ShortEnd(World):
    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}


class ComplexObservation(World):
    def step(self, action):
        return np.zeros(3, np.complex64), 0.0, False, False, {}


class NanObservation(World):
    def step(self, action):
        return np.full(3, np.nan, np.float32), 0.0, False, False, {}


class NoSuchState(World):
    observation_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return -1, 0.0, False, False, {}


class Raises(World):
    def step(self, action):
        raise KeyError("door")


class RaisesInReset(World):
    def reset(self, *, seed=None, options=None):
        raise FileNotFoundError("level.txt")


class NoStep(gym.Env):
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)


class NoDictionary(World):
    def step(self, action):
        return np.zeros(3, np.float32), 0.0, False, False, None


class ListInfo(World):
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), []


class NoInfo(World):
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), None


class NoObservation(World):
    def step(self, action):
        return None, 0.0, False, False, {}


class NoFirstObservation(World):
    def reset(self, *, seed=None, options=None):
        return None, {}


class TextObservation(World):
    observation_space = spaces.Text(5)


class EmptyAction(World):
    action_space = spaces.Sequence(spaces.Discrete(2))


class Foreign:
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)


def nothing():
    return None


def needs(level):
    return World()


instance = World()
"""
for world, says in {
    "OldStep": ("step", "terminated, truncated, info"), "OldReset": ("reset", "observation, info"),
    "OldSeed": ("reset", "seed"), "WrongShape": ("(4,)", "(3,)"), "WrongShapeLater": ("(4,)", "(3,)"),
    "NoObservationSpace": ("observation_space",), "NoActionSpace": ("action_space",), "TextReward": ("float", "good"),
    "NoReward": ("reward", "NaN"), "NanObservation": ("NaN", "observation"), "Raises": ("KeyError", "door"),
    "NoSuchState": ("-1", "Discrete.3."), "TextEnd": ("terminated='False'", "true or false"),
    "ShortEnd": ("(1,)", "(3,)"), "ComplexObservation": ("complex64", "float32"),
    "RaisesInReset": ("FileNotFoundError", "level.txt"), "NoStep": ("reset|step",), "NoDictionary": ("info|step",),
    "ListInfo": (r"\[\]\).*reset", "info"), "NoInfo": (r"None\).*reset", "info"),
    "NoObservation": ("the observation None", "(3,)"), "NoFirstObservation": (r"\(None, .*reset", "observation"),
    "TextObservation": ("Text",), "EmptyAction": ("can't act in", "Sequence"), "Foreign": ("Foreign", "gymnasium.Env"),
    "nothing": ("nothing", "None"), "needs": ("needs", "level"), "instance": ("instance|World", "callable"),
}.items():  # fmt: skip
    patterns = tuple(f"\\({s[1:-1]}\\)" if s.startswith("(") else s for s in says)
    cli(f"environment {world}", [*CARTPOLE, "--data.env_id", f"worlds:{world}"], *patterns, worlds__py=WORLDS)

# ------------------------------------------------------------------------------------------------ language: commands
addition: dict[str, tuple[str, ...]] = {
    "model.model_config {hiden_size: 64}": ("model_config", "hiden_size", "did you mean hidden_size"),
    "model.model_config {model_type: qwen9}": ("model_config", "qwen9"),
    "model.model_config {hidden_size: 30}": ("model_config|hidden_size",),
    "model.model_config 7": ("model_config",),
    "model.model_config {quantization_config: {load_in_4bit: true}}": ("model_config", "quantization_config"),
    "model.model_config {dtype: bfloat16}": ("model_config", "dtype='bfloat16'", "torch_dtype"),
    "model.model_name_or_path no/such/model": ("model_name_or_path|'no/such/model'", "directory"),
    "model.model_name_or_path .": ("tokenizer", "directory"),
    "model.torch_dtype float8": ("torch_dtype='float8'", "bfloat16"),
    "model.quantization_config {bits: 4}": ("quantization_config", "load_in_4bit"),
    "model.quantization_config {load_in_4bit: true}": ("quantization_config", "give lora"),
    "model.use_liger_kernel true": ("use_liger_kernel=true needs a GPU",),
    "model.learning_rate -1": ("learning_rate",), "model.learning_rate fast": ("learning_rate='fast'",),
    "model.warmup_steps -1": ("warmup_steps=-1",), "model.lora {rank: 3}": ("lora", "rank"),
    "model.max_completion_length 0": ("max_completion_length=0",),
    "model.gradient_checkpointing some": ("gradient_checkpointing='some'", "selective"),
    "model.max_grad_norm -1": ("max_grad_norm=-1",),
    "data.task adition": ("'adition'", "did you mean addition"), "data.task no.module:Task": ("no.module", "imported"),
    "data.task math:pi": ("math:pi", "Task"),
    "data.task_kwargs {digits: 3}": ("digits", "did you mean n_digits"), "data.path none.jsonl": ("task and path",),
    "data.batch_size 0": ("batch_size=0",), "data.n_eval -1": ("n_eval=-1",), "data.n_train 0": ("n_train=0",),
    "data.n_train -4": ("n_train=-4",), "data.eval_steps -1": ("eval_steps=-1",), "data.max_length 0": ("max_length=0",),
    "data.overlong drp": ("overlong='drp'", "drop"),
    "data.eval_temperature -1": ("eval_temperature=-1",), "data.eval_top_p 2": ("eval_top_p=2",),
    "data.env_id CartPole-v1": ("env_id", "InstructionDataModule"),
    "data.total_timesteps 100": ("total_timesteps", "InstructionDataModule takes"),
}  # fmt: skip
for option, says in addition.items():
    cli(f"sft --{option}", [*ADDITION, *f"--{option}".split(" ", 1)], *says)
grpo: dict[str, tuple[str, ...]] = {
    "data.reward_funcs acuracy": ("'acuracy'", "did you mean accuracy"),
    "data.reward_funcs no.module:f": ("no.module", "imported"), "data.reward_funcs math:pi": ("math:pi", "function"),
    "data.reward_funcs length_reward": ("length_reward", "target"),
    "data.reward_funcs [{length_reward: {targt: 3}}]": ("targt", "did you mean target"),
    "data.num_generations 0": ("num_generations=0",),
    "data.num_generations 3": ("num_generations=3 does not divide",), "data.num_generations 1": ("num_generations=1",),
    "data.steps_per_generation 0": ("steps_per_generation=0",), "data.num_iterations 0": ("num_iterations=0",),
    "data.reward_time_limit_s -1": ("reward_time_limit_s=-1",), "data.reward_workers 0": ("reward_workers=0",),
    "model.temperature -1": ("temperature=-1",), "model.temperature 0": ("temperature=0",),
    "model.top_p 2": ("top_p=2",), "model.top_k -1": ("top_k=-1",), "model.beta -1": ("beta=-1",),
    "model.epsilon -1": ("epsilon=-1",), "model.loss_type gropo": ("loss_type='gropo'", "grpo"),
    "model.scale_rewards groups": ("scale_rewards='groups'", "group"),
    "model.importance_sampling_level word": ("importance_sampling_level='word'", "token"),
    "model.reward_weights [1,2]": ("reward_weights", "2"), "model.max_completion_length 0": ("max_completion_length=0",),
    "model.max_completion_length 100000": ("max_completion_length=100000",), "data.batch_size 7": ("batch_size",),
    "trainer.accumulate_grad_batches 3": ("accumulate_grad_batches=3",), "model.num_generations 4": ("--data.num_generations",),
}  # fmt: skip
for option, says in grpo.items():
    cli(f"grpo --{option}", [*GRPO_ADDITION, *f"--{option}".split(" ", 1)], *says)

rewards = """
def text(prompts, completions, **columns):
    return ["good"] * len(completions)


def nothing(prompts, completions, **columns):
    return [None] * len(completions)


def one(prompts, completions, **columns):
    return 1.0


def short(prompts, completions, **columns):
    return [1.0]


def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)


def fails(prompts, completions, **columns):
    return 1 / 0


def needs(prompts, completions, colour):
    return [0.0] * len(completions)


class Judge:
    pass
"""
for name, reward_says in {
    "text": ("'text'", "'good'", "number"), "nothing": ("nothing", "None|no reward"), "one": ("'one'", "list"),
    "short": ("'short'", "1 values for"), "nan": ("nan", "NaN|finite"), "fails": ("'fails'", "ZeroDivisionError"),
    "needs": ("'needs'", "colour"), "missing": ("missing",), "Judge": ("Judge", "function"),
}.items():  # fmt: skip
    # Of two prompts: a single one may be of a kind that no function judges.
    cli(f"reward {name}", [*GRPO_ADDITION, "--data.batch_size=16", f"--data.reward_funcs=judges:{name}"],
        *reward_says, judges__py=rewards)  # fmt: skip

for name, text, record_says in (
    ("syntax", '{"prompt": "1"\n', (r"mine\.jsonl:1", "JSON")),
    ("list", "[1]\n", (r"mine\.jsonl:1", "object")),
    ("second line", '{"prompt": "1", "completion": "2"}\n{"prompt": }\n', (r"mine\.jsonl:2", "JSON")),
    ("no completion", '{"prompt": "1"}\n', (r"mine\.jsonl:1", "completion")),
    ("NaN completion", '{"prompt": "1", "completion": NaN}\n', (r"mine\.jsonl:1", "completion", "NaN|nan")),
    ("null completion", '{"prompt": "1", "completion": null}\n', (r"mine\.jsonl:1", "completion")),
    ("a list as completion", '{"prompt": "1", "completion": [1]}\n', (r"mine\.jsonl:1", "completion")),
    ("no prompt", '{"question": "1", "completion": "2"}\n', (r"mine\.jsonl:1", "prompt", "columns")),
    ("empty", "", (r"mine\.jsonl", "empty")),
    ("Latin-1", '{"prompt": "ü", "completion": "2"}\n'.encode("latin-1"), (r"mine\.jsonl:1", "UTF-8")),
):
    cli(f"records {name}", ["fit", "--model", "SFT", "--data", "InstructionDataModule", "--data.path", "mine.jsonl",
                            "--trainer.max_steps=1", "--data.n_eval=0"], *record_says, mine__jsonl=text)  # fmt: skip
cli("a row without a cell", ["fit", "--model", "SFT", "--data", "InstructionDataModule", "--data.path", "m.csv",
    "--trainer.max_steps=1"], "m.csv:3: 1 cells under the 2 names", "comma", m__csv="prompt,completion\na,b\nc\n")  # fmt: skip
cli("serve: the engine that went", "serve --engine native --port 0", "--engine=native", "--model.sampler native")
cli("records of no file", ["fit", "--model", "SFT", "--data", "InstructionDataModule", "--data.path", "no.jsonl",
                           "--trainer.max_steps=1"], "no.jsonl")  # fmt: skip
cli("no source", "fit --model SFT --data InstructionDataModule --trainer.max_steps=1", "task, path and dataset")
cli("no end", "fit --model SFT --data InstructionDataModule --data.task addition", "max_steps")

TASKS = """
from datamodules.language import Task


class NoSolve(Task):
    name = "nosolve"

    def draw(self, rng):
        return {"question": str(rng.random())}


class NoDraw(Task):
    name = "nodraw"

    def solve(self, question, rng):
        return {"answer": "1"}
"""
for name, missing in (("NoSolve", "solve"), ("NoDraw", "draw")):
    cli(f"task without {missing}", [*ADDITION, "--data.task", f"tasks:{name}"], name, missing, tasks__py=TASKS)
# What a task's methods return that is none of the contract's types, by the class's body.
for name, (body, *patterns) in {
    "draws None": ("def draw(self, rng): return None", "has None as a question", "a dict of the template's fields"),
    "draws text": ("def draw(self, rng): return '1 + 1'", r"has '1 \+ 1' as a question"),
    "fails to draw": ("def draw(self, rng): return {}['x']", r"raised KeyError: 'x' \(.*mine\.py:9\)"),
    "solves by None": ("def solve(self, question, rng): return None", "solve of task 'mine' returned None", "a dict"),
    "answers by a list": ("def solve(self, question, rng): return {'answer': ['2']}", "record 0: 'answer' is list"),
    "demonstrates by a list": (
        "def solve(self, question, rng): return {'answer': '2', 'completion': ['2']}",
        "record 0: 'completion' is list",
    ),
    "asks by a number": ("def prompt(self, question): return rng_of(question)", "record 0: 'prompt' is int"),
    "asks by a dictionary": ("def prompt(self, question): return {**question}", "record 0: 'prompt' is dict"),
    "asks the same again": ("def prompt(self, question): return 'x'", "only 1 with different prompts"),
    "returns no records": ("def records(self, split, n): return []", "no records in its train split"),
    "returns texts": ("def records(self, split, n): return ['a'] * n", "record 0 is str 'a'", "a dict with prompt"),
    "has no rewards": ("reward_funcs = None", "reward_funcs=None", "a list of functions"),
    "names its rewards": ("reward_funcs = ['accuracy']", r"reward_funcs=\['accuracy'\]", "a list of functions"),
    "begins by an error": ("def __init__(self, seed=0): raise OSError('door')", "OSError: door", r"mine\.py:9"),
    "judges by an error": ("def is_correct(self, answer, record): return 1 / 0", r"ZeroDivisionError.*mine\.py:9"),
}.items():
    code = f"""from datamodules.language import Task
def rng_of(question): return hash(question['question'])
class Base(Task):
    name = 'mine'
    def draw(self, rng): return {{'question': f'{{rng.randrange(1000)}} + 1 ='}}
    def solve(self, question, rng): return {{'answer': '2'}}

class Mine(Base):
    {body}
"""
    cli(
        f"a task that {name}",
        [*GRPO_ADDITION, "--data.task", "mine:Mine", "--data.batch_size=16"],
        *patterns,
        mine__py=code,
    )

for model, datamodule, fitting in (
    ("PPO", "PromptDataModule", "RolloutDataModule"), ("SFT", "PromptDataModule", "InstructionDataModule"),
    ("RewardModel", "InstructionDataModule", "PreferenceDataModule"), ("GRPO", "RolloutDataModule", "PromptDataModule"),
    ("DQN", "RolloutDataModule", "ReplayDataModule"), ("DPO", "PromptDataModule", "PreferenceDataModule"),
    ("SFT", "RolloutDataModule", "InstructionDataModule"), ("QLearning", "ReplayDataModule", "RolloutDataModule"),
    ("KTO", "InstructionDataModule", "PreferenceDataModule"), ("GRPO", "InstructionDataModule", "PromptDataModule"),
):  # fmt: skip
    source = [] if datamodule in ("RolloutDataModule", "ReplayDataModule") else ["--data.task", "addition"]
    source += ["--trainer.max_steps=1"] if source or model in ("SFT", "GRPO") else []
    cli(f"{model} with {datamodule}", ["fit", "--model", model, "--data", datamodule, *source], model, datamodule,
        f"use {fitting}")  # fmt: skip

# ------------------------------------------------------------------------------------------------ Python: control
python("the model named as in Stable-Baselines3", lambda p: PPO("MlpPolicy", gym.make("CartPole-v1")), "MlpPolicy",
       "RolloutDataModule", "fit")  # fmt: skip
python("a model's environment", lambda p: PPO(env="CartPole-v1"), "env", "RolloutDataModule|datamodule")
python("a model's argument misspelled", lambda p: PPO(gama=0.9), "gama", "did you mean gamma")
python("a model's argument of SB3", lambda p: PPO(n_steps=64), "n_steps", "RolloutDataModule")
python("DQN's policy", lambda p: DQN("MlpPolicy", "CartPole-v1"), "MlpPolicy", "ReplayDataModule")
python(
    "data's argument misspelled", lambda p: RolloutDataModule("CartPole-v1", n_env=3), "n_env", "did you mean n_envs"
)
python("data's argument of the model", lambda p: RolloutDataModule("CartPole-v1", gamma=0.9), "gamma", "module")
python("model alone", lambda p: trainer().fit(PPO()), "PPO", "datamodule=RolloutDataModule")
python("DQN alone", lambda p: trainer().fit(DQN()), "DQN", "datamodule=ReplayDataModule")
python("no environment", lambda p: RolloutDataModule(None), "env_id=None", "Gymnasium id")
python("environment by number", lambda p: RolloutDataModule(7), "env_id=7", "Gymnasium id")
python(
    "an instance of an environment",
    lambda p: RolloutDataModule(gym.make("CartPole-v1")),
    "one environment",
    "CartPole-v1",
)
python("DQN with rollouts", lambda p: fit(DQN(), rollouts()), "DQN learns from replay", "ReplayDataModule")
python("PPO with replay", lambda p: fit(PPO(), ReplayDataModule("CartPole-v1", learning_starts=8, total_timesteps=64)),
       "PPO learns from rollouts", "RolloutDataModule")  # fmt: skip
python("PPO with prompts", lambda p: fit(PPO(), PromptDataModule("addition", batch_size=8)), "PPO", "PromptDataModule",
       "use RolloutDataModule")  # fmt: skip
python("GRPO with rollouts", lambda p: fit(GRPO(), rollouts()), "GRPO", "RolloutDataModule", "use PromptDataModule")
python("SFT with prompts", lambda p: fit(SFT(), PromptDataModule("addition", batch_size=8)), "SFT",
       "use InstructionDataModule")  # fmt: skip
python("RewardModel with demonstrations", lambda p: fit(RewardModel(), InstructionDataModule("addition")), "RewardModel",
       "use PreferenceDataModule")  # fmt: skip
python("DPO with demonstrations", lambda p: fit(DPO(), InstructionDataModule("addition")), "DPO",
       "use PreferenceDataModule")  # fmt: skip
python("SARSA on CartPole", lambda p: fit(SARSA(), rollouts()), "SARSA", "Discrete")
python("MonteCarlo on CartPole", lambda p: fit(MonteCarlo(), rollouts()), "MonteCarlo", "Discrete")
python("QLearning on pixels", lambda p: fit(QLearning(), rollouts(lambda: Box())), "QLearning", "Discrete")
python("TRPO with two devices' strategy", lambda p: fit(TRPO(), rollouts(), strategy="fsdp"), "strategy|fsdp")
python("net_arch of zeros", lambda p: A2C(net_arch=[0]), r"net_arch=\[0\]")
python("net_arch of a number", lambda p: A2C(net_arch=64), "net_arch=64", "list")
python("net_arch of floats", lambda p: A2C(net_arch=[64.5]), "net_arch", "64.5")
python("gamma of text", lambda p: PPO(gamma="0.9x"), "gamma", "0.9x")
python("gamma of None", lambda p: PPO(gamma=None), "gamma", "None")
python("max_grad_norm below zero", lambda p: REINFORCE(max_grad_norm=-1), "max_grad_norm=-1")
python("norm_gamma above one", lambda p: RolloutDataModule("CartPole-v1", norm_gamma=2), "norm_gamma=2")
python("n_envs of text", lambda p: RolloutDataModule("CartPole-v1", n_envs="4x"), "n_envs", "4x")
python("n_envs of half", lambda p: RolloutDataModule("CartPole-v1", n_envs=1.5), "n_envs=1.5", "whole number")
python("n_steps of half", lambda p: RolloutDataModule("CartPole-v1", n_steps=2.5), "n_steps=2.5", "whole number")
python(
    "total_timesteps of None", lambda p: RolloutDataModule("CartPole-v1", total_timesteps=None), "total_timesteps=None"
)
python("buffer_size of text", lambda p: ReplayDataModule("CartPole-v1", buffer_size="big"), "buffer_size", "big")


class Box(gym.Env):
    """An environment of images."""

    observation_space = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    action_space = spaces.Discrete(2)


class Gone(gym.Env):
    """Lacks its spaces."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return 0, {}


python("an environment without spaces", lambda p: fit(PPO(), rollouts(Gone)), "Gone", "observation_space")
python("a callable of None", lambda p: fit(PPO(), rollouts(lambda: None)), "NoneType|None", "gymnasium.Env")


def loaded(p: Place) -> PPO:
    """The trained policy."""
    return PPO.load_from_checkpoint(p.control)


python("predict before the spaces", lambda p: PPO().predict(np.zeros(4)), "PPO", "spaces", "observation_space")
python("predict a wrong shape", lambda p: loaded(p).predict(np.zeros(5)), r"\(5,\)", r"\(4,\)")
python("predict text", lambda p: loaded(p).predict("north"), "observation", "north|str|number")
python("predict None", lambda p: loaded(p).predict(None), "observation", "None")
python("predict a dictionary", lambda p: loaded(p).predict({"x": np.zeros(4)}), "observation", "dict|shape")
python("predict NaN", lambda p: loaded(p).predict(np.full(4, np.nan)), "observation", "NaN")
python("predict NaN in float64", lambda p: loaded(p).predict(np.full((2, 4), np.nan, np.float64)), "observation", "NaN")
python("predict reset's pair", lambda p: loaded(p).predict(gym.make("CartPole-v1").reset()), "observation",
       "reset|tuple")  # fmt: skip

python("load no file", lambda p: PPO.load_from_checkpoint("no.ckpt"), "no.ckpt")
python("load a folder", lambda p: PPO.load_from_checkpoint("."), "folder|directory")
python("load text", lambda p: PPO.load_from_checkpoint("x.ckpt"), "x.ckpt", x__ckpt="hi")
python("load another algorithm's", lambda p: A2C.load_from_checkpoint(p.control), "PPO", "A2C")
python("load a language model's", lambda p: PPO.load_from_checkpoint(p.language), "SFT", "PPO")
python("load a policy as language model", lambda p: SFT.load_from_checkpoint(p.control), "PPO", "SFT")


def truncated(p: Place) -> None:
    """Half a checkpoint."""
    Path("half.ckpt").write_bytes(Path(p.control).read_bytes()[:5000])
    PPO.load_from_checkpoint("half.ckpt")


def pickled_weights(p: Place) -> None:
    SFT.load_from_checkpoint(p.language).export("model")
    Path("model/model.safetensors").unlink()
    Path("model/pytorch_model.bin").write_bytes(pickle.dumps(print))
    SFT(model_name_or_path="model").configure_model()


def nested_config(p: Place) -> None:
    SFT.load_from_checkpoint(p.language).export("model")
    Path("model/config.json").write_text('{"a": ' * 100_000)
    SFT(model_name_or_path="model").configure_model()


def saved(content: Any) -> Callable[[Place], Any]:
    """Loads a checkpoint of this content."""

    def load(p: Place) -> None:
        torch.save(content, "foreign.ckpt")
        PPO.load_from_checkpoint("foreign.ckpt")

    return load


def changed(change: Callable[[dict], Any]) -> Callable[[Place], Any]:
    """Loads PPO's checkpoint with a change."""

    def load(p: Place) -> None:
        checkpoint = torch.load(p.control, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, "changed.ckpt")
        PPO.load_from_checkpoint("changed.ckpt")

    return load


python("load pickled weights", pickled_weights, "model_name_or_path='model'", "code is never run", "safetensors")
python("load a nested config", nested_config, "model_name_or_path='model'", "recursion")
python("load a cut file", truncated, "half.ckpt", "cut off|damaged")
python("load bare weights", saved({"weight": torch.zeros(3, dtype=torch.float32)}), "foreign.ckpt", "PPO|checkpoint")
python("load a list", saved([1, 2]), "foreign.ckpt", "checkpoint")
python("load an empty dictionary", saved({}), "foreign.ckpt", "checkpoint")
python("load another trainer's", saved({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}), "foreign.ckpt|checkpoint",
       "PPO")  # fmt: skip
python(
    "load without version", changed(lambda c: c.pop("pytorch-lightning_version") and c.pop("algorithm")), "changed.ckpt"
)
python("load without hyperparameters", changed(lambda c: c.pop("hyper_parameters")), "changed.ckpt", "hyper_parameters")
python("load with an instantiator", changed(lambda c: c["hyper_parameters"].update(_instantiator="os.system")),
       "_instantiator", "hyper_parameters")  # fmt: skip
python("load without weights", changed(lambda c: c.pop("state_dict")), "changed.ckpt", "state_dict")
python(
    "load with other shapes",
    changed(lambda c: c["hyper_parameters"].update(net_arch=[8])),
    "changed.ckpt|network",
    "another network",
)
python("warm start of no file", lambda p: fit(PPO(init_from="no.ckpt"), rollouts()), "init_from='no.ckpt'")
python("warm start of text", lambda p: fit(PPO(init_from="x.ckpt"), rollouts()), "init_from='x.ckpt'", x__ckpt="hi")
python("warm start from a language model", lambda p: fit(PPO(init_from=p.language), rollouts()), "SFT", "PPO")

# ------------------------------------------------------------------------------------------------ Python: functional
python("gae of lists", lambda p: F.gae([1.0], [1.0], [1.0], [False], [False], 0.9, 0.9), "reward", "tensor", "list")
python("gae of arrays", lambda p: F.gae(*[np.ones((2, 1), np.float32)] * 5, 0.9, 0.9), "reward", "tensor", "ndarray")
python("returns of lists", lambda p: F.discounted_returns([1.0], [1.0], [False], [False], 0.9), "reward", "tensor")
python("clip loss of lists", lambda p: F.ppo_clip_loss([1.0], [1.0], [1.0], 0.2), "log_prob", "tensor")
python("value loss of numbers", lambda p: F.value_loss(1.0, 2.0), "value", "tensor")
python(
    "a gamma of text", lambda p: F.gae(*[torch.ones(2, 1, dtype=torch.float32, device="cpu")] * 5, "0.9", 0.9), "gamma"
)
python("pass@k of nothing", lambda p: F.pass_at_k(0, 0, 1), "num_samples|k")

# ------------------------------------------------------------------------------------------------ Python: language
python("task unknown", lambda p: PromptDataModule("adition"), "'adition'", "did you mean addition")
python("no source in Python", lambda p: PromptDataModule(), "task, path and dataset")
python("reward function of a number", lambda p: PromptDataModule("addition", reward_funcs=[7]), "7|int", "function")
python("model of text", lambda p: fit(SFT(model_name_or_path="no/model"), InstructionDataModule("addition"), max_steps=1),
       "no/model", "directory")  # fmt: skip
python("SFT's argument misspelled", lambda p: SFT(learning_rat=1), "learning_rat", "did you mean learning_rate")
python("SFT's model as SB3", lambda p: SFT(model="qwen"), "model", "model_name_or_path")
for several, make in {
    "path": InstructionDataModule, "eval_path": PreferenceDataModule,
    "eval_split": PreferenceDataModule, "ptx_path": PromptDataModule, "reward_model_name_or_path": GRPO,
    "ref_model_name_or_path": DPO,
}.items():  # fmt: skip
    python(f"several of {several}", lambda p, make=make, name=several: make(**{name: ["a", "b"]}),
           rf"{several}=\['a', 'b'\] is a list", "where a single text should be")  # fmt: skip
python("several of torch_dtype", lambda p: SFT(torch_dtype=["a", "b"]), r"torch_dtype=\['a', 'b'\] must be one of")
python("several of tokenizer_name_or_path", lambda p: RewardModel(tokenizer_name_or_path=["a", "b"]),
       "tokenizer_name_or_path is a list; it takes a directory, a hub name or a tokenizer")  # fmt: skip
python(
    "sources without a form",
    lambda p: PromptDataModule(task=["a", "b"]),
    "task: the source 'a'",
    "dictionary",
    "weight",
)
python("task_kwargs without names", lambda p: PromptDataModule("addition", task_kwargs=["digits"]),
       r"task_kwargs=\['digits'\] is a list", "dictionary {name: value}")  # fmt: skip
python(
    "GRPO(packing_strategy=…)", lambda p: GRPO(packing_strategy="bfd"), "takes no argument 'packing_strategy'; reward"
)
python("GRPO(model_init_kwargs=…)", lambda p: GRPO(model_init_kwargs={}), "model_config", "torch_dtype")
python("RLOO(loss_type=…)", lambda p: RLOO(loss_type="dapo"), "RLOO sets loss_type itself", "GRPO takes it")
python("GRPO's rewards in the module", lambda p: GRPO(reward_funcs=[len]), "reward_funcs", "PromptDataModule")
python("preferences without a source", lambda p: PreferenceDataModule(), "task, path and dataset")
python("chat template that loops", lambda p: with_template("{% for i in range(99999) %}{% for j in range(99999) %}"
       "{% endfor %}{% endfor %}"), "chat template of a/folder", "2 s of processor time", "another template")  # fmt: skip
python("chat template without the answer", lambda p: with_template("{{ messages[0].content }}"), "leaves out the content",
       "another|a template that renders it")  # fmt: skip
python("chat template that rewrites the prompt", lambda p: with_template(
    "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"), "differently", "another template")  # fmt: skip
python("a model's folder without its tokenizer", lambda p: without(p, "tokenizer*"), "tokenizer", "has no vocabulary",
       "tokenizer.json", "tokenizer_name_or_path")  # fmt: skip
python("a model's folder without its config", lambda p: without(p, "config.json"), "model_name_or_path", "config.json")
python(
    "a model's folder without its weights",
    lambda p: without(p, "*.safetensors"),
    "model_name_or_path",
    "model.safetensors",
)


def without(p: Place, pattern: str) -> None:
    """Exports a model, removes the files of a pattern, and trains from it."""
    from recipes.language import export

    folder = export(p.language, "model")
    for file in folder.glob(pattern):
        file.unlink()
    fit(SFT(model_name_or_path=str(folder)), InstructionDataModule("addition", n_eval=0), max_steps=1)


def resumed(key: str, algorithm: str, command: str, *options: str) -> Callable[[Place], Any]:
    """Runs a command on a checkpoint that lacks a key."""

    def run(p: Place) -> None:
        checkpoint = torch.load(getattr(p, algorithm), weights_only=True)
        del checkpoint[key]
        torch.save(checkpoint, "lacking.ckpt")
        RLCLI(command, [*options, "--ckpt_path", "lacking.ckpt"])

    return run


for command in ("fit", "validate"):
    for algorithm, options in (("control", ("--config", str(configs.find("ppo/cartpole.yaml")))),
                               ("language", ("--config", str(configs.find("sft/addition.yaml"))))):  # fmt: skip
        python(f"{command} {algorithm} without hyperparameters", resumed("hyper_parameters", algorithm, command, *options),
               "ckpt_path='lacking.ckpt'", "no hyper_parameters")  # fmt: skip
        if command == "fit":
            python(f"{algorithm} without an optimizer", resumed("optimizer_states", algorithm, command, *options),
                   "ckpt_path='lacking.ckpt'", "weights alone", "--model.init_from lacking.ckpt")  # fmt: skip
python("cut safetensors", lambda p: cut_weights(p), "model.safetensors|can't be loaded", "cut|model")


def with_template(template: str) -> None:
    """Learns from texts in a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = template, "a/folder"
    fit(SFT(tokenizer_name_or_path=tokenizer), InstructionDataModule("addition", n_eval=0), max_steps=1)


def cut_weights(p: Place) -> None:
    """Exports a model, cuts its weights off, and trains from it."""
    from recipes.language import export

    folder = export(p.language, "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    fit(SFT(model_name_or_path=str(folder)), InstructionDataModule("addition", n_eval=0), max_steps=1)


# ------------------------------------------------------------------------------------------------ names of other libraries
for flat, meant in (
    ("total-timesteps", "data.total_timesteps"), ("env-id", "data.env_id"), ("num-steps", "data.n_steps"),
    ("no-cuda", "trainer.accelerator"), ("cuda", "trainer.accelerator"), ("track", "trainer.logger"),
    ("capture_video", "record_every"), ("wandb-project-name", "trainer.logger"), ("n-timesteps", "data.total_timesteps"),
    ("num-minibatches", "data.n_minibatches"), ("update-epochs", "data.n_epochs"), ("clip-coef", "model.clip_range"),
    ("model.update_epochs", "data.n_epochs"), ("model.num_minibatches", "data.n_minibatches"),
    ("model.clip_coef", "model.clip_range"), ("model.policy_kwargs", "model.net_arch"),
    ("data.frame_stack", "data.wrappers"), ("data.normalize", "data.norm_obs"), ("data.n_eval", "data.n_eval_episodes"),
    ("data.eval_steps", "data.eval_freq"), ("data.num_envs", "n_envs"), ("model.anneal_lr", "learning_rate"),
):  # fmt: skip
    cartpole(f"--{flat} 1", flat, meant)
for flat, meant in (
    ("model.use_vllm", "model.sampler"), ("model.per_device_train_batch_size", "data.batch_size"),
    ("data.per_device_train_batch_size", "data.batch_size"), ("model.num_train_epochs", "trainer.max_epochs"),
    ("data.gradient_accumulation_steps", "trainer.accumulate_grad_batches"), ("dataset_name", "data.dataset"),
    ("model.use_peft", "model.lora"), ("model.rloo_k", "data.num_generations"), ("data.num_ppo_epochs",
    "data.num_iterations"), ("model.max_new_tokens", "model.max_completion_length"), ("model.bf16", "trainer.precision"),
):  # fmt: skip
    cli(f"grpo --{flat}", [*GRPO_ADDITION, f"--{flat}", "1"], flat, f"did you mean --{meant}|did you mean {meant}")
for flat, says in {
    "model.max_prompt_length": "no prompt is truncated here: overlong=drop", "max-prompt-length": "overlong=drop",
    "data.chat_template_path": "chat_template.jinja into the folder that tokenizer_name_or_path names",
    "model.num_train_epochs": r"--trainer.max_epochs \(with PromptDataModule an epoch is one generation",
    "data.per_device_train_batch_size": r"--data.batch_size \(.*gradient_accumulation_steps times as many",
}.items():  # fmt: skip
    cli(f"grpo --{flat}, explained", [*GRPO_ADDITION, f"--{flat}", "1"], flat, says)
for name, says in {
    "max_prompt_length": "overlong=drop", "chat_template_path": "chat_template.jinja",
    "num_train_epochs": r"Trainer's max_epochs \(with PromptDataModule", "per_device_train_batch_size": r"batch_size \(the rows",
    "gradient_accumulation_steps": r"accumulate_grad_batches \(which divides batch_size",
    "rollout_func": "the datamodule's environment",
    "environment_factory": "the datamodule's environment", "tools": "environment .*ToolEnvironment",
    "max_tool_calling_iterations": "the datamodule's max_turns", "generation_kwargs": "temperature, top_k, top_p",
    "formatting_func": "columns of the datamodule", "shuffle_dataset": "streaming_buffer=1 keeps",
    "assistant_only_loss": "completion_only_loss", "dataset_text_field": "columns",
}.items():  # fmt: skip
    python(f"a datamodule's {name}", lambda p, name=name: PromptDataModule("addition", **{name: 1}), name, says)
    python(f"a model's {name}", lambda p, name=name: GRPO(**{name: 1}), name, says)
cli("RLOO's own choice", "fit --config rloo/addition.yaml --model.scale_rewards group", "scale_rewards", "RLOO sets")

# ------------------------------------------------------------------------------------------------ newer algorithms
cartpole("--trainer.callbacks EarlyStopping", "trainer.callbacks", "required: monitor")
cartpole("--data.env_id PongNoFrameskip-v4", "'PongNoFrameskip-v4'", "ALE/Pong-v5")
cartpole("--data.env_id Pong-v0", "'Pong-v0'", "ALE/Pong-v5")
cartpole("--data.env_id MiniGrid-Empty-5x5-v0", "'MiniGrid-Empty-5x5-v0'", "minigrid:", "my_module:make_env")
DQN_CARTPOLE = ("fit", "--config", "dqn/cartpole.yaml")
for option, says in {
    "data.env_id Pendulum-v1": ("DQN", "Discrete", "Box"),
}.items():
    cli(f"dqn --{option}", [*DQN_CARTPOLE, *f"--{option}".split(" ", 1)], *says)
for option, says in {
    "sac/pendulum.yaml --model.ent_coef autoo": ("ent_coef='autoo'", "auto"),
    "sac/pendulum.yaml --model.target_entropy high": ("target_entropy='high'", "auto"),
    "sac/pendulum.yaml --model.tau 2": ("tau=2", r"\(0, 1\]"),
    "sac/pendulum.yaml --data.env_id CartPole-v1": ("SAC", "Box", "Discrete"),
    "td3/pendulum.yaml --model.policy_delay 0": ("policy_delay=0",),
    "tqc/pendulum.yaml --model.top_quantiles_to_drop_per_net 25": (
        "top_quantiles_to_drop_per_net=25",
        "n_quantiles=25",
    ),
    "qrdqn/cartpole.yaml --model.n_quantiles 0": ("n_quantiles=0",),
    "pqn/cartpole.yaml --model.q_lambda 2": ("q_lambda=2", r"\[0, 1\]"),
    "pqn/cartpole.yaml --data.env_id Pendulum-v1": ("PQN compares the values of all actions", "Discrete"),
    "crossq/pendulum.yaml --model.policy_delay 0": ("policy_delay=0", "at least 1"),
    "crossq/pendulum.yaml --model.batch_norm_eps 0": ("batch_norm_eps=0", "above 0"),
    "crossq/pendulum.yaml --model.batch_norm_momentum 2": ("batch_norm_momentum=2", r"\(0, 1\]"),
    "crossq/pendulum.yaml --model.network tests.networks.PolicyAndCritics": ("network", "BatchRenorm", "SAC"),
    "c51/cartpole.yaml --model.n_atoms 1": ("n_atoms=1", "at least 2"),
    "c51/cartpole.yaml --model.v_max 0": ("v_max=0", "above v_min=0"),
    "qrdqn/cartpole.yaml --model.loss huber": ("QRDQN takes",),
    "recurrent_ppo/cartpole_no_velocity.yaml --model.rnn transformer": ("rnn='transformer'", "lstm", "gru"),
    "recurrent_ppo/cartpole_no_velocity.yaml --model.sequence_length 1000": ("sequence_length=1000", "n_steps=128"),
    "recurrent_ppo/cartpole_no_velocity.yaml --model.shared_lstm true": ("shared_lstm", "enable_critic_lstm"),
}.items():
    cli(option, ["fit", "--config", *option.split(" ")], *says)
for option, says in {
    "dpo/paths.yaml --model.loss_type sigmoid2": ("loss_type='sigmoid2'", "sigmoid"),
    "dpo/paths.yaml --model.beta 0": ("beta=0", "above 0"),
    "dpo/paths.yaml --data.n_train 8": ("runs/rlhf/sft/model", "earlier stage", "--model.model_name_or_path"),
    "kto/paths.yaml --model.loss_type apo": ("loss_type='apo'", "apo_zero_unpaired"),
    "kto/paths.yaml --model.desirable_weight -1": ("desirable_weight=-1",),
}.items():
    cli(option, ["fit", "--config", *option.split(" ")], *says)
for option, says in {
    "model.sampler vllm": ("sampler=vllm", "not installed"), "model.sampler vlm": ("sampler='vlm'", "did you mean vllm"),
    "model.sampler vllm_server": ("vllm_server", "addresses"),
    "model.sampler_options {token: a}": ("no option of sampler=native",),
    "model.advantages no.module:f": ("advantages", "no.module"), "model.advantages math:pi": ("math:pi", "float"),
    "model.advantages math:sqrt": ("math:sqrt", "ValueError", r"\[P, G\]"),
    "model.advantages zscore": ("'zscore'", "rloo", "import path"),
    "model.attn_implementation flash_attention_2": ("attn_implementation", "eager or sdpa"),
    "data.streaming true": ("streaming=True", "task='addition'"),
    "data.async_generations -1": ("async_generations=-1",),
    "model.importance_sampling_correction tokens": ("importance_sampling_correction='tokens'", "token_truncate"),
}.items():  # fmt: skip
    cli(f"grpo --{option}", [*GRPO_ADDITION, *f"--{option}".split(" ", 1)], *says)

# ------------------------------------------------------------------------------------------------ Python: other libraries
python("SAC as in Stable-Baselines3", lambda p: SAC("MlpPolicy", "Pendulum-v1"), "SAC", r"ReplayDataModule\('Pendulum-v1'\)",
       r"model = SAC\(\)")  # fmt: skip
python("TQC's policy by name", lambda p: TQC(policy="MlpPolicy"), "'policy'", "ReplayDataModule")
for word, where in {
    "seed": "the datamodule's seed", "device": "the Trainer's devices", "verbose": "'verbose'",
    "policy_kwargs": "did you mean net_arch", "tensorboard_log": "the Trainer's default_root_dir",
    "clip_coef": "did you mean clip_range", "num_steps": "the datamodule's n_steps",
}.items():  # fmt: skip
    python(f"PPO({word}=…)", lambda p, word=word: PPO(**{word: 1}), f"'{word}'", where)
python("GRPO(model=…)", lambda p: GRPO(model="x"), "'model'", "model_name_or_path")
python("GRPO(train_dataset=…)", lambda p: GRPO(train_dataset=[]), "'train_dataset'", "datamodule's dataset")
python("an optimizer's name", lambda p: PPO(optimizer="adam"), "optimizer='adam'", "torch.optim")
python("load_from_checkpoint of None", lambda p: PPO.load_from_checkpoint(None), "checkpoint_path=None", "path")
python("a wrapper's class", lambda p: fit(PPO(), rollouts(wrappers=[gym.wrappers.TimeLimit])), "wrappers", "TimeLimit",
       "class_path")  # fmt: skip
python(
    "a wrapper's function", lambda p: fit(PPO(), rollouts(wrappers=[lambda env: env])), "wrappers", "env_id a function"
)
python("env_kwargs is a list", lambda p: fit(PPO(), rollouts(env_kwargs=[1])), r"env_kwargs=\[1\]", "dict")
python("n_envs is a truth value", lambda p: RolloutDataModule("CartPole-v1", n_envs=True), "n_envs=True", "number")
