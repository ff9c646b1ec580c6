"""What the optimizer step of small networks gains over torch's own pieces, measured on whole training runs.

    python -m benchmarks.optimizers --rounds 7

Every round trains once with torch's Adam, clipping, once with each replacement alone, once with all; ratios
are taken within a round and their median is reported. Run it while nothing else runs.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import control
from rl_modules.base import ControlModule

OURS: dict[str, Callable[..., Any]] = {
    name: getattr(ControlModule, name) for name in ("adam", "configure_gradient_clipping", "__setattr__")
}


def torch_adam(self: Any, parameters: Any, lr: float, eps: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, eps=eps, fused=True)


def torch_clipping(self: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    self.run.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)


TORCH: dict[str, Callable[..., Any]] = {
    "adam": torch_adam,
    "configure_gradient_clipping": torch_clipping,
    "__setattr__": torch.nn.Module.__setattr__,
}
VARIANTS = {"torch": (), **{name: (name,) for name in TORCH}, "all": tuple(TORCH)}


def run(train: Callable[[int], None], timesteps: int, ours: tuple[str, ...]) -> float:
    """Seconds of one training run with the named pieces ours and the others torch's."""
    for name in TORCH:
        setattr(ControlModule, name, OURS[name] if name in ours else TORCH[name])
    start_s = time.perf_counter()
    train(timesteps)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name, train, timesteps in (("PPO", control.ours_ppo, 16_384), ("DQN", control.ours_dqn_defaults, 8_192)):
        train(2_048)
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant, ours in VARIANTS.items():
                seconds[variant].append(run(train, timesteps, ours))
        print(f"\n{name}, {timesteps:,} transitions, {args.rounds} rounds: speed ÷ that with torch's pieces")
        for variant, values in seconds.items():
            ratio = statistics.median(base / own for base, own in zip(seconds["torch"], values, strict=True))
            print(f"  {variant:<28}{ratio:6.2f}")


if __name__ == "__main__":
    main()
