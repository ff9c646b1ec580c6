import math
from itertools import product

import numpy as np
import pytest

from datamodules.language.worlds import Arithmetic, Guess, Islands, Nim, TextMaze, demonstrations

WORLDS = [TextMaze, Guess, Nim, Arithmetic, Islands]


def said(text):
    return {"role": "assistant", "content": text}


def play(world, record, words):
    world.reset(record)
    steps = [world.step(said(word)) for word in words]
    return [m[0]["content"] if m else None for m, _, _ in steps], sum(r for _, r, _ in steps), steps[-1][2]


@pytest.mark.parametrize("world", WORLDS)
def test_the_scripted_player_s_dialogues_end_and_repeat(world):
    records = world.records("train", 20)
    dialogues = list(demonstrations(world(), records, seed=3))
    assert dialogues == list(demonstrations(world(), records, seed=3))
    assert len(dialogues) == 20
    for dialogue in dialogues:
        roles = [message["role"] for message in dialogue["messages"]]
        assert roles[0] == "user" and roles[-1] == "assistant"
        assert all((role == "assistant") == bool(i % 2) for i, role in enumerate(roles))


@pytest.mark.parametrize("world", [Arithmetic, Islands])
def test_splits_share_no_question_and_the_scripted_player_is_right(world):
    train, test = ({r["prompt"] for r in world.records(split, 500)} for split in ("train", "test"))
    assert not train & test
    for dialogue in demonstrations(world(), world.records("test", 30)):
        assert dialogue["reward"] == 1.0
        assert dialogue["messages"][2]["role"] == "tool"
        assert dialogue["messages"][-1]["content"] in dialogue["messages"][2]["content"]


# ---------------------------------------------------------------- maze


def test_the_maze_as_text_is_the_maze_of_the_table():
    """Every sequence of three moves, compared with the transition table."""
    world = TextMaze(brief=True)
    for moves in product(range(4), repeat=3):
        state, earned, cells = 0, 0.0, []
        for move in moves:
            [(_, state, reward, ended)] = world.maze.P[state][move]
            earned += reward
            cells.append(None if ended else f"{state // 3},{state % 3}")
            if ended:
                break
        words = [TextMaze.names[move] for move in moves[: len(cells)]]
        assert play(world, {}, words) == (cells, earned, ended)
        assert play(world, {}, [word[0].upper() for word in words])[1] == earned


def test_another_word_ends_a_walk_like_the_trap_and_the_horizon_ends_it_too():
    assert play(TextMaze(), {}, ["right", "north"])[1:] == (-10.0, True)
    assert play(TextMaze(max_steps=2), {}, ["left", "left"])[1:] == (0.0, True)


# ---------------------------------------------------------------- guess


def bisect(world, record):
    low, high = 1, world.most
    messages, done = world.reset(record), False
    while not done:
        middle = (low + high) // 2
        messages, _, done = world.step(said(str(middle)))
        if messages and messages[0]["content"] == "higher":
            low = middle + 1
        else:
            high = middle - 1
    return world.guesses


@pytest.mark.parametrize("most", [1, 2, 7, 64, 100])
def test_no_strategy_guesses_faster_than_bisection(most):
    world = Guess(most)
    counts = [bisect(world, {"secret": number}) for number in range(1, most + 1)]
    assert Guess.optimum(most) == pytest.approx(sum(counts) / most)
    # Of any strategy at most 2^(k-1) numbers are found by the k-th guess.
    assert Guess.optimum(most) == pytest.approx(sum(int(math.log2(i)) + 1 for i in range(1, most + 1)) / most)


def test_a_guess_costs_one_whether_it_is_a_number_or_not():
    world = Guess(brief=True)
    assert play(world, {"secret": 5}, ["9", "1", "five", "", "٣", "5"]) == (["-", "+", "!", "!", "!", None], -6.0, True)
    assert play(world, {"secret": 5}, ["1"] * 10)[1:] == (-10.0, True)


