"""The cheap rows of the results table, as a person runs them: one seed each, so with some room below the targets."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

THRESHOLDS = {
    "reinforce/cartpole": 450,
    "reinforce/cartpole_return": 400,
    "reinforce/cartpole_baseline": 450,
    "reinforce/cartpole_vpg": 450,
    "a2c/cartpole": 450,
    "trpo/cartpole": 475,
    "trpo/acrobot": -95,
    "ppo/cartpole_penalty": 475,
    "ppo/pendulum": -220,
}


@pytest.mark.parametrize("config", THRESHOLDS)
def test_config_learns_its_task(config: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes", "fit", "--config", f"{config}.yaml", "--data.eval_freq", "0"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = re.search(r"mean return (-?[\d.]+)", run.stdout)
    assert found, run.stdout
    assert float(found[1]) >= THRESHOLDS[config]
