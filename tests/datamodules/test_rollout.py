import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder

from datamodules import RolloutDataModule
from datamodules.envs.vector import make_env, make_vector_env
from datamodules.evaluation import run_episodes
from rl_modules import A2C, PPO, PQN, REINFORCE, TRPO, RecurrentA2C, RecurrentPPO
from rl_modules.common.errors import UsageError
from tests.datamodules.envs import Counter
from tests.training import fit, rollouts


class Recorder(PPO):
    """Keeps every minibatch it is given."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append({key: value.clone() for key, value in batch.items()})
        return super().training_step(batch, batch_idx)


def record(make_trainer, **kwargs):
    defaults = {"n_envs": 2, "n_steps": 12, "batch_size": 6, "n_epochs": 3, "total_timesteps": 48, "eval_freq": 0}
    data, model = RolloutDataModule(Counter, **{**defaults, **kwargs}), Recorder()
    make_trainer().fit(model, datamodule=data)
    return model.batches, data


def rows(batches):
    return sorted((*o.tolist(), a.item()) for b in batches for o, a in zip(b["observation"], b["action"], strict=True))


def test_every_pass_sees_every_transition_once_in_another_order(make_trainer):
    batches, data = record(make_trainer)
    assert data.num_timesteps == 48
    assert len(batches) == 2 * 3 * 4
    passes = [batches[i : i + 4] for i in range(0, len(batches), 4)]
    first, second = passes[:3], passes[3:]
    for rollout in (first, second):
        assert rows(rollout[0]) == rows(rollout[1]) == rows(rollout[2])
        assert len(rows(rollout[0])) == 24
        in_order = [torch.cat([b["observation"] for b in each]) for each in rollout]
        assert not torch.equal(in_order[0], in_order[1])
    assert rows(first[0]) != rows(second[0])


def test_reset_rows_reach_no_minibatch(make_trainer):
    batches, data = record(make_trainer, autoreset_mode="next_step", total_timesteps=20, n_epochs=1)
    # 12 rows of each environment: five steps, a reset, five steps, a reset.
    assert data.num_timesteps == 20
    counts = torch.cat([b["observation"] for b in batches])[:, 1]
    assert sorted(counts.tolist()) == sorted([0.0, 1.0, 2.0, 3.0, 4.0] * 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rollout_of_resets_alone_is_followed_by_one_with_transitions(make_trainer, overlap):
    sizes = {"n_steps": 1, "batch_size": None, "n_epochs": 1, "autoreset_mode": "next_step", "overlap": overlap}
    batches, data = record(make_trainer, **sizes)
    # Both environments reset after every fifth step.
    assert [batch["observation"][:, 1].tolist() for batch in batches] == [[float(i % 5)] * 2 for i in range(24)]
    assert data.num_timesteps == 48
    assert list(data.collector.episodes.lengths) == [5] * 8


@pytest.mark.long
def test_other_algorithms_get_no_rollout_of_resets_alone(make_trainer):
    for model in (A2C(normalize_advantage=True), REINFORCE(psi="baseline", normalize_advantage=True),
                  TRPO(batch_size=4), PQN(), RecurrentA2C(lstm_hidden_size=8)):  # fmt: skip
        data = RolloutDataModule(Counter, n_envs=1, n_steps=1, batch_size=None, n_epochs=1, total_timesteps=24,
                                 eval_freq=0, autoreset_mode="next_step")  # fmt: skip
        make_trainer().fit(model, datamodule=data)
        assert data.num_timesteps == 24
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.long
def test_sequences_of_one_step_that_are_resets_reach_no_minibatch(make_trainer):
    class Sequences(RecurrentPPO):
        def minibatch_loss(self, policy, value, batch):
            seen.append(len(value))
            return super().minibatch_loss(policy, value, batch)

    seen = []
    data = RolloutDataModule(Counter, n_envs=2, n_steps=12, batch_size=2, n_epochs=20, total_timesteps=40, eval_freq=0,
                             autoreset_mode="next_step")  # fmt: skip
    model = Sequences(sequence_length=1, lstm_hidden_size=8, normalize_advantage=False)
    make_trainer().fit(model, datamodule=data)
    # 24 rows in 12 minibatches; of the 24 four are resets, of which two come together in every fourth pass.
    assert sum(seen) == 40 * 20 and len(seen) == 24 * 20 and min(seen) == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Uneven(Counter):
    """Of five instances, the first of which is an example, the second has long episodes, the others single steps."""

    made = 0

    def __init__(self):
        super().__init__(length=1000 if Uneven.made == 1 else 1)
        Uneven.made += 1


@pytest.mark.long
def test_minibatches_without_a_transition_are_refused(make_trainer):
    with pytest.raises(UsageError, match="batch_size=1 .* autoreset_mode=next_step .* give at least batch_size=2"):
        record(make_trainer, batch_size=1, autoreset_mode="next_step")
    record(make_trainer, batch_size=1)
    Uneven.made = 0
    data = RolloutDataModule(Uneven, n_envs=4, n_steps=1, batch_size=2, total_timesteps=48, eval_freq=0,
                             autoreset_mode="next_step")  # fmt: skip
    with pytest.raises(UsageError, match="batch_size=2 cuts n_steps=1 into 2 minibatches, and all rows .* but 1 are"):
        make_trainer().fit(PPO(), datamodule=data)


@pytest.mark.parametrize("bad_at", [-1, 3])
def test_a_run_leaves_the_process_its_subnormal_numbers_even_if_it_fails(make_trainer, bad_at):
    data = RolloutDataModule(Counter, n_envs=2, n_steps=12, batch_size=6, total_timesteps=24, eval_freq=0,
                             env_kwargs={"bad_at": bad_at})  # fmt: skip
    if bad_at < 0:
        make_trainer().fit(PPO(), datamodule=data)
    else:
        with pytest.raises(UsageError, match="NaN"):
            make_trainer().fit(PPO(), datamodule=data)
    assert (torch.tensor([1e-40]) / 2).item() > 0


def test_training_ends_once_total_timesteps_are_reached_inside_an_epoch(make_trainer):
    batches, data = record(make_trainer, rollouts_per_epoch=10, total_timesteps=50)
    assert data.num_timesteps == 72
    assert len(batches) == 3 * 3 * 4


def test_same_seed_same_run_other_seed_other_run(make_trainer):
    one, again, other = (record(make_trainer, seed=seed)[0] for seed in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(one, again, strict=True) for k in a)
    assert rows(one) != rows(other)


def test_evaluation_changes_nothing_in_training(make_trainer):
    results = []
    for eval_freq in (0, 24):
        torch.manual_seed(eval_freq)  # the global generator is relied on nowhere
        data = RolloutDataModule(
            "CartPole-v1", n_envs=2, n_steps=16, batch_size=8, n_epochs=2, total_timesteps=128, eval_freq=eval_freq,
            n_eval_episodes=2, norm_obs=True, norm_reward=True
        )  # fmt: skip
        model = PPO()
        trainer = make_trainer()
        trainer.fit(model, datamodule=data)
        assert ("eval/mean_reward" in trainer.callback_metrics) == bool(eval_freq)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


class Follows:
    """Plays a fixed action; counts how often it was asked."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.zeros(len(observation), np.int64), state


