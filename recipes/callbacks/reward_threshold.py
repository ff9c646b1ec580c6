"""Ends a run once an evaluation reaches a mean return."""

import lightning as L

from rl_modules.common.errors import UsageError


class StopTrainingOnRewardThreshold(L.Callback):
    """Ends training once ``eval/mean_reward`` is at least ``reward_threshold``, as Stable-Baselines3's class does.

    Lightning's ``EarlyStopping(stopping_threshold=500)`` needs more than 500, which CartPole-v1 does not give.

    Args:
        reward_threshold: mean return of an evaluation, in units of reward.
        verbose: 1 prints a line when training ends; 0 does not.

    Raises:
        UsageError: when a ``fit`` starts that evaluates nothing in training.
    """

    def __init__(self, reward_threshold: float, verbose: int = 1) -> None:
        self.reward_threshold, self.verbose = reward_threshold, verbose

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        if getattr(data, "eval_freq", None) == 0 or not hasattr(data, "eval_freq"):
            raise UsageError("StopTrainingOnRewardThreshold reads evaluations in training, and there are none: set "
                             "data.eval_freq, in transitions")  # fmt: skip

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        mean = trainer.callback_metrics.get("eval/mean_reward")
        if mean is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        reached = trainer.strategy.reduce_boolean_decision(bool(mean >= self.reward_threshold), all=False)
        if reached and self.verbose and trainer.is_global_zero:
            print(f"the mean return {float(mean):g} reached reward_threshold={self.reward_threshold:g}: training ends")
        trainer.should_stop = trainer.should_stop or reached
