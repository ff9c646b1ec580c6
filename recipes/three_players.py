"""Three players and 25 games: a reward model in its smallest form, beside the exact solution.

    python -m recipes.three_players

A beat B 8 times and lost 4, A beat C 3 times and lost 5, B beat C twice and lost 3. Gradient descent on the loss that
trains reward models ends at the maximum-likelihood strengths, which Zermelo's iteration computes to 1e-12.
"""

import logging
import warnings

import lightning as L
import torch

from datamodules.loader import LazyLoader
from rl_modules.language.strengths import PlayerStrengths, games, maximum_likelihood_strengths

PLAYERS = ["A", "B", "C"]
WINS = {("A", "B"): 8, ("B", "A"): 4, ("A", "C"): 3, ("C", "A"): 5, ("B", "C"): 2, ("C", "B"): 3}
STEPS = 500


def fit_strengths(
    players: list[str] = PLAYERS, wins: dict[tuple[str, str], int] = WINS, steps: int = STEPS
) -> torch.Tensor:
    """The strengths after ``steps`` steps of gradient descent over the whole table, their mean 0, [players]."""
    table = games(players, wins)
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False
    )  # fmt: skip
    model = PlayerStrengths(len(players))
    trainer.fit(model, LazyLoader(steps, lambda: (table for _ in range(steps))))
    strength = model.strength.detach()
    return strength - strength.mean()


def main() -> None:
    """Fit, solve, print both."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    fitted, exact = fit_strengths(), maximum_likelihood_strengths(PLAYERS, WINS)
    print(f"player  gradient descent  maximum likelihood  wins\n{'-' * 50}")
    for i, player in enumerate(PLAYERS):
        won = sum(count for (winner, _), count in WINS.items() if winner == player)
        print(f"{player:6}  {fitted[i]:+16.10f}  {exact[i]:+18.10f}  {won:4}")
    print(f"\nlargest difference {(fitted - exact).abs().max():.1e}")
    print(f"P(A beats C) = {torch.sigmoid(exact[0] - exact[2]):.3f}; they played 3-5")


if __name__ == "__main__":
    main()
