"""Networks and feature extractors of a user's own: what they may be, what a checkpoint keeps, errors."""

import copy
import functools
import io
import random
from pathlib import Path

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from torch import nn

import rl_modules
from recipes.cli import main
from rl_modules import DQN, PPO, SAC, TRPO
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.distributions import as_distribution
from rl_modules.networks.custom import CustomActorCritic
from rl_modules.networks.features import FeaturesExtractor, as_floats
from tests import networks
from tests.conformance.control import CASES
from tests.training import assert_resumes_exactly, fit, rollouts

NETWORKS = {
    "PPO": "tests.networks.PolicyAndValue",
    "A2C": networks.PolicyAndValue,
    "REINFORCE": "tests.networks:PolicyAndValue",
    "TRPO": networks.Policy,
    "DQN": {"class_path": "tests.networks.ActionValues", "init_args": {"width": 5}},
    "PQN": "tests.networks.ActionValues",
    "QRDQN": functools.partial(networks.ActionValues, n_quantiles=5),
    "C51": functools.partial(networks.ActionValues, n_quantiles=5),
    "DDPG": {"class_path": "tests.networks.PolicyAndCritics", "init_args": {"gaussian": False}},
    "TD3": functools.partial(networks.PolicyAndCritics, gaussian=False),
    "SAC": networks.PolicyAndCritics,
    "TQC": {"class_path": "tests.networks.PolicyAndCritics", "init_args": {"outputs": 25}},
    "CrossQ": "tests.networks.PolicyAndRenormalizedCritics",
}
CASE = {case.name: case for case in CASES if not case.label}


def spaces_of(env_id):
    env = gym.make(env_id)
    return {"observation_space": space_to_dict(env.observation_space), "action_space": space_to_dict(env.action_space)}


def check_run(name, tmp_path, **arguments):
    """Trains, and loads the checkpoint alone: the same weights and the same actions."""
    case = CASE[name]
    model = case.make_model(**arguments)
    trainer = fit(model, case.make_data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    for argument in arguments:
        path = stored[argument] if isinstance(stored[argument], str) else stored[argument]["class_path"]
        assert path.replace(":", ".").startswith("tests.networks.")
    loaded = getattr(rl_modules, name).load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    observation = gym.make(case.env_id).reset(seed=0)[0]
    np.testing.assert_array_equal(
        model.predict(observation, deterministic=True)[0], loaded.predict(observation, deterministic=True)[0]
    )
    return model


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "DDPG"])
def test_every_algorithm_takes_a_whole_network(name, tmp_path):
    model = check_run(name, tmp_path, network=NETWORKS[name])
    assert any(type(part).__module__ == "tests.networks" for part in model.network.modules())
    untrained = CASE[name].make_model(network=NETWORKS[name], **spaces_of(CASE[name].env_id))
    untrained.configure_model()
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), untrained.parameters(), strict=True))


@pytest.mark.parametrize("name", [case.name for case in CASE.values() if case.has_gradient and case.name != "ARS"])
def test_every_algorithm_takes_a_feature_extractor(name, tmp_path):
    model = check_run(name, tmp_path, features_extractor={"class_path": "tests.networks.Features"})
    made = [part for part in model.network.modules() if isinstance(part, networks.Features)]
    assert made


@pytest.mark.parametrize("given", ["tests.networks.make_features", networks.make_features, networks.Features])
def test_a_class_and_a_function_by_path_or_itself(given):
    model = PPO(features_extractor=given, **spaces_of("CartPole-v1"))
    model.configure_model()
    assert model.network.encoder.out_features == (7 if given is networks.Features else 3)


@pytest.mark.parametrize(("name", "key"), [("PPO", "network"), ("DQN", "network"), ("SAC", "features_extractor")])
def test_a_custom_network_resumes_exactly(name, key, tmp_path):
    given = NETWORKS[name] if key == "network" else networks.Features
    case = CASE[name]
    assert_resumes_exactly(lambda: case.make_model(**{key: given}), case.make_epochs, tmp_path, epochs=3)


