"""Base of control with a table of action values: Monte Carlo, SARSA and Q-learning.

There is no gradient descent. One batch is one rollout; its transitions update their entries of the table one after the
other, in order of time. With ``n_steps=1`` this is the textbook's update after every step.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules.base import ControlModule
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import split_mask
from rl_modules.common.schedules import OptionalRate, Schedule, as_notation, parse_schedule, schedule_value
from rl_modules.contract import EVERY_STEP, Minibatch, Rollout
from rl_modules.core.curves import write_evaluation
from rl_modules.core.resume import count_step
from rl_modules.core.settings import Converted, changed, fixed, setting
from rl_modules.core.state import persistent
from rl_modules.exploration import exploration_rate


class ActionValues(torch.nn.Module):
    """K tables of action values with their counts; with ``masks``, the last mask seen in each state.

    They stay in main memory in float64, whatever the module's device and dtype, because accelerators are slow at
    reading and writing single entries.
    """

    q: Tensor
    visits: Tensor
    #: Whether a state allows an action, [S, A]; None: every state allows every one.
    allowed: Tensor | None

    def __init__(self, n_tables: int, n_states: int, n_actions: int, initial_value: float, masks: bool = False) -> None:
        super().__init__()
        shape = (n_tables, n_states, n_actions)
        self.register_buffer("q", torch.full(shape, initial_value, dtype=torch.float64))
        self.register_buffer("visits", torch.zeros(shape, dtype=torch.int64))
        self.register_buffer("allowed", torch.ones(shape[1:], dtype=torch.bool) if masks else None)

    def _apply(self, fn: Any, recurse: bool = True) -> "ActionValues":
        return self


def _parse_visit_exponent(learning_rate: float | str) -> float | None:
    """Returns the w of ``1/n^w``, 1 for ``1/n``, None for anything else."""
    if learning_rate == "1/n":
        return 1.0
    try:
        exponent = float(str(learning_rate).removeprefix("1/n^"))
    except ValueError:
        return None
    # Outside this range the sum of the steps, or of their squares, has the wrong limit (Robbins & Monro 1951).
    return exponent if str(learning_rate).startswith("1/n^") and 0.5 < exponent < 1 else None


def _parse_step_size(learning_rate: float | str) -> Schedule:
    try:
        schedule = parse_schedule(learning_rate, "learning_rate")
    except UsageError:
        schedule = Schedule(0.0, False)
    if not 0 < schedule[0] <= 1:
        raise UsageError(
            f"learning_rate={learning_rate!r} is no step size; give a number in (0, 1], lin_<number> for "
            "linear decay to 0, 1/n for the mean of all targets, or 1/n^<w> with w between 0.5 "
            "and 1"
        )
    return schedule


def check_step_size(name: str, value: Any) -> Any:
    """Refuses what is no step size of a table; returns a function of the remaining progress as points."""
    value = as_notation(value)
    if _parse_visit_exponent(value) is None:
        _parse_step_size(value)
    return value


class TabularControl(ControlModule):
    """Base class of the tabular agents: the table, ε-greedy actions, step sizes, exact evaluation."""

    supported_action_spaces = (spaces.Discrete,)
    experience = EVERY_STEP
    n_tables = 1

    gamma: float = setting(default=0.99, says="discount γ per transition", least=0, most=1)
    learning_rate: Converted[OptionalRate, float | str | None] = changed(
        default=0.1,
        says="step size α, in (0, 1]; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0 over "
        "``total_timesteps``, points such as ``0:0.5, 1:0.1``, ``1/n`` for the mean of all targets of an entry, or "
        "``1/n^<w>`` with w in (½, 1), which weights recent targets more",
        check=check_step_size,
    )
    exploration_fraction: float = setting(default=0.1, says="share of training over which ε falls", least=0, most=1)
    exploration_initial_eps: float = setting(
        default=1.0, says="ε at the start, the probability of a uniformly random action", least=0, most=1
    )
    exploration_final_eps: float = setting(
        default=0.05, says="final ε; equal to the initial one: constant ε", least=0, most=1
    )
    initial_value: float = setting(
        default=0.0,
        says="initial value of all entries, in units of return; optimistic values cause exploration",
    )
    optimizer, lr_scheduler = fixed(None), fixed(None)  # a table has none
    network, features_extractor = fixed(None), fixed(None)
    #: ε, the probability of a random action.
    epsilon: float = persistent(lambda m: m._exploration_rate(1.0))
    # Seeded by a number that is drawn with the table.
    _generator: torch.Generator = persistent(lambda m: torch.Generator().manual_seed(m._seed))

    def __post_init__(self) -> None:
        # A table has no optimizer, so the step size is not an optimizer's.
        rate: Any = self.learning_rate
        self.learning_rate = None
        super().__post_init__()
        self.visit_exponent = _parse_visit_exponent(rate)
        self.step_schedule = _parse_step_size(rate) if self.visit_exponent is None else None
        self.step_size = 0.0 if self.step_schedule is None else self.step_schedule[0]
        self.automatic_optimization = False
        self._seed = 0
        self._model: Any = None

    def _setup(self, stage: str) -> None:
        """Checks the settings, and reads the environment's transition table if it has one."""
        super()._setup(stage)
        self.configure_model()
        if self.trainer.world_size > 1:
            raise UsageError(
                f"{type(self).__name__} keeps one table in one process; use trainer.devices=1, not "
                f"{self.trainer.world_size} processes, and raise n_envs instead"
            )
        self._model = self.source.transition_model()
        if self._model is not None and self._model.horizon is None and self._model.may_never_end():
            raise UsageError(
                f"{self.source.env_name} has no time limit, so that an episode of a policy that goes in "
                "circles never ends; give it env_kwargs={'max_episode_steps': 200}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None}

    def check_spaces(self) -> None:
        """Refuses spaces without a finite table."""
        for name, space in (("observation", self.observation_space), ("action", self.action_space)):
            if not isinstance(space, spaces.Discrete):
                raise UsageError(
                    f"{type(self).__name__} looks values up in a table, for which the {name} space must "
                    f"be Discrete, not {space}; A2C, TRPO and PPO fit, and the wrapper "
                    "datamodules.envs.discrete.FlattenDiscrete numbers tuples of Discrete"
                )

    def build_network(self) -> None:
        n_states, n_actions = int(self.observation_space.n), int(self.action_space.n)
        self.network = ActionValues(self.n_tables, n_states, n_actions, self.initial_value, self.masks_actions)
        self._seed = int(torch.randint(2**62, ()))

    @property
    def tables(self) -> ActionValues:
        """The tables that :attr:`q` averages; available after ``configure_model``."""
        return self.network

    @property
    def q(self) -> Tensor:
        """Q(s, a), [S, A] float64: the table, or the mean of two."""
        return self.tables.q.mean(0)

    @property
    def allowed_q(self) -> Tensor:
        """:attr:`q` with -∞ for the actions that the last mask seen in a state forbids, [S, A] float64."""
        return self.q if self.tables.allowed is None else self.q.masked_fill(~self.tables.allowed, -torch.inf)

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns ε-greedy actions [N] with ties broken at random; if deterministic, the first of the best actions."""
        state, mask = split_mask(observation)
        masks = () if mask is None else (mask,)  # a subclass may know none
        return {"action": self.choose(state, generator, deterministic, *masks).to(state.device)}

    def choose(
        self, state: Tensor, generator: torch.Generator | None, deterministic: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """The ε-greedy choice, [N] int64 from states [N]; without ``mask`` [N, A] by the last one seen."""
        # NumPy, because its calls on a few numbers take a third of the time of torch's.
        q = self.tables.q.numpy()[:, state.cpu().numpy()].mean(0)
        if mask is None and self.tables.allowed is not None:
            mask = self.tables.allowed[state.cpu()]
        if mask is not None:
            q = np.where(mask.cpu().numpy().astype(bool), q, -np.inf)
        if deterministic:
            return torch.from_numpy(q.argmax(-1))
        device = None if generator is None else generator.device
        u = torch.rand(len(q), q.shape[1] + 1, generator=generator, device=device).cpu().numpy()
        explores = u[:, :1] < self.epsilon
        allowed = explores | (q == q.max(-1, keepdims=True))
        if mask is not None:
            allowed &= q > -np.inf
        # The largest of independent uniform numbers is equally likely to be any of them.
        return torch.from_numpy(np.where(allowed, u[:, 1:], -1.0).argmax(-1))

    def greedy_policy(self) -> Tensor:
        """Returns π(a|s) of the greedy policy, [S, A], as in ``predict(..., deterministic=True)``."""
        q = self.allowed_q
        return torch.nn.functional.one_hot(q.argmax(-1), q.shape[1]).double()

    def read_masks(self, rollout: Rollout) -> Rollout:
        """Stores the masks and returns the rollout with plain states."""
        if self.tables.allowed is None:
            return rollout
        plain: Any = dict(rollout)
        for name in ("next_observation", "observation"):
            state, mask = split_mask(plain[name])
            allowed = mask.cpu().bool()
            # A mask that allows nothing, at an episode's end, says nothing about the state.
            says = allowed.any(-1)
            self.tables.allowed[state.cpu()[says]] = allowed[says]
            plain[name] = state
        return plain

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Returns the transitions unchanged, [T, N] each."""
        rollout = self.read_masks(rollout)
        names = ("observation", "action", "reward", "next_observation", "terminated")
        kept: Any = {name: rollout[name] for name in names}  # type: ignore[literal-required]
        return kept

    # ---------------------------------------------------------------- pieces of every update

    def move(self, state: int, action: int, target: float, table: int = 0) -> float:
        """Q(s, a) ← Q(s, a) + α [target - Q(s, a)]; returns the error in brackets before the move."""
        q, visits = self.tables.q.numpy(), self.tables.visits.numpy()
        visits[table, state, action] += 1
        step_size = self.step_size
        if self.visit_exponent is not None:
            step_size = int(visits[table, state, action]) ** -self.visit_exponent
        error = target - float(q[table, state, action])
        q[table, state, action] += step_size * error
        return error

    def expected_value(self, state: int) -> float:
        """Returns Σ_a π(a|s) Q(s, a) under the ε-greedy policy."""
        q = self.values(state).mean(0)
        return float((1.0 - self.epsilon) * q.max() + self.epsilon * q.mean())

    def values(self, state: int) -> np.ndarray:
        """Returns Q(s, a) of the allowed actions, [K, at most A]."""
        q = self.tables.q.numpy()[:, state]
        return q if self.tables.allowed is None else q[:, self.tables.allowed[state].numpy()]

    def finish_step(self, errors: list[float]) -> None:
        """Counts the batch as a training step, which Lightning does only for optimizers, and records its error."""
        count_step(self.trainer)
        if errors and self.run.logs_this_epoch:
            self.record(td_error=torch.tensor(sum(map(abs, errors)) / len(errors)))

    def update_schedules(self, progress_remaining: float) -> None:
        self.epsilon = self._exploration_rate(progress_remaining)
        self.record_now(**{"rollout/exploration_rate": self.epsilon})
        if self.step_schedule is not None:
            if self.step_schedule.decays:
                self.step_size = schedule_value(self.step_schedule, progress_remaining)
            self.record_now(learning_rate=self.step_size)

    def _exploration_rate(self, progress_remaining: float) -> float:
        return exploration_rate(
            progress_remaining, self.exploration_fraction, self.exploration_initial_eps, self.exploration_final_eps
        )

    # ---------------------------------------------------------------- exact evaluation

    def end_evaluation(self, prefix: str) -> None:
        """Logs the exact returns of the greedy and of the optimal policy, where there is a transition table."""
        if self._model is None:
            return
        write_evaluation(
            self,
            {
                f"{prefix}/true_return": self._model.expected_return(self.greedy_policy()),
                f"{prefix}/optimal_return": self._model.optimal_return(),
            },
        )

    # ---------------------------------------------------------------- what Lightning asks for

    def configure_optimizers(self) -> list:
        """Returns no optimizer, because tables have no gradient."""
        return []


def rows(batch: dict[str, Tensor], *names: str) -> Iterator[tuple]:
    """Yields a batch's transitions as Python numbers."""
    return zip(*(batch[name].tolist() for name in names), strict=True)
