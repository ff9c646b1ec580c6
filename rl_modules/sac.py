"""Soft actor-critic."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rl_modules import functional as F
from rl_modules.base import beside_network, sde_sample_freq, use_sde, without_sde
from rl_modules.common.errors import UsageError
from rl_modules.common.stored_arguments import settings_before
from rl_modules.contract import Minibatch, Replayed
from rl_modules.core.settings import Converted, made, setting
from rl_modules.networks.critics import Critics, SquashedGaussianPolicy, StateDependentPolicy
from rl_modules.off_policy import OffPolicyActorCritic


def parse_ent_coef(ent_coef: float | str) -> tuple[float, bool]:
    """Returns the initial value of α, and whether it is learned."""
    text = str(ent_coef)
    learned = text.startswith("auto")
    number = {"auto": "1.0"}.get(text, text.removeprefix("auto_"))
    if not _is_finite(number) or float(number) < 0 or (learned and float(number) == 0):
        raise UsageError(f"ent_coef={ent_coef!r} must be a number ≥ 0, auto, or auto_<number above 0>")
    return float(number), learned


def check_ent_coef(name: str, value: Any) -> Any:
    """Refuses what :func:`parse_ent_coef` does not read."""
    parse_ent_coef(value)
    return value


def check_target_entropy(name: str, value: Any) -> Any:
    """Refuses what is neither a number nor ``auto``."""
    if value != "auto" and not _is_finite(value):
        raise UsageError(f"{name}={value!r} must be a number of nats, or auto")
    return value


def _is_finite(value: float | str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


class SAC(OffPolicyActorCritic):
    """Soft actor-critic with twin critics and a learned entropy coefficient.

    Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905. Per minibatch of replayed transitions, in this order,

        critics   ½ Σ_k E[(Q_k(s, a) - y)²],   y = r + γ (1 - terminated) (min_k Q_target,k(s', a') - α log π(a'|s'))
        α         -E[log α (log π(ã|s) + target_entropy)],   ã ~ π(·|s)
        policy    E[α log π(ã|s) - min_k Q_k(s, ã)]

    where the critics' target and the policy's loss use α before its update, and the policy's loss uses the updated
    critics. n-step targets (the datamodule's ``n_steps``) and importance weights (its ``prioritized_replay``) change
    the critics' loss. The names and defaults are Stable-Baselines3's. Departures from it: ``target_update_interval``
    counts updates over the whole run, in SB3 within one round; the learning rate changes once per round of experience.

    Optimization is manual: the Trainer refuses ``gradient_clip_val``, and ``global_step`` counts updates.
    """

    policy_is_gaussian = True
    #: log α; None where α is fixed.
    log_ent_coef: torch.nn.Parameter | None = made()

    given_ent_coef: float | str = setting(
        alias="ent_coef",
        default="auto",
        says="entropy coefficient α, in units of reward per nat: a number ≥ 0, ``auto`` to learn it from 1, or "
        "``auto_<number>`` to learn it from that number",
        check=check_ent_coef,
    )
    target_entropy: Converted[float | str, float] = setting(
        default="auto",
        says="target of the policy's entropy, in nats, for a learned α; ``auto``: minus the number of action "
        "dimensions",
        check=check_target_entropy,
        idle=lambda m: not m.learns_ent_coef and f"with the fixed ent_coef={m.given_ent_coef!r}; set that to auto",
    )
    target_update_interval: int = setting(default=1, says="updates between two updates of the target critics", least=1)
    policy_delay: int = setting(default=1, says="updates of the critics per update of policy and α", least=1)
    target_subset: int | None = setting(
        default=None,
        says="critics drawn at random in each update, whose smallest value is the target's, while the policy maximises "
        "the mean of all critics, as in REDQ; None: all, and the policy maximises their smallest value",
        least=1,
    )
    log_std_init: float = setting(
        default=-3.0,
        says="initial log standard deviation of the matrices' entries; only ``use_sde`` reads it",
        idle=lambda m: beside_network(m) or without_sde(m),
    )
    use_sde: bool = use_sde()
    sde_sample_freq: int = sde_sample_freq("``train_freq`` steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.initial_ent_coef, self.learns_ent_coef = parse_ent_coef(self.given_ent_coef)
        if self.target_subset is not None and self.target_subset > self.n_critics:
            raise UsageError(f"target_subset={self.target_subset} must be at most n_critics={self.n_critics}")

    # ---------------------------------------------------------------- networks

    def build_network(self) -> None:
        super().build_network()
        self.begin_ent_coef(-float(self.network.bounds.width))

    def begin_ent_coef(self, auto: float) -> None:
        """Makes the parameter of a learned α; ``auto``: the target of the entropy where none is given, in nats."""
        self.log_ent_coef = None
        if self.learns_ent_coef:
            start = torch.tensor(math.log(self.initial_ent_coef), dtype=torch.float32)
            self.log_ent_coef = torch.nn.Parameter(start)
        given = self.hparams["target_entropy"]
        #: Entropy that a learned α holds the policy at, in nats.
        self.target_entropy = auto if given == "auto" else float(given)

    def make_policy(self, width: int, net_arch: Sequence[int]) -> torch.nn.Module:
        if self.use_sde:
            return StateDependentPolicy(self.observation_space, width, net_arch, self.activation_fn, self.log_std_init)
        return SquashedGaussianPolicy(self.observation_space, width, net_arch, self.activation_fn)

    def make_target(self) -> Critics:
        return copy.deepcopy(self.network.critics)

    def followed(self) -> Critics:
        return self.network.critics

    @property
    def ent_coef(self) -> Tensor | float:
        """α at the moment, without gradient."""
        return self.initial_ent_coef if self.log_ent_coef is None else self.log_ent_coef.detach().exp()

    def weights_to_start_from(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        weights = super().weights_to_start_from(checkpoint)
        before = settings_before(self, checkpoint).get("ent_coef")
        if before is None:
            # Checkpoints of an earlier version lack values that the constructor of a subclass chose.
            is_same = ("log_ent_coef" in weights) == self.learns_ent_coef
        else:
            is_same = parse_ent_coef(before) == parse_ent_coef(self.given_ent_coef)
        if is_same:
            return weights
        # A new value of the argument overrides the checkpoint's α.
        weights = {name: x for name, x in weights.items() if name != "log_ent_coef"}
        if self.log_ent_coef is None:
            return weights
        return {**weights, "log_ent_coef": torch.full_like(self.log_ent_coef, math.log(self.initial_ent_coef))}

    def _on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores a run; a new value of ``ent_coef`` overrides the checkpoint's α."""
        super()._on_load_checkpoint(checkpoint)
        checkpoint["state_dict"] = self.weights_to_start_from(checkpoint)

    # ---------------------------------------------------------------- acting and learning

    def choose(self, observation: Any, generator: torch.Generator | None, deterministic: bool) -> Tensor:
        if self.run.noise_matrices is not None and not deterministic:
            explored: Tensor | None = self.network.policy.explore(observation, self.run.noise_matrices, generator)
            if explored is not None:
                return explored
        mean, log_std = self.network.policy(observation)
        if deterministic:
            return mean.tanh()
        device = mean.device if generator is None else generator.device
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=device).to(mean.device)
        return torch.addcmul(mean, log_std.exp(), noise).tanh()

    def noise_shape(self) -> tuple[int, ...]:
        # For an action in s and one in s'.
        return (2, self.network.bounds.width)

    def prepare(self, sample: Replayed) -> Minibatch:
        prepared = super().prepare(sample)
        if self.target_subset is not None:
            drawn = self._noise(len(prepared["reward"]), self.n_critics)
            prepared["critic_order"] = drawn.to(prepared["reward"].device)
        return prepared

    # The first gradient would free a compiled graph of both losses, so their parts are compiled separately.
    @_disable_dynamo(recursive=False)
    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        lists, network, ent_coef = self.lists, self.network, self.ent_coef
        here, after = batch["noise"].unbind(1)
        moves_policy = (self.n_updates + 1) % self.policy_delay == 0
        if moves_policy:
            action, log_prob = network.policy.sample(batch["observation"], here)
        with torch.no_grad():
            target = self.td_target(batch, after, ent_coef)
        q = network.critics(batch["observation"], batch["action"])
        predicted = q[..., 0] if self.n_outputs == 1 else q
        critic_loss = self.critic_loss(predicted, target, batch.get("weight"))
        parameters, gradients = lists["critics"], self.gradients_of(critic_loss, lists["critics"])
        metrics: dict[str, Tensor | float] = {"critic_loss": critic_loss, "ent_coef": ent_coef}
        if moves_policy and self.log_ent_coef is not None and self.log_ent_coef.requires_grad:
            ent_coef_loss = self.ent_coef_loss(self.log_ent_coef, log_prob.detach())
            gradients += self.gradients_of(ent_coef_loss, [self.log_ent_coef])
            parameters = [*parameters, self.log_ent_coef]
            metrics["ent_coef_loss"] = ent_coef_loss
        self.step(parameters, gradients)
        loss = critic_loss.detach()
        if moves_policy:
            q_policy = network.critics(batch["observation"], action, frozen=True)
            metrics["actor_loss"] = policy_loss = self.actor_loss(q_policy, log_prob, ent_coef)
            self.step(lists["policy"], self.gradients_of(policy_loss, lists["policy"]))
            loss = loss + policy_loss.detach()
        self.finish_update()
        if self.n_updates % self.target_update_interval == 0:
            self.update_target()
        if "index" in batch:
            self.td_error = self.absolute_error(q.detach(), target)
        self.record(**metrics)
        return loss

    # ---------------------------------------------------------------- pieces to override

    def td_target(self, batch: Minibatch, noise: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Returns the regression target of the critics, [B].

        Args:
            batch: what ``prepare`` returned for a minibatch.
            noise: standard normal numbers for the action in s', [B, A].
            ent_coef: α.
        """
        action, log_prob = self.network.policy.sample(batch["next_observation"], noise)
        next_q = self.target_network(batch["next_observation"], action)[..., 0]
        if self.target_subset is not None:
            next_q = next_q[batch["critic_order"][0].argsort()[: self.target_subset]]
        next_q = next_q.amin(0)
        return F.soft_q_target(batch["reward"], batch["terminated"], next_q, log_prob, ent_coef, batch["discount"])

    def critic_loss(self, q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Half the squared error of each critic, mean over the minibatch, summed over critics.

        Args:
            q: what the critics predict, [K, B].
            target: [B].
            weight: importance weights of prioritised replay, [B].
        """
        return 0.5 * super().critic_loss(q if q.ndim == 2 else q[..., 0], target, weight)

    def actor_loss(self, q: Tensor, log_prob: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Returns the policy's loss, a scalar.

        Args:
            q: values of the policy's actions, [K, B, n_outputs].
            log_prob: their log-density in nats, [B].
            ent_coef: α.
        """
        value = q[..., 0].amin(0) if self.target_subset is None else q[..., 0].mean(0)
        return (ent_coef * log_prob - value).mean()

    def ent_coef_loss(self, log_ent_coef: Tensor, log_prob: Tensor) -> Tensor:
        """Returns the loss of log α, a scalar, from the policy's log-densities [B]."""
        return -(log_ent_coef * (log_prob + self.target_entropy)).mean()

    def absolute_error(self, q: Tensor, target: Tensor) -> Tensor:
        """Returns |δ| per transition for prioritised replay, [B]: the mean over critics."""
        return (q[..., 0] - target).abs().mean(0)
