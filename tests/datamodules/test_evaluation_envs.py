"""Environments of evaluation: made with settings of their own, and kept between evaluations."""

import inspect
import os

import gymnasium as gym
import numpy as np
import pytest
import torch

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.base import ControlDataModule
from datamodules.envs import vector
from datamodules.envs.boundary import require_finite_evaluation
from datamodules.envs.vector import make_vector_env
from datamodules.evaluation import Watch, run_episodes
from recipes.callbacks import Checkpoints
from rl_modules import PPO, SAC
from rl_modules.common.errors import UsageError
from tests.conformance.envs import Endless
from tests.ranks import on_ranks
from tests.training import fit

SMALL = {"n_envs": 2, "n_steps": 32, "total_timesteps": 256, "n_eval_episodes": 2, "n_test_episodes": 3,
         "rollouts_per_epoch": 1}  # fmt: skip


def lengths(trainer, model, data):
    return trainer.test(model, datamodule=data, verbose=False)[0]["test/mean_ep_length"]


def test_a_list_of_a_yaml_file_is_the_tuple_that_a_wrapper_asks_for():
    wrappers = [{"class_path": "ReshapeObservation", "init_args": {"shape": [2, 2]}}]
    data = RolloutDataModule("CartPole-v1", wrappers=wrappers, **SMALL)
    data.setup("check")
    assert data.observation_space.shape == (2, 2)
    data.teardown("check")


@pytest.mark.long
def test_evaluation_has_its_own_arguments_and_wrappers():
    limits = {"env_kwargs": {"max_episode_steps": 7}}
    longer = {"eval_env_kwargs": {"max_episode_steps": 9}}
    shorter = {"eval_wrappers": [{"class_path": "TimeLimit", "init_args": {"max_episode_steps": 5}}]}
    for arguments, expected in ((limits, 7), ({**limits, **longer}, 9), ({**limits, **longer, **shorter}, 5)):
        data = RolloutDataModule("Pendulum-v1", eval_freq=64, **SMALL, **arguments)
        model = PPO()
        trainer = fit(model, data)
        assert data.metrics()["rollout/ep_len_mean"] == 7
        assert trainer.callback_metrics["eval/mean_ep_length"] == expected
        assert lengths(trainer, model, data) == expected


@pytest.mark.long
def test_the_environments_are_made_once(monkeypatch):
    made = []
    original = vector.make_env

    def counted(*args, **arguments):
        made.append(args)
        return original(*args, **arguments)

    monkeypatch.setattr(vector, "make_env", counted)
    counts = {}
    for eval_freq in (256, 64):
        made.clear()
        data = RolloutDataModule("CartPole-v1", eval_freq=eval_freq, **SMALL)
        fit(PPO(), data)
        counts[eval_freq] = len(made)
    assert counts[64] == counts[256] == 2 + 2  # of training, and of one evaluation


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False])
def test_kept_environments_play_the_same_episodes(kept, monkeypatch):
    """As environments that are made for each evaluation: the curve is the same."""
    from datamodules.environments import Environments

    if not kept:
        monkeypatch.setattr(Environments, "for_evaluation", Environments.make_for_evaluation)
    data = ReplayDataModule("Pendulum-v1", learning_starts=16, total_timesteps=64, rollouts_per_epoch=16, eval_freq=16,
                            n_eval_episodes=2)  # fmt: skip
    curve = []

    class Watch(SAC):
        def on_validation_end(self):
            curve.append(float(self.trainer.callback_metrics["eval/mean_reward"]))

    fit(Watch(net_arch=[8]), data)
    _CURVES.append(curve)
    assert len(curve) >= 3
    assert all(curve == other for other in _CURVES)


_CURVES: list[list[float]] = []


