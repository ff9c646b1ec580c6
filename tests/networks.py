"""Networks of a user's own, named by import paths in tests."""

import gymnasium as gym
import torch
from torch import nn

from rl_modules.networks.batch_renorm import BatchRenorm


class Features(nn.Module):
    """One hidden layer, with the width of its output as Stable-Baselines3's extractors have it."""

    def __init__(self, observation_space, width=7):
        super().__init__()
        self.features_dim = width
        self.layer = nn.Linear(gym.spaces.flatdim(observation_space), width)

    def forward(self, observation):
        return torch.tanh(self.layer(observation.flatten(1)))


def make_features(observation_space, width=3):
    return Features(observation_space, width)


class Wrong(Features):
    """Says another width than it has."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.features_dim = 8


class NoWidth(nn.Identity):
    def __init__(self, observation_space):
        super().__init__()


class PolicyAndValue(nn.Module):
    """Numbers of the policy, and a value."""

    def __init__(self, observation_space, action_space, width=8, outputs=None):
        super().__init__()
        size = gym.spaces.flatdim(action_space) * (2 if isinstance(action_space, gym.spaces.Box) else 1)
        self.body = nn.Sequential(nn.Linear(gym.spaces.flatdim(observation_space), width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, outputs or size), nn.Linear(width, 1)

    def forward(self, observation):
        x = self.body(observation)
        return self.policy(x), self.value(x).squeeze(-1)


class Policy(PolicyAndValue):
    """The policy alone."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        del self.value

    def forward(self, observation):
        return self.policy(self.body(observation))


class RulesOut(PolicyAndValue):
    """Rules the first number of the policy out where the first number of the observation is above 0."""

    def forward(self, observation):
        numbers, value = super().forward(observation)
        return torch.where((observation[:, :1] > 0) & (torch.arange(numbers.shape[1]) == 0), -torch.inf, numbers), value


class TorchDistribution(PolicyAndValue):
    def forward(self, observation):
        logits, value = super().forward(observation)
        return torch.distributions.Categorical(logits=logits), value


class ActionValues(nn.Module):
    def __init__(self, observation_space, action_space, width=8, n_quantiles=None):
        super().__init__()
        self.shape = (action_space.n,) if n_quantiles is None else (n_quantiles, action_space.n)
        n = int(torch.tensor(self.shape).prod())
        self.layers = nn.Sequential(nn.Linear(gym.spaces.flatdim(observation_space), width), nn.ReLU(),
                                    nn.Linear(width, n))  # fmt: skip

    def forward(self, observation):
        return self.layers(observation).unflatten(1, self.shape)


class Actor(nn.Module):
    def __init__(self, n_in, n_out, gaussian):
        super().__init__()
        self.layers, self.gaussian = nn.Linear(n_in, 2 * n_out if gaussian else n_out), gaussian

    def forward(self, observation):
        out = self.layers(observation)
        return out.chunk(2, 1) if self.gaussian else out.tanh()


class Twins(nn.Module):
    def __init__(self, n_in, outputs=1):
        super().__init__()
        self.outputs, self.layers = outputs, nn.Linear(n_in, 2 * outputs)

    def forward(self, observation, action):
        q = self.layers(torch.cat([observation, action], 1))
        return q.unflatten(1, (2, self.outputs)).transpose(0, 1)


class PolicyAndCritics(nn.Module):
    def __init__(self, observation_space, action_space, gaussian=True, outputs=1):
        super().__init__()
        n, a = gym.spaces.flatdim(observation_space), gym.spaces.flatdim(action_space)
        self.policy, self.critics = Actor(n, a, gaussian), Twins(n + a, outputs)


class RenormalizedTwins(Twins):
    def __init__(self, n_in):
        super().__init__(n_in)
        self.renorm = BatchRenorm(n_in)

    def forward(self, observation, action):
        return self.layers(self.renorm(torch.cat([observation, action], 1))).unflatten(1, (2, 1)).transpose(0, 1)


class PolicyAndRenormalizedCritics(PolicyAndCritics):
    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        n, a = gym.spaces.flatdim(observation_space), gym.spaces.flatdim(action_space)
        self.critics = RenormalizedTwins(n + a)


def no_module(*spaces):
    return 3


def fails(*spaces):
    raise ValueError("no such thing")


class Broken(nn.Linear):
    """Reads another width than the observations have."""

    features_dim = 4

    def __init__(self, *spaces):
        super().__init__(99, 4)
