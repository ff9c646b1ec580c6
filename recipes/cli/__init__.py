"""The ``rl`` command: Lightning's CLI with configs found by name, errors in one sentence, and a summary at the end.

rl fit --config ppo/cartpole.yaml
rl validate --config ppo/cartpole.yaml --ckpt_path logs/.../last.ckpt
"""

from recipes.cli.command import main
from recipes.terminal import quiet

__all__ = ["main", "quiet"]