@pytest.mark.long
def test_they_are_closed_with_the_run():
    data = RolloutDataModule("CartPole-v1", eval_freq=64, **SMALL)
    closed = []

    class Closes(gym.Wrapper):
        def close(self):
            closed.append(self)
            super().close()

    data = RolloutDataModule(lambda: Closes(gym.make("CartPole-v1")), eval_freq=64, **SMALL)
    fit(PPO(), data)
    assert data.environments._kept == {}
    assert len(closed) >= 4


@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"eval_wrappers": ["FlattenObservatio"]}, "did you mean FlattenObservation"),
    ({"eval_wrappers": [{"class_path": "FrameStackObservation", "init_args": {"stack_size": 2}}]},
     r"eval_env_kwargs and eval_wrappers make environments with the observation_space Box\(2, 4\) float32, in training "
     r"it is Box\(4,\) float32"),
    ({"eval_env_kwargs": {"no_such": 1}}, "can't be made with env_kwargs=.*no_such"),
])  # fmt: skip
def test_a_mistake_is_reported_before_training(arguments, sentence):
    data = RolloutDataModule("CartPole-v1", eval_freq=0, **SMALL, **arguments)
    with pytest.raises(UsageError, match=sentence):
        data.setup("fit")


class Succeeds(gym.Env):
    """Episodes of one step, which succeed where the action is 1; ``says``: which of them say so."""

    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(2)

    def __init__(self, says: str = "all") -> None:
        self.says = says

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        told = self.says == "all" or (self.says == "success" and action)
        return 0, 1.0, True, False, {"is_success": bool(action)} if told else {}


class Alternates:
    def __init__(self) -> None:
        self.asked = 0

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        self.asked += 1
        return np.array([self.asked % 2, 1])[: len(observation)], state


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_success_is_that_of_the_episodes(mode):
    envs = make_vector_env(Succeeds, 2, autoreset_mode=mode)
    got = run_episodes(Alternates(), envs, [4, 5], n_episodes=8)
    own = got["success"].reshape(4, 2)
    assert own[:, 1].tolist() == [1.0] * 4
    assert own[:, 0].tolist() == ([1.0, 1.0, 1.0, 1.0] if mode == "next_step" else [1.0, 0.0, 1.0, 0.0])


def test_an_episode_that_does_not_say_so_is_no_success_and_nothing_is_made_up():
    told = run_episodes(Alternates(), make_vector_env(lambda: Succeeds("success"), 1), [4], n_episodes=4)
    assert told["success"].tolist() == [1.0, 0.0, 1.0, 0.0]
    silent = run_episodes(Alternates(), make_vector_env(lambda: Succeeds("none"), 1), [4], n_episodes=4)
    assert "success" not in silent


def test_others_see_how_far_an_evaluation_is_and_what_was_cut(monkeypatch):
    monkeypatch.setattr("datamodules.evaluation.TOLD_EVERY_S", 0.0)
    seen = []
    watch = Watch(tell=seen.append)
    with pytest.warns(UserWarning, match="2 evaluation episodes were cut"):
        run_episodes(Alternates(), make_vector_env(Endless, 2), [4, 5], n_episodes=4, max_steps=3, watch=watch)
    assert seen == [0, 1, 2] and watch.cut == 2
    run_episodes(Alternates(), make_vector_env(Succeeds, 1), [4], n_episodes=1, watch=watch)
    assert watch.cut == 0


def test_the_success_rate_is_logged():
    data = RolloutDataModule(Succeeds, n_envs=2, n_steps=8, total_timesteps=32, eval_freq=16, n_eval_episodes=4,
                             n_test_episodes=3)  # fmt: skip
    trainer = fit(PPO(), data)
    assert trainer.callback_metrics["eval/success_rate"] in (0.0, 1.0)
    assert "test/success_rate" in trainer.test(trainer.model, datamodule=data, verbose=False)[0]


