"""Ranges are those of this project's arguments; a subclass's own arguments mean what it likes."""

import pytest

from datamodules import RolloutDataModule
from rl_modules import GRPO, PPO, SAC
from rl_modules.common.errors import UsageError


class Tempered(PPO):
    """Names that other algorithms have, with other values."""

    def __init__(self, beta: str = "auto", tau: float = -1.0, **ppo):
        super().__init__(**ppo)


class Signed(GRPO):
    def __init__(self, tau: float = -1.0, clip_obs: str = "never", **grpo):
        super().__init__(**grpo)


class Rows(RolloutDataModule):
    def __init__(self, *args, beta: float = -0.5, **data):
        super().__init__(*args, **data)


class Discounted(PPO):
    """Redeclares an argument for another default."""

    def __init__(self, gamma: float = 0.9, **ppo):
        super().__init__(gamma=gamma, **ppo)


def test_an_argument_that_only_a_subclass_has_is_its_own():
    assert Tempered().hparams["beta"] == "auto"
    assert Tempered(tau=7.0).hparams["tau"] == 7.0
    assert Signed(model_config={"hidden_size": 16}).hparams["clip_obs"] == "never"
    assert Rows("CartPole-v1").hparams["beta"] == -0.5


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Tempered(vf_coef=-1.0), "vf_coef=-1.0 must be a finite number of at least 0"),
        (lambda: Discounted(gamma=7.0), r"gamma=7.0 must lie in \[0, 1\]"),
        (lambda: Signed(beta=-1.0), "beta=-1.0 must be a finite number of at least 0"),
        (lambda: SAC(tau=-1.0), r"tau=-1.0 must lie in \(0, 1\]"),
        (lambda: Rows("CartPole-v1", clip_obs=-1.0), "clip_obs=-1.0 must be a finite number above 0"),
    ],
)
def test_the_arguments_of_this_project_keep_their_ranges_in_a_subclass(build, sentence):
    with pytest.raises(UsageError, match=sentence):
        build()
