"""Monte Carlo control with a table of action values."""

import torch
from torch import Tensor

from rl_modules.contract import Minibatch, Rollout
from rl_modules.core.settings import setting
from rl_modules.core.state import persistent
from rl_modules.tabular import TabularControl, rows


class MonteCarlo(TabularControl):
    """On-policy Monte Carlo control for ε-soft policies.

    Sutton & Barto 2018, section 5.4. When an episode has ended, every visited pair moves towards its return:

        G_t = r_t + γ G_{t+1},   Q(s_t, a_t) ← Q(s_t, a_t) + α [G_t - Q(s_t, a_t)]

    Departure from the book: the return of a truncated episode is bootstrapped from its last state, with
    G = Σ_a π(a|s') Q(s', a). Episodes that are still running at the end of training are not used.
    """

    first_visit: bool = setting(
        default=True, says="count only a pair's first visit in each episode; false: count every visit"
    )
    learning_rate = "1/n"

    # Per environment the running episode so far.
    _episodes: list[dict[str, list]] = persistent([])

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Returns the visits of the episodes that ended in this rollout: observation, action, returns, [visits, 1]
        each.
        """
        rollout = self.read_masks(rollout)
        n_envs = rollout["reward"].shape[1]
        if not self._episodes:
            self._episodes = [{"observation": [], "action": [], "reward": [], "successor": []} for _ in range(n_envs)]
        names = ("observation", "action", "reward", "next_observation", "terminated", "truncated", "valid")
        flat = {name: rollout[name].flatten() for name in names}  # type: ignore[literal-required]
        visits: list[tuple[int, int, float]] = []
        for i, (state, action, reward, successor, terminated, truncated, valid) in enumerate(rows(flat, *names)):
            if not valid:
                continue
            episode = self._episodes[i % n_envs]
            if episode["successor"] not in ([], [state]):
                # A resumed run could not restore this episode: the environment began another.
                self._forget(episode)
            episode["observation"].append(state)
            episode["action"].append(action)
            episode["reward"].append(reward)
            episode["successor"][:] = [successor]
            if terminated or truncated:
                after = 0.0 if terminated else self.expected_value(successor)
                visits += self.returns(episode["observation"], episode["action"], episode["reward"], after)
                self._forget(episode)
        columns = zip(*visits, strict=True) if visits else ((), (), ())
        observation, action, returns = (list(column) for column in columns)
        return {
            "observation": torch.tensor(observation, dtype=torch.int64)[:, None],
            "action": torch.tensor(action, dtype=torch.int64)[:, None],
            "returns": torch.tensor(returns, dtype=torch.float64)[:, None],
            "valid": torch.ones(len(visits), 1, dtype=torch.bool),
        }

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        errors = []
        for state, action, target in rows(batch, "observation", "action", "returns"):
            errors.append(self.move(state, action, target))
        self.finish_step(errors)

    # ---------------------------------------------------------------- pieces to override

    def returns(
        self, states: list[int], actions: list[int], rewards: list[float], after: float
    ) -> list[tuple[int, int, float]]:
        """Returns (s, a, G) of one episode, in order of time; ``after`` is the bootstrap value after the last
        reward.
        """
        visits = []
        for state, action, reward in zip(reversed(states), reversed(actions), reversed(rewards), strict=True):
            after = reward + self.gamma * after
            visits.append((state, action, after))
        visits.reverse()
        if not self.first_visit:
            return visits
        # Written backwards, so that the first visit overwrites the later ones.
        first = {(state, action): t for t, (state, action, _) in reversed(list(enumerate(visits)))}
        return [visits[t] for t in sorted(first.values())]

    @staticmethod
    def _forget(episode: dict[str, list]) -> None:
        for column in episode.values():
            column.clear()