def test_evaluation_plays_the_asked_number_of_whole_seeded_episodes():
    envs = make_vector_env(Counter, 3)
    got = run_episodes(Follows(), envs, [4, 5, 6], n_episodes=7)
    assert got["return"].tolist() == [15.0] * 7
    assert got["length"].tolist() == [5] * 7
    assert len(set(got["seed"].tolist())) == 7
    again = run_episodes(Follows(), envs, [4, 5, 6], n_episodes=7)
    assert got["seed"].tolist() == again["seed"].tolist()


def test_evaluated_episode_can_be_repeated_from_its_seed():
    envs = make_vector_env("CartPole-v1", 2)
    got = run_episodes(Follows(), envs, [4, 5], n_episodes=4)
    for seed, expected in zip(got["seed"].tolist(), got["return"].tolist(), strict=True):
        env = make_env("CartPole-v1")
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(0)
            total, over = total + float(reward), terminated or truncated
        assert total == expected


def test_a_batch_size_is_compared_with_the_algorithms_own_steps():
    data = RolloutDataModule("CartPole-v1", n_envs=8, batch_size=40, total_timesteps=40, eval_freq=0)
    fit(A2C(), data)  # 5 steps
    assert data.num_timesteps == data.batch_size == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_minibatches": 257}, r"n_minibatches=257 is more than n_envs\*n_steps=256"),
        ({"batch_size": 257}, r"batch_size=257 must lie between 1 and n_envs\*n_steps=256"),
        ({"n_envs": 0}, "n_envs=0 must be at least 1"),
        ({"n_epochs": 0}, "n_epochs=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"vectorization_mode": "asinc"}, "vectorization_mode='asinc' must be one of .*; did you mean async"),
        ({"autoreset_mode": "never"}, "autoreset_mode='never' must be one of same_step"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, message):
    with pytest.raises(UsageError, match=message):
        RolloutDataModule("CartPole-v1", **{"n_steps": 32, "batch_size": 32, **arguments})


class Refuses(gym.Wrapper):
    def __init__(self, env):
        raise gym.error.UnsupportedMode


class RefusesInASentence(gym.Wrapper):
    def __init__(self, env):
        raise UsageError("mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "CartPol-v1"}, "env_id='CartPol-v1' is not a known environment; did you mean CartPole-v1"),
        ({"env_id": "CartPole-v99"}, "env_id='CartPole-v99' can't be made: .*v1"),
        ({"env_id": "no.such.module:env"}, "the module 'no.such.module' can't be imported"),
        ({"env_id": "tests.datamodules.envs:Nothing"}, "has no 'Nothing'"),
        ({"env_id": "CartPole-v1", "env_kwargs": {"gravity": 3}}, "env_kwargs={'gravity': 3}"),
        ({"env_id": "CartPole-v1", "wrappers": ["FlatenObservation"]}, "did you mean FlattenObservation"),
        (
            {"env_id": "CartPole-v1", "wrappers": [{"class_path": "TimeLimit", "init_args": {"steps": 3}}]},
            "does not fit",
        ),
        (
            {"env_id": "CartPole-v1", "wrappers": ["GrayscaleObservation"]},
            "^wrappers: 'GrayscaleObservation' with {} does not fit <.*CartPole-v1>+: .* requires an image with 3",
        ),
        (
            {"env_id": "CartPole-v1", "wrappers": [{"class_path": "TimeLimit", "init_args": {"max_episode_steps": 0}}]},
            "^wrappers: 'TimeLimit' with {'max_episode_steps': 0} does not fit <.*>: .*positive, actually: 0",
        ),
        (
            {"env_id": "CartPole-v1", "wrappers": ["tests.datamodules.test_rollout.Refuses"]},
            "^wrappers: 'tests.datamodules.test_rollout.Refuses' with {} does not fit <.*>: UnsupportedMode$",
        ),
        ({"env_id": "CartPole-v1", "wrappers": ["tests.datamodules.test_rollout.RefusesInASentence"]}, "^mine$"),
    ],
)
def test_environments_that_cannot_be_made_get_one_sentence(arguments, message):
    with pytest.raises(UsageError, match=message):
        make_env(**arguments)


