"""From a composition to packs of samples: every place is given a sample of its length."""

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import Composition
from offline_packing.planner.strategies.kernels import random_below, random_state
from offline_packing.planner.strategies.packs import Packs


@njit(cache=True)
def _bucket_samples(num_tokens: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Counting sort of sample indices by length into ``ids``; returns the bucket starts.

    Bucket of length l: ``ids[starts[l]:starts[l + 1]]``, indices ascending.
    """
    starts = np.zeros(counts.shape[0] + 1, np.int64)
    for length in range(counts.shape[0]):
        starts[length + 1] = starts[length] + counts[length]
    ends = starts[:-1].copy()
    for sample in range(num_tokens.shape[0]):
        length = num_tokens[sample]
        ids[ends[length]] = sample
        ends[length] += 1
    return starts


@njit(cache=True)
def _shuffle_buckets(ids: np.ndarray, starts: np.ndarray, state: np.ndarray) -> None:
    """Fisher-Yates inside each bucket: a random choice among equal lengths, cache-friendly."""
    for length in range(starts.shape[0] - 1):
        start = starts[length]
        for last in range(starts[length + 1] - 1, start, -1):
            other = start + random_below(state, last - start + 1)
            ids[last], ids[other] = ids[other], ids[last]


@njit(cache=True)
def _fill_packs(
    lengths: np.ndarray,
    repeats: np.ndarray,
    offsets: np.ndarray,
    multiplicity: np.ndarray,
    ids: np.ndarray,
    next_id: np.ndarray,
    sample_ids: np.ndarray,
    pack_offsets: np.ndarray,
) -> None:
    """Take samples from the buckets in order, pattern after pattern, pack after pack."""
    pack = 0
    end = 0
    for pattern in range(multiplicity.shape[0]):
        for _ in range(multiplicity[pattern]):
            for entry in range(offsets[pattern], offsets[pattern + 1]):
                source = next_id[lengths[entry]]
                for _ in range(repeats[entry]):
                    sample_ids[end] = ids[source]
                    source += 1
                    end += 1
                next_id[lengths[entry]] = source
            pack += 1
            pack_offsets[pack] = end


def expand_composition(
    composition: Composition,
    num_tokens: np.ndarray,
    counts: np.ndarray,
    *,
    seed: int | None = None,
) -> Packs:
    """Give every place in the composition a sample of its length.

    ``num_tokens`` int32 (num_samples,), ``counts`` its histogram, which the composition uses up
    exactly. With a ``seed`` the choice among equal lengths is random, else in sample order.
    Packs come out in the order of the composition. O(num_samples).
    """
    id_type = np.int32 if len(num_tokens) < 2**31 else np.int64
    ids = np.empty(len(num_tokens), id_type)
    starts = _bucket_samples(num_tokens, counts, ids)
    if seed is not None:
        _shuffle_buckets(ids, starts, random_state(seed))
    sample_ids = np.empty(len(num_tokens), id_type)
    pack_offsets = np.zeros(composition.num_packs + 1, np.int64)
    _fill_packs(*composition[:4], ids, starts[:-1].copy(), sample_ids, pack_offsets)
    assert pack_offsets[-1] == len(num_tokens), "the composition must use every sample once"
    return Packs(sample_ids, pack_offsets)
