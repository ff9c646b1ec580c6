"""Action masks: nothing forbidden is ever done, and the loss sees the distribution that acted."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical as TorchCategorical

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import A2C, DQN, PPO, REINFORCE, SARSA, TRPO, MonteCarlo, QLearning
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import split_space
from rl_modules.distributions import Categorical, make_distribution, parameter_count, sample_allowed
from tests.marks import quick
from tests.masked_envs import MASKED_SPACES, Corridor, DeadEnd, Guarded, make_corridor, make_guarded
from tests.training import assert_equal_checkpoints, fit, rollouts

POLICY_GRADIENTS = {
    "PPO": lambda: PPO(ent_coef=0.01),
    "penalty": lambda: PPO(policy_objective="penalty"),
    "A2C": lambda: A2C(ent_coef=0.01),
    "REINFORCE": lambda: REINFORCE(psi="baseline"),
    "TRPO": lambda: TRPO(n_critic_updates=2),
}
each_policy = pytest.mark.parametrize("name", POLICY_GRADIENTS)
each_space = pytest.mark.parametrize("space", MASKED_SPACES)
each_source = pytest.mark.parametrize("source", ["info", "method", "observation"])


def guarded(space: str, source: str) -> dict[str, Any]:
    return {"env_id": "tests.masked_envs:make_guarded", "env_kwargs": {"space": space, "source": source}}


# -------------------------------------------------------------------- distributions


def test_masked_categorical_equals_torch_on_the_allowed_options() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1]).bool().expand(5, 4)
    ours = Categorical(logits).masked(mask)
    plain = TorchCategorical(logits=logits[:, [0, 2, 3]])
    torch.testing.assert_close(ours.log_prob(torch.full((5,), 2)), plain.log_prob(torch.full((5,), 1)))
    torch.testing.assert_close(ours.entropy(), plain.entropy())
    other = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kl = torch.distributions.kl_divergence(plain, TorchCategorical(logits=other[:, [0, 2, 3]]))
    torch.testing.assert_close(ours.kl(Categorical(other).masked(mask)), kl)
    (ours.entropy().sum() + ours.log_prob(torch.zeros(5)).sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert (logits.grad[:, 1].abs() < 1e-15).all()


def test_masked_distributions_equal_sb3_contribs() -> None:
    contrib = pytest.importorskip("sb3_contrib.common.maskable.distributions")
    generator = torch.Generator().manual_seed(0)
    peers = {"discrete": contrib.MaskableCategoricalDistribution(6),
             "multidiscrete": contrib.MaskableMultiCategoricalDistribution([3, 4]),
             "multibinary": contrib.MaskableBernoulliDistribution(4)}  # fmt: skip
    masks = {
        "discrete": [1, 0, 1, 0, 0, 1],
        "multidiscrete": [1, 0, 1, 0, 0, 1, 0],
        "multibinary": [1, 1, 1, 0, 0, 1, 1, 1],
    }
    for name, space in MASKED_SPACES.items():
        parameters = torch.randn(3, parameter_count(space), generator=generator)
        mask = torch.tensor(masks[name]).bool().expand(3, -1)
        ours = make_distribution(space, parameters).masked(mask)
        # Theirs has two logits per switch, of which the difference counts.
        logits = parameters
        if name == "multibinary":
            logits = torch.stack([torch.zeros_like(parameters), parameters], -1).flatten(1)
        theirs = peers[name].proba_distribution(logits)
        theirs.apply_masking(mask.numpy())
        actions = torch.stack([sample_allowed(space, mask[i], generator) for i in range(3)])
        torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
        torch.testing.assert_close(ours.entropy(), theirs.entropy())
        torch.testing.assert_close(ours.mode(), theirs.mode().to(ours.mode().dtype))


@each_space
def test_samples_are_allowed_and_uniform_where_asked(space: str) -> None:
    action_space = MASKED_SPACES[space]
    mask = torch.ones(sum(Guarded(action_space, "info").sizes), dtype=torch.bool)
    mask[0] = False
    actions = sample_allowed(action_space, mask.expand(20_000, -1), torch.Generator().manual_seed(0))
    first = actions.reshape(20_000, -1)[:, 0]
    counts = torch.bincount(first, minlength=2).double() / 20_000
    assert counts[0] == 0
    torch.testing.assert_close(counts[1:], torch.full_like(counts[1:], 1 / len(counts[1:])), atol=0.02, rtol=0)


# -------------------------------------------------------------------- training


@each_policy
@each_space
@each_source
def test_nothing_forbidden_is_done(name: str, space: str, source: str) -> None:
    model = POLICY_GRADIENTS[name]()
    data = RolloutDataModule(**guarded(space, source), n_envs=2, n_steps=8, total_timesteps=64, eval_freq=32,
                             n_eval_episodes=2)  # fmt: skip
    fit(model, data)
    assert data.num_timesteps == 64 and model.masks_actions
    assert isinstance(model.observation_space, spaces.Box)


@each_policy
@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_whatever_the_way_of_resetting(name: str, mode: str) -> None:
    fit(POLICY_GRADIENTS[name](), rollouts(**guarded("multidiscrete", "method"), n_envs=2, total_timesteps=64,
                                           autoreset_mode=mode))  # fmt: skip


@pytest.mark.parametrize("arguments", [{}, {"double": True}])
@pytest.mark.parametrize("data", [{}, {"n_steps": 3, "prioritized_replay": True}])
@each_source
def test_dqn_explores_and_bootstraps_from_what_is_allowed(source: str, arguments: Any, data: Any) -> None:
    targets: list[torch.Tensor] = []

    class Watched(DQN):
        def td_target(self, batch: Any) -> torch.Tensor:
            target = super().td_target(batch)
            forbidden = batch["next_q"] == -1e8
            assert forbidden.any() and not forbidden.all(1).any()
            targets.append(target)
            return target

    model = Watched(target_update_interval=20, **arguments)
    fit(model, ReplayDataModule(**guarded("discrete", source), n_envs=2, buffer_size=500, learning_starts=50,
                                total_timesteps=200, eval_freq=100, n_eval_episodes=2, **data))  # fmt: skip
    assert all(target.abs().max() < 100 for target in targets)


TABLES = {"MonteCarlo": (MonteCarlo, {}), "SARSA": (SARSA, {}), "expected SARSA": (SARSA, {"expected": True}),
          "QLearning": (QLearning, {}), "double QLearning": (QLearning, {"double": True})}  # fmt: skip


class Phases(gym.Env):
    """Every step forbids one of three actions, whatever the state; counts those that are taken."""

    observation_space, action_space = spaces.Discrete(3), spaces.Discrete(3)
    forbidden = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.see()

    def see(self) -> tuple[int, dict[str, Any]]:
        self.mask = np.arange(3) != self.np_random.integers(3)
        return int(self.np_random.integers(3)), {"action_mask": self.mask}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        Phases.forbidden += int(not self.mask[action])
        self.t += 1
        observation, info = self.see()
        return observation, 1.0, False, self.t >= 10, info


@pytest.mark.parametrize("n_steps", [1, 4])
@pytest.mark.parametrize("algorithm", [SARSA, QLearning, MonteCarlo])
def test_tables_respect_masks_that_are_no_function_of_the_state(algorithm: Any, n_steps: int) -> None:
    Phases.forbidden = 0
    sizes = {} if algorithm is MonteCarlo else {"n_steps": n_steps}
    fit(algorithm(), RolloutDataModule(Phases, n_envs=2, total_timesteps=400, eval_freq=0, **sizes))
    assert Phases.forbidden == 0


def test_sarsa_takes_the_action_that_it_bootstrapped_from_where_it_is_allowed() -> None:
    """The one that :meth:`prepare` drew for the first state is taken whatever the table says by then."""
    model = SARSA(exploration_initial_eps=0.0, exploration_final_eps=0.0)
    fit(model, RolloutDataModule(Phases, n_envs=2, total_timesteps=40, eval_freq=0))
    model.tables.q[:] = torch.tensor([0.0, 1.0, 2.0])
    state, drawn = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0])
    allowed = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.uint8)
    model._next_action = (torch.tensor([0, 1, 1]), drawn)  # of the third environment: another state
    taken = model.act({"observation": state, "action_mask": allowed}, torch.Generator().manual_seed(0))["action"]
    assert taken.tolist() == [0, 2, 1]


@pytest.mark.long
@pytest.mark.parametrize("name", quick(TABLES, "MonteCarlo", "expected SARSA", "double QLearning"))
def test_tables_learn_the_values_of_allowed_actions(name: str, tmp_path: Path) -> None:
    make, arguments = TABLES[name]
    # Optimistic values: an action that is never allowed keeps 10, which would be bootstrapped from.
    model = make(
        gamma=1.0,
        initial_value=10.0,
        learning_rate=0.5,
        exploration_fraction=0.5,
        exploration_final_eps=0.0,
        **arguments,
    )
    data = RolloutDataModule(make_corridor, n_envs=4, total_timesteps=3000, eval_freq=0)
    trainer = fit(model, data)
    assert (model.tables.visits[:, :, 2] == 0).all()
    np.testing.assert_array_equal(model.greedy_policy()[:5, 1], np.ones(5))
    np.testing.assert_allclose(model.q[:5, 1], [-5, -4, -3, -2, -1], atol=0.3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = type(model).load_from_checkpoint(tmp_path / "a.ckpt")
    assert [int(loaded.predict(s, deterministic=True)[0]) for s in range(5)] == [1] * 5
    assert int(loaded.predict(3, deterministic=True, action_masks=np.array([True, False, False]))[0]) == 0


@each_policy
def test_the_first_minibatchs_ratio_is_one(name: str) -> None:
    seen: list[torch.Tensor] = []

    class Watch:
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not seen and "log_prob" in batch:
                policy = self.policy if hasattr(self, "policy") else lambda o: self.policy_and_value(o)[0]  # type: ignore[attr-defined]
                now = policy(batch["observation"]).log_prob(batch["action"])
                seen.append((now - batch["log_prob"]).detach())
            return super().training_step(batch, batch_idx)  # type: ignore[misc]

    kind = type(POLICY_GRADIENTS[name]())
    model = type("Watched", (Watch, kind), {})(**({"policy_objective": "penalty"} if name == "penalty" else {}))
    fit(model, rollouts(**guarded("discrete", "info"), total_timesteps=128))
    if kind in (PPO, TRPO):
        torch.testing.assert_close(seen[0], torch.zeros_like(seen[0]), atol=1e-6, rtol=0)


def test_resumes_exactly(tmp_path: Path) -> None:
    def run(stop: int | None, resume: bool = False) -> Path:
        data = RolloutDataModule(**guarded("discrete", "method"), n_envs=2, n_steps=8, batch_size=8, n_epochs=2,
                                 total_timesteps=96, eval_freq=0, rollouts_per_epoch=1)  # fmt: skip
        path = tmp_path / f"{stop}.ckpt"
        ckpt = tmp_path / "3.ckpt" if resume else None
        fit(PPO(), data, ckpt_path=ckpt, max_epochs=stop or -1).save_checkpoint(path)
        return path

    whole = run(6)
    run(3)
    whole.rename(tmp_path / "whole.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", run(6, resume=True))


def test_no_environment_pays_that_has_none() -> None:
    data = rollouts("CartPole-v1", total_timesteps=64)
    model = PPO()
    fit(model, data)
    assert not model.masks_actions and isinstance(data.rollout["observation"], torch.Tensor)


def test_masks_can_be_left_alone() -> None:
    data = rollouts("Taxi-v4", total_timesteps=64)
    data.setup("fit")
    assert isinstance(data.observation_space, spaces.Dict)
    data = rollouts("Taxi-v4", total_timesteps=64, action_masks=False)
    data.setup("fit")
    assert isinstance(data.observation_space, spaces.Discrete)


class Late(Guarded):
    """Gives no mask after a reset, and fails on no action."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        observation, info = self._draw()
        return observation, 0.0, False, self.t == self.length, info


