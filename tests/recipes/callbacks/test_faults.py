"""What breaks from outside costs no more than what came after the last checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_modules import PPO
from rl_modules.common.errors import UsageError
from tests.recipes.callbacks.test_checkpoints import ppo_data, saving
from tests.training import assert_equal_checkpoints, fit


def data(tmp_path: Path, mode: str, how: str, at: int = 0) -> Any:
    kwargs = {"file": str(tmp_path / "fails"), "at": at, "how": how}
    return ppo_data(env_id="tests.datamodules.envs:Unreliable", env_kwargs=kwargs, n_envs=2, vectorization_mode=mode)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "how", "message"),
    [
        ("sync", "raises", r"raised ZeroDivisionError: the pole is gone \(\S*envs.py:\d+\); .* --resume"),
        ("async", "raises", r"raised ZeroDivisionError: the pole is gone \(its own traceback stands above\)"),
        ("async", "dies", r"the process of environment 0 \(exit code -9\), 1 \(exit code -9\) of .*Unreliable died"),
    ],
)
def test_an_environment_that_fails_at_a_random_step(mode: str, how: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    # Both fail in the same step: past the first rollout's checkpoints, before the last rollout.
    at = int(np.random.default_rng().integers(9, 56))
    with pytest.raises(UsageError, match=message):
        fit(PPO(), data(tmp_path, mode, how, at), **saving(tmp_path / "run"))
    (tmp_path / "fails").unlink()
    if (mode, how) == ("async", "raises"):
        return  # what follows is the same as in the other two
    last = tmp_path / "run/checkpoints/last.ckpt"
    fit(PPO(), data(tmp_path, mode, how, at), last, **saving(tmp_path / "run", interval_s=1e9))
    fit(PPO(), data(tmp_path, mode, how, at), **saving(tmp_path / "whole", interval_s=1e9))
    assert_equal_checkpoints(tmp_path / "whole/checkpoints/last.ckpt", last)
