"""One world, six learners: value iteration, Q-learning, DQN, PPO, recurrent PPO and a language model in the same maze.

python -m recipes.one_world              5 minutes on two cores; folder runs/one_world
python -m recipes.one_world --seed 1

The world is ``Maze-v0`` with a horizon of 8 steps, whose best return, by value iteration, is 10. The exact regret, that
best return minus the policy's exact return, is written against the steps taken in the maze: of the greedy policy for
the control algorithms, and of the policy that samples its words for the language model. All curves are in one
TensorBoard, ``exact/regret``, and in ``regret.png``. A last regret above ``TARGET`` is marked as missed, and the exit
status is then 1.
"""

import argparse
import contextlib
import json
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn.utils.rnn import pad_sequence

import rl_modules
from datamodules import InstructionDataModule, PromptDataModule, ReplayDataModule, RolloutDataModule
from datamodules.envs.model import transition_model
from datamodules.evaluation import Predicts
from datamodules.language.environments import Step
from datamodules.language.messages import Message
from datamodules.language.worlds import TextMaze
from recipes.agent import write_records
from recipes.cli.options import Parser
from recipes.pipeline import run_command, write_jsonl
from recipes.program import end_if_missed
from recipes.trainer import Trainer

if TYPE_CHECKING:
    from rl_modules.language.policy import LanguagePolicy

HORIZON = 8
#: Largest last regret of a learner that has solved the maze: a policy that samples its words keeps some.
TARGET = 0.5
#: Sequences of moves that are followed at each step, the most probable ones.
MOST = 500
#: Of each control algorithm: its arguments, and those of its datamodule.
CONTROL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "QLearning": (
        {"exploration_fraction": 0.8, "exploration_initial_eps": 1.0},
        {"n_envs": 4, "n_steps": 4, "batch_size": None, "n_epochs": 1, "total_timesteps": 4000},
    ),
    "DQN": (
        {
            "gamma": 0.9,
            "learning_rate": 2e-3,
            "exploration_fraction": 0.5,
            "net_arch": [32],
            "target_update_interval": 50,
        },
        {
            "n_envs": 4,
            "learning_starts": 100,
            "train_freq": 8,
            "gradient_steps": 8,
            "batch_size": 32,
            "buffer_size": 4000,
            "total_timesteps": 8000,
        },
    ),
    "PPO": (
        {"net_arch": [32], "learning_rate": 3e-3},
        {"n_envs": 8, "n_steps": 32, "batch_size": 64, "n_epochs": 4, "total_timesteps": 8000},
    ),
    "RecurrentPPO": (
        {"lstm_hidden_size": 16, "net_arch": {"pi": [], "vf": []}, "learning_rate": 3e-3},
        {"n_envs": 8, "n_steps": 32, "batch_size": 64, "n_epochs": 4, "total_timesteps": 8000},
    ),
}


