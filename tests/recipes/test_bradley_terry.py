"""Gradient descent on the reward model's loss finds the maximum-likelihood strengths of a table of games."""

import pytest
import torch

from recipes.bradley_terry import PLAYERS, WINS, fit_strengths, main, maximum_likelihood_strengths
from rl_modules.common.errors import UsageError


@pytest.mark.long
def test_gradient_descent_ends_at_the_maximum_likelihood_of_three_players():
    exact = maximum_likelihood_strengths(PLAYERS, WINS)
    # The likelihood's own equations: each player is expected to win as often as it did.
    for i, player in enumerate(PLAYERS):
        games = {other: WINS[player, other] + WINS[other, player] for other in PLAYERS if other != player}
        expected = sum(n * torch.sigmoid(exact[i] - exact[PLAYERS.index(other)]) for other, n in games.items())
        assert float(expected) == pytest.approx(sum(WINS[player, other] for other in games), abs=1e-9)
    torch.testing.assert_close(fit_strengths(), exact, atol=1e-9, rtol=0)


def test_an_unbeaten_player_has_no_finite_strength():
    with pytest.raises(UsageError, match="finite strengths"):
        maximum_likelihood_strengths(["A", "B"], {("A", "B"): 3})


@pytest.mark.long
def test_the_program_prints_both_solutions(capsys):
    main()
    out = capsys.readouterr().out
    assert "maximum likelihood" in out
    assert float(out.split("largest difference ")[1].split()[0]) < 1e-9
