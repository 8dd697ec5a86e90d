"""Sequential greedy packing: samples keep their order, one pack is open at a time."""

import numpy as np
from numba import njit
from pydantic import Field

from offline_packing.planner.strategies.by_sample import check_lengths
from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.strategy import Strategy, StrategyOptions


@njit(cache=True)
def _pack_ends(lengths: np.ndarray, seq_length: int, max_samples: int) -> np.ndarray:
    """Offsets int64 (num_packs + 1,) of packs that are closed when the next sample does not fit."""
    offsets = np.zeros(lengths.shape[0] + 1, np.int64)
    num_packs = 0
    tokens = 0
    for sample in range(lengths.shape[0]):
        full = tokens + lengths[sample] > seq_length
        if full or sample - offsets[num_packs] == max_samples:
            num_packs += 1
            offsets[num_packs] = sample
            tokens = 0
        tokens += lengths[sample]
    if lengths.shape[0] > 0:
        num_packs += 1
        offsets[num_packs] = lengths.shape[0]
    return offsets[: num_packs + 1].copy()


def next_fit(lengths: np.ndarray, seq_length: int, max_samples: int | None) -> np.ndarray:
    """Pack offsets int64 (num_packs + 1,) over ``lengths``, which are all in 1..seq_length."""
    limit = len(lengths) + 1 if max_samples is None else max_samples
    return _pack_ends(lengths, seq_length, limit)


class SequentialOptions(StrategyOptions):
    """Limits beside tokens."""

    max_samples: int | None = Field(None, ge=1, description="samples that a pack holds at most")


def _sequential(
    num_tokens: np.ndarray, seq_length: int, *, options: SequentialOptions, seed: int = 0
) -> Packs:
    """Add samples in their order until the next one does not fit, then start a new pack. O(n).

    The greedy packing of nanoVLM's data pipeline, and with ``max_samples`` the two batch modes of
    VeOmni: a token budget (``dyn_bsz``) or a fixed number of samples. ``seed`` is unused: this is
    the strategy that keeps the order of the samples.

    ``num_tokens`` integers (num_samples,) in 1..seq_length, else ValueError.
    """
    lengths = check_lengths(num_tokens, seq_length)
    offsets = next_fit(lengths, seq_length, options.max_samples)
    return Packs(np.arange(len(lengths)), offsets)


sequential = Strategy(_sequential, SequentialOptions)