def test_every_number_is_asked_equally_often():
    asked = [record["secret"] for record in Guess.records("train", 128)]
    assert sorted(asked) == sorted([*range(1, 65)] * 2) and asked != sorted(asked)


@pytest.mark.parametrize("mistakes", [0.0, 0.75, 1.0])
def test_the_scripted_guesser_is_consistent_with_what_it_was_told(mistakes):
    """Compared with the expectation over all intervals; of random guesses alone it is 2 (1 + 1/n) H_n - 3 (Knuth,
    TAOCP 3, 6.2.2), of middles alone the optimum."""
    total = [0.0]
    for size in range(1, 65):
        of = [size + total[guess - 1] + total[size - guess] for guess in range(1, size + 1)]
        total.append(mistakes * sum(of) / size + (1 - mistakes) * of[(size + 1) // 2 - 1])
    if mistakes == 1:
        assert total[64] / 64 == pytest.approx(2 * (1 + 1 / 64) * sum(1 / i for i in range(1, 65)) - 3)
    if mistakes == 0:
        assert total[64] / 64 == Guess.optimum(64)
    world = Guess(max_guesses=64, mistakes=mistakes)
    records = Guess.records("train", 6400)
    mean = -sum(d["reward"] for d in demonstrations(world, records)) / len(records)
    assert mean == pytest.approx(total[64] / 64, abs=0.1)


# ---------------------------------------------------------------- nim


def wins(stones):
    """Whether the player to move wins, by search of all games."""
    return any(taken == stones or not wins(stones - taken) for taken in (1, 2, 3) if taken <= stones)


def test_the_perfect_opponent_loses_only_to_perfect_play():
    """All replies to it, against a search of the game."""
    for stones in range(1, 14):
        results = set()

        def follow(record, moves, results=results):
            for taken in "123":
                *_, earned, done = play(Nim(brief=True), record, [*moves, taken])
                results.add(earned) if done else follow(record, [*moves, taken])

        follow({"stones": stones, "perfect": True}, [])
        assert (1.0 in results) == wins(stones)
    assert all(wins(record["stones"]) for record in Nim.records("test", 30))


def test_the_policy_s_own_games_end_at_the_last_stone_or_a_wrong_move():
    assert play(Nim(brief=True), {"stones": 6}, ["3", "1", "2"]) == (["3", "2", None], 1.0, True)
    assert play(Nim(), {"stones": 2}, ["3"])[1:] == play(Nim(), {"stones": 9}, ["1", "none"])[1:] == (-1.0, True)


@pytest.mark.parametrize(("beta", "expected"), [(0.1, 9.97), (0.5, 9.79)])
def test_what_a_policy_of_the_cell_returns_at_rest_under_the_kl(beta, expected):
    """The page's numbers: π ∝ exp(Q/β) beside the random walk, Q over a horizon of 8 and the cells' visits."""
    maze = TextMaze(brief=True).maze
    policy = np.full((6, 4), 0.25)
    for _ in range(80):
        value, q = np.zeros((9, 6)), np.zeros((8, 6, 4))
        for t in reversed(range(8)):
            for s, a in np.ndindex(6, 4):
                [(_, there, reward, ended)] = maze.P[s][a]
                q[t, s, a] = reward + (0.0 if ended else value[t + 1, there])
            value[t] = (policy * q[t]).sum(1)
        visits = np.zeros((8, 6))
        visits[0, 0] = 1.0
        for t, s, a in np.ndindex(7, 6, 4):
            [(_, there, _, ended)] = maze.P[s][a]
            visits[t + 1, there] += 0.0 if ended else visits[t, s] * policy[s, a]
        mean = (visits[:, :, None] * q).sum(0) / (visits.sum(0)[:, None] + 1e-12)
        rest = np.exp((mean - mean.max(1, keepdims=True)) / beta)
        policy = 0.7 * policy + 0.3 * rest / rest.sum(1, keepdims=True)
    assert value[0, 0] == pytest.approx(expected, abs=0.006)
