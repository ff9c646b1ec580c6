"""PPO in the text maze, its value function beside the exact one.

    python -m benchmarks.ppo_maze [--seed 0] [--steps 150]

The start is SFT on 500 random walks, as in ``recipes.one_world``. Every ten steps: V of the first state beside the
exact return of the policy that samples, which is its value; and for the states before each turn of a generation the
mean |V - V*|, where V* is the value of the cell with the remaining moves by value iteration (10 where the goal can be
reached, else 0).
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from datamodules import InstructionDataModule, PromptDataModule
from datamodules.language.worlds import TextMaze
from recipes.agent import write_records
from recipes.one_world import HORIZON, dialogue_return
from rl_modules import RLHFPPO, SFT

SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4}  # fmt: skip


def optimal_values() -> list[Tensor]:
    """V* of each cell with 0, 1, … moves left, by value iteration."""
    maze = TextMaze().maze
    values = [torch.zeros(len(maze.P))]
    for _ in range(HORIZON):
        best = [max(sum(p * (reward + (0 if ended else float(values[-1][there]))) for p, there, reward, ended in moves)
                    for moves in maze.P[state].values()) for state in range(len(maze.P))]  # fmt: skip
        values.append(torch.tensor(best))
    return values


class Watched(RLHFPPO):
    """Compares the values of a generation with the optimal ones."""

    def prepare(self, rollout: Any) -> Any:
        fields = super().prepare(rollout)
        mask, columns = fields["mask"], TextMaze().maze.shape[1]
        starts = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
        errors, gained = [], []
        for row in range(len(mask)):
            for turn, place in enumerate(starts[row].nonzero().flatten().tolist()):
                end = int(fields["prompt_length"][row]) + place
                cell = re.findall(r"(\d),(\d)", self.tokenizer.decode(fields["tokens"][row, :end]))[-1]
                exact = float(self.exact[HORIZON - turn][int(cell[0]) * columns + int(cell[1])])
                errors.append(abs(float(fields["value"][row, place]) - exact))
                gained.append(abs(float(rollout["reward"][row, place:].sum()) - exact))
        step = self.trainer.global_step
        if step % 10 == 0:
            first = float(fields["value"][:, 0].mean())
            print(f"{step} steps: V {first:.3f}, exact return {dialogue_return(self, None):.3f}, mean |V - V*| "
                  f"{sum(errors) / len(errors):.3f}, mean |return - V*| {sum(gained) / len(gained):.3f}, "
                  f"{len(errors)} states", flush=True)  # fmt: skip
        return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--rows", type=int, default=128, help="dialogues of a step")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--whiten", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_records("maze", 500, given.seed, folder)
    L.seed_everything(given.seed, verbose=False)
    start = SFT(model_config=SMALL, tokenizer_name_or_path=str(folder / "tokenizer"), learning_rate=3e-3,
                lr_scheduler_type="constant_with_warmup", warmup_steps=10)  # fmt: skip
    shown = InstructionDataModule(path=str(folder / "dialogues.jsonl"), batch_size=64, n_eval=0, seed=given.seed,
                                  completion_only_loss=False)  # fmt: skip
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False}  # fmt: skip
    L.Trainer(max_steps=150, **quiet).fit(start, shown)  # type: ignore[arg-type]
    module = Watched(
        str(start.export(folder / "start")),
        beta=given.beta,
        cliprange_value=None,
        vf_coef=0.5,
        max_completion_length=64,
        learning_rate=given.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        whiten_advantages=given.whiten,
        completions_steps=0,
    )
    module.exact = optimal_values()  # type: ignore[assignment]
    data = PromptDataModule(
        path=str(folder / "train.jsonl"),
        environment=TextMaze,
        max_turns=HORIZON,
        max_turn_tokens=3,
        seed=given.seed,
        environment_kwargs={"brief": True, "max_steps": HORIZON},
        num_generations=given.rows,
        batch_size=given.rows,
        n_eval=0,
    )
    L.Trainer(max_steps=given.steps, **quiet).fit(module, data)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
