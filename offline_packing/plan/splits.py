"""Splits: which sample stands on which side, decided before anything is packed.

A sample goes by the group that `source.fields.group` names; without one by its images and videos;
without any by its own content. All samples that lead from one to another by what they share go by
the least hash among them. With `output.split_seed`, that hash draws a number in [0, 1), and the
number the split in whose share it lies:

    {train: 0.9, val: 0.1}    .37 -> train    .93 -> val

Nothing else decides: outputs packed apart, of other sources, models or lengths, agree on every
group, and on every picture of samples that show one.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from offline_packing.index.records import Hashes, shared_contents
from offline_packing.index.table import Index

#: Salts of the numbers that are drawn from a hash.
USE_SALT, SPLIT_SALT = 0, 1

_MOST = np.iinfo(np.uint64).max


def draw_splits(samples: Index, shares: Mapping[str, float], seed: int) -> npt.NDArray[np.int16]:
    """(num_samples,) the place among the shares of the split of each sample of the index."""
    joined, least_of = _joined(samples)
    limits = np.cumsum(list(shares.values()))[:-1]
    splits = np.empty(samples.info.num_samples, np.int16)
    for some, rows, hashes in shared_contents(samples):
        if len(joined):
            places = np.minimum(np.searchsorted(joined, hashes), len(joined) - 1)
            hashes = np.where(joined[places] == hashes, least_of[places], hashes)
        least = np.full(some.stop - some.start, _MOST)
        np.minimum.at(least, rows, hashes)
        splits[some] = np.searchsorted(limits, draw(least, seed, SPLIT_SALT), side="right")
    return splits


def _joined(samples: Index) -> tuple[Hashes, Hashes]:
    """Hashes of the contents of samples that have several, ascending; and the least that each leads
    to. Only such samples join anything, so only theirs are held."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    found = [(np.empty(0, np.int64), np.empty(0, np.uint64))]
    for some, rows, hashes in shared_contents(samples):
        joins = (np.bincount(rows, minlength=some.stop - some.start) > 1)[rows]
        found.append((some.start + rows[joins], hashes[joins]))
    owners, hashes = map(np.concatenate, zip(*found, strict=True))
    joined, places = np.unique(hashes, return_inverse=True)
    _, owners = np.unique(owners, return_inverse=True)
    size = len(joined) + int(owners.max(initial=-1)) + 1
    edges = (np.ones(len(owners), np.bool_), (places, len(joined) + owners))
    labels = connected_components(coo_array(edges, (size, size)), directed=False)[1][: len(joined)]
    least = np.full(size, _MOST)
    np.minimum.at(least, labels, joined)
    return joined, least[labels]


def draw(hashes: Hashes, seed: int, salt: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each hash, of SplitMix64's mixing function."""
    key = np.random.default_rng([seed, salt]).integers(0, 2**64, dtype=np.uint64)
    z = hashes ^ key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53
