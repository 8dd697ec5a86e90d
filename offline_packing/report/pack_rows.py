"""Which packs, and which padded batches, a picture of packing shows."""

import numpy as np
import numpy.typing as npt


def choose_packs(num_packs: int, count: int) -> npt.NDArray[np.int64]:
    """Numbers of at most `count` packs, evenly over all."""
    return np.unique(np.linspace(0, num_packs - 1, min(count, num_packs)).astype(np.int64))


def padded_rows(
    lengths: npt.NDArray[np.integer], batch_size: int, num_rows: int, seed: int
) -> list[tuple[int, int]]:
    """(tokens, padded to) of samples in random batches: whole batches, about `num_rows` rows.

    Args:
        lengths: (num_packed,) tokens of the samples, at least one.
    """
    wanted = min(len(lengths), -(-num_rows // batch_size) * batch_size)
    chosen = np.random.default_rng(seed).choice(len(lengths), wanted, replace=False)
    rows = []
    for start in range(0, wanted, batch_size):
        batch = lengths[chosen[start : start + batch_size]].tolist()
        rows += [(length, max(batch)) for length in batch]
    return rows