@pytest.mark.parametrize("replays", [False, True])
def test_masks_that_a_reset_lacks_are_not_passed_over(replays: bool) -> None:
    def run(**arguments: Any) -> None:
        make = lambda: Late(spaces.Discrete(6), "info")  # noqa: E731
        if replays:
            fit(DQN(), ReplayDataModule(make, learning_starts=16, total_timesteps=32, eval_freq=0, **arguments))
        else:
            fit(PPO(), rollouts(make, total_timesteps=128, **arguments))

    with pytest.raises(UsageError, match="has an action_mask after a step, but had none after the reset; give one"):
        run()
    run(action_masks=False)


def test_normalised_observations_leave_the_mask_as_it_is() -> None:
    model, data = PPO(), rollouts(**guarded("discrete", "method"), total_timesteps=256, norm_obs=True)
    fit(model, data)
    mask = data.rollout["observation"]["action_mask"]
    assert mask.dtype == torch.uint8 and set(mask.unique().tolist()) == {0, 1}
    env = make_guarded(source="method")
    observation, _ = env.reset(seed=0)
    model.predict(observation, action_masks=env.get_wrapper_attr("action_masks")())


# -------------------------------------------------------------------- prediction


@each_space
def test_predict_takes_masks(space: str) -> None:
    model = PPO()
    fit(model, rollouts(**guarded(space, "method"), total_timesteps=64))
    env: Any = make_guarded(space, "method")
    observation, _ = env.reset(seed=3)
    for deterministic in (True, False):
        for _ in range(20):
            action, _ = model.predict(observation, deterministic=deterministic, action_masks=env.action_masks())
            observation, *_ = env.step(action)
    batch = np.stack([observation] * 3)
    actions, _ = model.predict(batch, action_masks=np.stack([env.action_masks()] * 3))
    assert len(actions) == 3
    # A part for each choice, as training takes them; a vector's infos have an array of such objects.
    parts = np.split(np.array(env.action_masks()), np.cumsum(env.sizes)[:-1])
    several = np.empty(3, object)
    for i in range(3):
        several[i] = [part.tolist() for part in parts]
    for given, n, forms in ((observation, 1, [parts, tuple(parts), several[0]]), (batch, 3, [[parts] * 3, several])):
        flat = np.concatenate(parts * n)
        for form in forms:
            actions = [model.predict(given, deterministic=True, action_masks=masks)[0] for masks in (form, flat)]
            np.testing.assert_array_equal(*actions)
    model.predict(observation)  # everything is allowed
    with pytest.raises(UsageError, match="action_masks has 2 entries; 1 observations"):
        model.predict(observation, action_masks=np.ones(2))
    with pytest.raises(UsageError, match="action_masks allows no action"):
        model.predict(observation, action_masks=np.zeros(len(env.action_masks())))


