"""Curricula: weights of a mixture's sources that follow their pass rates."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from datamodules.language.mixture import Mixture
from rl_modules.common.errors import UsageError
from rl_modules.common.loading import load_object


class Curriculum:
    """Weighs the sources of a mixture anew after each generation.

    Args:
        given: function of pass rates and weights by source that returns weights, or its name or import path.
        mixture: the sources.
        has_rewards: whether completions are scored, so that there are pass rates.
    """

    def __init__(self, given: Callable[..., Any] | str, mixture: Mixture | None, has_rewards: bool) -> None:
        found = learnable if given == "learnable" else given
        found = load_object(found, "curriculum", ["learnable"]) if isinstance(found, str) else found
        self._name = str(getattr(found, "__name__", given))
        if not callable(found):
            raise UsageError(f"curriculum={given!r} is a {type(found).__name__}, where a function should be")
        if mixture is None or not has_rewards:
            raise UsageError(
                f"curriculum={self._name} weighs sources by their pass rates; give task a list of sources, with "
                "reward functions"
            )
        self._weigh, self._weights = found, mixture.weights
        self.names = list(mixture.sources)

    def pass_rates(self, before: Mapping[str, float], counts: Tensor) -> dict[str, float]:
        """Running pass rates, over about ten generations, from the last one's right completions and all, [sources, 2].

        A source without a completion yet has none.
        """
        rates = dict(before)
        for name, (right, n) in zip(self.names, counts.tolist(), strict=True):
            if n:
                rates[name] = 0.9 * rates[name] + 0.1 * right / n if name in rates else right / n
        return rates

    def weights(self, pass_rates: Mapping[str, float]) -> dict[str, float]:
        """The function's weights, checked; a source without a completion yet has a pass rate of 1/2."""
        found = self._weigh({name: pass_rates.get(name, 0.5) for name in self.names}, self._weights)
        return checked_weights(found, self.names, self._name)


def learnable(pass_rates: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
    """Weights in proportion to p (1 - p), the variance of a right answer: no source that is always or never solved."""
    return {name: weights[name] * (rate * (1 - rate) + 0.01) for name, rate in pass_rates.items()}


def checked_weights(found: Any, names: Sequence[str], what: str) -> dict[str, float]:
    """A curriculum's weights, checked."""
    if (
        not isinstance(found, Mapping)
        or {*found} != {*names}
        or not all(isinstance(x, int | float) and 0 <= x < math.inf for x in found.values())
        or not sum(found.values())
    ):
        raise UsageError(
            f"curriculum={what} returned {found!r}, where a weight of at least 0 for each of "
            f"{', '.join(names)} should be, not all of them 0"
        )
    return {name: float(found[name]) for name in names}
