"""What padding would cost."""

import numpy as np
import numpy.typing as npt


def padded_tokens(counts: npt.NDArray[np.integer], batch_size: int) -> float:
    """Tokens of an epoch whose random batches are padded to the longest of their samples: the mean
    over all orders of the samples, in closed form.

    Args:
        counts: (longest + 1,) samples of each length; at least one sample.
    """
    num_batches, rest = divmod(int(counts.sum()), batch_size)
    total = num_batches * batch_size * _mean_longest(counts, batch_size)
    return total + (rest * _mean_longest(counts, rest) if rest else 0.0)


def _mean_longest(counts: npt.NDArray[np.integer], drawn: int) -> float:
    """Mean of the longest of some samples drawn without replacement; 0 where there are fewer."""
    up_to = np.cumsum(counts, dtype=np.int64)
    none_longer = np.ones(len(counts))
    for i in range(drawn):  # all of the drawn samples are among those up to this length
        none_longer *= np.maximum(up_to - i, 0) / max(up_to[-1] - i, 1)
    return float(np.diff(none_longer, prepend=0.0) @ np.arange(len(counts)))