def test_missing_extra_names_the_pip_command(monkeypatch):
    def fail(*args, **kwargs):
        raise gym.error.DependencyNotInstalled("Box2D is not installed, run pip install swig")

    monkeypatch.setattr(gym, "make", fail)
    with pytest.raises(UsageError, match=r"LunarLander-v3 needs .* pip install 'gymnasium\[box2d\]'"):
        make_env("LunarLander-v3")


def test_wrappers_apply_in_order():
    env = make_env("CartPole-v1", wrappers=[
        {"class_path": "TimeLimit", "init_args": {"max_episode_steps": 7}}, "gymnasium.wrappers.NormalizeReward"
    ])  # fmt: skip
    assert type(env).__name__ == "NormalizeReward"
    assert type(env.env).__name__ == "TimeLimit"


def test_engine_refuses_wrappers_and_environments_without_one():
    with pytest.raises(UsageError, match="wrappers are for single environments"):
        make_vector_env("CartPole-v1", 2, "vector_entry_point", wrappers=["FlattenObservation"])
    with pytest.raises(UsageError, match="has no vectorised engine"):
        make_vector_env("Acrobot-v1", 2, "vector_entry_point")


def test_a_batch_size_that_a_callback_sets_is_checked():
    data = rollouts("CartPole-v1", n_envs=2, n_steps=16, batch_size=16, total_timesteps=128)
    with pytest.raises(UsageError, match=r"batch_size=64 must lie between 1 and n_envs\*n_steps=32"):
        fit(PPO(), data, callbacks=[BatchSizeFinder(init_val=16, steps_per_trial=1)])


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_what_prepare_computes_has_the_precision_of_acting(precision):
    class Compares(PPO):
        def prepare(self, rollout):
            policy, value = self.policy_and_value(rollout["observation"].flatten(0, 1))
            assert torch.equal(policy.log_prob(rollout["action"].flatten()), rollout["log_prob"].flatten())
            assert torch.equal(value, rollout["value"].flatten())
            return super().prepare(rollout)

    # Of one step: rows are computed as one batch in both.
    fit(Compares(), rollouts("CartPole-v1", n_steps=1), max_epochs=3, precision=precision)


def test_lightning_knows_that_a_run_resumes_within_an_epoch(make_trainer, tmp_path):
    def run(max_steps, ckpt_path=None):
        trainer = make_trainer(max_steps=max_steps)
        data = RolloutDataModule("CartPole-v1", n_envs=1, n_steps=16, batch_size=4, n_epochs=2, eval_freq=0)
        trainer.fit(PPO(net_arch=[4]), datamodule=data, ckpt_path=ckpt_path)
        return trainer

    run(3).save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not resumable")
        assert run(5, tmp_path / "a.ckpt").global_step == 5