def test_predict_takes_masks_without_having_trained_with_any() -> None:
    model = PPO()
    fit(model, rollouts("CartPole-v1", total_timesteps=64))
    observation = np.zeros((50, 4), np.float32)
    actions, _ = model.predict(observation, action_masks=np.tile([False, True], (50, 1)))
    assert (actions == 1).all()


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_allows_nothing_is_one_sentence(mode: str) -> None:
    with pytest.raises(UsageError, match="action_mask allows no action, but its episode goes on"):
        fit(PPO(), rollouts(DeadEnd, n_envs=2, vectorization_mode=mode))


def test_a_mask_of_the_wrong_size_is_one_sentence() -> None:
    class Short(Guarded):
        def _draw(self) -> Any:
            observation, info = super()._draw()
            return observation, {"action_mask": info["action_mask"][:2]}

    with pytest.raises(UsageError, match="action_mask has 2 numbers; its action space .* has 6 options"):
        fit(PPO(), rollouts(lambda: Short(MASKED_SPACES["discrete"], "info")))


def test_the_corridor_complains() -> None:
    env = Corridor()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="forbidden"):
        env.step(2)
    assert isinstance(env, gym.Env)


# -------------------------------------------------------------------- sb3-contrib's own tests, on its environments

CONTRIB = "sb3_contrib.common.envs:InvalidActionEnv"