def test_a_checkpoint_does_not_choose_which_functions_are_called(tmp_path):
    case = CASE["PPO"]
    trained = case.make_model(features_extractor=networks.make_features)
    fit(trained, case.make_data()).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match="is no class of torch.nn.Module.*features_extractor=make_features"):
        PPO.load_from_checkpoint(tmp_path / "a.ckpt")
    again = PPO.load_from_checkpoint(tmp_path / "a.ckpt", features_extractor=networks.make_features)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trained.parameters(), strict=True))
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    saved["hyper_parameters"]["features_extractor"] = {"class_path": "os.system", "init_args": {}}
    torch.save(saved, tmp_path / "b.ckpt")
    with pytest.raises(UsageError, match=r"os.system, which is no class of torch.nn.Module"):
        PPO.load_from_checkpoint(tmp_path / "b.ckpt")


@pytest.fixture(scope="module")
def saved_ppo(tmp_path_factory):
    """A checkpoint's contents, and a setting that runs a command: keys of the space are the command's words."""
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    fit(PPO(net_arch=[8]), rollouts("CartPole-v1", total_timesteps=64)).save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    part = space_to_dict(spaces.Box(0.0, 1.0, (1,)))
    evil = {"class_path": "subprocess.Popen", "init_args": {"executable": "/bin/sh"}}
    words = {"type": "Dict", "spaces": {"!": part, "-c": part, "touch ran": part}}
    saved["hyper_parameters"] |= {"observation_space": words, "features_extractor": evil}
    return saved


