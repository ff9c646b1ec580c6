"""The tabular agents: updates worked out by hand, agreement with exact solutions, exact resume."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import datamodules
from datamodules.envs.model import transition_model
from rl_modules import PPO, SARSA, MonteCarlo, QLearning
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from tests.training import assert_resumes_exactly, fit, rollouts

CONSTANT_EPS = {"exploration_initial_eps": 1.0, "exploration_final_eps": 1.0}
GREEDY = {"exploration_initial_eps": 0.0, "exploration_final_eps": 0.0}


class Conveyor(gym.Env):
    """States 0, 1, 2 and the end, in this order whatever is done, with rewards 1, 2 and 3."""

    observation_space = spaces.Discrete(3)
    action_space = spaces.Discrete(1)

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.state = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.state = 0
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict]:
        self.state += 1
        done = self.state == 3
        return self.state % 3, float(self.state), done, self.state == self.limit, {}


def known(agent: Any, n_states: int = 3, n_actions: int = 2) -> Any:
    """An agent whose spaces are known, outside any training."""
    agent.hparams["observation_space"] = {"type": "Discrete", "n": n_states, "start": 0}
    agent.hparams["action_space"] = {"type": "Discrete", "n": n_actions, "start": 0}
    agent.configure_model()
    return agent


def train(agent: Any, env_id: Any, total_timesteps: int, **arguments: Any) -> Any:
    fit(agent, rollouts(env_id, total_timesteps=total_timesteps, **arguments))
    return agent


def table(agent: Any) -> list[float]:
    return agent.q[:, 0].tolist()


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("n_steps", [1, 2, 3, 6])
def test_q_learning_on_the_conveyor_is_what_one_gets_on_paper(n_steps):
    # α = γ = ½. First pass, from zeros: ½·1, ½·2, ½·3. Second pass, each from what its successor holds by then:
    # Q(0) = ½ + ½(1 + ½·1 - ½) = 1, Q(1) = 1 + ½(2 + ½·1.5 - 1) = 1.875, Q(2) = 1.5 + ½(3 - 1.5) = 2.25.
    agent = train(QLearning(gamma=0.5, learning_rate=0.5), Conveyor, 6, n_envs=1, n_steps=n_steps)
    assert table(agent) == [1.0, 1.875, 2.25]
    assert agent.tables.visits.flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize("expected", [False, True])
def test_sarsa_agrees_with_q_learning_where_there_is_one_action(expected):
    agent = train(SARSA(expected=expected, gamma=0.5, learning_rate=0.5), Conveyor, 6, n_envs=1, n_steps=1)
    assert table(agent) == [1.0, 1.875, 2.25]


@pytest.mark.parametrize("autoreset_mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("n_steps", [1, 2, 6])
def test_monte_carlo_on_the_conveyor_holds_the_returns(n_steps, autoreset_mode):
    # G(2) = 3, G(1) = 2 + ½·3, G(0) = 1 + ½·3.5; rollouts of one or two steps leave episodes unfinished.
    agent = train(MonteCarlo(gamma=0.5), Conveyor, 6, n_envs=1, n_steps=n_steps, autoreset_mode=autoreset_mode)
    assert table(agent) == [2.75, 3.5, 3.0]


def test_step_size_one_over_n_takes_the_mean_of_the_targets():
    agent = known(QLearning(learning_rate="1/n", initial_value=100.0))
    for target in (1.0, 2.0, 6.0):
        agent.move(0, 1, target)
    # The initial value has no weight at all, for the first step has size 1.
    assert agent.q[0].tolist() == [100.0, 3.0]


def test_step_size_one_over_n_to_a_power_forgets_the_first_targets():
    agent = known(QLearning(learning_rate="1/n^0.75"))
    for target in (0.0, 1.0, 1.0):
        agent.move(0, 1, target)
    # 1 - (1 - 2^-¾)(1 - 3^-¾): the mean would be ⅔.
    assert agent.q[0, 1] == pytest.approx(1 - (1 - 2**-0.75) * (1 - 3**-0.75))


def test_monte_carlo_counts_the_first_visit_or_every_visit():
    # s: 0 0 1, rewards 1 2 3, γ = ½: G = 1 + ½(2 + ½·3) = 2.75, 2 + ½·3 = 3.5, 3.
    episode = ([0, 0, 1], [1, 1, 0], [1.0, 2.0, 3.0], 0.0)
    assert MonteCarlo(first_visit=True, gamma=0.5).returns(*episode) == [(0, 1, 2.75), (1, 0, 3.0)]
    assert MonteCarlo(first_visit=False, gamma=0.5).returns(*episode) == [(0, 1, 2.75), (0, 1, 3.5), (1, 0, 3.0)]


def test_monte_carlo_returns_are_the_functional_cores():
    reward = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    ends = torch.zeros(20, 1, dtype=torch.bool)
    ends[-1] = True
    after = torch.full((20, 1), 1.7)
    reference = F.discounted_returns(reward, after, ~ends & False, ends, 0.9)[:, 0]
    visits = MonteCarlo(first_visit=False, gamma=0.9).returns(list(range(20)), [0] * 20, reward[:, 0].tolist(), 1.7)
    torch.testing.assert_close(torch.tensor([g for _, _, g in visits]), reference)


@pytest.mark.parametrize("agent_class", [MonteCarlo, SARSA, QLearning])
def test_a_time_limit_is_not_an_end(agent_class):
    # Cut off in state 2, never seen and worth 4: Q(1) = 2 + ½·4. As an end it would be 2.
    agent = agent_class(gamma=0.5, learning_rate=1.0, initial_value=4.0)
    train(agent, lambda: Conveyor(limit=2), 20, n_envs=1, n_steps=2)
    assert table(agent) == [1 + 0.5 * 4.0, 4.0, 4.0]


@pytest.mark.parametrize("agent_class", [MonteCarlo, SARSA, QLearning])
def test_an_endless_reward_under_a_time_limit_of_eight_is_worth_fifty(agent_class):
    # V = 1 / (1 - 0.98); episodes that count as ended after 8 steps would give 7.5.
    agent = agent_class(gamma=0.98, learning_rate=0.5, initial_value=45.0)
    train(agent, "tests.envs:make_infinite_horizon", 8_000, n_envs=8, n_steps=32)
    assert abs(agent.q[0].max() - 50) < 1


def test_expected_sarsa_bootstraps_from_the_policys_mean():
    agent = known(SARSA(expected=True, exploration_initial_eps=0.4, exploration_final_eps=0.4))
    agent.tables.q[0, 2] = torch.tensor([1.0, 5.0])
    # ½·0.4 on the worse action.
    assert agent.next_value(2, -1) == pytest.approx(0.2 * 1 + 0.8 * 5)


def test_double_q_learning_lets_the_other_table_judge():
    agent = known(QLearning(double=True))
    agent.tables.q[0, 2] = torch.tensor([1.0, 5.0])
    agent.tables.q[1, 2] = torch.tensor([7.0, -2.0])
    assert agent.next_value(2, 0) == -2.0
    assert agent.next_value(2, 1) == 1.0
    assert agent.q[2].tolist() == [4.0, 1.5]


# ---------------------------------------------------------------- acting


def test_ties_are_broken_at_random_and_epsilon_is_the_share_of_random_actions():
    agent = known(QLearning(exploration_initial_eps=0.3), n_states=2, n_actions=4)
    agent.tables.q[0, 1] = torch.tensor([0.0, 2.0, 2.0, 0.0])
    states = torch.ones(20_000, dtype=torch.int64)
    share = agent.act(states, torch.Generator().manual_seed(0))["action"].bincount(minlength=4) / 20_000
    # Four standard errors: √(¼ / 20,000)·4.
    torch.testing.assert_close(share, torch.tensor([0.075, 0.425, 0.425, 0.075]), atol=0.015, rtol=0)
    # Deterministic is a function of the table alone.
    assert agent.predict(np.array([1, 1, 0]), deterministic=True)[0].tolist() == [1, 1, 0]


def test_acting_draws_from_its_generator_alone():
    agent = known(QLearning(exploration_initial_eps=0.5))
    states = torch.zeros(50, dtype=torch.int64)
    before = torch.random.get_rng_state()
    one, other = (agent.act(states, torch.Generator().manual_seed(3))["action"] for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("autoreset_mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("n_steps", [1, 5])
def test_sarsa_takes_the_very_action_it_bootstraps_from(n_steps, autoreset_mode):
    class Spy(SARSA):
        def prepare(self, rollout):
            prepared = super().prepare(rollout)
            for t in range(len(rollout["reward"])):
                seen.append({k: v[t] for k, v in {**rollout, **prepared}.items()})
            # Evaluation between two rollouts must not use the promise up.
            self.predict(np.array([0, 1, 2]), deterministic=False)
            return prepared

    seen: list[dict] = []
    data = rollouts("FrozenLake-v1", n_envs=3, n_steps=n_steps, total_timesteps=300, autoreset_mode=autoreset_mode,
                    env_kwargs={"max_episode_steps": 6})  # fmt: skip
    fit(Spy(exploration_initial_eps=0.5, exploration_final_eps=0.5), data)
    compared = 0
    for now, after in zip(seen, seen[1:], strict=False):
        goes_on = ~(now["terminated"] | now["truncated"]) & now["valid"]
        assert torch.equal(now["next_action"][goes_on], after["action"][goes_on])
        assert torch.equal(now["next_observation"][goes_on], after["observation"][goes_on])
        compared += int(goes_on.sum())
    assert compared > 150


def test_sarsa_draws_an_action_for_the_state_that_a_time_limit_cut_off_in():
    """Not the first action of the next episode, which belongs to another state."""

    class Spy(SARSA):
        def choose(self, state, generator, deterministic=False):
            asked.append(state.clone())
            return super().choose(state, generator, deterministic)

    asked: list[torch.Tensor] = []
    fit(Spy(), rollouts(lambda: Conveyor(limit=2), n_envs=1, n_steps=3, total_timesteps=3))
    # Three actions taken, then two drawn in prepare: for state 2 after row 1, for state 1 after row 2.
    assert [state.tolist() for state in asked] == [[0], [1], [0], [2, 1]]


# ---------------------------------------------------------------- agreement with exact solutions


def maze_solution(gamma: float) -> tuple[torch.Tensor, Any]:
    model = transition_model(gym.make("Maze-v0"))
    return F.value_iteration(model.transition, model.reward, gamma)[:-1], model


@pytest.mark.parametrize("double", [False, True])
def test_q_learning_ends_at_the_optimal_values(double):
    agent = train(QLearning(double=double, gamma=0.9, learning_rate=1.0, **CONSTANT_EPS), "Maze-v0", 4_000, n_steps=64)
    exact, model = maze_solution(0.9)
    # Certain moves and full steps: nothing is left to average.
    torch.testing.assert_close(agent.q[model.acts_in()], exact[model.acts_in()])
    assert model.expected_return(agent.greedy_policy()) == 10.0


@pytest.mark.long
@pytest.mark.parametrize(
    "agent",
    [
        MonteCarlo(gamma=0.9, **CONSTANT_EPS),
        MonteCarlo(gamma=0.9, first_visit=False, **CONSTANT_EPS),
        SARSA(gamma=0.9, learning_rate="lin_0.2", **CONSTANT_EPS),
        SARSA(gamma=0.9, learning_rate="lin_0.2", expected=True, **CONSTANT_EPS),
    ],
    ids=["first visit", "every visit", "SARSA", "Expected SARSA"],
)
def test_on_policy_agents_end_at_the_values_of_the_policy_that_acts(agent):
    train(agent, "Maze-v0", 12_000, n_steps=128)
    _, model = maze_solution(0.9)
    uniform = torch.full_like(model.reward, 0.25)
    value = F.policy_evaluation(model.transition, model.reward, uniform, 0.9)
    exact = (model.reward + 0.9 * model.transition @ value)[:-1]
    # Returns spread by about 7; after some 500 visits of each pair their mean is good to 0.3.
    torch.testing.assert_close(agent.q[model.acts_in()], exact[model.acts_in()], atol=1.2, rtol=0)


def test_the_optimum_is_not_the_value_of_the_random_policy():
    """Or the two tests above could not tell on-policy from off-policy."""
    exact, model = maze_solution(0.9)
    uniform = torch.full_like(model.reward, 0.25)
    value = F.policy_evaluation(model.transition, model.reward, uniform, 0.9)
    assert (exact.max(-1).values - value[:-1])[model.acts_in()].min() > 3


def mean_estimate(double: bool) -> float:
    """Sutton & Barto, example 6.7: what a state whose ten actions pay -0.1 ± 1 and end is held to be worth."""
    draw = np.random.default_rng(0)
    estimates = []
    for _ in range(40):
        agent = known(QLearning(double=double, learning_rate=0.1), n_states=1, n_actions=10)
        for step in range(400):
            judged = int(draw.integers(2)) if double else 0
            agent.move(0, int(draw.integers(10)), draw.normal(-0.1, 1.0), judged)
            if step >= 200:
                estimates.append(agent.next_value(0, judged))
    return float(np.mean(estimates))


@pytest.mark.long
def test_double_q_learning_does_not_take_noise_for_value():
    # The maximum of ten noisy averages is well above their common mean; the other table's opinion is not.
    assert mean_estimate(double=False) > 0.1
    assert mean_estimate(double=True) == pytest.approx(-0.1, abs=0.08)


# ---------------------------------------------------------------- on Lightning


AGENTS = {
    "first visit": lambda: MonteCarlo(),
    "every visit": lambda: MonteCarlo(first_visit=False, learning_rate="lin_0.3"),
    "sarsa": lambda: SARSA(exploration_fraction=0.9),
    "expected": lambda: SARSA(expected=True, learning_rate="1/n"),
    "q": lambda: QLearning(learning_rate="lin_0.5"),
    "double": lambda: QLearning(double=True, log_every=2),
}


@pytest.mark.parametrize("name", AGENTS)
def test_a_resumed_run_equals_the_uninterrupted_one(name, tmp_path):
    def data():
        return rollouts("FrozenLake-v1", n_envs=3, n_steps=4, rollouts_per_epoch=5, total_timesteps=300, seed=5,
                        env_kwargs={"max_episode_steps": 15})  # fmt: skip

    assert_resumes_exactly(AGENTS[name], data, tmp_path, epochs=3)


def test_a_checkpoint_holds_what_is_unfinished(tmp_path):
    data = rollouts("Maze-v0", n_envs=2, n_steps=1, total_timesteps=4)
    fit(MonteCarlo(**GREEDY), data).save_checkpoint(tmp_path / "a.ckpt")
    unfinished = torch.load(tmp_path / "a.ckpt", weights_only=True)["run"]["episodes"]
    assert any(len(episode["action"]) for episode in unfinished)
    data = rollouts("Maze-v0", n_envs=2, n_steps=1, total_timesteps=2)
    fit(SARSA(), data).save_checkpoint(tmp_path / "b.ckpt")
    states, actions = torch.load(tmp_path / "b.ckpt", weights_only=True)["run"]["next_action"]
    assert states.shape == actions.shape == (2,)


@pytest.mark.long
def test_a_checkpoint_alone_predicts_what_the_agent_did(tmp_path):
    agent = SARSA(learning_rate=1.0, gamma=0.9)
    fit(agent, rollouts("Maze-v0", total_timesteps=2000)).save_checkpoint(tmp_path / "a.ckpt")
    loaded = SARSA.load_from_checkpoint(tmp_path / "a.ckpt")
    states = np.arange(6)
    assert np.array_equal(loaded.predict(states, deterministic=True)[0], agent.predict(states, deterministic=True)[0])
    assert loaded.predict(3, deterministic=True)[0].shape == ()
    assert loaded.epsilon == agent.epsilon == 0.05
    assert loaded.step_size == 1.0


def test_evaluation_leaves_training_as_it_was():
    with_evaluation, without = (SARSA() for _ in range(2))
    settings = {"n_envs": 2, "n_steps": 4, "total_timesteps": 400, "eval_deterministic": False, "n_eval_episodes": 3}
    fit(with_evaluation, rollouts("FrozenLake-v1", eval_freq=80, **settings))
    fit(without, rollouts("FrozenLake-v1", **settings))
    assert torch.equal(with_evaluation.q, without.q)


def test_evaluation_logs_the_true_return_of_the_greedy_policy(make_trainer):
    agent = QLearning(learning_rate=1.0, gamma=0.9, **CONSTANT_EPS)
    trainer = fit(agent, rollouts("Maze-v0", n_steps=64, eval_freq=1024, total_timesteps=3072))
    assert trainer.callback_metrics["eval/true_return"] == 10.0
    assert trainer.callback_metrics["eval/optimal_return"] == 10.0
    assert trainer.callback_metrics["eval/mean_reward"] == 10.0
    agent.tables.q.zero_()
    trainer.validate(agent, datamodule=rollouts("Maze-v0"), verbose=False)
    # A table without a preference goes left for ever.
    assert trainer.callback_metrics["eval/true_return"] == 0.0


def test_every_batch_counts_as_a_step_so_that_checkpoints_are_kept(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(tmp_path, monitor="eval/true_return", mode="max", filename="best")
    data = rollouts("Maze-v0", n_envs=2, n_steps=8, eval_freq=16, total_timesteps=160)
    trainer = fit(QLearning(), data, enable_checkpointing=True, callbacks=[keep])
    assert trainer.global_step == 10
    assert (tmp_path / "best.ckpt").is_file()


@pytest.mark.long
def test_a_user_writes_an_algorithm_in_a_few_lines():
    class Pessimist(QLearning):
        def next_value(self, state, table):
            return float(self.tables.q[table, state].min())

    agent = train(Pessimist(gamma=0.9, learning_rate=1.0, **CONSTANT_EPS), "Maze-v0", 6_000, n_steps=64)
    # The worst case is the trap, wherever one stands.
    assert agent.q[0].min() < 0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("agent_class", [MonteCarlo, SARSA, QLearning])
@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v1", "observation space must be Discrete, not Box.*A2C, TRPO and PPO fit"),
        ("Blackjack-v1", "not Tuple.*datamodules.envs.discrete.FlattenDiscrete"),
        (lambda: gym.wrappers.TransformAction(gym.make("Maze-v0"), int, spaces.Box(0, 3)), "action space must be Disc"),
        ("CliffWalking-v1", "CliffWalking-v1 has no time limit.*max_episode_steps"),
    ],
    ids=["CartPole", "Blackjack", "Box actions", "no time limit"],
)
def test_environments_that_no_table_fits_are_named(agent_class, env_id, message):
    with pytest.raises(UsageError, match=message):
        fit(agent_class(), rollouts(env_id))


def test_cut_rollouts_are_refused():
    with pytest.raises(UsageError, match="n_epochs=10 and batch_size=64: leave both out, or give n_epochs=1 and batch"):
        fit(QLearning(), datamodules.RolloutDataModule("Maze-v0", n_steps=16, batch_size=64, n_epochs=10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": "1/m"}, r"learning_rate='1/m' is no step size; .* 1/n"),
        ({"learning_rate": "1/n^0.4"}, r"learning_rate='1/n\^0.4' is no step size.*w between 0.5 and 1"),
        ({"learning_rate": 1.5}, r"learning_rate=1.5 .*\(0, 1\]"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"gamma": 1.1}, r"gamma=1.1 must lie in \[0, 1\]"),
        ({"exploration_final_eps": -0.1}, "exploration_final_eps=-0.1"),
        ({"exploration_fraction": 2.0}, "exploration_fraction=2.0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        QLearning(**arguments)


def test_a_table_of_another_algorithm_is_refused(tmp_path):
    fit(PPO(), rollouts("Maze-v0", total_timesteps=8, n_steps=1)).save_checkpoint(tmp_path / "ppo.ckpt")
    with pytest.raises(UsageError, match="holds PPO, not QLearning"):
        fit(QLearning(), rollouts("Maze-v0"), ckpt_path=tmp_path / "ppo.ckpt")


def test_an_observation_space_may_start_elsewhere_than_at_zero():
    class Shifted(gym.ObservationWrapper):
        observation_space = spaces.Discrete(6, start=10)

        def observation(self, observation):
            return observation + 10

    agent = QLearning(gamma=0.9, learning_rate=1.0, **CONSTANT_EPS)
    train(agent, lambda: Shifted(TimeLimit(gym.make("Maze-v0"), 50)), 4_000, n_steps=64)
    exact, model = maze_solution(0.9)
    torch.testing.assert_close(agent.q[model.acts_in()], exact[model.acts_in()])
    assert agent.predict(12, deterministic=True)[0] == 1


def test_sarsa_acts_after_training_in_any_number_of_states():
    agent = SARSA()
    fit(agent, rollouts("Maze-v0", n_envs=4, n_steps=2, total_timesteps=8))
    assert [len(agent.act(torch.arange(n))["action"]) for n in (1, 2, 6)] == [1, 2, 6]
