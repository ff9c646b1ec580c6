"""Bradley–Terry strengths of three players: a reward model in its smallest form, compared with the exact solution.

    python -m recipes.bradley_terry

A beat B 8 times and lost 4, A beat C 3 times and lost 5, B beat C twice and lost 3. Gradient descent on the loss that
trains reward models converges to the maximum-likelihood strengths, which Zermelo's iteration computes to 1e-12.
"""

import logging
import warnings
from collections.abc import Mapping

import lightning as L
import torch
from torch import Tensor, nn

from datamodules.experience import LazyLoader
from rl_modules import functional as F
from rl_modules.common.errors import UsageError

#: Games won, by (winner, loser).
Wins = Mapping[tuple[str, str], int]

PLAYERS = ["A", "B", "C"]
WINS = {("A", "B"): 8, ("B", "A"): 4, ("A", "C"): 3, ("C", "A"): 5, ("B", "C"): 2, ("C", "B"): 3}
STEPS = 500


class BradleyTerry(L.LightningModule):
    """The model P(i beats j) = σ(s_i - s_j), fitted by gradient descent on its likelihood.

    The loss is that of a reward model whose texts are players. A batch holds the numbers of the winners and of the
    losers, [games] each.

    Args:
        n_players: number of players, ≥ 2.
        learning_rate: step size of gradient descent.
    """

    def __init__(self, n_players: int, learning_rate: float = 2.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.strength = nn.Parameter(torch.zeros(n_players, dtype=torch.float64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        winner, loser = batch
        return F.bradley_terry_loss(self.strength[winner], self.strength[loser])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def games(players: list[str], wins: Wins) -> tuple[Tensor, Tensor]:
    """Returns one row per game: the numbers of the winners and of the losers, [games] each."""
    pairs = [(players.index(i), players.index(j)) for (i, j), count in wins.items() for _ in range(count)]
    winner, loser = torch.tensor(pairs).unbind(-1)
    return winner, loser


def fit_strengths(players: list[str] = PLAYERS, wins: Wins = WINS, steps: int = STEPS) -> Tensor:
    """Returns the strengths after ``steps`` steps of gradient descent over the whole table, their mean 0, [players]."""
    table = games(players, wins)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BradleyTerry(len(players))
    trainer.fit(model, LazyLoader(steps, lambda: (table for _ in range(steps))))
    strength = model.strength.detach()
    return strength - strength.mean()


def maximum_likelihood_strengths(players: list[str], wins: Wins, tolerance: float = 1e-12) -> Tensor:
    """Computes the exact maximum-likelihood strengths, their mean 0.

    p_i ← W_i / Σ_j n_ij / (p_i + p_j)   until nothing changes;   s_i = log p_i

    with W_i the games that i won and n_ij those that i and j played.

    Source: Zermelo 1929; Hunter 2004, "MM algorithms for generalized Bradley-Terry models", eq. 3, and its
        assumption 1 for the error.
    """
    n = len(players)
    won = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for (i, j), count in wins.items():
        won[players.index(i), players.index(j)] += count
    reached = ((won > 0) | torch.eye(n, dtype=torch.bool)).double()
    if (torch.linalg.matrix_power(reached, n) == 0).any():
        raise UsageError(
            "some players won or lost every game against the others; finite strengths need each to be "
            "beaten, directly or through others, by each"
        )
    played = won + won.T
    p = torch.ones(n, dtype=torch.float64, device="cpu")
    while True:
        updated = won.sum(1) / (played / (p[:, None] + p[None, :])).sum(1)
        updated = updated / updated.log().mean().exp()
        change = (updated.log() - p.log()).abs().max()
        p = updated
        if change < tolerance:
            return p.log()


def main() -> None:
    """Fits the strengths by gradient descent, solves for them exactly, and prints both."""
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