class ExactRegret(L.Callback):
    """Writes ``best`` minus the policy's exact ``value``, after an epoch, every ``every`` ``steps`` of the maze."""

    def __init__(self, value: Any, steps: Any, best: float, every: int) -> None:
        self.value, self.steps, self.best, self.every = value, steps, best, every
        self.points: list[tuple[int, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measures the initial policy."""
        self._measure(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measures, where enough steps have passed."""
        if self.steps(trainer) >= self.points[-1][0] + self.every:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measures the final policy."""
        if self.steps(trainer) > self.points[-1][0]:
            self._measure(trainer, pl_module)

    def _measure(self, trainer: L.Trainer, module: Any) -> None:
        training = module.training
        module.eval()
        self.points.append((self.steps(trainer), self.best - self.value(module, trainer.datamodule)))  # type: ignore[attr-defined]
        module.train(training)
        for logger in trainer.loggers:
            logger.log_metrics({"exact/regret": self.points[-1][1]}, step=self.points[-1][0])


class CountedMaze(TextMaze):
    """The maze as text, which counts the steps of all dialogues."""

    taken = count()

    def step(self, message: Message) -> Step:
        """Moves."""
        next(self.taken)
        return super().step(message)


def greedy_return(policy: Predicts, data: object) -> float:
    """Returns the exact return of a greedy policy, which is that of one episode: the maze draws nothing."""
    maze = gym.make("Maze-v0", max_episode_steps=HORIZON)
    observation, _ = maze.reset()
    state, total, ended = None, 0.0, False
    first = torch.ones(1, dtype=torch.bool).numpy()
    while not ended:
        action, state = policy.predict(observation, state, first, deterministic=True)
        observation, reward, terminated, truncated, _ = maze.step(int(action))
        total, ended, first = total + float(reward), terminated or truncated, ~first & first
    return total


@torch.no_grad()
def dialogue_return(module: "LanguagePolicy", data: object) -> float:
    """Returns the exact return of a language model that samples its words, over the ``MOST`` most probable sequences.

    Every other word counts as the trap, which for a policy that writes letters is exact to 10 times their chance.
    """
    world = TextMaze(max_steps=HORIZON, brief=True)
    tokenizer: Any = module.tokenizer
    words = [name[0] for name in world.names]
    letters, (stop,) = tokenizer.convert_tokens_to_ids(words), module.settings().eos_token_id
    total = 0.0
    walks: list[tuple[int, float, list[Message]]] = [(0, 1.0, world.reset({}))]
    for _ in range(HORIZON):
        texts = [tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"] for _, _, said in walks]
        rows = [torch.tensor([*text, letter]) for text in texts for letter in letters]
        logits = module.model(pad_sequence(rows, batch_first=True)).logits.log_softmax(-1)
        last = torch.tensor([len(row) - 1 for row in rows])
        index = torch.arange(len(rows))
        chances = (logits[index, last - 1, torch.tensor(letters).repeat(len(walks))] + logits[index, last, stop]).exp()
        further = []
        for (state, weight, said), each in zip(walks, chances.view(-1, len(words)).tolist(), strict=True):
            total -= 10.0 * weight * (1 - sum(each))
            for action, chance in enumerate(each):
                [(_, there, reward, ended)] = world.maze.P[state][action]
                total += weight * chance * reward
                world.state = there
                answer = [{"role": "assistant", "content": words[action]}, {"role": "user", "content": world.cell()}]
                if not ended:
                    further.append((there, weight * chance, [*said, *answer]))
        walks = sorted(further, key=lambda walk: -walk[1])[:MOST]
        if not walks:
            break
    return total


def main(args: list[str] | None = None) -> None:
    """Trains all; prints the table and writes the picture."""
    run_command(run, parse, args)


def parse(args: list[str]) -> tuple[argparse.Namespace]:
    """Returns the command's arguments."""
    parser = Parser("python -m recipes.one_world", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default="runs/one_world", help="where everything goes")
    parser.add_argument("--seed", type=int, default=0, help="of every learner")
    return (parser.parse_args(args),)


def run(given: argparse.Namespace) -> None:
    """Trains all; prints the last regret of each."""
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = transition_model(gym.make("Maze-v0", max_episode_steps=HORIZON))
    assert model is not None
    best = model.optimal_return()
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, (arguments, settings) in CONTROL.items():
        L.seed_everything(given.seed, verbose=False)
        kind = ReplayDataModule if name == "DQN" else RolloutDataModule
        data = kind("Maze-v0", env_kwargs={"max_episode_steps": HORIZON}, seed=given.seed, eval_freq=0, **settings)
        exact = ExactRegret(greedy_return, lambda trainer: trainer.datamodule.num_timesteps, best, 100)
        fit(folder, name, getattr(rl_modules, name)(**arguments), data, exact)
        curves[name] = exact.points
    curves["language model"] = language_model(folder, given.seed, best)
    last = {"value iteration": 0.0, **{name: points[-1][1] for name, points in curves.items()}}
    (folder / "regret.json").write_text(json.dumps(curves), "utf-8")
    print(table(last))
    print(f"curves: tensorboard --logdir {folder}")
    with contextlib.suppress(ModuleNotFoundError):
        draw(curves, folder / "regret.png")
        print(f"picture: {folder / 'regret.png'}")
    missed = [f"the regret of {name} is {value:.4g}" for name, value in last.items() if not value <= TARGET]
    end_if_missed(missed, f"at most {TARGET:g}")


def table(regrets: Mapping[str, float]) -> str:
    """Returns the learners' last regrets as a table, misses marked."""
    lines = [f"| {name} | {value:.4f} | {'' if value <= TARGET else 'missed'} |" for name, value in regrets.items()]
    return "\n".join([f"| learner | exact regret, of 10 | target {TARGET:g} |", "|---|---|---|", *lines])


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draws all regrets over one axis, the steps taken in the maze; value iteration has none from the start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        steps, regrets = zip(*points, strict=True)
        axes.plot([max(step, 1) for step in steps], regrets, label=name)
    axes.axhline(0, color="0.5", linestyle="--", linewidth=1, label="value iteration")
    axes.set(xscale="log", xlabel="steps taken in the maze", ylabel="exact regret, of a best return of 10")
    axes.legend()
    figure.savefig(path, dpi=120)


def language_model(folder: Path, seed: int, best: float) -> list[tuple[int, float]]:
    """Supervised fine-tuning on random walks that did not fall into the trap, then GRPO in turns; returns the regrets.

    The steps of all walks count. From a start on all of them, which falls into the trap in every second dialogue, GRPO
    may unlearn every way to the goal while it learns to avoid the trap.
    """
    records = folder / "records"
    if not records.exists():
        records.mkdir(parents=True)
        write_records("maze", 2000, seed, records)
    small = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    walks = [json.loads(line) for line in (records / "dialogues.jsonl").read_text("utf-8").splitlines()]
    walked = sum(message["role"] == "assistant" for walk in walks for message in walk["messages"])
    write_jsonl(records / "shown.jsonl", [walk for walk in walks if walk["reward"] >= 0])
    L.seed_everything(seed, verbose=False)
    start = rl_modules.SFT(
        model_config=small,
        tokenizer_name_or_path=str(records / "tokenizer"),
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
    )
    # The maze's answers count too: a model that can predict them has a representation of its cell.
    shown = InstructionDataModule(
        path=str(records / "shown.jsonl"), batch_size=64, n_eval=0, seed=seed, completion_only_loss=False
    )
    fit(folder, "SFT", start, shown, max_steps=300)
    shutil.rmtree(folder / "start", ignore_errors=True)
    start.export(folder / "start")
    learner = rl_modules.GRPO(
        model_name_or_path=str(folder / "start"),
        loss_type="dapo",
        reward_to_go=True,
        scale_rewards="none",
        beta=0.1,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=5,
        max_completion_length=64,
    )
    asked = PromptDataModule(
        path=str(records / "train.jsonl"),
        environment=CountedMaze,
        max_turns=HORIZON,
        max_turn_tokens=3,
        seed=seed,
        environment_kwargs={"brief": True, "max_steps": HORIZON},
        num_generations=64,
        batch_size=64,
        n_eval=0,
    )
    CountedMaze.taken = count(walked)
    played = ExactRegret(dialogue_return, lambda trainer: int(repr(CountedMaze.taken)[6:-1]), best, 8000)
    fit(folder, "GRPO", learner, asked, played, max_steps=120)
    return played.points


def fit(folder: Path, name: str, module: Any, data: Any, *callbacks: L.Callback, **how: Any) -> None:
    """Trains with a TensorBoard of its own below the folder."""
    logger = TensorBoardLogger(str(folder), name=name, version="", default_hp_metric=False)
    Trainer(
        callbacks=list(callbacks),
        logger=logger,
        accelerator="cpu",
        enable_checkpointing=False,
        evaluate=False,
        default_root_dir=str(folder),
        **how,
    ).fit(module, datamodule=data)


if __name__ == "__main__":
    main()
