"""Augmented random search."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector

from rl_modules import functional as F
from rl_modules.base import ControlModule
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import mask_logits, split_mask
from rl_modules.common.schedules import Rate
from rl_modules.common.seeding import generator_of
from rl_modules.contract import EVERY_STEP, Minibatch, Rollout, RolloutSource
from rl_modules.core.resume import step_schedulers_of_updates
from rl_modules.core.settings import Scheduled, fixed, setting
from rl_modules.core.state import persistent
from rl_modules.gradients import GradientHooks
from rl_modules.networks.critics import ActionBounds
from rl_modules.networks.encoders import build_encoder, encoding_width
from rl_modules.networks.layers import activation, check_widths


class SearchPolicy(nn.Module):
    """A linear policy or an MLP without an encoder's weights: numbers per action, [B, *obs] → [B, A].

    They are the values of choices, whose largest is taken, or real actions, squashed by tanh with ``squash_output``.
    """

    def __init__(
        self,
        space: spaces.Space,
        n_outputs: int,
        net_arch: list[int],
        activation_fn: str,
        with_bias: bool,
        squash: bool,
    ) -> None:
        super().__init__()
        self.encoder = build_encoder(space)
        sizes = [encoding_width(self.encoder), *net_arch, n_outputs]
        layers: list[nn.Module] = []
        for width_in, width_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(width_in, width_out, bias=with_bias), activation(activation_fn)]
        self.layers = nn.Sequential(*layers[:-1], *([nn.Tanh()] if squash else []))

    def forward(self, observation: Any) -> Tensor:
        features = self.encoder(observation)
        return self.layers(features.to(next(self.layers.parameters()).dtype))

    def of_each(self, observation: Any, weights: Tensor) -> Tensor:
        """Returns the numbers of row i under the weights i, [B, A]; ``weights`` [B, P] in the order of parameters."""
        named = dict(self.layers.named_parameters())
        parts = weights.split([p.numel() for p in named.values()], dim=1)
        own = {name: part.unflatten(1, p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}
        features = self.encoder(observation).to(weights.dtype)
        return vmap(lambda each, x: functional_call(self.layers, each, (x,)))(own, features)


class ARS(ControlModule):
    """Augmented random search: a policy's weights follow differences of returns, without a gradient of the policy.

    Mania et al. 2018, arXiv:1803.07055, algorithm 2. ``n_delta`` perturbations δ_k of the weights θ give 2 ``n_delta``
    candidates θ ± σ δ_k, whose returns over whole episodes are r_k⁺ and r_k⁻. Then

        θ ← θ + α / (b σ_R) Σ_k (r_k⁺ - r_k⁻) δ_k,   over the b = ``n_top`` best perturbations by max(r_k⁺, r_k⁻)

    with σ_R the standard deviation of these 2b returns; σ is ``delta_std``, α ``learning_rate``. Each environment plays
    an episode of the next candidate that needs one, and the update follows when all have theirs; an environment that
    finds none then plays θ, and this episode counts for nothing. ``norm_obs`` of the datamodule is the paper's V2.

    Names and defaults are sb3-contrib's, with its LinearPolicy; ``net_arch=[64, 64], activation_fn="relu",
    with_bias=True, squash_output=True`` are its MlpPolicy. Departures from it: candidates are played side by side;
    the step is that of ``optimizer``, by default plain gradient ascent.

    Optimization is manual: the Trainer refuses ``gradient_clip_val``, and ``global_step`` counts updates of θ.
    """

    supported_action_spaces = (spaces.Discrete, spaces.Box)
    experience = EVERY_STEP

    gamma: float = setting(default=1.0, says="discount of the rewards in a candidate's return", least=0, most=1)
    n_delta: int = setting(default=8, says="perturbations per update; twice as many candidates", least=1)
    n_top: int | None = setting(
        default=None, says="b, the best perturbations, from which the update is computed; None: all", least=1
    )
    delta_std: Scheduled[Rate, float] = setting(
        default=0.05, says="σ, standard deviation of the perturbations of each weight; a number or a schedule"
    )
    zero_policy: bool = setting(default=True, says="begin with all weights 0")
    alive_bonus_offset: float = setting(
        default=0.0, says="added to each reward in the candidates' returns, to cancel a reward for staying alive"
    )
    n_eval_episodes: int = setting(default=1, says="episodes of each candidate per update", least=1)
    net_arch: list[int] | None = setting(
        default=None, says="hidden widths; None: none, a linear policy", check=check_widths
    )
    activation_fn: str = setting(default="relu", says="tanh, relu, elu, silu, gelu or leaky_relu")
    with_bias: bool = setting(default=False, says="biases in all layers")
    squash_output: bool = setting(
        default=False, says="real actions are tanh of the outputs, scaled to their bounds; else the outputs, clipped"
    )
    network, features_extractor = fixed(None), fixed(None)
    graph = fixed(False)

    #: Of the perturbations.
    generator: torch.Generator = persistent(lambda m: generator_of(m.source.seed, 0, "perturbations"))
    #: δ, [n_delta, P], and the σ with which their candidates play; None: not drawn yet.
    deltas: Tensor = persistent()
    played_std: float = persistent(0.0)
    #: Of each candidate, first all θ + σ δ: the sum of its episodes' returns and their number, [2 n_delta].
    returns: Tensor = persistent()
    n_episodes: Tensor = persistent()
    #: Of each environment: its candidate, -1 for θ; whether an episode begins; its return and discount so far, [N].
    playing: Tensor = persistent()
    begins: Tensor = persistent()
    running: Tensor = persistent()
    discount: Tensor = persistent()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.automatic_optimization = False
        if self.n_top is not None and self.n_top > self.n_delta:
            raise UsageError(f"n_top={self.n_top} must be at most n_delta={self.n_delta}")

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if self.trainer.world_size > 1:
            raise UsageError(
                f"{type(self).__name__} plays all candidates in one process; use trainer.devices=1, not "
                f"{self.trainer.world_size} processes, and raise n_envs instead"
            )

    def check_spaces(self) -> None:
        """Refuses images, whose encoder has too many weights to search, and bounds that tanh can't reach."""
        super().check_spaces()
        if any(True for _ in build_encoder(self.observation_space).parameters()):
            raise UsageError(
                f"{type(self).__name__} searches the weights of a policy of vectors, not of the image "
                f"{self.observation_space}; PPO and DQN learn from images"
            )
        if self.squash_output and isinstance(self.action_space, spaces.Box) and not self.action_space.is_bounded():
            raise UsageError(f"squash_output=True needs an action space with bounds, not {self.action_space}")

    def build_network(self) -> None:
        space, is_box = self.action_space, isinstance(self.action_space, spaces.Box)
        n_outputs = int(np.prod(space.shape)) if is_box else int(space.n)
        arguments = (self.net_arch or [], self.activation_fn, self.with_bias, self.squash_output and is_box)
        self.network = SearchPolicy(self.observation_space, n_outputs, *arguments)
        self.bounds = ActionBounds(space) if self.squash_output and is_box else None
        if self.zero_policy:
            for parameter in self.network.parameters():
                nn.init.zeros_(parameter)

    # ---------------------------------------------------------------- acting

    @property
    def n_envs(self) -> int:
        """Number of environments in which candidates play."""
        return cast(RolloutSource, self.source).n_envs

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns the actions [N, *act] of each environment's candidate; those of θ if ``deterministic``."""
        plain, mask = split_mask(observation)
        if deterministic or not self.is_fitting:
            numbers = self.network(plain)
        else:
            self.assign()
            numbers = self.network.of_each(plain, self.candidates()[self.playing])
        if isinstance(self.action_space, spaces.Box):
            action = numbers.float().reshape(-1, *self.action_space.shape)
            return {"action": action if self.bounds is None else self.bounds.to_box(action)}
        return {"action": (numbers if mask is None else mask_logits(numbers, mask)).argmax(-1)}

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Chooses the actions of θ in NumPy, as :meth:`ControlModule.predict`; the policy has no randomness."""
        return super().predict(observation, state, episode_start, True, action_masks)

    def perturbations(self) -> Tensor:
        """Draws δ, [n_delta, P]."""
        size = sum(p.numel() for p in self.network.parameters())
        return torch.randn((self.n_delta, size), generator=self.generator).to(self.device)

    def begin_population(self) -> None:
        """Draws new candidates, which have not played."""
        self.deltas, self.played_std = self.perturbations(), self.delta_std
        self.returns = torch.zeros(2 * self.n_delta, dtype=torch.float64)
        self.n_episodes = torch.zeros(2 * self.n_delta, dtype=torch.int64)

    def candidates(self) -> Tensor:
        """Returns the weights θ + σ δ, θ - σ δ and, last, θ, [2 n_delta + 1, P]."""
        center = parameters_to_vector(self.network.parameters()).detach()
        offsets = self.played_std * self.deltas.to(center)
        return torch.cat([center + offsets, center - offsets, center[None]])

    def assign(self) -> None:
        """Gives each environment in which an episode begins the next candidate that needs one, or θ."""
        if self.deltas is None or len(self.deltas) != self.n_delta:
            self.begin_population()
        if self.playing is None or len(self.playing) != self.n_envs:
            self.playing = torch.full((self.n_envs,), -1)
            self.begins = torch.ones(self.n_envs, dtype=torch.bool)
            self.running = torch.zeros(self.n_envs, dtype=torch.float64)
            self.discount = torch.ones(self.n_envs, dtype=torch.float64)
        for i in self.begins.nonzero()[:, 0].tolist():
            others = self.playing[~self.begins & (self.playing >= 0)]
            missing = self.n_episodes + others.bincount(minlength=2 * self.n_delta) < self.n_eval_episodes
            self.playing[i] = int(missing.int().argmax()) if missing.any() else -1
            self.begins[i] = False

    # ---------------------------------------------------------------- learning

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Adds a step's rewards to the candidates' returns; the update reads these alone."""
        if len(rollout["reward"]) != 1:
            raise UsageError(
                f"n_steps={len(rollout['reward'])}: {type(self).__name__} gives an environment its next candidate as "
                "soon as an episode ends, so that a rollout has one step; leave n_steps out"
            )
        reward, valid = rollout["reward"][0].cpu().double(), rollout["valid"][0].cpu()
        done = (rollout["terminated"] | rollout["truncated"])[0].cpu() & valid
        self.running = torch.where(
            valid, self.running + self.discount * (reward + self.alive_bonus_offset), self.running
        )
        self.discount = torch.where(valid, self.discount * self.gamma, self.discount)
        counts = done & (self.playing >= 0)
        self.returns.index_add_(0, self.playing[counts], self.running[counts])
        self.n_episodes.index_add_(0, self.playing[counts], torch.ones_like(self.playing[counts]))
        self.begins |= done
        self.running[done], self.discount[done] = 0.0, 1.0
        return {"reward": rollout["reward"]}

    def training_step(self, batch: Minibatch, batch_idx: int) -> None:
        if (self.n_episodes < self.n_eval_episodes).any():
            return
        plus, minus = self.returns.to(self.deltas).split(self.n_delta)
        direction = F.random_search_direction(self.deltas, plus, minus, self.n_top)
        self.ascend(direction)
        self.record(return_std=self.returns.std())
        self.begin_population()

    def ascend(self, direction: Tensor) -> None:
        """Takes one step of the optimizer along a direction of the weights, [P]."""
        parameters = list(self.network.parameters())
        for p, piece in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
            p.grad = -piece.view_as(p).to(p)
        GradientHooks(self.trainer).after_backward()
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        step_schedulers_of_updates(self)

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns plain gradient steps, at sb3-contrib's 0.02."""
        return torch.optim.SGD(parameters, lr=0.02)
