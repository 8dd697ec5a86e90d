"""The learning rate as a pure function of the iteration: resuming needs only that number."""

import math
from collections.abc import Callable
from typing import Final

#: Share of the way from min to max left at `progress` in 0..1, by name.
DECAYS: Final[dict[str, Callable[[float], float]]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(
    iteration: int,
    *,
    iterations: int,
    warmup_iterations: int,
    max_rate: float,
    min_rate: float,
    decay: str,
) -> float:
    """The rate of one step.

    Rises linearly over the warm-up, then falls towards `min_rate`, which it would reach one step
    after the last: with a minimum of 0, no step is wasted.

    Args:
        iteration: 0 for the first step.
        iterations: steps of the whole run.
        decay: a name in DECAYS.
    """
    if iteration < warmup_iterations:
        return max_rate * (iteration + 1) / warmup_iterations
    steps = max(1, iterations - warmup_iterations)
    progress = min(1.0, (iteration - warmup_iterations) / steps)
    return min_rate + (max_rate - min_rate) * DECAYS[decay](progress)