@pytest.mark.parametrize("source", [str, lambda path: io.BytesIO(path.read_bytes()), lambda path: path.as_uri()])
@pytest.mark.parametrize("key", ["hyper_parameters", "hparams", "module_arguments"])
def test_a_checkpoint_runs_nothing_wherever_it_is_and_wherever_it_says_so(
    source, key, saved_ppo, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    saved = copy.deepcopy(saved_ppo)
    evil = saved["hyper_parameters"].pop("features_extractor")
    saved.setdefault(key, {})["features_extractor"] = evil
    torch.save(saved, "evil.ckpt")
    called = []
    monkeypatch.setattr("subprocess.Popen", lambda *words, **settings: called.append(words))
    with pytest.raises(UsageError, match="subprocess.Popen, which is no class of torch.nn.Module|has the key 'h|'modu"):
        PPO.load_from_checkpoint(source(tmp_path / "evil.ckpt"))
    assert not called


def test_weights_from_a_file_bring_no_network(saved_ppo):
    model = PPO(net_arch=[8])
    with pytest.raises(UsageError, match="holds another network"):  # than that which the command gave
        model.load_state_dict({"checkpoint_of_rank": {**saved_ppo, "reached": {"began_at": (0, 0)}}})
    assert model.hparams["features_extractor"] is None


def test_a_subclass_may_choose_a_function_for_its_network(tmp_path):
    class Own(PPO):
        def __init__(self, **arguments):
            super().__init__(features_extractor="tests.networks.make_features", **arguments)

    trained = Own()
    fit(trained, rollouts("CartPole-v1", total_timesteps=64)).save_checkpoint(tmp_path / "a.ckpt")
    again = Own.load_from_checkpoint(tmp_path / "a.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trained.parameters(), strict=True))


class Dropping(networks.Features):
    """Features with dropout, and noise of NumPy's and of Python's."""

    def forward(self, x):
        features = super().forward(x)
        if not self.training:
            return features
        noise = np.random.rand() + random.random()  # noqa: NPY002
        return nn.functional.dropout(features, 0.5) * (1 + 0.1 * noise)


@pytest.mark.parametrize("name", ["PPO", "DQN", "SAC"])
def test_what_draws_from_global_generators_resumes_exactly(name, tmp_path):
    case = CASE[name]

    def make_model():
        L.seed_everything(0, verbose=False)  # as every process of `rl fit` begins
        return case.make_model(features_extractor=Dropping)

    assert_resumes_exactly(make_model, case.make_epochs, tmp_path, epochs=3)


def test_a_run_that_draws_from_no_global_generator_stores_none(tmp_path):
    trainer = fit(CASE["PPO"].make_model(), CASE["PPO"].make_data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["generators"] is None


def test_a_network_like_the_built_in_one_trains_like_it(tmp_path):
    """With the same weights the same updates: the wrapper changes nothing."""
    case = CASE["PPO"]
    ours = case.make_model(features_extractor="tests.networks.Features", net_arch=[4], max_grad_norm=None)
    fit(ours, case.make_data())
    again = case.make_model(network="tests.rl_modules.test_custom_networks.Twin", max_grad_norm=None)
    fit(again, case.make_data())
    for a, b in zip(ours.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def Twin(observation_space, action_space):
    from rl_modules.networks.actor_critic import ActorCritic
    from rl_modules.networks.encoders import extractor_of

    with extractor_of("tests.networks.Features"):
        return ActorCritic(observation_space, action_space, [4])


def test_a_torch_distribution_and_a_box():
    case = CASE["PPO"]
    fit(case.make_model(network=networks.TorchDistribution), case.make_data())
    model = PPO(network=networks.PolicyAndValue)
    fit(model, rollouts("Pendulum-v1", n_envs=2, total_timesteps=64))
    policy, value = model.network(torch.zeros(5, 3))
    assert policy.mean.shape == policy.log_std.shape == (5, 1)
    assert value.shape == (5,)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)])
def test_numbers_of_minus_infinity_rule_options_out(space):
    observation = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    network = CustomActorCritic("tests.networks.RulesOut", spaces.Box(-1, 1, (2,)), space)
    policy, old = network(observation)[0], network(observation)[0].detach()
    first = torch.stack([policy.sample() for _ in range(50)]).reshape(50, 2, -1)[..., 0]
    assert (first[:, 0] != 0).all() if not isinstance(space, spaces.MultiBinary) else (first[:, 0] == 0).all()
    assert old.kl(policy).abs().max() < 1e-6
    gradients = torch.autograd.grad((policy.entropy() + old.kl(policy)).sum(), list(network.module.policy.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_trpo_takes_steps_where_its_network_rules_options_out():
    model = TRPO(network=networks.RulesOut)
    fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=64, total_timesteps=256))
    assert model.rejected_updates == 0


def test_observations_arrive_as_in_stable_baselines3():
    preprocess = pytest.importorskip("stable_baselines3.common.preprocessing").preprocess_obs
    space = spaces.Dict({
        "image": spaces.Box(0, 255, (3, 36, 40), np.uint8),
        "choice": spaces.Discrete(4),
        "choices": spaces.MultiDiscrete([2, 3]),
        "switches": spaces.MultiBinary(3),
        "numbers": spaces.Box(-2, 2, (2, 2), np.float32),
    })  # fmt: skip
    space.seed(0)
    batch = {name: torch.as_tensor(np.stack([part.sample() for _ in range(4)])) for name, part in space.items()}
    theirs = preprocess(batch, space)
    ours = as_floats(batch, space)
    for name in space:
        torch.testing.assert_close(ours[name], theirs[name].float())


def test_an_extractor_of_stable_baselines3_is_one():
    layers = pytest.importorskip("stable_baselines3.common.torch_layers")
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    extractor = FeaturesExtractor({"class_path": "stable_baselines3.common.torch_layers.NatureCNN",
                                   "init_args": {"features_dim": 32}}, space)  # fmt: skip
    assert isinstance(extractor.extractor, layers.NatureCNN)
    image = torch.randint(0, 255, (2, 4, 84, 84), dtype=torch.uint8)
    torch.testing.assert_close(extractor(image), extractor.extractor(image.float() / 255))


@pytest.mark.long
def test_yaml_names_a_network(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from tests.networks import PolicyAndValue as Net\n")
    config = {"model": {"class_path": "PPO", "init_args": {
        "network": {"class_path": "mine.Net", "init_args": {"width": 6}}}},
        "data": {"class_path": "RolloutDataModule", "init_args": {"total_timesteps": 256, "n_test_episodes": 1,
                                                                  "eval_freq": 0}}}  # fmt: skip
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "mine.yaml"])
    (path,) = tmp_path.glob("logs/*/*/checkpoints/last.ckpt")
    model = PPO.load_from_checkpoint(path, weights_only=True)
    assert model.network.module.body[0].out_features == 6
    main(["fit", "--config", "mine.yaml", "--model.network=null", "--model.features_extractor=tests.networks.Features"])
    with pytest.raises(SystemExit):
        main(["fit", "--config", "mine.yaml", "--model.network=mine.Nett"])
    assert "network='mine.Nett': the module 'mine' has no 'Nett'; did you mean Net?" in capsys.readouterr().err


