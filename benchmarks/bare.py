"""PPO on CartPole-v1 as one plain torch loop, explained line by line in docs/ppo_in_one_page.md.

benchmarks/control.py measures the project's speed against it.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn


def bare_ppo(total_timesteps: int, seed: int = 0) -> nn.Module:
    """Trains with rl-baselines3-zoo's CartPole settings; returns the policy, from observations to logits."""
    n_envs, n_steps, n_epochs, gamma, gae_lambda = 8, 32, 20, 0.98, 0.8
    torch.manual_seed(seed)
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1", disable_env_checker=True)] * n_envs,
                         autoreset_mode=AutoresetMode.SAME_STEP)  # fmt: skip
    pi = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    vf = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    parameters = [*pi.parameters(), *vf.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5)
    observation, _ = envs.reset(seed=seed)
    num_timesteps = 0
    while num_timesteps < total_timesteps:
        shape = (n_steps, n_envs)
        obs_buffer = torch.empty(*shape, 4, dtype=torch.float32, device="cpu")
        action_buffer = torch.empty(shape, dtype=torch.long, device="cpu")
        log_prob_buffer, value_buffer, next_value, reward_buffer, ended, advantage = (
            torch.zeros(shape, dtype=torch.float32, device="cpu") for _ in range(6)
        )
        with torch.no_grad():
            for t in range(n_steps):
                obs_buffer[t] = torch.from_numpy(observation)
                log_p = torch.log_softmax(pi(obs_buffer[t]), -1)
                action_buffer[t] = torch.multinomial(log_p.exp(), 1).squeeze(1)
                log_prob_buffer[t] = log_p.gather(1, action_buffer[t][:, None]).squeeze(1)
                value_buffer[t] = vf(obs_buffer[t]).squeeze(1)
                observation, reward, terminated, truncated, info = envs.step(action_buffer[t].numpy())
                reward_buffer[t] = torch.from_numpy(reward).float()
                done = terminated | truncated
                ended[t] = torch.from_numpy(done).float()
                for i in np.flatnonzero(truncated & ~terminated):
                    reward_buffer[t, i] += gamma * vf(torch.from_numpy(info["final_obs"][i])).item()
            next_value[:-1] = value_buffer[1:]
            next_value[-1] = vf(torch.from_numpy(observation)).squeeze(1)
            last = torch.zeros(n_envs, dtype=torch.float32, device="cpu")
            for t in reversed(range(n_steps)):
                delta = reward_buffer[t] + gamma * next_value[t] * (1 - ended[t]) - value_buffer[t]
                last = delta + gamma * gae_lambda * (1 - ended[t]) * last
                advantage[t] = last
            returns = (advantage + value_buffer).flatten()
        num_timesteps += n_envs * n_steps
        remaining = max(1 - num_timesteps / total_timesteps, 0.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * remaining
        clip = 0.2 * remaining
        obs, action = obs_buffer.flatten(0, 1), action_buffer.flatten()
        old, adv = log_prob_buffer.flatten(), advantage.flatten()
        for _ in range(n_epochs):
            order = torch.randperm(len(obs))
            log_p = torch.log_softmax(pi(obs[order]), -1)
            log_prob = log_p.gather(1, action[order][:, None]).squeeze(1)
            whitened = (adv[order] - adv[order].mean()) / (adv[order].std() + 1e-8)
            ratio = (log_prob - old[order]).exp()
            policy_loss = -torch.min(ratio * whitened, ratio.clamp(1 - clip, 1 + clip) * whitened).mean()
            value_loss = (vf(obs[order]).squeeze(1) - returns[order]).pow(2).mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
    envs.close()
    return pi
