"""gSDE: densities, noise over steps, resuming."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_modules import A2C, PPO, SAC, TQC, TRPO, CrossQ, RecurrentA2C, RecurrentPPO
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.distributions.independent import DiagGaussian
from rl_modules.distributions.state_dependent import NoiseMatrices, StateDependentGaussian, exploring_act
from rl_modules.networks.critics import StateDependentPolicy
from tests.conformance.control import CASES
from tests.training import assert_resumes_exactly, fit, rollouts

PENDULUM = gym.make("Pendulum-v1")
SPACES = {"observation_space": space_to_dict(PENDULUM.observation_space),
          "action_space": space_to_dict(PENDULUM.action_space)}  # fmt: skip
REPLAY = {"n_envs": 2, "buffer_size": 1000, "learning_starts": 32, "train_freq": 6, "batch_size": 8, "eval_freq": 0}
CASE = {case.name: case for case in CASES if not case.label}


def random_gaussian(batch=6, width=5, actions=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean, features = torch.randn(batch, actions, generator=generator), torch.randn(batch, width, generator=generator)
    log_std = torch.randn(width, actions, generator=generator) * 0.5
    return mean, log_std, features


def test_densities_are_those_of_stable_baselines3():
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    mean, log_std, features = random_gaussian()
    theirs = distributions.StateDependentNoiseDistribution(3)
    theirs.latent_sde_dim = 5
    theirs.sample_weights(log_std, batch_size=6)
    theirs.proba_distribution(mean, log_std, features)
    ours = StateDependentGaussian(mean, log_std, features)
    action = torch.randn(6, 3)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.mode(), theirs.mode())
    # With their matrices the same noise.
    matrices = NoiseMatrices(-1)
    matrices.standard = theirs.exploration_matrices / log_std.exp()
    ours.matrices = matrices
    torch.testing.assert_close(ours.sample(), theirs.sample())


def test_squashed_densities_are_those_of_stable_baselines3():
    torch.manual_seed(0)  # an action at its bound would show the ε of theirs
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    policy = StateDependentPolicy(PENDULUM.observation_space, 3, [5], log_std_init=-1.0)
    torch.nn.init.normal_(policy.log_std, mean=-2.0)
    observation = torch.randn(7, 3)
    mean, features = policy._mean_and_features(observation)
    theirs = distributions.StateDependentNoiseDistribution(3, squash_output=True, learn_features=True)
    theirs.latent_sde_dim = 5
    theirs.sample_weights(policy.log_std, batch_size=7)
    action, log_prob = theirs.log_prob_from_params(mean, policy.log_std, features)
    ours_mean, ours_log_std = policy(observation)
    noise = (torch.atanh(action) - ours_mean) / ours_log_std.exp()
    ours_action, ours_log_prob = policy.sample(observation, noise)
    torch.testing.assert_close(ours_action, action, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours_log_prob, log_prob, atol=1e-2, rtol=1e-3)  # their ε in log(1 - a² + ε)


def test_a_gradient_reaches_the_noise_and_in_sac_the_features():
    mean, log_std, features = (x.requires_grad_() for x in random_gaussian())
    StateDependentGaussian(mean, log_std, features.detach()).log_prob(torch.zeros(6, 3)).sum().backward()
    assert log_std.grad.abs().min() > 0
    policy = StateDependentPolicy(PENDULUM.observation_space, 1, [5])
    policy(torch.randn(4, 3))[1].sum().backward()
    assert policy.trunk[0].weight.grad.abs().sum() > 0
    assert policy.log_std.grad.abs().sum() > 0


def test_the_noise_of_many_rollouts_has_the_density():
    mean, log_std, features = random_gaussian(batch=1)
    policy = StateDependentGaussian(mean.expand(20_000, -1), log_std, features.expand(20_000, -1))
    policy.matrices = NoiseMatrices(-1)
    sample = policy.sample(torch.Generator().manual_seed(1))
    sigma = (features.square() @ log_std.exp().square()).sqrt()[0]
    torch.testing.assert_close(sample.mean(0), mean[0], atol=5 * float(sigma.max()) / math.sqrt(20_000), rtol=0)
    torch.testing.assert_close(sample.std(0), sigma, atol=0, rtol=0.03)


@pytest.mark.parametrize(("freq", "changes"), [(-1, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4])])
def test_matrices_change_every_sample_freq_steps(freq, changes):
    matrices, generator = NoiseMatrices(freq), torch.Generator().manual_seed(0)
    drawn = [matrices.next(2, torch.ones(3, 1), generator) for _ in range(6)]
    assert [t for t in range(1, 6) if not torch.equal(drawn[t], drawn[t - 1])] == changes
    assert not torch.equal(drawn[0][0], drawn[0][1])  # environments have their own
    assert matrices.next(5, torch.ones(3, 1), generator) is None


def test_the_rollouts_noise_is_a_function_of_the_state():
    """Same state, same matrices, same action; another rollout has others."""
    model = PPO(use_sde=True, **SPACES)
    model.configure_model()
    observation, generator = torch.randn(3, 3), torch.Generator().manual_seed(0)
    act = exploring_act(model)
    one, other = act(observation, generator), act(observation, generator)
    assert torch.equal(one["action"], other["action"])
    assert not torch.equal(one["action"], exploring_act(model)(observation, generator)["action"])
    assert not torch.equal(model.act(observation, generator)["action"], model.act(observation, generator)["action"])
    mode = model.act(observation, deterministic=True)["action"]
    assert torch.equal(act(observation, generator, deterministic=True)["action"], mode)
    policy, _ = model.policy_and_value(observation)
    torch.testing.assert_close(policy.log_prob(one["action"]), one["log_prob"])
    assert isinstance(policy, DiagGaussian)


@pytest.mark.parametrize("cls", [RecurrentPPO, RecurrentA2C])
def test_the_noise_of_a_recurrent_policy_is_a_function_of_its_features(cls):
    """The same features and matrices give the same noise; the density along a sequence is that of acting."""
    model = cls(use_sde=True, lstm_hidden_size=8, net_arch=[6], log_std_init=-1.0, **SPACES)
    model.configure_model()
    assert model.network.log_std.shape == (6, 1)
    observations, generator = torch.randn(3, 5, 3), torch.Generator().manual_seed(0)
    act, other, state, log_probs, actions = exploring_act(model), exploring_act(model), None, [], []
    for t in range(5):
        acted = act(observations[:, t], generator, state=state)
        again = act(observations[:, t], generator, state=state)
        assert torch.equal(acted["action"], again["action"])
        assert not torch.equal(acted["action"], other(observations[:, t], generator, state=state)["action"])
        state = acted["next_state"]
        actions.append(acted["action"])
        log_probs.append(acted["log_prob"])
    policy, _, _ = model.network(observations, model.initial_state(3))
    together = policy.log_prob(torch.stack(actions, 1).flatten(0, 1)).unflatten(0, (3, 5))
    torch.testing.assert_close(together, torch.stack(log_probs, 1))


@pytest.mark.parametrize("name", ["PPO", "A2C", "TRPO", "SAC", "RecurrentPPO", "RecurrentA2C"])
def test_a_run_resumes_exactly(name, tmp_path):
    sde = {"use_sde": True, "sde_sample_freq": 4, "log_std_init": -2.0}
    case = CASE[name]

    def data():
        if name == "SAC":
            return case.make_epochs(train_freq=6)
        return rollouts("Pendulum-v1", n_envs=2, **({} if name == "PPO" else {"n_steps": 8}))

    assert_resumes_exactly(lambda: case.make_model(**sde), data, tmp_path, epochs=3)


@pytest.mark.long
@pytest.mark.parametrize("cls", [PPO, A2C, TRPO, SAC, TQC, CrossQ, RecurrentPPO, RecurrentA2C])
def test_a_checkpoint_loads_alone(cls, tmp_path):
    model = cls(use_sde=True, net_arch=[8])
    data = CASE["SAC"].make_data() if issubclass(cls, SAC) else rollouts("Pendulum-v1", n_envs=2, total_timesteps=64)
    fit(model, data).save_checkpoint(tmp_path / "a.ckpt")
    assert "use_sde" in torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    loaded = cls.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    observation = PENDULUM.reset(seed=0)[0]
    np.testing.assert_array_equal(
        model.predict(observation, deterministic=True)[0], loaded.predict(observation, deterministic=True)[0]
    )


def test_a_wrong_argument_is_one_sentence():
    cartpole = gym.make("CartPole-v1")
    discrete = {"observation_space": space_to_dict(cartpole.observation_space),
                "action_space": space_to_dict(cartpole.action_space)}  # fmt: skip
    with pytest.raises(UsageError, match="use_sde=True adds noise to real numbers"):
        PPO(use_sde=True, **discrete).configure_model()
    for cls in (PPO, SAC):
        with pytest.raises(UsageError, match="sde_sample_freq=0 must be"):
            cls(use_sde=True, sde_sample_freq=0, **SPACES).configure_model()
        with pytest.raises(UsageError, match="needs the features of the project's own networks"):
            cls(use_sde=True, network="tests.networks.PolicyAndValue", **SPACES).configure_model()