@pytest.mark.parametrize(("cls", "env_id", "arguments", "sentence"), [
    (PPO, "CartPole-v1", {"network": "Net"}, "network='Net'"),
    (PPO, "CartPole-v1", {"network": "no_such.Net"}, "the module 'no_such' can't be imported"),
    (PPO, "CartPole-v1", {"network": "tests.networks.PolicyAndValu"}, "did you mean PolicyAndValue?"),
    (PPO, "CartPole-v1", {"network": "tests.networks.gym"}, "can't be made"),
    (PPO, "CartPole-v1", {"network": {"path": "x"}}, "must have the key class_path"),
    (PPO, "CartPole-v1", {"network": lambda *_: None}, "has no import path"),
    (PPO, "CartPole-v1", {"network": torch.nn.Linear(1, 1)}, "has no import path"),
    (PPO, "CartPole-v1", {"network": networks.no_module}, "made int; it must make a torch.nn.Module"),
    (PPO, "CartPole-v1", {"network": networks.fails}, "no such thing"),
    (PPO, "CartPole-v1", {"network": networks.Broken}, "can't read two observations of Box"),
    (PPO, "CartPole-v1", {"network": networks.Policy}, "must return the policy and the value"),
    (PPO, "CartPole-v1", {"network": functools.partial(networks.PolicyAndValue, outputs=5)},
     r"returned a policy of shape \(2, 5\) for 2 observations; the action space Discrete\(2\) needs \(2, 2\)"),
    (PPO, "CartPole-v1", {"network": functools.partial(networks.PolicyAndValue, wdth=5)}, "wdth"),
    (TRPO, "Pendulum-v1", {"network": functools.partial(networks.Policy, outputs=1)}, r"needs \(2, 2\)"),
    (DQN, "CartPole-v1", {"network": networks.PolicyAndValue}, r"it must return a tensor of shape \(2, 2\)"),
    (SAC, "Pendulum-v1", {"network": networks.ActionValues}, "can't be made"),
    (SAC, "Pendulum-v1", {"network": functools.partial(networks.PolicyAndCritics, gaussian=False)},
     "must return mean and log standard deviation"),
    (SAC, "Pendulum-v1", {"network": functools.partial(networks.PolicyAndCritics, outputs=2)},
     r"must return a tensor of shape \(2, 2, 1\)"),
    (PPO, "CartPole-v1", {"features_extractor": networks.Wrong}, r"it must return a tensor of shape \(2, 8\)"),
    (PPO, "CartPole-v1", {"features_extractor": networks.Broken}, "features_extractor: Broken can't read"),
    (PPO, "CartPole-v1", {"features_extractor": networks.Features, "network": networks.PolicyAndValue},
     "are both given"),
])  # fmt: skip
def test_what_is_no_network_is_one_sentence(cls, env_id, arguments, sentence):
    with pytest.raises(UsageError, match=sentence) as error:
        cls(**arguments, **spaces_of(env_id)).configure_model()
    assert "\n" not in str(error.value)


class Normals(networks.PolicyAndValue):
    """A normal distribution whose parameters have the dtype of the last layer."""

    def forward(self, observation):
        (mean, log_std), value = self.policy(self.body(observation)).chunk(2, -1), super().forward(observation)[1]
        normal = torch.distributions.Normal(mean, log_std.exp())
        return torch.distributions.Independent(normal, 1), value


@pytest.mark.parametrize(("network", "env_id"), [
    (networks.TorchDistribution, "CartPole-v1"), (Normals, "Pendulum-v1"),
])  # fmt: skip
def test_distributions_of_torch_compute_in_float32_under_mixed_precision(network, env_id):
    class Keeps(PPO):
        def prepare(self, rollout):
            acted.update(log_prob=rollout["log_prob"], action=rollout["action"])
            return super().prepare(rollout)

    acted: dict = {}
    fit(Keeps(network=network), rollouts(env_id, n_envs=2), max_epochs=1, precision="bf16-mixed")
    assert acted["log_prob"].dtype == torch.float32
    assert acted["action"].dtype in (torch.float32, torch.int64)


def test_logits_of_16_bits_are_normalised_in_32():
    logits = torch.tensor([[5.0, 1.3, -2.0]]).bfloat16()
    ours = as_distribution(torch.distributions.Categorical(logits=logits, validate_args=False))
    total = sum(ours.log_prob(torch.tensor([i])).exp() for i in range(3))
    torch.testing.assert_close(total, torch.ones(1), atol=1e-6, rtol=0)
