"""The oldest reward model: one strength per player, fitted to a table of who beat whom."""

from collections.abc import Mapping

import lightning as L
import torch
from torch import Tensor, nn

from rl_modules import functional as F
from rl_modules.common.errors import UsageError

#: Wins by (winner, loser).
Wins = Mapping[tuple[str, str], int]


class PlayerStrengths(L.LightningModule):
    """Bradley and Terry's model itself: P(i beats j) = σ(s_i - s_j), by gradient descent on its likelihood.

    The loss is that of a reward model whose texts are players. Batches are pairs of numbers of winners and losers,
    [games] each.

    Args:
        n_players: their number, ≥ 2.
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
    """The table as one row per game: numbers of the winners and of the losers, [games] each."""
    pairs = [(players.index(i), players.index(j)) for (i, j), count in wins.items() for _ in range(count)]
    winner, loser = torch.tensor(pairs).unbind(-1)
    return winner, loser


def maximum_likelihood_strengths(players: list[str], wins: Wins, tolerance: float = 1e-12) -> Tensor:
    """The exact maximum-likelihood strengths, their mean 0.

    p_i ← W_i / Σ_j n_ij / (p_i + p_j)   until nothing changes;   s_i = log p_i

    with W_i the games that i won and n_ij those that i and j played.

    Args:
        players: their names.
        wins: games won, by (winner, loser).
        tolerance: largest change of a strength in the last round.

    Returns:
        s, [players] float64.

    Raises:
        UsageError: a group of players won (or lost) every game against the others: no finite strengths are likeliest.

    Source: Zermelo 1929; Hunter 2004, "MM algorithms for generalized Bradley-Terry models", eq. 3, and its
        assumption 1 for the error.
    """
    n = len(players)
    won = torch.zeros(n, n, dtype=torch.float64)
    for (i, j), count in wins.items():
        won[players.index(i), players.index(j)] += count
    reached = ((won > 0) | torch.eye(n, dtype=torch.bool)).double()
    if (torch.linalg.matrix_power(reached, n) == 0).any():
        raise UsageError("some players won or lost every game against the others; finite strengths need each to be "
                         "beaten, directly or through others, by each")  # fmt: skip
    played = won + won.T
    p = torch.ones(n, dtype=torch.float64)
    while True:
        updated = won.sum(1) / (played / (p[:, None] + p[None, :])).sum(1)
        updated = updated / updated.log().mean().exp()
        change = (updated.log() - p.log()).abs().max()
        p = updated
        if change < tolerance:
            return p.log()
