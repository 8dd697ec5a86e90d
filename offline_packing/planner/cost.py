"""Cost of padding, and the saving of packing."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from offline_packing.planner.pack_plan import PackPlan

_VALUES_AT_ONCE: Final = 1 << 20


def count_values(values: npt.NDArray[np.integer], most: int) -> npt.NDArray[np.int64]:
    """Return how often each value of 0..most occurs. `np.bincount` of all of them would make a copy
    of eight bytes each."""
    counts = np.zeros(most + 1, np.int64)
    for start in range(0, len(values), _VALUES_AT_ONCE):
        counts += np.bincount(values[start : start + _VALUES_AT_ONCE], minlength=most + 1)
    return counts


def padded_tokens(counts: npt.NDArray[np.integer], batch_size: int) -> float:
    """Tokens of an epoch whose random batches are padded to the longest of their samples: the mean
    over all orders of the samples, in closed form. `counts` (longest + 1,) are the samples of each
    length, at least one in all."""
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


def saving(
    lengths: npt.NDArray[np.integer],
    packs: PackPlan,
    padded_batch_size: int,
    global_batch_size: int,
) -> dict[str, int | float]:
    """Saving of packing, against batches of `padded_batch_size` samples padded to their longest:
    tokens, shares of padding, and steps of an epoch at `global_batch_size`. `lengths` (num_packed,)
    are the tokens of the packed samples, at least one."""
    num_samples, real = len(lengths), int(lengths.sum(dtype=np.int64))
    seq_length, in_packs = packs.info.seq_length, packs.info.num_tokens
    in_batches = padded_tokens(count_values(lengths, seq_length), padded_batch_size)
    return {
        "tokens": real,
        "tokens_in_packs": in_packs,
        "padded_batch_size": padded_batch_size,
        "tokens_in_padded_batches": in_batches,
        "tokens_padded_to_seq_length": num_samples * seq_length,
        "padding_before": 1 - real / in_batches,
        "padding_after": 1 - real / in_packs,
        "speedup": in_batches / in_packs,
        "global_batch_size": global_batch_size,
        "iterations_before": math.ceil(num_samples / global_batch_size),
        "iterations_after": math.ceil(packs.num_packs / global_batch_size),
        # keeps the samples of a step
        "equal_batch_size": max(1, round(global_batch_size * packs.num_packs / num_samples)),
    }
