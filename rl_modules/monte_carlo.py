"""Monte Carlo control with a table of action values."""

from typing import Any

import torch
from torch import Tensor

from rl_modules.common.contract import Rollout
from rl_modules.tabular import TabularControl, rows


class MonteCarlo(TabularControl):
    """On-policy Monte Carlo control for ε-soft policies.

    Sutton & Barto 2018, section 5.4. When an episode has ended, every visited pair moves towards its return:

        G_t = r_t + γ G_{t+1},   Q(s_t, a_t) ← Q(s_t, a_t) + α [G_t - Q(s_t, a_t)]

    Departure from the book: the return of a truncated episode is bootstrapped from its last state, with
    G = Σ_a π(a|s') Q(s', a). Episodes that are still running at the end of training are not used.

    Args:
        first_visit: count only a pair's first visit in each episode; false: count every visit.
        gamma: discount γ per transition, in [0, 1].
        learning_rate: step size α, in (0, 1]; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0 over
            ``total_timesteps``, points such as ``0:0.5, 1:0.1``, ``1/n`` for the mean of all targets of an entry, or
            ``1/n^<w>`` with w in (½, 1), which weights recent targets more.
        exploration_fraction: share of training over which ε falls, in [0, 1].
        exploration_initial_eps: ε at the start, in [0, 1]; ε is the probability of a uniformly random action.
        exploration_final_eps: final ε, in [0, 1]; equal to the initial one: constant ε.
        initial_value: initial value of all entries, in units of return; optimistic values cause exploration.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose table a ``fit`` starts from; None: a new table.
    """

    def __init__(
        self,
        first_visit: bool = True,
        gamma: float = 0.99,
        learning_rate: float | str = "1/n",
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        initial_value: float = 0.0,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__(
            gamma,
            learning_rate,
            exploration_fraction,
            exploration_initial_eps,
            exploration_final_eps,
            initial_value,
            log_every,
            observation_space,
            action_space,
            init_from,
        )
        self.first_visit = first_visit
        # Per environment the running episode so far.
        self._episodes: list[dict[str, list]] = []

    def begin_run(self) -> None:
        super().begin_run()
        self._episodes = []

    def prepare(self, rollout: Rollout) -> dict[str, Any]:
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
        """Returns (s, a, G) of one episode, in order of time.

        Args:
            states: s_t.
            actions: a_t.
            rewards: r_t.
            after: bootstrap value after the last reward; 0 at a termination.
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["tabular"]["episodes"] = [{k: list(v) for k, v in episode.items()} for episode in self._episodes]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._episodes = [{k: list(v) for k, v in episode.items()} for episode in checkpoint["tabular"]["episodes"]]
