"""Minibatches of different sizes: a batch size that does not divide the rollout, or a number of minibatches."""

import pytest
import torch
from torch import nn

from datamodules import RolloutDataModule
from rl_modules import PPO, PQN, RecurrentPPO
from tests.datamodules.envs import Counter
from tests.masked_envs import MASKED_SPACES, Guarded
from tests.training import assert_equal_checkpoints, fit, rollouts

#: Two environments and 12 steps: 24 transitions.
SMALL = {"n_envs": 2, "n_steps": 12}


def sizes(make_model, env=Counter, **arguments):
    """Rows of every minibatch of one rollout."""

    class Counts(type(make_model())):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch["returns"]))
            return super().training_step(batch, batch_idx)

    seen = []
    model = Counts(**make_model().hparams)
    fit(model, rollouts(env, **{**SMALL, **arguments}), max_epochs=1)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return seen


@pytest.mark.parametrize(
    ("make_model", "arguments", "expected"),
    [
        (PPO, {"batch_size": 10}, [10, 10, 4]),
        (PPO, {"batch_size": 23}, [23, 1]),  # one row has no deviation to whiten by
        (PPO, {"n_minibatches": 5}, [5, 5, 5, 5, 4]),
        (PQN, {"batch_size": 10}, [10, 10, 4]),
        # Eight sequences of three steps in five minibatches, of five transitions or nearly so.
        (lambda: RecurrentPPO(sequence_length=3, lstm_hidden_size=4), {"batch_size": 5}, [2, 2, 2, 1, 1]),
    ],
)
def test_every_pass_ends_with_the_rest(make_model, arguments, expected):
    assert sizes(make_model, n_epochs=2, **arguments) == 2 * expected


def test_masked_actions_and_reset_rows_are_cut_too():
    assert sizes(PPO, lambda: Guarded(MASKED_SPACES["discrete"], "info"), batch_size=10) == [10, 10, 4]
    # Of the 24 rows four are resets; 20 transitions in three minibatches.
    assert sizes(PPO, batch_size=10, autoreset_mode="next_step") == [7, 7, 6]


def test_a_run_says_once_that_the_last_minibatch_is_short(caplog):
    fit(PPO(), rollouts("CartPole-v1", **SMALL, batch_size=10), max_epochs=2)
    [said] = [r.getMessage() for r in caplog.records if "batch_size=10 does not divide n_envs*n_steps=24" in r.message]
    assert said.endswith("each pass has 3 minibatches, the last of 4 transitions.")


def test_each_loss_is_the_mean_over_its_own_rows():
    class Compares(PPO):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            policy, value = self.policy_and_value(batch["observation"])
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
            a = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
            surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / len(a)
            error = ((value - batch["returns"]) ** 2).sum() / len(a)
            torch.testing.assert_close(loss, -surrogate + 0.5 * error)
            compared.append(len(a))
            return loss

    compared = []
    fit(Compares(), rollouts("CartPole-v1", **SMALL, batch_size=10), max_epochs=1)
    assert compared == [10, 10, 4]


@pytest.mark.parametrize("cut", [{"batch_size": 10}, {"n_minibatches": 5}, {"batch_size": 7, "n_epochs": 2}])
def test_accumulated_minibatches_are_one_mean_over_their_rows(cut):
    """The gradient that is accumulated over a pass is that of the pass as one minibatch."""

    def gradient(accumulated, **cut):
        class Keeps(PPO):
            def on_before_optimizer_step(self, optimizer):
                kept.append(nn.utils.parameters_to_vector(p.grad for p in self.parameters()).clone())

        kept = []
        data = rollouts("CartPole-v1", **SMALL, **cut)
        fit(Keeps(normalize_advantage=False, learning_rate=0.0, max_grad_norm=None), data, max_epochs=1,
            accumulate_grad_batches=accumulated)  # fmt: skip
        return kept

    [whole] = gradient(1, batch_size=None)
    n = cut.get("n_minibatches") or -(-24 // cut["batch_size"])
    for accumulated in gradient(n, **cut):
        torch.testing.assert_close(accumulated, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("stop", [3, 7, 11])
@pytest.mark.parametrize("cut", [{"batch_size": 10}, {"n_minibatches": 3}])
def test_a_run_resumes_exactly_within_such_an_epoch(tmp_path, cut, stop):
    def run(max_steps, ckpt_path=None):
        data = RolloutDataModule("CartPole-v1", **SMALL, **cut, n_epochs=2, eval_freq=0, rollouts_per_epoch=2)
        return fit(PPO(net_arch=[4]), data, ckpt_path, max_steps=max_steps)

    run(20).save_checkpoint(tmp_path / "whole.ckpt")
    run(stop).save_checkpoint(tmp_path / "part.ckpt")
    run(20, tmp_path / "part.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