class FailsAt(gym.Env):
    """Episodes of 20 steps, whose fifth goes wrong; ``how`` = "starts": the reset of the second episode."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)

    def __init__(self, how: str = "not") -> None:
        self.how, self.episodes = how, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episodes = 0, self.episodes + 1
        return np.full(3, np.nan if self.how == "starts" and self.episodes == 2 else 0.0, np.float32), {}

    def step(self, action):
        self.t += 1
        fails = self.t == 5
        if fails and self.how == "raises":
            raise RuntimeError("only in evaluation")
        observation = np.zeros(4 if fails and self.how == "shape" else 3, np.float32)
        if fails and self.how == "observation":
            observation[1] = np.inf
        return observation, np.nan if fails and self.how == "reward" else 1.0, self.t == 20, False, {}


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", r"^the environment mine raised RuntimeError: only in evaluation \(.*py:\d+\); fix it"),
        ("shape", "^the environment mine raised ValueError: Output array is the wrong shape"),
        ("reward", "^environment 0 of mine returned a NaN or infinite reward in an evaluation"),
        ("observation", "^environment 0 of mine returned a NaN or infinite observation in an evaluation"),
        ("starts", "^environment 0 of mine returned a NaN or infinite observation in an evaluation"),
    ],
)
def test_an_environment_that_fails_in_evaluation_is_named_in_one_sentence(how, sentence, mode):
    envs = make_vector_env(lambda: FailsAt(how), 1, autoreset_mode=mode)
    with pytest.raises(UsageError, match=sentence):
        run_episodes(Alternates(), envs, [4], n_episodes=2, name="mine")


def test_a_dict_and_a_tuple_are_looked_through():
    values = {"a": np.zeros(2), "b": (np.zeros((2, 1)), np.array([[0.0], [np.nan]]))}
    with pytest.raises(UsageError, match="environment 1 of mine returned a NaN or infinite observation"):
        require_finite_evaluation("mine", "observation", values)


def test_a_bad_evaluation_is_no_best_checkpoint(tmp_path):
    data = RolloutDataModule(FailsAt, **{**SMALL, "eval_env_kwargs": {"how": "reward"}}, eval_freq=64)
    best = Checkpoints()
    with pytest.raises(UsageError, match="of .*FailsAt returned a NaN or infinite reward in an evaluation"):
        fit(PPO(net_arch=[8]), data, callbacks=[best], enable_checkpointing=True, default_root_dir=tmp_path)
    assert not list(tmp_path.rglob("best.ckpt"))


@pytest.mark.long
def test_ranks_of_which_one_knows_of_success_do_not_wait_for_each_other(tmp_path):
    def evaluate():
        says = "all" if os.environ["RANK"] == "0" else "none"
        data = RolloutDataModule(lambda: Succeeds(says), n_envs=2, n_steps=8, total_timesteps=64, eval_freq=32,
                                 n_eval_episodes=4)  # fmt: skip
        trainer = fit(PPO(), data, devices=2, strategy="ddp")
        return float(trainer.callback_metrics["eval/success_rate"])

    one, two = on_ranks(evaluate, tmp_path)
    assert one == two and one in (0.0, 0.5)


def test_a_subclass_may_set_the_environments_arguments():
    class Short(RolloutDataModule):
        def __init__(self, **arguments):
            super().__init__("Pendulum-v1", **arguments)
            self.env_kwargs = {"max_episode_steps": 4}

    data = Short(n_envs=1)
    data.setup("test")
    assert data.example_env.spec.max_episode_steps == 4
    assert data.environments.for_training(1).envs[0].spec.max_episode_steps == 4
    data.teardown("test")


@pytest.mark.long
def test_what_is_assigned_between_two_fits_holds_for_evaluation_too():
    """Every episode of Pendulum lasts as long as its TimeLimit says."""
    data = RolloutDataModule("Pendulum-v1", env_kwargs={"max_episode_steps": 5}, eval_freq=64, **SMALL)
    model = PPO()

    def trained_and_evaluated():
        trainer = fit(model, data)
        return data.metrics()["rollout/ep_len_mean"], float(trainer.callback_metrics["eval/mean_ep_length"])

    assert trained_and_evaluated() == (5, 5)
    data.env_kwargs = {"max_episode_steps": 9}
    assert trained_and_evaluated() == (9, 9)
    data.wrappers = [{"class_path": "TimeLimit", "init_args": {"max_episode_steps": 4}}]
    assert trained_and_evaluated() == (4, 4)
    data.eval_wrappers = []
    assert trained_and_evaluated() == (4, 9)
    data.eval_env_kwargs = {"max_episode_steps": 7}
    assert trained_and_evaluated() == (4, 7)


def test_an_environment_assigned_between_two_fits_is_named_in_checkpoints(tmp_path):
    """By the name a resumed run knows its own."""
    data = RolloutDataModule("CartPole-v1", eval_freq=0, **SMALL)
    model = PPO()
    fit(model, data)
    data.env_id = "CartPole-v0"
    fit(model, data).save_checkpoint(tmp_path / "second.ckpt")
    assert data.env_name == data.collector.name == "CartPole-v0"
    again = RolloutDataModule("CartPole-v0", eval_freq=0, **{**SMALL, "total_timesteps": 2 * SMALL["total_timesteps"]})
    fit(PPO(), again, ckpt_path=tmp_path / "second.ckpt")
    assert again.is_complete


def test_arguments_of_evaluation_go_over_those_of_training():
    given = {"env_kwargs": {"max_episode_steps": 4, "g": 1.0}, "eval_env_kwargs": {"g": 2.0}}
    data = RolloutDataModule("Pendulum-v1", **given)
    assert data.environments.eval_env_kwargs == {"max_episode_steps": 4, "g": 2.0}
    assert data.env_kwargs == {"max_episode_steps": 4, "g": 1.0}
    data = RolloutDataModule("Pendulum-v1", vectorization_mode="vector_entry_point", **given)
    assert data.environments.eval_env_kwargs == {"g": 2.0}  # an engine's arguments are its own


def saved_with(path, **settings):
    """A checkpoint of PPO whose datamodule has other settings."""
    fit(PPO(), RolloutDataModule("CartPole-v1", eval_freq=0, **SMALL | {"total_timesteps": 64})).save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    of_all = inspect.signature(ControlDataModule.__init__).parameters
    named = {name: value for name, value in saved["datamodule_hyper_parameters"].items() if name in of_all}
    saved["datamodule_hyper_parameters"] = {**named, **settings}
    torch.save(saved, path)
    return path


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"env_id": "subprocess:Popen", "env_kwargs": {"args": ["touch", "ran"]}}, "env_id=…"),
        ({"wrappers": ["os.system"]}, "wrappers=…"),
        ({"eval_wrappers": [{"class_path": "subprocess:Popen", "init_args": {}}]}, "eval_wrappers=…"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [RolloutDataModule, ReplayDataModule])
def test_a_checkpoints_datamodule_chooses_no_code(settings, again, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved_with("a.ckpt", **settings)
    with pytest.raises(UsageError, match=f"must not choose what code runs.*load_from_checkpoint\\(…, {again}\\)"):
        kind.load_from_checkpoint(path)


def test_a_checkpoints_datamodule_loads_with_registered_names_and_what_is_given_again(tmp_path):
    path = saved_with(tmp_path / "a.ckpt", wrappers=["RecordEpisodeStatistics"])
    data = RolloutDataModule.load_from_checkpoint(path)
    assert (data.env_id, data.wrappers, data.n_envs) == ("CartPole-v1", ["RecordEpisodeStatistics"], 2)
    path = saved_with(tmp_path / "b.ckpt", env_id="no.such:make")
    assert RolloutDataModule.load_from_checkpoint(path, env_id="Acrobot-v1").env_id == "Acrobot-v1"
