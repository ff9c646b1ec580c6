"""Arguments that nothing reads beside others are named in one warning each; those that are read are not."""

import warnings

import pytest
import torch

from datamodules import ReplayDataModule
from rl_modules import A2C, DQN, PPO, REINFORCE, SAC, TRPO, RecurrentPPO
from tests import networks
from tests.training import fit, rollouts

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"


def run(algorithm, env_id, arguments):
    if algorithm in (SAC, DQN):
        data = ReplayDataModule(env_id, learning_starts=4, total_timesteps=8, batch_size=4, eval_freq=0)
        fit(algorithm(**arguments), data)
    else:
        fit(algorithm(**arguments), rollouts(env_id, n_envs=2, n_steps=8), max_epochs=1)


def complaints(algorithm, env_id, arguments):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(algorithm, env_id, arguments)
    return [str(one.message) for one in told if "does nothing" in str(one.message)]


@pytest.mark.parametrize(("algorithm", "env_id", "given", "others", "why"), [
    (PPO, CARTPOLE, {"kl_coef": 0.5}, {}, "with policy_objective=clip; set that to penalty"),
    (PPO, CARTPOLE, {"clip_range": 0.1}, {"policy_objective": "penalty"}, "with policy_objective=penalty"),
    (PPO, CARTPOLE, {"log_std_init": -1.0}, {}, r"in the action space Discrete\(2\); use it with a Box"),
    (PPO, PENDULUM, {"sde_sample_freq": 4}, {}, "while use_sde is false; set that to true"),
    (PPO, CARTPOLE, {"net_arch": [8]}, {"network": networks.PolicyAndValue}, "beside network"),
    (RecurrentPPO, CARTPOLE, {"log_std_init": -1.0}, {"lstm_hidden_size": 4}, "in the action space"),
    (A2C, CARTPOLE, {"rms_prop_eps": 1e-3}, {"use_rms_prop": False}, "while use_rms_prop is false"),
    (A2C, CARTPOLE, {"use_rms_prop": False}, {"optimizer": torch.optim.SGD}, "beside optimizer"),
    (REINFORCE, CARTPOLE, {"gae_lambda": 0.5}, {"psi": "baseline"}, "with psi=baseline; set that to advantage"),
    (REINFORCE, CARTPOLE, {"vf_coef": 1.0}, {}, "with psi=reward_to_go, which needs no values"),
    (SAC, PENDULUM, {"target_entropy": -2.0}, {"ent_coef": 0.1, "net_arch": [8]}, "with the fixed ent_coef=0.1"),
    (SAC, PENDULUM, {"log_std_init": -2.0}, {"net_arch": [8]}, "while use_sde is false"),
    (DQN, CARTPOLE, {"dueling": True}, {"network": networks.ActionValues}, "beside network"),
], ids=lambda x: getattr(x, "__name__", str(x)))  # fmt: skip
def test_an_argument_that_nothing_reads_is_named(algorithm, env_id, given, others, why):
    (name, value), *_ = given.items()
    (told,) = complaints(algorithm, env_id, {**given, **others})
    assert told.startswith(f"{name}={value!r} does nothing ")
    assert told.endswith(f", or leave {name} out")
    with pytest.warns(UserWarning, match=why):
        run(algorithm, env_id, {**given, **others})
    assert not complaints(algorithm, env_id, others)


@pytest.mark.parametrize(("algorithm", "env_id", "given"), [
    (PPO, CARTPOLE, {"kl_coef": 0.5, "policy_objective": "penalty"}),
    (PPO, CARTPOLE, {"clip_range": 0.1}),
    (PPO, PENDULUM, {"log_std_init": -1.0, "use_sde": True, "sde_sample_freq": 4}),
    (A2C, CARTPOLE, {"rms_prop_eps": 1e-3}),
    (REINFORCE, CARTPOLE, {"gae_lambda": 0.5, "vf_coef": 1.0, "psi": "advantage"}),
    (TRPO, CARTPOLE, {"net_arch": [8], "ortho_init": False, "network": networks.PolicyAndValue}),
    (SAC, PENDULUM, {"target_entropy": -2.0, "ent_coef": "auto_0.1", "net_arch": [8]}),
    (SAC, PENDULUM, {"use_sde": True, "sde_sample_freq": 4, "log_std_init": -2.0, "net_arch": [8]}),
], ids=lambda x: getattr(x, "__name__", str(x)))  # fmt: skip
def test_an_argument_that_is_read_is_not(algorithm, env_id, given):
    assert not complaints(algorithm, env_id, given)


def test_a_subclass_may_read_what_its_base_does_not():
    class Both(PPO):
        """Clips, with a penalty beside it."""

        def idle_arguments(self):
            return {name: why for name, why in super().idle_arguments().items() if name != "kl_coef"}

    class Weights(PPO):
        """Has an argument of that name with another meaning."""

        def __init__(self, kl_coef=3.0, **arguments):
            super().__init__(**arguments)
            self.weight = kl_coef

    assert not complaints(Both, CARTPOLE, {"kl_coef": 0.5})
    assert not complaints(Weights, CARTPOLE, {"kl_coef": 5.0})