def masked_return(model: PPO, env: Any, n_episodes: int = 20) -> float:
    """sb3-contrib's ``evaluate_policy(model, env)``: masks from the environment's method, most likely actions."""
    total = 0.0
    for episode in range(n_episodes):
        observation, _ = env.reset(seed=episode)
        over = False
        while not over:
            masks = np.asarray(env.get_wrapper_attr("action_masks")())
            action, _ = model.predict(observation, deterministic=True, action_masks=masks)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
    return total / n_episodes


def untrained(env_id: str, **env_kwargs: Any) -> tuple[PPO, Any]:
    data = rollouts(env_id, env_kwargs=env_kwargs, n_envs=1, n_steps=64, total_timesteps=64)
    model = PPO(learning_rate=0.0)
    fit(model, data)
    name = env_id.rpartition(":")[2]
    return model, getattr(pytest.importorskip("sb3_contrib.common.envs"), name)(**env_kwargs)


@pytest.mark.slow
def test_masked_ppo_solves_what_unmasked_ppo_does_not() -> None:
    """``test_identity``: the same task, budget, settings and threshold."""
    pytest.importorskip("sb3_contrib")
    reached = {}
    for masks in (True, False):
        data = RolloutDataModule(f"{CONTRIB}Discrete", env_kwargs={"dim": 70, "n_invalid_actions": 55}, n_envs=1,
                                 n_steps=2048, batch_size=64, n_epochs=10, total_timesteps=3000, eval_freq=0,
                                 n_test_episodes=20, seed=32, action_masks=masks)  # fmt: skip
        model = PPO(gamma=0.4)
        trainer = fit(model, data)
        reached[masks] = trainer.test(model, datamodule=data, verbose=False)[0]["test/mean_reward"]
    assert reached[True] >= 90 > 50 > reached[False], reached


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("Discrete", {"dim": 20, "n_invalid_actions": 19}), ("MultiDiscrete", {"dims": [2, 3], "n_invalid_actions": 3}),
     ("MultiBinary", {"dims": 3, "n_invalid_actions": 3})],
)  # fmt: skip
def test_an_untrained_policy_succeeds_where_one_action_is_left(kind: str, arguments: dict[str, Any]) -> None:
    pytest.importorskip("sb3_contrib")
    model, env = untrained(f"{CONTRIB}{kind}", **arguments)
    assert masked_return(model, env) >= 99
    observation, _ = env.reset(seed=0)
    choices = np.stack([np.ravel(model.predict(observation)[0]) for _ in range(200)])
    assert len(np.unique(choices, axis=0)) > 1  # without masks it guesses


