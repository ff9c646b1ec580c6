"""Trust region policy optimization."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules import ranks
from rl_modules.actor_critic import ActorCriticModule
from rl_modules.base import OptimizerFactory
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import split_mask
from rl_modules.common.modules import tree_map
from rl_modules.common.schedules import OptionalRate, Rate, parse_schedule
from rl_modules.contract import WHOLE_ROLLOUTS, Minibatch, Rollout
from rl_modules.core.resume import step_schedulers_of_updates
from rl_modules.core.settings import Converted, Scheduled, changed, fixed, made, setting
from rl_modules.core.state import persistent
from rl_modules.distributions import Distribution
from rl_modules.fast.adam import adam, clip_grad_norm
from rl_modules.gradients import GradientHooks, averaged, gradients, trainable
from rl_modules.networks.critics import ValueNetwork


def check_radius(name: str, value: Any) -> Any:
    """Refuses a trust region of size 0."""
    if parse_schedule(value, name).initial == 0:
        raise UsageError(f"{name}={value} must be positive")
    return value


class TRPO(ActorCriticModule):
    """Trust region policy optimization.

    Schulman et al. 2015, arXiv:1502.05477. Per rollout, one step of the policy to

        max_θ E[ρ A]   subject to   E[KL(π_old || π)] ≤ target_kl,   ρ = π(a|s) / π_old(a|s)

    1. g is the gradient of the surrogate E[ρ A], F the Fisher matrix: the Hessian of the KL at π_old.
    2. Conjugate gradient solves (F + cg_damping) x = g with products with F only, each a second backward pass.
    3. The step √(2 target_kl / xᵀ(F + cg_damping)x) · x reaches the edge of the trust region for a quadratic KL. The
    step is shortened until the constraint holds and the surrogate improves; otherwise the old policy is restored.

    Then the critic, a network of its own, is fitted to the λ-returns by ``n_critic_updates`` passes of Adam over the
    rollout in minibatches. Names and defaults are those of sb3-contrib; departures from it: the KL is KL(π_old || π),
    the paper's direction, and policy and critic never share an encoder.

    Optimization is manual: the Trainer refuses ``gradient_clip_val``, and ``global_step`` counts the critic's steps.
    ``batch_size`` is that of the critic; the datamodule yields whole rollouts.
    """

    experience = WHOLE_ROLLOUTS
    value_network: ValueNetwork = made()

    target_kl: Scheduled[Rate, float] = setting(
        default=0.01,
        says="the trust region's size, in nats; a number or a schedule, as for ``learning_rate``: under "
        "``lin_<number>`` the policy's steps decay to 0",
        check=check_radius,
    )
    cg_max_steps: int = setting(default=15, says="iterations of conjugate gradient", least=1)
    cg_damping: float = setting(default=0.1, says="added to the Fisher matrix's diagonal", least=0)
    line_search_shrinking_factor: float = setting(default=0.8, says="factor on a rejected step", above=0, below=1)
    line_search_max_iter: int = setting(default=10, says="maximum number of step lengths", least=1)
    n_critic_updates: int = setting(default=10, says="passes of the critic over each rollout", least=1)
    batch_size: int = setting(
        default=128, says="transitions per minibatch of the critic; the last one contains the remainder", least=1
    )
    learning_rate: Converted[OptionalRate, float | str | None] = changed(
        says="of the critic; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0, points such as "
        "``0:3e-4, 1:0``, or None for the optimizer's own (Adam: 1e-3)"
    )
    optimizer: OptimizerFactory | None = changed(
        says="callable from the critic's parameters to an optimizer; None: Adam with eps 1e-5"
    )
    network = changed(
        says="module class or callable that makes the policy network from both spaces: an import path, or class_path "
        "with init_args; the critic is built from ``net_arch``. None: built from the other arguments"
    )
    net_arch: list[int] | dict[str, list[int]] | None = changed(idle=None)  # the critic reads them beside a network
    activation_fn: str = changed(idle=None)
    ortho_init: bool = changed(idle=None)
    max_grad_norm, ent_coef, vf_coef = fixed(), fixed(), fixed()
    #: Line searches of this run that found no step.
    rejected_updates: int = persistent(0)
    #: The generator of the critic's minibatches. Ranks whose rollouts have reset rows draw fewer numbers from theirs.
    shuffler: torch.Generator = persistent(lambda m: torch.Generator().manual_seed(m._shuffler_seed))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.automatic_optimization = False
        # Factor on this rank's mean; 1 if all ranks have equally many transitions.
        self._weight = 1.0
        # Seed of the critic's minibatches; drawn with the weights, so that it depends on the datamodule's seed.
        self._shuffler_seed = 0

    def build_network(self) -> None:
        self.network = self.make_network(critic=False)
        vf = self.net_arch["vf"] if isinstance(self.net_arch, dict) else self.net_arch
        self.value_network = ValueNetwork(self.observation_space, vf, self.activation_fn, self.ortho_init)
        self._shuffler_seed = int(torch.randint(2**63 - 1, ()))

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Actions with their log-probability and the state's value, each [N]."""
        policy, value = self.policy_and_value(observation)
        action = policy.mode() if deterministic else policy.sample(generator)
        return {"action": action, "log_prob": policy.log_prob(action), "value": value}

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Computes advantages and returns of a :class:`~rl_modules.contract.Rollout`."""
        advantage = self.advantages(rollout)
        returns = advantage + rollout["value"]
        self.record_explained_variance(rollout["value"], returns, rollout["valid"])
        return Minibatch(
            observation=rollout["observation"],
            action=rollout["action"],
            log_prob=rollout["log_prob"],
            advantage=advantage,
            returns=returns,
        )

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        step = self.update_policy(batch)
        value_loss = self.update_critic(batch)
        self.record(**step, value_loss=value_loss)
        step_schedulers_of_updates(self)
        return value_loss

    # ---------------------------------------------------------------- the policy

    def update_policy(self, batch: Minibatch) -> dict[str, Tensor]:
        """Takes one step of the policy within the trust region, or none.

        Args:
            batch: a whole rollout, flat: observation, action, log_prob, advantage, [B] each.

        Returns:
            Scalars to log: policy_objective (the surrogate's improvement), approx_kl (the exact KL, in nats),
            line_search_steps (step lengths tried), is_line_search_success (0 or 1), entropy_loss.
        """
        self._weight = self.loss_over_ranks(1.0, len(batch["advantage"]))
        if self.normalize_advantage:
            batch = {**batch, "advantage": self.whiten(batch["advantage"])}
        parameters = trainable(self.network)
        policy = self.policy(batch["observation"])
        old = policy.detach()
        if not parameters:  # all are frozen
            nothing = torch.zeros((), dtype=torch.float32, device=self.device)
            return {**_scalars(nothing, nothing, 0, success=False), "entropy_loss": -old.entropy().mean()}
        surrogate = self.surrogate(policy, batch)
        gradient = self.over_ranks(_gradient(surrogate, parameters, retain_graph=True))
        fisher = self.fisher_product(old.kl(policy).mean(), parameters)
        direction = F.conjugate_gradient(fisher, gradient, self.cg_max_steps)
        curvature = direction.dot(fisher(direction))
        # Without a gradient the step is 0; the line search rejects it, because it improves nothing.
        length = torch.where(curvature > 0, (2 * self.target_kl / curvature).sqrt(), 0.0)
        found = self.line_search(length * direction, parameters, old, surrogate, batch)
        self.rejected_updates += int(not found["is_line_search_success"])
        self.record_now(rejected_updates=self.rejected_updates)
        return {**found, "entropy_loss": -old.entropy().mean()}

    def fisher_product(self, kl: Tensor, parameters: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """Returns the function v ↦ (F + cg_damping) v (the paper's appendix C.1).

        Args:
            kl: mean KL(π_old || π) at π = π_old, a scalar with a graph; its Hessian there is the Fisher matrix.
            parameters: the policy's.
        """
        kl_gradient = _gradient(kl, parameters, create_graph=True)

        def product(vector: Tensor) -> Tensor:
            hessian_product = _gradient(kl_gradient.dot(vector), parameters, retain_graph=True)
            return self.over_ranks(hessian_product) + self.cg_damping * vector

        return product

    @torch.no_grad()
    def line_search(
        self, step: Tensor, parameters: Sequence[Tensor], old: Distribution, surrogate: Tensor, batch: Minibatch
    ) -> dict[str, Tensor]:
        """Shortens the step until the constraint holds and the surrogate improves; takes none if this fails.

        Args:
            step: full step, one number per parameter.
            parameters: the policy's, changed in place.
            old: π_old in every state of the batch.
            surrogate: E[ρ A] of the old policy.
            batch: as in :meth:`update_policy`.

        Returns:
            The first four scalars of :meth:`update_policy`.
        """
        start = [p.clone() for p in parameters]
        before = self.over_ranks(surrogate.detach())
        for tried in range(1, self.line_search_max_iter + 1):
            share = self.line_search_shrinking_factor ** (tried - 1)
            pieces = (share * step).split([p.numel() for p in parameters])
            for p, origin, piece in zip(parameters, start, pieces, strict=True):
                p.copy_(origin + piece.view_as(p))
            policy = self.policy(batch["observation"])
            improvement = self.over_ranks(self.surrogate(policy, batch)) - before
            kl = self.over_ranks(old.kl(policy).mean())
            if kl <= self.target_kl and improvement > 0:
                return _scalars(improvement, kl, tried, success=True)
        for p, origin in zip(parameters, start, strict=True):
            p.copy_(origin)
        return _scalars(torch.zeros_like(before), torch.zeros_like(before), self.line_search_max_iter, success=False)

    # ---------------------------------------------------------------- the critic

    def update_critic(self, batch: Minibatch) -> Tensor:
        """Fits the critic to the returns in ``n_critic_updates`` passes of shuffled minibatches.

        Args:
            batch: a whole rollout, flat: observation, returns, [B] each.

        Returns:
            The mean loss, a scalar in squared units of return.
        """
        optimizer: Any = self.optimizers()
        hooks = GradientHooks(self.trainer)
        parameters = [p for p in self.trainable_parameters() if p.requires_grad]
        returns = batch["returns"]
        # A subclass's `value_loss` gets the rows of all fields; the inherited one reads only the returns.
        reads_all = type(self).value_loss is not ActorCriticModule.value_loss
        fields = batch if reads_all else {"observation": batch["observation"], "returns": returns}
        losses = []
        for _ in range(self.n_critic_updates):
            order = torch.randperm(len(returns), generator=self.shuffler).to(returns.device)
            for chunk in self._minibatches(order):
                self._weight = self.loss_over_ranks(1.0, len(chunk))
                # A mean over no rows is NaN, even with a weight of 0, so an arbitrary row is used.
                rows = chunk if len(chunk) else order[:1]
                minibatch = tree_map(lambda x: x[rows], fields)  # noqa: B023
                loss = self.value_loss(self.state_value(minibatch["observation"]), minibatch)
                # Not `manual_backward`: under DDP it waits for the policy's gradients, which never come.
                found: Sequence[Tensor | None] = gradients(loss, parameters)
                if self.run.n_ranks > 1:
                    found = averaged(parameters, found, self.over_ranks)
                for p, gradient in zip(parameters, found, strict=True):
                    p.grad = gradient
                hooks.after_backward()
                if self.max_grad_norm is not None:
                    self.run.grad_norm = clip_grad_norm(parameters, self.max_grad_norm)
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).mean()

    # ---------------------------------------------------------------- pieces to override

    def policy_and_value(self, observation: Any) -> tuple[Distribution, Tensor]:
        return self.policy(observation), self.state_value(observation)

    def policy(self, observation: Any) -> Distribution:
        """π(·|s) for a batch of observations."""
        return super().policy_and_value(observation)[0]

    def state_value(self, observation: Any) -> Tensor:
        """V(s) of a batch of observations, [B]."""
        return self.value_network(split_mask(observation)[0])

    def surrogate(self, policy: Distribution, batch: Minibatch) -> Tensor:
        """E[ρ A] (eq. 14), a scalar to maximise."""
        ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
        return (ratio * batch["advantage"]).mean()

    # ---------------------------------------------------------------- optimizer and state

    def update_schedules(self, progress_remaining: float) -> None:
        super().update_schedules(progress_remaining)
        # A trust region of size 0 allows no step: a linear schedule's last rollout keeps a positive value.
        self.target_kl = max(self.target_kl, 1e-3 * self.schedules["target_kl"].initial)
        self.record_now(target_kl=self.target_kl)

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns Adam at 1e-3 with eps 1e-5, for the critic."""
        return adam(self, parameters, lr=1e-3, eps=1e-5)

    def trainable_parameters(self) -> Iterable:
        """Returns the parameters of the critic and of a subclass's own parts, which ``value_loss`` trains.

        The policy is updated separately.
        """
        policy = {id(p) for p in self.network.parameters()}
        return [p for p in self.parameters() if id(p) not in policy]

    def over_ranks(self, x: Tensor) -> Tensor:
        """Returns the mean over the transitions of all ranks from each rank's mean, so that all take the same step."""
        if self.run.n_ranks == 1:
            return x
        return self.trainer.strategy.reduce(x * self._weight, reduce_op="mean")

    def _minibatches(self, order: Tensor) -> Sequence[Tensor]:
        """Cuts an order of transitions into minibatches, as many on every rank."""
        if self.run.n_ranks == 1 or not self.run.has_resets:
            return order.split(self.batch_size)
        return order.tensor_split(ranks.largest(-(-len(order) // self.batch_size), order.device))


def _gradient(scalar: Tensor, parameters: Sequence[Tensor], **options: Any) -> Tensor:
    """Returns the gradient as one vector; 0 for parameters that the scalar does not depend on, which no step moves."""
    found = torch.autograd.grad(scalar, parameters, allow_unused=True, materialize_grads=True, **options)
    return torch.cat([tensor.reshape(-1) for tensor in found])


def _scalars(improvement: Tensor, kl: Tensor, tried: int, success: bool) -> dict[str, Tensor]:
    return {
        "policy_objective": improvement,
        "approx_kl": kl,
        "line_search_steps": improvement.new_tensor(tried),
        "is_line_search_success": improvement.new_tensor(success),
    }
