"""A PPO script in CleanRL's style, saved and resumed as CleanRL's page "Resume Training" shows.

The page saves the agent's weights every ``CHECKPOINT_FREQUENCY`` updates and resumes at the logged update's number; the
update's number, which W&B keeps there, is kept in a file here.
"""

from pathlib import Path

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from benchmarks.resume.trace import Trace, fingerprint, weights_fingerprint
from rl_modules import functional as F

N_ENVS, N_STEPS, UPDATES, CHECKPOINT_FREQUENCY = 4, 64, 24, 2


class Agent(nn.Module):
    """Policy and value network."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


class CleanRLStyle:
    """PPO on CartPole-v1 in one script."""

    name = "CleanRL-style PPO script"
    version = "page at 24f64e0"
    unit = "transitions"
    way = "`torch.save(agent.state_dict())` every few updates; `starting_update = summary['charts/update'] + 1`"
    quote = "The first step is to save models periodically. […] torch.save(agent.state_dict(), …)"
    link = "https://docs.cleanrl.dev/advanced/resume-training/"

    def prepare(self, folder: Path) -> None:
        pass

    def train(self, folder: Path, trace: Trace) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * N_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
        agent = Agent()
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
        starting_update = self._resume(agent, folder, trace)
        observation, _ = envs.reset(seed=0)
        for update in range(starting_update, UPDATES + 1):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - (update - 1) / UPDATES)
            observation = one_update(agent, optimizer, envs, observation, trace)
            trace.write("update", weights_fingerprint(agent))
            (folder / "charts_update.txt").write_text(str(update))
            if update % CHECKPOINT_FREQUENCY == 0:
                trace.write("checkpoint", update)
                torch.save(agent.state_dict(), folder / "agent.pt")
                (folder / "saved.txt").write_text(str(update))  # read by the measurement, not by the script
        return agent.state_dict()

    @staticmethod
    def _resume(agent: Agent, folder: Path, trace: Trace) -> int:
        if not (folder / "agent.pt").exists():
            trace.write("resume", "start")
            return 1
        try:
            agent.load_state_dict(torch.load(folder / "agent.pt", weights_only=True))
        except Exception:
            trace.write("damaged", "agent.pt")
            trace.write("resume", "start")
            return 1
        logged = int((folder / "charts_update.txt").read_text() or 0)
        saved = int((folder / "saved.txt").read_text() or 0)
        trace.write("resume", saved)
        trace.write("lost", max(logged - saved, 0) * N_ENVS * N_STEPS)
        return logged + 1


def one_update(agent: Agent, optimizer: torch.optim.Optimizer, envs: SyncVectorEnv, observation, trace: Trace):
    """A rollout and four epochs of PPO on it; returns the last observation."""
    rows: dict[str, list[torch.Tensor]] = {}
    units: list[str] = []
    with torch.no_grad():
        for _ in range(N_STEPS):
            state = torch.as_tensor(observation)
            log_p = torch.log_softmax(agent.actor(state), -1)
            action = torch.multinomial(log_p.exp(), 1).squeeze(1)
            following, reward, terminated, truncated, _ = envs.step(action.numpy())
            units += [fingerprint(observation[i], action[i], reward[i], following[i]) for i in range(N_ENVS)]
            values = {"state": state, "action": action, "log_prob": log_p.gather(1, action[:, None]).squeeze(1),
                      "value": agent.critic(state).squeeze(1), "reward": torch.as_tensor(reward).float(),
                      "next_value": agent.critic(torch.as_tensor(following)).squeeze(1),
                      "ended": torch.as_tensor(terminated | truncated)}  # fmt: skip
            for name, value in values.items():
                rows.setdefault(name, []).append(value)
            observation = following
    trace.write("collected", *units)
    batch = {name: torch.stack(values) for name, values in rows.items()}
    never = torch.zeros_like(batch["ended"])
    advantage = F.gae(batch["reward"], batch["value"], batch["next_value"], batch["ended"], never, 0.99, 0.95)
    returns = advantage + batch["value"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(4):
        log_p = torch.log_softmax(agent.actor(batch["state"]), -1).gather(2, batch["action"][..., None]).squeeze(2)
        loss = F.ppo_clip_loss(log_p, batch["log_prob"], advantage, 0.2)
        loss = loss + 0.5 * F.value_loss(agent.critic(batch["state"]).squeeze(2), returns)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    trace.write("used", *units)
    return observation


CASES = {"cleanrl": CleanRLStyle}