def test_sb3_contribs_action_masker_and_dict_observations() -> None:
    masker = pytest.importorskip("sb3_contrib.common.wrappers").ActionMasker

    class ToDict(gym.ObservationWrapper):
        def __init__(self, env: gym.Env) -> None:
            super().__init__(env)
            self.observation_space = spaces.Dict({"obs": env.observation_space})

        def observation(self, observation: Any) -> dict[str, Any]:
            return {"obs": observation}

    def make() -> gym.Env:
        return ToDict(masker(gym.make("CartPole-v1"), lambda env: np.array([False, True])))

    model, data = PPO(), rollouts(make, total_timesteps=256)
    fit(model, data)
    assert (data.rollout["action"] == 1).all()
    assert isinstance(model.observation_space, spaces.Dict) and list(model.observation_space) == ["obs"]


@pytest.mark.parametrize(
    ("action_space", "shape", "right"),
    [
        (gym.spaces.Box(-1, 1, (2,)), (2,), "which has no masks"),
        (gym.spaces.Discrete(3), (2,), r"whose masks have the shape \(3,\)"),
    ],
    ids=["box", "size"],
)
def test_a_part_that_is_called_as_a_mask_is_and_is_none_is_refused(action_space: Any, shape: Any, right: str) -> None:
    parts = {"x": gym.spaces.Box(-1, 1, (3,)), "action_mask": gym.spaces.Box(0, 1, shape)}
    with pytest.raises(UsageError, match=rf"observation has 'action_mask' of shape.*{right}; call that part otherwise"):
        split_space(gym.spaces.Dict(parts), action_space)
